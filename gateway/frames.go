package gateway

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"strconv"
	"time"
	"unicode/utf8"

	"headcount/presence"
)

// maxMessage is the longest message a client may send, in bytes.
const maxMessage = 4096

// Codes of error frames.
const (
	codeBadJSON       = "bad_json"
	codeBadType       = "bad_type"
	codeBadPage       = "bad_page"
	codeTooManyPages  = "too_many_pages"
	codeTooLarge      = "too_large"
	codeBinary        = "binary"
	codeTooManyErrors = "too_many_errors"
	codeRateLimited   = "rate_limited"
	codeTokenExpired  = "token_expired"
)

// Types of client messages.
const (
	typeJoin        = "join"
	typeLeave       = "leave"
	typeSubscribe   = "subscribe"
	typeUnsubscribe = "unsubscribe"
	typeHeartbeat   = "heartbeat"
	typeRead        = "read"
)

// maxPrecision is the most significant digits a subscriber may ask for. More
// than a billion users need no more.
const maxPrecision = 9

// message is what a client sent: pages has the one of a join or leave, too.
type message struct {
	kind      string
	pages     []string
	precision uint8 // of a subscribe: significant digits of its counts; 0: all
}

// fault is a client's mistake, in the form of an error frame.
type fault struct {
	code    string
	message string
	page    string
	hasPage bool
}

func (f *fault) Error() string { return f.code + ": " + f.message }

// parseMessage reads one client message. Its error is a *fault. Member names
// are compared exactly, which encoding/json's structs do not.
func parseMessage(text []byte) (message, error) {
	var members map[string]json.RawMessage
	if err := json.Unmarshal(text, &members); err != nil || members == nil {
		return message{}, &fault{code: codeBadJSON, message: "a message is a JSON object" + because(err)}
	}
	raw, ok := members["type"]
	if !ok {
		return message{}, &fault{code: codeBadType, message: `the message has no "type"`}
	}
	var m message
	if err := decodeMember("type", raw, &m.kind); err != nil {
		return message{}, err
	}
	switch m.kind {
	case typeJoin, typeLeave:
		page := ""
		if raw, ok := members["page"]; ok {
			if err := decodeMember("page", raw, &page); err != nil {
				return message{}, err
			}
		}
		if err := presence.CheckPage(page); err != nil {
			return message{}, badPage(page, err)
		}
		m.pages = []string{page}
	case typeSubscribe, typeUnsubscribe:
		raw, ok := members["pages"]
		if !ok {
			return message{}, &fault{code: codeBadPage, message: `the message has no "pages", a list of page ids`}
		}
		// A list of *string tells null, which is no string, from "".
		var list []*string
		if err := decodeMember("pages", raw, &list); err != nil {
			return message{}, err
		}
		for _, page := range list {
			if page == nil {
				return message{}, &fault{code: codeBadJSON, message: `"pages" has a null; it is a list of strings`}
			}
			if err := presence.CheckReadable(*page); err != nil {
				return message{}, badPage(*page, err)
			}
			m.pages = append(m.pages, *page)
		}
		if raw, ok := members["precision"]; ok && m.kind == typeSubscribe {
			var digits int
			if err := decodeMember("precision", raw, &digits); err != nil {
				return message{}, err
			}
			if digits < 1 || digits > maxPrecision {
				return message{}, &fault{code: codeBadJSON, message: fmt.Sprintf(`"precision" is %d; it is the number of significant digits, 1 to %d; leave it out for exact counts`, digits, maxPrecision)}
			}
			m.precision = uint8(digits)
		}
	case typeHeartbeat, typeRead:
	default:
		return message{}, &fault{code: codeBadType, message: fmt.Sprintf("%q is no message type; there are join, leave, subscribe, unsubscribe, heartbeat and read", presence.Excerpt(m.kind))}
	}
	return m, nil
}

func decodeMember(name string, raw json.RawMessage, into any) error {
	err := json.Unmarshal(raw, into)
	if err == nil && string(raw) == "null" {
		err = errors.New("it is null")
	}
	if err != nil {
		return &fault{code: codeBadJSON, message: fmt.Sprintf("%q has the wrong JSON type%s", name, because(err))}
	}
	return nil
}

func because(err error) string {
	if err == nil {
		return ""
	}
	return ": " + err.Error()
}

func badPage(page string, err error) *fault {
	return &fault{code: codeBadPage, message: err.Error(), page: presence.Excerpt(page), hasPage: true}
}

// appendJSON appends the error frame's text.
func (f *fault) appendJSON(b []byte) []byte {
	b = append(b, `{"type":"error","code":"`...)
	b = append(b, f.code...)
	b = append(b, `","message":`...)
	b = appendQuoted(b, f.message)
	if f.hasPage {
		b = append(b, `,"page":`...)
		b = appendQuoted(b, f.page)
	}
	return append(b, '}')
}

// appendQuoted is for text that came from outside.
func appendQuoted(b []byte, s string) []byte {
	quoted, err := json.Marshal(s)
	if err != nil { // cannot be: every string can be encoded
		return append(b, `""`...)
	}
	return append(b, quoted...)
}

// significant rounds n, which is not negative, to that many significant
// digits, halves up; 0 digits are all of them.
func significant(n int64, digits uint8) int64 {
	unit, most := int64(1), int64(1)
	for range digits {
		most *= 10
	}
	for digits > 0 && n/unit >= most {
		unit *= 10
	}
	rest := n % unit
	if n -= rest; rest > 0 && rest >= unit/2 && n <= math.MaxInt64-unit {
		n += unit
	}
	return n
}

func appendCountText(b []byte, c presence.Count) []byte {
	b = append(b, `{"type":"count",`...)
	b = c.AppendMembers(b)
	return append(b, '}')
}

func appendWelcome(b []byte, id Identity, ping time.Duration) []byte {
	b = append(b, `{"type":"welcome","user":`...)
	b = appendQuoted(b, id.User)
	if id.Signed != "" {
		b = append(b, `,"id":`...)
		b = appendQuoted(b, id.Signed)
	}
	b = append(b, `,"heartbeat_ms":`...)
	b = strconv.AppendInt(b, ping.Milliseconds(), 10)
	return append(b, '}')
}

func appendUnread(b []byte, n int64) []byte {
	b = append(b, `{"type":"unread","count":`...)
	b = strconv.AppendInt(b, n, 10)
	return append(b, '}')
}

func appendReconnect(b []byte, after time.Duration) []byte {
	b = append(b, `{"type":"reconnect","after_ms":`...)
	b = strconv.AppendInt(b, after.Milliseconds(), 10)
	return append(b, '}')
}

// Opcodes of RFC 6455, with the FIN bit.
const (
	frameText  = 0x81
	frameClose = 0x88
	framePing  = 0x89
	framePong  = 0x8a
)

// appendFrame appends an unmasked WebSocket frame, as servers send them: the
// same bytes serve every client.
func appendFrame(b []byte, opcode byte, payload []byte) []byte {
	b = append(b, opcode)
	switch n := len(payload); {
	case n < 126:
		b = append(b, byte(n))
	case n <= 0xffff:
		b = append(b, 126)
		b = binary.BigEndian.AppendUint16(b, uint16(n))
	default:
		b = append(b, 127)
		b = binary.BigEndian.AppendUint64(b, uint64(n))
	}
	return append(b, payload...)
}

// appendClose appends a close frame. A reason is at most 123 bytes.
func appendClose(b []byte, code int, reason string) []byte {
	for len(reason) > 123 || !utf8.ValidString(reason) {
		reason = reason[:len(reason)-1]
	}
	payload := binary.BigEndian.AppendUint16(make([]byte, 0, 2+len(reason)), uint16(code))
	return appendFrame(b, frameClose, append(payload, reason...))
}

// appendEvent appends a server-sent event with a counter.
func appendEvent(b []byte, c presence.Count) []byte {
	b = append(b, "event: count\nid: "...)
	b = append(b, c.Version.String()...)
	b = append(b, "\ndata: "...)
	b = c.AppendJSON(b)
	return append(b, "\n\n"...)
}
