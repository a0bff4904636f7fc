package transfer

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"time"

	"github.com/rs/zerolog"

	"headcount/counter"
	"headcount/counter/call"
	"headcount/counter/local"
	"headcount/counter/owner"
	"headcount/counter/routed"
	"headcount/internal/redisconn"
	"headcount/internal/rows"
	"headcount/internal/rows/rowsredis"
	"headcount/presence/presenceredis"
)

// closers are functions that close what was opened, in the order of opening.
type closers []func() error

// Close closes everything.
func (c closers) Close() error {
	var err error
	// What was opened later uses what was opened before.
	for i := len(c) - 1; i >= 0; i-- {
		err = errors.Join(err, c[i]())
	}

	return err
}

func (c *closers) add(fn func() error) { *c = append(*c, fn) }

// openRedis opens the rows of a Redis, unless the Redis is refused.
func (c *closers) openRedis(ctx context.Context, p *Place, imports bool) (*redisconn.Conn, *rowsredis.Store, error) {
	conn, err := p.dial(ctx)
	if err != nil {
		return nil, nil, err
	}
	// Also a connection to a Redis that is refused below is closed.
	c.add(conn.Close)
	if err := p.checkRedis(ctx, conn, imports); err != nil {
		return nil, nil, err
	}

	redis := rowsredis.New(rowsredis.Config{Conn: conn})
	c.add(func() error {
		redis.Close()
		return nil
	})

	return conn, redis, nil
}

// Source has the counters to export.
type Source struct {
	counter.Dumper
	closers
}

// OpenSource opens the counters for an export, and changes nothing, so servers may be running. It fails, with
// postgres.ErrConfig for a database, if the counters cannot be used.
func (p *Place) OpenSource(ctx context.Context) (*Source, error) {
	s := &Source{}
	if err := s.open(ctx, p); err != nil {
		// What was opened before the error is closed again.
		return nil, errors.Join(err, s.Close())
	}

	return s, nil
}

func (s *Source) open(ctx context.Context, p *Place) error {
	// Read the file without an owner, so that it can be exported even if the disk is full.
	if p.isFile() {
		file, err := local.OpenDump(p.Dir)
		if err != nil {
			return fmt.Errorf("--data-dir: %w", err)
		}
		s.add(file.Close)
		s.Dumper = file

		return nil
	}

	var redis rows.Store // nil: read only what PostgreSQL has
	if p.Redis != "" {
		_, store, err := s.openRedis(ctx, p, false)
		if err != nil {
			return err
		}
		redis = store
		s.Dumper = owner.NewReader(redis, rows.PartitionOf)
	}
	if p.Postgres == "" {
		return nil
	}

	dump, err := routed.OpenDump(ctx, p.Postgres, p.Use(), redis)
	if err != nil {
		return err
	}
	s.add(dump.Close)
	s.Dumper = dump

	return nil
}

// Target is a store into which an export is imported.
type Target struct {
	counter.Restorer
	closers
	place *Place
	redis *redisconn.Conn // nil: there is none
}

// OpenTarget opens the counters for an import, and claims them. It refuses a Redis that running servers use. It fails
// in the same cases as OpenSource.
func (p *Place) OpenTarget(ctx context.Context, rules *counter.Rules) (*Target, error) {
	t := &Target{place: p}
	if err := t.open(ctx, rules); err != nil {
		return nil, errors.Join(err, t.Close())
	}

	return t, nil
}

func (t *Target) open(ctx context.Context, rules *counter.Rules) error {
	p := t.place
	switch {
	case p.isFile():
		file, err := local.Open(ctx, p.Dir, rules, zerolog.Nop())
		if err != nil {
			return fmt.Errorf("--data-dir: %w", err)
		}
		t.add(file.Close)
		t.Restorer = file

		return nil
	case p.Redis == "":
		// This claims everything, so a server that uses the database makes no more changes.
		alone, err := routed.OpenAlone(ctx, routed.AloneConfig{URL: p.Postgres, Rules: rules, Log: zerolog.Nop()})
		if err != nil {
			return err
		}
		t.add(alone.Close)
		t.Restorer = alone

		return nil
	}

	conn, redis, err := t.openRedis(ctx, p, true)
	if err != nil {
		return err
	}
	t.redis = conn
	switch {
	case p.Postgres == "":
		return t.openAlone(ctx, redis, rules)
	case p.Regions:
		return t.openSharedExact(ctx, redis, rules)
	default:
		return t.openTiered(ctx, redis, rules)
	}
}

// openAlone opens a target whose counters are all in Redis.
func (t *Target) openAlone(ctx context.Context, redis rows.Store, rules *counter.Rules) error {
	owned, err := t.own(ctx, redis, rules, owner.Config{Region: owner.AnyRegion})
	t.Restorer = owned

	return err
}

// openSharedExact opens a target whose exact counters are in the PostgreSQL of all regions, and the others in Redis.
func (t *Target) openSharedExact(ctx context.Context, redis rows.Store, rules *counter.Rules) error {
	shared, err := routed.OpenSharedExact(ctx, routed.SharedExactConfig{
		Owned: redis, URL: t.place.Postgres, Rules: rules, Log: zerolog.Nop(),
	})
	if err != nil {
		return err
	}
	t.add(func() error {
		shared.Close()
		return nil
	})

	owned, err := t.own(ctx, shared.Rows(), rules, owner.Config{ExactOutside: true, Region: owner.AnyRegion})
	if err != nil {
		return err
	}
	t.Restorer = shared.NewStore(owned)

	return nil
}

const (
	// adoptWithin limits how long an import waits until PostgreSQL has what Redis had before PostgreSQL was added, and
	// persistWithin until it has the imported counters.
	adoptWithin   = 10 * time.Minute
	persistWithin = 10 * time.Minute
)

// openTiered opens a target whose exact counters are in PostgreSQL, and the others in Redis, from where they are
// drained to PostgreSQL.
func (t *Target) openTiered(ctx context.Context, redis rows.Store, rules *counter.Rules) error {
	tiered, err := routed.OpenTiered(ctx, routed.TieredConfig{URL: t.place.Postgres, Rules: rules, Log: zerolog.Nop()})
	if err != nil {
		return err
	}
	tiered.Begin(redis)
	t.add(func() error {
		// Also after an import that was interrupted: what it has restored goes to PostgreSQL.
		ctx, cancel := context.WithTimeout(context.Background(), persistWithin)
		defer cancel()
		return tiered.Close(ctx)
	})

	owned, err := t.own(ctx, tiered.Rows(), rules, owner.Config{ExactOutside: true})
	if err != nil {
		return err
	}
	t.Restorer = tiered.NewStore(owned)

	ctx, cancel := context.WithTimeout(ctx, adoptWithin)
	defer cancel()

	return tiered.AwaitReady(ctx)
}

// own claims everything. With owner.AnyRegion, it keeps what an export says about other regions, whatever this region
// is called.
func (t *Target) own(
	ctx context.Context, over rows.Store, rules *counter.Rules, cfg owner.Config,
) (*call.Store, error) {
	// No server has this name, so none takes the claim of an import for its own.
	cfg.Name = "import " + rand.Text()
	owned, err := call.NewLocal(ctx, over, rules, cfg)
	if err != nil {
		return nil, err
	}
	t.add(owned.Close)

	return owned, nil
}

// Complete marks the import as complete. From then on servers of this release that use the same stores serve the
// counters of the Redis, and other releases refuse to start.
func (t *Target) Complete(ctx context.Context) error {
	if t.redis == nil {
		return nil
	}

	return ofRedis(withRedis(ctx, t.redis, func(ctx context.Context, c *redisconn.Client) error {
		return presenceredis.NoteCounters(ctx, c, t.place.Facts())
	}))
}
