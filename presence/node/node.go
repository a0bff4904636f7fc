// Package node implements a presence node, which counts the users of the partitions that
// it owns.
//
//	partition.go  the actor of a partition: mailbox, timer, replies
//	streams.go    joins, leaves and heartbeats from gateways, and holds
//	sessions.go   users, sessions and pages, and how they expire (wheel.go)
//	pagepresence.go  the pages of a session, each with the end of a grace or hold
//	takeover.go   how a new owner learns of all users
//	outbox.go     changes that the store does not have yet; writer.go writes them
//	manager.go    claims partitions, starts and stops their actors
//
// Only a partition's actor knows which users are present. A failing store never stops an
// actor: its changes wait in the outbox, where newer values replace older ones.
package node

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"

	"headcount/internal/machine"
	"headcount/internal/outage"
	"headcount/internal/wake"
	"headcount/presence"
	"headcount/presence/heartbeat"
)

var (
	// ErrConfig is wrapped by every error about settings that cannot work.
	ErrConfig = errors.New("bad setting")
	// ErrTooManyHolds means that the user already holds presence.MaxPages pages.
	ErrTooManyHolds = fmt.Errorf("%w holds: a user can hold at most %d pages", presence.ErrTooMany, presence.MaxPages)
)

// Replies carries a node's answers to gateways.
type Replies interface {
	SendReply(gateway string, r *heartbeat.Reply)
}

// Departures is notified of users that have left their last page. The actors call Departed, so it must not block.
type Departures interface{ Departed(u presence.User) }

// Config tunes a Node. A zero field takes its default.
type Config struct {
	Name            string        // this node's name in claims; required
	Partitions      int           // P; default presence.DefaultPartitions
	PresenceTimeout time.Duration // silence before a user is gone; required
	// Reply sends replies to gateways. The actors call it, so it must not block. A reply
	// may be lost, because gateways repeat their requests.
	Reply      Replies
	Arrivals   bool                  // report arrivals to the store
	LastSeen   presence.LastSeen     // where departures are remembered; nil: they are neither reported nor looked up
	Departures Departures            // optional
	Tick       func()                // called at every tick of the node's clock, which waits for it; may be nil
	Elapsed    func() time.Duration  // a clock that does not stop while the machine sleeps, see machine.NewStandstill
	Registerer prometheus.Registerer // registers the node's metrics; nil: there are none
	Log        zerolog.Logger
}

// Node owns partitions. Its methods may be called from any goroutine.
type Node struct {
	cfg     Config
	store   presence.Partitions
	batches prometheus.Histogram        // changes in one call to the store
	actors  []atomic.Pointer[partition] // by partition; nil: not owned
	ready   chan *partition             // partitions whose outbox is queued, each at most once
	want    chan []int                  // the newest set to own; holds one, a newer set replaces it
	trouble chan struct{}               // holds one: the manager must reconcile
	clock   clock

	gateways     gatewayList
	death        atomic.Int64        // when Died was last called, by the clock; 0: never
	handingOver  atomic.Bool         // HandOver was called
	standstill   *machine.Standstill // a suspension during which other nodes may have claimed partitions of this one
	wasSuspended atomic.Bool         // it is over, and the manager has not released the partitions yet

	users       atomic.Int64 // present on any page
	suspensions atomic.Int64 // suspensions noticed
	dropped     atomic.Int64 // beats dropped because a mailbox was full
	written     atomic.Int64 // changes in the store
	failures    atomic.Int64 // changes that had to be repeated
	fenced      atomic.Int64 // changes refused because of a newer owner's claim
	claimed     atomic.Int64 // partitions taken over
	counts      atomic.Int64 // counts in the store
	asked       atomic.Int64 // questions to gateways about users without heartbeats
	endedSilent atomic.Int64 // sessions that ended without heartbeats
}

// New returns a Node that does nothing until Run. It fails here, at start,
// rather than count wrongly later.
func New(store presence.Partitions, cfg Config) (*Node, error) {
	cfg.Partitions = cmp.Or(cfg.Partitions, presence.DefaultPartitions)

	switch {
	case cfg.Name == "":
		return nil, fmt.Errorf("node: %w: no name", ErrConfig)
	case cfg.Partitions < 1:
		return nil, fmt.Errorf("node: %w: %d partitions", ErrConfig, cfg.Partitions)
	case cfg.PresenceTimeout <= 0:
		return nil, fmt.Errorf("node: %w: presence timeout %s", ErrConfig, cfg.PresenceTimeout)
	case cfg.Reply == nil:
		return nil, fmt.Errorf("node: %w: no Reply", ErrConfig)
	}

	n := &Node{
		cfg:    cfg,
		store:  store,
		actors: make([]atomic.Pointer[partition], cfg.Partitions),
		// Twice the partitions: the outbox of an actor that was stopped may wait beside that of its successor.
		ready:   make(chan *partition, 2*cfg.Partitions),
		want:    make(chan []int, 1),
		trouble: make(chan struct{}, 1),
		batches: newBatches(),

		standstill: machine.NewStandstill(takeoverPossible, cfg.Elapsed),
	}

	// Gateways and Died read the clock before Run moves it for the first time.
	n.clock.last.Store(&clockReading{real: time.Now()})
	if cfg.Registerer != nil {
		cfg.Registerer.MustRegister(n.collectors()...)
	}

	return n, nil
}

// Own sets the partitions that this node is to own. Run makes the change in the
// background.
func (n *Node) Own(partitions []int) {
	wake.Replace(n.want, partitions)
}

// HandOver prepares the node for other nodes to take over all its partitions. From then
// on the node claims no partition and no session expires: a returning user's join may
// already go to the next owner, which puts every session on trial anyway.
func (n *Node) HandOver() { n.handingOver.Store(true) }

// Owns reports whether the partition's actor runs here.
func (n *Node) Owns(partition int) bool { return n.actors[partition].Load() != nil }

// Check makes every owned partition whose number is share modulo shares write to the
// store, even if it has no changes. A refused write shows that the partition has a newer
// owner, even where no user joins or leaves. A caller that may have missed a change of
// owners must check all partitions: Check(0, 1).
func (n *Node) Check(share, shares int) {
	for i := share; i < len(n.actors); i += shares {
		if p := n.actors[i].Load(); p != nil {
			// The outbox is all that Check and flush use, so the actor need not be asked.
			p.out.mu.Lock()
			p.out.check = true
			p.out.mu.Unlock()
			p.flush()
		}
	}
}

// Deliver hands a beat to its partition's actor, which owns the beat from then on.
// It never blocks: when the node does not own the partition or the mailbox is full, it
// drops the beat and returns false. The gateway repeats the ops and heartbeats in it.
func (n *Node) Deliver(b *heartbeat.Beat) bool {
	if b.Partition < 0 || b.Partition >= len(n.actors) {
		return false
	}

	// A sender that has not heard of a new owner yet still sends here; its repetitions go to the right node.
	p := n.actors[b.Partition].Load()
	if p == nil {
		return false
	}

	// The reader of the socket calls this, so one busy partition must not hold up the others.
	select {
	case p.mail <- (*beat)(b):
		return true
	default:
		n.dropped.Add(1)
		return false
	}
}

// Hold takes, renews or ends a hold, which lasts three presence timeouts. It returns when
// the store has the change, or with presence.ErrNotOwner, presence.ErrOvertaken,
// ErrTooManyHolds or ctx's error. After an error the change may still take effect, but only
// if the actor had begun it before ctx ended. A later start, for instance after a suspension
// of the process, could undo a newer request of the caller.
func (n *Node) Hold(ctx context.Context, change presence.HoldChange) error {
	p := n.actors[change.User.Partition(len(n.actors))].Load()
	if p == nil {
		return presence.ErrNotOwner
	}

	// The mailbox may have room although ctx has ended, and then ask chooses at random.
	if err := expired(ctx); err != nil {
		return err
	}

	done := make(chan error, 1)
	if err := p.ask(ctx, &holdRequest{change, ctx, done}); err != nil {
		return err
	}

	refused, err := await(ctx, p, done)
	return cmp.Or(err, refused)
}

// Run owns the node's goroutines. It claims the partitions that Own asks for and
// runs the actors and the writer. It returns when ctx and all goroutines have ended.
func (n *Node) Run(ctx context.Context) error {
	var wg sync.WaitGroup
	defer wg.Wait()

	wg.Go(func() { n.write(ctx) })

	// The time since New was startup, not a suspension.
	n.clock.last.Store(&clockReading{real: time.Now(), at: n.clock.now()})
	wg.Go(func() { n.clock.run(ctx, n.cfg.Tick, n.countSuspension) })
	wg.Go(func() { n.standstill.Run(ctx, n.resumed) })

	m := manager{n: n, wg: &wg, owned: map[int]*ownership{}, fenced: map[int]fence{}, unverified: map[int]bool{}}

	poll := time.NewTicker(generationPoll)
	defer poll.Stop()

	// The timer runs only after a failure, or while partitions are left out.
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
		// A store that just failed would only fail once more.
		if err == nil && due {
			err = m.checkComplete(ctx)
		}

		if err != nil && ctx.Err() == nil {
			failed++
			pause := outage.Pause(failed)
			level := outage.Level(errors.Is(err, presence.ErrUnavailable))
			n.cfg.Log.WithLevel(level).Err(err).Stringer("retry_in", pause.Round(time.Millisecond)).
				Msg("partitions could not be claimed or checked")

			retry.Reset(pause)
		} else {
			failed = 0
			if m.retryIn > 0 {
				retry.Reset(m.retryIn)
			}
		}
	}
}

// StopClock stops the node's time: no grace or timeout ends any more. A process that is alone calls it when it begins
// to shut down. Its clients cannot reconnect before the next process runs, so that one must find all users present
// whose connections this process closes.
func (n *Node) StopClock() { n.clock.stop() }

// resumed makes the manager release all partitions after a suspension.
func (n *Node) resumed() {
	// Set before the signal, because the manager that it wakes swaps it back.
	n.wasSuspended.Store(true)
	wake.Signal(n.trouble)
}

// hasStoodStill reports whether the process was suspended, and may still have the partitions that it owned before.
func (n *Node) hasStoodStill() bool {
	// Ask in this order: resumed sets wasSuspended before Ended becomes false.
	return n.standstill.Ended() || n.wasSuspended.Load()
}

// countSuspension counts a suspension of the process, for which the clock left out d.
func (n *Node) countSuspension(d time.Duration) {
	// One line is enough; headcount_suspensions_total counts the others.
	first := n.suspensions.Add(1) == 1
	if first {
		n.cfg.Log.Warn().Stringer("for", d.Round(time.Millisecond)).
			Msg("the process was suspended; the deadlines of the users that it counts move by that time. See whether " +
				"the machine sleeps or lacks CPU; headcount_suspensions_total counts further suspensions")
	}
}
