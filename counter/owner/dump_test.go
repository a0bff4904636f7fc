package owner

import (
	"context"
	"fmt"
	"testing"

	"headcount/counter"
	"headcount/internal/rows"
	"headcount/internal/rows/rowsmem"
)

// scanned counts the bytes that scans of a store read. Like a Redis, the store reads a whole collection for each.
type scanned struct {
	*rowsmem.Store
	bytes int
}

func (s *scanned) Scan(
	ctx context.Context, partition int, collection, after string, each func(string, []byte) error,
) error {
	s.bytes += s.Size(partition, collection)

	return s.Store.Scan(ctx, partition, collection, after, each)
}

// TestAnExportReadsTheNamesOfCountersFewTimes: for each page of names Redis reads all of a partition, so small pages
// would keep it busy for hours with an export of millions.
func TestAnExportReadsTheNamesOfCountersFewTimes(t *testing.T) {
	const counters = 1000
	s := &scanned{Store: rowsmem.New(rowsmem.Config{})}
	claims, _ := s.Claim(t.Context(), "owner", []rows.Former{{Partition: 7}})
	c := rows.Commit{Partition: 7, Epoch: claims[0].Epoch, Number: 1}
	is := counter.State{Kind: counter.Exact, Version: counter.Version{Incarnation: 1, Sequence: 1}}
	for i := range counters {
		c.Rows = append(c.Rows, rows.Row{Name: headOf(fmt.Sprintf("e:%04d", i)), Value: EncodeHead(is)})
	}
	if err := s.Commit(t.Context(), []rows.Commit{c})[0]; err != nil {
		t.Fatal(err)
	}

	n := 0
	err := NewReader(s, rows.PartitionOf).Dump(t.Context(), "", func(counter.Copy) error {
		n++
		return nil
	})
	if most := 2 * s.Size(7, heads); err != nil || n != counters || s.bytes > most {
		t.Errorf("%d counters, %v, are found by reading %d bytes; want %d in at most %d",
			n, err, s.bytes, counters, most)
	}
}
