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
	stays *person // alone on the page "stays", so that its count must be 1
	sees  *person // subscribes to the pages of newcomers
	api   *client.API
	n     int // how many newcomers there were
}

func newOrdinary(addr string) *ordinary {
	dialer := &net.Dialer{LocalAddr: neighbour}
	web := &http.Client{Timeout: timeout, Transport: &http.Transport{DialContext: dialer.DialContext}}

	return &ordinary{addr: addr, api: client.NewAPI(client.Config{URL: "http://" + addr, HTTP: web})}
}

func (o *ordinary) open() (err error) {
	o.stays, err = o.arrive()
	if err != nil {
		return err
	}
	o.sees, err = o.arrive()
	if err != nil {
		return err
	}

	err = o.stays.Join("stays")
	if err == nil {
		err = o.stays.await("stays", 1)
	}

	// await has set a deadline, which would end the connection during the attack.
	_ = o.stays.below.SetReadDeadline(time.Time{})
	// The server closes the connections of clients that do not read.
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
	below net.Conn // the TCP connection of Conn
}

// arrive connects an ordinary client.
func (o *ordinary) arrive() (*person, error) {
	p := &person{}
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()

	var err error
	p.Conn, err = client.Dial(ctx, client.Config{
		URL: "http://" + o.addr,
		DialContext: func(context.Context, string, string) (net.Conn, error) {
			var err error
			p.below, err = connect(neighbour, o.addr, timeout)
			return p.below, err
		},
	})

	return p, err
}

// await reads until the page's count is want.
func (p *person) await(page string, want int64) error {
	_ = p.below.SetReadDeadline(time.Now().Add(timeout))

	for f := (client.Frame{}); ; {
		if err := p.Receive(&f); err != nil {
			return err
		}
		if f.Type == "count" && f.Count.Page == page && f.Count.Count == want {
			return nil
		}
	}
}

// measured has the latencies of ordinary clients.
type measured struct {
	seen  times // from a join until another client sees it
	first times // until a newcomer has its first count
	liked times
	lost  int // newcomers that failed
}

// measure lets newcomers come, one after the other, for d.
func (o *ordinary) measure(ctx context.Context, d time.Duration) (m measured) {
	for end := time.Now().Add(d); time.Now().Before(end) && ctx.Err() == nil; time.Sleep(50 * time.Millisecond) {
		if err := o.visit(&m); err != nil {
			m.lost++
		}
	}

	slices.Sort(m.seen)
	slices.Sort(m.first)
	slices.Sort(m.liked)
	return m
}

// visit measures one newcomer: it must receive its first count, another client must see it, and the like of every
// second newcomer must count.
func (o *ordinary) visit(m *measured) error {
	o.n++
	page := fmt.Sprintf("ordinary %d", o.n)

	came := time.Now()
	c, err := o.arrive()
	connected := time.Since(came)
	if err != nil {
		return err
	}
	defer c.Abort()

	// The first count of the page, which has no users yet, confirms the subscription.
	if err := o.sees.Subscribe(page); err != nil {
		return err
	}
	if err := o.sees.await(page, 0); err != nil {
		return err
	}
	time.Sleep(300 * time.Millisecond) // longer than --update-interval, which would delay the next count

	joined := time.Now()
	if err := c.Join(page); err != nil {
		return err
	}
	if err := c.await(page, 1); err != nil {
		return err
	}
	// The sleep above does not count: it is not the server's.
	first := connected + time.Since(joined)
	if err := o.sees.await(page, 1); err != nil {
		return err
	}
	m.seen = append(m.seen, time.Since(joined))
	m.first = append(m.first, first)

	// A connection may watch 100 pages, and there are more newcomers than that.
	if err := o.sees.Unsubscribe(page); err != nil {
		return err
	}
	if o.n%2 == 0 { // an address without identity may like ten times a second
		return o.like(m)
	}
	return nil
}

func (o *ordinary) like(m *measured) error {
	began := time.Now()
	liked, err := o.api.AddMember(context.Background(), fmt.Sprintf("likes:%d", o.n), client.Me)
	m.liked = append(m.liked, time.Since(began))

	if err == nil && liked.Value != 1 {
		err = fmt.Errorf("%d likes", liked.Value)
	}
	return err
}

// count returns the count of the page on which one ordinary client stays.
func (o *ordinary) count(ctx context.Context) (int64, error) {
	c, err := o.api.Count(ctx, "stays")
	return c.Count, err
}
