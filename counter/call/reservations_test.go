package call_test

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"testing/synctest"
	"time"

	"headcount/counter"
	"headcount/counter/call"
	"headcount/counter/countertest"
	"headcount/counter/owner"
	"headcount/internal/rows"
	"headcount/internal/rows/rowsmem"
)

// TestReservationHistories: in every random history free + reserved + committed is what was put in, even when
// reservations expire, and when one owner after another takes over. With -histories 10000 it takes some minutes.
func TestReservationHistories(t *testing.T) {
	eachHistory(t, keepHistory)
}

func keepHistory(t *testing.T, seed uint64) {
	h := &countertest.Holdings{Rand: rand.New(rand.NewPCG(seed, 0)), Pause: time.Sleep}
	store := rowsmem.New(rowsmem.Config{})
	life := 0
	h.Crash = func() counter.Store {
		life++
		return taken(t, store, fmt.Sprint("life ", life))
	}
	h.Store = h.Crash()
	if seed%3 == 0 { // in memory alone, where no owner can take over
		h.Store = inMemory(t, countertest.Rules)
		h.Crash = nil
	}
	h.Run(t, 60)
}

// TestReservationsDueForLong: what should have expired while no process ran is found at once, also of a deleted
// counter. The rows that note when it is due are deleted later.
func TestReservationsDueForLong(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		over := rowsmem.New(rowsmem.Config{})
		s := taken(t, over, "before")
		for key, life := range map[string]time.Duration{
			"e:1": time.Second, "e:2": 3 * time.Hour, "e:gone": time.Minute,
		} {
			hold := &counter.Hold{ID: "cart", For: life}
			must(t, s, key, counter.Change{Verb: counter.Reserve, Delta: 2, Hold: hold})
		}

		must(t, s, "e:gone", counter.Change{Verb: counter.Delete})

		// Much longer than any of the reservations, as if no process had run for a month.
		time.Sleep(30 * 24 * time.Hour)
		s = taken(t, over, "after")
		if made := countertest.ExpireDue(t, s); len(made) != 3 {
			t.Errorf("%d reservations were due, want 3", len(made))
		}

		read, err := s.Read(t.Context(), []string{"e:1", "e:2"}, "", 0)
		if err != nil || read[0].Value != 0 || read[1].Value != 0 || read[0].Reserved+read[1].Reserved != 0 {
			t.Errorf("the counters are %+v, %v; want nothing free or reserved", read, err)
		}

		// What has expired must not be due again while the rows that note it are deleted.
		for range 3 {
			if made := countertest.ExpireDue(t, s); len(made) != 0 {
				t.Errorf("%+v are due again, want none", made)
			}
		}

		err = over.Scan(t.Context(), owner.ExactPartition, "due", "", func(field string, _ []byte) error {
			t.Errorf("row %q still says that something is due", field)
			return nil
		})

		if err != nil {
			t.Error(err)
		}
	})
}

// taken returns a store whose owner has taken over all partitions.
func taken(t testing.TB, store rows.Store, name string) counter.Store {
	t.Helper()
	o := owner.New(store, owner.Config{Name: name, VerifyEvery: time.Hour, SweepEvery: time.Hour, Memory: 8 << 10})
	all := make([]int, rows.Partitions)
	for id := range all {
		all[id] = id
	}
	if err := o.Own(t.Context(), all...); err != nil {
		t.Fatal(err)
	}

	s := call.NewStore(store, countertest.Everywhere{Owner: o}, countertest.Rules, call.Config{Stream: name})
	t.Cleanup(func() {
		_ = s.Close()
		o.Close()
	})

	return s
}
