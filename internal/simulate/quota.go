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

	// clockSlack is by how much a period may be longer on the server's clock, which has whole milliseconds, than on
	// this one.
	clockSlack = 10 * time.Millisecond
)

// A quota is the truth about one limit. The server judges a call at an unknown moment between its sending and its
// answer. So the run reports only what is wrong at whichever moments the calls were judged: more has passed than the
// limit, or a call was refused although it fitted all the time.
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
	before time.Time // before which it was judged; zero: it is under way
	sure   bool      // the server says that it has passed
	end    time.Time // about when, as the server says, its window of the clock ends
}

func (r *lastingRun) openQuotas() {
	r.quotas = []*quota{
		{key: r.name, algorithm: "fixed", window: time.Second},
		{key: r.name, algorithm: "sliding", window: time.Second},
		{key: r.name, algorithm: "log", window: 2 * time.Second},
	}
}

// pass makes a call on a limit. It does not repeat a call without an answer, which the server may have counted.
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

	// By then the server has given up on the call.
	p.before = time.Now().Add(answerTimeout)
}

// passed notes that a call has passed. reset is after which time, as the answer says, the whole limit is free again.
func (q *quota) passed(p *pass, reset time.Duration) {
	q.mu.Lock()
	defer q.mu.Unlock()

	p.before = time.Now()
	p.sure = true
	// The server wrote the answer about halfway between the call and its return.
	p.end = p.sent.Add(p.before.Sub(p.sent)/2 + reset)
}

// refused removes a call that was refused, and returns how much may have counted against it.
func (q *quota) refused(p *pass) (most int64) {
	q.mu.Lock()
	defer q.mu.Unlock()

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

// check reports what cannot be right about the calls that have passed, and forgets old ones. No call may be under way.
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

	// Twice the reach to be safe: keeping a call for too long costs only memory.
	old := time.Now().Add(-2 * q.reach())
	q.passes = slices.DeleteFunc(q.passes, func(p *pass) bool { return p.before.Before(old) })
}

// checkStretches checks the algorithm log: no period of less than a window has more than the limit.
func (q *quota) checkStretches(sure []*pass, wrong func(format string, args ...any)) {
	// It is enough to check periods that begin with a call.
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

// checkWindows checks the algorithms with windows of the clock: no window has more than the limit. When a window ends
// follows from the time that an answer gives until the whole limit is free.
func (q *quota) checkWindows(sure []*pass, wrong func(format string, args ...any)) {
	// That time begins at an unknown moment between the call and its return. A call that took long may be of either of
	// two windows, so it is left out.
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
