package simulate

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/url"
	"strconv"
	"sync/atomic"
	"time"
)

const (
	countersRoot  = "/api/v1/counters"
	answerTimeout = 20 * time.Second      // of one try; the server gives up sooner
	answerLimit   = 2 * time.Minute       // in which a call must be answered, however often it is tried
	pauseLeast    = 20 * time.Millisecond // before a call is tried again …
	pauseMost     = 500 * time.Millisecond
	cutsAtMost    = 3 // of one call, so that it ends also with a --kill-fraction of 1
	maxAnswer     = 1 << 20
)

// A call is one on counters, which may be tried several times.
type call struct {
	method, path string
	body         string
	once         string // Idempotency-Key; "" for none
	who          *fan   // nil: the API key
}

// A reply is the answer to a call.
type reply struct {
	status int
	body   []byte
	replay bool
	// unknown says that an earlier try was not answered, so it may have been carried out.
	unknown bool
}

// A lasting is a counter that lasts, as an answer, a frame or an event shows it.
type lasting struct {
	Key     string `json:"key"`
	Kind    string `json:"kind"`
	Value   *int64 `json:"value"`
	Version string `json:"version"`
	Exact   bool   `json:"exact"`
	Stale   bool   `json:"stale"`
	Mine    bool   `json:"mine"`
	Member  *bool  `json:"member"`

	version version
}

// check refuses an answer that is no counter of that key.
func (l *lasting) check(t *tally) error {
	var err error
	if l.version, err = parseVersion(l.Version); err != nil {
		return err
	}
	switch {
	case l.Key != t.key:
		return fmt.Errorf("the key is %q", l.Key)
	case l.Kind != t.kind:
		return fmt.Errorf("the kind is %q, not %q", l.Kind, t.kind)
	case l.Value == nil:
		return errors.New("there is no value")
	case t.floor && *l.Value < 0:
		return fmt.Errorf("the value %d is below 0", *l.Value)
	}
	return nil
}

// callStats count what happened to the calls.
type callStats struct {
	answered    atomic.Int64 // calls
	retries     atomic.Int64 // tries after the first
	replays     atomic.Int64 // answers that said so
	refused     atomic.Int64 // 409
	limited     atomic.Int64 // 429
	passed      atomic.Int64 // calls on limits
	held        atomic.Int64 // calls on limits that did not pass
	unavailable atomic.Int64 // 503
	lost        atomic.Int64 // connections that ended before the answer
	cuts        atomic.Int64 // connections that the client cut
	latency     histogram    // of a try that was answered
}

// failures count what a healthy server does not do.
func (s *callStats) failures() int64 { return s.unavailable.Load() + s.lost.Load() }

// errUnexpected is in the errors about answers that are not in the contract.
var errUnexpected = errors.New("unexpected answer")

// call tries a call until it is answered, each time at any gateway. The client itself
// cuts off the fraction cuts of the tries. The caller must judge the status that comes
// back: it is neither 429 nor one that says to try again.
func (r *lastingRun) call(ctx context.Context, rng *rand.Rand, q call, cuts float64) (reply, error) {
	unknown, last := false, error(nil)
	began, pause := time.Now(), pauseLeast
	for try := 0; ; try++ {
		if try > 0 {
			r.calls.retries.Add(1)
		}
		if time.Since(began) > answerLimit {
			return reply{}, fmt.Errorf("%s %s is not answered after %s: %w", q.method, q.path, answerLimit, last)
		}
		gateway := r.gateway(rng.IntN(len(r.cfg.URL)))
		if try < cutsAtMost && rng.Float64() < cuts {
			r.calls.cuts.Add(1)
			unknown = true
			r.cut(ctx, rng, gateway, q)
			continue
		}
		start := time.Now()
		got, wait, err := r.try(ctx, gateway, q)
		switch {
		case ctx.Err() != nil:
			return reply{}, fmt.Errorf("interrupted: %w", context.Cause(ctx))
		case err != nil:
			r.calls.lost.Add(1)
			unknown, last = true, err
		case got.status == http.StatusServiceUnavailable || got.status == http.StatusBadGateway || got.status == http.StatusGatewayTimeout:
			r.calls.unavailable.Add(1)
			unknown, last = true, fmt.Errorf("status %d: %.200s", got.status, got.body)
		case got.status == http.StatusTooManyRequests:
			r.calls.limited.Add(1)
			last = fmt.Errorf("status %d: %.200s", got.status, got.body)
			if err := sleep(ctx, max(wait, pauseLeast)); err != nil {
				return reply{}, err
			}
			continue
		default:
			r.calls.latency.add(time.Since(start))
			r.calls.answered.Add(1)
			if got.replay {
				r.calls.replays.Add(1)
			}
			got.unknown = unknown
			return got, nil
		}
		if err := sleep(ctx, pause/2+rand.N(pause/2)); err != nil {
			return reply{}, err
		}
		pause = min(2*pause, pauseMost)
	}
}

// try sends a call once. The error says that there was no whole answer.
func (r *lastingRun) try(ctx context.Context, gateway string, q call) (got reply, wait time.Duration, err error) {
	req, err := r.request(ctx, gateway, q)
	if err != nil {
		return reply{}, 0, err
	}
	resp, err := r.web.Do(req)
	if err != nil {
		return reply{}, 0, err
	}
	defer resp.Body.Close()
	if got.body, err = io.ReadAll(io.LimitReader(resp.Body, maxAnswer)); err != nil {
		return reply{}, 0, err
	}
	got.status, got.replay = resp.StatusCode, resp.Header.Get("Idempotent-Replay") == "true"
	seconds, _ := strconv.Atoi(resp.Header.Get("Retry-After"))
	return got, time.Duration(seconds) * time.Second, nil
}

func (r *lastingRun) request(ctx context.Context, gateway string, q call) (*http.Request, error) {
	req, err := http.NewRequestWithContext(ctx, q.method, gateway+q.path, bytes.NewReader([]byte(q.body)))
	if err != nil {
		return nil, err
	}
	// Without GetBody the HTTP client does not repeat the request by itself, so a
	// request was sent as often as the run believes.
	req.GetBody = nil
	r.cfg.inSite(req.Header)
	if q.body != "" {
		req.Header.Set("Content-Type", "application/json")
	}
	if q.once != "" {
		req.Header.Set("Idempotency-Key", q.once)
	}
	if q.who == nil {
		req.Header.Set("X-API-Key", r.cfg.APIKey)
		return req, nil
	}
	return req, q.who.sign(r.crowd, req.Header)
}

// cut sends a request, or a part of it, and ends the connection, as a client does that
// is killed.
func (r *lastingRun) cut(ctx context.Context, rng *rand.Rand, gateway string, q call) {
	req, err := r.request(ctx, gateway, q)
	if err != nil {
		return
	}
	var text bytes.Buffer
	if err := req.Write(&text); err != nil {
		return
	}
	l := &link{}
	if err := l.connect(ctx, req); err != nil {
		return
	}
	sent := text.Bytes()
	if rng.IntN(3) == 0 {
		sent = sent[:rng.IntN(len(sent))]
	}
	_, _ = l.Write(sent)
	_ = sleep(ctx, rand.N(3*time.Millisecond))
	if rng.IntN(2) == 0 {
		l.kill()
	} else {
		l.fin()
	}
}

// read gets one counter and checks what every answer must be.
func (r *lastingRun) read(ctx context.Context, rng *rand.Rand, t *tally, exact bool) (lasting, error) {
	path := t.path("")
	if exact {
		path = t.path("/exact")
	}
	got, err := r.call(ctx, rng, call{method: http.MethodGet, path: path}, 0)
	if err != nil {
		return lasting{}, err
	}
	return r.understand(got, t)
}

// understand reads an answer that is one counter.
func (r *lastingRun) understand(got reply, t *tally) (lasting, error) {
	var l lasting
	if got.status != http.StatusOK {
		return l, r.unexpected(t.key, got)
	}
	if err := json.Unmarshal(got.body, &l); err != nil {
		return l, fmt.Errorf("%w: counter %q: %w: %.200s", errUnexpected, t.key, err, got.body)
	}
	if err := l.check(t); err != nil {
		return l, fmt.Errorf("%w: counter %q: %w: %.200s", errUnexpected, t.key, err, got.body)
	}
	return l, nil
}

// decode reads an answer that is no counter.
func (r *lastingRun) decode(got reply, what string, into any) error {
	if got.status != http.StatusOK {
		return r.unexpected(what, got)
	}
	if err := json.Unmarshal(got.body, into); err != nil {
		return fmt.Errorf("%w: %s: %w: %.200s", errUnexpected, what, err, got.body)
	}
	return nil
}

func (r *lastingRun) unexpected(what string, got reply) error {
	mend := ""
	if got.status == http.StatusUnauthorized {
		mend = "; give --api-key one of the server's"
	}
	return fmt.Errorf("%w: %s: status %d: %.300s%s", errUnexpected, what, got.status, bytes.TrimSpace(got.body), mend)
}

// path is that of a call on the counter.
func (t *tally) path(call string) string { return countersRoot + "/" + url.PathEscape(t.key) + call }
