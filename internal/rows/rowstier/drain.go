package rowstier

import (
	"context"
	"errors"
	"slices"
	"time"

	"headcount/internal/rows"
	"headcount/internal/wake"
)

// drainEach drains until ctx ends.
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

// drain brings to the back what has changed. It returns how many rows and IDs are left, and the last error.
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

// send brings to the back what has changed in the partitions that are claimed there. It returns the last error.
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

// say logs once that the back is away, and that it works again. Whoever has the connection to the back warns. The
// caller has draining.
func (s *Store) say(err error) {
	if err != nil && s.away == nil {
		s.cfg.Log.Info().Err(err).
			Msg("counters: the lasting store cannot be written; changes stay in the fast one until it can")
	}
	if err == nil && s.away != nil {
		s.cfg.Log.Info().Msg("counters: the lasting store can be written again")
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

// unclaimed returns the owner and the former claim of a partition that has something to drain, and is not claimed in
// the back yet.
func (p *partition) unclaimed() (string, rows.Former) {
	p.mu.Lock()
	defer p.mu.Unlock()

	if p.claimed || p.dirtyLocked() == 0 {
		return "", rows.Former{}
	}

	return p.owner, rows.Former{Partition: p.id, Epoch: p.backEpoch}
}

// outrun has this process leave a partition that another one has claimed in the back. If the back still has the rows
// of this front, only the front can say whose the partition is: perhaps the other process came first there, and was
// slow to get to the back.
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

// claimedBack takes a claim of the back.
func (p *partition) claimedBack(claim rows.Claim) {
	p.mu.Lock()
	defer p.mu.Unlock()

	p.claimedBackLocked(claim)
}

// claimedBackLocked goes on from a claim of the back.
func (p *partition) claimedBackLocked(claim rows.Claim) {
	p.claimed = true
	p.backEpoch = claim.Epoch
	p.backHas = claim.Number
	p.state.back = claim.Number
	if p.sending == nil {
		return
	}

	// The back may have it already, but it is no harm to write it again.
	again := *p.sending
	again.Epoch = claim.Epoch
	again.After = claim.Number
	again.Number = claim.Number + 1
	// The front may have got another token meanwhile.
	again.Rows = slices.Clone(again.Rows)
	last := &again.Rows[len(again.Rows)-1]
	last.Value = had{number: p.sendingTo, token: p.state.token}.encode()
	p.sending = &again
}

// leaveLocked forgets a partition that another process owns.
func (p *partition) leaveLocked() { p.tenure = tenure{} }

// toSend returns what the back shall get, the same again until it has it, or nil.
func (p *partition) toSend(now time.Time) *rows.Commit {
	p.mu.Lock()
	defer p.mu.Unlock()

	if !p.claimed {
		return nil
	}

	// One that was sent before is sent until its outcome is known.
	hasToken := p.unsaid && !p.changed // the front has it, and the back does not know that
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

	// It is the last one, see claimedBackLocked.
	c.Rows = append(c.Rows, rows.Row{Name: drainedName, Value: had{number: p.newest, token: p.state.token}.encode()})

	p.sending = c
	p.sendingNames = names
	p.sendingTo = p.newest
	p.sentSince = p.since
	p.pending = nil
	p.ids = nil

	return c
}

// sent goes on with the outcome of a commit of the back.
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
		return nil // the next drain sends the rest
	case errors.As(err, &fenced), errors.As(err, &lost):
		p.claimed = false // claimBack finds out whose it is now
		return err
	default:
		return err
	}
}

// drainedToLocked notes that the back has a commit.
func (p *partition) drainedToLocked(c *rows.Commit) {
	p.sending = nil
	p.unsaid = false
	p.backHas = c.Number
	p.state.back = c.Number
	p.drainedUntil = p.sendingTo
	p.changed = true

	// The front needs the names no more that were noted for who owns the partition next.
	p.marks = slices.DeleteFunc(p.marks, func(number uint64) bool {
		done := number <= p.sendingTo
		if done {
			p.drained = append(p.drained, dirtyName(number))
		}

		return done
	})
	for _, row := range c.Rows {
		if row.Value == nil && !p.state.whole {
			p.drained = append(p.drained, row.Name) // its tombstone
		}
	}
}
