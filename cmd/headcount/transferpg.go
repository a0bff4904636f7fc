package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/rs/zerolog"

	"headcount/counter"
	"headcount/counter/cluster"
	"headcount/counter/routed"
	"headcount/internal/redisconn"
	"headcount/internal/rows"
	"headcount/internal/rows/rowsredis"
	"headcount/internal/setting"
	"headcount/presence/presenceredis"
)

// redisFront is the Redis in front of PostgreSQL, for an export or an import.
type redisFront struct {
	conn *redisconn.Conn
	rows *rowsredis.Store
}

// openFront opens the Redis. For an import there may be counters of an earlier release, which stay as they are.
func (p place) openFront(imports bool) (*redisFront, error) {
	if problem := redisconn.CheckURL(p.Redis); problem != "" {
		return nil, setting.Errorf("redis", "%s", problem)
	}
	if p.DataDir != "" {
		return nil, setting.Errorf("data-dir", "with --redis counters are not in a file; leave one of the two out")
	}
	conn, err := redisconn.Open(redisconn.Config{URL: p.Redis, Log: zerolog.Nop()})
	if err != nil {
		return nil, fmt.Errorf("--redis: %w", err)
	}

	return &redisFront{conn: conn, rows: cluster.OpenRows(conn, imports)}, nil
}

// Close closes what openFront opened.
func (f *redisFront) Close() error {
	f.rows.Close()

	return f.conn.Close()
}

// use returns once Redis has said that the counters may be used, and for an import that nobody else uses them.
func (f *redisFront) use(ctx context.Context, alone bool) error {
	facts := f.conn.Caller(redisconn.CallerConfig{Unavailable: counter.ErrUnavailable})
	defer facts.Close()

	for until := time.Now().Add(dialled); ; time.Sleep(100 * time.Millisecond) {
		first := rows.Address{Name: rows.Name{Collection: "heads"}}
		err := f.rows.Read(ctx, []rows.Address{first})[0].Err
		if err == nil && alone {
			err = facts.Do(ctx, checkUse)
		}
		if err == nil || isRefusal(err) || time.Now().After(until) || ctx.Err() != nil {
			return err
		}
	}
}

// isRefusal reports whether an error is what Redis says, which does not change by waiting.
func isRefusal(err error) bool {
	return errors.Is(err, errInUse)
}

var errInUse = errors.New("it is in use by other processes")

// checkUse refuses a Redis that processes use.
func checkUse(ctx context.Context, c *redisconn.Client) error {
	all, err := c.HGetAll(ctx, "hc:{c}:leases").Result()
	if err != nil {
		return err
	}
	facts, err := c.HMGet(ctx, "hc:{c}:facts", "postgres").Result()
	if err != nil {
		return err
	}

	var running []string
	for name, text := range all {
		var ends int64
		_, err := fmt.Sscan(text, &ends)
		if err == nil && time.UnixMilli(ends).After(time.Now()) {
			running = append(running, name)
		}
	}
	slices.Sort(running)
	names := strings.Join(running, ", ")
	switch {
	case len(running) > 0 && facts[0] == "none":
		return redisconn.Answered(fmt.Errorf("processes without --postgres use this Redis (%s): %w; end all of them first", names, errInUse))
	case len(running) > 0:
		return redisconn.Answered(fmt.Errorf("%w (%s); end them first", errInUse, names))
	}

	return nil
}

// behindDump is an export of PostgreSQL, and of the Redis in front of it.
type behindDump struct {
	*routed.Export
	front *redisFront // nil: there is none
}

// Close is as dump says.
func (d *behindDump) Close() error {
	err := d.Export.Close()
	if d.front != nil {
		err = errors.Join(err, d.front.Close())
	}

	return err
}

// openPostgresDump opens PostgreSQL for an export, alone or with the Redis in front of it.
func (p place) openPostgresDump(ctx context.Context) (dump, error) {
	d := &behindDump{}
	var front rows.Store
	if p.Redis != "" {
		var err error
		if d.front, err = p.openFront(false); err != nil {
			return nil, err
		}
		if err := d.front.use(ctx, false); err != nil {
			return nil, errors.Join(fmt.Errorf("--redis: %w", err), d.front.Close())
		}
		front = d.front.rows
	}

	var err error
	d.Export, err = routed.OpenExport(ctx, p.Postgres, front)
	if err != nil {
		err = refusedPostgres(err)
		if d.front != nil {
			_ = d.front.Close()
		}
		return nil, err
	}

	return d, nil
}

// behindImport is a counterStore in Redis and the PostgreSQL behind it.
type behindImport struct {
	*routed.Import
	front *redisFront
}

// Complete says that the import is whole. From then on servers of this release serve the counters, with PostgreSQL behind
// this Redis. A Redis that no server has used gets its facts from the first one.
func (i *behindImport) Complete(ctx context.Context) error {
	facts := i.front.conn.Caller(redisconn.CallerConfig{Unavailable: counter.ErrUnavailable})
	defer facts.Close()

	return facts.Do(ctx, func(ctx context.Context, c *redisconn.Client) error {
		used, err := c.HExists(ctx, "hc:{c}:facts", "format").Result()
		if err != nil || !used {
			return err
		}

		return c.HSet(ctx, "hc:{c}:facts", "counters", cluster.Format, "postgres", presenceredis.PostgresBehind).Err()
	})
}

// Close is as counter.Store says.
func (i *behindImport) Close() error { return errors.Join(i.Import.Close(), i.front.Close()) }

// openBehindImport opens Redis and the PostgreSQL behind it for an import.
func (p place) openBehindImport(ctx context.Context, rules *counter.Rules) (counterStore, error) {
	front, err := p.openFront(true)
	if err != nil {
		return nil, err
	}
	if err := front.use(ctx, true); err != nil {
		_ = front.Close()
		return nil, fmt.Errorf("--redis: %w", err)
	}
	store, err := routed.OpenImport(ctx, p.Postgres, front.rows, rules)
	if err != nil {
		_ = front.Close()
		return nil, refusedPostgres(err)
	}

	return &behindImport{store, front}, nil
}
