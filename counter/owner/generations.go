package owner

import "iter"

// generations is a map that forgets what was not used for the longest time. It has two halves: age forgets the older one
// and begins a new one, and what is used moves into the younger half. The zero value is ready for use.
type generations[K comparable, V any] struct {
	younger, older map[K]V
	size           int // of the younger half, in bytes
}

// get returns the value of a key. It moves a value of the older half into the younger one.
func (g *generations[K, V]) get(key K, size func(K, V) int) (value V, ok bool) {
	value, ok = g.younger[key]
	if ok {
		return value, true
	}

	value, ok = g.older[key]
	if ok {
		delete(g.older, key)
		g.put(key, value, size(key, value))
	}

	return value, ok
}

// put stores a value that takes size bytes. The size is counted again when the value is replaced, so that the younger
// half ends a little early.
func (g *generations[K, V]) put(key K, value V, size int) {
	if g.younger == nil {
		g.younger = map[K]V{}
	}

	delete(g.older, key)
	g.younger[key] = value
	g.size += size
}

// age forgets the older half.
func (g *generations[K, V]) age() {
	g.older = g.younger
	g.younger = nil
	g.size = 0
}

// all yields all keys and values.
func (g *generations[K, V]) all() iter.Seq2[K, V] {
	return func(yield func(K, V) bool) {
		for _, half := range []map[K]V{g.younger, g.older} {
			for key, value := range half {
				if !yield(key, value) {
					return
				}
			}
		}
	}
}
