package conn

import (
	"math"
	"time"

	"github.com/cespare/xxhash/v2"

	"headcount/gateway/fanout"
	"headcount/gateway/websocket"
	"headcount/presence"
)

// eventForm is a count as a server-sent event. Every other form but pusherForm is a
// frame of our own, whose count has that many significant digits; 0 means all digits.
const eventForm fanout.Form = 1 << 7

// CountEncoder encodes counts of pages. It implements fanout.Encoder.
type CountEncoder struct{}

// Encode implements fanout.Encoder.
func (CountEncoder) Encode(b []byte, u presence.Update, form fanout.Form) (encoded []byte, shown uint64) {
	count, ok := presence.CountOf(u)
	if !ok {
		return b, 0
	}

	switch form {
	case eventForm:
		// An event shows the version, so each is news to its client.
		return appendEvent(b, count), 0
	case pusherForm:
		return appendPusherCount(b, count)
	}

	precision := uint8(form)
	count.Users = significant(count.Users, precision)
	b = websocket.AppendFrame(b, websocket.Text, appendCountText(nil, count))

	// The version and the time do not make a rounded count a new one.
	if precision != 0 {
		count.Version = presence.Version{}
		count.Updated = time.Time{}
		shown = xxhash.Sum64(appendCountText(nil, count))
	}

	return b, shown
}

func appendCountText(b []byte, c presence.Count) []byte {
	b = append(b, `{"type":"count",`...)
	b = c.AppendMembers(b)

	return append(b, '}')
}

// appendEvent appends a server-sent event with a count.
func appendEvent(b []byte, c presence.Count) []byte {
	b = append(b, "event: count\nid: "...)
	b = append(b, c.Version.String()...)
	b = append(b, "\ndata: "...)
	b = c.AppendJSON(b)

	return append(b, "\n\n"...)
}

// significant rounds n, which is not negative, to that many significant digits; a half
// rounds up. 0 digits means no rounding.
func significant(n int64, digits uint8) int64 {
	unit := int64(1) // of the last digit that stays
	limit := int64(1)
	for range digits {
		limit *= 10
	}
	// The next unit is at most n, so it does not overflow.
	for digits > 0 && n/unit >= limit {
		unit *= 10
	}

	rest := n % unit
	n -= rest
	roundUp := rest > 0 && rest >= unit/2
	if roundUp && n <= math.MaxInt64-unit { // the largest numbers would overflow
		n += unit
	}

	return n
}
