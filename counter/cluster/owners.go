package cluster

import (
	"context"

	"github.com/rs/zerolog"

	"headcount/internal/redisconn"
	"headcount/internal/rows"
	"headcount/internal/rows/rowsredis"
)

// Partitions is how many partitions the counters of a cluster have.
const Partitions = rows.Partitions

// Owners returns how many partitions each process owns in the Redis at a URL, keyed by presence.IncarnationName.
// Partitions that were never claimed are left out.
func Owners(ctx context.Context, url string) (map[string]int, error) {
	conn, err := redisconn.Open(redisconn.Config{URL: url, Log: zerolog.Nop()})
	if err != nil {
		return nil, err
	}
	defer conn.Close()

	store := rowsredis.New(rowsredis.Config{Conn: conn, Accept: accept})
	defer store.Close()

	// These are the owners by the last claims, so processes that have ended may be among them.
	all, err := store.Owners(ctx)
	if err != nil {
		return nil, err
	}

	owned := map[string]int{}
	for _, owner := range all {
		if owner != "" {
			owned[owner]++
		}
	}

	return owned, nil
}
