//go:build !portable

package fanout

import (
	"math"
	"testing"
	"testing/synctest"
	"time"
)

// A number comes with the updates that are due, once per interval, and again when
// the client asks or a write was lost.
func TestNumber(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const interval = 100 * time.Millisecond
		s := loneShard(interval)
		w := s.watcher(t)
		defer w.close()

		expect := func(want ...int64) {
			t.Helper()
			s.deliver()
			w.expect(t, want...)
		}

		// The client was told the number in its first frame.
		w.SentUnread(3)
		w.SendUnread(3, false)
		expect()

		w.SendUnread(4, false)
		expect(4)
		w.SendUnread(5, false)
		w.SendUnread(6, false)
		expect() // within the interval

		time.Sleep(interval)
		expect(6)

		w.SendUnread(6, true)
		expect(6) // the client asked
		w.missed = true
		w.Free()
		expect(6)

		// For a client that was told nothing yet, the first number is news, even 0.
		v := s.watcher(t)
		defer v.close()
		v.missed = true
		v.Free()
		s.deliver()
		if got := v.take(t); len(got) != 0 {
			t.Fatalf("got %q before the number is known", got)
		}

		v.SendUnread(0, false)
		s.deliver()
		if got := counts(t, v.take(t)...); len(got) != 1 || got[0].Count != 0 {
			t.Fatalf("got %v, want 0", got)
		}

		v.Leave()
		v.SendUnread(1, true)
		s.deliver()
		if got := v.take(t); len(got) != 0 {
			t.Fatalf("got %q after it left", got)
		}
	})
}

// A withheld topic is kept back until it is ready. When patience ends, its updates do not claim to include the user who
// waits.
func TestWithhold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := loneShard(10 * time.Millisecond)
		w := s.watcher(t)
		defer w.close()

		w.Withhold(topicOf("p"))
		s.update(countOf("p", 1, 1))
		s.deliver()
		s.sweep()
		if got := w.take(t); len(got) != 0 {
			t.Fatalf("got %q while it is withheld", got)
		}

		w.Ready(topicOf("p"))
		w.Ready(topicOf("p")) // which is nothing now
		s.deliver()
		if got := counts(t, w.take(t)...); len(got) != 1 {
			t.Fatalf("got %v, want one", got)
		}

		for i, stale := range []bool{false, true} {
			version := uint64(10 * (i + 1))
			u := countOf("p", 1, version)
			u.Stale = stale
			s.update(u)
			s.deliver()
			w.take(t)

			// A stale update says itself that a user may be missing, so it may come sooner.
			patience := int(withholdFresh / time.Second)
			if stale {
				patience = int(withholdStale / time.Second)
			}

			w.Withhold(topicOf("p"))
			for second := range 6 {
				want := 0
				if second == patience {
					want = 1
				}
				s.sweep()
				s.deliver()
				if got := counts(t, w.take(t)...); len(got) != want || want > 0 && !got[0].Stale {
					t.Fatalf("got %v after %d s of patience, stale %t; want %d, and stale", got, second, stale, want)
				}
				time.Sleep(time.Second)
			}

			// The user who waits may be missing in newer updates, too, until Ready.
			s.update(countOf("p", 1, version+1))
			s.deliver()
			if got := counts(t, w.take(t)...); len(got) != 1 || !got[0].Stale {
				t.Fatalf("got %v after a newer update, stale %t; want one, and stale", got, stale)
			}
			w.Ready(topicOf("p"))
			s.deliver()
			if got := counts(t, w.take(t)...); len(got) != 1 || got[0].Stale {
				t.Fatalf("got %v after Ready, stale %t; want one that is not stale", got, stale)
			}
		}

		w.Unsubscribe(topicOf("p"))
		w.Unsubscribe(topicOf("p"))
		if len(s.topics) != 0 || len(w.places) != 0 {
			t.Fatalf("%d topics and %d places are left", len(s.topics), len(w.places))
		}
		w.Leave()
	})
}

// A busy shard makes 2^32 passes within weeks. A client that has just come gets its count in each of them.
func TestManyPasses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := loneShard(10 * time.Millisecond)
		s.pass.id = math.MaxUint32 // with 32 bits the next one would be 0, which is that of a new client
		w := s.watcher(t)
		defer w.close()

		w.watch(0, "p")
		s.update(countOf("p", 7, 1))
		s.deliver()
		w.expect(t, 7)
		w.Leave()
	})
}

// A subscribe while the client is paused is no reason to send what the client has, unless in another form.
func TestSubscribeWhilePaused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const interval = 10 * time.Millisecond
		s := loneShard(interval)
		w := s.watcher(t)
		defer w.close()

		keys := []string{"same", "changed", "rounded"}
		w.watch(0, keys...)
		for _, key := range keys {
			s.update(countOf(key, 77, 1))
		}

		s.deliver()
		w.take(t)
		time.Sleep(interval)

		w.Pause(true)
		w.watch(0, "same", "changed")
		w.Renew(topicOf("same"))
		w.watch(1, "rounded")
		s.update(countOf("changed", 78, 2))
		s.deliver()
		w.expect(t)

		w.Pause(false)
		s.deliver()
		// The one that has not changed is missing; Renew alone is no reason to send it.
		w.expect(t, 78, 80)
		w.Leave()
	})
}

// An update whose write was lost comes although the client is paused, or busy again, when its turn comes.
func TestALostUpdateIsNotForgotten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := loneShard(10 * time.Millisecond)
		w := s.watcher(t)
		defer w.close()

		w.watch(0, "p")
		s.update(countOf("p", 7, 1))
		s.deliver()

		w.take(t)
		time.Sleep(time.Millisecond)

		w.missed = true // as if that write had failed
		w.Free()
		w.Pause(true)
		s.deliver()
		if got := w.take(t); len(got) != 0 {
			t.Fatalf("got %q while it is paused", got)
		}

		w.Pause(false)
		s.deliver()
		w.expect(t, 7)
		w.Leave()
	})
}
