package counterapi

import (
	"context"
	"errors"
	"net/http"
	"net/netip"
	"sync"
	"time"

	"github.com/gin-gonic/gin"
	"github.com/hashicorp/golang-lru/v2/simplelru"

	"headcount/counter"
	"headcount/gateway/httppolicy"
)

const (
	maxAnswers   = 1 << 10         // answers kept, of 12 KB at most; beyond that the one not asked for longest is dropped
	maxWaiting   = 64              // public questions that wait; a further one is 429
	maxOfAddress = 3               // public questions of one address that wait or are computed; a further one is 429
	turnWait     = 4 * time.Second // longest wait of a public question; then it is 429
	pauses       = 3               // the pause after a computation, in durations of that computation
	// The longest pause. So who waits for one computation and all questions of another address gets the turn in time, if
	// each takes half a second.
	maxPause  = turnWait / (2 * (1 + maxOfAddress))
	staleKept = time.Second          // how long an answer is kept in which a region is missing
	perPoint  = 2 * time.Microsecond // time to write one point of an answer, see pace
)

// errTurn says that too many public questions are being answered.
var errTurn = errors.New("too many questions about history")

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

// questions answers questions about history. Concurrent equal questions share one computation, whose answer is kept for
// the stale of the rule.
//
// The computations of public questions run one at a time, each followed by a pause of three times its duration, at most
// half a second. So they take about a quarter of a core, whatever is asked. One address has few of them at a time, so others
// get their turn; questions that share a computation do not count. The answers are not all written at once, see pace.
//
// A caller with an API key never waits for public questions. It shares a computation under way, but never gets a kept
// answer, since it may just have changed the counter.
type questions struct {
	turn      chan struct{} // holds one during the computation of a public question and the pause after it
	addresses *httppolicy.AddressSlots

	mu      sync.Mutex // guards all below, and began of every computation
	kept    *simplelru.LRU[question, *computation]
	waiting int       // public questions
	free    time.Time // when the next public answer may be written
}

// asker is who asks: a server with an API key, or a visitor.
type asker struct {
	server bool
	addr   netip.Addr // of a visitor
}

// computation is the computation of an answer.
type computation struct {
	began time.Time     // zero: it has not begun
	done  chan struct{} // closed when out and err are final
	out   outcome
	err   error
}

func newQuestions() (*questions, error) {
	kept, err := simplelru.NewLRU[question, *computation](maxAnswers, nil)
	if err != nil {
		return nil, err
	}
	return &questions{turn: make(chan struct{}, 1), addresses: httppolicy.NewAddressSlots(maxOfAddress), kept: kept}, nil
}

// ask returns the answer to q, which is at most stale old. Its error is errTurn, that of compute or of ctx.
func (s *questions) ask(ctx context.Context, q question, stale time.Duration, by asker, compute func(context.Context) (outcome, error)) (outcome, error) {
	out, err := s.find(ctx, q, stale, by, compute)
	if err == nil && !by.server {
		err = s.pace(ctx, len(out.all.Values))
	}
	return out, err
}

// pace waits until an answer of so many points may be written. Otherwise a hundred callers that wait for the same answer
// of thousands of points would write it at once, and delay every other call.
func (s *questions) pace(ctx context.Context, points int) error {
	s.mu.Lock()
	now := time.Now()
	wait := max(0, s.free.Sub(now))
	if wait <= turnWait {
		s.free = now.Add(wait + time.Duration(points)*perPoint)
	}
	s.mu.Unlock()
	if wait > turnWait {
		return errTurn
	}
	if wait == 0 {
		return nil
	}
	select {
	case <-time.After(wait):
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// find returns the answer as ask does.
func (s *questions) find(ctx context.Context, q question, stale time.Duration, by asker, compute func(context.Context) (outcome, error)) (outcome, error) {
	s.mu.Lock()
	is, known := s.kept.Get(q)
	if known && is.serves(stale, by.server) {
		s.mu.Unlock()
		select {
		case <-is.done:
			return is.out, is.err
		case <-ctx.Done():
			return outcome{}, context.Cause(ctx)
		}
	}
	is = &computation{done: make(chan struct{}), err: errors.New("the computation was aborted")}
	if by.server {
		is.began = time.Now()
	} else {
		slot, ok := s.addresses.Enter(by.addr)
		if !ok {
			s.mu.Unlock()
			return outcome{}, errTurn
		}
		defer slot.Leave()
	}
	s.kept.Add(q, is)
	s.mu.Unlock()
	defer s.end(q, is)
	if !by.server {
		if is.err = s.enter(is); is.err != nil {
			return outcome{}, is.err
		}
		defer s.leave(is)
	}
	// Other requests may wait for it, so it must outlive this one.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), patience)
	defer cancel()
	is.out, is.err = compute(ctx)
	return is.out, is.err
}

// serves reports whether a question that comes now may share c. The caller holds mu.
func (c *computation) serves(stale time.Duration, server bool) bool {
	select {
	case <-c.done:
		if c.out.is.Stale {
			stale = min(stale, staleKept)
		}
		return !server && time.Since(c.began) < stale
	default:
	}
	if c.began.IsZero() {
		return !server
	}
	return time.Since(c.began) < stale
}

// end publishes the answer, and keeps it unless it is an error.
func (s *questions) end(q question, is *computation) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if now, ok := s.kept.Peek(q); is.err != nil && ok && now == is {
		s.kept.Remove(q)
	}
	close(is.done)
}

// enter waits for the turn of a public question.
func (s *questions) enter(is *computation) error {
	s.mu.Lock()
	full := s.waiting >= maxWaiting
	if !full {
		s.waiting++
	}
	s.mu.Unlock()
	if full {
		return errTurn
	}
	wait := time.NewTimer(turnWait)
	defer wait.Stop()
	var err error
	select {
	case s.turn <- struct{}{}:
	case <-wait.C:
		err = errTurn
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.waiting--
	if err == nil {
		is.began = time.Now()
	}
	return err
}

// leave ends the turn of a public question, after the pause.
func (s *questions) leave(is *computation) {
	time.AfterFunc(min(pauses*time.Since(is.began), maxPause), func() { <-s.turn })
}

// asker returns who sent the request; server says whether it has an API key.
func (a *API) asker(c *gin.Context, server bool) asker {
	return asker{server: server, addr: a.callers.Addr(c.Request)}
}

// crowded answers 429.
func (a *API) crowded(c *gin.Context) {
	a.metrics.crowded.Inc()
	httppolicy.Problem(c.Writer, http.StatusTooManyRequests, "Too many questions about the history of counters are being answered, of this address or of all; ask again later.", httppolicy.RetryAfter(comeBack))
}
