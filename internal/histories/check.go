package histories

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/anishathalye/porcupine"
)

const (
	timeout      = 4 * time.Second        // of a check
	shortTimeout = 100 * time.Millisecond // of a check of a shortened history, of which there are many
)

// porcupine returns the model in the checker's form.
func (m *Model) porcupine() porcupine.Model {
	return porcupine.Model{
		Init: func() any { return state{} },
		Step: func(s, call, answer any) (bool, any) {
			after, ok := m.step(s.(state), call.(*Call), answer.(*Answer))
			return ok, after
		},
	}
}

func (m *Model) check(history []porcupine.Operation, within time.Duration) porcupine.CheckResult {
	return porcupine.CheckOperationsTimeout(m.porcupine(), history, within)
}

// Check has the checker judge the history of a subject, without reads within the periods in which they may be old. It
// returns what is wrong, or "". The history is undecided if the checker takes too long.
func (s *Subject) Check(old ...Between) (wrong string, undecided bool) {
	history := s.history(old)
	switch s.Model.check(history, timeout) {
	case porcupine.Ok:
		return "", false
	case porcupine.Unknown:
		return "", true
	}

	shortest := s.Model.shorten(history)
	var b strings.Builder
	fmt.Fprintf(&b, "%s, %d calls: no order of these explains the answers\n", s.Name, len(history))
	const shown = 40 // of the operations, the last ones
	for _, op := range shortest[max(0, len(shortest)-shown):] {
		fmt.Fprintf(&b, "%9.1f – %9.1f ms  %v: %v\n", ms(op.Call), ms(op.Return), op.Input, op.Output)
	}

	return b.String(), false
}

func ms(ns int64) float64 {
	if ns == never {
		return 0
	}

	return float64(ns) / 1e6
}

// shorten returns a part of a history that is wrong by itself, for people to read.
func (m *Model) shorten(history []porcupine.Operation) []porcupine.Operation {
	until := time.Now().Add(timeout)
	// When the time is over no part counts as wrong, so the shortest one so far stays.
	isWrong := func(h []porcupine.Operation) bool {
		return time.Now().Before(until) && m.check(h, shortTimeout) == porcupine.Illegal
	}
	byBegin := func(a, b porcupine.Operation) int { return cmp.Compare(a.Call, b.Call) }
	slices.SortStableFunc(history, byBegin)

	// First find the earliest moment until which the answers are wrong. A history that is wrong until some moment is
	// wrong until every later one, so this can be a binary search.
	ends := make([]int64, len(history))
	for i := range history {
		ends[i] = history[i].Return
	}
	slices.Sort(ends)
	first, _ := slices.BinarySearchFunc(ends, 0, func(end int64, _ int) int {
		if isWrong(before(history, end)) {
			return 1
		}
		return -1
	})
	if first < len(ends) {
		history = before(history, ends[first])
	}

	// Then leave out each answer without which the rest is still wrong. This begins at the end, because deleting an
	// operation moves those after it.
	for i := len(history) - 1; i >= 0; i-- {
		fewer := weaken(slices.Clone(history), i)
		if isWrong(fewer) {
			history = fewer
		}
	}

	return history
}

// before returns the history as it was known at a moment.
func before(history []porcupine.Operation, at int64) (known []porcupine.Operation) {
	for _, op := range history {
		if op.Call > at {
			continue
		}
		// A call without an answer by then may still have taken effect.
		known = append(known, op)
		if op.Return > at {
			known = weaken(known, len(known)-1)
		}
	}

	return known
}

// weaken makes the answer of a call unknown. Every order that explained the history still does.
func weaken(history []porcupine.Operation, i int) []porcupine.Operation {
	verb := history[i].Input.(*Call).Verb
	// A read changes nothing, so without its answer nothing is left of it.
	if verb == Read || verb == Look {
		return slices.Delete(history, i, i+1)
	}
	history[i].Output = &Answer{Unknown: true}
	history[i].Return = never

	return history
}
