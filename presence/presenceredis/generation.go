package presenceredis

import (
	"context"
	"fmt"
	"strconv"
	"sync"

	"golang.org/x/sync/singleflight"

	"headcount/presence"
)

// generationCache has the generation of Redis as this process last read it. A connection
// to another run of a server clears it: that server may have older data.
type generationCache struct {
	reading singleflight.Group // of generations

	mu         sync.Mutex
	runs       map[string]struct{} // run ids of the servers reached so far; at most maxRuns
	reached    uint64              // how many runs were new
	generation uint64              // 0: not known
}

// maxRuns bounds generationCache.runs. Beyond it all are forgotten, and count as new when
// they are reached again.
const maxRuns = 1000

// Reached implements redisconn.Runs.
func (s *Store) Reached(run string) {
	if s.generations.isNew(run) {
		s.marks.Restarted()
	}
}

// isNew records a run, and reports whether it was reached for the first time.
func (k *generationCache) isNew(run string) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	if _, old := k.runs[run]; old {
		return false
	}
	if k.runs == nil || len(k.runs) == maxRuns {
		k.runs = map[string]struct{}{}
	}
	k.runs[run] = struct{}{}
	k.reached++
	k.generation = 0
	return true
}

func (k *generationCache) get() (generation, reached uint64) {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.generation, k.reached
}

// set stores a generation that was read, unless a new run was reached since the reading
// began.
func (k *generationCache) set(generation, reached uint64) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.reached == reached {
		k.generation = generation
	}
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
	generation, _ := s.generations.get()
	if generation != 0 && compare(generation) {
		return is, nil
	}
	// The cached generation may be outdated.
	v, err, _ := s.generations.reading.Do("", func() (any, error) { return s.Generation(context.WithoutCancel(ctx)) })
	if err != nil {
		return nil, err
	}
	compare(v.(uint64))
	return is, nil
}

// errRestored means that Redis is available again, but that a bucket may still assign
// versions that Redis has lost to other contents.
var errRestored = fmt.Errorf("%w: Redis is back, but presence nodes have not written its buckets yet", presence.ErrUnavailable)
