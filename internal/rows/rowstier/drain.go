package rowstier

import (
	"context"
	"errors"
	"slices"
	"time"

	"headcount/internal/marks"
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
			// A store that is away need not be asked as often.
			pause *= 5
		}
	}
}

// drain writes pending changes to the durable store. It returns how many rows and IDs are left, and the last error.
func (s *Store) drain(ctx context.Context) (left int, err error) {
	release, err := s.hold(ctx)
	if err != nil {
		return s.Dirty(), err
	}
	defer release()

	// Partitions that cannot be claimed now do not hold up the others.
	claiming, cancel := context.WithTimeout(ctx, s.cfg.Timeout)
	err = s.claimDurable(claiming)
	cancel()
	if failed := s.send(ctx); failed != nil {
		err = failed
	}
	s.logOutageLocked(err)

	return s.Dirty(), err
}

// sentAtOnce is the number of rows and IDs after which a transaction of the durable store takes no further partition.
// Usually one transaction has everything. But after an outage millions of rows may wait, and one that took too long for
// the store would be repeated for ever.
const sentAtOnce = 10_000

// send writes the pending changes of the partitions that are claimed in the durable store. It returns the last error.
func (s *Store) send(ctx context.Context) error {
	var some portion
	var last error
	// Claims wait meanwhile, so what is left then waits for the next drain.
	until := time.Now().Add(s.cfg.Timeout)
	for id := range s.partitions {
		if time.Now().After(until) {
			break
		}

		some.add(&s.partitions[id])
		if some.size < sentAtOnce {
			continue
		}
		if err := s.sendPortion(ctx, &some); err != nil {
			last = err
		}
		some = portion{}
	}

	if err := s.sendPortion(ctx, &some); err != nil {
		last = err
	}

	return last
}

// portion are the pending changes of some partitions, which are sent in one transaction.
type portion struct {
	of      []*partition
	commits []rows.Commit
	size    int // rows and IDs
}

// add adds the pending changes of a partition.
func (some *portion) add(p *partition) {
	commit := p.nextDrain(time.Now())
	if commit == nil {
		return
	}

	some.of = append(some.of, p)
	some.commits = append(some.commits, *commit)
	some.size += len(commit.Rows) + len(commit.IDs)
}

// sendPortion writes a portion, and returns the last error.
func (s *Store) sendPortion(ctx context.Context, some *portion) error {
	if len(some.commits) == 0 {
		return nil
	}

	// The changes of a single partition cannot be divided, and may be many.
	ctx, cancel := context.WithTimeout(ctx, s.cfg.Timeout+rows.TimeFor(some.commits))
	defer cancel()

	var last error
	for i, outcome := range s.durable.Commit(ctx, some.commits) {
		if err := some.of[i].drainOutcome(&some.commits[i], outcome); err != nil {
			last = err
		}
	}

	return last
}

// logOutageLocked logs once when writes to the durable store begin to fail, and once when they work again. It logs at
// level info only, because the connection to the durable store logs the warning.
func (s *Store) logOutageLocked(err error) {
	if err != nil && s.away == nil {
		s.cfg.Log.Info().Err(err).
			Msg("counters: PostgreSQL cannot be written; changes stay in Redis until it can")
	}
	if err == nil && s.away != nil {
		s.cfg.Log.Info().Msg("counters: PostgreSQL can be written again")
	}

	s.away = err
}

// claimDurable claims in the durable store the partitions that this process owns in the fast store. It returns the last
// error.
func (s *Store) claimDurable(ctx context.Context) error {
	// As a rule there is one owner; a Claim names one at a time.
	byOwner := map[string][]rows.Former{}
	for id := range s.partitions {
		owner, former := s.partitions[id].unclaimed()
		if owner != "" {
			byOwner[owner] = append(byOwner[owner], former)
		}
	}

	var last error
	for owner, formers := range byOwner {
		confirmed, err := s.confirm(ctx, owner, formers)
		if err != nil {
			last = err
		}
		if len(confirmed) == 0 {
			continue
		}
		if err := s.claimConfirmed(ctx, owner, confirmed); err != nil {
			last = err
		}
	}

	return last
}

// claimConfirmed claims confirmed partitions in the durable store. It returns the last error.
func (s *Store) claimConfirmed(ctx context.Context, owner string, formers []rows.Former) error {
	claims, err := s.durable.Claim(ctx, owner, formers)
	if err != nil {
		return err
	}

	var last error
	var granted []rows.Former
	byPartition := map[int]rows.Claim{}
	for i, former := range formers {
		if claims[i].Epoch != 0 {
			granted = append(granted, former)
			byPartition[former.Partition] = claims[i]
			continue
		}
		if err := s.giveUp(ctx, &s.partitions[former.Partition]); err != nil {
			last = err
		}
	}

	// Confirm again: another process may have claimed both stores since, and drained, before this claim.
	confirmed, err := s.confirm(ctx, owner, granted)
	if err != nil {
		last = err
	}
	for _, former := range confirmed {
		s.partitions[former.Partition].claimedDurable(byPartition[former.Partition])
	}

	return last
}

// confirm returns the partitions that this process owns in the fast store, as far as it must know that, and the last
// error of the others. It forgets partitions that another process owns. A claim of the durable store that names a
// former one needs no confirmation. But a process that has never claimed the partition there, because the durable store
// was away, would take it from any process, also from a later owner, and overwrite that owner's rows with older ones.
func (s *Store) confirm(
	ctx context.Context, owner string, formers []rows.Former,
) (confirmed []rows.Former, last error) {
	var probed []rows.Former
	var probes []rows.Commit
	for _, former := range formers {
		if former.Epoch != 0 {
			confirmed = append(confirmed, former)
			continue
		}
		probed = append(probed, former)
		probes = append(probes, s.partitions[former.Partition].probe())
	}
	if len(probes) == 0 {
		return confirmed, nil
	}

	// One call has all probes, so that partitions whose probes have no answer do not use up the time of the others.
	for i, outcome := range s.fast.Commit(ctx, probes) {
		isOwned, err := s.probed(ctx, owner, &probes[i], outcome)
		if err != nil {
			last = err
		}
		if isOwned {
			confirmed = append(confirmed, probed[i])
		}
	}

	return confirmed, last
}

// probe returns a commit that shows whether this process still owns the partition in the fast store.
func (p *partition) probe() rows.Commit {
	p.mu.Lock()
	defer p.mu.Unlock()

	return probeOf(p.id, p.epoch, p.newest)
}

// probeOf returns a commit by which the fast store only says whether the claim with that epoch lasts, and whether it
// has lost commits up to that number. The commit's number is that before it, so the fast store does not make it.
func probeOf(partition int, epoch, number uint64) rows.Commit {
	return rows.Commit{Partition: partition, Epoch: epoch, After: number, Number: number, At: time.Now()}
}

// probed reports whether this process owns a partition, given the outcome of its probe. If another process does, it
// forgets the partition, and nothing is left to do there.
func (s *Store) probed(ctx context.Context, owner string, probe *rows.Commit, outcome error) (isOwned bool, err error) {
	var lost *rows.Lost
	if outcome == nil || errors.As(outcome, &lost) {
		return true, nil
	}
	// An older claim than this one means that the fast store has lost this one. The owner claims the partition again.
	var fenced *rows.Fenced
	if !errors.As(outcome, &fenced) || fenced.Epoch < probe.Epoch {
		return false, outcome
	}

	// The newer claim may be one of this process whose answer was lost. Only a claim tells.
	claims, err := s.fast.Claim(ctx, owner, []rows.Former{{Partition: probe.Partition, Epoch: probe.Epoch}})
	if err != nil {
		return false, err
	}
	// The newer claim was this process's own. The owner does not have the epoch of either claim, so it claims once more
	// when a commit is refused.
	if claims[0].Epoch != 0 {
		return false, outcome
	}
	s.partitions[probe.Partition].forget(probe.Epoch)

	return false, nil
}

// unclaimed returns the owner and the former claim of the partition if it has undrained changes and is not claimed in
// the durable store yet. Otherwise the owner is empty.
func (p *partition) unclaimed() (string, rows.Former) {
	p.mu.Lock()
	defer p.mu.Unlock()

	if p.durable.isHeld || p.countDirtyLocked() == 0 {
		return "", rows.Former{}
	}

	return p.owner, rows.Former{Partition: p.id, Epoch: p.durable.epoch}
}

// giveUp makes this process give up a partition that another process has claimed in the durable store. If that process
// uses the same fast store, only the fast store can decide which one is the owner: the other process may have been the
// earlier owner there and merely late to claim the durable store.
func (s *Store) giveUp(ctx context.Context, p *partition) error {
	// Read before the lock is taken, because the store may be slow.
	row := s.durable.Read(ctx, []rows.Address{{Partition: p.id, Name: drainedName}})[0]
	if row.Err != nil {
		return row.Err
	}

	p.mu.Lock()
	defer p.mu.Unlock()

	rival := otherFast
	if decodeDrainRecord(row.Value).token == p.state.token {
		rival = sameFast
	}
	p.forgetLocked()
	p.rival = rival

	return nil
}

// claimedDurable records a claim in the durable store.
func (p *partition) claimedDurable(claim rows.Claim) {
	p.mu.Lock()
	defer p.mu.Unlock()

	p.claimedDurableLocked(claim)
}

// claimedDurableLocked is claimedDurable for a caller that holds mu.
func (p *partition) claimedDurableLocked(claim rows.Claim) {
	p.durable = durableClaim{isHeld: true, epoch: claim.Epoch, newest: claim.Number}
	p.state.syncedTo = claim.Number
	if p.sending == nil {
		return
	}

	// The outcome of sending is unknown, so send it again under the new claim: writing it twice does no harm.
	again := *p.sending
	again.Epoch = claim.Epoch
	again.After = claim.Number
	again.Number = claim.Number + 1
	// The fast store may have been given another token meanwhile. The record of it is the last row, see newDrainLocked.
	again.Rows = slices.Clone(again.Rows)
	again.Rows[len(again.Rows)-1] = p.drainedRowLocked(again.upTo)
	p.sending = &again
}

// drainedRowLocked returns the row by which the durable store knows that it has everything up to a commit of the fast
// store. It also confirms that the fast store has its token.
func (p *partition) drainedRowLocked(upTo uint64) rows.Row {
	return rows.Row{Name: drainedName, Value: drainRecord{upTo: upTo, token: p.state.token}.encode()}
}

// forgetLocked forgets everything about a partition that this process no longer owns.
func (p *partition) forgetLocked() { p.tenure = tenure{} }

// forget is forgetLocked, unless the claim with that epoch has ended.
func (p *partition) forget(epoch uint64) {
	p.mu.Lock()
	defer p.mu.Unlock()

	if p.epoch == epoch {
		p.forgetLocked()
	}
}

// nextDrain returns the partition's next commit to the durable store, or nil if there is none. It returns the same
// commit again until its outcome is known.
func (p *partition) nextDrain(now time.Time) *rows.Commit {
	p.mu.Lock()
	defer p.mu.Unlock()

	if !p.durable.isHeld {
		return nil
	}

	if p.sending == nil && p.hasNewsLocked() {
		p.sending = p.newDrainLocked(now)
	}
	if p.sending == nil {
		return nil
	}

	return &p.sending.Commit
}

// hasNewsLocked reports whether the fast store has something that the durable store lacks: changes, or its token, which
// it has once its state is written.
func (p *partition) hasNewsLocked() bool {
	hasToken := p.drained.unconfirmed && !p.stateChanged

	return p.dirty.len() > 0 || hasToken
}

// newDrainLocked takes all dirty rows and IDs, and returns the drain that sends them.
func (p *partition) newDrainLocked(now time.Time) *drain {
	dirty := p.dirty.take()
	d := &drain{names: make(map[rows.Name]bool, len(dirty.rows)), upTo: p.newest, since: dirty.since}
	d.Commit = rows.Commit{
		Partition: p.id,
		Epoch:     p.durable.epoch,
		After:     p.durable.newest,
		Number:    p.durable.newest + 1,
		At:        now,
		// A commit names each ID once, and those that have expired need no copy.
		IDs: slices.DeleteFunc(distinct(dirty.ids), func(id rows.ID) bool { return !id.Until.After(now) }),
	}

	for name, value := range dirty.rows {
		d.names[name] = true
		d.Rows = append(d.Rows, rows.Row{Name: name, Value: value})
	}

	// This row must be the last one: claimedDurableLocked replaces it.
	d.Rows = append(d.Rows, p.drainedRowLocked(d.upTo))

	return d
}

// drainOutcome handles the outcome of a commit to the durable store.
func (p *partition) drainOutcome(c *rows.Commit, err error) error {
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
		p.drainedLocked(c)
		return nil
	case errors.As(err, &known):
		p.sending.IDs = rows.Without(p.sending.IDs, known.IDs)
		return nil // the next drain sends the commit without the known IDs
	case errors.As(err, &fenced), errors.As(err, &lost):
		p.durable.isHeld = false // the next claimDurable finds out which process owns the partition now
		return err
	default:
		return err
	}
}

// drainedLocked records that the durable store has a commit.
func (p *partition) drainedLocked(c *rows.Commit) {
	upTo := p.sending.upTo
	marks.Must(upTo <= p.newest, "what is drained was acknowledged")
	p.sending = nil
	p.drained = drainRecord{upTo: upTo, token: p.state.token}
	p.durable.newest = c.Number
	p.state.syncedTo = c.Number
	p.stateChanged = true

	// The next owner no longer needs the names of these rows, so the fast store can drop them.
	p.dirtyCommits = slices.DeleteFunc(p.dirtyCommits, func(number uint64) bool {
		isDrained := number <= upTo
		if isDrained {
			p.removals.drained = append(p.removals.drained, dirtyName(number))
		}

		return isDrained
	})
	if len(p.dirtyCommits) == 0 {
		p.listed = 0
	}

	// Once a deletion is drained, its tombstone can go.
	for _, row := range c.Rows {
		if row.Value == nil && !p.state.complete {
			p.removals.drained = append(p.removals.drained, row.Name)
		}
	}
}
