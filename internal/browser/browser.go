// Package browser runs the browser client in simulations, in the form in which the server serves it. A Browser has
// tabs, each in a JavaScript interpreter of its own, which share storage, locks and channels. Its timers are those of
// package time and its connections come from Config.Dial, so that in a bubble of synctest its clock and its network are
// the simulation's.
package browser

import (
	"context"
	"io/fs"
	"math/rand/v2"
	"net"
	"net/http"
	"slices"
	"sync"
)

// Config tunes a Browser.
type Config struct {
	Address string // of the page that all tabs show, on the server's own origin
	Files   fs.FS  // that the server serves under /-/
	Chance  *rand.Rand
	// Dial connects to the server.
	Dial func(ctx context.Context, network, address string) (net.Conn, error)
	// Asked is called with each request but those for WebSockets. It must not block.
	Asked func(method, address string)
	// Say is called with each line of the console. Fail is called with each exception that no script catches.
	Say, Fail func(text string)
}

// Browser is one browser. Any goroutine may call New, Do and Close; everything else, tabs included, is for functions
// that Do runs.
type Browser struct {
	cfg  Config
	web  *http.Client
	todo chan func()
	ctx  context.Context
	stop context.CancelFunc
	work sync.WaitGroup // the goroutines of the loop and of the network

	// Only the loop uses these.
	soon     []func() // run after the function that runs now
	tabs     []*Tab
	stored   map[string]string
	locks    map[string]*lock
	channels []*channel
}

// New starts a browser without tabs. The caller must call Close.
func New(cfg Config) *Browser {
	ctx, stop := context.WithCancel(context.Background())
	b := &Browser{
		cfg: cfg, ctx: ctx, stop: stop, todo: make(chan func()),
		// Each request has a connection of its own, so that each may reach another gateway.
		web:    &http.Client{Transport: &http.Transport{DialContext: cfg.Dial, DisableKeepAlives: true}},
		stored: map[string]string{}, locks: map[string]*lock{},
	}
	b.work.Go(b.loop)

	return b
}

// Close ends all tabs, and waits until nothing of the browser runs any more.
func (b *Browser) Close() {
	b.stop()
	b.work.Wait()
}

// Do runs f in the browser's loop, after what runs there now. It does not wait for the end of f.
func (b *Browser) Do(f func()) {
	select {
	case b.todo <- f:
	case <-b.ctx.Done():
	}
}

// loop runs all scripts of all tabs, one after the other.
func (b *Browser) loop() {
	for {
		select {
		case f := <-b.todo:
			f()
			for len(b.soon) > 0 {
				next := b.soon[0]
				b.soon = b.soon[1:]
				next()
			}
		case <-b.ctx.Done():
			for _, t := range slices.Clone(b.tabs) {
				t.Kill()
			}
			return
		}
	}
}

// lock is a Web Lock.
type lock struct {
	holder  *request
	waiting []*request
}

// request is a tab's request for a lock.
type request struct {
	tab     *Tab
	name    string // of the lock
	granted func()
	stolen  func()
}

// request requests a lock. If steal is set, it takes the lock from its holder.
func (b *Browser) request(r *request, steal bool) {
	l := b.locks[r.name]
	if l == nil {
		l = &lock{}
		b.locks[r.name] = l
	}

	if !steal {
		l.waiting = append(l.waiting, r)
		b.grant(l)
		return
	}

	if robbed := l.holder; robbed != nil {
		robbed.tab.task(robbed.stolen)
	}
	l.holder = r
	r.tab.task(r.granted)
}

func (b *Browser) grant(l *lock) {
	if l.holder != nil || len(l.waiting) == 0 {
		return
	}

	l.holder, l.waiting = l.waiting[0], l.waiting[1:]
	l.holder.tab.task(l.holder.granted)
}

// withdraw cancels a request, and reports whether it was waiting.
func (b *Browser) withdraw(r *request) bool {
	l := b.locks[r.name]
	before := len(l.waiting)
	l.waiting = slices.DeleteFunc(l.waiting, func(o *request) bool { return o == r })

	return len(l.waiting) < before
}

// release frees a lock, unless it was stolen.
func (b *Browser) release(r *request) {
	l := b.locks[r.name]
	if l.holder == r {
		l.holder = nil
		b.grant(l)
	}
}

// channel is a tab's end of a BroadcastChannel.
type channel struct {
	tab     *Tab
	name    string
	receive func(text string)
}

// post sends a message to all other ends of the channel.
func (b *Browser) post(from *channel, text string) {
	for _, c := range b.channels {
		if c != from && c.name == from.name {
			c.tab.task(func() {
				if slices.Contains(b.channels, c) {
					c.receive(text)
				}
			})
		}
	}
}

func (b *Browser) close(c *channel) {
	b.channels = slices.DeleteFunc(b.channels, func(o *channel) bool { return o == c })
}
