package owner

import (
	"context"
	"encoding/binary"
	"fmt"
	"testing"
	"time"

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

// changing is a store whose counter changes after each read of its head.
type changing struct {
	*rowsmem.Store
	change func()
}

func (s changing) Read(ctx context.Context, addresses []rows.Address) []rows.Found {
	found := s.Store.Read(ctx, addresses)
	if addresses[0].Collection == heads {
		s.change()
	}

	return found
}

// TestAnExportOfACounterThatKeepsChanging: it never finds the rows of a counter at one moment, and has the counter all
// the same as it was at one. An import would refuse the set for its value, and give later entries of the ledger wrong
// numbers.
func TestAnExportOfACounterThatKeepsChanging(t *testing.T) {
	const hour = 3600
	s := changing{Store: rowsmem.New(rowsmem.Config{})}
	claims, _ := s.Claim(t.Context(), "owner", []rows.Former{{Partition: 7}})
	n := 0
	s.change = func() {
		n++
		headed := func(key string, is counter.State, parts parts) *head {
			is.Version = counter.Version{Incarnation: 1, Sequence: uint64(n)}
			is.Value = int64(n)
			return &head{key: key, record: record{State: is, life: 1, parts: parts}}
		}
		exact := headed("e:1", counter.State{Kind: counter.Exact, Entries: uint64(n)}, 0)
		slots := counter.Slots{{Step: hour, Number: uint32(n), Value: 1}}
		sum := headed("n:1", counter.State{Kind: counter.Sum, Slots: slots}, historyPart(hour))
		crowd := headed("s:1", counter.State{Kind: counter.Members}, hasSet)
		crowd.extent = &extent{members: uint64(n)}

		var entries, past, members []byte
		for i := range n {
			entries = appendEntry(entries, &counter.Entry{
				Op: counter.LedgerOp(1), Before: int64(i), Delta: 1, At: time.Unix(int64(i), 0),
			})
			hash := hashOf(fmt.Sprint(i))
			members = append(members, hash[:]...)
			past = binary.AppendVarint(append(past, byte(i)), 1)
		}

		c := rows.Commit{Partition: 7, Epoch: claims[0].Epoch, After: uint64(n - 1), Number: uint64(n)}
		c.Rows = []rows.Row{
			{Name: headOf(exact.key), Value: exact.append(nil)},
			{Name: ledgerName(exact, 1), Value: entries},
			{Name: headOf(sum.key), Value: sum.append(nil)},
			{Name: rows.Name{Collection: historyCollection(sum, hour), Field: numberField(0)}, Value: past},
			{Name: headOf(crowd.key), Value: crowd.append(nil)},
			{Name: set{h: crowd}.row(0), Value: members},
		}
		if err := s.Commit(t.Context(), []rows.Commit{c})[0]; err != nil {
			t.Fatal(err)
		}
	}
	s.change()

	exported := map[string]counter.Copy{}
	err := NewReader(s, rows.PartitionOf).Dump(t.Context(), "", func(c counter.Copy) error {
		line, err := c.MarshalJSON()
		var again counter.Copy
		if err == nil {
			err = again.UnmarshalJSON(line)
		}
		exported[c.Key] = again
		return err
	})
	if err != nil {
		t.Fatal(err)
	}

	e := exported["e:1"]
	if len(e.Ledger) == 0 || uint64(len(e.Ledger)) != e.Entries || e.Ledger[len(e.Ledger)-1].After != e.Value {
		t.Errorf("a counter of %d with %d entries has the ledger %+v", e.Value, e.Entries, e.Ledger)
	}
	sum := exported["n:1"]
	if running := int64(sum.Slots[0].Number); len(sum.Steps) == 0 || sum.Steps[len(sum.Steps)-1].Number != running-1 {
		t.Errorf("the time buckets that are over are %+v, and the running one is %d", sum.Steps, running)
	}
	if is := exported["s:1"]; is.Value == 0 || is.Value != int64(len(is.Hashes)) {
		t.Errorf("a set of %d has %d members", is.Value, len(is.Hashes))
	}
}
