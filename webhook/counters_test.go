package webhook_test

import (
	"context"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"headcount/counter"
	"headcount/webhook"
)

// pair has two processes that change a counter and judge it. Process a uses its own store and counters.
type pair struct {
	*world
	a, b *webhook.Service
	endA func()
}

// withPair runs a test with a pair of processes. Through may wrap the store and counters of a.
func withPair(t *testing.T, through func(*world), test func(*pair)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "counter:likes:*>100=http://r.test/")
		stop := w.start()
		defer func() { stop() }()
		p := &pair{world: w, b: w.service}

		store := w.store
		counters := w.counters
		through(w)
		p.endA = w.start()
		defer func() { p.endA() }()
		p.a = w.service
		p.a.Serve(nil) // b sends
		w.store = store
		w.counters = counters

		test(p)
	})
}

// add makes a process change the counter, and waits.
func (p *pair) add(by *webhook.Service, n int64, then time.Duration) {
	p.t.Helper()
	rule := counter.BuiltinRules().Of("*")
	op := counter.Op{Changes: []counter.Change{{Key: "likes:1", Rule: rule, Verb: counter.Add, Delta: n}}}
	results := p.counters.Apply(p.t.Context(), []counter.Op{op})
	if results[0].Err != nil {
		p.t.Fatal(results[0].Err)
	}

	by.Changed(results)
	time.Sleep(then)
}

// farStore is a store that a process sometimes cannot reach, or that resets states late.
type farStore struct {
	webhook.Store
	away   atomic.Bool
	resets time.Duration
}

func (f *farStore) Report(ctx context.Context, changes []webhook.Change) ([]string, int, error) {
	if f.away.Load() {
		return nil, 0, webhook.ErrUnavailable
	}
	if len(changes) == 1 && changes[0].Was != changes[0].Is && changes[0].Is == "" {
		time.Sleep(f.resets)
	}

	return f.Store.Report(ctx, changes)
}

// A process could not report a counter. As soon as it can, it reads the counter again: others may have reported it, and
// it may have fallen.
func TestAnOldValueOfACounterIsNotReported(t *testing.T) {
	var far farStore
	withPair(t, func(w *world) { far.Store, w.store = w.store, &far }, func(p *pair) {
		far.away.Store(true)
		p.add(p.a, 101, time.Second)
		p.add(p.b, 1, time.Second)
		p.add(p.b, -50, 3*settle)
		p.want("counter.over likes:1 102")

		far.away.Store(false)
		time.Sleep(3 * settle)
		p.want()

		p.add(p.b, 60, 3*time.Second)
		p.want("counter.over likes:1 112")
	})
}

// A counter passes its threshold when another process has read that it fell, and has not reported the fall yet.
func TestACounterRisesWhileItsFallIsReported(t *testing.T) {
	far := farStore{resets: time.Second}
	withPair(t, func(w *world) { far.Store, w.store = w.store, &far }, func(p *pair) {
		p.add(p.a, 101, 2*settle)
		p.add(p.a, -2, settle+far.resets/2)
		p.want("counter.over likes:1 101")

		p.add(p.b, 2, 3*settle)
		p.want("counter.over likes:1 101")
	})
}

// A process ends after a counter fell, and before the fall has settled. The next process reports it.
func TestAFallOfACounterOutlivesItsProcess(t *testing.T) {
	withPair(t, func(*world) {}, func(p *pair) {
		p.add(p.a, 101, 2*settle)
		p.add(p.a, -2, settle/2)
		p.endA()
		p.want("counter.over likes:1 101")

		time.Sleep(11 * time.Minute)
		p.add(p.b, 2, 3*time.Second)
		p.want("counter.over likes:1 101")
	})
}

// A counter falls twice, each time for a moment. Neither fall settles.
func TestACounterIsBackForMoments(t *testing.T) {
	withPair(t, func(*world) {}, func(p *pair) {
		p.add(p.a, 101, 2*settle)
		p.want("counter.over likes:1 101")

		p.add(p.a, -2, settle-400*time.Millisecond)
		p.add(p.a, 2, 200*time.Millisecond)
		p.add(p.a, -2, 400*time.Millisecond)
		p.add(p.a, 2, 3*settle)
		p.want()
	})
}

// farCounters are counters that sometimes cannot be read, because one of two servers is away.
type farCounters struct {
	counter.Store
	away atomic.Bool
}

func (f *farCounters) Read(
	ctx context.Context, keys []string, member string, lag time.Duration,
) ([]counter.Reading, error) {
	if f.away.Load() {
		return counter.Away(keys), nil
	}

	return f.Store.Read(ctx, keys, member, lag)
}

// A counter that cannot be read has no value, so it is not below its threshold.
func TestACounterThatCannotBeReadIsNotBack(t *testing.T) {
	var far farCounters
	withPair(t, func(w *world) { far.Store, w.counters = w.counters, &far }, func(p *pair) {
		p.add(p.a, 101, 2*settle)
		p.want("counter.over likes:1 101")

		p.add(p.a, -2, time.Second)
		p.add(p.b, 2, time.Second)
		far.away.Store(true)
		time.Sleep(2 * settle)
		far.away.Store(false)
		p.add(p.b, 1, 3*settle)
		p.want()
	})
}
