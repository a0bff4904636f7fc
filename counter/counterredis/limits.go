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

// limitKey is that of the one key that a call on a limit touches, so it needs no hash tag. It is in
// no bucket, so what empties buckets leaves limits alone.
func limitKey(n limit.Name) string {
	return "hc:limit:" + n.Algorithm.String() + ":" + strconv.FormatInt(n.Window, 10) + ":" + n.Key
}

var errAnswer = errors.New("an answer that cannot be read")

// Limit is as counter.Limiter says: a script for each call, all in one pipeline. Times come from
// Redis. A state is as durable as Redis, and ends by itself (PX).
func (s *Store) Limit(ctx context.Context, calls []limit.Call) []counter.LimitResult {
	results := make([]counter.LimitResult, len(calls))
	runs := make([]*redisconn.Call, len(calls))
	for i := range calls {
		c := &calls[i]
		runs[i] = &redisconn.Call{Script: scripts.CounterLimit, Keys: []string{limitKey(c.Name)}, Args: []any{c.Algorithm.String(), c.Window, c.Limit, c.Cost}}
	}
	_ = s.conn.Run(ctx, runs) // each says what became of it
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

// parseAnswer reads what counter_limit.lua returned.
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
