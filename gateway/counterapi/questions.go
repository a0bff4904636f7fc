package counterapi

import (
	"context"
	"errors"
	"net/netip"
	"sync"
	"time"

	"github.com/gin-gonic/gin"
	"github.com/hashicorp/golang-lru/v2/simplelru"

	"headcount/counter"
	"headcount/gateway/httppolicy"
)

const (
	maxAnswers   = 1 << 10              // answers about counters that are kept, of 12 KB at most
	maxWaiting   = 64                   // public questions that wait; a further one is 429
	maxOfAddress = 16                   // public questions of one address under way; a further one is 429
	maxPaced     = 128                  // answers to one address that wait to be written; a further one is 429
	turnWait     = 4 * time.Second      // longest wait of a public question; then it is 429
	pauses       = 3                    // the pause after a computation, in durations of that computation
	maxPause     = turnWait / 8         // the longest pause; the next question still has its turn in time
	staleKept    = time.Second          // how long an answer is kept in which a region is missing
	perPoint     = 2 * time.Microsecond // time to write one point of an answer, see pace
)

// ErrTurn says that too many public questions are being answered.
var ErrTurn = errors.New("too many questions about history")

// Answered is the answer to an expensive question.
type Answered interface {
	Points() int   // it is as long as so many points
	Lacking() bool // a region is missing in it
}

// question is an expensive question about history. Equal questions have one answer.
type question struct {
	of  string // the name of a counter or, for a top list, the match of a rule
	q   counter.Question
	top int // length of a top list; otherwise 0
}

// outcome is the answer to a question.
type outcome struct {
	is  counter.Counter
	all counter.Answer
	top []counter.Gained
}

// Points implements Answered.
func (o outcome) Points() int { return len(o.all.Values) }

// Lacking implements Answered.
func (o outcome) Lacking() bool { return o.is.Stale }

// Questions answers questions about history. Concurrent equal questions share one computation, whose answer is kept for
// as long as it may be stale.
//
// The computations of public questions run one at a time, each followed by a pause of three times its duration, at
// most half a second. So they take about a quarter of a core, whatever is asked. Addresses take turns; questions that
// share a computation have no part in that. The answers are not all written at once, see pace.
//
// A caller with an API key never waits for public questions. It shares a computation under way, but never gets a kept
// answer, since it may just have changed the counter.
type Questions[Q comparable, A Answered] struct {
	turn      chan struct{} // holds one during the computation of a public question and the pause after it
	addresses *httppolicy.AddressSlots
	paced     *httppolicy.AddressSlots // of the answers that wait in pace

	mu      sync.Mutex // guards all below, and began of every computation
	kept    *simplelru.LRU[Q, *computation[A]]
	waiting int       // public questions
	free    time.Time // when the next public answer may be written
}

// Asker is who asks: a server with an API key, or a visitor.
type Asker struct {
	Server bool
	Addr   netip.Addr // of a visitor
}

// computation is the computation of an answer.
type computation[A Answered] struct {
	began time.Time     // zero: it has not begun
	done  chan struct{} // closed when out and err are final
	out   A
	err   error
}

// NewQuestions returns Questions that keep so many answers. Beyond that the one not asked for longest is dropped.
func NewQuestions[Q comparable, A Answered](answers int) *Questions[Q, A] {
	kept, _ := simplelru.NewLRU[Q, *computation[A]](answers, nil) // fails only for a size under 1

	return &Questions[Q, A]{
		turn:      make(chan struct{}, 1),
		kept:      kept,
		addresses: httppolicy.NewAddressSlots(maxOfAddress),
		paced:     httppolicy.NewAddressSlots(maxPaced),
	}
}

// Ask returns the answer to q, which is at most stale old. Its error is ErrTurn, that of compute or of ctx.
func (s *Questions[Q, A]) Ask(
	ctx context.Context, q Q, stale time.Duration, by Asker, compute func(context.Context) (A, error),
) (A, error) {
	asked := asking[Q, A]{q, stale, by, compute}
	out, err := s.find(ctx, asked, true)
	if err == nil && !by.Server {
		err = s.pace(ctx, by.Addr, out.Points())
	}

	return out, err
}

// asking is a call of Ask.
type asking[Q comparable, A Answered] struct {
	q       Q
	stale   time.Duration
	by      Asker
	compute func(context.Context) (A, error)
}

// pace waits until an answer of so many points may be written to an address. Otherwise a hundred callers that
// wait for the same answer of thousands of points would write it at once, and delay every other call. No
// address can fill the queue.
func (s *Questions[Q, A]) pace(ctx context.Context, addr netip.Addr, points int) error {
	slot, ok := s.paced.Enter(addr)
	if !ok {
		return ErrTurn
	}
	defer slot.Leave()

	wait := s.queue(points)
	switch {
	case wait > turnWait:
		return ErrTurn
	case wait == 0:
		return nil
	}

	select {
	case <-time.After(wait):
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// queue queues an answer of so many points, and returns how long it has to wait. One that would wait longer than
// turnWait is not queued.
func (s *Questions[Q, A]) queue(points int) time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()

	now := time.Now()
	wait := max(0, s.free.Sub(now))
	if wait <= turnWait {
		s.free = now.Add(wait + time.Duration(points)*perPoint)
	}

	return wait
}

// find returns the answer as Ask does. If who asked first gives up, it asks again when again is set, so nobody waits
// more than twice.
func (s *Questions[Q, A]) find(ctx context.Context, asked asking[Q, A], again bool) (none A, _ error) {
	s.mu.Lock()
	is, known := s.kept.Get(asked.q)
	if known && is.servesLocked(asked.stale, asked.by.Server) {
		s.mu.Unlock()
		return s.share(ctx, is, asked, again)
	}

	// Nobody has the answer, so this caller computes it.
	is = &computation[A]{done: make(chan struct{}), err: errors.New("the computation was aborted")}
	var slot *httppolicy.AddressSlot // nil for a server
	if asked.by.Server {
		is.began = time.Now()
	} else {
		fits := false
		slot, fits = s.addresses.Enter(asked.by.Addr)
		if !fits {
			s.mu.Unlock()
			return none, ErrTurn
		}
	}
	defer slot.Leave()
	s.kept.Add(asked.q, is)
	s.mu.Unlock()
	defer s.end(asked.q, is)

	if !asked.by.Server {
		is.err = s.enter(is, slot.Turn())
		if is.err != nil {
			return none, is.err
		}
		defer s.leave(is)
	}

	// Other requests may wait for it, so it must outlive this one.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), patience)
	defer cancel()
	is.out, is.err = asked.compute(ctx)

	return is.out, is.err
}

// share waits for a computation that somebody else has begun.
func (s *Questions[Q, A]) share(
	ctx context.Context, is *computation[A], asked asking[Q, A], again bool,
) (none A, _ error) {
	select {
	case <-is.done:
	case <-ctx.Done():
		return none, context.Cause(ctx)
	}

	// The address that asked first had no turn; this one has a turn of its own.
	if again && errors.Is(is.err, ErrTurn) {
		return s.find(ctx, asked, false)
	}

	return is.out, is.err
}

// servesLocked reports whether a question that comes now may share c. The caller holds mu.
func (c *computation[A]) servesLocked(stale time.Duration, server bool) bool {
	select {
	case <-c.done:
		if c.out.Lacking() {
			stale = min(stale, staleKept)
		}
		return !server && time.Since(c.began) < stale
	default:
	}

	// A server does not wait for the turn of a visitor.
	if c.began.IsZero() {
		return !server
	}

	return time.Since(c.began) < stale
}

// end publishes the answer, and keeps it unless it is an error.
func (s *Questions[Q, A]) end(q Q, is *computation[A]) {
	s.mu.Lock()
	defer s.mu.Unlock()

	now, kept := s.kept.Peek(q)
	if kept && now == is && is.err != nil {
		s.kept.Remove(q)
	}
	close(is.done)
}

// enter waits for the turn of a public question. Of the questions of an address, only the one that has the address's
// own turn waits beside those of others, so an address with many questions holds up nobody else.
func (s *Questions[Q, A]) enter(is *computation[A], own chan struct{}) error {
	if !s.beginToWait() {
		return ErrTurn
	}
	err := s.await(own)

	s.mu.Lock()
	defer s.mu.Unlock()
	s.waiting--
	if err == nil {
		is.began = time.Now()
	}

	return err
}

// beginToWait counts a question that waits, or returns false if too many do.
func (s *Questions[Q, A]) beginToWait() bool {
	s.mu.Lock()
	defer s.mu.Unlock()

	if s.waiting >= maxWaiting {
		return false
	}
	s.waiting++

	return true
}

// await takes the turn, for which it waits in the address's own turn.
func (s *Questions[Q, A]) await(own chan struct{}) error {
	wait := time.NewTimer(turnWait)
	defer wait.Stop()

	select {
	case own <- struct{}{}:
		defer func() { <-own }()
	case <-wait.C:
		return ErrTurn
	}

	select {
	case s.turn <- struct{}{}:
		return nil
	case <-wait.C:
		return ErrTurn
	}
}

// leave ends the turn of a public question, after the pause.
func (s *Questions[Q, A]) leave(is *computation[A]) {
	time.AfterFunc(min(pauses*time.Since(is.began), maxPause), func() { <-s.turn })
}

// asker returns who sent the request; server says whether it has an API key.
func (a *API) asker(c *gin.Context, server bool) Asker {
	return Asker{Server: server, Addr: a.callers.Addr(c.Request)}
}
