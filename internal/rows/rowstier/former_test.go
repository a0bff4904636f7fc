package rowstier

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"headcount/internal/rows"
)

// TestAFormerOwnerDrainsNothingOld: a process owned the partition while the durable store was away, so it has never
// claimed the partition there. When the durable store is back, the partition has another owner, and what that owner has
// drained stays.
func TestAFormerOwnerDrainsNothingOld(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		fast, durable, former := unclaimedDurable(t)
		time.Sleep(2 * time.Second) // until a drain has failed

		durable.away.Store(false)
		o := newOwned(t, "owner", fast, durable)
		o.must(t, o.next("4"))
		time.Sleep(5 * time.Second) // until the former owner has tried to drain, too
		o.wants(t, durable, "4")
		// Rows that it kept would count in its metrics, and hold up its end.
		if n := former.Dirty(); n != 0 {
			t.Errorf("the former owner still has %d dirty rows, want none", n)
		}
		// If the former owner had claimed the durable store, the drain of the new one would have been refused, and now
		// its commit.
		if err := o.commit(t, o.next("5")); err != nil {
			t.Errorf("a commit of the new owner returns %v", err)
		}

		former.close(t)
		o.close(t)
	})
}

// TestAFailedTakeoverDrainsNothingOld: a process takes a partition back and claims it in the durable store, and then
// the takeover fails. What it knows from its former claim is not drained over what another process has drained since.
func TestAFailedTakeoverDrainsNothingOld(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		fast, durable, former := undrainedChange(t)

		// No time passes until the takeover has failed, so the former owner does not drain.
		o := newOwned(t, "owner", fast, durable)
		if err := o.commit(t, o.next("3")); err != nil {
			t.Fatal(err)
		}
		if _, err := o.drain(t.Context()); err != nil {
			t.Fatal(err)
		}

		// The takeover holds the durable store from here on, and does not learn what the fast store has.
		durable.claiming = func() { fast.away.Store(true) }
		if _, err := former.Claim(t.Context(), "former", []rows.Former{{Partition: 7}}); err == nil {
			t.Fatal("the takeover succeeded, want an error")
		}

		fast.away.Store(false)

		// Several drains of both processes. One of the former owner would put "2" over the "3".
		time.Sleep(5 * time.Second)
		o.wants(t, durable, "3")
		if n := former.Dirty(); n != 0 {
			t.Errorf("the former owner still has %d dirty rows, want none", n)
		}

		former.close(t)
		o.close(t)
	})
}

// TestARefusedClaimLeavesNothingToDrain: a takeover fails before it reads the changes that were not drained, and
// another process claims the partition. That process drains them, and the former owner has nothing left to do.
func TestARefusedClaimLeavesNothingToDrain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		fast, durable, former := undrainedChange(t)

		// No time passes until the takeover has failed, so the former owner does not drain.
		again := []rows.Former{{Partition: 7, Epoch: former.claim.Epoch}}
		durable.claiming = func() { fast.away.Store(true) }
		if _, err := former.Claim(t.Context(), "former", again); err == nil {
			t.Fatal("the takeover succeeded, want an error")
		}
		fast.away.Store(false)

		o := newOwned(t, "owner", fast, durable)
		claims, err := former.Claim(t.Context(), "former", again)
		if err != nil || claims[0].Epoch != 0 || claims[0].Err != nil {
			t.Fatalf("the claim of the former owner is %+v, %v; want no epoch", claims, err)
		}
		if former.Dirty() != 0 || former.Lag() != 0 {
			t.Errorf("the former owner still has %d dirty rows, for %s; want none", former.Dirty(), former.Lag())
		}
		// Close returns once nothing is left. With a row that it may not drain it would go on until the minute ends.
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if err := former.Close(ctx); err != nil {
			t.Errorf("Close of the former owner returns %v", err)
		}

		o.close(t)
		o.wants(t, durable, "2")
	})
}

// TestARefusedClaimEndsNoDrain: the fast store has lost a change, and another process has claimed the partition there,
// but not yet in the durable store. Only the former owner still has the change, and drains it.
func TestARefusedClaimEndsNoDrain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		fast, durable, former := undrainedChange(t)

		fast.lose(1)
		if _, err := fast.Claim(t.Context(), "owner", []rows.Former{{Partition: 7}}); err != nil {
			t.Fatal(err)
		}
		again := []rows.Former{{Partition: 7, Epoch: former.claim.Epoch}}
		claims, err := former.Claim(t.Context(), "former", again)
		if err != nil || claims[0].Epoch != 0 {
			t.Fatalf("the claim of the former owner is %+v, %v; want no epoch", claims, err)
		}
		// Close drains the change. The durable store accepts that, since nobody else has claimed it there.
		former.close(t)

		o := newOwned(t, "owner", fast, durable)
		o.wants(t, o, "2")
		o.close(t)
	})
}

// TestAnOvertakenRenewalDrainsNothingOld: the fast store has lost everything, and the owner claims its partition again.
// Before it reaches the durable store, another process claims the partition in both stores, and goes on. The renewal
// fails, and what the former owner knows is not drained over what the other process has drained.
func TestAnOvertakenRenewalDrainsNothingOld(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		fast, durable, former := undrainedChange(t)

		fast.lose(len(fast.log))
		var o *owned
		durable.claiming = func() {
			o = newOwned(t, "owner", fast, durable)
			if err := o.commit(t, o.next("3")); err != nil {
				t.Error(err)
			}
			if _, err := o.drain(t.Context()); err != nil {
				t.Error(err)
			}
		}

		again := []rows.Former{{Partition: 7, Epoch: former.claim.Epoch}}
		if _, err := former.Claim(t.Context(), "former", again); err == nil {
			t.Fatal("the renewal succeeded, want an error")
		}

		time.Sleep(5 * time.Second)
		o.wants(t, durable, "3")
		// Only this claim shows the former owner that the partition is gone. From then on it must not count those rows
		// as dirty.
		claims, err := former.Claim(t.Context(), "former", again)
		if err != nil || claims[0].Epoch != 0 || former.Dirty() != 0 {
			t.Errorf("the claim of the former owner is %+v, %v, and it has %d dirty rows; want no epoch and none",
				claims, err, former.Dirty())
		}

		former.close(t)
		o.close(t)
	})
}

// unclaimedDurable returns both stores and an owner that has a change to drain. The durable store is away, and the
// owner has never claimed the partition there.
func unclaimedDurable(t *testing.T) (*fastStore, *durableStore, *owned) {
	t.Helper()
	fast := newFast()
	durable := newDurable()
	first := newOwned(t, "first", fast, durable)
	first.must(t, first.next("1"))
	first.must(t, first.next("2")) // this writes the state to the fast store
	first.close(t)

	durable.away.Store(true)
	former := newOwned(t, "former", fast, durable)
	if err := former.commit(t, former.next("3")); err != nil {
		t.Fatal(err)
	}

	return fast, durable, former
}

// undrainedChange returns both stores and an owner of the partition in both, which has a change to drain.
func undrainedChange(t *testing.T) (*fastStore, *durableStore, *owned) {
	t.Helper()
	fast := newFast()
	durable := newDurable()
	former := newOwned(t, "former", fast, durable)
	former.must(t, former.next("1"))
	if err := former.commit(t, former.next("2")); err != nil {
		t.Fatal(err)
	}

	return fast, durable, former
}
