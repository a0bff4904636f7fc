package fanout

import (
	"testing"
	"testing/synctest"
	"time"

	"headcount/presence"
)

// TestASilentDispatcher: while a dispatcher is silent, every count of its buckets is stale, whoever brings it. It is
// not old, however: it is read from the store at every check, and for each GET. When the dispatcher is back the count
// is read once more.
func TestASilentDispatcher(t *testing.T) {
	withCalls(t, func(t *testing.T, h *Hub, store *calls) {
		bucket := readTopic.Bucket(presence.DefaultBuckets)
		stale := func(sequence uint64) presence.Update {
			u := version(sequence)
			u.Stale = true
			return u
		}
		want := func(u presence.Update) {
			t.Helper()
			synctest.Wait()
			if last, known := h.Last(readTopic); !known || last != u {
				t.Errorf("known %t: version %s, stale %t; want version %s, stale %t",
					known, last.Version, last.Stale, u.Version, u.Stale)
			}
		}

		store.brings(version(1))
		h.Want(readTopic)
		want(version(1))

		// The silence of another dispatcher does not concern this topic.
		h.Silence([]int{(bucket + 1) % presence.DefaultBuckets})
		want(version(1))

		h.Silence([]int{bucket})
		want(stale(1))

		// In doubt a GET reads the store, and so gets a count that nobody publishes.
		store.brings(version(2))
		wantRead(t, store, h.Newest, version(2), 1)
		want(stale(2))

		store.brings(version(3))
		// Nobody publishes this version, so the next check has to find it.
		time.Sleep(verifyEvery)
		want(stale(3))

		// The version may come with an acknowledgement, which says nothing about the dispatcher.
		h.Update(version(4))
		want(stale(4))

		store.brings(version(5))
		h.Silence(nil)
		want(version(5))
		wantRead(t, store, h.Newest, version(5), 0)
	})
}
