package pgstore

import (
	"context"
	"testing"

	"headcount/counter"
	"headcount/counter/pgtest"
)

// TestNoRowFallsBack: what a Redis with an older memory has of a counter is not persisted.
func TestNoRowFallsBack(t *testing.T) {
	s := open(t, pgtest.Single(t).Database(t), func(c *Config) { c.Behind = true })
	for _, tc := range []struct{ value, want int64 }{{12, 12}, {6, 12}, {13, 13}} { // also its number of changes
		state := counter.State{Kind: counter.Sum, Value: tc.value, Updated: 1, Version: counter.Version{Incarnation: 7, Sequence: uint64(tc.value)}}
		_, err := s.Persist(t.Context(), func(ctx context.Context, p *Persisting) (epoch, deleted uint64, err error) {
			return p.Epoch + 1, 0, p.Write(ctx, []counter.Cut{{Key: "v:1", State: state}})
		})
		rows, err1 := s.Rows(t.Context(), []string{"v:1"})
		if err != nil || err1 != nil || rows["v:1"].Value != tc.want {
			t.Errorf("after %d was to be persisted: %+v, want %d, %v, %v", tc.value, rows["v:1"], tc.want, err, err1)
		}
	}
}
