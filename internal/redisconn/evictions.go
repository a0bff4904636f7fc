package redisconn

import (
	"context"
	"strconv"
	"sync"

	"github.com/redis/go-redis/v9"
)

// Evictions detects whether Redis evicts keys when its memory is full, and whether it has done so. Only noeviction
// keeps everything that was acknowledged: even policies that evict only expiring keys lose idempotency keys, for
// example. Only one goroutine may call Look.
type Evictions struct {
	policy string           // Evicted.Policy of the last Look
	keys   map[string]int64 // by run id of a server: its evicted keys at the last Look; at most maxRuns entries
}

// Evicted is what Look found.
type Evicted struct {
	Policy  string // the policy by which some master evicts keys when its memory is full; empty: none does
	Changed bool   // Policy differs from that of the last Look; for the first one, it is not empty
	Keys    int64  // keys of any kind that were evicted since the last Look
}

// Look asks all masters.
func (e *Evictions) Look(ctx context.Context, c *Client) (found Evicted, err error) {
	var mu sync.Mutex // guards infos
	var infos []string
	err = c.Masters(ctx, func(ctx context.Context, m redis.Cmdable) error {
		// Three sections are needed, so one command for all of them costs less than three.
		info, err := m.Info(ctx).Result()
		if err != nil {
			return err
		}

		// On a Cluster Masters calls this from several goroutines.
		mu.Lock()
		defer mu.Unlock()
		infos = append(infos, info)

		return nil
	})
	if err != nil {
		return found, err
	}

	for _, info := range infos {
		found.Keys += e.dropped(info)
		// One master that drops keys is enough.
		if policy := DropsKeys(info); policy != "" {
			found.Policy = policy
		}
	}

	found.Changed = found.Policy != e.policy
	e.policy = found.Policy

	return found, nil
}

// dropped returns how many keys a server has evicted since the last Look, given its INFO reply.
func (e *Evictions) dropped(info string) int64 {
	run := InfoField(info, "run_id")
	keys, err := strconv.ParseInt(InfoField(info, "evicted_keys"), 10, 64)
	if err != nil { // the server does not report the number
		return 0
	}

	// Counted by run id, because the number begins at 0 with each run of a server.
	before, known := e.keys[run]
	// Servers come and go. One that is forgotten counts as new.
	if e.keys == nil || len(e.keys) == maxRuns {
		e.keys = map[string]int64{}
	}
	e.keys[run] = keys

	// Keys that a server dropped before this process saw it are not counted.
	if !known {
		return 0
	}
	return max(0, keys-before) // CONFIG RESETSTAT resets the number
}

// DropsKeys returns the policy by which a server evicts keys when its memory is full, given its INFO reply. It is empty
// if the server evicts none, or has no memory limit.
func DropsKeys(info string) string {
	// Without a limit nothing is ever evicted, whatever the policy says.
	policy := InfoField(info, "maxmemory_policy")
	if policy == "noeviction" || InfoField(info, "maxmemory") == "0" {
		return ""
	}
	return policy
}
