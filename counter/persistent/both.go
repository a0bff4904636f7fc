package persistent

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"sync"

	"headcount/counter"
	"headcount/counter/pgstore"
	"headcount/counter/redisstore"
)

// This file has what Store and Beside share: operations and watches of both stores.

// cross makes an operation on counters of both: on those in Redis that hot says, and on exact ones in PostgreSQL, which
// decides. again: it has to be looked at anew.
func cross(ctx context.Context, redis *redisstore.Store, pg *pgstore.Store, op *counter.Op, hot func(*counter.Change) bool, behind pgstore.Behind, result *counter.Result) (again bool, err error) {
	exact := func(upTo int) counter.Op {
		part := counter.Op{Identity: op.Identity}
		for i := range op.Changes[:upTo] {
			if !hot(&op.Changes[i]) {
				part.Changes = append(part.Changes, op.Changes[i])
			}
		}
		return part
	}
	// lookAnew has Redis look for counters in PostgreSQL again: they are not there, or not exact.
	lookAnew := func(part counter.Op) error {
		gone := make([]string, len(part.Changes))
		for i := range part.Changes {
			gone[i] = part.Changes[i].Key
		}
		return redis.Note(ctx, nil, gone, 0)
	}
	held, at, refusal, err := redis.Hold(ctx, op, hot)
	switch {
	case errors.Is(err, redisstore.ErrMoved) || errors.Is(err, redisstore.ErrLost):
		return true, nil
	case err != nil:
		return false, err
	case refusal != nil:
		// A change before it may be refused, too, and would be the first at fault; and what is a
		// replay is not refused.
		*result = counter.Result{Err: refusal}
		if before := exact(at); len(before.Changes) > 0 {
			behind.Dry, behind.Hot = true, nil
			did, err := pg.ApplyExact(ctx, []counter.Op{before}, behind)
			switch {
			case err != nil:
				return false, err
			case len(did.Results) == 0:
				return true, lookAnew(before)
			case did.Results[0].Err != nil || did.Results[0].Replay:
				*result = did.Results[0]
			}
		}
		return false, nil
	}
	behind.Transaction, behind.Generation = held.ID, held.Generation
	part := exact(len(op.Changes))
	did, err := pg.ApplyExact(ctx, []counter.Op{part}, behind)
	if err != nil {
		// Perhaps it is made. Who meets its locks finds out, and finishes it.
		var finished bool
		var fault error
		if !errors.Is(err, pgstore.ErrNotMade) {
			finished, fault = pg.Outcome(ctx, held.ID)
		}
		if fault == nil && !finished && held.Abort(ctx) == nil && (errors.Is(err, pgstore.ErrRow) || errors.Is(err, pgstore.ErrGeneration)) {
			return true, nil
		}
		return false, err
	}
	made := did.Results
	if len(made) == 0 || made[0].Err != nil || made[0].Replay {
		if err := held.Abort(ctx); err != nil {
			return false, err
		}
		if len(made) == 0 {
			return true, lookAnew(part)
		}
		*result = made[0]
		return false, nil
	}
	counters, err := held.Commit(ctx)
	if err == nil && op.Identity != (counter.Identity{}) {
		err = redis.Note(ctx, []counter.Identity{op.Identity}, nil, 0)
	}
	if err != nil {
		return false, err
	}
	for i := range part.Changes {
		counters[part.Changes[i].Key] = made[0].Counters[i]
	}
	result.Counters = countersOf(op, counters)
	return false, nil
}

// claims are those of PostgreSQL to identities of batches, while it decides their operations: Redis decides nothing
// under the same identities meanwhile.
type claims struct {
	redis *redisstore.Store
	who   string
	ids   []counter.Identity
}

// claim claims the identities of batches among ops. known: Redis remembers one of them; then nothing is claimed.
func claim(ctx context.Context, redis *redisstore.Store, ops ...counter.Op) (c claims, known bool, err error) {
	c = claims{redis: redis, who: rand.Text()}
	for i := range ops {
		if ops[i].OfBatch() {
			c.ids = append(c.ids, ops[i].Identity)
		}
	}
	if len(c.ids) > 0 {
		known, err = redis.Claim(ctx, c.ids, c.who)
	}
	if known {
		c.end(ctx, nil)
	}
	return c, known, err
}

// end ends the claims, unless err leaves open whether an operation was made, or whether Redis knows: then who meets
// a claim asks PostgreSQL. So does who meets one that cannot be ended now.
func (c claims) end(ctx context.Context, err error) {
	if len(c.ids) > 0 && (!errors.Is(err, counter.ErrUnavailable) || errors.Is(err, pgstore.ErrNotMade)) {
		_ = c.redis.EndClaim(context.WithoutCancel(ctx), c.ids, c.who)
	}
}

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
		return counter.Result{Err: fmt.Errorf("persistent: a replay: %w", unavailable(err))}
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
