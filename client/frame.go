package client

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"
)

// A Version orders the states of one count or counter: incarnation first, then sequence.
// The zero Version belongs to a page or counter that never changed.
type Version struct{ Incarnation, Sequence uint64 }

// ParseVersion parses "incarnation-sequence".
func ParseVersion(s string) (Version, error) {
	incarnation, sequence, _ := strings.Cut(s, "-")

	var v Version
	var err1, err2 error
	v.Incarnation, err1 = strconv.ParseUint(incarnation, 10, 64)
	v.Sequence, err2 = strconv.ParseUint(sequence, 10, 64) // also refuses a text without a hyphen
	if err1 != nil || err2 != nil {
		return Version{}, fmt.Errorf("version %q is not incarnation-sequence", s)
	}

	return v, nil
}

// Before reports whether v is older than w.
func (v Version) Before(w Version) bool {
	if v.Incarnation != w.Incarnation {
		return v.Incarnation < w.Incarnation
	}

	return v.Sequence < w.Sequence
}

// String returns "incarnation-sequence".
func (v Version) String() string { return fmt.Sprintf("%d-%d", v.Incarnation, v.Sequence) }

// MarshalText returns the same as String.
func (v Version) MarshalText() ([]byte, error) { return []byte(v.String()), nil }

// UnmarshalText is ParseVersion.
func (v *Version) UnmarshalText(text []byte) (err error) {
	*v, err = ParseVersion(string(text))

	return err
}

// A Count is the number of users on a page.
type Count struct {
	Page         string           `json:"page"`
	Count        int64            `json:"count"`
	UpdatedAt    time.Time        `json:"updated_at"` // zero: the page never had a user
	Version      Version          `json:"version"`
	Stale        bool             `json:"stale,omitempty"` // the count may be outdated
	StaleRegions []string         `json:"stale_regions,omitempty"`
	Regions      map[string]int64 `json:"regions,omitempty"` // only in the answer to API.Regions
}

// A Counter is the state of a durable counter.
type Counter struct {
	Key       string    `json:"key"`
	Kind      string    `json:"kind"`
	Value     int64     `json:"value"`
	UpdatedAt time.Time `json:"updated_at"` // zero: never changed
	Version   Version   `json:"version"`
	Reserved  int64     `json:"reserved,omitempty"` // what open reservations have taken out of the value
	Exact     bool      `json:"exact"`              // false: an estimate, or a value that may lag
	Stale     bool      `json:"stale,omitempty"`    // the value may be outdated
	Mine      bool      `json:"mine,omitempty"`     // in frames: the connection's user is a member
	Member    *bool     `json:"member,omitempty"`   // in answers about one member
	Replayed  bool      `json:"-"`                  // in answers: the change was made earlier, with the same Idempotency-Key
}

// A Frame is one message of the server. Type says which of the other fields are set.
type Frame struct {
	Type    string
	Count   Count   // of a "count"
	Counter Counter // of a "counter"
	Unread  int64   // of an "unread"

	// Of a "welcome".
	User      string        // the user of the connection, according to the server
	ID        string        // signed; Config.ID of a later connection of the same user
	Heartbeat time.Duration // silence after which a client asks for a sign of life

	// Of a "reconnect".
	After time.Duration

	// Of an "error".
	Code, Message string
	Page, Key     string // the page or counter at fault, if any
}

// ErrFrame is wrapped by errors about messages and answers that are not in the contract.
var ErrFrame = errors.New("the server's message cannot be understood")

// ParseFrame parses one message. Because counts are very frequent, a fast parser handles flat
// ASCII without escapes; encoding/json parses all other messages.
func ParseFrame(msg []byte, f *Frame) error {
	if scanFrame(msg, f) {
		return nil
	}

	return decodeFrame(msg, f)
}

func decodeFrame(msg []byte, f *Frame) error {
	var w wireFrame
	if err := json.Unmarshal(msg, &w); err != nil {
		return fmt.Errorf("%w: %w: %.200q", ErrFrame, err, msg)
	}

	// Callers use a Frame again, so nothing of the former message may be left, also after an error.
	*f = Frame{Type: w.Type}

	// A newer server may add members; one that leaves out these is not ours.
	if !w.whole() {
		return fmt.Errorf("%w: a member is missing: %.200q", ErrFrame, msg)
	}

	switch w.Type {
	case "count":
		f.Count = Count{
			Page:         w.Page,
			Count:        *w.Count,
			UpdatedAt:    w.UpdatedAt,
			Version:      *w.Version,
			Stale:        w.Stale,
			StaleRegions: w.StaleRegions,
		}
	case "counter":
		f.Counter = w.Counter
		f.Counter.Value = *w.Value
		f.Counter.Version = *w.Version
	case "unread":
		f.Unread = *w.Count
	case "welcome":
		f.User = w.User
		f.ID = w.ID
		f.Heartbeat = time.Duration(w.HeartbeatMS) * time.Millisecond
	case "reconnect":
		f.After = time.Duration(w.AfterMS) * time.Millisecond
	case "error":
		f.Code = w.Code
		f.Message = w.Message
		f.Page = w.Page
		f.Key = w.Faulty
	}

	return nil
}

// wireFrame has the members of every type of frame.
type wireFrame struct {
	Counter
	Type         string   `json:"type"`
	Value        *int64   `json:"value"`
	Page         string   `json:"page"`
	Count        *int64   `json:"count"`
	Version      *Version `json:"version"`
	StaleRegions []string `json:"stale_regions"`
	User         string   `json:"user"`
	ID           string   `json:"id"`
	HeartbeatMS  int64    `json:"heartbeat_ms"`
	AfterMS      int64    `json:"after_ms"`
	Code         string   `json:"code"`
	Message      string   `json:"message"`
	Faulty       string   `json:"counter"`
}

// whole reports whether the frame has the members that its type needs.
func (w *wireFrame) whole() bool {
	switch w.Type {
	case "":
		return false
	case "count":
		return w.Count != nil && w.Version != nil && w.Page != ""
	case "counter":
		return w.Value != nil && w.Version != nil && w.Key != ""
	case "unread":
		return w.Count != nil
	case "welcome":
		return w.User != ""
	default:
		return true
	}
}

// scanFrame parses a count frame with known members only. For any other message it returns
// false, and the content of f is undefined.
func scanFrame(msg []byte, f *Frame) bool {
	rest, ok := bytes.CutPrefix(msg, []byte(`{"type":"count"`))
	if !ok {
		return false
	}

	*f = Frame{Type: "count"}

	counted := false
	versioned := false
	for s := (scanner{rest}); s.eat(','); {
		// Members in any order, as JSON permits; a repeated one overwrites, as encoding/json does.
		key, ok := s.text()
		if !ok || !s.eat(':') {
			return false
		}

		switch string(key) {
		case "page":
			text, isText := s.text()
			f.Count.Page = string(text)
			ok = isText && len(text) > 0
		case "count":
			f.Count.Count, ok = s.number()
			counted = ok
		case "updated_at":
			if s.word("null") {
				break
			}
			text, _ := s.text()
			ok = f.Count.UpdatedAt.UnmarshalText(text) == nil
		case "version":
			text, _ := s.text()
			ok = f.Count.Version.UnmarshalText(text) == nil
			versioned = ok
		case "stale":
			f.Count.Stale = s.word("true")
			ok = f.Count.Stale || s.word("false")
		default:
			return false
		}
		if !ok {
			return false
		}

		// What follows the object, and a missing member, is for decodeFrame to refuse with a reason.
		if s.eat('}') {
			return len(s.rest) == 0 && counted && versioned && f.Count.Page != ""
		}
	}
	return false
}

// A scanner parses tokens at the front of rest. It allows no white space, no escapes and no
// byte outside printable ASCII.
type scanner struct{ rest []byte }

func (s *scanner) eat(c byte) bool {
	if len(s.rest) == 0 || s.rest[0] != c {
		return false
	}

	s.rest = s.rest[1:]
	return true
}

func (s *scanner) word(w string) bool {
	rest, ok := bytes.CutPrefix(s.rest, []byte(w))
	s.rest = rest

	return ok
}

func (s *scanner) text() ([]byte, bool) {
	if !s.eat('"') {
		return nil, false
	}

	for i, c := range s.rest {
		if c == '"' {
			text := s.rest[:i]
			s.rest = s.rest[i+1:]
			return text, true
		}

		// Escapes and UTF-8 are left to encoding/json, so that text needs no copy.
		plain := 0x20 <= c && c <= 0x7e && c != '\\'
		if !plain {
			return nil, false
		}
	}

	return nil, false
}

// number reads an integer of at most 18 digits, so that it cannot overflow.
func (s *scanner) number() (int64, bool) {
	negative := s.eat('-')

	n := int64(0)
	digits := 0
	for digits < len(s.rest) && s.rest[digits]-'0' <= 9 {
		n = n*10 + int64(s.rest[digits]-'0')
		digits++
		if digits > 18 {
			return 0, false
		}
	}

	// JSON has no leading zeros; such a number is encoding/json's to refuse.
	if digits == 0 || digits > 1 && s.rest[0] == '0' {
		return 0, false
	}

	s.rest = s.rest[digits:]

	if negative {
		n = -n
	}

	return n, true
}

// topicFrames returns frames of a type that list topics, as many frames as needed to stay
// below the 4,096 bytes that the server accepts. member is "pages" or "counters".
func topicFrames(kind, member string, topics []string) [][]byte {
	const limit = 4000
	var frames [][]byte
	var msg []byte

	for _, topic := range topics {
		quoted := quote(topic)
		// A topic that the server accepts always fits into a frame of its own.
		if msg != nil && len(msg)+len(quoted) > limit {
			frames = append(frames, append(msg, `]}`...))
			msg = nil
		}

		if msg == nil {
			msg = fmt.Appendf(nil, `{"type":%q,%q:[`, kind, member)
		} else {
			msg = append(msg, ',')
		}

		msg = append(msg, quoted...)
	}
	if msg != nil {
		frames = append(frames, append(msg, `]}`...))
	}

	return frames
}

func quote(s string) []byte {
	quoted, _ := json.Marshal(s) // a string always has a JSON form

	return quoted
}
