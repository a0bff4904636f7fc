package counter

import (
	"fmt"
	"math/rand/v2"
	"testing"
)

// A pruned map has at most maxPruned keys, and knows each key's gain except for a 2,000th of all gains.
func TestPrunedMap(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	zipf := rand.NewZipf(rng, 1.2, 10, 1_000_000)
	for name, key := range map[string]func(i int) uint64{
		"few are heavy":   func(int) uint64 { return zipf.Uint64() },
		"all are alike":   func(int) uint64 { return rng.Uint64N(100_000) },
		"none repeats":    func(i int) uint64 { return uint64(i) },
		"light, then not": func(i int) uint64 { return uint64(i % (1 + (300_000-i)/10)) },
	} {
		t.Run(name, func(t *testing.T) {
			p := prunedMap{keys: map[string]int64{}}
			truth := map[string]int64{}
			for i := range 300_000 {
				k, n := fmt.Sprint(key(i)), 1+rng.Int64N(5)
				truth[k] += n

				if most := p.add(k, n); most < truth[k] {
					t.Fatalf("%q gained %d, at most %d", k, truth[k], most)
				}
				if len(p.keys) > maxPruned || p.missed > p.total/(maxPruned/2) {
					t.Fatalf("%d keys, %d of %d missed", len(p.keys), p.missed, p.total)
				}
			}

			// The bounds of every key include its true gain.
			for k, n := range truth {
				if has := p.keys[k]; has > n || has+p.missed < n {
					t.Errorf("%q gained %d, and the map has %d with %d missed", k, n, has, p.missed)
				}
			}
		})
	}
}
