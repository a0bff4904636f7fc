// Package dispatcher carries new counts from the store to the gateways that
// have subscribers for them. A dispatcher owns buckets: it hears their
// publications, keeps a copy of their endpoints, and sends each gateway the
// newest count per page.
package dispatcher

import (
	"context"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/rs/zerolog"

	"headcount/presence"
)

// Store is what a dispatcher needs of a store.
type Store interface {
	presence.Counters
	presence.Endpoints
	presence.Feed
}

// PushFunc sends counts to a gateway. When it fails the counts are sent again,
// or newer ones in their place. It is called from one goroutine per gateway.
type PushFunc func(ctx context.Context, gateway string, counts []presence.Count) error

// maxPush bounds the counts of one push: a longer list goes in several.
const maxPush = 1024

// Dispatcher serves the buckets that Own gave it.
type Dispatcher struct {
	store Store
	push  PushFunc
	log   zerolog.Logger
	// OnChange is told of every bucket whose counts may have changed. It must not
	// block. Set before Run; optional.
	OnChange func(bucket int)
	want     chan []int // the newest set to own; holds one, a newer replaces it
	top      top

	// Owned by the goroutine in which Watch calls publication.
	endpoints map[int]map[string][]string // bucket -> page -> gateways
	outs      map[string]*out             // by gateway; one per gateway that has an endpoint
}

// out is what one gateway has still to be told. Newer counts of a page replace
// older ones, so it never holds more than the gateway's pages.
type out struct {
	refs int           // endpoints of this gateway; the publication goroutine's
	stop func()        // ends the sender
	wake chan struct{} // holds one: pending has something

	mu      sync.Mutex
	pending map[string]presence.Count
}

// New returns a Dispatcher that does nothing until Run.
func New(store Store, push PushFunc, log zerolog.Logger) *Dispatcher {
	return &Dispatcher{store: store, push: push, log: log, want: make(chan []int, 1)}
}

// Own says which buckets this dispatcher is to serve from now on. Any goroutine
// may call it. Two dispatchers that serve the same bucket for a while do no
// harm: counts are absolute and have versions.
func (d *Dispatcher) Own(buckets []int) {
	for {
		select {
		case d.want <- buckets:
			return
		default:
		}
		select {
		case <-d.want:
		default:
		}
	}
}

// Run owns the dispatcher's goroutines; it returns when ctx has ended and all
// of them have.
func (d *Dispatcher) Run(ctx context.Context) error {
	var buckets []int
	for failed := 0; ; {
		wctx, stop := context.WithCancel(ctx)
		done, serving := make(chan error, 1), buckets
		go func() { done <- d.serve(wctx, serving) }() // waited for below, in every case
		select {
		case <-ctx.Done():
			stop()
			<-done
			return nil
		case buckets = <-d.want:
			stop()
			<-done
			failed = 0
		case err := <-done:
			stop()
			failed++
			d.log.Warn().Err(err).Msg("publications cannot be heard; trying again")
			pause(ctx, failed)
		}
	}
}

// serve carries the buckets' counts until ctx ends. What it knows begins and
// ends with it: the first word of every bucket is to read it.
func (d *Dispatcher) serve(ctx context.Context, buckets []int) error {
	d.top.serve(buckets)
	if len(buckets) == 0 {
		<-ctx.Done()
		return ctx.Err()
	}
	d.endpoints, d.outs = map[int]map[string][]string{}, map[string]*out{}
	var senders sync.WaitGroup
	defer senders.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	return d.store.Watch(ctx, buckets, func(p presence.Publication) { d.publication(ctx, &senders, p) })
}

func (d *Dispatcher) publication(ctx context.Context, senders *sync.WaitGroup, p presence.Publication) {
	for _, e := range p.Endpoints {
		d.endpoint(ctx, senders, p.Bucket, e)
	}
	d.enqueue(p.Bucket, p.Counts)
	d.top.take(p.Bucket, p.Counts)
	if d.OnChange != nil && (len(p.Counts) > 0 || p.Lost) {
		d.OnChange(p.Bucket)
	}
	for failed := 0; p.Lost && ctx.Err() == nil; {
		err := d.reread(ctx, senders, p.Bucket)
		if err == nil {
			return
		}
		failed++
		d.log.Warn().Err(err).Int("bucket", p.Bucket).Msg("bucket could not be read; trying again")
		pause(ctx, failed)
	}
}

// reread makes good what publications may have been missed.
func (d *Dispatcher) reread(ctx context.Context, senders *sync.WaitGroup, bucket int) error {
	endpoints, err := d.store.Attached(ctx, bucket)
	if err != nil {
		return err
	}
	old := d.endpoints[bucket]
	d.endpoints[bucket] = map[string][]string{}
	for _, e := range endpoints {
		d.endpoint(ctx, senders, bucket, e)
	}
	for page, gateways := range old { // only now, so that senders in use live on
		for _, gw := range gateways {
			d.unref(gw)
		}
		delete(old, page)
	}
	pages := d.top.beside(bucket, d.endpoints[bucket])
	for page := range d.endpoints[bucket] {
		pages = append(pages, page)
	}
	if len(pages) == 0 {
		return nil
	}
	counts, err := d.store.Counts(ctx, pages)
	if err != nil {
		return err
	}
	d.enqueue(bucket, counts)
	d.top.take(bucket, counts)
	return nil
}

func (d *Dispatcher) endpoint(ctx context.Context, senders *sync.WaitGroup, bucket int, e presence.Endpoint) {
	pages := d.endpoints[bucket]
	if pages == nil {
		pages = map[string][]string{}
		d.endpoints[bucket] = pages
	}
	for i, gw := range pages[e.Page] {
		if gw != e.Gateway {
			continue
		}
		if e.Gone {
			rest := append(append([]string(nil), pages[e.Page][:i]...), pages[e.Page][i+1:]...)
			if pages[e.Page] = rest; len(rest) == 0 {
				delete(pages, e.Page)
			}
			d.unref(gw)
		}
		return
	}
	if e.Gone {
		return
	}
	pages[e.Page] = append(pages[e.Page], e.Gateway)
	o := d.outs[e.Gateway]
	if o == nil {
		sctx, stop := context.WithCancel(ctx)
		o = &out{stop: stop, wake: make(chan struct{}, 1), pending: map[string]presence.Count{}}
		d.outs[e.Gateway] = o
		senders.Go(func() { d.send(sctx, e.Gateway, o) })
	}
	o.refs++
}

func (d *Dispatcher) unref(gateway string) {
	o := d.outs[gateway]
	if o.refs--; o.refs == 0 {
		o.stop()
		delete(d.outs, gateway)
	}
}

func (d *Dispatcher) enqueue(bucket int, counts []presence.Count) {
	for _, c := range counts {
		for _, gw := range d.endpoints[bucket][c.Page] {
			d.outs[gw].add(c)
		}
	}
}

// add keeps c, unless what waits for the page is newer. Of two of one version
// the later holds: it knows better whether the count is stale.
func (o *out) add(c presence.Count) {
	o.mu.Lock()
	if old, ok := o.pending[c.Page]; !ok || !old.Newer(c) {
		o.pending[c.Page] = c
	}
	o.mu.Unlock()
	o.signal()
}

// restore puts back what could not be sent, but for what is newer by now.
func (o *out) restore(counts []presence.Count) {
	o.mu.Lock()
	for _, c := range counts {
		if old, ok := o.pending[c.Page]; !ok || c.Newer(old) {
			o.pending[c.Page] = c
		}
	}
	o.mu.Unlock()
	o.signal()
}

func (o *out) signal() {
	select {
	case o.wake <- struct{}{}:
	default:
	}
}

// take removes up to maxPush pending counts.
func (o *out) take(buf []presence.Count) []presence.Count {
	o.mu.Lock()
	defer o.mu.Unlock()
	for page, c := range o.pending {
		if len(buf) == maxPush {
			break
		}
		buf = append(buf, c)
		delete(o.pending, page)
	}
	return buf
}

// send is the one goroutine that talks to gateway. While a push is under way
// new counts replace each other in pending.
func (d *Dispatcher) send(ctx context.Context, gateway string, o *out) {
	for failed := 0; ; {
		select {
		case <-ctx.Done():
			return
		case <-o.wake:
		}
		for {
			counts := o.take(nil)
			if len(counts) == 0 {
				break
			}
			err := d.push(ctx, gateway, counts)
			if err == nil {
				failed = 0
				continue
			}
			if ctx.Err() != nil {
				return
			}
			failed++
			if failed == 1 {
				d.log.Warn().Err(err).Str("gateway", gateway).Msg("gateway could not be reached; trying again")
			}
			o.restore(counts)
			pause(ctx, failed)
		}
	}
}

// pause waits after the nth failure in a row: 50 ms doubled up to 2 s, jittered.
func pause(ctx context.Context, n int) {
	d := min(50*time.Millisecond<<min(n-1, 10), 2*time.Second)
	t := time.NewTimer(d/2 + rand.N(d/2))
	defer t.Stop()
	select {
	case <-ctx.Done():
	case <-t.C:
	}
}
