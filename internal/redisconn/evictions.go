package redisconn

import (
	"context"
	"strconv"
	"sync"

	"github.com/redis/go-redis/v9"
)

// Evictions tell whether Redis drops keys when its memory is full, and whether it has dropped some. Only noeviction
// keeps what was acknowledged: policies for keys that expire drop idempotency keys, for example. One goroutine calls
// Look.
type Evictions struct {
	policy string           // as Evicted has it at the last look
	keys   map[string]int64 // by the run id of a server, how many it had dropped at the last look; at most maxRuns
}

// Evicted is what Look found.
type Evicted struct {
	Policy  string // the policy by which a master drops keys when its memory is full; empty: none does
	Changed bool   // Policy is another one than at the last look, or not empty at the first
	Keys    int64  // dropped since the last look, whosever they were
}

// Look asks all masters.
func (e *Evictions) Look(ctx context.Context, c *Client) (found Evicted, err error) {
	var mu sync.Mutex // guards infos
	var infos []string
	err = c.Masters(ctx, func(ctx context.Context, m redis.Cmdable) error {
		info, err := m.Info(ctx).Result()
		if err != nil {
			return err
		}

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
		if policy := DropsKeys(info); policy != "" {
			found.Policy = policy
		}
	}

	found.Changed = found.Policy != e.policy
	e.policy = found.Policy

	return found, nil
}

// dropped returns how many keys a server has dropped since the last look, by its answer to INFO.
func (e *Evictions) dropped(info string) int64 {
	run := InfoField(info, "run_id")
	keys, err := strconv.ParseInt(InfoField(info, "evicted_keys"), 10, 64)
	if err != nil { // a server that does not say it
		return 0
	}

	before, known := e.keys[run]
	if e.keys == nil || len(e.keys) == maxRuns {
		e.keys = map[string]int64{}
	}
	e.keys[run] = keys

	if !known {
		return 0
	}
	return max(0, keys-before) // CONFIG RESETSTAT begins anew
}

// DropsKeys returns the policy by which a server drops keys when its memory is full, by its answer to INFO; empty: it
// drops none, or has no bound.
func DropsKeys(info string) string {
	policy := InfoField(info, "maxmemory_policy")
	if policy == "noeviction" || InfoField(info, "maxmemory") == "0" {
		return ""
	}
	return policy
}
