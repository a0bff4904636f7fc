package counter

import (
	"context"
	"fmt"
	"runtime"
	"sync"

	"github.com/cespare/xxhash/v2"

	"headcount/counter/limit"
)

// Limits stand in front of a Limiter as a Combiner stands in front of a Writer: while calls of a
// lane are with the store, the next ones gather and go together; a lone call goes at once. Calls
// are not merged: each is judged by itself. The methods may be called from any goroutine.
type Limits struct {
	to    Limiter
	cfg   CombinerConfig
	lanes []limitLane
	wg    sync.WaitGroup // the goroutines of lanes
}

// limitLane has at most one batch with the store.
type limitLane struct {
	mu     sync.Mutex // guards all below
	busy   bool       // a goroutine runs, and looks at queue before it ends
	closed bool
	queue  []*limitCall
}

type limitCall struct {
	call   limit.Call
	result LimitResult
	done   chan struct{} // closed when result is there
}

// NewLimits returns Limits in front of to. Of the config they take Lanes, Queue, Batch,
// WriteTimeout and Instant.
func NewLimits(to Limiter, cfg CombinerConfig) *Limits {
	cfg = cfg.withDefaults()
	return &Limits{to: to, cfg: cfg, lanes: make([]limitLane, cfg.Lanes)}
}

// Do judges c. When ctx ends before, or the store cannot be reached, the error is ErrUnavailable,
// and the cost may have been counted.
func (l *Limits) Do(ctx context.Context, c limit.Call) (limit.Answer, error) {
	if err := c.Check(); err != nil {
		return limit.Answer{}, fmt.Errorf("%w: %w", ErrOp, err)
	}
	if l.cfg.Instant {
		r := l.to.Limit(ctx, []limit.Call{c})[0]
		return r.Answer, r.Err
	}
	one := &limitCall{call: c, done: make(chan struct{})}
	lane := &l.lanes[xxhash.Sum64String(c.Key)%uint64(len(l.lanes))]
	if err := l.enter(lane, one); err != nil {
		return limit.Answer{}, err
	}
	select {
	case <-one.done:
		return one.result.Answer, one.result.Err
	case <-ctx.Done():
		return limit.Answer{}, fmt.Errorf("limits: %w: %w, and the cost may yet be counted", ErrUnavailable, context.Cause(ctx))
	}
}

func (l *Limits) enter(lane *limitLane, one *limitCall) error {
	lane.mu.Lock()
	defer lane.mu.Unlock()
	switch {
	case lane.closed:
		return fmt.Errorf("limits: %w: the process ends", ErrUnavailable)
	case len(lane.queue) >= l.cfg.Queue:
		return ErrBusy
	}
	lane.queue = append(lane.queue, one)
	if !lane.busy {
		lane.busy = true
		l.wg.Go(func() { l.run(lane) }) // under mu and not closed: before Close waits
	}
	return nil
}

// run hands batches to the store until nothing is left.
func (l *Limits) run(lane *limitLane) {
	var batch []*limitCall
	var calls []limit.Call
	for {
		lane.mu.Lock()
		n := min(len(lane.queue), l.cfg.Batch)
		if n == 0 {
			lane.busy, lane.queue = false, nil
			lane.mu.Unlock()
			return
		}
		batch = append(batch[:0], lane.queue[:n]...)
		lane.queue = lane.queue[n:]
		lane.mu.Unlock()
		calls = calls[:0]
		for _, one := range batch {
			calls = append(calls, one.call)
		}
		ctx, cancel := context.WithTimeout(context.Background(), l.cfg.WriteTimeout)
		for i, r := range l.to.Limit(ctx, calls) {
			batch[i].result = r
			close(batch[i].done)
		}
		cancel()
		clear(batch)
		// Who was answered just now and calls again goes with the next batch.
		runtime.Gosched()
	}
}

// Close waits for all that was taken. Calls after it fail with ErrUnavailable.
func (l *Limits) Close() {
	for i := range l.lanes {
		l.lanes[i].mu.Lock()
		l.lanes[i].closed = true
		l.lanes[i].mu.Unlock()
	}
	l.wg.Wait()
}
