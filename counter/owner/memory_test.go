package owner

import (
	"testing"

	"pgregory.net/rapid"
)

// Whatever is stored, used and forgotten, the bytes are those of what is left, and the budget has those of the younger
// half.
func TestGenerationsKnowTheirSize(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		b := budget{limit: 1 << 20}
		g := generations[int, int]{budget: &b, sizeOf: func(_, value int) int { return value }}
		key := rapid.IntRange(0, 9)
		t.Repeat(map[string]func(*rapid.T){
			"put": func(t *rapid.T) { g.put(key.Draw(t, "key"), rapid.IntRange(1, 1000).Draw(t, "size")) },
			"get": func(t *rapid.T) { g.get(key.Draw(t, "key")) },
			"age": func(*rapid.T) {
				g.age()
				b.size = 0
			},
			"": func(t *rapid.T) {
				all, young := 0, 0
				for _, size := range g.all() {
					all += size
				}
				for _, size := range g.younger {
					young += size
				}
				if g.bytes() != all || b.size != young {
					t.Errorf("%d bytes and %d in the budget, want %d and %d", g.bytes(), b.size, all, young)
				}
			},
		})
	})
}
