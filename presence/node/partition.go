package node

import (
	"context"
	"slices"
	"time"

	"headcount/presence"
	"headcount/presence/heartbeat"
)

// mailboxSize bounds the mail that waits for one partition's actor. Further beats
// are dropped: their sender repeats the ops, and the next heartbeat brings the next
// list of live users. Further calls wait in their caller.
const mailboxSize = 256

// gapTimeout is how long ops may be missing, in milliseconds, until the actor asks
// for a new stream. A stream that was not needed costs one repetition.
const gapTimeout = 500

// askInterval is how often, in milliseconds, the actor asks the gateway of a session
// without heartbeats whether the user is still there. The gateway answers with a
// join and repeats it until it arrives, so no user is removed because the network
// lost datagrams.
const askInterval = 300

// confirmTimeout is how much time, in milliseconds, the other gateways with
// connections of a user on a page have to confirm the user's presence, after one
// gateway has confirmed it.
const confirmTimeout = 1500

// deathDetection is how long it takes, in milliseconds, to notice that a process died: one
// second more or less (see package member).
const deathDetection = 3500

// recentDeath is how long after a death the partitions of the dead are taken over.
const recentDeath = 5 * time.Second

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

// source is where sessions come from: one life of a gateway, or one of the
// partition's own two sources, the holds taken by PUT and the members that the
// store had when the partition was claimed.
type source struct {
	heartbeat.Source
	stream   uint64 // the gateway's current stream of ops
	applied  uint64 // ops of the stream that are applied
	acked    uint64 // ops of the stream that are in the store
	gapSince int64  // when an op beyond the next one came, without progress since; 0: there is no gap
	// mustReset says that the actor dropped users whom the gateway may still have: the
	// stream no longer tells of all of them, so the actor asks for a new one.
	mustReset    bool
	snapshotEnd  uint64 // 1 + the op up to which the stream tells of everything; 0: not known
	lastBeat     int64  // when the last beat came
	lastProgress int64  // when the stream last told something new
	sessions     int
}

// reported reports whether the gateway has reported all its users of the partition.
func (s *source) reported() bool {
	return s != nil && !s.mustReset && s.snapshotEnd > 0 && s.applied+1 >= s.snapshotEnd
}

// page is one page as this partition counts it.
type page struct {
	name   string
	users  int64          // distinct users of this partition
	latest presence.Count // as of this partition's last write of it
}

// pendingReply is an answer that waits for generation gen to be in the store.
type pendingReply struct {
	batch uint64
	// either the acknowledgement of a gateway's stream,
	from   *source
	stream uint64
	acked  uint64
	pages  []*page
	// or the end of a call
	done chan<- error
}

// mail is a *heartbeat.Beat, a *holdCall, a *stored, a *returned, a *reclaimed or
// an *incomplete.
type mail any

type holdCall struct {
	ctx  context.Context // the caller's
	user presence.User
	page string
	on   bool
	done chan error // buffered: the actor never waits for a caller that left
}

// reclaimed says that the store lost data: the actor must write everything under
// claim, over what the store had (found).
type reclaimed struct {
	claim presence.Claim
	found presence.Snapshot
}

// stored says that the store has one generation of the outbox, and the counts after
// it.
type stored struct {
	batch  uint64
	counts []presence.Count
}

// refused says that the store refused a change because its claim was not valid.
// The actor may have a new claim already, and could not queue the outbox while the
// old change was under way: it must look at the outbox again.
type refused struct{}

// incomplete says that the partition is not complete in the store.
type incomplete struct{}

// partition is the actor of one partition. Only run touches its fields, except
// mail and out.
type partition struct {
	node  *Node
	id    int
	mail  chan mail
	ended chan struct{} // closed when run has returned
	out   outbox

	users   map[presence.User]*session
	pages   map[string]*page
	site    *page // the users of the default site; it is there also while there are none
	sources map[heartbeat.Source]*source
	holds   *source
	loaded  *source
	asking  map[*source][]presence.User // the users to ask about, see askEvery
	pending []pendingReply
	wheel   wheel

	whole   bool  // all users of the partition are known, or were loaded
	told    bool  // every live gateway has reported all its users, or is mute
	unknown int64 // since when whole and told were to be found out
	askNext int64 // when the gateways that have not are asked again

	start time.Duration // the node's clock when the partition was claimed
	alarm int64         // when the timer rings; 0: it is not set
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
	p.out.batch = 1 // 0 stands for an answer that needs no write
	p.out.arrivals = map[memberKey]struct{}{}
	p.out.members, p.out.counts = map[memberKey]presence.MemberChange{}, map[string]int64{}
	p.site = p.page(presence.AllPages)
	return p
}

// now is the partition's clock: milliseconds since the partition was claimed,
// without the time in which the process stood still.
func (p *partition) now() int64 { return (p.node.clock.now() - p.start).Milliseconds() }

func (p *partition) timeout() int64 { return p.node.cfg.PresenceTimeout.Milliseconds() }

// adopt takes over what the last owner left: every member gets some time in which
// a gateway must confirm it, and every page is counted anew. When the store lacks
// some of the partition, the partition is complete once the gateways have reported
// all their users.
func (p *partition) adopt(snap presence.Snapshot) {
	for _, name := range snap.Pages {
		p.out.counts[name] = 0
	}
	p.load(snap.Members)
	clear(p.out.members) // they are in the store: only the counts are new
	p.out.counts[presence.AllPages] = p.site.users
	p.whole, p.out.complete = p.out.claim.Whole, p.out.claim.Whole
	if p.whole {
		p.askNext = p.now() + askInterval // the gateways find out by themselves
	}
	p.flush()
}

// checkReports finds out whether every live gateway has reported all its users, and, as
// long as that matters, asks the gateways that have not. Once all have, and those
// that died cannot come back in time, the actor knows the whole partition.
func (p *partition) checkReports() {
	if !p.needsReports() {
		return
	}
	now := p.now()
	ask := now >= p.askNext
	if ask {
		p.askNext = now + askInterval
	}
	known := p.node.gateways.known.Load()
	if p.told = known != nil; !p.told {
		return
	}
	for _, g := range known.live {
		src := p.sources[g.Source]
		if src.reported() {
			continue
		}
		if p.silent(g, src, known.at) {
			p.node.logSilent(g)
			continue
		}
		p.told = false
		if ask {
			r := &heartbeat.Reply{Partition: p.id, Ask: true}
			if src != nil {
				r.Stream, r.Reset = src.stream, src.mustReset
			}
			p.node.cfg.Reply.SendReply(g.Gateway, r)
		}
	}
	if !p.told || p.whole || slices.ContainsFunc(known.gone, func(g *gateway) bool {
		return p.node.clock.now() < g.until && !p.sources[g.Source].reported()
	}) {
		return
	}
	p.whole = true
	p.out.mu.Lock()
	p.out.complete = true
	p.out.mu.Unlock()
}

// silent reports whether a live gateway has told nothing new for a timeout, at the
// time at which it was last known to be live. A gateway that waits for an answer
// waits for the store.
func (p *partition) silent(g *gateway, src *source, at time.Duration) bool {
	heard := p.unknown
	if src != nil {
		if src.acked < src.applied {
			return false
		}
		heard = max(heard, src.lastProgress)
	}
	since := max(g.since, p.start+time.Duration(heard)*time.Millisecond)
	return at-since > p.node.cfg.PresenceTimeout
}

// needsReports reports whether it still matters what the gateways have reported.
func (p *partition) needsReports() bool { return !p.whole || p.loaded.sessions > 0 }

// repeatComplete tells the store once more that the partition is complete, unless a change
// is under way.
func (p *partition) repeatComplete() {
	p.out.mu.Lock()
	defer p.out.mu.Unlock()
	if p.whole && !p.out.flying {
		p.out.complete = true
	}
}

// load lets members that another owner left stay for the time of a trial, until
// their gateways confirm them, and those who are there by a hold alone until its end.
// If the former owner had the partition for less than a trial, its own trial of these
// members goes on: a partition that changes hands twice keeps nobody for twice as
// long. A third of the timeout is left in any case, for users whose gateway that
// owner knew and who are on the way to another one.
func (p *partition) load(members []presence.Member) {
	now, trial := p.now(), p.trialPeriod()
	if held := p.out.claim.Held.Milliseconds(); held < trial {
		trial = max(trial-held, min(trial, p.timeout()/3))
	}
	for _, m := range members {
		pg := p.page(m.Page)
		if !m.Alone {
			s := p.session(m.User, p.loaded, pg)
			p.join(s, pg, 0)
			s.deadline = now + trial
			p.schedule(s)
		}
		left := min(time.Until(m.Hold).Milliseconds(), holdTimeouts*p.timeout())
		if m.Alone || !m.Hold.IsZero() && left > 0 {
			h := p.session(m.User, p.holds, pg)
			p.join(h, pg, now+max(left, 1)) // one that is over ends at once, as any other
			p.schedule(h)
		}
	}
}

// trialPeriod is how long, in milliseconds, a user stays whom no gateway confirms: long
// enough for a grace that an earlier owner knew, and for a user who lost a gateway
// to come back through another. After a death the trial is shorter: noticing it took
// time, in which the graces ended, and a user who left must be gone 3 s after the
// timeout, counted from the death.
func (p *partition) trialPeriod() int64 {
	if at := p.node.death.Load(); at != 0 && p.node.clock.now()-time.Duration(at) < recentDeath {
		return max(p.timeout()-deathDetection, p.timeout()/6)
	}
	return p.timeout() * 2 / 3
}

// putOnTrial puts all sessions of the source on trial: the source reports everything
// again. A session that it does not report ended while another owner received the
// reports, or its end was lost.
func (p *partition) putOnTrial(src *source) {
	if src.sessions == 0 {
		return
	}
	deadline := p.now() + p.trialPeriod()
	for u := range p.users {
		s := p.lookup(u, src)
		if s == nil {
			continue
		}
		pg := s.list[0].page
		l := p.session(u, p.loaded, pg)
		for _, st := range s.list {
			switch have := l.find(st.page); {
			case have == nil:
				l.add(st.page, st.until)
			case st.until == 0 || have.until != 0 && have.until < st.until:
				l.set(have, st.until)
			}
		}
		p.removeSession(s, pg)
		l.deadline = deadline
		p.schedule(l)
	}
}

// run is the actor. It ends with ctx; the writer still writes what is in the
// outbox then.
func (p *partition) run(ctx context.Context) {
	defer close(p.ended)
	defer func() { p.node.users.Add(-int64(len(p.users))) }()
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		p.checkReports()
		p.flush()
		p.sendDue()
		p.arm(timer)
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
			p.alarm = 0 // arm sets it anew, also when the clock is behind the timer
			p.checkReports()
			p.wheel.due(p.now(), p.expire)
			p.askGateways()
		case m := <-p.mail:
			p.handle(m)
			for range len(p.mail) { // mail that came together is written together
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
	case *refused: // run looks at the outbox after every mail
	case *reclaimed:
		p.rewrite(m)
	case *incomplete:
		p.repeatComplete()
	}
}

// post puts mail that must not be lost into the mailbox. It waits while the mailbox
// is full, and gives up only when the actor has ended.
func (p *partition) post(m mail) {
	select {
	case p.mail <- m:
	case <-p.ended:
	}
}

// rewrite puts everything into the outbox, for a store that lost data. Another node
// may have owned the partition meanwhile and heard of users that this node does not
// know, and the store may have lost that it did. Unless the store has all of
// the partition, the actor therefore asks the gateways whether this node has
// all their reports.
func (p *partition) rewrite(r *reclaimed) {
	if p.whole = r.claim.Whole; !p.whole {
		p.askNext, p.unknown = p.now(), p.now()
		for _, src := range p.sources {
			src.snapshotEnd = 0
		}
	}
	members := map[memberKey]presence.MemberChange{}
	for u, head := range p.users {
		for s := head; s != nil; s = s.next {
			for _, st := range s.list {
				members[memberKey{u, st.page.name}] = p.memberChange(u, st.page)
			}
		}
	}
	p.out.mu.Lock()
	defer p.out.mu.Unlock()
	p.out.claim, p.out.members = r.claim, members
	p.out.reset, p.out.complete = true, p.whole
	if p.out.blocked = p.out.next != r.claim; !p.out.blocked {
		p.out.next = presence.Claim{}
	}
	for _, name := range r.found.Pages {
		p.out.counts[name] = 0
	}
	for _, m := range r.found.Members {
		p.out.counts[m.Page], p.out.counts[presence.TotalOf(m.Page)] = 0, 0
	}
	for name, pg := range p.pages { // counts may already have a page that is gone
		p.out.counts[name] = pg.users
	}
}

// arm sets the timer to the wheel's next slot.
func (p *partition) arm(timer *time.Timer) {
	at, ok := p.wheel.next()
	if !ok {
		at = 0
	}
	if (!p.whole || p.needsReports() && !p.told) && (at == 0 || p.askNext < at) {
		at = p.askNext
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

// beat applies one message of a gateway.
func (p *partition) beat(b *heartbeat.Beat) {
	now := p.now()
	src := p.sources[b.Source]
	if src == nil {
		p.sweep(now)
		src = &source{Source: b.Source}
		p.sources[b.Source] = src
	}
	src.lastBeat = now
	reply := heartbeat.Reply{Partition: b.Partition, Stream: b.Stream}
	if b.First > 0 {
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
		p.node.cfg.Reply.SendReply(b.Source.Gateway, &reply)
	}
}

// ops applies a run of the source's stream, in order. It answers ops again that
// were applied before, and leaves ops after a gap for the gateway to repeat.
func (p *partition) ops(src *source, b *heartbeat.Beat, reply *heartbeat.Reply) {
	switch {
	case b.Stream > src.stream && b.First == 1:
		p.putOnTrial(src)
		src.lastProgress = p.now()
		src.stream, src.applied, src.acked, src.gapSince, src.mustReset, src.snapshotEnd = b.Stream, 0, 0, 0, false, 0
	case b.Stream != src.stream || src.mustReset:
		reply.Reset = b.Stream >= src.stream
		return
	case b.First > src.applied+1:
		// Usually the missing ops are on their way. If they do not come, an earlier
		// owner has acknowledged them, and this owner knows the stream only from a
		// late copy of its beginning.
		if src.gapSince == 0 {
			src.gapSince = p.now()
		}
		reply.Reset = p.now()-src.gapSince > gapTimeout
		return
	}
	src.gapSince = 0
	if b.Whole > src.snapshotEnd {
		src.snapshotEnd, src.lastProgress = b.Whole, p.now()
	}
	var joined []*page
	fresh := false
	for i, op := range b.Ops {
		n := b.First + uint64(i)
		if n > src.applied+1 {
			break
		}
		if n == src.applied+1 {
			src.applied, src.lastProgress, fresh = n, p.now(), true
			if op.Kind == heartbeat.Join {
				p.arrive(src, op.User, p.page(op.Page))
			} else {
				p.depart(src, op.User, op.Page, op.Grace)
			}
		}
		if pg := p.pages[op.Page]; op.Kind == heartbeat.Join && pg != nil && !slices.Contains(joined, pg) {
			joined = append(joined, pg)
			if all := p.total(pg); !slices.Contains(joined, all) {
				joined = append(joined, all)
			}
		}
	}
	if fresh {
		p.queueReply(pendingReply{from: src, stream: src.stream, acked: src.applied, pages: joined})
		return
	}
	if last := b.First + uint64(len(b.Ops)) - 1; len(b.Ops) > 0 && last <= src.acked { // the answer was lost
		reply.Acked = src.acked
		reply.Counts = latest(joined)
	}
}

// arrive applies a join. The join ends graces of the user on the page: the user has
// returned. The join also confirms a loaded stay, which then lasts only until the
// user's other gateways have had time to confirm it too (othersConfirm).
func (p *partition) arrive(src *source, u presence.User, pg *page) {
	p.noteArrival(u, pg)
	s := p.session(u, src, pg)
	p.join(s, pg, 0)
	s.deadline = p.now() + p.timeout()
	p.schedule(s)
	for o := p.users[u]; o != nil; {
		next := o.next
		switch st := o.find(pg); {
		case st == nil || o == s || o.from == p.holds:
		case o.from == p.loaded:
			if end := p.now() + confirmTimeout; st.until == 0 && end < o.deadline || end < st.until {
				o.set(st, end)
				p.schedule(o)
			}
		case st.until != 0:
			p.leave(o, pg)
		}
		o = next
	}
}

// depart applies a leave: at once, or after a grace in which the user may return.
func (p *partition) depart(src *source, u presence.User, name string, grace time.Duration) {
	s, pg := p.lookup(u, src), p.pages[name]
	var st *pagePresence
	if s != nil && pg != nil {
		st = s.find(pg)
	}
	if st == nil { // the gateway told an earlier owner of the join, and no owner of the leave
		p.departUnknown(src, u, name, grace)
		return
	}
	if grace <= 0 {
		p.leave(s, pg)
		return
	}
	s.set(st, p.now()+grace.Milliseconds())
	p.schedule(s)
}

// departUnknown is depart for a user of whom an earlier owner knew. The stay ends with the
// grace, unless another gateway confirms that the user is there. If the store had lost
// the user, only the gateway that tells of the grace still knows of it.
func (p *partition) departUnknown(src *source, u presence.User, name string, grace time.Duration) {
	pg := p.pages[name]
	if !p.whole && grace > 0 && (pg == nil || !p.present(u, pg)) {
		pg = p.page(name)
		s := p.session(u, src, pg)
		p.join(s, pg, p.now()+grace.Milliseconds())
		p.schedule(s)
		return
	}
	s := p.lookup(u, p.loaded)
	if s == nil || pg == nil {
		return
	}
	if st := s.find(pg); st != nil {
		s.set(st, max(st.until, p.now()+max(grace.Milliseconds(), confirmTimeout)))
		p.schedule(s)
	}
}

// hold takes, renews or ends a hold.
func (p *partition) hold(c *holdCall) {
	if err := expired(c.ctx); err != nil {
		c.done <- err
		return
	}
	s, pg := p.lookup(c.user, p.holds), p.pages[c.page]
	switch {
	case c.on:
		if s != nil && len(s.list) >= presence.MaxPages && (pg == nil || s.find(pg) == nil) {
			c.done <- ErrTooManyHolds
			return
		}
		pg = p.page(c.page)
		p.noteArrival(c.user, pg)
		s = p.session(c.user, p.holds, pg)
		p.join(s, pg, p.now()+holdTimeouts*p.timeout())
		p.noteMember(c.user, pg) // also when only its end moved
		p.schedule(s)
	case s != nil && pg != nil && s.find(pg) != nil:
		p.leave(s, pg)
	default: // a newer owner may know of the hold: the answer waits until the store confirms this node's claim
		p.out.mu.Lock()
		p.out.check = true
		p.out.mu.Unlock()
	}
	p.queueReply(pendingReply{done: c.done})
}

// expired is ctx.Err, but does not wait for the timer of the deadline: when a process that stood
// still goes on, whatever runs first may run before its timers.
func expired(ctx context.Context) error {
	if at, ok := ctx.Deadline(); ok && !time.Now().Before(at) {
		return context.DeadlineExceeded
	}
	return ctx.Err()
}

// queueReply queues an answer until all that has been applied so far is in the store.
func (p *partition) queueReply(o pendingReply) {
	p.out.mu.Lock()
	o.batch = p.out.batch
	empty := p.out.empty()
	switch {
	case empty && p.out.flying:
		o.batch--
	case empty:
		o.batch = 0
	}
	p.out.mu.Unlock()
	p.pending = append(p.pending, o)
}

// sendDue sends the answers that wait for no write.
func (p *partition) sendDue() {
	p.sendReplies(func(o pendingReply) bool { return o.batch == 0 })
}

func (p *partition) sendReplies(due func(pendingReply) bool) {
	rest := p.pending[:0]
	for _, o := range p.pending {
		if !due(o) {
			rest = append(rest, o)
			continue
		}
		switch {
		case o.done != nil:
			o.done <- nil
		case o.from.stream == o.stream:
			o.from.acked = max(o.from.acked, o.acked)
			p.node.cfg.Reply.SendReply(o.from.Gateway, &heartbeat.Reply{
				Partition: p.id, Stream: o.stream, Acked: o.from.acked, Counts: latest(o.pages),
			})
		}
	}
	clear(p.pending[len(rest):])
	p.pending = rest
}

// stored takes the counts of a generation that is in the store, and sends the
// answers that waited for it.
func (p *partition) stored(st *stored) {
	for _, c := range st.counts {
		if pg := p.pages[c.Page]; pg != nil && !pg.latest.Newer(c) {
			pg.latest = c
		}
	}
	p.sendReplies(func(o pendingReply) bool { return o.batch <= st.batch })
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

// flush tells the writer, once, that the outbox has something.
func (p *partition) flush() {
	p.out.mu.Lock()
	tell := !p.out.queued && !p.out.flying && !p.out.blocked && !p.out.empty()
	if tell {
		p.out.queued = true
	}
	p.out.mu.Unlock()
	if tell {
		p.node.ready <- p // never blocks: it has room for every partition, and each is in it once
	}
}

// sweep forgets gateways that are gone: they have no sessions and were silent for
// two timeouts.
func (p *partition) sweep(now int64) {
	for key, src := range p.sources {
		if src.sessions == 0 && now-src.lastBeat > 2*p.timeout() {
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
