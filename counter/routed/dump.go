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

// Dump reads everything in a database, and in the Redis that is used with it. It changes nothing, so servers may be
// running.
type Dump struct {
	both
	back *rowspg.Store
	tier *rowstier.Store // nil: there is no Redis in front of the database
	pg   *exactpg.Store
}

var _ counter.Dumper = (*Dump)(nil)

// OpenDump opens the counters in the database of a URL, and in the rows of the Redis that is used with it. If redis is
// nil, it reads only what PostgreSQL has. It fails, with postgres.ErrConfig, if the database cannot be used.
func OpenDump(ctx context.Context, url string, use Use, redis rows.Store) (*Dump, error) {
	cfg := use.config()
	// A PostgreSQL behind a Redis is not refused here: it is what is left to export when the Redis is lost.
	cfg.RefuseTier = ""
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
	case use == UseTiered: // undrained rows are in Redis only
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
		err = d.tier.Close(context.Background()) // there is nothing to drain
	}
	d.pg.Close()
	d.back.Close()

	return err
}

// both dumps the counters of owners and the exact counters as one.
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
	// Both dumps are read in step, so that neither has to be kept in memory.
	next, stop := iter.Pull2(copies(ctx, b.owned, after))
	defer stop()

	one, err, more := next()

	// upTo passes on the owned counters whose keys are less than key, or all remaining ones if key is empty.
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

// copies iterates over the counters of a dump, and ends with its error.
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
