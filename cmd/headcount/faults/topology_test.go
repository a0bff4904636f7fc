package faults

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"headcount/internal/simulate"
	"headcount/internal/testkit"
)

const exactWithin = 10 * time.Second // after a fault, as the product promises

// topology is the cluster of one region, with its clients.
type topology struct {
	gateways, nodes, dispatchers []*member
	members                      []*member
	crowd                        *simulate.Crowd
}

// newTopology starts the processes of layout, and connects the clients.
func newTopology(t *testing.T, redis string, between func() *proxy, flags ...string) *topology {
	t.Helper()
	top := layout(redis, between, flags...)
	top.begin(t)
	return top
}

// layout returns 2 gateways, 3 presence nodes and 2 dispatchers over a Redis. between, unless nil, returns a proxy for
// each process.
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
			*role.to = append(*role.to,
				newMember(fmt.Sprintf("%s %d", role.name, i), role.name, redis, through, flags...))
		}
		top.members = append(top.members, *role.to...)
	}

	return top
}

// newWholes is newTopology with three processes, each of which has all roles.
func newWholes(t *testing.T, redis string, flags ...string) *topology {
	t.Helper()
	top := &topology{}
	for i := range 3 {
		top.members = append(top.members, newMember(fmt.Sprint("process ", i), allRoles, redis, nil, flags...))
	}
	top.gateways = top.members
	top.begin(t)

	return top
}

// begin starts the processes and connects the clients.
func (top *topology) begin(t *testing.T) {
	t.Helper()
	startAll(t, top.members...)
	awaitReady(t, top.members...)
	top.crowd = newCrowd(t, top.gateways)
}

// fault is a fault of a topology.
type fault struct {
	name    string
	damage  func(t *testing.T) time.Time // causes it, and returns when it was healed or, if it is not, caused
	since   string                       // the moment that damage returns, in words
	during  time.Duration                // for how long after that moment users still come and go
	lingers time.Duration                // for how much longer than promised a ghost may be visible
	mend    func(t *testing.T)           // called when counts are exact, for example to restart a killed process
}

// suffer runs one fault and checks what must hold. After a failure the topology suffers no other fault.
func (top *topology) suffer(t *testing.T, f fault) {
	t.Helper()
	c := top.crowd
	exact := func(what string, since time.Time, late func() time.Duration) (took time.Duration) {
		t.Helper()
		took, err := c.Exact(t.Context(), since, late)
		if err != nil {
			t.Errorf("%s: %s: the counts are not exact: %v", f.name, what, err)
		}

		return took
	}

	machine := testkit.NewStopwatch(t)
	exact("before the fault", time.Now(), machine.Lost)

	begun := time.Now()
	lingering := func() time.Duration { return machine.Lost() + f.lingers }
	observed := c.Observe(t.Context(), lingering)

	stop := c.Churn(t.Context())
	defer stop()
	time.Sleep(500 * time.Millisecond) // some users come and go before the fault
	healed := f.damage(t)
	time.Sleep(time.Until(healed.Add(f.during)))
	stop()

	took := exact("after the fault", healed, machine.Lost)
	ghost := observed()
	t.Logf("%s: exact %.1f s after %s; the machine lost %s", f.name, took.Seconds(), f.since, machine.Lost())

	if ghost.By > 0 {
		t.Errorf("%s: a fresh count was wrong by %d for longer than %s: %s",
			f.name, ghost.By, exactWithin+lingering(), ghost.Where)
	}

	// Mending changes the owners of partitions, too.
	if f.mend != nil {
		f.mend(t)
		exact("after mending", time.Now(), machine.Lost)
	}

	for _, w := range c.Wrongs() {
		t.Errorf("%s: %s", f.name, w)
	}
	if t.Failed() {
		t.Fatalf("%s: the processes' logs since %s:\n%s", f.name, begun.UTC().Format("15:04:05.000"), top.words(begun))
	}
}

// words returns the last lines of all logs since then, sorted by time.
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

// again starts a process again and waits until it is ready.
func again(t *testing.T, m *member) {
	t.Helper()
	if err := m.start(); err != nil {
		t.Fatal(err)
	}
	awaitReady(t, m)
}
