// Package call sends the changes of this process to the owners of their keys.
//
// This process is a stream. For each partition it has at most one call under way, which has a number; it is repeated
// with that number, also to another owner, until it is answered. So a change is made once, whatever happens to calls,
// answers and owners.
package call

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"headcount/counter"
	"headcount/counter/owner"
	"headcount/internal/marks"
	"headcount/internal/rows"
	"headcount/internal/wake"
)

var (
	repeats = marks.Sometimes("a call is repeated")
)

// Owner makes calls: an *owner.Owner, or a connection to one in another process.
type Owner interface {
	Do(ctx context.Context, call owner.Call) (owner.Answer, error)
}

// Owners knows who owns a partition now. It returns nil if nobody does, as far as it knows.
type Owners interface {
	OwnerOf(partition int) Owner
}

// Config tunes a Caller. A zero field takes its default.
type Config struct {
	// Stream names this process. No other process has it, nor has this one before a restart.
	Stream string
	// Timeout is how long an owner may take before the call is repeated, default 1s.
	Timeout time.Duration
	// RepeatAfter is the pause before a call is repeated, default 20ms.
	RepeatAfter time.Duration
	Observer    Observer // may be nil
}

// Observer observes calls. It must not block.
type Observer interface {
	// Called says how long a call took with its repetitions, and how it ended.
	Called(took time.Duration, err error)
}

// Caller sends calls. Its methods may be called from any goroutine.
type Caller struct {
	cfg    Config
	owners Owners
	lanes  [rows.Partitions]lane
}

// lane is the way to the owner of one partition.
type lane struct {
	turn   chan struct{} // a lock that a caller may stop waiting for; it guards number
	number uint64        // of the last call
}

// New returns a Caller that finds owners with owners.
func New(owners Owners, cfg Config) *Caller {
	cfg.Timeout = cmp.Or(cfg.Timeout, time.Second)
	cfg.RepeatAfter = cmp.Or(cfg.RepeatAfter, 20*time.Millisecond)

	c := &Caller{cfg: cfg, owners: owners}
	for i := range c.lanes {
		c.lanes[i].turn = make(chan struct{}, 1)
	}

	return c
}

// Do makes a call, to which it gives its stream and a number. The error is counter.ErrBusy if nothing was made, or
// counter.ErrUnavailable when ctx ended first; then the call may still be made.
func (c *Caller) Do(ctx context.Context, call owner.Call) (owner.Answer, error) {
	if c.cfg.Observer == nil {
		return c.do(ctx, call)
	}

	began := time.Now()
	answer, err := c.do(ctx, call)
	c.cfg.Observer.Called(time.Since(began), err)

	return answer, err
}

func (c *Caller) do(ctx context.Context, call owner.Call) (owner.Answer, error) {
	l := &c.lanes[call.Partition]
	select {
	case l.turn <- struct{}{}:
		defer func() { <-l.turn }()
	case <-ctx.Done():
		return owner.Answer{}, fmt.Errorf("call: %w: %w", counter.ErrBusy, context.Cause(ctx))
	}

	// A call that was given up is overtaken by this one, and its owner will not make it any more.
	l.number++
	call.Number = l.number
	call.Stream = c.cfg.Stream
	call.Until = givesUp(ctx, &call)

	for {
		// The owner is looked up each time: the partition may have moved since.
		answer, err := c.try(ctx, call)
		if err == nil {
			return answer, nil
		}
		if !call.Repeated && errors.Is(err, counter.ErrBusy) {
			// After an attempt whose outcome is unknown it would not say that nothing was made.
			return owner.Answer{}, err
		}
		if !wake.Wait(ctx, c.cfg.RepeatAfter, nil) {
			// Not %w: that of the last attempt may say that nothing was made.
			return owner.Answer{}, fmt.Errorf("call: %w: %v", counter.ErrUnavailable, err)
		}

		call.Repeated = true
		repeats.Reached()
	}
}

// givesUp returns when the sender of a call gives up, the zero time if that matters to nobody. A call on a limit may
// take its cost late, and its sender waits for so short a time that the clocks of processes would have to be exact.
func givesUp(ctx context.Context, call *owner.Call) time.Time {
	deadline, limited := ctx.Deadline()
	if !limited || len(call.Ops) == 0 {
		return time.Time{}
	}

	return deadline
}

// DoAll makes calls to different partitions at the same time, as Do does.
func (c *Caller) DoAll(ctx context.Context, calls []owner.Call) []owner.Outcome {
	outcomes := make([]owner.Outcome, len(calls))
	// Each partition has a lane of its own, so these do not wait for each other.
	var made sync.WaitGroup
	for i, call := range calls {
		made.Go(func() { outcomes[i].Answer, outcomes[i].Err = c.Do(ctx, call) })
	}
	made.Wait()

	return outcomes
}

// try makes one attempt.
func (c *Caller) try(ctx context.Context, call owner.Call) (owner.Answer, error) {
	to := c.owners.OwnerOf(call.Partition)
	if to == nil {
		return owner.Answer{}, fmt.Errorf("partition %d: %w", call.Partition, owner.ErrNotOwner)
	}

	ctx, cancel := context.WithTimeout(ctx, c.cfg.Timeout)
	defer cancel()

	return to.Do(ctx, call)
}
