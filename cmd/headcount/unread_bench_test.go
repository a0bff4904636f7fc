package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/coder/websocket"
	"github.com/rs/zerolog"
	"golang.org/x/sync/errgroup"

	"headcount/presence/redisstore"
	"headcount/presence/redistest"
	"headcount/presence/unread"
	"headcount/servertest"
)

const (
	benchFollowers = 1_000_000
	benchOnline    = 10_000
	benchKey       = "a key that is long enough"
)

// BenchmarkChange changes a page with a million followers in Redis, of whom 10,000 are
// connected. It measures when the last of them knows, and what that cost Redis.
func BenchmarkChange(b *testing.B) {
	redis := redistest.Start(b)
	url, _ := benchServer(b, "--redis", redis.URL(), "--cluster-listen", servertest.FreeAddr(), "--api-key", benchKey)
	store, err := redisstore.Open(redisstore.Config{URL: redis.URL(), Log: zerolog.Nop(), Facts: redisstore.Facts{Region: "local", Secret: "none"}})
	if err != nil {
		b.Fatal(err)
	}
	defer store.Close()
	b.Logf("%.0f followers/s are saved", rate(b, benchFollowers, func(i int) error {
		user := unread.User(unread.KeyHash("follower", fmt.Sprint(i)))
		_, err := store.Save(b.Context(), user, unread.Record{}, unread.Record{Follows: []unread.Follow{{Page: "p"}}})
		return err
	}))
	var told atomic.Int64
	var want atomic.Int64 // the count that is waited for
	all := make(chan time.Time, 1)
	conns := make([]*websocket.Conn, benchOnline)
	b.Logf("%.0f connections/s are opened and follow", rate(b, benchOnline, func(i int) error {
		ctx, cancel := context.WithTimeout(b.Context(), 30*time.Second)
		defer cancel()
		ws, _, err := websocket.Dial(ctx, "ws"+strings.TrimPrefix(url, "http")+"/-/ws", nil)
		if err != nil {
			return err
		}
		conns[i] = ws
		var welcome struct{ ID string }
		_, text, err := ws.Read(ctx)
		if err == nil {
			err = json.Unmarshal(text, &welcome)
		}
		if err != nil {
			return err
		}
		return call("PUT", url+"/-/me/follows/p", "", "Headcount-Id", welcome.ID)
	}))
	var readers sync.WaitGroup
	for _, ws := range conns {
		readers.Go(func() {
			for {
				_, text, err := ws.Read(b.Context())
				if err != nil {
					return
				}
				var f struct {
					Type  string
					Count int64
				}
				if json.Unmarshal(text, &f) == nil && f.Type == "unread" && f.Count == want.Load() && f.Count > 0 && told.Add(1) == benchOnline {
					all <- time.Now()
				}
			}
		})
	}
	defer readers.Wait()
	defer func() {
		for _, ws := range conns {
			_ = ws.CloseNow()
		}
	}()
	change := func() time.Duration {
		told.Store(0)
		want.Add(1)
		begin := time.Now()
		if err := call("POST", url+"/p/changes", "", "X-API-Key", benchKey, "Idempotency-Key", fmt.Sprint(want.Load())); err != nil {
			b.Fatal(err)
		}
		select {
		case at := <-all:
			return at.Sub(begin)
		case <-time.After(30 * time.Second):
			b.Fatalf("only %d of %d were told", told.Load(), benchOnline)
		}
		return 0
	}
	change() // the page has a history now
	time.Sleep(2 * time.Second)
	const rounds = 20
	for b.Loop() {
		var took []time.Duration
		var commands []int
		for range rounds {
			commands = append(commands, redisCommands(b, redis, func() { took = append(took, change()) }))
			time.Sleep(500 * time.Millisecond)
		}
		slices.Sort(took)
		slices.Sort(commands)
		b.ReportMetric(0, "ns/op")
		b.ReportMetric(took[rounds/2].Seconds()*1000, "ms-to-the-last-p50")
		b.ReportMetric(took[rounds-1].Seconds()*1000, "ms-to-the-last-max")
		// In some rounds a lease is renewed, or claims are proved, as well.
		b.ReportMetric(float64(commands[rounds/2]), "redis-commands/change")
	}
}

// redisCommands counts the commands that Redis carries out while do runs, also those
// within scripts.
func redisCommands(b *testing.B, redis *redistest.Server, do func()) int {
	b.Helper()
	redis.Do(b, "CONFIG", "RESETSTAT")
	do()
	n := 0
	for line := range strings.Lines(redis.Do(b, "INFO", "commandstats").(string)) {
		name, rest, ok := strings.Cut(strings.TrimPrefix(line, "cmdstat_"), ":calls=")
		if !ok || strings.HasPrefix(name, "config") || name == "info" || name == "ping" {
			continue
		}
		var calls int
		if _, err := fmt.Sscan(strings.TrimSpace(strings.Split(rest, ",")[0]), &calls); err != nil {
			b.Fatal(err)
		}
		n += calls
	}
	return n
}

// BenchmarkReadUnread measures a GET of the unread count of a user with 1,000 follows.
func BenchmarkReadUnread(b *testing.B) {
	for name, flags := range map[string]func() []string{
		"embedded": func() []string { return []string{"--data-dir", b.TempDir()} },
		"redis": func() []string {
			return []string{"--redis", redistest.Start(b).URL(), "--cluster-listen", servertest.FreeAddr()}
		},
	} {
		b.Run(name, func(b *testing.B) {
			url, _ := benchServer(b, append(flags(), "--api-key", benchKey)...)
			rate(b, unread.MaxFollows, func(i int) error {
				if err := call("PUT", fmt.Sprint(url, "/-/users/u/follows/page", i), "", "X-API-Key", benchKey); err != nil {
					return err
				}
				return call("POST", fmt.Sprint(url, "/page", i, "/changes"), "", "X-API-Key", benchKey)
			})
			for b.Loop() {
				var took []time.Duration
				for range 500 {
					begin := time.Now()
					if err := call("GET", url+"/-/users/u/unread", "", "X-API-Key", benchKey); err != nil {
						b.Fatal(err)
					}
					took = append(took, time.Since(begin))
				}
				slices.Sort(took)
				b.ReportMetric(0, "ns/op")
				b.ReportMetric(took[250].Seconds()*1000, "ms-p50")
				b.ReportMetric(took[495].Seconds()*1000, "ms-p99")
			}
		})
	}
}

// BenchmarkDurableChanges measures how many changes a second the data directory takes.
func BenchmarkDurableChanges(b *testing.B) {
	url, _ := benchServer(b, "--data-dir", b.TempDir(), "--api-key", benchKey)
	for b.Loop() {
		run := time.Now().String()
		perSecond := rate(b, 20_000, func(i int) error {
			return call("POST", fmt.Sprint(url, "/page", i%100, "/changes"), "", "X-API-Key", benchKey, "Idempotency-Key", fmt.Sprint(run, i))
		})
		b.ReportMetric(0, "ns/op")
		b.ReportMetric(perSecond, "changes/s")
	}
}

// rate does n things, 64 at a time, and returns how many it did a second.
func rate(b *testing.B, n int, do func(i int) error) float64 {
	b.Helper()
	begin := time.Now()
	var next atomic.Int64
	var all errgroup.Group
	for range 64 {
		all.Go(func() error {
			for i := int(next.Add(1)) - 1; i < n; i = int(next.Add(1)) - 1 {
				if err := do(i); err != nil {
					return err
				}
			}
			return nil
		})
	}
	if err := all.Wait(); err != nil {
		b.Fatal(err)
	}
	return float64(n) / time.Since(begin).Seconds()
}

var benchClient = &http.Client{Transport: &http.Transport{Proxy: nil, MaxIdleConnsPerHost: 64, DisableCompression: true}, Timeout: 30 * time.Second}

// call makes a request, which must succeed; headers are names and values.
func call(method, url, body string, headers ...string) error {
	req, err := http.NewRequest(method, url, strings.NewReader(body))
	if err != nil {
		return err
	}
	for i := 0; i < len(headers); i += 2 {
		req.Header.Set(headers[i], headers[i+1])
	}
	resp, err := benchClient.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode >= 300 {
		err = fmt.Errorf("%s %s: %s: %s", method, url, resp.Status, text)
	}
	return err
}
