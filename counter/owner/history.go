package owner

import (
	"encoding/binary"
	"fmt"
	"strconv"
	"time"

	"headcount/counter"
	"headcount/counter/hyperloglog"
	"headcount/internal/rows"
)

// bucketName returns the name of the row with that number of a history. Its field sorts as the number.
func bucketName(h *head, key string, step uint32, number int64) rows.Name {
	return rows.Name{Collection: historyCollection(h, key, step), Field: fmt.Sprintf("%08x", number)}
}

// The ended time buckets of a sum are in rows of 64: bucket n is in row n/64.
const historyRow = 64

// historyCollection returns where the time buckets of a length, in seconds, are.
func historyCollection(h *head, key string, step uint32) string {
	return "history:" + strconv.FormatUint(h.life, 36) + ":" + strconv.FormatUint(uint64(step), 10) + ":" + key
}

// Past implements counter.Step.
func (d *draft) Past(key string, s counter.Slot, kept time.Duration) {
	span := s.Number / historyRow
	name := bucketName(d.head(key), key, s.Step, int64(span))

	row := d.get(name)
	b := append(row[:len(row):len(row)], byte(s.Number%historyRow))
	d.put(name, binary.AppendVarint(b, s.Value))

	if row == nil {
		last := int64(span)*historyRow + historyRow - 1
		d.expire(name, counter.ForgetAt(last, time.Duration(s.Step)*time.Second, kept))
	}
}

// gains reads a row of the time buckets of a sum.
func (r *reader) gains(span int64) []counter.Gain {
	var all []counter.Gain
	for len(r.rest) > 0 {
		number := span*historyRow + int64(r.byte())
		all = append(all, counter.Gain{Number: number, Value: r.int()})
	}

	return all
}

// See implements counter.Step.
func (d *draft) See(key string, s counter.Slot, members []string, kept time.Duration) {
	name := bucketName(d.head(key), key, s.Step, int64(s.Number))

	row := d.get(name)
	registers := d.registers(row)
	if !registers.Add(members...) {
		return
	}
	d.put(name, registers.Bytes())

	if row == nil {
		d.expire(name, counter.ForgetAt(int64(s.Number), time.Duration(s.Step)*time.Second, kept))
	}
}

// registers returns a copy of the registers in a row.
func (d *draft) registers(row []byte) *hyperloglog.Registers {
	registers, err := hyperloglog.Parse(row)
	if err != nil {
		d.malformed = err
	}
	own := registers.Clone()

	return &own
}

// Registers implements counter.Step. What Judge adds to them is written by Changed.
func (d *draft) Registers(key string) *hyperloglog.Registers {
	h := d.head(key)
	if h.registers == nil {
		h.registers = d.registers(d.get(registersName(h, key)))
	}

	return h.registers
}

// registersName returns the name of the row of a unique's registers.
func registersName(h *head, key string) rows.Name {
	return rows.Name{Collection: setCollection(h, key), Field: "registers"}
}
