package presenceredis

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"headcount/internal/wake"
	"headcount/presence"
	"headcount/scripts"
)

const (
	tidyBatch = 500         // pages in one run of sweep.lua
	tidyPause = time.Second // upper bound of a random pause before a sweep: one process may do it for all
)

// chores are the buckets whose empty pages need attention. Scripts that change counts
// report them, and one goroutine of the Store works them off.
type chores struct {
	wake chan struct{} // holds one

	mu sync.Mutex
	// todo has the buckets with too many empty pages. The value says that some empty pages may
	// lack an expiry, so that all pages must be checked.
	todo map[int]bool
}

func (c *chores) add(bucket int, sweep bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.todo[bucket] = c.todo[bucket] || sweep
}

// noteEmptyPages adds chores according to a script's report about the empty pages of a bucket.
func (s *Store) noteEmptyPages(bucket, empties int, sweep bool) {
	if sweep || empties > s.maxEmpty() {
		s.chores.add(bucket, sweep)
		wake.Signal(s.chores.wake)
	}
}

// maxEmpty returns how many empty pages a bucket may have.
func (s *Store) maxEmpty() int { return max(1, s.cfg.EmptyPages/s.cfg.Buckets) }

// doChores works off the chores until ctx ends. It repeats a failed chore after tidyPause.
func (s *Store) doChores(ctx context.Context) {
	retry := time.NewTimer(time.Hour)

	defer retry.Stop()

	failed := func(bucket int, sweep bool, err error) {
		s.chores.add(bucket, sweep)
		retry.Reset(tidyPause)
		s.cfg.Log.Debug().Err(err).Int("bucket", bucket).Msg("empty pages could not be forgotten; retrying")
	}

	for {
		select {
		case <-ctx.Done():
			return
		case <-s.chores.wake:
		case <-retry.C:
		}

		// What scripts report during the work goes into the new map, and is done next.
		s.chores.mu.Lock()
		todo := s.chores.todo
		s.chores.todo = map[int]bool{}
		s.chores.mu.Unlock()

		var sweep []int
		for b, all := range todo {
			if err := s.forget(ctx, b); err != nil {
				failed(b, false, err)
			}
			if all {
				sweep = append(sweep, b)
			}
		}

		if len(sweep) == 0 {
			continue
		}

		// Processes that wait for different times seldom sweep together, and the later ones find the work done.
		select {
		case <-ctx.Done():
			return
		case <-time.After(rand.N(tidyPause)):
		}

		if err := s.sweep(ctx, sweep); err != nil {
			for _, b := range sweep {
				failed(b, true, err)
			}
		}
	}
}

// forget drops the pages of a bucket that have been empty longest, until their number is
// a tenth below maxEmpty.
func (s *Store) forget(ctx context.Context, bucket int) error {
	for {
		var pages []string
		err := s.do(ctx, func(ctx context.Context, c *client) error {
			s.conn.Metrics.Commands.Add(2)

			n, err := c.ZCard(ctx, s.at().emptiesKey(bucket)).Result()
			if err != nil {
				return err
			}

			maxPages := int64(s.maxEmpty())
			// A tenth more than necessary, so that not every further page calls for another round.
			if excess := n - (maxPages - maxPages/10); excess > 0 {
				pages, err = c.ZRange(ctx, s.at().emptiesKey(bucket), 0, min(excess, tidyBatch)-1).Result()
			}
			return err
		})

		if err != nil || len(pages) == 0 {
			return err
		}

		if err := s.conn.Run(ctx, []*scriptRun{s.sweepRun(bucket, pages, true, "")}); err != nil {
			return err
		}
	}
}

// sweep checks all pages of the buckets that no other process has swept meanwhile.
func (s *Store) sweep(ctx context.Context, buckets []int) error {
	runs := make([]*scriptRun, len(buckets))
	for i, b := range buckets {
		// Without pages a run changes nothing and tells which sweep is due.
		runs[i] = s.sweepRun(b, nil, false, "")
	}

	if err := s.conn.Run(ctx, runs); err != nil {
		return err
	}

	numbers := map[int]string{} // of the sweeps that are due, by bucket
	for i, b := range buckets {
		reply := runs[i].Reply.([]any)
		requested, ended := reply[0], reply[1]
		if requested != ended {
			numbers[b] = requested.(string)
		}
	}
	if len(numbers) == 0 {
		return nil
	}

	err := s.eachPage(ctx, func(ctx context.Context, bucket int, pages []string) error {
		if numbers[bucket] == "" {
			return nil
		}
		return s.conn.Run(ctx, []*scriptRun{s.sweepRun(bucket, pages, false, "")})
	})
	if err != nil {
		return err
	}

	runs = runs[:0]
	for b, number := range numbers {
		// The sweep ends under the number from before the scan, so a sweep that was requested meanwhile stays due.
		runs = append(runs, s.sweepRun(b, nil, false, number))
	}

	return s.conn.Run(ctx, runs)
}

// sweepRun returns a run of sweep.lua. done is the number of the sweep that ends with it, or empty.
func (s *Store) sweepRun(bucket int, pages []string, forget bool, done string) *scriptRun {
	prefix := s.at().pagePrefix(bucket)
	run := &scriptRun{
		Script: scripts.Sweep,
		Keys:   []string{s.at().stateKey(bucket), s.at().emptiesKey(bucket)},
		Args:   []any{len(prefix), int(s.cfg.RememberFor.Seconds()), flag(forget), done},
	}

	for _, page := range pages {
		run.Keys = append(run.Keys, prefix+page)
	}

	return run
}

// Pages implements presence.Lister. It scans all keys.
func (s *Store) Pages(ctx context.Context, fn func(pages []string)) error {
	// Masters are scanned in parallel, and the contract promises one call of fn at a time.
	var mu sync.Mutex
	return s.eachPage(ctx, func(_ context.Context, _ int, pages []string) error {
		mu.Lock()
		defer mu.Unlock()
		fn(pages)
		return nil
	})
}

// eachPage calls fn with all pages, some pages of one bucket at a time. It scans masters in
// parallel, so several goroutines call fn.
func (s *Store) eachPage(ctx context.Context, fn func(ctx context.Context, bucket int, pages []string) error) error {
	c, err := s.known(ctx)
	if err != nil {
		return err
	}

	// Not by Store.do, whose time limit is that of a call: a scan of all keys may take longer.
	err = c.Masters(ctx, func(ctx context.Context, m redis.Cmdable) error { return s.eachPageOf(ctx, m, fn) })
	// Errors of fn are of the contract already.
	if err != nil && !errors.Is(err, presence.ErrUnavailable) {
		return s.classify(err)
	}
	return err
}

func (s *Store) eachPageOf(
	ctx context.Context, m redis.Cmdable, fn func(ctx context.Context, bucket int, pages []string) error,
) error {
	for cursor := uint64(0); ; {
		s.conn.Metrics.Commands.Inc()
		keys, next, err := m.Scan(ctx, cursor, prefix+"{b*}:c:*", scanBatch).Result()
		if err != nil {
			return err
		}

		pages := map[int][]string{}
		for _, key := range keys {
			tag, page, _ := strings.Cut(strings.TrimPrefix(key, prefix+"{"), "}:c:")
			// The pattern also fits keys of other tags, such as what a release with another format left.
			b, known := s.at().byTag[tag]
			if known {
				pages[b] = append(pages[b], page)
			}
		}

		for b, list := range pages {
			for part := range slices.Chunk(list, tidyBatch) {
				if err := fn(ctx, b, part); err != nil {
					return err
				}
			}
		}

		if next == 0 {
			return nil
		}
		cursor = next
	}
}
