package memstore

import (
	"context"

	"headcount/presence"
)

// watcher is one call of Watch. The store's mutex guards it.
type watcher struct {
	buckets map[int]bool // -> whether publications of it were dropped
	backlog []presence.Publication
	wake    chan struct{} // holds one: there is something
}

// Watch implements presence.Feed.
func (s *Store) Watch(ctx context.Context, buckets []int, fn func(presence.Publication)) error {
	w := &watcher{buckets: make(map[int]bool, len(buckets)), wake: make(chan struct{}, 1)}
	for _, b := range buckets {
		w.buckets[b] = true
	}
	w.wake <- struct{}{}
	s.mu.Lock()
	s.watchers[w] = struct{}{}
	s.mu.Unlock()
	defer func() {
		s.mu.Lock()
		delete(s.watchers, w)
		s.mu.Unlock()
	}()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-w.wake:
		}
		s.mu.Lock()
		var lost []int
		for b, dropped := range w.buckets {
			if dropped {
				lost = append(lost, b)
				w.buckets[b] = false
			}
		}
		todo := w.backlog
		w.backlog = nil
		s.mu.Unlock()
		for _, p := range todo { // older than what was dropped
			fn(p)
		}
		for _, b := range lost {
			fn(presence.Publication{Bucket: b, Lost: true})
		}
	}
}

// publish tells the watchers the new counts, one publication a bucket.
func (s *Store) publish(touched map[*page]struct{}) {
	if len(touched) == 0 || len(s.watchers) == 0 {
		return
	}
	buckets := map[int][]presence.Count{}
	for pg := range touched {
		b := presence.Bucket(pg.count.Page, s.cfg.Buckets)
		buckets[b] = append(buckets[b], s.count(pg.count.Page))
	}
	for b, counts := range buckets {
		s.tell(presence.Publication{Bucket: b, Counts: counts})
	}
}

// tell hands p to the watchers of its bucket. One that does not keep up loses
// it and is told to read the bucket again.
func (s *Store) tell(p presence.Publication) {
	for w := range s.watchers {
		dropped, watched := w.buckets[p.Bucket]
		switch {
		case !watched || dropped:
			continue // it will read the bucket again anyway
		case len(w.backlog) >= s.cfg.Backlog:
			w.buckets[p.Bucket] = true
		default:
			w.backlog = append(w.backlog, p)
		}
		select {
		case w.wake <- struct{}{}:
		default:
		}
	}
}
