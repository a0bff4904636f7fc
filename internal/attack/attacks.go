//go:build linux

package main

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"net"
	"sync"
	"time"

	"headcount/client"
	"headcount/internal/testkit"
)

// attack is one way to harm other clients. run returns soon after ctx ends, with every connection closed.
type attack struct {
	name  string
	run   func(ctx context.Context, addr string)
	rules string // of counters; "": the built-in ones
}

// crowding are attacks with many connections or many well-formed messages.
var crowding = []attack{
	{name: "connects", run: repeat(1000, 500, func(addr string, _ int) io.Closer {
		if c, err := dial(addr); err == nil {
			return c
		}
		return nil
	})},
	{name: "silent connects", run: repeat(3000, 3000, func(addr string, _ int) io.Closer { return opened(addr, "") })},
	{name: "slow writers", run: repeat(200, 400, func(addr string, _ int) io.Closer {
		return opened(addr, "GET /-/ws HTTP/1.1\r\nHost: h\r\n")
	})},
	{name: "repeated subscribes", run: talk(2, 310, func(_, _ int) []byte {
		return text(`{"type":"subscribe","pages":%s}`, list("same ", 100))
	})},
	{name: "joins", run: talk(20, 300, func(n, i int) []byte {
		page := i / 180 * 90 // ninety joins, then their leaves
		if i%180 < 90 {
			return text(`{"type":"join","page":"joined %d/%d"}`, n, page+i%90)
		}
		return text(`{"type":"leave","page":"joined %d/%d"}`, n, page+i%90)
	})},
	{name: "pings", run: talk(4, 20_000, func(_, _ int) []byte { return testkit.ClientFrame(0x89, "") })},
	{name: "fragments", run: talk(4, 20_000, func(_, i int) []byte {
		if i == 0 {
			return testkit.ClientFrame(0x01, "")
		}
		return testkit.ClientFrame(0x00, "")
	})},
	{name: "ids", run: repeat(1000, 1, func(addr string, _ int) io.Closer {
		return opened(addr, "GET /ids/counter/events HTTP/1.1\r\nHost: h\r\n\r\n")
	})},
	{name: "puts", run: repeat(1000, 50, func(addr string, _ int) io.Closer {
		const head = "PUT /stays%20not/counter HTTP/1.1\r\nHost: h\r\nContent-Length: 22\r\n\r\n"
		return opened(addr, head+`{"action":"increment"}`)
	})},
	{name: "pages of one user", run: pagesOfOneUser},
	{name: "slow readers", run: talking(50, 400, func(_, i int) []byte {
		return text(`{"type":"subscribe","pages":%s}`, list(fmt.Sprintf("deaf %d/", i%2), 50))
	}, func(net.Conn) {})},
}

// pagesOfOneUser lets one user join 100 pages over each of up to 1,000 connections, as fast as the server accepts new
// pages from an address: 20,000 at once and then less than 1,000 a second. When three quarters of the time are over,
// all connections end at once, because that costs others as well.
func pagesOfOneUser(ctx context.Context, addr string) {
	const connections, atOnce, perSecond = 1000, 200, 9
	end, _ := ctx.Deadline()
	staying, leave := context.WithTimeout(ctx, time.Until(end)*3/4)
	defer leave()

	id := ""
	var wg sync.WaitGroup
	open := func(n int) {
		c, err := client.Dial(staying, client.Config{URL: "http://" + addr, ID: id})
		if err != nil {
			return
		}
		// The first connection receives an id. All later ones present it, so they are the same user.
		id = cmp.Or(id, c.ID)

		wg.Go(func() {
			defer c.Abort()
			stop := context.AfterFunc(staying, c.Abort)
			defer stop()
			for page := range 100 {
				if c.Join(fmt.Sprintf("one's %d/%d", n, page)) != nil {
					return
				}
			}
			for f := (client.Frame{}); c.Receive(&f) == nil; { // until the connection ends
			}
		})
	}

	// No faster than the server's limit for an address, so that it accepts all of them.
	paced(staying, 100, func(n int) bool {
		open(n)
		return n < atOnce-1
	})
	paced(staying, perSecond, func(n int) bool {
		open(atOnce + n)
		return atOnce+n < connections-1
	})

	<-staying.Done()
	wg.Wait()
	<-ctx.Done()
}

// opened connects and sends text.
func opened(addr, text string) io.Closer {
	c, err := connect(nil, addr, time.Second)
	if err != nil {
		return nil
	}

	_, _ = io.WriteString(c, text) // the server may have closed it
	return c
}

// repeat returns an attack that calls do perSecond times a second, from ten goroutines. The newest connections, kept in
// number, stay open.
func repeat(perSecond, kept int, do func(addr string, i int) io.Closer) func(context.Context, string) {
	const workers = 10
	return func(ctx context.Context, addr string) {
		var wg sync.WaitGroup
		for range workers {
			wg.Go(func() {
				// A ring buffer of the open connections: the newest one takes the place of the oldest.
				open := make([]io.Closer, max(kept/workers, 1))
				paced(ctx, perSecond/workers, func(i int) bool {
					at := &open[i%len(open)]
					if *at != nil {
						_ = (*at).Close()
					}
					*at = do(addr, i)
					return true
				})

				// The server cannot free its memory while these are open.
				for _, c := range open {
					if c != nil {
						_ = c.Close()
					}
				}
			})
		}

		wg.Wait()
	}
}

// talk returns an attack in which each client sends perSecond messages a second: say returns message i of client n. A
// client whose connection is closed connects again. The clients read what they are sent.
func talk(clients, perSecond int, say func(n, i int) []byte) func(context.Context, string) {
	return talking(clients, perSecond, say, func(c net.Conn) { _, _ = io.Copy(io.Discard, c) })
}

// talking is talk with clients that read by calling listen.
func talking(clients, perSecond int, say func(n, i int) []byte, listen func(net.Conn)) func(context.Context, string) {
	return func(ctx context.Context, addr string) {
		var wg sync.WaitGroup
		for n := range clients {
			wg.Go(func() {
				// The attack goes on when the server has closed the attacker's connection.
				for ctx.Err() == nil {
					c, err := dial(addr)
					if err != nil {
						time.Sleep(100 * time.Millisecond)
						continue
					}

					wg.Go(func() { listen(c) }) // ends with the connection
					stop := context.AfterFunc(ctx, func() { _ = c.Close() })

					paced(ctx, perSecond, func(i int) bool {
						_, err := c.Write(say(n, i))
						return err == nil
					})

					stop()
					_ = c.Close()
				}
			})
		}

		wg.Wait()
	}
}

// paced calls do perSecond times a second until it returns false or ctx ends.
func paced(ctx context.Context, perSecond int, do func(i int) bool) {
	const tick = 10 * time.Millisecond
	every := time.NewTicker(tick)
	defer every.Stop()
	began := time.Now()
	i := 0

	for {
		// Counted by elapsed time and not by ticks, so that a late tick sends what is overdue, too.
		for due := int(time.Since(began).Seconds() * float64(perSecond)); i < due; i++ {
			if ctx.Err() != nil {
				return
			}
			if !do(i) {
				return
			}
		}

		select {
		case <-ctx.Done():
			return
		case <-every.C:
		}
	}
}
