package node

import (
	"context"
	"slices"
	"time"

	"headcount/presence"
	"headcount/presence/heartbeat"
)

const (
	// gapTimeout is how long ops may be missing before the actor asks for a new stream. A
	// needless request costs one repetition of the gateway's users.
	gapTimeout = 500 * time.Millisecond
	// confirmTimeout is how long the user's other gateways have to confirm a page presence that
	// was loaded from the store, after one gateway has confirmed it.
	confirmTimeout = 1500 * time.Millisecond
)

// source is where sessions come from: one incarnation of a gateway, or one of the
// partition's own two sources, holds and loaded.
type source struct {
	heartbeat.Source
	stream   uint64        // the gateway's current stream of ops
	applied  uint64        // ops of the stream up to this one are applied
	acked    uint64        // ops of the stream up to this one are in the store
	gapSince time.Duration // when an op beyond the next one arrived, without progress since; 0: no gap
	// mustReset says that the actor removed users that the gateway may still have. The
	// actor then asks for a new stream, because the ops that follow in this one do not
	// report these users again.
	mustReset    bool
	snapshotEnd  uint64        // 1 + the last op of the gateway's initial users; 0: not announced yet
	lastBeat     time.Duration // when the last beat arrived
	lastProgress time.Duration // when the stream last said something new
	sessions     int
}

// reported reports whether the source has reported all its users. A nil source is a
// gateway that has sent nothing.
func (s *source) reported() bool {
	return s != nil && !s.mustReset && s.snapshotEnd > 0 && s.applied+1 >= s.snapshotEnd
}

// holdRequest asks an actor to change a hold.
type holdRequest struct {
	presence.HoldChange
	ctx  context.Context // the caller's
	done chan error      // buffered, so that the actor never waits for a caller that gave up
}

// A refusal is answered at once, and everything else when the store has the change.
func (c *holdRequest) deliver(p *partition) {
	if err := p.admitHold(c); err != nil {
		c.done <- err
		return
	}

	if c.On {
		p.takeHold(c.User, c.Page)
	} else {
		p.endHold(c.User, c.Page)
	}

	// Even if there was no hold to end, wait for the store: only an owner that it still accepts can know that.
	p.queueReply(pendingReply{answer: c.done, ctx: c.ctx})
}

// beat applies one message of a gateway.
func (p *partition) beat(b *heartbeat.Beat) {
	now := p.now()

	// A new incarnation of a gateway is a new source: its old sessions end by themselves.
	src := p.sources[b.Source]
	if src == nil {
		// Only a new source makes the map grow, so this is when old ones are looked for.
		p.sweep(now)
		src = &source{Source: b.Source}
		p.sources[b.Source] = src
	}
	src.lastBeat = now // keeps sweep from deleting the source

	reply := heartbeat.Reply{Partition: b.Partition, Stream: b.Stream}
	// Ops first: a user in Alive may have joined with an op of the same message.
	if b.First > 0 {
		p.ops(src, b, &reply)
	}

	// A user that this owner does not know is asked for: the gateway then repeats the join.
	for _, u := range b.Alive {
		if s := p.lookup(u, src); s != nil && s.live() {
			p.extend(s, b)
		} else {
			reply.Unknown = append(reply.Unknown, u)
		}
	}

	if reply.Reset || reply.Acked > 0 || len(reply.Unknown) > 0 {
		p.node.cfg.Reply.SendReply(b.Source.Gateway, &reply)
	}
}

// verdict says how the ops of a message relate to the stream of their source.
type verdict uint8

const (
	continues verdict = iota // they are the next ops, or repeat earlier ones
	begins                   // they begin a new stream, which reports all users of the gateway again
	outdated                 // they are late ops of an earlier stream
	headless                 // the actor cannot follow their stream: it missed the beginning, or removed users
	gapped                   // ops before them are missing
)

// judge returns the verdict on the ops of b. It changes nothing.
func (s *source) judge(b *heartbeat.Beat) verdict {
	if b.Stream > s.stream {
		if b.First == 1 {
			return begins
		}
		return headless
	}

	switch {
	case b.Stream < s.stream:
		return outdated
	case s.mustReset:
		return headless
	case b.First > s.applied+1:
		return gapped
	default:
		return continues
	}
}

// ops applies ops of the source's stream in order. It acknowledges repeated ops again,
// and ignores ops after a gap, which the gateway repeats.
func (p *partition) ops(src *source, b *heartbeat.Beat, reply *heartbeat.Reply) {
	switch src.judge(b) {
	case begins:
		// Before begin: sessions that the new stream does not confirm have ended, and only their trial removes them.
		p.putOnTrial(src)
		src.begin(b.Stream, p.now())
	case outdated:
		return
	case headless:
		reply.Reset = true
		return
	case gapped:
		// Usually the missing ops are on their way. If they never arrive, an earlier
		// owner has acknowledged them, and this owner learned of the stream from a late
		// copy of its beginning.
		if src.gapSince == 0 {
			src.gapSince = p.now()
		}
		reply.Reset = p.now()-src.gapSince > gapTimeout
		return
	}

	src.gapSince = 0
	p.apply(src, b, reply)
}

// apply applies ops that begin or continue the source's stream.
func (p *partition) apply(src *source, b *heartbeat.Beat, reply *heartbeat.Reply) {
	// Whole may come with a later beat: at first the gateway may not know its last initial op.
	if b.Whole > src.snapshotEnd {
		src.snapshotEnd = b.Whole
		src.lastProgress = p.now()
	}

	var joined []*page
	fresh := false
	for i, op := range b.Ops {
		n := b.First + uint64(i)
		if n == src.applied+1 {
			src.applied = n
			src.lastProgress = p.now()
			fresh = true

			if op.Kind == heartbeat.Join {
				p.arrive(src, b, op.User, p.page(op.Page))
			} else {
				p.depart(src, op.User, op.Page, op.Grace)
			}
		} else if op.Kind == heartbeat.Join {
			// A repeated leave is ignored: the user may have joined again with a later op.
			p.repeated(src, b, op.User)
		}

		// The acknowledgement of joins carries the counts that include them, so that the
		// first count that a visitor gets includes the visitor.
		// Repeated joins too: the acknowledgement with their counts may have been lost.
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

	// The gateway repeats ops that are in the store: their acknowledgement was lost, or came without the counts of
	// their pages. It need not wait for the ops after them.
	if len(b.Ops) > 0 && b.First <= src.acked {
		src.acknowledge(reply, joined)
	}
}

// begin starts a stream, of which nothing has been applied yet.
func (s *source) begin(stream uint64, now time.Duration) {
	s.stream = stream
	s.applied = 0
	s.acked = 0
	s.gapSince = 0
	s.mustReset = false
	s.snapshotEnd = 0
	s.lastProgress = now
}

// acknowledge makes reply the acknowledgement of all ops that are in the store, with the counts of pages.
func (s *source) acknowledge(reply *heartbeat.Reply, pages []*page) {
	reply.Acked = s.acked
	reply.Counts = latest(pages)
	reply.Counted = s.acked
}

// extend moves the deadline of a session, because b says that its user was live when it was sent. A beat that a slow
// link delivers after its gateway died keeps nobody longer than that gateway would have. expire files s under the new
// deadline when the old one passes.
func (p *partition) extend(s *session, b *heartbeat.Beat) {
	s.deadline = max(s.deadline, p.now()+p.timeout()-b.Age)
}

// repeated takes a join that was applied before as a sign of life. While the store is away, the gateway repeats joins,
// and that is also its answer to the actor's questions about their users.
func (p *partition) repeated(src *source, b *heartbeat.Beat, u presence.User) {
	s := p.lookup(u, src)
	if s != nil && s.live() {
		p.extend(s, b)
	}
}

// arrive applies a join. It ends the user's graces on the page, because the user has
// returned. It also confirms a loaded page presence: the loaded copy then lasts only until
// the user's other gateways have had time to report the user too.
func (p *partition) arrive(src *source, b *heartbeat.Beat, u presence.User, pg *page) {
	// Before there is a session, since afterwards the user is present.
	p.noteArrival(u, pg)

	s := p.session(u, src, pg)
	p.join(s, pg, 0)
	p.extend(s, b)
	p.schedule(s)

	for o := p.users[u]; o != nil; {
		next := o.next
		p.giveWay(o, s, pg) // may remove o
		o = next
	}
}

// giveWay adapts o, another session of the user who has just arrived on pg with s. A hold stays as it is.
func (p *partition) giveWay(o, s *session, pg *page) {
	pp := o.find(pg)
	if pp == nil || o == s || o.from == p.holds {
		return
	}

	if o.from == p.loaded {
		ends := pp.until
		if ends == 0 {
			ends = o.deadline
		}
		// The copy does not end at once: it may stand for a tab at another gateway, which has not reported yet.
		if end := p.now() + confirmTimeout; end < ends {
			o.set(pp, end)
			p.schedule(o)
		}
		return
	}

	if pp.until != 0 { // a grace
		p.leave(o, pg)
	}
}

// depart applies a leave: at once, or after a grace in which the user may return.
func (p *partition) depart(src *source, u presence.User, name string, grace time.Duration) {
	s := p.lookup(u, src)
	pg := p.pages[name]

	var pp *pagePresence
	if s != nil && pg != nil {
		pp = s.find(pg)
	}

	if pp == nil { // an earlier owner applied the join
		p.departUnknown(src, u, name, grace)
		return
	}

	if grace <= 0 {
		p.leave(s, pg)
		return
	}

	// Only the end moves. The store keeps the user as present, so that an owner that takes over knows the user too.
	s.set(pp, p.now()+grace)
	p.schedule(s)
}

// departUnknown applies a leave whose join an earlier owner applied. The loaded page
// presence ends with the grace, unless another gateway confirms it. If the store lost the
// user, only this leave shows that the user is in a grace, so it creates the presence.
func (p *partition) departUnknown(src *source, u presence.User, name string, grace time.Duration) {
	pg := p.pages[name]
	if !p.takeover.complete && grace > 0 && (pg == nil || !p.present(u, pg)) {
		pg = p.page(name)
		s := p.session(u, src, pg)
		p.join(s, pg, p.now()+grace)
		p.schedule(s)
		return
	}

	s := p.lookup(u, p.loaded)
	if s == nil || pg == nil {
		return
	}

	// Never earlier than the end that another gateway's leave has set.
	if pp := s.find(pg); pp != nil {
		s.set(pp, max(pp.until, p.now()+max(grace, confirmTimeout)))
		p.schedule(s)
	}
}

// admitHold returns why a change of a hold is refused, or nil.
func (p *partition) admitHold(c *holdRequest) error {
	if err := expired(c.ctx); err != nil {
		return err
	}

	// Admit it only now: a change that was refused above must not overtake one that is carried out.
	key := memberKey{c.User, c.Page}
	if err := p.holdOrder.admit(key, c.Asked, time.Now()); err != nil {
		return err
	}

	// A renewal is never refused, because it takes no further place.
	s := p.lookup(c.User, p.holds)
	isFull := s != nil && len(s.list) >= presence.MaxPages
	if c.On && isFull && !p.held(c.User, p.pages[c.Page]) {
		return ErrTooManyHolds
	}

	return nil
}

// takeHold takes or renews the user's hold on a page.
func (p *partition) takeHold(u presence.User, name string) {
	pg := p.page(name)
	p.noteArrival(u, pg)

	s := p.session(u, p.holds, pg)
	p.join(s, pg, p.now()+holdTimeouts*p.timeout())
	p.noteMember(u, pg) // join does not note a member if only the end of the hold moved
	p.schedule(s)
}

// endHold ends the user's hold on a page, if there is one.
func (p *partition) endHold(u presence.User, name string) {
	pg := p.pages[name]
	if p.held(u, pg) {
		p.leave(p.lookup(u, p.holds), pg)
	}
}

// expired returns ctx's error. It also compares the deadline with the clock, because
// after a suspension goroutines may run before the context's timer fires.
func expired(ctx context.Context) error {
	if at, ok := ctx.Deadline(); ok && !time.Now().Before(at) {
		return context.DeadlineExceeded
	}

	return ctx.Err()
}

// sweep deletes sources without sessions that have been silent for two timeouts.
func (p *partition) sweep(now time.Duration) {
	for key, src := range p.sources {
		// A gateway that comes back after that is asked for a new stream, with all its users.
		if src.sessions == 0 && now-src.lastBeat > 2*p.timeout() {
			delete(p.sources, key)
		}
	}
}
