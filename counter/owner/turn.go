package owner

import (
	"context"
	"errors"
	"fmt"
	"time"

	"headcount/counter"
	"headcount/internal/rows"
)

// makeTurn makes the calls that wait. The caller has the turn.
func (o *Owner) makeTurn() {
	o.make(o.take())
}

// make makes the calls that partitions have in the turn. The caller has the turn.
func (o *Owner) make(work []*partition) {
	now := time.Now()
	drafted := o.judge(work, now)

	dirty := drafted[:0]
	commits := o.scratch.commits[:0]
	for _, p := range drafted {
		// What changes nothing is committed as well: another process may have claimed the partition since, and only the
		// store knows. One that loses nothing has no other owner.
		isAlone := o.cfg.VerifyEvery < 0
		if isAlone && p.draft.empty() || p.draft.stays() {
			o.land(p)
			continue
		}

		dirty = append(dirty, p)
		commits = append(commits, rows.Commit{})
		p.draft.commit(&commits[len(commits)-1], o.cfg.Hub == nil)
	}

	o.commit(dirty, commits)
	// Nothing may keep the rows of this turn alive.
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
		if p.unsure || len(p.queue) == 0 {
			continue
		}

		p.takeLocked(o.cfg.Batch)
		work = append(work, p)
	}
	// Who comes from now on is listed anew.
	clear(o.busy)
	o.busy = o.busy[:0]
	o.scratch.work = work

	// Calls that were left wait for another turn.
	for _, p := range work {
		if len(p.queue) > 0 {
			o.listLocked(p)
			p.callQueueLocked()
		}
	}

	return work
}

// judge drafts the calls of partitions, and returns the partitions whose drafts are complete. A draft that needs more
// rows than its calls name finds that out by judging them, and then judges them again.
func (o *Owner) judge(work []*partition, now time.Time) []*partition {
	for _, p := range work {
		p.draft = o.newDraft(p, now)
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
		// Few calls come here: those that need rows which they do not name, and these are not in memory.
		work = incomplete
	}
	o.scratch.complete = complete

	return complete
}

// read reads the rows that the drafts of partitions miss, and returns the partitions that have them now.
func (o *Owner) read(work []*partition) []*partition {
	addresses := o.scratch.addresses[:0]
	for _, p := range work {
		addresses = p.draft.appendMissing(addresses)
	}
	if len(addresses) == 0 {
		return work
	}

	// One read for all partitions, however many rows are missing.
	ctx, cancel := o.limited()
	found := o.store.Read(ctx, addresses)
	cancel()

	clear(addresses)
	o.scratch.addresses = addresses

	ready := o.scratch.ready[:0]
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

// limited returns the context of one call of the store.
func (o *Owner) limited() (context.Context, context.CancelFunc) {
	if o.cfg.WriteTimeout < 0 {
		return o.ctx, func() {}
	}

	return context.WithTimeout(o.ctx, o.cfg.WriteTimeout)
}

// commit makes the commits of partitions and goes on with the outcomes. The caller has the turn.
func (o *Owner) commit(partitions []*partition, commits []rows.Commit) {
	if len(commits) == 0 {
		return
	}

	errs := o.write(commits)
	for i, p := range partitions {
		o.settled(p, &commits[i], errs[i])
	}
}

// write makes commits, with a limit in time.
func (o *Owner) write(commits []rows.Commit) []error {
	if o.near != nil {
		return o.store.Commit(o.ctx, commits)
	}

	ctx, cancel := o.limited()
	defer cancel()

	return o.store.Commit(ctx, commits)
}

// settled goes on with p when the outcome of its commit is known, or unknown. The caller has the turn.
func (o *Owner) settled(p *partition, commit *rows.Commit, err error) {
	// The usual outcome, and the only one that is not slow anyway.
	if err == nil {
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
		o.heal(p) // or give it up, if another process has claimed it
	case errors.Is(err, rows.ErrFull):
		o.fail(p, fmt.Errorf("owner: %w: %w", counter.ErrBusy, err))
	default:
		o.doubt(p, commit)
	}
}

// land moves the draft of p, which the store has, into memory, and answers its calls. The caller has the turn.
func (o *Owner) land(p *partition) {
	// The draft is read until the last call is answered.
	d := p.draft
	p.landDraft()
	// Before the answer, so that a watcher never gets an older value than a caller had.
	if o.cfg.Hub != nil {
		o.cfg.Hub.Publish(d.news, d.counter)
	}

	if len(d.told) > 0 && o.cfg.Shared != nil {
		o.cfg.Shared(p.id, p.epoch, d.told)
	}

	for _, one := range p.calls {
		o.answer(one)
	}
	o.end(p)
}

// fail answers the calls in the turn of p with an error. Nothing of them was made.
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

// requeue puts the calls in the turn of p before those that wait. A later turn judges them anew, apart from those whose
// caller has gone: their operations may be others by now. The caller has the turn.
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

// newDraft returns an empty draft, perhaps one that was used before. The caller has the turn.
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
	// A draft that has grown large is left to the garbage collector.
	if d != nil && d.reset() {
		o.scratch.drafts = append(o.scratch.drafts, d)
	}
}
