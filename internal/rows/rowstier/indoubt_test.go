package rowstier

import (
	"testing"
	"testing/synctest"
	"time"

	"headcount/internal/rows"
)

// TestACommitThatNobodyAcknowledged: the fast store has made a commit without an answer when its owner claims the
// partition again. What the commit wrote is drained with the next changes.
func TestACommitThatNobodyAcknowledged(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		fast := newFast()
		durable := newDurable()
		o := newOwned(t, "owner", fast, durable)
		o.must(t, o.next("1"))

		unanswered := o.unanswered(t, fast, "2")
		claims, err := o.Claim(t.Context(), "owner", []rows.Former{{Partition: 7, Epoch: o.claim.Epoch}})
		if err != nil || claims[0].Number != unanswered.Number {
			t.Fatalf("the new claim is %v, %v; want the number of the commit without an answer", claims, err)
		}
		o.claim = claims[0]

		// Another row, so that the value "2" can come only from the commit without an answer.
		other := o.next("3")
		other.Rows[0].Field = "g"
		o.must(t, other)
		time.Sleep(time.Second)
		o.close(t)
		o.wants(t, durable, "2")
	})
}

// TestALossDuringATakeover: after its owner has claimed again, the fast store loses a commit without an answer. The
// claim fails, and the next claim does not take the commit for stored.
func TestALossDuringATakeover(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		fast := newFast()
		durable := newDurable()
		o := newOwned(t, "owner", fast, durable)
		defer o.close(t)
		o.must(t, o.next("1"))

		unanswered := o.unanswered(t, fast, "2")

		former := []rows.Former{{Partition: 7, Epoch: o.claim.Epoch}}
		durable.claiming = func() { fast.lose(len(fast.log)) }
		if claims, err := o.Claim(t.Context(), "owner", former); err == nil {
			t.Errorf("the claim is %+v, want an error", claims)
		}
		// With the number of the lost commit the owner would answer its caller that the change is stored.
		claims, err := o.Claim(t.Context(), "owner", former)
		if err != nil || claims[0].Epoch == 0 || claims[0].Number >= unanswered.Number {
			t.Errorf("the next claim is %+v, %v; want a number below that of the lost commit", claims, err)
		}
	})
}

// TestADeletionInDoubtBeforeTheFirstEviction: a deletion has no answer, and before it is repeated the first row of the
// partition is to be evicted. The deleted row stays deleted for readers, whose missing rows the durable store has from
// then on.
func TestADeletionInDoubtBeforeTheFirstEviction(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		fast := newFast()
		durable := newDurable()
		o := newOwned(t, "owner", fast, durable)
		defer o.close(t)
		o.must(t, o.next("1"))
		other := o.next("1")
		other.Rows[0].Field = "evicted"
		o.must(t, other)

		// Nothing is drained from here on.
		release, err := o.hold(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		defer release()
		deletion := o.next("")
		deletion.Rows[0].Value = nil
		prepared := o.partitions[7].prepare(&deletion)
		if err := fast.Commit(t.Context(), []rows.Commit{prepared})[0]; err != nil {
			t.Fatal(err)
		}
		// The fast store made the deletion while it was complete, so it wrote no tombstone. The repetition comes after
		// the first eviction, but the store may keep to the earlier form.
		o.Evict(7, []rows.Name{other.Rows[0].Name})
		if err := o.commit(t, deletion); err != nil {
			t.Fatal(err)
		}

		// The next commit, which is no repetition, has to write the tombstone that the store may lack.
		third := o.next("3")
		third.Rows[0].Field = "g"
		if err := o.commit(t, third); err != nil {
			t.Fatal(err)
		}
		got := o.Read(t.Context(), []rows.Address{{Partition: 7, Name: o.name}})[0]
		if got.Value != nil || got.Err != nil {
			t.Errorf("the deleted row is %q, %v; want none", got.Value, got.Err)
		}
	})
}

// unanswered makes the next commit in the fast store, and the tier never learns of it.
func (o *owned) unanswered(t *testing.T, fast *fastStore, value string) rows.Commit {
	t.Helper()
	c := o.next(value)
	prepared := o.partitions[7].prepare(&c)
	if err := fast.Commit(t.Context(), []rows.Commit{prepared})[0]; err != nil {
		t.Fatal(err)
	}

	return c
}
