package rowstier

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"headcount/internal/rows"
)

// Claim implements rows.Store. While the back is unavailable, only partitions whose state is in the front can be
// claimed. A front without the state may have lost everything, and only the back knows what was drained.
func (s *Store) Claim(ctx context.Context, owner string, partitions []rows.Former) ([]rows.Claim, error) {
	claims, err := s.front.Claim(ctx, owner, partitions)
	if err != nil {
		return nil, err
	}

	// The back must not be written by two drains at once.
	defer s.hold()()

	var all takings
	for i, former := range partitions {
		if claims[i].Epoch == 0 {
			continue
		}
		all = append(all, &taking{
			s: s, p: &s.partitions[former.Partition], at: i, owner: owner, former: former.Epoch, claim: claims[i],
		})
	}
	all.take(ctx)

	// One failed partition does not fail the others, so that a repeated call has fewer partitions to claim.
	for _, t := range all {
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

// taking is the takeover of one partition that has been claimed in the front.
type taking struct {
	s      *Store
	p      *partition
	at     int // index in the results of Claim
	owner  string
	former uint64     // epoch of the caller's former claim, or 0
	claim  rows.Claim // in the front
	err    error      // why the partition is not claimed

	state   state
	isThere bool // state was found in the front
	// goesOn says that this process renews its own claim, and knows all undrained changes: no other process has owned
	// the partition since, and the front has no commit that was not acknowledged.
	goesOn bool

	back    rows.Claim
	away    error // why the partition could not be claimed in the back
	isNew   bool  // the back never had a row of the partition
	drained had   // the back's record of what was drained
}

// reached reports whether the back was claimed.
func (t *taking) reached() bool { return t.away == nil }

// takings are partitions that are claimed together. A round trip to the back may be slow, so each call to it covers all
// partitions.
type takings []*taking

// takenAtOnce is how many partitions begin in parallel once the back has been read.
const takenAtOnce = 8

// take claims the partitions in the back, too, and prepares each for use.
func (all takings) take(ctx context.Context) {
	all.readStates(ctx)
	all.claimBack(ctx)
	all.introduce(ctx)

	// The remaining calls concern one partition each, and most of them go to the front only.
	var begun sync.WaitGroup
	slots := make(chan struct{}, takenAtOnce)
	for _, t := range all.possible() {
		slots <- struct{}{}
		begun.Go(func() {
			defer func() { <-slots }()
			t.err = t.begin(ctx)
		})
	}
	begun.Wait()
}

// possible returns the takings that have not failed.
func (all takings) possible() takings {
	return slices.DeleteFunc(slices.Clone(all), func(t *taking) bool { return t.err != nil })
}

// reached returns the takings that have not failed in the front or in the back.
func (all takings) reached() takings {
	return slices.DeleteFunc(all.possible(), func(t *taking) bool { return !t.reached() })
}

// begin prepares the partition for use: it compares the front with the back and repairs the front if it has lost data.
func (t *taking) begin(ctx context.Context) error {
	// A front without a state may have lost everything, and only the back can tell.
	if !t.isThere && !t.reached() {
		return t.away
	}
	if err := t.remember(ctx); err != nil {
		return err
	}

	lost, err := t.lost()
	switch {
	case err != nil:
		return err
	case lost:
		return t.restore(ctx)
	case t.isThere:
	case t.isNew:
		t.state.whole = true
		t.state.adopts = t.claim.Number > 0
	case t.claim.Number > 0:
		return fmt.Errorf("partition %d: %w", t.p.id, ErrBoth)
	default:
		// The back was used without a front until now. Reads fill the front, but do not bring over the IDs.
		t.state.lossy = time.Now().Add(lossyFor)
	}

	t.warn()
	if t.reached() {
		t.state.back = t.back.Number
	}
	t.settle(t.reached())

	return nil
}

// lost reports whether the front has lost data that the back or the memory of this process has.
func (t *taking) lost() (bool, error) {
	p := t.p
	p.mu.Lock()
	defer p.mu.Unlock()

	if t.reached() && t.claim.Number < t.drained.number {
		return true, nil
	}

	// Of a partition that it did not own all the time, this process knows no more than the front.
	if !t.goesOn || t.claim.Number >= p.newest {
		return false, nil
	}
	if !t.reached() && t.claim.Number < p.drainedUntil {
		return false, fmt.Errorf("%w: the fast store has lost data, and the durable store, which "+
			"has it, is unavailable",
			rows.ErrUnavailable)
	}

	return true, nil
}

// readStates reads the states from the front.
func (all takings) readStates(ctx context.Context) {
	if len(all) == 0 {
		return
	}

	for i, row := range all[0].s.front.Read(ctx, all.addresses(stateName)) {
		t := all[i]
		t.err = row.Err
		if row.Err != nil || row.Value == nil {
			continue
		}

		var err error
		t.state, err = decodeState(row.Value)
		t.err = t.s.malformed(err, rows.Address{Partition: t.p.id, Name: stateName})
		t.isThere = true
	}
}

// addresses returns the address of the named row in each partition.
func (all takings) addresses(name rows.Name) []rows.Address {
	addresses := make([]rows.Address, len(all))
	for i, t := range all {
		addresses[i] = rows.Address{Partition: t.p.id, Name: name}
	}

	return addresses
}

// claimBack claims the partitions in the back, and reads what the front and the back record about each other.
func (all takings) claimBack(ctx context.Context) {
	if len(all) == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, all[0].s.cfg.Timeout)
	defer cancel()

	// This read comes before the claim and excludes partitions of which the back belongs to another front. A claim
	// would take them away from the rightful owner.
	all.possible().readDrained(ctx)
	all.reached().claimReached(ctx)

	// Read both again: another process may have given a front its token before the claim. From the claim on no other
	// process can write these partitions in the back.
	all.reached().readStates(ctx)
	all.reached().readDrained(ctx)
	for _, t := range all.reached() {
		t.isNew = t.back.Number == 0 || t.drained.number == 0 && strings.HasPrefix(t.drained.token, newToken)
	}
}

// claimReached claims the partitions in the back. It names no former claims: the claim in the front has decided which
// process is the owner.
func (all takings) claimReached(ctx context.Context) {
	if len(all) == 0 {
		return
	}

	formers := make([]rows.Former, len(all))
	for i, t := range all {
		formers[i].Partition = t.p.id
	}
	claims, err := all[0].s.back.Claim(ctx, all[0].owner, formers)
	for i, t := range all {
		t.away = err
		if err == nil {
			t.back = claims[i]
			t.away = claims[i].Err
		}
	}
}

// ErrOtherFront is wrapped by the errors of claims whose back was drained from a front with another token. It wraps
// rows.ErrUnavailable.
var ErrOtherFront = fmt.Errorf("%w: the durable store is in use with another fast store", rows.ErrUnavailable)

// ErrBoth is wrapped by the errors of claims whose front and back both have rows but were never used together. It wraps
// rows.ErrUnavailable.
var ErrBoth = fmt.Errorf("%w: both stores have rows, but were never used together: export the rows of one store, "+
	"empty it, and import the export into the two together", rows.ErrUnavailable)

// newToken is the prefix of the token of a front whose back had no rows when it got the token.
const newToken = "new-"

// readDrained reads the back's records of what was drained, and fails the takings of another front.
func (all takings) readDrained(ctx context.Context) {
	if len(all) == 0 {
		return
	}

	for i, row := range all[0].s.back.Read(ctx, all.addresses(drainedName)) {
		t := all[i]
		t.away = row.Err
		if row.Err != nil {
			continue
		}

		t.drained = decodeHad(row.Value)
		isOther := t.drained.token != "" && t.drained.token != t.state.token
		if t.isThere && isOther {
			t.err = fmt.Errorf("partition %d: %w", t.p.id, ErrOtherFront)
		}
	}
}

// introduce gives a new token to every front that has none, since it may not be the front that was used before. The
// back stores the token first, so a front whose token the back does not have is always a wrong one.
//
// Several processes may claim a partition at the same time, and the front later refuses all but one of them. So they
// must not make different tokens: if the back already has one that the front may not have yet, they use that.
func (all takings) introduce(ctx context.Context) {
	var nameless takings
	var commits []rows.Commit
	for _, t := range all.reached() {
		switch {
		case t.isThere:
		case t.drained.unsaid:
			t.state.token = t.drained.token
		default:
			nameless = append(nameless, t)
			commits = append(commits, t.name())
		}
	}
	if len(commits) == 0 {
		return
	}

	s := all[0].s
	ctx, cancel := context.WithTimeout(ctx, s.cfg.Timeout)
	defer cancel()

	for i, err := range s.back.Commit(ctx, commits) {
		t := nameless[i]
		t.back.Number = commits[i].Number
		if err != nil {
			t.err = fmt.Errorf("%w: %w", rows.ErrUnavailable, err)
		}
	}
}

// name gives the front a new token, and returns the commit that stores it in the back.
func (t *taking) name() rows.Commit {
	t.state.token = rand.Text()
	if t.isNew {
		t.state.token = newToken + t.state.token
	}
	t.drained.token = t.state.token
	t.drained.unsaid = true

	return rows.Commit{
		Partition: t.p.id,
		Epoch:     t.back.Epoch,
		After:     t.back.Number,
		Number:    t.back.Number + 1,
		At:        time.Now(),
		Rows:      []rows.Row{{Name: drainedName, Value: t.drained.encode()}},
	}
}

// warn logs that the back has fewer commits than were drained to it. The rows in the front are right, but return to the
// back only when they change.
func (t *taking) warn() {
	hasLess := t.reached() && t.back.Number < t.state.back
	if t.isThere && hasLess {
		t.s.cfg.Log.Warn().Int("partition", t.p.id).
			Msg("counters: the durable store was restored from an older copy; counters that were " +
				"evicted from the fast " +
				"store since then have their old values, and the others are written again when they change")
	}
}

// remember reads the undrained changes from the front, unless this process has owned the partition all along and so has
// them in memory.
func (t *taking) remember(ctx context.Context) error {
	t.enter()
	if t.goesOn {
		return nil // the memory has all undrained changes, even those that the front has lost
	}

	p := t.p
	var names []rows.Name
	var ids []rows.ID
	var marks []uint64
	var old []rows.Name
	err := t.s.front.Scan(ctx, p.id, dirtyRows, "", func(field string, b []byte) error {
		var number uint64
		if _, err := fmt.Sscanf(field, "%x", &number); err != nil {
			return errMalformed
		}

		// The back has this commit already, or a newer one if the front was restored from an older copy.
		if number <= t.drained.number {
			old = append(old, dirtyName(number))
			return nil
		}

		some, someIDs, err := decodeNames(b)
		names = append(names, some...)
		ids = append(ids, someIDs...)
		marks = append(marks, number)

		return err
	})
	if err != nil {
		return err
	}
	pending, err := t.values(ctx, names)
	if err != nil {
		return err
	}

	p.mu.Lock()
	defer p.mu.Unlock()

	p.pending = pending
	p.since = time.Now()
	p.ids = distinct(ids)
	p.marks = marks
	p.drained = old
	p.newest = t.claim.Number

	return nil
}

// enter records the claim. It forgets what this process knew from an earlier claim if another process may have owned
// the partition in between, or if the front knows more.
func (t *taking) enter() {
	p := t.p
	p.mu.Lock()
	defer p.mu.Unlock()

	// The store grants a claim that names a former claim only if no other process has claimed the partition since. But
	// the front may have made a commit whose answer was lost, and only the front knows what that commit changed.
	knowsAll := t.claim.Number <= p.newest
	t.goesOn = t.former != 0 && p.epoch != 0 && knowsAll
	if !t.goesOn {
		p.leaveLocked()
	}
	p.owner = t.owner
	p.epoch = t.claim.Epoch
}

// values returns the newest values of the named rows from the front; nil means deleted.
func (t *taking) values(ctx context.Context, names []rows.Name) (map[rows.Name][]byte, error) {
	// Several commits may have changed the same row. Their newest values are in the front.
	values := map[rows.Name][]byte{}
	var addresses []rows.Address
	for _, name := range names {
		if _, again := values[name]; !again {
			values[name] = nil
			addresses = append(addresses, rows.Address{Partition: t.p.id, Name: name})
		}
	}
	if len(addresses) == 0 {
		return values, nil
	}

	for i, row := range t.s.front.Read(ctx, addresses) {
		if row.Err != nil {
			return nil, row.Err
		}
		if row.Value == nil {
			// A deletion would have left a tombstone. So the row was drained and then evicted.
			if !t.state.whole {
				delete(values, addresses[i].Name)
			}
			continue
		}

		value, err := decodeValue(row.Value)
		if err != nil {
			return nil, t.s.malformed(err, addresses[i])
		}
		values[addresses[i].Name] = value
	}

	return values, nil
}

func distinct(ids []rows.ID) []rows.ID {
	seen := map[[16]byte]bool{}
	var once []rows.ID
	for _, id := range ids {
		if !seen[id.Bytes] {
			seen[id.Bytes] = true
			once = append(once, id)
		}
	}

	return once
}

// settle records the result of the takeover. If the state changed, the owner's next commit writes it to the front.
func (t *taking) settle(changed bool) {
	t.p.mu.Lock()
	defer t.p.mu.Unlock()

	t.p.state = t.state
	t.p.changed = changed
	if t.reached() {
		t.p.claimedBackLocked(t.back)
		t.p.drainedUntil = t.drained.number
		t.p.unsaid = t.drained.unsaid
	}
}

// restore writes to the front what it has lost: the rows that changed in the back since, and the undrained changes of
// this process. It uses one commit, so the front is either repaired or as it was.
func (t *taking) restore(ctx context.Context) error {
	changed, err := t.changedInBack(ctx)
	if err != nil {
		return err
	}

	// The lost IDs are not copied from the back, because there may be millions. lossy makes admit look them up there.
	now := time.Now()
	t.state.whole = t.isThere && t.state.whole
	t.state.lossy = now.Add(lossyFor)
	if t.reached() {
		t.state.back = t.back.Number
	}

	commit := rows.Commit{Partition: t.p.id, Epoch: t.claim.Epoch, After: t.claim.Number, At: now}
	t.p.addUndrained(&commit, changed, max(t.drained.number, t.claim.Number+1))
	commit.Rows = append(commit.Rows, rows.Row{Name: stateName, Value: t.state.encode()})

	if err := t.write(ctx, &commit); err != nil {
		return fmt.Errorf("%w: %w", rows.ErrUnavailable, err)
	}
	t.settle(false)
	t.claim.Number = commit.Number

	return nil
}

// changedInBack returns the rows that the back has and the front may have lost. For a front without a state it returns
// nothing, because reads fill such a front.
func (t *taking) changedInBack(ctx context.Context) (map[rows.Name][]byte, error) {
	changed := map[rows.Name][]byte{}
	if !t.reached() || !t.isThere {
		return changed, nil
	}

	err := t.s.back.Changed(ctx, t.p.id, t.state.back, func(name rows.Name, value []byte) error {
		if name != drainedName {
			changed[name] = value
		}

		return nil
	})

	return changed, err
}

// write commits c to the front, without the IDs that the front still has.
func (t *taking) write(ctx context.Context, c *rows.Commit) error {
	for {
		err := t.s.front.Commit(ctx, []rows.Commit{*c})[0]
		var known *rows.Known
		if !errors.As(err, &known) {
			return err
		}
		c.IDs = without(c.IDs, known.IDs)
	}
}

// without returns ids without others. It modifies neither.
func without(ids, others []rows.ID) []rows.ID {
	return slices.DeleteFunc(slices.Clone(ids), func(id rows.ID) bool {
		return slices.ContainsFunc(others, func(other rows.ID) bool { return other.Bytes == id.Bytes })
	})
}

// addUndrained adds the rows that changed in the back to a commit of the front, overridden by the undrained changes.
// The number of the commit is the partition's newest one, but not lower than least.
func (p *partition) addUndrained(c *rows.Commit, changed map[rows.Name][]byte, least uint64) {
	p.mu.Lock()
	defer p.mu.Unlock()

	dirty := rows.Commit{}
	values := map[rows.Name][]byte{}
	if p.sending != nil {
		for _, row := range p.sending.Rows {
			if row.Name != drainedName {
				values[row.Name] = row.Value
			}
		}
		c.IDs = append(c.IDs, p.sending.IDs...)
	}
	maps.Copy(values, p.pending)
	for name := range values {
		dirty.Rows = append(dirty.Rows, rows.Row{Name: name})
	}
	c.IDs = append(c.IDs, p.ids...)
	dirty.IDs = c.IDs

	maps.Copy(changed, values)
	for name, value := range changed {
		c.Rows = append(c.Rows, rows.Row{Name: name, Value: encodeValue(value)})
	}

	c.Number = max(least, p.newest)
	p.newest = c.Number
	p.drained = nil // the front may need these rows again
	if len(dirty.Rows)+len(dirty.IDs) > 0 {
		c.Rows = append(c.Rows, rows.Row{Name: dirtyName(c.Number), Value: encodeNames(&dirty)})
		p.marks = append(p.marks, c.Number)
	}
}
