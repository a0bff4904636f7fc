package rowspg

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"

	"headcount/internal/outage"
	"headcount/internal/pgtest"
	"headcount/internal/rows"
	"headcount/internal/testkit"
)

// TestClockServerKilledWhileItCommits: PostgreSQL is killed. Acknowledged commits stay, and a commit without an answer
// is made exactly once when it is repeated.
func TestClockServerKilledWhileItCommits(t *testing.T) {
	server := pgtest.Start(t)
	s := open(t, server.Database(t))
	var made, refused atomic.Int64
	var ends atomic.Bool
	var writers sync.WaitGroup
	for p := range 8 {
		claims, err := s.Claim(t.Context(), "a", []rows.Former{{Partition: p}})
		if err != nil {
			t.Fatal(err)
		}

		writers.Go(func() {
			for number := uint64(1); !ends.Load(); number++ {
				c := rows.Commit{Partition: p, Epoch: claims[0].Epoch, After: number - 1, Number: number}
				c.Rows = []rows.Row{{Name: rows.Name{Collection: "c", Field: fmt.Sprint(number)}, Value: []byte{1}}}
				if !insist(t, s, c, &refused) {
					return
				}

				made.Add(1)
			}
		})
	}

	more := func(of *atomic.Int64, by int64) {
		before := of.Load()
		testkit.Eventually(t, fmt.Sprintf("%d more", by), func() bool { return of.Load() >= before+by })
	}

	for range 2 {
		more(&made, 50)
		server.Kill()
		more(&refused, 16)
		server.Restart(t)
	}

	more(&made, 50)
	ends.Store(true)
	writers.Wait()

	var found int64
	for p := range 8 {
		count := func(string, []byte) error { found++; return nil }
		if err := s.Scan(t.Context(), p, "c", "", count); err != nil {
			t.Fatal(err)
		}
	}

	if found != made.Load() {
		t.Errorf("%d commits were acknowledged, and the store has %d rows", made.Load(), found)
	}

	t.Logf("%d commits, %d repetitions", made.Load(), refused.Load())
}

// insist repeats a commit until it is made. It returns false if the commit is refused.
func insist(t *testing.T, s *Store, c rows.Commit, refused *atomic.Int64) bool {
	for {
		err := s.Commit(t.Context(), []rows.Commit{c})[0]
		if err == nil {
			return true
		}
		if !errors.Is(err, rows.ErrUnavailable) {
			t.Error(err)
			return false
		}

		refused.Add(1)
		outage.Sleep(t.Context(), outage.Jitter(outage.ProbeEvery/50))
	}
}
