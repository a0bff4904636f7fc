package owner

import (
	"cmp"
	"errors"
	"slices"
	"time"

	"headcount/internal/marks"
	"headcount/internal/rows"
	"headcount/internal/wake"
)

var (
	knownToStore  = marks.Sometimes("an idempotency key is known to the store alone")
	inDoubt       = marks.Sometimes("a commit has no known outcome")
	fencedOrLost  = marks.Sometimes("a commit is refused by the fence or after a loss")
	leftInDoubt   = marks.Sometimes("a partition is given up while a commit of it is in doubt")
	replaced      = marks.Sometimes("an owner that was replaced gives a partition up")
	healsInPieces = marks.Sometimes("what the store lost is written again in pieces")
)

// giveUp ends the ownership of p and makes its callers turn to the new owner. The caller has the turn.
func (o *Owner) giveUp(p *partition) {
	// The commit of these calls may yet reach the store. Then the next owner finds their answers, which are part of it.
	o.fail(p, ErrNotOwner)

	o.mu.Lock()
	if o.owned[p.id] == p {
		o.owned[p.id] = nil
	}
	// From here on no call can enter the queue, since the partition is not owned any more.
	queue := p.queue
	p.queue = nil
	if p.unsure {
		leftInDoubt.Reached()
	}
	o.mu.Unlock()

	for _, one := range queue {
		o.refuse(one, ErrNotOwner)
	}
}

// heal claims p again after the store has refused a commit, and has every row written that the store may lack, or gives
// p up if another process has claimed it. The calls in the turn of p are judged again, unless the store has made that
// commit before. The caller has the turn. It does not wait for the claim, which may take long, because other partitions
// need the turn.
func (o *Owner) heal(p *partition, commit *rows.Commit) {
	fencedOrLost.Reached()
	own := cloned(commit)
	former := rows.Former{Partition: p.id, Epoch: p.epoch}
	healed := make(chan struct{})

	o.mu.Lock()
	defer o.mu.Unlock()

	p.unsure = true
	// From here on a release waits, because only this process has what the store may have lost.
	p.healed = healed
	o.wg.Go(func() {
		defer close(healed)
		o.claimAgain(p, former, &own)
	})
}

// claimAgain claims p again, and then takes the turn to go on.
func (o *Owner) claimAgain(p *partition, former rows.Former, commit *rows.Commit) {
	// A tiered store makes one claim at a time, and the time of the others would run out while they wait there.
	if o.wait(o.ctx, o.reclaiming) != nil {
		return // Close gives the partition up
	}
	// The claim names the former claim, so it is refused if another process has claimed the partition since.
	ctx, cancel := o.limited()
	claims, err := o.store.Claim(ctx, o.cfg.Name, []rows.Former{former})
	cancel()
	o.reclaiming.unlock()

	if o.lock(o.ctx) != nil {
		return
	}
	defer o.unlock()

	o.mu.Lock()
	released := o.sureLocked(p)
	o.mu.Unlock()
	// Its callers have turned to the next owner.
	if released {
		return
	}

	if err == nil {
		err = claims[0].Err
	}
	if err != nil {
		// The outcome is unknown: the claim may have been granted. Repeat the commit until the store answers; its
		// answer leads here again. Until then p is kept, because it alone may have what the store lost.
		o.doubt(p, commit)
		return
	}
	o.healClaimed(p, claims[0], commit)
}

// healClaimed goes on with a partition that has been claimed again, or is another process's now. The caller has the
// turn.
func (o *Owner) healClaimed(p *partition, claim rows.Claim, commit *rows.Commit) {
	if claim.Epoch == 0 {
		replaced.Reached()
		o.giveUp(p)
		return
	}

	// An earlier attempt may have made the commit that the store refused in the end, for example because a claim of
	// this process arrived late. Without that commit, the rows in memory would be older than those in the store.
	wasMade := claim.Number == commit.Number && commit.Number > p.number
	if wasMade {
		p.number = commit.Number
		o.land(p)
	} else {
		o.requeue(p)
	}

	// The commits that heal have to name the new claim.
	p.epoch = claim.Epoch
	_ = o.emptyCommit(p) // starts the draft that handleOutcome ends after the last piece
	pieces := p.healing(claim.Number, o.cfg.HealRows)
	if len(pieces) > 1 {
		healsInPieces.Reached()
	}
	o.commitLater(p, pieces, make(chan struct{}))
}

// healing returns the commits that restore a store whose newest commit has the given number.
//
// There are several, so that they do not block other work of the store. They are ordered by the numbers of the rows:
// each commit has all rows of a range of numbers, and its own number is the greatest of them. So the invariant holds at
// every moment that a store with some number has every row with that number or a lower one.
//
// A lost commit's IDs and answers of streams keep its number, while its counters may have got greater numbers since. So
// no change of a counter is restored before them: if this owner dies between two of the commits, a repeated call still
// finds that it was made.
func (p *partition) healing(number uint64, most int) []rows.Commit {
	now := time.Now()
	commit := rows.Commit{Partition: p.id, Epoch: p.epoch, After: number, At: now}

	var pieces []rows.Commit
	var before uint64
	for _, one := range p.after(number, now) {
		// A piece ends only between two numbers, so that a store with a number has all rows of it.
		if one.number > before && len(commit.Rows)+len(commit.IDs) >= most {
			commit.Number = before
			pieces = append(pieces, commit)
			commit = rows.Commit{Partition: p.id, Epoch: p.epoch, After: before, At: now}
		}
		before = one.number

		// A restored row or ID counts as written just now, and stays in memory that long: the store may lose it again.
		if one.isID {
			commit.IDs = append(commit.IDs, one.id)
			p.ids.put(one.id.Bytes, remembered{until: one.id.Until, number: one.number})
		} else {
			commit.Rows = append(commit.Rows, one.row)
			p.written.put(one.row.Name, row{value: one.row.Value, number: one.number})
		}
	}

	// The meta row has no number, so it is always written: the store's row may come from an earlier owner.
	if p.meta.loaded {
		commit.Rows = append(commit.Rows, rows.Row{Name: metaRow, Value: p.meta.encode()})
	}
	commit.Number = max(p.number, number) + 1
	commit.Publication = anything
	marks.Must(commit.Number > before, "commits that restore a store are in the order of their rows")

	return append(pieces, commit)
}

// numbered is a row or an ID with the number of the commit that wrote it, or a greater number.
type numbered struct {
	number uint64
	row    rows.Row
	isID   bool
	id     rows.ID
}

// after returns everything in memory with a greater number, in the order of the numbers.
func (p *partition) after(number uint64, now time.Time) []numbered {
	var all []numbered
	for name, is := range p.written.all() {
		if is.number > number && name != metaRow {
			all = append(all, numbered{number: is.number, row: rows.Row{Name: name, Value: is.value}})
		}
	}
	for name, is := range p.rows.all() {
		// A row that is also in written has the same value here, but the cache may have the greater number of a later
		// read.
		if is.number > number && name != metaRow && !p.written.has(name) {
			all = append(all, numbered{number: is.number, row: rows.Row{Name: name, Value: is.value}})
		}
	}
	for id, is := range p.ids.all() {
		if is.number > number && is.until.After(now) {
			all = append(all, numbered{number: is.number, isID: true, id: rows.ID{Bytes: id, Until: is.until}})
		}
	}
	// The order within one number does not matter, because no piece ends there.
	slices.SortFunc(all, func(a, b numbered) int { return cmp.Compare(a.number, b.number) })

	return all
}

// emptyCommit starts a draft for p and returns a commit without changes. The caller has the turn.
func (o *Owner) emptyCommit(p *partition) rows.Commit {
	// The outcome copies the draft's meta to the partition, so an empty draft needs the partition's own.
	p.draft = o.newDraft(p, time.Now())
	p.draft.meta = p.meta

	var c rows.Commit
	p.draft.commit(&c, false)

	return c
}

// doubt hands p over to a goroutine of its own, because the outcome of its commit is unknown.
func (o *Owner) doubt(p *partition, commit *rows.Commit) {
	inDoubt.Reached()

	o.commitLater(p, []rows.Commit{cloned(commit)}, nil)
}

// cloned returns a copy of a commit. Its partition may be given up before the outcome is known, and then another one
// uses the draft and its slices.
func cloned(commit *rows.Commit) rows.Commit {
	own := *commit
	own.Rows = slices.Clone(commit.Rows)
	own.IDs = slices.Clone(commit.IDs)
	own.Asked = slices.Clone(commit.Asked)

	return own
}

// commitLater hands p over to a goroutine of its own, which makes commits and waits for their outcomes. Until these are
// known, turns skip p. Healed is nil, or closed at the end.
func (o *Owner) commitLater(p *partition, commits []rows.Commit, healed chan struct{}) {
	o.mu.Lock()
	defer o.mu.Unlock()

	p.unsure = true
	p.healed = healed
	o.wg.Go(func() { o.commitAll(p, commits, healed) })
}

// commitAll makes commits one after another, until one of them fails.
func (o *Owner) commitAll(p *partition, commits []rows.Commit, healed chan struct{}) {
	if healed != nil {
		defer close(healed)
		// Only one partition at a time: many partitions may have lost data at the same moment.
		select {
		case o.healing <- struct{}{}:
			defer func() { <-o.healing }()
		case <-o.ctx.Done():
			return // Close gives the partition up
		}
	}

	// Each commit follows the one before it, so after a failure the rest cannot be made.
	var last *rows.Commit
	var err error
	for i := range commits {
		last = &commits[i]
		err = o.insist(last)
		// The store may have lost rows and kept the IDs of their commits, as a Redis does that evicts keys. Then the
		// rest is missing.
		var known *rows.Known
		for healed != nil && errors.As(err, &known) {
			last.IDs = rows.Without(last.IDs, known.IDs)
			err = o.insist(last)
		}
		if err != nil {
			break
		}
		if healed != nil {
			o.healed.Add(uint64(len(last.Rows) + len(last.IDs)))
		}
	}

	// The outcome changes the partition's memory, which belongs to whoever has the turn.
	if o.lock(o.ctx) != nil {
		// Close has taken the turn for good, and gives the partition up.
		return
	}
	defer o.unlock()

	// From here on a turn may take calls from the queue again.
	o.mu.Lock()
	released := o.sureLocked(p)
	if len(p.queue) > 0 {
		o.listLocked(p)
		p.callQueueLocked()
	}
	o.mu.Unlock()

	// If the partition was released in the meantime, its callers have turned to the next owner, which knows the stored
	// answers.
	if !released {
		o.handleOutcome(p, last, err)
	}
	// Commits that heal name no counters, so watchers have to read theirs again.
	if healed != nil && o.cfg.Hub != nil {
		o.cfg.Hub.MarkMissed()
	}
}

// sureLocked ends the time in which turns skip p, and reports whether p was released in it. The caller has the turn and
// mu.
func (o *Owner) sureLocked(p *partition) (released bool) {
	p.unsure = false
	p.healed = nil

	return o.owned[p.id] != p
}

// insist repeats a commit until its outcome is known. ErrFull does not count as an outcome: an earlier attempt may
// reach the store late, when it is not full any more.
func (o *Owner) insist(commit *rows.Commit) error {
	// Other partitions do not wait here, so a commit of many rows gets the time that a turn does not have.
	longer := rows.TimeFor([]rows.Commit{*commit})
	for {
		// The number stays the same, so a store that already has the commit reports success.
		err := o.writeLonger([]rows.Commit{*commit}, longer)[0]
		if !errors.Is(err, rows.ErrUnavailable) && !errors.Is(err, rows.ErrFull) {
			return err
		}
		if !wake.Wait(o.ctx, o.cfg.RepeatAfter, nil) {
			return err
		}
	}
}

// verify checks at intervals, even without any traffic, whether the store has lost data.
func (o *Owner) verify() {
	const parts = 5 // groups of partitions that are checked one after the other, so that not all commits come at once
	for round := 0; wake.Wait(o.ctx, o.cfg.VerifyEvery/parts, nil); round++ {
		if o.lock(o.ctx) != nil {
			return
		}
		o.verifyEach(round%parts, parts)
		o.unlock()
	}
}

// verifyEach checks every parts-th partition, beginning with part. The caller has the turn.
func (o *Owner) verifyEach(part, parts int) {
	var some []*partition
	cached := 0
	bytes := 0
	for _, p := range o.partitions() {
		cached += p.rows.len()
		bytes += p.rows.bytes()
		if p.id%parts == part {
			some = append(some, p)
		}
	}

	o.cached.Store(int64(cached))
	o.bytes.Store(int64(bytes))
	o.check(some)
}

// check makes an empty commit of each partition. The outcome shows whether the store has lost something, or another
// process has claimed the partition. The caller has the turn.
func (o *Owner) check(partitions []*partition) {
	var idle []*partition
	var commits []rows.Commit
	for _, p := range partitions {
		// The outcome of an unsure partition's commit says the same as an empty commit would.
		if o.isUnsure(p) {
			continue
		}

		idle = append(idle, p)
		commits = append(commits, o.emptyCommit(p))
	}

	o.commit(idle, commits)
}

func (o *Owner) isUnsure(p *partition) bool {
	o.mu.Lock()
	defer o.mu.Unlock()

	return p.unsure
}

// isHealing reports whether rows of p that the store has lost are being written again.
func (o *Owner) isHealing(p *partition) bool {
	o.mu.Lock()
	defer o.mu.Unlock()

	return p.healed != nil
}
