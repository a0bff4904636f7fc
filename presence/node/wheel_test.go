package node

import (
	"testing"
	"time"

	"pgregory.net/rapid"
)

// In any order of put and drop, the wheel visits a session no earlier than its time and, if due is called often, at
// most one tick late.
func TestWheelIsNeverEarlyAndAtMostATickLate(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		var w wheel
		now := duration(rt, "start", 1<<60)

		sessions := make([]*session, rapid.IntRange(1, 10).Draw(rt, "sessions"))

		due := map[*session]time.Duration{}
		for i := range sessions {
			sessions[i] = &session{slot: -1}
		}

		for range rapid.IntRange(1, 200).Draw(rt, "steps") {
			s := rapid.SampledFrom(sessions).Draw(rt, "session")
			switch rapid.IntRange(0, 3).Draw(rt, "what") {
			case 0:
				at := now + duration(rt, "in", time.Minute)
				w.idle(now)
				w.put(s, at)
				due[s] = at
			case 1:
				w.drop(s)
				delete(due, s)
			default:
				now += duration(rt, "pass", 2*wheelTick)
			}

			w.due(now, func(s *session) {
				at, filed := due[s]
				if !filed {
					rt.Fatal("due visited a dropped session")
				}
				if at > now { // the wheel could not reach so far ahead
					w.put(s, at)
					return
				}
				delete(due, s)
			})

			for s, at := range due {
				if s.slot < 0 || at+wheelTick <= now-wheelTick {
					rt.Fatalf("a session due at %s was not visited by %s", at, now)
				}
			}

			if at, ok := w.next(); ok != (len(due) > 0) || ok && at <= now-wheelTick {
				rt.Fatalf("at %s, with %d sessions, next = %s, %v", now, len(due), at, ok)
			}
		}
	})
}

func duration(rt *rapid.T, label string, longest time.Duration) time.Duration {
	return time.Duration(rapid.Int64Range(0, int64(longest)).Draw(rt, label))
}
