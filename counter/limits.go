package counter

import (
	"context"
	"fmt"

	"headcount/counter/limit"
)

// Limits combines requests for a Limiter, as a Combiner combines operations for a Writer: requests that come while a
// write of their queue is under way go together in the next one. Each request is judged by itself. The methods may be
// called from any goroutine.
type Limits struct {
	to     Limiter
	queues *batchQueues[limit.Request, LimitResult]
}

// NewLimits returns Limits that asks to. It uses Queues, QueueSize, Batch, the timeouts and Instant of cfg.
func NewLimits(to Limiter, cfg CombinerConfig) *Limits {
	cfg = cfg.withDefaults()
	// A limit stands in front of other work, so it does not wait for company.
	cfg.Pace = 0
	if cfg.LimitTimeout > 0 {
		cfg.WriteTimeout = cfg.LimitTimeout
	}
	writer := func() batchWriter[limit.Request, LimitResult] { return &judging{to: to} }

	return &Limits{to, newQueues(cfg.Queues, cfg, writer)}
}

// Do judges r. When ctx ends first or the store cannot be reached, the error is ErrUnavailable and the cost may have
// been counted.
func (l *Limits) Do(ctx context.Context, c limit.Request) (limit.Answer, error) {
	if err := c.Check(); err != nil {
		return limit.Answer{}, fmt.Errorf("%w: %w", ErrOp, err)
	}
	if l.queues.cfg.Instant {
		r := l.to.Limit(ctx, []limit.Request{c})[0]
		return r.Answer, r.Err
	}

	// A limit stands in front of other work, so the wait in the queue counts as well.
	if within := l.queues.cfg.LimitTimeout; within > 0 {
		limited, cancel := context.WithTimeout(ctx, within)
		defer cancel()
		ctx = limited
	}

	r, err := l.queues.do(ctx, queueOf(c.Key, len(l.queues.all)), c, 1)
	if err != nil {
		return limit.Answer{}, err
	}

	return r.Answer, r.Err
}

// Close waits until every accepted request is answered. Later ones fail with ErrUnavailable.
func (l *Limits) Close() { l.queues.close() }

// judging sends the requests of one queue to the store. It reuses its slice for the next write.
type judging struct {
	to       Limiter
	requests []limit.Request
}

func (j *judging) write(ctx context.Context, items []*item[limit.Request, LimitResult]) {
	j.requests = j.requests[:0]
	for _, one := range items {
		j.requests = append(j.requests, one.op)
	}

	for i, r := range j.to.Limit(ctx, j.requests) {
		items[i].answer(r)
	}
	clear(j.requests) // their keys may point into bodies of calls
}
