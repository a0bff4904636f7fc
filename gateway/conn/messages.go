package conn

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"time"

	"headcount/counter"
	"headcount/gateway/bounds"
	"headcount/gateway/calls"
	"headcount/gateway/identity"
	"headcount/gateway/websocket"
	"headcount/presence"
)

// Types of client messages.
const (
	typeJoin        = "join"
	typeLeave       = "leave"
	typeSubscribe   = "subscribe"
	typeUnsubscribe = "unsubscribe"
	typeHeartbeat   = "heartbeat"
	typeRead        = "read"
	typePause       = "pause"
	typeResume      = "resume"
	typeSignin      = "signin" // of Pusher alone
)

// maxPrecision is the largest number of significant digits that a subscriber may
// ask for, enough even for counts of a billion users.
const maxPrecision = 9

// message is one client message. pages also has the one page of a join, leave or read.
type message struct {
	kind      string
	pages     []string
	counters  []string
	precision uint8 // significant digits of a subscribe's counts; 0: all digits
}

// fault is a client's mistake, in the form of an error frame.
type fault struct {
	code    string
	message string
	member  string // "page" or "counter", if one is at fault
	// value is that of the member, whole: clients find the page or counter by it. A message is short enough.
	value string
}

func (f *fault) Error() string { return f.code + ": " + f.message }

// faultOf returns the fault of a message that an error refuses, as package calls says what errors mean.
func faultOf(err error, message string) *fault {
	return &fault{code: calls.CodeOf(err), message: message}
}

// faultBeyond returns the fault of a message that goes beyond a bound.
func faultBeyond(b *bounds.Bound) *fault { return faultOf(b.Is, b.Says) }

// about returns the fault with the page or counter that is at fault.
func (f *fault) about(member, value string) *fault {
	// A new one, because all clients share the faults in variables.
	return &fault{code: f.code, message: f.message, member: member, value: value}
}

// parseMessage reads one client message. Its error is a *fault.
func parseMessage(text []byte) (message, error) {
	page, isPlain := plainJoin(text)
	if !isPlain {
		return decodeMessage(text)
	}
	if err := presence.CheckPage(page); err != nil {
		return message{}, badPage(page, err)
	}

	return message{kind: typeJoin, pages: []string{page}}, nil
}

// plainJoin returns the page of a join as our clients write it, and whether text is one. Almost every connection sends
// one, and decodeMessage takes ten times as long.
func plainJoin(text []byte) (page string, ok bool) {
	rest, isJoin := bytes.CutPrefix(text, []byte(`{"type":"join","page":"`))
	name, isWhole := bytes.CutSuffix(rest, []byte(`"}`))
	if !isJoin || !isWhole || bytes.ContainsFunc(name, isCoded) {
		return "", false
	}

	return string(name), true
}

// isCoded reports whether a character in a JSON string may stand for another one, or be a mistake.
func isCoded(r rune) bool { return r < ' ' || r > '~' || r == '"' || r == '\\' }

// decodeMessage is parseMessage for any message. It compares member names exactly; a struct would match them without
// regard to case.
func decodeMessage(text []byte) (message, error) {
	var members map[string]json.RawMessage
	if err := json.Unmarshal(text, &members); err != nil || members == nil {
		return message{}, faultOf(calls.ErrBad, "a message is a JSON object"+because(err))
	}

	raw, ok := members["type"]
	if !ok {
		return message{}, faultOf(calls.ErrMessageType, `the message has no "type"`)
	}

	var m message
	if err := decodeMember("type", raw, &m.kind); err != nil {
		return message{}, err
	}

	var err error

	switch m.kind {
	case typeJoin, typeLeave:
		m.pages, err = decodePage(members, true)
	case typeSubscribe, typeUnsubscribe:
		err = m.decodeLists(members)
	case typeRead:
		m.pages, err = decodePage(members, false)
	case typeHeartbeat, typePause, typeResume:
	default:
		err = faultOf(calls.ErrMessageType, fmt.Sprintf("%q is no message type; there are join, leave, "+
			"subscribe, unsubscribe, heartbeat, read, pause and resume", presence.Excerpt(m.kind)))
	}
	if err != nil {
		return message{}, err
	}

	// This check comes last, because the errors about pages and keys are better: they name the page or key. Invalid
	// Unicode in these was decoded as U+FFFD, which they may not have.
	if err := presence.CheckUnicode(text); err != nil {
		return message{}, faultOf(calls.ErrBad, "a message is JSON"+because(err))
	}

	return m, nil
}

// decodePage reads the one page of a message. If the page is missing and not required, the list is empty.
func decodePage(members map[string]json.RawMessage, required bool) ([]string, error) {
	page := ""
	raw, given := members["page"]

	// A read without a page is of all pages.
	if !given && !required {
		return nil, nil
	}

	if given {
		if err := decodeMember("page", raw, &page); err != nil {
			return nil, err
		}
	}

	if err := presence.CheckPage(page); err != nil {
		return nil, badPage(page, err)
	}

	return []string{page}, nil
}

// decodeLists reads the pages and counters of a subscribe or unsubscribe, and the precision of a subscribe.
func (m *message) decodeLists(members map[string]json.RawMessage) (err error) {
	pages, hasPages := members["pages"]
	counters, hasCounters := members["counters"]
	if !hasPages && !hasCounters {
		return faultOf(presence.ErrPage, `the message has neither "pages", a list of page ids, `+
			`nor "counters", a list of keys`)
	}

	if hasPages {
		m.pages, err = decodeList("pages", pages, checkReadable)
		if err != nil {
			return err
		}
	}

	if hasCounters {
		m.counters, err = decodeList("counters", counters, checkCounter)
		if err != nil {
			return err
		}
	}

	// An unsubscribe may have the member, in which it means nothing.
	if raw, ok := members["precision"]; ok && m.kind == typeSubscribe {
		m.precision, err = decodePrecision(raw)
	}

	return err
}

// checkReadable returns a fault about a page that nobody can read.
func checkReadable(page string) error {
	if err := presence.CheckReadable(page); err != nil {
		return badPage(page, err)
	}

	return nil
}

// checkCounter returns a fault if key is not a valid counter key.
func checkCounter(key string) error {
	if err := counter.CheckKey(key); err != nil {
		return badCounter(key, err)
	}

	return nil
}

func decodePrecision(raw json.RawMessage) (uint8, error) {
	var digits int
	if err := decodeMember("precision", raw, &digits); err != nil {
		return 0, err
	}

	if digits < 1 || digits > maxPrecision {
		return 0, faultOf(calls.ErrBad, fmt.Sprintf(`"precision" is %d; it is the number of `+
			`significant digits, 1 to %d; leave it out for exact counts`, digits, maxPrecision))
	}

	return uint8(digits), nil
}

func decodeMember(name string, raw json.RawMessage, into any) error {
	// JSON's null fits every type of Go, but no member.
	err := json.Unmarshal(raw, into)
	if err == nil && string(raw) == "null" {
		err = errors.New("it is null")
	}

	if err != nil {
		return faultOf(calls.ErrBad, fmt.Sprintf("%q has the wrong JSON type%s", name, because(err)))
	}

	return nil
}

// decodeList reads a list of strings that check accepts.
func decodeList(name string, raw json.RawMessage, check func(string) error) (list []string, err error) {
	var elements []*string // pointers, so that null differs from ""
	if err := decodeMember(name, raw, &elements); err != nil {
		return nil, err
	}

	for _, element := range elements {
		if element == nil {
			return nil, faultOf(calls.ErrBad, fmt.Sprintf("%q has a null; it is a list of strings", name))
		}

		if err := check(*element); err != nil {
			return nil, err
		}

		list = append(list, *element)
	}

	return list, nil
}

func because(err error) string {
	if err == nil {
		return ""
	}
	return ": " + err.Error()
}

func badPage(page string, err error) *fault {
	return faultOf(err, err.Error()).about("page", page)
}

// appendJSON appends the error frame's text.
func (f *fault) appendJSON(b []byte) []byte {
	b = append(b, `{"type":"error","code":"`...)
	b = append(b, f.code...)
	b = append(b, `","message":`...)
	b = appendQuoted(b, f.message)
	if f.member != "" {
		b = append(append(append(b, `,"`...), f.member...), `":`...)
		b = appendQuoted(b, f.value)
	}

	return append(b, '}')
}

// appendQuoted appends s, which may be any text, as a JSON string.
func appendQuoted(b []byte, s string) []byte {
	quoted, _ := json.Marshal(s) // every string can be encoded

	return append(b, quoted...)
}

func appendWelcome(b []byte, id identity.Identity, ping time.Duration) []byte {
	b = append(b, `{"type":"welcome","user":`...)
	b = appendQuoted(b, id.User)
	// With a token there is no id that a client could keep.
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

// UnreadEncoder implements fanout.NumberEncoder.
type UnreadEncoder struct{}

// AppendNumber implements fanout.NumberEncoder.
func (UnreadEncoder) AppendNumber(b []byte, n int64) []byte {
	return websocket.AppendFrame(b, websocket.Text, appendUnread(nil, n))
}

func appendReconnect(b []byte, after time.Duration) []byte {
	b = append(b, `{"type":"reconnect","after_ms":`...)
	b = strconv.AppendInt(b, after.Milliseconds(), 10)
	return append(b, '}')
}
