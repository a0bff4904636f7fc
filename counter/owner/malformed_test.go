package owner

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"headcount/counter"
	"headcount/hyperloglog"
	"headcount/internal/rows"
	"headcount/internal/rows/rowsmem"
)

// Callers learn that rows are malformed, which another program has written. They can act as in an outage, but the
// message does not speak of one.
func TestMalformedRowsAreNoOutage(t *testing.T) {
	err := unavailable("read", fmt.Errorf("redis: %w: a key", rows.ErrMalformed))

	if !errors.Is(err, counter.ErrMalformed) || !errors.Is(err, counter.ErrUnavailable) {
		t.Errorf("%v is not both ErrMalformed and ErrUnavailable", err)
	}
	if strings.Contains(err.Error(), counter.ErrUnavailable.Error()) {
		t.Errorf("%q speaks of an outage", err)
	}
	if err := unavailable("read", rows.ErrUnavailable); errors.Is(err, counter.ErrMalformed) {
		t.Errorf("an outage is ErrMalformed: %v", err)
	}
}

// TestAnOwnerElsewhereSaysThatARowIsMalformed: the sender of a call gets the same error as if it owned the row itself.
func TestAnOwnerElsewhereSaysThatARowIsMalformed(t *testing.T) {
	call := Call{Number: 1, Ops: []counter.Op{{Changes: []counter.Change{{Key: "views"}}}}}
	answer := Answer{Results: []counter.Result{{Err: fmt.Errorf("row of %q: %w", "views", ErrMalformed)}}}

	got, err := ParseAnswer(AppendAnswer(nil, &call, &answer), &call)
	if err != nil {
		t.Fatal(err)
	}

	is := got.Results[0].Err
	if !errors.Is(is, counter.ErrMalformed) || errors.Is(is, counter.ErrOp) {
		t.Errorf("the sender got %v, want ErrMalformed and not ErrOp", is)
	}
	if !strings.Contains(is.Error(), `"views"`) {
		t.Errorf("%q does not say which row", is)
	}
}

// TestForeignRegisters: an estimate of registers that another program wrote does not panic.
func TestForeignRegisters(t *testing.T) {
	h := &head{key: "visitors:1", record: record{life: 1, extent: &extent{}}}
	d := &draft{p: &partition{}}
	r := registers{d: d, collection: setCollection(h), counts: true}
	d.put(r.name(0), []byte{aloneForm, 0xff, 0xff, 0xff})

	if n := (unique{d, h}).Count(); n < 1 {
		t.Errorf("the estimate of one register is %d, want at least 1", n)
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

// TestForeignRowsOfTimeBuckets: rows of time buckets with foreign names are malformed, and end no process.
func TestForeignRowsOfTimeBuckets(t *testing.T) {
	for _, field := range []string{"00000001" + "ff", "00000001" + "-1", "00000001" + "10", "00000001"} {
		r := NewReader(foreignRow{field: field}, rows.PartitionOf)

		_, err := r.uniqueGains(t.Context(), &found{head: head{key: "visitors:1"}}, time.Hour, 0, 10)
		if !errors.Is(err, ErrMalformed) {
			t.Errorf("a row named %q gives %v, want ErrMalformed", field, err)
		}
	}
}

// TestACallOfNoPartition: a call with a number that is no partition is refused. Its sender may be faulty, and the
// number is an index.
func TestACallOfNoPartition(t *testing.T) {
	for _, partition := range []int{-1, rows.Partitions} {
		call := Call{Partition: partition, Number: 1}
		if got, err := ParseCall(AppendCall(nil, &call), &Rules{}); !errors.Is(err, ErrMalformed) {
			t.Errorf("partition %d: got %v and error %v, want ErrMalformed", partition, got, err)
		}
	}
}

// TestRegistersWithForeignRanks: dense registers that a file or another region sends may have ranks that no member has.
// They end no process, and count as the greatest rank.
func TestRegistersWithForeignRanks(t *testing.T) {
	dense := append([]byte("HYLL\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x80"), make([]byte, 12288)...)
	for i := range dense[16:] {
		dense[16+i] = 0xff
	}
	foreign, err := hyperloglog.Parse(dense)
	if err != nil {
		t.Fatal(err)
	}

	o := New(rowsmem.New(rowsmem.Config{}), Config{Name: "only", VerifyEvery: -1, SweepEvery: -1})
	defer o.Close()
	if err := o.Own(t.Context(), 0); err != nil {
		t.Fatal(err)
	}
	one := counter.Copy{Key: "visitors:1", Registers: foreign}
	one.State = counter.State{Kind: counter.Unique, Value: 1, Version: counter.Version{Incarnation: 1, Sequence: 1}}
	call := Call{Partition: 0, More: &More{Restore: &Restore{Copies: []counter.Copy{one}, Rules: &counter.Rules{}}}}
	if answer, err := o.Do(t.Context(), call); err != nil || answer.More.Restored != 1 {
		t.Errorf("%+v, %v; want one counter", answer.More, err)
	}
}
