package node

import (
	"context"
	"slices"
	"time"

	"headcount/presence"
	"headcount/presence/heartbeat"
)

// gapTimeout is how long ops may be missing, in milliseconds, until the actor asks
// for a new stream. A stream that was not needed costs one repetition.
const gapTimeout = 500

// confirmTimeout is how much time, in milliseconds, the other gateways with
// connections of a user on a page have to confirm the user's presence, after one
// gateway has confirmed it.
const confirmTimeout = 1500

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

type holdCall struct {
	ctx  context.Context // the caller's
	user presence.User
	page string
	on   bool
	done chan error // buffered: the actor never waits for a caller that left
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

// sweep forgets gateways that are gone: they have no sessions and were silent for
// two timeouts.
func (p *partition) sweep(now int64) {
	for key, src := range p.sources {
		if src.sessions == 0 && now-src.lastBeat > 2*p.timeout() {
			delete(p.sources, key)
		}
	}
}
