package member

import (
	"context"
	"fmt"
	"math"
	"testing"
	"testing/synctest"
	"time"
)

// TestDaysOverAHundredKills: users come and go while processes are killed and started again, a hundred times. In the
// end the person-minutes of pages are those of the model, within 0.1 %. The cluster may learn of a change seconds late
// while a process is dead, so during that time no user moves.
func TestDaysOverAHundredKills(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := wholesOf(3)
		defer s.end()
		for _, m := range s.members {
			s.start(m)
		}

		s.ready()
		for i := range simUsers {
			u := newUser(fmt.Sprint("u", i))
			s.crowd.users = append(s.crowd.users, u)
			s.newTab(u, s.where[i%len(s.where)], nil)
		}

		time.Sleep(time.Second)

		truth := map[string]time.Duration{}
		last := time.Now()
		advance := func(by time.Duration) {
			time.Sleep(by)
			for page, users := range s.sizes() {
				truth[page] += time.Duration(users) * time.Since(last)
			}

			last = time.Now()
		}

		kills := 100
		if testing.Short() {
			kills = 20
		}
		for kill := range kills {
			m := s.members[kill%len(s.members)]
			r := m.running
			r.life.kill(true)
			m.running = nil
			advance(4 * time.Second)
			r.stop()
			s.start(m)
			advance(simQuiet) // all users are back, so from here on changes are counted at once
			for range 18 {
				u := s.crowd.users[s.chance.IntN(simUsers)]
				page := s.pages[s.chance.IntN(len(s.pages))]
				if s.chance.IntN(3) == 0 {
					u.tabs[0].leave(page)
				} else {
					u.tabs[0].join(page)
				}
				advance(time.Duration(s.chance.ExpFloat64() * float64(4*time.Second)))
			}

			advance(time.Second)
		}

		s.store.mu.Lock()
		defer s.store.mu.Unlock()
		for page, want := range truth {
			is := s.store.presenceOn(page)
			off := is.Minutes()/want.Minutes() - 1
			t.Logf("%s: %.2f person-minutes of %.2f: %+.4f %%", page, is.Minutes(), want.Minutes(), 100*off)
			if math.Abs(off) > 0.001 {
				t.Errorf("%s has %s of presence, want %s", page, is, want)
			}
		}

		if s.failed() || len(truth) != len(s.pages)+1 {
			t.Errorf("%d pages, want %d; broken: %q", len(truth), len(s.pages)+1, s.failure)
		}
	})
}

// presenceOn returns how long users were on a page, all of them together, according to the days of the store.
func (s *sharedStore) presenceOn(page string) (is time.Duration) {
	days, err := s.inner.Days(context.Background(), page, 0)
	must(err)

	for _, d := range days {
		end := min((d.At+1)*24*60*60*1000, time.Now().UnixMilli())
		is += time.Duration(d.Presence+d.Last*(end-d.Until)) * time.Millisecond
	}

	return is
}
