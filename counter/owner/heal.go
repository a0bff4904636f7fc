package owner

import (
	"errors"
	"time"

	"headcount/internal/rows"
	"headcount/internal/wake"
)

// giveUp ends the ownership of p and sends its callers elsewhere. The caller has the turn.
func (o *Owner) giveUp(p *partition) {
	o.fail(p, ErrNotOwner)

	o.mu.Lock()
	if o.owned[p.id] == p {
		o.owned[p.id] = nil
	}
	// After this nobody can enter the queue, since the partition is owned no more.
	queue := p.queue
	p.queue = nil
	o.mu.Unlock()

	for _, one := range queue {
		o.refuse(one, ErrNotOwner)
	}
}

// heal claims p again and writes every row that the store may lack, or gives p up if another process has claimed it.
// The calls in the turn of p are judged anew after that. The caller has the turn.
func (o *Owner) heal(p *partition) {
	o.requeue(p)

	// The claim names the former one, so it fails if somebody else has claimed since.
	ctx, cancel := o.limited()
	claims, err := o.store.Claim(ctx, o.cfg.Name, []rows.Former{{Partition: p.id, Epoch: p.epoch}})
	cancel()
	if err != nil {
		// The claim may have been granted. An empty commit, repeated until the store answers, leads here again.
		nothing := o.nothing(p)
		o.doubt(p, &nothing)
		return
	}
	if claims[0].Epoch == 0 {
		o.giveUp(p)
		return
	}

	p.draft = o.newDraft(p, time.Now())
	o.commit([]*partition{p}, []rows.Commit{p.healing(claims[0], o.cfg.Hub == nil)})
}

// nothing drafts and returns a commit that changes nothing. The caller has the turn.
func (o *Owner) nothing(p *partition) rows.Commit {
	p.draft = o.newDraft(p, time.Now())

	var c rows.Commit
	p.draft.commit(&c, false)

	return c
}

// doubt leaves p to a goroutine of its own, because the outcome of its commit is unknown. Until it is known the turns
// leave p alone.
func (o *Owner) doubt(p *partition, commit *rows.Commit) {
	o.mu.Lock()
	defer o.mu.Unlock()

	p.commit = *commit
	p.unsure = true
	o.wg.Go(func() { o.settle(p) })
}

// settle repeats the commit of p until its outcome is known. An earlier attempt may still reach a store that is full
// now but not then, so a full store decides nothing.
func (o *Owner) settle(p *partition) {
	err := error(rows.ErrUnavailable)
	for errors.Is(err, rows.ErrUnavailable) || errors.Is(err, rows.ErrFull) {
		if !wake.Wait(o.ctx, o.cfg.RepeatAfter, nil) {
			return
		}
		// The same commit with the same number: a store that has it already says so.
		err = o.write([]rows.Commit{p.commit})[0]
	}

	if o.lock(o.ctx) != nil {
		return
	}
	defer o.unlock()

	// Only now may a turn look into the queue again.
	o.mu.Lock()
	p.unsure = false
	released := o.owned[p.id] != p
	if len(p.queue) > 0 {
		o.listLocked(p)
		p.callQueueLocked()
	}
	o.mu.Unlock()

	// The callers of a partition that was released meanwhile have turned to its next owner, which finds what was made.
	if !released {
		commit := p.commit
		o.settled(p, &commit, err)
	}
}

// verify finds out, also without any traffic, whether the store has lost something.
func (o *Owner) verify() {
	const parts = 5 // of the partitions, one after another, so that the store does not get all at once
	for turn := 0; wake.Wait(o.ctx, o.cfg.VerifyEvery/parts, nil); turn++ {
		if o.lock(o.ctx) != nil {
			return
		}
		o.verifyEach(turn%parts, parts)
		o.unlock()
	}
}

// verifyEach makes empty commits of the partitions whose number is part modulo parts. The caller has the turn.
func (o *Owner) verifyEach(part, parts int) {
	var idle []*partition
	var commits []rows.Commit
	for _, p := range o.partitions() {
		if p.id%parts != part || o.isUnsure(p) {
			continue
		}

		idle = append(idle, p)
		commits = append(commits, o.nothing(p))
	}

	o.commit(idle, commits)
}

func (o *Owner) isUnsure(p *partition) bool {
	o.mu.Lock()
	defer o.mu.Unlock()

	return p.unsure
}
