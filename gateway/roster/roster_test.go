package roster

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"

	"headcount/presence"
	"headcount/presence/heartbeat"
)

// beats is a roster of one partition, and the beats that it has sent.
type beats struct {
	*Roster
	sent  []*heartbeat.Beat
	times []time.Time // when each beat was sent
}

func newBeats() *beats { return newBeatsOf(1, time.Second) }

func newBeatsOf(partitions int, interval time.Duration) *beats {
	b := &beats{}
	b.Roster = New(Config{
		Source:     heartbeat.Source{Gateway: "g", Incarnation: 1},
		Partitions: partitions,
		Interval:   interval,
		Grace:      time.Minute,
		Beats:      b,
		Counts:     b,
	})

	return b
}

func (b *beats) SendBeat(m *heartbeat.Beat) {
	b.sent = append(b.sent, m)
	b.times = append(b.times, time.Now())
}

func (b *beats) Acknowledged(presence.Update) {}

// joined counts the acknowledgements of its joins.
type joined struct{ arrivals int }

func (j *joined) Arrived(string) { j.arrivals++ }

// ops sends what waits, and returns the operations.
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

// beat sends what waits, which must be one beat, and returns it.
func (b *beats) beat(t *testing.T) *heartbeat.Beat {
	t.Helper()
	b.ops()
	if len(b.sent) != 1 {
		t.Fatalf("sent %d beats, want 1", len(b.sent))
	}

	return b.sent[0]
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

// While the store is away nothing is acknowledged. The grace of a lost connection runs all the same, and its return
// must not wait for an acknowledgement.
func TestReturnIsSentWhileTheLeaveIsUnanswered(t *testing.T) {
	b := newBeats()
	c := &joined{}
	b.Join(1, "p", c)
	b.wantOps(t, heartbeat.Join)
	b.Receive(&heartbeat.Reply{Stream: 1, Acked: 1})

	b.Leave(1, "p", c, true)
	b.wantOps(t, heartbeat.Leave)

	b.Join(1, "p", c)
	if !b.Waits(1, "p", c) {
		t.Fatal("the join counts as stored before its acknowledgement")
	}

	b.wantOps(t, heartbeat.Join)

	b.Leave(1, "p", c, true)
	b.Join(1, "p", c)
	b.wantOps(t) // nothing more: a join is under way already

	before := c.arrivals
	b.Receive(&heartbeat.Reply{Stream: 1, Acked: 2})
	if c.arrivals != before {
		t.Fatal("the acknowledgement of the leave was taken for that of the join")
	}

	b.Receive(&heartbeat.Reply{Stream: 1, Acked: 3})
	if c.arrivals != before+1 {
		t.Fatalf("%d joins were answered, want 1", c.arrivals-before)
	}

	b.wantOps(t)
	b.Leave(1, "p", c, false)
	b.wantOps(t, heartbeat.Leave)
	b.Receive(&heartbeat.Reply{Stream: 1, Acked: 4})
	if len(b.streams[0].users) != 0 {
		t.Fatal("the user was not forgotten")
	}
}

// An acknowledgement may overtake the one before it, or be the only one that arrives. Then it does not release a join
// whose count it lacks.
func TestAJoinWaitsForItsCount(t *testing.T) {
	counts := func(pages ...string) (all []presence.Count) {
		for _, page := range append(pages, presence.AllPages) {
			all = append(all, presence.Count{Page: page, Users: 1})
		}

		return all
	}

	p := &heartbeat.Reply{Stream: 1, Acked: 1, Counted: 1, Counts: counts("p")}
	q := &heartbeat.Reply{Stream: 1, Acked: 2, Counted: 2, Counts: counts("q")}
	both := &heartbeat.Reply{Stream: 1, Acked: 2, Counted: 2, Counts: counts("q", "p")}
	// This is the datagram before the one with the count of q.
	half := &heartbeat.Reply{Stream: 1, Counted: 2, Counts: counts("p")}

	for name, tc := range map[string]struct {
		replies []*heartbeat.Reply
		want    []int // arrivals on p after each of them
	}{
		"in order":    {[]*heartbeat.Reply{p, q}, []int{1, 1}},
		"overtaken":   {[]*heartbeat.Reply{q, p}, []int{0, 1}},
		"lost":        {[]*heartbeat.Reply{q, both}, []int{0, 1}},
		"in parts":    {[]*heartbeat.Reply{half, q}, []int{0, 1}},
		"part lost":   {[]*heartbeat.Reply{q, half}, []int{0, 1}},
		"without any": {[]*heartbeat.Reply{{Stream: 1, Acked: 2, Counted: 2}, both}, []int{0, 1}},
		"older owner": {[]*heartbeat.Reply{{Stream: 1, Acked: 2}}, []int{1}},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBeats()
			onP, onQ := &joined{}, &joined{}
			b.Join(1, "p", onP)
			b.wantOps(t, heartbeat.Join)
			b.Join(2, "q", onQ)
			b.wantOps(t, heartbeat.Join)

			for i, reply := range tc.replies {
				b.Receive(reply)
				if onP.arrivals != tc.want[i] {
					t.Errorf("after %d replies the join of p was released %d times, want %d",
						i+1, onP.arrivals, tc.want[i])
				}
			}

			if onQ.arrivals != 1 || len(b.streams[0].flight) != 0 {
				t.Errorf("the join of q was released %d times, and %d ops are left",
					onQ.arrivals, len(b.streams[0].flight))
			}
		})
	}
}

// TestAFurtherTabAsksTheOwner: after it acknowledged the first tab, the owner may have been cut off from this gateway,
// and let the user time out. So a further tab waits for the owner, and so does a tab that wants the counts again. Tabs
// that have their counts wait for nothing.
func TestAFurtherTabAsksTheOwner(t *testing.T) {
	b := newBeats()
	first, second := &joined{}, &joined{}
	b.Join(1, "p", first)
	b.wantOps(t, heartbeat.Join)
	b.Receive(&heartbeat.Reply{Stream: 1, Acked: 1})

	b.Join(1, "p", second)
	b.wantOps(t, heartbeat.Join)
	if first.arrivals != 1 || second.arrivals != 0 || b.Waits(1, "p", first) || !b.Waits(1, "p", second) {
		t.Fatalf("%d and %d arrivals before the owner answered again, want 1 and 0", first.arrivals, second.arrivals)
	}

	b.Receive(&heartbeat.Reply{Stream: 1, Acked: 2})

	b.Confirm(1, "p", first)
	b.Confirm(1, "p", first)
	b.wantOps(t, heartbeat.Join)
	b.Receive(&heartbeat.Reply{Stream: 1, Acked: 3})
	b.wantOps(t)
	// The two requests of the first tab are one operation for the owner, with one acknowledgement.
	if first.arrivals != 2 || second.arrivals != 1 || b.Waits(1, "p", first) || b.Waits(1, "p", second) {
		t.Errorf("%d and %d arrivals, want 2 and 1", first.arrivals, second.arrivals)
	}
}

// A join that has ended meanwhile does not wait for a count, since its page may have none any more.
func TestAJoinThatHasEndedWaitsForNoCount(t *testing.T) {
	b := newBeats()
	c := &joined{}
	b.Join(1, "p", c)
	b.wantOps(t, heartbeat.Join)

	b.Leave(1, "p", c, false)
	b.wantOps(t, heartbeat.Leave)

	// The acknowledgement has no count of p, which is empty now.
	b.Receive(&heartbeat.Reply{Stream: 1, Acked: 2, Counted: 2})
	if left := len(b.streams[0].flight); left != 0 {
		t.Fatalf("%d operations would be repeated for ever", left)
	}
}

// A new owner gets all users, in a new stream.
func TestNewOwnerIsSentEverybody(t *testing.T) {
	b := newBeats()
	c := &joined{}
	b.Join(1, "p", c)
	b.Join(2, "p", c)
	b.wantOps(t, heartbeat.Join, heartbeat.Join)
	b.Receive(&heartbeat.Reply{Stream: 1, Acked: 2})

	b.Leave(2, "p", c, false)
	b.wantOps(t, heartbeat.Leave)

	// The leave is in flight, so it must also be sent to the new owner.
	b.MovedTo(0)
	b.wantOps(t, heartbeat.Leave, heartbeat.Join)
	m := b.streams[0].beatLocked(b.cfg.Source, 0)
	if m.Stream != 2 || m.First != 1 || len(m.Ops) != 2 || m.Whole != 3 {
		t.Fatalf("the new owner is sent %+v, want the leave in flight and the join of user 1, and that this is all", m)
	}

	// Its reply to earlier beats comes late; the missing operations are in flight.
	b.Receive(&heartbeat.Reply{Stream: 1, Ask: true})
	b.wantOps(t, heartbeat.Leave, heartbeat.Join)

	b.Receive(&heartbeat.Reply{Stream: 2, Acked: 2})
	b.Receive(&heartbeat.Reply{Stream: 2, Ask: true})
	if m := b.beat(t); m.Stream != 2 || m.First != 3 || len(m.Ops) != 0 || m.Whole != 3 {
		t.Fatalf("an owner that asks is sent %+v, want that the stream is whole", m)
	}

	b.Receive(&heartbeat.Reply{Ask: true}) // from another owner, which does not know the stream
	if m := b.beat(t); m.Stream != 3 || m.First != 1 || len(m.Ops) != 1 || m.Whole != 2 {
		t.Fatalf("an owner that knows no stream is sent %+v, want a new one with the join of user 1", m)
	}
}

// newGrace returns a roster that has sent, as operation 2, the grace of user 1, who was on "p".
func newGrace(t *testing.T) *beats {
	t.Helper()
	b := newBeats()
	c := &joined{}
	b.Join(1, "p", c)
	b.ops()
	b.Receive(&heartbeat.Reply{Stream: 1, Acked: 1})

	b.Leave(1, "p", c, true)
	b.wantOps(t, heartbeat.Leave)

	return b
}

// A new owner gets the rest of a grace that no owner has acknowledged.
func TestNewOwnerIsSentTheRestOfAGrace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newGrace(t)
		for _, want := range []time.Duration{40 * time.Second, 20 * time.Second, 0, 0} {
			time.Sleep(20 * time.Second)
			b.MovedTo(0)
			if ops := b.ops(); len(ops) != 1 || ops[0].Kind != heartbeat.Leave || ops[0].Grace != want {
				t.Fatalf("sent %+v; want a leave with a grace of %s", ops, want)
			}
		}
	})
}

// A new owner also gets a grace that a former owner has acknowledged, even for a while after its end, because an owner
// that hands over lets no presence expire.
func TestNewOwnerIsSentAGraceThatAnotherOneKnew(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newGrace(t)
		b.Receive(&heartbeat.Reply{Stream: 1, Acked: 2})
		b.wantOps(t)

		for i, want := range []time.Duration{time.Minute, 30 * time.Second, 0, 0} {
			b.MovedTo(0)
			if m := b.beat(t); len(m.Ops) != 1 || m.Ops[0].Kind != heartbeat.Leave || m.Ops[0].Grace != want ||
				m.Whole != 2 {
				t.Fatalf("sent %+v; want a leave with a grace of %s, and that this is all", m, want)
			}

			// Some of the new owners do not live long enough to acknowledge it.
			if i%2 == 0 {
				b.Receive(&heartbeat.Reply{Stream: uint64(2 + i), Acked: 1})
			}

			b.Roster.sendAlive(&b.streams[0])
			switch i {
			case 0, 1:
				time.Sleep(30 * time.Second)
			case 2:
				time.Sleep(afterGrace - time.Millisecond)
			}
		}

		b.Receive(&heartbeat.Reply{Stream: 5, Acked: 1})
		time.Sleep(time.Millisecond)
		b.Roster.sendAlive(&b.streams[0])
		b.MovedTo(0)
		if m := b.beat(t); len(m.Ops) != 0 || len(b.streams[0].users) != 0 {
			t.Fatalf("sent %+v long after the grace", m)
		}
	})
}

// A gateway without users reports that.
func TestAGatewayWithoutUsersSaysSo(t *testing.T) {
	b := newBeats()
	b.MovedTo(0)
	if m := b.beat(t); m.Stream != 2 || m.First != 1 || len(m.Ops) != 0 || m.Whole != 1 {
		t.Fatalf("the new owner is sent %+v, want that there is nobody", m)
	}
}

// A stream that is longer than what may be in flight is whole with its last operation, however many users come and go
// meanwhile.
func TestALongStreamSaysWhenItIsWhole(t *testing.T) {
	b := newBeats()
	c := &joined{}
	const users = heartbeat.MaxOps + 10
	for u := range presence.User(users) {
		b.Join(u, "p", c)
	}

	b.MovedTo(0)
	if m := b.beat(t); len(m.Ops) != heartbeat.MaxOps || m.Whole != 0 {
		t.Fatalf("%d ops, whole with %d; want a part", len(m.Ops), m.Whole)
	}

	b.Join(users, "p", c) // this user was not there when the stream began
	b.Receive(&heartbeat.Reply{Stream: 2, Acked: heartbeat.MaxOps})
	if m := b.beat(t); len(m.Ops) != 11 || m.Whole != users+1 && m.Whole != users+2 {
		t.Fatalf("%d ops, whole with %d; want the rest", len(m.Ops), m.Whole)
	}
}

// Of two lost tabs one comes back and leaves. The grace of the other tab goes on, and the user is forgotten when it
// ends.
func TestTheOtherTabsGraceLasts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBeats()
		c, d := &joined{}, &joined{}
		b.Join(1, "p", c)
		b.Join(1, "p", d)
		b.wantOps(t, heartbeat.Join)
		b.Receive(&heartbeat.Reply{Stream: 1, Acked: 1})

		b.Leave(1, "p", c, true)
		b.Leave(1, "p", d, true)
		b.wantOps(t, heartbeat.Leave)
		b.Receive(&heartbeat.Reply{Stream: 1, Acked: 2})

		b.Join(1, "p", c)
		b.wantOps(t, heartbeat.Join)
		b.Receive(&heartbeat.Reply{Stream: 1, Acked: 3})

		b.Leave(1, "p", c, false)
		// The owner knows users, not tabs, so this leave carries the grace of the other tab.
		if ops := b.ops(); len(ops) != 1 || ops[0].Kind != heartbeat.Leave || ops[0].Grace != time.Minute {
			t.Fatalf("sent %+v, want a leave with the other's grace", ops)
		}

		b.Receive(&heartbeat.Reply{Stream: 1, Acked: 4})
		time.Sleep(time.Minute + afterGrace)
		b.Roster.sendAlive(&b.streams[0])
		if n := len(b.streams[0].users); n != 0 {
			t.Fatalf("%d users are kept after the grace", n)
		}
	})
}

// A user who joins and leaves while nothing is acknowledged is forgotten at once, except for operations in flight.
func TestUsersWhoComeAndGoAreForgottenWhileTheStoreIsAway(t *testing.T) {
	b := newBeats()
	c := &joined{}
	l := &b.streams[0]
	b.Join(1, "stays", c)

	const users = 10_000
	for u := range presence.User(users) {
		b.Join(u+2, "p", c)
		b.ops()
		b.Leave(u+2, "p", c, false)
		b.ops()
	}

	if len(l.users) > heartbeat.MaxOps || len(l.queue.entries) > 2*heartbeat.MaxOps {
		t.Fatalf("%d users and %d entries stay of %d who came and went", len(l.users), len(l.queue.entries), users)
	}

	// What was in flight is forgotten when it is acknowledged.
	for first := uint64(0); len(l.flight) > 0; {
		first = l.first + uint64(len(l.flight)) - 1
		b.Receive(&heartbeat.Reply{Stream: 1, Acked: first})
		b.ops()
	}

	if len(l.users) != 1 || b.Waits(1, "stays", c) {
		t.Fatalf("%d users are left, want the one who stays, stored", len(l.users))
	}
}

// Messages may be lost any number of times: a join is repeated until it is acknowledged, and not after that.
func TestJoinsAreRepeatedUntilAcknowledged(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBeats()
		c := &joined{}
		b.Join(1, "p", c)
		b.wantOps(t, heartbeat.Join)
		lost := b.sent[0]

		repeats := func() int {
			b.sent = nil
			for range 60 {
				time.Sleep(lastRepeat)
				b.resend(&b.streams[0], time.Now())
			}
			return len(b.sent)
		}

		if n := repeats(); n != 60 {
			t.Fatalf("sent again %d times in a minute, want 60", n)
		}
		if m := b.sent[59]; m.First != lost.First || len(m.Ops) != 1 || m.Ops[0].Kind != heartbeat.Join {
			t.Fatalf("sent %+v again, want %+v", m, lost)
		}

		b.Receive(&heartbeat.Reply{Stream: lost.Stream, Acked: lost.First})
		if n := repeats(); n != 0 || c.arrivals != 1 {
			t.Fatalf("acknowledged, and sent again %d times, with %d arrivals", n, c.arrivals)
		}
	})
}

// A user with many pages has an index of the entries. It finds what a list would find, and nothing of pages that the
// user has left.
func TestEntriesOfAUserAreFoundWhateverTheirNumber(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		res := &userEntry{}
		model := map[string]*presenceEntry{}
		for range rapid.IntRange(0, 200).Draw(rt, "steps") {
			page := fmt.Sprint(rapid.IntRange(0, 3*fewEntries).Draw(rt, "page"))
			sp := res.find(page)
			switch {
			case sp != model[page]:
				rt.Fatalf("%s: found %v, want %v", page, sp, model[page])
			case sp == nil:
				model[page] = &presenceEntry{page: page}
				res.add(model[page])
			case rapid.Bool().Draw(rt, "remove"):
				res.remove(sp)
				delete(model, page)
			}

			if len(res.entries) != len(model) {
				rt.Fatalf("%d entries, want %d", len(res.entries), len(model))
			}
		}
	})
}

// A user is on at most MaxUserPages pages. A further page is refused until another one is left. Pages that the user is
// on can be joined by other connections.
func TestPagesOfAUserAreBounded(t *testing.T) {
	b := newBeats()
	c := &joined{}
	for n := range MaxUserPages {
		if err := b.Join(1, fmt.Sprint(n), c); err != nil {
			t.Fatalf("page %d: %v", n, err)
		}
	}

	if err := b.Join(1, "one more", c); !errors.Is(err, ErrTooManyPages) {
		t.Errorf("one page more: %v, want ErrTooManyPages", err)
	}
	if err := b.Join(1, "7", &joined{}); err != nil {
		t.Errorf("a page that the user is on: %v", err)
	}
	if err := b.Join(2, "one more", c); err != nil {
		t.Errorf("another user: %v", err)
	}

	b.Leave(1, "8", c, false)
	if err := b.Join(1, "one more", c); err != nil {
		t.Errorf("after a leave: %v", err)
	}
}

// A user who was on thousands of pages, and now is on a few, takes no more memory than other users.
func TestFewEntriesTakeLittle(t *testing.T) {
	res := &userEntry{}
	for n := range 1000 {
		res.add(&presenceEntry{page: fmt.Sprint(n)})
	}

	for len(res.entries) > 1 {
		res.remove(res.entries[0])
	}

	if cap(res.entries) > 2*fewEntries || res.byPage != nil {
		t.Errorf("there is room for %d entries, and the index is %v; want little and none",
			cap(res.entries), res.byPage)
	}
}

// BenchmarkJoinLeave measures a join and a leave of a user who is on many other pages.
func BenchmarkJoinLeave(b *testing.B) {
	for _, others := range []int{1, 10, 1000, MaxUserPages - 1} {
		b.Run(fmt.Sprint(others), func(b *testing.B) {
			r := newBeats()
			c := &joined{}
			for n := range others {
				r.Join(1, fmt.Sprint(n), c)
			}

			for b.Loop() {
				r.Join(1, "p", c)
				r.Leave(1, "p", c, false)
			}
		})
	}
}

// The heartbeats of few users are sent in four rounds an interval, and those of many in more. No partition is left out.
func TestHeartbeatsGoInTurns(t *testing.T) {
	for users, rounds := range map[int]int{100: 4, 50_000: 10} {
		synctest.Test(t, func(t *testing.T) {
			const partitions, interval = 40, 2 * time.Second
			b := newBeatsOf(partitions, interval)
			for u := range presence.User(users) {
				// As after a join that was acknowledged long ago.
				e := b.streamOf(u).findOrAddLocked(u, "p")
				e.live = 1
				e.lastOp = heartbeat.Join
			}

			// The number of users is known after the first interval, so the last one is measured.
			ctx, cancel := context.WithTimeout(t.Context(), 3*interval+time.Millisecond)
			defer cancel()
			b.Run(ctx)

			times, seen := map[time.Time]bool{}, map[int]bool{}
			all := 0
			for i, m := range b.sent {
				if at := b.times[i]; time.Since(at) < interval {
					times[at] = true
					seen[m.Partition] = true
					all += len(m.Alive)
				}
			}

			if len(times) != rounds || len(seen) != partitions || all != users {
				t.Errorf("in the last interval %d partitions and %d users were in heartbeats at %d times, want %d, "+
					"%d and %d",
					len(seen), all, len(times), partitions, users, rounds)
			}
		})
	}
}

// A roster that had nothing to repeat for a while repeats later joins.
func TestLateJoinIsRepeated(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBeats()
		ctx, cancel := context.WithTimeout(t.Context(), 20*lastRepeat)
		defer cancel()

		// By then the repeating loop has found nothing to do ten times.
		time.AfterFunc(10*lastRepeat, func() { b.Join(1, "p", &joined{}) })
		b.Run(ctx)

		sent := 0
		for _, m := range b.sent {
			sent += len(m.Ops)
		}

		if sent < 10 {
			t.Errorf("sent %d times in 10 s, want 10 at least", sent)
		}
	})
}
