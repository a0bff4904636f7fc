package fanout

import (
	"context"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"headcount/presence"
)

var readTopic = presence.CountTopic("p")

func version(sequence uint64) presence.Update {
	return presence.Update{Topic: readTopic, Version: presence.Version{Incarnation: 1, Sequence: sequence}}
}

// wantRead checks what read returns, and how many calls to the store it makes.
func wantRead(
	t *testing.T, store *calls, read func(context.Context, []presence.Topic) ([]presence.Update, bool),
	want presence.Update, cost int64,
) {
	t.Helper()

	before := store.reads.Load()
	got, known := read(t.Context(), []presence.Topic{readTopic})
	if !known || got[0] != want {
		t.Errorf("read version %s, stale %t, known %t; want version %s, stale %t",
			got[0].Version, got[0].Stale, known, want.Version, want.Stale)
	}

	if calls := store.reads.Load() - before; calls != cost {
		t.Errorf("the read made %d calls to the store, want %d", calls, cost)
	}
}

// A read is never older than an earlier one, nor than what a subscriber was sent.
func TestNoReadIsOlderThanTheOneBefore(t *testing.T) {
	withCalls(t, func(t *testing.T, h *Hub, store *calls) {
		h.Want(readTopic)
		synctest.Wait()

		h.Update(version(18))
		store.brings(version(20))
		wantRead(t, store, h.Newest, version(18), 0) // what subscribers have
		wantRead(t, store, h.Read, version(20), 1)
		wantRead(t, store, h.Newest, version(20), 0)

		store.brings(version(19)) // the answer to a read that began earlier and ends later
		wantRead(t, store, h.Read, version(20), 1)

		// Without the store the newest count that anybody has seen is the answer, marked as stale.
		h.Away()
		store.away.Store(true)
		stale := version(20)
		stale.Stale = true
		wantRead(t, store, h.Newest, stale, 1)
	})
}

// A topic that is read twice within a second is followed, until it has not been read for a while.
func TestABusyTopicIsReadOnce(t *testing.T) {
	withCalls(t, func(t *testing.T, h *Hub, store *calls) {
		store.brings(version(1))
		// Reads that are far apart do not make the hub follow the topic.
		for range 3 {
			wantRead(t, store, h.Newest, version(1), 1)
			time.Sleep(2 * readAgain)
			wantEndpoints(t, store, 0)
		}

		wantRead(t, store, h.Newest, version(1), 1)
		wantRead(t, store, h.Newest, version(1), 1)
		synctest.Wait()
		wantEndpoints(t, store, 1)

		h.Update(version(2)) // as from its dispatcher
		for range 30 {
			wantRead(t, store, h.Newest, version(2), 0)
			time.Sleep(lingerFor / 3)
		}
		wantEndpoints(t, store, 1)

		time.Sleep(2 * lingerFor)
		wantEndpoints(t, store, 0)
		if n := h.Topics(); n > 0 {
			t.Errorf("%d topics are kept without readers, want none", n)
		}

		store.brings(version(3))
		wantRead(t, store, h.Newest, version(3), 1)
	})
}

// A followed topic is read from the store again while its updates may not arrive: after its endpoint was lost, and
// while the store is away.
func TestAFollowedTopicIsNotReadFromMemoryInDoubt(t *testing.T) {
	withCalls(t, func(t *testing.T, h *Hub, store *calls) {
		store.brings(version(1))
		wantRead(t, store, h.Newest, version(1), 1)
		wantRead(t, store, h.Newest, version(1), 1)

		synctest.Wait()
		h.Update(version(1))
		wantRead(t, store, h.Newest, version(1), 0)

		// As when the store has taken this gateway for dead: no update arrives, and nothing says so.
		if err := store.Store.Detach(t.Context(), "g/1", []presence.Topic{readTopic}); err != nil {
			t.Fatal(err)
		}

		time.Sleep(lingerFor - time.Second) // while the topic still lingers
		store.brings(version(2))
		wantRead(t, store, h.Newest, version(2), 1)
		wantRead(t, store, h.Newest, version(2), 1) // twice within a second, so it is followed again
		synctest.Wait()
		wantEndpoints(t, store, 1)

		h.Update(version(2))
		wantRead(t, store, h.Newest, version(2), 0)

		h.Away()
		store.brings(version(3))
		wantRead(t, store, h.Newest, version(3), 1)
		h.Back()
	})
}

// While the store is away the hub follows no topic for readers, and afterwards it keeps none.
func TestReadersLeaveNothingBehind(t *testing.T) {
	withCalls(t, func(t *testing.T, h *Hub, store *calls) {
		store.brings(version(1))
		for i := range 2 * maxLingering {
			topics := []presence.Topic{presence.CountTopic(fmt.Sprint("p", i))}
			h.Newest(t.Context(), topics)
			h.Newest(t.Context(), topics)

			// The store goes away and comes back again and again.
			store.away.Store(i%1000 > 500)
			if i%100 == 0 {
				synctest.Wait()
			}
		}

		store.away.Store(false)
		h.Back()
		if n := h.Topics(); n > 2*maxLingering {
			t.Errorf("%d topics are kept, want at most %d", n, 2*maxLingering)
		}

		time.Sleep(3 * lingerFor)
		synctest.Wait()
		if n := h.Topics(); n > 0 {
			t.Errorf("%d topics are kept without readers, want none", n)
		}
		wantEndpoints(t, store, 0)
	})
}

// Simultaneous reads of one topic are one call, and a caller who gives up does not end it for the others.
func TestConcurrentReadsAreOneCall(t *testing.T) {
	withCalls(t, func(t *testing.T, h *Hub, store *calls) {
		store.brings(version(1))
		store.slow = time.Second
		first, leave := context.WithCancel(t.Context())
		answers := make(chan bool, 64)
		read := func(ctx context.Context) {
			got, known := h.Newest(ctx, []presence.Topic{readTopic})
			answers <- known && got[0] == version(1)
		}

		go read(first)
		synctest.Wait()

		for range 63 {
			go read(t.Context())
		}
		synctest.Wait()

		// The caller who gives up is the one that began the call.
		leave()
		if <-answers {
			t.Error("the caller who gave up got an answer")
		}
		for range 63 {
			if !<-answers {
				t.Error("a caller who waits got no answer")
			}
		}

		if n := store.reads.Load(); n != 1 {
			t.Errorf("%d calls to the store, want 1", n)
		}
	})
}
