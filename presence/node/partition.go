package node

import (
	"context"
	"slices"
	"sync"
	"time"

	"headcount/presence"
	"headcount/presence/heartbeat"
)

// mailboxSize bounds what waits for one partition's actor. Beats beyond it are
// dropped: their sender repeats the ops, and the next list of the living comes
// with the next heartbeat. Calls beyond it wait in their caller.
const mailboxSize = 256

// gapPatience is how long ops may be missing, in milliseconds, until a new
// stream is asked for. An unneeded one costs a repetition.
const gapPatience = 500

// askEvery is how often, in milliseconds, the gateway of a session that has
// missed its heartbeats is asked whether the user is still there: its answer is
// a join, which is repeated until it arrives, so that a network that loses
// datagrams costs nobody its presence.
const askEvery = 300

// othersConfirm is how long after one gateway has confirmed a user's presence on
// a page, in milliseconds, others that have connections of the user there may
// take until they have, too.
const othersConfirm = 1500

// stay is a session's presence on one page.
type stay struct {
	page *page
	// until is when the stay ends by itself, in the partition's milliseconds: the
	// end of a grace or a hold. 0: it lives as long as the session.
	until int64
}

// session is one user as one source knows it. Those of one user are chained.
type session struct {
	user     presence.User
	from     *source
	next     *session // the same user from another source
	deadline int64    // moved by each heartbeat; stays without an end of their own end here
	stays    []stay

	later, sooner *session // neighbours in the wheel's slot
	slot          int16    // in the wheel; -1: not there
}

func (s *session) find(pg *page) *stay {
	for i := range s.stays {
		if s.stays[i].page == pg {
			return &s.stays[i]
		}
	}
	return nil
}

func (s *session) live() bool {
	return slices.ContainsFunc(s.stays, func(st stay) bool { return st.until == 0 })
}

// source is whatever vouches for sessions: one life of a gateway, or one of the
// partition's own two: the holds taken by PUT and the members found on claiming.
type source struct {
	heartbeat.Source
	stream  uint64 // the gateway's current stream of ops
	applied uint64 // ops applied in it
	acked   uint64 // of these, in the store
	gap     int64  // when an op beyond the next one came, with no progress since; 0: none did
	// void says that users were lost whom the gateway may still have: the stream
	// does not tell of all of them any more, so a new one is asked for.
	void     bool
	heard    int64
	sessions int
}

// page is one page as this partition counts it.
type page struct {
	name   string
	users  int64          // distinct users of this partition
	latest presence.Count // as of this partition's last write of it
}

type memberKey struct {
	user presence.User
	page string
}

// outbox collects what the store must learn: keys overwrite themselves, so a
// store that is slow or away costs freshness, never more memory than there are
// members and pages. The actor fills it, the writer empties it; mu guards it.
type outbox struct {
	mu      sync.Mutex
	claim   presence.Claim // what the next change is written under
	members map[memberKey]presence.MemberChange
	counts  map[string]int64
	// reset and complete go with the first change under a claim, see presence.Change.
	reset, complete bool
	check           bool   // the claim is to be proved to the store
	gen             uint64 // of what is collected now
	flying          bool   // generation gen-1 is being written
	queued          bool   // the writer knows that there is something
	blocked         bool   // the claim is worth nothing: nothing is written until there is a new one

}

// owed is an answer that waits for generation gen to be in the store.
type owed struct {
	gen uint64
	// either the acknowledgement of a gateway's stream …
	from   *source
	stream uint64
	acked  uint64
	pages  []*page
	// … or the end of a call
	done chan<- error
}

// mail is a *heartbeat.Beat, a *holdCall, a *stored or a *reclaimed.
type mail any

type holdCall struct {
	user presence.User
	page string
	on   bool
	done chan error // buffered: the actor never waits for a caller that left
}

// reclaimed says that the store lost data: everything is to be written under
// that claim, over what was found there.
type reclaimed struct {
	claim presence.Claim
	found presence.Snapshot
}

// stored says what became of one generation of the outbox.
type stored struct {
	gen    uint64
	counts []presence.Count
}

// partition is the actor of one partition. run alone touches everything here
// but mail and out.
type partition struct {
	node  *Node
	id    int
	mail  chan mail
	ended chan struct{} // closed when run has returned
	out   outbox

	users   map[presence.User]*session
	pages   map[string]*page
	site    *page
	sources map[heartbeat.Source]*source
	holds   *source
	loaded  *source
	asking  map[*source][]presence.User // to be asked about, see askEvery
	owed    []owed
	wheel   wheel

	start time.Duration // of the node's clock
	alarm int64         // when the timer is to ring; 0: it is not set
}

func newPartition(n *Node, claim presence.Claim) *partition {
	p := &partition{
		node:    n,
		id:      claim.Partition,
		mail:    make(chan mail, mailboxSize),
		ended:   make(chan struct{}),
		users:   map[presence.User]*session{},
		pages:   map[string]*page{},
		sources: map[heartbeat.Source]*source{},
		asking:  map[*source][]presence.User{},
		holds:   &source{},
		loaded:  &source{},
		start:   n.clock.now(),
	}
	p.out.claim = claim
	p.out.gen = 1 // 0 stands for what needs no write
	p.out.members, p.out.counts = map[memberKey]presence.MemberChange{}, map[string]int64{}
	p.site = p.page(presence.Site)
	return p
}

// now is the partition's clock: milliseconds since it was claimed, without
// those in which the process stood still.
func (p *partition) now() int64 { return (p.node.clock.now() - p.start).Milliseconds() }

func (p *partition) timeout() int64 { return p.node.cfg.PresenceTimeout.Milliseconds() }

// adopt takes over what the last owner left: every member gets the time of two
// heartbeats, in which its gateway confirms it, and every page is counted anew.
// It is no full timeout: the last owner may have died seconds ago.
func (p *partition) adopt(snap presence.Snapshot) {
	for _, name := range snap.Pages {
		p.out.counts[name] = 0
	}
	p.load(snap.Members)
	clear(p.out.members) // they are in the store: only the counts are new
	p.out.counts[presence.Site] = p.site.users
	p.out.complete = true
	p.flush()
}

// load has members that another owner left stay until their gateways confirm
// them, or do not.
func (p *partition) load(members []presence.Member) {
	now := p.now()
	for _, m := range members {
		pg := p.page(m.Page)
		s := p.session(m.User, p.loaded)
		p.join(s, pg, 0)
		s.deadline = now + p.trial()
		p.file(s)
		if left := time.Until(m.Hold).Milliseconds(); !m.Hold.IsZero() && left > 0 {
			h := p.session(m.User, p.holds)
			p.join(h, pg, now+left)
			p.file(h)
		}
	}
}

// trial is how long, in milliseconds, who is not confirmed by a gateway stays.
func (p *partition) trial() int64 { return p.timeout() * 2 / 3 }

// doubt has all that the source vouched for be confirmed anew: it tells of
// everything again, and what it does not tell of ended while another owner was
// told, or was lost.
func (p *partition) doubt(src *source) {
	if src.sessions == 0 {
		return
	}
	deadline := p.now() + p.trial()
	for u := range p.users {
		s := p.lookup(u, src)
		if s == nil {
			continue
		}
		l := p.session(u, p.loaded)
		for _, st := range s.stays {
			switch have := l.find(st.page); {
			case have == nil:
				l.stays = append(l.stays, st)
			case st.until == 0 || have.until != 0 && have.until < st.until:
				have.until = st.until
			}
		}
		p.drop(s)
		l.deadline = deadline
		p.file(l)
	}
}

// run is the actor. It ends with ctx; what is in the outbox then is still the
// writer's to write.
func (p *partition) run(ctx context.Context) {
	defer close(p.ended)
	defer func() { p.node.users.Add(-p.site.users) }()
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		p.flush()
		p.pay()
		p.arm(timer)
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
			p.alarm = 0 // arm sets it anew, also when the clock is behind the timer
			p.wheel.due(p.now(), p.expire)
			p.ask()
		case m := <-p.mail:
			p.handle(m)
			for range len(p.mail) { // what came together is written together
				p.handle(<-p.mail)
			}
		}
	}
}

func (p *partition) handle(m mail) {
	switch m := m.(type) {
	case *heartbeat.Beat:
		p.beat(m)
	case *holdCall:
		p.hold(m)
	case *stored:
		p.stored(m)
	case *reclaimed:
		p.rewrite(m)
	}
}

// rewrite puts everything into the outbox, for a store that lost data. If
// another node owned the partition meanwhile, it was told of users that nobody
// told this one of.
func (p *partition) rewrite(r *reclaimed) {
	if r.claim.Former > p.out.claim.Epoch { // only this goroutine changes the claim
		p.load(r.found.Members)
	}
	members := map[memberKey]presence.MemberChange{}
	for u, head := range p.users {
		for s := head; s != nil; s = s.next {
			for _, st := range s.stays {
				members[memberKey{u, st.page.name}] = p.memberChange(u, st.page)
			}
		}
	}
	p.out.mu.Lock()
	defer p.out.mu.Unlock()
	p.out.claim, p.out.members = r.claim, members
	p.out.reset, p.out.complete, p.out.blocked = true, true, false
	for _, name := range r.found.Pages {
		p.out.counts[name] = 0
	}
	for _, m := range r.found.Members {
		p.out.counts[m.Page] = 0
	}
	for name, pg := range p.pages { // what is in counts already may be a page that has gone
		p.out.counts[name] = pg.users
	}
}

// arm sets the timer to the wheel's next slot.
func (p *partition) arm(timer *time.Timer) {
	at, ok := p.wheel.next()
	if !ok {
		at = 0
	}
	if at == p.alarm {
		return
	}
	p.alarm = at
	if at == 0 {
		timer.Stop()
		return
	}
	timer.Reset(time.Duration(max(at-p.now(), 0)) * time.Millisecond)
}

// page returns the page of that name, known from now on.
func (p *partition) page(name string) *page {
	pg := p.pages[name]
	if pg == nil {
		pg = &page{name: name}
		p.pages[name] = pg
	}
	return pg
}

// session returns the user's session of a source, made when there is none.
func (p *partition) session(u presence.User, from *source) *session {
	head := p.users[u]
	for s := head; s != nil; s = s.next {
		if s.from == from {
			return s
		}
	}
	s := &session{user: u, from: from, next: head, slot: -1}
	p.users[u] = s
	from.sessions++
	if head == nil {
		p.site.users++
		p.node.users.Add(1)
		p.counted(p.site)
	}
	return s
}

// lookup is session without making one.
func (p *partition) lookup(u presence.User, from *source) *session {
	for s := p.users[u]; s != nil; s = s.next {
		if s.from == from {
			return s
		}
	}
	return nil
}

// present reports whether any of the user's sessions stays on the page.
func (p *partition) present(u presence.User, pg *page) bool {
	for s := p.users[u]; s != nil; s = s.next {
		if s.find(pg) != nil {
			return true
		}
	}
	return false
}

// join makes s stay on the page, until a time of its own or, 0, with the session.
func (p *partition) join(s *session, pg *page, until int64) {
	if st := s.find(pg); st != nil {
		st.until = until
		return
	}
	first := !p.present(s.user, pg)
	if s.stays == nil {
		s.stays = make([]stay, 0, 1)
	}
	s.stays = append(s.stays, stay{pg, until})
	if first {
		pg.users++
		p.counted(pg)
		p.member(s.user, pg)
	}
}

// leave ends s's stay on the page at once, if there is one.
func (p *partition) leave(s *session, pg *page) {
	i := slices.IndexFunc(s.stays, func(st stay) bool { return st.page == pg })
	if i < 0 {
		return
	}
	s.stays = slices.Delete(s.stays, i, i+1)
	if !p.present(s.user, pg) {
		pg.users--
		p.counted(pg)
		p.member(s.user, pg)
	}
	if len(s.stays) == 0 {
		p.drop(s)
	}
}

// drop forgets a session that stays nowhere.
func (p *partition) drop(s *session) {
	p.wheel.drop(s)
	s.from.sessions--
	head := p.users[s.user]
	switch {
	case head == s && s.next == nil:
		delete(p.users, s.user)
		p.site.users--
		p.node.users.Add(-1)
		p.counted(p.site)
	case head == s:
		p.users[s.user] = s.next
	default:
		for ; head.next != s; head = head.next {
		}
		head.next = s.next
	}
}

// file puts s into the wheel at its earliest end.
func (p *partition) file(s *session) {
	at, live := int64(0), false
	for _, st := range s.stays {
		live = live || st.until == 0
		if st.until != 0 && (at == 0 || st.until < at) {
			at = st.until
		}
	}
	if live {
		end := s.deadline
		if left := end - p.now(); left > p.unsure() {
			end -= p.unsure()
		} else if s.from.Gateway != "" {
			end = min(end, p.now()+askEvery)
		}
		if at == 0 || end < at {
			at = end
		}
	}
	if at != 0 {
		p.wheel.idle(p.now())
		p.wheel.put(s, at)
	}
}

// expire ends the stays whose time has come: this is the decrement.
func (p *partition) expire(s *session) {
	now := p.now()
	var ended []*page // rarely more than one
	for _, st := range s.stays {
		if end := st.until; end == 0 && s.deadline <= now || end != 0 && end <= now {
			ended = append(ended, st.page)
			s.from.void = s.from.void || end == 0
		}
	}
	for _, pg := range ended {
		p.leave(s, pg)
	}
	if len(s.stays) == 0 {
		return
	}
	if s.from.Gateway != "" && s.live() && s.deadline-now <= p.unsure() {
		p.asking[s.from] = append(p.asking[s.from], s.user)
	}
	p.file(s)
}

// unsure is how long before its end, in milliseconds, a session is asked about:
// by then two heartbeats have not come.
func (p *partition) unsure() int64 { return p.timeout() / 3 }

// ask asks the gateways whose users have fallen silent.
func (p *partition) ask() {
	for src, users := range p.asking {
		p.node.cfg.Reply(src.Gateway, &heartbeat.Reply{Partition: p.id, Stream: src.stream, Unknown: users})
	}
	clear(p.asking)
}

// counted notes that the page's number of users must be written.
func (p *partition) counted(pg *page) {
	p.out.mu.Lock()
	p.out.counts[pg.name] = pg.users
	p.out.mu.Unlock()
}

// member notes that the user's presence on the page must be written.
func (p *partition) member(u presence.User, pg *page) {
	m := p.memberChange(u, pg)
	p.out.mu.Lock()
	p.out.members[memberKey{u, pg.name}] = m
	p.out.mu.Unlock()
}

// memberChange is the user's presence on the page as it is now.
func (p *partition) memberChange(u presence.User, pg *page) presence.MemberChange {
	m := presence.MemberChange{Member: presence.Member{User: u, Page: pg.name}, Gone: true}
	for s := p.users[u]; s != nil; s = s.next {
		if st := s.find(pg); st != nil {
			m.Gone = false
			if s.from == p.holds {
				m.Hold = time.Now().Add(time.Duration(st.until-p.now()) * time.Millisecond)
			}
		}
	}
	return m
}

// beat applies one message of a gateway.
func (p *partition) beat(b *heartbeat.Beat) {
	now := p.now()
	src := p.sources[b.Source]
	if src == nil {
		p.sweep(now)
		src = &source{Source: b.Source}
		p.sources[b.Source] = src
	}
	src.heard = now
	reply := heartbeat.Reply{Partition: b.Partition, Stream: b.Stream}
	if len(b.Ops) > 0 {
		p.ops(src, b, &reply)
	}
	for _, u := range b.Alive {
		if s := p.lookup(u, src); s != nil && s.live() {
			s.deadline = now + p.timeout()
		} else {
			reply.Unknown = append(reply.Unknown, u)
		}
	}
	if reply.Reset || reply.Acked > 0 || len(reply.Unknown) > 0 {
		p.node.cfg.Reply(b.Source.Gateway, &reply)
	}
}

// ops applies a run of the source's stream, in order. What came before is
// answered again, what comes after a gap is left to be repeated.
func (p *partition) ops(src *source, b *heartbeat.Beat, reply *heartbeat.Reply) {
	switch {
	case b.Stream > src.stream && b.First == 1:
		p.doubt(src)
		src.stream, src.applied, src.acked, src.gap, src.void = b.Stream, 0, 0, 0, false
	case b.Stream != src.stream || src.void:
		reply.Reset = b.Stream >= src.stream
		return
	case b.First > src.applied+1:
		// Usually what is between is on its way. If it does not come, it was
		// acknowledged by an owner before this one, which only knows the stream
		// from a late copy of its beginning.
		if src.gap == 0 {
			src.gap = p.now()
		}
		reply.Reset = p.now()-src.gap > gapPatience
		return
	}
	src.gap = 0
	var joined []*page
	fresh := false
	for i, op := range b.Ops {
		n := b.First + uint64(i)
		if n > src.applied+1 {
			break
		}
		if n == src.applied+1 {
			src.applied, fresh = n, true
			if op.Kind == heartbeat.Join {
				p.arrive(src, op.User, p.page(op.Page))
			} else {
				p.depart(src, op.User, op.Page, op.Grace)
			}
		}
		if pg := p.pages[op.Page]; op.Kind == heartbeat.Join && pg != nil && !slices.Contains(joined, pg) {
			joined = append(joined, pg)
		}
	}
	if fresh {
		p.owe(owed{from: src, stream: src.stream, acked: src.applied, pages: joined})
		return
	}
	if last := b.First + uint64(len(b.Ops)) - 1; last <= src.acked { // the answer was lost
		reply.Acked = src.acked
		reply.Counts = latest(joined)
	}
}

// arrive is a join. It is the return of a connection lost elsewhere, which has
// to run out by itself no more. And it confirms what was loaded, which then only
// stays for as long as the user's other gateways may take to do the same.
func (p *partition) arrive(src *source, u presence.User, pg *page) {
	s := p.session(u, src)
	p.join(s, pg, 0)
	s.deadline = p.now() + p.timeout()
	p.file(s)
	for o := p.users[u]; o != nil; {
		next := o.next
		switch st := o.find(pg); {
		case st == nil || o == s || o.from == p.holds:
		case o.from == p.loaded:
			if end := p.now() + othersConfirm; st.until == 0 && end < o.deadline || end < st.until {
				st.until = end
				p.file(o)
			}
		case st.until != 0:
			p.leave(o, pg)
		}
		o = next
	}
}

// depart is a leave: at once, or after a grace in which the user may return.
func (p *partition) depart(src *source, u presence.User, name string, grace time.Duration) {
	s, pg := p.lookup(u, src), p.pages[name]
	if s == nil || pg == nil {
		return
	}
	st := s.find(pg)
	if st == nil {
		return
	}
	if grace <= 0 {
		p.leave(s, pg)
		return
	}
	st.until = p.now() + grace.Milliseconds()
	p.file(s)
}

// hold takes, renews or ends a hold.
func (p *partition) hold(c *holdCall) {
	s, pg := p.lookup(c.user, p.holds), p.pages[c.page]
	switch {
	case c.on:
		if s != nil && len(s.stays) >= presence.MaxPages && (pg == nil || s.find(pg) == nil) {
			c.done <- ErrTooManyHolds
			return
		}
		s, pg = p.session(c.user, p.holds), p.page(c.page)
		p.join(s, pg, p.now()+3*p.timeout())
		p.member(c.user, pg) // also when only its end moved
		p.file(s)
	case s != nil && pg != nil && s.find(pg) != nil:
		p.leave(s, pg)
		p.member(c.user, pg) // also when a connection keeps the user there
	default: // a newer owner may know of it: the answer waits until the store says that there is none
		p.out.mu.Lock()
		p.out.check = true
		p.out.mu.Unlock()
	}
	p.owe(owed{done: c.done})
}

// owe answers when all that has been applied so far is in the store.
func (p *partition) owe(o owed) {
	p.out.mu.Lock()
	o.gen = p.out.gen
	empty := p.out.empty()
	switch {
	case empty && p.out.flying:
		o.gen--
	case empty:
		o.gen = 0
	}
	p.out.mu.Unlock()
	p.owed = append(p.owed, o)
}

// pay answers what needs no write any more.
func (p *partition) pay() {
	p.settle(func(o owed) bool { return o.gen == 0 })
}

func (p *partition) settle(due func(owed) bool) {
	rest := p.owed[:0]
	for _, o := range p.owed {
		switch {
		case !due(o):
			rest = append(rest, o)
		case o.done != nil:
			o.done <- nil
		case o.from.stream == o.stream:
			o.from.acked = max(o.from.acked, o.acked)
			p.node.cfg.Reply(o.from.Gateway, &heartbeat.Reply{
				Partition: p.id, Stream: o.stream, Acked: o.from.acked, Counts: latest(o.pages),
			})
		}
	}
	clear(p.owed[len(rest):])
	p.owed = rest
}

// stored learns what the store made of a generation, and answers who waited.
func (p *partition) stored(st *stored) {
	for _, c := range st.counts {
		if pg := p.pages[c.Page]; pg != nil && !pg.latest.Newer(c) {
			pg.latest = c
		}
	}
	p.settle(func(o owed) bool { return o.gen <= st.gen })
	for _, c := range st.counts {
		if pg := p.pages[c.Page]; pg != nil && pg != p.site && pg.users == 0 {
			p.out.mu.Lock()
			if _, dirty := p.out.counts[pg.name]; !dirty {
				delete(p.pages, pg.name)
			}
			p.out.mu.Unlock()
		}
	}
}

// flush tells the writer that there is something, once.
func (p *partition) flush() {
	p.out.mu.Lock()
	tell := !p.out.queued && !p.out.flying && !p.out.blocked && !p.out.empty()
	if tell {
		p.out.queued = true
	}
	p.out.mu.Unlock()
	if tell {
		p.node.ready <- p // never blocks: room for every partition, each in it once
	}
}

// sweep forgets gateways that are gone: silent for two timeouts, no sessions.
func (p *partition) sweep(now int64) {
	for key, src := range p.sources {
		if src.sessions == 0 && now-src.heard > 2*p.timeout() {
			delete(p.sources, key)
		}
	}
}

func latest(pages []*page) []presence.Count {
	var counts []presence.Count
	for _, pg := range pages {
		if pg.latest.Page != "" {
			counts = append(counts, pg.latest)
		}
	}
	return counts
}
