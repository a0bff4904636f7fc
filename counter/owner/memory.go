package owner

import (
	"iter"
	"time"

	"headcount/internal/rows"
)

// memory bounds how many rows of its partitions an owner keeps. The holder of the turn owns it.
//
// The cache has the rows that were used last, so that they need not be read again. Recent has the rows and IDs that
// were written last: if the store loses them, the owner writes them again.
type memory struct {
	cache  budget
	recent budget

	aged time.Time // when recent was last aged
}

// recentFor is how long written rows stay in memory, at least. A store that loses writes which are older than this has
// broken its promise to persist them.
const recentFor = 30 * time.Second

// budget counts the bytes in the younger halves of the generations that share it. At the limit these age. A negative
// limit keeps nothing.
type budget struct{ size, limit int }

func newMemory(cfg *Config) memory {
	// A budget counts the younger half alone, so the two halves together take all of the configured memory.
	half := cfg.Memory / 2
	if cfg.Memory < 0 {
		half = -1
	}

	m := memory{cache: budget{limit: half}, recent: budget{limit: half}}
	if cfg.VerifyEvery < 0 {
		m.recent.limit = -1 // without verification no loss would be noticed
	}

	return m
}

// forget keeps the memory within its bounds. The caller has the turn.
func (m *memory) forget(now time.Time, o *Owner) {
	// All partitions share the budget, so a busy one may use what idle ones do not need.
	if m.cache.size > m.cache.limit && m.cache.limit >= 0 {
		m.cache.size = 0
		for _, p := range o.partitions() {
			p.rows.age()
		}
	}

	// Together, both halves have what was written within the last 30 to 60 seconds, or less if there is no room.
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

// generations is a map that forgets what was not used for the longest time. It has two halves: age drops the older half
// and starts a new one, and every use moves an entry into the younger half.
type generations[K comparable, V any] struct {
	*budget        // shared by all generations that age together
	sizeOf         func(K, V) int
	younger, older map[K]V

	youngerSize, olderSize int // in bytes
}

// get returns the value of a key, and moves it into the younger half.
func (g *generations[K, V]) get(key K) (value V, ok bool) {
	value, ok = g.younger[key]
	if ok || len(g.older) == 0 {
		return value, ok
	}

	value, ok = g.older[key]
	if ok {
		// Otherwise it would go with the older half although it is used.
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

	// A row that is written repeatedly counts only once.
	grown := g.sizeOf(key, value)
	before, ok := g.younger[key]
	if ok {
		grown -= g.sizeOf(key, before)
	}
	g.size += grown
	g.youngerSize += grown
	g.younger[key] = value

	// A key is in one half only, so that all yields it once.
	before, ok = g.older[key]
	if ok {
		g.olderSize -= g.sizeOf(key, before)
		delete(g.older, key)
	}
}

// has reports whether there is a value of a key.
func (g *generations[K, V]) has(key K) bool {
	_, young := g.younger[key]
	_, old := g.older[key]

	return young || old
}

func (g *generations[K, V]) len() int { return len(g.younger) + len(g.older) }

// bytes estimates the memory of both halves.
func (g *generations[K, V]) bytes() int { return g.youngerSize + g.olderSize }

// age forgets the older half.
func (g *generations[K, V]) age() {
	g.older = g.younger
	g.olderSize = g.youngerSize
	g.younger = nil
	g.youngerSize = 0
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

// row is a row in memory. A nil value means that the row does not exist.
type row struct {
	value []byte
	// number is that of the commit that wrote the row, or a greater one: a store that has this commit has the row.
	number uint64
}

// rowSize estimates the memory of a row.
func rowSize(name rows.Name, is row) int {
	return len(name.Collection) + len(name.Field) + len(is.value) + 100
}

// remembered is an ID that was used. Its number has the same meaning as that of a row.
type remembered struct {
	until  time.Time
	number uint64
}

// idSize estimates the memory of an ID.
func idSize([16]byte, remembered) int { return 100 }
