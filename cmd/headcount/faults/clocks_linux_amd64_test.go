package faults

import (
	"cmp"
	"fmt"
	"sync"
	"testing"
	"time"

	"headcount/client"
	"headcount/internal/redistest"
	"headcount/internal/testkit"
)

// TestClockOfAProcessIsWrong: processes whose clocks are an hour ahead or behind start while users are there, and
// others start next to them. No user who stays is missing from a count, and each of these processes logs once that its
// clock is wrong.
func TestClockOfAProcessIsWrong(t *testing.T) {
	t.Parallel()
	const wrong = time.Hour
	top := layout(redistest.Start(t).URL(), nil)
	ahead, behind := top.nodes[0], top.nodes[1]
	ahead.process.Clock, top.dispatchers[0].process.Clock = wrong, wrong
	behind.process.Clock, top.gateways[1].process.Clock = -wrong, -wrong
	top.begin(t)

	top.suffer(t, fault{
		name:  "processes start again beside others whose clocks are an hour ahead and behind",
		since: "the last is ready",
		damage: func(t *testing.T) time.Time {
			for _, m := range []*member{ahead, top.gateways[0]} {
				if err := m.leave(); err != nil {
					t.Error(err)
				}
				again(t, m)
			}

			behind.kill()
			again(t, behind)
			return time.Now()
		},
	})

	// Each process with a wrong clock logs it once per run.
	for _, m := range top.members {
		want := 0
		switch {
		case m == ahead, m == behind: // they have run twice
			want = 2
		case m.process.Clock != 0:
			want = 1
		}

		if got := m.log.Count("clocks of this process and of the store differ"); got != want {
			t.Errorf("%s logs %d times that its clock is wrong, want %d", m.name, got, want)
		}
	}
}

// TestClockHoldsChangeHandsBetweenWrongClocks: the clocks of two nodes are 25 s apart. Holds last equally long with
// either of them. A hold that is released just after its partition changed hands is over when the call is answered.
func TestClockHoldsChangeHandsBetweenWrongClocks(t *testing.T) {
	t.Parallel()
	const users = 40
	redis := redistest.Start(t).URL()
	gateway := newMember("gateway", "gateway,dispatcher", redis, nil)
	right := newMember("right", "presence", redis, nil)
	ahead := newMember("ahead", "presence", redis, nil)
	ahead.process.Clock = 25 * time.Second
	startAll(t, gateway, right, ahead)
	awaitReady(t, gateway, right, ahead)

	// Each user has a hold on a page of their own, and the watcher sees the total.
	watcher := mustDial(t, gateway)
	if err := watcher.Subscribe(site); err != nil {
		t.Fatal(err)
	}
	shown := watch(watcher)

	ids := make([]string, users)
	each := func(do func(api *client.API, i int, page string) error) {
		t.Helper()
		var all sync.WaitGroup
		for i := range ids {
			api := gateway.api(ids[i])
			all.Go(func() {
				testkit.Eventually(t, "a call is answered",
					func() bool { return do(api, i, fmt.Sprint("p", i)) == nil })
			})
		}
		all.Wait()
	}

	hold := func(api *client.API, i int, page string) error {
		_, id, err := api.Hold(t.Context(), page)
		ids[i] = cmp.Or(id, ids[i])
		return err
	}

	each(hold)
	testkit.Eventually(t, "all are counted", func() bool { return shown.is(site, users) })

	// The node that is ahead takes all holds over, and none may end early.
	right.kill()
	killed := time.Now() // holds end by the clock, however slow the machine is
	testkit.Eventually(t, "the node that is ahead has all partitions for some time", func() bool {
		if !shown.is(site, users) {
			t.Fatalf("%.1f s after a death %s is no longer %d", time.Since(killed).Seconds(), site, users)
		}
		return time.Since(killed) > 10*time.Second
	})

	// Some holds move to the right node and back. Releases at once after the second change must stand.
	again(t, right)
	each(hold)

	ahead.kill()
	each(func(api *client.API, _ int, page string) error {
		got, err := api.Release(t.Context(), page)
		if err == nil && got.Count != 0 {
			t.Errorf("the end of the hold on %s was answered with %d", page, got.Count)
		}
		return err
	})

	testkit.Within(t, time.Second, "nobody is shown", func() bool { return shown.is(site, 0) })
}

// TestClockOfARunningProcessIsSet: the wall clock of a process is set by minutes and by an hour while it runs. Its
// users stay in all counts, no count becomes stale, and both processes show new users.
func TestClockOfARunningProcessIsSet(t *testing.T) {
	t.Parallel()
	const page = "p"
	redis := redistest.Start(t).URL()
	right := newMember("right", allRoles, redis, nil)
	set := newMember("set", allRoles, redis, nil)
	set.process.Clock = time.Second
	startAll(t, right, set)
	awaitReady(t, right, set)

	users := int64(0)
	come := func(n int) {
		t.Helper()
		for range n {
			for _, m := range []*member{right, set} {
				conn := mustDial(t, m)
				go drain(conn) // ends with the connection
				if err := conn.Join(page); err != nil {
					t.Fatal(err)
				}
				users++
			}
		}
	}

	count := func(m *member) string {
		c, err := m.api("").Count(t.Context(), page)
		return fmt.Sprint(c.Count, " stale ", c.Stale, " ", err)
	}
	want := func() string { return fmt.Sprint(users, " stale false <nil>") }
	exact := func(what string) {
		t.Helper()
		testkit.Within(t, exactWithin, what, func() bool { return count(right) == want() && count(set) == want() })
	}

	come(10)
	exact("all are counted")

	// Leases must not end by the wall clock that is set.
	for _, offset := range []time.Duration{2 * time.Minute, -2 * time.Minute, time.Hour} {
		if err := set.process.SetClock(offset); err != nil {
			t.Fatal(err)
		}

		moved := time.Now() // leases and heartbeats end by the clock, however slow the machine is
		testkit.Eventually(t, "a presence timeout and a lease have passed", func() bool {
			for _, m := range []*member{right, set} {
				if got := count(m); got != want() {
					t.Fatalf("%s after the clock was set to %s: %s says %s, want %s",
						time.Since(moved).Round(time.Millisecond), offset, m.name, got, want())
				}
			}
			return time.Since(moved) > 12*time.Second
		})

		come(1)
		exact("users who come later are counted")
	}

	if set.log.Count("clocks of this process and of the store differ") == 0 {
		t.Error("the process does not log that its clock is wrong")
	}
}
