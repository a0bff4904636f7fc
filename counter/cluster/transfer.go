package cluster

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"headcount/counter"
	"headcount/counter/call"
	"headcount/counter/owner"
	"headcount/internal/redisconn"
	"headcount/internal/rows"
	"headcount/internal/rows/rowsredis"
)

// ErrPostgres means that PostgreSQL is needed for what is in a Redis.
var ErrPostgres = errors.New("the counters of this Redis are persisted in PostgreSQL; give its --postgres, too")

// Export is what an export of a Redis reads.
type Export struct {
	*owner.Reader
	rows *rowsredis.Store
}

// OpenExport opens the counters in the Redis of conn for an export. Processes may be using them. It refuses those of
// another release.
func OpenExport(conn *redisconn.Conn) *Export {
	store := rowsredis.New(rowsredis.Config{
		Conn: conn,
		Accept: func(ctx context.Context, c *redisconn.Client) error {
			return errors.Join(alone(ctx, c), accept(ctx, c))
		},
	})

	return &Export{Reader: owner.NewReader(store, rows.PartitionOf), rows: store}
}

// Close closes what OpenExport opened, but not the connection.
func (e *Export) Close() error {
	e.rows.Close()

	return nil
}

// Import is a store into which an export is read. No server uses its counters meanwhile.
type Import struct {
	*call.Store
	rows  *rowsredis.Store
	facts *redisconn.Caller
}

// OpenImport opens the counters in the Redis of conn for an import, and claims them. There may be counters of an
// earlier release, which this one does not read: they stay as they are. It refuses while servers run.
func OpenImport(ctx context.Context, conn *redisconn.Conn, rules *counter.Rules) (*Import, error) {
	facts := conn.Caller(redisconn.CallerConfig{Unavailable: counter.ErrUnavailable})
	i := &Import{facts: facts, rows: rowsredis.New(rowsredis.Config{Conn: conn, Accept: acceptEarlier})}
	if err := i.open(ctx, rules); err != nil {
		i.rows.Close()
		facts.Close()
		return nil, err
	}

	return i, nil
}

func (i *Import) open(ctx context.Context, rules *counter.Rules) error {
	running, err := leases(ctx, i.facts)
	if err != nil {
		return err
	}
	if len(running) > 0 {
		return fmt.Errorf("it is in use by other processes (%s); end them first", strings.Join(running, ", "))
	}

	// A server that starts in spite of that takes the claims, and the import ends.
	i.Store, err = call.NewLocal(ctx, i.rows, rules, owner.Config{
		Name: "import " + rand.Text(),
		// What an export says of other regions is kept, whatever this one is called.
		Region: owner.AnyRegion,
	})

	return err
}

// Complete says that the import is whole. From then on servers of this release serve the counters, and those of an
// earlier release refuse to start.
func (i *Import) Complete(ctx context.Context) error { return complete(ctx, i.facts) }

// Close closes what OpenImport opened, but not the connection.
func (i *Import) Close() error {
	err := i.Store.Close()
	i.rows.Close()
	i.facts.Close()

	return err
}

// acceptEarlier refuses counters of a later release, and those that need PostgreSQL.
func acceptEarlier(ctx context.Context, c *redisconn.Client) error {
	err := accept(ctx, c)
	var other *counter.FormatError
	if errors.As(err, &other) && isEarlier(other.Theirs) {
		err = nil
	}

	return errors.Join(alone(ctx, c), err)
}

// isEarlier reports whether a format is of an earlier release. The first ones had no number.
func isEarlier(format string) bool {
	n, err := strconv.Atoi(format)

	return format == "" || err == nil && n < Format
}

// alone refuses a Redis that has some counters only until they are in PostgreSQL, or has none of the exact ones.
func alone(ctx context.Context, c *redisconn.Client) error {
	postgres, err := c.HMGet(ctx, factsKey, "postgres").Result()
	if err != nil {
		return err
	}
	if is, known := postgres[0].(string); known && is != "none" {
		return redisconn.Answered(ErrPostgres)
	}

	return nil
}

// leases returns the processes that use a Redis, sorted.
func leases(ctx context.Context, redis *redisconn.Caller) (live []string, err error) {
	err = redis.Do(ctx, func(ctx context.Context, c *redisconn.Client) error {
		all, err := c.HGetAll(ctx, "hc:{c}:leases").Result()
		live = nil
		for name, text := range all {
			end, _, _ := strings.Cut(text, " ")
			ms, err := strconv.ParseInt(end, 10, 64)
			if err == nil && time.UnixMilli(ms).After(time.Now()) {
				live = append(live, name)
			}
		}

		return err
	})
	slices.Sort(live)

	return live, err
}

// complete makes the format of the counters in a Redis that of this release.
func complete(ctx context.Context, redis *redisconn.Caller) error {
	return redis.Do(ctx, func(ctx context.Context, c *redisconn.Client) error {
		// A Redis that no server has used has no facts. The first server writes all of them.
		used, err := c.HExists(ctx, factsKey, "format").Result()
		if err != nil || !used {
			return err
		}

		return c.HSet(ctx, factsKey, formatFact, Format).Err()
	})
}
