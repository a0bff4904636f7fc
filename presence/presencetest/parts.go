package presencetest

import (
	"slices"
	"testing"

	"headcount/internal/testkit"
)

// Parts has parts of the contract, by name, with the reason why a set-up of a store can differ in each from a store
// that passes the whole contract.
type Parts map[string]string

// RunParts tests parts of the contract.
func RunParts(t *testing.T, some Parts, open Factory) {
	names := slices.DeleteFunc(partNames(), func(name string) bool { return some[name] == "" })
	if len(names) != len(some) {
		t.Errorf("%d parts of %v are parts of the contract", len(names), some)
	}

	onServer(t, names, open)
}

// atOnce are the parts that wait for nothing: neither for time nor for publications or other callers.
var atOnce = []string{
	"a change during a reset is not lost",
	"a departure is remembered",
	"a hold has its end",
	"a user follows at most 1,000 pages",
	"a user is forgotten",
	"an answer outdates the saves before it",
	"an old departure is forgotten",
	"attach returns levels and versions",
	"load names the pages of an unfinished write",
	"many departures in one write",
	"many members and pages in one write are listed",
	"notifications are read one by one",
	"partitions written at once add up",
	"records are saved",
	"the authors of a page are bounded",
	"the region has all of a count",
	"the running minute is remembered",
}

// onServer tests parts in real time. Those that wait for nothing are one test, whose log names each part: they take
// milliseconds, and cannot fail because the machine is busy.
func onServer(t *testing.T, names []string, open Factory) {
	var quick []string
	for _, name := range names {
		if slices.Contains(atOnce, name) {
			quick = append(quick, name)
			continue
		}
		t.Run(name, func(t *testing.T) { run(t, name, open(t)) })
	}
	if len(quick) == 0 {
		return
	}

	t.Run("what waits for nothing", func(t *testing.T) {
		for _, name := range quick {
			t.Log(name)
			testkit.Part(t, func(of testing.TB) { run(t, name, open(of)) })
		}
	})
}
