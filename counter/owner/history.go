package owner

import (
	"encoding/binary"
	"fmt"
	"strconv"
	"time"

	"headcount/counter"
	"headcount/internal/rows"
)

// Completed time buckets of a sum are stored in rows of 64: bucket n is in row n/64. A time bucket of a unique is
// stored in rows of registers.
const historyRow = 64

// historyCollection returns the collection that has the counter's time buckets of a length, in seconds.
func historyCollection(h *head, step uint32) string {
	return "history:" + strconv.FormatUint(h.life, 36) + ":" + strconv.FormatUint(uint64(step), 10) + ":" + h.key
}

// numberField returns a field name that sorts like its number.
func numberField(number int64) string { return fmt.Sprintf("%08x", number) }

// Past implements counter.Tx.
func (d *draft) Past(key string, s counter.Slot, kept time.Duration) {
	h := d.head(key)
	h.parts |= historyPart(s.Step) // Judge also calls Changed, so the head is written

	// The row of a span expires when its last time bucket does.
	span := int64(s.Number) / historyRow
	name := rows.Name{Collection: historyCollection(h, s.Step), Field: numberField(span)}
	if d.get(name) == nil {
		last := span*historyRow + historyRow - 1
		d.expire(name, counter.ForgetAt(last, time.Duration(s.Step)*time.Second, kept))
	}

	b := append(d.own(name), byte(s.Number%historyRow))
	d.put(name, binary.AppendVarint(b, s.Value))
}

// gains decodes a row of time buckets of a sum.
func (r *reader) gains(span int64) []counter.Gain {
	var all []counter.Gain
	for len(r.rest) > 0 {
		number := span*historyRow + int64(r.byte())
		all = append(all, counter.Gain{Number: number, Value: r.int()})
	}

	return all
}

// See implements counter.Tx.
func (d *draft) See(key string, s counter.Slot, members []string, kept time.Duration) {
	h := d.head(key)
	part := historyPart(s.Step)
	if h.parts&part == 0 {
		h.parts |= part
		d.change(h) // the head is written, but the counter's version stays unchanged
	}

	bucket := d.timeBucket(h, s, kept)
	bucket.add(members)
}

// timeBucket returns the registers of a time bucket.
func (d *draft) timeBucket(h *head, s counter.Slot, kept time.Duration) registers {
	until := counter.ForgetAt(int64(s.Number), time.Duration(s.Step)*time.Second, kept)

	return registers{d: d, collection: historyCollection(h, s.Step), prefix: numberField(int64(s.Number)), until: until}
}
