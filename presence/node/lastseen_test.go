package node

import (
	"context"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"headcount/presence"
	"headcount/presence/presencemem"
)

// seenStore is a store that remembers departures. Its reads and writes can be made slow, or fail.
type seenStore struct {
	*shaky
	unreadable bool
	slow       time.Duration // before a write
}

func (s *seenStore) Write(ctx context.Context, changes []presence.Change) []presence.Outcome {
	time.Sleep(s.slow)
	return s.shaky.Write(ctx, changes)
}

func newSeenStore(most int) *seenStore {
	return &seenStore{shaky: &shaky{Store: presencemem.New(presencemem.Config{
		Partitions: testPartitions, LastSeen: time.Hour, MaxLastSeen: most,
	})}}
}

func (s *seenStore) LastSeen(ctx context.Context, users []presence.User) ([]time.Time, error) {
	if s.unreadable {
		<-ctx.Done() // like a store that does not answer

		return nil, presence.ErrUnavailable
	}
	return s.Store.(*presencemem.Store).LastSeen(ctx, users)
}

func (s *seenStore) ForgetSeen(context.Context, presence.User) error { panic("nodes forget nobody") }

func startSeen(t *testing.T, name string, s *seenStore) (*rig, func()) {
	t.Helper()
	return startBeside(t, name, s, nil, func(n *Node) { n.cfg.LastSeen = s })
}

// wantSeen checks that the user is absent, and when the user was last here. The zero time means that this is not known.
func (r *rig) wantSeen(u presence.User, want time.Time) {
	r.t.Helper()
	synctest.Wait()

	states, err := r.node.Users(r.t.Context(), []presence.User{u})
	if err != nil || states[0].Pages != 0 || !states[0].LastSeen.Truncate(time.Second).Equal(want) {
		r.t.Fatalf("Users(%d) = %+v, %v; want an absent user, last seen at %s", u, states, err, want)
	}
}

func (r *rig) wantPresent(u presence.User) {
	r.t.Helper()
	synctest.Wait()

	states, err := r.node.Users(r.t.Context(), []presence.User{u})
	if err != nil || states[0].Since.IsZero() || !states[0].LastSeen.IsZero() {
		r.t.Fatalf("Users(%d) = %+v, %v; want a present user", u, states, err)
	}
}

// TestLastSeen: a user was last here when the presence ended: after the grace, at the end of a silence, or with a hold.
func TestLastSeen(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, _ := startSeen(t, "n", newSeenStore(0))
		a := gw("a")
		r.wantSeen(1, time.Time{})

		r.op(a, join(1, "p"))
		r.op(a, join(1, "q"))
		r.op(a, leave(1, "q", 0))
		r.wantPresent(1)

		r.op(a, leave(1, "p", 2*time.Second))

		time.Sleep(time.Second)
		r.op(a, join(1, "p")) // a reload
		r.wantPresent(1)

		r.op(a, leave(1, "p", 2*time.Second))
		left := time.Now().Add(2 * time.Second)
		time.Sleep(3 * time.Second)
		r.wantSeen(1, left)

		time.Sleep(time.Minute)
		r.wantSeen(1, left)

		r.op(a, join(1, "p"))
		r.wantPresent(1)

		silent := time.Now() // the gateway dies
		time.Sleep(2 * timeout)
		r.wantSeen(1, silent.Add(timeout))

		if err := r.node.Hold(t.Context(), asked(4, "p", true)); err != nil {
			t.Fatal(err)
		}
		r.wantPresent(4)

		if err := r.node.Hold(t.Context(), asked(4, "p", false)); err != nil {
			t.Fatal(err)
		}
		r.wantSeen(4, time.Now())

		time.Sleep(2 * time.Hour)
		r.wantSeen(1, time.Time{})
	})
}

// The next owner of a partition knows when users departed from the one before. Inherited users who do not return
// depart, too.
func TestLastSeenMovesWithThePartition(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := newSeenStore(0)
		r, stop := startSeen(t, "n", store)

		r.op(gw("a"), join(1, "p"))
		r.op(gw("a"), join(4, "p"))

		store.slow = time.Second
		r.op(gw("a"), leave(1, "p", 0))
		left := time.Now()
		r.wantSeen(1, left) // while it is being written
		time.Sleep(time.Second)

		stop()
		time.Sleep(time.Second)
		next, _ := startSeen(t, "m", store)
		next.wantSeen(1, left)
		next.wantPresent(4)

		time.Sleep(2 * timeout)
		next.wantSeen(1, left)

		states, err := next.node.Users(t.Context(), []presence.User{4})
		if at := states[0].LastSeen; err != nil || at.Before(left) || at.After(left.Add(time.Second+timeout)) {
			t.Errorf("Users(4) = %+v, %v; want a user who was last here during the trial", states, err)
		}
	})
}

// While the store is away, the owner knows the departures. Later the store has them, too, even if the partition had to
// be claimed again. The owner needs no store to know who is present.
func TestLastSeenWhileTheStoreIsAway(t *testing.T) {
	for name, lost := range map[string]bool{"away": false, "away, and restarted": true} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				store := newSeenStore(0)
				r, stop := startSeen(t, "n", store)

				for _, u := range []presence.User{1, 4, 7} {
					r.op(gw("a"), join(u, "p"))
				}
				r.op(gw("a"), leave(1, "p", 0))
				first := time.Now()

				store.set(func() { store.away = true })
				store.unreadable = true
				time.Sleep(2 * time.Second)

				r.alive(gw("a"), 4, 7)
				r.op(gw("a"), leave(4, "p", 0))
				left := time.Now()
				r.wantSeen(4, left)

				r.wantPresent(7)
				r.wantSeen(1, time.Time{})

				time.Sleep(2 * time.Second)
				r.wantSeen(4, left)
				r.alive(gw("a"), 7)

				store.set(func() { store.away = false })
				store.unreadable = false
				if lost {
					store.set(func() { store.generation++ })
				}

				r.wantSeen(4, left)
				time.Sleep(4 * time.Second)
				stop()

				next, _ := startSeen(t, "m", store)
				next.wantSeen(1, first)
				next.wantSeen(4, left)
			})
		})
	}
}

// At the bound the oldest departure is forgotten.
func TestLastSeenIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, _ := startSeen(t, "n", newSeenStore(2))

		left := map[presence.User]time.Time{}
		for _, u := range []presence.User{1, 2, 3, 1} {
			r.op(gw("a"), join(u, "p"))
			r.op(gw("a"), leave(u, "p", 0))
			left[u] = time.Now()
			time.Sleep(time.Second)
		}

		r.wantSeen(1, left[1])
		r.wantSeen(2, time.Time{})
		r.wantSeen(3, left[3])
	})
}

// Without the setting nothing is written.
func TestLastSeenIsOff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := newSeenStore(0)
		r, _ := start(t, "n", store)

		r.op(gw("a"), join(1, "p"))
		r.op(gw("a"), leave(1, "p", 0))

		r.wantSeen(1, time.Time{})
		if times, _ := store.LastSeen(t.Context(), []presence.User{1}); !times[0].IsZero() {
			t.Errorf("the store remembers %v, want nothing", times)
		}
	})
}

// departures records the users who were reported as departed.
type departures struct {
	mu    sync.Mutex
	users []presence.User
}

func (d *departures) Departed(u presence.User) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.users = append(d.users, u)
}

func (d *departures) want(t *testing.T, users ...presence.User) {
	t.Helper()
	synctest.Wait()

	d.mu.Lock()
	defer d.mu.Unlock()

	slices.Sort(d.users)
	if !slices.Equal(d.users, users) {
		t.Fatalf("%v departed, want %v", d.users, users)
	}

	d.users = nil
}

// A user departs once: at the end of the last session. At the next owner only users depart who have not returned there.
// The end of an owner makes nobody depart.
func TestDepartures(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := newSeenStore(0)
		d := &departures{}

		open := func(name string) (*rig, func()) {
			return startBeside(t, name, store, nil, func(n *Node) { n.cfg.Departures = d })
		}

		r, stop := open("n")
		a, b := gw("a"), gw("b")

		r.op(a, join(1, "p"))
		r.op(a, join(1, "q"))
		r.op(b, join(1, "p"))
		r.op(a, join(4, "p"))

		r.op(a, leave(1, "p", 0))
		r.op(a, leave(1, "q", 0))
		d.want(t)

		r.op(b, leave(1, "p", 2*time.Second))
		time.Sleep(time.Second)
		r.op(b, join(1, "p")) // a reload
		time.Sleep(2 * time.Second)

		d.want(t)

		r.op(b, leave(1, "p", 0))
		d.want(t, 1)

		if err := r.node.Hold(t.Context(), asked(7, "p", true)); err != nil {
			t.Fatal(err)
		}

		stop()
		d.want(t)

		next, _ := open("m")
		next.op(b, join(1, "p"))

		time.Sleep(2 * timeout)
		d.want(t, 1, 4) // 1 and 4: their gateways are silent

		time.Sleep(4 * timeout)
		d.want(t, 7)
	})
}
