package presence

import (
	"maps"
	"slices"
	"testing"

	"pgregory.net/rapid"
)

// A set of incarnations behaves like a map. Sets with the same incarnations are equal, in whatever order these came and
// went.
func TestLives(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var l Incarnations
		want := map[string]bool{}

		for range rapid.IntRange(0, 20).Draw(t, "steps") {
			name := IncarnationName(rapid.SampledFrom([]string{"a:1", "b:1", "c:2"}).Draw(t, "process"), 7)
			if rapid.Bool().Draw(t, "comes") {
				l = l.With(name)
				want[name] = true
			} else {
				l = l.Without(name)
				delete(want, name)
			}

			if l.Has(name) != want[name] {
				t.Fatalf("Has(%q) = %t, want the opposite", name, l.Has(name))
			}
		}

		names := slices.Sorted(maps.Keys(want))
		if got := slices.Sorted(l.All()); !slices.Equal(got, names) {
			t.Fatalf("the set is %q, want %q", got, names)
		}

		var again Incarnations
		for _, name := range slices.Backward(names) {
			again = again.With(name)
		}

		if again != l {
			t.Fatalf("%q and %q are not equal", slices.Collect(again.All()), slices.Collect(l.All()))
		}
	})
}
