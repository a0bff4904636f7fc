package rowstier

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"headcount/internal/rows"
)

// TestAFormerOwnerDrainsNothingOld: a process has owned the partition while the durable store was away, so it has never
// claimed the partition there. When the durable store is back, the partition has another owner, and what that has
// drained stays.
func TestAFormerOwnerDrainsNothingOld(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		fast, durable, former := unclaimedDurable(t)
		time.Sleep(2 * time.Second) // a drain fails

		durable.away.Store(false)
		o := newOwned(t, "owner", fast, durable)
		o.must(t, o.next("4"))
		time.Sleep(5 * time.Second) // the former owner drains, too
		o.wants(t, durable, "4")
		if n := former.Dirty(); n != 0 {
			t.Errorf("the former owner has %d rows", n)
		}
		if err := o.commit(t, o.next("5")); err != nil {
			t.Errorf("the owner commits: %v", err)
		}
		former.close(t)
		o.close(t)
	})
}

// TestAFailedTakeoverDrainsNothingOld: a process takes a partition back, claims it in the durable store, and fails.
// What it knows from its former claim is not drained over what another process has drained meanwhile.
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
		durable.claiming = func() { fast.away.Store(true) }
		if _, err := former.Claim(t.Context(), "former", []rows.Former{{Partition: 7}}); err == nil {
			t.Fatal("the takeover has not failed")
		}
		fast.away.Store(false)

		time.Sleep(5 * time.Second)
		o.wants(t, durable, "3")
		if n := former.Dirty(); n != 0 {
			t.Errorf("the former owner has %d rows", n)
		}
		former.close(t)
		o.close(t)
	})
}

// TestARefusedClaimLeavesNothingToDrain: a takeover has failed before it got to the changes that were not drained, and
// another process has claimed the partition since. That one drains them, and the former owner waits for nothing.
func TestARefusedClaimLeavesNothingToDrain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		fast, durable, former := undrainedChange(t)

		// No time passes until the takeover has failed, so the former owner does not drain.
		again := []rows.Former{{Partition: 7, Epoch: former.claim.Epoch}}
		durable.claiming = func() { fast.away.Store(true) }
		if _, err := former.Claim(t.Context(), "former", again); err == nil {
			t.Fatal("the takeover has not failed")
		}
		fast.away.Store(false)

		o := newOwned(t, "owner", fast, durable)
		claims, err := former.Claim(t.Context(), "former", again)
		if err != nil || claims[0].Epoch != 0 || claims[0].Err != nil {
			t.Fatalf("the former owner claims again: %+v, %v", claims, err)
		}
		if former.Dirty() != 0 || former.Lag() != 0 {
			t.Errorf("the former owner has %d rows, for %s", former.Dirty(), former.Lag())
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if err := former.Close(ctx); err != nil {
			t.Errorf("the former owner ends: %v", err)
		}

		o.close(t)
		o.wants(t, durable, "2")
	})
}

// TestARefusedClaimEndsNoDrain: the fast store has lost a change, and another process has claimed the partition there,
// but not in the durable store yet. The former owner alone still has the change, and drains it.
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
			t.Fatalf("the former owner claims again: %+v, %v", claims, err)
		}
		former.close(t)

		o := newOwned(t, "owner", fast, durable)
		o.wants(t, o, "2")
		o.close(t)
	})
}

// TestAnOvertakenRenewalDrainsNothingOld: the fast store has lost everything, and its owner claims the partition again.
// Before it gets to the durable store, another process claims both stores, and goes on. The renewal fails, and what its
// process knows is not drained over what the other one has drained.
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
			t.Fatal("the renewal has not failed")
		}

		time.Sleep(5 * time.Second)
		o.wants(t, durable, "3")
		claims, err := former.Claim(t.Context(), "former", again)
		if err != nil || claims[0].Epoch != 0 || former.Dirty() != 0 {
			t.Errorf("the former owner claims again: %+v, %v, and has %d rows", claims, err, former.Dirty())
		}
		former.close(t)
		o.close(t)
	})
}

// unclaimedDurable returns both stores, and an owner of the partition that has never claimed it in the durable one,
// which is away, and has a change to drain.
func unclaimedDurable(t *testing.T) (*fastStore, *durableStore, *owned) {
	t.Helper()
	fast := newFast()
	durable := newDurable()
	first := newOwned(t, "first", fast, durable)
	first.must(t, first.next("1"))
	first.must(t, first.next("2")) // brings the state to the fast store
	first.close(t)

	durable.away.Store(true)
	former := newOwned(t, "former", fast, durable)
	if err := former.commit(t, former.next("3")); err != nil {
		t.Fatal(err)
	}

	return fast, durable, former
}

// undrainedChange returns both stores, and an owner of the partition in both, which has a change to drain.
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
