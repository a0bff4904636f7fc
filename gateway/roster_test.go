package gateway

import (
	"testing"
	"time"

	"headcount/presence"
	"headcount/presence/heartbeat"
)

// beats is a roster of one partition, and what it sent.
type beats struct {
	*roster
	sent []*heartbeat.Beat
}

func newBeats(t *testing.T) *beats {
	t.Helper()
	b := &beats{}
	b.roster = newRoster(heartbeat.Source{Gateway: "g", Incarnation: 1}, 1, time.Second, time.Minute, func(m *heartbeat.Beat) { b.sent = append(b.sent, m) })
	b.ready = func(*conn, string, presence.Count) {}
	return b
}

// ops sends what waits, and returns it.
func (b *beats) ops() (ops []heartbeat.Op) {
	b.sent = nil
	for len(b.kick) > 0 {
		b.flush(<-b.kick)
	}
	for _, m := range b.sent {
		ops = append(ops, m.Ops...)
	}
	return ops
}

func (b *beats) wantOps(t *testing.T, kinds ...heartbeat.Kind) {
	t.Helper()
	ops := b.ops()
	if len(ops) != len(kinds) {
		t.Fatalf("sent %+v, want %d ops", ops, len(kinds))
	}
	for i, k := range kinds {
		if ops[i].Kind != k {
			t.Fatalf("op %d is %+v, want kind %d", i, ops[i], k)
		}
	}
}

// While the store is away nothing is answered, and the grace of a lost
// connection runs all the same: its return must not wait for an answer.
func TestReturnIsToldWhileTheLeaveIsUnanswered(t *testing.T) {
	b, c := newBeats(t), &conn{}
	b.join(1, "p", c)
	b.wantOps(t, heartbeat.Join)
	b.receive(&heartbeat.Reply{Stream: 1, Acked: 1})
	b.leave(1, "p", c, true)
	b.wantOps(t, heartbeat.Leave)
	if b.join(1, "p", c) {
		t.Fatal("the join is said to be in the store")
	}
	b.wantOps(t, heartbeat.Join)
	b.leave(1, "p", c, true)
	b.join(1, "p", c)
	b.wantOps(t) // the join on its way says it all
	var ready int
	b.ready = func(*conn, string, presence.Count) { ready++ }
	b.receive(&heartbeat.Reply{Stream: 1, Acked: 2})
	if ready != 0 {
		t.Fatal("the leave's answer was taken for the join's")
	}
	b.receive(&heartbeat.Reply{Stream: 1, Acked: 3})
	if ready != 1 {
		t.Fatalf("%d joins were answered, want 1", ready)
	}
	b.wantOps(t)
	b.leave(1, "p", c, false)
	b.wantOps(t, heartbeat.Leave)
	b.receive(&heartbeat.Reply{Stream: 1, Acked: 4})
	if len(b.lanes[0].users) != 0 {
		t.Fatal("the user is not forgotten")
	}
}

// A new owner is told of everybody, in a stream of its own.
func TestNewOwnerIsToldOfEverybody(t *testing.T) {
	b, c := newBeats(t), &conn{}
	b.join(1, "p", c)
	b.join(2, "p", c)
	b.wantOps(t, heartbeat.Join, heartbeat.Join)
	b.receive(&heartbeat.Reply{Stream: 1, Acked: 2})
	b.leave(2, "p", c, false)
	b.wantOps(t, heartbeat.Leave)
	b.movedTo(0)
	b.wantOps(t, heartbeat.Join)
	m := b.lanes[0].beatOf(b.source, 0)
	if m.Stream != 2 || m.First != 1 || len(m.Ops) != 2 {
		t.Fatalf("the new owner is told %+v, want the leave in flight and the join of user 1", m)
	}
}
