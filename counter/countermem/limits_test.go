package countermem

import (
	"errors"
	"strconv"
	"testing"
	"time"

	"headcount/counter"
	"headcount/counter/limit"
)

// States that have ended leave memory, while those that are used stay.
func TestEndedLimitsAreForgotten(t *testing.T) {
	now := time.UnixMilli(1_700_000_000_000)
	s := New(Config{Now: func() time.Time { return now }})
	take := func(key string, a limit.Algorithm) counter.LimitResult {
		return s.Limit(t.Context(), []limit.Call{{Name: limit.Name{Key: key, Algorithm: a, Window: 1000}, Limit: 2, Cost: 1}})[0]
	}
	const rounds, keys = 50, 30
	for round := range rounds {
		for key := range keys {
			for _, a := range []limit.Algorithm{limit.Fixed, limit.Sliding, limit.Log} {
				if r := take(strconv.Itoa(round*keys+key), a); r.Err != nil || !r.Allowed {
					t.Fatalf("%+v", r)
				}
			}
			now = now.Add(50 * time.Millisecond)
			take("busy", limit.Log)
		}
	}
	l := &s.limits
	// A second has 20 keys; a state of sliding ends after two.
	if n := len(l.states); n > 4*20*3 || n != len(l.due) {
		t.Errorf("%d states and %d in the heap", n, len(l.due))
	}
	if l.passed > 100 {
		t.Errorf("%d calls are remembered", l.passed)
	}
	for range 1000 {
		now = now.Add(time.Second)
		take("busy", limit.Fixed)
	}
	if len(l.states) != 1 || len(l.due) != 1 || l.passed != 0 {
		t.Errorf("%d states, %d in the heap, %d calls", len(l.states), len(l.due), l.passed)
	}
}

// At the bound new states are refused, and those that are there go on.
func TestMemoryOfLimitsIsBounded(t *testing.T) {
	s := New(Config{})
	call := limit.Call{Name: limit.Name{Key: "k", Algorithm: limit.Log, Window: limit.MaxWindow.Milliseconds()}, Limit: 2, Cost: 1}
	other := call
	other.Key = "other"
	if r := s.Limit(t.Context(), []limit.Call{call})[0]; !r.Allowed {
		t.Fatalf("%+v", r)
	}
	s.limits.maxPassed = 1
	if r := s.Limit(t.Context(), []limit.Call{call})[0]; !errors.Is(r.Err, counter.ErrBusy) {
		t.Errorf("%+v", r)
	}
	s.limits.maxPassed, s.limits.maxStates = 2, 1
	if r := s.Limit(t.Context(), []limit.Call{other})[0]; !errors.Is(r.Err, counter.ErrBusy) {
		t.Errorf("%+v", r)
	}
	if r := s.Limit(t.Context(), []limit.Call{call})[0]; r.Err != nil || !r.Allowed {
		t.Errorf("%+v", r)
	}
}
