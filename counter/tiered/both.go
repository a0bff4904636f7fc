package tiered

import (
	"context"
	"fmt"
	"sync"

	"headcount/counter"
)

// This file has what Store and Beside share: replays and watches of both stores.

// countersOf are those of the changes of op.
func countersOf(op *counter.Op, by map[string]counter.Counter) []counter.Counter {
	out := make([]counter.Counter, len(op.Changes))
	for i := range op.Changes {
		out[i] = by[op.Changes[i].Key].Or(op.Changes[i].Rule.Kind)
	}
	return out
}

// replay answers an operation that was made before, with its counters as read reads them.
func replay(op *counter.Op, read func(keys []string) ([]counter.Reading, error)) counter.Result {
	by := map[string]counter.Counter{}
	var keys []string
	for i := range op.Changes {
		key := op.Changes[i].Key
		if _, seen := by[key]; !seen {
			by[key] = counter.Counter{}
			keys = append(keys, key)
		}
	}
	found, err := read(keys)
	if err != nil {
		return counter.Result{Err: fmt.Errorf("tiered: a replay: %w", unavailable(err))}
	}
	for _, r := range found {
		by[r.Key] = r.Counter
	}
	return counter.Result{Replay: true, Counters: countersOf(op, by)}
}

// watchBoth is a watch of both feeds; part says which keys are followed in which.
func watchBoth(redis, pg counter.Feed, told func([]counter.Update), lost func(), part func(keys []string) (hot, exact []string)) counter.Watch {
	var mu sync.Mutex // told is called by two
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
	return &watch{hot: redis.Watch(one, missed), exact: pg.Watch(one, missed), part: part}
}

// watch is of both.
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
