package region

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/rs/zerolog"

	"headcount/internal/outage"
	"headcount/presence/pncounter"
)

// link sends this region's changes to one peer. It has two goroutines, so that a change
// never waits for the reply to a greeting: greet greets the peer and reads the peer's
// positions, run sends the changes.
type link struct {
	Peer
	r        *Replicator
	log      zerolog.Logger
	wake     chan struct{} // holds one: run may have something to send
	greetNow chan struct{} // holds one: greet must not wait for its next turn

	mu             sync.Mutex // guards all down to polled
	owned          []int
	dirty          map[int]bool // owned buckets that may have changes
	oldestDirty    time.Time    // of the oldest change in dirty; zero: none
	oldestInFlight time.Time    // of the oldest change in flight; zero: none
	greeted        bool         // the peer has answered the last greeting and is not refused
	inFlight       []int        // buckets of the batches in flight
	touched        map[int]bool // buckets sent since greet began to read the peer's positions
	polled         map[int]pncounter.Position

	positions map[int]pncounter.Position // only run: the peer's position by bucket
	room      int                        // only run: bound of the pages in one round
	sent      bool                       // only run: the last round sent something
	broken    map[int]bool               // only run: buckets that the peer failed to merge
	refused   string                     // only greet: why the peer is refused; empty: it is not
}

func (l *link) own(buckets []int) {
	l.mu.Lock()
	l.owned = slices.Clone(buckets)
	l.mu.Unlock()
	signal(l.greetNow)
}

func (l *link) changed(bucket int) {
	l.mu.Lock()
	mine := slices.Contains(l.owned, bucket)
	if mine {
		l.dirty[bucket] = true
		if l.oldestDirty.IsZero() {
			l.oldestDirty = time.Now()
		}
	}
	l.mu.Unlock()
	if mine {
		signal(l.wake)
	}
}

// lag returns how long the oldest unacknowledged change has waited, or 0.
func (l *link) lag() time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	oldest := l.oldestInFlight
	if oldest.IsZero() {
		oldest = l.oldestDirty
	}
	if oldest.IsZero() {
		return 0
	}
	return time.Since(oldest)
}

// greet greets the peer every helloEvery and compares the peer's positions with the
// known ones every pollEvery, until ctx ends.
func (l *link) greet(ctx context.Context) {
	var polled time.Time // the last time
	var asked []int      // and for which buckets
	n := 0               // polls
	tick := time.NewTimer(0)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		case <-l.greetNow:
		}
		start := time.Now()
		l.mu.Lock()
		owned := l.owned
		l.mu.Unlock()
		id := l.r.identity.Load()
		if len(owned) == 0 || id == nil { // there are no buckets to share, or no identity yet
			tick.Reset(lookEvery)
			continue
		}
		err := l.Remote.Hello(ctx, *id)
		if err == nil && (start.Sub(polled) >= pollEvery || !slices.Equal(owned, asked)) {
			if !slices.Equal(owned, asked) {
				n = 0
			}
			if err = l.poll(ctx, owned, n%fullPollEvery == 0); err == nil {
				polled, asked = start, owned
				n++
			}
		}
		if ctx.Err() != nil {
			return
		}
		l.noteGreeting(err)
		pause := helloEvery - time.Since(start)
		switch {
		case l.refused != "":
			pause = refusedFor
		case err != nil:
			pause = outage.Jitter(retryAfter)
		}
		tick.Reset(max(pause, 0))
	}
}

// poll reads the peer's positions, for run to compare with its own. With all it marks
// all buckets dirty. It ignores buckets that run sends meanwhile: the position read may
// be outdated, and the peer's ack brings a newer one.
func (l *link) poll(ctx context.Context, owned []int, all bool) error {
	l.mu.Lock()
	l.touched = map[int]bool{}
	for _, b := range l.inFlight {
		l.touched[b] = true
	}
	l.mu.Unlock()
	positions, err := l.Remote.Positions(ctx, owned)
	if err != nil {
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.polled == nil {
		l.polled = map[int]pncounter.Position{}
	}
	for _, p := range positions {
		if !l.touched[p.Bucket] {
			l.polled[p.Bucket] = p
		}
		if all {
			l.dirty[p.Bucket] = true
		}
	}
	return nil
}

// noteGreeting handles the outcome of a greeting, and shows it in the log and the metrics.
func (l *link) noteGreeting(err error) {
	reason := ""
	if errors.Is(err, pncounter.ErrRefused) {
		reason = err.Error()
	} else if err != nil {
		reason = l.refused // a refused peer that does not answer stays refused
		l.failed(err)
	}
	switch {
	case reason != "" && l.refused != reason:
		l.log.Warn().Err(err).Msg("counts are not shared with this region")
	case reason == "" && l.refused != "":
		l.log.Info().Msg("counts are shared with this region again")
	}
	l.refused = reason
	value := 0.0
	if reason != "" {
		value = 1
	}
	l.r.metrics.refused.WithLabelValues(l.Name).Set(value)
	l.mu.Lock()
	l.greeted = err == nil
	l.mu.Unlock()
	if err == nil {
		signal(l.wake)
	}
}

func (l *link) failed(err error) {
	l.r.metrics.failures.WithLabelValues(l.Name).Inc()
	l.log.Debug().Err(err).Msg("changes could not be sent to the peer; trying again")
}

// run sends changes to the peer until ctx ends. It sends the first change after a
// pause at once, and then at most one round in each Every. While a round leaves more
// to send, the next one follows without a pause.
func (l *link) run(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-l.wake:
		}
		start := time.Now()
		more, later, err := l.round(ctx)
		if ctx.Err() != nil {
			return
		}
		rest := time.Duration(0)
		switch {
		case err != nil:
			l.failed(err)
			rest = outage.Jitter(retryAfter)
		case later:
			rest = unreadyFor
		case l.sent && !more:
			rest = l.r.cfg.Every - time.Since(start)
		}
		if rest > 0 && !outage.Sleep(ctx, rest) {
			return
		}
		if more || later || err != nil {
			signal(l.wake)
		}
	}
}

// drain returns the dirty buckets for the next round. ok is false until the peer has
// been greeted.
func (l *link) drain() (dirty map[int]bool, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.greeted {
		return nil, false
	}
	// The peer's own word about its positions is better than what the link believes.
	for b, p := range l.polled {
		old, known := l.positions[b]
		if known && old.Done && (p.Log != old.Log || p.Cursor < old.Cursor) {
			l.r.metrics.repairs.WithLabelValues(l.Name).Inc()
		}
		if !p.Done || p != old { // after a failover the peer may lack what it had acknowledged
			l.dirty[b] = true
		}
		l.positions[b] = p
	}
	// Another process has taken over the other buckets.
	for b := range l.dirty {
		if !slices.Contains(l.owned, b) {
			delete(l.dirty, b)
			delete(l.positions, b)
		}
	}
	dirty = l.dirty
	l.dirty, l.polled, l.oldestInFlight, l.oldestDirty = map[int]bool{}, nil, l.oldestDirty, time.Time{}
	return dirty, true
}

// requeue marks the buckets dirty again that a round did not finish.
func (l *link) requeue(rest map[int]bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for b := range rest {
		l.dirty[b] = true
	}
	if len(rest) > 0 && !l.oldestInFlight.IsZero() {
		l.oldestDirty = l.oldestInFlight
	}
	l.oldestInFlight, l.inFlight = time.Time{}, nil
}

// round sends changes to the peer. more says that another round must follow at once, and
// later that some buckets must be tried again after a pause.
func (l *link) round(ctx context.Context) (more, later bool, err error) {
	l.sent = false
	dirty, ok := l.drain()
	if !ok || len(dirty) == 0 {
		return false, false, nil
	}
	defer func() { l.requeue(dirty) }()
	positions := make([]pncounter.Position, 0, len(dirty))
	for b := range dirty {
		at := l.positions[b]
		at.Bucket = b
		positions = append(positions, at)
	}
	all, err := l.r.cfg.Local.Outgoing(ctx, positions, min(bucketPages, l.room))
	if err != nil {
		return false, false, err
	}
	batches, begin, more, err := l.choose(ctx, all, dirty)
	if err != nil {
		return false, false, err
	}
	if len(begin) > 0 {
		if err := l.r.cfg.Local.BeginLogs(ctx, begin); err != nil {
			return false, false, err
		}
		more = true
	}
	if len(batches) == 0 {
		return more, false, nil
	}
	l.sent = true
	acks, err := l.Remote.Merge(ctx, batches)
	if err != nil { // the peer may have merged some: poll finds out
		l.room = max(l.room/2, minPages)
		return false, false, err
	}
	l.room = min(l.room+l.room/4, maxPages)
	behind, refused := 0, 0
	for i, ack := range acks {
		again, err := l.acked(ctx, batches[i], ack, dirty)
		if err != nil {
			return false, false, err
		}
		more = more || again
		later = later || ack.Status == pncounter.Unready || ack.Status == pncounter.Failed
		refused += len(ack.Refused)
		if ack.Status == pncounter.Behind {
			behind++
		}
	}
	if behind+refused > 0 {
		l.log.Warn().Int("buckets", behind).Int("pages", refused).Msg("the peer has counts of this region with higher incarnations; this region raises its own above them")
	}
	return more, later, nil
}

// choose returns the batches to send in this round, and the buckets that must begin a
// new log. It removes buckets without changes from dirty.
func (l *link) choose(ctx context.Context, all []pncounter.Batch, dirty map[int]bool) (batches []pncounter.Batch, begin []int, more bool, err error) {
	pages := 0
	var inflight []int
	for _, b := range all {
		at := l.positions[b.Bucket]
		switch {
		case b.Partial: // Changed marks the bucket again when it is complete
			delete(dirty, b.Bucket)
		case b.Log == 0: // the bucket has no log yet
			begin = append(begin, b.Bucket)
		case b.Forgotten: // the peer may have missed that a page became empty
			l.r.metrics.repairs.WithLabelValues(l.Name).Inc()
			if err := l.r.cfg.Local.Raise(ctx, b.Bucket, b.Log, nil); err != nil {
				return nil, nil, false, err
			}
			more = true
		case b.Log == at.Log && b.To == at.Cursor && (at.Done || !b.Complete): // nothing has changed
			delete(dirty, b.Bucket)
		case pages >= l.room: // in the next round
			more = true
		default:
			pages += len(b.Pages)
			batches, inflight = append(batches, b), append(inflight, b.Bucket)
		}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.inFlight = inflight
	for _, b := range inflight { // their polled positions are outdated from here on
		l.touched[b] = true
		delete(l.polled, b)
	}
	return batches, begin, more, nil
}

// acked handles the acknowledgement of a batch. more says that the bucket must be sent
// again at once.
func (l *link) acked(ctx context.Context, b pncounter.Batch, ack pncounter.Ack, dirty map[int]bool) (more bool, err error) {
	m := l.r.metrics
	m.merged.WithLabelValues(l.Name).Add(float64(ack.Changed))
	if ack.Malformed > 0 {
		m.malformed.WithLabelValues(l.Name).Add(float64(ack.Malformed))
		l.log.Warn().Int("pages", ack.Malformed).Int("bucket", b.Bucket).Msg("the peer's Redis holds counts that cannot be read; this region's counts among them are written again")
	}
	switch ack.Status {
	case pncounter.Merged:
		delete(l.broken, b.Bucket)
		l.positions[b.Bucket] = pncounter.Position{Bucket: b.Bucket, Log: ack.Log, Cursor: ack.Cursor, Done: ack.Done}
		if len(ack.Refused) > 0 { // the peer ignored these pairs: send them again, raised
			pages := make([]string, len(ack.Refused))
			for i, at := range ack.Refused {
				pages[i] = b.Pages[at].Page
			}
			return true, l.r.cfg.Local.Raise(ctx, b.Bucket, ack.High, pages)
		}
		if !b.More {
			delete(dirty, b.Bucket)
		}
		return b.More, nil
	case pncounter.Behind: // this region has lost data, and the peer knows its old pairs
		m.repairs.WithLabelValues(l.Name).Inc()
		return true, l.r.cfg.Local.Raise(ctx, b.Bucket, ack.High, nil)
	case pncounter.Gap: // the peer has less than the link believed: go on from there
		m.repairs.WithLabelValues(l.Name).Inc()
		l.positions[b.Bucket] = pncounter.Position{Bucket: b.Bucket, Log: ack.Log, Cursor: ack.Cursor}
		return true, nil
	case pncounter.Failed:
		l.failed(ack.Err)
		if !l.broken[b.Bucket] {
			l.broken[b.Bucket] = true
			l.log.Warn().Err(ack.Err).Int("bucket", b.Bucket).Msg("a bucket of the peer cannot take changes; the other buckets go on")
		}
		return false, nil
	default: // the bucket has no owner at the peer yet
		return false, nil
	}
}
