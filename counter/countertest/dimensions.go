package countertest

import (
	"maps"
	"math"
	"strconv"
	"testing"

	"headcount/counter"
)

// under is c with pairs of a dimension and a value.
func under(c counter.Change, pairs ...string) counter.Change {
	for i := 0; i < len(pairs); i += 2 {
		c.Dimensions = append(c.Dimensions, counter.Dimension{Name: pairs[i], Value: pairs[i+1]})
	}
	return c
}

// counted reads a dimension, of which no more is kept than may be.
func counted(t testing.TB, s counter.Reader, key, name string) counter.Counted {
	t.Helper()
	c, all, err := s.Dimension(t.Context(), key, name)
	if err != nil || c.Key != key || len(all.Values) > counter.MaxValues {
		t.Fatalf("Dimension(%q, %q) = %+v, %d values, %v", key, name, c, len(all.Values), err)
	}
	return all
}

// counts says what was counted under a dimension, of few values.
func counts(t testing.TB, s counter.Reader, key, name string, want map[string]int64) {
	t.Helper()
	if all := counted(t, s, key, name); !maps.Equal(all.Values, want) || all.Other != 0 {
		t.Fatalf("%q counted %v under %q, and %d under others, want %v", key, all.Values, name, all.Other, want)
	}
}

// dimensions has what the model does not: strange values, several dimensions, a crash, 64 bits.
func dimensions(t *testing.T, i Instance) {
	s, peer := i.Store, i.peer()
	one(t, s, under(add(sum, "s:1", 5), "country", "de", "os", "linux"))
	one(t, peer, under(add(sum, "s:1", -2), "country", "de"))
	apply(t, s, under(add(sum, "s:1", 3), "country", "fr"), under(add(sum, "s:2", 10), "country", "fr"), under(add(sum, "s:1", 2), "country", "de", "os", "mac"))
	refused(t, s, counter.ErrKind, "m:1", 0, under(add(sum, "s:1", 1), "country", "de"), under(add(members, "m:1", 1), "country", "de"))
	// An addition to a counter that is no sum has none, whatever its rule says.
	one(t, s, add(exact, "e:1", 1))
	withDimensions := *exact
	withDimensions.Dimensions = sum.Dimensions
	one(t, s, under(add(&withDimensions, "e:1", 1), "country", "de"))
	counts(t, s, "e:1", "country", nil)
	want := map[string]int64{"de": 5, "fr": 3}
	for _, v := range []string{"a:b", ":", "#", " ", "ü \\ \" %", "*", "{n1}", "DE", "0", "\n"} { // values are taken as they are
		one(t, s, under(add(sum, "s:1", 1), "country", v))
		want[v] = 1
	}
	for _, s := range []counter.Store{s, peer} {
		counts(t, s, "s:1", "country", want)
		counts(t, s, "s:1", "os", map[string]int64{"linux": 5, "mac": 2})
		counts(t, s, "s:1", "o", nil)
		counts(t, s, "s:1", "oss", nil)
		counts(t, s, "s:2", "country", map[string]int64{"fr": 10})
	}
	if i.Crash != nil {
		s = i.Crash(t)
		counts(t, s, "s:1", "country", want)
		one(t, s, under(add(sum, "s:1", 1), "country", "de"))
		want["de"]++
		counts(t, s, "s:1", "country", want)
	}
	one(t, s, drop(sum, "s:1"))
	one(t, s, add(sum, "s:1", 1))
	counts(t, s, "s:1", "country", nil)
	// What leaves 64 bits stays at their end.
	for range 3 {
		one(t, s, under(add(sum, "s:3", 1<<62), "os", "x"))
		one(t, s, under(add(sum, "s:3", -1<<62), "os", "y"))
	}
	counts(t, s, "s:3", "os", map[string]int64{"x": math.MaxInt64, "y": math.MinInt64})
}

// manyValues has more values than are kept.
func manyValues(t *testing.T, i Instance) {
	const more = 50
	s := i.Store
	var first, second []counter.Change
	for n := range counter.MaxValues {
		first = append(first, under(add(sum, "s:1", int64(n+1)), "os", "v"+strconv.Itoa(n)))
	}
	for n := range more {
		second = append(second, under(add(sum, "s:1", 7), "os", "other "+strconv.Itoa(n)), under(add(sum, "s:1", 1), "os", "v"+strconv.Itoa(n)))
	}
	apply(t, s, first...)
	apply(t, s, second...)
	apply(t, s, under(add(sum, "s:1", -3), "os", "other 0", "country", "de"))
	all := counted(t, s, "s:1", "os")
	sum := all.Other
	for _, n := range all.Values {
		sum += n
	}
	if n := read(t, s, "s:1").Value; sum != n || len(all.Values) != counter.MaxValues {
		t.Errorf("%d are counted under %d values and others, want all %d", sum, len(all.Values), n)
	}
	counts(t, s, "s:1", "country", map[string]int64{"de": -3})
}
