package fanout

import (
	"context"
	"time"

	"headcount/internal/outage"
	"headcount/presence"
)

const (
	attachBatch = 500             // topics in one call to the store
	detachBatch = 2 * attachBatch // more than are attached in a turn, so that what is to be detached gets less
	lingerFor   = 5 * time.Second // a topic that nobody wants is kept this long: reloads come back
	// A topic is dropped before lingerFor is over when this many others were left
	// after it.
	maxLingering = 10_000
	verifyPart   = 8 // buckets whose endpoints are verified at a time: a command each
	verifyLimit  = 2 * time.Second
)

// keepAttached keeps the store told of the topics that are wanted here, until ctx
// ends. In a turn it attaches one batch and detaches one, so that neither keeps
// the other waiting. After a failure new topics wait for the next attempt, which
// is with one topic: what it asked for has to be detached, whether or not it came
// to anything, so it must not be much while the store is away.
func (h *Hub) keepAttached(ctx context.Context) {
	tick := time.NewTicker(lingerFor / 2)
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
			h.look(ctx)
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
				h.log.Warn().Err(err).Msg("topics could not be attached; trying again")
			}
			retry.Reset(outage.Pause(failed))
			continue
		}
		if failed > 0 {
			h.log.Info().Int("attempts", failed).Msg("topics can be attached again")
		}
		failed = 0
		detached := h.detach(ctx)
		h.mu.Lock()
		more := h.fresh.len > 0 || detached && len(h.gone) > 0
		h.mu.Unlock()
		if more {
			signal(h.wake)
		}
	}
}

// attachAll has every topic attached and read anew; under mu.
func (h *Hub) attachAll() {
	h.era++
	for _, w := range h.topics {
		h.renew(w)
	}
}

// renew has a topic attached and read anew: at once, or when somebody wants it
// again; under mu.
func (h *Hub) renew(w *watched) {
	if w.sourced {
		return // it is not the store's
	}
	w.current = false
	if w.refs > 0 && w.in == nil {
		h.fresh.push(w)
	}
}

// look goes through all topics, once: they are many, and most of them have not been
// touched for long. It verifies the endpoints of some, and has the topics read again
// whose update is stale, or not known, though the store answers: the word that it is
// complete again may have been lost, or overtaken by one that it is not.
//
// What it verifies are the endpoints in some of the buckets that had any when it
// looked last, in turn. So a loss is found within eight looks, and within three when
// the topics are in few buckets.
func (h *Hub) look(ctx context.Context) {
	h.mu.Lock()
	if h.down {
		h.mu.Unlock()
		return
	}
	chosen, next := h.used, h.verified
	if !h.lost {
		chosen, next = h.used.some(h.verified)
	}
	h.used = buckets{}
	reread := h.fresh.len == 0 // else these come first
	var topics []presence.Topic
	for t, w := range h.topics {
		if w.verifiable() {
			h.used[w.bucket] = true
			if chosen[w.bucket] {
				topics = append(topics, t)
			}
		}
		if reread && (w.update.Stale && !h.doubt || !w.known) {
			h.renew(w)
		}
	}
	h.mu.Unlock()
	if h.verify(ctx, topics) {
		h.verified = next
	}
}

// buckets is a set of them.
type buckets [presence.DefaultBuckets]bool

// some returns verifyPart of the buckets, from the one at first, and where to go on.
func (b *buckets) some(first int) (part buckets, next int) {
	next = first
	for n, looked := 0, 0; looked < len(b) && n < verifyPart; looked++ {
		if b[next] {
			part[next] = true
			n++
		}
		next = (next + 1) % len(b)
	}
	return part, next
}

// verify has every topic attached again when the store lacks one of these: this
// gateway may have been taken for dead. The goroutine that calls it attaches and
// detaches, too, so what it takes for attached has to be there. ok is false when the
// store did not answer; it says so itself.
func (h *Hub) verify(ctx context.Context, topics []presence.Topic) (ok bool) {
	ctx, cancel := context.WithTimeout(ctx, verifyLimit)
	defer cancel()
	missing, err := h.store.Missing(ctx, h.life, topics)
	if err != nil {
		return false
	}
	if h.lost = len(missing) > 0; h.lost {
		h.log.Warn().Int("endpoints", len(missing)).Msg("the store lacks endpoints of this gateway; attaching all topics again")
		h.mu.Lock()
		h.attachAll()
		h.mu.Unlock()
	}
	return true
}

// verifiable reports whether the store should have the endpoint of the topic. The
// caller holds the hub's lock.
func (w *watched) verifiable() bool { return w.attached && w.refs > 0 && !w.sourced }

// attach tells the endpoint store of new topics, at most that many, and learns
// their updates.
func (h *Hub) attach(ctx context.Context, most int) error {
	h.mu.Lock()
	era := h.era
	batch := make([]*watched, 0, min(h.fresh.len, most))
	topics := make([]presence.Topic, 0, cap(batch))
	for len(batch) < cap(batch) {
		w := h.fresh.first
		w.leaveLine()
		w.asked = true
		batch, topics = append(batch, w), append(topics, w.update.Topic)
	}
	h.mu.Unlock()
	if len(batch) == 0 {
		return nil
	}
	updates, err := h.store.Attach(ctx, h.life, topics)
	h.mu.Lock()
	for _, w := range batch {
		switch {
		case h.topics[w.update.Topic] != w: // it was dropped meanwhile, and is to be detached
		case err != nil:
			h.renew(w)
		default:
			w.attached = true
			w.current = era == h.era
		}
	}
	h.mu.Unlock()
	if err != nil {
		return err
	}
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
	for w := h.lingering.first; w != nil && now-w.left >= lingerFor; w = h.lingering.first {
		h.drop(w)
	}
}

// detach tells the store of topics that were dropped. It reports whether it could;
// if not, they are told again at the next turn.
func (h *Hub) detach(ctx context.Context) bool {
	var topics []presence.Topic
	h.mu.Lock()
	for t := range h.gone {
		if len(topics) == detachBatch {
			break
		}
		topics = append(topics, t)
		delete(h.gone, t)
	}
	h.mu.Unlock()
	if len(topics) == 0 {
		return true
	}
	// This goroutine attaches, too, so a topic wanted again meanwhile is attached
	// after this, never before.
	err := h.store.Detach(ctx, h.life, topics)
	if err == nil {
		return true
	}
	h.log.Debug().Err(err).Msg("topics stay attached for now: their updates will come and be ignored")
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, t := range topics {
		if w := h.topics[t]; w != nil {
			w.asked = true
		} else {
			h.gone[t] = struct{}{}
		}
	}
	return false
}
