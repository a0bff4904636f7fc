package rowstier

import (
	"bytes"
	"fmt"
	"slices"
	"sync"
	"time"

	"headcount/internal/rows"
)

// Rows of the front that belong to the tier.
const (
	collection = "tier"
	dirtyRows  = "tier-dirty" // number of a commit -> the names of what it changed
)

var (
	stateName   = rows.Name{Collection: collection, Field: "state"}   // in the front
	drainedName = rows.Name{Collection: collection, Field: "drained"} // in the back: what it has, and of which front
)

func dirtyName(number uint64) rows.Name {
	return rows.Name{Collection: dirtyRows, Field: fmt.Sprintf("%016x", number)}
}

// partition is what the owner of a partition knows about it.
type partition struct {
	id int

	mu sync.Mutex // guards the fields below
	tenure
}

// tenure is what a process knows of a partition from the claim of it on.
type tenure struct {
	owner string // empty: this process has not claimed the partition
	epoch uint64 // of the claim in the front
	state state  // of the front

	pending map[rows.Name][]byte // what changed in the front since sending
	ids     []rows.ID            // likewise
	newest  uint64               // the front's newest commit in pending
	marks   []uint64             // commits whose rows of names are in the front
	since   time.Time            // the first change in pending

	claimed   bool   // in the back, too
	backEpoch uint64 // of that claim
	backHas   uint64 // the newest commit of the back
	sending   *rows.Commit
	sendingTo uint64    // the front's commit that the back has with sending
	sentSince time.Time // the first change in sending

	sendingNames map[rows.Name]bool // of its rows
	// unsaid says that the back takes the front's token for one that the front may not have yet.
	unsaid bool
	// drainedUntil is the newest commit of the front that the back has, as far as this process knows.
	drainedUntil uint64

	evicted []rows.Name // rows that are to leave the front
	drained []rows.Name // rows of the tier, and tombstones, that the front needs no more
	// ousted says that another process has claimed the partition in the back, which has the rows of another front now.
	ousted bool
	// contested says that another process has claimed the partition in the back, for this front.
	contested bool
	// changed says that the front has not got the state yet.
	changed bool
	// begun is the number of the commit that began last, and isRepeated says that it had begun before.
	begun      uint64
	isRepeated bool
	// opened says that the front has not got the commit yet from which on it is not whole.
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

// oldest returns when the first change was made that is not drained, or the zero time.
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

// refuses returns why a commit must not be made in the front. One that changes nothing may: if the partition was
// claimed in the front, too, its owner finds out by that.
func (p *partition) refuses(c *rows.Commit) error {
	p.mu.Lock()
	defer p.mu.Unlock()

	if p.contested {
		return &rows.Lost{} // its owner claims it again, unless the front has another owner
	}
	if p.ousted && len(c.Rows)+len(c.IDs) > 0 {
		return fmt.Errorf("%w: what it gets would not be kept: another process has claimed the lasting store",
			rows.ErrFull)
	}

	return nil
}

func (p *partition) isLossy(now time.Time) bool {
	p.mu.Lock()
	defer p.mu.Unlock()

	return now.Before(p.state.lossy)
}

// begin returns the commit as it goes to the front.
func (p *partition) begin(c *rows.Commit) rows.Commit {
	p.mu.Lock()
	defer p.mu.Unlock()

	p.isRepeated = c.Number == p.begun
	p.begun = c.Number

	// A row that is not drained stays: it would be nowhere.
	leaving := slices.DeleteFunc(slices.Clone(p.evicted[:p.leavingLocked()]), p.isDirtyLocked)
	if len(leaving) > 0 && p.state.whole {
		p.state.whole = false
		p.changed = true
		p.opened = true
	}

	// The caller's commit stays as it is, because it may be repeated.
	front := *c
	front.Rows = make([]rows.Row, 0, len(c.Rows)+len(p.evicted)+len(p.drained)+2)
	written := make(map[rows.Name]bool, len(c.Rows))
	for _, row := range c.Rows {
		written[row.Name] = true
		front.Rows = append(front.Rows, p.inFrontLocked(row))
	}

	// If this process ends before that is drained, the next owner reads the names.
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

// appendTombstonesLocked adds tombstones of rows whose deletion is not drained, because from now on the back may be
// asked for rows that are not in the front.
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

// inFrontLocked returns a row as the front has it.
func (p *partition) inFrontLocked(row rows.Row) rows.Row {
	if row.Value == nil && p.state.whole {
		return row // nobody looks for it in the back
	}

	return rows.Row{Name: row.Name, Value: encodeValue(row.Value)}
}

// isDirtyLocked reports whether a row has a change that is not drained.
func (p *partition) isDirtyLocked(name rows.Name) bool {
	if _, is := p.pending[name]; is {
		return true
	}

	return p.sending != nil && p.sendingNames[name]
}

// made notes that the front has a commit.
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

	// If the commit was repeated, the front may have an earlier form of it, without some of these. Then rows stay that
	// nobody needs.
	written := map[rows.Name]bool{}
	for _, row := range front.Rows {
		written[row.Name] = true
	}
	p.drained = slices.DeleteFunc(p.drained, func(name rows.Name) bool { return written[name] })
	p.evicted = p.evicted[p.leavingLocked():]
	p.opened = false

	// The state may have changed since the commit began, and of one that was repeated the front may have the earlier
	// form.
	wroteState := func(row rows.Row) bool { return row.Name == stateName && bytes.Equal(row.Value, p.state.encode()) }
	if !p.isRepeated && slices.ContainsFunc(front.Rows, wroteState) {
		p.changed = false
	}
}

// evictAtOnce is how many rows leave the front with one commit, so that no commit is large because of them.
const evictAtOnce = 1000

func (p *partition) leavingLocked() int { return min(len(p.evicted), evictAtOnce) }

func (p *partition) evict(names []rows.Name) {
	p.mu.Lock()
	defer p.mu.Unlock()

	p.evicted = append(p.evicted, names...)
}
