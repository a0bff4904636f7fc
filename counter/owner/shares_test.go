package owner

import (
	"context"
	"errors"
	"testing"

	"headcount/counter"
	"headcount/internal/rows"
)

// away is a store that cannot be read.
type away struct{ rows.Store }

func (away) Read(_ context.Context, addresses []rows.Address) []rows.Found {
	found := make([]rows.Found, len(addresses))
	for i := range found {
		found[i].Err = rows.ErrUnavailable
	}

	return found
}

// TestAnExportWhileTheStoreFails: if the shares of other regions cannot be read, the export fails with the error of the
// store.
func TestAnExportWhileTheStoreFails(t *testing.T) {
	r := NewReader(away{}, func(string) int { return 7 })
	sum := found{head: head{key: "views"}}
	sum.Kind = counter.Sum

	if _, err := r.elsewhere(t.Context(), &sum); !errors.Is(err, counter.ErrUnavailable) {
		t.Errorf("the error is %v, want ErrUnavailable", err)
	}
}
