package gateway

import (
	"context"
	"errors"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cespare/xxhash/v2"

	"headcount/presence"
)

// joinPatience is how long a count waits for a join to be in the store. After
// it, the subscriber gets the count as it is known.
const joinPatience = time.Second

// shard delivers counts to a part of the connections. Its state has one lock,
// which is never held while something is written; one goroutine, run, writes.
//
// Conflation: a topic's newest count goes to each subscriber at once if the
// last one went at least interval ago, else when that has passed. What is
// newer in the meantime takes its place, so nothing is ever queued.
type shard struct {
	hub      *hub
	interval time.Duration // least time between two counts of one page to one subscriber, when the budget has room
	quantum  time.Duration // least time between two looks at all subscribers of a topic
	live     liveness
	poller   *poller // serves the connections that have something to say
	start    time.Time
	wake     chan struct{} // holds one: there is something to deliver

	delivered atomic.Int64 // counts written to subscribers

	mu     sync.Mutex // guards all below, and the places of the shard's connections
	topics map[string]*topic
	conns  []seat
	due    []*topic // topics to look at, each once
	fresh  []visit  // subscribers to serve at once
	bells  []*conn  // to be told their unread count, each once

	// run's own
	pace   pace
	pass   uint32
	swept  time.Duration // the last sweep
	batch  []delivery
	joined []byte

	bellText []byte // frames of the bells of one pass
}

// topic is a page with subscribers in this shard.
type topic struct {
	page    string
	count   presence.Count
	gen     uint32 // grows with every new count; 0: it is not known yet
	subs    []subscription
	queued  bool          // in due
	at      time.Duration // when to look
	scanned time.Duration // when all subscribers were last looked at

	// forms of the count that subscribers want: at most one for each precision,
	// and one for event streams.
	forms []form
}

// form is a topic's count in the form of some of its subscribers, encoded once
// for all of them.
type form struct {
	precision uint8
	event     bool
	gen       uint32 // of the topic, when it was made
	bytes     []byte // a frame or an event; written without the lock, changed only by run
	shown     uint64 // stands for what a subscriber sees of it; 0: it is never what one has already
}

// seat is a connection's place among the shard's.
type seat struct {
	conn *conn
	look time.Duration // a sweep has nothing to do for it before
}

// subscription is one subscriber of a topic.
type subscription struct {
	conn      *conn
	gen       uint32        // of the last count sent, or seen to be what the subscriber has
	ready     bool          // false while a join waits for the store
	precision uint8         // significant digits; 0: all
	at        time.Duration // when the last count was sent
	shown     uint64        // form.shown of what the subscriber has; 0: whatever comes is sent
}

// place is one page of a connection.
type place struct {
	topic  *topic // nil: not subscribed
	index  int    // in topic.subs
	page   string
	joined bool
	own    bool          // subscribed by a subscribe, which a leave does not end
	since  time.Duration // waiting for the store since; 0: not waiting
}

type visit struct {
	conn *conn
	page string
}

// delivery is what one connection gets in one pass; more chains further pages.
type delivery struct {
	conn    *conn
	bytes   []byte
	more    int32 // index of the next delivery to the same connection; 0: none
	chained bool  // not the first of its connection
}

// newShard returns a shard that may make budget deliveries a second.
func newShard(h *hub, interval time.Duration, budget float64, live liveness) *shard {
	return &shard{
		hub:      h,
		pace:     pace{budget: budget, least: interval},
		interval: interval,
		quantum:  max(interval/10, time.Millisecond),
		live:     live,
		start:    time.Now(),
		wake:     make(chan struct{}, 1),
		topics:   map[string]*topic{},
	}
}

// now is the shard's clock. It begins at an interval, so that nothing seems to
// have been sent just before.
func (s *shard) now() time.Duration { return time.Since(s.start) + s.interval }

func (s *shard) wakeUp() {
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

func (s *shard) add(c *conn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	c.index = len(s.conns)
	s.conns = append(s.conns, seat{conn: c})
}

// remove takes c out and returns the pages it had joined.
func (s *shard) remove(c *conn) (joined []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := range c.places {
		if c.places[i].joined {
			joined = append(joined, c.places[i].page)
		}
		s.unsubscribe(c, &c.places[i])
	}
	c.places = nil
	last := len(s.conns) - 1
	s.conns[c.index] = s.conns[last]
	s.conns[c.index].conn.index = c.index
	s.conns[last] = seat{}
	s.conns = s.conns[:last]
	c.index = -1
	return joined
}

func (c *conn) place(page string) *place {
	for i := range c.places {
		if c.places[i].page == page {
			return &c.places[i]
		}
	}
	return nil
}

// errTooManyPages says that a connection would pass presence.MaxPages.
var errTooManyPages = errors.New("too many pages")

// join subscribes c to the page, if it is not, and holds its next count back
// until the store has the join; fresh says that c had not joined before.
func (s *shard) join(c *conn, page string) (fresh bool, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	p := c.place(page)
	if p == nil {
		if len(c.places) >= presence.MaxPages {
			return false, errTooManyPages
		}
		c.places = append(c.places, place{page: page})
		p = &c.places[len(c.places)-1]
	}
	fresh = !p.joined
	p.joined = true
	s.subscribe(c, p)
	sub := &p.topic.subs[p.index]
	if sub.gen, sub.shown = 0, 0; fresh {
		sub.ready = false
		p.since = s.now()
		seat := &s.conns[c.index]
		seat.look = min(seat.look, p.since+joinPatience)
	} else if sub.ready {
		s.visit(c, page)
	}
	return fresh, nil
}

// ready says that the store has c's join.
func (s *shard) ready(c *conn, page string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	p := c.place(page)
	if p == nil {
		return
	}
	if p.since = 0; p.topic != nil {
		p.topic.subs[p.index].ready = true
		s.visit(c, page)
	}
}

// leave ends c's presence on the page; it reports whether there was any.
func (s *shard) leave(c *conn, page string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	p := c.place(page)
	if p == nil || !p.joined {
		return false
	}
	p.joined = false
	if !p.own {
		s.unsubscribe(c, p)
	} else if p.since != 0 {
		p.since = 0
		p.topic.subs[p.index].ready = true
		s.visit(c, page)
	}
	c.tidy()
	return true
}

// watch subscribes c to pages, with counts of that precision: to all, or, when
// that were too many, to none.
func (s *shard) watch(c *conn, pages []string, precision uint8) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	var fresh []string
	for _, page := range pages {
		if c.place(page) == nil && !slices.Contains(fresh, page) {
			if fresh = append(fresh, page); len(c.places)+len(fresh) > presence.MaxPages {
				return errTooManyPages
			}
		}
	}
	for _, page := range fresh {
		c.places = append(c.places, place{page: page})
	}
	for i, page := range pages {
		if slices.Contains(pages[:i], page) {
			continue // one count is enough
		}
		p := c.place(page)
		s.subscribe(c, p)
		p.own = true
		sub := &p.topic.subs[p.index]
		sub.precision, sub.gen, sub.shown = precision, 0, 0
		if sub.ready {
			s.visit(c, page)
		}
	}
	return nil
}

// resume subscribes c, which has nothing yet, to a page of which it has the
// count with that version: it is sent another one.
func (s *shard) resume(c *conn, page string, has presence.Version) {
	s.mu.Lock()
	defer s.mu.Unlock()
	c.places = []place{{page: page, own: true}}
	p := &c.places[0]
	s.subscribe(c, p)
	p.topic.subs[p.index].shown = shownVersion(has)
	s.visit(c, page)
}

// unwatch ends subscriptions; presence stays.
func (s *shard) unwatch(c *conn, pages []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, page := range pages {
		if p := c.place(page); p != nil {
			s.unsubscribe(c, p)
			p.own = false
		}
	}
	c.tidy()
}

// tidy drops the places that are neither joined nor subscribed.
func (c *conn) tidy() {
	c.places = slices.DeleteFunc(c.places, func(p place) bool { return !p.joined && p.topic == nil })
}

func (s *shard) subscribe(c *conn, p *place) {
	if p.topic != nil {
		return
	}
	t := s.topics[p.page]
	if t == nil {
		t = &topic{page: p.page}
		s.topics[p.page] = t
		if count, known := s.hub.want(p.page); known {
			t.count, t.gen = count, 1
		}
	}
	p.topic, p.index = t, len(t.subs)
	t.subs = append(t.subs, subscription{conn: c, ready: p.since == 0})
}

func (s *shard) unsubscribe(c *conn, p *place) {
	t := p.topic
	if t == nil {
		return
	}
	p.topic = nil
	last := len(t.subs) - 1
	if p.index != last {
		moved := t.subs[last]
		t.subs[p.index] = moved
		moved.conn.place(t.page).index = p.index
	}
	t.subs[last] = subscription{}
	t.subs = t.subs[:last]
	if len(t.subs) == 0 {
		delete(s.topics, t.page)
		s.hub.unwant(t.page)
	}
}

// visit has c served with the page's count at once; also when it has it, if
// its subscription says nothing of what it is shown.
func (s *shard) visit(c *conn, page string) {
	s.fresh = append(s.fresh, visit{c, page})
	s.wakeUp()
}

// update takes a newer count of a page.
func (s *shard) update(c presence.Count) {
	s.mu.Lock()
	defer s.mu.Unlock()
	t := s.topics[c.Page]
	if t == nil || t.gen != 0 && !replaces(c, t.count) {
		return
	}
	t.count = c
	if t.gen++; t.gen == 0 {
		t.gen = 1
	}
	s.look(t, max(s.now(), t.scanned+s.quantum))
}

// look has all subscribers of t looked at.
func (s *shard) look(t *topic, at time.Duration) {
	if t.queued {
		t.at = min(t.at, at)
	} else {
		t.queued, t.at = true, at
		s.due = append(s.due, t)
	}
	s.wakeUp()
}

// freed has a connection that was slow served with what it missed.
func (s *shard) freed(c *conn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, p := range c.places {
		if p.topic == nil {
			continue
		}
		sub := &p.topic.subs[p.index]
		if c.missed {
			sub.shown = 0
		}
		if sub.ready && (c.missed || sub.gen != p.topic.gen) {
			s.visit(c, p.page)
		}
	}
	if c.follower != nil {
		c.bell.forced = c.bell.forced || c.missed
		s.queueBell(c)
	}
	c.missed = false
}

// run delivers and keeps an eye on silent connections until ctx ends.
func (s *shard) run(ctx context.Context) {
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	sweep := time.NewTicker(s.live.tick())
	defer sweep.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-s.wake:
		case <-timer.C:
		case <-sweep.C:
			s.sweep()
			continue
		}
		if next := s.deliver(); next > 0 {
			timer.Reset(max(next-s.now(), 0))
		}
	}
}

// deliver is one pass: it collects what is due under the lock and writes it
// without. It returns when the next pass is due, or 0.
func (s *shard) deliver() (next time.Duration) {
	s.mu.Lock()
	now := s.now()
	s.pass++
	s.batch = append(s.batch[:0], delivery{}) // index 0 stands for none
	for _, v := range s.fresh {
		if p := v.conn.place(v.page); p != nil && p.topic != nil {
			if sub := &p.topic.subs[p.index]; sub.at != now { // else it was asked for twice
				s.offer(p.topic, sub, now)
			}
		}
	}
	clear(s.fresh)
	s.fresh = s.fresh[:0]
	later := s.due[:0]
	for _, t := range s.due {
		if t.at > now {
			later = append(later, t)
		} else if t.at = s.scan(t, now); t.at != 0 {
			later = append(later, t)
		} else {
			t.queued = false
			continue
		}
		if next == 0 || t.at < next {
			next = t.at
		}
	}
	clear(s.due[len(later):])
	s.due = later
	if at := s.offerBells(now); next == 0 || at != 0 && at < next {
		next = at
	}
	s.mu.Unlock()

	for i := 1; i < len(s.batch); i++ {
		d := &s.batch[i]
		if d.chained {
			continue
		}
		bytes := d.bytes
		if d.more != 0 {
			s.joined = append(s.joined[:0], bytes...)
			for j := d.more; j != 0; j = s.batch[j].more {
				s.joined = append(s.joined, s.batch[j].bytes...)
			}
			bytes = s.joined
		}
		if err := d.conn.wire.try(bytes); err != nil {
			s.undelivered(d.conn, err)
		}
	}
	s.delivered.Add(int64(len(s.batch) - 1))
	s.pace.spend(len(s.batch)-1, now)
	clear(s.batch)
	return next
}

// scan offers t's count to all subscribers that do not have it, and returns
// when to look again, or 0 when all have been served or cannot be now.
func (s *shard) scan(t *topic, now time.Duration) (again time.Duration) {
	t.scanned = now
	interval := s.pace.interval(len(t.subs))
	for i := range t.subs {
		sub := &t.subs[i]
		if sub.gen == t.gen || !sub.ready {
			continue
		}
		if at := sub.at + interval; sub.at != 0 && at > now {
			if again == 0 || at < again {
				again = at
			}
			continue
		}
		s.offer(t, sub, now)
	}
	if again != 0 {
		again = max(again, now+s.quantum)
	}
	return again
}

// offer adds t's count to what the subscriber gets in this pass, unless it
// would see no difference. One that has not taken its last write is left
// alone; it is served when it has.
func (s *shard) offer(t *topic, sub *subscription, now time.Duration) {
	c := sub.conn
	if t.gen == 0 || !sub.ready || c.wire.busy.Load() {
		return
	}
	f := t.form(sub.precision, c.events)
	sub.gen = t.gen
	if sub.shown != 0 && sub.shown == f.shown {
		return
	}
	sub.at, sub.shown = now, f.shown
	s.chain(c, f.bytes)
}

// chain adds bytes to what the connection gets in this pass.
func (s *shard) chain(c *conn, bytes []byte) {
	d := delivery{conn: c, bytes: bytes, chained: c.pass == s.pass}
	if i := int32(len(s.batch)); d.chained {
		s.batch[c.tail].more, c.tail = i, i
	} else {
		c.pass, c.tail = s.pass, i
	}
	s.batch = append(s.batch, d)
}

// form is t's count as a frame of that precision, or as an event.
func (t *topic) form(precision uint8, event bool) *form {
	i := 0
	for i < len(t.forms) && (t.forms[i].precision != precision || t.forms[i].event != event) {
		i++
	}
	if i == len(t.forms) {
		t.forms = append(t.forms, form{precision: precision, event: event})
	}
	f := &t.forms[i]
	if f.gen == t.gen {
		return f
	}
	count := t.count
	count.Users = significant(count.Users, precision)
	if f.gen = t.gen; event {
		f.bytes = appendEvent(f.bytes[:0], count)
	} else {
		f.bytes = appendFrame(f.bytes[:0], frameText, appendCountText(nil, count))
	}
	switch f.shown = 0; {
	case precision != 0: // only the number and whether it is stale can be seen
		count.Version, count.Updated = presence.Version{}, time.Time{}
		f.shown = xxhash.Sum64(appendCountText(nil, count))
	case event && !count.Stale && count.Without == "":
		f.shown = shownVersion(count.Version)
	}
	return f
}

// shownVersion stands for an exact count with that version.
func shownVersion(v presence.Version) uint64 { return xxhash.Sum64String(v.String()) }

// undelivered deals with a write that was not even begun.
func (s *shard) undelivered(c *conn, err error) {
	if !errors.Is(err, errBusy) {
		if !errors.Is(err, net.ErrClosed) {
			_ = c.wire.Close() // which has it cleaned up
		}
		return
	}
	s.mu.Lock()
	c.missed = true
	s.mu.Unlock()
	if !c.wire.busy.Load() { // it became free before missed was set
		s.freed(c)
	}
}

// liveness says when a silent connection is dead.
type liveness struct {
	ping time.Duration // silence before a ping
	pong time.Duration // silence after it before the end
}

func (l liveness) tick() time.Duration {
	return max(min(time.Second, min(l.ping, l.pong)/8), 5*time.Millisecond)
}

// verdict is what is to be done about a connection last heard at heard, to
// which a ping was sent at pinged (0: none is unanswered).
func (l liveness) verdict(now, heard, pinged time.Duration) (ping, dead bool) {
	switch {
	case pinged != 0 && heard < pinged:
		return false, now-pinged >= l.pong
	default:
		return now-max(heard, pinged) >= l.ping, false
	}
}

// next is when verdict may say something else, unless the client is heard.
func (l liveness) next(heard, pinged time.Duration) time.Duration {
	if pinged != 0 && heard < pinged {
		return pinged + l.pong
	}
	return max(heard, pinged) + l.ping
}

// sweep pings the connections that have been silent, and ends those that do
// not answer and those whose token has expired.
func (s *shard) sweep() {
	type task struct {
		conn *conn
		do   func(*conn)
	}
	var tasks []task
	s.mu.Lock()
	now := s.now()
	suspended := s.swept != 0 && now-s.swept > s.live.tick()+s.live.pong/2
	s.swept = now
	for i := range s.conns {
		seat := &s.conns[i]
		if now < seat.look && !suspended {
			continue // without touching the connection, which is not in the cache
		}
		c := seat.conn
		if suspended && c.heard() < c.pinged {
			c.pinged = now // the process stood still: its clients get their time again
		}
		ping, dead := s.live.verdict(now, c.heard(), c.pinged)
		switch {
		case dead:
			tasks = append(tasks, task{c, (*conn).dead})
		case c.expired(now):
			c.expires = 0 // once is enough
			tasks = append(tasks, task{c, (*conn).expire})
		case ping:
			c.pinged = now
			tasks = append(tasks, task{c, (*conn).ping})
		}
		seat.look = s.live.next(c.heard(), c.pinged)
		if c.expires != 0 {
			seat.look = min(seat.look, c.expires)
		}
		for i := range c.places {
			p := &c.places[i]
			switch {
			case p.since == 0 || p.topic == nil:
			case now-p.since < joinPatience:
				seat.look = min(seat.look, p.since+joinPatience)
			default:
				p.since = 0
				p.topic.subs[p.index].ready = true
				s.visit(c, p.page)
			}
		}
	}
	s.mu.Unlock()
	for _, t := range tasks {
		t.do(t.conn)
	}
}
