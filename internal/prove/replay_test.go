package main

import (
	"slices"
	"testing"
)

// The remaining faults still break the promise, and each of them is necessary.
func TestFewest(t *testing.T) {
	for title, needed := range map[string][]int{
		"none": nil, "the first": {0}, "the last": {12}, "two": {3, 9}, "neighbours": {5, 6, 7},
	} {
		breaks := func(without []int) bool {
			return !slices.ContainsFunc(needed, func(n int) bool { return slices.Contains(without, n) })
		}

		without := fewest(13, breaks)
		if len(without) != 13-len(needed) || !breaks(without) {
			t.Errorf("%s: the faults left out are %v", title, without)
		}
	}
}

// A run reports the promise that it broke first, and how many faults it had.
func TestResultSaysWhatBroke(t *testing.T) {
	res := resultOf("=== RUN\n    0.000  fault 12:\n    1.500  fault 3:\n    2.000  BROKEN once: sum is 5\n"+
		"    3.000  BROKEN newest: late\n--- FAIL: (0.30s)\n", "", nil)
	if res.broke != "once: sum is 5" || res.promise() != "once" || res.faults() != 13 {
		t.Errorf("%q, %q, %d faults", res.broke, res.promise(), res.faults())
	}
	if want := 4; lines(res.trace()) != want {
		t.Errorf("%d lines, want %d: %q", lines(res.trace()), want, res.trace())
	}
}
