package presencemem

import (
	"context"

	"headcount/internal/wake"
	"headcount/presence"
)

// watcher is one call of Watch. The store's mutex guards it.
type watcher struct {
	buckets map[int]bool // by bucket: whether publications were dropped
	backlog []presence.Publication
	wake    chan struct{} // holds one: there is something to send
}

// Watch implements presence.Feed.
func (s *Store) Watch(ctx context.Context, buckets []int, fn func(presence.Publication)) {
	w := &watcher{buckets: make(map[int]bool, len(buckets)), wake: make(chan struct{}, 1)}
	for _, b := range buckets {
		w.buckets[b] = true
	}

	// The first publication of each bucket is a Lost, and nothing else would wake the loop for it.
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
			return
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

		for _, p := range todo { // these come first, because they are older than the dropped ones
			fn(p)
		}
		for _, b := range lost {
			fn(presence.Publication{Bucket: b, Lost: true})
		}
	}
}

// publish notifies the watchers of the new counts, with one publication per bucket.
func (s *Store) publish(touched map[*page]struct{}) {
	// Making publications is work, so it is skipped if nobody would get them.
	if len(touched) == 0 || len(s.watchers) == 0 {
		return
	}

	buckets := map[int][]presence.Update{}
	for pg := range touched {
		u := s.count(pg.count.Page).Update()
		b := u.Topic.Bucket(s.cfg.Buckets)
		buckets[b] = append(buckets[b], u)
	}

	for b, updates := range buckets {
		s.notify(presence.Publication{Bucket: b, Updates: updates})
	}
}

// notify queues p for the watchers of its bucket. A watcher that does not keep up loses
// p, and gets a Lost for the bucket.
func (s *Store) notify(p presence.Publication) {
	for w := range s.watchers {
		dropped, watched := w.buckets[p.Bucket]
		if !watched || dropped {
			continue // a watcher that has lost publications reads the whole bucket anyway
		}

		if len(w.backlog) < s.cfg.Backlog {
			w.backlog = append(w.backlog, p)
		} else {
			w.buckets[p.Bucket] = true
		}

		wake.Signal(w.wake)
	}
}
