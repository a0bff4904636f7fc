package rows_test

import (
	"encoding/binary"
	"testing"
	"time"

	"headcount/internal/rows"
)

// TestWithoutMany: after a long outage a store knows most of several hundred thousand IDs. To leave them out takes
// a moment: whoever does it holds a lock.
func TestWithoutMany(t *testing.T) {
	const many = 400_000
	ids := make([]rows.ID, many)
	for i := range ids {
		binary.LittleEndian.PutUint64(ids[i].Bytes[:], uint64(i))
		ids[i].Until = time.Unix(1, 0)
	}

	left := rows.Without(ids, ids[1:])
	if len(left) != 1 || left[0] != ids[0] || len(ids) != many || ids[1].Until.IsZero() {
		t.Errorf("of %d IDs %v are left, want the first alone, and %d as before", many, left, len(ids))
	}
}
