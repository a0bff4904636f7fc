//go:build !portable

package fanout

import (
	"math"
	"testing"
	"testing/synctest"
	"time"
)

// A client gets its number with the updates that are due, once per interval, and again if it asks or a write was lost.
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

		// The client's first frame had the number.
		w.SentUnread(3)
		w.SendUnread(3, false)
		expect()

		w.SendUnread(4, false)
		expect(4)
		w.SendUnread(5, false)
		w.SendUnread(6, false)
		expect() // not again within the interval

		time.Sleep(interval)
		expect(6)

		w.SendUnread(6, true)
		expect(6) // the client asked
		// As after a write that failed: what was in it counts as sent, and the client does not have it.
		w.missed = true
		w.Free()
		expect(6)

		// A client that has no number yet gets the first one, even if it is 0.
		v := s.watcher(t)
		defer v.close()
		v.missed = true
		v.Free()
		s.deliver()
		if got := v.take(t); len(got) != 0 {
			t.Fatalf("got %q before the number is known, want nothing", got)
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
			t.Fatalf("got %q after the client left, want nothing", got)
		}
	})
}

// A withheld topic is kept back until Ready. When the patience ends first, its updates are sent and marked as stale,
// since the waiting user may be missing.
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
			t.Fatalf("got %q while the topic is withheld, want nothing", got)
		}

		w.Ready(topicOf("p"))
		w.Ready(topicOf("p")) // has no effect: the topic is no longer withheld
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

			// An update that is stale in any case claims nothing, so it comes after less patience.
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

			// Until Ready the waiting user may be missing in newer updates, too.
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
			t.Fatalf("%d topics and %d places are left, want none", len(s.topics), len(w.places))
		}
		w.Leave()
	})
}

// A client that asks again for a topic that was withheld for too long is answered, with a stale update as before.
func TestAnOverdueTopicIsAnswered(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := loneShard(10 * time.Millisecond)
		w := s.watcher(t)
		defer w.close()

		w.Withhold(topicOf("p"))
		s.update(countOf("p", 7, 1))
		time.Sleep(withholdFresh + time.Second)
		s.sweep()
		s.deliver()
		w.expect(t, 7)

		for range 2 {
			time.Sleep(time.Second)
			w.watch(0, "p")
			s.deliver()
			if got := counts(t, w.take(t)...); len(got) != 1 || got[0].Count != 7 || !got[0].Stale {
				t.Fatalf("the answer is %v, want the count of before, as a stale one", got)
			}
		}

		w.Ready(topicOf("p"))
		s.deliver()
		if got := counts(t, w.take(t)...); len(got) != 1 || got[0].Stale {
			t.Fatalf("got %v after Ready, want the count, and not as a stale one", got)
		}
		w.Leave()
	})
}

// A busy shard makes more than 2^32 passes within weeks. A new client gets its counts even then.
func TestManyPasses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := loneShard(10 * time.Millisecond)
		s.pass.id = math.MaxUint32 // with 32 bits the next id would be 0, the one that new clients have
		w := s.watcher(t)
		defer w.close()

		w.watch(0, "p")
		s.update(countOf("p", 7, 1))
		s.deliver()
		w.expect(t, 7)
		w.Leave()
	})
}

// A paused client that subscribes again gets what it has already only in another form.
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
		// What changes meanwhile is the reason for a delivery at the end of the pause.
		s.update(countOf("changed", 78, 2))
		s.deliver()
		w.expect(t)

		w.Pause(false)
		s.deliver()
		// A count that has not changed is missing: Renew alone is no reason to send it.
		w.expect(t, 78, 80)
		w.Leave()
	})
}

// An update whose write was lost is sent again at the client's next turn, even if the client is paused or busy
// meanwhile.
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

		w.missed = true // as after a failed write
		w.Free()
		w.Pause(true)
		s.deliver()
		if got := w.take(t); len(got) != 0 {
			t.Fatalf("got %q while the client is paused, want nothing", got)
		}

		w.Pause(false)
		s.deliver()
		w.expect(t, 7)
		w.Leave()
	})
}
