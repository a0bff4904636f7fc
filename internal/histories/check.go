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
	patience = 4 * time.Second        // of a check
	glance   = 100 * time.Millisecond // of a check of a shorter form, of which there are many
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

// Check has the history of a subject judged, apart from reads within times in which they may be old. It returns what is
// wrong, or nothing. The history is undecided if the checker took too long.
func (s *Subject) Check(old ...Between) (wrong string, undecided bool) {
	history := s.history(old)
	// The verdict first: the checker's own explanation is too long for people.
	switch s.Model.check(history, patience) {
	case porcupine.Ok:
		return "", false
	case porcupine.Unknown:
		return "", true
	}

	shortest := s.Model.shorten(history)
	var b strings.Builder
	fmt.Fprintf(&b, "%s, %d calls: no order of these explains the answers\n", s.Name, len(history))
	const shown = 40 // the last ones
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

// shorten returns a part of a history that is wrong by itself, for people.
func (m *Model) shorten(history []porcupine.Operation) []porcupine.Operation {
	until := time.Now().Add(patience)
	// When the time is over nothing more counts as wrong, so what has been found so far stays.
	isWrong := func(h []porcupine.Operation) bool {
		return time.Now().Before(until) && m.check(h, glance) == porcupine.Illegal
	}
	byBegin := func(a, b porcupine.Operation) int { return cmp.Compare(a.Call, b.Call) }
	slices.SortStableFunc(history, byBegin)

	// The answers until some moment, as few as possible.
	ends := make([]int64, len(history))
	for i := range history {
		ends[i] = history[i].Return
	}
	slices.Sort(ends)
	// Once wrong, a history stays wrong when more is known, so the first such moment can be searched for.
	first, _ := slices.BinarySearchFunc(ends, 0, func(end int64, _ int) int {
		if isWrong(before(history, end)) {
			return 1
		}
		return -1
	})
	if first < len(ends) {
		history = before(history, ends[first])
	}

	// Of these, each that does not have to be known.
	// From the end, so that deleting an element moves none that is still to come.
	for i := len(history) - 1; i >= 0; i-- {
		fewer := weaken(slices.Clone(history), i)
		if isWrong(fewer) {
			history = fewer
		}
	}

	return history
}

// before returns what was known at a moment.
func before(history []porcupine.Operation, at int64) (known []porcupine.Operation) {
	for _, op := range history {
		if op.Call > at {
			continue
		}
		// What had begun by then may have taken effect, whatever its answer was going to be.
		known = append(known, op)
		if op.Return > at {
			known = weaken(known, len(known)-1)
		}
	}

	return known
}

// weaken makes the answer of a call unknown, which explains all that it explained before, and more.
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
