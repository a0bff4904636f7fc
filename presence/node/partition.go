package node

import (
	"container/list"
	"context"
	"time"

	"headcount/internal/marks"
	"headcount/presence"
	"headcount/presence/heartbeat"
)

// mailboxSize bounds the mail that waits for one actor. When the mailbox is full, beats are dropped, because the
// gateway repeats its ops and its next heartbeat lists the live users again; requests block their caller.
const mailboxSize = 256

// mail is what other goroutines send to an actor. The actor delivers it to its partition.
type mail interface{ deliver(p *partition) }

// beat is mail from a gateway.
type beat heartbeat.Beat

func (b *beat) deliver(p *partition) { p.beat((*heartbeat.Beat)(b)) }

// stored says that a batch of the outbox is in the store, and carries the counts
// after it.
type stored struct {
	batch  uint64
	counts []presence.Count
}

func (s *stored) deliver(p *partition) { p.stored(s) }

// refused says that the store refused a change because its claim was not valid. The actor
// may have received a new claim while the change was in flight. It could not queue the
// outbox then, and does so now.
type refused struct{}

func (*refused) deliver(*partition) {} // run flushes the outbox after every mail

// partition is the actor of one partition. Other goroutines use only mail, ended and
// out; everything else belongs to the goroutine of run. Times are those of the node's
// clock, see now; 0 means none.
type partition struct {
	node  *Node
	id    int
	mail  chan mail
	ended chan struct{} // closed when run has returned
	out   outbox

	users   map[presence.User]*session // the first session of each user's chain
	pages   map[string]*page           // pages with users, and those whose last count is not stored yet
	site    *page                      // the total of the default site, kept even at 0
	sources map[heartbeat.Source]*source
	holds   *source                     // of the sessions that PUT holds make
	loaded  *source                     // of the sessions that an earlier owner stored
	asking  map[*source][]presence.User // users to ask their gateways about, see askGateways
	pending []pendingReply
	done    uint64 // the last batch that the actor knows to be in the store, and whose counts its pages have
	wheel   wheel

	holdOrder holdOrder

	takeover takeover
	alarm    time.Duration // when run's timer fires; 0: the timer is stopped
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

		holdOrder: holdOrder{newest: map[memberKey]*list.Element{}},
		takeover:  takeover{since: n.clock.now()},
	}

	p.out.claim = claim
	p.out.batch = 1 // batch 0 is done
	p.out.arrivals = map[memberKey]struct{}{}
	p.out.departures = map[presence.User]time.Time{}
	p.out.members = map[memberKey]presence.MemberChange{}
	p.out.counts = map[string]int64{}

	p.site = p.page(presence.AllPages)

	return p
}

// now returns the time of the node's clock, which leaves out the time for which the process was suspended.
func (p *partition) now() time.Duration { return p.node.clock.now() }

func (p *partition) timeout() time.Duration { return p.node.cfg.PresenceTimeout }

// run is the actor's loop. It returns when ctx ends; the writer still writes an outbox
// that is queued by then.
func (p *partition) run(ctx context.Context) {
	defer close(p.ended)
	// The gauge is the sum over all actors; the next owner adds these users to its own.
	defer func() { p.node.users.Add(-int64(len(p.users))) }()

	// arm sets the timer before anything waits for it.
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()

	for {
		// checkReports may make the partition complete, and flush then writes that. sendDue is called here too: no mail
		// comes for a reply whose batch is in the store already.
		p.checkReports()
		p.flush()
		p.sendDue()
		p.arm(timer)

		select {
		case <-ctx.Done():
			return
		case <-timer.C:
			p.alarm = 0 // so that arm resets the timer even if the clock has not reached the alarm
			// The wait may have been long, and whether expire may end a loaded user depends on the reports.
			p.checkReports()
			p.wheel.due(p.now(), p.expire)
			p.askGateways()
		case m := <-p.mail:
			m.deliver(p)
			for range len(p.mail) { // mail that arrived together is written together
				m = <-p.mail
				m.deliver(p)
			}
		}
	}
}

// ask delivers a question. It blocks while the mailbox is full. Its error is presence.ErrNotOwner if the actor has
// ended, or ctx's error.
func (p *partition) ask(ctx context.Context, m mail) error {
	select {
	case p.mail <- m:
		return nil
	case <-p.ended:
		return presence.ErrNotOwner
	case <-ctx.Done():
		return ctx.Err()
	}
}

// await returns the answer to a question. Its errors are those of partition.ask.
func await[T any](ctx context.Context, p *partition, answer <-chan T) (a T, err error) {
	select {
	case a = <-answer:
		return a, nil
	case <-p.ended:
		return a, presence.ErrNotOwner
	case <-ctx.Done():
		return a, ctx.Err()
	}
}

// post delivers mail that must not be lost. It blocks while the mailbox is full, and
// gives up only when the actor has ended.
func (p *partition) post(m mail) {
	select {
	case p.mail <- m:
	case <-p.ended:
	}
}

// arm sets the timer to the wheel's next deadline or to the time of the next question to
// the gateways, whichever is earlier.
func (p *partition) arm(timer *time.Timer) {
	at, ok := p.wheel.next()
	if !ok {
		at = 0
	}

	// When everybody has reported, loaded users only wait for their deadlines, which the wheel has.
	waits := p.needsReports() && !(p.takeover.complete && p.takeover.reported)
	if waits && (at == 0 || p.takeover.nextAsk < at) {
		at = p.takeover.nextAsk
	}

	if at == p.alarm {
		return
	}

	p.alarm = at

	if at == 0 || p.node.clock.stopped() { // the timer would end again and again, before its time
		timer.Stop()
		return
	}

	timer.Reset(max(at-p.now(), 0))
}

// flush queues the outbox for the writer, unless the writer has it already.
func (p *partition) flush() {
	p.out.mu.Lock()

	// Node.Check calls flush as well. The state changes under the lock, so that only one of the two queues the outbox.
	ready := p.out.state == idle && !p.out.blocked && !p.out.emptyLocked()

	if ready {
		p.out.state = queued
	}

	p.out.mu.Unlock()

	if ready {
		p.node.ready <- p // never blocks: the channel has room for every partition, and each is in it once
	}
}

// pendingReply is a reply that waits until a batch of the outbox is in the store. It is either the acknowledgement of a
// gateway's stream or the answer to a request.
type pendingReply struct {
	batch uint64

	from   *source // nil for a request
	stream uint64
	acked  uint64
	pages  []*page

	answer chan<- error    // nil for an acknowledgement
	ctx    context.Context // of the caller who waits for answer
}

// abandoned reports whether nobody waits for the reply any more. The gateway of an acknowledgement always does.
func (r *pendingReply) abandoned() bool { return r.answer != nil && r.ctx.Err() != nil }

// relied reports whether the receiver relies on the reply: a join is answered with counts that include its user, and a
// hold with status 200. If a gateway misses the acknowledgement of a leave, nothing is lost: it repeats the leave to
// the next owner.
func (r *pendingReply) relied() bool { return r.answer != nil || len(r.pages) > 0 }

// queueReply arranges for r to be sent once every change applied so far is in the store, and the actor has the counts
// after it.
//
// If the outbox is empty, nothing has changed: the user was here already, as far as this actor knows. But another node
// may own the partition in the meantime and have removed the user, for instance while this process was suspended. So a
// reply on which its receiver relies waits until the store has accepted this node's claim once more. Any other reply
// waits for the previous batch, which may be in flight, or written with its counts still in the mailbox.
func (p *partition) queueReply(r pendingReply) {
	p.out.mu.Lock()
	p.out.check = p.out.check || r.relied()
	r.batch = p.out.batch
	if p.out.emptyLocked() {
		r.batch--
	}
	p.out.mu.Unlock()

	p.pending = append(p.pending, r)
}

// sendDue sends the replies whose batch is done.
func (p *partition) sendDue() {
	rest := p.pending[:0]
	for _, r := range p.pending {
		switch {
		case r.abandoned(): // while the partition cannot be written, callers give up and others come
		case r.batch > p.done:
			rest = append(rest, r)
		case r.answer != nil:
			r.answer <- nil
		case r.from.stream == r.stream: // otherwise the gateway has begun a new stream meanwhile
			r.from.acked = max(r.from.acked, r.acked)

			reply := &heartbeat.Reply{Partition: p.id, Stream: r.stream}
			r.from.acknowledge(reply, r.pages)
			p.node.cfg.Reply.SendReply(r.from.Gateway, reply)
		}
	}

	// The elements behind rest would keep old sources and pages in memory.
	clear(p.pending[len(rest):])
	p.pending = rest
}

// stored records the counts of a batch that is in the store, and sends the replies that
// waited for the batch.
func (p *partition) stored(st *stored) {
	for _, c := range st.counts {
		if pg := p.pages[c.Page]; pg != nil && !pg.latest.Newer(c) {
			pg.latest = c
		}
	}

	marks.Must(st.batch > p.done, "changes of a partition are stored in their order")
	// The counts had to be recorded before, because the acknowledgements of joins carry them.
	p.done = st.batch
	p.sendDue()

	// The store has the 0 of these empty pages, unless the outbox has a newer count.
	for _, c := range st.counts {
		pg := p.pages[c.Page]
		if pg == nil || pg == p.site || pg.users > 0 {
			continue
		}

		p.out.mu.Lock()
		_, dirty := p.out.counts[pg.name]
		p.out.mu.Unlock()

		if !dirty {
			delete(p.pages, pg.name)
		}
	}
}

// latest returns the last stored counts of pages.
func latest(pages []*page) []presence.Count {
	var counts []presence.Count
	for _, pg := range pages {
		if pg.latest.Page != "" {
			counts = append(counts, pg.latest)
		}
	}

	return counts
}
