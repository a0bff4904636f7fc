package owner

import (
	"encoding/binary"
	"fmt"
	"slices"
	"time"

	"headcount/counter"
	"headcount/counter/limit"
	"headcount/internal/rows"
)

// Flags: which members a change has besides a key, a verb and a delta.
const (
	withMerged = 1 << iota
	withMembers
	withReason
	withDimensions
	withHold
)

// AppendCall appends a call in the form in which processes send it to each other. It includes each rule of its changes
// once: an owner judges by the sender's rules, so it needs none itself.
func AppendCall(b []byte, call *Call) []byte {
	b = binary.AppendUvarint(b, uint64(call.Partition))
	b = appendBytes(b, call.Stream)
	b = binary.AppendUvarint(b, call.Number)
	b = append(b, flag(call.Repeated))
	b = appendTime(b, call.Until)

	rules := call.rules()
	b = binary.AppendUvarint(b, uint64(len(rules)))
	for _, rule := range rules {
		b = appendBytes(b, appendRule(make([]byte, 0, 64), rule))
	}

	b = binary.AppendUvarint(b, uint64(len(call.Ops)))
	for i := range call.Ops {
		b = appendOp(b, &call.Ops[i], rules)
	}

	b = append(b, flag(call.More != nil))
	if call.More == nil {
		return b
	}

	return appendMore(b, call.More)
}

func appendMore(b []byte, m *More) []byte {
	b = binary.AppendUvarint(b, uint64(len(m.Limits)))
	for i := range m.Limits {
		one := &m.Limits[i]
		b = appendBytes(b, one.Key)
		b = append(b, byte(one.Algorithm))
		b = binary.AppendVarint(b, one.Window)
		b = binary.AppendVarint(b, one.Limit)
		b = binary.AppendVarint(b, one.Cost)
	}

	b = binary.AppendUvarint(b, uint64(len(m.Rows)))
	for i := range m.Rows {
		row := &m.Rows[i]
		b = appendBytes(b, row.Collection)
		b = appendBytes(b, row.Field)
		// A row without a value is deleted, one with an empty value is not.
		b = append(b, flag(row.Value != nil))
		b = appendBytes(b, row.Value)
		b = appendTime(b, row.Until)
	}

	// Imports, shares and sweeps are work for a partition's own process, so calls never carry these.
	return appendIDs(appendIDs(b, m.Asked), m.Remembered)
}

// appendTime appends a time in ms, 0 for the zero time.
func appendTime(b []byte, t time.Time) []byte {
	if t.IsZero() {
		return append(b, 0)
	}

	return binary.AppendVarint(b, t.UnixMilli())
}

func (r *reader) time() time.Time {
	ms := r.int()
	if ms == 0 {
		return time.Time{}
	}

	return time.UnixMilli(ms)
}

func appendIDs(b []byte, ids []counter.IdempotencyKey) []byte {
	b = binary.AppendUvarint(b, uint64(len(ids)))
	for i := range ids {
		b = append(b, ids[i][:]...)
	}

	return b
}

func appendOp(b []byte, op *counter.Op, rules []*counter.Rule) []byte {
	keyed := op.IdempotencyKey != counter.IdempotencyKey{}
	b = append(b, flag(keyed))
	if keyed {
		b = append(b, op.IdempotencyKey[:]...)
	}

	b = binary.AppendUvarint(b, uint64(len(op.Changes)))
	for i := range op.Changes {
		b = binary.AppendUvarint(b, uint64(slices.Index(rules, op.Changes[i].Rule)))
		b = appendChange(b, &op.Changes[i])
	}

	return b
}

func appendChange(b []byte, c *counter.Change) []byte {
	with := withMerged*flag(c.Merged > 1) | withMembers*flag(len(c.Join)+len(c.Leave) > 0) |
		withReason*flag(c.Reason+c.By != "") | withDimensions*flag(len(c.Dimensions) > 0) | withHold*flag(c.Hold != nil)
	// What most changes lack costs one bit each.
	b = append(b, with)

	b = appendBytes(b, c.Key)
	b = append(b, byte(c.Verb))
	b = binary.AppendVarint(b, c.Delta)
	if with&withMerged != 0 {
		b = binary.AppendUvarint(b, uint64(c.Merged))
	}
	if with&withMembers != 0 {
		b = appendStrings(b, c.Join)
		b = appendStrings(b, c.Leave)
	}
	if with&withReason != 0 {
		b = appendBytes(b, c.Reason)
		b = appendBytes(b, c.By)
	}
	if with&withDimensions != 0 {
		b = binary.AppendUvarint(b, uint64(len(c.Dimensions)))
		for _, d := range c.Dimensions {
			b = appendBytes(b, d.Name)
			b = appendBytes(b, d.Value)
		}
	}
	if with&withHold != 0 {
		b = appendBytes(b, c.Hold.ID)
		b = binary.AppendVarint(b, int64(c.Hold.For))
		b = binary.AppendVarint(b, c.Hold.Until)
	}

	return b
}

// ParseCall parses a call of another process. The error is ErrMalformed, or about something that the sender should have
// checked.
func ParseCall(b []byte, known *Rules) (*Call, error) {
	r := reader{rest: b}
	partition := r.uint()
	call := &Call{Partition: int(partition), Stream: string(r.bytes()), Number: r.uint(), Repeated: r.byte() == 1}
	call.Until = r.time()
	// The number is an index, and comes from another process. As an int a huge one would be negative.
	if partition >= rows.Partitions {
		r.fail()
	}

	rules := make([]*counter.Rule, r.count())
	for i := range rules {
		rules[i] = known.parse(r.bytes())
	}
	for range r.count() {
		call.Ops = append(call.Ops, r.op(rules))
	}
	if r.byte() == 1 {
		call.More = r.work()
	}
	if err := r.end("a call"); err != nil {
		return nil, err
	}

	return call, call.check()
}

// work reads the More of a call.
func (r *reader) work() *More {
	m := &More{}
	for range r.count() {
		one := limit.Request{
			Name: limit.Name{Key: string(r.bytes()), Algorithm: limit.Algorithm(r.byte()), Window: r.int()},
		}
		one.Limit = r.int()
		one.Cost = r.int()
		m.Limits = append(m.Limits, one)
	}

	for range r.count() {
		row := Expiring{Row: rows.Row{Name: rows.Name{Collection: string(r.bytes()), Field: string(r.bytes())}}}
		exists := r.byte() == 1
		value := r.bytes()
		if exists {
			// A copy does not keep the whole frame alive. It is never nil, since that would delete the row.
			row.Value = append([]byte{}, value...)
		}
		row.Until = r.time()
		m.Rows = append(m.Rows, row)
	}

	m.Asked = r.ids()
	m.Remembered = r.ids()

	return m
}

func (r *reader) ids() []counter.IdempotencyKey {
	var ids []counter.IdempotencyKey
	for range r.count() {
		ids = append(ids, r.id())
	}

	return ids
}

func (r *reader) id() (id counter.IdempotencyKey) {
	for i := range id {
		id[i] = r.byte()
	}

	return id
}

func (r *reader) op(rules []*counter.Rule) counter.Op {
	var op counter.Op
	if r.byte() == 1 {
		op.IdempotencyKey = r.id()
	}

	op.Changes = make([]counter.Change, r.count())
	for i := range op.Changes {
		rule := r.uint()
		op.Changes[i] = r.change()
		// Without a rule, check refuses the operation.
		if rule < uint64(len(rules)) {
			op.Changes[i].Rule = rules[rule]
		}
	}

	return op
}

func (r *reader) change() counter.Change {
	with := r.byte()
	c := counter.Change{Key: string(r.bytes()), Verb: counter.Verb(r.byte()), Delta: r.int()}
	if with&withMerged != 0 {
		c.Merged = int(r.uint())
	}
	if with&withMembers != 0 {
		c.Join = r.strings()
		c.Leave = r.strings()
	}
	if with&withReason != 0 {
		c.Reason = string(r.bytes())
		c.By = string(r.bytes())
	}
	if with&withDimensions != 0 {
		c.Dimensions = make([]counter.Dimension, r.count())
		for i := range c.Dimensions {
			c.Dimensions[i] = counter.Dimension{Name: string(r.bytes()), Value: string(r.bytes())}
		}
	}
	if with&withHold != 0 {
		c.Hold = &counter.Hold{ID: string(r.bytes()), For: time.Duration(r.int()), Until: r.int()}
	}

	return c
}

// check repeats the checks of the sender, which may be of another version.
func (c *Call) check() error {
	for i := range c.Ops {
		if err := c.Ops[i].Check(); err != nil {
			return err
		}
	}
	if c.More == nil {
		return nil
	}
	for i := range c.More.Limits {
		one := &c.More.Limits[i]
		if err := one.Check(); err != nil {
			return fmt.Errorf("limit %q: %w", one.Key, err)
		}
	}

	return nil
}

// AppendAnswer appends the answer to a call in the form in which processes send it to each other.
func AppendAnswer(b []byte, call *Call, answer *Answer) []byte {
	// Only an answer that is stored needs its time, by which it is swept.
	return append(b, encodeAnswer(call.Number, time.Unix(0, 0), answer)...)
}

// ParseAnswer parses the answer to a call. The error is ErrMalformed.
func ParseAnswer(b []byte, call *Call) (Answer, error) {
	number, answer, err := decodeAnswer(b, call)
	if err == nil && number != call.Number {
		err = fmt.Errorf("the answer to call %d, not %d: %w", number, call.Number, ErrMalformed)
	}

	return answer, err
}
