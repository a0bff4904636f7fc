package node

import (
	"time"

	"headcount/internal/marks"
	"headcount/presence"
	"headcount/presence/heartbeat"
)

// askInterval is how often the actor asks a gateway about a user without heartbeats. The
// gateway answers with a join, which it repeats until it is acknowledged; so lost
// datagrams remove no user.
const askInterval = 300 * time.Millisecond

// session is one source's report of one user. The sessions of a user form a chain.
type session struct {
	user     presence.User
	from     *source
	next     *session      // the same user, from another source
	deadline time.Duration // the end of open-ended page presences; each heartbeat moves it
	pagePresences

	slotNext, slotPrev *session // neighbours in the wheel's slot
	slot               int16    // the slot; -1: not in the wheel
	since              uint32   // when the user's first session began, unix seconds
}

// page is one page as this partition counts it.
type page struct {
	name   string
	users  int64          // distinct users of this partition
	latest presence.Count // the total after this partition's last write of the page
}

// page returns the page with the name, and creates it if it is missing.
func (p *partition) page(name string) *page {
	pg := p.pages[name]
	if pg == nil {
		pg = &page{name: name}
		p.pages[name] = pg
	}

	return pg
}

// total returns the page that counts all users of pg's site. All pages of one user
// are on the same site.
func (p *partition) total(pg *page) *page {
	name := presence.TotalOf(pg.name)
	if name == p.site.name {
		return p.site
	}

	return p.page(name)
}

// session returns the user's session of a source. It creates a missing session, for a
// user who is about to join pg.
func (p *partition) session(u presence.User, from *source, pg *page) *session {
	if s := p.lookup(u, from); s != nil {
		return s
	}

	// A user has been here since the first session began, so a later one takes over its time.
	head := p.users[u]
	s := &session{user: u, from: from, next: head, slot: -1}

	p.users[u] = s
	from.sessions++

	if head != nil {
		s.since = head.since
	} else {
		s.since = uint32(time.Now().Unix())
		// A site counts a user once, whatever the number of pages, so with the first session.
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

// present reports whether any of the user's sessions is on the page.
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

// join puts s on the page until the given time; 0 means as long as the session lasts.
func (p *partition) join(s *session, pg *page, until time.Duration) {
	if pp := s.find(pg); pp != nil {
		s.set(pp, until)
		return
	}

	// A user counts once, however many sessions are on the page.
	first := !p.present(s.user, pg)

	s.add(pg, until)

	// The store also keeps whether a held user has a connection (Member.Alone).
	if first || p.held(s.user, pg) {
		p.noteMember(s.user, pg)
	}

	// After the member, because the writer may take the outbox in between: the store counts nobody whom it does not
	// have.
	if first {
		pg.users++
		p.noteCount(pg)
	}
}

// leave takes s off the page at once.
func (p *partition) leave(s *session, pg *page) {
	pp := s.find(pg)
	if pp == nil {
		return
	}

	s.remove(pp)

	gone := !p.present(s.user, pg)

	if gone {
		pg.users--
		marks.Must(pg.users >= 0, "a page has no fewer users than none")
		p.noteCount(pg)
	}

	// As in join: a hold without any connection is stored differently. Here the count comes first.
	if gone || s.from == p.holds || p.held(s.user, pg) {
		p.noteMember(s.user, pg)
	}

	if len(s.list) == 0 {
		p.removeSession(s, pg)
	}
}

// removeSession unlinks a session. pg is any page of the user: with the last session, the
// total of pg's site loses the user.
func (p *partition) removeSession(s *session, pg *page) {
	// Otherwise wheel.due would pass expire a session that belongs to no user any more.
	p.wheel.drop(s)
	s.from.sessions--

	last := p.unlink(s)
	if !last {
		return
	}

	// The page has lost the user before, in leave, so the page never exceeds its site.
	all := p.total(pg)
	all.users--
	marks.Must(all.users >= pg.users, "a site has no fewer users than one of its pages")
	p.node.users.Add(-1)
	p.noteCount(all)
	p.noteDeparture(s.user)
}

// unlink takes s out of the chain of its user's sessions. It reports whether s was the last of them.
func (p *partition) unlink(s *session) (last bool) {
	prev := p.users[s.user]
	if prev != s {
		for prev.next != s {
			prev = prev.next
		}
		prev.next = s.next
		return false
	}

	// A user without sessions must not stay in the map.
	if s.next == nil {
		delete(p.users, s.user)
		return true
	}

	p.users[s.user] = s.next
	return false
}

// schedule puts s into the wheel at the earliest time at which one of its page presences
// may end, or at which the actor has to ask the gateway about the user.
func (p *partition) schedule(s *session) {
	at := s.earliestEnd
	if s.live() {
		// Long before the deadline, the next look is due when the questions begin;
		// after that, at every question.
		end := s.deadline
		if left := end - p.now(); left > p.askBefore() {
			end -= p.askBefore()
		} else if s.from.Gateway != "" {
			// holds and loaded have no gateway that could be asked.
			end = min(end, p.now()+askInterval)
		}

		if at == 0 || end < at {
			at = end
		}
	}

	if at != 0 {
		// The first session after a quiet time would make due visit every tick since.
		p.wheel.idle(p.now())
		p.wheel.put(s, at)
	}
}

// expire ends the page presences of s whose time has come.
func (p *partition) expire(s *session) {
	now := p.now()

	// The user's gateway may not have reported to this new owner yet, or may already
	// report to the next one.
	unconfirmed := s.from == p.loaded && !p.takeover.reported
	if unconfirmed || p.node.handingOver.Load() {
		p.wheel.put(s, now+askInterval)
		return
	}

	// leave changes the list, so the ended ones are gathered first.
	var ended []*page // rarely more than one
	silent := false

	// set and remove may leave earliestEnd too early, since a look that comes too early costs little. It becomes exact
	// again here.
	s.earliestEnd = 0
	for _, pp := range s.list {
		openEnded := pp.until == 0
		end := pp.until
		if openEnded {
			end = s.deadline
		}

		if end > now {
			s.noteEnd(pp.until)
			continue
		}
		ended = append(ended, pp.page)
		silent = silent || openEnded
	}

	if silent {
		s.from.mustReset = true // the heartbeats may be lost and the gateway may still have the user
		p.node.endedSilent.Add(1)
	}

	for _, pg := range ended {
		p.leave(s, pg)
	}

	// The last leave has removed the session.
	if len(s.list) == 0 {
		return
	}

	// Ask the gateway before the deadline ends the user.
	isOverdue := s.live() && s.deadline-now <= p.askBefore()
	if isOverdue && s.from.Gateway != "" {
		p.asking[s.from] = append(p.asking[s.from], s.user)
		p.node.asked.Add(1)
	}

	p.schedule(s)
}

// askBefore returns how long before a session's deadline the actor begins to ask the
// gateway: by then two heartbeats are missing.
func (p *partition) askBefore() time.Duration { return p.timeout() / 3 }

// askGateways asks the gateways about the users whose heartbeats are missing.
func (p *partition) askGateways() {
	for src, users := range p.asking {
		p.node.cfg.Reply.SendReply(src.Gateway, &heartbeat.Reply{Partition: p.id, Stream: src.stream, Unknown: users})
	}

	clear(p.asking)
}

// noteArrival records that the user is about to arrive on the page, unless the user is
// present already. It records none while the partition is not complete, because the
// gateways then report users who were present before.
func (p *partition) noteArrival(u presence.User, pg *page) {
	if !p.node.cfg.Arrivals || !p.takeover.complete || p.present(u, pg) {
		return
	}

	p.out.mu.Lock()
	defer p.out.mu.Unlock()

	p.out.arrivals[memberKey{u, pg.name}] = struct{}{}

	// With the first page the user also arrives on the site.
	if p.users[u] == nil {
		p.out.arrivals[memberKey{u, presence.TotalOf(pg.name)}] = struct{}{}
	}
}

// noteDeparture records that the user is no longer present.
func (p *partition) noteDeparture(u presence.User) {
	if to := p.node.cfg.Departures; to != nil {
		to.Departed(u)
	}

	if p.node.cfg.LastSeen == nil {
		return
	}

	// When it happened, not when it is written: an outage may delay the write for long.
	p.out.mu.Lock()
	p.out.departures[u] = time.Now()
	p.out.mu.Unlock()
}

// noteCount puts the page's number of users into the outbox.
func (p *partition) noteCount(pg *page) {
	p.out.mu.Lock()
	p.out.counts[pg.name] = pg.users
	p.out.mu.Unlock()
}

// noteMember puts the user's presence on the page into the outbox.
func (p *partition) noteMember(u presence.User, pg *page) {
	m := p.memberChange(u, pg)

	p.out.mu.Lock()
	p.out.members[memberKey{u, pg.name}] = m
	p.out.mu.Unlock()
}

// memberChange returns the user's presence on the page in the form that the store keeps.
func (p *partition) memberChange(u presence.User, pg *page) presence.MemberChange {
	m := presence.MemberChange{Member: presence.Member{User: u, Page: pg.name}}

	connected := false
	for s := p.users[u]; s != nil; s = s.next {
		pp := s.find(pg)
		switch {
		case pp == nil:
		case s.from == p.holds:
			m.Hold = time.Now().Add(pp.until - p.now())
		default:
			connected = true
		}
	}

	m.Alone = !m.Hold.IsZero() && !connected
	m.Gone = m.Hold.IsZero() && !connected

	return m
}
