package presence

import (
	"maps"
	"slices"
	"testing"

	"pgregory.net/rapid"
)

// A set of lives is what a map says, and sets of the same lives are equal, in whatever
// order the lives came and went.
func TestLives(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var l Incarnations
		want := map[string]bool{}
		for range rapid.IntRange(0, 20).Draw(t, "steps") {
			life := IncarnationName(rapid.SampledFrom([]string{"a:1", "b:1", "c:2"}).Draw(t, "process"), 7)
			if rapid.Bool().Draw(t, "comes") {
				l, want[life] = l.With(life), true
			} else {
				l = l.Without(life)
				delete(want, life)
			}
			if l.Has(life) != want[life] {
				t.Fatalf("%s: %t", life, l.Has(life))
			}
		}
		names := slices.Sorted(maps.Keys(want))
		if got := slices.Sorted(l.All()); !slices.Equal(got, names) {
			t.Fatalf("%q, want %q", got, names)
		}
		var again Incarnations
		for _, life := range slices.Backward(names) {
			again = again.With(life)
		}
		if again != l {
			t.Fatalf("%q and %q are not equal", slices.Collect(again.All()), slices.Collect(l.All()))
		}
	})
}
