package call_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"headcount/counter"
	"headcount/counter/owner"
	"headcount/counter/simtest"
	"headcount/internal/rows"
	"headcount/internal/rows/rowsmem"
)

// world is the store of the simulation. It keeps a log of everything that changed it, so that it can lose its tail.
type world struct {
	rand *simtest.Dice // of a planted fault

	mu    sync.Mutex // guards the fields below
	store *rowsmem.Store
	log   []change
	// kept is how much of the log cannot be lost: what is old, and the commits of owners that have ended or no longer
	// own the partition.
	kept int
	late []rows.Commit // sent commits that may yet arrive, or arrive again
	// orphans are partitions whose owner is dead. Only a claim of an orphan may be lost: after the loss of another
	// claim the former owner would take itself for the owner again.
	orphans map[int]bool
	lost    time.Time // when the store last lost something
	away    bool      // nobody reaches the store
	full    bool
	safe    bool      // it never loses anything
	trace   *recorder // records the actions of formal models, unless nil

	trust    bool // a planted fault: the store does not compare epochs
	forget   bool // a planted fault: the store keeps no answers of streams
	hasty    bool // a planted fault: some commits are acknowledged and never made
	complete bool // a planted fault: the store never says that it lost something
}

// change is one entry of the log: a claim or a commit.
type change struct {
	at     time.Time
	owner  string
	former *rows.Former
	commit *rows.Commit
}

func newWorld(r *simtest.Dice) *world {
	return &world{rand: r, store: rowsmem.New(rowsmem.Config{}), orphans: map[int]bool{}}
}

// claim claims partitions, and notes what others wrote before.
func (w *world) claim(owner string, partitions []rows.Former) ([]rows.Claim, error) {
	w.mu.Lock()
	defer w.mu.Unlock()

	if w.away || w.asksFormer(partitions) {
		return nil, rows.ErrUnavailable
	}

	claims, _ := w.store.Claim(context.Background(), owner, partitions)
	for i := range partitions {
		w.trace.claim(owner, partitions[i], claims[i])
		if claims[i].Epoch == 0 {
			continue
		}
		id := partitions[i].Partition
		w.log = append(w.log, change{at: time.Now(), owner: owner, former: &partitions[i]})
		if partitions[i].Epoch != 0 {
			continue // claimed again by its owner, which remembers all its commits
		}

		// A new owner reads the rows as they are and remembers no commit of its predecessor, so a loss of those would
		// never heal.
		w.kept = len(w.log)
		if w.orphans[id] {
			// The former owner is dead, so this claim may be lost, too: nobody would take itself for the owner again.
			w.kept--
			delete(w.orphans, id)
		}
	}

	return claims, nil
}

// asksFormer reports whether a partition to claim has an owner that is alive and has not healed a loss of the store. A
// process that takes a partition over first asks such an owner to give it up.
func (w *world) asksFormer(partitions []rows.Former) bool {
	if time.Since(w.lost) > simHeal {
		return false
	}

	return slices.ContainsFunc(partitions, func(f rows.Former) bool { return f.Epoch == 0 && !w.orphans[f.Partition] })
}

// commit makes a commit, or is the late arrival of a copy.
func (w *world) commit(c rows.Commit, isLate bool) error {
	w.mu.Lock()
	defer w.mu.Unlock()

	err := w.decide(c)
	w.trace.commit(c, isLate, err)

	return err
}

func (w *world) decide(c rows.Commit) error {
	hasRoom := !w.full || len(c.Rows) == 0
	if w.away {
		return rows.ErrUnavailable
	}
	if !hasRoom {
		return rows.ErrFull
	}
	// Rolled last, so that a seed without the planted fault rolls the same dice.
	if w.hasty && w.rand.Chance(0.3) {
		return nil
	}

	if w.forget {
		c.Rows = slices.DeleteFunc(slices.Clone(c.Rows), func(r rows.Row) bool { return r.Collection == "streams" })
	}
	if w.trust {
		c = w.trusted(c)
	}

	// The log outlives the commit, and the owner may use the slices again.
	c.Rows = slices.Clone(c.Rows)
	c.IDs = slices.Clone(c.IDs)
	c.Asked = slices.Clone(c.Asked)

	err := w.store.Commit(context.Background(), []rows.Commit{c})[0]
	if err == nil {
		w.log = append(w.log, change{at: time.Now(), commit: &c})
	}
	if w.complete && err != nil {
		if _, ok := err.(*rows.Lost); ok {
			return nil
		}
	}

	return err
}

// trusted gives a commit the epoch and the numbers with which it is accepted.
func (w *world) trusted(c rows.Commit) rows.Commit {
	// The store names the epoch and the number that it would accept in its refusals.
	probe := c
	probe.Epoch = 0
	if fenced, ok := w.store.Commit(context.Background(), []rows.Commit{probe})[0].(*rows.Fenced); ok &&
		fenced.Epoch != c.Epoch {
		c.Epoch = fenced.Epoch
		probe = rows.Commit{Partition: c.Partition, Epoch: c.Epoch, After: 1 << 60, Number: 1<<60 + 1}
		if lost, ok := w.store.Commit(context.Background(), []rows.Commit{probe})[0].(*rows.Lost); ok {
			c.After = lost.Number
			c.Number = lost.Number + 1
		}
	}

	return c
}

// loseTail makes the store forget its newest changes: all that it may lose, or some of them.
func (w *world) loseTail(dice *simtest.Dice) int {
	w.mu.Lock()
	defer w.mu.Unlock()

	// Owners do not promise to remember older commits.
	const remembered = 30 * time.Second
	for w.kept < len(w.log) && time.Since(w.log[w.kept].at) >= remembered {
		w.kept++
	}

	keep := w.kept + dice.Below(len(w.log)-w.kept+1)
	// Otherwise the greatest loss would be as rare as any other.
	if dice.Chance(0.3) {
		keep = w.kept
	}
	if w.safe {
		keep = len(w.log)
	}
	lost := len(w.log) - keep

	// A claim of the log gets the time at which it was made first, and so the same epoch. Later claims get their own.
	var at time.Time
	now := func() time.Time {
		if at.IsZero() {
			return time.Now()
		}
		return at
	}
	store := rowsmem.New(rowsmem.Config{Now: now})
	for _, one := range w.log[:keep] {
		if one.former != nil {
			at = one.at
			_, _ = store.Claim(context.Background(), one.owner, []rows.Former{*one.former})
		} else {
			_ = store.Commit(context.Background(), []rows.Commit{*one.commit})
		}
	}

	at = time.Time{}

	w.lost = time.Now()
	w.log = w.log[:keep]
	w.store = store
	w.late = nil // connections to the former master are gone
	w.trace.lose(w.log)

	return lost
}

// orphan notes that the owner of partitions is dead, so that no owner can heal their part of the log.
func (w *world) orphan(partitions []int) {
	w.mu.Lock()
	defer w.mu.Unlock()

	w.kept = len(w.log)
	for _, id := range partitions {
		w.orphans[id] = true
	}
}

func (w *world) read(addresses []rows.Address) []rows.Found {
	w.mu.Lock()
	defer w.mu.Unlock()

	if w.away {
		found := make([]rows.Found, len(addresses))
		for i := range found {
			found[i].Err = rows.ErrUnavailable
		}
		return found
	}

	return w.store.Read(context.Background(), addresses)
}

// now returns the present store, and whether it is away.
func (w *world) now() (store *rowsmem.Store, away bool) {
	w.mu.Lock()
	defer w.mu.Unlock()

	return w.store, w.away
}

func (w *world) lostAt() time.Time {
	w.mu.Lock()
	defer w.mu.Unlock()

	return w.lost
}

func (w *world) scan(ctx context.Context, id int, collection, after string, each func(string, []byte) error) error {
	store, away := w.now()
	if away {
		return rows.ErrUnavailable
	}

	return store.Scan(ctx, id, collection, after, each)
}

// process is one process with an owner. It implements rows.Store for it, and call.Owner for gateways.
type process struct {
	simtest.Host
	name  string
	of    *simulation
	owner *owner.Owner
}

var _ rows.Store = (*process)(nil)

func (p *process) kill() {
	p.Die()
	p.of.world.trace.end(p.name)
	p.owner.Close()
}

// Claim implements rows.Store.
func (p *process) Claim(_ context.Context, _ string, partitions []rows.Former) ([]rows.Claim, error) {
	dice := p.of.dice(p.name, "claims", partitions[0].Partition)
	time.Sleep(dice.UpTo(2 * time.Millisecond))
	if !p.Alive() || dice.Chance(p.of.chances().store) {
		return nil, rows.ErrUnavailable
	}

	claims, err := p.of.world.claim(p.name, partitions)
	p.of.Logf("%s claims %+v: %+v, %v", p.name, partitions, claims, err)
	time.Sleep(dice.UpTo(2 * time.Millisecond))
	if !p.Alive() || dice.Chance(p.of.chances().store) {
		return nil, rows.ErrUnavailable // the answer is lost
	}

	for _, one := range partitions {
		p.of.world.trace.answer(p.name, one.Partition, err)
	}
	return claims, err
}

// Commit implements rows.Store. A commit may get lost, come late or twice, or lose its answer.
func (p *process) Commit(_ context.Context, commits []rows.Commit) []error {
	errs := make([]error, len(commits))
	dice := p.of.dice(p.name, "commits", commits[0].Partition)
	time.Sleep(dice.UpTo(2 * time.Millisecond))
	alive := p.Alive()
	for i, c := range commits {
		if !alive || dice.Chance(p.of.chances().store) {
			p.of.Logf("%s commits to partition %d: number %d is lost, or late", p.name, c.Partition, c.Number)
			errs[i] = rows.ErrUnavailable
			p.of.world.repeatLater(c) // or never
			continue
		}

		errs[i] = p.of.world.commit(c, false)
		p.of.Logf("%s commits to partition %d: number %d after %d, %d rows, epoch %d: %v",
			p.name, c.Partition, c.Number, c.After, len(c.Rows), c.Epoch, errs[i])
		if errs[i] == nil {
			p.of.world.repeatLater(c)
		}
	}

	time.Sleep(dice.UpTo(2 * time.Millisecond))
	alive = p.Alive()
	for i := range errs {
		if !alive || dice.Chance(p.of.chances().store) {
			p.of.Logf("%s does not get the answer to number %d of partition %d",
				p.name, commits[i].Number, commits[i].Partition)
			errs[i] = rows.ErrUnavailable
		}
		p.of.world.trace.answer(p.name, commits[i].Partition, errs[i])
	}

	return errs
}

// repeatLater keeps some commits, which arrive later, perhaps more than once.
func (w *world) repeatLater(c rows.Commit) {
	w.mu.Lock()
	defer w.mu.Unlock()

	c.Rows = slices.Clone(c.Rows)
	c.IDs = slices.Clone(c.IDs)
	c.Asked = slices.Clone(c.Asked)

	// Each fault makes only one of them arrive, so a few are enough.
	const most = 50
	if len(w.late) < most {
		w.late = append(w.late, c)
	}
}

// repeatOne makes an earlier commit arrive.
func (w *world) repeatOne(dice *simtest.Dice) {
	w.mu.Lock()
	if len(w.late) == 0 {
		w.mu.Unlock()
		return
	}
	i := dice.Below(len(w.late))
	c := w.late[i]
	w.late = slices.Delete(w.late, i, i+1)
	w.mu.Unlock()

	// The sender has its answer already, or has given up. The late copy must be refused, or change nothing.
	_ = w.commit(c, true)
}

// Read implements rows.Store.
func (p *process) Read(_ context.Context, addresses []rows.Address) []rows.Found {
	time.Sleep(p.of.dice(p.name, "reads", addresses[0].Partition).UpTo(2 * time.Millisecond))
	p.Alive()

	return p.of.world.read(addresses)
}

// Scan implements rows.Store.
func (p *process) Scan(ctx context.Context, id int, collection, after string, each func(string, []byte) error) error {
	if !p.Alive() {
		return rows.ErrUnavailable
	}

	return p.of.world.scan(ctx, id, collection, after, each)
}

// Watch implements rows.Store. Owners do not watch.
func (p *process) Watch(context.Context, func(int, uint64, []byte), func()) error {
	return fmt.Errorf("an owner must not watch: %w", rows.ErrUnavailable)
}

// Do implements call.Owner. A call may arrive late, even after its repetition, or lose its answer.
func (p *process) Do(ctx context.Context, one owner.Call) (owner.Answer, error) {
	dice := p.of.dice(one.Stream, "calls", one.Partition)
	p.of.world.trace.send(one)
	time.Sleep(dice.UpTo(2 * time.Millisecond))
	if dice.Chance(p.of.chances().calls) {
		delay := dice.UpTo(3 * time.Second)
		p.of.Logf("%s: a call to partition %d comes %v late", one.Stream, one.Partition, delay)
		// The caller repeats the call meanwhile, so the late one arrives after its repetition, perhaps at a former
		// owner.
		p.of.stray.Go(func() {
			time.Sleep(delay)
			ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
			defer cancel()
			_, _ = p.do(ctx, one)
		})

		// A lost message is no error that its sender sees: it learns of the loss by waiting.
		<-ctx.Done()
		return owner.Answer{}, counter.ErrUnavailable
	}

	answer, err := p.do(ctx, one)
	time.Sleep(dice.UpTo(2 * time.Millisecond))
	if dice.Chance(p.of.chances().calls) {
		p.of.Logf("%s: an answer of partition %d is lost", one.Stream, one.Partition)
		<-ctx.Done()
		return owner.Answer{}, counter.ErrUnavailable
	}

	p.of.world.trace.tell(one, answer, err)
	return answer, err
}

// do makes a call, and does not answer while the process stands still.
func (p *process) do(ctx context.Context, one owner.Call) (owner.Answer, error) {
	type outcome struct {
		answer owner.Answer
		err    error
	}
	answered := make(chan outcome, 1)
	p.of.stray.Go(func() {
		if !p.Alive() {
			return
		}

		answer, err := p.owner.Do(ctx, one)
		if errors.Is(err, owner.ErrNotOwner) && p.of.OwnerOf(one.Partition) == p {
			_ = p.owner.Own(ctx, one.Partition) // it should be the owner: the repetition will succeed
		}
		if p.Alive() {
			answered <- outcome{answer, err}
		}
	})

	select {
	case o := <-answered:
		return o.answer, o.err
	case <-ctx.Done():
		return owner.Answer{}, counter.ErrUnavailable
	}
}
