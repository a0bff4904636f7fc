// Package dispatcher sends updates from the store to the gateways that have subscribers
// for them. A dispatcher owns buckets: it receives their publications, keeps a copy of
// their endpoints, and sends every gateway the newest update of each of its topics.
package dispatcher

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"

	"headcount/internal/machine"
	"headcount/internal/outage"
	"headcount/internal/wake"
	"headcount/presence"
)

// Store is the part of a store that a dispatcher uses.
type Store interface {
	presence.Updates
	presence.Endpoints
	presence.Feed
}

// Gateways carries updates to gateways.
type Gateways interface {
	// PushUpdates sends updates to a gateway. After an error the dispatcher sends the same
	// updates again, or newer ones in their place. One goroutine per gateway calls it.
	PushUpdates(ctx context.Context, gateway string, updates []presence.Update) error
	// Ended reports whether an incarnation of a gateway seems to have ended. It must not
	// block; any goroutine may call it.
	Ended(gateway string) bool
}

// Regions replicates buckets to other regions. The dispatcher calls Changed for every
// bucket that may have changed. Changed must not block.
type Regions interface{ Changed(bucket int) }

// Watcher receives the updates of the buckets that are served. Its methods must not block.
type Watcher interface {
	Serve(buckets []int) // sets the buckets that are served from now on
	Received(updates []presence.Update)
	Lost() // reports that updates may have been missed
}

// Pages is a set of pages, by their names. Has must not block.
type Pages interface{ Has(name string) bool }

const (
	maxPush = 1024 // updates of one push; a longer list goes out in several pushes
	// fewPending is how many updates need no more room in a map than none.
	fewPending = 8
	// standstillLimit is how long the process may be suspended before its queued updates count as doubtful: the store
	// may have lost its data in the meantime, and then they are not the newest any more.
	standstillLimit = 2 * time.Second
)

// Config says what a Dispatcher serves.
type Config struct {
	Store      Store                 // required
	Gateways   Gateways              // required
	Regions    Regions               // nil: there are no other regions
	Watchers   []Watcher             // of all updates
	Public     Pages                 // the pages that visitors may see in lists; nil: none
	Elapsed    func() time.Duration  // a clock that does not stop while the machine sleeps, see machine.NewStandstill
	Registerer prometheus.Registerer // of the metrics; nil: none
	Log        zerolog.Logger
}

// Dispatcher serves the buckets that Own sets.
type Dispatcher struct {
	cfg     Config
	want    chan []int         // the newest set of buckets to own; holds one, and a newer set replaces it
	again   chan chan struct{} // makes Run serve the buckets again; Run closes the value once the old service has ended
	still   *machine.Standstill
	top     top
	metrics metrics

	turn chan struct{} // holds one: the right to handle a publication, or to read a bucket and keep the result
	lost map[int]bool  // buckets that retry reads; only the holder of turn uses it

	// Only the holder of turn changes these maps, and holds mu for that; it reads them
	// without mu. sweep holds mu to read them.
	mu        sync.Mutex
	endpoints map[int]map[presence.Topic]presence.Incarnations // bucket -> topic -> gateways
	queues    map[string]*gatewayQueue                         // of the gateways with endpoints
}

// gatewayQueue has the updates that are not sent to one gateway yet. A newer update of a
// topic replaces an older one, so there are never more updates than the gateway has topics.
type gatewayQueue struct {
	refs int           // endpoints of this gateway; only the holder of turn uses it
	stop func()        // ends the sender
	wake chan struct{} // holds one: pending is not empty

	mu      sync.Mutex
	pending map[presence.Topic]presence.Update
}

// New returns a Dispatcher that does nothing until Run.
func New(cfg Config) *Dispatcher {
	return &Dispatcher{
		cfg:     cfg,
		want:    make(chan []int, 1),
		again:   make(chan chan struct{}),
		turn:    make(chan struct{}, 1),
		still:   machine.NewStandstill(standstillLimit, cfg.Elapsed),
		metrics: newMetrics(cfg.Registerer),
	}
}

// Own sets the buckets that this dispatcher serves. Any goroutine may call it. Two
// dispatchers may serve the same bucket for a while, since updates are absolute and have
// versions.
func (d *Dispatcher) Own(buckets []int) {
	wake.Replace(d.want, buckets)
}

// Run runs the dispatcher's goroutines. It returns when ctx and all of them have ended.
func (d *Dispatcher) Run(ctx context.Context) error {
	var watch sync.WaitGroup
	defer watch.Wait()
	watch.Go(func() { d.still.Run(ctx, func() { d.resumed(ctx) }) })

	var next []int
	for ctx.Err() == nil {
		// A copy, because next is set while the service still runs.
		buckets := next
		served, stop := context.WithCancel(ctx)
		var service sync.WaitGroup
		service.Go(func() { d.serve(served, buckets) })

		var ended chan struct{}
		select {
		case <-ctx.Done():
		case next = <-d.want:
		case ended = <-d.again:
		}

		// The old service ends before the new one begins, because both would own the same maps.
		stop()
		service.Wait()

		// resumed waits until nothing of before is sent any more.
		if ended != nil {
			close(ended)
			d.awaitResumed(ctx)
		}
	}

	return nil
}

// resumed has all buckets be read anew after a standstill of the process, and drops what waits to be sent. It returns
// when nothing of the old service is sent any more.
func (d *Dispatcher) resumed(ctx context.Context) {
	ended := make(chan struct{})
	select {
	case d.again <- ended:
		<-ended
	case <-ctx.Done():
	}
}

// awaitResumed waits until d.still reports no standstill any more, which is soon after resumed has returned. Until then
// a new service would drop all that it receives. If the process stands still once more meanwhile, resumed is called
// again, and has no service to wait for.
func (d *Dispatcher) awaitResumed(ctx context.Context) {
	for d.still.Ended() {
		select {
		case ended := <-d.again:
			close(ended)
		case <-time.After(time.Millisecond):
		case <-ctx.Done():
			return
		}
	}
}

// serve sends the buckets' updates until ctx ends. It begins without endpoints: the first
// publication of every bucket is a Lost, which makes it read the bucket.
func (d *Dispatcher) serve(ctx context.Context, buckets []int) {
	d.top.serve(buckets)
	for _, w := range d.cfg.Watchers {
		w.Serve(buckets)
	}

	if len(buckets) == 0 {
		<-ctx.Done()
		return
	}

	// Without mu, because nothing of a service runs yet.
	d.lost = map[int]bool{}
	d.endpoints = map[int]map[presence.Topic]presence.Incarnations{}
	d.queues = map[string]*gatewayQueue{}

	var senders sync.WaitGroup // the senders, sweep and retry
	defer senders.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()

	senders.Go(func() { d.sweep(ctx, buckets) })
	d.cfg.Store.Watch(ctx, buckets, func(p presence.Publication) { d.publication(ctx, &senders, p) })
}

// publication handles a publication of the store. After a Lost it reads the bucket again;
// meanwhile the store's feed drops publications rather than queue them, and reports that as
// the next Lost. If the bucket cannot be read, retry reads it and the other buckets go on.
// Publications of a bucket that is still lost are handled as well: they are true, and the
// read that follows replaces the endpoints and brings the updates that were missed.
func (d *Dispatcher) publication(ctx context.Context, senders *sync.WaitGroup, p presence.Publication) {
	// The publication may be from before the standstill, and resumed has all buckets be read anew.
	if d.still.Ended() {
		return
	}

	// There is no need to watch ctx: whoever has the turn is in a call of the store, which ends with ctx.
	d.turn <- struct{}{}
	defer func() { <-d.turn }()

	// Endpoints first, so that a gateway which has just attached gets the updates that came with its endpoint.
	d.mu.Lock()
	for _, e := range p.Endpoints {
		d.endpointLocked(ctx, senders, p.Bucket, e)
	}
	d.mu.Unlock()

	d.metrics.received.Add(float64(len(p.Updates)))
	d.enqueue(p.Bucket, p.Updates)
	d.publish(p.Bucket, p.Updates)

	// Watchers learn of it at once, although the read that follows may take long.
	if p.Lost {
		for _, w := range d.cfg.Watchers {
			w.Lost()
		}
	}

	// After a loss any page of the bucket may have changed.
	if d.cfg.Regions != nil && (len(p.Updates) > 0 || p.Lost) {
		d.cfg.Regions.Changed(p.Bucket)
	}

	if !p.Lost || d.lost[p.Bucket] { // lost: retry reads it, sooner or later
		return
	}

	// While a bucket is lost, its server may not answer: no other bucket waits for it here.
	if len(d.lost) == 0 && d.reread(ctx, senders, p.Bucket) == nil {
		return
	}

	d.lost[p.Bucket] = true
	senders.Go(func() { d.retry(ctx, senders, p.Bucket) })
}

// retry reads a lost bucket until that succeeds or ctx ends. It waits for its turn only when
// the bucket can be read, so that a server that does not answer delays no other bucket. A
// read outside the turn cannot be kept: it may lack endpoints that were published meanwhile.
// One goroutine per lost bucket runs it.
func (d *Dispatcher) retry(ctx context.Context, senders *sync.WaitGroup, bucket int) {
	for failed := 1; outage.Sleep(ctx, outage.Pause(failed)); failed++ {
		// A server that does not answer this call would hold up all buckets under turn.
		_, err := d.cfg.Store.Attached(ctx, bucket)
		if err == nil {
			d.turn <- struct{}{}
			err = d.reread(ctx, senders, bucket)
			if err == nil {
				delete(d.lost, bucket)
			}
			<-d.turn
		}
		if err == nil {
			return
		}

		if failed == 1 {
			level := outage.Level(errors.Is(err, presence.ErrUnavailable))
			d.cfg.Log.WithLevel(level).Err(err).Int("bucket", bucket).
				Msg("a bucket cannot be read; retrying (other buckets are not affected)")
		}
	}
}

// reread reads the bucket's endpoints and updates, since publications may have been lost.
// The caller holds turn.
func (d *Dispatcher) reread(ctx context.Context, senders *sync.WaitGroup, bucket int) error {
	d.metrics.reread.Inc()

	endpoints, err := d.cfg.Store.Attached(ctx, bucket)
	if err != nil {
		return err
	}

	d.mu.Lock()
	old := d.endpoints[bucket]
	// Built anew, because what was read does not say which endpoints are gone.
	d.endpoints[bucket] = map[presence.Topic]presence.Incarnations{}
	for _, e := range endpoints {
		d.endpointLocked(ctx, senders, bucket, e)
	}
	for topic, gateways := range old { // after the new endpoints, so that senders still needed keep running
		for gw := range gateways.All() {
			d.releaseLocked(gw)
		}
		delete(old, topic)
	}
	d.mu.Unlock()

	// A page without a gateway is still in the list of top pages, whose count may have changed as well.
	topics := d.top.unattached(bucket, d.endpoints[bucket])
	for topic := range d.endpoints[bucket] {
		topics = append(topics, topic)
	}
	if len(topics) == 0 {
		return nil
	}

	updates, err := d.cfg.Store.Updates(ctx, topics)
	if err != nil {
		return err
	}

	// The queues leave out what they have newer already.
	d.enqueue(bucket, updates)
	d.publish(bucket, updates)

	return nil
}

// publish passes updates to the parts of this process that need all of them.
func (d *Dispatcher) publish(bucket int, updates []presence.Update) {
	// The process may have stood still while the bucket was read, or this waited for its turn. Watchers could not tell
	// old updates from new ones, and resumed has all buckets be read anew.
	if d.still.Ended() {
		return
	}

	d.top.update(bucket, updates)

	for _, w := range d.cfg.Watchers {
		w.Received(updates)
	}
}

// endpointLocked adds or removes the endpoint.
func (d *Dispatcher) endpointLocked(ctx context.Context, senders *sync.WaitGroup, bucket int, e presence.Endpoint) {
	topics := d.endpoints[bucket]
	if topics == nil {
		topics = map[presence.Topic]presence.Incarnations{}
		d.endpoints[bucket] = topics
	}

	gateways := topics[e.Topic]
	// A publication may come twice, or be older than the read of the bucket: then this is known.
	if gateways.Has(e.Gateway) != e.Gone {
		return
	}

	if e.Gone {
		topics[e.Topic] = gateways.Without(e.Gateway)
		if topics[e.Topic] == (presence.Incarnations{}) {
			delete(topics, e.Topic)
		}
		d.releaseLocked(e.Gateway)
		return
	}

	topics[e.Topic] = gateways.With(e.Gateway)

	o := d.queues[e.Gateway]
	if o == nil {
		// The sender ends with the gateway's last endpoint, which may be long before the service.
		sctx, stop := context.WithCancel(ctx)
		o = &gatewayQueue{stop: stop, wake: make(chan struct{}, 1), pending: map[presence.Topic]presence.Update{}}
		d.queues[e.Gateway] = o
		senders.Go(func() { d.send(sctx, e.Gateway, o) })
	}

	o.refs++
}

// releaseLocked drops one endpoint of the gateway, and stops its sender after the last one.
func (d *Dispatcher) releaseLocked(gateway string) {
	o := d.queues[gateway]
	o.refs--
	if o.refs == 0 {
		o.stop()
		delete(d.queues, gateway)
	}
}

func (d *Dispatcher) enqueue(bucket int, updates []presence.Update) {
	for _, u := range updates {
		for gw := range d.endpoints[bucket][u.Topic].All() {
			// Never nil: a gateway has a queue as long as it has an endpoint.
			d.queues[gw].add(u)
		}
	}
}

// add queues u, unless the pending update of the topic is newer. Of two updates with the
// same version the later one wins, since its Stale is right.
func (o *gatewayQueue) add(u presence.Update) {
	o.mu.Lock()
	if old, ok := o.pending[u.Topic]; !ok || !old.Newer(u) {
		o.pending[u.Topic] = u
	}

	o.mu.Unlock()
	wake.Signal(o.wake)
}

// restore queues updates that could not be sent again, except where a newer update is
// pending.
func (o *gatewayQueue) restore(updates []presence.Update) {
	o.mu.Lock()
	for _, u := range updates {
		// If both have the same version, the pending one came later, so its Stale is right.
		if old, ok := o.pending[u.Topic]; !ok || u.Newer(old) {
			o.pending[u.Topic] = u
		}
	}

	o.mu.Unlock()
	wake.Signal(o.wake)
}

// take removes up to maxPush pending updates.
func (o *gatewayQueue) take() (updates []presence.Update) {
	o.mu.Lock()
	defer o.mu.Unlock()

	updates = make([]presence.Update, 0, min(len(o.pending), maxPush))
	for topic, u := range o.pending {
		if len(updates) == maxPush {
			return updates
		}
		updates = append(updates, u)
		delete(o.pending, topic)
	}

	// A map keeps the room of its greatest burst, and each later call would go through all of it.
	if len(updates) > fewPending {
		o.pending = map[presence.Topic]presence.Update{}
	}

	return updates
}

// send pushes updates to the gateway until ctx ends. One goroutine per gateway runs it.
// During a push, newer updates replace older ones in the queue.
func (d *Dispatcher) send(ctx context.Context, gateway string, o *gatewayQueue) {
	for failed := 0; ; {
		select {
		case <-ctx.Done():
			return
		case <-o.wake:
		}

		// One signal stands for all updates since the last one.
		for {
			updates := o.take()
			if len(updates) == 0 {
				break
			}

			// The updates may be from before the standstill; resumed ends this service.
			if d.still.Ended() {
				return
			}

			err := d.cfg.Gateways.PushUpdates(ctx, gateway, updates)
			if err == nil {
				d.metrics.pushed.Add(float64(len(updates)))
				d.metrics.batches.Observe(float64(len(updates)))
				failed = 0
				continue
			}

			if ctx.Err() != nil {
				return
			}

			failed++
			d.metrics.failed.Inc()
			// Once per outage; the metric counts every failure.
			if failed == 1 {
				d.cfg.Log.Warn().Err(err).Str("gateway", gateway).Msg("a gateway could not be reached; retrying")
			}

			// Before the pause, so that newer updates replace them meanwhile.
			o.restore(updates)
			outage.Sleep(ctx, outage.Pause(failed))
		}
	}
}
