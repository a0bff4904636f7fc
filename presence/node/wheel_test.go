package node

import (
	"testing"
	"time"

	"pgregory.net/rapid"
)

// In any order of put and drop, due visits a session no earlier than its time and, if it
// is called often, at most one tick late.
func TestWheelIsNeverEarlyAndAtMostATickLate(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		const tick = int64(wheelTick / time.Millisecond)

		var w wheel
		now := rapid.Int64Range(0, 1<<40).Draw(rt, "start")

		sessions := make([]*session, rapid.IntRange(1, 10).Draw(rt, "sessions"))

		due := map[*session]int64{}
		for i := range sessions {
			sessions[i] = &session{slot: -1}
		}

		for range rapid.IntRange(1, 200).Draw(rt, "steps") {
			s := rapid.SampledFrom(sessions).Draw(rt, "session")
			switch rapid.IntRange(0, 3).Draw(rt, "what") {
			case 0:
				at := now + rapid.Int64Range(0, 60_000).Draw(rt, "in")
				w.idle(now)
				w.put(s, at)
				due[s] = at
			case 1:
				w.drop(s)
				delete(due, s)
			default:
				now += rapid.Int64Range(0, 2*tick).Draw(rt, "pass")
			}

			w.due(now, func(s *session) {
				at, filed := due[s]
				if !filed {
					rt.Fatal("a dropped session was looked at")
				}
				if at > now { // it was further away than the wheel reaches
					w.put(s, at)
					return
				}
				delete(due, s)
			})

			for s, at := range due {
				if s.slot < 0 || at+tick <= now-tick {
					rt.Fatalf("due at %d, not looked at by %d", at, now)
				}
			}

			if at, ok := w.next(); ok != (len(due) > 0) || ok && at <= now-tick {
				rt.Fatalf("next = %d, %v at %d with %d filed", at, ok, now, len(due))
			}
		}
	})
}
