package node

import (
	"context"
	"slices"
	"testing"
	"time"

	"github.com/rs/zerolog"

	"headcount/presence"
	"headcount/presence/heartbeat"
)

// oneStore is a store of one partition. The test decides when each of its steps happens, and only the test's goroutine
// uses it.
type oneStore struct {
	epoch, generation uint64
	complete          bool
	users             map[string]int64
	members           map[presence.User]bool
	away              bool
	version           uint64 // of the last count
}

func (s *oneStore) Generation(context.Context) (uint64, error) { return s.generation, nil }

func (s *oneStore) Claim(context.Context, string, []int, bool) ([]presence.Claim, error) {
	s.epoch++

	return []presence.Claim{{Epoch: s.epoch, Generation: s.generation}}, nil
}

func (s *oneStore) Incomplete(_ context.Context, partitions []int, _ bool) ([]int, error) {
	if s.complete {
		return nil, nil
	}

	return partitions, nil
}

func (s *oneStore) Load(_ context.Context, claims []presence.Claim) ([]presence.Snapshot, error) {
	return make([]presence.Snapshot, len(claims)), nil
}

func (s *oneStore) Write(_ context.Context, changes []presence.Change) []presence.Outcome {
	outcomes := make([]presence.Outcome, len(changes))
	for i, c := range changes {
		switch {
		case s.away:
			outcomes[i].Err = presence.ErrUnavailable
		case c.Epoch < s.epoch:
			outcomes[i].Err = presence.ErrFenced
		case c.Generation != s.generation:
			outcomes[i].Err = presence.ErrLost
		default:
			for _, pu := range c.Counts {
				s.users[pu.Page] = pu.Users
				s.version++
				outcomes[i].Counts = append(outcomes[i].Counts, presence.Count{
					Page: pu.Page, Users: pu.Users, Version: presence.Version{Incarnation: 1, Sequence: s.version},
				})
			}

			if c.Reset {
				clear(s.members)
			}
			for _, m := range c.Members {
				s.members[m.User] = true
				if m.Gone {
					delete(s.members, m.User)
				}
			}

			s.complete = s.complete || c.Complete
		}
	}

	return outcomes
}

// interleaving is one history of a partition. The test makes the steps of its actor, the writer and the manager, in any
// order.
type interleaving struct {
	t       *testing.T
	store   *oneStore
	node    *Node
	manager manager
	actor   *partition
	seq     uint64
	joined  presence.User // the users 1 to joined have joined
	left    presence.User // the users 1 to left have left again

	// the batch under way, from the store's answer until the writer handles it
	batch    []*partition
	changes  []presence.Change
	outcomes []presence.Outcome
	again    []*partition
}

func newInterleaving(t *testing.T) *interleaving {
	h := &interleaving{t: t, store: &oneStore{users: map[string]int64{}, members: map[presence.User]bool{}}}

	var err error
	h.node, err = New(h.store, Config{
		Name:            "n",
		Partitions:      1,
		PresenceTimeout: timeout,
		Reply:           replies(func(string, *heartbeat.Reply) {}),
		Log:             zerolog.Nop(),
	})
	if err != nil {
		t.Fatal(err)
	}

	claims, _ := h.store.Claim(t.Context(), "n", []int{0}, false)
	h.node.Gateways(nil)

	h.actor = newPartition(h.node, claims[0])
	h.actor.restore(presence.Snapshot{})
	h.actor.checkReports()
	h.actor.flush()

	h.node.actors[0].Store(h.actor)
	h.manager = manager{
		n:          h.node,
		want:       []int{0},
		owned:      map[int]*ownership{0: {h.actor, func() {}}},
		fenced:     map[int]fence{},
		unverified: map[int]bool{},
	}

	return h
}

// step makes a step, and reports whether it was possible.
func (h *interleaving) step(name byte) bool {
	switch name {
	case 'j': // the actor applies a join
		if h.joined >= 2 {
			return false
		}

		h.joined++
		src := &source{Source: heartbeat.Source{Gateway: "g"}}
		h.actor.arrive(src, &heartbeat.Beat{}, h.joined, h.actor.page("p"))
		h.actor.flush()

	case 'l': // the actor applies the leave of the first user who joined
		if h.joined == 0 || h.left > 0 {
			return false
		}

		h.left++
		h.actor.leave(h.actor.users[1], h.actor.page("p"))
		h.actor.flush()

	case 'a': // the actor reads one mail
		if len(h.actor.mail) == 0 {
			return false
		}

		(<-h.actor.mail).deliver(h.actor)
		h.actor.checkReports()
		h.actor.flush()

	case 'w', 'u': // the writer takes the ready outboxes, and the store writes them; u: the answer is lost
		if h.batch != nil || len(h.node.ready) == 0 {
			return false
		}

		h.batch, h.changes = h.node.collect(<-h.node.ready, &h.seq)
		h.store.away = name == 'u'
		h.outcomes = h.store.Write(h.t.Context(), h.changes)

	case 'o': // the writer learns the outcome
		if h.batch == nil {
			return false
		}

		h.again = append(h.again, h.node.outcomes(h.batch, h.changes, h.outcomes)...)
		h.batch = nil

	case 'r': // the writer's pause after a failure is over
		if len(h.again) == 0 {
			return false
		}

		for _, p := range h.again {
			h.node.ready <- p
		}

		h.again = nil

	case 'e': // the store is emptied
		if h.store.generation >= 2 {
			return false
		}

		h.store.generation++
		h.store.complete = false
		h.store.users = map[string]int64{}
		h.store.members = map[presence.User]bool{}

	case 'm': // the manager checks its claims
		select {
		case <-h.node.trouble:
		default:
		}

		if h.node.actors[0].Load() != h.actor {
			h.t.Fatal("the node gave the partition up, though nobody else had claimed it")
		}
		if err := h.manager.reclaim(h.t.Context(), h.store.generation); err != nil {
			h.t.Fatal(err)
		}
	}

	return true
}

// settle makes all steps that are due, without new events, and reports whether no step is left in the end.
func (h *interleaving) settle() bool {
	h.step('m') // the manager checks every two seconds in any case

	for range 50 {
		progress := false
		for _, s := range []byte("orwa") {
			progress = h.step(s) || progress
		}

		if len(h.node.trouble) > 0 {
			progress = h.step('m')
		}

		if !progress {
			return true
		}
	}

	return false
}

// TestOutboxIsAlwaysWritten tries every order of up to seven steps of the actor, the writer, the manager and a store
// that is emptied or does not answer. Whatever the order, when no step is left the store has everything: the counts,
// the members, and the record that the partition is complete. (Invariants 1 and 6.)
func TestOutboxIsAlwaysWritten(t *testing.T) {
	depth := 7
	if testing.Short() {
		depth = 6
	}

	histories := 0
	var walk func(prefix []byte)
	walk = func(prefix []byte) {
		for _, s := range []byte("jlawuorem") {
			h := newInterleaving(t)
			next := append(slices.Clone(prefix), s)
			taken := true
			for _, step := range next {
				taken = h.step(step)
			}
			if !taken {
				continue // without that step this history was tried already
			}

			histories++
			settled := h.settle()
			present := int(h.joined - h.left)
			users := int(h.store.users["p"])
			members := len(h.store.members)
			if !settled || !h.store.complete || users != present || members != present {
				t.Fatalf("after the steps %q: settled %v, complete %v, %d users and %d members in the store, want %d, "+
					"outbox %+v", next, settled, h.store.complete, users, members, present, &h.actor.out)
			}

			if len(next) < depth {
				walk(next)
			}
		}
	}

	begun := time.Now()
	walk(nil)
	t.Logf("%d histories in %s", histories, time.Since(begun).Round(time.Millisecond))

	if histories < 1000 {
		t.Fatalf("%d histories were tried, want at least 1000", histories)
	}
}

// A join changes nothing if the user is present through another gateway. Its acknowledgement still has a count that
// includes the user: it waits for the write that brings the user, and until the actor knows that this write has ended.
func TestASecondJoinIsAcknowledgedWithItsCount(t *testing.T) {
	for _, way := range []string{"", "w", "wo", "woa"} { // the steps of the first write before the second join
		h := newInterleaving(t)
		for h.step('w') || h.step('o') || h.step('a') { // writes what the restored actor has
		}

		counted := map[string]int64{}
		h.node.cfg.Reply = replies(func(gateway string, r *heartbeat.Reply) {
			if r.Acked != 1 || r.Counted != 1 {
				t.Errorf("%q: %s got %+v; want an acknowledgement whose counts include the join", way, gateway, r)
			}

			for _, c := range r.Counts {
				if c.Page == "p" {
					counted[gateway] = c.Users
				}
			}
		})

		join := func(gateway string) {
			h.actor.beat(&heartbeat.Beat{
				Source: heartbeat.Source{Gateway: gateway, Incarnation: 1}, Stream: 1, First: 1,
				Ops: []heartbeat.Op{{Kind: heartbeat.Join, User: 1, Page: "p"}},
			})

			h.actor.flush()
			h.actor.sendDue()
		}

		join("first")
		for _, step := range []byte(way) {
			h.step(step)
		}

		join("second")
		for h.step('w') || h.step('o') || h.step('a') {
		}

		if counted["first"] != 1 || counted["second"] != 1 {
			t.Errorf("%q: the acknowledgements have the counts %v of the page, want 1 for both", way, counted)
		}
	}
}
