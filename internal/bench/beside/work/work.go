// Package work is what the bare servers share. It counts the connections on each page, and sends counts that changed to
// the page's subscribers.
//
// It is much less than Headcount does, so that the servers cost what their libraries cost. It has no identity (a
// connection is a user), no rules of presence (somebody who reconnects has left), no bounds and no metrics. Pings are
// sent, but nobody looks whether they are answered.
package work

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"
)

const (
	site       = "*" // the page of all users
	pingEvery  = 15 * time.Second
	pingGroups = 100 // so that not everyone is pinged at once
)

// ping is the frame of a ping without a payload.
var ping = []byte{0x89, 0}

// A Client is a connection.
type Client struct {
	to      io.Writer // takes a whole encoded frame with each call, and never waits
	group   int       // of those who are pinged together
	joined  *page
	watched []*page
}

type page struct {
	name    string
	count   int
	version int
	dirty   bool // changed since it was last sent
	clients []*Client
}

// add makes c a subscriber. It reports false when c was one before.
func (p *page) add(c *Client) bool {
	// One frame for each change is enough, even if a client has joined the page and watches it.
	if p == c.joined || slices.Contains(c.watched, p) {
		return false
	}

	p.clients = append(p.clients, c)
	return true
}

func (p *page) remove(c *Client) {
	last := len(p.clients) - 1
	if i := slices.Index(p.clients, c); i >= 0 {
		// The order does not matter, so the last one takes the free place.
		p.clients[i] = p.clients[last]
		p.clients[last] = nil
		p.clients = p.clients[:last]
	}
}

// text returns the page as JSON, without the opening brace.
func (p *page) text() string {
	return fmt.Sprintf(`"page":%q,"count":%d,"updated_at":"2030-10-10T12:11:42Z","version":"1700000000000-%d"}`,
		p.name, p.count, p.version)
}

// A Hub has all pages and clients. It writes to clients while its lock is held, so that a new subscriber never
// receives an older count after a newer one.
type Hub struct {
	encode func(text []byte) []byte // returns the frame of a text, in the way of the server's library

	mu     sync.Mutex
	pages  map[string]*page
	groups [pingGroups]map[*Client]struct{}
	users  int
}

// NewHub returns a Hub without clients. encode is called once for each page and change.
func NewHub(encode func(text []byte) []byte) *Hub {
	h := &Hub{encode: encode, pages: map[string]*page{}}
	for i := range h.groups {
		h.groups[i] = map[*Client]struct{}{}
	}

	return h
}

// Welcome adds a client and sends it the first frame. id is what the client says that it is; empty: a new one.
func (h *Hub) Welcome(id string, to io.Writer) *Client {
	h.mu.Lock()
	defer h.mu.Unlock()

	h.users++
	if id == "" {
		id = fmt.Sprintf("u%d", h.users)
	}

	c := &Client{to: to, group: h.users % pingGroups}
	h.groups[c.group][c] = struct{}{}
	h.sendLocked(c, fmt.Sprintf(`{"type":"welcome","user":%q,"id":%q,"heartbeat_ms":%d}`,
		id, id, pingEvery.Milliseconds()))

	return c
}

// Receive handles a text of a client.
func (h *Hub) Receive(c *Client, text []byte) {
	var frame struct {
		Type, Page string
		Pages      []string
	}
	if json.Unmarshal(text, &frame) != nil {
		return
	}

	h.mu.Lock()
	defer h.mu.Unlock()

	switch frame.Type {
	case "subscribe":
		for _, name := range frame.Pages {
			h.watchLocked(c, h.pageLocked(name))
		}
	case "join":
		// A connection is on one page at a time here, as in the simulator's scenarios.
		h.leaveLocked(c)
		h.joinLocked(c, h.pageLocked(frame.Page))
	case "leave":
		h.leaveLocked(c)
	}
}

// Gone forgets a client whose connection has ended.
func (h *Hub) Gone(c *Client) {
	h.mu.Lock()
	defer h.mu.Unlock()

	h.leaveLocked(c)
	for _, p := range c.watched {
		p.remove(c)
	}
	delete(h.groups[c.group], c)
}

func (h *Hub) watchLocked(c *Client, p *page) {
	if p.add(c) {
		c.watched = append(c.watched, p)
		h.sendLocked(c, `{"type":"count",`+p.text())
	}
}

func (h *Hub) joinLocked(c *Client, p *page) {
	h.moveLocked(p, 1)
	if p.add(c) {
		h.sendLocked(c, `{"type":"count",`+p.text())
	}
	// Set after add, which would take the page for one that is watched already.
	c.joined = p
}

func (h *Hub) leaveLocked(c *Client) {
	p := c.joined
	if p == nil {
		return
	}

	c.joined = nil
	h.moveLocked(p, -1)
	if !slices.Contains(c.watched, p) {
		p.remove(c)
	}
}

// moveLocked changes the counts of a page and of the site.
func (h *Hub) moveLocked(p *page, by int) {
	for _, p := range []*page{p, h.pageLocked(site)} {
		p.count += by
		p.version++
		p.dirty = true
	}
}

func (h *Hub) pageLocked(name string) *page {
	if h.pages[name] == nil {
		h.pages[name] = &page{name: name}
	}

	return h.pages[name]
}

// sendLocked ignores errors, as all writes here do: reading from the connection will fail, too.
func (h *Hub) sendLocked(c *Client, text string) { _, _ = c.to.Write(h.encode([]byte(text))) }

// Run sends counts that changed, once an interval, and pings. It never returns.
func (h *Hub) Run(interval time.Duration) {
	counts := time.Tick(interval)
	// One group of a hundred at a time, so that each client is pinged once in pingEvery.
	pings := time.Tick(pingEvery / pingGroups)
	for group := 0; ; {
		select {
		case <-counts:
			h.sendCounts()
		case <-pings:
			h.sendPings(group)
			group = (group + 1) % pingGroups
		}
	}
}

func (h *Hub) sendCounts() {
	h.mu.Lock()
	defer h.mu.Unlock()

	for _, p := range h.pages {
		if !p.dirty {
			continue
		}

		p.dirty = false
		frame := h.encode([]byte(`{"type":"count",` + p.text()))
		for _, c := range p.clients {
			_, _ = c.to.Write(frame)
		}
	}
}

func (h *Hub) sendPings(group int) {
	h.mu.Lock()
	defer h.mu.Unlock()

	for c := range h.groups[group] {
		_, _ = c.to.Write(ping)
	}
}

// Answer returns the answer to a GET of a path, which names the page of a count.
func (h *Hub) Answer(path string) string {
	h.mu.Lock()
	defer h.mu.Unlock()

	name := strings.TrimSuffix(strings.TrimPrefix(path, "/"), "/counter")
	return "{" + h.pageLocked(name).text()
}

// ServeHTTP answers a GET.
func (h *Hub) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	_, _ = io.WriteString(w, h.Answer(r.URL.Path)) // the client sees the error
}
