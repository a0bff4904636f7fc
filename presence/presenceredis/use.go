package presenceredis

import (
	"context"
	"slices"
	"strings"
	"time"

	"headcount/internal/redisconn"
	"headcount/presence"
)

// Use is what a Redis is used for, for a program that is no process of the cluster.
type Use struct {
	Running  []string // the names of processes with a lease, sorted
	IsUsed   bool     // a process has written the facts
	Counters string   // the fact counters; empty: there is none
	Postgres string   // the fact postgres: a constant above or its form of an older release; empty: there is none
}

// FindUse returns what a Redis is used for.
func FindUse(ctx context.Context, c *redisconn.Client) (u Use, err error) {
	facts, err := c.HGetAll(ctx, factsKey).Result()
	if err != nil {
		return u, err
	}
	u.IsUsed = facts[formatFact] != ""
	u.Counters = facts["counters"]
	u.Postgres = facts["postgres"]

	// Leases end by the clock of Redis.
	now, err := c.Time(ctx).Result()
	if err != nil {
		return u, err
	}
	live, err := liveProcesses(ctx, c, now)
	for _, p := range live {
		u.Running = append(u.Running, p.Name)
	}

	return u, err
}

// liveProcesses returns the processes whose leases have not ended, sorted by name. If now is zero, they are all that
// have a lease. A lease that is malformed is left out.
func liveProcesses(ctx context.Context, c *redisconn.Client, now time.Time) (live []presence.Process, err error) {
	leases, err := c.HGetAll(ctx, leasesKey).Result()
	if err != nil {
		return nil, err
	}

	for name, text := range leases {
		l, err := parseLease(name, text)
		if err == nil && (now.IsZero() || l.ends.After(now)) {
			live = append(live, l.Process)
		}
	}
	slices.SortFunc(live, func(a, b presence.Process) int { return strings.Compare(a.Name, b.Name) })

	return live, nil
}

// NoteCounters makes facts of what f says of counters and PostgreSQL. No process may be running. The first one adds the
// facts that are missing.
func NoteCounters(ctx context.Context, c *redisconn.Client, f Facts) error {
	// Two commands and no script: no process runs, so nothing comes in between.
	used, err := c.HExists(ctx, factsKey, formatFact).Result()
	if err != nil {
		return err
	}

	facts := []any{"counters", f.Counters, "postgres", f.Postgres}
	if !used {
		facts = append(facts, formatFact, formatEven) // without it processes refuse all facts
	}

	return c.HSet(ctx, factsKey, facts...).Err()
}
