package owner

import (
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	"headcount/counter"
	"headcount/counter/limit"
)

// Encodings of a result in the answer to a call.
const (
	made = iota
	replayed
	badOp
	conflictFrom // this value and above: the index in conflicts
)

var conflicts = []error{
	counter.ErrBound, counter.ErrOverflow, counter.ErrKind, counter.ErrReservation, counter.ErrNoReservation,
	ErrMalformed, // not a conflict, but encoded like one; an older release rejects the whole answer as malformed
}

// encodeAnswer returns the row of a stream: the number, the time and the answer of its last call.
func encodeAnswer(number uint64, at time.Time, answer *Answer) []byte {
	b := binary.AppendUvarint(make([]byte, 0, 16+16*len(answer.Results)), number)
	b = binary.AppendVarint(b, at.Unix())
	for i := range answer.Results {
		b = appendResult(b, &answer.Results[i])
	}
	// The lists below are written without their lengths: a reader has the call, and so knows how many elements it
	// asked for.
	if answer.More == nil {
		return b
	}

	for i := range answer.More.Limits {
		one := &answer.More.Limits[i]
		b = append(b, flag(one.Allowed))
		b = binary.AppendVarint(b, one.Remaining)
		b = binary.AppendVarint(b, one.Reset)
	}
	for _, known := range answer.More.Known {
		b = append(b, flag(known))
	}

	return b
}

// lastCall returns the time of a stream's last call.
func lastCall(row []byte) time.Time {
	r := reader{rest: row}
	r.uint()

	return time.Unix(r.int(), 0)
}

func appendResult(b []byte, result *counter.Result) []byte {
	var conflict *counter.Conflict
	switch {
	case errors.As(result.Err, &conflict):
		// The client of the call is told the counter and its value. Of any other refusal it is told only the text.
		return appendConflict(b, conflict)
	case errors.Is(result.Err, ErrMalformed):
		return appendConflict(b, &counter.Conflict{Is: ErrMalformed, Text: result.Err.Error()})
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
		if c.Kind.IsExact() {
			b = binary.AppendVarint(b, c.Reserved)
		}
	}
	if result.Reservation != nil {
		b = appendReservation(b, *result.Reservation)
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

// decodeAnswer returns the number of a stream's last call to a partition, 0 if there was none. If call has that number,
// decodeAnswer also returns the answer.
func decodeAnswer(b []byte, call *Call) (number uint64, answer Answer, err error) {
	if len(b) == 0 {
		return 0, Answer{}, nil
	}

	r := reader{rest: b}
	number = r.uint()
	// The time says only when the row may be swept.
	r.int()
	// The row answers another call, whose operations the caller does not have, so the rest cannot be read.
	if number != call.Number {
		return number, Answer{}, nil
	}

	answer.Results = make([]counter.Result, len(call.Ops))
	for i := range answer.Results {
		answer.Results[i] = r.result(&call.Ops[i])
	}
	if call.More != nil {
		answer.More = r.more(call.More)
	}

	return number, answer, r.end("an answer")
}

// more reads the answer to the More of a call.
func (r *reader) more(m *More) *MoreAnswer {
	answer := &MoreAnswer{Limits: make([]limit.Answer, len(m.Limits)), Known: make([]bool, len(m.Asked))}
	for i := range answer.Limits {
		one := &answer.Limits[i]
		one.Allowed = r.byte() == 1
		one.Remaining = r.int()
		one.Reset = r.int()
	}
	for i := range answer.Known {
		answer.Known[i] = r.byte() == 1
	}

	return answer
}

// result reads the result of op.
func (r *reader) result(op *counter.Op) counter.Result {
	what := r.byte()
	switch {
	case what == badOp:
		return counter.Result{Err: fmt.Errorf("%w: %s", counter.ErrOp, r.bytes())}
	case int(what) >= conflictFrom+len(conflicts):
		// A newer release may know further conflicts.
		r.fail()
		return counter.Result{}
	case what >= conflictFrom:
		conflict := &counter.Conflict{Is: conflicts[what-conflictFrom]}
		conflict.Key = string(r.bytes())
		conflict.Value = r.int()
		conflict.Text = string(r.bytes())
		if errors.Is(conflict, ErrMalformed) {
			return counter.Result{Err: fmt.Errorf("%w: %s", ErrMalformed, conflict.Text)}
		}

		return counter.Result{Err: conflict}
	}

	// Keys and IDs are those of the call, so an answer does not repeat them.
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
		if c.Kind.IsExact() {
			c.Reserved = r.int()
		}
	}
	if len(op.Changes) > 0 && op.Changes[0].Verb.Holds() {
		is := r.reservation(op.Changes[0].Hold.ID)
		result.Reservation = &is
	}

	return result
}
