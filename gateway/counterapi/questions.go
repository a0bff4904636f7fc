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
	"headcount/gateway/bounds"
)

const (
	maxAnswers = 1 << 10              // cached answers about counters, of 12 KB at most
	turnWait   = 4 * time.Second      // maximum wait of a public question; after that it is refused with 429
	pauses     = 3                    // the pause after a computation, as a multiple of its duration
	maxPause   = turnWait / 8         // short enough for the next question to have its turn in time
	staleKept  = time.Second          // how long an answer is cached in which a region's part is missing
	perPoint   = 2 * time.Microsecond // estimated time to write one point of an answer, see pace
)

// ErrTurn means that too many public questions are being answered.
var ErrTurn = errors.New("too many questions about history")

// Answered is the answer to an expensive question.
type Answered interface {
	Points() int   // size of the answer, in points
	Lacking() bool // a region's part is missing
}

// question is an expensive question about history. Equal questions share one answer.
type question struct {
	of  string // name of a counter or, for a top list, the match of a rule
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

// Questions answers questions about history. Concurrent equal questions share one computation, and its answer is cached
// for as long as it may be stale.
//
// The computations of public questions run one at a time, each followed by a pause of three times its duration, but at
// most half a second. So they take about a quarter of a core, whatever is asked. Addresses take turns; questions that
// share a computation need no turn. The answers are not all written at once, see pace.
//
// A caller with an API key never waits for public questions. It shares a computation in progress, but never gets a
// cached answer, since it may just have changed the counter.
type Questions[Q comparable, A Answered] struct {
	turn      bounds.Turn   // of a public question, for its computation and the pause after it
	waiting   chan struct{} // has an element for each public question that waits for its turn
	addresses *bounds.Slots
	paced     *bounds.Slots // counts the answers that wait in pace

	mu   sync.Mutex // guards the fields below, and began of every computation
	kept *simplelru.LRU[Q, *computation[A]]
	free time.Time // when the next public answer may be written
}

// Asker identifies the caller: a server with an API key, or a visitor.
type Asker struct {
	Server bool
	Addr   netip.Addr // of a visitor
}

// computation is the computation of an answer.
type computation[A Answered] struct {
	began time.Time     // zero: it waits for its turn
	done  chan struct{} // closed when out and err are final
	out   A
	err   error
}

// NewQuestions returns Questions that cache up to the given number of answers. Beyond it the least recently used one is
// dropped.
func NewQuestions[Q comparable, A Answered](answers int) *Questions[Q, A] {
	kept, _ := simplelru.NewLRU[Q, *computation[A]](answers, nil) // fails only for a size below 1

	return &Questions[Q, A]{
		turn:      bounds.NewTurn(bounds.Questions.Max),
		waiting:   make(chan struct{}, bounds.QuestionsWaiting.Max),
		kept:      kept,
		addresses: bounds.NewSlots(bounds.QuestionsOfAddress.Max),
		paced:     bounds.NewSlots(bounds.AnswersOfAddress.Max),
	}
}

// Ask returns an answer to q that is at most maxAge old. Its error is ErrTurn, or that of compute or of ctx.
func (s *Questions[Q, A]) Ask(
	ctx context.Context, q Q, maxAge time.Duration, by Asker, compute func(context.Context) (A, error),
) (A, error) {
	asked := asking[Q, A]{q, maxAge, by, compute}
	out, err := s.find(ctx, asked, true)
	if err == nil && !by.Server {
		err = s.pace(ctx, by.Addr, out.Points())
	}

	return out, err
}

// asking is a call of Ask.
type asking[Q comparable, A Answered] struct {
	q       Q
	maxAge  time.Duration
	by      Asker
	compute func(context.Context) (A, error)
}

// pace waits until an answer with the given number of points may be written to an address. Otherwise a hundred callers
// that wait for the same answer of thousands of points would all write it at the same moment, and delay every other
// call. No address can fill the queue alone.
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

// queue queues an answer with the given number of points, and returns how long it has to wait. If that exceeds
// turnWait, the answer is not queued.
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

// find does the work of Ask. If the caller that began the computation got no turn, find asks once more if again is set,
// so no caller waits more than twice.
func (s *Questions[Q, A]) find(ctx context.Context, asked asking[Q, A], again bool) (none A, _ error) {
	s.mu.Lock()
	is, known := s.kept.Get(asked.q)
	if known && is.servesLocked(asked.maxAge, asked.by.Server) {
		s.mu.Unlock()
		return s.share(ctx, is, asked, again)
	}

	// No answer is cached or in progress, so this caller computes it.
	// The error stays if compute panics.
	is = &computation[A]{done: make(chan struct{}), err: errors.New("the computation was aborted")}
	var slot *bounds.Slot // nil for a server
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
	// From here on equal questions wait for this one.
	s.kept.Add(asked.q, is)
	s.mu.Unlock()
	defer s.end(asked.q, is)

	if !asked.by.Server {
		var end func()
		end, is.err = s.enter(is, slot)
		if is.err != nil {
			return none, is.err
		}
		defer s.leave(is, end)
	}

	// Other requests may be waiting for the answer, so the computation must outlive this one.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), patience)
	defer cancel()
	is.out, is.err = asked.compute(ctx)

	return is.out, is.err
}

// share waits for a computation that another caller has begun.
func (s *Questions[Q, A]) share(
	ctx context.Context, is *computation[A], asked asking[Q, A], again bool,
) (none A, _ error) {
	select {
	case <-is.done:
	case <-ctx.Done():
		return none, context.Cause(ctx)
	}

	// The address that asked first got no turn; this caller's address may get one.
	if again && errors.Is(is.err, ErrTurn) {
		return s.find(ctx, asked, false)
	}

	return is.out, is.err
}

// servesLocked reports whether a question that arrives now may share c.
func (c *computation[A]) servesLocked(maxAge time.Duration, server bool) bool {
	select {
	case <-c.done:
		if c.out.Lacking() {
			maxAge = min(maxAge, staleKept)
		}
		return !server && time.Since(c.began) < maxAge
	default:
	}

	// A server does not wait for a visitor's turn.
	if c.began.IsZero() {
		return !server
	}

	return time.Since(c.began) < maxAge
}

// end publishes the answer, and caches it unless it is an error.
func (s *Questions[Q, A]) end(q Q, is *computation[A]) {
	s.mu.Lock()
	defer s.mu.Unlock()

	// A server's computation may have replaced this one meanwhile.
	now, kept := s.kept.Peek(q)
	if kept && now == is && is.err != nil {
		s.kept.Remove(q)
	}
	close(is.done)
}

// enter waits for the turn of a public question, which lasts until end is called. The request may end meanwhile, but
// others may share the answer.
func (s *Questions[Q, A]) enter(is *computation[A], slot *bounds.Slot) (end func(), err error) {
	select {
	case s.waiting <- struct{}{}:
		defer func() { <-s.waiting }()
	default:
		return nil, ErrTurn
	}

	ctx, cancel := context.WithTimeout(context.Background(), turnWait)
	defer cancel()
	end, err = s.turn.Wait(ctx, slot)
	if err != nil {
		return nil, ErrTurn
	}

	// The time of waiting is no part of the answer's age.
	s.mu.Lock()
	defer s.mu.Unlock()
	is.began = time.Now()

	return end, nil
}

// leave ends the turn of a public question after the pause.
func (s *Questions[Q, A]) leave(is *computation[A], end func()) {
	// The answer is not held back by the pause: only the next question is.
	time.AfterFunc(min(pauses*time.Since(is.began), maxPause), end)
}

// asker returns the Asker of the request; server says whether it has an API key.
func (a *API) asker(c *gin.Context, server bool) Asker {
	return Asker{Server: server, Addr: a.callers.Addr(c.Request)}
}
