package simulate

import (
	"slices"
	"sync"
	"time"
)

// truth is what the run itself has done: which users are on which page, and with how many tabs. It also remembers for a
// while who came and left.
type truth struct {
	mu    sync.Mutex
	pages map[string]map[*user]int // how many tabs each user has on each page
	users map[*user]int            // how many tabs each user has
	moves map[string][]arrival     // of each page, in the order of time
}

// An arrival is a user who came or, unless on is set, left.
type arrival struct {
	at   time.Time
	user *user
	on   bool
}

const remember = 2 * time.Minute // for how long truth.moves go back

func newTruth() *truth {
	return &truth{
		pages: map[string]map[*user]int{},
		users: map[*user]int{},
		moves: map[string][]arrival{},
	}
}

// enter notes one more tab of u on the page. Nobody is on a page that the server must refuse.
func (t *truth) enter(u *user, page string) {
	if !validPage(page) {
		return
	}

	t.mu.Lock()
	defer t.mu.Unlock()

	if t.pages[page] == nil {
		t.pages[page] = map[*user]int{}
	}

	t.addLocked(t.pages[page], page, u)
	t.addLocked(t.users, wholeSite, u)
}

// exit notes one tab less. Without a tab on the page it does nothing.
func (t *truth) exit(u *user, page string) {
	t.mu.Lock()
	defer t.mu.Unlock()

	if t.pages[page][u] == 0 {
		return
	}

	t.removeLocked(t.pages[page], page, u)
	if len(t.pages[page]) == 0 {
		delete(t.pages, page)
	}
	t.removeLocked(t.users, wholeSite, u)
}

func (t *truth) addLocked(tabs map[*user]int, page string, u *user) {
	tabs[u]++
	if tabs[u] == 1 {
		t.noteLocked(page, u, true)
	}
}

func (t *truth) removeLocked(tabs map[*user]int, page string, u *user) {
	tabs[u]--
	if tabs[u] == 0 {
		delete(tabs, u)
		t.noteLocked(page, u, false)
	}
}

func (t *truth) noteLocked(page string, u *user, on bool) {
	now := time.Now()
	moves := append(t.moves[page], arrival{now, u, on})
	byTime := func(a arrival, at time.Time) int { return a.at.Compare(at) }
	old, _ := slices.BinarySearchFunc(moves, now.Add(-remember), byTime)
	t.moves[page] = moves[old:]
}

// count returns the number of distinct users on the page, or, for `*`, on any.
func (t *truth) count(page string) int64 {
	t.mu.Lock()
	defer t.mu.Unlock()

	return t.countLocked(page)
}

func (t *truth) countLocked(page string) int64 {
	if page == wholeSite {
		return int64(len(t.users))
	}

	return int64(len(t.pages[page]))
}

// distance returns how far n is from the possible counts. Each user's last arrival or departure since then may or may
// not be in them yet.
func (t *truth) distance(page string, n int64, since time.Time) int64 {
	t.mu.Lock()
	defer t.mu.Unlock()

	low := t.countLocked(page)
	high := low
	moved := map[*user]bool{}

	// From the newest to the oldest, because only a user's last move matters.
	for _, m := range slices.Backward(t.moves[page]) {
		if m.at.Before(since) {
			break
		}
		if moved[m.user] {
			continue
		}

		moved[m.user] = true
		if m.on {
			low--
		} else {
			high++
		}
	}

	return max(low-n, n-high, 0)
}

const wholeSite = "*"
