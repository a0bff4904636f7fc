package counterapi

import (
	"context"
	"errors"
	"net/http"
	"sync"
	"time"

	"github.com/gin-gonic/gin"
	"github.com/hashicorp/golang-lru/v2/simplelru"

	"headcount/counter"
	"headcount/gateway/httppolicy"
)

const (
	maxAnswers = 1 << 10              // answers kept, of 12 KB at most; the one not asked for longest goes
	maxWaiting = 64                   // public questions that wait for their turn; a further one is 429
	turnWait   = 2 * time.Second      // how long one waits before it is 429
	pauses     = 3                    // the pause after a computation is so many times as long as that took
	maxPause   = turnWait / 4         // after a long computation, so that the next one in the queue has its turn in time
	staleKept  = time.Second          // how long an answer in which a region is missing is kept, so that its return shows soon
	perPoint   = 2 * time.Microsecond // between two public answers, for each point of the first: what it takes to write one
)

// errTurn says that too many public questions are being answered.
var errTurn = errors.New("too many questions about history")

// question is one about history that may cost much: equal ones have one answer.
type question struct {
	of  string // the name of a counter, or the match of a rule
	q   counter.Question
	top int // of a top list: how many counters; else 0
}

// outcome is the answer to a question.
type outcome struct {
	is  counter.Counter // of a counter
	all counter.Answer
	top []counter.Gained
}

// questions answers questions about history for all callers. Concurrent equal questions are one computation, and its
// answer is kept for the rule's stale. Callers without API key have their computations made one at a time, and each is
// followed by a pause three times as long as it took, half a second at most: so they take about a quarter of a core, however
// they vary their questions. Nor do all who waited for an answer write it at once, see pace. A caller with an API key never waits for them. It shares a computation that is under way, but is not given an
// answer of before: it may just have changed what it asks about.
type questions struct {
	turn chan struct{} // holds one while a public question is answered, and for its pause

	mu      sync.Mutex // guards all below, and began of every computation
	kept    *simplelru.LRU[question, *computation]
	waiting int       // public questions
	free    time.Time // when the next public answer may be written
}

// computation is one of an answer.
type computation struct {
	began time.Time     // zero: it waits for its turn
	done  chan struct{} // closed when out and err are final
	out   outcome
	err   error
}

func newQuestions() (*questions, error) {
	kept, err := simplelru.NewLRU[question, *computation](maxAnswers, nil)
	if err != nil {
		return nil, err
	}
	return &questions{turn: make(chan struct{}, 1), kept: kept}, nil
}

// ask returns the answer to q, which is at most stale old. Its error is errTurn, that of compute or of ctx.
func (s *questions) ask(ctx context.Context, q question, stale time.Duration, server bool, compute func(context.Context) (outcome, error)) (outcome, error) {
	out, err := s.find(ctx, q, stale, server, compute)
	if err == nil && !server {
		err = s.pace(ctx, len(out.all.Values))
	}
	return out, err
}

// pace waits until an answer of so many points may be written. A hundred who wait for one of thousands of points would
// else write it at once, and every other call would wait for them all.
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
func (s *questions) find(ctx context.Context, q question, stale time.Duration, server bool, compute func(context.Context) (outcome, error)) (outcome, error) {
	s.mu.Lock()
	is, known := s.kept.Get(q)
	if known && is.serves(stale, server) {
		s.mu.Unlock()
		select {
		case <-is.done:
			return is.out, is.err
		case <-ctx.Done():
			return outcome{}, context.Cause(ctx)
		}
	}
	is = &computation{done: make(chan struct{}), err: errors.New("the computation was aborted")}
	if server {
		is.began = time.Now()
	}
	s.kept.Add(q, is)
	s.mu.Unlock()
	defer s.end(q, is)
	if !server {
		if is.err = s.enter(is); is.err != nil {
			return outcome{}, is.err
		}
		defer s.leave(is)
	}
	// Others wait for it, so it outlives the request.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), patience)
	defer cancel()
	is.out, is.err = compute(ctx)
	return is.out, is.err
}

// serves reports whether a question that comes now may have the answer of c. It is called with mu.
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

// end hands out the answer, and keeps it unless it is an error.
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

// leave gives the turn to the next one, after the pause.
func (s *questions) leave(is *computation) {
	time.AfterFunc(min(pauses*time.Since(is.began), maxPause), func() { <-s.turn })
}

// crowded answers 429.
func (a *API) crowded(c *gin.Context) {
	a.metrics.crowded.Inc()
	httppolicy.Problem(c.Writer, http.StatusTooManyRequests, "Too many questions about the history of counters are being answered; ask again later.", httppolicy.RetryAfter(comeBack))
}
