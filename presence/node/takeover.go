package node

import (
	"slices"
	"time"

	"headcount/internal/marks"
	"headcount/presence"
	"headcount/presence/heartbeat"
)

var (
	onTrial   = marks.Sometimes("a gateway reports its users anew to the same owner")
	rewritten = marks.Sometimes("an owner has the store written again and asks every gateway")
)

const (
	// deathDetection is how long it takes to notice that a process died, give or take a
	// second (see package member).
	deathDetection = 3500 * time.Millisecond
	// recentDeath is how long after a death a takeover is attributed to that death.
	recentDeath = 5 * time.Second
)

// takeover is an actor's progress in learning of all users after its partition was
// claimed, or claimed again because the store lost data.
type takeover struct {
	// complete says that no user of the partition is missing. Otherwise the store lacked users
	// and some live gateway has not reported, or a gateway that died may come back with more.
	complete bool
	// reported says that all live gateways have reported all their users. Otherwise a loaded
	// user without confirmation may still be connected to one of them.
	reported bool
	since    time.Duration // when the actor began to wait for the gateways' reports
	nextAsk  time.Duration // when the actor asks the gateways again
}

// reclaimed says that the store lost data and that the partition was claimed again.
// found is the partition's data that the store still had.
type reclaimed struct {
	claim presence.Claim
	found presence.Snapshot
}

func (r *reclaimed) deliver(p *partition) { p.rewrite(r) }

// incomplete says that the store has not recorded the partition as complete.
type incomplete struct{}

func (*incomplete) deliver(p *partition) { p.repeatComplete() }

// needsReports reports whether the actor still depends on the gateways' reports.
func (p *partition) needsReports() bool { return !p.takeover.complete || p.loaded.sessions > 0 }

// restore takes over the snapshot that the last owner stored. It counts every page anew,
// and puts every member on trial until a gateway confirms it. If the store may lack
// members, the partition becomes complete only when the gateways have reported all their
// users.
func (p *partition) restore(snap presence.Snapshot) {
	// The last owner may have written members of these pages and not the counts; load raises those that have users.
	for _, name := range snap.Pages {
		p.out.counts[name] = 0
	}

	p.load(snap.Members)
	clear(p.out.members) // they come from the store; only the counts are new

	// Written even at 0, because the store may still have the last owner's number.
	p.out.counts[presence.AllPages] = p.site.users

	if p.out.claim.Whole {
		p.takeover.complete = true
		p.out.complete = true
		p.takeover.nextAsk = p.now() + askInterval // by then the gateways may have reported by themselves
	}

	p.flush()
}

// load puts the members that another owner stored on trial. Members that are present by
// a hold alone stay until the hold ends instead.
//
// If the former owner had the partition for less than a trial, the members' trial has
// already begun, and load shortens it by that time, so that two takeovers in a row do not
// double it. At least a third of the timeout is left, for users whose gateway had
// reported them to that owner and who are now reconnecting through another gateway.
func (p *partition) load(members []presence.Member) {
	now := p.now()
	trial := p.trialPeriod()
	if held := p.out.claim.Held; held < trial {
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

		// Clocks may differ; whatever they say, no hold lasts longer than a new one.
		left := min(time.Until(m.Hold), holdTimeouts*p.timeout())
		if m.Alone || !m.Hold.IsZero() && left > 0 {
			h := p.session(m.User, p.holds, pg)
			p.join(h, pg, now+max(left, 1)) // a hold that has ended already is removed at the next tick
			p.schedule(h)
		}
	}
}

// trialPeriod returns how long a user without confirmation by a gateway stays. It is long
// enough for a grace that an earlier owner granted, and for a user of a lost gateway to
// reconnect through another one. After a death the trial is shorter, because a user who left
// must be gone 3 s after the timeout, counted from the death. It need not allow for graces,
// which have run out by the time that the death is noticed.
func (p *partition) trialPeriod() time.Duration {
	if at := p.node.death.Load(); at != 0 && p.now()-time.Duration(at) < recentDeath {
		return max(p.timeout()-deathDetection, p.timeout()/6)
	}

	return p.timeout() * 2 / 3
}

// putOnTrial moves all sessions of the source to loaded, because the gateway is about to
// report all its users again. A session that it does not report has ended: another owner
// received the leave, or the leave was lost.
func (p *partition) putOnTrial(src *source) {
	if src.sessions == 0 {
		return
	}
	onTrial.Reached()

	// All users are searched: a new stream is rare, and an index by source would cost every join.
	deadline := p.now() + p.trialPeriod()
	for u := range p.users {
		s := p.lookup(u, src)
		if s == nil {
			continue
		}

		pg := s.list[0].page
		l := p.session(u, p.loaded, pg)

		for _, pp := range s.list {
			// add and set instead of join: the user is on the page already, so no count and no member changes.
			have := l.find(pp.page)
			switch {
			case have == nil:
				l.add(pp.page, pp.until)
			case pp.outlasts(have):
				l.set(have, pp.until)
			}
		}

		p.removeSession(s, pg)
		l.deadline = deadline
		p.schedule(l)
	}
}

// checkReports checks whether every live gateway has reported all its users, and asks the
// gateways that have not. When all have reported, and no dead gateway can come back before
// its users time out, the partition is complete.
func (p *partition) checkReports() {
	if !p.needsReports() {
		return
	}

	now := p.now()
	ask := now >= p.takeover.nextAsk
	if ask {
		p.takeover.nextAsk = now + askInterval
	}

	known := p.node.gateways.known.Load()
	// Nobody has read the leases yet, so a gateway may exist of which this node knows nothing.
	if known == nil {
		p.takeover.reported = false
		return
	}

	missing := p.unreported(known)
	p.takeover.reported = len(missing) == 0
	if ask {
		for _, g := range missing {
			p.askForUsers(g)
		}
	}

	if p.takeover.complete || !p.takeover.reported || p.mayComeBack(known.gone) {
		return
	}

	p.takeover.complete = true

	p.out.mu.Lock()
	p.out.complete = true
	p.out.mu.Unlock()
}

// unreported returns the live gateways that have not reported all their users. It leaves out those that are silent, so
// that they do not hold up the partition.
func (p *partition) unreported(known *gatewayView) (missing []*gateway) {
	for _, g := range known.live {
		src := p.sources[g.Source]
		if src.reported() {
			continue
		}

		if p.silent(g, src, known.at) {
			p.node.logSilent(g)
			continue
		}

		missing = append(missing, g)
	}

	return missing
}

// askForUsers asks a gateway to report all its users. If the actor must have a new stream, the question asks for that,
// too, and the gateway begins the stream with all its users.
func (p *partition) askForUsers(g *gateway) {
	r := &heartbeat.Reply{Partition: p.id, Ask: true}
	if src := p.sources[g.Source]; src != nil {
		r.Stream = src.stream
		r.Reset = src.mustReset
	}

	p.node.cfg.Reply.SendReply(g.Gateway, r)
}

// mayComeBack reports whether one of the dead gateways may come back with users that it has not reported.
func (p *partition) mayComeBack(dead []*gateway) bool {
	now := p.now()
	return slices.ContainsFunc(dead, func(g *gateway) bool {
		return now < g.until && !p.sources[g.Source].reported()
	})
}

// silent reports whether a live gateway had sent nothing new for a presence timeout at
// the given time, when its lease was last read. A gateway that waits for an
// acknowledgement is not silent: the acknowledgement waits for the store.
func (p *partition) silent(g *gateway, src *source, at time.Duration) bool {
	last := p.takeover.since
	if src != nil {
		if src.acked < src.applied {
			return false
		}
		last = max(last, src.lastProgress)
	}

	return at-max(g.since, last) > p.timeout()
}

// repeatComplete makes the next change say again that the partition is complete, unless
// a change is in flight, which may say so already.
func (p *partition) repeatComplete() {
	p.out.mu.Lock()
	defer p.out.mu.Unlock()

	if p.takeover.complete && p.out.state != inFlight {
		p.out.complete = true
	}
}

// rewrite puts everything into the outbox, for a store that lost data. Another node may
// have owned the partition meanwhile, with users that this node does not know, and the
// store may have lost every trace of that ownership. Unless the store still has the whole
// partition, the actor therefore asks all gateways to report again.
func (p *partition) rewrite(r *reclaimed) {
	if r.claim.Whole {
		p.takeover.complete = true
		p.takeover.reported = false
	} else {
		// The gateways' earlier reports count for nothing: users may have come to the other owner since.
		rewritten.Reached()
		p.takeover = takeover{since: p.now(), nextAsk: p.now()}
		for _, src := range p.sources {
			src.snapshotEnd = 0
		}
	}

	// Gather the members before taking the lock: that takes long, and the writer may need the lock.
	members := map[memberKey]presence.MemberChange{}
	for u, head := range p.users {
		for s := head; s != nil; s = s.next {
			for _, pp := range s.list {
				members[memberKey{u, pp.page.name}] = p.memberChange(u, pp.page)
			}
		}
	}

	p.out.mu.Lock()
	defer p.out.mu.Unlock()

	p.out.claim = r.claim
	p.out.members = members
	p.out.reset = true
	p.out.complete = p.takeover.complete

	// The manager may have begun a newer claim since, which makes this one invalid.
	p.out.blocked = p.out.next != r.claim
	if !p.out.blocked {
		p.out.next = presence.Claim{}
	}

	// The pages that the store still has start at 0, because this node may have no user of them.
	for _, name := range r.found.Pages {
		p.out.counts[name] = 0
	}
	for _, m := range r.found.Members {
		p.out.counts[m.Page] = 0
		p.out.counts[presence.TotalOf(m.Page)] = 0
	}

	for name, pg := range p.pages { // after the zeros, because a page of found may have users
		p.out.counts[name] = pg.users
	}
}
