package gateway

import (
	"context"
	"errors"
	"slices"
	"sync/atomic"
	"time"

	"headcount/presence"
	"headcount/presence/heartbeat"
)

const (
	repeatTick  = 25 * time.Millisecond // precision of repetitions
	leastRounds = 4                     // rounds of heartbeats in an interval
	roundUsers  = 5000                  // users in one of more rounds, about
)

// roster is the ground truth of the users connected to this gateway, by user and page. It reports them to the
// owners of the partitions: joins and leaves at once, repeated until they are acknowledged, and the users that
// are still connected in a heartbeat at every interval.
//
// The users of one partition share a stream with a lock of its own; run is the one goroutine that sends.
type roster struct {
	source   heartbeat.Source
	interval time.Duration
	grace    time.Duration
	beats    Beats
	counts   acknowledged
	streams  []partitionStream
	kick     chan *partitionStream // streams with something new to send; has room for all, each in it at most once

	joinWait observer     // observes the seconds that joins wait for the store; may be nil
	repeated atomic.Int64 // joins and leaves sent again because no acknowledgement arrived
}

var errTooManyPages = errors.New("the user is on too many pages")

// observer takes measurements. A prometheus.Observer is one.
type observer interface{ Observe(float64) }

// Beats carries beats to the owners of their partitions. SendBeat must not block,
// and may lose a beat.
type Beats interface{ SendBeat(b *heartbeat.Beat) }

// acknowledged receives the counts in acknowledgements.
type acknowledged interface{ Acknowledged(u presence.Update) }

// joiner is a connection that has joined a page. arrived is called when the store
// has the join, without the roster's locks.
type joiner interface{ arrived(page string) }

// waiter is a joiner that waits for the store.
type waiter struct {
	joiner
	since time.Time
}

func newRoster(
	source heartbeat.Source, partitions int, interval, grace time.Duration, beats Beats, counts acknowledged,
) *roster {
	r := &roster{
		source:   source,
		interval: interval,
		grace:    grace,
		beats:    beats,
		counts:   counts,
		streams:  make([]partitionStream, partitions),
		kick:     make(chan *partitionStream, partitions),
	}

	for i := range r.streams {
		s := &r.streams[i]
		s.partition = i
		s.users = map[presence.User]*userEntry{}
		s.first = 1
		s.kick = r.kick

		// Streams of an earlier incarnation have lower numbers, so their late answers are ignored.
		s.number = max(source.Incarnation, 1)
	}

	return r
}

func (r *roster) streamOf(u presence.User) *partitionStream {
	return &r.streams[u.Partition(len(r.streams))]
}

// join records that a connection of the user has joined the page. c.arrived is called when the store has the user on
// the page. join returns errTooManyPages, and records nothing, when the user is on maxUserPages other pages.
func (r *roster) join(u presence.User, page string, c joiner) error {
	s := r.streamOf(u)
	s.mu.Lock()
	defer s.mu.Unlock()

	e := s.findOrAddLocked(u, page)
	if e == nil {
		return errTooManyPages
	}

	e.live++
	s.alive = nil

	// A join within the grace is a lost connection that has come back. After the grace none is expected any more.
	if e.lost > 0 && time.Now().Before(e.until) {
		e.lost--
	} else {
		e.lost = 0
	}

	s.awaitLocked(e, c)

	return nil
}

// confirm is join for a connection that is on the page already.
func (r *roster) confirm(u presence.User, page string, c joiner) {
	s := r.streamOf(u)
	s.mu.Lock()
	defer s.mu.Unlock()

	e := s.findLocked(u, page)
	if e != nil && !e.awaited(c) {
		s.awaitLocked(e, c)
	}
}

// awaitLocked has c wait until the owner says that the store has e. The owner is asked although it may have said so to
// another connection: it may have been cut off from this gateway since, and have let the user time out.
func (s *partitionStream) awaitLocked(e *presenceEntry, c joiner) {
	e.waiters = append(e.waiters, waiter{c, time.Now()})
	s.enqueueLocked(e)
}

// leave records that a connection has left the page. If lost, the connection ended without a leave, and the
// user stays for the grace.
func (r *roster) leave(u presence.User, page string, c joiner, lost bool) {
	s := r.streamOf(u)
	s.mu.Lock()
	defer s.mu.Unlock()

	e := s.findLocked(u, page)
	if e == nil || e.live == 0 {
		return
	}

	e.live--
	s.alive = nil
	e.waiters = slices.DeleteFunc(e.waiters, func(w waiter) bool { return w.joiner == c })

	if lost && r.grace > 0 {
		e.beginGrace(time.Now(), r.grace)
	}

	if e.live > 0 {
		return
	}

	// The join was never sent, so neither join nor leave need be. The entry may have been the last marked one of the
	// queue: flush can then announce the stream as whole.
	if e.lastOp == 0 {
		s.queue.withdraw(e)
		s.forgetLocked(e)
		s.wakeLocked()
		return
	}

	s.enqueueLocked(e)
}

// waits reports whether a connection that has joined the page waits for the store.
func (r *roster) waits(u presence.User, page string, c joiner) bool {
	s := r.streamOf(u)
	s.mu.Lock()
	defer s.mu.Unlock()

	e := s.findLocked(u, page)
	return e != nil && e.awaited(c)
}

// movedTo reports all users of a partition to its new owner, in a new stream. If the new owner owned the
// partition before, the new stream shows that it has missed ops.
func (r *roster) movedTo(partition int) {
	s := &r.streams[partition]
	s.mu.Lock()
	defer s.mu.Unlock()
	s.restartLocked()
}

// run sends until ctx ends. Each stream sends its heartbeats once in an interval. Those of few users go in four
// rounds, since what costs a quiet process most is to wake up, and the owners' deadlines then pass together,
// too. Those of many users go in more rounds, so that neither buffers nor CPUs meet a burst.
func (r *roster) run(ctx context.Context) {
	rounds := leastRounds // in this interval
	over := 0             // rounds of this interval that are over
	users := 0            // users in the heartbeats of these rounds

	round := time.NewTicker(r.interval / leastRounds)
	defer round.Stop()

	repeat := time.NewTicker(repeatTick)
	defer repeat.Stop()
	repeats := true // repeat runs while a stream waits for acknowledgements; only flush makes one wait

	for {
		select {
		case <-ctx.Done():
			return

		case s := <-r.kick:
			r.flush(s)
			if !repeats {
				repeats = true
				repeat.Reset(repeatTick)
			}

		case now := <-repeat.C:
			repeats = r.resendAll(now)
			if !repeats {
				repeat.Stop()
			}

		case <-round.C:
			for i := over * len(r.streams) / rounds; i < (over+1)*len(r.streams)/rounds; i++ {
				users += r.sendAlive(&r.streams[i])
			}

			// The users of this interval decide how many rounds the next one has.
			over++
			if over == rounds {
				rounds = min(max(users/roundUsers, leastRounds), len(r.streams))
				round.Reset(r.interval / time.Duration(rounds))
				over = 0
				users = 0
			}
		}
	}
}

// receive handles a node's reply. Any goroutine may call it; it does not block.
func (r *roster) receive(a *heartbeat.Reply) {
	if a.Partition < 0 || a.Partition >= len(r.streams) {
		return
	}

	// The counts come first: arrived delivers them.
	for _, c := range a.Counts {
		r.counts.Acknowledged(c.Update())
	}

	s := &r.streams[a.Partition]
	for _, ar := range s.receive(a) {
		if r.joinWait != nil {
			r.joinWait.Observe(time.Since(ar.since).Seconds())
		}

		ar.arrived(ar.page)
	}
}
