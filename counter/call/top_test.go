package call_test

import (
	"context"
	"errors"
	"strings"
	"testing"

	"headcount/counter"
	"headcount/counter/owner"
	"headcount/internal/rows"
	"headcount/internal/rows/rowsmem"
)

// foreign is a store in which another program has written a candidate of a top list.
type foreign struct{ rows.Store }

func (f foreign) Scan(
	ctx context.Context, id int, of, after string, each func(field string, value []byte) error,
) error {
	if strings.HasPrefix(of, "marks:") {
		return each("12", []byte{1})
	}

	return f.Store.Scan(ctx, id, of, after, each)
}

// TestAForeignMark: a candidate whose field has no whole number is reported as malformed, without further harm.
func TestAForeignMark(t *testing.T) {
	s := openedOver(t, foreign{rowsmem.New(rowsmem.Config{})}, counter.BuiltinRules(), owner.InMemory)

	marked, err := s.Marked(t.Context(), "views:*")
	if !errors.Is(err, counter.ErrMalformed) {
		t.Errorf("got %v and error %v, want ErrMalformed", marked, err)
	}
}
