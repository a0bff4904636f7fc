package countermem

import (
	"container/heap"
	"context"
	"fmt"
	"strings"
	"sync"

	"headcount/counter"
	"headcount/counter/limit"
)

// Bounds of the memory of limits: about 250 bytes for a state, and 16 to 32 for a call that log remembers, so 0.4 GB
// at most. A call that needs more is refused with counter.ErrBusy until other states have expired: forgetting one
// would let more pass than its limit.
const (
	maxLimits = 1 << 20
	maxPassed = 1 << 22
)

// limits has a lock of its own, so that calls do not wait for aggregates of counters.
type limits struct {
	mu     sync.Mutex // guards the fields below
	states map[limit.Name]*limit.State
	due    dues
	passed int // entries of all states of log
	closed bool
	// The bounds; tests lower them.
	maxStates, maxPassed int
}

func newLimits() limits {
	return limits{states: map[limit.Name]*limit.State{}, maxStates: maxLimits, maxPassed: maxPassed}
}

// dues is a heap of all states, by when they may have expired. Calls do not move a state in it; a state that has not
// expired when its time comes is pushed again.
type dues []due

type due struct {
	at   int64 // unix ms
	name limit.Name
}

func (d dues) Len() int           { return len(d) }
func (d dues) Less(i, j int) bool { return d[i].at < d[j].at }
func (d dues) Swap(i, j int)      { d[i], d[j] = d[j], d[i] }
func (d *dues) Push(x any)        { *d = append(*d, x.(due)) }
func (d *dues) Pop() any {
	old := *d
	last := old[len(old)-1]
	old[len(old)-1] = due{}
	*d = old[:len(old)-1]
	return last
}

// Limit implements counter.Limiter. It waits for nothing but the lock.
func (s *Store) Limit(_ context.Context, calls []limit.Call) []counter.LimitResult {
	results := make([]counter.LimitResult, len(calls))
	l := &s.limits
	l.mu.Lock()
	defer l.mu.Unlock()
	now := s.now().UnixMilli()
	for i := range calls {
		if l.closed {
			results[i].Err = s.unavailable("limit")
			continue
		}
		results[i] = l.take(&calls[i], now)
	}
	return results
}

// take judges one call. The caller holds mu. Each call checks two states that are due and creates at most one, so
// expired states are deleted faster than new ones come.
func (l *limits) take(c *limit.Call, now int64) counter.LimitResult {
	for range 2 {
		l.forget(now)
	}
	s := l.states[c.Name]
	if s == nil && len(l.states) >= l.maxStates || c.Algorithm == limit.Log && l.passed >= l.maxPassed {
		return counter.LimitResult{Err: fmt.Errorf("countermem: limit: %w", counter.ErrBusy)}
	}
	if s == nil {
		s = &limit.State{}
		name := c.Name
		name.Key = strings.Clone(name.Key) // it may be a slice of a request
		l.states[name] = s
		heap.Push(&l.due, due{now + c.Window, name}) // a first call always passes, so the state is not empty
	}
	before := s.Entries()
	a := s.Take(*c, now)
	l.passed += s.Entries() - before
	return counter.LimitResult{Answer: a}
}

// forget deletes the next due state if it has expired.
func (l *limits) forget(now int64) {
	if len(l.due) == 0 || l.due[0].at > now {
		return
	}
	d := &l.due[0]
	s := l.states[d.name]
	if end := s.End(d.name); end > now {
		d.at = end
		heap.Fix(&l.due, 0)
		return
	}
	l.passed -= s.Entries()
	delete(l.states, d.name)
	heap.Pop(&l.due)
}
