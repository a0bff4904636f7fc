//go:build linux

package main

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"slices"
	"time"

	"headcount/client"
)

// ordinary are clients that do nothing wrong.
type ordinary struct {
	addr  string
	stays *person // on its page, and the 1 that its count shows
	sees  *person
	api   *client.API
	n     int
}

func newOrdinary(addr string) *ordinary {
	return &ordinary{addr: addr, api: client.NewAPI(client.Config{URL: "http://" + addr, HTTP: &http.Client{Timeout: patience, Transport: &http.Transport{
		DialContext: (&net.Dialer{LocalAddr: neighbour}).DialContext,
	}}})}
}

func (o *ordinary) open() (err error) {
	if o.stays, err = o.arrive(); err != nil {
		return err
	}
	if o.sees, err = o.arrive(); err != nil {
		return err
	}
	if err = o.stays.Join("stays"); err == nil {
		err = o.stays.await("stays", 1)
	}
	_ = o.stays.below.SetReadDeadline(time.Time{})
	go func() { // ends with close
		var f client.Frame
		for o.stays.Receive(&f) == nil {
		}
	}()
	return err
}

func (o *ordinary) close() {
	o.stays.Abort()
	o.sees.Abort()
}

// person is one ordinary client.
type person struct {
	*client.Conn
	below net.Conn
}

// arrive connects an ordinary client.
func (o *ordinary) arrive() (*person, error) {
	p := &person{}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	var err error
	p.Conn, err = client.Dial(ctx, client.Config{
		URL: "http://" + o.addr,
		DialContext: func(context.Context, string, string) (net.Conn, error) {
			var err error
			p.below, err = connect(neighbour, o.addr, patience)
			return p.below, err
		},
	})
	return p, err
}

// await reads until the page's count is want.
func (p *person) await(page string, want int64) error {
	_ = p.below.SetReadDeadline(time.Now().Add(patience))
	for f := (client.Frame{}); ; {
		if err := p.Receive(&f); err != nil {
			return err
		}
		if f.Type == "count" && f.Count.Page == page && f.Count.Count == want {
			return nil
		}
	}
}

// measured is what ordinary clients felt, and how many of them did not get what they wanted.
type measured struct {
	seen, first, liked times
	lost               int
}

// measure has newcomers come, one after the other. Each must get its first count, another
// client must see it, and a like of a visitor must count.
func (o *ordinary) measure(ctx context.Context, d time.Duration) (m measured) {
	for end := time.Now().Add(d); time.Now().Before(end) && ctx.Err() == nil; time.Sleep(50 * time.Millisecond) {
		o.n++
		page := fmt.Sprintf("ordinary %d", o.n)
		came := time.Now()
		c, err := o.arrive()
		connected := time.Since(came)
		if err == nil {
			if err = o.sees.Subscribe(page); err == nil {
				err = o.sees.await(page, 0)
			}
			time.Sleep(300 * time.Millisecond) // or the page's next count would wait for the interval
			joined := time.Now()
			if err == nil {
				err = c.Join(page)
			}
			if err == nil {
				err = c.await(page, 1)
			}
			firstAt := time.Now()
			if err == nil {
				err = o.sees.await(page, 1)
			}
			if err == nil {
				m.seen, m.first = append(m.seen, time.Since(joined)), append(m.first, connected+firstAt.Sub(joined))
				err = o.sees.Unsubscribe(page)
			}
			if likes := time.Now(); err == nil && o.n%2 == 0 { // an address without identity may do it ten times a second
				var liked client.Counter
				if liked, err = o.api.AddMember(context.Background(), fmt.Sprintf("likes:%d", o.n), client.Me); err == nil && liked.Value != 1 {
					err = fmt.Errorf("%d likes", liked.Value)
				}
				m.liked = append(m.liked, time.Since(likes))
			}
			c.Abort()
		}
		if err != nil {
			m.lost++
		}
	}
	slices.Sort(m.seen)
	slices.Sort(m.first)
	slices.Sort(m.liked)
	return m
}

// count is the count of the page on which one ordinary client stays.
func (o *ordinary) count(ctx context.Context) (int64, error) {
	c, err := o.api.Count(ctx, "stays")
	return c.Count, err
}
