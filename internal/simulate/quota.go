package simulate

import (
	"cmp"
	"context"
	"slices"
	"sync"
	"time"

	"headcount/client"
)

const (
	quotaLimit = 8 // of each quota: some calls of its window pass, others do not
	quotaCost  = 3 // of a call, at most

	// clockSlack is by how much a stretch of time on the server's clock, which has whole milliseconds, may be
	// longer than on this one.
	clockSlack = 10 * time.Millisecond
)

// A quota is the truth about one limit. A call on it was judged at some moment between when it was sent and when it was
// answered, so what is known for sure is less than what happened: the run only speaks of what cannot be right, at
// whichever moments the calls were judged. There are two things that cannot be: more than the limit has passed, and a
// call was refused although it fitted at all times.
type quota struct {
	key, algorithm string
	window         time.Duration

	mu     sync.Mutex
	passes []*pass // that may still matter: those of the last windows
}

// A pass is a call that has passed, or may have.
type pass struct {
	cost   int64
	sent   time.Time
	before time.Time // it was judged before; zero: it is under way
	sure   bool      // the server says that it has passed
	end    time.Time // when, as the server says, its window of the clock is over, about
}

func (r *lastingRun) openQuotas() {
	r.quotas = []*quota{
		{key: r.name, algorithm: "fixed", window: time.Second},
		{key: r.name, algorithm: "sliding", window: time.Second},
		{key: r.name, algorithm: "log", window: 2 * time.Second},
	}
}

// pass asks whether something may pass. A call that is not answered is not repeated: it may have been counted.
func (w *worker) pass(ctx context.Context, q *quota) error {
	cost := 1 + w.rng.Int64N(quotaCost)
	var got client.Verdict
	c := other("the limit "+q.key, func(ctx context.Context, api *client.API) (err error) {
		limit := client.Limit{Limit: quotaLimit, Window: q.window, Cost: cost, Algorithm: q.algorithm}
		got, err = api.Limit(ctx, q.key, limit)
		return err
	})

	api, err := w.api(w.gateway(w.rng.IntN(len(w.cfg.URL))), nil)
	if err != nil {
		return err
	}

	// Noted before it is sent, because the server may judge it before this goroutine goes on.
	p := q.send(cost)

	if w.rng.Float64() < w.cfg.KillFraction {
		w.cut(ctx, api, c)
		q.unknown(p)
		return nil
	}

	_, err = c.do(ctx, client.NewAPI(api))
	if err != nil {
		q.unknown(p)
		wait, err := w.missed(ctx, c.name, err)
		if err != nil {
			return err
		}
		return sleep(ctx, max(wait, pauseLeast))
	}

	w.calls.latency.add(time.Since(p.sent))
	w.calls.answered.Add(1)

	outOfRange := got.Limit != quotaLimit || got.Remaining < 0 || got.Remaining > quotaLimit || got.ResetAfter < 0
	tooMuch := got.Allowed && got.Remaining > quotaLimit-cost
	if outOfRange || tooMuch {
		w.wrong("limit %q (%s): the answer is %+v, for a cost of %d of %d", q.key, q.algorithm, got, cost, quotaLimit)
		q.unknown(p)
		return nil
	}

	if got.Allowed {
		w.calls.passed.Add(1)
		q.passed(p, got.ResetAfter)
		return nil
	}

	w.calls.held.Add(1)
	most := q.refused(p)
	if most+cost <= quotaLimit {
		w.wrong("limit %q (%s): a cost of %d was refused, and of %d at most %d had passed",
			q.key, q.algorithm, cost, quotaLimit, most)
	}
	return nil
}

func (q *quota) send(cost int64) *pass {
	q.mu.Lock()
	defer q.mu.Unlock()

	p := &pass{cost: cost, sent: time.Now()}
	q.passes = append(q.passes, p)

	return p
}

// unknown notes that a call was not answered. The server may still judge it.
func (q *quota) unknown(p *pass) {
	q.mu.Lock()
	defer q.mu.Unlock()

	// The server gives up on a call by then, whatever the network did to it.
	p.before = time.Now().Add(answerTimeout)
}

// passed notes that a call has passed, and when all of the limit is back.
func (q *quota) passed(p *pass, reset time.Duration) {
	q.mu.Lock()
	defer q.mu.Unlock()

	p.before = time.Now()
	p.sure = true
	// The answer came from about half way between the call and its return.
	p.end = p.sent.Add(p.before.Sub(p.sent)/2 + reset)
}

// refused removes a call that was refused, and returns how much may have counted against it.
func (q *quota) refused(p *pass) (most int64) {
	q.mu.Lock()
	defer q.mu.Unlock()

	// What was refused took nothing, so it must not count against later calls.
	q.passes = slices.DeleteFunc(q.passes, func(other *pass) bool { return other == p })

	since := p.sent.Add(-q.reach() - clockSlack)
	for _, other := range q.passes {
		if other.before.IsZero() || other.before.After(since) {
			most += other.cost
		}
	}

	return most
}

// reach returns how long a call that has passed counts.
func (q *quota) reach() time.Duration {
	if q.algorithm == "sliding" {
		return 2 * q.window
	}
	return q.window
}

// check says of all that has passed what cannot be, when no call is under way, and forgets what is over.
func (q *quota) check(wrong func(format string, args ...any)) {
	q.mu.Lock()
	defer q.mu.Unlock()

	var sure []*pass
	for _, p := range q.passes {
		if p.sure {
			sure = append(sure, p)
		}
	}

	slices.SortFunc(sure, func(a, b *pass) int { return a.sent.Compare(b.sent) })
	if q.algorithm == "log" {
		q.checkStretches(sure, wrong)
	} else {
		q.checkWindows(sure, wrong)
	}

	// Twice the reach, to be sure: a call that is kept for too long costs memory alone.
	old := time.Now().Add(-2 * q.reach())
	q.passes = slices.DeleteFunc(q.passes, func(p *pass) bool { return p.before.Before(old) })
}

// checkStretches adds up what a log judged within less than a window.
func (q *quota) checkStretches(sure []*pass, wrong func(format string, args ...any)) {
	// Each call begins a stretch, since any of them may be the first of one with too many.
	for i, first := range sure {
		sum := int64(0)
		for _, p := range sure[i:] {
			if p.before.Sub(first.sent) < q.window-clockSlack {
				sum += p.cost
			}
		}

		if sum > quotaLimit {
			wrong("limit %q (%s): %d have passed in less than %s; the limit is %d",
				q.key, q.algorithm, sum, q.window, quotaLimit)
			return
		}
	}
}

// checkWindows adds up what was judged in each window of the clock. The server itself says where these are, in how long
// it is until all of the limit is back. A call that was answered late may be of either of two.
func (q *quota) checkWindows(sure []*pass, wrong func(format string, args ...any)) {
	// The server says how long its window lasts from some moment between the call and its return. The longer the call
	// took, the less that says.
	late := func(p *pass) bool { return p.before.Sub(p.sent) > q.window/4-clockSlack }
	known := slices.DeleteFunc(slices.Clone(sure), late)
	slices.SortFunc(known, func(a, b *pass) int { return cmp.Or(a.end.Compare(b.end), a.sent.Compare(b.sent)) })
	for len(known) > 0 {
		n := slices.IndexFunc(known, func(p *pass) bool { return p.end.Sub(known[0].end) > q.window/2 })

		if n < 0 {
			n = len(known)
		}

		sum := int64(0)
		for _, p := range known[:n] {
			sum += p.cost
		}

		if sum > quotaLimit {
			wrong("limit %q (%s): %d have passed in one window of %s; the limit is %d",
				q.key, q.algorithm, sum, q.window, quotaLimit)
		}

		known = known[n:]
	}
}
