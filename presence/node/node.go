// Package node is a presence node: for every partition it owns it runs one
// actor that alone knows who is present, removes who falls silent, and hands
// what changed to the one writer, which puts it into the store.
//
// A failing store never stops an actor: what it must still learn waits in the
// partition's outbox, where newer values replace older ones.
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

	"github.com/rs/zerolog"

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

// Config tunes a Node. A zero field takes its default.
type Config struct {
	Name            string        // this node's, for claims; required
	Partitions      int           // P; default presence.DefaultPartitions
	PresenceTimeout time.Duration // silence before a user is gone; default 7s
	// Reply answers a gateway. It is called by the actors and must not block; a
	// reply that is lost is asked for again.
	Reply func(gateway string, r *heartbeat.Reply)
	Log   zerolog.Logger
}

// writeBatch bounds the members and counts that one call to the store carries,
// so that one busy partition does not make all others wait for long.
const writeBatch = 16384

// Node owns partitions. Its methods may be called from any goroutine.
type Node struct {
	cfg     Config
	store   presence.Partitions
	actors  []atomic.Pointer[partition] // by partition; nil: not owned
	ready   chan *partition             // partitions with something in their outbox: at most one entry each
	want    chan []int                  // the newest set to own; holds one, a newer replaces it
	trouble chan struct{}               // holds one: the manager must look
	clock   clock

	users    atomic.Int64 // present on any page
	gaps     atomic.Int64 // suspensions noticed
	dropped  atomic.Int64 // beats that found a full mailbox
	written  atomic.Int64 // changes in the store
	failures atomic.Int64 // changes that had to be repeated
	losses   atomic.Int64 // losses of data in the store that were made good
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
	}
	n.clock.last.Store(&reading{real: time.Now()})
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

// Owns reports whether the partition's actor is running here.
func (n *Node) Owns(partition int) bool { return n.actors[partition].Load() != nil }

// Check has claims proved to the store by a write, if only of nothing: those of
// one share of the partitions, of that many shares. A partition that has a newer
// owner is given up, also when nobody comes or goes there. Whoever may have
// missed that another node owned its partitions for a while must ask for all.
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

// Deliver hands a beat to its partition's actor, which owns it from then on.
// It never blocks: a beat for a partition that is not owned, or whose mailbox
// is full, is dropped, and its sender repeats what mattered.
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
// timeouts, or ends it. It returns when the store has it, or with ErrNotOwner,
// ErrTooManyHolds or ctx's error; the hold may have been taken all the same.
func (n *Node) Hold(ctx context.Context, u presence.User, page string, on bool) error {
	p := n.actors[u.Partition(len(n.actors))].Load()
	if p == nil {
		return ErrNotOwner
	}
	done := make(chan error, 1)
	select {
	case p.mail <- &holdCall{u, page, on, done}:
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

// Run owns the node's goroutines: it claims what Own asks for, runs the actors
// and the writer, and returns when ctx has ended and all of them have.
func (n *Node) Run(ctx context.Context) error {
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() { n.write(ctx) })
	wg.Go(func() { n.clock.run(ctx, n.suspended) })

	m := manager{n: n, wg: &wg, owned: map[int]*ownership{}, fenced: map[int]fence{}}
	defer m.stopAll()
	poll := time.NewTicker(generationPoll)
	defer poll.Stop()
	retry := time.NewTimer(time.Hour)
	retry.Stop()
	defer retry.Stop()
	for failed := 0; ; {
		select {
		case <-ctx.Done():
			return nil
		case m.want = <-n.want:
		case <-n.trouble:
		case <-poll.C:
		case <-retry.C:
		}
		if err := m.reconcile(ctx); err != nil && ctx.Err() == nil {
			failed++
			pause := backoff(failed)
			n.cfg.Log.Warn().Err(err).Stringer("retry_in", pause.Round(time.Millisecond)).Msg("partitions could not be claimed")
			retry.Reset(pause)
		} else {
			failed = 0
			if m.later > 0 {
				retry.Reset(m.later)
			}
		}
	}
}

const (
	// generationPoll is how soon a loss of data in the store is noticed that no
	// write runs into.
	generationPoll = 2 * time.Second
	// fencedPause keeps two nodes that both think a partition theirs from taking
	// it from each other all the time: by then they have agreed on the members.
	fencedPause = time.Second
)

// manager owns the set of actors; it lives in Run's goroutine.
type manager struct {
	n      *Node
	wg     *sync.WaitGroup
	want   []int
	owned  map[int]*ownership
	fenced map[int]fence // partitions lost to another owner
	later  time.Duration // what is left alone now can be claimed then; 0: nothing is
}

// fence is the last time a partition was lost, and until when it is left alone.
type fence struct{ at, until time.Time }

// fence notes that a partition was lost. The first time it is claimed again
// soon, if it is still wanted: usually a claim of a node that had not heard of
// this one yet came late.
func (m *manager) fence(id int) {
	now := time.Now()
	pause := fencedPause / 5
	if now.Sub(m.fenced[id].at) < 5*fencedPause {
		pause = fencedPause
	}
	m.fenced[id] = fence{at: now, until: now.Add(pause)}
}

type ownership struct {
	p    *partition
	stop context.CancelFunc
}

func (m *manager) stopAll() {
	for _, o := range m.owned {
		o.stop()
	}
}

// reconcile makes the actors what they should be: those not wanted, or fenced,
// end; those whose store lost data claim again; missing ones begin.
func (m *manager) reconcile(ctx context.Context) error {
	n := m.n
	wanted := make(map[int]bool, len(m.want))
	for _, id := range m.want {
		wanted[id] = true
	}
	taken := 0 // partitions wanted here that another node has claimed
	for id, o := range m.owned {
		fenced := n.actors[id].Load() != o.p
		if fenced {
			m.fence(id)
		}
		if fenced && wanted[id] {
			taken++
		}
		if fenced || !wanted[id] {
			n.actors[id].CompareAndSwap(o.p, nil)
			o.stop()
			delete(m.owned, id)
		}
	}
	if taken > 0 {
		n.cfg.Log.Warn().Int("partitions", taken).Msg("another node has claimed partitions of this one; giving them up until the owners are agreed")
	}
	if len(m.want) == 0 {
		return nil
	}
	generation, err := n.store.Generation(ctx)
	if err != nil {
		return fmt.Errorf("node: store generation: %w", err)
	}
	if err := m.reclaim(ctx, generation); err != nil {
		return err
	}
	if len(n.want) > 0 {
		return nil // there is a newer set: nothing is taken from others by an older one
	}
	return m.begin(ctx)
}

// reclaim takes the partitions anew whose claim is of another generation, and
// has their actors write everything.
func (m *manager) reclaim(ctx context.Context, generation uint64) error {
	var ids []int
	for id, o := range m.owned {
		if o.p.out.lost(generation) {
			ids = append(ids, id)
		}
	}
	if len(ids) == 0 {
		return nil
	}
	m.n.losses.Add(1)
	m.n.cfg.Log.Warn().Int("partitions", len(ids)).Msg("the store has lost data; writing everything again")
	claims, err := m.n.store.Claim(ctx, m.n.cfg.Name, ids, true)
	if err != nil {
		return fmt.Errorf("node: claim %d partitions again: %w", len(ids), err)
	}
	// Usually there is nothing. But if this node was out of touch another may have
	// owned the partitions meanwhile, and have written pages unknown here.
	snaps, err := m.n.store.Load(ctx, claims)
	if err != nil {
		return fmt.Errorf("node: load %d partitions again: %w", len(ids), err)
	}
	for i, c := range claims {
		p := m.owned[c.Partition].p
		select {
		case p.mail <- &reclaimed{c, snaps[i]}:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

// begin claims the partitions that are wanted and not owned, and starts their actors.
func (m *manager) begin(ctx context.Context) error {
	var ids []int
	m.later = 0
	for _, id := range m.want {
		if m.owned[id] != nil {
			continue
		}
		if left := time.Until(m.fenced[id].until); left > 0 {
			m.later = max(m.later, left)
		} else {
			ids = append(ids, id)
		}
	}
	if len(ids) == 0 {
		return nil
	}
	claims, err := m.n.store.Claim(ctx, m.n.cfg.Name, ids, false)
	if err != nil {
		return fmt.Errorf("node: claim %d partitions: %w", len(ids), err)
	}
	snaps, err := m.n.store.Load(ctx, claims)
	if err != nil {
		return fmt.Errorf("node: load %d partitions: %w", len(ids), err)
	}
	for i, c := range claims {
		p := newPartition(m.n, c)
		p.adopt(snaps[i])
		actx, stop := context.WithCancel(ctx)
		m.owned[c.Partition] = &ownership{p, stop}
		m.n.actors[c.Partition].Store(p)
		m.wg.Go(func() { p.run(actx) })
	}
	return nil
}

// lost reports whether the claim is of another generation, or a write has found
// it worthless; then nothing is written any more until it is made again.
func (o *outbox) lost(generation uint64) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.blocked = o.blocked || o.claim.Generation != generation
	return o.blocked
}

// write is the one writer. While a call to the store is under way, changes
// gather in the outboxes, so the batches are as large as the store is slow and
// a lone change waits for nothing.
func (n *Node) write(ctx context.Context) {
	seq := uint64(0)
	failed := 0
	for {
		var p *partition
		select {
		case <-ctx.Done():
			return
		case p = <-n.ready:
		}
		var batch []*partition
		var changes []presence.Change
		for size := 0; p != nil; {
			seq++
			if c, ok := p.out.take(seq); ok {
				batch, changes = append(batch, p), append(changes, c)
				if size += len(c.Members) + len(c.Counts); size >= writeBatch {
					break
				}
			}
			select {
			case p = <-n.ready:
			default:
				p = nil
			}
		}
		if len(changes) == 0 {
			continue
		}
		again := n.outcomes(batch, changes, n.store.Write(ctx, changes))
		if len(again) == 0 {
			failed = 0
			continue
		}
		failed++
		select {
		case <-ctx.Done():
			return
		case <-time.After(backoff(failed)):
		}
		for _, p := range again {
			n.ready <- p
		}
	}
}

// outcomes tells the actors what became of their changes, and returns those
// whose change must be repeated.
func (n *Node) outcomes(batch []*partition, changes []presence.Change, outcomes []presence.Outcome) (again []*partition) {
	for i, o := range outcomes {
		p := batch[i]
		switch {
		case o.Err == nil:
			n.written.Add(1)
			select {
			case p.mail <- &stored{gen: p.out.landed(), counts: o.Counts}:
			case <-p.ended:
			}
		case errors.Is(o.Err, presence.ErrFenced) && !p.out.superseded(changes[i]):
			n.actors[changes[i].Partition].CompareAndSwap(p, nil)
			n.alert()
		case errors.Is(o.Err, presence.ErrFenced) || errors.Is(o.Err, presence.ErrLost):
			n.failures.Add(1)
			p.out.restore(changes[i], true)
			n.alert()
		default:
			n.failures.Add(1)
			p.out.restore(changes[i], false)
			again = append(again, p)
		}
	}
	return again
}

// alert has the manager look at once.
func (n *Node) alert() {
	select {
	case n.trouble <- struct{}{}:
	default:
	}
}

// take empties the outbox into a change and marks it as under way; there is
// none while a claim must be made again.
func (o *outbox) take(seq uint64) (presence.Change, bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.queued = false
	if o.blocked {
		return presence.Change{}, false
	}
	c := presence.Change{
		Claim:    o.claim,
		Reset:    o.reset,
		Complete: o.complete,
		Sequence: seq,
		Members:  make([]presence.MemberChange, 0, len(o.members)),
		Counts:   make([]presence.PageUsers, 0, len(o.counts)),
	}
	for _, m := range o.members {
		c.Members = append(c.Members, m)
	}
	for page, users := range o.counts {
		c.Counts = append(c.Counts, presence.PageUsers{Page: page, Users: users})
	}
	clear(o.members)
	clear(o.counts)
	o.reset, o.complete, o.check = false, false, false
	o.gen++
	o.flying = true
	return c, true
}

// landed notes that what was under way is in the store, and returns its generation.
func (o *outbox) landed() uint64 {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.flying = false
	return o.gen - 1
}

// superseded reports whether c's claim is this node's own former one, so that
// it was fenced by its successor.
func (o *outbox) superseded(c presence.Change) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.blocked || o.claim != c.Claim
}

// restore puts back what could not be written, but for what is newer by now.
// Unless the claim is lost, the outbox counts as queued: the writer repeats it.
func (o *outbox) restore(c presence.Change, lost bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, m := range c.Members {
		if _, newer := o.members[memberKey{m.User, m.Page}]; !newer {
			o.members[memberKey{m.User, m.Page}] = m
		}
	}
	for _, pu := range c.Counts {
		if _, newer := o.counts[pu.Page]; !newer {
			o.counts[pu.Page] = pu.Users
		}
	}
	if o.claim == c.Claim {
		o.reset = o.reset || c.Reset
		o.blocked = o.blocked || lost
	}
	o.complete = o.complete || c.Complete
	o.queued, o.flying = !lost, false
}

// empty reports whether there is nothing to write; under mu.
func (o *outbox) empty() bool {
	return len(o.members) == 0 && len(o.counts) == 0 && !o.reset && !o.complete && !o.check
}

// backoff is the pause after the nth failure in a row: 100 ms doubled up to
// 2 s, with full jitter above half of it.
func backoff(n int) time.Duration {
	d := min(100*time.Millisecond<<min(n-1, 10), 2*time.Second)
	return d/2 + rand.N(d/2)
}

// suspended is told by the clock that the process stood still.
func (n *Node) suspended(d time.Duration) {
	if n.gaps.Add(1) == 1 {
		n.cfg.Log.Warn().Stringer("for", d.Round(time.Millisecond)).Msg("the process was suspended: sessions are given that time back")
	}
}
