package node

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/rs/zerolog"
	"pgregory.net/rapid"

	"headcount/internal/outage"
	"headcount/internal/testkit"
	"headcount/presence"
	"headcount/presence/heartbeat"
	"headcount/presence/presencemem"
)

func TestMain(m *testing.M) { testkit.Main(m) }

const (
	testPartitions = 3
	timeout        = 7 * time.Second
)

// rig is a running node over a store, and the gateways that talk to it.
type rig struct {
	t     testing.TB
	store presence.Store
	node  *Node

	mu      sync.Mutex
	replies map[string][]heartbeat.Reply // by gateway
	streams map[streamKey]uint64         // last number given
}

type streamKey struct {
	source    heartbeat.Source
	partition int
}

func newStore() *presencemem.Store {
	return presencemem.New(presencemem.Config{Partitions: testPartitions})
}

// run runs a node that owns all partitions, until the test ends or stop is called. It calls before(n) first.
func run(t testing.TB, store presence.Store, cfg Config, before func(*Node)) (n *Node, stop func()) {
	t.Helper()
	cfg.Partitions = testPartitions
	cfg.PresenceTimeout = timeout
	cfg.Log = zerolog.Nop()

	n, err := New(store, cfg)
	if err != nil {
		t.Fatal(err)
	}

	before(n)
	n.Own([]int{0, 1, 2})

	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = n.Run(ctx)
	}()
	stop = sync.OnceFunc(func() { cancel(); <-done })
	t.Cleanup(stop)

	return n, stop
}

// alone makes the node believe that no gateway lives.
func alone(n *Node) { n.Gateways(nil) }

// start runs a node that waits for no gateways, until the test ends or the returned function is called.
func start(t testing.TB, name string, store presence.Store) (*rig, func()) {
	t.Helper()
	return startBeside(t, name, store, nil)
}

// startBeside is start, but with live gateways. It calls the functions of before first.
func startBeside(
	t testing.TB, name string, store presence.Store, gateways []heartbeat.Source, before ...func(*Node),
) (*rig, func()) {
	t.Helper()
	r := &rig{t: t, store: store, replies: map[string][]heartbeat.Reply{}, streams: map[streamKey]uint64{}}

	reply := replies(func(gw string, a *heartbeat.Reply) {
		r.mu.Lock()
		r.replies[gw] = append(r.replies[gw], *a)
		r.mu.Unlock()
	})

	n, stop := run(t, store, Config{Name: name, Reply: reply}, func(n *Node) {
		n.Gateways(gateways)
		for _, do := range before {
			do(n)
		}
	})
	r.node = n

	synctest.Wait()
	return r, stop
}

func gw(name string) heartbeat.Source { return heartbeat.Source{Gateway: name, Incarnation: 1} }

func join(u presence.User, page string) heartbeat.Op {
	return heartbeat.Op{Kind: heartbeat.Join, User: u, Page: page}
}

func leave(u presence.User, page string, grace time.Duration) heartbeat.Op {
	return heartbeat.Op{Kind: heartbeat.Leave, User: u, Page: page, Grace: grace}
}

// op sends one op in the source's stream, and waits until it has taken effect.
func (r *rig) op(src heartbeat.Source, op heartbeat.Op) {
	r.t.Helper()
	key := streamKey{src, op.User.Partition(testPartitions)}
	r.streams[key]++

	r.deliver(&heartbeat.Beat{
		Source: src, Partition: key.partition, Stream: 1, First: r.streams[key], Ops: []heartbeat.Op{op},
	})
}

func (r *rig) alive(src heartbeat.Source, users ...presence.User) {
	r.t.Helper()
	for _, u := range users {
		r.deliver(&heartbeat.Beat{
			Source: src, Partition: u.Partition(testPartitions), Stream: 1, Alive: []presence.User{u},
		})
	}
}

func (r *rig) deliver(b *heartbeat.Beat) {
	r.t.Helper()
	if !r.node.Deliver(b) {
		r.t.Fatalf("beat for partition %d was not taken", b.Partition)
	}

	synctest.Wait()
}

func (r *rig) last(name string) heartbeat.Reply {
	r.t.Helper()

	r.mu.Lock()
	defer r.mu.Unlock()

	if len(r.replies[name]) == 0 {
		r.t.Fatalf("%s got no reply", name)
	}

	return r.replies[name][len(r.replies[name])-1]
}

// count returns the number of replies that a gateway got.
func (r *rig) count(name string) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.replies[name])
}

func (r *rig) want(page string, users int64) {
	r.t.Helper()

	counts, err := r.store.Counts(r.t.Context(), []string{page})
	if err != nil {
		r.t.Fatal(err)
	}

	if counts[0].Users != users {
		r.t.Fatalf("count of %q = %d, want %d", page, counts[0].Users, users)
	}
}

func TestNewRefusesSettingsThatCannotWork(t *testing.T) {
	reply := func(string, *heartbeat.Reply) {}
	for name, tc := range map[string]struct {
		cfg  Config
		want error
	}{
		"what is required": {Config{Name: "n", Reply: replies(reply), PresenceTimeout: 1}, nil},
		"no name":          {Config{Reply: replies(reply), PresenceTimeout: 1}, ErrConfig},
		"nobody to answer": {Config{Name: "n", PresenceTimeout: 1}, ErrConfig},
		"no partitions":    {Config{Name: "n", Reply: replies(reply), PresenceTimeout: 1, Partitions: -1}, ErrConfig},
		"no timeout":       {Config{Name: "n", Reply: replies(reply)}, ErrConfig},
		"negative timeout": {Config{Name: "n", Reply: replies(reply), PresenceTimeout: -1}, ErrConfig},
	} {
		t.Run(name, func(t *testing.T) {
			if _, err := New(newStore(), tc.cfg); !errors.Is(err, tc.want) {
				t.Fatalf("New(%+v) = %v, want %v", tc.cfg, err, tc.want)
			}
		})
	}
}

func TestJoinIsAcknowledgedWhenStored(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, _ := start(t, "n", newStore())

		r.op(gw("a"), join(1, "p"))

		a := r.last("a")
		counted := map[string]int64{}
		for _, c := range a.Counts {
			counted[c.Page] = c.Users
		}
		if a.Acked != 1 || !maps.Equal(counted, map[string]int64{"p": 1, presence.AllPages: 1}) {
			t.Fatalf("reply %+v, want op 1 acknowledged with a count of 1, also of the site", a)
		}
		r.want("p", 1)
		r.want(presence.AllPages, 1)

		r.op(gw("a"), join(4, "q")) // the partition of user 1
		if a := r.last("a"); a.Acked != 2 {
			t.Fatalf("reply %+v, want op 2 acknowledged", a)
		}
		r.want(presence.AllPages, 2)
	})
}

// Every site has a total of its own, also for the next owner.
func TestTotalsOfSites(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := newStore()
		r, stop := start(t, "n", store)

		shop, blog := presence.SiteOf("shop"), presence.SiteOf("blog")
		all := shop.Qualify(presence.AllPages)

		r.op(gw("a"), join(1, "p"))
		r.op(gw("a"), join(4, shop.Qualify("p"))) // the partition of user 1
		r.op(gw("a"), join(4, shop.Qualify("q")))
		r.op(gw("a"), join(7, shop.Qualify("q")))
		r.op(gw("a"), join(10, blog.Qualify("p")))

		r.want(presence.AllPages, 1)
		r.want(all, 2)
		r.want(blog.Qualify(presence.AllPages), 1)
		r.want("p", 1)
		r.want(shop.Qualify("p"), 1)
		r.want(shop.Qualify("q"), 2)

		r.op(gw("a"), leave(10, blog.Qualify("p"), 0))
		r.want(blog.Qualify(presence.AllPages), 0)

		stop()
		r, _ = start(t, "m", store)
		r.want(all, 2)
		r.want(presence.AllPages, 1)

		// The gateway has lost 4 meanwhile; it reports the others.
		r.op(gw("a"), join(1, "p"))
		r.op(gw("a"), join(7, shop.Qualify("q")))
		for range 6 {
			time.Sleep(2 * time.Second)
			r.alive(gw("a"), 1, 7)
		}

		r.want(all, 1)
		r.want(shop.Qualify("p"), 0)
		r.want(presence.AllPages, 1)

		r.op(gw("a"), leave(7, shop.Qualify("q"), 0))
		r.want(all, 0)
		r.want(presence.AllPages, 1)
	})
}

// Operations are applied in the order of their numbers, and each of them once.
func TestStreamIsAppliedInOrderAndOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, _ := start(t, "n", newStore())

		beat := func(stream, first uint64, ops ...heartbeat.Op) {
			r.deliver(&heartbeat.Beat{Source: gw("a"), Partition: 1, Stream: stream, First: first, Ops: ops})
		}

		beat(1, 2, join(1, "later"))
		if a := r.last("a"); !a.Reset {
			t.Fatalf("the reply to a stream that does not begin at 1 is %+v, want Reset", a)
		}

		beat(2, 1, join(1, "p"))
		beat(2, 3, leave(1, "p", 0)) // 2 is missing
		r.want("p", 1)

		beat(2, 1, join(1, "p"), join(1, "q"), leave(1, "p", 0))
		r.want("p", 0)
		r.want("q", 1)
		if a := r.last("a"); a.Acked != 3 {
			t.Fatalf("reply %+v, want 3 acknowledged", a)
		}

		beat(2, 1, join(1, "p"), join(1, "q")) // late copies
		r.want("p", 0)
		if a := r.last("a"); a.Acked != 3 || len(a.Counts) == 0 {
			t.Fatalf("reply to a late copy %+v, want 3 acknowledged again, with counts", a)
		}

		beat(1, 1, join(1, "p")) // an older stream
		r.want("p", 0)
	})
}

// A user of a gateway that sends no heartbeats ends with the timeout, and the gateway learns that the user is unknown.
func TestSilentUsersEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, _ := start(t, "n", newStore())
		r.op(gw("a"), join(1, "p"))
		r.op(gw("a"), join(2, "p"))

		for range 5 {
			time.Sleep(2 * time.Second)
			r.alive(gw("a"), 1)
		}

		r.want("p", 1)
		time.Sleep(timeout - 10*time.Millisecond)
		r.want("p", 1)

		time.Sleep(wheelTick + 20*time.Millisecond)
		r.want("p", 0)
		r.want(presence.AllPages, 0)

		r.alive(gw("a"), 1)
		if a := r.last("a"); !slices.Equal(a.Unknown, []presence.User{1}) {
			t.Fatalf("reply %+v, want user 1 unknown", a)
		}
	})
}

// TestAJoinThatIsRepeatedIsASignOfLife: the store is away, so a gateway repeats a join, and all heartbeats are lost.
// The user stays as long as the join is repeated, but no longer. A late copy of a join does not undo a leave.
func TestAJoinThatIsRepeatedIsASignOfLife(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &shaky{Store: newStore()}
		r, _ := start(t, "n", s)

		repeat := func(age time.Duration) {
			joins := []heartbeat.Op{join(1, "p"), join(4, "p")}
			r.deliver(&heartbeat.Beat{Source: gw("a"), Partition: 1, Stream: 1, First: 1, Ops: joins, Age: age})
		}

		s.set(func() { s.away = true })
		repeat(0)
		r.deliver(&heartbeat.Beat{
			Source: gw("a"), Partition: 1, Stream: 1, First: 3, Ops: []heartbeat.Op{leave(4, "p", 0)},
		})

		for range 20 {
			time.Sleep(time.Second)
			repeat(0)
		}

		s.set(func() { s.away = false })
		time.Sleep(3 * time.Second)
		r.want("p", 1)

		time.Sleep(timeout - 4*time.Second)
		repeat(timeout - time.Second) // sent before the gateway died, and delivered late
		time.Sleep(time.Second + wheelTick)
		r.want("p", 0)
	})
}

// A leave with a grace ends the presence when the grace is over, unless the user returns.
func TestLeaves(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, _ := start(t, "n", newStore())
		r.op(gw("a"), join(1, "p"))
		r.op(gw("a"), leave(1, "p", 0))
		r.want("p", 0)

		r.op(gw("a"), join(1, "p"))
		r.op(gw("a"), leave(1, "p", 2*time.Second))
		time.Sleep(1990 * time.Millisecond)
		r.want("p", 1)
		time.Sleep(wheelTick + 20*time.Millisecond)
		r.want("p", 0)

		r.op(gw("a"), join(1, "p"))
		r.op(gw("a"), leave(1, "p", 2*time.Second))
		time.Sleep(time.Second)
		r.op(gw("a"), join(1, "p")) // came back
		time.Sleep(2 * time.Second)
		r.want("p", 1)
		r.op(gw("a"), leave(1, "p", 0))
		r.want("p", 0)
		r.op(gw("a"), leave(1, "p", 0)) // absent already: no effect
		r.op(gw("a"), leave(9, "unheard of", time.Second))
		r.want("p", 0)
	})
}

// A user stays on a page until no gateway has the user there.
func TestUserOnTwoGateways(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, _ := start(t, "n", newStore())

		r.op(gw("a"), join(1, "p"))
		r.op(gw("b"), join(1, "p"))
		r.op(gw("b"), join(1, "q"))

		r.want("p", 1)
		r.want(presence.AllPages, 1)

		r.op(gw("b"), leave(1, "p", 0))
		r.want("p", 1)

		for range 4 { // a has died
			time.Sleep(2 * time.Second)
			r.alive(gw("b"), 1)
		}

		r.want("p", 0)
		r.want("q", 1)
		r.want(presence.AllPages, 1)
	})
}

// A user who returns at another gateway and leaves there without a grace is gone at once.
func TestReturnElsewhereEndsTheGrace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, _ := start(t, "n", newStore())

		r.op(gw("a"), join(1, "p"))
		r.op(gw("a"), leave(1, "p", 2*time.Second))

		r.op(gw("b"), join(1, "p"))
		r.want("p", 1)

		r.op(gw("b"), leave(1, "p", 0))
		r.want("p", 0)
	})
}

// A hold lasts for three timeouts, and can be renewed or ended. The number of holds of a user is bounded.
func TestHolds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, _ := start(t, "n", newStore())

		hold := func(page string, on bool) {
			t.Helper()
			if err := r.node.Hold(t.Context(), asked(1, page, on)); err != nil {
				t.Fatal(err)
			}
		}

		hold("p", true)
		hold("p", true)
		r.want("p", 1)

		time.Sleep(2 * timeout)
		hold("p", true)
		time.Sleep(3*timeout - 20*time.Millisecond)
		r.want("p", 1)

		time.Sleep(wheelTick + 40*time.Millisecond)
		r.want("p", 0)

		hold("p", true)
		r.op(gw("a"), join(1, "p"))

		hold("p", false)
		r.want("p", 1)

		r.op(gw("a"), leave(1, "p", 0))
		r.want("p", 0)

		hold("p", false)
		hold("never held", false)

		for i := range presence.MaxPages {
			hold(fmt.Sprint("p", i), true)
		}
		hold("p0", true)

		if err := r.node.Hold(t.Context(), asked(1, "one more", true)); !errors.Is(err, presence.ErrTooMany) {
			t.Fatalf("a hold beyond MaxPages = %v, want ErrTooMany", err)
		}
		r.want("one more", 0)
		r.want(presence.AllPages, 1)
	})
}

// A hold is not taken for a caller who has given up, even if the actor is the first to notice.
func TestNoHoldForACallerWhoGaveUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, _ := start(t, "n", newStore())

		ctx, cancel := context.WithCancel(t.Context())
		cancel()

		for range 50 { // the mailbox has room, so that only the context can stop the call
			if err := r.node.Hold(ctx, asked(1, "p", true)); !errors.Is(err, context.Canceled) {
				t.Fatalf("Hold = %v, want Canceled", err)
			}
		}
		r.want("p", 0)

		done := make(chan error, 1)
		r.node.actors[1].Load().post(&holdRequest{asked(1, "p", true), ctx, done})
		if err := <-done; !errors.Is(err, context.Canceled) {
			t.Fatalf("the actor answered %v, want Canceled", err)
		}
		synctest.Wait()
		r.want("p", 0)
	})
}

// While a partition cannot be written, callers give up, and others come. The actor keeps no answers for those who have
// given up, however long it lasts.
func TestNoAnswerForACallerWhoGaveUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &faulty{shaky: &shaky{Store: newStore()}, broken: map[int]bool{}}
		r, _ := start(t, "n", s)
		s.set(func() { s.broken[1] = true })

		for range 100 {
			ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
			if err := r.node.Hold(ctx, asked(1, "p", true)); !errors.Is(err, context.DeadlineExceeded) {
				t.Fatalf("Hold = %v, want DeadlineExceeded", err)
			}
			cancel()
		}
		synctest.Wait()

		if kept := len(r.node.actors[1].Load().pending); kept > 1 {
			t.Errorf("%d answers wait, and nobody waits for them", kept)
		}

		s.set(func() { clear(s.broken) })
		time.Sleep(outage.MaxPause)
		r.want("p", 1) // it may still take effect
	})
}

// A former owner that does not know its successor is fenced at its next write, and the successor keeps the users whom
// gateways confirm, and the holds.
func TestTakeover(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := newStore()
		old, _ := start(t, "old", store)

		old.op(gw("a"), join(1, "p"))
		old.op(gw("a"), join(2, "p"))
		if err := old.node.Hold(t.Context(), asked(3, "p", true)); err != nil {
			t.Fatal(err)
		}

		next, _ := start(t, "next", store)
		next.want("p", 3)

		// The former owner learns of its successor at its first write.
		old.op(gw("a"), join(7, "p"))
		if old.node.Owns(1) {
			t.Fatal("the fenced node still owns the partition")
		}
		next.want("p", 3)

		old.node.Own(nil) // the former owner is told to own nothing

		// A user whom the gateway confirms stays. Every other user stays for one full timeout.
		next.alive(gw("a"), 1)
		if a := next.last("a"); !slices.Equal(a.Unknown, []presence.User{1}) {
			t.Fatalf("reply %+v, want user 1 unknown, so that the gateway repeats its joins", a)
		}

		next.op(gw("a"), join(1, "p"))
		for range 5 {
			time.Sleep(2 * time.Second)
			next.alive(gw("a"), 1)
		}
		next.want("p", 2) // 1, and the hold of 3

		next.op(gw("a"), leave(1, "p", 0))
		next.want("p", 1)

		time.Sleep(3 * timeout)
		next.want("p", 0)
	})
}

// A new stream means that the gateway sent operations to another owner meanwhile, which this owner lacks. The gateway
// reports all its users again, and presences that it does not report end.
func TestNewStreamIsDoubted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, _ := start(t, "n", newStore())

		r.op(gw("a"), join(1, "left meanwhile"))
		r.op(gw("a"), join(1, "p"))
		r.op(gw("b"), join(1, "q"))

		partition := presence.User(1).Partition(testPartitions)
		r.deliver(&heartbeat.Beat{
			Source: gw("a"), Partition: partition, Stream: 3, First: 1, Ops: []heartbeat.Op{join(1, "p")},
		})
		r.want("left meanwhile", 1)

		for range 5 {
			time.Sleep(time.Second)
			r.deliver(&heartbeat.Beat{Source: gw("a"), Partition: partition, Alive: []presence.User{1}})
			r.deliver(&heartbeat.Beat{Source: gw("b"), Partition: partition, Alive: []presence.User{1}})
		}

		r.want("left meanwhile", 0)
		r.want("p", 1)
		r.want("q", 1)
		r.want(presence.AllPages, 1)
	})
}

// One of two gateways confirms a user to the new owner, and then the user leaves there, before the other gateway has
// confirmed the user. The user stays.
func TestTakeoverWaitsForAllGateways(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := newStore()

		old, stop := start(t, "old", store)
		old.op(gw("a"), join(1, "p"))
		old.op(gw("b"), join(1, "p"))
		stop()

		next, _ := start(t, "next", store)
		next.op(gw("a"), join(1, "p"))
		next.op(gw("a"), leave(1, "p", 0))
		next.want("p", 1)

		time.Sleep(confirmTimeout / 2)
		next.op(gw("b"), join(1, "p"))
		time.Sleep(confirmTimeout)
		next.want("p", 1)

		next.op(gw("b"), leave(1, "p", 0))
		next.want("p", 0)
	})
}

// The next owner knows which users are present by a hold alone. Such a user is gone when the hold ends, without waiting
// for gateways. A user with a connection stays, whichever came first.
func TestEndOfAHoldAfterATakeover(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := newStore()

		r, stop := start(t, "old", store)

		hold := func(u presence.User, on bool) {
			t.Helper()
			if err := r.node.Hold(t.Context(), asked(u, "p", on)); err != nil {
				t.Fatal(err)
			}
		}

		hold(1, true)
		hold(2, true)
		r.op(gw("a"), join(2, "p"))
		r.op(gw("a"), join(3, "p"))
		hold(3, true)
		hold(4, true)
		r.op(gw("a"), join(4, "p"))
		r.op(gw("a"), leave(4, "p", 0))
		hold(5, true) // this hold is not ended below

		stop()
		time.Sleep(time.Second)
		r, stop = start(t, "next", store)
		r.want("p", 5)

		for u := range presence.User(4) {
			hold(u+1, false)
		}
		r.want("p", 3) // 2 and 3 may still be connected, and 5 is held

		stop()
		r, _ = start(t, "last", store)

		r.op(gw("a"), join(2, "p"))
		for range 5 {
			time.Sleep(time.Second)
			r.alive(gw("a"), 2)
		}
		r.want("p", 2) // no gateway has confirmed 3

		for range 14 {
			time.Sleep(time.Second)
			r.alive(gw("a"), 2)
		}
		r.want("p", 2)

		time.Sleep(time.Second + wheelTick + 20*time.Millisecond)
		r.want("p", 1)
	})
}

// A former owner that does not know its successor must not answer that there is no hold.
func TestEndOfAHoldNeedsTheOwner(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := newStore()

		zombie, _ := start(t, "zombie", store)
		owner, _ := start(t, "owner", store)

		if err := owner.node.Hold(t.Context(), asked(1, "p", true)); err != nil {
			t.Fatal(err)
		}

		if err := zombie.node.Hold(t.Context(), asked(1, "p", false)); !errors.Is(err, presence.ErrNotOwner) {
			t.Fatalf("the zombie's answer = %v, want presence.ErrNotOwner", err)
		}
		owner.want("p", 1)
	})
}

// A former owner that does not know its successor must not acknowledge a join, even of a user whom it has already: the
// successor may have removed the user, and then the counts of the acknowledgement lack the user.
func TestAJoinThatChangesNothingNeedsTheOwner(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := newStore()

		zombie, _ := start(t, "zombie", store)
		zombie.op(gw("a"), join(1, "p"))
		zombie.op(gw("b"), join(1, "p"))
		if acked := zombie.last("b").Acked; acked != 1 {
			t.Fatalf("the owner acknowledged %d joins, want 1", acked)
		}

		start(t, "owner", store)
		zombie.op(gw("c"), join(1, "p"))

		if n := zombie.count("c"); n != 0 {
			t.Errorf("a former owner acknowledged a join: %+v", zombie.last("c"))
		}
	})
}

// A node that has lost a partition gives it up when it checks its claims, even if no user joins or leaves there.
// (Invariant 4.)
func TestCheckFindsOutWhatWasLost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := newStore()

		zombie, _ := start(t, "zombie", store)
		start(t, "owner", store)

		zombie.node.Own([]int{1}) // it has 1 already, so it claims nothing
		synctest.Wait()
		if !zombie.node.Owns(1) {
			t.Fatal("the former owner gave the partition up before it checked its claims")
		}

		zombie.node.Check(0, 1)
		synctest.Wait()
		if zombie.node.Owns(1) {
			t.Fatal("the former owner keeps the partition after it checked its claims")
		}
		zombie.node.Own(nil)
	})
}

// A node is cut off from the store, which is restarted meanwhile. The node's data is old, so it takes nothing back from
// the owner that replaced it.
func TestANodeThatWasCutOffTakesNothingBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := newStore()
		s := &shaky{Store: store}
		first, _ := start(t, "first", s)

		if err := first.node.Hold(t.Context(), asked(1, "p", true)); err != nil {
			t.Fatal(err)
		}

		s.set(func() { s.away = true })

		next, _ := start(t, "next", &shaky{Store: store, generation: 1})
		if err := next.node.Hold(t.Context(), asked(1, "p", false)); err != nil {
			t.Fatal(err)
		}

		s.set(func() {
			s.away = false
			s.generation = 1
		})

		for range 10 {
			next.want("p", 0)
			time.Sleep(generationPoll / 2)
		}
	})
}

// A node gets its partitions back after the store has lost them and another node has owned them. It keeps the users of
// both, since their gateways confirm them.
func TestMembersOfAnOwnerInBetweenStay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &shaky{Store: newStore()}

		first, _ := start(t, "first", s)

		first.op(gw("a"), join(1, "p"))
		s.set(func() { s.away = true }) // first does not notice the loss

		emptied := &shaky{Store: newStore(), generation: 1}
		_, stop := start(t, "before", emptied) // epochs keep growing in a store that was emptied
		stop()

		between, stop := start(t, "between", emptied)
		between.op(gw("b"), join(4, "p")) // of the same partition
		between.want("p", 1)
		stop()

		s.set(func() {
			s.Store = emptied.Store
			s.away = false
			s.generation = 1
		})
		time.Sleep(generationPoll + 2100*time.Millisecond)
		first.want("p", 1)

		clear(first.streams) // the new owner knows no streams
		first.op(gw("a"), join(1, "p"))
		first.op(gw("b"), join(4, "p"))

		for range 5 {
			time.Sleep(2 * time.Second)
			first.alive(gw("a"), 1)
			first.alive(gw("b"), 4)
		}

		first.want("p", 2)
	})
}

// wantStale checks at once, without waiting, whether the counts are stale.
func (r *rig) wantStale(want bool) {
	r.t.Helper()
	counts, err := r.store.Counts(r.t.Context(), []string{"p"})
	if err != nil || counts[0].Stale != want {
		r.t.Fatalf("Counts = %+v, %v; want stale %t", counts, err, want)
	}
}

// The store has lost the data of some partitions. Their owner declares them complete when every live gateway has
// reported all its users.
func TestEmptiedPartitionIsCompleteWhenAllHaveTold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, _ := startBeside(t, "n", newStore(), []heartbeat.Source{gw("a"), gw("b")})

		told := func(src heartbeat.Source, partition int, ops ...heartbeat.Op) {
			r.deliver(&heartbeat.Beat{
				Source: src, Partition: partition, Stream: 1, First: 1, Ops: ops, Whole: uint64(len(ops)) + 1,
			})
		}

		if a := r.last("a"); !a.Ask {
			t.Fatalf("gateway a got %+v, want a request to report its users", a)
		}

		told(gw("a"), 1, join(1, "p"), join(4, "p"))
		told(gw("a"), 0)
		told(gw("a"), 2)
		told(gw("b"), 0)
		told(gw("b"), 2)

		r.want("p", 2)
		r.wantStale(true)

		before := r.count("b")
		time.Sleep(askInterval * 3)
		if got := r.count("b"); got < before+2 {
			t.Fatalf("gateway b was asked %d times, want at least 2", got-before)
		}

		r.deliver(&heartbeat.Beat{
			Source: gw("b"), Partition: 1, Stream: 1, First: 1, Ops: []heartbeat.Op{join(7, "p")}, Whole: 3,
		})
		r.wantStale(true) // the gateway has reported only a part of its users
		r.deliver(&heartbeat.Beat{
			Source: gw("b"), Partition: 1, Stream: 1, First: 2, Ops: []heartbeat.Op{join(10, "p")}, Whole: 3,
		})

		r.wantStale(false)
		r.want("p", 4)
		before = r.count("b")
		if before == 0 {
			t.Fatal("gateway b got no reply at all")
		}

		time.Sleep(3 * askInterval)
		if got := r.count("b"); got != before {
			t.Fatalf("gateway b got %d more replies though it has reported all its users", got-before)
		}
	})
}

// The owner of users in their grace has died, and the store has lost everything. Only the gateway still knows these
// users.
func TestGracesOfAnEmptiedPartition(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, _ := startBeside(t, "n", newStore(), []heartbeat.Source{gw("a")})

		for partition := range testPartitions {
			b := &heartbeat.Beat{Source: gw("a"), Partition: partition, Stream: 1, First: 1, Whole: 1}
			if partition == 1 {
				b.Ops = []heartbeat.Op{
					join(1, "q"), leave(1, "p", 2*time.Second), leave(4, "p", 2*time.Second), leave(7, "p", 0),
				}
				b.Whole = 5
			}
			r.deliver(b)
		}

		r.wantStale(false)
		r.want("p", 2)

		time.Sleep(time.Second)
		r.op(gw("b"), join(4, "p"))

		time.Sleep(2 * time.Second)
		r.want("p", 1)
		r.want("q", 1)

		r.deliver(&heartbeat.Beat{
			Source: gw("a"), Partition: 1, Stream: 1, First: 5, Ops: []heartbeat.Op{leave(10, "p", 2*time.Second)},
		})
		r.want("p", 1) // a leave adds nobody: the owner now knows all users
	})
}

// A gateway that is gone from the list of live gateways is no longer waited for.
func TestAGatewayThatIsGoneIsNotWaitedFor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, _ := startBeside(t, "n", newStore(), []heartbeat.Source{gw("a")})

		time.Sleep(time.Minute)
		r.wantStale(true)

		r.node.Gateways(nil)
		time.Sleep(askInterval + wheelTick)
		r.wantStale(false)
	})
}

// A gateway that died, or was suspended, may come back with its users. The owner waits for it as long as its users
// would be counted if the store had lost nothing.
func TestAGatewayThatDiedIsWaitedForUntilTheTimeout(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		died := func(n *Node) {
			gateway := presence.Process{Name: "a", Incarnation: 1, Roles: []string{presence.RoleGateway}}
			n.Died(gateway, time.Now().Add(-time.Second))
			n.Died(presence.Process{Name: "no gateway", Roles: []string{presence.RolePresence}}, time.Now())
		}

		r, _ := startBeside(t, "n", newStore(), nil, died)
		time.Sleep(timeout - 2*time.Second - lastRenewal)
		r.wantStale(true)

		time.Sleep(time.Second + askInterval + wheelTick)
		r.wantStale(false)
	})

	synctest.Test(t, func(t *testing.T) { // the gateway was not dead
		r, _ := startBeside(t, "n", newStore(), nil, func(n *Node) {
			n.Died(presence.Process{Name: "a", Incarnation: 1, Roles: []string{presence.RoleGateway}}, time.Now())
		})

		r.node.Gateways([]heartbeat.Source{gw("a")})
		for id := range testPartitions {
			r.wantStale(true)
			r.deliver(&heartbeat.Beat{Source: gw("a"), Partition: id, Stream: 1, First: 1, Whole: 1})
		}
		r.wantStale(false)
	})
}

// The node waits only for one timeout for a gateway that has a lease and reports nothing. It waits longer while the
// gateway makes progress, and the time in which the gateway could not learn of the owners does not count.
func TestAMuteGatewayIsNotWaitedFor(t *testing.T) {
	live := []heartbeat.Source{gw("a"), gw("b")}

	renew := func(r *rig, d time.Duration) {
		for end := time.Now().Add(d); time.Now().Before(end); time.Sleep(900 * time.Millisecond) {
			r.node.Gateways(live)
		}
	}

	begin := func(t *testing.T, log *strings.Builder) *rig {
		r, _ := startBeside(t, "n", newStore(), live, func(n *Node) { n.cfg.Log = zerolog.New(log) })
		for id := range testPartitions {
			r.deliver(&heartbeat.Beat{Source: gw("b"), Partition: id, Stream: 1, First: 1, Whole: 1})
		}
		return r
	}

	synctest.Test(t, func(t *testing.T) {
		var log strings.Builder
		r := begin(t, &log)

		renew(r, timeout-time.Second)
		r.wantStale(true)

		renew(r, 3*time.Second)
		r.wantStale(false)

		if n := strings.Count(log.String(), `"gateway":"a"`); n != 1 || strings.Contains(log.String(), `"b"`) {
			t.Errorf("the log names gateway a %d times, want once, and never b: %s", n, log.String())
		}
	})

	synctest.Test(t, func(t *testing.T) { // the gateway reports 30 users, one a second
		var log strings.Builder
		r := begin(t, &log)

		for _, id := range []int{0, 2} {
			r.deliver(&heartbeat.Beat{Source: gw("a"), Partition: id, Stream: 1, First: 1, Whole: 1})
		}

		var users []presence.User
		for n := uint64(1); n <= 30; n++ {
			users = append(users, presence.User(1+3*n))
			r.deliver(&heartbeat.Beat{
				Source: gw("a"), Partition: 1, Stream: 1, First: n, Whole: 31,
				Ops: []heartbeat.Op{join(users[n-1], "p")}, Alive: users,
			})
			r.wantStale(n < 30)
			renew(r, time.Second)
		}

		if log.String() != "" {
			t.Errorf("the log has %q, want nothing", log.String())
		}
	})

	synctest.Test(t, func(t *testing.T) { // the leases are not read for a long time
		var log strings.Builder
		r := begin(t, &log)

		renew(r, timeout-time.Second)

		time.Sleep(3 * timeout)
		r.wantStale(true)

		renew(r, timeout-time.Second)
		r.wantStale(true)

		if log.String() != "" {
			t.Errorf("the log has %q, want nothing", log.String())
		}
	})
}

// The members that a new owner loads stay while a live gateway has not reported: it may have them, and not know the new
// owner yet. When all gateways have reported, the other members end; after the death of the former owner they end when
// the rest of the timeout has passed.
func TestInheritedMembersWaitForTheGateways(t *testing.T) {
	for name, tc := range map[string]struct {
		died bool
		stay time.Duration
	}{
		"after a handover": {false, timeout * 2 / 3},
		"after a death":    {true, timeout - deathDetection},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				store := newStore()

				old, stop := start(t, "old", store)
				old.op(gw("a"), join(1, "p"))
				old.op(gw("b"), join(4, "p"))
				stop()

				r, _ := startBeside(t, "next", store, []heartbeat.Source{gw("b")}, func(n *Node) {
					if tc.died {
						n.Died(presence.Process{Name: "dead"}, time.Now())
					}
				})
				r.wantStale(false) // the store has the whole partition

				time.Sleep(time.Minute)
				r.want("p", 2)

				r.deliver(&heartbeat.Beat{
					Source: gw("b"), Partition: 1, Stream: 1, First: 1, Ops: []heartbeat.Op{join(4, "p")}, Whole: 2,
				})
				time.Sleep(askInterval + wheelTick)
				r.want("p", 1)

				stopped, stop2 := startBeside(t, "last", store, []heartbeat.Source{gw("b")}, func(n *Node) {
					if tc.died {
						n.Died(presence.Process{Name: "dead"}, time.Now())
					}
				})

				stopped.deliver(&heartbeat.Beat{Source: gw("b"), Partition: 1, Stream: 2, First: 1, Whole: 1})

				time.Sleep(tc.stay - 50*time.Millisecond)
				stopped.want("p", 1)

				time.Sleep(50*time.Millisecond + 2*wheelTick)
				stopped.want("p", 0)
				stop2()
			})
		})
	}
}

// forgetful is a store that loses the write that declares a partition complete.
type forgetful struct {
	*presencemem.Store
	mu      sync.Mutex
	forgets int // how many more completions are dropped
}

func (s *forgetful) Write(ctx context.Context, changes []presence.Change) []presence.Outcome {
	s.mu.Lock()
	defer s.mu.Unlock()

	changes = slices.Clone(changes)
	for i := range changes {
		if changes[i].Complete && s.forgets > 0 {
			s.forgets--
			changes[i].Complete = false
		}
	}

	return s.Store.Write(ctx, changes)
}

// A partition that is not complete in the store for some seconds, whatever the cause, is declared complete again.
func TestPartitionsThatAreNotCompleteAreDeclaredAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, _ := start(t, "n", &forgetful{Store: newStore(), forgets: testPartitions + 1})

		r.wantStale(true)

		time.Sleep(2*generationPoll + 100*time.Millisecond)
		r.wantStale(false)
	})
}

// shaky is a store that can be away, or lose everything.
type shaky struct {
	presence.Store
	mu         sync.Mutex
	away       bool
	generation uint64
}

func (s *shaky) set(f func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f()
}

func (s *shaky) now() (presence.Store, bool, uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.Store, s.away, s.generation
}

func (s *shaky) Generation(context.Context) (uint64, error) {
	_, away, g := s.now()
	if away {
		return 0, presence.ErrUnavailable
	}
	return g, nil
}

func (s *shaky) Claim(ctx context.Context, owner string, partitions []int, again bool) ([]presence.Claim, error) {
	store, away, g := s.now()
	if away {
		return nil, presence.ErrUnavailable
	}

	claims, err := store.Claim(ctx, owner, partitions, again)
	for i := range claims {
		claims[i].Generation = g
	}

	return claims, err
}

func (s *shaky) Incomplete(ctx context.Context, partitions []int, everywhere bool) ([]int, error) {
	store, _, _ := s.now()
	return store.Incomplete(ctx, partitions, everywhere)
}

func (s *shaky) Counts(ctx context.Context, pages []string) ([]presence.Count, error) {
	store, _, _ := s.now()
	return store.Counts(ctx, pages)
}

func (s *shaky) Write(ctx context.Context, changes []presence.Change) []presence.Outcome {
	store, away, g := s.now()
	outcomes := make([]presence.Outcome, len(changes))

	var good []presence.Change
	var at []int

	for i, c := range changes {
		switch {
		case away:
			outcomes[i].Err = presence.ErrUnavailable
		case c.Generation != g:
			outcomes[i].Err = presence.ErrLost
		default:
			good = append(good, c)
			at = append(at, i)
		}
	}

	for i, o := range store.Write(ctx, good) {
		outcomes[at[i]] = o
	}

	return outcomes
}

// While the store is away nothing is acknowledged. When it is back, everything is written and acknowledged.
func TestStoreAwayLosesNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &shaky{Store: newStore()}
		r, _ := start(t, "n", s)

		r.op(gw("a"), join(1, "p"))
		r.op(gw("a"), join(2, "p"))

		s.set(func() { s.away = true })
		before := r.count("a")

		r.op(gw("a"), join(3, "p"))
		r.op(gw("a"), leave(1, "p", 0))
		for range 15 {
			time.Sleep(2 * time.Second)
			r.alive(gw("a"), 2, 3)
		}

		if got := r.count("a"); got != before {
			t.Fatalf("%d acknowledgements while the store was away: %+v", got-before, r.last("a"))
		}
		r.want("p", 2)

		s.set(func() { s.away = false })
		time.Sleep(3 * time.Second)
		r.want("p", 2)
		r.want(presence.AllPages, 2)

		if got := r.count("a"); got == before {
			t.Fatal("no acknowledgement after the store came back")
		}
	})
}

// A store that comes back with old data is corrected: users who have left are removed.
func TestStoreThatLostTheNewestIsWrittenAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		past := &shaky{Store: newStore(), generation: 1}

		old, stop := start(t, "n", past)
		old.op(gw("a"), join(1, "left since"))
		shop := presence.SiteOf("shop")
		old.op(gw("a"), join(2, shop.Qualify("left since")))
		stop()

		s := &shaky{Store: newStore()}
		for range 3 { // the epochs of this store get higher than those of the old one
			_, stop := start(t, "n", s)
			stop()
		}

		r, _ := start(t, "n", s)
		r.op(gw("a"), join(1, "p"))

		s.set(func() {
			s.Store = past.Store
			s.generation = 1
		})
		r.want("left since", 1)
		r.want(shop.Qualify(presence.AllPages), 1)

		time.Sleep(generationPoll + 100*time.Millisecond)
		r.want("left since", 0)
		r.want("p", 1)
		r.want(presence.AllPages, 1)
		r.want(shop.Qualify("left since"), 0)
		r.want(shop.Qualify(presence.AllPages), 0)
	})
}

// A store that comes back empty gets everything again, with and without a write that notices the loss.
func TestStoreThatLostEverythingIsWrittenAgain(t *testing.T) {
	for name, write := range map[string]bool{"noticed by a write": true, "noticed without a write": false} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := &shaky{Store: newStore()}

				r, _ := start(t, "n", s)
				r.op(gw("a"), join(1, "p"))
				r.op(gw("a"), join(2, "p"))
				r.op(gw("a"), join(2, "q"))

				s.set(func() {
					s.Store = newStore()
					s.generation++
				})
				r.want("p", 0)

				if write {
					r.op(gw("a"), join(3, "p"))
					r.op(gw("a"), leave(2, "q", 0))
				}

				time.Sleep(generationPoll + 100*time.Millisecond)
				if write {
					r.want("p", 3)
					r.want("q", 0)
				} else {
					r.want("p", 2)
					r.want("q", 1)
				}

				counts, err := s.Counts(t.Context(), []string{"p"})
				if err != nil || counts[0].Stale {
					t.Fatalf("Counts = %+v, %v; want every partition complete again", counts, err)
				}

				next, _ := start(t, "next", s) // the next owner finds all members
				if write {
					next.want("p", 3)
				} else {
					next.want("p", 2)
				}
			})
		})
	}
}

// A suspension of the process advances the clock of the node by maxAdvance at most, and is reported.
func TestTimeStandsStillWithTheProcess(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := clock{}
		c.last.Store(&clockReading{real: time.Now()})

		time.Sleep(20 * time.Second) // nothing ticks, as while the process is suspended
		if got := c.now(); got != maxAdvance {
			t.Fatalf("after a suspension the clock shows %s, want %s", got, maxAdvance)
		}

		ctx, cancel := context.WithCancel(t.Context())
		told := make(chan time.Duration, 10)
		go c.run(ctx, nil, func(d time.Duration) { told <- d })

		time.Sleep(10*clockTick + clockTick/2)
		synctest.Wait()
		if got := c.now(); got != maxAdvance+9*clockTick+clockTick/2 {
			t.Fatalf("ten ticks later the clock shows %s, want %s", got, maxAdvance+9*clockTick+clockTick/2)
		}

		if d := <-told; d != 20*time.Second+clockTick-maxAdvance || len(told) != 0 {
			t.Fatalf("a suspension of %s was reported, want %s", d, 20*time.Second+clockTick-maxAdvance)
		}

		c.stop()
		time.Sleep(clockTick)
		synctest.Wait()

		stopped := c.now()
		time.Sleep(20 * clockTick)
		synctest.Wait()
		if got := c.now(); got != stopped || len(told) != 0 {
			t.Fatalf("the stopped clock went on by %s and reported %d more suspensions", got-stopped, len(told))
		}

		cancel()
	})
}

// A long time between New and Run, in which the process opens its other stores, is no suspension.
func TestALongStartIsNoSuspension(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, _ := startBeside(t, "n", newStore(), nil, func(*Node) { time.Sleep(20 * time.Second) })

		time.Sleep(time.Second)
		if n := r.node.suspensions.Load(); n != 0 {
			t.Errorf("%d suspensions, want 0", n)
		}
	})
}

// A node that hands over lets no presence expire: the next owner may already have received the return of the user.
func TestHandingOverEndsNoPresence(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := newStore()
		r, stop := start(t, "n", store)

		r.op(gw("a"), join(1, "p"))
		r.op(gw("a"), join(4, "p"))
		r.op(gw("a"), leave(1, "p", 2*time.Second))

		time.Sleep(time.Second)
		r.node.HandOver()
		time.Sleep(timeout)
		r.want("p", 2)

		r.op(gw("a"), leave(4, "p", 0)) // a leave without a grace is no matter of time
		r.want("p", 1)

		stop()
		next, _ := start(t, "next", store)
		next.want("p", 1)

		time.Sleep(timeout)
		next.want("p", 0)
	})
}

// A partition that changes its owner twice in a row has one trial, not two. A user who is reconnecting
// through another gateway has a third of the timeout in any case.
func TestATrialGoesOnWithTheNextOwner(t *testing.T) {
	const trial, least = timeout * 2 / 3, timeout / 3
	for held, left := range map[time.Duration]time.Duration{

		time.Second:         trial - time.Second,
		trial - time.Second: least,
		trial:               trial, // the trial was over, so the next owner begins a new one
	} {
		t.Run(held.String(), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				store := newStore()

				r, stop := start(t, "first", store)
				r.op(gw("a"), join(1, "p"))
				stop()

				// The process has ended, and its end is not reported as a death: without Died, no user ends early.
				time.Sleep(time.Minute)

				_, stop = startBeside(t, "second", store, []heartbeat.Source{gw("b")})
				time.Sleep(held)
				stop()

				r, _ = start(t, "third", store)
				time.Sleep(left - 50*time.Millisecond)
				r.want("p", 1)

				time.Sleep(50*time.Millisecond + 2*wheelTick)
				r.want("p", 0)
			})
		})
	}
}

// A node that hands over gives up a partition that another node claims, and does not claim it back.
func TestANodeThatHandsOverTakesNothingBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := newStore()
		r, _ := start(t, "n", store)
		r.op(gw("a"), join(1, "p"))

		r.node.HandOver()
		next, _ := start(t, "next", store)
		r.op(gw("a"), join(4, "p")) // this write meets the claim

		time.Sleep(time.Minute)
		if r.node.Owns(1) || !next.node.Owns(1) {
			t.Fatalf("the node that hands over owns the partition: %t; the next one: %t",
				r.node.Owns(1), next.node.Owns(1))
		}
	})
}

// leavesWhileTaking has a node hand over while it takes partitions over, and makes each takeover long.
type leavesWhileTaking struct {
	*shaky
	node  *Node
	asked int // calls of Generation; guarded by mu
}

func (s *leavesWhileTaking) Generation(ctx context.Context) (uint64, error) {
	s.mu.Lock()
	s.asked++
	if s.asked == 2 {
		s.node.HandOver()
	}
	s.mu.Unlock()

	return s.shaky.Generation(ctx)
}

func (s *leavesWhileTaking) Load(ctx context.Context, claims []presence.Claim) ([]presence.Snapshot, error) {
	time.Sleep(generationPoll + time.Second)
	return s.shaky.Load(ctx, claims)
}

// A node that hands over while it takes partitions over does not ask the store in a loop.
func TestANodeThatHandsOverWhileItTakesOverAsksSeldom(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := &leavesWhileTaking{shaky: shaky40()}
		n, err := New(store, configOf40())
		if err != nil {
			t.Fatal(err)
		}

		store.node = n
		n.Own(firstPartitions(40))

		ctx, stop := context.WithCancel(t.Context())
		ended := make(chan struct{})
		go func() { defer close(ended); _ = n.Run(ctx) }()

		time.Sleep(10 * generationPoll)
		stop()
		<-ended

		if store.asked > 12 {
			t.Errorf("in %s the store was asked %d times for its generation, want at most 12",
				10*generationPoll, store.asked)
		}
	})
}

// A node that is told to own fewer partitions gives the others up, and leaves their counts to the next owner.
func TestPlannedStopOfAPartition(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := newStore()
		r, _ := start(t, "n", store)
		r.op(gw("a"), join(1, "p"))

		r.node.Own([]int{0, 2})
		synctest.Wait()
		if r.node.Owns(1) || !r.node.Owns(0) {
			t.Fatalf("the node owns partition 1: %t, and 0: %t; want 0 alone", r.node.Owns(1), r.node.Owns(0))
		}

		if r.node.Deliver(&heartbeat.Beat{Partition: 1}) {
			t.Fatal("a beat was taken for a partition that is not owned")
		}

		if err := r.node.Hold(t.Context(), asked(1, "p", true)); !errors.Is(err, presence.ErrNotOwner) {
			t.Fatalf("Hold = %v, want presence.ErrNotOwner", err)
		}
		r.want("p", 1) // the next owner decides

		r.node.Own([]int{0, 1, 2})
		synctest.Wait()
		r.want("p", 1)

		time.Sleep(timeout + time.Second)
		r.want("p", 0)
	})
}

// TestAnyHistory plays random joins, leaves, heartbeats and pauses of several gateways against a model that knows the
// present users of each page.
func TestAnyHistory(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		synctest.Test(t, func(t *testing.T) { history(t, rt) })
	})
}

func history(t *testing.T, rt *rapid.T) {
	r, stop := start(t, "n", newStore())
	defer stop()

	const grace = 2 * time.Second
	type key struct {
		source heartbeat.Source
		user   presence.User
		page   string
	}

	there := map[key]bool{}
	sources := []heartbeat.Source{gw("a"), gw("b"), gw("c")}

	for range rapid.IntRange(1, 60).Draw(rt, "steps") {
		k := key{
			rapid.SampledFrom(sources).Draw(rt, "source"),
			presence.User(rapid.Uint64Range(0, 5).Draw(rt, "user")),
			rapid.SampledFrom([]string{"p", "q"}).Draw(rt, "page"),
		}

		switch rapid.IntRange(0, 3).Draw(rt, "what") {
		case 0, 1:
			r.op(k.source, join(k.user, k.page))
			there[k] = true
		case 2:
			r.op(k.source, leave(k.user, k.page, time.Duration(rapid.IntRange(0, 1).Draw(rt, "grace"))*grace))
			delete(there, k)
		case 3:
			time.Sleep(time.Duration(rapid.IntRange(1, 1000).Draw(rt, "ms")) * time.Millisecond)
		}

		for k := range there { // live users send heartbeats often enough
			r.alive(k.source, k.user)
		}
	}

	time.Sleep(grace + wheelTick)
	for k := range there {
		r.alive(k.source, k.user)
	}

	users := map[presence.User]bool{}
	pages := map[string]map[presence.User]bool{"p": {}, "q": {}}
	for k := range there {
		users[k.user] = true
		pages[k.page][k.user] = true
	}

	for page, want := range pages {
		r.want(page, int64(len(want)))
	}
	r.want(presence.AllPages, int64(len(users)))

	time.Sleep(timeout + wheelTick)
	r.want(presence.AllPages, 0)

	stop() // the actors have ended, so the test may read their state
	for i := range r.node.actors {
		if p := r.node.actors[i].Load(); len(p.users) != 0 || len(p.pages) != 1 {
			rt.Fatalf("without users, partition %d still remembers %d users and %d pages",
				i, len(p.users), len(p.pages)-1)
		}
	}
}

// slowLoad lets one Load of partitions through for each value in let.
type slowLoad struct {
	*shaky
	asked chan int // the number of partitions in a Load
	let   chan struct{}
}

func (s *slowLoad) Load(ctx context.Context, claims []presence.Claim) ([]presence.Snapshot, error) {
	s.asked <- len(claims)
	select {
	case <-s.let:
		return s.shaky.Load(ctx, claims)
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// A node that takes over many partitions serves the first ones while it loads the others. It claims each group only
// when its turn comes: until then its last owner still serves it.
func TestTheFirstPartitionsServeEarly(t *testing.T) {
	store := &slowLoad{shaky40(), make(chan int), make(chan struct{})}
	n, err := New(store, configOf40())
	if err != nil {
		t.Fatal(err)
	}

	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() { defer close(ended); _ = n.Run(ctx) }()

	all := make([]int, 40)
	for i := range all {
		all[i] = i
	}
	n.Own(all)

	owned := func() (k int) {
		for i := range all {
			if n.Owns(i) {
				k++
			}
		}
		return k
	}

	for i, want := range []int{claimGroup, claimGroup, 40 - 2*claimGroup} {
		if got := <-store.asked; got != want {
			t.Errorf("group %d has %d partitions, want %d", i, got, want)
		}

		if got := owned(); got != i*claimGroup {
			t.Errorf("while group %d is loaded the node owns %d partitions, want %d", i, got, i*claimGroup)
		}

		store.let <- struct{}{}
	}

	stop()
	<-ended
}

// faulty is a store that can neither load nor write some of its partitions.
type faulty struct {
	*shaky
	broken map[int]bool // guarded by mu
}

// errForeign is an error about one partition. It is also an ErrUnavailable, like that of presenceredis for a key of
// another type.
var errForeign = fmt.Errorf("%w: foreign data", presence.ErrUnavailable)

func (s *faulty) broke(c presence.Claim) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.broken[c.Partition]
}

func (s *faulty) Load(ctx context.Context, claims []presence.Claim) ([]presence.Snapshot, error) {
	if slices.ContainsFunc(claims, s.broke) {
		return nil, errForeign
	}
	return s.shaky.Load(ctx, claims)
}

func (s *faulty) Write(ctx context.Context, changes []presence.Change) []presence.Outcome {
	outcomes := make([]presence.Outcome, len(changes))
	for i, c := range changes {
		if s.broke(c.Claim) {
			outcomes[i].Err = errForeign
		} else {
			outcomes[i] = s.shaky.Write(ctx, changes[i:i+1])[0]
		}
	}

	return outcomes
}

// startFaulty runs a node over 40 partitions that owns the first ones.
func startFaulty(t *testing.T, owned int, broken ...int) (*faulty, *Node) {
	s := &faulty{shaky: &shaky{Store: presencemem.New(presencemem.Config{Partitions: 40})}, broken: map[int]bool{}}
	for _, id := range broken {
		s.broken[id] = true
	}

	n, err := New(s, configOf40())
	if err != nil {
		t.Fatal(err)
	}

	n.Gateways(nil)
	n.Own(firstPartitions(owned))

	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() { defer close(ended); _ = n.Run(ctx) }()
	t.Cleanup(func() { stop(); <-ended })

	return s, n
}

// shaky40 returns a store of 40 partitions, for nodes with configOf40.
func shaky40() *shaky {
	return &shaky{Store: presencemem.New(presencemem.Config{Partitions: 40}), generation: 1}
}

func configOf40() Config {
	return Config{
		Name:            "n",
		Partitions:      40,
		PresenceTimeout: timeout,
		Reply:           replies(func(string, *heartbeat.Reply) {}),
	}
}

func firstPartitions(k int) []int {
	ids := make([]int, k)
	for i := range ids {
		ids[i] = i
	}

	return ids
}

// without returns the partitions, of all 40, that do not satisfy ok.
func without(ok func(id int) bool) []int { return slices.DeleteFunc(firstPartitions(40), ok) }

// A node owns all partitions but those that the store cannot load, and these as well once they are repaired.
func TestABrokenPartitionLeavesNoOtherWithoutAnOwner(t *testing.T) {
	firstGroup := firstPartitions(claimGroup - 1)
	for name, broken := range map[string][]int{
		"one":                            {5},
		"the first and the last":         {0, 39},
		"two in a row, in two groups":    {claimGroup - 1, claimGroup},
		"all but one of the first group": firstGroup,
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s, n := startFaulty(t, 40, broken...)

				time.Sleep(2 * time.Second)
				if got := without(n.Owns); !slices.Equal(got, broken) {
					t.Errorf("the node does not own %v, want only the broken %v missing", got, broken)
				}

				s.set(func() { clear(s.broken) })
				time.Sleep(outage.MaxPause)
				if got := without(n.Owns); len(got) > 0 {
					t.Errorf("after the repair the node does not own %v, want all owned", got)
				}
			})
		})
	}
}

// After a loss all partitions are claimed again on the new store, but for the broken one.
func TestABrokenPartitionKeepsNoOtherFromBeingWrittenAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, n := startFaulty(t, 30)
		synctest.Wait()

		s.set(func() {
			s.Store = presencemem.New(presencemem.Config{Partitions: 40})
			s.generation = 1
			s.broken[5] = true
		})
		n.Own(firstPartitions(40))

		reclaimed := func(id int) bool {
			p := n.actors[id].Load()
			if p == nil {
				return false
			}

			p.out.mu.Lock()
			defer p.out.mu.Unlock()
			return p.out.claim.Generation == 1
		}

		time.Sleep(2 * time.Second)
		if got := without(reclaimed); !slices.Equal(got, []int{5}) {
			t.Errorf("%v were not claimed on the new store, want only 5 missing", got)
		}

		s.set(func() { clear(s.broken) })
		time.Sleep(outage.MaxPause)
		if got := without(reclaimed); len(got) > 0 {
			t.Errorf("after the repair %v were not claimed on the new store, want all claimed", got)
		}
	})
}

// A fault of the whole store costs few calls: the node tries neither every group nor every partition.
func TestAStoreThatLoadsNothingIsAskedSeldom(t *testing.T) {
	s := &shaky{Store: newStore()}
	m := manager{n: &Node{store: s}}

	for _, tc := range []struct {
		away bool
		want int
	}{{false, 1 + claimGroup}, {true, 1}} {
		s.set(func() { s.away = tc.away })

		calls := 0
		err := m.inGroups(t.Context(), firstPartitions(40), func([]int) (bool, error) {
			calls++
			return true, errForeign
		})

		if calls != tc.want || !errors.Is(err, errForeign) {
			t.Errorf("away %v: %d calls and error %v, want %d and %v", tc.away, calls, err, tc.want, errForeign)
		}
	}
}

// While one partition cannot be written, the others are written and acknowledged at once.
func TestABrokenPartitionDelaysNoWriteOfAnother(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &faulty{shaky: &shaky{Store: newStore()}, broken: map[int]bool{}}
		r, _ := start(t, "n", s)

		s.set(func() { s.broken[1] = true })
		r.op(gw("broken"), join(1, "p"))

		for range 5 { // the pauses between the attempts grow
			time.Sleep(outage.MaxPause)
			r.alive(gw("broken"), 1)

			before := r.count("a")
			r.op(gw("a"), join(2, "p"))
			r.op(gw("a"), leave(2, "p", 0))
			if got := r.count("a") - before; got != 2 {
				t.Fatalf("%d acknowledgements without a pause, want 2", got)
			}
		}

		if r.count("broken") > 0 {
			t.Fatalf("a join that was not written was acknowledged: %+v", r.last("broken"))
		}

		s.set(func() { clear(s.broken) })
		time.Sleep(outage.MaxPause)
		if got := r.last("broken"); got.Acked != 1 {
			t.Fatalf("after the repair the reply is %+v, want op 1 acknowledged", got)
		}

		r.want("p", 1)
	})
}

// replies is a function that implements Replies.
type replies func(gateway string, r *heartbeat.Reply)

func (f replies) SendReply(gateway string, r *heartbeat.Reply) { f(gateway, r) }

// arriving records the arrivals that are reported to a store.
type arriving struct {
	presence.Store
	mu  sync.Mutex
	all []string
}

func (s *arriving) Write(ctx context.Context, changes []presence.Change) []presence.Outcome {
	s.mu.Lock()
	for _, c := range changes {
		for _, a := range c.Arrivals {
			s.all = append(s.all, fmt.Sprint(uint64(a.User), a.Page))
		}
	}
	s.mu.Unlock()

	return s.Store.Write(ctx, changes)
}

func (s *arriving) take() string {
	s.mu.Lock()
	defer s.mu.Unlock()

	slices.Sort(s.all)
	told := strings.Join(s.all, " ")
	s.all = nil

	return told
}

// A user arrives who was not present. Somebody who returns within a grace does not, nor does a user whom a gateway
// reports to the next owner.
func TestArrivals(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := &arriving{Store: newStore()}
		arrivals := func(n *Node) { n.cfg.Arrivals = true }
		r, stop := startBeside(t, "n", store, nil, arrivals)

		want := func(when, told string) {
			t.Helper()
			synctest.Wait()
			if is := store.take(); is != told {
				t.Errorf("%s: the arrivals are %q, want %q", when, is, told)
			}
		}

		a, b := gw("a"), gw("b")
		time.Sleep(time.Second)

		r.op(a, join(3, "p"))
		want("a first page", "3* 3p")

		r.op(a, join(3, "q"))
		r.op(b, join(3, "p"))
		want("a second page, and a second gateway", "3q")

		r.op(a, leave(3, "q", time.Second))
		time.Sleep(time.Second / 2)
		r.op(a, join(3, "q"))
		want("back within the grace", "")

		r.op(a, leave(3, "q", time.Second))
		time.Sleep(2 * time.Second)
		r.op(a, join(3, "q"))
		want("back after the grace", "3q")

		if err := r.node.Hold(t.Context(), asked(6, "p", true)); err != nil {
			t.Fatal(err)
		}
		if err := r.node.Hold(t.Context(), asked(6, "p", true)); err != nil {
			t.Fatal(err)
		}
		want("a hold that is taken and renewed", "6* 6p")

		stop()
		next, _ := startBeside(t, "m", store, nil, arrivals)
		time.Sleep(100 * time.Millisecond)

		next.op(a, join(3, "p"))
		next.op(a, join(3, "q"))
		want("reported to the next owner", "")
	})
}

// asked returns the change of a hold by a call that is made now.
func asked(u presence.User, page string, on bool) presence.HoldChange {
	return presence.HoldChange{User: u, Page: page, On: on, Asked: time.Now()}
}
