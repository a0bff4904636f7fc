package simulate

import (
	"sync"

	"headcount/client"
)

// A tally is the truth about one counter that lasts, and about the changes that are
// under way. Workers and the driver share it.
//
// A change is started before it is first sent, and lands when it is acknowledged, or
// is refused. What is started and neither landed nor refused may have landed.
type tally struct {
	key, kind string
	floor     bool // 0 is its floor

	mu      sync.Mutex
	started moves // those that were refused are taken out again
	landed  moves
	newest  client.Version // of the acknowledged changes
	doubted bool           // something was wrong since the last checkpoint
	entries uint64         // that the ledger must have; of exact
	read    uint64         // seq of the last entry that was checked; the driver's
	after   int64          // of that entry; the driver's
}

// moves are sums of what went up and what went down, both positive.
type moves struct{ up, down int64 }

func (m moves) plus(delta int64) moves {
	if delta < 0 {
		m.down -= delta
	} else {
		m.up += delta
	}
	return m
}

func (m moves) minus(delta int64) moves {
	if delta < 0 {
		m.down += delta
	} else {
		m.up -= delta
	}
	return m
}

// A moment is what was acknowledged when a call began.
type moment struct {
	landed moves
	newest client.Version
}

func newTally(kind, key string) *tally {
	return &tally{key: key, kind: kind, floor: kind == "exact" || kind == "members"}
}

// now returns the moment at which a read begins.
func (t *tally) now() moment { return t.start(0) }

// start notes that a change is about to be sent.
func (t *tally) start(delta int64) moment {
	t.mu.Lock()
	defer t.mu.Unlock()

	m := moment{t.landed, t.newest}
	t.started = t.started.plus(delta)

	return m
}

// land notes that a change was acknowledged.
func (t *tally) land(delta int64) {
	t.mu.Lock()
	defer t.mu.Unlock()

	t.landed = t.landed.plus(delta)
	// A change by 0, such as a member who is in already, has no entry.
	if delta != 0 {
		t.entries++
	}
}

// refuse notes that a change was refused and cannot land any more.
func (t *tally) refuse(delta int64) {
	t.mu.Lock()
	defer t.mu.Unlock()

	t.started = t.started.minus(delta)
}

// saw notes the version of an acknowledged change.
func (t *tally) saw(v client.Version) {
	t.mu.Lock()
	defer t.mu.Unlock()

	if t.newest.Before(v) {
		t.newest = v
	}
}

// bounds returns the lowest and the highest value that the counter can have had since then.
func (t *tally) bounds(since moment) (low, high int64) {
	t.mu.Lock()
	defer t.mu.Unlock()

	// The least that it can be: everything that may have gone down, and nothing more up than was acknowledged.
	low = since.landed.up - t.started.down
	high = t.started.up - since.landed.down
	if t.floor {
		low = max(low, 0)
	}

	return low, high
}

// doubt records that the counter's value is wrong, and reports whether it was right since
// the last checkpoint. Only the first wrong answer is worth a report, because all later ones
// follow from it.
func (t *tally) doubt() (first bool) {
	t.mu.Lock()
	defer t.mu.Unlock()

	first = !t.doubted
	t.doubted = true

	return first
}

// trust ends doubt.
func (t *tally) trust() {
	t.mu.Lock()
	defer t.mu.Unlock()

	t.doubted = false
}

// fits reports whether a change downwards that was started then can never have had too
// little.
func (t *tally) fits(since moment) bool {
	t.mu.Lock()
	defer t.mu.Unlock()

	return since.landed.up-t.started.down >= 0
}

// value returns the truth, when nothing is under way.
func (t *tally) value() int64 {
	t.mu.Lock()
	defer t.mu.Unlock()

	return t.landed.up - t.landed.down
}

// correct takes over a wrong value that was reported, so that it is reported once.
func (t *tally) correct(value int64) {
	t.mu.Lock()
	defer t.mu.Unlock()

	delta := value - (t.landed.up - t.landed.down)
	// In both sums, so that the difference between what is started and what has landed stays.
	t.started = t.started.plus(delta)
	t.landed = t.landed.plus(delta)
}

// touched reports whether the counter must exist.
func (t *tally) touched() bool {
	t.mu.Lock()
	defer t.mu.Unlock()

	return t.landed != moves{}
}
