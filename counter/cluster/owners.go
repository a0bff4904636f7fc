package cluster

import (
	"context"
	"fmt"
	"slices"

	"github.com/rs/zerolog"

	"headcount/internal/redisconn"
	"headcount/internal/rows"
	"headcount/internal/rows/rowsredis"
	"headcount/presence"
)

// Partitions is how many partitions the counters of a cluster have.
const Partitions = rows.Partitions

// Owners returns how many partitions each of the running processes owns in the Redis at a URL. Processes that have just
// started may not own any yet. If processes run, but some partitions still belong to processes that have ended, it
// returns an error in addition to the numbers.
func Owners(ctx context.Context, url string, running []presence.Process) (map[string]int, error) {
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
	gone := 0
	for _, owner := range all {
		runs := slices.ContainsFunc(running, func(p presence.Process) bool {
			return presence.IncarnationName(p.Name, p.Incarnation) == owner
		})

		switch {
		case owner == "": // nobody has ever used the partition
		case runs:
			owned[presence.ProcessOf(owner)]++
		default:
			gone++
		}
	}

	// While nothing runs, all partitions are of processes that have ended, and nobody waits.
	if gone > 0 && len(running) > 0 {
		return owned, fmt.Errorf("%d of %d partitions are of processes that have ended, and changes of their counters "+
			"wait; see whether a process with the role presence runs, and what it logs", gone, Partitions)
	}

	return owned, nil
}
