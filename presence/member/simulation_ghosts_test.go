package member

import (
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"headcount/presence"
)

// TestGhostsEndInTime: a process with all roles dies. Its users are gone from every count at most 3 s after the
// timeout, whatever the timeout is and whenever the process dies. The same holds if the process is started again and
// takes its partitions back while their owners still wait for those users.
func TestGhostsEndInTime(t *testing.T) {
	for _, timeout := range []time.Duration{3 * time.Second, 4 * time.Second, simTimeout} {
		for name, back := range map[string]time.Duration{"dead": time.Hour, "back after 4s": 4 * time.Second} {
			t.Run(fmt.Sprint(timeout, " ", name), func(t *testing.T) {
				worst := time.Duration(0)
				for moment := range moments(12) {
					synctest.Test(t, func(t *testing.T) {
						worst = max(worst, ghosts(t, timeout, time.Duration(moment)*161*time.Millisecond, back))
					})
				}

				t.Logf("the last ghost was gone %s after the death", worst)
				if limit := timeout + 3*time.Second; worst > limit {
					t.Errorf("users of the dead process were counted for %s, which is more than %s", worst, limit)
				}
			})
		}
	}
}

// wholesOf returns the first simulation, counted from that seed, of three processes with all roles.
func wholesOf(seed uint64) *simulation {
	for ; ; seed++ {
		if s := newSimulation(seed, false); len(s.members) == 3 {
			return s
		}
	}
}

// ghosts kills a process at the given moment, and returns for how long its users stay in the counts that others
// receive. The process is started again after the time back.
func ghosts(t *testing.T, timeout, moment, back time.Duration) time.Duration {
	s := wholesOf(uint64(1 + moment/time.Millisecond))
	s.timeout = timeout
	defer s.end()

	s.startAll()

	dead := s.members[0]
	s.watch(s.where[1:], []string{presence.AllPages})
	for i := range simUsers {
		s.newVisitor(i, s.where[i%len(s.where)], "a")
	}
	time.Sleep(5*time.Second + moment)

	dead.life.kill(false)
	begun := time.Now()

	// The model stops counting them at the death. Soon the watchers must receive the same counts.
	for _, u := range s.crowd.at(dead.name) {
		u.tabs[0].end(true)
	}
	s.members, s.where = s.members[1:], s.where[1:]

	defer dead.stop()

	want := int64(len(s.crowd.truth()[presence.AllPages]))
	for shown := false; !shown; {
		time.Sleep(10 * time.Millisecond)
		if time.Since(begun) > time.Minute {
			t.Fatal("a minute after the death users of the dead process are still counted")
		}

		// The process takes its partitions back, and must not bring the ghosts with it.
		if time.Since(begun) >= back {
			back = time.Hour
			dead.stop()
			s.start(dead)
			s.members = append(s.members, dead)
		}

		shown = !slices.ContainsFunc(s.watchers, func(u *user) bool {
			w := u.tabs[0]
			w.mu.Lock()
			defer w.mu.Unlock()
			return w.last[presence.AllPages].users != want
		})
	}

	return time.Since(begun)
}
