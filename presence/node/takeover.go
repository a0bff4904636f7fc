package node

import (
	"slices"
	"time"

	"headcount/presence"
	"headcount/presence/heartbeat"
)

// deathDetection is how long it takes, in milliseconds, to notice that a process died: one
// second more or less (see package member).
const deathDetection = 3500

// recentDeath is how long after a death the partitions of the dead are taken over.
const recentDeath = 5 * time.Second

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
