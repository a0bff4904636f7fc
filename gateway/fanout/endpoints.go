package fanout

import (
	"context"
	"time"

	"headcount/internal/outage"
	"headcount/internal/wake"
	"headcount/presence"
)

const (
	attachBatch = 500             // topics in one call to the store
	detachBatch = 2 * attachBatch // more than are attached in a turn, so that the topics to detach get fewer
	// lingerFor is how long a topic is kept that nobody wants: pages are reloaded, and read.
	lingerFor   = 10 * time.Second
	verifyEvery = 2500 * time.Millisecond
	// maxLingering bounds the topics that nobody wants: the one left longest ago is dropped
	// early.
	maxLingering = 10_000
	// verifyPart is how many buckets' endpoints are verified at a time, a command each. Three looks see all buckets: a
	// loss must be mended within 10 s.
	verifyPart  = 22
	verifyLimit = 2 * time.Second
)

// verifier says which endpoints keepAttached verifies next: those in some of the buckets, and
// after a loss those in all buckets until none is missing.
type verifier struct {
	next int     // the bucket to begin with
	used buckets // those that had endpoints of this gateway when they were last counted
	lost bool    // endpoints were missing at the last look
}

// keepAttached attaches the topics that are wanted here at the store, and detaches others,
// until ctx ends. In a turn it attaches one batch and detaches one, so that neither delays
// the other. After a failure new topics wait for the next attempt, which has one topic only:
// whatever the store was asked for has to be detached, whether or not it answered, so it
// must not be much while the store is away.
func (h *Hub) keepAttached(ctx context.Context) {
	tick := time.NewTicker(verifyEvery)
	defer tick.Stop()

	retry := time.NewTimer(time.Hour)
	retry.Stop()

	for failed := 0; ; {
		select {
		case <-ctx.Done():
			return
		case <-h.wake:
			if failed > 0 {
				continue
			}
		case <-h.back:
		case <-retry.C:
		case <-tick.C:
			h.expire()
			h.verify(ctx)
			if failed > 0 {
				continue
			}
		}

		batch := attachBatch
		if failed > 0 {
			batch = 1
		}

		if err := h.attach(ctx, batch); err != nil {
			if ctx.Err() != nil {
				return
			}
			failed++
			if failed == 1 {
				h.cfg.Log.Warn().Err(err).Msg("subscribing to topics in the store failed; retrying")
			}
			retry.Reset(outage.Pause(failed))
			continue
		}
		if failed > 0 {
			h.cfg.Log.Info().Int("attempts", failed).Msg("topics are subscribed in the store again")
		}
		failed = 0

		detached := h.detach(ctx)
		h.mu.Lock()
		// What could not be detached waits for the next tick: a store that fails must not be asked without a pause.
		more := h.backlog.fresh.Len() > 0 || detached && len(h.backlog.gone) > 0
		h.mu.Unlock()
		if more {
			wake.Signal(h.wake)
		}
	}
}

// attachAllLocked makes every topic be attached and read anew.
func (h *Hub) attachAllLocked() {
	h.renewed++
	for _, w := range h.topics {
		h.renewLocked(w)
	}
}

// renewLocked makes a topic be attached and read anew: now, or when somebody wants it again.
func (h *Hub) renewLocked(w *watched) {
	if w.kind.source != nil {
		return
	}

	w.endpoint = min(w.endpoint, outdated)
	if w.in != nil {
		return
	}

	if w.refs > 0 {
		w.join(&h.backlog.fresh)
	} else { // it was read twice, and the store did not answer
		h.lingerLocked(w)
	}
}

// verify looks for endpoints that the store has lost: it may have taken this gateway for
// dead. A loss is found within three calls.
//
// verify goes through all topics once, since they are many and most of them are not in the
// cache. So it also renews those whose update is stale or not known although the store
// answers: the update that completes them may have been lost, or overtaken by a stale one.
func (h *Hub) verify(ctx context.Context) {
	h.mu.Lock()
	if h.doubts&storeAway != 0 {
		h.mu.Unlock()
		return
	}

	v := &h.verifier
	chosen := v.used
	next := v.next
	if !v.lost {
		chosen, next = v.used.some(v.next)
	}

	// Counted anew below, while the topics are gone through anyway.
	v.used = buckets{}
	reread := h.backlog.fresh.Len() == 0 // otherwise fresh topics come first
	var topics []presence.Topic

	for t, w := range h.topics {
		if w.hasEndpoint() {
			v.used[w.bucket] = true
			if chosen[w.bucket] {
				topics = append(topics, t)
			}
		}

		incomplete := !w.known || w.update.Stale && h.doubts == 0
		if reread && incomplete {
			h.renewLocked(w)
		}
	}
	h.mu.Unlock()

	// Otherwise the next look asks about the same buckets again.
	if h.attachMissing(ctx, topics) {
		v.next = next
	}
}

// buckets is a set of buckets.
type buckets [presence.DefaultBuckets]bool

// some returns verifyPart of the buckets, from first on, and the bucket where to go on.
func (b *buckets) some(first int) (part buckets, next int) {
	next = first
	n := 0 // buckets in part
	for looked := 0; looked < len(b) && n < verifyPart; looked++ {
		if b[next] {
			part[next] = true
			n++
		}
		next = (next + 1) % len(b)
	}

	return part, next
}

// attachMissing makes every topic be attached again if the store lacks one of these. Only the goroutine
// of keepAttached attaches and detaches, so the store should have all of them. ok is false if the store did
// not answer; the store logs that itself.
func (h *Hub) attachMissing(ctx context.Context, topics []presence.Topic) (ok bool) {
	ctx, cancel := context.WithTimeout(ctx, verifyLimit)
	defer cancel()

	missing, err := h.cfg.Store.Missing(ctx, h.cfg.Gateway, topics)
	if err != nil {
		return false
	}
	h.verifier.lost = len(missing) > 0
	if h.verifier.lost {
		h.cfg.Log.Warn().Int("endpoints", len(missing)).
			Msg("the store lacks endpoints of this gateway; attaching all topics again")

		h.mu.Lock()
		h.attachAllLocked()
		h.mu.Unlock()
	}

	return true
}

// attach attaches fresh topics at the store, at most limit, and reads their updates.
func (h *Hub) attach(ctx context.Context, limit int) error {
	h.mu.Lock()

	renewed := h.renewed
	fresh := &h.backlog.fresh
	batch := make([]*watched, 0, min(fresh.Len(), limit))
	topics := make([]presence.Topic, 0, cap(batch))
	for len(batch) < cap(batch) {
		w := first(fresh)
		w.leave()
		w.endpoint = max(w.endpoint, asked)
		batch = append(batch, w)
		topics = append(topics, w.update.Topic)
	}
	h.mu.Unlock()

	if len(batch) == 0 {
		return nil
	}

	// The topics count as asked for before the call: the store may attach them although its answer is lost.
	updates, err := h.cfg.Store.Attach(ctx, h.cfg.Gateway, topics)

	h.mu.Lock()
	for _, w := range batch {
		switch {
		case h.topics[w.update.Topic] != w: // it was dropped meanwhile, and is to be detached
		case err != nil:
			h.renewLocked(w)
		case renewed != h.renewed: // all topics were to be attached anew meanwhile
			w.endpoint = outdated
		default:
			w.endpoint = attached
			if w.refs == 0 && w.in == nil { // it was read twice
				h.lingerLocked(w)
			}
		}
	}
	h.mu.Unlock()

	if err != nil {
		return err
	}

	// Only after the topics are marked as attached: until then Update remembers updates and delivers none.
	for _, u := range updates {
		h.Update(u)
	}

	return nil
}

// expire drops the topics that nobody has wanted for a while.
func (h *Hub) expire() {
	h.mu.Lock()
	defer h.mu.Unlock()
	now := time.Since(h.born)
	lingering := &h.backlog.lingering
	for w := first(lingering); w != nil && now-w.left >= lingerFor; w = first(lingering) {
		h.dropLocked(w)
	}
}

// detach detaches some of the topics that were dropped. If it returns false, the store could
// not be reached, and the next turn tries again.
func (h *Hub) detach(ctx context.Context) bool {
	var topics []presence.Topic

	h.mu.Lock()
	gone := h.backlog.gone
	for t := range gone {
		if len(topics) == detachBatch {
			break
		}
		topics = append(topics, t)
		delete(gone, t)
	}
	h.mu.Unlock()

	if len(topics) == 0 {
		return true
	}

	// This goroutine also attaches, so a topic that is wanted again meanwhile is attached
	// after this, never before.
	err := h.cfg.Store.Detach(ctx, h.cfg.Gateway, topics)
	if err == nil {
		return true
	}
	h.cfg.Log.Debug().Err(err).Msg("topics stay attached for now: their updates will come and be ignored")

	h.mu.Lock()
	defer h.mu.Unlock()
	for _, t := range topics {
		if w := h.topics[t]; w != nil { // it is wanted again, and must not be forgotten as never asked for
			w.endpoint = max(w.endpoint, asked)
		} else {
			gone[t] = struct{}{}
		}
	}
	return false
}
