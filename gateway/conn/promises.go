//go:build promises

package conn

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"weak"

	"headcount/gateway/websocket"
	"headcount/internal/promises"
	"headcount/presence"
)

// With the tag promises, the program reads what it writes to WebSockets and event streams as clients do, and ends at
// once when that breaks a promise of docs/promises.md which a single connection can show. The programs that tests start
// are built with the tag, so every connection of such a test is checked, those of browsers too.

// stories has what every connection has been told. A story goes with its connection.
var stories sync.Map // *story by weak.Pointer[conn]

// story is what one connection has been told. The connection's wire has a lock that guards it, but for own.
type story struct {
	newest map[string]news // by type and name
	joined string          // the page that an event stream has joined

	mu sync.Mutex // guards own
	// own has the pages that the client of a WebSocket has joined, with the version from which on counts include the
	// client. nil: the store does not have the join yet, or the client has seen the first count after it.
	own map[string]*presence.Version
}

// news is a count of a page, or a value of a counter.
type news struct {
	Type    string `json:"type"`
	Page    string `json:"page"`
	Key     string `json:"key"`
	Count   int64  `json:"count"`
	Value   int64  `json:"value"`
	Version string `json:"version"`
	Stale   bool   `json:"stale"`
}

// Wrote is told what the client is sent: whole frames or events, after the head of the answer.
func (c *conn) Wrote(p []byte) {
	_, rest, isHead := bytes.Cut(p, []byte("\r\n\r\n"))
	// The first write has the head of the HTTP answer in front of its frames.
	if isHead && bytes.HasPrefix(p, []byte("HTTP/1.1 ")) {
		p = rest
	}

	read := eachFrame
	if c.speech == stream {
		read = eachEvent
	}

	err := read(p, c.story().judge)
	if err != nil {
		promises.Broken("%v; it was written: %q", err, p)
	}
}

// noteJoin is told that the client of a WebSocket joins a page.
func (c *conn) noteJoin(name string) {
	s := c.story()
	s.mu.Lock()
	defer s.mu.Unlock()

	// Until the store has the join, no count has to include the client.
	s.own[presence.KeyOf(name)] = nil
}

// noteArrival is told that the store has a join. What the hub has now includes the client, and so does all that is
// newer; an older count may still be on its way.
func (c *conn) noteArrival(name string) {
	page, _ := c.all.cfg.Hub.Last(presence.CountTopic(name)) // without one, any count is newer
	site, _ := c.all.cfg.Hub.Last(c.total())

	s := c.story()
	s.mu.Lock()
	defer s.mu.Unlock()

	if _, joined := s.own[presence.KeyOf(name)]; joined {
		s.own[presence.KeyOf(name)] = &page.Version
		s.own[presence.AllPages] = &site.Version
	}
}

// noteLeave is told that the client leaves a page. It may be on another one, but need not.
func (c *conn) noteLeave(name string) {
	s := c.story()
	s.mu.Lock()
	defer s.mu.Unlock()

	delete(s.own, presence.KeyOf(name))
	delete(s.own, presence.AllPages)
}

// arrived reports whether a count has to include the client of a WebSocket: it is the first one since the arrival.
func (s *story) arrived(page string, version presence.Version) bool {
	s.mu.Lock()
	defer s.mu.Unlock()

	since := s.own[page]
	if since == nil || version.Compare(*since) < 0 {
		return false
	}
	// The first one alone, since the user may have left by the next one.
	s.own[page] = nil

	return true
}

func (c *conn) story() *story {
	// Another key would keep every connection that ever was.
	key := weak.Make(c)
	had, known := stories.Load(key)
	if known {
		return had.(*story)
	}

	// The reader and the writer of a connection may begin its story at once.
	s, known := stories.LoadOrStore(key, &story{newest: map[string]news{}, own: map[string]*presence.Version{}})
	if !known {
		runtime.AddCleanup(c, func(key weak.Pointer[conn]) { stories.Delete(key) }, key)
	}

	return s.(*story)
}

// eachFrame reads WebSocket frames and calls judge with the texts.
func eachFrame(p []byte, judge func(kind string, text []byte) error) error {
	for len(p) > 0 {
		if len(p) < 2 {
			return errors.New("half a frame")
		}

		opcode, size, head := p[0], uint64(p[1]), 2
		switch size {
		case 126:
			size, head = uint64(binary.BigEndian.Uint16(p[2:])), 4
		case 127:
			size, head = binary.BigEndian.Uint64(p[2:]), 10
		}
		if uint64(len(p)-head) < size {
			return errors.New("half a frame")
		}

		payload := p[head:][:size]
		p = p[head:][size:]

		// Control frames promise nothing.
		if opcode != websocket.Text {
			continue
		}
		if err := judge("", payload); err != nil {
			return err
		}
	}

	return nil
}

// eachEvent reads server-sent events and calls judge with their names and data. Comments say nothing.
func eachEvent(p []byte, judge func(kind string, text []byte) error) error {
	for event := range bytes.SplitAfterSeq(p, []byte("\n\n")) {
		if len(event) == 0 {
			return nil
		}
		if !bytes.HasSuffix(event, []byte("\n\n")) {
			return errors.New("half an event")
		}

		kind := ""
		for line := range bytes.Lines(event) {
			name, value, _ := bytes.Cut(bytes.TrimSuffix(line, []byte("\n")), []byte(": "))
			switch string(name) {
			case "event":
				kind = string(value)
			case "data":
				if err := judge(kind, value); err != nil {
					return err
				}
			}
		}
	}

	return nil
}

// judge judges one message. An event has its type as its name, a frame in its text.
func (s *story) judge(kind string, text []byte) error {
	is := news{Type: kind}
	if !json.Valid(text) {
		return errors.New("not JSON")
	}

	err := json.Unmarshal(text, &is)
	if err != nil {
		return nil // a message of another type, whose members have other types
	}

	switch is.Type {
	case "count", "counter":
		return s.compare(is)
	case "join":
		s.joined = is.Page
		had, known := s.newest["count "+is.Page]
		if known {
			return includes(had)
		}

		return nil
	default:
		return nil
	}
}

// includes judges a count of a page that the client has joined.
func includes(is news) error {
	if is.Count == 0 && !is.Stale {
		return fmt.Errorf("own join: the count of %q lacks who has joined", is.Page)
	}

	return nil
}

// compare judges a count or a value by the one before it.
func (s *story) compare(is news) error {
	topic := is.Type + " " + is.Page + is.Key
	had, known := s.newest[topic]
	s.newest[topic] = is

	if is.Count < 0 {
		return fmt.Errorf("counted: the count of %q is negative", is.Page)
	}

	version, err := presence.ParseVersion(is.Version)
	if err != nil {
		return fmt.Errorf("%q: %w", topic, err)
	}

	isOwn := is.Type == "count" && s.arrived(is.Page, version)
	if isOwn || topic == "count "+s.joined {
		if err := includes(is); err != nil {
			return err
		}
	}
	if !known {
		return nil
	}

	older, _ := presence.ParseVersion(had.Version) // it was looked at when it came
	wentBack := version.Compare(older) < 0
	if wentBack && !is.deleted() {
		return fmt.Errorf("ordered: after version %s of %q came %s", had.Version, topic, is.Version)
	}

	isSame := version == older && !is.Stale && !had.Stale
	if isSame && is.Count != had.Count {
		return fmt.Errorf("ordered: version %s of %q was %d, then %d", is.Version, topic, had.Count, is.Count)
	}

	return nil
}

// deleted reports whether the counter was deleted: then it has no version.
func (n news) deleted() bool {
	return n.Type == "counter" && n.Version == (presence.Version{}).String()
}
