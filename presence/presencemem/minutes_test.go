package presencemem

import (
	"bytes"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"headcount/presence"
	"headcount/presence/minutes"
)

// crowd writes the users of one page, from one partition.
type crowd struct {
	t     *testing.T
	s     *Store
	claim presence.Claim
	seq   uint64
}

func newCrowd(t *testing.T, s *Store) *crowd {
	t.Helper()
	claims, err := s.Claim(t.Context(), "n", []int{0}, false)
	if err != nil {
		t.Fatal(err)
	}
	return &crowd{t: t, s: s, claim: claims[0]}
}

func (c *crowd) set(page string, users int64, arrivals ...presence.User) {
	c.t.Helper()
	c.seq++
	change := presence.Change{Claim: c.claim, Sequence: c.seq, Counts: []presence.PageUsers{{Page: page, Users: users}}}

	for _, u := range arrivals {
		change.Arrivals = append(change.Arrivals, presence.Arrival{User: u, Page: page})
	}

	if o := c.s.Write(c.t.Context(), []presence.Change{change}); o[0].Err != nil {
		c.t.Fatal(o[0].Err)
	}
}

// text returns the minutes of a page, oldest first, each as the greatest count, a + and the joins, and then the number
// of all visitors.
func text(t *testing.T, s *Store, page string, last int, users int64) string {
	t.Helper()
	now := time.Now()
	q, err := minutes.Ask(time.Duration(last-1)*time.Minute, time.Minute, 24*time.Hour, now)
	if err != nil {
		t.Fatal(err)
	}

	list, err := s.Minutes(t.Context(), page, q.From)
	if err != nil {
		t.Fatal(err)
	}

	a := q.Answer(page, list, users, now)
	out := ""
	for _, p := range a.Points {
		out += fmt.Sprintf("%d+%d ", p.Max, p.Joins)
	}
	return out + fmt.Sprint(a.Visitors)
}

// TestMinutesFollowEachOther: each minute has its greatest count and its joins. An hour of minutes is kept.
func TestMinutesFollowEachOther(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := New(Config{PageStats: time.Hour})
		c := newCrowd(t, s)
		c.set("p", 2, 1, 2)
		c.set("p", 1)

		time.Sleep(2 * time.Minute)
		c.set("p", 3, 3, 4)
		c.set("p", 0)

		time.Sleep(time.Minute)
		c.set("p", 1, 1)

		if is := text(t, s, "p", 5, 1); is != "0+0 2+2 1+0 3+2 1+1 4" {
			t.Errorf("the minutes are %q", is)
		}

		// The oldest minutes are forgotten.
		for minute := range 100 {
			time.Sleep(time.Minute)
			c.set("p", int64(1+minute%2))
		}

		if n := len(s.history.pages["p"].minutes); n > 62 {
			t.Errorf("%d minutes of one hour are kept, want 62 at most", n)
		}

		c.set("p", 0)
		time.Sleep(2 * time.Hour)
		c.set("q", 1)
		if s.history.pages["p"] != nil {
			t.Error("a page that was left two hours ago still has minutes")
		}
	})
}

// TestMinutesAreBounded: beyond the bound of memory the minutes of the pages that changed longest ago are forgotten.
func TestMinutesAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const most = 100_000
		s := New(Config{PageStats: 24 * time.Hour, PageStatsBytes: most})
		c := newCrowd(t, s)
		for i := range 1000 {
			c.set(fmt.Sprint(i), 1, presence.User(i))
			time.Sleep(time.Second)
		}

		_, newest := s.history.pages["999"]
		_, oldest := s.history.pages["0"]
		if s.history.bytes > most || len(s.history.pages) < 200 || !newest || oldest {
			t.Errorf("%d bytes, %d pages; want the newest pages in %d bytes",
				s.history.bytes, len(s.history.pages), most)
		}

		// The size that is compared with the bound is the sum of the sizes of the pages.
		sum := 0
		for _, r := range s.history.pages {
			sum += r.bytes
		}

		if sum != s.history.bytes || s.history.order.Len() != len(s.history.pages) {
			t.Errorf("the pages have %d bytes, and the history counts %d", sum, s.history.bytes)
		}
	})
}

// TestMinutesAfterTheClockWentBack: a clock was hours ahead, and was then set. The minutes of the present go on, in
// memory and in the data directory.
func TestMinutesAfterTheClockWentBack(t *testing.T) {
	start := time.Unix(1_000_000*60, 0)
	h := newPageHistory(Config{PageStats: time.Hour, PageStatsBytes: 1 << 20})
	h.disk = true
	file := map[string]minutes.Minute{}
	write := func(at int64) func() {
		puts, done := h.unwritten(at, false)
		for _, p := range puts {
			delete(file, string(p.key))
			if p.value != nil && !bytes.Equal(p.key, untilKey) {
				_, m, err := parseMinute(p.key, p.value)
				if err != nil {
					t.Fatal(err)
				}
				file[string(p.key)] = m
			}
		}
		return done
	}
	count := func(users int64, after time.Duration) {
		touched := map[*page]struct{}{{count: presence.Count{Page: "p", Users: users}}: {}}
		h.remember(touched, []presence.Arrival{{User: presence.User(users), Page: "p"}}, start.Add(after))
	}

	count(1, 0)
	write(1_000_001)()
	count(2, 180*time.Minute)
	count(3, 181*time.Minute)
	done := write(1_000_182)
	count(1, time.Minute) // the clock is set while they are written
	done()
	count(4, 2*time.Minute)
	write(1_000_003)()

	// A correction by a second: the minute before the last is written already.
	count(5, 3*time.Minute)
	write(1_000_004)()
	count(6, 3*time.Minute)
	write(1_000_004)()

	want := []string{"0 1 1 +1", "1 3 1 +3", "2 4 4 +1", "3 6 6 +2"}
	for name, list := range map[string][]minutes.Minute{
		"memory": h.pages["p"].minutes, "file": slices.Collect(maps.Values(file)),
	} {
		var is []string
		for _, m := range list {
			if m.At == 1_000_003 && name == "memory" {
				m.Joins += h.pages["p"].running.Joins
			}
			is = append(is, fmt.Sprintf("%d %d %d +%d", m.At-1_000_000, m.Max, m.Last, m.Joins))
		}
		slices.Sort(is)
		if !slices.Equal(is, want) {
			t.Errorf("the minutes in the %s are %q, want %q", name, is, want)
		}
	}
}

// A page that is forgotten while its minutes are written leaves nothing in the data directory.
func TestMinutesOfAPageThatIsForgottenMeanwhile(t *testing.T) {
	h := newPageHistory(Config{PageStats: time.Hour, PageStatsBytes: 1 << 20})
	h.disk = true
	h.minute("p", 1).last().Max = 5

	puts, done := h.unwritten(2, false)
	key := minuteKey("p", 1)
	if !slices.ContainsFunc(puts, func(p put) bool { return bytes.Equal(p.key, key) && p.value != nil }) {
		t.Fatalf("the minute is not written: %q", puts)
	}

	h.maxBytes = 0
	h.bound(2)
	done()

	puts, _ = h.unwritten(3, false)
	if !slices.ContainsFunc(puts, func(p put) bool { return bytes.Equal(p.key, key) && p.value == nil }) {
		t.Errorf("the minute is not deleted: %q", puts)
	}
}

// TestDirectoryKeepsMinutes: minutes survive a restart, and a kill but for the running minute.
func TestDirectoryKeepsMinutes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := filepath.Join(t.TempDir(), "d")
		open := func() *Store {
			s, err := Open(dir, Config{PageStats: time.Hour})
			if err != nil {
				t.Fatal(err)
			}
			return s
		}

		s := open()

		c := newCrowd(t, s)
		c.set("p", 2, 1, 2)
		c.set("q", 1, 1)
		time.Sleep(time.Minute)
		c.set("p", 1, 3)
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}

		s = open() // in the same minute
		c = newCrowd(t, s)
		c.set("p", 3, 4)
		time.Sleep(2 * time.Minute)
		c.set("p", 4, 5)
		time.Sleep(time.Minute)

		if is := text(t, s, "p", 5, 4); is != "2+2 3+2 3+0 4+1 4+0 5" {
			t.Errorf("after a restart the minutes are %q", is)
		}
		if is := text(t, s, "q", 5, 0); is != "1+1 1+0 0+0 0+0 0+0 1" {
			t.Errorf("without users since the restart the minutes are %q", is)
		}

		// A killed process has written all minutes but the running one.
		time.Sleep(2 * time.Second)
		s.writeMinutes(false)
		s.unread.disk.db.Close() // from here on nothing is written
		defer s.Close()

		time.Sleep(time.Minute)
		s = open()
		if is := text(t, s, "p", 6, 0); is != "2+2 3+2 3+0 4+1 4+0 0+0 5" {
			t.Errorf("after a kill the minutes are %q", is)
		}

		// After two hours these pages are forgotten, in the file as well.
		newCrowd(t, s).set("p", 0)
		time.Sleep(2 * time.Hour)
		newCrowd(t, s).set("r", 1)
		s.writeMinutes(true)
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}

		s = open()
		if len(s.history.pages) != 1 || s.history.pages["r"] == nil {
			t.Errorf("%d pages are kept, want the one that changed within an hour", len(s.history.pages))
		}

		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
	})
}
