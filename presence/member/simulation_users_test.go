package member

import (
	"bufio"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"time"

	"headcount/internal/testkit"
	"headcount/presence"
	"headcount/presence/node"
)

// The clients of a simulation: users with tabs and holds, and the model of which users are present on each page.

const (
	simPing   = 3 * time.Second // of the gateways
	simPong   = 2 * time.Second
	handshake = time.Second // how long a client waits for a gateway
)

// user is one person, who is present where the tabs and holds are.
type user struct {
	name, token string
	hash        presence.User
	tabs        []*tab
	holds       map[string]*hold
	stays       map[string]bool // pages it does not leave in this round; under crowd.mu
	excused     bool            // not expected to stay in this round, see excuse
}

// crowd has all users, and the bounds of the counts that they may receive at present.
type crowd struct {
	s     *simulation
	users []*user

	mu      sync.Mutex
	floor   map[string]int                 // by page: how many users have been there all the time
	ceiling map[string]map[string]struct{} // by page: users who may have been counted there in this round
}

// told checks a count that a user has received.
func (c *crowd) told(by, page string, users int64, stale bool) {
	c.mu.Lock()
	// Users who stay are always counted. Others are counted at most if they were present at some time of the round.
	least, most := int64(c.floor[page]), int64(len(c.ceiling[page]))
	c.mu.Unlock()

	switch {
	case users < 0:
		c.s.broken("counted", "%s was told %d on %s: negative", by, users, page)
	case users < least:
		c.s.broken("counted", "%s was told %d (stale %t) on %s, where %d stayed all the time",
			by, users, stale, page, least)
	case users > most:
		c.s.broken("gone in time", "%s was told %d (stale %t) on %s, where at most %d were in all this time",
			by, users, stale, page, most)
	}
}

// arrives notes that the user may be counted on the page from now on.
func (c *crowd) arrives(u *user, pages ...string) {
	c.mu.Lock()
	defer c.mu.Unlock()

	for _, page := range append(pages, presence.AllPages) {
		if c.ceiling[page] == nil {
			c.ceiling[page] = map[string]struct{}{}
		}
		c.ceiling[page][u.name] = struct{}{}
	}
}

// names returns the names of all users.
func (c *crowd) names() (names []string) {
	for _, u := range c.users {
		names = append(names, u.name)
	}
	for _, a := range c.s.apps {
		names = append(names, a.user.name)
	}

	for _, u := range c.s.surfers {
		names = append(names, u.user.name)
	}

	return names
}

// truth returns the users who are present, by page.
func (c *crowd) truth() map[string]map[string]struct{} {
	there := map[string]map[string]struct{}{presence.AllPages: {}}
	for _, page := range c.s.pages {
		there[page] = map[string]struct{}{}
	}

	arePresent := func(u *user, pages []string) {
		for _, page := range pages {
			there[page][u.name] = struct{}{}
			there[presence.AllPages][u.name] = struct{}{}
		}
	}

	for _, u := range c.users {
		arePresent(u, u.pages())
	}

	for _, a := range c.s.apps {
		arePresent(a.user, a.pages())
	}

	for _, u := range c.s.surfers {
		arePresent(u.user, u.pages())
	}

	return there
}

// pages returns the pages on which the user is present.
func (u *user) pages() (pages []string) {
	for _, t := range u.tabs {
		pages = append(pages, t.joined()...)
	}

	for page, h := range u.holds {
		if h.wanted() {
			pages = append(pages, page)
		}
	}

	slices.Sort(pages)
	return slices.Compact(pages)
}

// begin starts a round in which the given users stay.
func (c *crowd) begin(stayers []*user) {
	there := c.truth()

	c.mu.Lock()
	defer c.mu.Unlock()

	c.floor = map[string]int{}
	c.ceiling = there // present users may be counted in the whole round, however soon they leave
	for _, u := range c.users {
		u.stays, u.excused = nil, false
	}

	for _, u := range stayers {
		u.stays = map[string]bool{}
		for _, page := range u.pages() {
			u.stays[page] = true
			c.floor[page]++
		}
		if len(u.stays) > 0 {
			c.floor[presence.AllPages]++
		}
	}
}

// excuse ends the check that the user is counted all the time, because no process could have known that the user
// stayed.
func (c *crowd) excuse(u *user) {
	c.mu.Lock()
	defer c.mu.Unlock()

	if u.excused || len(u.stays) == 0 {
		return
	}

	u.excused = true
	for page := range u.stays {
		c.floor[page]--
	}
	c.floor[presence.AllPages]--
	c.s.detail("%s is not held to stay any more", u.name)
}

// spares reports whether a user with a tab, other than these, is still checked.
func (c *crowd) spares(these []*user) bool {
	c.mu.Lock()
	defer c.mu.Unlock()

	return slices.ContainsFunc(c.users, func(u *user) bool {
		// A hold alone does not suffice: another fault may excuse all holds.
		return !u.excused && !slices.Contains(these, u) && slices.ContainsFunc(u.tabs, func(t *tab) bool {
			return slices.ContainsFunc(t.joined(), func(page string) bool { return u.stays[page] })
		})
	})
}

// forgetHolds ends the check of users on pages where only a hold keeps them present.
func (c *crowd) forgetHolds() {
	for _, u := range c.users {
		var joined []string
		for _, t := range u.tabs {
			joined = append(joined, t.joined()...)
		}

		c.mu.Lock()
		before := len(u.stays)
		for page := range u.stays {
			if !slices.Contains(joined, page) {
				delete(u.stays, page)
				if !u.excused {
					c.floor[page]--
				}
			}
		}

		// A user who stays on no page need not be counted on the site either.
		if before > 0 && len(u.stays) == 0 && !u.excused {
			c.floor[presence.AllPages]--
		}
		c.mu.Unlock()
	}
}

// held returns how many users were checked all the time, and how many were meant to be.
func (c *crowd) held() (held, meant int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, u := range c.users {
		if len(u.stays) > 0 {
			meant++
			if !u.excused {
				held++
			}
		}
	}

	return held, meant
}

// at returns the users who have a tab at the gateway.
func (c *crowd) at(gateway string) (users []*user) {
	for _, u := range c.users {
		if slices.ContainsFunc(u.tabs, func(t *tab) bool { return t.gateway() == gateway }) {
			users = append(users, u)
		}
	}

	return users
}

// tab is one client. It keeps a connection to some gateway, wants to be on pages, and like the browser client it
// reconnects after each loss.
type tab struct {
	s    *simulation
	user *user
	name string
	home string // the only gateway it goes to; empty: to any

	mu      sync.Mutex // guards the fields below
	chance  *rand.Rand
	at      string // gateway connected to, or to try next
	want    map[string]bool
	watches []string
	gone    bool // the tab was closed, or has vanished
	link    *link
	last    map[string]seenCount // the counts received on this connection
	arrival map[string]time.Time // when pages were joined on this connection, until their first count that is not stale
	unread  int64                // the number of notifications received on this connection
	moved   chan struct{}        // has room for one: at or gone has changed
	pause   time.Duration        // before it connects again

	hasUnread bool // whether unread was received
}

type seenCount struct {
	version presence.Version
	users   int64
	stale   bool
}

// link is one connection of a tab.
type link struct {
	end  *pipeEnd
	out  chan []byte // frames; a full channel costs the connection
	done chan struct{}
	once sync.Once
}

func (l *link) close(silently bool) {
	l.once.Do(func() {
		close(l.done)
		if silently {
			l.end.mute()
		} else {
			_ = l.end.Close()
		}
	})
}

// newTab opens a tab.
func (s *simulation) newTab(u *user, home string, watches []string, pages ...string) *tab {
	s.tabs++
	t := &tab{
		s: s, user: u, name: fmt.Sprintf("%s/%d", u.name, s.tabs), home: home, watches: watches,
		want: map[string]bool{}, arrival: map[string]time.Time{}, moved: make(chan struct{}, 1),
	}

	t.chance = chance(s.seed, t.name)
	// A tab with a home stays with that gateway. Other tabs go to any.
	t.at = home

	if home == "" {
		t.at = s.someGateway(t.chance)
	}

	for _, p := range pages {
		t.want[p] = true
	}

	u.tabs = append(u.tabs, t)
	s.crowd.arrives(u, pages...)
	s.clients.Go(t.run)

	return t
}

func (t *tab) gateway() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.at
}

func (t *tab) joined() (pages []string) {
	t.mu.Lock()
	defer t.mu.Unlock()

	for p := range t.want {
		if !t.gone {
			pages = append(pages, p)
		}
	}

	slices.Sort(pages)
	return pages
}

func (t *tab) join(page string) {
	t.s.crowd.arrives(t.user, page)
	t.mu.Lock()

	defer t.mu.Unlock()
	// Joining a page again brings no first count again.
	if !t.want[page] {
		t.arrival[page] = time.Now()
	}
	t.want[page] = true
	t.say(`{"type":"join","page":"` + page + `"}`)
}

func (t *tab) leave(page string) {
	t.mu.Lock()
	defer t.mu.Unlock()

	delete(t.want, page)
	delete(t.arrival, page)
	t.say(`{"type":"leave","page":"` + page + `"}`)
}

// say sends a message on the present connection. The caller holds mu.
func (t *tab) say(text string) {
	if t.link == nil {
		return
	}

	select {
	// 0x81: a whole text frame.
	case t.link.out <- testkit.ClientFrame(0x81, text):
	default:
		t.link.close(false)
	}
}

// end closes the tab for good, or makes it vanish without notice.
func (t *tab) end(silently bool) {
	t.mu.Lock()
	t.gone = true
	if t.link != nil {
		t.link.close(silently)
	}

	t.mu.Unlock()
	t.signal()
	t.user.tabs = slices.DeleteFunc(t.user.tabs, func(o *tab) bool { return o == t })
}

// move makes the tab reconnect to that gateway after a pause.
func (t *tab) move(to string, pause time.Duration) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.at, t.pause = to, pause

	if t.link != nil {
		t.link.close(false)
	}
}

func (t *tab) signal() {
	select {
	case t.moved <- struct{}{}:
	default:
	}
}

// run connects again and again until the tab is closed.
func (t *tab) run() {
	for {
		t.mu.Lock()
		at, gone := t.at, t.gone
		t.mu.Unlock()

		if gone {
			return
		}

		err := t.connect(at)
		t.mu.Lock()
		t.link = nil
		pause := t.pause
		t.pause = 0
		// Without a pause from the test or the gateway, the client waits a random time.
		if pause == 0 {
			pause = 50*time.Millisecond + time.Duration(t.chance.Int64N(int64(250*time.Millisecond)))
		}

		// Like the browser client, a tab that was refused or lost tries another gateway.
		if t.home == "" && t.at == at && err != nil {
			t.at = t.s.otherGateway(t.chance, at)
		}

		t.mu.Unlock()

		timer := time.NewTimer(pause)
		select {
		case <-timer.C:
		case <-t.moved: // it has been closed
		}
		timer.Stop()
	}
}

var errRefused = errors.New("refused")

// connect makes one connection and serves it until it ends. The error is nil if the tab ended it.
func (t *tab) connect(gateway string) error {
	end, err := t.s.net.dial(gateway)
	if err != nil {
		return err
	}

	l := &link{end: end, out: make(chan []byte, 256), done: make(chan struct{})}

	defer l.close(false)
	_ = end.SetDeadline(time.Now().Add(handshake))
	_, err = io.WriteString(end, "GET /-/ws?token="+t.user.token+" HTTP/1.1\r\nHost: "+gateway+
		"\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: "+
		"AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n")
	if err != nil {
		return err
	}

	r := bufio.NewReaderSize(end, 512)
	resp, err := http.ReadResponse(r, nil)
	if err != nil {
		return err
	}
	if resp.StatusCode != http.StatusSwitchingProtocols {
		return errRefused
	}

	// From here on the read deadline alone limits the silence of the gateway.
	_ = end.SetDeadline(time.Time{})
	t.s.clients.Go(func() { l.write() })

	t.mu.Lock()
	// The tab was closed, or sent elsewhere, during the handshake.
	if t.gone || t.at != gateway {
		t.mu.Unlock()
		return nil
	}

	t.link = l
	t.last = map[string]seenCount{}
	t.arrival = map[string]time.Time{}
	t.hasUnread = false

	t.s.detail("%s is connected to %s", t.name, gateway)
	for page := range t.want {
		t.arrival[page] = time.Now()
		t.say(`{"type":"join","page":"` + page + `"}`)
	}

	if len(t.watches) > 0 {
		// A watcher subscribes without being present.
		pages, _ := json.Marshal(t.watches)
		t.say(`{"type":"subscribe","pages":` + string(pages) + `}`)
	}

	t.mu.Unlock()
	err = t.read(l, r)

	select {
	case <-l.done:
		return nil
	default:
		return err
	}
}

func (l *link) write() {
	for {
		select {
		case <-l.done:
			return
		case b := <-l.out:
			_ = l.end.SetWriteDeadline(time.Now().Add(2 * time.Second))
			if _, err := l.end.Write(b); err != nil {
				l.close(false)
				return
			}
		}
	}
}

// read reads frames until the connection ends, or no data arrives for too long.
func (t *tab) read(l *link, r *bufio.Reader) error {
	for {
		// The gateway pings, so silence for longer than this is a dead connection.
		_ = l.end.SetReadDeadline(time.Now().Add(simPing + simPong))
		op, body, err := readFrame(r)
		if err != nil {
			return err
		}

		switch op {
		case 8:
			return io.EOF
		// A ping is answered by a pong.
		case 9:
			t.mu.Lock()
			if t.link == l {
				select {
				case l.out <- testkit.ClientFrame(0x8a, string(body)):
				default:
				}
			}
			t.mu.Unlock()

		case 1:
			if err := t.frame(l, body); err != nil {
				return err
			}
		}
	}
}

var errSentAway = errors.New("sent away")

func (t *tab) frame(l *link, body []byte) error {
	var m struct {
		Type    string
		Page    string
		Count   int64
		Version string
		Stale   bool
		AfterMS int64 `json:"after_ms"`
	}
	if err := json.Unmarshal(body, &m); err != nil {
		t.s.broken("–", "%s got %q: %v", t.name, body, err)
		return err
	}

	switch m.Type {
	case "reconnect":
		if t.home == "" {
			t.mu.Lock()
			// The gateway drains, and says how long to wait before trying another one.
			t.pause = max(time.Duration(m.AfterMS)*time.Millisecond, 1)
			t.mu.Unlock()
			return errSentAway
		}

	case "error":
		t.s.broken("–", "%s got %s", t.name, body)
	case "count":
		t.count(l, m.Page, m.Count, m.Version, m.Stale)
	case "unread":
		t.mu.Lock()
		t.unread = m.Count
		t.hasUnread = true
		t.mu.Unlock()
		t.s.readers.told(t.name, t.user, m.Count)
		t.s.detail("%s at %s: %d are unread", t.name, t.gateway(), m.Count)
	}

	return nil
}

// count checks a count that arrived on the connection, against the model and the counts before it.
func (t *tab) count(l *link, page string, users int64, version string, stale bool) {
	v, err := presence.ParseVersion(version)
	if err != nil {
		t.s.broken("–", "%s: %v", t.name, err)
	}

	t.s.crowd.told(t.name, page, users, stale)

	t.mu.Lock()
	old, known := t.last[page]
	t.last[page] = seenCount{v, users, stale}
	arrived, arrives := t.arrival[page]
	first := t.link == l && arrives && !stale
	if first {
		delete(t.arrival, page)
	}
	t.mu.Unlock()

	// The join was stored before its count was sent, so the count includes the user, unless the owner has let the user
	// time out since.
	if first && !t.s.wasCutOff(t.gateway(), arrived) && t.s.store.past.lacks(page, v, t.user.hash) {
		t.s.broken("own join",
			"the first count of %s after a join of %s is %d, of version %s, which does not include the user",
			page, t.name, users, v)
	}
	if known && v.Compare(old.version) < 0 {
		t.s.broken("ordered", "%s was told version %s of %s after %s", t.name, v, page, old.version)
	}
	if t.s.replay {
		t.s.detail("%s at %s: %s = %d, %s stale %t", t.name, t.gateway(), page, users, version, stale)
	}
}

// readFrame reads one unmasked frame that is not fragmented.
func readFrame(r *bufio.Reader) (op byte, body []byte, err error) {
	var head [2]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return 0, nil, err
	}

	n := uint64(head[1] & 0x7f)

	// Longer bodies have their length in the bytes after the head (RFC 6455, 5.2).
	switch n {
	case 126:
		var b [2]byte
		_, err = io.ReadFull(r, b[:])
		n = uint64(binary.BigEndian.Uint16(b[:]))
	case 127:
		var b [8]byte
		_, err = io.ReadFull(r, b[:])
		n = binary.BigEndian.Uint64(b[:])
	}

	if err != nil {
		return 0, nil, err
	}

	body = make([]byte, n)
	_, err = io.ReadFull(r, body)
	return head[0] & 0x0f, body, err
}

// hold is a user's presence by PUT, renewed and ended by requests to any gateway.
type hold struct {
	s    *simulation
	user *user
	page string
	wake chan struct{} // has room for one: on has changed

	mu     sync.Mutex
	chance *rand.Rand
	on     bool // the user wants the hold
	is     bool // the hold may exist
	kept   bool // the hold exists for sure
	gone   bool
}

const (
	holdRenewal = 5 * time.Second
	putPatience = 4 * time.Second
)

// hold begins or ends the user's hold on the page.
func (s *simulation) hold(u *user, page string, on bool) {
	h := u.holds[page]
	if h == nil {
		h = &hold{s: s, user: u, page: page, wake: make(chan struct{}, 1), chance: chance(s.seed, "hold "+u.name+page)}
		u.holds[page] = h
		s.clients.Go(h.run)
	}

	if on {
		s.crowd.arrives(u, page)
	}

	h.mu.Lock()
	h.on, h.kept = on, h.kept && on
	h.mu.Unlock()

	h.signal()
}

func (h *hold) signal() {
	select {
	case h.wake <- struct{}{}:
	default:
	}
}

func (h *hold) wanted() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.on
}

func (h *hold) settled() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.on && h.kept
}

func (h *hold) end() {
	h.mu.Lock()
	h.gone = true
	h.mu.Unlock()
	h.signal()
}

// lapse records that the hold could not be renewed in time, because the store was unavailable or gateways were
// suspended. From then on it need not be counted.
func (h *hold) lapse() {
	h.mu.Lock()
	on := h.on && !h.gone
	h.kept = false
	h.mu.Unlock()

	if on {
		h.s.log("the hold of %s on %s could not be renewed in time", h.user.name, h.page)
		h.s.crowd.excuse(h.user)
	}
}

func (h *hold) run() {
	// The timer is set only while the hold is known to exist.
	lapse := time.AfterFunc(time.Hour, h.lapse)
	lapse.Stop()
	defer lapse.Stop()

	for {
		h.mu.Lock()
		on, is := h.on, h.is
		gone := h.gone
		gateway := h.s.someGateway(h.chance)
		h.mu.Unlock()

		pause, begun := holdRenewal, time.Now()
		idle := !on && !is
		switch {
		case gone:
			return
		case idle:
			<-h.wake
			continue
		case h.put(gateway, on):
			h.mu.Lock()
			h.is, h.kept = on, on
			h.mu.Unlock()
			lapse.Stop()
			if on {
				// The time of a hold begins when its call is made.
				lapse.Reset(node.HoldTime(h.s.timeout) - time.Since(begun))
			}

		default:
			pause = 300 * time.Millisecond
		}

		timer := time.NewTimer(pause)
		select {
		case <-timer.C:
		case <-h.wake:
		}

		timer.Stop()
	}
}

// put makes the request and reports whether it was answered with 200.
func (h *hold) put(gateway string, on bool) bool {
	action := "decrement"
	if on {
		action = "increment"
		h.mu.Lock()

		h.is = true // the call may take effect, whatever its answer is
		h.mu.Unlock()
	}

	status, body := h.s.request(gateway, http.MethodPut, "/"+url.PathEscape(h.page)+"/counter", h.user.token,
		`{"action":"`+action+`"}`)

	if status != http.StatusOK {
		return false
	}

	c, err := counterOf(body)
	if err != nil {
		h.s.broken("–", "%s of %s got %q: %v", action, h.user.name, body, err)
		return true
	}

	h.s.crowd.told(action+" of "+h.user.name, c.Page, c.Users, c.Stale)
	// The change was stored before its answer, so the count includes the user.
	if on && c.Users < 1 {
		h.s.broken("own change", "increment of %s got %s: the change is not in it", h.user.name, body)
	}

	return true
}

func counterOf(body []byte) (presence.Count, error) {
	var m struct {
		Page    string
		Count   int64
		Version string
		Stale   bool
	}

	if err := json.Unmarshal(body, &m); err != nil {
		return presence.Count{}, err
	}

	v, err := presence.ParseVersion(m.Version)
	return presence.Count{Page: m.Page, Users: m.Count, Version: v, Stale: m.Stale}, err
}

// request makes one HTTP request. Status 0 means that there was no answer.
func (s *simulation) request(
	gateway, method, path, token, body string, headers ...string,
) (status int, answer []byte) {
	return s.requestWithin(putPatience, gateway, method, path, token, body, headers...)
}

// requestWithin is request for a client that gives up after the given time.
func (s *simulation) requestWithin(
	patience time.Duration, gateway, method, path, token, body string, headers ...string,
) (status int, answer []byte) {
	end, err := s.net.dial(gateway)
	if err != nil {
		return 0, nil
	}
	defer end.Close()
	_ = end.SetDeadline(time.Now().Add(patience))

	var b strings.Builder
	// The request is written by hand: net/http knows no connections of this kind.
	fmt.Fprintf(&b, "%s %s HTTP/1.1\r\nHost: %s\r\nConnection: close\r\nContent-Length: %d\r\n",
		method, path, gateway, len(body))
	if token != "" {
		fmt.Fprintf(&b, "Authorization: Bearer %s\r\n", token)
	}
	for _, header := range headers {
		b.WriteString(header + "\r\n")
	}
	b.WriteString("\r\n" + body)

	if _, err := io.WriteString(end, b.String()); err != nil {
		return 0, nil
	}

	resp, err := http.ReadResponse(bufio.NewReader(end), nil)
	if err != nil {
		return 0, nil
	}
	defer resp.Body.Close()

	answer, err = io.ReadAll(resp.Body)
	if err != nil {
		return 0, nil
	}

	return resp.StatusCode, answer
}
