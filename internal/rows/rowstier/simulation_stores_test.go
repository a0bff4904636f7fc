package rowstier

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"headcount/counter/simtest"
	"headcount/internal/rows"
	"headcount/internal/rows/rowsmem"
)

// stores has the two stores of the simulation, and what they must have.
type stores struct {
	notes *simtest.Notes
	rand  *simtest.Dice // of a planted fault

	mu          sync.Mutex // guards the fields below
	fast        *rowsmem.Store
	durable     *durableStore
	fastAway    bool
	durableAway bool
	expected    [simPartitions]expected
	serials     int
	losses      int
	trace       *recorder // records the actions of the formal model, unless nil

	hastyFast    bool // a planted fault: some commits are acknowledged and never made
	hastyDurable bool
	trusting     bool // a planted fault: the durable store does not compare epochs
	forgetful    bool // a planted fault: the fast store loses rows and nothing else
}

// expected is what the stores know and have of a partition, in the terms of the formal model.
type expected struct {
	acknowledged version         // the newest acknowledged version, which must not be missing
	isLost       bool            // the fast store has lost that version, and the owner has not written it again
	newest       *process        // the last process whose claim the fast store granted
	owner        *process        // that process, until the fast store loses its claim
	values       map[version]int // version without its serial -> serial
}

func newStores(notes *simtest.Notes, r *simtest.Dice) *stores {
	w := &stores{notes: notes, rand: r, fast: rowsmem.New(rowsmem.Config{}), durable: newDurable()}
	for id := range w.expected {
		w.expected[id].values = map[version]int{}
	}

	return w
}

func (w *stores) set(flag *bool, value bool) {
	w.mu.Lock()
	defer w.mu.Unlock()

	*flag = value
}

func (w *stores) newSerial() int {
	w.mu.Lock()
	defer w.mu.Unlock()

	w.serials++

	return w.serials
}

// end makes a process end, at a moment at which no call of it arrives.
func (w *stores) end(p *process) {
	w.mu.Lock()
	defer w.mu.Unlock()

	if !p.IsDead() {
		w.trace.end(p)
	}
	p.Die()
}

// fastRowLocked returns the row in the fast store.
func (w *stores) fastRowLocked(partition int) version {
	value, _ := decodeValue(w.fast.Get(partition, addressOf(partition).Name))

	return decodeVersion(value)
}

func (w *stores) durableRowLocked(partition int) version {
	return decodeVersion(w.durable.Store.Get(partition, addressOf(partition).Name))
}

// drainedLocked returns what the durable store records about its drains.
func (w *stores) drainedLocked(partition int) drainRecord {
	return decodeDrainRecord(w.durable.Store.Get(partition, drainedName))
}

// hasLocked reports whether one of the stores has the acknowledged version.
func (w *stores) hasLocked(partition int) bool {
	is := w.expected[partition].acknowledged

	return !w.fastRowLocked(partition).less(is) || !w.durableRowLocked(partition).less(is)
}

// checkLocked notes if an acknowledged version is in neither store, although the fast store has lost nothing.
func (w *stores) checkLocked(partition int) {
	is := &w.expected[partition]
	is.isLost = is.isLost && !w.hasLocked(partition)
	if !is.isLost && !w.hasLocked(partition) {
		w.notes.Failf("once", "of partition %d the fast store has %v, the durable one %v, and %v was acknowledged",
			partition, w.fastRowLocked(partition), w.durableRowLocked(partition), is.acknowledged)
	}
}

// newest returns the versions of a partition in the two stores, and the acknowledged one.
func (w *stores) newest(partition int) (fast, durable, acknowledged version) {
	w.mu.Lock()
	defer w.mu.Unlock()

	return w.fastRowLocked(partition), w.durableRowLocked(partition), w.expected[partition].acknowledged
}

func (w *stores) hasInFast(partition int) bool {
	w.mu.Lock()
	defer w.mu.Unlock()

	return w.fastRowLocked(partition) != version{}
}

// acknowledge records that a change is answered. It arrived when the fast store had had so many losses. If it was lost
// since, and the partition has another owner, that owner goes on without it.
func (w *stores) acknowledge(p *process, partition int, is version, losses int) {
	w.mu.Lock()
	defer w.mu.Unlock()

	of := &w.expected[partition]
	if losses < w.losses && of.newest != p {
		return
	}
	of.isLost = of.isLost || losses < w.losses
	if of.acknowledged.less(is) {
		of.acknowledged = is
	}
	w.checkLocked(partition)
}

// madeLocked checks a change that the fast store has made.
func (w *stores) madeLocked(partition int, c change) {
	is := &w.expected[partition]
	if c.base.less(is.acknowledged) {
		w.notes.Failf("own change", "a change of partition %d was judged on %v, and %v was acknowledged",
			partition, c.base, is.acknowledged)
	}

	plain := version{epoch: c.value.epoch, sequence: c.value.sequence}
	if serial, isUsed := is.values[plain]; isUsed && serial != c.value.serial {
		w.notes.Failf("ordered", "version %v of partition %d has two values", c.value, partition)
	}
	is.values[plain] = c.value.serial
}

// loseAll makes the fast store forget everything, and be away for a while. It does nothing while a process that was
// overtaken takes itself for an owner: the loss would make it the owner again.
func (w *stores) loseAll() bool {
	w.mu.Lock()
	defer w.mu.Unlock()

	for id := range w.expected {
		if w.isDoubtedLocked(id) {
			return false
		}
	}

	w.fast = rowsmem.New(rowsmem.Config{})
	w.fastAway = true
	w.losses++
	for id := range w.expected {
		// A version that was drained before is not lost: the durable store still has it.
		is := &w.expected[id]
		is.isLost = !w.hasLocked(id)
		if is.owner != nil {
			w.trace.lose(id)
		}
		is.owner = nil
	}

	return true
}

// isDoubtedLocked reports whether a process may wrongly take itself for the owner of a partition.
func (w *stores) isDoubtedLocked(partition int) bool {
	is := w.expected[partition].newest
	if is == nil {
		return false
	}

	return slices.ContainsFunc(is.of.processes, func(p *process) bool {
		return p != is && p.owners[partition].isAtWork.Load()
	})
}

// claimedLocked records claims that the fast store has granted.
func (w *stores) claimedLocked(p *process, former rows.Former, claim rows.Claim) {
	if claim.Epoch == 0 {
		return
	}

	is := &w.expected[former.Partition]
	is.newest = p
	is.owner = p
	if former.Epoch != 0 || !is.isLost {
		return
	}

	// The former owner had no time to write the lost version again.
	is.isLost = false
	is.acknowledged = w.fastRowLocked(former.Partition)
	if durable := w.durableRowLocked(former.Partition); is.acknowledged.less(durable) {
		is.acknowledged = durable
	}
}

// claimLate makes an earlier claim of a partition's owner arrive again.
func (w *stores) claimLate(p *process, partition int) {
	w.mu.Lock()
	defer w.mu.Unlock()

	o := p.owners[partition]
	if w.fastAway || p.IsDead() || w.expected[partition].owner != p || !o.isAtWork.Load() || o.isClaiming.Load() {
		return
	}
	former := rows.Former{Partition: partition, Epoch: 1}
	claims, _ := w.fast.Claim(context.Background(), p.name, []rows.Former{former})
	p.of.Logf("a claim of partition %d by %s arrives late: %+v", partition, p.name, claims[0])
	if claims[0].Epoch != 0 {
		w.trace.add(p, partition, action{kind: comesLate, epoch: claims[0].Epoch})
	}
}

// reach waits until a call arrives at a store, and reports whether it does.
func (p *process) reach(ctx context.Context, isDurable bool) bool {
	lost, slow := p.of.network()
	dice := p.of.dice(fmt.Sprint(p.name, " ", callOf(ctx).who, " ", isDurable))
	most := 2 * time.Millisecond
	if isDurable {
		most = 40*time.Millisecond + slow
	}
	time.Sleep(dice.UpTo(most))

	return p.Alive() && ctx.Err() == nil && !dice.Chance(lost)
}

// answered waits until the answer arrives, and reports whether it does.
func (p *process) answered(ctx context.Context, isDurable bool) bool { return p.reach(ctx, isDurable) }

// read makes a store read n rows, unless it is away, or the call or its answer is lost. The stores are locked
// meanwhile.
func (p *process) read(
	ctx context.Context, isDurable bool, n int, isAway *bool, do func() ([]rows.Found, *action),
) []rows.Found {
	w := p.of.stores
	unavailable := slices.Repeat([]rows.Found{{Err: rows.ErrUnavailable}}, n)
	if !p.reach(ctx, isDurable) {
		return unavailable
	}

	w.mu.Lock()
	if *isAway || p.IsDead() {
		w.mu.Unlock()
		return unavailable
	}
	found, seen := do()
	w.mu.Unlock()

	if !p.answered(ctx, isDurable) {
		return unavailable
	}
	w.trace.see(seen)

	return found
}

// fastLink is how a process reaches the fast store.
type fastLink struct{ *process }

var _ rows.Store = fastLink{}

// Claim implements rows.Store.
func (l fastLink) Claim(ctx context.Context, owner string, partitions []rows.Former) ([]rows.Claim, error) {
	w := l.of.stores
	if !l.reach(ctx, false) {
		return nil, rows.ErrUnavailable
	}

	w.mu.Lock()
	if w.fastAway || l.IsDead() {
		w.mu.Unlock()
		return nil, rows.ErrUnavailable
	}
	claims, err := w.fast.Claim(ctx, owner, partitions)
	var seen []*action
	for i, former := range partitions {
		w.claimedLocked(l.process, former, claims[i])
		seen = append(seen, w.trace.claim(l.process, callOf(ctx).kind, former, claims[i]))
	}
	w.mu.Unlock()

	if !l.answered(ctx, false) {
		return nil, rows.ErrUnavailable
	}
	w.trace.see(seen...)

	return claims, err
}

// Commit implements rows.Store. The commit of an owner arrives at once, or never.
func (l fastLink) Commit(ctx context.Context, commits []rows.Commit) []error {
	w := l.of.stores
	is := callOf(ctx)
	var arrives bool
	if is.kind == turns {
		is.owner.hasSent.Store(true)
		lost, _ := l.of.network()
		arrives = !l.of.dice(fmt.Sprint(l.name, " ", is.who, " commits")).Chance(lost)
	} else {
		l.tracked.probes(commits)
		arrives = l.reach(ctx, false)
	}

	errs := slices.Repeat([]error{rows.ErrUnavailable}, len(commits))
	var seen []*action
	w.mu.Lock()
	arrives = arrives && !w.fastAway && !l.IsDead()
	for i := range commits {
		if arrives {
			errs[i] = w.commitFastLocked(&commits[i], is)
		}
		if arrives && is.kind == turns && errs[i] == nil {
			is.owner.losses = w.losses
		}
		seen = append(seen, w.trace.commitFast(l.process, is.kind, &commits[i], arrives, errs[i]))
	}

	w.mu.Unlock()

	if !arrives || !l.answered(ctx, false) {
		return slices.Repeat([]error{rows.ErrUnavailable}, len(commits))
	}

	w.trace.see(seen...)
	if is.kind == turns {
		w.trace.answer(l.process, commits[0].Partition)
	}

	return errs
}

func (w *stores) commitFastLocked(c *rows.Commit, is call) error {
	_, writes := valueOf(c)
	if w.hastyFast && writes && w.rand.Chance(0.1) {
		return nil
	}

	own := *c
	own.Rows = slices.Clone(c.Rows)
	if w.forgetful && writes && w.rand.Chance(0.1) {
		own.Rows = slices.DeleteFunc(own.Rows, func(r rows.Row) bool { return isRow(r.Name) })
	}

	before := w.fastRowLocked(c.Partition)
	err := w.fast.Commit(context.Background(), []rows.Commit{own})[0]
	isMade := is.of.value.epoch != 0 && !is.of.heals && w.fastRowLocked(c.Partition) != before
	if err == nil && isMade {
		w.madeLocked(c.Partition, is.of)
	}
	w.checkLocked(c.Partition)

	return err
}

// Read implements rows.Store.
func (l fastLink) Read(ctx context.Context, addresses []rows.Address) []rows.Found {
	w := l.of.stores
	return l.read(ctx, false, len(addresses), &w.fastAway, func() ([]rows.Found, *action) {
		found := w.fast.Read(ctx, addresses)
		return found, w.trace.readFast(l.process, callOf(ctx).kind, addresses, found)
	})
}

// Scan implements rows.Store.
func (l fastLink) Scan(
	ctx context.Context, partition int, collection, after string, each func(string, []byte) error,
) error {
	w := l.of.stores
	if !l.reach(ctx, false) {
		return rows.ErrUnavailable
	}

	var found []rows.Row
	w.mu.Lock()
	isAway := w.fastAway || l.IsDead()
	if !isAway {
		_ = w.fast.Scan(ctx, partition, collection, after, func(field string, value []byte) error {
			found = append(found, rows.Row{Name: rows.Name{Field: field}, Value: value})
			return nil
		})
	}
	seen := w.trace.list(l.process, partition, isAway)
	w.mu.Unlock()

	if isAway || !l.answered(ctx, false) {
		return rows.ErrUnavailable
	}
	w.trace.see(seen)
	for _, row := range found {
		if err := each(row.Field, row.Value); err != nil {
			return err
		}
	}

	return nil
}

// Watch implements rows.Store. Owners do not watch.
func (l fastLink) Watch(context.Context, func(int, uint64, []byte), func()) error {
	return rows.ErrUnavailable
}

// durableLink is how a process reaches the durable store.
type durableLink struct{ *process }

var _ Durable = durableLink{}

// Claim implements rows.Store.
func (l durableLink) Claim(ctx context.Context, owner string, partitions []rows.Former) ([]rows.Claim, error) {
	w := l.of.stores
	if !l.reach(ctx, true) {
		return nil, rows.ErrUnavailable
	}

	w.mu.Lock()
	if w.durableAway || l.IsDead() {
		w.mu.Unlock()
		return nil, rows.ErrUnavailable
	}
	claims, err := w.durable.Store.Claim(ctx, owner, partitions)
	var seen []*action
	for i, former := range partitions {
		seen = append(seen, w.trace.claimDurable(l.process, callOf(ctx).kind, former, claims[i]))
	}
	w.mu.Unlock()

	if !l.answered(ctx, true) {
		return nil, rows.ErrUnavailable
	}
	w.trace.see(seen...)
	if callOf(ctx).kind == drains {
		l.tracked.holds(partitions)
	}

	return claims, err
}

// Commit implements rows.Store.
func (l durableLink) Commit(ctx context.Context, commits []rows.Commit) []error {
	w := l.of.stores
	kind := callOf(ctx).kind
	for i := range commits {
		w.trace.send(l.process, kind, &commits[i])
	}

	unavailable := slices.Repeat([]error{rows.ErrUnavailable}, len(commits))
	if !l.reach(ctx, true) {
		return unavailable
	}

	w.mu.Lock()
	if w.durableAway || l.IsDead() {
		w.mu.Unlock()
		return unavailable
	}

	errs := make([]error, len(commits))
	var seen []*action
	for i := range commits {
		errs[i] = w.commitDurableLocked(&commits[i], kind)
		seen = append(seen, w.trace.commitDurable(l.process, kind, &commits[i], errs[i]))
	}

	w.mu.Unlock()

	if !l.answered(ctx, true) {
		return unavailable
	}

	w.trace.see(seen...)
	for i := range commits {
		w.trace.drained(l.process, kind, &commits[i])
	}

	return errs
}

func (w *stores) commitDurableLocked(c *rows.Commit, kind callKind) error {
	_, writes := valueOf(c)
	if w.hastyDurable && writes && w.rand.Chance(0.1) {
		return nil
	}

	own := *c
	own.Rows = slices.Clone(c.Rows)
	if w.trusting && kind == drains {
		w.trustLocked(&own)
	}
	before := w.durableRowLocked(c.Partition)
	upTo := w.drainedLocked(c.Partition).upTo
	err := w.durable.Commit(context.Background(), []rows.Commit{own})[0]
	w.checkLocked(c.Partition)
	w.checkDrainLocked(c, before)
	if is := w.drainedLocked(c.Partition).upTo; is < upTo {
		w.notes.Failf("once", "the durable store of partition %d has what was drained up to %d, after %d",
			c.Partition, is, upTo)
	}

	return err
}

// checkDrainLocked notes if a drain makes a row of the durable store older. That is permitted for versions that were
// not acknowledged, and while the fast store records that a newer row is still to be drained.
func (w *stores) checkDrainLocked(c *rows.Commit, before version) {
	is := w.durableRowLocked(c.Partition)
	if !is.less(before) || w.expected[c.Partition].acknowledged.less(before) {
		return
	}

	upTo := dirtyName(drainOf(c).to).Field
	isMarked := false
	_ = w.fast.Scan(context.Background(), c.Partition, dirtyRows, upTo, func(string, []byte) error {
		isMarked = true
		return nil
	})

	if !isMarked {
		w.notes.Failf("once", "the durable store has %v of partition %d after %v", is, c.Partition, before)
	}
}

// trustLocked gives a commit the epoch and the numbers with which it is accepted.
func (w *stores) trustLocked(c *rows.Commit) {
	probe := *c
	probe.Epoch = 0
	if fenced, ok := w.durable.Store.Commit(context.Background(), []rows.Commit{probe})[0].(*rows.Fenced); ok {
		c.Epoch = fenced.Epoch
	}
	probe = rows.Commit{Partition: c.Partition, Epoch: c.Epoch, After: 1 << 60, Number: 1<<60 + 1}
	if lost, ok := w.durable.Store.Commit(context.Background(), []rows.Commit{probe})[0].(*rows.Lost); ok {
		c.After = lost.Number
		c.Number = lost.Number + 1
	}
}

// Read implements rows.Store.
func (l durableLink) Read(ctx context.Context, addresses []rows.Address) []rows.Found {
	w := l.of.stores
	return l.read(ctx, true, len(addresses), &w.durableAway, func() ([]rows.Found, *action) {
		found := w.durable.Store.Read(ctx, addresses)
		return found, w.trace.readDurable(l.process, callOf(ctx).kind, addresses, found)
	})
}

// Changed implements Durable. It examines all rows at once, as the formal model does.
func (l durableLink) Changed(
	ctx context.Context, partition int, after uint64, from rows.Place,
) (some []rows.Row, next rows.Place, err error) {
	w := l.of.stores
	if !l.reach(ctx, true) {
		return nil, from, rows.ErrUnavailable
	}

	w.mu.Lock()
	isAway := w.durableAway || l.IsDead()
	next = from
	for !isAway && !next.End {
		var more []rows.Row
		more, next, _ = w.durable.Changed(context.Background(), partition, after, next)
		some = append(some, more...)
	}
	seen := w.trace.readChanged(l.process, partition, isAway)
	w.mu.Unlock()

	if isAway || !l.answered(ctx, true) {
		return nil, from, rows.ErrUnavailable
	}
	w.trace.see(seen)

	return some, next, nil
}

// Scan implements rows.Store. Collections are not read here.
func (l durableLink) Scan(context.Context, int, string, string, func(string, []byte) error) error {
	return rows.ErrUnavailable
}

// Remembered implements Durable. There are no IDs.
func (l durableLink) Remembered(context.Context, int, []rows.ID) ([]rows.ID, error) { return nil, nil }

// Watch implements rows.Store. Owners do not watch.
func (l durableLink) Watch(context.Context, func(int, uint64, []byte), func()) error {
	return rows.ErrUnavailable
}
