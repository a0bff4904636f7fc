package simulate

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"unicode"
	"unicode/utf8"
)

// A frame is what the server says, all types in one. Page is only valid until
// the buffer it came in is used again.
type frame struct {
	Type        string
	Page        []byte
	Count       int64
	HasCount    bool
	Version     string
	Stale       bool
	User        string
	ID          string
	HeartbeatMS int64
	AfterMS     int64
	Code        string
	Message     string
}

var errFrame = errors.New("the frame cannot be parsed")

// parseFrame reads one message. Hundreds of thousands of counts come, so flat ASCII
// without escapes takes a short way that allocates little. encoding/json reads
// everything else.
func parseFrame(msg []byte) (frame, error) {
	if f, ok := scanFrame(msg); ok {
		return f, nil
	}
	return decodeFrame(msg)
}

func decodeFrame(msg []byte) (frame, error) {
	var w struct {
		Type        string `json:"type"`
		Page        string `json:"page"`
		Count       *int64 `json:"count"`
		Version     string `json:"version"`
		Stale       bool   `json:"stale"`
		User        string `json:"user"`
		ID          string `json:"id"`
		HeartbeatMS int64  `json:"heartbeat_ms"`
		AfterMS     int64  `json:"after_ms"`
		Code        string `json:"code"`
		Message     string `json:"message"`
	}
	if err := json.Unmarshal(msg, &w); err != nil {
		return frame{}, fmt.Errorf("%w: %w", errFrame, err)
	}
	if w.Type == "" {
		return frame{}, fmt.Errorf("%w: no type", errFrame)
	}
	f := frame{
		Type: w.Type, Page: []byte(w.Page), Version: w.Version, Stale: w.Stale, User: w.User, ID: w.ID,
		HeartbeatMS: w.HeartbeatMS, AfterMS: w.AfterMS, Code: w.Code, Message: w.Message,
	}
	if w.Count != nil {
		f.Count, f.HasCount = *w.Count, true
	}
	return f, nil
}

// scanFrame reads a flat object whose members it knows. For everything else it
// reports false, and its frame means nothing.
func scanFrame(msg []byte) (f frame, ok bool) {
	s := scanner{rest: msg}
	if !s.eat('{') {
		return frame{}, false
	}
	for {
		key, ok := s.text()
		if !ok || !s.eat(':') || !s.member(&f, key) {
			return frame{}, false
		}
		if s.eat('}') {
			return f, len(s.rest) == 0 && f.Type != ""
		}
		if !s.eat(',') {
			return frame{}, false
		}
	}
}

// member reads the value of one member into f.
func (s *scanner) member(f *frame, key []byte) (ok bool) {
	var text []byte
	switch string(key) {
	case "type":
		text, ok = s.text()
		f.Type = typeName(text)
	case "page":
		f.Page, ok = s.text()
	case "count":
		f.Count, ok = s.number()
		f.HasCount = ok
	case "updated_at":
		if !s.word("null") {
			_, ok = s.text()
			return ok
		}
		return true
	case "version":
		text, ok = s.text()
		f.Version = string(text)
	case "stale":
		f.Stale = s.word("true")
		return f.Stale || s.word("false")
	case "user":
		text, ok = s.text()
		f.User = string(text)
	case "id":
		text, ok = s.text()
		f.ID = string(text)
	case "heartbeat_ms":
		f.HeartbeatMS, ok = s.number()
	case "after_ms":
		f.AfterMS, ok = s.number()
	}
	return ok
}

// typeName saves the allocation for the types that come often.
func typeName(b []byte) string {
	switch string(b) {
	case "count":
		return "count"
	case "heartbeat":
		return "heartbeat"
	}
	return string(b)
}

// A scanner takes tokens off the front of rest. It allows no white space, no
// escapes and no byte outside printable ASCII.
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
		switch {
		case c == '"':
			text := s.rest[:i]
			s.rest = s.rest[i+1:]
			return text, true
		case c == '\\' || c < 0x20 || c > 0x7e:
			return nil, false
		}
	}
	return nil, false
}

// number reads an integer of at most 18 digits, so that it cannot overflow.
func (s *scanner) number() (int64, bool) {
	negative := s.eat('-')
	n, digits := int64(0), 0
	for digits < len(s.rest) && s.rest[digits]-'0' <= 9 {
		n = n*10 + int64(s.rest[digits]-'0')
		if digits++; digits > 18 {
			return 0, false
		}
	}
	if digits == 0 || digits > 1 && s.rest[0] == '0' {
		return 0, false
	}
	s.rest = s.rest[digits:]
	if negative {
		n = -n
	}
	return n, true
}

// A version orders the counts of one page: incarnation first, then sequence.
type version struct{ incarnation, sequence uint64 }

func parseVersion(s string) (version, error) {
	for i := range len(s) {
		if s[i] != '-' {
			continue
		}
		incarnation, err := strconv.ParseUint(s[:i], 10, 64)
		if err != nil {
			break
		}
		sequence, err := strconv.ParseUint(s[i+1:], 10, 64)
		if err != nil {
			break
		}
		return version{incarnation, sequence}, nil
	}
	return version{}, fmt.Errorf("version %q is not incarnation-sequence", s)
}

func (v version) before(w version) bool {
	if v.incarnation != w.incarnation {
		return v.incarnation < w.incarnation
	}
	return v.sequence < w.sequence
}

// validPage says whether the server must accept a join of the page. The rule is
// written out here, from the contract, because a checker that asked the server's
// own code would agree with its mistakes.
func validPage(page string) bool {
	switch page {
	case "", "*", "-", ".", "..":
		return false
	}
	n, size := utf8.RuneCountInString(page), len(page)
	if n > 128 || !utf8.ValidString(page) {
		return false
	}
	for i, r := range page {
		switch {
		case r == ' ':
		case r == '\u200c' || r == '\u200d':
			if i == 0 || i+utf8.RuneLen(r) == size {
				return false
			}
		case r == utf8.RuneError || !unicode.In(r, unicode.L, unicode.M, unicode.N, unicode.P, unicode.S):
			return false
		}
	}
	return true
}

// The frames a client sends.

func pageFrame(kind, page string) []byte {
	quoted, err := json.Marshal(page)
	if err != nil { // a string always has a JSON form
		panic(err)
	}
	msg := make([]byte, 0, len(`{"type":"subscribe","page":}`)+len(quoted))
	msg = append(msg, `{"type":"`...)
	msg = append(msg, kind...)
	msg = append(msg, `","page":`...)
	msg = append(msg, quoted...)
	return append(msg, '}')
}

// subscribeFrames asks for the counts of pages, in as many frames as are needed
// to stay under the 4,096 bytes that the server reads.
func subscribeFrames(pages []string) [][]byte {
	const limit = 4000
	var frames [][]byte
	var msg []byte
	for _, page := range pages {
		quoted, err := json.Marshal(page)
		if err != nil {
			panic(err)
		}
		if msg != nil && len(msg)+len(quoted) > limit {
			frames = append(frames, append(msg, `]}`...))
			msg = nil
		}
		if msg == nil {
			msg = append(msg, `{"type":"subscribe","pages":[`...)
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

var heartbeatFrame = []byte(`{"type":"heartbeat"}`)
