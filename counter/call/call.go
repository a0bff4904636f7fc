// Package call sends the changes of this process to the owners of their keys.
//
// This process is one sender. It has at most one call in progress for each partition. The call has a number, and is
// repeated with that number until it is answered, if necessary by another owner. So a change is made only once,
// whatever happens to calls, answers and owners.
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

// Owners returns the current owner of a partition, or nil if no owner is known.
type Owners interface {
	OwnerOf(partition int) Owner
}

// Config tunes a Caller. A zero field takes its default.
type Config struct {
	// Stream identifies this run of the process. It must be unique, also among earlier runs.
	Stream string
	// Timeout is how long to wait for an owner before the call is repeated, default 1s.
	Timeout time.Duration
	// RepeatAfter is the pause before a call is repeated, default 20ms.
	RepeatAfter time.Duration
	Observer    Observer // may be nil
}

// Observer observes calls. It must not block.
type Observer interface {
	// Called reports how long a call took, including repetitions, and its outcome.
	Called(took time.Duration, err error)
}

// Caller sends calls. Its methods may be called from any goroutine.
type Caller struct {
	cfg    Config
	owners Owners
	lanes  [rows.Partitions]lane
}

// lane serialises the calls to one partition.
type lane struct {
	turn   chan struct{} // a lock whose waiters may give up; it guards number
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

// Do makes a call, after setting its stream and number. The error is counter.ErrBusy if nothing was made, or
// counter.ErrUnavailable if ctx ended first; then the call may still be made.
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
		// Held until the end, because a stream has one call under way in each partition.
		defer func() { <-l.turn }()
	case <-ctx.Done():
		// Nothing was sent yet, so nothing can have been made.
		return owner.Answer{}, fmt.Errorf("call: %w: %w", counter.ErrBusy, context.Cause(ctx))
	}

	// Once an owner has seen this number, it refuses an earlier call that was given up and arrives late.
	l.number++
	call.Number = l.number
	call.Stream = c.cfg.Stream
	call.Until = givesUp(ctx, &call)

	for {
		// Look up the owner each time, because the partition may have moved.
		answer, err := c.try(ctx, call)
		if err == nil {
			return answer, nil
		}
		if !call.Repeated && errors.Is(err, counter.ErrBusy) {
			// Repeated calls are excluded, because an earlier attempt may have been made, and the error denies that.
			return owner.Answer{}, err
		}
		if !wake.Wait(ctx, c.cfg.RepeatAfter, nil) {
			// Not %w: the last error may say that nothing was made, but an earlier attempt may have been made.
			return owner.Answer{}, fmt.Errorf("call: %w: %v", counter.ErrUnavailable, err)
		}

		call.Repeated = true
		repeats.Reached()
	}
}

// givesUp returns when the sender of a call gives up, the zero time if the owner need not know. It need not know for
// calls on limits: their cost may be counted late, and their senders wait so briefly that the clocks of processes would
// have to agree exactly.
func givesUp(ctx context.Context, call *owner.Call) time.Time {
	deadline, limited := ctx.Deadline()
	if !limited || len(call.Ops) == 0 {
		return time.Time{}
	}

	return deadline
}

// DoAll makes calls to different partitions in parallel, as Do does.
func (c *Caller) DoAll(ctx context.Context, calls []owner.Call) []owner.Outcome {
	outcomes := make([]owner.Outcome, len(calls))
	// Each partition has its own lane, so the calls do not wait for each other.
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
	// The next attempt may find an owner.
	if to == nil {
		return owner.Answer{}, fmt.Errorf("partition %d: %w", call.Partition, owner.ErrNotOwner)
	}

	// An owner may disappear without an answer. The next attempt looks for the owner again.
	ctx, cancel := context.WithTimeout(ctx, c.cfg.Timeout)
	defer cancel()

	return to.Do(ctx, call)
}
