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
