//go:build linux

package main

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/cookiejar"
	"slices"
	"strings"
	"sync"
	"time"

	"headcount/client"
	"headcount/internal/benchenv"
	"headcount/internal/testkit"
)

// malformed are frames of which none may be sent, each as the first of its connection.
var malformed = [][]byte{
	{0x81, 2, 'h', 'i'},                                 // without a mask
	testkit.ClientFrame(0xc1, "compressed"),             // with a bit that only an extension may set
	testkit.ClientFrame(0x83, ""),                       // of an unknown kind
	testkit.ClientFrame(0x89, strings.Repeat("p", 126)), // a ping that is too long
	testkit.ClientFrame(0x09, "a part of a ping"),
	testkit.ClientFrame(0x80, "the end of nothing"),
	slices.Concat(testkit.ClientFrame(0x01, "a"), testkit.ClientFrame(0x81, "b")), // a message within another
	{0x81, 0xff, 0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0},                           // 2^63 bytes
	{0x82, 0xff, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0},                              // a terabyte
	testkit.ClientFrame(0x88, "\x03\xed"),                                         // a close code that is never sent
	testkit.ClientFrame(0x88, "x"),
	testkit.ClientFrame(0x81, "\xff\xfe"), // no UTF-8
	{0x81},                                // a half head
}

// refusals are requests that a server must not take for others.
var refusals = []string{
	"PUT /a/counter HTTP/1.1\r\nHost: h\r\nContent-Length: 22\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /hidden/counter HTTP/1.1\r\nHost: h\r\n\r\n",
	"PUT /a/counter HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\nContent-Length: 22\r\n\r\n" + increment,
	"PUT /a/counter HTTP/1.1\r\nHost: h\r\nContent-Length: +22\r\n\r\n" + increment,
	"PUT /a/counter HTTP/1.1\r\nHost: h\r\nTransfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
	"PUT /a/counter HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
	"PUT /a/counter HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffff1\r\n" + increment,
	"PUT /a/counter HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\nTrailer: Content-Length, Authorization\r\n\r\n16\r\n" + increment + "\r\n0\r\nContent-Length: 5\r\nAuthorization: Bearer x\r\n" + strings.Repeat("X-Trailer: x\r\n", 100) + "\r\n",
	"PUT /a/counter HTTP/1.1\r\nHost: h\r\nContent-Length: 2200\r\n\r\n" + increment, // and then nothing
	"PUT /a/counter HTTP/1.1\r\nHost: h\r\nContent-Length: 4\r\n\r\n" + increment,
	"GET /a/counter HTTP/1.1\r\nHost: h\r\nHost: other\r\n\r\n",
	"GET /a/counter HTTP/1.1\r\nHost: h\r\nX: a\r\n folded\r\n\r\n",
	"GET /a/counter HTTP/1.1\r\nHost: h\r\nX: a\x00b\r\n\r\n",
	"GET /a%zz/counter HTTP/1.1\r\nHost: h\r\n\r\n",
	"GET http://other/a/counter HTTP/1.1\r\nHost: h\r\n\r\n",
	"GET /a/counter HTTP/1.1\nHost: h\n\n",
	"GET /a/counter HTTP/1.1\r\nHost: h\r\nX: " + strings.Repeat("x", 15<<10) + "\r\n\r\n",
	"GET /a/counter HTTP/1.1\r\nHost: h\r\nX: " + strings.Repeat("x", 64<<10) + "\r\n\r\n",
	"GET /a/counter HTTP/1.1\r\nHost: h\r\n" + strings.Repeat("X: y\r\n", 2500) + "\r\n",
	"GET /-/counters?" + strings.Repeat("page=a&", 2000) + " HTTP/1.1\r\nHost: h\r\n\r\n",
	"GET /-/ws?" + strings.Repeat("%u", 3000) + " HTTP/1.1\r\nHost: h\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: x\r\n\r\n",
	"GET /a/counter/events HTTP/1.1\r\nHost: h\r\nLast-Event-ID: " + strings.Repeat("9", 4000) + "\r\n\r\n",
	"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
}

const increment = `{"action":"increment"}`

// oddNames are names of pages, in JSON, that a page has seldom.
var oddNames = []string{
	`"\u0000"`, `"\ud800"`, `"a\u200d"`, `"\u202eabc"`, `"\ufeff"`, `"\u0301\u0301\u0301"`, `"` + strings.Repeat(`\ud83d\udc68\u200d`, 40) + `x"`,
	`"` + strings.Repeat("𝒳", 128) + `"`, `"` + strings.Repeat("𝒳", 129) + `"`, `"../../etc/passwd"`, `"*"`, `"-"`, `"{b}"`, `"a\u0000b"`, `"hc:{1}:x"`, `"\ufffd"`, `"\u00ad"`, `"\u2028"`,
}

// malforming are attacks by what no honest client sends, and by HTTP.
var malforming = []attack{
	{name: "malformed frames", run: repeat(500, 50, func(_ context.Context, addr string, i int) io.Closer {
		c, err := dial(addr)
		if err != nil {
			return nil
		}
		_, _ = c.Write(malformed[i%len(malformed)])
		return c
	})},
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
	{name: "odd names", run: talk(20, 200, func(n, i int) []byte {
		return text(`{"type":"join","page":%s}`, oddNames[(n+i)%len(oddNames)])
	})},
	{name: "pages and counters", run: talk(4, 250, func(n, i int) []byte {
		kind := []string{"subscribe", "unsubscribe"}[i%2]
		return text(`{"type":"%s","pages":%s,"counters":%s}`, kind, list(fmt.Sprintf("p %d/%d/", n, i/2), 50), list(fmt.Sprintf("views:%d/%d/", n, i/2), 50))
	})},
	{name: "event streams", run: repeat(1000, 5000, func(_ context.Context, addr string, i int) io.Closer {
		return opened(addr, fmt.Sprintf("GET /stream%d/counter/events HTTP/1.1\r\nHost: h\r\n\r\n", i%100))
	})},
	{name: "wrong requests", run: repeat(1000, 100, func(_ context.Context, addr string, i int) io.Closer {
		return opened(addr, refusals[i%len(refusals)])
	})},
	{name: "held bodies", rules: clapping, run: repeat(300, 2000, func(_ context.Context, addr string, _ int) io.Closer {
		return opened(addr, "POST /api/v1/counters/claps:x/increment HTTP/1.1\r\nHost: h\r\nContent-Length: 262144\r\n\r\n"+strings.Repeat(" ", 262_000))
	})},
	{name: "keys", rules: clapping, run: visiting(200, func(ctx context.Context, api *client.API, n, i int) error {
		name := fmt.Sprintf("%d/%d", n, i)
		_, err := api.Once(name+strings.Repeat("k", 200)).Increment(ctx, "claps:"+name, 1)
		return err
	})},
	{name: "follows", run: visiting(200, func(ctx context.Context, api *client.API, n, i int) error {
		_, err := api.Do(ctx, http.MethodPut, fmt.Sprintf("/-/me/follows/followed%d%%2F%d%s", n, i, strings.Repeat("f", 100)), nil, nil)
		return err
	})},
	{name: "half handshakes", tls: true, run: repeat(3000, 9000, func(_ context.Context, addr string, _ int) io.Closer {
		c, err := connect(nil, addr, time.Second)
		if err != nil {
			return nil
		}
		_ = c.SetReadDeadline(time.Unix(1, 0)) // the handshake ends when the server is to answer
		_, _ = c.Write(nil)
		return c
	})},
	{name: "a deaf webhook", flags: deafWebhook, run: talk(20, 300, func(n, i int) []byte {
		return text(`{"type":"%s","page":"hooked %d/%d"}`, []string{"join", "leave"}[i%2], n, i/2%50)
	})},
}

// deafWebhook sends every event to a server that accepts and never answers.
func deafWebhook(t *benchenv.Trial) []string {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	go func() { // ends with the listener
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() { _, _ = io.Copy(io.Discard, c) }() // ends with the server
		}
	}()
	return []string{"--webhook", "page:*=http://" + l.Addr().String() + "/", "--webhook-secret", "whsec_" + base64.StdEncoding.EncodeToString(make([]byte, 32))}
}

// clapping are rules of counters that visitors may increment, and of likes.
const clapping = `{"rules":[
{"match":"claps:*","kind":"sum","public":["read","increment"]},
{"match":"likes:*","kind":"members","public":["read","member"]}]}`

// visiting has visitors, each with an identity of its own, make calls that the server knows: an attack that it refuses as
// wrong would attack nothing.
func visiting(visitors int, call func(ctx context.Context, api *client.API, visitor, i int) error) func(context.Context, string) {
	return func(ctx context.Context, addr string) {
		var wg sync.WaitGroup
		for n := range visitors {
			wg.Go(func() {
				jar, _ := cookiejar.New(nil) // without options it cannot fail
				dial := func(context.Context, string, string) (net.Conn, error) { return connect(nil, addr, patience) }
				web := &http.Client{Jar: jar, Transport: &http.Transport{DialContext: dial}}
				defer web.CloseIdleConnections()
				api := client.NewAPI(client.Config{URL: "http://" + addr, HTTP: web})
				paced(ctx, 20, func(i int) bool {
					err := call(ctx, api, n, i)
					refused := (*client.Error)(nil)
					if errors.As(err, &refused) && (refused.Status == http.StatusBadRequest || refused.Status == http.StatusNotFound) {
						panic(fmt.Errorf("the attack misses: %w", err))
					}
					return ctx.Err() == nil
				})
			})
		}
		wg.Wait()
	}
}
