package owner

import (
	"testing"
	"testing/synctest"
	"time"

	"headcount/counter"
	"headcount/counter/limit"
	"headcount/internal/rows"
	"headcount/internal/rows/rowsmem"
)

// TestReservationsAreDueAfterTheClockWentBack: a clock was hours ahead while a process looked for what is due, and was
// then set. Reservations that are made from then on are due in time.
func TestReservationsAreDueAfterTheClockWentBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := rowsmem.New(rowsmem.Config{})
		o := New(store, Config{Name: "only", VerifyEvery: -1, SweepEvery: -1})
		defer o.Close()
		if err := o.Own(t.Context(), ExactPartition); err != nil {
			t.Fatal(err)
		}

		dues := NewDues(store)
		next := func() []counter.Due {
			t.Helper()
			all, _, err := dues.Next(t.Context())
			if err != nil {
				t.Fatal(err)
			}

			return all
		}
		next()
		// The clock of a bubble cannot go back, so what it has left behind is put here.
		dues.from += int64(3 * time.Hour / time.Second)

		hold := &counter.Hold{ID: "cart", For: time.Minute}
		rule := &counter.Rule{Kind: counter.Exact}
		reserve := counter.Change{Key: "k", Rule: rule, Verb: counter.Reserve, Delta: 2, Hold: hold}
		ops := []counter.Op{{Changes: []counter.Change{reserve}}}
		answer, err := o.Do(t.Context(), Call{Partition: ExactPartition, Ops: ops})
		if err != nil || answer.Results[0].Err != nil {
			t.Fatal(answer, err)
		}

		time.Sleep(59 * time.Second)
		if all := next(); len(all) != 0 {
			t.Errorf("%+v are due a second early, want none", all)
		}
		time.Sleep(2 * time.Second)
		if all := next(); len(all) != 1 {
			t.Errorf("%+v are due, want the reservation", all)
		}
	})
}

// TestLimitsAfterTheClockWentBack: a clock was hours ahead while a limit was used up, and was then set. After two
// windows at most the limit lets calls pass again.
func TestLimitsAfterTheClockWentBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := New(rowsmem.New(rowsmem.Config{}), Config{Name: "only", VerifyEvery: -1, SweepEvery: -1})
		defer o.Close()
		if err := o.Own(t.Context(), 0); err != nil {
			t.Fatal(err)
		}

		r := limit.Request{
			Name: limit.Name{Key: "k", Algorithm: limit.Sliding, Window: time.Minute.Milliseconds()}, Limit: 1, Cost: 1,
		}
		take := func() bool {
			t.Helper()
			answer, err := o.Do(t.Context(), Call{Partition: 0, More: &More{Limits: []limit.Request{r}}})
			if err != nil {
				t.Fatal(err)
			}

			return answer.More.Limits[0].Allowed
		}

		// The clock of a bubble cannot go back, so what the clock has left behind is written here.
		var state limit.State
		state.Take(r, time.Now().Add(3*time.Hour).UnixMilli())
		row := rows.Row{Name: limitName(r.Name), Value: state.Append(nil)}
		if _, err := o.Do(t.Context(), Call{Partition: 0, More: &More{Rows: []Expiring{{Row: row}}}}); err != nil {
			t.Fatal(err)
		}

		if take() {
			t.Error("a call passes at once, want that the limit is used up")
		}
		time.Sleep(2 * time.Minute)
		if !take() {
			t.Error("two windows later a call is refused, want that it passes")
		}
	})
}

// TestSweepsAfterTheClockWentBack: a clock was hours ahead while expired rows were deleted, and was then set. What
// expires from then on is deleted in time.
func TestSweepsAfterTheClockWentBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := rowsmem.New(rowsmem.Config{})
		// The clock of a bubble cannot go back, so what the clock has left behind is written here.
		claims, err := store.Claim(t.Context(), "before", []rows.Former{{Partition: 0}})
		if err != nil {
			t.Fatal(err)
		}
		m := meta{swept: time.Now().Add(3*time.Hour).Unix() / 60}
		left := rows.Commit{Epoch: claims[0].Epoch, Number: 1, At: time.Now()}
		left.Rows = []rows.Row{{Name: metaRow, Value: m.encode()}}
		if err := store.Commit(t.Context(), []rows.Commit{left})[0]; err != nil {
			t.Fatal(err)
		}

		o := New(store, Config{Name: "only", VerifyEvery: -1})
		defer o.Close()
		if err := o.Own(t.Context(), 0); err != nil {
			t.Fatal(err)
		}

		r := limit.Request{
			Name: limit.Name{Key: "k", Algorithm: limit.Fixed, Window: time.Minute.Milliseconds()}, Limit: 1, Cost: 1,
		}
		for range 2 {
			if _, err := o.Do(t.Context(), Call{Partition: 0, More: &More{Limits: []limit.Request{r}}}); err != nil {
				t.Fatal(err)
			}
			if store.Get(0, limitName(r.Name)) == nil {
				t.Fatal("the limit has no state")
			}

			time.Sleep(5 * time.Minute)
			if store.Get(0, limitName(r.Name)) != nil {
				t.Error("five minutes later the state of a limit for a minute is there, want that it is deleted")
			}
		}
	})
}
