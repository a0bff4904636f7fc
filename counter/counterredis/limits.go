package counterredis

import (
	"context"
	"errors"
	"fmt"
	"strconv"

	"headcount/counter"
	"headcount/counter/limit"
	"headcount/internal/redisconn"
	"headcount/scripts"
)

// limitKey returns the key of a limit. A call uses no other key, so it needs no hash tag. It is in no bucket, so
// emptying buckets keeps limits.
func limitKey(n limit.Name) string {
	return "hc:limit:" + n.Algorithm.String() + ":" + strconv.FormatInt(n.Window, 10) + ":" + n.Key
}

var errAnswer = errors.New("unexpected answer")

// Limit implements counter.Limiter: a script for each call, all in one pipeline. Times come from
// Redis. A state is as durable as Redis, and expires (PX).
func (s *Store) Limit(ctx context.Context, calls []limit.Call) []counter.LimitResult {
	results := make([]counter.LimitResult, len(calls))
	runs := make([]*redisconn.Call, len(calls))
	for i := range calls {
		c := &calls[i]
		runs[i] = &redisconn.Call{Script: scripts.CounterLimit, Keys: []string{limitKey(c.Name)}, Args: []any{c.Algorithm.String(), c.Window, c.Limit, c.Cost}}
	}
	_ = s.conn.Run(ctx, runs) // every call has its own error
	for i, run := range runs {
		if run.Err == nil {
			results[i].Answer, run.Err = parseAnswer(run.Reply)
		}
		if run.Err != nil {
			results[i].Err = fmt.Errorf("counterredis: limit: %w", run.Err)
		}
	}
	return results
}

// parseAnswer parses the reply of counter_limit.lua.
func parseAnswer(reply any) (limit.Answer, error) {
	list, _ := reply.([]any)
	if len(list) != 3 {
		return limit.Answer{}, fmt.Errorf("%w: %w: %v", counter.ErrUnavailable, errAnswer, reply)
	}
	var numbers [3]int64
	for i, n := range list {
		numbers[i], _ = n.(int64)
	}
	return limit.Answer{Allowed: numbers[0] == 1, Remaining: numbers[1], Reset: numbers[2]}, nil
}
