package rowstier

import (
	"bytes"
	"encoding/binary"
	"errors"
	"time"

	"headcount/internal/rows"
)

var errMalformed = errors.New("a row of the tier is malformed")

// tombstone is the value of a deleted row in the fast store. All other values are stored unchanged, so that a fast
// store that was used alone can get a durable store. Only a value that begins like a tombstone is escaped, by one more
// byte.
const (
	tombstone = "\x00gone"
	escaped   = tombstone + "="
)

// encodeValue returns a value in the form in which the fast store stores it; nil becomes a tombstone.
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

// state is what the fast store records about a partition of itself and of the durable store.
type state struct {
	complete bool // the fast store has all rows, so a row that it does not have does not exist
	// adopts says that the fast store was used alone, and that the durable store does not have all its rows yet.
	adopts        bool
	syncedTo      uint64    // the fast store has everything up to this commit of the durable store
	lacksIDsUntil time.Time // until then the fast store may lack IDs that the durable store has
	token         string    // identifies the fast store, so that no other one uses the durable store by mistake
}

// Flags of a state.
const (
	isComplete = 1 << iota
	isAdopting
)

func (s *state) encode() []byte {
	flags := byte(0)
	if s.complete {
		flags |= isComplete
	}
	if s.adopts {
		flags |= isAdopting
	}

	until := int64(0)
	if !s.lacksIDsUntil.IsZero() {
		until = s.lacksIDsUntil.UnixMilli()
	}

	b := binary.AppendUvarint([]byte{flags}, s.syncedTo)
	b = binary.AppendVarint(b, until)

	return append(b, s.token...)
}

func decodeState(b []byte) (s state, err error) {
	if len(b) == 0 {
		return s, errMalformed
	}
	s.complete = b[0]&isComplete != 0
	s.adopts = b[0]&isAdopting != 0

	syncedTo, n := binary.Uvarint(b[1:])
	if n <= 0 {
		return s, errMalformed
	}
	s.syncedTo = syncedTo

	ms, m := binary.Varint(b[1+n:])
	if m <= 0 {
		return s, errMalformed
	}
	if ms != 0 {
		s.lacksIDsUntil = time.UnixMilli(ms)
	}
	s.token = string(b[1+n+m:])

	return s, nil
}

// drainRecord is what the durable store records about the fast store that was drained last.
type drainRecord struct {
	upTo  uint64 // the newest commit of the fast store that was drained
	token string // the fast store's token; empty: the durable store was always used alone
	// unconfirmed says that the token is new, and that the fast store may not have it yet.
	unconfirmed bool
}

// unconfirmedMark precedes a token that the fast store may not have yet. No token contains it.
const unconfirmedMark = '?'

func (r drainRecord) encode() []byte {
	b := binary.AppendUvarint(nil, r.upTo)
	if r.unconfirmed {
		b = append(b, unconfirmedMark)
	}

	return append(b, r.token...)
}

// decodeDrainRecord is the inverse of encode. An empty b is that of a durable store that was always used alone.
func decodeDrainRecord(b []byte) (r drainRecord) {
	upTo, n := binary.Uvarint(b)
	r.upTo = upTo
	r.token = string(b[max(n, 0):])
	if r.token != "" && r.token[0] == unconfirmedMark {
		r.token = r.token[1:]
		r.unconfirmed = true
	}

	return r
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
