package tiered

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"

	"headcount/counter"
	"headcount/counter/counterpg"
	"headcount/counter/counterredis"
	"headcount/internal/redisconn"
)

// BesideConfig tunes a Beside.
type BesideConfig struct {
	Redis      string                // URL, as counterredis.Config has it; required
	Postgres   string                // URL, as counterpg.Config has it; required
	Region     string                // as counterredis.Config has it
	Rules      *counter.Rules        // say which counters are exact; required
	Dial       time.Duration         // as counterredis.Config has it
	Registerer prometheus.Registerer // of the store's metrics; nil: none
	Log        zerolog.Logger
	OnRedis    counter.States   // optional
	OnPostgres counter.States   // optional
	Marks      *redisconn.Marks // as counterredis.Config has them
}

// Beside is a counter.Store of a region with others: exact counters are in PostgreSQL, which all regions share, and all
// others, and limits, in the region's own Redis. See the package doc. Its methods may be called from any goroutine.
type Beside struct {
	*counterredis.Store
	pg    *counterpg.Store
	rules *counter.Rules
}

var (
	_ counter.Store    = (*Beside)(nil)
	_ counter.Dumper   = (*Beside)(nil)
	_ counter.Restorer = (*Beside)(nil)
)

// OpenBeside returns a store over both. It fails as counterredis.Open and counterpg.Open do: when settings
// cannot work, not when one of the two does not answer. Close ends it.
func OpenBeside(ctx context.Context, cfg BesideConfig) (*Beside, error) {
	pg, err := counterpg.Open(ctx, counterpg.Config{URL: cfg.Postgres, Behind: true, Beside: true, Log: cfg.Log, OnState: cfg.OnPostgres})
	if err != nil {
		return nil, err
	}
	redis, err := counterredis.Open(counterredis.Config{
		URL: cfg.Redis, Dial: cfg.Dial, Region: cfg.Region, Registerer: cfg.Registerer, Log: cfg.Log, OnState: cfg.OnRedis, Marks: cfg.Marks,
	})
	if err != nil {
		return nil, errors.Join(err, pg.Close())
	}
	return &Beside{Store: redis, pg: pg, rules: cfg.Rules}, nil
}

// Close is as counter.Store says.
func (s *Beside) Close() error { return errors.Join(s.Store.Close(), s.pg.Close()) }

// Cause is why PostgreSQL cannot be used; nil: it can.
func (s *Beside) Cause() error { return s.pg.Cause() }

// Redis is the region's.
func (s *Beside) Redis() *counterredis.Store { return s.Store }

func (s *Beside) exact(key string) bool {
	rule := s.rules.Find(key)
	return rule != nil && rule.Kind == counter.Exact
}

// part parts keys by where their counters are.
func (s *Beside) part(keys []string) (hot, exact []string) {
	for _, key := range keys {
		if s.exact(key) {
			exact = append(exact, key)
		} else {
			hot = append(hot, key)
		}
	}
	return hot, exact
}

// Apply is as counter.Writer says. What is of one store alone does not wait for the other.
func (s *Beside) Apply(ctx context.Context, ops []counter.Op) []counter.Result {
	results := make([]counter.Result, len(ops))
	var hot, exact []int // what may go at once
	flush := func() {
		var wg sync.WaitGroup
		wg.Go(func() { applySome(ctx, s.Store, ops, hot, results) })
		applySome(ctx, s.pg, ops, exact, results)
		wg.Wait()
		hot, exact = nil, nil
	}
	for i := range ops {
		op := &ops[i]
		if results[i].Err = op.Check(); results[i].Err != nil {
			continue
		}
		switch is := s.exact(op.Changes[0].Key); {
		case !is:
			hot = append(hot, i)
		case !op.OfBatch():
			exact = append(exact, i)
		default: // its order among the others stays
			flush()
			results[i] = s.batch(ctx, op)
		}
	}
	flush()
	return results
}

// applySome makes the operations at of ops.
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

// batch makes an operation on exact counters under an identity of a batch. All batches share one space of identities, so
// Redis is asked before, and told afterwards.
func (s *Beside) batch(ctx context.Context, op *counter.Op) counter.Result {
	known, err := s.Store.Remembers(ctx, op.Identity)
	result := counter.Result{Replay: known}
	if err == nil && !known {
		if result = s.pg.Apply(ctx, []counter.Op{*op})[0]; result.Err != nil {
			return result
		}
		err = s.Store.Note(ctx, []counter.Identity{op.Identity}, nil, 0)
	}
	if err != nil {
		return counter.Result{Err: fmt.Errorf("tiered: apply: %w", unavailable(err))}
	}
	if result.Replay {
		return replay(op, func(keys []string) ([]counter.Reading, error) { return s.read(ctx, keys, "", 0, true) })
	}
	return result
}

// Read is as counter.Reader says.
func (s *Beside) Read(ctx context.Context, keys []string, member string, lag time.Duration) ([]counter.Reading, error) {
	return s.read(ctx, keys, member, lag, false)
}

// read reads counters where they are; whole is as ReadHot has it.
func (s *Beside) read(ctx context.Context, keys []string, member string, lag time.Duration, whole bool) ([]counter.Reading, error) {
	hot, exact := s.part(keys)
	var hots, exacts []counter.Reading
	var hotErr, err error
	var wg sync.WaitGroup
	if len(hot) > 0 {
		wg.Go(func() { hots, _, hotErr = s.Store.ReadHot(ctx, hot, member, whole) })
	}
	if len(exact) > 0 {
		exacts, err = s.pg.Read(ctx, exact, member, lag)
	}
	wg.Wait()
	if err := errors.Join(hotErr, err); err != nil {
		return nil, fmt.Errorf("tiered: read %d counters: %w", len(keys), unavailable(err))
	}
	by := make(map[string]counter.Reading, len(keys))
	for _, list := range [...][]counter.Reading{hots, exacts} {
		for _, r := range list {
			by[r.Key] = r
		}
	}
	out := make([]counter.Reading, len(keys))
	for i, key := range keys {
		out[i] = by[key]
	}
	return out, nil
}

// reader is the store in which key is.
func (s *Beside) reader(key string) counter.Reader {
	if s.exact(key) {
		return s.pg
	}
	return s.Store
}

// Ledger is as counter.Reader says.
func (s *Beside) Ledger(ctx context.Context, key string, after uint64, limit int) (counter.Ledger, error) {
	return s.reader(key).Ledger(ctx, key, after, limit)
}

// History is as counter.Reader says.
func (s *Beside) History(ctx context.Context, key string, step time.Duration, from, to int64) (counter.Counter, []counter.Gain, error) {
	return s.reader(key).History(ctx, key, step, from, to)
}

// Dimension is as counter.Reader says.
func (s *Beside) Dimension(ctx context.Context, key, name string) (counter.Counter, counter.Counted, error) {
	return s.reader(key).Dimension(ctx, key, name)
}

// Size is as counter.Reader says.
func (s *Beside) Size(ctx context.Context, prefix string) (int64, error) {
	exact, err := s.pg.Size(ctx, prefix)
	if err != nil {
		return 0, unavailable(err)
	}
	others, err := s.Store.Size(ctx, prefix)
	if err != nil {
		return 0, unavailable(err)
	}
	return exact + others, nil
}

// Aggregate is as counter.Reader says.
func (s *Beside) Aggregate(ctx context.Context, prefix string) (counter.Aggregate, error) {
	total := &counter.Total{}
	err := s.Store.AddTo(ctx, total, prefix)
	if err == nil {
		err = s.pg.AddTo(ctx, total, prefix, nil)
	}
	if err != nil {
		return counter.Aggregate{}, fmt.Errorf("tiered: aggregate %q: %w", prefix, unavailable(err))
	}
	return total.Aggregate(prefix)
}

// Watch is as counter.Feed says.
func (s *Beside) Watch(told func([]counter.Update), lost func()) counter.Watch {
	return watchBoth(s.Store, s.pg, told, lost, s.part)
}

// Deleted is as counter.Dumper says.
func (s *Beside) Deleted(ctx context.Context) (uint64, error) {
	redis, err := s.Store.Deleted(ctx)
	if err != nil {
		return 0, err
	}
	pg, err := s.pg.Deleted(ctx)
	return max(redis, pg), err
}

// Dump is as counter.Dumper says, but each store has a moment of its own.
func (s *Beside) Dump(ctx context.Context, after string, each func(counter.Copy) error) error {
	next, stop := iter.Pull2(func(yield func(counter.Copy, error) bool) {
		enough := errors.New("enough")
		err := s.Store.Dump(ctx, after, func(c counter.Copy) error {
			if !yield(c, nil) {
				return enough
			}
			return nil
		})
		if err != nil && !errors.Is(err, enough) {
			yield(counter.Copy{}, err)
		}
	})
	defer stop()
	hot, err, more := next()
	upTo := func(key string) error { // those of Redis before key; empty: all
		for ; more && err == nil && (key == "" || hot.Key < key); hot, err, more = next() {
			if err := each(hot); err != nil {
				return err
			}
		}
		return err
	}
	if err := s.pg.Dump(ctx, after, func(c counter.Copy) error {
		if err := upTo(c.Key); err != nil {
			return err
		}
		return each(c)
	}); err != nil {
		return err
	}
	return upTo("")
}

// Restore is as counter.Restorer says, but not all or none: a counter goes where its rule says.
func (s *Beside) Restore(ctx context.Context, copies []counter.Copy, rules *counter.Rules) (restored int, err error) {
	var hot, exact []counter.Copy
	for _, c := range copies {
		if s.exact(c.Key) {
			exact = append(exact, c)
		} else {
			hot = append(hot, c)
		}
	}
	if len(exact) > 0 {
		if restored, err = s.pg.Restore(ctx, exact, rules); err != nil {
			return restored, err
		}
	}
	if len(hot) > 0 {
		n, err := s.Store.Restore(ctx, hot, rules)
		return restored + n, err
	}
	return restored, nil
}

// RestoreDeleted is as counter.Restorer says.
func (s *Beside) RestoreDeleted(ctx context.Context, deleted uint64) error {
	if err := s.Store.RestoreDeleted(ctx, deleted); err != nil {
		return err
	}
	return s.pg.RestoreDeleted(ctx, deleted)
}
