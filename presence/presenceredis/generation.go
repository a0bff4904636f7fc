package presenceredis

import (
	"context"
	"fmt"
	"strconv"
	"sync"

	"golang.org/x/sync/singleflight"

	"headcount/internal/redisconn"
	"headcount/presence"
)

// generationCache has the generation of Redis as this process last read it. It is void when
// another run of a server answers: that server may have older data.
type generationCache struct {
	reading singleflight.Group // of generations
	marks   *redisconn.Marks

	mu         sync.Mutex
	runs       uint64              // marks.Runs before the generation was read
	generation uint64              // 0: not known
	former     map[uint64]struct{} // generations before it; at most maxFormer
}

// maxFormer bounds generationCache.former. Beyond it all are forgotten.
const maxFormer = 1000

// get returns the generation, or 0, and the number of runs for set.
func (k *generationCache) get() (generation, runs uint64) {
	k.mu.Lock()
	defer k.mu.Unlock()

	runs = k.marks.Runs()
	// Another server may have answered since the generation was read, and nothing read before holds for its data.
	if runs == k.runs {
		generation = k.generation
	}

	return generation, runs
}

// set stores a generation that was read after get had returned runs.
func (k *generationCache) set(generation, runs uint64) {
	k.mu.Lock()
	defer k.mu.Unlock()

	if runs < k.runs {
		return // another goroutine read it after a later restart
	}

	// Remember the former generation, so that returned recognizes it: a server that came back under it would reuse
	// versions that clients have.
	if k.generation != 0 && k.generation != generation {
		if k.former == nil || len(k.former) == maxFormer {
			k.former = map[uint64]struct{}{}
		}
		k.former[k.generation] = struct{}{}
	}

	k.generation = generation
	k.runs = runs
}

// returned reports whether Redis had that generation before its present one.
func (k *generationCache) returned(generation uint64) bool {
	k.mu.Lock()
	defer k.mu.Unlock()

	_, was := k.former[generation]

	return was && k.generation != generation
}

// current returns the generation of Redis. It reads the generation only if it is not known.
func (s *Store) current(ctx context.Context) (uint64, error) {
	if generation, _ := s.generations.get(); generation != 0 {
		return generation, nil
	}

	return s.Generation(ctx)
}

// repaired reports for each bucket whether its counts and all its versions belong to the
// current generation of Redis. buckets are the generations that the buckets have; an
// empty one belongs to a bucket that was never written. The caller reads them first, so
// that no restart before the reading goes unnoticed.
func (s *Store) repaired(ctx context.Context, buckets ...string) ([]bool, error) {
	is := make([]bool, len(buckets))
	compare := func(generation uint64) (all bool) {
		text := strconv.FormatUint(generation, 10)
		all = true

		for i, b := range buckets {
			is[i] = b == "" || b == text
			all = all && is[i]
		}

		return all
	}

	// In the steady state this costs no read: the buckets were read before, and all of them are of the cached
	// generation.
	generation, _ := s.generations.get()
	if generation != 0 && compare(generation) {
		return is, nil
	}

	// The cached generation may be outdated.
	// After a restart many reads come here at once, so one of them asks for all.
	v, err, _ := s.generations.reading.Do("", func() (any, error) {
		return s.Generation(context.WithoutCancel(ctx)) // its other callers must not fail with this one
	})
	if err != nil {
		return nil, err
	}

	compare(v.(uint64))
	return is, nil
}

// errRestored means that Redis is available again, but that a bucket may still assign
// versions that Redis has lost to other contents.
var errRestored = fmt.Errorf("%w: Redis is back, but presence nodes have not written its buckets yet",
	presence.ErrUnavailable)
