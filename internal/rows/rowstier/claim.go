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

// Claim implements rows.Store. While the back is away, a partition can be claimed whose front says how far it is; after
// the front has lost that, its partitions are unavailable until the back says what was drained.
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

	// If some partitions are not claimed, the next call has fewer to claim.
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

// taking is how a partition that was claimed in the front begins.
type taking struct {
	s      *Store
	p      *partition
	at     int // its index in the call
	owner  string
	former uint64     // epoch of the caller's former claim, or 0
	claim  rows.Claim // in the front
	err    error      // why the partition is not claimed

	state   state
	isThere bool // the front has a state
	goesOn  bool // this process owned the partition all the time

	back    rows.Claim
	away    error // why the back was not claimed
	isNew   bool  // the back never had a row of the partition
	drained had   // what the back has of the front
}

// reached reports whether the back was claimed.
func (t *taking) reached() bool { return t.away == nil }

// takings are partitions that are claimed together. The back may be far, so each of its calls is for all of them.
type takings []*taking

// takenAtOnce is how many partitions begin at the same time, once the back has told what it has of them.
const takenAtOnce = 8

// take claims the partitions in the back, too, and has each begin.
func (all takings) take(ctx context.Context) {
	all.readStates(ctx)
	all.claimBack(ctx)
	all.introduce(ctx)

	// What is left are calls about one partition each, most of them of the front alone.
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

// possible returns those that may still be claimed.
func (all takings) possible() takings {
	return slices.DeleteFunc(slices.Clone(all), func(t *taking) bool { return t.err != nil })
}

// reached returns those that may still be claimed in the back.
func (all takings) reached() takings {
	return slices.DeleteFunc(all.possible(), func(t *taking) bool { return !t.reached() })
}

// begin has the partition begin where the front and the back are.
func (t *taking) begin(ctx context.Context) error {
	// Such a front may have lost everything, and the back alone knows.
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
		// The back was used alone until now. The front is filled by reads, and does not know the IDs.
		t.state.lossy = time.Now().Add(lossyFor)
	}

	t.warn()
	if t.reached() {
		t.state.back = t.back.Number
	}
	t.settle(t.reached())

	return nil
}

// lost reports whether the front has lost something that the back or the memory of this process has.
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
		return false, fmt.Errorf("%w: what the front has lost is in the back alone", rows.ErrUnavailable)
	}

	return true, nil
}

// readStates reads from the front how far it and the back are.
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

// addresses returns the row of a name in each partition.
func (all takings) addresses(name rows.Name) []rows.Address {
	addresses := make([]rows.Address, len(all))
	for i, t := range all {
		addresses[i] = rows.Address{Partition: t.p.id, Name: name}
	}

	return addresses
}

// claimBack claims the partitions in the back, and finds out what both have.
func (all takings) claimBack(ctx context.Context) {
	if len(all) == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, all[0].s.cfg.Timeout)
	defer cancel()

	// Before the claim, which would take a partition from the owner in front of the right one.
	all.possible().readDrained(ctx)
	all.reached().claimReached(ctx)

	// Nobody else writes the back from now on. Another process may have given a front its token meanwhile, and then the
	// back has it as well.
	all.reached().readStates(ctx)
	all.reached().readDrained(ctx)
	for _, t := range all.reached() {
		t.isNew = t.back.Number == 0 || t.drained.number == 0 && strings.HasPrefix(t.drained.token, newToken)
	}
}

// claimReached claims the partitions in the back. What they had there does not matter: the front has decided.
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

// ErrOtherFront is in the errors of claims whose front has another token than that from which the back has its rows. It
// is a rows.ErrUnavailable.
var ErrOtherFront = fmt.Errorf("%w: the lasting store has the rows of another store in front of it",
	rows.ErrUnavailable)

// ErrBoth is in the errors of claims whose front and back both have rows, and were never used together. It is a
// rows.ErrUnavailable.
var ErrBoth = fmt.Errorf("%w: both stores have rows, and were never used together: give an empty one of them, "+
	"and import into both what was exported from the other", rows.ErrUnavailable)

// newToken begins the token of a front whose back never had a row before.
const newToken = "new-"

// readDrained reads what the back has.
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

// introduce gives fronts without a token one: each may be another front than before. The back gets the token first,
// so that a front with a token that the back does not have is never the right one. Of processes that claim a
// partition at the same time, all but one are refused by the front later on, so they must not have tokens of their
// own: all take the one that the back has got and the front has not.
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

// name gives the front a token, and returns the commit by which the back gets it.
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

// warn says that the back has less than was drained. What is in the front is right, and goes to the back when it
// changes.
func (t *taking) warn() {
	hasLess := t.reached() && t.back.Number < t.state.back
	if t.isThere && hasLess {
		t.s.cfg.Log.Warn().Int("partition", t.p.id).
			Msg("counters: the lasting store was restored from an older copy; " +
				"what left the fast one since is as it was then, and what did not is kept again when it changes")
	}
}

// remember forgets what this process knew of the partition from a former time, and reads from the front what is not
// drained.
func (t *taking) remember(ctx context.Context) error {
	t.enter()
	if t.goesOn {
		return nil // its memory has everything that is not drained, also what the front has lost
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

		// The back has it, or something newer: the front may be an older copy of itself.
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

// enter makes the partition this process's, and forgets a former time.
func (t *taking) enter() {
	p := t.p
	p.mu.Lock()
	defer p.mu.Unlock()

	// A claim with a former one is granted only if no other process has claimed the partition since.
	t.goesOn = t.former != 0 && p.epoch != 0
	if !t.goesOn {
		p.leaveLocked()
	}
	p.owner = t.owner
	p.epoch = t.claim.Epoch
}

// values returns rows of the front.
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
			// Without a tombstone it was not deleted: it was drained, and then it left the front.
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

// settle notes how far front and back are. The front gets it with the next commit of the owner.
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

// restore writes to the front what it has lost: what changed in the back since, and what this process has not drained
// yet. That is one commit, after which the front is as it was.
func (t *taking) restore(ctx context.Context) error {
	changed, err := t.changedInBack(ctx)
	if err != nil {
		return err
	}

	// The IDs that were lost are in the back, and are not brought over: there may be millions.
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

// changedInBack returns the rows that the back has and the front may have lost. A front that has nothing is filled by
// reads.
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

// write makes a commit of the front, without the IDs that it has not lost.
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

// addUndrained adds to a commit of the front what changed in the back, and over it what is not drained. The number of
// the commit is the newest one of the partition, and at least least.
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
	p.drained = nil // what is of no use to the front may be of use again
	if len(dirty.Rows)+len(dirty.IDs) > 0 {
		c.Rows = append(c.Rows, rows.Row{Name: dirtyName(c.Number), Value: encodeNames(&dirty)})
		p.marks = append(p.marks, c.Number)
	}
}
