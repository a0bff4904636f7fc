package routed

import (
	"context"
	"errors"
	"iter"

	"github.com/rs/zerolog"

	"headcount/counter"
	"headcount/counter/exactpg"
	"headcount/counter/owner"
	"headcount/internal/rows"
	"headcount/internal/rows/rowspg"
	"headcount/internal/rows/rowstier"
)

// Dump reads everything that a database has, and the Redis in front of it or beside it. It changes nothing, so
// servers may be using them.
type Dump struct {
	both
	back *rowspg.Store
	tier *rowstier.Store // nil: there is none
	pg   *exactpg.Store
}

var _ counter.Dumper = (*Dump)(nil)

// OpenDump opens the counters in the database of a URL, and in the rows of the Redis with it; nil: what PostgreSQL
// has is all, whatever is in front of it. It fails, with postgres.ErrConfig, if the database cannot be used.
func OpenDump(ctx context.Context, url string, use Use, redis rows.Store) (*Dump, error) {
	cfg := use.config()
	cfg.NoFront = ""
	cfg.URL = url
	cfg.ReadOnly = true
	cfg.Log = zerolog.Nop()
	back, err := open(ctx, cfg)
	if err != nil {
		return nil, err
	}

	d := &Dump{back: back}
	d.pg = exactpg.New(exactpg.Config{DB: back.DB(), ReadOnly: true, Log: zerolog.Nop()})
	store := redis
	switch {
	case redis == nil:
		store = back
	case use == UseBehind: // what is not drained yet is in Redis alone
		d.tier = rowstier.New(redis, back, rowstier.Config{Log: zerolog.Nop()})
		store = d.tier
	}
	d.both = both{owner.NewReader(store, rows.PartitionOf), d.pg}

	return d, nil
}

// Close closes what OpenDump opened.
func (d *Dump) Close() error {
	var err error
	if d.tier != nil {
		err = d.tier.Close(context.Background()) // it has nothing to drain
	}
	d.pg.Close()
	d.back.Close()

	return err
}

// both are the counters of owners, and exact ones.
type both struct{ owned, exact counter.Dumper }

// Deleted implements counter.Dumper.
func (b both) Deleted(ctx context.Context) (uint64, error) {
	owned, err := b.owned.Deleted(ctx)
	if err != nil {
		return 0, err
	}
	exact, err := b.exact.Deleted(ctx)

	return max(owned, exact), err
}

// Dump implements counter.Dumper: the counters of both, in the order of their keys.
func (b both) Dump(ctx context.Context, after string, each func(counter.Copy) error) error {
	next, stop := iter.Pull2(copies(ctx, b.owned, after))
	defer stop()

	one, err, more := next()

	// upTo passes those whose key is less than key on, all of them if key is empty.
	upTo := func(key string) error {
		for more && err == nil && (key == "" || one.Key < key) {
			if err := each(one); err != nil {
				return err
			}
			one, err, more = next()
		}

		return err
	}

	failed := b.exact.Dump(ctx, after, func(c counter.Copy) error {
		if err := upTo(c.Key); err != nil {
			return err
		}

		return each(c)
	})
	if failed != nil {
		return failed
	}

	return upTo("")
}

var errEnough = errors.New("enough")

// copies returns what a dump calls its function with, and the error with which it ends.
func copies(ctx context.Context, of counter.Dumper, after string) iter.Seq2[counter.Copy, error] {
	return func(yield func(counter.Copy, error) bool) {
		err := of.Dump(ctx, after, func(c counter.Copy) error {
			if !yield(c, nil) {
				return errEnough
			}

			return nil
		})
		if err != nil && !errors.Is(err, errEnough) {
			yield(counter.Copy{}, err)
		}
	}
}
