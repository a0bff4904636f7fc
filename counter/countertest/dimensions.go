package countertest

import (
	"maps"
	"math"
	"strconv"
	"testing"

	"headcount/counter"
)

// under returns c with dimensions: pairs of a name and a value.
func under(c counter.Change, pairs ...string) counter.Change {
	for i := 0; i < len(pairs); i += 2 {
		c.Dimensions = append(c.Dimensions, counter.Dimension{Name: pairs[i], Value: pairs[i+1]})
	}

	return c
}

// counted reads a dimension, which must not have more values than are kept.
func counted(t testing.TB, s counter.Reader, key, name string) counter.Counted {
	t.Helper()
	c, all, err := s.Dimension(t.Context(), key, name)
	if err != nil || c.Key != key || len(all.Values) > counter.MaxValues {
		t.Fatalf("Dimension(%q, %q) = %+v, %d values, %v", key, name, c, len(all.Values), err)
	}

	return all
}

// counts fails unless want is all that a dimension with few values has counted.
func counts(t testing.TB, s counter.Reader, key, name string, want map[string]int64) {
	t.Helper()
	all := counted(t, s, key, name)
	if !maps.Equal(all.Values, want) || all.Other != 0 {
		t.Fatalf("%q counted %v under %q, and %d under others, want %v", key, all.Values, name, all.Other, want)
	}
}

// manyValues tests a dimension with more values than are kept, and sums that 64 bits cannot hold.
func manyValues(t *testing.T, i Instance) {
	const more = 50
	s := i.Store
	var first, second []counter.Change
	for n := range counter.MaxValues {
		first = append(first, under(add(sum, "s:1", int64(n+1)), "os", "v"+strconv.Itoa(n)))
	}
	for n := range more {
		second = append(second, under(add(sum, "s:1", 7), "os", "other "+strconv.Itoa(n)))
		second = append(second, under(add(sum, "s:1", 1), "os", "v"+strconv.Itoa(n)))
	}

	apply(t, s, first...)
	apply(t, s, second...)
	apply(t, s, under(add(sum, "s:1", -3), "os", "other 0", "country", "de"))

	all := counted(t, s, "s:1", "os")
	// Every change counts, whether under its value or under the others.
	total := all.Other
	for _, n := range all.Values {
		total += n
	}
	if n := read(t, s, "s:1").Value; total != n || len(all.Values) != counter.MaxValues {
		t.Errorf("%d are counted under %d values and others, want all %d", total, len(all.Values), n)
	}
	counts(t, s, "s:1", "country", map[string]int64{"de": -3})

	// A count that would overflow stays at the end of its range.
	for range 3 {
		one(t, s, under(add(sum, "s:3", 1<<62), "os", "x"))
		one(t, s, under(add(sum, "s:3", -1<<62), "os", "y"))
	}
	counts(t, s, "s:3", "os", map[string]int64{"x": math.MaxInt64, "y": math.MinInt64})
}
