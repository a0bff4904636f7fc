package owner

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

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

// TestForeignRegisters: registers that another program wrote end no process.
func TestForeignRegisters(t *testing.T) {
	h := &head{key: "visitors:1", record: record{life: 1, extent: &extent{}}}
	d := &draft{p: &partition{}}
	r := registers{d: d, collection: setCollection(h), counts: true}
	d.put(r.name(0), []byte{aloneForm, 0xff, 0xff, 0xff})

	if n := (unique{d, h}).Count(); n < 1 {
		t.Errorf("the estimate of one register is %d", n)
	}
	r.split(d.get(r.name(0)))
}

// foreignRow is a store in which another program wrote a row of registers.
type foreignRow struct {
	rows.Store
	field string
}

func (f foreignRow) Scan(
	_ context.Context, _ int, _, _ string, each func(field string, value []byte) error,
) error {
	return each(f.field, []byte{sparseForm, 0xff, 0xff})
}

func TestForeignRowsOfTimeBuckets(t *testing.T) {
	for _, field := range []string{"00000001" + "ff", "00000001" + "-1", "00000001" + "10", "00000001"} {
		r := NewReader(foreignRow{field: field}, rows.PartitionOf)

		_, err := r.uniqueGains(t.Context(), &found{head: head{key: "visitors:1"}}, time.Hour, 0, 10)
		if !errors.Is(err, ErrMalformed) {
			t.Errorf("a row named %q: %v", field, err)
		}
	}
}

// TestACallOfNoPartition: a partition is an index, and the call may come from a process with a fault.
func TestACallOfNoPartition(t *testing.T) {
	for _, partition := range []int{-1, rows.Partitions} {
		call := Call{Partition: partition, Number: 1}
		if got, err := ParseCall(AppendCall(nil, &call), &Rules{}); !errors.Is(err, ErrMalformed) {
			t.Errorf("partition %d: %v, %v", partition, got, err)
		}
	}
}
