package owner

import (
	"iter"
	"time"

	"headcount/internal/rows"
)

// memory says how much of the partitions' rows an owner keeps. Who has the turn owns it.
//
// The cache has the rows that were used last, so that they are not read again. Recent has the rows that were written
// last, and the IDs: if the store loses them, the owner writes them again.
type memory struct {
	cache  budget
	recent budget

	aged time.Time // when recent forgot something
}

// recentFor is how long what was written stays in memory, at least. A store that loses more than it wrote within this
// time has lost what it promised to keep.
const recentFor = 30 * time.Second

// budget is the size of what the younger halves of some generations have, in bytes. At the limit they age. A negative
// limit keeps nothing.
type budget struct{ size, limit int }

func newMemory(cfg *Config) memory {
	half := cfg.Memory / 2
	if cfg.Memory < 0 {
		half = -1
	}

	m := memory{cache: budget{limit: half}, recent: budget{limit: half}}
	if cfg.VerifyEvery < 0 {
		m.recent.limit = -1 // nobody would notice a loss
	}

	return m
}

// forget keeps what is in memory within its bounds. The caller has the turn.
func (m *memory) forget(now time.Time, o *Owner) {
	if m.cache.size > m.cache.limit && m.cache.limit >= 0 {
		m.cache.size = 0
		for _, p := range o.partitions() {
			p.rows.age()
		}
	}

	// Both halves together have what was written within the last 30 to 60 seconds.
	full := m.recent.size > m.recent.limit
	old := m.recent.size > 0 && now.Sub(m.aged) > recentFor
	if m.recent.limit >= 0 && (full || old) {
		m.recent.size = 0
		m.aged = now
		for _, p := range o.partitions() {
			p.written.age()
			p.ids.age()
		}
	}
}

// generations is a map that forgets what was not used for the longest time. It has two halves: age forgets the older
// one and begins a new one, and what is used moves into the younger half.
type generations[K comparable, V any] struct {
	*budget        // shared by all generations that age together
	sizeOf         func(K, V) int
	younger, older map[K]V
}

// get returns the value of a key. It moves a value of the older half into the younger one.
func (g *generations[K, V]) get(key K) (value V, ok bool) {
	value, ok = g.younger[key]
	if ok || len(g.older) == 0 {
		return value, ok
	}

	value, ok = g.older[key]
	if ok {
		g.put(key, value)
	}

	return value, ok
}

// put stores a value.
func (g *generations[K, V]) put(key K, value V) {
	if g.limit < 0 {
		return
	}
	if g.younger == nil {
		g.younger = map[K]V{}
	}

	// A row that is written again and again counts once.
	before, ok := g.younger[key]
	if ok {
		g.size -= g.sizeOf(key, before)
	}
	g.size += g.sizeOf(key, value)
	g.younger[key] = value
	delete(g.older, key)
}

// has reports whether there is a value of a key.
func (g *generations[K, V]) has(key K) bool {
	_, young := g.younger[key]
	_, old := g.older[key]

	return young || old
}

func (g *generations[K, V]) len() int { return len(g.younger) + len(g.older) }

// age forgets the older half.
func (g *generations[K, V]) age() {
	g.older = g.younger
	g.younger = nil
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

// row is a row in memory. A nil value says that it does not exist.
type row struct {
	value []byte
	// number is that of the commit that wrote the row, or a greater one: a store that has this number has the row.
	number uint64
}

// rowSize returns about what a row takes in memory.
func rowSize(name rows.Name, is row) int {
	return len(name.Collection) + len(name.Field) + len(is.value) + 100
}

// remembered is an ID that was used. Its number is like that of a row.
type remembered struct {
	until  time.Time
	number uint64
}

// idSize returns about what an ID takes in memory.
func idSize([16]byte, remembered) int { return 100 }
