package counter

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"headcount/counter/limit"
)

// door is a Limiter that answers when may permits it, and notes the sizes of batches.
type door struct {
	may chan struct{} // nil: always

	mu      sync.Mutex
	batches []int
	err     error
}

func (d *door) ForgetLimit(context.Context, string) error { return nil }

func (d *door) Limit(ctx context.Context, calls []limit.Request) []LimitResult {
	d.mu.Lock()
	d.batches = append(d.batches, len(calls))
	err := d.err
	d.mu.Unlock()

	if d.may != nil {
		select {
		case <-d.may:
		case <-ctx.Done():
			err = errors.Join(ErrUnavailable, ctx.Err())
		}
	}

	results := make([]LimitResult, len(calls))
	for i, c := range calls {
		results[i] = LimitResult{Answer: limit.Answer{Allowed: true, Remaining: c.Cost}, Err: err}
	}

	return results
}

func passes(key string, cost int64) limit.Request {
	return limit.Request{Name: limit.Name{Key: key, Algorithm: limit.Log, Window: 1000}, Limit: 100, Cost: cost}
}

// Calls that arrive while others are with the store are sent together, and each gets its own answer.
func TestLimitsGather(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := &door{may: make(chan struct{})}
		l := NewLimits(d, CombinerConfig{Batch: 5})

		var wg sync.WaitGroup

		// The first call is under way alone, and the others wait for it.
		for cost := range int64(8) {
			wg.Go(func() {
				a, err := l.Do(t.Context(), passes("k", cost+1))
				if err != nil || a.Remaining != cost+1 {
					t.Errorf("%d: %+v, %v", cost+1, a, err)
				}
			})
			synctest.Wait()
		}

		close(d.may)
		wg.Wait()
		l.Close()

		if len(d.batches) != 3 || d.batches[0] != 1 || d.batches[1] != 5 || d.batches[2] != 2 {
			t.Errorf("the batches have %d calls, want 1, 5 and 2", d.batches)
		}
	})
}

// The queue of calls is bounded. A caller that gives up is answered at once.
func TestLimitsAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := &door{may: make(chan struct{})}
		l := NewLimits(d, CombinerConfig{QueueSize: 2, WriteTimeout: time.Second})
		var wg sync.WaitGroup

		for range 3 {
			wg.Go(func() {
				_, err := l.Do(t.Context(), passes("k", 1))
				if !errors.Is(err, ErrUnavailable) || errors.Is(err, ErrBusy) {
					t.Errorf("after the time of a write: %v", err)
				}
			})
			synctest.Wait()
		}

		if _, err := l.Do(t.Context(), passes("k", 1)); !errors.Is(err, ErrBusy) {
			t.Errorf("a full queue: %v", err)
		}

		// A caller that has gone is answered at once.
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		time.Sleep(time.Second) // until the first write has ended
		if _, err := l.Do(ctx, passes("k", 1)); !errors.Is(err, ErrUnavailable) {
			t.Errorf("a caller that has gone: %v", err)
		}

		wg.Wait()
		l.Close()
		if _, err := l.Do(t.Context(), passes("k", 1)); !errors.Is(err, ErrUnavailable) {
			t.Errorf("closed: %v", err)
		}
	})
}

// A call that cannot pass at all is refused before it reaches the store.
func TestLimitsCheck(t *testing.T) {
	l := NewLimits(&door{}, CombinerConfig{Instant: true})
	if _, err := l.Do(t.Context(), passes("k", 101)); !errors.Is(err, ErrOp) {
		t.Errorf("%v", err)
	}
	if a, err := l.Do(t.Context(), passes("k", 100)); err != nil || !a.Allowed {
		t.Errorf("%+v, %v", a, err)
	}
}

// A call is given up after LimitTimeout, in which the wait for earlier calls is included.
func TestLimitsAreGivenUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := NewLimits(&door{may: make(chan struct{})}, CombinerConfig{LimitTimeout: 250 * time.Millisecond})

		var wg sync.WaitGroup
		for range 3 {
			wg.Go(func() {
				began := time.Now()
				_, err := l.Do(t.Context(), passes("k", 1))
				if took := time.Since(began); !errors.Is(err, ErrUnavailable) || took != 250*time.Millisecond {
					t.Errorf("after %v: %v", took, err)
				}
			})
			time.Sleep(100 * time.Millisecond)
		}

		wg.Wait()
		l.Close()
	})
}
