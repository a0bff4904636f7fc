package member

import (
	"context"
	"fmt"
	"testing"
	"testing/synctest"
	"time"
)

// TestLeaversAreGoneInTimeWhileAProcessIsReplaced: a process with all roles leaves and is back within seconds, so its
// partitions change their owner twice. A user who leaves at any moment meanwhile is soon gone from the counts.
func TestLeaversAreGoneInTimeWhileAProcessIsReplaced(t *testing.T) {
	const limit = simGrace + 3*time.Second
	worst := time.Duration(0)
	for _, pause := range []time.Duration{0, time.Second, 2 * time.Second} {
		for moment := range moments(6) {
			synctest.Test(t, func(t *testing.T) {
				took, who := replace(false, pause, time.Duration(moment)*renewEvery/6)
				worst = max(worst, took)
				if took > limit {
					t.Errorf("started again after %s, moment %d: %s was counted for %s, which is more than %s",
						pause, moment, who, took, limit)
				}
			})
		}
	}

	t.Logf("the last was gone %s after leaving", worst)
}

// TestLeaversAreGoneInTimeWhileAProcessIsKilledAndReplaced: the same, but the process is killed, and is started again
// before or after others notice. Its own users count as those of any dead gateway.
func TestLeaversAreGoneInTimeWhileAProcessIsKilledAndReplaced(t *testing.T) {
	const limit = 10 * time.Second
	worst := time.Duration(0)
	for pause := range 8 {
		for moment := range moments(6) {
			synctest.Test(t, func(t *testing.T) {
				took, who := replace(true, time.Duration(pause)*time.Second, time.Duration(moment)*renewEvery/6)
				worst = max(worst, took)
				if took > limit {
					t.Errorf("started again after %d s, moment %d: %s was counted for %s, which is more than %s",
						pause, moment, who, took, limit)
				}
			})
		}
	}

	t.Logf("the last was gone %s after leaving", worst)
}

// replace replaces a process, which takes the given pause to start. Users leave one after the other, from a second
// before until the process has its partitions again. It returns the longest time for which a user who had left was
// counted, and the user.
func replace(killed bool, pause, moment time.Duration) (longest time.Duration, whose string) {
	s := wholesOf(uint64(1 + moment/time.Millisecond))
	defer s.end()
	s.startAll()

	for i := range 70 {
		where := s.where
		if killed { // users of a killed gateway stay until its death is noticed
			where = where[1:]
		}
		s.newVisitor(i, where[i%len(where)], fmt.Sprint("u", i)) // each on a page of the user's own
	}
	time.Sleep(5*time.Second + moment)

	// The users begin to leave a second before the process does.
	done := make(chan struct{})
	go func() { // ends when all users are gone
		defer close(done)
		longest, whose = s.leaveOneByOne(100 * time.Millisecond)
	}()

	time.Sleep(time.Second)
	m := s.members[0]
	if killed {
		m.life.kill(false)
		defer m.stop()
	} else {
		s.leave(m)
		<-m.left
	}

	// While it is away, others take its partitions over, and give them back afterwards.
	time.Sleep(pause)
	s.start(m)
	<-done

	return longest, whose
}

// leaveOneByOne makes the users leave their pages one after the other, by a message or by closing the tab, and waits
// until all are gone from the counts.
func (s *simulation) leaveOneByOne(every time.Duration) (longest time.Duration, whose string) {
	left := map[string]time.Time{} // by page
	next := time.Now()
	for i := 0; i < len(s.crowd.users) || len(left) > 0; time.Sleep(20 * time.Millisecond) {
		now := time.Now()
		if i < len(s.crowd.users) && !now.Before(next) {
			u := s.crowd.users[i]
			left[u.name] = now
			if i%4 == 0 {
				u.tabs[0].leave(u.name)
			} else {
				u.tabs[0].end(false)
			}
			i++
			next = next.Add(every)
		}

		for page, since := range left {
			s.store.mu.Lock()
			counts, err := s.store.inner.Counts(context.Background(), []string{page})
			s.store.mu.Unlock()
			must(err)

			took := time.Since(since)
			if counts[0].Users == 0 || took > time.Minute {
				delete(left, page)
				if took > longest {
					longest, whose = took, page
				}
			}
		}
	}

	return longest, whose
}

// TestEverybodySoonKnowsWhoLeaves: a process that leaves writes that into its lease at once, and a process that
// receives a datagram from a process with another table reads the leases at once. So all soon know who leaves.
func TestEverybodySoonKnowsWhoLeaves(t *testing.T) {
	for moment := range moments(6) {
		synctest.Test(t, func(t *testing.T) {
			s := wholesOf(1)
			defer s.end()
			for _, m := range s.members {
				s.start(m)
				time.Sleep(renewEvery / 4) // so that the processes renew their leases at different times
			}

			s.ready()
			for i := range simUsers {
				s.newVisitor(i, s.where[1+i%2], "a")
			}
			time.Sleep(5*time.Second + time.Duration(moment)*renewEvery/6)

			// Most processes do not renew their leases in this time, so they must have learned it in another way.
			s.leave(s.members[0])
			time.Sleep(renewEvery / 3)

			for _, m := range s.members[1:] {
				if n := len(m.process.table.Load().PartitionsOf(s.members[0].name)); n > 0 {
					t.Errorf("moment %d: in the table of %s the process that leaves still has %d partitions, want 0",
						moment, m.name, n)
				}
			}

			<-s.members[0].left
		})
	}
}
