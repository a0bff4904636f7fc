package simulate

import (
	"sync"

	"headcount/client"
)

// A tally is the truth about one counter, and about its changes that are under way. Workers and the driver share it.
//
// A change starts before it is first sent. It lands when it is acknowledged, unless it is refused. The server may have
// made a change that has started and has neither landed nor been refused.
type tally struct {
	key, kind string
	floor     bool // its floor is 0

	mu      sync.Mutex
	started moves // without those that were refused
	landed  moves
	newest  client.Version // of the changes that have landed
	doubted bool           // a value since the last checkpoint was wrong
	entries uint64         // how many the ledger of an exact counter must have
	read    uint64         // seq of the last ledger entry that was checked; the driver's
	after   int64          // the value after that entry; the driver's
}

// moves are the sums of all increases and of all decreases, both positive.
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

// A moment is what had landed when a call began.
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
	// A change by 0 has no entry in the ledger.
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

	// At the lowest, all decreases that have started are made, and no increases but those that had landed.
	low = since.landed.up - t.started.down
	high = t.started.up - since.landed.down
	if t.floor {
		low = max(low, 0)
	}

	return low, high
}

// doubt records that a value of the counter was wrong, and reports whether it was the first since the last checkpoint.
// Only the first one is worth a report, because the others follow from it.
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

// fits reports whether a decrease that started at a moment had enough all the time.
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

// correct makes a wrong value that was reported the truth, so that it is reported once.
func (t *tally) correct(value int64) {
	t.mu.Lock()
	defer t.mu.Unlock()

	delta := value - (t.landed.up - t.landed.down)
	// In both sums, so that the difference between them stays the same.
	t.started = t.started.plus(delta)
	t.landed = t.landed.plus(delta)
}

// touched reports whether the counter must exist.
func (t *tally) touched() bool {
	t.mu.Lock()
	defer t.mu.Unlock()

	return t.landed != moves{}
}
