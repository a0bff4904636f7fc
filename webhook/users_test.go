package webhook_test

import (
	"context"
	"fmt"
	"iter"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"headcount/presence"
	"headcount/webhook"
)

// crowd has the users who are present, as the owners of their partitions know them.
type crowd struct {
	mu        sync.Mutex
	present   map[presence.User]bool
	connected map[presence.User]string // to this process, with their names
	away      bool
	silent    presence.User // whose owner does not answer; 0: all answer
	asked     func()        // called between the reading of an answer and its return; may be nil
}

func (c *crowd) Connected() iter.Seq2[presence.User, string] {
	c.mu.Lock()
	defer c.mu.Unlock()

	return maps.All(maps.Clone(c.connected))
}

func (c *crowd) Present(ctx context.Context, users []presence.User) map[presence.User]bool {
	c.mu.Lock()
	present := map[presence.User]bool{}
	isSilent := false
	for _, u := range users {
		present[u] = c.present[u]
		if u == c.silent {
			delete(present, u)
			isSilent = true
		}
	}

	away, asked := c.away, c.asked
	c.mu.Unlock()

	if away || len(users) > presence.MaxAsked {
		return nil
	}
	if isSilent {
		<-ctx.Done()
	}
	if asked != nil {
		asked()
	}

	return present
}

func (c *crowd) set(do func()) {
	c.mu.Lock()
	defer c.mu.Unlock()

	do()
}

// come puts a user on a page, and the gateway and the node notice.
func (w *world) come(u presence.User, name string) {
	w.crowd.set(func() { w.present[u] = true })
	w.service.Arrived(u, name)
}

func (w *world) leave(u presence.User) {
	w.crowd.set(func() { delete(w.present, u) })
	w.service.Departed(u)
}

// soon is enough time for a round and for the sender.
const soon = 3 * time.Second

func TestUsers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "user:*=http://r.test/", "user@shop:ann=http://r.test/")
		stop := w.start()
		defer func() { stop() }()
		shop := presence.SiteOf("shop")

		w.come(1, "ann")
		w.come(1, "ann") // another tab
		w.come(2, shop.Qualify("ann"))
		w.come(3, shop.Qualify("bob"))
		time.Sleep(soon)
		w.want("user.online ann", "shop user.online ann", "shop user.online ann", "shop user.online bob")

		w.come(1, "ann") // a further page
		time.Sleep(soon)
		w.want()

		// A user who is back within Settle causes no event. By leaving again the user starts a new Settle.
		w.leave(1)
		time.Sleep(settle - soon)
		w.come(1, "ann")
		time.Sleep(soon - time.Second)
		w.leave(1)
		time.Sleep(settle - time.Second)
		w.want()
		time.Sleep(soon)
		w.want("user.offline ann")

		w.leave(2)
		time.Sleep(settle + soon)
		w.want("shop user.offline ann", "shop user.offline ann")

		w.come(1, "ann")
		time.Sleep(soon)
		w.want("user.online ann")

		w.come(1, "ann") // ann leaves before the next round
		w.leave(1)
		time.Sleep(settle + soon)
		w.want("user.offline ann")
		if n := w.metric("headcount_webhook_events_total", "type", webhook.Online); n != 5 {
			t.Errorf("there were %v events user.online, want 5", n)
		}
	})
}

// A user comes back between the answer of the owner and the report of the departure, and stays reported as online.
func TestUserReturnsWhileTheDepartureIsJudged(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "user:*=http://r.test/")
		other := newWorld(t, "user:*=http://r.test/")
		other.store, other.receiver, other.crowd = w.store, w.receiver, w.crowd
		defer w.start()()
		defer other.start()()

		w.come(1, "ann")
		time.Sleep(soon)
		w.want("user.online ann")

		w.crowd.set(func() {
			w.asked = func() {
				w.crowd.set(func() { w.asked = nil })
				other.come(1, "ann") // reported at once, because the process other judges nobody else
				time.Sleep(soon)
			}
		})

		w.leave(1)
		time.Sleep(2*settle + soon)
		w.want()

		w.leave(1)
		time.Sleep(settle + soon)
		w.want("user.offline ann")
	})
}

// A departure that a process judges when it goes on after a suspension has the time of then: others may have reported
// the same user meanwhile, at an earlier time.
func TestADepartureHasTheTimeOfItsReport(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "user:*=http://r.test/")
		defer w.start()()

		w.come(1, "ann")
		time.Sleep(soon)
		w.want("user.online ann")

		var goesOn time.Time
		w.crowd.set(func() {
			w.asked = func() {
				w.crowd.set(func() { w.asked = nil })
				time.Sleep(settle / 2) // after a longer time the user would be judged anew
				goesOn = time.Now()
			}
		})

		w.leave(1)
		time.Sleep(2*settle + soon)
		w.want("user.offline ann")

		if last := w.all[len(w.all)-1]; goesOn.IsZero() || last.Timestamp.Before(goesOn) {
			t.Errorf("%s is of %s, and was reported after %s", last.Type, last.Timestamp, goesOn)
		}
	})
}

// Changes noticed while the store or the owners are away are reported when they are back, once, and if they last.
func TestUsersWhileTheStoreIsAway(t *testing.T) {
	for name, away := range map[string]func(w *world, s *shakyStore, is bool){
		"store":  func(_ *world, s *shakyStore, is bool) { s.set(is) },
		"owners": func(w *world, _ *shakyStore, is bool) { w.crowd.set(func() { w.away = is }) },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, "user:*=http://r.test/")
				s := &shakyStore{Store: w.store}
				w.store = s
				defer w.start()()

				w.come(1, "ann")
				w.come(2, "bob")
				time.Sleep(soon)
				w.want("user.online ann", "user.online bob")

				away(w, s, true)
				w.leave(1)
				w.come(3, "cid")
				w.come(4, "dan")
				w.leave(4)
				time.Sleep(time.Minute)
				w.want()

				away(w, s, false)
				time.Sleep(time.Minute)
				w.want("user.offline ann", "user.online cid")
			})
		})
	}
}

// While the owner of one user does not answer, others are reported. When it answers again, so is that user.
func TestASilentOwnerHoldsUpNoOtherUsers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "user:*=http://r.test/")
		defer w.start()()
		w.come(1, "ann")
		w.come(2, "bob")
		time.Sleep(soon)
		w.want("user.online ann", "user.online bob")

		w.crowd.set(func() { w.silent = 2 })
		w.leave(2)
		w.come(3, "cid")
		w.leave(1)
		time.Sleep(time.Minute)
		w.want("user.online cid", "user.offline ann")

		w.crowd.set(func() { w.silent = 0 })
		time.Sleep(time.Minute)
		w.want("user.offline bob")
	})
}

// shakyStore makes a change, or does not, and then returns an error in either case.
type shakyStore struct {
	webhook.Store
	mu   sync.Mutex
	away bool
}

func (s *shakyStore) set(away bool) {
	s.mu.Lock()
	defer s.mu.Unlock()

	s.away = away
}

func (s *shakyStore) Report(ctx context.Context, changes []webhook.Change) ([]string, int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()

	reported, dropped, err := s.Store.Report(ctx, changes)
	if s.away {
		return nil, 0, webhook.ErrUnavailable
	}

	return reported, dropped, err
}

// A departure was noticed by a process that was killed. The owner of the hook's bucket finds it.
func TestUserWhomNobodySawLeaving(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "user:*=http://r.test/")
		stop := w.start()
		w.come(1, "ann")
		w.come(2, "bob")
		w.come(3, "cyd")
		time.Sleep(soon)
		w.want("user.online ann", "user.online bob", "user.online cyd")

		w.leave(1)
		stop()
		stop = w.start()
		defer func() { stop() }()
		time.Sleep(time.Minute - time.Second)

		w.crowd.set(func() { delete(w.present, 3) }) // user 3 reloads during the look through all users
		time.Sleep(time.Second + settle/2)
		w.come(3, "cyd")
		time.Sleep(time.Minute + settle + soon)
		w.want("user.offline ann")

		stop()
		w.crowd.set(func() { delete(w.present, 2); delete(w.present, 3) })
		stop = w.start()
		w.service.Serve(nil) // now another process owns the hook's bucket

		time.Sleep(2*time.Minute + settle + soon)
		if states, err := w.store.Reported(t.Context(), w.hooks[0].ID); err != nil || len(states) != 2 {
			t.Errorf("%d users are reported, %v; want none, since the process does not own the bucket",
				len(states), err)
		}
	})
}

// A user timed out while the links between the gateway and the owner were cut, and is counted again without a new
// arrival. The user is reported as online once. For a user who is reported already nothing is written.
func TestUserWhoWasTimedOutIsOnlineAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "user:*=http://r.test/", "user:ann=http://r.test/")
		other := newWorld(t, "user:*=http://r.test/", "user:ann=http://r.test/")
		other.store, other.receiver, other.crowd, other.hooks = w.store, w.receiver, w.crowd, w.hooks
		defer w.start()()
		defer other.start()()
		other.service.Serve(nil) // one process sends, and both scan

		w.come(1, "ann")
		w.come(2, "bob")
		// Both processes have connections of both users, so both notice.
		w.crowd.set(func() { w.connected = map[presence.User]string{1: "ann", 2: "bob"} })
		time.Sleep(soon)
		w.want("user.online ann", "user.online ann", "user.online bob")
		bob := w.stateOf(2)

		w.leave(1) // as the owner decided
		time.Sleep(5 * time.Minute)
		w.want("user.offline ann", "user.offline ann")

		w.crowd.set(func() { w.present[1] = true })
		time.Sleep(time.Minute + soon)
		w.want("user.online ann", "user.online ann")

		time.Sleep(5 * time.Minute)
		w.want()
		if w.stateOf(2) != bob {
			t.Error("the state of a user who was reported already was written again")
		}
	})
}

// stateOf returns the reported state of a user, for the first hook.
func (w *world) stateOf(u presence.User) string {
	w.t.Helper()
	states, err := w.store.Reported(w.t.Context(), w.hooks[0].ID)
	if err != nil {
		w.t.Fatal(err)
	}

	return states[fmt.Sprintf("%016x", uint64(u))]
}

// All users of a gateway may time out at once. They take no places from users who come and leave meanwhile.
func TestManyUsersWhoWereTimedOutAreOnlineAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "user:*=http://r.test/")
		s := &shakyStore{Store: w.store}
		w.store = s

		const all = webhook.MaxQueue
		w.crowd.set(func() {
			w.connected = map[presence.User]string{}
			for i := range all {
				w.connected[presence.User(i+1)] = fmt.Sprint("user", i)
				w.present[presence.User(i+1)] = true
			}
		})

		s.set(true)
		defer w.start()()
		time.Sleep(time.Minute + time.Second) // the first scan fails
		s.set(false)
		for i := range 100_000 {
			w.service.Departed(presence.User(all + i + 1))
		}

		time.Sleep(2 * time.Minute)

		w.receiver.mu.Lock()
		defer w.receiver.mu.Unlock()
		if len(w.events) != all {
			t.Errorf("%d of %d users are reported as online", len(w.events), all)
		}
		if n := w.metric("headcount_webhook_left_out_total", "kind", "user"); n != 0 {
			t.Errorf("%v users are left out, want none", n)
		}
	})
}

// The store has no readable ids of users. Events whose secret is gone are dropped.
func TestUsersAreSealed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "user:*=http://r.test/")
		w.answers(503)
		stop := w.start()
		w.come(1, "ann.of.the.clear")
		time.Sleep(soon)
		states, err := w.store.Reported(t.Context(), w.hooks[0].ID)

		events, _, failed := w.store.Take(t.Context(), w.hooks[0].ID)
		if err != nil || failed != nil {
			t.Fatal(err, failed)
		}
		all := fmt.Sprint(states, events)
		if len(states) != 1 || len(events) != 1 || strings.Contains(all, "ann.") {
			t.Errorf("the store has %s, want one state and one event without the name", all)
		}

		stop()
		w.answers(204)
		keys := slices.Clone(keys)
		defer func(were [][]byte) { setKeys(were) }(keys)
		setKeys([][]byte{[]byte("another key of 24 bytes.."), keys[0]}) // the secrets were rotated
		stop = w.start()
		time.Sleep(soon)
		w.want("user.online ann.of.the.clear")

		stop()
		setKeys([][]byte{[]byte("a third key of 24 bytes...")})
		stop = w.start()
		defer func() { stop() }()
		w.leave(1) // the user's id can no longer be read
		time.Sleep(settle + soon)
		w.want()
		if n := w.metric("headcount_webhook_dropped_total", "reason", "sealed"); n != 1 {
			t.Errorf("%v departures were dropped, want 1", n)
		}

		w.answers(503)
		w.come(2, "bob")
		time.Sleep(soon)
		stop()
		w.answers(204)
		setKeys([][]byte{[]byte("a fourth key of 24 bytes..")})
		stop = w.start()
		time.Sleep(soon)

		w.want()
		if n := w.metric("headcount_webhook_dropped_total", "reason", "sealed"); n != 1 {
			t.Errorf("%v events were dropped, want 1", n)
		}
	})
}

func setKeys(to [][]byte) { keys = to }

// More users leave at once than the outbox has room for, and than one question may name.
func TestManyUsersLeaveAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "user:*=http://r.test/")
		w.answers(503)
		defer w.start()()

		const all = 6000
		for i := range all {
			w.come(presence.User(i+1), fmt.Sprint("user", i))
		}

		time.Sleep(soon)
		for i := range all {
			w.leave(presence.User(i + 1))
		}

		time.Sleep(settle + soon)
		const over = 2*all - webhook.MaxQueue // or up to a batch more, if one was under way
		if n := w.metric("headcount_webhook_dropped_total", "reason", "full"); n < over || n > over+webhook.MaxBatch {
			t.Errorf("%v events were dropped, want %d, or up to a batch more", n, over)
		}

		w.answers(204)
		time.Sleep(10 * time.Minute)
		w.receiver.mu.Lock()
		defer w.receiver.mu.Unlock()

		left := 0
		for _, e := range w.events {
			if strings.HasPrefix(e, webhook.Offline) {
				left++
			}
		}
		if left != all {
			t.Errorf("%d of %d users are reported as offline", left, all)
		}
	})
}

func TestUsersWhoWaitAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "user:*=http://r.test/")
		defer w.start()()

		for i := range 100_001 {
			w.service.Arrived(presence.User(i+1), "ann")
		}

		if n := w.metric("headcount_webhook_left_out_total", "kind", "user"); n != 1 {
			t.Errorf("%v users are left out, want 1", n)
		}
	})
}
