package histories

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"slices"
	"sync"
	"time"

	"headcount/client"
)

// Config tunes a Run.
type Config struct {
	URLs   func() []string // servers that should answer now
	APIKey string
	Models []*Model
	Seed   uint64
	Calls  int // after this many calls the clients rest
}

const (
	clients     = 24
	live        = 4                // subjects of each model that are used at a time
	maxRetired  = 200              // subjects that wait to be judged; with more the clients wait
	answerBy    = 12 * time.Second // longer than a server takes
	settleBy    = 2 * time.Minute  // how long a call is repeated; by then all faults are over
	hangUpOneOf = 60               // of this many calls, the client gives up one
	repeatOneOf = 12               // of this many calls, one repeats an earlier change with its key
	examples    = 3                // of wrong histories; then no more are judged
)

// Run is a group of clients at work. Its methods may be called from any goroutine.
type Run struct {
	cfg  Config
	web  *http.Client
	stop context.CancelFunc

	clients sync.WaitGroup
	checker sync.WaitGroup
	ended   chan *Subject // to the checker

	mu      sync.Mutex // guards the fields below
	live    []*Subject // that clients use
	retired []*Subject // that nobody uses any more
	named   int        // how many subjects there were
	old     []Between  // when reads may be old
	report  Report
}

// Report is the outcome of a run.
type Report struct {
	Calls     int            // that were tried
	Figures   map[string]int // calls, by their outcome
	Subjects  int            // that were judged
	Undecided int            // of these, because the checker took too long
	Wrong     []string
}

// Start starts clients that work until ctx ends or enough calls are made.
func Start(ctx context.Context, cfg Config) *Run {
	ctx, stop := context.WithCancel(ctx)
	web := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: clients}, Timeout: answerBy}
	r := &Run{cfg: cfg, web: web, stop: stop, ended: make(chan *Subject, maxRetired)}
	r.report.Figures = map[string]int{}
	for range live {
		for _, m := range cfg.Models {
			r.live = append(r.live, r.newSubject(m))
		}
	}

	// Each client has random numbers of its own, because a rand.Rand is for one goroutine.
	for i := range clients {
		random := rand.New(rand.NewPCG(cfg.Seed, uint64(i)))
		r.clients.Go(func() {
			for ctx.Err() == nil {
				r.work(ctx, random)
			}
		})
	}
	r.checker.Go(r.judge)

	return r
}

func (r *Run) newSubject(m *Model) *Subject {
	r.named++

	return NewSubject(m, fmt.Sprintf("%s:%x-%d", m.Name, r.cfg.Seed, r.named))
}

// Working reports whether the clients have more to do.
func (r *Run) Working() bool {
	r.mu.Lock()
	defer r.mu.Unlock()

	return r.report.Calls < r.cfg.Calls && len(r.report.Wrong) == 0
}

// work makes one call of a client, and repeats it as necessary.
func (r *Run) work(ctx context.Context, random *rand.Rand) {
	var s *Subject
	if r.Working() {
		s = r.pick(random)
	}
	if s == nil {
		time.Sleep(10 * time.Millisecond)
		return
	}
	defer s.leave()

	if c, ok := s.earlier(random); ok && random.IntN(repeatOneOf) == 0 {
		r.insist(ctx, random, s, c)
		return
	}

	c := s.Model.draw(random)
	if c.Verb != Read && c.Verb != Look {
		c.ID = s.NewID()
	}
	r.insist(ctx, random, s, c)
}

// pick returns a subject for one call, after which the client calls its leave. It returns nil if too many subjects wait
// to be judged.
func (r *Run) pick(random *rand.Rand) *Subject {
	r.mu.Lock()
	defer r.mu.Unlock()

	at := random.IntN(len(r.live))
	if r.live[at].join() {
		return r.live[at]
	}
	// Judging may be slower than calling, and histories must not fill the memory.
	if len(r.retired) >= maxRetired {
		return nil
	}

	// The subject has had enough calls: it will be judged, and a new one takes its place.
	r.retired = append(r.retired, r.live[at])
	r.live[at] = r.newSubject(r.live[at].Model)
	r.live[at].join()

	return r.live[at]
}

// insist makes a call. If the call has a key, insist repeats it until it is answered. It reports whether the server has
// made the change.
func (r *Run) insist(ctx context.Context, random *rand.Rand, s *Subject, c Call) bool {
	const refusals = 30 // that it waits for the outcome of an earlier try without an answer
	unknown, refused := false, 0
	for until := time.Now().Add(settleBy); time.Now().Before(until) && refused < refusals; {
		answer, err := r.try(ctx, random, s, c)
		answered := err == nil
		made := answered && !answer.Refused
		// A refusal is not final after a try without an answer, which the server may still accept later.
		isOver := answered && !unknown || !answered && !c.Keyed

		switch {
		case errors.Is(err, errUnexpected):
			r.wrong(fmt.Sprintf("%s: %v: %v", s.Name, &c, err))
			return false
		case made:
			return true
		case isOver:
			return false
		case answered:
			refused++
		case !isUnsent(err):
			unknown = true
		}
		time.Sleep(5*time.Millisecond + upTo(random, 100*time.Millisecond))
	}

	return false
}

// try makes a call once, and records it.
func (r *Run) try(ctx context.Context, random *rand.Rand, s *Subject, c Call) (Answer, error) {
	urls := r.cfg.URLs()
	if len(urls) == 0 {
		return Answer{}, errNowhere
	}
	api := client.NewAPI(client.Config{URL: urls[random.IntN(len(urls))], APIKey: r.cfg.APIKey, HTTP: r.web})

	// The end of the run does not cancel calls that have begun.
	ctx = context.WithoutCancel(ctx)
	// The server may still make a call that the client has given up: histories exist to check such cases.
	if random.IntN(hangUpOneOf) == 0 {
		short, cancel := context.WithTimeout(ctx, upTo(random, 3*time.Millisecond))
		defer cancel()
		ctx = short
	}

	index := s.Begin(c)
	answer, err := s.send(ctx, api, &c)
	switch {
	case err == nil:
		s.End(index, answer)
	case isUnsent(err):
		s.Forget(index)
	default:
		s.Lose(&c)
	}
	r.count(c.Verb, &answer, err)

	return answer, err
}

func upTo(random *rand.Rand, most time.Duration) time.Duration {
	return time.Duration(random.Int64N(int64(most)))
}

// errNowhere means, like an error of a dial, that nothing was sent.
var errNowhere = errors.New("no server answers")

func (r *Run) count(verb Verb, answer *Answer, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()

	r.report.Calls++
	figure := "made"
	switch {
	case isUnsent(err):
		figure = "unsent"
	case err != nil:
		figure = "unknown"
	case answer.Refused:
		figure = "refused"
	case answer.Replay:
		figure = "made before"
	case verb == Read, verb == Look:
		figure = "read"
	}
	r.report.Figures[figure]++
}

func (r *Run) wrong(what string) {
	r.mu.Lock()
	defer r.mu.Unlock()

	r.report.Wrong = append(r.report.Wrong, what)
}

// Old declares that from now on reads may be old, until the returned function is called.
func (r *Run) Old() (over func()) {
	r.mu.Lock()
	defer r.mu.Unlock()

	const long = 24 * time.Hour
	at := len(r.old)
	r.old = append(r.old, Between{From: time.Now(), To: time.Now().Add(long)})

	return func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.old[at].To = time.Now()
	}
}

// Settle reads the retired subjects once more, and has them judged. No fault may be under way.
func (r *Run) Settle(ctx context.Context) {
	r.mu.Lock()
	retired := r.retired
	r.retired = nil
	r.mu.Unlock()

	random := rand.New(rand.NewPCG(r.cfg.Seed, uint64(clients)))
	for _, s := range retired {
		s.users.Wait() // the history needs the answers to their calls
		r.readAll(ctx, random, s)
		r.ended <- s
	}
}

// readAll reads all of a subject.
func (r *Run) readAll(ctx context.Context, random *rand.Rand, s *Subject) {
	var all []Call
	for _, at := range s.counters() {
		all = append(all, Call{Verb: Read, At: at})
	}
	if s.Model == Members {
		for at := range members {
			all = append(all, Call{Verb: Look, At: at})
		}
	}

	// All reads of the subject share one bound, so that a server that never answers does not cost settleBy for each.
	until := time.Now().Add(settleBy)
	for _, c := range all {
		for !r.insist(ctx, random, s, c) && time.Now().Before(until) {
			time.Sleep(10 * time.Millisecond)
		}
	}
}

// judge checks the histories of subjects that have ended.
func (r *Run) judge() {
	for s := range r.ended {
		r.mu.Lock()
		old := slices.Clone(r.old)
		// A few examples say as much as hundreds, and shortening one takes seconds.
		isEnough := len(r.report.Wrong) >= examples
		r.mu.Unlock()
		if isEnough {
			continue
		}

		wrong, undecided := s.Check(old...)
		if wrong != "" {
			r.wrong(wrong)
		}

		r.mu.Lock()
		r.report.Subjects++
		if undecided {
			r.report.Undecided++
		}
		r.mu.Unlock()
	}
}

// Finish ends the clients, has everything judged, and returns the report. No fault may be under way.
func (r *Run) Finish(ctx context.Context) Report {
	r.stop()
	r.clients.Wait() // they add to r.retired
	r.mu.Lock()
	r.retired = append(r.retired, r.live...)
	r.mu.Unlock()

	r.Settle(context.WithoutCancel(ctx))
	close(r.ended)
	r.checker.Wait()
	r.web.CloseIdleConnections()

	return r.report
}
