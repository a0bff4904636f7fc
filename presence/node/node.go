// Package node is a presence node. It runs one actor for every partition that it
// owns. Only the actor knows who is present. The actor removes users who fall
// silent, and hands changes to the node's one writer, which writes them to the store.
//
// A failing store never stops an actor: the changes that the store lacks wait in
// the partition's outbox, where newer values replace older ones.
package node

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"

	"headcount/internal/outage"
	"headcount/presence"
	"headcount/presence/heartbeat"
)

var (
	// ErrConfig is in every error about settings that cannot work.
	ErrConfig = errors.New("bad setting")
	// ErrNotOwner says that this node does not own the user's partition now.
	ErrNotOwner = errors.New("this node does not own the partition")
	// ErrTooManyHolds says that the user holds presence.MaxPages pages already.
	ErrTooManyHolds = fmt.Errorf("%w holds: a user can hold at most %d pages", presence.ErrTooMany, presence.MaxPages)
)

// Replies carries a node's answers to gateways.
type Replies interface {
	SendReply(gateway string, r *heartbeat.Reply)
}

// Config tunes a Node. A zero field takes its default.
type Config struct {
	Name            string        // this node's name in claims; required
	Partitions      int           // P; default presence.DefaultPartitions
	PresenceTimeout time.Duration // silence before a user is gone; default 7s
	// Reply answers a gateway. The actors call it, so it must not block. A gateway
	// asks again when a reply is lost.
	Reply      Replies
	Arrivals   bool                  // tell the store who arrives
	Tick       func()                // called at every tick of the node's clock, which stands still meanwhile; nil: not called
	Registerer prometheus.Registerer // registers the node's metrics; nil: there are none
	Log        zerolog.Logger
}

// Node owns partitions. Its methods may be called from any goroutine.
type Node struct {
	cfg     Config
	store   presence.Partitions
	batches prometheus.Histogram        // changes in one call to the store
	actors  []atomic.Pointer[partition] // by partition; nil: not owned
	ready   chan *partition             // partitions with something in their outbox: at most one entry each
	want    chan []int                  // the newest set to own; holds one, a newer replaces it
	trouble chan struct{}               // holds one: the manager must reconcile
	clock   clock

	gateways     gatewayList
	death        atomic.Int64 // when Died was called last, on the clock; 0: never
	handingOver  atomic.Bool  // HandOver was called
	wasSuspended atomic.Bool  // the process stood still: other nodes may have its partitions

	users       atomic.Int64 // present on any page
	suspensions atomic.Int64 // suspensions noticed
	dropped     atomic.Int64 // beats that found a full mailbox
	written     atomic.Int64 // changes in the store
	failures    atomic.Int64 // changes that had to be repeated
	fenced      atomic.Int64 // changes that a newer owner's claim refused
	claimed     atomic.Int64 // partitions taken over
	counts      atomic.Int64 // counts in the store
	asked       atomic.Int64 // questions to gateways about users without heartbeats
	endedSilent atomic.Int64 // sessions that ended without heartbeats
}

// New returns a Node that does nothing until Run. It fails here, at start,
// rather than count wrongly later.
func New(store presence.Partitions, cfg Config) (*Node, error) {
	cfg.Partitions = cmp.Or(cfg.Partitions, presence.DefaultPartitions)
	cfg.PresenceTimeout = cmp.Or(cfg.PresenceTimeout, 7*time.Second)
	switch {
	case cfg.Name == "":
		return nil, fmt.Errorf("node: %w: it has no name", ErrConfig)
	case cfg.Partitions < 1:
		return nil, fmt.Errorf("node: %w: %d partitions", ErrConfig, cfg.Partitions)
	case cfg.PresenceTimeout < 0:
		return nil, fmt.Errorf("node: %w: presence timeout %s", ErrConfig, cfg.PresenceTimeout)
	case cfg.Reply == nil:
		return nil, fmt.Errorf("node: %w: nobody to reply to", ErrConfig)
	}
	n := &Node{
		cfg:     cfg,
		store:   store,
		actors:  make([]atomic.Pointer[partition], cfg.Partitions),
		ready:   make(chan *partition, 2*cfg.Partitions),
		want:    make(chan []int, 1),
		trouble: make(chan struct{}, 1),
		batches: newBatches(),
	}
	n.clock.last.Store(&clockReading{real: time.Now()})
	if cfg.Registerer != nil {
		cfg.Registerer.MustRegister(n.collectors()...)
	}
	return n, nil
}

// Own says which partitions this node is to own from now on. The change is
// made in the background, by Run.
func (n *Node) Own(partitions []int) {
	for {
		select {
		case n.want <- partitions:
			return
		default:
		}
		select {
		case <-n.want:
		default:
		}
	}
}

// HandOver says that other nodes are about to take over all partitions. From then on
// nobody's time ends here: a return may be on its way to the next owner, which gives
// everybody time anew. And this node takes no partition any more, also none back.
func (n *Node) HandOver() { n.handingOver.Store(true) }

// Owns reports whether the partition's actor is running here.
func (n *Node) Owns(partition int) bool { return n.actors[partition].Load() != nil }

// Check proves claims to the store by a write, which may be empty. It proves the
// claims of share number share of the partitions, out of shares. The node so gives
// up a partition that has a newer owner, even when no user comes or goes there. A
// caller that may have missed a change of owners must check all partitions.
func (n *Node) Check(share, shares int) {
	for i := share; i < len(n.actors); i += shares {
		if p := n.actors[i].Load(); p != nil {
			p.out.mu.Lock()
			p.out.check = true
			p.out.mu.Unlock()
			p.flush()
		}
	}
}

// Deliver hands a beat to its partition's actor, which owns the beat from then on.
// It never blocks: it drops a beat when the node does not own the partition or the
// mailbox is full, and returns false. The sender repeats what matters.
func (n *Node) Deliver(b *heartbeat.Beat) bool {
	if b.Partition < 0 || b.Partition >= len(n.actors) {
		return false
	}
	p := n.actors[b.Partition].Load()
	if p == nil {
		return false
	}
	select {
	case p.mail <- b:
		return true
	default:
		n.dropped.Add(1)
		return false
	}
}

// Hold takes or renews the user's hold on the page, which lasts three presence
// timeouts; unless on, it ends the hold. It returns when the store has the change,
// or with ErrNotOwner, ErrTooManyHolds or ctx's error. After an error the change
// may have been made all the same; but once ctx has ended no change begins: whoever
// gave up may have changed their mind since, and the process may have stood still.
func (n *Node) Hold(ctx context.Context, u presence.User, page string, on bool) error {
	p := n.actors[u.Partition(len(n.actors))].Load()
	if p == nil {
		return ErrNotOwner
	}
	if err := expired(ctx); err != nil {
		return err
	}
	done := make(chan error, 1)
	select {
	case p.mail <- &holdCall{ctx, u, page, on, done}:
	case <-p.ended:
		return ErrNotOwner
	case <-ctx.Done():
		return ctx.Err()
	}
	select {
	case err := <-done:
		return err
	case <-p.ended:
		return ErrNotOwner
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Run owns the node's goroutines. It claims the partitions that Own asks for and
// runs the actors and the writer. It returns when ctx and all goroutines have ended.
func (n *Node) Run(ctx context.Context) error {
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() { n.write(ctx) })
	n.clock.last.Store(&clockReading{time.Now(), n.clock.now()}) // since New the process opened its stores: it was not suspended
	wg.Go(func() { n.clock.run(ctx, n.cfg.Tick, n.suspended) })

	m := manager{n: n, wg: &wg, owned: map[int]*ownership{}, fenced: map[int]fence{}, unverified: map[int]bool{}}
	defer m.stopAll()
	poll := time.NewTicker(generationPoll)
	defer poll.Stop()
	retry := time.NewTimer(time.Hour)
	retry.Stop()
	defer retry.Stop()
	for failed := 0; ; {
		due := false
		select {
		case <-ctx.Done():
			return nil
		case m.want = <-n.want:
		case <-n.trouble:
		case <-poll.C:
			due = true
		case <-retry.C:
		}
		err := m.reconcile(ctx)
		if err == nil && due {
			err = m.checkComplete(ctx)
		}
		if err != nil && ctx.Err() == nil {
			failed++
			pause := backoff(failed)
			n.cfg.Log.WithLevel(outage.Level(errors.Is(err, presence.ErrUnavailable))).Err(err).Stringer("retry_in", pause.Round(time.Millisecond)).Msg("partitions could not be claimed or looked after")
			retry.Reset(pause)
		} else {
			failed = 0
			if m.retryIn > 0 {
				retry.Reset(m.retryIn)
			}
		}
	}
}

// alert has the manager reconcile at once.
func (n *Node) alert() {
	select {
	case n.trouble <- struct{}{}:
	default:
	}
}

// backoff is the pause after the nth failure in a row: 100 ms doubled up to
// 2 s, with full jitter above half of it.
func backoff(n int) time.Duration {
	d := min(100*time.Millisecond<<min(n-1, 10), 2*time.Second)
	return d/2 + rand.N(d/2)
}

// suspended counts that the process stood still for d. The clock calls it.
func (n *Node) suspended(d time.Duration) {
	if d > takeoverPossible {
		n.wasSuspended.Store(true)
		n.alert()
	}
	if n.suspensions.Add(1) == 1 {
		n.cfg.Log.Warn().Stringer("for", d.Round(time.Millisecond)).Msg("the process was suspended: sessions are given that time back")
	}
}
