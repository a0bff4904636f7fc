package owner

import (
	"context"
	"errors"
	"fmt"
	"time"

	"headcount/counter"
	"headcount/internal/marks"
	"headcount/internal/rows"
)

// makeTurn makes the waiting calls. The caller has the turn.
func (o *Owner) makeTurn() {
	o.make(o.take())
}

// make judges the calls that take has moved into the turn, and commits what they change. The caller has the turn.
func (o *Owner) make(work []*partition) {
	now := time.Now()
	o.keep(o.judge(work, now), now)
}

// keep commits the complete drafts of partitions. The caller has the turn.
func (o *Owner) keep(drafted []*partition, now time.Time) {
	dirty := drafted[:0]
	commits := o.scratch.commits[:0]
	for _, p := range drafted {
		// A draft without changes is committed as well: another process may have claimed the partition since, and only
		// the store knows. A store that loses nothing has only one process, so there the commit can be skipped.
		isAlone := o.cfg.VerifyEvery < 0
		changesNothing := isAlone && p.draft.empty()
		if changesNothing || p.draft.stays() {
			o.land(p)
			continue
		}

		dirty = append(dirty, p)
		commits = append(commits, rows.Commit{})
		p.draft.commit(&commits[len(commits)-1], o.cfg.Hub == nil)
	}

	// One call of the store has them all, so a turn costs one round trip however many partitions it changes.
	o.commit(dirty, commits)
	// The buffer must not keep the rows of this turn alive.
	clear(commits)
	o.scratch.commits = commits
	o.memory.forget(now, o)
}

// take moves waiting calls into the turn, and returns the partitions that have any.
func (o *Owner) take() []*partition {
	o.mu.Lock()
	defer o.mu.Unlock()

	work := o.scratch.work[:0]
	for _, p := range o.busy {
		p.listed = false
		// An unsure partition is listed again once the outcome of its commit is known.
		if p.unsure || len(p.queue) == 0 {
			continue
		}

		p.takeLocked(o.cfg.Batch)
		work = append(work, p)
	}
	// Calls that arrive from now on list their partitions again.
	clear(o.busy)
	o.busy = o.busy[:0]
	o.scratch.work = work

	// Calls beyond the batch wait for another turn.
	for _, p := range work {
		if len(p.queue) > 0 {
			o.listLocked(p)
			p.callQueueLocked()
		}
	}

	return work
}

// judge drafts the calls of partitions, and returns the partitions whose drafts are complete. If judging shows that a
// draft needs more rows, these are read, and its calls are judged again.
func (o *Owner) judge(work []*partition, now time.Time) []*partition {
	for _, p := range work {
		p.draft = o.newDraft(p, now)
		// Gather the rows for one read. A store in memory (near) is asked row by row.
		if o.near == nil {
			p.draft.prepare(p.calls)
		}
	}

	complete := o.scratch.complete[:0]
	for len(work) > 0 {
		var incomplete []*partition
		for _, p := range o.read(work) {
			p.draft.judge(p.calls)
			switch {
			case p.draft.malformed != nil:
				o.fail(p, fmt.Errorf("owner: %w", p.draft.malformed))
			case p.draft.missing > 0:
				incomplete = append(incomplete, p)
			default:
				complete = append(complete, p)
			}
		}
		// Few calls get here: only those that need rows which they do not name and which are not in memory.
		work = incomplete
	}
	o.scratch.complete = complete

	return complete
}

// read reads the rows that the drafts of partitions lack, and returns the partitions for which that succeeded.
func (o *Owner) read(work []*partition) []*partition {
	addresses := o.scratch.addresses[:0]
	for _, p := range work {
		addresses = p.draft.appendMissing(addresses)
	}
	if len(addresses) == 0 {
		return work
	}

	// One read serves all partitions.
	ctx, cancel := o.limited()
	found := o.store.Read(ctx, addresses)
	cancel()

	clear(addresses)
	o.scratch.addresses = addresses

	ready := o.scratch.ready[:0]
	// The rows are in the order of the partitions, and within each in that of its draft.
	for _, p := range work {
		n := p.draft.missing
		if err := p.draft.fill(found[:n]); err != nil {
			o.fail(p, unavailable("read", err))
		} else {
			ready = append(ready, p)
		}
		found = found[n:]
	}
	o.scratch.ready = ready

	return ready
}

// limited returns a context for one call of the store.
func (o *Owner) limited() (context.Context, context.CancelFunc) { return o.limitedLonger(0) }

// limitedLonger is limited for a call that may take so much longer than others.
func (o *Owner) limitedLonger(longer time.Duration) (context.Context, context.CancelFunc) {
	if o.cfg.WriteTimeout < 0 {
		return o.ctx, func() {}
	}

	return context.WithTimeout(o.ctx, o.cfg.WriteTimeout+longer)
}

// commit makes the commits of partitions and handles their outcomes. The caller has the turn.
func (o *Owner) commit(partitions []*partition, commits []rows.Commit) {
	if len(commits) == 0 {
		return
	}

	errs := o.write(commits)
	for i, p := range partitions {
		o.handleOutcome(p, &commits[i], errs[i])
	}
}

// write makes commits, within the time limit.
func (o *Owner) write(commits []rows.Commit) []error { return o.writeLonger(commits, 0) }

// writeLonger is write for commits that may take so much longer than others.
func (o *Owner) writeLonger(commits []rows.Commit, longer time.Duration) []error {
	if o.near != nil {
		// Memory answers at once, so a limit would only cost its timer.
		return o.store.Commit(o.ctx, commits)
	}

	ctx, cancel := o.limitedLonger(longer)
	defer cancel()

	return o.store.Commit(ctx, commits)
}

// handleOutcome handles the outcome of p's commit, which may be unknown. The caller has the turn.
func (o *Owner) handleOutcome(p *partition, commit *rows.Commit, err error) {
	// This is the usual outcome, so it comes before the slower tests of error types.
	if err == nil {
		marks.Must(commit.Number > p.number, "the numbers of a partition's commits grow")
		p.number = commit.Number
		o.land(p)
		return
	}

	var fenced *rows.Fenced
	var lost *rows.Lost
	var known *rows.Known

	switch {
	case errors.As(err, &known):
		p.learn(known.IDs)
		o.requeue(p)
	case errors.As(err, &lost), errors.As(err, &fenced):
		o.heal(p, commit) // gives p up if another process has claimed it
	case errors.Is(err, rows.ErrFull):
		// The store says for certain that nothing was written, so this is no doubt.
		o.fail(p, fmt.Errorf("owner: %w: %w", counter.ErrBusy, err))
	default:
		o.doubt(p, commit)
	}
}

// land moves the committed draft of p into memory, and answers its calls. The caller has the turn.
func (o *Owner) land(p *partition) {
	d := p.draft
	p.landDraft()
	// Publish before the answer, so that no watcher gets an older value than the caller already has.
	if o.cfg.Hub != nil {
		o.cfg.Hub.Publish(d.news, d.counter)
	}

	// Other regions must not learn of what is not committed.
	if len(d.sharesToSend) > 0 && o.cfg.Shared != nil {
		o.cfg.Shared(p.id, p.epoch, d.sharesToSend)
	}

	for _, one := range p.calls {
		o.answer(one)
	}
	o.end(p)
}

// fail answers the calls in the turn of p with an error. They have had no effect, unless their commit is in doubt.
func (o *Owner) fail(p *partition, err error) {
	for _, one := range p.calls {
		o.refuse(one, err)
	}
	o.end(p)
}

// end ends the turn of p.
func (o *Owner) end(p *partition) {
	clear(p.calls)
	p.calls = p.calls[:0]
	o.dropDraft(p)
}

// requeue puts the calls in the turn of p back at the front of its queue, and a later turn judges them again. It
// refuses calls whose caller has left, since that caller may have reused their operations. The caller has the turn.
func (o *Owner) requeue(p *partition) {
	calls := p.calls
	p.calls = nil
	o.dropDraft(p)

	var again []*pending
	for _, one := range calls {
		if one.withdrawn {
			o.refuse(one, counter.ErrUnavailable)
		} else {
			again = append(again, one)
		}
	}

	o.mu.Lock()
	defer o.mu.Unlock()

	p.queue = append(again, p.queue...)
	if len(p.queue) > 0 {
		o.listLocked(p)
		p.callQueueLocked()
	}
}

// newDraft returns an empty draft, which may be a reused one. The caller has the turn.
func (o *Owner) newDraft(p *partition, now time.Time) *draft {
	var d *draft
	last := len(o.scratch.drafts) - 1
	if last < 0 {
		d = &draft{}
	} else {
		d = o.scratch.drafts[last]
		o.scratch.drafts = o.scratch.drafts[:last]
	}

	d.p = p
	d.near = o.near
	d.now = now
	d.region = o.cfg.Region

	return d
}

// dropDraft ends the draft of p, if it has one. The caller has the turn.
func (o *Owner) dropDraft(p *partition) {
	d := p.draft
	p.draft = nil
	// A draft that has grown large is not reused, so that its memory is freed.
	if d != nil && d.reset() {
		o.scratch.drafts = append(o.scratch.drafts, d)
	}
}
