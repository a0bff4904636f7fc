package node

import (
	"context"
	"time"

	"headcount/presence"
	"headcount/presence/heartbeat"
)

// mailboxSize bounds the mail that waits for one partition's actor. Further beats
// are dropped: their sender repeats the ops, and the next heartbeat brings the next
// list of live users. Further calls wait in their caller.
const mailboxSize = 256

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

func latest(pages []*page) []presence.Count {
	var counts []presence.Count
	for _, pg := range pages {
		if pg.latest.Page != "" {
			counts = append(counts, pg.latest)
		}
	}
	return counts
}
