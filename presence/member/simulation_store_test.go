package member

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"headcount/presence"
	"headcount/presence/presencemem"
	"headcount/webhook/webhookmem"
)

// sharedStore is the store of one simulation: a presencemem store that can be unavailable, can lose everything, and has
// the leases of the processes. Each life of a process uses it through a handle of its own.
type sharedStore struct {
	partitions, buckets int
	broken              func(promise, format string, args ...any) // called when an invariant is broken
	log                 func(format string, args ...any)

	mu         sync.Mutex // guards the fields below, and every call of inner
	inner      *presencemem.Store
	generation uint64
	void       uint64 // incarnation of pages without data, after a loss was repaired; otherwise 0
	away       bool
	silent     bool          // while the store is away, calls get no answer instead of an error
	slow       time.Duration // duration of calls that are not about leases
	clock      time.Duration // by how much its clock is ahead
	changed    chan struct{}
	lostAt     time.Time
	leases     map[string]simLease
	facts      string               // the cluster facts; empty: not written yet
	epochs     uint64               // highest epoch assigned before this generation
	highest    uint64               // highest epoch assigned
	owners     map[writeRight]*life // the process that made the claim
	past       past
	tried      map[writeRight]try // the last write under the claim
	unread     unreadData
	hooks      *webhookmem.Store
}

type simLease struct {
	presence.Process
	until time.Time
}

// writeRight is a claim of one partition. Over all generations a later claim has a higher epoch.
type writeRight struct {
	partition int
	epoch     uint64
}

// try is a write that a node made, and the error that refused it, if any.
type try struct {
	sequence uint64
	refused  error
}

func newSharedStore(
	partitions, buckets int, broken func(string, string, ...any), log func(string, ...any),
) *sharedStore {
	s := &sharedStore{
		partitions: partitions, buckets: buckets, broken: broken, log: log,
		changed: make(chan struct{}), leases: map[string]simLease{},
		owners: map[writeRight]*life{}, tried: map[writeRight]try{}, past: newPast(),
	}
	s.inner = s.fresh()
	s.hooks = webhookmem.New()

	return s
}

func (s *sharedStore) fresh() *presencemem.Store {
	return presencemem.New(presencemem.Config{Partitions: s.partitions, Buckets: s.buckets, PageDays: 10})
}

// set changes the store, and makes every subscription begin anew.
func (s *sharedStore) set(f func()) {
	s.mu.Lock()
	defer s.mu.Unlock()

	f()
	close(s.changed)
	s.changed = make(chan struct{})
}

func (s *sharedStore) leave(silent bool) { s.set(func() { s.away, s.silent = true, silent }) }
func (s *sharedStore) comeBack()         { s.set(func() { s.away, s.silent = false, false }) }

// lose empties the store.
func (s *sharedStore) lose() { s.loseAfter(time.Time{}) }

// loseAfter empties the store, except for the follows and changes that it had at that moment. Nodes write presence
// again anyway.
func (s *sharedStore) loseAfter(moment time.Time) {
	s.set(func() {
		s.inner = s.fresh()
		s.restoreUnread(moment)
		s.unread.closed = false
		s.hooks = webhookmem.New()
		s.leases = map[string]simLease{}
		s.facts = ""
		s.generation++
		s.lostAt = time.Now()
		s.void = 0
		s.epochs = s.highest // the emptied store assigns epochs from 1 on again
	})
}

func (s *sharedStore) patch(v *presence.Version) {
	if *v == (presence.Version{}) {
		v.Incarnation = s.void
	}
}

// handle is the access of one life of a process to the store.
type handle struct {
	*sharedStore
	l     *life
	state func(up bool)
	facts string // of the settings of this process

	mu    sync.Mutex
	down  bool // the store is known to be away: calls fail without trying
	known bool // the state that was last reported to the process

	accepted  bool      // this field and the next one: under the store's lock
	factsFrom time.Time // since when the store has no facts
}

var _ Store = (*handle)(nil)

// ownStore is the store of a single process. It is suspended and ends with the process.
type ownStore struct {
	*presencemem.Store
	l    *life
	past past
}

func (o *ownStore) Write(ctx context.Context, changes []presence.Change) []presence.Outcome {
	if err := o.l.pass(); err != nil {
		outcomes := make([]presence.Outcome, len(changes))
		for i := range outcomes {
			outcomes[i].Err = err
		}

		return outcomes
	}

	return o.past.write(ctx, o.Store, changes)
}

func (o *ownStore) Counts(ctx context.Context, pages []string) ([]presence.Count, error) {
	if err := o.l.pass(); err != nil {
		return nil, err
	}

	return o.Store.Counts(ctx, pages)
}

func (o *ownStore) Attach(ctx context.Context, gateway string, topics []presence.Topic) ([]presence.Update, error) {
	if err := o.l.pass(); err != nil {
		return nil, err
	}

	return o.Store.Attach(ctx, gateway, topics)
}

func (o *ownStore) Renew(
	ctx context.Context, p presence.Process, ttl time.Duration,
) ([]presence.Process, time.Time, error) {
	if err := o.l.pass(); err != nil {
		return nil, time.Time{}, err
	}

	return o.Store.Renew(ctx, p, ttl)
}

const (
	storeLooks   = 250 * time.Millisecond // between two checks whether the store answers
	storeTimeout = 3 * time.Second        // of a call without an answer
	simFactsWait = 1600 * time.Millisecond
	lostAnswers  = 0.02 // share of the calls that take effect and report an error
)

// call runs do under the store's lock, after the delay of a network.
func (h *handle) call(ctx context.Context, do func() error) error { return h.callAs(ctx, false, do) }

func (h *handle) callAs(ctx context.Context, lease bool, do func() error) error {
	fail := func() error {
		if err := ctx.Err(); err != nil {
			return fmt.Errorf("%w: %w", presence.ErrUnavailable, err)
		}
		return presence.ErrUnavailable
	}

	if err := h.l.pass(); err != nil {
		return err
	}

	h.mu.Lock()
	down := h.down
	h.mu.Unlock()

	// The number luck decides whether the answer is lost in the end.
	luck, delay := h.l.toss(time.Millisecond)
	slow := h.slowness()
	if !lease {
		delay += slow
	}

	if down || wait(ctx, delay) != nil || h.l.pass() != nil {
		return fail()
	}

	h.sharedStore.mu.Lock()
	away, silent := h.away, h.silent
	var err error
	if !away {
		err = do()
	}
	h.sharedStore.mu.Unlock()

	if away {
		// The caller waits for its timeout, as with a server that drops packets.
		if silent {
			_ = wait(ctx, storeTimeout)
		}
		return fail()
	}

	// The call has taken effect. From here on only its answer can be lost.
	_, delay = h.l.toss(time.Millisecond)
	if wait(ctx, delay) != nil || h.l.pass() != nil {
		return fail()
	}

	if luck < lostAnswers*h.l.net.weather.Load().lost/0.2 {
		return fail()
	}

	return err
}

func (h *handle) slowness() time.Duration {
	h.sharedStore.mu.Lock()
	defer h.sharedStore.mu.Unlock()
	return h.slow
}

// run reports to the process whether the store answers, until ctx ends.
func (h *handle) run(ctx context.Context) {
	for ctx.Err() == nil && h.l.pass() == nil {
		h.sharedStore.mu.Lock()
		down := h.away
		h.sharedStore.mu.Unlock()

		h.mu.Lock()
		tell := !h.known || down != h.down
		h.down, h.known = down, true
		h.mu.Unlock()

		if tell {
			h.state(!down)
		}

		// As with a real connection, the process learns of an outage only at the next check.
		_ = wait(ctx, storeLooks)
	}
}

func (h *handle) Generation(ctx context.Context) (g uint64, err error) {
	err = h.call(ctx, func() error {
		g = h.generation + 1
		return nil
	})
	return g, err
}

func (h *handle) Claim(
	ctx context.Context, owner string, partitions []int, again bool,
) (claims []presence.Claim, err error) {
	err = h.call(ctx, func() error {
		claims, err = h.inner.Claim(ctx, owner, partitions, again)
		for i := range claims {
			c := &claims[i]
			if c.Epoch == 0 { // another process has claimed it since
				continue
			}

			// The inner store of each generation counts its epochs from 1. Outside they grow over all generations.
			c.Epoch += h.epochs
			c.Generation = h.generation + 1
			h.highest = max(h.highest, c.Epoch)
			h.owners[writeRight{c.Partition, c.Epoch}] = h.l
		}

		isGranted := func(c presence.Claim) bool { return c.Epoch > 0 }
		if slices.ContainsFunc(claims, isGranted) {
			h.unread.claimed(h.generation)
		}
		// The repair of a loss gives pages without data an incarnation above all earlier ones.
		if again && h.void == 0 {
			h.void = uint64(time.Now().UnixMilli())
		}

		return err
	})
	if err != nil {
		return nil, err
	}

	return claims, nil
}

func (h *handle) Load(ctx context.Context, claims []presence.Claim) (snaps []presence.Snapshot, err error) {
	err = h.call(ctx, func() error {
		// Claims of an earlier generation are lost. The others are translated to the inner store's epochs.
		inner := slices.Clone(claims)
		for i := range inner {
			if inner[i].Generation != h.generation+1 {
				return presence.ErrLost
			}
			inner[i].Epoch -= h.epochs
		}

		snaps, err = h.inner.Load(ctx, inner)
		return err
	})
	if err != nil {
		return nil, err
	}

	return snaps, nil
}

func (h *handle) Incomplete(ctx context.Context, partitions []int, everywhere bool) (missing []int, err error) {
	err = h.call(ctx, func() error {
		missing, err = h.inner.Incomplete(ctx, partitions, everywhere)
		return err
	})
	return missing, err
}

func (h *handle) Write(ctx context.Context, changes []presence.Change) []presence.Outcome {
	outcomes := make([]presence.Outcome, len(changes))
	h.tries(changes)

	err := h.call(ctx, func() error {
		var good []presence.Change
		var at []int
		for i, c := range changes {
			if c.Generation != h.generation+1 {
				outcomes[i].Err = presence.ErrLost
				continue
			}
			c.Epoch -= h.epochs
			good = append(good, c)
			at = append(at, i)
		}

		written := h.past.write(ctx, h.inner, good)

		for k, o := range written {
			i := at[k]
			for j := range o.Counts {
				h.patch(&o.Counts[j].Version)
			}

			outcomes[i] = o
			h.log("%s writes %+v: %v", h.l.name, changes[i], o.Err)
		}

		return nil
	})
	if err != nil {
		for i := range outcomes {
			outcomes[i] = presence.Outcome{Err: err}
		}
	}

	h.answered(changes, outcomes)
	return outcomes
}

// tries checks the rules that a node must keep by itself, even where the store would refuse the write. A node writes
// only under claims of its present life, and no more once it knows that a claim is void. Each change under a claim has
// a higher number than the one before.
func (h *handle) tries(changes []presence.Change) {
	h.sharedStore.mu.Lock()
	defer h.sharedStore.mu.Unlock()

	for _, c := range changes {
		right := writeRight{c.Partition, c.Epoch}
		if h.owners[right] != h.l {
			h.broken("–", "partition %d: %s writes under epoch %d, which is not a claim of this life",
				c.Partition, h.l.name, c.Epoch)
		}

		last, tried := h.tried[right]
		switch again := tried && c.Sequence <= last.sequence; {
		case last.refused != nil:
			h.broken("–", "partition %d: %s writes under epoch %d though it has read: %v",
				c.Partition, h.l.name, c.Epoch, last.refused)
		case again:
			h.broken("–", "partition %d: %s writes number %d under epoch %d after %d",
				c.Partition, h.l.name, c.Sequence, c.Epoch, last.sequence)
		}

		h.tried[right] = try{sequence: c.Sequence}
	}
}

// answered records which claims are void, as the node now knows.
func (h *handle) answered(changes []presence.Change, outcomes []presence.Outcome) {
	h.sharedStore.mu.Lock()
	defer h.sharedStore.mu.Unlock()

	for i, c := range changes {
		if err := outcomes[i].Err; errors.Is(err, presence.ErrFenced) || errors.Is(err, presence.ErrLost) {
			h.tried[writeRight{c.Partition, c.Epoch}] = try{c.Sequence, err}
		}
	}
}

func (h *handle) Counts(ctx context.Context, pages []string) (counts []presence.Count, err error) {
	err = h.call(ctx, func() error {
		counts, err = h.inner.Counts(ctx, pages)
		for i := range counts {
			h.patch(&counts[i].Version)
		}

		return err
	})
	if err != nil {
		return nil, err
	}

	return counts, nil
}

func (h *handle) Parts(ctx context.Context, page string) (c presence.Count, parts []presence.Part, err error) {
	err = h.call(ctx, func() error {
		c, parts, err = h.inner.Parts(ctx, page)
		h.patch(&c.Version)
		return err
	})

	return c, parts, err
}

func (h *handle) Updates(ctx context.Context, topics []presence.Topic) ([]presence.Update, error) {
	return h.updates(ctx, func() ([]presence.Update, error) { return h.inner.Updates(ctx, topics) })
}

func (h *handle) Attach(ctx context.Context, gateway string, topics []presence.Topic) ([]presence.Update, error) {
	return h.updates(ctx, func() ([]presence.Update, error) { return h.inner.Attach(ctx, gateway, topics) })
}

func (h *handle) updates(
	ctx context.Context, read func() ([]presence.Update, error),
) (updates []presence.Update, err error) {
	err = h.call(ctx, func() error {
		updates, err = read()
		for i := range updates {
			h.patch(&updates[i].Version)
		}

		return err
	})
	if err != nil {
		return nil, err
	}

	return updates, nil
}

func (h *handle) Detach(ctx context.Context, gateway string, topics []presence.Topic) error {
	return h.call(ctx, func() error { return h.inner.Detach(ctx, gateway, topics) })
}

func (h *handle) Attached(ctx context.Context, bucket int) (ends []presence.Endpoint, err error) {
	err = h.call(ctx, func() error {
		ends, err = h.inner.Attached(ctx, bucket)
		return err
	})
	if err != nil {
		return nil, err
	}

	return ends, nil
}

func (h *handle) Missing(
	ctx context.Context, gateway string, topics []presence.Topic,
) (missing []presence.Topic, err error) {
	err = h.call(ctx, func() error {
		missing, err = h.inner.Missing(ctx, gateway, topics)
		return err
	})
	if err != nil {
		return nil, err
	}

	return missing, nil
}

// Watch implements presence.Feed. When the store goes away the subscription ends; a new subscription begins with a Lost
// of every bucket. When the store is emptied the subscription goes on, and a bucket's next publication shows the gap.
func (h *handle) Watch(ctx context.Context, buckets []int, fn func(presence.Publication)) {
	gap := map[int]bool{}
	for first := true; ; {
		h.sharedStore.mu.Lock()
		inner, changed := h.inner, h.changed
		away := h.away
		prompt := h.lostAt.Equal(time.Now()) // nothing has been published since the loss
		h.sharedStore.mu.Unlock()

		if away {
			first = true
			select {
			case <-ctx.Done():
				return
			case <-changed:
			}
			continue
		}

		if first {
			if wait(ctx, 100*time.Millisecond) != nil {
				return
			}
		}

		// A new inner store reports every bucket as lost. If nothing has been published since the loss, a real store
		// does not notice it yet: only the bucket's next publication shows the gap.
		swallow := map[int]bool{}
		for _, b := range buckets {
			swallow[b] = !first && prompt
			gap[b] = swallow[b]
		}
		first = false

		wctx, stop := context.WithCancel(ctx)
		done := make(chan struct{})
		go func() {
			defer close(done)
			inner.Watch(wctx, buckets, func(p presence.Publication) {
				if p.Lost && swallow[p.Bucket] {
					swallow[p.Bucket] = false
					return
				}

				// A publication to a frozen process waits, and one to a dead process is lost.
				_, delay := h.l.toss(time.Millisecond)
				if wait(wctx, delay) != nil || h.l.pass() != nil {
					return
				}

				if gap[p.Bucket] {
					gap[p.Bucket] = false
					p = presence.Publication{Bucket: p.Bucket, Lost: true}
				}

				fn(p)
			})
		}()

		select {
		case <-ctx.Done():
			stop()
			<-done
			return
		case <-changed:
			stop()
			<-done
		case <-h.l.dead:
			stop()
			<-done
			<-ctx.Done() // a dead process watches nothing
			return
		}
	}
}

func (h *handle) Renew(
	ctx context.Context, p presence.Process, ttl time.Duration,
) (all []presence.Process, at time.Time, err error) {
	err = h.callAs(ctx, true, func() error {
		now := time.Now()
		old, ok := h.leases[p.Name]
		if ok && old.Incarnation != p.Incarnation && now.Before(old.until) {
			return presence.ErrNameTaken
		}

		switch {
		case h.accepted, h.sharedStore.facts == h.facts:
		case h.sharedStore.facts != "":
			return presence.ErrFacts
		case h.factsFrom.IsZero():
			h.factsFrom = now
			return presence.ErrNoFacts
		case now.Sub(h.factsFrom) < simFactsWait:
			return presence.ErrNoFacts
		}

		h.accepted = true
		if h.sharedStore.facts == "" { // after a loss, the first accepted process writes the facts
			h.sharedStore.facts = h.facts
		}

		h.leases[p.Name] = simLease{p, now.Add(ttl)}

		for name, l := range h.leases {
			if now.Before(l.until) {
				all = append(all, l.Process)
			} else {
				delete(h.leases, name)
			}
		}

		slices.SortFunc(all, func(a, b presence.Process) int { return strings.Compare(a.Name, b.Name) })
		// Leases use the real clock, so that a jump of the store's clock ends none of them.
		at = now.Add(h.clock)

		return nil
	})
	if err != nil {
		return nil, at, err
	}

	return all, at, nil
}

func (h *handle) Leave(ctx context.Context, p presence.Process) error {
	return h.call(ctx, func() error {
		if h.leases[p.Name].Incarnation == p.Incarnation {
			delete(h.leases, p.Name)
		}
		return nil
	})
}
