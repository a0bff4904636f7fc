package node

import (
	"time"

	"headcount/presence"
	"headcount/presence/heartbeat"
)

// askInterval is how often, in milliseconds, the actor asks the gateway of a session
// without heartbeats whether the user is still there. The gateway answers with a
// join and repeats it until it arrives, so no user is removed because the network
// lost datagrams.
const askInterval = 300

// session is one user as one source knows the user. The sessions of one user are
// chained.
type session struct {
	user     presence.User
	from     *source
	next     *session // the same user from another source
	deadline int64    // each heartbeat moves it; stays with until 0 end here
	pagePresences

	slotNext, slotPrev *session // neighbours in the wheel's slot
	slot               int16    // in the wheel; -1: not there
}

// page is one page as this partition counts it.
type page struct {
	name   string
	users  int64          // distinct users of this partition
	latest presence.Count // as of this partition's last write of it
}

// page returns the page of that name, and creates it when there is none.
func (p *partition) page(name string) *page {
	pg := p.pages[name]
	if pg == nil {
		pg = &page{name: name}
		p.pages[name] = pg
	}
	return pg
}

// total returns the page that counts all users of the site of pg. A user is of one site, so
// any page of a user has the same.
func (p *partition) total(pg *page) *page {
	name := presence.TotalOf(pg.name)
	if name == p.site.name {
		return p.site
	}
	return p.page(name)
}

// session returns the user's session of a source, and creates it when there is none, for
// a user who is about to stay on pg.
func (p *partition) session(u presence.User, from *source, pg *page) *session {
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
		all := p.total(pg)
		all.users++
		p.node.users.Add(1)
		p.noteCount(all)
	}
	return s
}

// lookup returns the user's session of a source, or nil.
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

// held reports whether the user has a hold on the page.
func (p *partition) held(u presence.User, pg *page) bool {
	h := p.lookup(u, p.holds)
	return h != nil && h.find(pg) != nil
}

// join makes s stay on the page until the given time, or, when until is 0, as long
// as the session lasts.
func (p *partition) join(s *session, pg *page, until int64) {
	if st := s.find(pg); st != nil {
		s.set(st, until)
		return
	}
	first := !p.present(s.user, pg)
	s.add(pg, until)
	if first {
		pg.users++
		p.noteCount(pg)
	}
	if first || p.held(s.user, pg) {
		p.noteMember(s.user, pg)
	}
}

// leave ends s's stay on the page at once, if there is one.
func (p *partition) leave(s *session, pg *page) {
	st := s.find(pg)
	if st == nil {
		return
	}
	s.remove(st)
	gone := !p.present(s.user, pg)
	if gone {
		pg.users--
		p.noteCount(pg)
	}
	if gone || s.from == p.holds || p.held(s.user, pg) {
		p.noteMember(s.user, pg)
	}
	if len(s.list) == 0 {
		p.removeSession(s, pg)
	}
}

// removeSession forgets a session that stays on no page any more, or need not. pg is a page of the
// user.
func (p *partition) removeSession(s *session, pg *page) {
	p.wheel.drop(s)
	s.from.sessions--
	head := p.users[s.user]
	switch {
	case head == s && s.next == nil:
		delete(p.users, s.user)
		all := p.total(pg)
		all.users--
		p.node.users.Add(-1)
		p.noteCount(all)
	case head == s:
		p.users[s.user] = s.next
	default:
		for ; head.next != s; head = head.next {
		}
		head.next = s.next
	}
}

// schedule puts s into the wheel at its earliest end.
func (p *partition) schedule(s *session) {
	at := s.earliestEnd
	if s.live() {
		end := s.deadline
		if left := end - p.now(); left > p.askBefore() {
			end -= p.askBefore()
		} else if s.from.Gateway != "" {
			end = min(end, p.now()+askInterval)
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
	// A gateway may have the user and not know that this node is the owner, or know
	// already that another one is about to be.
	if s.from == p.loaded && !p.told || p.node.handingOver.Load() {
		p.wheel.put(s, now+askInterval)
		return
	}
	var ended []*page // rarely more than one
	silent := false
	s.earliestEnd = 0
	for _, st := range s.list {
		if end := st.until; end == 0 && s.deadline <= now || end != 0 && end <= now {
			ended = append(ended, st.page)
			s.from.mustReset = s.from.mustReset || end == 0
			silent = silent || end == 0
		} else {
			s.noteEnd(end)
		}
	}
	if silent {
		p.node.endedSilent.Add(1)
	}
	for _, pg := range ended {
		p.leave(s, pg)
	}
	if len(s.list) == 0 {
		return
	}
	if s.from.Gateway != "" && s.live() && s.deadline-now <= p.askBefore() {
		p.asking[s.from] = append(p.asking[s.from], s.user)
		p.node.asked.Add(1)
	}
	p.schedule(s)
}

// askBefore is how long before a session's end, in milliseconds, the actor asks the
// gateway about it: by then two heartbeats are missing.
func (p *partition) askBefore() int64 { return p.timeout() / 3 }

// askGateways asks the gateways about their users who have fallen silent.
func (p *partition) askGateways() {
	for src, users := range p.asking {
		p.node.cfg.Reply.SendReply(src.Gateway, &heartbeat.Reply{Partition: p.id, Stream: src.stream, Unknown: users})
	}
	clear(p.asking)
}

// noteArrival notes that the user is about to come to the page, unless the user is there.
// Until all users are known, nobody arrives: the gateways tell of those who were there.
func (p *partition) noteArrival(u presence.User, pg *page) {
	if !p.node.cfg.Arrivals || !p.whole || p.present(u, pg) {
		return
	}
	p.out.mu.Lock()
	defer p.out.mu.Unlock()
	p.out.arrivals[memberKey{u, pg.name}] = struct{}{}
	if p.users[u] == nil {
		p.out.arrivals[memberKey{u, presence.TotalOf(pg.name)}] = struct{}{}
	}
}

// noteCount notes that the page's number of users must be written.
func (p *partition) noteCount(pg *page) {
	p.out.mu.Lock()
	p.out.counts[pg.name] = pg.users
	p.out.mu.Unlock()
}

// noteMember notes that the user's presence on the page must be written.
func (p *partition) noteMember(u presence.User, pg *page) {
	m := p.memberChange(u, pg)
	p.out.mu.Lock()
	p.out.members[memberKey{u, pg.name}] = m
	p.out.mu.Unlock()
}

// memberChange is the user's presence on the page as it is now.
func (p *partition) memberChange(u presence.User, pg *page) presence.MemberChange {
	m := presence.MemberChange{Member: presence.Member{User: u, Page: pg.name}}
	connected := false
	for s := p.users[u]; s != nil; s = s.next {
		switch st := s.find(pg); {
		case st == nil:
		case s.from == p.holds:
			m.Hold = time.Now().Add(time.Duration(st.until-p.now()) * time.Millisecond)
		default:
			connected = true
		}
	}
	m.Alone = !m.Hold.IsZero() && !connected
	m.Gone = m.Hold.IsZero() && !connected
	return m
}
