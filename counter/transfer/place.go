package transfer

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/rs/zerolog"

	"headcount/counter"
	"headcount/counter/cluster"
	"headcount/counter/routed"
	"headcount/internal/redisconn"
	"headcount/presence/presenceredis"
)

// Place says where counters are: in a file, in Redis, in PostgreSQL, or in both of them.
type Place struct {
	Dir      string // data directory with the file; ignored if Redis or Postgres is set
	Redis    string // URL; empty: no counters are in Redis
	Postgres string // URL; empty: no counters are in PostgreSQL
	// Regions says that the Redis belongs to one of several regions, which share a PostgreSQL that has only the exact
	// counters. Otherwise PostgreSQL is the durable store behind Redis.
	Regions bool
}

// isFile reports whether the counters are in a file.
func (p *Place) isFile() bool { return p.Redis == "" && p.Postgres == "" }

// Use returns for what counters use PostgreSQL.
func (p *Place) Use() routed.Use {
	switch {
	case p.Redis == "":
		return routed.UseAlone
	case p.Regions:
		return routed.UseSharedExact
	default:
		return routed.UseTiered
	}
}

// Facts returns the facts that the servers of this place must agree on.
func (p *Place) Facts() presenceredis.Facts {
	f := presenceredis.Facts{Counters: cluster.Format, Postgres: presenceredis.PostgresTiered}
	switch {
	case p.Postgres == "":
		f.Postgres = presenceredis.PostgresNone
	case p.Regions:
		f.Postgres = presenceredis.PostgresSharedExact
	}

	return f
}

// dialled limits how long dial waits until Redis answers.
const dialled = 3 * time.Second

// dial opens a connection to Redis, and waits until it answers.
func (p *Place) dial(ctx context.Context) (*redisconn.Conn, error) {
	conn, err := redisconn.Open(redisconn.Config{URL: p.Redis, Log: zerolog.Nop()})
	if err != nil {
		return nil, ofRedis(err)
	}

	runner := conn.Runner(redisconn.RunnerConfig{Unavailable: counter.ErrUnavailable})
	defer runner.Close()
	for until := time.Now().Add(dialled); ; time.Sleep(100 * time.Millisecond) {
		_, err := runner.Known(ctx)
		if err == nil {
			return conn, nil
		}
		// A Redis that starts at the same time gets some time to answer.
		if time.Now().After(until) || ctx.Err() != nil {
			return nil, errors.Join(ofRedis(err), conn.Close())
		}
	}
}

// ofRedis adds the setting to an error about Redis.
func ofRedis(err error) error {
	if err == nil {
		return nil
	}

	return fmt.Errorf("--redis: %w", err)
}

// withRedis calls fn with the Redis.
func withRedis(ctx context.Context, conn *redisconn.Conn, fn func(context.Context, *redisconn.Client) error) error {
	runner := conn.Runner(redisconn.RunnerConfig{Unavailable: counter.ErrUnavailable})
	defer runner.Close()

	return runner.Do(ctx, fn)
}

// checkRedis refuses a Redis whose counters cannot be exported, or imported over.
func (p *Place) checkRedis(ctx context.Context, conn *redisconn.Conn, imports bool) error {
	var use presenceredis.Use
	err := withRedis(ctx, conn, func(ctx context.Context, c *redisconn.Client) (err error) {
		use, err = presenceredis.FindUse(ctx, c)
		return err
	})
	if err == nil {
		err = p.refuses(&use, imports)
	}

	return ofRedis(err)
}

// refuses returns why the counters of a Redis cannot be exported, or imported over.
func (p *Place) refuses(use *presenceredis.Use, imports bool) error {
	if imports {
		if err := p.checkRunning(use); err != nil {
			return err
		}
	}
	if err := checkFormat(use, imports); err != nil {
		return err
	}

	return p.checkPostgres(use)
}

// checkRunning refuses a Redis that processes are using. A server that starts later all the same takes over the claims
// of an import, which then fails.
func (p *Place) checkRunning(use *presenceredis.Use) error {
	names := strings.Join(use.Running, ", ")
	isAdded := p.Postgres != "" && use.Postgres == presenceredis.PostgresNone
	switch {
	case len(use.Running) == 0:
		return nil
	case isAdded:
		return fmt.Errorf("processes without --postgres use this Redis (%s): it is in use by other processes; "+
			"end all of them first", names)
	default:
		return fmt.Errorf("it is in use by other processes (%s); end them first", names)
	}
}

// checkFormat refuses counters in the format of another release. An import accepts those of an earlier release: they
// have other keys, and are left alone.
func checkFormat(use *presenceredis.Use, imports bool) error {
	// The first formats had no number.
	n, err := strconv.Atoi(use.Counters)
	isEarlier := use.Counters == "" || err == nil && n < cluster.Format
	if imports && isEarlier {
		return nil
	}

	return cluster.CheckFormat(use.Counters, use.IsUsed)
}

var (
	errPostgres = errors.New("the counters of this Redis are persisted in PostgreSQL; give its --postgres, too")
	errRegions  = errors.New("its servers have other --postgres and --peer flags; give --regions if they have both, " +
		"and only then")
)

// checkPostgres refuses a Redis whose servers use PostgreSQL in another way. If they used none, PostgreSQL may be added
// behind the Redis.
func (p *Place) checkPostgres(use *presenceredis.Use) error {
	// Ignore the number, which is the form of undrained rows in Redis: it belongs to the format of the counters.
	theirs, _, _ := strings.Cut(use.Postgres, " ")
	ours, _, _ := strings.Cut(p.Facts().Postgres, " ")
	isAdded := theirs == presenceredis.PostgresNone && p.Postgres != "" && !p.Regions
	switch {
	case theirs == "", theirs == ours, isAdded:
		return nil
	case p.Postgres == "":
		return errPostgres
	default:
		return errRegions
	}
}
