package counter

import (
	"context"
	"fmt"

	"headcount/counter/limit"
)

// Limits stand in front of a Limiter as a Combiner stands in front of a Writer: while calls of a
// queue are with the store, the next ones gather and go together; a lone call goes at once. Calls
// are not merged: each is judged by itself. The methods may be called from any goroutine.
type Limits struct {
	to     Limiter
	queues *batchQueues[limit.Call, LimitResult]
}

// NewLimits returns Limits in front of to. Of the config they take Queues, Queue, Batch,
// WriteTimeout and Instant.
func NewLimits(to Limiter, cfg CombinerConfig) *Limits {
	cfg = cfg.withDefaults()
	cfg.Pace = 0
	return &Limits{to, newQueues(cfg.Queues, cfg, func() batchWriter[limit.Call, LimitResult] { return &judging{to: to} })}
}

// Do judges c. When ctx ends before, or the store cannot be reached, the error is ErrUnavailable,
// and the cost may have been counted.
func (l *Limits) Do(ctx context.Context, c limit.Call) (limit.Answer, error) {
	if err := c.Check(); err != nil {
		return limit.Answer{}, fmt.Errorf("%w: %w", ErrOp, err)
	}
	if l.queues.cfg.Instant {
		r := l.to.Limit(ctx, []limit.Call{c})[0]
		return r.Answer, r.Err
	}
	r, err := l.queues.do(ctx, queueOf(c.Key, len(l.queues.all)), c, 1)
	if err != nil {
		return limit.Answer{}, err
	}
	return r.Answer, r.Err
}

// Close waits for all that was taken. Calls after it fail with ErrUnavailable.
func (l *Limits) Close() { l.queues.close() }

// judging hands the calls of a queue to the store. It keeps the room that some need for the next.
type judging struct {
	to    Limiter
	calls []limit.Call
}

func (j *judging) write(ctx context.Context, calls []*call[limit.Call, LimitResult]) {
	j.calls = j.calls[:0]
	for _, one := range calls {
		j.calls = append(j.calls, one.op)
	}
	for i, r := range j.to.Limit(ctx, j.calls) {
		calls[i].answer(r)
	}
	clear(j.calls) // they may be parts of requests
}
