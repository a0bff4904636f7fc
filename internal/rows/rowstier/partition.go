package rowstier

import (
	"bytes"
	"fmt"
	"slices"
	"sync"
	"time"

	"headcount/internal/marks"
	"headcount/internal/rows"
)

// Collections of the tier's own rows.
const (
	collection = "tier"
	dirtyRows  = "tier-dirty" // in the fast store: number of a commit -> names of the rows that it changed
)

var (
	stateName   = rows.Name{Collection: collection, Field: "state"}   // in the fast store
	drainedName = rows.Name{Collection: collection, Field: "drained"} // in the durable store: see drainRecord
)

func dirtyName(number uint64) rows.Name {
	return rows.Name{Collection: dirtyRows, Field: fmt.Sprintf("%016x", number)}
}

// partition is what this process knows about a partition.
type partition struct {
	id    int
	lists int // Config.Lists

	compared comparison // guarded by Store.draining

	mu sync.Mutex // guards the fields below
	tenure
}

// comparison is what claims have found of the rows that the durable store has and the fast store may have lost. To find
// them, all rows of the partition are examined, which may take longer than one claim may. The next claim then goes on.
type comparison struct {
	number  uint64 // of the durable store's newest commit: with another one, its rows may be others
	after   uint64 // the newest commit that the two stores have in common
	place   rows.Place
	changed map[rows.Name][]byte // a nil value: deleted
}

// tenure is what a process has learned about a partition since it claimed the partition.
type tenure struct {
	owner string // empty: this process has not claimed the partition
	epoch uint64 // of the claim in the fast store
	rival rival

	state        state // of the fast store
	stateChanged bool  // state is newer than its row in the fast store

	// A changed row is first in dirty, then in sending, and then drained.
	dirty   changes
	sending *drain      // the drain whose outcome is not known yet, or nil
	drained drainRecord // as far as this process knows

	durable durableClaim

	newest       uint64   // the newest commit of the fast store, as far as this process knows
	dirtyCommits []uint64 // commits whose dirtyRows row is in the fast store
	listed       int      // at least so many names and IDs are in these rows
	commit       fastCommit
	removals     removals
}

// rival says whether another process has claimed the partition in the durable store after this one.
type rival int

const (
	noRival   rival = iota
	sameFast        // it uses the same fast store, which decides which of the two processes is the owner
	otherFast       // it uses another fast store, which the durable store belongs to now
)

// changes are changes that the fast store has and that no drain has begun to send.
type changes struct {
	rows  map[rows.Name][]byte // a nil value: deleted
	ids   []rows.ID
	since time.Time // time of the first of these changes
}

func (c *changes) len() int { return len(c.rows) + len(c.ids) }

// put adds the change of a row, or replaces an earlier one.
func (c *changes) put(name rows.Name, value []byte) {
	if c.rows == nil {
		c.rows = map[rows.Name][]byte{}
	}
	c.rows[name] = value
}

// take returns the changes, and leaves none.
func (c *changes) take() changes {
	taken := *c
	c.rows = nil
	c.ids = nil

	return taken
}

// drain is a commit to the durable store.
type drain struct {
	rows.Commit
	names map[rows.Name]bool // of its rows, without the tier's own
	upTo  uint64             // with it the durable store has everything up to this commit of the fast store
	since time.Time          // time of the first change in it
}

// durableClaim is the claim of the partition in the durable store.
type durableClaim struct {
	isHeld bool
	epoch  uint64
	newest uint64 // number of the durable store's newest commit
}

// fastCommit is the owner's last commit to the fast store.
type fastCommit struct {
	number     uint64
	isRepeated bool // it was sent before, so the fast store may have its earlier form
	// endsComplete says that the fast store may be complete until this commit, so this one writes tombstones.
	endsComplete bool
	mergesLists  bool // its row of dirtyRows replaces all earlier ones
	evicts       int  // how many rows of removals.evicted it removes
	tidies       int  // how many rows of removals.drained it removes
}

// removals are rows to delete from the fast store with the next commits.
type removals struct {
	evicted []rows.Name // by Store.Evict
	drained []rows.Name // tombstones and rows of dirtyRows that are not needed after a drain
}

func (p *partition) countDirty() int {
	p.mu.Lock()
	defer p.mu.Unlock()

	return p.countDirtyLocked()
}

func (p *partition) countDirtyLocked() int {
	n := p.dirty.len()
	if p.sending != nil {
		n += len(p.sending.Rows) + len(p.sending.IDs)
	}

	return n
}

// isDirtyLocked reports whether a row has an undrained change.
func (p *partition) isDirtyLocked(name rows.Name) bool {
	if _, is := p.dirty.rows[name]; is {
		return true
	}

	return p.sending != nil && p.sending.names[name]
}

// oldest returns the time of the first undrained change, or the zero time.
func (p *partition) oldest() time.Time {
	p.mu.Lock()
	defer p.mu.Unlock()

	switch {
	case p.sending != nil:
		return p.sending.since
	case p.dirty.len() > 0:
		return p.dirty.since
	default:
		return time.Time{}
	}
}

// refuses returns why a commit must not be made in the fast store, or nil.
func (p *partition) refuses(c *rows.Commit) error {
	p.mu.Lock()
	defer p.mu.Unlock()

	// A commit without changes may pass: its outcome shows the owner whether another process has claimed the partition
	// in the fast store, too.
	hasChanges := len(c.Rows)+len(c.IDs) > 0
	switch p.rival {
	case sameFast:
		return &rows.Lost{} // makes the owner claim the partition again, unless the fast store has another owner
	case otherFast:
		if hasChanges {
			return fmt.Errorf("%w: another process uses this PostgreSQL with another Redis, so changes would be lost",
				rows.ErrFull)
		}
	}

	return nil
}

// mayLackIDs reports whether the fast store may have lost IDs that the durable store has.
func (p *partition) mayLackIDs(now time.Time) bool {
	p.mu.Lock()
	defer p.mu.Unlock()

	return now.Before(p.state.lacksIDsUntil)
}

// prepare returns the commit in the form in which the fast store gets it.
func (p *partition) prepare(c *rows.Commit) rows.Commit {
	p.mu.Lock()
	defer p.mu.Unlock()

	// An owner repeats a commit with its number until it knows the outcome.
	p.commit.isRepeated = c.Number == p.commit.number
	p.commit.number = c.Number

	// An undrained row stays in the fast store, because no other store has it.
	next := atOnce(p.removals.evicted)
	p.commit.evicts = len(next)
	evicted := slices.DeleteFunc(slices.Clone(next), p.isDirtyLocked)
	if len(evicted) > 0 && p.state.complete {
		p.state.complete = false
		p.stateChanged = true
		p.commit.endsComplete = true
	}

	// The caller may repeat its commit, so prepare does not modify it.
	prepared := *c
	tidied := atOnce(p.removals.drained)
	p.commit.tidies = len(tidied)
	prepared.Rows = make([]rows.Row, 0, len(c.Rows)+len(evicted)+len(tidied)+2)
	written := make(map[rows.Name]bool, len(c.Rows))
	for _, row := range c.Rows {
		written[row.Name] = true
		prepared.Rows = append(prepared.Rows, p.encodeRowLocked(row))
	}

	// If this process ends before the rows are drained, the next owner reads their names here.
	p.commit.mergesLists = p.mergesListsLocked()
	if len(c.Rows)+len(c.IDs) > 0 {
		prepared.Rows = append(prepared.Rows, rows.Row{Name: dirtyName(c.Number), Value: p.encodeListLocked(c)})
	}

	remove := func(name rows.Name) {
		if !written[name] {
			written[name] = true
			prepared.Rows = append(prepared.Rows, rows.Row{Name: name})
		}
	}
	for _, name := range tidied {
		// A row that has changed again is no tombstone any more; the drain of that change comes back to it.
		if !p.isDirtyLocked(name) {
			remove(name)
		}
	}
	for _, name := range evicted {
		remove(name)
	}

	if p.commit.endsComplete {
		prepared.Rows = p.appendTombstonesLocked(prepared.Rows, written)
	}
	if p.stateChanged {
		prepared.Rows = append(prepared.Rows, rows.Row{Name: stateName, Value: p.state.encode()})
	}

	return prepared
}

// appendTombstonesLocked adds tombstones for undrained deletions. From now on, reads look in the durable store for rows
// that the fast store does not have, and would find the deleted rows there.
func (p *partition) appendTombstonesLocked(to []rows.Row, written map[rows.Name]bool) []rows.Row {
	add := func(name rows.Name, value []byte) {
		if value == nil && !written[name] {
			written[name] = true
			to = append(to, rows.Row{Name: name, Value: encodeValue(nil)})
		}
	}

	for name, value := range p.dirty.rows {
		add(name, value)
	}
	if p.sending == nil {
		return to
	}
	for _, row := range p.sending.Rows {
		// If the row has changed since, dirty has its newer value.
		if _, again := p.dirty.rows[row.Name]; !again {
			add(row.Name, row.Value)
		}
	}

	return to
}

// encodeRowLocked returns a row in the form in which the fast store has it.
func (p *partition) encodeRowLocked(row rows.Row) rows.Row {
	if row.Value == nil && p.state.complete {
		return row // needs no tombstone: reads do not ask the durable store
	}

	return rows.Row{Name: row.Name, Value: encodeValue(row.Value)}
}

// acknowledge records that the fast store has a commit: c is the caller's form, prepared is the fast store's.
func (p *partition) acknowledge(c, prepared *rows.Commit) {
	p.mu.Lock()
	defer p.mu.Unlock()

	p.addDirtyLocked(c)

	// If the commit was repeated, the fast store may have its earlier form, which deletes fewer rows. The others then
	// stay in the fast store although nothing needs them, which does no harm. Others may have been added since.
	p.removals.drained = p.removals.drained[min(p.commit.tidies, len(p.removals.drained)):]
	p.removals.evicted = p.removals.evicted[min(p.commit.evicts, len(p.removals.evicted)):]

	// The state may have changed since the commit was prepared. And if the commit was repeated, the fast store may have
	// its earlier form, with an earlier state and without tombstones. Then the next commit writes them.
	if !p.commit.isRepeated {
		p.commit.endsComplete = false
	}
	hasState := func(row rows.Row) bool { return row.Name == stateName && bytes.Equal(row.Value, p.state.encode()) }
	if !p.commit.isRepeated && slices.ContainsFunc(prepared.Rows, hasState) {
		p.stateChanged = false
	}
}

// addDirtyLocked adds the changes of a commit that the fast store has acknowledged.
func (p *partition) addDirtyLocked(c *rows.Commit) {
	if p.dirty.len() == 0 {
		p.dirty.since = time.Now()
	}
	for _, row := range c.Rows {
		p.dirty.put(row.Name, row.Value)
	}
	p.dirty.ids = append(p.dirty.ids, c.IDs...)
	marks.Must(c.Number >= p.newest, "commits to the fast store are acknowledged in their order")
	p.newest = c.Number

	if len(c.Rows)+len(c.IDs) > 0 {
		p.addListLocked(c)
	}
}

// mergesListsLocked reports whether the next commit lists all undrained rows and IDs, so that the earlier rows of
// dirtyRows can go. Without that there would be one for each commit of an outage of the durable store. A list of all is
// written only where the lists that it replaces are twice as long, so that it costs less than they did.
func (p *partition) mergesListsLocked() bool {
	isLong := len(p.dirtyCommits) >= p.lists && p.listed >= 2*p.countDirtyLocked()

	// If the commit is repeated, the fast store may have its earlier form, without the list of all.
	return isLong && !p.commit.isRepeated
}

// encodeListLocked returns the row of dirtyRows of a commit.
func (p *partition) encodeListLocked(c *rows.Commit) []byte {
	if !p.commit.mergesLists {
		return encodeNames(c)
	}

	values, ids := p.undrainedLocked()
	all := rows.Commit{Rows: c.Rows, IDs: distinct(append(ids, c.IDs...))}
	for _, row := range c.Rows {
		delete(values, row.Name)
	}
	all.Rows = slices.Clone(all.Rows)
	for name := range values {
		all.Rows = append(all.Rows, rows.Row{Name: name})
	}

	return encodeNames(&all)
}

// addListLocked records that the fast store has the row of dirtyRows of a commit.
func (p *partition) addListLocked(c *rows.Commit) {
	p.listed += len(c.Rows) + len(c.IDs)
	if p.commit.mergesLists {
		for _, number := range p.dirtyCommits {
			p.removals.drained = append(p.removals.drained, dirtyName(number))
		}
		p.dirtyCommits = nil
		p.listed = p.countDirtyLocked()
	}

	p.dirtyCommits = append(p.dirtyCommits, c.Number)
}

// removedAtOnce is the maximum number of rows that one commit evicts, and that it removes after drains, so that neither
// makes a commit large.
const removedAtOnce = 1000

// atOnce returns the names that the next commit removes.
func atOnce(names []rows.Name) []rows.Name { return names[:min(len(names), removedAtOnce)] }

func (p *partition) evict(names []rows.Name) {
	p.mu.Lock()
	defer p.mu.Unlock()

	p.removals.evicted = append(p.removals.evicted, names...)
}
