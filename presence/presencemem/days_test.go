package presencemem

import (
	"fmt"
	"math"
	"os"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"headcount/presence"
	"headcount/presence/minutes"
)

// dayText returns a text with the last days of a page, oldest first: the greatest count, the person-minutes, the joins
// and the visitors.
func dayText(t *testing.T, s *Store, page string, days int) (text string) {
	t.Helper()
	now := time.Now()
	q, err := minutes.AskDays(time.Duration(days-1)*24*time.Hour, 400, now)
	if err != nil {
		t.Fatal(err)
	}

	list, err := s.Days(t.Context(), page, q.From/minutes.MinutesOfDay)
	if err != nil {
		t.Fatal(err)
	}

	for _, p := range q.AnswerDays(page, list, s.count(page).Users, now).Points {
		text += fmt.Sprintf("%d %dm +%d %d, ", p.Max, p.PersonMinutes, p.Joins, p.OfDay.Visitors)
	}

	return text
}

// TestDaysFollowEachOther: each day has its own numbers, also one without a change. Days are forgotten when they are
// too old.
func TestDaysFollowEachOther(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := New(Config{PageDays: 10})
		c := newCrowd(t, s)
		c.set("p", 2, 1, 2)
		time.Sleep(30 * time.Minute)
		c.set("p", 1)
		time.Sleep(47*time.Hour + 30*time.Minute) // over two midnights
		c.set("p", 2, 1)
		time.Sleep(time.Minute)
		c.set("p", 0)
		if is := dayText(t, s, "p", 3); is != "2 1470m +2 2, 1 1440m +0 1, 2 2m +1 2, " {
			t.Errorf("the days are %q", is)
		}

		for range 20 {
			time.Sleep(24 * time.Hour)
			c.set("p", 1, 3)
			c.set("p", 0)
		}

		if list, err := s.Days(t.Context(), "p", 0); len(list) != 11 || err != nil {
			t.Errorf("%d days and the running one are kept, %v; want 10", len(list)-1, err)
		}

		time.Sleep(11 * 24 * time.Hour)
		c.set("q", 1)
		if s.days.pages["p"] != nil || s.days.order.Len() != 1 {
			t.Error("a page that was left eleven days ago still has days")
		}
	})
}

// TestDaysAreBounded: beyond the bound of memory the days of the pages that changed longest ago are forgotten.
func TestDaysAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const most = 100_000
		s := New(Config{PageDays: 400, PageDaysBytes: most})
		c := newCrowd(t, s)
		for i := range 1000 {
			c.set(fmt.Sprint(i), 1, presence.User(i))
			time.Sleep(time.Second)
		}

		sum := 0
		for _, r := range s.days.pages {
			sum += r.bytes
		}

		if sum != s.days.bytes || sum > most || len(s.days.pages) < 150 || s.days.pages["999"] == nil ||
			s.days.pages["0"] != nil {
			t.Errorf("%d bytes, which are counted as %d, have the days of %d pages; want the newest pages in %d bytes",
				sum, s.days.bytes, len(s.days.pages), most)
		}
	})
}

// A year of 10,000 pages takes 50 MB at most. The test has every 200th of them.
func TestAYearOfPagesTakes50MB(t *testing.T) {
	const pages, days, every = 10_000, 400, 200
	s := New(Config{PageDays: days})
	now := time.Unix(20_000*86_400, 0)
	for day := range days {
		now = now.Add(24 * time.Hour)
		for page := 0; page < pages; page += every {
			name := fmt.Sprint("/articles/", page)
			joins := 1 + pages/(page+1)
			s.days.count(name, int64(joins), now)
			for u := range joins {
				s.days.touch(name, now).calendar.Arrive(presence.User(u*7919+day), now)
			}

			s.days.count(name, 0, now.Add(time.Duration(joins)*17*time.Minute))
		}
	}

	for _, r := range s.days.pages {
		s.days.weigh(r)
	}

	t.Logf("%.1f MB of %d pages, %.1f bytes a day", float64(s.days.bytes)*every/1e6, len(s.days.pages)*every,
		float64(s.days.bytes)*every/pages/days)
	if len(s.days.pages) != pages/every || s.days.bytes*every > 50e6 {
		t.Errorf("%d pages take %d bytes, want %d pages in %d bytes at most",
			len(s.days.pages), s.days.bytes, pages/every, 50_000_000/every)
	}
}

// stamp sets the times of the files of present users to that of the bubble, since the system has set its own.
func stamp(t *testing.T, dir string) {
	t.Helper()
	for _, name := range []string{presentFile, presentLogFile} {
		if err := os.Chtimes(filepath.Join(dir, name), time.Now(), time.Now()); err != nil {
			t.Fatal(err)
		}
	}
}

// A process that is killed a hundred times, and recalls its users each time, keeps the person-minutes.
func TestDirectoryKeepsDays(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := filepath.Join(t.TempDir(), "d")
		open := func() (*Store, *crowd) {
			s, err := Open(dir, Config{PageDays: 10, PresenceTimeout: 7 * time.Second})
			if err != nil {
				t.Fatal(err)
			}

			return s, newCrowd(t, s)
		}

		kill := func(s *Store) {
			s.unread.disk.db.Close() // from here on nothing is written
			s.Close()
			stamp(t, dir)
		}

		s, c := open()
		users, truth := int64(0), 0.0
		for i := range 100 {
			for j := range 30 {
				users = max(0, users+int64((i*31+j*17)%21-9)) // the count grows on average
				c.set("p", users, presence.User(j))
				wait := time.Duration(1000+(i*7919+j*104729)%40_000) * time.Millisecond
				time.Sleep(wait)
				truth += float64(users) * wait.Minutes()
			}

			kill(s)
			time.Sleep(3 * time.Second)
			truth += float64(users) * 0.05
			s, c = open()
			c.set("p", users)
		}

		defer s.Close()
		list, err := s.Days(t.Context(), "p", 0)
		if err != nil {
			t.Fatal(err)
		}

		sum, joins := 0.0, int64(0)
		for _, d := range list {
			sum += float64(d.Presence) / 60_000
			joins += d.Joins
		}

		t.Logf("%.1f person-minutes of %.1f, %d joins of %d, in %d days", sum, truth, joins, 3000, len(list))
		if math.Abs(sum-truth) > truth/1000 {
			t.Errorf("%.1f person-minutes, want %.1f", sum, truth)
		}
	})
}

// Recalled users are counted until all owners have written what they know. If the process was away for longer than the
// presence timeout, its users were gone when it ended.
func TestDaysAfterARestart(t *testing.T) {
	for name, tc := range map[string]struct {
		away time.Duration
		want string
	}{
		"a short one": {3 * time.Second, "2 22m +2 2, "}, // 2 users for 10 minutes and 3 s, and a minute more
		"a long one":  {5 * time.Minute, "2 20m +2 2, "},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				dir := twoUsersLeft(t)
				stamp(t, dir)
				time.Sleep(tc.away)

				s := openDays(t, dir)
				defer s.Close()
				c := newCrowd(t, s)
				time.Sleep(time.Minute)
				change := presence.Change{Claim: c.claim, Sequence: 1, Complete: true} // no user came back
				if o := s.Write(t.Context(), []presence.Change{change}); o[0].Err != nil {
					t.Fatal(o[0].Err)
				}

				time.Sleep(time.Hour)
				if is := dayText(t, s, "p", 1); is != tc.want && is != "0 0m +0 0, "+tc.want {
					t.Errorf("the days are %q, want %q", is, tc.want)
				}
			})
		})
	}
}

// For a week the process does not keep days. Afterwards that week has no users.
func TestDaysThatWereNotKept(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := twoUsersLeft(t)
		time.Sleep(7 * 24 * time.Hour)
		stamp(t, dir) // of a process without days

		s := openDays(t, dir)
		defer s.Close()
		newCrowd(t, s).set("p", 1)
		list, err := s.Days(t.Context(), "p", 0)
		if err != nil || len(list) != 2 || list[0].PersonMinutes() != 20 || list[1].Presence != 0 {
			t.Errorf("the days are %+v, %v; want one of 20 person-minutes and one without presence", list, err)
		}
	})
}

// openDays opens a data directory that keeps days.
func openDays(t *testing.T, dir string) *Store {
	t.Helper()
	s, err := Open(dir, Config{PageDays: 10, Partitions: 1, PresenceTimeout: 7 * time.Second})
	if err != nil {
		t.Fatal(err)
	}

	return s
}

// twoUsersLeft returns the data directory of a process that ended while two users were on the page p, after ten
// minutes.
func twoUsersLeft(t *testing.T) (dir string) {
	t.Helper()
	dir = filepath.Join(t.TempDir(), "d")
	s := openDays(t, dir)
	newCrowd(t, s).set("p", 2, 1, 2)
	time.Sleep(10 * time.Minute)

	if err := s.Close(); err != nil {
		t.Fatal(err)
	}

	return dir
}
