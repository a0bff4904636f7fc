package region

import (
	"context"
	"crypto/rand"
	"fmt"
	"slices"
	"time"

	"headcount/presence/pncounter"
)

// watch follows the peers' greetings until ctx ends.
func (r *Replicator) watch(ctx context.Context) {
	w := &watcher{r: r, words: map[string]string{}, greetedHere: map[string]bool{}}

	// Every peer counts as greeted now, so that none is silent before it had time to greet.
	r.mu.Lock()
	r.lookedAt = time.Now()
	for _, p := range r.cfg.Peers {
		r.greetedAt[p.Name] = r.lookedAt
	}
	r.mu.Unlock()

	tick := time.NewTicker(readEvery)
	defer tick.Stop()

	for failed := false; ; {
		err := w.look(ctx, time.Now())
		// The first failure alone, because looks go on all the time.
		if err != nil && !failed && ctx.Err() == nil {
			r.cfg.Log.Warn().Err(err).Msg("the state of the regions cannot be read; retrying")
		}

		failed = err != nil
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// watcher is the state of watch. Only watch's goroutine uses it.
type watcher struct {
	r           *Replicator
	words       map[string]string // by peer: its word at the last look
	greetedHere map[string]bool   // peers whose greeting this process has seen itself
	applied     string            // the decision last applied, and its buckets
	appliedAt   time.Time
	// bucket is the index, among the owned buckets, of the log that is being swept, and
	// rank is how far the sweep has come in it.
	bucket, rank int
}

// look reads the greetings of the peers. The process that owns bucket 0 decides which
// peers are left out, so that the region has one decision; every process applies the
// decision to its own buckets. now is this process's own clock: the clocks of other
// regions may be wrong.
func (w *watcher) look(ctx context.Context, now time.Time) error {
	r := w.r
	if len(r.cfg.Peers) == 0 { // former peers must not stay in totals
		r.mu.Lock()
		buckets := r.buckets
		r.mu.Unlock()
		return w.apply(ctx, now, buckets, nil, nil, applyAloneEvery)
	}

	regions, err := r.cfg.Local.Regions(ctx)
	if err != nil {
		return err
	}

	if err := r.identify(ctx, regions.Identity); err != nil {
		return err
	}

	r.mu.Lock()
	buckets := r.buckets
	r.mu.Unlock()
	// While bucket 0 moves, two processes may lead. Both judge by the same greetings.
	leads := slices.Contains(buckets, 0)

	// Each process judges, so that whichever leads next knows when it heard from each peer.
	in, out := w.judge(now, regions, len(buckets) > 0, leads)

	if leads && !slices.Equal(out, regions.Out) {
		// Stored before it is applied, because all other processes apply what is stored.
		if err := w.decide(ctx, regions.Out, out); err != nil {
			return err
		}
	}

	r.mu.Lock()
	r.out = slices.Clone(out)
	r.mu.Unlock()
	r.metrics.setLeftOut(out)

	if err := w.apply(ctx, now, buckets, in, out, applyEvery); err != nil {
		return err
	}

	return w.sweep(ctx, buckets)
}

// judge updates the time of each peer's last greeting, and returns the peers that totals include
// and the peers that they leave out. A process that does not lead repeats the decision in regions.
func (w *watcher) judge(now time.Time, regions pncounter.Regions, owns, leads bool) (in, out []string) {
	r := w.r
	r.mu.Lock()
	defer r.mu.Unlock()

	gap := now.Sub(r.lookedAt)
	r.lookedAt = now

	for _, p := range r.cfg.Peers {
		word := regions.Words[p.Name]
		was, known := w.words[p.Name]
		w.words[p.Name] = word

		// Each greeting changes the word. The first one that is read may be old, and shows nothing.
		greeted := known && word != was && word != ""
		idle := !w.greetedHere[p.Name] && !owns
		switch {
		case greeted:
			r.greetedAt[p.Name] = now
			w.greetedHere[p.Name] = true
		case idle: // this process takes no part yet
			r.greetedAt[p.Name] = now
		// The peer may have been unable to write its word: this process stood still, or Redis was away.
		case gap > awayAfter:
			r.greetedAt[p.Name] = r.greetedAt[p.Name].Add(gap)
		}

		silent := slices.Contains(regions.Out, p.Name)
		if leads {
			// By the time that this process has measured itself, whatever the clocks of the regions say.
			overdue := now.Sub(r.greetedAt[p.Name]) >= r.cfg.StaleAfter
			stays := silent && !w.greetedHere[p.Name] // as a former leader decided
			silent = r.cfg.StaleAfter > 0 && (overdue || stays)
		}

		if silent {
			out = append(out, p.Name)
		} else {
			in = append(in, p.Name)
		}
	}

	slices.Sort(in)
	slices.Sort(out)
	return in, out
}

// decide stores that totals leave out the peers in out, instead of those in old.
func (w *watcher) decide(ctx context.Context, old, out []string) error {
	if err := w.r.cfg.Local.DecideOut(ctx, out); err != nil {
		return err
	}

	// Only the leader logs a decision, and only when it changes.
	for _, name := range out {
		if !slices.Contains(old, name) {
			w.r.cfg.Log.Warn().Str("peer", name).Dur("silent_for", w.r.cfg.StaleAfter).
				Msg("a region is silent; totals leave the region out until it is heard again")
		}
	}

	for _, name := range old {
		if !slices.Contains(out, name) {
			w.r.cfg.Log.Info().Str("peer", name).
				Msg("a region is heard again; totals include the region")
		}
	}

	return nil
}

// sweep removes some forgotten pages from the logs, bucket by bucket.
func (w *watcher) sweep(ctx context.Context, buckets []int) (err error) {
	// The sweep of the last bucket has come to its end.
	if w.rank == 0 {
		w.bucket++
	}

	if len(buckets) > 0 {
		// After an error the rank is 0, so the next look goes on with another bucket.
		w.rank, err = w.r.cfg.Local.Sweep(ctx, buckets[w.bucket%len(buckets)], w.rank)
	}

	return err
}

// apply writes the decision to the buckets: totals leave out the regions in out.
func (w *watcher) apply(
	ctx context.Context, now time.Time, buckets []int, in, out []string, every time.Duration,
) error {
	what := fmt.Sprint(buckets, in, out)
	// The decision is written again every now and then, because a bucket may have lost it.
	recent := what == w.applied && now.Sub(w.appliedAt) < every
	if len(buckets) == 0 || recent {
		return nil
	}

	if err := w.r.cfg.Local.ApplyPeers(ctx, buckets, in, out); err != nil {
		return err
	}

	w.applied = what
	w.appliedAt = now
	return nil
}

// identify keeps the region's identity in its Redis: all processes remember it, and
// write it again when Redis has lost it.
func (r *Replicator) identify(ctx context.Context, found string) error {
	if found == "" {
		mine := rand.Text()
		if old := r.identity.Load(); old != nil {
			mine = *old
		}

		var err error
		// Another process may have been faster, and its identity is the region's then.
		found, err = r.cfg.Local.Identify(ctx, mine)
		if err != nil {
			return err
		}
	}

	old := r.identity.Swap(&found)
	if old == nil { // the links have waited for an identity to greet with
		for _, l := range r.links {
			l.Look()
		}
	}

	return nil
}

// isAway reports whether this region's own Redis has not answered for a while.
func (r *Replicator) isAway() bool {
	r.mu.Lock()
	defer r.mu.Unlock()

	return time.Since(r.lookedAt) > awayAfter
}

// silentFor returns the time since the peer's last greeting.
func (r *Replicator) silentFor(peer string) time.Duration {
	r.mu.Lock()
	defer r.mu.Unlock()

	at, ok := r.greetedAt[peer]
	// Nobody greets before Run.
	if !ok {
		return 0
	}

	return time.Since(at)
}
