package counterfile

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"time"

	"go.etcd.io/bbolt"

	"headcount/counter"
	"headcount/counter/hyperloglog"
)

// parseGain reads a value of the bucket gains.
func parseGain(number int64, v []byte) (counter.Gain, error) {
	if len(v) == 8 {
		return counter.Gain{Number: number, Value: int64(binary.BigEndian.Uint64(v))}, nil
	}
	seen, err := hyperloglog.Parse(bytes.Clone(v))
	return counter.Gain{Number: number, Seen: &seen}, err
}

// historyKey is the beginning of the keys of what was gained in steps of one length.
func historyKey(history uint64, seconds uint32) []byte {
	return binary.BigEndian.AppendUint32(within(history, ""), seconds)
}

// record is a counter in the file: kind, then seven numbers of 8 bytes. One with a history has
// its number and its slots as text, too.
type record struct {
	counter.State
	set     uint64 // its members or registers; 0: it never had any
	ledger  uint64 // 0: it never had one
	history uint64 // also of its dimensions; 0: it never had one
}

const recordSize = 1 + 7*8

func (r *record) append(b []byte) []byte {
	b = append(b, byte(r.Kind))
	for _, n := range [...]uint64{uint64(r.Value), uint64(r.Updated), r.Version.Incarnation, r.Version.Sequence, r.Entries, r.set, r.ledger} {
		b = binary.BigEndian.AppendUint64(b, n)
	}
	if r.Slots == (counter.Slots{}) && r.history == 0 {
		return b
	}
	return r.Slots.Append(binary.BigEndian.AppendUint64(b, r.history))
}

func (r *record) parse(b []byte) (err error) {
	if len(b) < recordSize || len(b) > recordSize && len(b) < recordSize+8 {
		return fmt.Errorf("a record of %d bytes, want %d", len(b), recordSize)
	}
	n := func(i int) uint64 { return binary.BigEndian.Uint64(b[1+8*i:]) }
	*r = record{counter.State{
		Kind: counter.Kind(b[0]), Value: int64(n(0)), Updated: int64(n(1)),
		Version: counter.Version{Incarnation: n(2), Sequence: n(3)}, Entries: n(4),
	}, n(5), n(6), 0}
	if len(b) > recordSize {
		r.history = n(7)
		r.Slots, err = counter.ParseSlots(string(b[recordSize+8:]))
	}
	return err
}

// load leaves r zero when there is no counter.
func (r *record) load(counters *bbolt.Bucket, key string) error {
	b := counters.Get([]byte(key))
	if b == nil {
		*r = record{}
		return nil
	}
	if err := r.parse(b); err != nil {
		return fmt.Errorf("counter %q: %w", key, err)
	}
	return nil
}

// registers are those in the file, not to be changed.
func (r *record) registers(in *bbolt.Bucket) (hyperloglog.Registers, error) {
	if r.set == 0 {
		return hyperloglog.Registers{}, nil
	}
	return hyperloglog.Parse(in.Get(within(r.set, "")))
}

// within is the key of a thing in a set or a ledger.
func within(id uint64, thing string) []byte { return append(number(id), thing...) }

// number is n in 8 bytes.
func number(n uint64) []byte { return binary.BigEndian.AppendUint64(nil, n) }

// appendEntry writes op, at in unix milliseconds, delta, before, the length of
// the reason, the reason and the author.
func appendEntry(b []byte, e counter.Entry) []byte {
	b = append(b, byte(e.Op))
	for _, n := range [...]int64{e.At.UnixMilli(), e.Delta, e.Before} {
		b = binary.BigEndian.AppendUint64(b, uint64(n))
	}
	b = binary.BigEndian.AppendUint16(b, uint16(len(e.Reason)))
	b = append(b, e.Reason...)
	return append(b, e.By...)
}

func parseEntry(seq, b []byte) (counter.Entry, error) {
	const fixed = 1 + 3*8 + 2
	if len(seq) != 8 || len(b) < fixed {
		return counter.Entry{}, fmt.Errorf("an entry of %d bytes", len(b))
	}
	n := func(i int) int64 { return int64(binary.BigEndian.Uint64(b[1+8*i:])) }
	reason := int(binary.BigEndian.Uint16(b[fixed-2:]))
	if len(b) < fixed+reason {
		return counter.Entry{}, fmt.Errorf("an entry of %d bytes with a reason of %d", len(b), reason)
	}
	return counter.Entry{
		Seq: binary.BigEndian.Uint64(seq), At: time.UnixMilli(n(0)).UTC(), Op: counter.LedgerOp(b[0]),
		Delta: n(1), Before: n(2), After: n(1) + n(2), Reason: string(b[fixed : fixed+reason]), By: string(b[fixed+reason:]),
	}, nil
}

// dimensionKey is the beginning of the keys of what was counted under a dimension.
func dimensionKey(history uint64, name string) []byte {
	return append(append(within(history, ""), byte(len(name))), name...)
}
