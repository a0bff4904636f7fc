package region

import (
	"encoding/binary"

	"headcount/internal/rows"
)

// Collections of an inbox.
const (
	sharesOf   = "shares"   // key -> share
	positionOf = "position" // one row: the last commit
)

var positionRow = rows.Name{Collection: positionOf, Field: "log"}

// Position identifies the newest commit of an inbox, so that the sender can tell whether the inbox has lost any. The
// zero Position is that of an empty inbox.
type Position struct {
	Epoch  uint64 // of the sender's claim at home
	Number uint64
}

func (p Position) encode() []byte {
	return binary.AppendUvarint(binary.AppendUvarint(nil, p.Epoch), p.Number)
}

// parsePosition parses a position. For malformed bytes it returns the zero Position.
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

// encodeKeys encodes the publication of a commit: the counters whose shares it has, and whether it is a repair. Rows
// cannot carry the repair flag, because a later change may replace a row before it is read.
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

// parseKeys parses a publication, and reports whether it is valid.
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
