package faults

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

const (
	readyWithin = 30 * time.Second // a process on a busy machine
	exactWithin = 10 * time.Second // the promise
)

func promised() time.Duration { return exactWithin }

// topology is a region's cluster with its clients.
type topology struct {
	gateways, nodes, dispatchers []*member
	members                      []*member
	crowd                        *crowd
}

// newTopology starts a layout, and brings the clients in.
func newTopology(t *testing.T, redis string, between func() *proxy, flags ...string) *topology {
	t.Helper()
	top := layout(redis, between, flags...)
	top.begin(t)
	return top
}

// layout is 2 gateways, 3 presence nodes and 2 dispatchers over a Redis. between makes a
// proxy for a process; it may be nil.
func layout(redis string, between func() *proxy, flags ...string) *topology {
	top := &topology{}
	for _, role := range []struct {
		name string
		n    int
		to   *[]*member
	}{{"presence", 3, &top.nodes}, {"dispatcher", 2, &top.dispatchers}, {"gateway", 2, &top.gateways}} {
		for i := range role.n {
			var through *proxy
			if between != nil {
				through = between()
			}
			*role.to = append(*role.to, newMember(fmt.Sprintf("%s %d", role.name, i), role.name, redis, through, flags...))
		}
		top.members = append(top.members, *role.to...)
	}
	return top
}

// newWholes is newTopology with three processes that have all roles.
func newWholes(t *testing.T, redis string) *topology {
	t.Helper()
	top := &topology{}
	for i := range 3 {
		top.members = append(top.members, newMember(fmt.Sprint("process ", i), allRoles, redis, nil))
	}
	top.gateways = top.members
	top.begin(t)
	return top
}

// begin starts the processes and brings the clients in.
func (top *topology) begin(t *testing.T) {
	t.Helper()
	startAll(t, top.members...)
	awaitReady(t, readyWithin, top.members...)
	top.crowd = newCrowd(t, top.gateways)
}

// fault is one row of the table. break does the damage and returns when it was
// healed, or done when it cannot be; churn goes on until then, and for during
// longer.
type fault struct {
	name    string
	since   string
	during  time.Duration
	damage  func(t *testing.T) time.Time
	lingers time.Duration      // a ghost may be seen for so much longer than is promised after a fault
	mend    func(t *testing.T) // once counts are exact, for example to start again what was killed
}

// stalls adds up how long this machine did not run the test when it should have. The
// processes under test had to wait as long.
type stalls struct {
	sum  atomic.Int64
	stop context.CancelFunc
}

func watchStalls() *stalls {
	ctx, cancel := context.WithCancel(context.Background())
	s := &stalls{stop: cancel}
	go func() { // ends with stop
		const nap, normal = 10 * time.Millisecond, 50 * time.Millisecond
		for ctx.Err() == nil {
			start := time.Now()
			time.Sleep(nap)
			if late := time.Since(start); late > normal {
				s.sum.Add(int64(late))
			}
		}
	}()
	return s
}

func (s *stalls) total() time.Duration { return time.Duration(s.sum.Load()) }

// stallsAtMost bounds what a machine that stalls adds to a limit.
const stallsAtMost = 10 * time.Second

// suffer runs one fault and checks what must hold.
func (top *topology) suffer(t *testing.T, f fault) {
	t.Helper()
	t.Run(f.name, func(t *testing.T) {
		c := top.crowd
		if _, err := c.exact(time.Now(), promised); err != nil {
			t.Fatalf("before the fault: %v", err)
		}
		begun := time.Now()
		machine := watchStalls()
		defer machine.stop()
		// A machine that stalls for a second costs leases, timeouts and their
		// repetitions more than that second. A machine that stalls for long proves
		// nothing.
		stalled := func() time.Duration { return min(3*machine.total(), stallsAtMost) }
		lingering := func() time.Duration { return stalled() + f.lingers }
		observed := c.errors(lingering)
		stop := c.churn()
		defer stop()
		time.Sleep(500 * time.Millisecond) // some users come and go before the fault
		healed := f.damage(t)
		if left := time.Until(healed.Add(f.during)); left > 0 {
			time.Sleep(left)
		}
		stop()
		took, err := c.exact(healed, func() time.Duration { return exactWithin + stalled() })
		row := result{fault: f.name, since: f.since, exact: took}
		fresh, stale, unexplained := observed()
		row.err, row.stale = fresh.by, stale.by
		table.add(row)
		t.Log(row, fresh.where, stale.where, "the machine stalled for", machine.total())
		if err != nil {
			t.Errorf("the counts are not exact: %v", err)
		}
		if unexplained.by > 0 {
			t.Errorf("a fresh count was wrong by %d for longer than %s: %s", unexplained.by, exactWithin+lingering(), unexplained.where)
		}
		if f.mend != nil {
			f.mend(t)
			if _, err := c.exact(time.Now(), promised); err != nil {
				t.Errorf("after mending: %v", err)
			}
		}
		for _, w := range c.takeWrongs() {
			t.Error(w)
		}
		if t.Failed() {
			t.Logf("the processes' words since %s:\n%s", begun.UTC().Format("15:04:05.000"), top.words(begun))
		}
	})
}

// words returns the last lines of all logs since then, by time.
func (top *topology) words(since time.Time) string {
	var lines []string
	for _, m := range top.members {
		for line := range strings.Lines(m.log.String()) {
			var head struct{ Time time.Time }
			if json.Unmarshal([]byte(line), &head) != nil {
				lines = append(lines, "? "+m.name+": "+line)
			} else if head.Time.After(since) {
				lines = append(lines, head.Time.Format("15:04:05.000 ")+m.name+": "+line)
			}
		}
	}
	slices.Sort(lines)
	return strings.Join(lines[max(0, len(lines)-150):], "")
}

// again starts a process once more and waits until it is ready.
func again(t *testing.T, m *member) {
	t.Helper()
	if err := m.start(); err != nil {
		t.Fatal(err)
	}
	awaitReady(t, readyWithin, m)
}
