package rowstier

import (
	"context"
	"errors"
	"slices"
	"time"

	"headcount/internal/rows"
	"headcount/internal/wake"
)

// drainEach drains at intervals until ctx ends.
func (s *Store) drainEach(ctx context.Context) {
	pause := s.cfg.DrainEvery
	for wake.Wait(ctx, pause, nil) {
		_, err := s.drain(ctx)
		pause = s.cfg.DrainEvery
		if err != nil {
			pause *= 5
		}
	}
}

// drain writes pending changes to the back. It returns how many rows and IDs are left, and the last error.
func (s *Store) drain(ctx context.Context) (left int, err error) {
	defer s.hold()()

	ctx, cancel := context.WithTimeout(ctx, s.cfg.Timeout)
	defer cancel()

	// Partitions that cannot be claimed now do not hold up the others.
	err = s.claimBack(ctx)
	if failed := s.send(ctx); failed != nil {
		err = failed
	}
	s.say(err)

	return s.Dirty(), err
}

// send writes the pending changes of the partitions that are claimed in the back. It returns the last error.
func (s *Store) send(ctx context.Context) error {
	var sent []*partition
	var commits []rows.Commit
	for id := range s.partitions {
		p := &s.partitions[id]
		commit := p.toSend(time.Now())
		if commit != nil {
			sent = append(sent, p)
			commits = append(commits, *commit)
		}
	}
	if len(commits) == 0 {
		return nil
	}

	var last error
	for i, outcome := range s.back.Commit(ctx, commits) {
		if err := sent[i].sent(&commits[i], outcome); err != nil {
			last = err
		}
	}

	return last
}

// say logs once when writes to the back begin to fail, and once when they work again. It logs at level info only,
// because the connection to the back logs the warning. The caller holds draining.
func (s *Store) say(err error) {
	if err != nil && s.away == nil {
		s.cfg.Log.Info().Err(err).
			Msg("counters: the durable store cannot be written; changes stay in the fast store until it can")
	}
	if err == nil && s.away != nil {
		s.cfg.Log.Info().Msg("counters: the durable store can be written again")
	}

	s.away = err
}

// claimBack claims in the back the partitions that this process owns in the front.
func (s *Store) claimBack(ctx context.Context) error {
	byOwner := map[string][]rows.Former{}
	for id := range s.partitions {
		if owner, former := s.partitions[id].unclaimed(); owner != "" {
			byOwner[owner] = append(byOwner[owner], former)
		}
	}

	var err error
	for owner, formers := range byOwner {
		claims, failed := s.back.Claim(ctx, owner, formers)
		if failed != nil {
			err = failed
			continue
		}

		for i, claim := range claims {
			p := &s.partitions[formers[i].Partition]
			if claim.Epoch > 0 {
				p.claimedBack(claim)
				continue
			}

			if failed := s.outrun(ctx, p); failed != nil {
				err = failed
			}
		}
	}

	return err
}

// unclaimed returns the owner and the former claim of the partition if it has undrained changes and is not claimed in
// the back yet. Otherwise the owner is empty.
func (p *partition) unclaimed() (string, rows.Former) {
	p.mu.Lock()
	defer p.mu.Unlock()

	if p.claimed || p.dirtyLocked() == 0 {
		return "", rows.Former{}
	}

	return p.owner, rows.Former{Partition: p.id, Epoch: p.backEpoch}
}

// outrun makes this process give up a partition that another process has claimed in the back. If the back still belongs
// to this front, the partition is contested and only the front can decide: the other process may have been the earlier
// owner there and merely late to claim the back.
func (s *Store) outrun(ctx context.Context, p *partition) error {
	row := s.back.Read(ctx, []rows.Address{{Partition: p.id, Name: drainedName}})[0]
	if row.Err != nil {
		return row.Err
	}

	p.mu.Lock()
	defer p.mu.Unlock()

	isOurs := decodeHad(row.Value).token == p.state.token
	p.leaveLocked()
	p.contested = isOurs
	p.ousted = !isOurs

	return nil
}

// claimedBack records a claim in the back.
func (p *partition) claimedBack(claim rows.Claim) {
	p.mu.Lock()
	defer p.mu.Unlock()

	p.claimedBackLocked(claim)
}

// claimedBackLocked is claimedBack for a caller that holds mu.
func (p *partition) claimedBackLocked(claim rows.Claim) {
	p.claimed = true
	p.backEpoch = claim.Epoch
	p.backHas = claim.Number
	p.state.back = claim.Number
	if p.sending == nil {
		return
	}

	// The outcome of sending is unknown, so send it again under the new claim: writing it twice does no harm.
	again := *p.sending
	again.Epoch = claim.Epoch
	again.After = claim.Number
	again.Number = claim.Number + 1
	// The front may have been given another token meanwhile. Its row is the last one, see toSend.
	again.Rows = slices.Clone(again.Rows)
	last := &again.Rows[len(again.Rows)-1]
	last.Value = had{number: p.sendingTo, token: p.state.token}.encode()
	p.sending = &again
}

// leaveLocked forgets everything about a partition that this process no longer owns.
func (p *partition) leaveLocked() { p.tenure = tenure{} }

// toSend returns the partition's next commit to the back, or nil if there is none. It returns the same commit again
// until its outcome is known.
func (p *partition) toSend(now time.Time) *rows.Commit {
	p.mu.Lock()
	defer p.mu.Unlock()

	if !p.claimed {
		return nil
	}

	hasToken := p.unsaid && !p.changed // the front has its token now, and the back's flag must be cleared
	hasNews := len(p.pending)+len(p.ids) > 0 || hasToken
	if p.sending != nil || !hasNews {
		return p.sending
	}

	c := &rows.Commit{
		Partition: p.id,
		Epoch:     p.backEpoch,
		After:     p.backHas,
		Number:    p.backHas + 1,
		At:        now,
		IDs:       slices.DeleteFunc(distinct(p.ids), func(id rows.ID) bool { return !id.Until.After(now) }),
	}

	names := make(map[rows.Name]bool, len(p.pending))
	for name, value := range p.pending {
		names[name] = true
		c.Rows = append(c.Rows, rows.Row{Name: name, Value: value})
	}

	// This row must be the last one: claimedBackLocked replaces it.
	c.Rows = append(c.Rows, rows.Row{Name: drainedName, Value: had{number: p.newest, token: p.state.token}.encode()})

	p.sending = c
	p.sendingNames = names
	p.sendingTo = p.newest
	p.sentSince = p.since
	p.pending = nil
	p.ids = nil

	return c
}

// sent handles the outcome of a commit to the back.
func (p *partition) sent(c *rows.Commit, err error) error {
	p.mu.Lock()
	defer p.mu.Unlock()

	if p.sending == nil || p.sending.Epoch != c.Epoch || p.sending.Number != c.Number {
		return nil // the partition was claimed anew meanwhile
	}

	var known *rows.Known
	var fenced *rows.Fenced
	var lost *rows.Lost
	switch {
	case err == nil:
		p.drainedToLocked(c)
		return nil
	case errors.As(err, &known):
		p.sending.IDs = without(p.sending.IDs, known.IDs)
		return nil // the next drain sends the commit without the known IDs
	case errors.As(err, &fenced), errors.As(err, &lost):
		p.claimed = false // the next claimBack finds out which process owns the partition now
		return err
	default:
		return err
	}
}

// drainedToLocked records that the back has a commit.
func (p *partition) drainedToLocked(c *rows.Commit) {
	p.sending = nil
	p.unsaid = false
	p.backHas = c.Number
	p.state.back = c.Number
	p.drainedUntil = p.sendingTo
	p.changed = true

	// The next owner no longer needs the names of these rows, so the front can drop them.
	p.marks = slices.DeleteFunc(p.marks, func(number uint64) bool {
		done := number <= p.sendingTo
		if done {
			p.drained = append(p.drained, dirtyName(number))
		}

		return done
	})
	for _, row := range c.Rows {
		if row.Value == nil && !p.state.whole {
			p.drained = append(p.drained, row.Name) // the deletion is drained, so its tombstone can go
		}
	}
}
