package node

import (
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"headcount/presence"
	"headcount/presence/heartbeat"
)

// A node was suspended while another node owned its partitions. It loads the data of that node, even if the store was
// restarted or emptied meanwhile, and writes none of its own.
func TestANodeThatStoodStillWritesNothingOfItsOwn(t *testing.T) {
	for name, emptied := range map[string]bool{"restarted": false, "emptied": true} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := &shaky{Store: newStore()}

				still := make(chan struct{})
				thaw := sync.OnceFunc(func() { close(still) })
				var frozen atomic.Bool

				pass := func() { // a goroutine that reads a clock is suspended with the process
					if frozen.Load() {
						<-still
					}
				}

				n, _ := run(t, s, Config{
					Name:  "still",
					Reply: replies(func(string, *heartbeat.Reply) {}),
					Tick:  pass,
					Elapsed: func() time.Duration {
						pass()
						return time.Duration(time.Now().UnixNano())
					},
				}, alone)
				t.Cleanup(thaw) // before the node is stopped

				ctx := t.Context()
				synctest.Wait()
				for u := range presence.User(6) {
					if err := n.Hold(ctx, asked(u, "p", true)); err != nil {
						t.Fatal(err)
					}
				}

				frozen.Store(true)
				time.Sleep(4 * time.Second)

				next, _ := start(t, "next", s)
				for u := range presence.User(6) {
					if err := next.node.Hold(ctx, asked(u, "p", false)); err != nil {
						t.Fatal(err)
					}
				}

				time.Sleep(timeout) // the trial of the users who had holds
				next.want("p", 0)

				s.set(func() {
					s.generation++
					if emptied {
						s.Store = newStore()
					}
				})

				for range 10 {
					time.Sleep(generationPoll / 2)
					next.want("p", 0)
				}

				frozen.Store(false)
				thaw()
				for range 10 {
					time.Sleep(generationPoll / 2)
					next.want("p", 0)
				}
			})
		})
	}
}

// A process may be asked about users before it has noticed that it was suspended. It does not answer: its data is from
// before the suspension.
func TestANodeThatStoodStillKnowsNobody(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var slept atomic.Int64
		n, _ := run(t, newStore(), Config{
			Name:    "still",
			Reply:   replies(func(string, *heartbeat.Reply) {}),
			Elapsed: func() time.Duration { return time.Duration(time.Now().UnixNano() + slept.Load()) },
		}, alone)

		synctest.Wait()
		if _, err := n.Users(t.Context(), []presence.User{1}); err != nil {
			t.Fatal(err)
		}

		slept.Store(int64(time.Minute))
		if _, err := n.Users(t.Context(), []presence.User{1}); !errors.Is(err, presence.ErrNotOwner) {
			t.Errorf("right after the suspension the error is %v, want ErrNotOwner", err)
		}

		// By now it owns its partitions again.
		time.Sleep(2 * time.Second)
		if _, err := n.Users(t.Context(), []presence.User{1}); err != nil {
			t.Error(err)
		}
	})
}

// While the machine sleeps, the clock of the node's timers stops, so it cannot show that another node may have owned
// the partitions. An emptied store has no trace of that node either.
func TestANodeWhoseMachineSleptWritesNothingOfItsOwn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &shaky{Store: newStore()}

		var slept atomic.Int64
		n, _ := run(t, s, Config{
			Name:    "asleep",
			Reply:   replies(func(string, *heartbeat.Reply) {}),
			Elapsed: func() time.Duration { return time.Duration(time.Now().UnixNano() + slept.Load()) },
		}, alone)

		ctx := t.Context()
		synctest.Wait()
		if err := n.Hold(ctx, asked(1, "p", true)); err != nil {
			t.Fatal(err)
		}

		slept.Store(int64(time.Minute))
		s.set(func() {
			s.generation++
			s.Store = newStore()
		})

		r := &rig{t: t, store: s}
		for range 4 {
			time.Sleep(generationPoll)
			r.want("p", 0)
		}

		// By now it owns its partitions again.
		if err := n.Hold(ctx, asked(1, "p", true)); err != nil {
			t.Fatal(err)
		}
		r.want("p", 1)
	})
}
