package rowstier

import (
	"context"
	"crypto/rand"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"headcount/internal/rows"
)

// Claim implements rows.Store. While the durable store is unavailable, only partitions whose state is in the fast store
// can be claimed. A fast store without the state may have lost everything, and only the durable store knows what was
// drained.
func (s *Store) Claim(ctx context.Context, owner string, partitions []rows.Former) ([]rows.Claim, error) {
	// First, because the fast store decides who is the owner; the durable store follows.
	claims, err := s.fast.Claim(ctx, owner, partitions)
	if err != nil {
		return nil, err
	}

	// The durable store must not be written by two drains at once.
	release, err := s.hold(ctx)
	if err != nil {
		return nil, err
	}
	defer release()

	var all takeovers
	for i, former := range partitions {
		p := &s.partitions[former.Partition]
		if claims[i].Epoch == 0 {
			if claims[i].Err == nil {
				p.forgetFailedTakeover()
			}
			continue
		}

		p.beginTakeover(former.Epoch)
		all = append(all, &takeover{
			s: s, p: p, at: i, owner: owner, former: former.Epoch, claim: claims[i],
		})
	}
	all.run(ctx)

	// One failed partition does not fail the others, so that a repeated call has fewer partitions to claim.
	for _, t := range all {
		// An owner claims a single partition again after a loss, and would take a claim without an epoch for a refusal.
		if t.err != nil && len(partitions) == 1 {
			return nil, t.err
		}
		claims[t.at] = t.claim
		if t.err != nil {
			claims[t.at] = rows.Claim{Err: t.err}
		}
	}

	return claims, nil
}

// beginTakeover ends what this process may do by its former claim in the durable store. The takeover claims the durable
// store from any process. So even if the takeover fails, a later claim that names the former one would not show that
// another process has drained newer rows since.
func (p *partition) beginTakeover(former uint64) {
	p.mu.Lock()
	defer p.mu.Unlock()

	if former == 0 {
		p.forgetLocked()
		return
	}

	// Until finish sets the owner, nothing is drained.
	p.owner = ""
	p.durable.isHeld = false
}

// forgetFailedTakeover forgets the dirty rows that a failed takeover has left, now that another process owns the
// partition. This process would never drain them, and the other process finds them in the fast store. The caller holds
// Store.draining.
//
// If no takeover has failed, nothing is forgotten: this process goes on draining until the durable store refuses that.
// The fast store may have lost these changes before the other process claimed it, and then only this process has them.
func (p *partition) forgetFailedTakeover() {
	p.compared = comparison{}
	p.mu.Lock()
	defer p.mu.Unlock()

	if p.owner == "" {
		p.forgetLocked()
	}
}

// takeover is the takeover of one partition that has been claimed in the fast store.
type takeover struct {
	s      *Store
	p      *partition
	at     int // index in the results of Claim
	owner  string
	former uint64     // epoch of the caller's former claim, or 0
	claim  rows.Claim // in the fast store
	err    error      // why the partition is not claimed

	state    state
	hasState bool // state was found in the fast store
	// isRenewal says that this process renews its own claim, and knows all undrained changes: no other process has
	// owned the partition since, and the fast store has no commit that was not acknowledged.
	isRenewal bool

	durable durableTakeover
}

// durableTakeover is what a takeover learns from the durable store.
type durableTakeover struct {
	claim   rows.Claim
	err     error       // why the partition could not be claimed there
	isEmpty bool        // no row of the partition was ever drained
	drained drainRecord // read before and after the claim
}

// hasDurable reports whether the partition was claimed in the durable store.
func (t *takeover) hasDurable() bool { return t.durable.err == nil }

// hasNoRows reports whether no row of the partition was ever drained. It needs the claim.
func (d *durableTakeover) hasNoRows() bool {
	isUndrained := d.drained.upTo == 0 && strings.HasPrefix(d.drained.token, toEmptyPrefix)

	return d.claim.Number == 0 || isUndrained
}

// takeovers are partitions that are claimed together. A round trip to the durable store may be slow, so each call to it
// covers all partitions.
type takeovers []*takeover

// takeoversAtOnce is how many partitions are prepared in parallel once the durable store has been read.
const takeoversAtOnce = 8

// run claims the partitions in the durable store, too, and prepares each for use.
func (all takeovers) run(ctx context.Context) {
	all.readStates(ctx)
	all.takeOverDurable(ctx)
	all.giveTokens(ctx)

	// The remaining calls concern one partition each, and most of them go to the fast store only.
	var prepared sync.WaitGroup
	slots := make(chan struct{}, takeoversAtOnce)
	for _, t := range all.notFailed() {
		slots <- struct{}{}
		prepared.Go(func() {
			defer func() { <-slots }()
			t.err = t.prepare(ctx)
		})
	}
	prepared.Wait()
}

// notFailed returns the takeovers that have not failed.
func (all takeovers) notFailed() takeovers {
	return slices.DeleteFunc(slices.Clone(all), func(t *takeover) bool { return t.err != nil })
}

// withDurable returns the takeovers that have not failed in either store.
func (all takeovers) withDurable() takeovers {
	return slices.DeleteFunc(all.notFailed(), func(t *takeover) bool { return !t.hasDurable() })
}

// prepare prepares the partition for use: it compares the two stores, and repairs the fast store if that has lost data.
func (t *takeover) prepare(ctx context.Context) error {
	// A fast store without a state may have lost everything, and only the durable store can tell.
	if !t.hasState && !t.hasDurable() {
		return t.durable.err
	}
	if err := t.loadUndrained(ctx); err != nil {
		return err
	}

	lost, err := t.fastLostData()
	switch {
	case err != nil:
		return err
	case lost:
		return t.restore(ctx)
	case t.hasState:
	case t.durable.isEmpty:
		// The durable store is new, so the fast store lacks nothing. If it has commits, it was used alone.
		t.state.complete = true
		t.state.adopts = t.claim.Number > 0
	case t.claim.Number > 0:
		// The durable store has rows, and none of them came from these commits.
		return fmt.Errorf("partition %d: %w", t.p.id, ErrBoth)
	default:
		// The durable store was used alone until now. Reads fill the fast store, but do not bring over the IDs.
		t.state.lacksIDsUntil = time.Now().Add(idsLackedFor)
	}

	t.warnOfOlderCopy()
	if t.hasDurable() {
		t.state.syncedTo = t.durable.claim.Number
	}
	t.finish(t.hasDurable())

	return nil
}

// fastLostData reports whether the fast store has lost data that the durable store or the memory of this process has.
func (t *takeover) fastLostData() (bool, error) {
	p := t.p
	p.mu.Lock()
	defer p.mu.Unlock()

	// Only what the fast store had acknowledged was ever drained.
	if t.hasDurable() && t.claim.Number < t.durable.drained.upTo {
		return true, nil
	}

	// Of a partition that it did not own all the time, this process knows no more than the fast store.
	if !t.isRenewal || t.claim.Number >= p.newest {
		return false, nil
	}
	if !t.hasDurable() && t.claim.Number < p.drained.upTo {
		return false, fmt.Errorf("%w: Redis has lost data, and PostgreSQL, which has it, is unavailable",
			rows.ErrUnavailable)
	}

	return true, nil
}

// readStates reads the states from the fast store.
func (all takeovers) readStates(ctx context.Context) {
	if len(all) == 0 {
		return
	}

	for i, row := range all[0].s.fast.Read(ctx, all.addresses(stateName)) {
		t := all[i]
		t.err = row.Err
		if row.Err != nil || row.Value == nil {
			continue
		}

		var err error
		t.state, err = decodeState(row.Value)
		t.err = t.s.malformed(err, rows.Address{Partition: t.p.id, Name: stateName})
		t.hasState = true
	}
}

// addresses returns the address of the named row in each partition.
func (all takeovers) addresses(name rows.Name) []rows.Address {
	addresses := make([]rows.Address, len(all))
	for i, t := range all {
		addresses[i] = rows.Address{Partition: t.p.id, Name: name}
	}

	return addresses
}

// takeOverDurable claims the partitions in the durable store, and reads what the two stores record about each other.
func (all takeovers) takeOverDurable(ctx context.Context) {
	if len(all) == 0 {
		return
	}
	// Claims wait for this, and partitions with a state can do without the durable store.
	ctx, cancel := context.WithTimeout(ctx, all[0].s.cfg.Timeout)
	defer cancel()

	// This read comes before the claim and excludes partitions of which the durable store belongs to another fast
	// store. A claim would take them away from the rightful owner.
	all.notFailed().readDrained(ctx)
	all.withDurable().claimDurable(ctx)

	// Read both again: another process may have given a fast store its token before the claim. From the claim on no
	// other process can write these partitions in the durable store.
	all.withDurable().readStates(ctx)
	all.withDurable().readDrained(ctx)
	for _, t := range all.withDurable() {
		t.durable.isEmpty = t.durable.hasNoRows()
	}
}

// claimDurable claims the partitions in the durable store. It names no former claims: the claim in the fast store has
// decided which process is the owner.
func (all takeovers) claimDurable(ctx context.Context) {
	if len(all) == 0 {
		return
	}

	formers := make([]rows.Former, len(all))
	for i, t := range all {
		formers[i].Partition = t.p.id
	}
	claims, err := all[0].s.durable.Claim(ctx, all[0].owner, formers)
	for i, t := range all {
		t.durable.err = err
		if err == nil {
			t.durable.claim = claims[i]
			t.durable.err = claims[i].Err
		}
	}
}

// ErrOtherFast is wrapped by the errors of claims whose durable store belongs to a fast store with another token. It
// wraps rows.ErrUnavailable.
var ErrOtherFast = fmt.Errorf("%w: this PostgreSQL is in use with another Redis", rows.ErrUnavailable)

// ErrBoth is wrapped by the errors of claims whose two stores both have rows but were never used together. It wraps
// rows.ErrUnavailable.
var ErrBoth = fmt.Errorf("%w: both Redis and PostgreSQL have counters, but were never used together: export the "+
	"counters of one, empty it, and import the export into the two together", rows.ErrUnavailable)

// toEmptyPrefix begins the token of a fast store whose durable store had no rows when the fast store got the token.
const toEmptyPrefix = "new-"

// readDrained reads the durable store's records of what was drained, and fails the takeovers of another fast store.
func (all takeovers) readDrained(ctx context.Context) {
	if len(all) == 0 {
		return
	}

	for i, row := range all[0].s.durable.Read(ctx, all.addresses(drainedName)) {
		t := all[i]
		t.durable.err = row.Err
		if row.Err != nil {
			continue
		}

		t.durable.drained = decodeDrainRecord(row.Value)
		isOther := t.durable.drained.token != "" && t.durable.drained.token != t.state.token
		// A fast store without a state is new or has lost everything, so it may take the durable store over.
		if t.hasState && isOther {
			t.err = fmt.Errorf("partition %d: %w", t.p.id, ErrOtherFast)
		}
	}
}

// giveTokens gives a new token to every fast store that has none, since it may not be the fast store that was used
// before. The durable store gets the token first, so a fast store whose token the durable store does not have is always
// a wrong one.
//
// Several processes may claim a partition at the same time, and the fast store later refuses all but one of them. So
// they must not make different tokens: if the durable store already has one that the fast store may not have yet, they
// use that.
func (all takeovers) giveTokens(ctx context.Context) {
	var tokenless takeovers
	var commits []rows.Commit
	for _, t := range all.withDurable() {
		switch {
		case t.hasState:
		case t.durable.drained.unconfirmed:
			t.state.token = t.durable.drained.token
		default:
			tokenless = append(tokenless, t)
			commits = append(commits, t.newToken())
		}
	}
	if len(commits) == 0 {
		return
	}

	s := all[0].s
	ctx, cancel := context.WithTimeout(ctx, s.cfg.Timeout)
	defer cancel()

	for i, err := range s.durable.Commit(ctx, commits) {
		t := tokenless[i]
		t.durable.claim.Number = commits[i].Number
		if err != nil {
			t.err = fmt.Errorf("%w: %w", rows.ErrUnavailable, err)
		}
	}
}

// newToken gives the fast store a new token, and returns the commit that stores it in the durable store.
func (t *takeover) newToken() rows.Commit {
	t.state.token = rand.Text()
	if t.durable.isEmpty {
		t.state.token = toEmptyPrefix + t.state.token
	}
	t.durable.drained.token = t.state.token
	t.durable.drained.unconfirmed = true

	return rows.Commit{
		Partition: t.p.id,
		Epoch:     t.durable.claim.Epoch,
		After:     t.durable.claim.Number,
		Number:    t.durable.claim.Number + 1,
		At:        time.Now(),
		Rows:      []rows.Row{{Name: drainedName, Value: t.durable.drained.encode()}},
	}
}

// warnOfOlderCopy logs that the durable store has fewer commits than were drained to it. The rows in the fast store are
// right, but return to the durable store only when they change.
func (t *takeover) warnOfOlderCopy() {
	hasLess := t.hasDurable() && t.durable.claim.Number < t.state.syncedTo
	if t.hasState && hasLess {
		t.s.cfg.Log.Warn().Int("partition", t.p.id).
			Msg("counters: PostgreSQL was restored from an older copy; counters that were evicted from Redis since " +
				"that copy have their old values, and the others are written again when they change")
	}
}
