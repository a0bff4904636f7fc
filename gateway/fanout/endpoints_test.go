package fanout

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/rs/zerolog"

	"headcount/presence"
	"headcount/presence/presencemem"
)

// TestLostEndpointsAreAttachedAgain: lost endpoints are attached again within 10 s, the time in which every count must
// be right again. The store loses all of them, half of them, or a single one of any bucket.
func TestLostEndpointsAreAttachedAgain(t *testing.T) {
	withCalls(t, func(t *testing.T, h *Hub, store *calls) {
		store.brings(version(1)) // stale topics would be attached again anyway
		var topics []presence.Topic
		for i := range 1000 {
			topics = append(topics, presence.CountTopic(fmt.Sprint("p", i)))
			h.Want(topics[i])
		}

		missing := func() int {
			synctest.Wait()
			gone, err := store.Missing(t.Context(), "g/1", topics)
			if err != nil {
				t.Fatal(err)
			}
			return len(gone)
		}

		if n := missing(); n > 0 {
			t.Fatalf("%d of 1000 topics were never attached", n)
		}

		parts := [][]presence.Topic{topics, topics[:500]}
		// A check looks at some of the buckets, so only the check of its bucket finds a single loss.
		for i := range 20 {
			parts = append(parts, topics[i:i+1])
		}
		for _, lost := range parts {
			if err := store.Detach(t.Context(), "g/1", lost); err != nil {
				t.Fatal(err)
			}

			if n := missing(); n != len(lost) {
				t.Fatalf("%d endpoints are missing, want the %d that were detached", n, len(lost))
			}
			time.Sleep(10 * time.Second)
			if n := missing(); n > 0 {
				t.Fatalf("%d endpoints of %d that were lost are still missing after 10 s", n, len(lost))
			}
		}
	})
}

// calls is a store that counts the topics of its calls, and that can be away.
type calls struct {
	*presencemem.Store
	away           atomic.Bool
	attach, detach atomic.Int64                    // how many topics
	failDetach     atomic.Int64                    // how many detaches fail
	during         func()                          // called once, during the next attach
	newest         atomic.Pointer[presence.Update] // what a read returns, and an attach once it is set
	reads          atomic.Int64
	slow           time.Duration // how long a read takes
}

func (c *calls) Updates(_ context.Context, topics []presence.Topic) ([]presence.Update, error) {
	c.reads.Add(1)
	time.Sleep(c.slow)
	if c.away.Load() {
		return nil, presence.ErrUnavailable
	}

	updates := make([]presence.Update, len(topics))
	for i, t := range topics {
		if newest := c.newest.Load(); newest != nil {
			updates[i] = *newest
		}
		updates[i].Topic = t
	}

	return updates, nil
}

// brings sets the update that the store returns from now on.
func (c *calls) brings(u presence.Update) { c.newest.Store(&u) }

func (c *calls) Attach(ctx context.Context, life string, topics []presence.Topic) ([]presence.Update, error) {
	if during := c.during; during != nil {
		c.during = nil
		during()
	}

	c.attach.Add(int64(len(topics)))
	if c.away.Load() {
		return nil, presence.ErrUnavailable
	}

	updates, err := c.Store.Attach(ctx, life, topics)
	if newest := c.newest.Load(); err == nil && newest != nil {
		updates = make([]presence.Update, len(topics))
		for i, t := range topics {
			updates[i] = *newest
			updates[i].Topic = t
		}
	}
	return updates, err
}

func (c *calls) Detach(ctx context.Context, life string, topics []presence.Topic) error {
	if c.failDetach.Add(-1) >= 0 {
		return presence.ErrUnavailable
	}

	c.detach.Add(int64(len(topics)))
	return c.Store.Detach(ctx, life, topics)
}

// withCalls runs a test in a bubble, with a hub over a store that counts its calls.
func withCalls(t *testing.T, test func(*testing.T, *Hub, *calls)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		store := &calls{Store: presencemem.New(presencemem.Config{})}
		h := New(Config{
			Gateway: "g/1", Store: store, Shards: 1, Interval: time.Second, Budget: 1000, Ping: time.Minute,
			Pong: time.Minute, Log: zerolog.Nop(),
		})
		h.Deliver(presence.KindCount, exactly{})

		ctx, stop := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() { defer close(done); h.Run(ctx) }()
		defer func() { stop(); <-done }()

		test(t, h, store)
	})
}

// Pages that are wanted and then left are dropped, even while the store is away.
func TestAFloodOfPagesLeavesNothing(t *testing.T) {
	for _, away := range []bool{false, true} {
		t.Run(fmt.Sprint("away ", away), func(t *testing.T) {
			withCalls(t, func(t *testing.T, h *Hub, store *calls) {
				store.away.Store(away)
				if away {
					h.Away()
				}

				const most = maxLingering
				topics := make([]presence.Topic, 100)
				for round := range 400 {
					for i := range topics {
						topics[i] = presence.CountTopic(fmt.Sprint("p", round, "-", i))
						h.Want(topics[i])
					}

					if round%2 == 0 {
						synctest.Wait() // the pages are attached before they are left
					}
					for _, topic := range topics {
						h.Unwant(topic)
					}
				}

				if n := h.Topics(); n > most {
					t.Errorf("%d topics are kept, want at most %d", n, most)
				}

				// While the store is away the pauses between two attempts grow.
				if asked := store.attach.Load(); away && asked > 1000 {
					t.Errorf("while it was away the store was asked for %d topics, want at most 1000", asked)
				}

				// When they have lingered, all of them are dropped.
				store.away.Store(false)
				h.Back()
				time.Sleep(3 * lingerFor)
				synctest.Wait()
				if n := h.Topics(); n > 0 {
					t.Errorf("%d topics are kept without a subscriber, want none", n)
				}

				wantEndpoints(t, store, 0)
			})
		})
	}
}

// A newcomer is served in the next turn, even while other clients want many pages and leave them again.
func TestANewcomerWaitsForOneTurn(t *testing.T) {
	withCalls(t, func(t *testing.T, h *Hub, store *calls) {
		// While the first turn runs, others want and leave many pages, and the newcomer wants one.
		store.during = func() { // the first turn: one page
			for i := range 20 * attachBatch {
				h.Want(presence.CountTopic(fmt.Sprint("p", i)))
				h.Unwant(presence.CountTopic(fmt.Sprint("p", i)))
			}
			h.Want(presence.CountTopic("newcomer"))
		}

		// A queue in the order of arrival would first attach twenty batches of pages that nobody wants any more.
		h.Want(presence.CountTopic("first"))
		synctest.Wait()
		if n := store.attach.Load(); n != 2 {
			t.Errorf("the store was asked for %d topics, want the first and the newcomer's", n)
		}

		wantEndpoints(t, store, 2)
	})
}

// The store comes back while a topic lingers. The hub does not attach the topic again, since nobody wants it. A detach
// that fails is repeated.
func TestNoEndpointWithoutSubscribers(t *testing.T) {
	withCalls(t, func(t *testing.T, h *Hub, store *calls) {
		topic := presence.CountTopic("p")
		h.Want(topic)
		synctest.Wait()
		wantEndpoints(t, store, 1)

		// From here on the topic lingers.
		h.Unwant(topic)
		h.Back()
		store.failDetach.Store(2)

		time.Sleep(4 * lingerFor)
		synctest.Wait()
		wantEndpoints(t, store, 0)
		if n := store.attach.Load(); n != 1 {
			t.Errorf("attached %d times, want once", n)
		}

		h.Want(topic)
		synctest.Wait()
		wantEndpoints(t, store, 1)
	})
}

func wantEndpoints(t *testing.T, store *calls, want int) {
	t.Helper()
	n := 0
	for bucket := range presence.DefaultBuckets {
		all, err := store.Attached(t.Context(), bucket)
		if err != nil {
			t.Fatal(err)
		}
		n += len(all)
	}

	if n != want {
		t.Errorf("the store has %d endpoints, want %d", n, want)
	}
}

// exactly is an Encoder that writes nothing, for a kind without forms.
type exactly struct{}

func (exactly) Encode(b []byte, _ presence.Update, _ Form) ([]byte, uint64) { return b, 0 }

// wants is a Source that records the wanted topics.
type wants map[presence.Topic]bool

func (w wants) Want(t presence.Topic)   { w[t] = true }
func (w wants) Unwant(t presence.Topic) { delete(w, t) }

// Topics of a source do not belong to the store: the hub never asks the store for them, and the source says whether
// they are stale. They linger like other topics.
func TestTopicsOfASource(t *testing.T) {
	withCalls(t, func(t *testing.T, h *Hub, store *calls) {
		kind := presence.KindOf("sourced")
		source := wants{}
		h.Supply(kind, exactly{}, source)
		topic := presence.Topic{Kind: kind, Key: "k"}

		h.Want(topic)
		if !source[topic] {
			t.Fatal("the source was not asked for the topic")
		}

		tell := func(sequence uint64, stale, want bool) {
			t.Helper()
			u := presence.Update{Topic: topic, Stale: stale}
			if sequence > 0 {
				u.Version = presence.Version{Incarnation: 1, Sequence: sequence}
			}
			h.Update(u)
			last, known := h.Last(topic)
			if !known || last.Stale != want || sequence > 0 && last.Version.Sequence != sequence {
				t.Errorf("after %+v the hub has %+v, known %t; want stale %t", u, last, known, want)
			}
		}

		// The store is away, which says nothing about a source.
		h.Away()
		tell(1, false, false)
		tell(0, true, true)
		h.Back()

		tell(2, false, false)
		h.Away()
		if last, _ := h.Last(topic); last.Stale {
			t.Error("the store is away, and the topic of the source is stale")
		}

		// A topic that is wanted again while it lingers is wanted as before.
		h.Back()
		h.Unwant(topic)
		h.Want(topic)
		time.Sleep(2 * lingerFor)
		if !source[topic] {
			t.Error("a lingering topic that is wanted again is not wanted of the source")
		}

		h.Unwant(topic)
		time.Sleep(2 * lingerFor)
		synctest.Wait()
		if len(source) > 0 || h.Topics() > 0 {
			t.Errorf("the source still has %v, and the hub %d topics; want none", source, h.Topics())
		}

		if n := store.attach.Load() + store.detach.Load(); n > 0 {
			t.Errorf("the store was asked for %d topics, want none", n)
		}
	})
}

// An update that arrives after the store has gone is taken, but is stale: it may be outdated already.
func TestUpdatesAreStaleWhileTheStoreIsAway(t *testing.T) {
	withCalls(t, func(t *testing.T, h *Hub, store *calls) {
		topic := presence.CountTopic("p")
		h.Want(topic)
		synctest.Wait() // until it is attached

		want := func(sequence uint64, stale bool) {
			t.Helper()
			h.Update(presence.Update{Topic: topic, Version: presence.Version{Incarnation: 1, Sequence: sequence}})
			if last, _ := h.Last(topic); last.Version.Sequence != sequence || last.Stale != stale {
				t.Errorf("the hub has %+v, want number %d, stale %t", last, sequence, stale)
			}
		}
		want(1, false)

		store.away.Store(true)
		h.Away()
		want(1, true)
		want(2, true)
	})
}
