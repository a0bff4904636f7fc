package region

import (
	"encoding/binary"

	"headcount/internal/rows"
)

// The rows of an inbox.
const (
	sharesOf   = "shares"   // key -> share
	positionOf = "position" // one row: the last commit
)

var positionRow = rows.Name{Collection: positionOf, Field: "log"}

// Position is the last commit of an inbox, so it tells its sender whether the inbox has lost one. The zero Position is
// that of an empty inbox.
type Position struct {
	Epoch  uint64 // of the sender's claim at home
	Number uint64
}

func (p Position) encode() []byte {
	return binary.AppendUvarint(binary.AppendUvarint(nil, p.Epoch), p.Number)
}

// parsePosition reads a position; what cannot be read is the zero Position.
func parsePosition(b []byte) Position {
	epoch, n := binary.Uvarint(b)
	if n <= 0 {
		return Position{}
	}
	number, m := binary.Uvarint(b[n:])
	if m <= 0 {
		return Position{}
	}

	return Position{epoch, number}
}

func shareRow(key string) rows.Name { return rows.Name{Collection: sharesOf, Field: key} }

// encodeKeys returns the publication of a commit: the counters of which it has shares, and whether it is a repair. The
// rows do not say that, because a later change replaces a row that nobody has read yet.
func encodeKeys(keys []string, repair bool) []byte {
	b := make([]byte, 1, 64)
	if repair {
		b[0] = 1
	}
	for _, key := range keys {
		b = binary.AppendUvarint(b, uint64(len(key)))
		b = append(b, key...)
	}

	return b
}

// parseKeys reads a publication, and reports whether it is one.
func parseKeys(b []byte) (keys []string, repair, ok bool) {
	if len(b) == 0 {
		return nil, false, true
	}
	repair = b[0] == 1
	b = b[1:]
	for len(b) > 0 {
		n, size := binary.Uvarint(b)
		if size <= 0 || n > uint64(len(b)-size) {
			return nil, false, false
		}
		keys = append(keys, string(b[size:size+int(n)]))
		b = b[size+int(n):]
	}

	return keys, repair, true
}
