package simulate

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"net/http/httptrace"
	"sync/atomic"
	"time"

	"headcount/client"
)

const (
	answerTimeout = 20 * time.Second       // of one try; the server gives up sooner
	answerLimit   = 2 * time.Minute        // within which a call must be answered, however often it is tried
	pauseLeast    = 20 * time.Millisecond  // before the next try, at first
	pauseMost     = 500 * time.Millisecond // before the next try, after many
	cutsAtMost    = 3                      // of one call, so that it is made even with a --kill-fraction of 1
)

// A call is an HTTP call about counters, which may be tried several times.
type call struct {
	name string // for people
	once string // Idempotency-Key; "": none
	who  *user  // who makes the call; nil: the owner of the API key
	do   func(context.Context, *client.API) ([]client.Counter, error)
}

// one returns a call whose answer is one counter.
func one(name string, do func(context.Context, *client.API) (client.Counter, error)) call {
	return call{name: name, do: func(ctx context.Context, api *client.API) ([]client.Counter, error) {
		counter, err := do(ctx, api)
		return []client.Counter{counter}, err
	}}
}

// other returns a call whose answer has no counter.
func other(name string, do func(context.Context, *client.API) error) call {
	return call{name: name, do: func(ctx context.Context, api *client.API) ([]client.Counter, error) {
		return nil, do(ctx, api)
	}}
}

// A reply is the answer to a call.
type reply struct {
	counters []client.Counter
	conflict *client.Error // status 409: nothing was changed
	replay   bool
	// unknown says that an earlier try was not answered, so the server may have made that one.
	unknown bool
}

// check returns an error unless l can be the counter of the tally.
func (t *tally) check(l *client.Counter) error {
	belowFloor := t.floor && l.Value < 0
	switch {
	case l.Key != t.key:
		return fmt.Errorf("the key is %q", l.Key)
	case l.Kind != t.kind:
		return fmt.Errorf("the kind is %q, not %q", l.Kind, t.kind)
	case belowFloor:
		return fmt.Errorf("the value %d is below 0", l.Value)
	}
	return nil
}

// callStats count calls by their outcomes.
type callStats struct {
	answered    atomic.Int64 // calls
	retries     atomic.Int64 // tries after the first
	replays     atomic.Int64 // answers that say that the change was made before
	refused     atomic.Int64 // 409
	limited     atomic.Int64 // 429
	passed      atomic.Int64 // calls on limits
	held        atomic.Int64 // calls on limits that did not pass
	unavailable atomic.Int64 // 503
	lost        atomic.Int64 // connections that ended before the answer
	cuts        atomic.Int64 // connections that the client cut
	latency     latencies    // of a try that was answered
}

// failures returns how many tries have failed. On a healthy server none does.
func (s *callStats) failures() int64 { return s.unavailable.Load() + s.lost.Load() }

// errUnexpected is in the errors about answers that are not in the contract.
var errUnexpected = errors.New("unexpected answer")

// call tries a call until it is answered, each time at a random gateway, because the last one may have been killed. The
// client itself cuts off the fraction cuts of the tries.
func (r *lastingRun) call(ctx context.Context, rng *rand.Rand, q call, cuts float64) (reply, error) {
	var last error
	unknown := false
	began := time.Now()
	pause := pauseLeast

	for try := 0; ; try++ {
		if try > 0 {
			r.calls.retries.Add(1)
		}

		// The bound is no number of tries, because a server that restarts refuses many within a second.
		if time.Since(began) > answerLimit {
			return reply{}, fmt.Errorf("%s is not answered after %s: %w", q.name, answerLimit, last)
		}

		api, err := r.api(r.gateway(rng.IntN(len(r.cfg.URL))), q.who)
		if err != nil {
			return reply{}, err
		}

		// The server may have made a call that was cut off, so it is repeated like one whose answer was lost.
		if try < cutsAtMost && rng.Float64() < cuts {
			unknown = true
			r.cut(ctx, api, q)
			continue
		}

		start := time.Now()
		counters, err := q.do(ctx, client.NewAPI(api).Once(q.once))
		last = err

		problem := (*client.Error)(nil)
		// A conflict is an answer as well: the server has judged the change and refused it.
		if err == nil || errors.As(err, &problem) && problem.Status == http.StatusConflict {
			r.calls.latency.add(time.Since(start))
			r.calls.answered.Add(1)

			got := reply{counters: counters, conflict: problem, unknown: unknown}
			got.replay = err == nil && len(counters) > 0 && counters[0].Replayed
			if got.replay {
				r.calls.replays.Add(1)
			}
			return got, nil
		}

		wait, err := r.missed(ctx, q.name, err)
		if err != nil {
			return reply{}, err
		}
		if wait == 0 {
			unknown = true
			// With jitter, so that workers do not all come back to a restarted server at the same moment.
			wait = pause/2 + rand.N(pause/2)
			pause = min(2*pause, pauseMost)
		}

		if err := sleep(ctx, wait); err != nil {
			return reply{}, err
		}
	}
}

// missed classifies the failure of a try. When the server has limited the caller, it returns after which time the
// caller may try again. It returns 0 when the server may have made the call. The error says that the failure is not in
// the contract, or that the run ends.
func (r *lastingRun) missed(ctx context.Context, name string, failure error) (wait time.Duration, err error) {
	// First, because the end of the run looks like a lost connection.
	if ctx.Err() != nil {
		return 0, fmt.Errorf("interrupted: %w", context.Cause(ctx))
	}

	var problem *client.Error
	if !errors.As(failure, &problem) {
		// An answer that cannot be parsed is a fault, which a further try would hide.
		if errors.Is(failure, client.ErrFrame) {
			return 0, unexpected(name, failure)
		}
		r.calls.lost.Add(1)
		return 0, nil
	}

	if problem.Status == http.StatusTooManyRequests {
		r.calls.limited.Add(1)
		return max(problem.RetryAfter, pauseLeast), nil
	}
	if problem.Temporary() {
		r.calls.unavailable.Add(1)
		return 0, nil
	}
	return 0, unexpected(name, failure)
}

// ask makes a call that changes nothing, so that a conflict is unexpected.
func (r *lastingRun) ask(ctx context.Context, rng *rand.Rand, q call) ([]client.Counter, error) {
	got, err := r.call(ctx, rng, q, 0)
	if err == nil && got.conflict != nil {
		err = unexpected(q.name, got.conflict)
	}

	return got.counters, err
}

func unexpected(what string, err error) error {
	return fmt.Errorf("%w: %s: %w", errUnexpected, what, err)
}

// api returns the configuration of calls to a gateway by a user; nil: with the API key.
func (r *lastingRun) api(gateway string, who *user) (client.Config, error) {
	if who == nil {
		return client.Config{URL: gateway, Site: r.cfg.Site, APIKey: r.cfg.APIKeys[0], HTTP: r.web}, nil
	}

	cfg, err := r.config(gateway, who.name, who.signed())
	cfg.HTTP = r.web
	return cfg, err
}

// cut makes a call and hangs up soon after it was sent, as a killed client does.
func (r *lastingRun) cut(ctx context.Context, api client.Config, q call) {
	r.calls.cuts.Add(1)
	ctx, hangUp := context.WithCancel(ctx)
	defer hangUp()

	// A moment after the request was sent, so that the server may or may not have made the change.
	sent := func(httptrace.WroteRequestInfo) { time.AfterFunc(rand.N(3*time.Millisecond), hangUp) }
	trace := &httptrace.ClientTrace{WroteRequest: sent}
	_, _ = q.do(httptrace.WithClientTrace(ctx, trace), client.NewAPI(api).Once(q.once))
}

// read reads one counter and checks its answer.
func (r *lastingRun) read(ctx context.Context, rng *rand.Rand, t *tally, exact bool) (client.Counter, error) {
	get := (*client.API).Counter
	if exact {
		get = (*client.API).Exact
	}

	name := "GET of " + t.key
	return r.counter(ctx, rng, t, one(name, func(ctx context.Context, api *client.API) (client.Counter, error) {
		return get(api, ctx, t.key)
	}))
}

// counter makes a call that reads one counter, and checks its answer.
func (r *lastingRun) counter(ctx context.Context, rng *rand.Rand, t *tally, q call) (client.Counter, error) {
	got, err := r.ask(ctx, rng, q)
	if err != nil {
		return client.Counter{}, err
	}

	if err := t.check(&got[0]); err != nil {
		return client.Counter{}, unexpected(q.name, fmt.Errorf("counter %q: %w", t.key, err))
	}

	return got[0], nil
}
