package rowsmem

import (
	"context"
	"encoding/binary"
	"testing"
	"time"

	"headcount/internal/rows"
)

// TestIDsAreForgottenAfterTheClockWentBack: IDs that were used while the clock was ahead expire late. They keep no
// other IDs in memory until then.
func TestIDsAreForgottenAfterTheClockWentBack(t *testing.T) {
	const kept = 1000 // how many commits later an ID expires
	s := New(Config{})
	claims, _ := s.Claim(t.Context(), "owner", []rows.Former{{}})
	number := uint64(0)
	commit := func(at time.Time) {
		t.Helper()
		number++
		id := rows.ID{Until: at.Add(kept * time.Second)}
		binary.BigEndian.PutUint64(id.Bytes[:], number)
		c := rows.Commit{Epoch: claims[0].Epoch, After: number - 1, Number: number, At: at, IDs: []rows.ID{id}}
		if err := s.Commit(context.Background(), []rows.Commit{c})[0]; err != nil {
			t.Fatal(err)
		}
	}

	now := time.Now()
	const ahead = 100 // commits
	for i := range ahead {
		commit(now.Add(24*365*time.Hour + time.Duration(i)*time.Second))
	}
	for i := range 5 * kept {
		commit(now.Add(time.Duration(i) * time.Second))
	}

	p := &s.partitions[0]
	if most := 2*kept + ahead; len(p.ids) > most || len(p.oldest) > most {
		t.Errorf("%d IDs are remembered, in a list of %d; want at most %d", len(p.ids), len(p.oldest), most)
	}
}
