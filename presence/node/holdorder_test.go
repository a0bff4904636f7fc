package node

import (
	"container/list"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"headcount/presence"
	"headcount/presence/heartbeat"
)

// TestAnOlderCallUndoesNothing: a call about a hold that arrives after one that was made later has no effect, whichever
// of the two ends the hold, for as long as any call may be on its way.
func TestAnOlderCallUndoesNothing(t *testing.T) {
	for _, late := range []bool{true, false} {
		synctest.Test(t, func(t *testing.T) {
			r, _ := start(t, "n", newStore())

			if err := r.node.Hold(t.Context(), asked(1, "p", late)); err != nil {
				t.Fatal(err)
			}

			time.Sleep(time.Second)
			older := asked(1, "p", late)
			time.Sleep(time.Millisecond)

			if err := r.node.Hold(t.Context(), asked(1, "p", !late)); err != nil {
				t.Fatal(err)
			}

			want := int64(1)
			if late {
				want = 0
			}

			for range 4 {
				if err := r.node.Hold(t.Context(), older); !errors.Is(err, presence.ErrOvertaken) {
					t.Errorf("an older call with hold=%t is answered %v, want ErrOvertaken", late, err)
				}
				r.want("p", want)
				time.Sleep(presence.HoldTimeout / 4)
			}

			if err := r.node.Hold(t.Context(), asked(1, "p", late)); err != nil {
				t.Errorf("the newest call, with hold=%t, is answered %v, want no error", late, err)
			}
			r.want("p", 1-want)
		})
	}
}

// TestHoldOrderIsBounded: a call is forgotten when no older one can arrive any more. While too many calls are
// remembered, those about further holds are refused.
func TestHoldOrderIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := holdOrder{newest: map[memberKey]*list.Element{}}

		for u := range presence.User(maxHoldOrder) {
			if err := o.admit(memberKey{u, "p"}, time.Now(), time.Now()); err != nil {
				t.Fatal(err)
			}
		}
		if err := o.admit(memberKey{1, "q"}, time.Now(), time.Now()); !errors.Is(err, presence.ErrUnavailable) {
			t.Errorf("a hold beyond the bound is answered %v, want ErrUnavailable", err)
		}

		if err := o.admit(memberKey{1, "p"}, time.Now(), time.Now()); err != nil {
			t.Errorf("a known hold, at the bound, is answered %v, want no error", err)
		}

		time.Sleep(presence.HoldTimeout)
		again := time.Now()

		if err := o.admit(memberKey{2, "p"}, again, again); err != nil {
			t.Errorf("a renewal is answered %v, want no error", err)
		}

		time.Sleep(time.Millisecond)

		err := o.admit(memberKey{1, "q"}, time.Now(), time.Now())
		if err != nil || o.changes.Len() != 2 || len(o.newest) != 2 {
			t.Errorf("when the others are forgotten: %v, and %d and %d are remembered; want 2 and 2",
				err, o.changes.Len(), len(o.newest))
		}

		err = o.admit(memberKey{2, "p"}, again.Add(-time.Millisecond), time.Now())
		if !errors.Is(err, presence.ErrOvertaken) {
			t.Errorf("a call from before the renewal is answered %v, want ErrOvertaken", err)
		}
	})
}

// BenchmarkHoldOrderAtItsBound measures a call that is refused because too many holds were changed a moment ago.
func BenchmarkHoldOrderAtItsBound(b *testing.B) {
	o, now := holdOrder{newest: map[memberKey]*list.Element{}}, time.Now()
	for u := range presence.User(maxHoldOrder) {
		if err := o.admit(memberKey{u, "p"}, now, now); err != nil {
			b.Fatal(err)
		}
	}

	for b.Loop() {
		_ = o.admit(memberKey{1, "q"}, now, now)
	}
}

// TestALateHeartbeatKeepsNobodyLonger: a link delivers heartbeats of a gateway after its death. Its users are gone as
// soon as without these heartbeats.
func TestALateHeartbeatKeepsNobodyLonger(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, _ := start(t, "n", newStore())

		r.op(gw("a"), join(1, "p"))

		for age := time.Second; age < timeout; age += time.Second {
			time.Sleep(time.Second)

			r.deliver(&heartbeat.Beat{Source: gw("a"), Partition: 1, Stream: 1, Alive: []presence.User{1}, Age: age})
			r.want("p", 1)
		}
		r.deliver(&heartbeat.Beat{
			Source: gw("a"), Partition: 1, Stream: 1, First: 2,
			Ops: []heartbeat.Op{join(4, "p")}, Age: timeout - time.Second,
		})
		r.want("p", 2)

		time.Sleep(time.Second + wheelTick)
		r.want("p", 0)
	})
}
