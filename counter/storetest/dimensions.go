package storetest

import (
	"maps"
	"math"
	"strconv"
	"sync"
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

func dimensions(t *testing.T, i Instance) {
	s, peer := i.Store, i.Peer
	if peer == nil {
		peer = s
	}
	counts(t, s, "s:none", "country", nil)
	c := one(t, s, under(add(sum, "s:1", 5), "country", "de", "os", "linux"))
	if c.Value != 5 || c.Version.Sequence != 1 {
		t.Fatalf("%+v", c)
	}
	one(t, peer, under(add(sum, "s:1", -2), "country", "de"))
	one(t, s, under(add(sum, "s:1", 3), "country", "fr"))
	one(t, s, add(sum, "s:1", 7))
	counts(t, peer, "s:1", "country", map[string]int64{"de": 3, "fr": 3})
	counts(t, s, "s:1", "os", map[string]int64{"linux": 5})
	counts(t, s, "s:1", "o", nil)
	counts(t, s, "s:1", "oss", nil)
	counts(t, s, "s:2", "country", nil)
	value(t, s, "s:1", 13)

	// Batches, once for each change; what is refused or repeated counts nothing.
	apply(t, s, under(add(sum, "s:1", 1), "country", "de"), under(add(sum, "s:2", 10), "country", "fr"), under(add(sum, "s:1", 2), "country", "de", "os", "mac"))
	o := with("again", op(under(add(sum, "s:1", 4), "country", "fr")))
	do(t, s, o, o)
	one(t, s, edit("m:1", []string{"a"}, nil))
	refused(t, s, counter.ErrKind, "m:1", 1, under(add(sum, "s:1", 1), "country", "de"), under(add(sum, "m:1", 1), "country", "de"))
	// An addition to a counter that is no sum has none, whatever its rule is now.
	one(t, s, add(exact, "e:1", 1))
	one(t, s, under(add(sum, "e:1", 1), "country", "de"))
	counts(t, s, "e:1", "country", nil)
	one(t, s, adjust(sum, "s:1", 1000))
	one(t, s, reset(sum, "s:1"))
	want := map[string]int64{"de": 6, "fr": 7}
	counts(t, peer, "s:1", "country", want)
	counts(t, s, "s:1", "os", map[string]int64{"linux": 5, "mac": 2})
	counts(t, s, "s:2", "country", map[string]int64{"fr": 10})
	// One that is exact goes with one that counts.
	apply(t, s, under(add(sum, "s:1", 1), "country", "de"), add(stock, "k:1", 1), under(add(sum, "s:1", 1), "country", "it"))
	want["de"], want["it"] = 7, 1
	counts(t, s, "s:1", "country", want)
	for _, v := range []string{"a:b", ":", "#", " ", "ü \\ \" %", "*", "{n1}", "DE", "0", "\n"} { // values are taken as they are
		one(t, s, under(add(sum, "s:1", 1), "country", v))
		want[v] = 1
	}
	counts(t, peer, "s:1", "country", want)
	if i.Crash != nil {
		s = i.Crash(t)
		counts(t, s, "s:1", "country", want)
		one(t, s, under(add(sum, "s:1", 1), "country", "de"))
		want["de"]++
		counts(t, s, "s:1", "country", want)
	}
	// They go with the counter, also within one step.
	r := do(t, s, op(under(add(sum, "s:1", 1), "country", "de")), op(drop(sum, "s:1")), op(under(add(sum, "s:1", 9), "country", "se")))
	for j := range r {
		if r[j].Err != nil {
			t.Fatal(r[j].Err)
		}
	}
	counts(t, s, "s:1", "country", map[string]int64{"se": 9})
	one(t, s, drop(sum, "s:1"))
	counts(t, s, "s:1", "country", nil)
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

func concurrentDimensions(t *testing.T, i Instance) {
	const clients, rounds = 8, 25
	var wg sync.WaitGroup
	for c := range clients {
		wg.Go(func() {
			s := i.Store
			if i.Peer != nil && c%2 == 0 {
				s = i.Peer
			}
			for n := range rounds {
				changes := []counter.Change{under(add(sum, "s:1", 1), "country", strconv.Itoa(n%3)), under(add(sum, "s:2", 2), "country", strconv.Itoa(c))}
				if n%2 == 0 {
					changes[0], changes[1] = changes[1], changes[0]
				}
				if r := s.Apply(t.Context(), []counter.Op{op(changes...)})[0]; r.Err != nil {
					t.Error(r.Err)
					return
				}
			}
		})
	}
	wg.Wait()
	counts(t, i.Store, "s:1", "country", map[string]int64{"0": 9 * clients, "1": 8 * clients, "2": 8 * clients})
	want := map[string]int64{}
	for c := range clients {
		want[strconv.Itoa(c)] = 2 * rounds
	}
	counts(t, i.Store, "s:2", "country", want)
}
