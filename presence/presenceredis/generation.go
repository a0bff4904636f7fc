package presenceredis

import (
	"context"
	"fmt"
	"strconv"
	"sync"

	"golang.org/x/sync/singleflight"

	"headcount/presence"
)

// generationCache is the generation of Redis as this process last read it. A connection to another run of
// a server makes it unknown: what that server answers may be older than what was read before.
type generationCache struct {
	reading singleflight.Group // of generations

	mu         sync.Mutex
	runs       map[string]struct{} // of the servers that connections have reached; bounded by maxRuns
	reached    uint64              // how many runs were new
	generation uint64              // 0: not known
}

// maxRuns bounds known.runs. Beyond, all are forgotten: a run that is reached again counts as new.
const maxRuns = 1000

// Reached implements redisconn.Runs.
func (s *Store) Reached(run string) {
	if s.generations.isNew(run) {
		s.marks.Restarted()
	}
}

// isNew notes a run, and reports whether it had not been reached.
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

// set notes a generation. It began to be read when so many runs had been reached.
func (k *generationCache) set(generation, reached uint64) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.reached == reached {
		k.generation = generation
	}
}

// current is the generation of Redis. It reads the generation when it is not known.
func (s *Store) current(ctx context.Context) (uint64, error) {
	if generation, _ := s.generations.get(); generation != 0 {
		return generation, nil
	}
	return s.Generation(ctx)
}

// repaired reports for each bucket whether its counts, and the versions of all else it keeps,
// belong to the present generation of Redis. These are the generations that the buckets said, and
// an empty one is of a bucket that nobody has written since Redis was empty. Call it after they
// were read: then no restart of Redis before that is overlooked.
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
	// This process may be the one that is late.
	v, err, _ := s.generations.reading.Do("", func() (any, error) { return s.Generation(context.WithoutCancel(ctx)) })
	if err != nil {
		return nil, err
	}
	compare(v.(uint64))
	return is, nil
}

// errRestored says that Redis came back, and the versions in some bucket are not above those that it
// may have lost yet.
var errRestored = fmt.Errorf("%w: it has come back, and presence nodes have not written its buckets yet", presence.ErrUnavailable)
