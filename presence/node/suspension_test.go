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

// A node that was suspended while another node owned its partitions loads the other node's
// data, also when the store was restarted or emptied meanwhile.
func TestANodeThatStoodStillWritesNothingOfItsOwn(t *testing.T) {
	for name, emptied := range map[string]bool{"restarted": false, "emptied": true} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := &shaky{Store: newStore()}

				still := make(chan struct{})
				thaw := sync.OnceFunc(func() { close(still) })
				var frozen atomic.Bool

				pass := func() { // a goroutine that looks at a clock is suspended with the process
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
				t.Cleanup(thaw) // before it stops

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

				time.Sleep(timeout) // the trial of those who held
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

// A process may be asked about users before it has noticed that it was suspended. What it knows of them is that of
// before.
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
			t.Errorf("right after the suspension it answers with the error %v", err)
		}

		// It owns its partitions again.
		time.Sleep(2 * time.Second)
		if _, err := n.Users(t.Context(), []presence.User{1}); err != nil {
			t.Error(err)
		}
	})
}

// While the machine sleeps, the clock of the node's timers stops with it. So that clock does not show that another node
// may have owned the partitions, of which an emptied store has kept no trace.
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

		// It owns its partitions again.
		if err := n.Hold(ctx, asked(1, "p", true)); err != nil {
			t.Fatal(err)
		}
		r.want("p", 1)
	})
}
