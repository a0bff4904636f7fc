package cluster

import (
	"context"
	"crypto/rand"
	"fmt"
	"strconv"

	"github.com/rs/zerolog"

	"headcount/counter"
	"headcount/counter/call"
	"headcount/counter/owner"
	"headcount/counter/routed"
	"headcount/internal/redisconn"
	"headcount/internal/rows"
	"headcount/internal/rows/rowsredis"
)

// SoleConfig describes a Sole.
type SoleConfig struct {
	Redis    *redisconn.Conn // required
	Postgres string          // URL of the PostgreSQL beside Redis; empty: there is none
	Rules    *counter.Rules  // required
	// Imports says that an export is read into the Redis. It may have counters of an earlier release, which stay as they
	// are.
	Imports bool
	Log     zerolog.Logger
}

// Sole is the counters of a region in the hands of a program that exports or imports them. While processes use the same
// Redis, nothing may be changed.
type Sole struct {
	whole
	redis  *redisconn.Caller
	rows   *rowsredis.Store
	owned  *call.Store
	beside *routed.Beside // nil: there is no PostgreSQL
}

// whole is what can be done with the counters.
type whole interface {
	counter.Store
	counter.Dumper
	counter.Restorer
}

// OpenSole opens the counters of a region. It fails if settings cannot work. Before Own nothing can be changed.
func OpenSole(ctx context.Context, cfg SoleConfig) (*Sole, error) {
	accepted := accept
	if cfg.Imports {
		accepted = acceptUpTo
	}
	s := &Sole{
		redis: cfg.Redis.Caller(redisconn.CallerConfig{Unavailable: counter.ErrUnavailable, Accept: accepted}),
		rows:  rowsredis.New(rowsredis.Config{Conn: cfg.Redis, Accept: accepted}),
	}
	over := rows.Store(s.rows)
	if cfg.Postgres != "" {
		var err error
		s.beside, err = routed.OpenBeside(ctx, routed.BesideConfig{
			Owned: s.rows, URL: cfg.Postgres, Rules: cfg.Rules, Log: cfg.Log,
		})
		if err != nil {
			s.rows.Close()
			s.redis.Close()
			return nil, fmt.Errorf("cluster: %w", err)
		}
		over = s.beside.Rows()
	}

	s.owned = call.NewSole(over, cfg.Rules, owner.Config{
		Name:         rand.Text(),
		WriteTimeout: writeTimeout,
		ExactOutside: s.beside != nil,
		// What an export says of other regions is kept, whatever this one is called.
		Region: owner.AnyRegion,
	}, nil)
	s.whole = s.owned
	if s.beside != nil {
		s.whole = s.beside.Over(s.owned)
	}

	return s, nil
}

// Own claims everything, so that counters can be changed.
func (s *Sole) Own(ctx context.Context) error { return s.owned.Own(ctx) }

// acceptUpTo refuses counters of a later release.
func acceptUpTo(ctx context.Context, c *redisconn.Client) error {
	is, err := c.HMGet(ctx, "hc:{c}:facts", "counters").Result()
	if err != nil {
		return err
	}

	text, _ := is[0].(string)
	if n, _ := strconv.Atoi(text); n > Format {
		return accept(ctx, c)
	}

	return nil
}

// Complete says that an import is whole. From then on the counters of the Redis are those of this release.
func (s *Sole) Complete(ctx context.Context) error { return complete(ctx, s.redis) }

// Leases returns the names of the processes that use the Redis, sorted.
func (s *Sole) Leases(ctx context.Context) ([]string, error) { return leases(ctx, s.redis) }

// Close implements counter.Store.
func (s *Sole) Close() error {
	_ = s.owned.Close() // without an error
	if s.beside != nil {
		s.beside.Close()
	}
	s.rows.Close()
	s.redis.Close()

	return nil
}
