package fanout

import (
	"testing"
	"testing/synctest"

	"headcount/presence"
)

// TestAStaleUpdateOutdatesAllBefore: a user joins when the store has just lost everything. The acknowledgement brings a
// count that lacks other users: it is stale, but newer than all counts from before the loss. Counts from before that
// are still on their way lack the user. None of them may become the first count that the user sees as right.
func TestAStaleUpdateOutdatesAllBefore(t *testing.T) {
	afterLoss := presence.Update{Topic: readTopic, Version: presence.Version{Incarnation: 2, Sequence: 3}, Stale: true}
	complete := afterLoss
	complete.Version.Sequence++
	complete.Stale = false

	for name, late := range map[string]func(h *Hub, store *calls){
		"a push of a dispatcher":             func(h *Hub, _ *calls) { h.Update(version(5)) },
		"a push that is repeated":            func(h *Hub, _ *calls) { h.Update(version(4)) },
		"the acknowledgement of another one": func(h *Hub, _ *calls) { h.Acknowledged(version(5)) },
		"a read of the store": func(h *Hub, store *calls) {
			store.brings(version(5))
			h.Back()
		},
	} {
		t.Run(name, func(t *testing.T) {
			withCalls(t, func(t *testing.T, h *Hub, store *calls) {
				store.brings(version(4))
				h.Want(readTopic)
				synctest.Wait()

				h.Acknowledged(afterLoss)
				late(h, store)
				synctest.Wait()
				if last, _ := h.Last(readTopic); !last.Stale {
					t.Errorf("version %s is not stale, though %s has outdated it", last.Version, afterLoss.Version)
				}

				// The doubt ends with the first count that is newer and not stale.
				h.Update(complete)
				if last, _ := h.Last(readTopic); last != complete {
					t.Errorf("the hub has version %s, stale %t; want %s", last.Version, last.Stale, complete.Version)
				}
			})
		})
	}

	t.Run("before the topic is attached", func(t *testing.T) {
		withCalls(t, func(t *testing.T, h *Hub, store *calls) {
			store.brings(version(4))
			store.during = func() { h.Acknowledged(afterLoss) }
			h.Want(readTopic)
			synctest.Wait()
			if last, known := h.Last(readTopic); known && !last.Stale {
				t.Errorf("version %s is not stale, though %s has outdated it", last.Version, afterLoss.Version)
			}

			h.Update(complete)
			if last, _ := h.Last(readTopic); last != complete {
				t.Errorf("the hub has version %s, stale %t; want %s", last.Version, last.Stale, complete.Version)
			}
		})
	})
}

// taker is a client that takes everything.
type taker struct{ Subscriber }

func (*taker) Busy() bool       { return false }
func (*taker) Try([]byte) error { return nil }
func (*taker) Close() error     { return nil }
func (*taker) Ping() bool       { return true }
func (*taker) Expire()          {}

// TestAMarkIsNotOvertaken: an update, and the mark that it may be outdated, go to a shard at the same time. Whichever
// arrives last, the shard ends with what the hub has.
func TestAMarkIsNotOvertaken(t *testing.T) {
	withCalls(t, func(t *testing.T, h *Hub, store *calls) {
		store.brings(version(4))
		c := &taker{}
		h.Prepare(&c.Subscriber, c, 0)
		c.Enter()
		defer c.Leave()
		c.Subscribe([]presence.Topic{readTopic}, 0)
		synctest.Wait()

		shard := h.shards[0]
		isMarked := func() bool {
			shard.mu.Lock()
			defer shard.mu.Unlock()
			return shard.topics[readTopic].update.Stale
		}

		right, _ := h.Last(readTopic)
		h.Away()
		marked, _ := h.Last(readTopic)
		if right.Stale || !marked.Stale || !isMarked() {
			t.Fatalf("stale is %t before the doubt and %t in it, and the shard has the mark: %t",
				right.Stale, marked.Stale, isMarked())
		}

		// An earlier update may arrive at the shard after a later one.
		shard.update(right)
		if !isMarked() {
			t.Error("a late update removed the mark")
		}

		h.Back()
		synctest.Wait()
		if last, _ := h.Last(readTopic); last.Stale || isMarked() {
			t.Fatalf("after the doubt the hub has stale %t, and the shard %t; want neither", last.Stale, isMarked())
		}

		shard.update(marked)
		if isMarked() {
			t.Error("a late mark was not ignored")
		}
	})
}
