package faults

import (
	"slices"
	"sync"
	"testing"
	"time"
)

const site = "*"

// truth knows who is where, and who came and went when.
type truth struct {
	mu    sync.Mutex
	pages map[string]map[string]bool // user -> pages
	count map[string]int64           // page -> users
	steps map[string][]step          // page -> who came or went, in order of time
}

type step struct {
	at   time.Time
	user string
	on   bool
}

func newTruth() *truth {
	return &truth{pages: map[string]map[string]bool{}, count: map[string]int64{}, steps: map[string][]step{}}
}

// set says that the user is on the page from now on, or is not.
func (t *truth) set(user, page string, on bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	mine := t.pages[user]
	if mine == nil {
		mine = map[string]bool{}
		t.pages[user] = mine
	}
	if mine[page] == on {
		return
	}
	before := len(mine)
	if on {
		mine[page] = true
	} else {
		delete(mine, page)
	}
	t.step(user, page, on)
	if before == 0 || len(mine) == 0 {
		t.step(user, site, on)
	}
}

func (t *truth) step(user, page string, on bool) {
	if on {
		t.count[page]++
	} else {
		t.count[page]--
	}
	t.steps[page] = append(t.steps[page], step{time.Now(), user, on})
}

// now is the page's true count.
func (t *truth) now(page string) int64 {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.count[page]
}

// distance is how far n is from the counts that are possible when each user's last
// coming or going since then may or may not have arrived.
func (t *truth) distance(page string, n int64, since time.Time) int64 {
	t.mu.Lock()
	defer t.mu.Unlock()
	low, high := t.count[page], t.count[page]
	moved := map[string]bool{}
	for _, s := range slices.Backward(t.steps[page]) {
		if s.at.Before(since) {
			break
		}
		if moved[s.user] {
			continue
		}
		moved[s.user] = true
		if s.on {
			low--
		} else {
			high++
		}
	}
	return max(low-n, n-high, 0)
}

func TestTruth(t *testing.T) {
	tr := newTruth()
	start := time.Now()
	tr.set("a", "p", true)
	tr.set("a", "q", true)
	tr.set("b", "p", true)
	tr.set("b", "p", true)
	if p, q, all := tr.now("p"), tr.now("q"), tr.now(site); p != 2 || q != 1 || all != 2 {
		t.Errorf("p %d, q %d, site %d", p, q, all)
	}
	later := time.Now()
	time.Sleep(time.Millisecond)
	tr.set("a", "p", false)
	tr.set("c", "p", true)
	tr.set("a", "q", false)
	if p, q, all := tr.now("p"), tr.now("q"), tr.now(site); p != 2 || q != 0 || all != 2 {
		t.Errorf("then p %d, q %d, site %d", p, q, all)
	}
	// b was there before, a has gone, c has come: since later, 1 to 3 are possible.
	for _, tc := range []struct {
		n     int64
		since time.Time
		want  int64
	}{{0, start, 0}, {3, start, 0}, {4, start, 1}, {0, later, 1}, {1, later, 0}, {3, later, 0}, {5, later, 2}, {3, time.Now(), 1}, {2, time.Now(), 0}} {
		if got := tr.distance("p", tc.n, tc.since); got != tc.want {
			t.Errorf("distance of %d since %s is %d, want %d", tc.n, tc.since.Sub(start), got, tc.want)
		}
	}
}
