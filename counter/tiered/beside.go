package tiered

import (
	"context"
	"errors"
	"fmt"
	"iter"

	"headcount/counter"
	"headcount/counter/counterpg"
	"headcount/counter/counterredis"
)

// Beside is a counter.Store of a region with others: exact counters are in PostgreSQL, which all regions share, and all
// others, and limits, in the region's own Redis. See the package doc. Its methods may be called from any goroutine.
type Beside struct {
	router
	region
}

// region is the Redis of a region. Its methods are one level deeper than those of router, so those of router win.
type region struct{ *counterredis.Store }

var (
	_ counter.Store    = (*Beside)(nil)
	_ counter.Dumper   = (*Beside)(nil)
	_ counter.Restorer = (*Beside)(nil)
)

// OpenBeside returns a store over both. Like counterpg.Open it fails if settings cannot work, not if a server does not
// answer. The caller closes it before the connection to Redis.
func OpenBeside(ctx context.Context, cfg Config) (*Beside, error) {
	both, err := openBoth(ctx, cfg, counterpg.Config{Beside: true}, 0)
	if err != nil {
		return nil, err
	}
	return &Beside{both, region{both.redis}}, nil
}

// Close implements counter.Store.
func (s *Beside) Close() error { return errors.Join(s.Store.Close(), s.pg.Close()) }

// Size implements counter.Reader.
func (s *Beside) Size(ctx context.Context, prefix string) (int64, error) {
	n, err := s.Store.Size(ctx, prefix)
	if err == nil && s.rules.Any(prefix, counter.Exact) {
		var exact int64
		exact, err = s.pg.Size(ctx, prefix)
		n += exact
	}
	if err != nil {
		return 0, unavailable(err)
	}
	return n, nil
}

// Aggregate implements counter.Reader. It needs PostgreSQL only where a counter may be exact.
func (s *Beside) Aggregate(ctx context.Context, prefix string) (counter.Aggregate, error) {
	total := &counter.Total{}
	err := s.Store.AddTo(ctx, total, prefix)
	if err == nil && s.rules.Any(prefix, counter.Exact) {
		err = s.pg.AddTo(ctx, total, prefix, nil)
	}
	if err != nil {
		return counter.Aggregate{}, during(fmt.Sprintf("aggregate %q", prefix), err)
	}
	return total.Aggregate(prefix)
}

// Deleted implements counter.Dumper.
func (s *Beside) Deleted(ctx context.Context) (uint64, error) {
	redis, err := s.Store.Deleted(ctx)
	if err != nil {
		return 0, err
	}
	pg, err := s.pg.Deleted(ctx)
	return max(redis, pg), err
}

// Dump implements counter.Dumper, but each store has a moment of its own.
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
	upTo := func(key string) error { // calls each with those of Redis before key; empty: with all
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

// Restore implements counter.Restorer, but not all or none: a counter goes where its rule says.
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

// RestoreDeleted implements counter.Restorer.
func (s *Beside) RestoreDeleted(ctx context.Context, deleted uint64) error {
	if err := s.Store.RestoreDeleted(ctx, deleted); err != nil {
		return err
	}
	return s.pg.RestoreDeleted(ctx, deleted)
}
