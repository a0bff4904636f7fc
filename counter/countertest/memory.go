package countertest

import (
	"testing"

	"headcount/counter"
	"headcount/counter/call"
	"headcount/counter/local"
)

// InMemory returns a store in memory, which ends with the test. rules may be nil for tests whose changes have rules of
// their own.
func InMemory(t testing.TB, rules *counter.Rules) counter.Store {
	t.Helper()
	if rules == nil {
		rules = &counter.Rules{}
	}

	s := local.InMemory(rules)
	t.Cleanup(func() { _ = s.Close() })

	return s
}

// Everywhere is a call.Owners in which one owner owns all partitions.
type Everywhere struct{ call.Owner }

// OwnerOf implements call.Owners.
func (e Everywhere) OwnerOf(int) call.Owner { return e.Owner }
