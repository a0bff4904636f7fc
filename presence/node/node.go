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
	"slices"
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
	PresenceTimeout time.Duration // silence before a user is gone; required
	// Reply answers a gateway. The actors call it, so it must not block. A gateway
	// asks again when a reply is lost.
	Reply      Replies
	Arrivals   bool                  // tell the store who arrives
	Tick       func()                // called at every tick of the node's clock, which stands still meanwhile; nil: not called
	Registerer prometheus.Registerer // registers the node's metrics; nil: there are none
	Log        zerolog.Logger
}

// writeBatch bounds the members and counts in one call to the store, so that one
// busy partition does not make all others wait for long.
const writeBatch = 16384

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

	gateways waited
	death    atomic.Int64 // when Died was called last, on the clock; 0: never
	handing  atomic.Bool  // HandOver was called
	stood    atomic.Bool  // the process stood still: other nodes may have its partitions

	users    atomic.Int64 // present on any page
	gaps     atomic.Int64 // suspensions noticed
	dropped  atomic.Int64 // beats that found a full mailbox
	written  atomic.Int64 // changes in the store
	failures atomic.Int64 // changes that had to be repeated
	fenced   atomic.Int64 // changes that a newer owner's claim refused
	claimed  atomic.Int64 // partitions taken over
	counts   atomic.Int64 // counts in the store
	missing  atomic.Int64 // questions to gateways about users without heartbeats
	silent   atomic.Int64 // sessions that ended without heartbeats
}

// New returns a Node that does nothing until Run. It fails here, at start,
// rather than count wrongly later.
func New(store presence.Partitions, cfg Config) (*Node, error) {
	cfg.Partitions = cmp.Or(cfg.Partitions, presence.DefaultPartitions)
	switch {
	case cfg.Name == "":
		return nil, fmt.Errorf("node: %w: it has no name", ErrConfig)
	case cfg.Partitions < 1:
		return nil, fmt.Errorf("node: %w: %d partitions", ErrConfig, cfg.Partitions)
	case cfg.PresenceTimeout <= 0:
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
	n.clock.last.Store(&reading{real: time.Now()})
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
func (n *Node) HandOver() { n.handing.Store(true) }

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
	if err := over(ctx); err != nil {
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
	n.clock.last.Store(&reading{time.Now(), n.clock.now()}) // since New the process opened its stores: it was not suspended
	wg.Go(func() { n.clock.run(ctx, n.cfg.Tick, n.suspended) })

	m := manager{n: n, wg: &wg, owned: map[int]*ownership{}, fenced: map[int]fence{}, unseen: map[int]bool{}}
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
			err = m.look(ctx)
		}
		if err != nil && ctx.Err() == nil {
			failed++
			pause := backoff(failed)
			n.cfg.Log.WithLevel(outage.Level(errors.Is(err, presence.ErrUnavailable))).Err(err).Stringer("retry_in", pause.Round(time.Millisecond)).Msg("partitions could not be claimed or looked after")
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
	// claimGroup is how many partitions are claimed and loaded in one step.
	claimGroup = 16
	// generationPoll is how soon the node notices that the store lost data when no
	// write finds out.
	generationPoll = 2 * time.Second
	// fencedPause keeps two nodes that both believe they own a partition from
	// taking it from each other all the time: after the pause they agree on the members.
	fencedPause = time.Second
)

// manager owns the set of actors; it lives in Run's goroutine.
type manager struct {
	n      *Node
	wg     *sync.WaitGroup
	want   []int
	owned  map[int]*ownership
	fenced map[int]fence // partitions lost to another owner
	unseen map[int]bool  // partitions that have not been seen complete since they were claimed
	later  time.Duration // until the partitions left alone now can be claimed; 0: there are none
}

// fence says when a partition was last lost, and until when the node leaves it alone.
type fence struct{ at, until time.Time }

// fence notes that the partition was lost. After the first loss the node claims
// the partition again soon, if it is still wanted: usually the other node claimed
// it late, before it had heard of this node.
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

// reconcile brings the actors in line with what is wanted. It ends actors that are
// fenced or not wanted, claims again for those whose store lost data, and starts
// missing ones.
func (m *manager) reconcile(ctx context.Context) error {
	n := m.n
	if n.clock.behind() > standstill {
		return nil // the clock is about to notice, and calls again
	}
	if n.stood.Swap(false) {
		m.giveUp()
	}
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
	if len(n.want) > 0 || n.handing.Load() {
		return nil // there is a newer set, or is to be none: an older set takes nothing from other nodes
	}
	return m.begin(ctx)
}

// giveUp ends all actors. What they know is old, and another node may have owned their
// partitions: claimed again, even after a loss of data, they would overwrite what it wrote.
func (m *manager) giveUp() {
	for id, o := range m.owned {
		m.n.actors[id].CompareAndSwap(o.p, nil)
		o.stop()
		delete(m.owned, id)
	}
}

// reclaim claims the partitions again whose claim is of another generation, and
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
	m.n.cfg.Log.Info().Int("partitions", len(ids)).Msg("the store was restarted, replaced or emptied; writing all of presence again, whatever it kept")
	for group := range slices.Chunk(ids, claimGroup) {
		if err := m.reclaimGroup(ctx, group); err != nil {
			return err
		}
	}
	return nil
}

func (m *manager) reclaimGroup(ctx context.Context, ids []int) error {
	claims, err := m.n.store.Claim(ctx, m.n.cfg.Name, ids, true)
	if err != nil {
		return fmt.Errorf("node: claim %d partitions again: %w", len(ids), err)
	}
	claims = slices.DeleteFunc(claims, func(c presence.Claim) bool {
		if c.Epoch == 0 { // this node was cut off, and another one owns the partition
			m.n.actors[c.Partition].Store(nil)
			m.n.alert()
		}
		return c.Epoch == 0
	})
	// Usually the store has nothing. But one that came back with an older memory has pages
	// that are unknown here.
	snaps, err := m.n.store.Load(ctx, claims)
	if err != nil {
		return fmt.Errorf("node: load %d partitions again: %w", len(ids), err)
	}
	for i, c := range claims {
		p := m.owned[c.Partition].p
		m.unseen[c.Partition] = true
		p.out.expect(c)
		select {
		case p.mail <- &reclaimed{c, snaps[i]}:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

// begin claims the partitions that are wanted and not owned, and starts their
// actors, a group at a time: the first actors serve while another node still owns
// the last partitions. begin returns after generationPoll, so that Run can notice a
// loss of data and a newer set; Run then calls it again at once.
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
	start := time.Now()
	for group := range slices.Chunk(ids, claimGroup) {
		if err := m.beginGroup(ctx, group); err != nil {
			return err
		}
		if ids = ids[len(group):]; len(ids) == 0 {
			break
		}
		if took := time.Since(start); took > generationPoll {
			m.n.cfg.Log.Info().Int("partitions", len(m.owned)).Int("of", len(m.want)).Int64("users", m.n.users.Load()).
				Msg("partitions are being taken over")
			m.later = time.Millisecond
			return nil
		}
		if len(m.n.want) > 0 || m.n.handing.Load() {
			return nil
		}
	}
	return nil
}

func (m *manager) beginGroup(ctx context.Context, ids []int) error {
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
		m.owned[c.Partition], m.unseen[c.Partition] = &ownership{p, stop}, true
		m.n.actors[c.Partition].Store(p)
		m.n.claimed.Add(1)
		m.wg.Go(func() { p.run(actx) })
	}
	return nil
}

// look asks the store which partitions are not complete, and has their actors
// complete them again. It looks through the whole store until a partition has been
// seen complete once, and then through a share of the store at a time.
func (m *manager) look(ctx context.Context) error {
	ask := func(ids []int, everywhere bool) (missing map[int]bool, err error) {
		if len(ids) == 0 {
			return nil, nil
		}
		list, err := m.n.store.Incomplete(ctx, ids, everywhere)
		if err != nil {
			return nil, fmt.Errorf("node: look for partitions that are not complete: %w", err)
		}
		missing = make(map[int]bool, len(list))
		for _, id := range list {
			missing[id] = true
			select {
			case m.owned[id].p.mail <- &incomplete{}:
			default: // the actor is busy: the next look finds the partition again
			}
		}
		return missing, nil
	}
	var fresh, known []int
	for id := range m.owned {
		if m.unseen[id] {
			fresh = append(fresh, id)
		} else {
			known = append(known, id)
		}
	}
	missing, err := ask(fresh, true)
	if err != nil {
		return err
	}
	for id := range m.unseen {
		if m.owned[id] == nil || !missing[id] {
			delete(m.unseen, id)
		}
	}
	_, err = ask(known, false)
	return err
}

// write is the one writer. While a call to the store is under way, changes gather
// in the outboxes: a slower store gets larger batches, and a lone change does not
// wait.
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
		batch, changes := n.collect(p, &seq)
		if len(changes) == 0 {
			continue
		}
		n.batches.Observe(float64(len(changes)))
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

// collect takes the outboxes of p and of all other ready partitions, up to
// writeBatch. seq is the number of the last change; it grows with each change.
func (n *Node) collect(p *partition, seq *uint64) (batch []*partition, changes []presence.Change) {
	for size := 0; p != nil; {
		*seq++
		if c, ok := p.out.take(*seq); ok {
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
	return batch, changes
}

// outcomes tells the actors the outcomes of their changes, and returns the
// partitions whose change must be repeated.
func (n *Node) outcomes(batch []*partition, changes []presence.Change, outcomes []presence.Outcome) (again []*partition) {
	for i, o := range outcomes {
		p := batch[i]
		switch {
		case o.Err == nil:
			n.written.Add(1)
			n.counts.Add(int64(len(changes[i].Counts)))
			p.post(&stored{gen: p.out.landed(), counts: o.Counts})
		case errors.Is(o.Err, presence.ErrFenced) && !p.out.superseded(changes[i]):
			n.fenced.Add(1)
			n.actors[changes[i].Partition].CompareAndSwap(p, nil)
			n.alert()
		case errors.Is(o.Err, presence.ErrFenced) || errors.Is(o.Err, presence.ErrLost):
			n.failures.Add(1)
			p.out.restore(changes[i], true)
			n.alert()
			p.post(&returned{})
		default:
			n.failures.Add(1)
			p.out.restore(changes[i], false)
			again = append(again, p)
		}
	}
	return again
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
	if d > standstill {
		n.stood.Store(true)
		n.alert()
	}
	if n.gaps.Add(1) == 1 {
		n.cfg.Log.Warn().Stringer("for", d.Round(time.Millisecond)).Msg("the process was suspended: sessions are given that time back")
	}
}
