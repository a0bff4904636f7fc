//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/cookiejar"
	"strings"
	"sync"

	"headcount/client"
)

// holding are attacks on what the server has to keep for a client: parts of messages, streams, bodies, keys.
var holding = []attack{
	{name: "endless frames", run: talk(4, 1000, func(_, i int) []byte {
		if i == 0 {
			return []byte{0x82, 0xff, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0}
		}
		return make([]byte, 16<<10)
	})},
	{name: "byte by byte", run: talk(1000, 5, func(_, i int) []byte {
		message := text(`{"type":"subscribe","pages":%s}`, list("slow ", 40))
		return message[i%len(message):][:1]
	})},
	{name: "pages and counters", run: talk(4, 250, func(n, i int) []byte {
		kind := []string{"subscribe", "unsubscribe"}[i%2]
		page := fmt.Sprintf("p %d/%d/", n, i/2)
		counter := fmt.Sprintf("views:%d/%d/", n, i/2)
		return text(`{"type":"%s","pages":%s,"counters":%s}`, kind, list(page, 50), list(counter, 50))
	})},
	{name: "event streams", run: repeat(1000, 5000, func(addr string, i int) io.Closer {
		return opened(addr, fmt.Sprintf("GET /stream%d/counter/events HTTP/1.1\r\nHost: h\r\n\r\n", i%100))
	})},
	{name: "held bodies", rules: clapping, run: repeat(300, 2000, func(addr string, _ int) io.Closer {
		const head = "POST /api/v1/counters/claps:x/increment HTTP/1.1\r\nHost: h\r\nContent-Length: 262144\r\n\r\n"
		return opened(addr, head+strings.Repeat(" ", 262_000))
	})},
	{name: "keys", rules: clapping, run: visiting(200, func(ctx context.Context, api *client.API, n, i int) error {
		name := fmt.Sprintf("%d/%d", n, i)
		_, err := api.Once(name+strings.Repeat("k", 200)).Increment(ctx, "claps:"+name, 1)
		return err
	})},
	{name: "follows", run: visiting(200, func(ctx context.Context, api *client.API, n, i int) error {
		page := fmt.Sprintf("followed%d%%2F%d%s", n, i, strings.Repeat("f", 100))
		_, err := api.Do(ctx, http.MethodPut, "/-/me/follows/"+page, nil, nil)
		return err
	})},
}

// clapping are rules of counters that visitors may increment, and of likes.
const clapping = `{"rules":[
{"match":"claps:*","kind":"sum","public":["read","increment"]},
{"match":"likes:*","kind":"members","public":["read","member"]}]}`

// visiting returns an attack in which visitors, each with an identity of its own, make valid calls. It panics when the
// server refuses one as invalid, because such a call attacks nothing.
func visiting(
	visitors int, call func(ctx context.Context, api *client.API, visitor, i int) error,
) func(context.Context, string) {
	return func(ctx context.Context, addr string) {
		var wg sync.WaitGroup
		for n := range visitors {
			wg.Go(func() {
				// The cookie makes all calls of a visitor the same user.
				jar, _ := cookiejar.New(nil) // without options it cannot fail
				dial := func(context.Context, string, string) (net.Conn, error) { return connect(nil, addr, timeout) }
				web := &http.Client{Jar: jar, Transport: &http.Transport{DialContext: dial}}
				defer web.CloseIdleConnections()

				api := client.NewAPI(client.Config{URL: "http://" + addr, HTTP: web})

				paced(ctx, 20, func(i int) bool {
					err := call(ctx, api, n, i)
					refused := (*client.Error)(nil)
					if errors.As(err, &refused) && invalid(refused.Status) {
						panic(fmt.Errorf("the server refuses a call of the attack as invalid: %w", err))
					}

					return ctx.Err() == nil
				})
			})
		}

		wg.Wait()
	}
}

func invalid(status int) bool {
	return status == http.StatusBadRequest || status == http.StatusNotFound
}
