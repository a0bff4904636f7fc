package owner

import (
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	"headcount/counter"
	"headcount/counter/limit"
)

// ErrMalformed is wrapped by errors about rows and publications that no owner wrote so.
var ErrMalformed = errors.New("malformed")

// reader reads values one after another. After the first that is malformed all are zero.
type reader struct {
	rest      []byte
	malformed bool
}

func (r *reader) fail() {
	r.rest = nil
	r.malformed = true
}

func (r *reader) uint() uint64 {
	value, n := binary.Uvarint(r.rest)
	if n <= 0 {
		r.fail()
		return 0
	}
	r.rest = r.rest[n:]

	return value
}

func (r *reader) int() int64 {
	value, n := binary.Varint(r.rest)
	if n <= 0 {
		r.fail()
		return 0
	}
	r.rest = r.rest[n:]

	return value
}

func (r *reader) byte() byte {
	if len(r.rest) == 0 {
		r.fail()
		return 0
	}
	value := r.rest[0]
	r.rest = r.rest[1:]

	return value
}

// bytes reads a length and as many bytes.
func (r *reader) bytes() []byte {
	n := r.uint()
	if n > uint64(len(r.rest)) {
		r.fail()
		return nil
	}
	value := r.rest[:n]
	r.rest = r.rest[n:]

	return value
}

// count reads the number of elements that follow, each of which has at least one byte.
func (r *reader) count() int {
	n := r.uint()
	if n > uint64(len(r.rest)) {
		r.fail()
		return 0
	}

	return int(n)
}

func appendBytes[T string | []byte](b []byte, value T) []byte {
	return append(binary.AppendUvarint(b, uint64(len(value))), value...)
}

// encodeNumber returns the value of a row that is a number.
func encodeNumber(n uint64) []byte { return binary.AppendUvarint(nil, n) }

func decodeNumber(b []byte) uint64 {
	n, _ := binary.Uvarint(b)

	return n
}

// encode returns the row of a counter, nil for one that does not exist.
func (h *head) encode() []byte {
	if h.Version == (counter.Version{}) {
		return nil
	}

	b := make([]byte, 0, 40)
	b = append(b, byte(h.Kind))
	b = binary.AppendVarint(b, h.Value)
	b = binary.AppendVarint(b, h.Updated)
	b = binary.AppendUvarint(b, h.Version.Incarnation)
	b = binary.AppendUvarint(b, h.Version.Sequence)
	b = binary.AppendUvarint(b, h.life)
	b = binary.AppendUvarint(b, h.Entries)

	if !h.Kind.Number() {
		b = binary.AppendUvarint(b, h.emptied)
		b = binary.AppendUvarint(b, h.members)
		return binary.AppendUvarint(b, h.shards)
	}

	for _, slot := range h.Slots {
		if slot.Step == 0 {
			continue
		}
		b = binary.AppendUvarint(b, uint64(slot.Step))
		b = binary.AppendUvarint(b, uint64(slot.Number))
		b = binary.AppendVarint(b, slot.Value)
	}

	return b
}

// decode reads the row of a counter.
func (h *head) decode(b []byte) error {
	if len(b) == 0 {
		return nil
	}

	r := reader{rest: b}
	h.Kind = counter.Kind(r.byte())
	h.Value = r.int()
	h.Updated = r.int()
	h.Version.Incarnation = r.uint()
	h.Version.Sequence = r.uint()
	h.life = r.uint()
	h.Entries = r.uint()

	if !h.Kind.Number() {
		h.emptied = r.uint()
		h.members = r.uint()
		h.shards = r.uint()
		return r.end("a counter")
	}

	for i := 0; len(r.rest) > 0 && i < len(h.Slots); i++ {
		h.Slots[i].Step = uint32(r.uint())
		h.Slots[i].Number = uint32(r.uint())
		h.Slots[i].Value = r.int()
	}

	return r.end("a counter")
}

// end returns an error unless everything was read.
func (r *reader) end(what string) error {
	if r.malformed || len(r.rest) > 0 {
		return fmt.Errorf("row of %s: %w", what, ErrMalformed)
	}

	return nil
}

// What a result is, in the answer to a call.
const (
	made = iota
	replayed
	badOp
	conflictFrom // and on: the index in conflicts
)

var conflicts = []error{counter.ErrBound, counter.ErrOverflow, counter.ErrKind}

// encodeAnswer returns the answer to a call, as it stands in the row of its stream.
func encodeAnswer(number uint64, answer *Answer) []byte {
	b := binary.AppendUvarint(make([]byte, 0, 8+16*len(answer.Results)), number)
	for i := range answer.Results {
		b = appendResult(b, &answer.Results[i])
	}
	for i := range answer.Limits {
		one := &answer.Limits[i]
		b = append(b, flag(one.Allowed))
		b = binary.AppendVarint(b, one.Remaining)
		b = binary.AppendVarint(b, one.Reset)
	}

	return b
}

func appendResult(b []byte, result *counter.Result) []byte {
	var conflict *counter.Conflict
	switch {
	case errors.As(result.Err, &conflict):
		return appendConflict(b, conflict)
	case result.Err != nil:
		return appendBytes(append(b, badOp), result.Err.Error())
	case result.Replay:
		b = append(b, replayed)
	default:
		b = append(b, made)
	}

	for i := range result.Counters {
		c := &result.Counters[i]
		b = append(b, byte(c.Kind))
		b = binary.AppendVarint(b, c.Value)
		b = binary.AppendUvarint(b, c.Version.Incarnation)
		b = binary.AppendUvarint(b, c.Version.Sequence)
		if c.Touched() {
			b = binary.AppendVarint(b, c.Updated.UnixMilli())
		}
	}

	return b
}

func appendConflict(b []byte, conflict *counter.Conflict) []byte {
	what := 0
	for i, is := range conflicts {
		if errors.Is(conflict, is) {
			what = i
		}
	}

	b = append(b, byte(conflictFrom+what))
	b = appendBytes(b, conflict.Key)
	b = binary.AppendVarint(b, conflict.Value)

	return appendBytes(b, conflict.Text)
}

// decodeAnswer returns the number of a stream's last call to a partition, 0 if there was none. If that is the number of
// call, it returns the answer, too.
func decodeAnswer(b []byte, call *Call) (number uint64, answer Answer, err error) {
	if len(b) == 0 {
		return 0, Answer{}, nil
	}

	r := reader{rest: b}
	number = r.uint()
	if number != call.Number {
		return number, Answer{}, nil
	}

	answer = Answer{Results: make([]counter.Result, len(call.Ops)), Limits: make([]limit.Answer, len(call.Limits))}
	for i := range answer.Results {
		answer.Results[i] = r.result(&call.Ops[i])
	}
	for i := range answer.Limits {
		one := &answer.Limits[i]
		one.Allowed = r.byte() == 1
		one.Remaining = r.int()
		one.Reset = r.int()
	}

	return number, answer, r.end("an answer")
}

// result reads the result of op.
func (r *reader) result(op *counter.Op) counter.Result {
	what := r.byte()
	switch {
	case what == badOp:
		return counter.Result{Err: fmt.Errorf("%w: %s", counter.ErrOp, r.bytes())}
	case int(what) >= conflictFrom+len(conflicts):
		r.fail()
		return counter.Result{}
	case what >= conflictFrom:
		conflict := &counter.Conflict{Is: conflicts[what-conflictFrom]}
		conflict.Key = string(r.bytes())
		conflict.Value = r.int()
		conflict.Text = string(r.bytes())
		return counter.Result{Err: conflict}
	}

	result := counter.Result{Replay: what == replayed, Counters: make([]counter.Counter, len(op.Changes))}
	for i := range result.Counters {
		c := &result.Counters[i]
		c.Key = op.Changes[i].Key
		c.Kind = counter.Kind(r.byte())
		c.Value = r.int()
		c.Version.Incarnation = r.uint()
		c.Version.Sequence = r.uint()
		if c.Touched() {
			c.Updated = time.UnixMilli(r.int()).UTC()
		}
	}

	return result
}

// publication returns what the draft tells watchers: each changed counter and who joined and left.
func (d *draft) publication() []byte {
	b := binary.AppendUvarint(nil, uint64(len(d.news)))
	for i := range d.news {
		one := &d.news[i]
		b = appendBytes(b, one.Key)
		b = appendBytes(b, d.get(headOf(one.Key)))
		b = appendStrings(b, one.Joined)
		b = appendStrings(b, one.Left)
		b = append(b, flag(one.All))
	}

	return b
}

func appendStrings(b []byte, all []string) []byte {
	b = binary.AppendUvarint(b, uint64(len(all)))
	for _, s := range all {
		b = appendBytes(b, s)
	}

	return b
}

func flag(set bool) byte {
	if set {
		return 1
	}

	return 0
}

// Publication calls each with the updates of a publication, oldest first. The error is ErrMalformed.
func Publication(b []byte, each func(counter.Update)) error {
	r := reader{rest: b}
	for range r.count() {
		var u counter.Update
		key := string(r.bytes())
		var h head
		if err := h.decode(r.bytes()); err != nil {
			return err
		}

		u.Counter = h.Counter(key)
		u.Joined = r.strings()
		u.Left = r.strings()
		u.Reread = r.byte() == 1
		if r.malformed {
			break
		}
		each(u)
	}

	return r.end("a publication")
}

func (r *reader) strings() []string {
	n := r.count()
	if n == 0 {
		return nil
	}

	all := make([]string, n)
	for i := range all {
		all[i] = string(r.bytes())
	}

	return all
}

// EncodeGained returns the value of a row that is a top list.
func EncodeGained(most []counter.Gained) []byte {
	b := binary.AppendUvarint(nil, uint64(len(most)))
	for i := range most {
		b = appendBytes(b, most[i].Key)
		b = binary.AppendVarint(b, most[i].Value)
	}

	return b
}

// DecodeGained returns the top list of a row. The error is ErrMalformed.
func DecodeGained(b []byte) ([]counter.Gained, error) {
	r := reader{rest: b}
	most := make([]counter.Gained, r.count())
	for i := range most {
		most[i].Key = string(r.bytes())
		most[i].Value = r.int()
	}

	return most, r.end("a top list")
}
