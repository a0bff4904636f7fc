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
	detachBatch = 2 * attachBatch // larger than attachBatch, so that topics to detach do not pile up
	// lingerFor is how long a topic without subscribers is kept, because pages are often reloaded or visited again.
	lingerFor   = 10 * time.Second
	verifyEvery = 2500 * time.Millisecond
	// maxLingering bounds the lingering topics. Beyond it, the one that was left longest ago is dropped early.
	maxLingering = 10_000
	// verifyPart is how many buckets' endpoints one call of verify checks, with one command for each. Three calls check
	// all buckets, because a loss must be repaired within 10 s.
	verifyPart  = 22
	verifyLimit = 2 * time.Second
)

// verifier selects the endpoints that keepAttached verifies next: those in the next few buckets, or, after a loss,
// those in all buckets until none is missing.
type verifier struct {
	next int     // the first bucket to verify next
	used buckets // buckets that had endpoints of this gateway when they were last counted
	lost bool    // endpoints were missing at the last verification
	// room is an empty buffer for the topics of the next verification. A new one each time would be most of the garbage
	// that a quiet gateway makes.
	room []presence.Topic
}

// keepAttached attaches the wanted topics in the store, and detaches dropped ones, until ctx ends. Each round attaches
// one batch and detaches one, so that neither delays the other.
//
// After a failure, the next attempt has only one topic: every topic that the store was asked to attach must be detached
// later, whether or not the store answered. So while the store is unavailable, few topics may be asked for.
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
			// While the store fails, news wait for the retry.
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
				h.cfg.Log.Warn().Err(err).
					Msg("subscribing to topics in the store failed; clients wait for the newest counts; retrying")
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

// attachAllLocked marks every topic to be attached and read again.
func (h *Hub) attachAllLocked() {
	h.renewed++
	for _, w := range h.topics {
		h.renewLocked(w)
	}
}

// renewLocked marks a topic to be attached and read again: now, or once it is wanted again.
func (h *Hub) renewLocked(w *watched) {
	// A source is in this process, so nothing can have been lost.
	if w.kind.source != nil {
		return
	}

	// An unasked topic stays unasked, so that it need not be detached.
	w.endpoint = min(w.endpoint, outdated)
	// A fresh one is attached soon, and a lingering one when it is wanted again.
	if w.in != nil {
		return
	}

	if w.refs > 0 {
		w.join(&h.backlog.fresh)
	} else { // it is only kept because it was read repeatedly, and the store did not answer
		h.lingerLocked(w)
	}
}

// verify looks for endpoints that the store has lost, for example because it took this gateway for dead. A loss is
// found within three calls.
//
// Going through all topics is expensive, since there are many and most are not in the CPU's cache. So the same pass
// also renews topics whose update is stale or unknown although the store answers: the update that completes them may
// have been lost, or overtaken by a stale one.
func (h *Hub) verify(ctx context.Context) {
	h.mu.Lock()
	// The store would not answer, and all topics are attached again when it is back.
	if h.doubts&storeAway != 0 {
		h.mu.Unlock()
		return
	}

	v := &h.verifier
	// After a loss all buckets are checked, until none lacks anything.
	chosen := v.used
	next := v.next
	if !v.lost {
		chosen, next = v.used.some(v.next)
	}

	// Counted anew below, while the topics are gone through anyway.
	v.used = buckets{}
	reread := h.backlog.fresh.Len() == 0 // otherwise fresh topics come first
	topics := v.room

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

	// If the store does not answer, the next verification asks about the same buckets again.
	if h.attachMissing(ctx, topics) {
		v.next = next
	}

	clear(topics)
	v.room = topics[:0]
}

// buckets is a set of buckets.
type buckets [presence.DefaultBuckets]bool

// some returns up to verifyPart of the buckets, starting at first, and the bucket to continue with.
func (b *buckets) some(first int) (part buckets, next int) {
	next = first
	n := 0 // number of buckets in part
	for looked := 0; looked < len(b) && n < verifyPart; looked++ {
		if b[next] {
			part[next] = true
			n++
		}
		next = (next + 1) % len(b)
	}

	return part, next
}

// attachMissing marks every topic to be attached again if the store lacks the endpoint of one of the given topics. Only
// the goroutine of keepAttached attaches and detaches, so the store should have all of them. ok is false if the store
// did not answer; the store logs that itself.
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
			Msg("the store has lost subscriptions of this gateway to topics; subscribing to all topics again")

		h.mu.Lock()
		// All of them, because the store was asked about a part only.
		h.attachAllLocked()
		h.mu.Unlock()
	}

	return true
}

// attach attaches at most limit fresh topics in the store, and reads their updates.
func (h *Hub) attach(ctx context.Context, limit int) error {
	h.mu.Lock()

	// This tells afterwards whether all topics were marked again during the call.
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
		case h.topics[w.update.Topic] != w: // it was dropped in the meantime, and will be detached
		case err != nil:
			h.renewLocked(w)
		case renewed != h.renewed: // in the meantime all topics were marked to be attached again
			w.endpoint = outdated
		default:
			w.endpoint = attached
			// No shard wants it: it was attached because it was read repeatedly.
			if w.refs == 0 && w.in == nil {
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

// expire drops the topics that have lingered for long enough.
func (h *Hub) expire() {
	h.mu.Lock()
	defer h.mu.Unlock()
	now := time.Since(h.born)
	lingering := &h.backlog.lingering
	// The topics are in the order in which they were left.
	for w := first(lingering); w != nil && now-w.left >= lingerFor; w = first(lingering) {
		h.dropLocked(w)
	}
}

// detach detaches one batch of dropped topics. It returns false if the store could not be reached; the next round tries
// again.
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

	// The same goroutine attaches topics. So a topic that is wanted again during this call is attached after it, never
	// before.
	err := h.cfg.Store.Detach(ctx, h.cfg.Gateway, topics)
	if err == nil {
		return true
	}
	h.cfg.Log.Debug().Err(err).
		Msg("unsubscribing from topics in the store failed; retrying (their updates are ignored)")

	h.mu.Lock()
	defer h.mu.Unlock()
	for _, t := range topics {
		// A topic that is wanted again has to be detached later, so it must not count as unasked.
		if w := h.topics[t]; w != nil {
			w.endpoint = max(w.endpoint, asked)
		} else {
			gone[t] = struct{}{}
		}
	}
	return false
}
