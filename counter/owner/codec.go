package owner

import (
	"encoding/binary"
	"fmt"

	"headcount/counter"
)

// ErrMalformed is wrapped by errors about rows and publications that are not in a form that an owner writes.
var ErrMalformed = counter.ErrMalformed

// reader reads one value after another. After the first malformed value, all reads return zero and end returns an
// error.
type reader struct {
	rest      []byte
	malformed bool
}

func (r *reader) fail() {
	r.rest = nil
	r.malformed = true
}

func (r *reader) uint() uint64 {
	if len(r.rest) > 0 && r.rest[0] < 0x80 { // most numbers take one byte
		value := r.rest[0]
		r.rest = r.rest[1:]
		return uint64(value)
	}

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

// bytes reads a length and that number of bytes.
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

// count reads the number of elements that follow. Each element has at least one byte, so a number that exceeds the
// remaining bytes is malformed.
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

// end returns an error unless everything was read.
func (r *reader) end(what string) error {
	if r.malformed || len(r.rest) > 0 {
		return fmt.Errorf("row of %s: %w", what, ErrMalformed)
	}

	return nil
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
