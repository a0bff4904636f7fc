package tiered

import (
	"context"
	"fmt"
	"sync"
	"time"

	"headcount/counter"
	"headcount/counter/counterpg"
	"headcount/counter/counterredis"
)

// router sends each call to the store that the rule of its key gives. Store and Beside have one.
type router struct {
	hot interface { // has the counters that are not exact
		counter.Writer
		counter.Reader
	}
	redis *counterredis.Store
	pg    *counterpg.Store // has the exact ones
	rules *counter.Rules
}

// Redis returns the store in Redis, which has the shards of sums and the state that regions share.
func (r *router) Redis() *counterredis.Store { return r.redis }

// Cause is why PostgreSQL cannot be used; nil: it can.
func (r *router) Cause() error { return r.pg.Cause() }

// ServeSQL is as counterpg.Store has it.
func (r *router) ServeSQL(ctx context.Context, rules *counter.Rules, changed func([]counter.Counter)) {
	r.pg.ServeSQL(ctx, rules, changed)
}

func (r *router) exact(key string) bool {
	rule := r.rules.Find(key)
	return rule != nil && rule.Kind == counter.Exact
}

// part divides keys by the store of their counters.
func (r *router) part(keys []string) (hot, exact []string) {
	for _, key := range keys {
		if r.exact(key) {
			exact = append(exact, key)
		} else {
			hot = append(hot, key)
		}
	}
	return hot, exact
}

// Apply implements counter.Writer. What is of one store alone does not wait for the other.
func (r *router) Apply(ctx context.Context, ops []counter.Op) []counter.Result {
	results := make([]counter.Result, len(ops))
	var hot, exact []int // operations whose order does not matter
	flush := func() {
		var wg sync.WaitGroup
		wg.Go(func() { applySome(ctx, r.hot, ops, hot, results) })
		applySome(ctx, r.pg, ops, exact, results)
		wg.Wait()
		hot, exact = nil, nil
	}
	for i := range ops {
		op := &ops[i]
		if results[i].Err = op.Check(); results[i].Err != nil {
			continue
		}
		switch is := r.exact(op.Changes[0].Key); {
		case !is:
			hot = append(hot, i)
		case !op.OfBatch():
			exact = append(exact, i)
		default: // it keeps its order among the others
			flush()
			results[i] = r.batch(ctx, op)
		}
	}
	flush()
	return results
}

// applySome makes the operations of ops with the indexes at.
func applySome(ctx context.Context, to counter.Writer, ops []counter.Op, at []int, results []counter.Result) {
	if len(at) == 0 {
		return
	}
	some := make([]counter.Op, len(at))
	for n, i := range at {
		some[n] = ops[i]
	}
	for n, r := range to.Apply(ctx, some) {
		results[at[n]] = r
	}
}

// batch makes an operation on exact counters with an idempotency key of a batch. All batches share one space of
// idempotency keys, so the idempotency key is looked up in Redis before, and noted there afterwards.
func (r *router) batch(ctx context.Context, op *counter.Op) counter.Result {
	known, err := r.redis.Remembers(ctx, op)
	result := counter.Result{Replay: known}
	if err == nil && !known {
		if result = r.pg.Apply(ctx, []counter.Op{*op})[0]; result.Err != nil {
			return result
		}
		err = r.redis.Note(ctx, op)
	}
	if err != nil {
		return counter.Result{Err: during("apply", err)}
	}
	if result.Replay {
		return r.replay(ctx, op)
	}
	return result
}

// replay returns the result of a replay: the present counters.
func (r *router) replay(ctx context.Context, op *counter.Op) counter.Result {
	by, err := op.ReadFrom(ctx, r)
	if err != nil {
		return counter.Result{Err: during("a replay", err)}
	}
	return counter.Result{Replay: true, Counters: op.Counters(by)}
}

// Read implements counter.Reader: it reads counters where they are.
func (r *router) Read(ctx context.Context, keys []string, member string, lag time.Duration) ([]counter.Reading, error) {
	hot, exact := r.part(keys)
	var hots, exacts []counter.Reading
	var hotErr, err error
	var wg sync.WaitGroup
	if len(hot) > 0 {
		wg.Go(func() { hots, hotErr = r.hot.Read(ctx, hot, member, lag) })
	}
	if len(exact) > 0 {
		exacts, err = r.readBehind(ctx, exact, member, lag)
	}
	wg.Wait()
	for _, err := range [...]error{hotErr, err} {
		if err != nil {
			return nil, fmt.Errorf("tiered: read %d counters: %w", len(keys), unavailable(err))
		}
	}
	by := make(map[string]counter.Reading, len(keys))
	for _, list := range [...][]counter.Reading{hots, exacts} {
		for _, one := range list {
			by[one.Key] = one
		}
	}
	out := make([]counter.Reading, len(keys))
	for i, key := range keys {
		out[i] = by[key]
	}
	return out, nil
}

// readBehind reads counters in PostgreSQL. While it is away, a read that may lag says so of each.
func (r *router) readBehind(ctx context.Context, keys []string, member string, lag time.Duration) ([]counter.Reading, error) {
	found, err := r.pg.Read(ctx, keys, member, lag)
	if err != nil && lag > 0 {
		return counter.Away(keys), nil
	}
	return found, err
}

// reader returns the store of key.
func (r *router) reader(key string) counter.Reader {
	if r.exact(key) {
		return r.pg
	}
	return r.hot
}

// Ledger implements counter.Reader.
func (r *router) Ledger(ctx context.Context, key string, after uint64, limit int) (counter.Ledger, error) {
	return r.reader(key).Ledger(ctx, key, after, limit)
}

// History implements counter.Reader.
func (r *router) History(ctx context.Context, key string, step time.Duration, from, to int64) (counter.Counter, []counter.Gain, error) {
	return r.reader(key).History(ctx, key, step, from, to)
}

// Dimension implements counter.Reader.
func (r *router) Dimension(ctx context.Context, key, name string) (counter.Counter, counter.Counted, error) {
	return r.reader(key).Dimension(ctx, key, name)
}

// Watch implements counter.Feed.
func (r *router) Watch(told func([]counter.Update), lost func()) counter.Watch {
	var mu sync.Mutex // both stores call told
	one := func(updates []counter.Update) {
		mu.Lock()
		defer mu.Unlock()
		told(updates)
	}
	missed := func() {
		if lost != nil {
			mu.Lock()
			defer mu.Unlock()
			lost()
		}
	}
	return &watch{hot: r.redis.Watch(one, missed), exact: r.pg.Watch(one, missed), part: r.part}
}

// watch is a watch of both stores.
type watch struct {
	hot, exact counter.Watch
	part       func(keys []string) (hot, exact []string)
}

func (w *watch) Follow(ctx context.Context, keys ...string) error {
	hot, exact := w.part(keys)
	if err := w.hot.Follow(ctx, hot...); err != nil {
		return err
	}
	return w.exact.Follow(ctx, exact...)
}

func (w *watch) Unfollow(keys ...string) {
	hot, exact := w.part(keys)
	w.hot.Unfollow(hot...)
	w.exact.Unfollow(exact...)
}

func (w *watch) Close() {
	w.hot.Close()
	w.exact.Close()
}
