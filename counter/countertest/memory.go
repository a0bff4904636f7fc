package countertest

import (
	"testing"

	"headcount/counter"
	"headcount/counter/local"
)

// InMemory returns a store in memory, until the test ends. Without rules it is for tests whose changes bring theirs.
func InMemory(t testing.TB, rules *counter.Rules) counter.Store {
	t.Helper()
	if rules == nil {
		rules = &counter.Rules{}
	}

	s := local.InMemory(rules)
	t.Cleanup(func() { _ = s.Close() })

	return s
}
