package fanout

import (
	"testing"
	"testing/synctest"
	"time"

	"headcount/presence"
)

// TestASilentDispatcher: what is known of the topics of its buckets is stale, whoever brings it, but is not old: it is
// read from the store at every look, and for each GET. When the dispatcher is back it is read once more.
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

		// Another dispatcher has nothing to do with this topic.
		h.Silence([]int{(bucket + 1) % presence.DefaultBuckets})
		want(version(1))

		h.Silence([]int{bucket})
		want(stale(1))

		store.brings(version(2))
		wantRead(t, store, h.Newest, version(2), 1)
		want(stale(2))

		store.brings(version(3))
		// Nobody publishes this one here, so a look finds it.
		time.Sleep(verifyEvery)
		want(stale(3))

		// An acknowledgement may bring it, but says nothing of the dispatcher.
		h.Update(version(4))
		want(stale(4))

		store.brings(version(5))
		h.Silence(nil)
		want(version(5))
		wantRead(t, store, h.Newest, version(5), 0)
	})
}
