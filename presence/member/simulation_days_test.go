package member

import (
	"context"
	"fmt"
	"math"
	"testing"
	"testing/synctest"
	"time"
)

// TestDaysOverAHundredKills: while processes are killed and started again, a hundred times, users come and go. The
// person-minutes of pages are those of the model, within 0.1 %. What a user does while somebody is dead the cluster may
// see seconds later, so then nobody does anything but stay.
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
			advance(simQuiet) // everybody is back: what a user does now the cluster sees at once
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
			days, err := s.store.inner.Days(context.Background(), page, 0)
			must(err)
			is := time.Duration(0)
			for _, d := range days {
				end := min((d.At+1)*24*60*60*1000, time.Now().UnixMilli())
				is += time.Duration(d.Presence+d.Last*(end-d.Until)) * time.Millisecond
			}
			off := is.Minutes()/want.Minutes() - 1
			t.Logf("%s: %.2f person-minutes of %.2f: %+.4f %%", page, is.Minutes(), want.Minutes(), 100*off)
			if math.Abs(off) > 0.001 {
				t.Errorf("%s has %s, want %s", page, is, want)
			}
		}
		if s.failed() || len(truth) != len(s.pages)+1 {
			t.Error(s.failure)
		}
	})
}
