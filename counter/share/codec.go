package share

import (
	"encoding/binary"
	"errors"

	"headcount/counter"
	"headcount/hyperloglog"
)

// ErrMalformed is the error for bytes that do not encode a share.
var ErrMalformed = errors.New("malformed share")

// Append appends an encoding of the share. Equal shares have equal encodings.
func (s *Share) Append(b []byte) []byte {
	b = append(b, byte(s.Kind))
	b = binary.AppendVarint(b, s.Updated)
	b = binary.AppendUvarint(b, s.Deletion)
	b = binary.AppendUvarint(b, s.Emptied)

	b = binary.AppendUvarint(b, uint64(len(s.Parts)))
	for i := range s.Parts {
		p := &s.Parts[i]
		b = appendBytes(b, []byte(p.Region))
		b = binary.AppendUvarint(b, p.Life)
		b = binary.AppendUvarint(b, p.Sequence)
		b = binary.AppendVarint(b, p.Value)
		b = binary.AppendUvarint(b, p.At)
		b = binary.AppendVarint(b, p.Base)
	}

	return appendBytes(b, s.Seen.Bytes())
}

func appendBytes(b, value []byte) []byte {
	return append(binary.AppendUvarint(b, uint64(len(value))), value...)
}

// Parse decodes a share that takes all of b. The error is ErrMalformed.
func Parse(b []byte) (Share, error) {
	var s Share
	if len(b) == 0 {
		return s, ErrMalformed
	}

	r := reader{rest: b[1:]}
	s.Kind = counter.Kind(b[0])
	s.Updated = r.int()
	s.Deletion = r.uint()
	s.Emptied = r.uint()

	// A number that is too large ends at the first part that is missing.
	for n := r.uint(); n > 0 && !r.malformed; n-- {
		p := Part{Region: string(r.bytes()), Life: r.uint(), Sequence: r.uint(), Value: r.int()}
		p.At = r.uint()
		p.Base = r.int()
		s.Parts = append(s.Parts, p)
	}

	// A copy, because registers are changed in place, and the bytes may be those of a row in memory.
	seen := append([]byte(nil), r.bytes()...)
	registers, err := hyperloglog.Parse(seen)
	s.Seen = registers
	if err != nil || r.malformed || len(r.rest) > 0 {
		return Share{}, ErrMalformed
	}

	return s, nil
}

// reader reads one value after another. After the first malformed value, all reads return zero.
type reader struct {
	rest      []byte
	malformed bool
}

func (r *reader) advance(n int) bool {
	if n <= 0 || n > len(r.rest) {
		r.rest = nil
		r.malformed = true
		return false
	}
	r.rest = r.rest[n:]

	return true
}

func (r *reader) uint() uint64 {
	value, n := binary.Uvarint(r.rest)
	if !r.advance(n) {
		return 0
	}

	return value
}

func (r *reader) int() int64 {
	value, n := binary.Varint(r.rest)
	if !r.advance(n) {
		return 0
	}

	return value
}

func (r *reader) bytes() []byte {
	n := r.uint()
	if n == 0 {
		return nil
	}

	rest := r.rest
	if n > uint64(len(rest)) || !r.advance(int(n)) {
		r.malformed = true
		return nil
	}

	return rest[:n]
}
