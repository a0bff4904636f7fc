package faults

import (
	"strings"
	"testing"

	"headcount/client"
	"headcount/internal/redistest"
	"headcount/internal/testkit"
)

// TestClockAKilledProcessKeepsItsPartitions: a process that is killed and restarted before its lease has ended gets its
// partitions back, and no other process had them. Users who left another process meanwhile are gone in time.
func TestClockAKilledProcessKeepsItsPartitions(t *testing.T) {
	t.Parallel()
	const users = 40
	redis := redistest.Start(t).URL()
	killed := newMember("killed", allRoles, redis, nil)
	other := newMember("other", allRoles, redis, nil)
	startAll(t, killed, other)
	awaitReady(t, killed, other)

	watcher := mustDial(t, other)
	if err := watcher.Subscribe("p"); err != nil {
		t.Fatal(err)
	}
	shown := watch(watcher)

	leavers := make([]*client.Conn, users)
	for i := range leavers {
		leavers[i] = mustDial(t, other)
		if err := leavers[i].Join("p"); err != nil {
			t.Fatal(err)
		}
	}
	testkit.Eventually(t, "all are counted", func() bool { return shown.is("p", users) })

	takeovers := func() string {
		_, _, metrics, err := get("http://" + other.admin + "/metrics")
		_, n, found := strings.Cut(metrics, "\nheadcount_takeovers_total ")
		if err != nil || !found {
			t.Fatalf("no number of takeovers in the metrics %q, error %v", metrics, err)
		}
		n, _, _ = strings.Cut(n, "\n")
		return n
	}

	// The users leave while the owner of some of them is down.
	before := takeovers()
	for _, conn := range leavers {
		conn.Abort()
	}

	killed.kill()
	if err := killed.start(); err != nil {
		t.Fatal(err)
	}
	testkit.Within(t, exactWithin, "nobody is shown", func() bool { return shown.is("p", 0) })

	awaitReady(t, killed)

	// "name is taken" says that the lease still held when the process came back.
	if after := takeovers(); after != before && strings.Contains(killed.log.String(), "name is taken") {
		t.Errorf("the other process took over %s partitions, not %s, though the first was back in time", after, before)
	}
}
