// Package roster tracks the users that are connected to this gateway and the pages they are on, and reports them to the
// owners of the partitions.
package roster

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

// Config configures a Roster.
type Config struct {
	Source     heartbeat.Source // this gateway, as it names itself in its beats
	Partitions int
	Interval   time.Duration // between two heartbeats of a user
	Grace      time.Duration // how long a user stays after a connection that ended without a leave
	Beats      Beats
	Counts     Counts
	JoinWait   Observer // observes the seconds that joins wait for the store; may be nil
}

// Roster is the ground truth of the users connected to this gateway, by user and page. It reports them to the
// owners of the partitions: joins and leaves at once, repeated until they are acknowledged, and the users that
// are still connected in a heartbeat at every interval.
//
// The users of one partition share a stream with a lock of its own; Run is the one goroutine that sends. All
// other methods are for any goroutine, and do not block.
type Roster struct {
	cfg      Config
	streams  []stream
	kick     chan *stream // streams with something new to send; has room for all, each in it at most once
	repeated atomic.Int64 // see Repeated
}

// ErrTooManyPages says that a user is on MaxUserPages other pages.
var ErrTooManyPages = errors.New("the user is on too many pages")

// Observer takes measurements. A prometheus.Observer is one.
type Observer interface{ Observe(float64) }

// Beats carries beats to the owners of their partitions. SendBeat must not block,
// and may lose a beat.
type Beats interface{ SendBeat(b *heartbeat.Beat) }

// Counts receives the counts in acknowledgements.
type Counts interface{ Acknowledged(u presence.Update) }

// Joiner is a connection that has joined a page. Arrived is called when the store
// has the join, without the roster's locks.
type Joiner interface{ Arrived(page string) }

// waiter is a Joiner that waits for the store.
type waiter struct {
	Joiner
	since time.Time
}

// New returns a Roster without users. Its beats are sent while Run runs.
func New(cfg Config) *Roster {
	r := &Roster{
		cfg:     cfg,
		streams: make([]stream, cfg.Partitions),
		kick:    make(chan *stream, cfg.Partitions),
	}

	for i := range r.streams {
		s := &r.streams[i]
		s.partition = i
		s.users = map[presence.User]*userEntry{}
		s.first = 1
		s.kick = r.kick

		// Streams of an earlier incarnation have lower numbers, so their late answers are ignored.
		s.number = max(cfg.Source.Incarnation, 1)
	}

	return r
}

func (r *Roster) streamOf(u presence.User) *stream {
	return &r.streams[u.Partition(len(r.streams))]
}

// Join records that a connection of the user has joined the page. c.Arrived is called when the store has the user on
// the page. Join returns ErrTooManyPages, and records nothing, when the user is on MaxUserPages other pages.
func (r *Roster) Join(u presence.User, page string, c Joiner) error {
	s := r.streamOf(u)
	s.mu.Lock()
	defer s.mu.Unlock()

	e := s.findOrAddLocked(u, page)
	if e == nil {
		return ErrTooManyPages
	}

	e.live++
	// The list for heartbeats is built again when it is needed.
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

// Confirm is Join for a connection that is on the page already.
func (r *Roster) Confirm(u presence.User, page string, c Joiner) {
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
func (s *stream) awaitLocked(e *presenceEntry, c Joiner) {
	e.waiters = append(e.waiters, waiter{c, time.Now()})
	s.enqueueLocked(e)
}

// Leave records that a connection has left the page. If lost, the connection ended without a leave, and the
// user stays for the grace.
func (r *Roster) Leave(u presence.User, page string, c Joiner, lost bool) {
	s := r.streamOf(u)
	s.mu.Lock()
	defer s.mu.Unlock()

	e := s.findLocked(u, page)
	if e == nil || e.live == 0 {
		return
	}

	e.live--
	s.alive = nil
	// Nobody waits for this join any more.
	e.waiters = slices.DeleteFunc(e.waiters, func(w waiter) bool { return w.Joiner == c })

	if lost && r.cfg.Grace > 0 {
		e.beginGrace(time.Now(), r.cfg.Grace)
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

// Waits reports whether a connection that has joined the page waits for the store.
func (r *Roster) Waits(u presence.User, page string, c Joiner) bool {
	s := r.streamOf(u)
	s.mu.Lock()
	defer s.mu.Unlock()

	e := s.findLocked(u, page)
	return e != nil && e.awaited(c)
}

// Has reports whether a connection of the user is on a page.
func (r *Roster) Has(u presence.User) bool {
	s := r.streamOf(u)
	s.mu.Lock()
	defer s.mu.Unlock()

	user := s.users[u]

	return user != nil && slices.ContainsFunc(user.entries, func(e *presenceEntry) bool { return e.live > 0 })
}

// MovedTo reports all users of a partition to its new owner, in a new stream. If the new owner owned the
// partition before, the new stream shows that it has missed ops.
func (r *Roster) MovedTo(partition int) {
	s := &r.streams[partition]
	s.mu.Lock()
	defer s.mu.Unlock()
	s.restartLocked()
}

// Run sends until ctx ends. Each stream sends its heartbeats once in an interval. Those of few users go in four
// rounds, since what costs a quiet process most is to wake up, and the owners' deadlines then pass together,
// too. Those of many users go in more rounds, so that neither buffers nor CPUs meet a burst.
func (r *Roster) Run(ctx context.Context) {
	rounds := leastRounds // in this interval
	over := 0             // rounds of this interval that are over
	users := 0            // users in the heartbeats of these rounds

	round := time.NewTicker(r.cfg.Interval / leastRounds)
	defer round.Stop()

	repeat := time.NewTicker(repeatTick)
	defer repeat.Stop()
	// The timer runs while a stream waits for acknowledgements; only flush makes one wait.
	repeats := true

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
				// A quiet process is not woken for nothing.
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
				round.Reset(r.cfg.Interval / time.Duration(rounds))
				over = 0
				users = 0
			}
		}
	}
}

// Receive handles a node's reply. Any goroutine may call it; it does not block.
func (r *Roster) Receive(a *heartbeat.Reply) {
	// The number comes from a datagram, and is an index.
	if a.Partition < 0 || a.Partition >= len(r.streams) {
		return
	}

	// The counts come first: Arrived delivers them.
	for _, c := range a.Counts {
		r.cfg.Counts.Acknowledged(c.Update())
	}

	s := &r.streams[a.Partition]
	for _, ar := range s.receive(a) {
		if r.cfg.JoinWait != nil {
			r.cfg.JoinWait.Observe(time.Since(ar.since).Seconds())
		}

		ar.Arrived(ar.page)
	}
}

// Repeated returns how many joins and leaves were sent again because no acknowledgement arrived.
func (r *Roster) Repeated() int64 { return r.repeated.Load() }

// Idle reports whether no user is present, and none is remembered.
func (r *Roster) Idle() bool {
	for i := range r.streams {
		if !r.streams[i].idle() {
			return false
		}
	}

	return true
}
