package call_test

import (
	"fmt"
	"sync"
	"testing"
	"testing/synctest"

	"headcount/counter"
	"headcount/counter/countertest"
	"headcount/counter/owner"
	"headcount/internal/rows/rowsmem"
)

// TestDifferentBatchesUnderOneKey: at the same moment callers send batches of different counters under one idempotency
// key. One of them is made, and all others are replays that change nothing.
func TestDifferentBatchesUnderOneKey(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := calledBy(t, rowsmem.New(rowsmem.Config{}), countertest.Rules, owner.Config{Name: "only"})
		// Who comes first depends on the scheduler, so one round would show only one order.
		for round := range 40 {
			id := counter.NewIdempotencyKey("*", "", fmt.Sprint(round))

			var made, replays int
			for _, result := range atOnce(t, s, id, round) {
				switch {
				case result.Err != nil:
					t.Errorf("round %d: %v", round, result.Err)
				case result.Replay:
					replays++
				default:
					made++
				}
			}

			if made != 1 || replays != 3 {
				t.Errorf("round %d: %d batches were made, want 1, and %d are replays, want 3", round, made, replays)
			}
		}

		// In each of the 40 rounds two counters have changed.
		sum, err := s.Aggregate(t.Context(), "k:")
		if err != nil || sum.Value != 2*40 {
			t.Errorf("the counters add up to %+v, %v; want %d", sum, err, 2*40)
		}
	})
}

// atOnce has four callers, each of which adds 1 to two counters of its own.
func atOnce(t *testing.T, s counter.Writer, id counter.IdempotencyKey, round int) []counter.Result {
	results := make([]counter.Result, 4)

	var callers sync.WaitGroup
	for caller := range results {
		callers.Go(func() {
			batch := counter.Op{IdempotencyKey: id}
			// Two counters, which usually lie in different partitions, so that the batch is made in parts.
			for half := range 2 {
				key := fmt.Sprintf("k:%d:%d:%d", round, caller, half)
				batch.Changes = append(batch.Changes, counter.Change{
					Key: key, Rule: countertest.Rules.Find(key), Verb: counter.Add, Delta: 1,
				})
			}

			results[caller] = s.Apply(t.Context(), []counter.Op{batch})[0]
		})
	}
	callers.Wait()

	return results
}
