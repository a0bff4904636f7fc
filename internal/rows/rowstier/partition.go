package rowstier

import (
	"bytes"
	"fmt"
	"slices"
	"sync"
	"time"

	"headcount/internal/rows"
)

// Collections of the tier's own rows.
const (
	collection = "tier"
	dirtyRows  = "tier-dirty" // in the front: number of a commit -> names of the rows that it changed
)

var (
	stateName   = rows.Name{Collection: collection, Field: "state"}   // in the front
	drainedName = rows.Name{Collection: collection, Field: "drained"} // in the back: see had
)

func dirtyName(number uint64) rows.Name {
	return rows.Name{Collection: dirtyRows, Field: fmt.Sprintf("%016x", number)}
}

// partition is what this process knows about a partition.
type partition struct {
	id int

	mu sync.Mutex // guards the fields below
	tenure
}

// tenure is what a process has learned about a partition since it claimed the partition.
type tenure struct {
	owner string // empty: this process has not claimed the partition
	epoch uint64 // of the claim in the front
	state state  // of the front

	pending map[rows.Name][]byte // rows that changed in the front and are not in sending
	ids     []rows.ID            // new IDs that are not in sending
	newest  uint64               // the front's newest commit in pending
	marks   []uint64             // commits whose dirtyRows row is in the front
	since   time.Time            // time of the first change in pending

	claimed   bool         // this process has claimed the partition in the back, too
	backEpoch uint64       // epoch of that claim
	backHas   uint64       // number of the back's newest commit
	sending   *rows.Commit // the drain whose outcome is not known yet, or nil
	sendingTo uint64       // once the back has sending, it has everything up to this commit of the front
	sentSince time.Time    // time of the first change in sending

	sendingNames map[rows.Name]bool // names of the rows in sending
	// unsaid says that the back's record of the front's token is flagged: the front may not have the token yet.
	unsaid bool
	// drainedUntil is the newest commit of the front that this process knows to be drained.
	drainedUntil uint64

	evicted []rows.Name // rows to remove from the front
	drained []rows.Name // tombstones and rows of dirtyRows that the front no longer needs
	// ousted says that another process has claimed the partition in the back for another front.
	ousted bool
	// contested says that another process has claimed the partition in the back for this front.
	contested bool
	// changed says that state is newer than its row in the front.
	changed bool
	// begun is the number of the commit that began last. isRepeated says that this commit had begun before.
	begun      uint64
	isRepeated bool
	// opened says that the front was whole until now, and that the commit which ends this is not acknowledged yet.
	opened bool
}

func (p *partition) dirty() int {
	p.mu.Lock()
	defer p.mu.Unlock()

	return p.dirtyLocked()
}

func (p *partition) dirtyLocked() int {
	n := len(p.pending) + len(p.ids)
	if p.sending != nil {
		n += len(p.sending.Rows) + len(p.sending.IDs)
	}

	return n
}

// oldest returns the time of the first undrained change, or the zero time.
func (p *partition) oldest() time.Time {
	p.mu.Lock()
	defer p.mu.Unlock()

	switch {
	case p.sending != nil:
		return p.sentSince
	case len(p.pending)+len(p.ids) > 0:
		return p.since
	default:
		return time.Time{}
	}
}

// refuses returns why a commit must not be made in the front, or nil. It lets commits without changes through to an
// ousted partition: their outcome shows the owner whether another process has claimed the partition in the front, too.
func (p *partition) refuses(c *rows.Commit) error {
	p.mu.Lock()
	defer p.mu.Unlock()

	if p.contested {
		return &rows.Lost{} // makes the owner claim the partition again, unless the front has another owner
	}
	if p.ousted && len(c.Rows)+len(c.IDs) > 0 {
		return fmt.Errorf("%w: another process uses the durable store with another fast store, so "+
			"changes would be lost",
			rows.ErrFull)
	}

	return nil
}

func (p *partition) isLossy(now time.Time) bool {
	p.mu.Lock()
	defer p.mu.Unlock()

	return now.Before(p.state.lossy)
}

// begin returns the commit in the form in which the front stores it.
func (p *partition) begin(c *rows.Commit) rows.Commit {
	p.mu.Lock()
	defer p.mu.Unlock()

	p.isRepeated = c.Number == p.begun
	p.begun = c.Number

	// An undrained row stays in the front, because no other store has it.
	leaving := slices.DeleteFunc(slices.Clone(p.evicted[:p.leavingLocked()]), p.isDirtyLocked)
	if len(leaving) > 0 && p.state.whole {
		p.state.whole = false
		p.changed = true
		p.opened = true
	}

	// The caller may repeat its commit, so begin does not modify it.
	front := *c
	front.Rows = make([]rows.Row, 0, len(c.Rows)+len(p.evicted)+len(p.drained)+2)
	written := make(map[rows.Name]bool, len(c.Rows))
	for _, row := range c.Rows {
		written[row.Name] = true
		front.Rows = append(front.Rows, p.inFrontLocked(row))
	}

	// If this process ends before the rows are drained, the next owner reads their names here.
	if len(c.Rows)+len(c.IDs) > 0 {
		front.Rows = append(front.Rows, rows.Row{Name: dirtyName(c.Number), Value: encodeNames(c)})
	}

	for _, name := range p.drained {
		if !written[name] && !p.isDirtyLocked(name) {
			written[name] = true
			front.Rows = append(front.Rows, rows.Row{Name: name})
		}
	}
	for _, name := range leaving {
		if !written[name] {
			written[name] = true
			front.Rows = append(front.Rows, rows.Row{Name: name})
		}
	}

	if p.opened {
		front.Rows = p.appendTombstonesLocked(front.Rows, written)
	}
	if p.changed {
		front.Rows = append(front.Rows, rows.Row{Name: stateName, Value: p.state.encode()})
	}

	return front
}

// appendTombstonesLocked adds tombstones for undrained deletions. From now on, reads look in the back for rows that the
// front does not have, and would find the deleted rows there.
func (p *partition) appendTombstonesLocked(to []rows.Row, written map[rows.Name]bool) []rows.Row {
	add := func(name rows.Name, value []byte) {
		if value == nil && !written[name] {
			written[name] = true
			to = append(to, rows.Row{Name: name, Value: encodeValue(nil)})
		}
	}

	for name, value := range p.pending {
		add(name, value)
	}
	if p.sending == nil {
		return to
	}
	for _, row := range p.sending.Rows {
		if _, again := p.pending[row.Name]; !again {
			add(row.Name, row.Value)
		}
	}

	return to
}

// inFrontLocked returns a row in the form in which the front stores it.
func (p *partition) inFrontLocked(row rows.Row) rows.Row {
	if row.Value == nil && p.state.whole {
		return row // needs no tombstone: reads do not ask the back
	}

	return rows.Row{Name: row.Name, Value: encodeValue(row.Value)}
}

// isDirtyLocked reports whether a row has an undrained change.
func (p *partition) isDirtyLocked(name rows.Name) bool {
	if _, is := p.pending[name]; is {
		return true
	}

	return p.sending != nil && p.sendingNames[name]
}

// made records that the front has acknowledged a commit: c is the caller's form, front is what begin made of it.
func (p *partition) made(c, front *rows.Commit) {
	p.mu.Lock()
	defer p.mu.Unlock()

	if len(p.pending)+len(p.ids) == 0 {
		p.since = time.Now()
	}
	if p.pending == nil {
		p.pending = map[rows.Name][]byte{}
	}
	for _, row := range c.Rows {
		p.pending[row.Name] = row.Value
	}
	p.ids = append(p.ids, c.IDs...)
	if len(c.Rows)+len(c.IDs) > 0 {
		p.marks = append(p.marks, c.Number)
	}
	p.newest = c.Number

	// If the commit was repeated, the front may have its earlier form, which deletes fewer rows. The others then stay
	// in the front although nothing needs them, which does no harm.
	written := map[rows.Name]bool{}
	for _, row := range front.Rows {
		written[row.Name] = true
	}
	p.drained = slices.DeleteFunc(p.drained, func(name rows.Name) bool { return written[name] })
	p.evicted = p.evicted[p.leavingLocked():]
	p.opened = false

	// The state may have changed since the commit began. And if the commit was repeated, the front may have its earlier
	// form, with an earlier state.
	wroteState := func(row rows.Row) bool { return row.Name == stateName && bytes.Equal(row.Value, p.state.encode()) }
	if !p.isRepeated && slices.ContainsFunc(front.Rows, wroteState) {
		p.changed = false
	}
}

// evictAtOnce is the maximum number of rows that one commit evicts, so that evictions do not make a commit large.
const evictAtOnce = 1000

func (p *partition) leavingLocked() int { return min(len(p.evicted), evictAtOnce) }

func (p *partition) evict(names []rows.Name) {
	p.mu.Lock()
	defer p.mu.Unlock()

	p.evicted = append(p.evicted, names...)
}
