package owner

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"headcount/counter"
	"headcount/internal/rows"
)

// Rows that nobody of ours wrote are malformed to callers as well. They can act as in an outage, but are not told of
// one.
func TestMalformedRowsAreNoOutage(t *testing.T) {
	err := unavailable("read", fmt.Errorf("redis: %w: a key", rows.ErrMalformed))

	if !errors.Is(err, counter.ErrMalformed) || !errors.Is(err, counter.ErrUnavailable) {
		t.Errorf("%v is not malformed, or not unavailable", err)
	}
	if strings.Contains(err.Error(), counter.ErrUnavailable.Error()) {
		t.Errorf("%q speaks of an outage", err)
	}
	if err := unavailable("read", rows.ErrUnavailable); errors.Is(err, counter.ErrMalformed) {
		t.Errorf("an outage is malformed: %v", err)
	}
}

// TestAnOwnerElsewhereSaysThatARowIsMalformed: the sender of a call learns the same as if it owned the row itself.
func TestAnOwnerElsewhereSaysThatARowIsMalformed(t *testing.T) {
	call := Call{Number: 1, Ops: []counter.Op{{Changes: []counter.Change{{Key: "views"}}}}}
	answer := Answer{Results: []counter.Result{{Err: fmt.Errorf("row of %q: %w", "views", ErrMalformed)}}}

	got, err := ParseAnswer(AppendAnswer(nil, &call, &answer), &call)
	if err != nil {
		t.Fatal(err)
	}
	is := got.Results[0].Err
	if !errors.Is(is, counter.ErrMalformed) || errors.Is(is, counter.ErrOp) {
		t.Errorf("the sender got %v", is)
	}
	if !strings.Contains(is.Error(), `"views"`) {
		t.Errorf("%q does not say which row", is)
	}
}
