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

// TestReservationHistories: free + reserved + committed is what was put in, in every random history, also when
// reservations expire, and when one owner after another takes over. With -histories 10000 it takes about a minute.
func TestReservationHistories(t *testing.T) {
	n := *histories
	if testing.Short() {
		n = min(n, 60)
	}

	for i := range uint64(n) {
		seed := *firstHistory + i
		ok := t.Run(fmt.Sprint(seed), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { keepHistory(t, seed) })
		})
		if !ok {
			t.Fatalf("replay: go test ./counter/call -run ReservationHistories -histories 1 -first-history %d", seed)
		}
	}
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
	if seed%3 == 0 { // nobody takes over what is in memory alone
		h.Store = inMemory(t, countertest.Rules)
		h.Crash = nil
	}
	h.Run(t, 60)
}

// taken returns a store whose owner has taken everything over.
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
