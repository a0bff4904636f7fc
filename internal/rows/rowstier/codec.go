package rowstier

import (
	"bytes"
	"encoding/binary"
	"errors"
	"time"

	"headcount/internal/rows"
)

var errMalformed = errors.New("a row of the tier is malformed")

// tombstone is the value of a deleted row in the front. All other values are stored unchanged, so that a front that was
// used without a back can be given one. Only a value that begins like a tombstone is escaped, by one more byte.
const (
	tombstone = "\x00gone"
	escaped   = tombstone + "="
)

// encodeValue returns a value in the form in which the front stores it; nil becomes a tombstone.
func encodeValue(value []byte) []byte {
	switch {
	case value == nil:
		return []byte(tombstone)
	case bytes.HasPrefix(value, []byte(tombstone)):
		return append([]byte(escaped), value[len(tombstone):]...)
	default:
		return value
	}
}

// decodeValue is the inverse of encodeValue: it returns nil and no error for a tombstone.
func decodeValue(b []byte) ([]byte, error) {
	rest, marked := bytes.CutPrefix(b, []byte(tombstone))
	switch {
	case !marked:
		return b, nil
	case len(rest) == 0:
		return nil, nil
	case rest[0] == '=':
		return append([]byte(tombstone), rest[1:]...), nil
	default:
		return nil, errMalformed
	}
}

// state is what the front records about a partition of itself and of the back.
type state struct {
	whole bool // the front has all rows, so a row that it does not have does not exist
	// adopts says that the front was used without a back, and that the back does not have all its rows yet.
	adopts bool
	back   uint64    // the front has everything up to this commit of the back
	lossy  time.Time // until then the front may lack IDs that the back has
	token  string    // identifies the front, so that another front cannot use the back by mistake
}

// Flags of a state.
const (
	isWhole = 1 << iota
	isAdopting
)

func (s *state) encode() []byte {
	flags := byte(0)
	if s.whole {
		flags |= isWhole
	}
	if s.adopts {
		flags |= isAdopting
	}

	lossy := int64(0)
	if !s.lossy.IsZero() {
		lossy = s.lossy.UnixMilli()
	}

	b := binary.AppendUvarint([]byte{flags}, s.back)
	b = binary.AppendVarint(b, lossy)

	return append(b, s.token...)
}

func decodeState(b []byte) (s state, err error) {
	if len(b) == 0 {
		return s, errMalformed
	}
	s.whole = b[0]&isWhole != 0
	s.adopts = b[0]&isAdopting != 0

	back, n := binary.Uvarint(b[1:])
	if n <= 0 {
		return s, errMalformed
	}
	s.back = back

	ms, m := binary.Varint(b[1+n:])
	if m <= 0 {
		return s, errMalformed
	}
	if ms != 0 {
		s.lossy = time.UnixMilli(ms)
	}
	s.token = string(b[1+n+m:])

	return s, nil
}

// had is what the back records about the front that was drained last.
type had struct {
	number uint64 // the newest commit of the front that was drained
	token  string // the front's token; empty: the back never had a front
	// unsaid says that the token is new, and that the front may not have it yet.
	unsaid bool
}

// unsaidMark precedes a token that the front may not have yet. No token contains it.
const unsaidMark = '?'

func (h had) encode() []byte {
	b := binary.AppendUvarint(nil, h.number)
	if h.unsaid {
		b = append(b, unsaidMark)
	}

	return append(b, h.token...)
}

// decodeHad is the inverse of encode. For an empty b, of a back that never had a front, it returns the zero had.
func decodeHad(b []byte) (h had) {
	number, n := binary.Uvarint(b)
	h.number = number
	h.token = string(b[max(n, 0):])
	if h.token != "" && h.token[0] == unsaidMark {
		h.token = h.token[1:]
		h.unsaid = true
	}

	return h
}

// encodeNames encodes what a commit changes: the names of its rows, and its IDs.
func encodeNames(c *rows.Commit) []byte {
	b := binary.AppendUvarint(nil, uint64(len(c.Rows)))
	for i := range c.Rows {
		b = appendText(b, c.Rows[i].Collection)
		b = appendText(b, c.Rows[i].Field)
	}
	for i := range c.IDs {
		b = append(b, c.IDs[i].Bytes[:]...)
		b = binary.AppendVarint(b, c.IDs[i].Until.UnixMilli())
	}

	return b
}

func appendText(b []byte, text string) []byte {
	return append(binary.AppendUvarint(b, uint64(len(text))), text...)
}

func decodeNames(b []byte) (names []rows.Name, ids []rows.ID, err error) {
	n, size := binary.Uvarint(b)
	if size <= 0 {
		return nil, nil, errMalformed
	}
	b = b[size:]

	for range n {
		var name rows.Name
		var ok bool
		name.Collection, b, ok = cutText(b)
		if ok {
			name.Field, b, ok = cutText(b)
		}
		if !ok {
			return nil, nil, errMalformed
		}
		names = append(names, name)
	}
	for len(b) > 0 {
		var id rows.ID
		if len(b) < len(id.Bytes) {
			return nil, nil, errMalformed
		}
		b = b[copy(id.Bytes[:], b):]

		ms, size := binary.Varint(b)
		if size <= 0 {
			return nil, nil, errMalformed
		}
		b = b[size:]
		id.Until = time.UnixMilli(ms)
		ids = append(ids, id)
	}

	return names, ids, nil
}

func cutText(b []byte) (text string, rest []byte, ok bool) {
	n, size := binary.Uvarint(b)
	if size <= 0 || n > uint64(len(b)-size) {
		return "", nil, false
	}
	end := size + int(n)

	return string(b[size:end]), b[end:], true
}
