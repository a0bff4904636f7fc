package counterpg

import (
	"context"
	"testing"

	"headcount/counter"
	"headcount/internal/pgtest"
	"headcount/internal/testkit"
)

// TestServerNoRowFallsBack: what a Redis with an older memory has of a counter is not persisted.
func TestServerNoRowFallsBack(t *testing.T) {
	s := open(t, pgtest.Single(t).Database(t), func(c *Config) { c.Behind = true })
	for _, tc := range []struct{ value, want int64 }{{12, 12}, {6, 12}, {13, 13}} { // also its number of changes
		state := counter.State{Kind: counter.Sum, Value: tc.value, Updated: 1, Version: counter.Version{Incarnation: 7, Sequence: uint64(tc.value)}}
		_, err := s.Persist(t.Context(), func(ctx context.Context, p *Persisting) (number, deleted uint64, err error) {
			return p.Checkpoint + 1, 0, p.Write(ctx, []counter.Drained{{Key: "v:1", State: state}})
		})
		rows, err1 := s.Rows(t.Context(), []string{"v:1"})
		if err != nil || err1 != nil || rows["v:1"].Value != tc.want {
			t.Errorf("after %d was to be persisted: %+v, want %d, %v, %v", tc.value, rows["v:1"], tc.want, err, err1)
		}
	}
}

// TestServerAGenerationThatWaitsForACheckpointKnowsWhatItWrote: whoever begins a generation while a checkpoint is being written learns of its
// idempotency keys. Without that the operations of the checkpoint would count again when they are repeated.
func TestServerAGenerationThatWaitsForACheckpointKnowsWhatItWrote(t *testing.T) {
	database := pgtest.Single(t).Database(t)
	s := open(t, database, func(c *Config) { c.Behind = true })
	var front Front
	regenerated := make(chan error, 1)
	_, err := s.Persist(t.Context(), func(ctx context.Context, p *Persisting) (number, deleted uint64, err error) {
		go func() {
			regenerated <- s.Regenerate(t.Context(), func(_ context.Context, f Front) (uint64, error) { front = f; return 0, nil })
		}()
		testkit.Eventually(t, "it waits for the checkpoint", func() bool {
			var waiting int
			err := p.c.QueryRow(ctx, "select count(*) from pg_locks where not granted").Scan(&waiting)
			return err != nil || waiting > 0
		})
		return p.Checkpoint + 1, 77, p.IdempotencyKeys(ctx, []counter.IdempotencyKey{{1}})
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := <-regenerated; err != nil || !front.IdempotencyKeys || front.Deleted != 77 {
		t.Errorf("%+v, %v", front, err)
	}
}
