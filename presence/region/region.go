// Package region shares this region's part of all counts with its peers, the
// other regions, and decides which of them are silent.
//
// A region logs which pages changed, in the scripts that change them. A link per
// peer reads the log from where the peer is, and hands the peer what the pages'
// pairs are now: however often a page changed, it travels once. Where the peer is
// stands in the peer's Redis and moves with what it says it has, so a peer that
// lost data, or was set back, is told again what it lacks, and a link needs no
// memory of its own.
package region

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	mrand "math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"

	"headcount/presence/pncounter"
)

const (
	helloEvery = time.Second            // a peer hears of this region at least so often
	pollEvery  = 2 * time.Second        // the peer's positions are compared
	lookEvery  = 500 * time.Millisecond // who was heard is looked at
	lookAgain  = 5                      // of so many comparisons one has all buckets looked at
	applyEvery = 10 * time.Second       // and what follows is written again, though it seems to be there
	aloneEvery = time.Minute            // the same, by a region without peers
	unreadyFor = 200 * time.Millisecond // until a bucket without an owner is tried again
	retryAfter = 500 * time.Millisecond // at most, until a peer that did not answer is tried again
	refusedFor = 2 * time.Second        // and one that is not what it should be
	// awayAfter without an answer of this region's own Redis says nothing about peers.
	awayAfter = 3 * time.Second

	bucketPages = 500 // of one bucket in one round
	// A round has at most so many pages: as many as got through, and half when they
	// did not.
	leastPages, mostPages = 256, 32768
)

// Local is the store of this region.
type Local interface {
	Outgoing(ctx context.Context, positions []pncounter.Position, limit int) ([]pncounter.Batch, error)
	BeginLogs(ctx context.Context, buckets []int) error
	Raise(ctx context.Context, bucket int, high uint64, pages []string) error
	Regions(ctx context.Context) (pncounter.Regions, error)
	Identify(ctx context.Context, identity string) (string, error)
	DecideOut(ctx context.Context, out []string) error
	ApplyPeers(ctx context.Context, buckets []int, in, out []string) error
	Sweep(ctx context.Context, bucket, rank int) (next int, err error)
}

// Remote is the store of a peer.
type Remote interface {
	Hello(ctx context.Context, identity string) error
	Positions(ctx context.Context, buckets []int) ([]pncounter.Position, error)
	Merge(ctx context.Context, batches []pncounter.Batch) ([]pncounter.Ack, error)
}

// Peer is another region.
type Peer struct {
	Name   string
	Remote Remote
}

// Config tunes a Replicator. A zero duration takes its default, but for StaleAfter.
type Config struct {
	Local Local
	Peers []Peer
	// StaleAfter is how long a peer may be silent before totals leave it out; 0 is
	// for ever.
	StaleAfter time.Duration
	Every      time.Duration // least time between two rounds of a link; default 200ms
	Log        zerolog.Logger
}

// Replicator shares the buckets that Own gave it. Its methods may be called from
// any goroutine.
type Replicator struct {
	cfg      Config
	links    []*link
	metrics  *metrics
	identity atomic.Pointer[string]

	mu      sync.Mutex // guards all below
	buckets []int
	heard   map[string]time.Time // by peer; since Run when it was never heard
}

// New returns a Replicator that does nothing until Run.
func New(cfg Config) *Replicator {
	cfg.Every = cmp.Or(cfg.Every, 200*time.Millisecond)
	r := &Replicator{cfg: cfg, heard: map[string]time.Time{}}
	r.metrics = newMetrics(r)
	for _, p := range cfg.Peers {
		r.links = append(r.links, &link{
			Peer: p, r: r, log: cfg.Log.With().Str("peer", p.Name).Logger(),
			wake: make(chan struct{}, 1), beat: make(chan struct{}, 1), room: mostPages / 4,
			dirty: map[int]bool{}, touched: map[int]bool{}, at: map[int]pncounter.Position{}, broken: map[int]bool{}, answers: map[int]pncounter.Position{},
		})
		r.metrics.peer(r.links[len(r.links)-1])
	}
	return r
}

// Own says which buckets this process is to share from now on. Two that share
// the same for a while do no harm: a peer takes everything once.
func (r *Replicator) Own(buckets []int) {
	r.mu.Lock()
	r.buckets = slices.Clone(buckets)
	r.mu.Unlock()
	for _, l := range r.links {
		l.own(buckets)
	}
}

// Changed says that counts of the bucket may have changed. It does not block.
func (r *Replicator) Changed(bucket int) {
	for _, l := range r.links {
		l.changed(bucket)
	}
}

// Collectors are the replicator's metrics.
func (r *Replicator) Collectors() []prometheus.Collector { return r.metrics.all }

// Run owns the replicator's goroutines; it returns when ctx has ended and all of
// them have. Each peer has its own: one that is slow or away holds up no other.
func (r *Replicator) Run(ctx context.Context) error {
	var wg sync.WaitGroup
	for _, l := range r.links {
		wg.Go(func() { l.run(ctx) })
		wg.Go(func() { l.pulse(ctx) })
	}
	wg.Go(func() { r.watch(ctx) })
	wg.Wait()
	return nil
}

// watch follows when peers were heard, until ctx ends.
func (r *Replicator) watch(ctx context.Context) {
	w := &watcher{r: r, last: time.Now(), seen: map[string]string{}, fresh: map[string]bool{}}
	r.mu.Lock()
	for _, p := range r.cfg.Peers {
		r.heard[p.Name] = w.last
	}
	r.mu.Unlock()
	tick := time.NewTicker(lookEvery)
	defer tick.Stop()
	for failed := false; ; {
		err := w.look(ctx, time.Now())
		if err != nil && !failed && ctx.Err() == nil {
			r.cfg.Log.Warn().Err(err).Msg("regions cannot be looked at; trying again")
		}
		failed = err != nil
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// watcher is what watch knows.
type watcher struct {
	r     *Replicator
	last  time.Time         // of the last look that succeeded
	seen  map[string]string // by peer: the word it left then
	fresh map[string]bool   // heard in this life of the process
	done  string            // what was applied to which buckets, and
	at    time.Time         // when
	// The log being swept, a place among the owned ones, and how far it is.
	bucket, rank int
}

// look reads who was heard. The process that has the first bucket decides who is
// left out, so that it is one decision for the region; all apply it to theirs.
// The time is this process's own clock: those of other regions may be wrong.
func (w *watcher) look(ctx context.Context, now time.Time) error {
	r := w.r
	if len(r.cfg.Peers) == 0 { // it may have had some: they must not stay in totals
		r.mu.Lock()
		buckets := r.buckets
		r.mu.Unlock()
		return w.apply(ctx, now, buckets, nil, nil, aloneEvery)
	}
	regions, err := r.cfg.Local.Regions(ctx)
	if err != nil {
		return err
	}
	if err := r.identify(ctx, regions.Identity); err != nil {
		return err
	}
	gap := now.Sub(w.last)
	w.last = now
	r.mu.Lock()
	buckets := r.buckets
	leads := slices.Contains(buckets, 0)
	var in, out []string
	for _, p := range r.cfg.Peers {
		word := regions.Heard[p.Name]
		was, known := w.seen[p.Name]
		w.seen[p.Name] = word
		switch {
		case known && word != was && word != "":
			r.heard[p.Name] = now
			w.fresh[p.Name] = true
		case !w.fresh[p.Name] && len(buckets) == 0: // this process has nothing to say yet
			r.heard[p.Name] = now
		case gap > awayAfter: // it may have been here, and could not leave a word
			r.heard[p.Name] = r.heard[p.Name].Add(gap)
		}
		silent := slices.Contains(regions.Out, p.Name)
		if leads {
			silent = r.cfg.StaleAfter > 0 && (now.Sub(r.heard[p.Name]) >= r.cfg.StaleAfter || silent && !w.fresh[p.Name])
		}
		if silent {
			out = append(out, p.Name)
		} else {
			in = append(in, p.Name)
		}
	}
	r.mu.Unlock()
	slices.Sort(in)
	slices.Sort(out)
	if leads && !slices.Equal(out, regions.Out) {
		if err := r.cfg.Local.DecideOut(ctx, out); err != nil {
			return err
		}
		for _, name := range out {
			if !slices.Contains(regions.Out, name) {
				r.cfg.Log.Warn().Str("peer", name).Dur("silent_for", r.cfg.StaleAfter).Msg("a region is silent: totals leave it out until it is heard")
			}
		}
		for _, name := range regions.Out {
			if !slices.Contains(out, name) {
				r.cfg.Log.Info().Str("peer", name).Msg("a region is heard again: totals have it")
			}
		}
	}
	r.metrics.leave(out)
	if err := w.apply(ctx, now, buckets, in, out, applyEvery); err != nil {
		return err
	}
	return w.sweep(ctx, buckets)
}

// sweep takes some forgotten pages out of the logs, of one bucket after the other.
func (w *watcher) sweep(ctx context.Context, buckets []int) (err error) {
	if w.rank == 0 {
		w.bucket++
	}
	if len(buckets) > 0 {
		w.rank, err = w.r.cfg.Local.Sweep(ctx, buckets[w.bucket%len(buckets)], w.rank)
	}
	return err
}

// apply makes the buckets count what was decided.
func (w *watcher) apply(ctx context.Context, now time.Time, buckets []int, in, out []string, every time.Duration) error {
	what := fmt.Sprint(buckets, in, out)
	if len(buckets) == 0 || what == w.done && now.Sub(w.at) < every {
		return nil
	}
	if err := w.r.cfg.Local.ApplyPeers(ctx, buckets, in, out); err != nil {
		return err
	}
	w.done, w.at = what, now
	return nil
}

// identify keeps the region's identity in its Redis: what all its processes
// remember, also when Redis lost it.
func (r *Replicator) identify(ctx context.Context, found string) error {
	if found == "" {
		mine := rand.Text()
		if old := r.identity.Load(); old != nil {
			mine = *old
		}
		var err error
		if found, err = r.cfg.Local.Identify(ctx, mine); err != nil {
			return err
		}
	}
	if old := r.identity.Swap(&found); old == nil {
		for _, l := range r.links {
			signal(l.beat)
		}
	}
	return nil
}

// heardFor is how long ago the peer was heard, in seconds.
func (r *Replicator) heardFor(peer string) float64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	at, ok := r.heard[peer]
	if !ok {
		return 0
	}
	return time.Since(at).Seconds()
}

// link carries this region's changes to one peer. It has two goroutines, so that a
// change never waits for the answer to a greeting: pulse greets the peer and looks
// where it is, run tells it what changed.
type link struct {
	Peer
	r    *Replicator
	log  zerolog.Logger
	wake chan struct{} // holds one: run may have something to do
	beat chan struct{} // holds one: pulse has something to do

	mu       sync.Mutex // guards all down to polled
	owned    []int
	dirty    map[int]bool // buckets that may have changes; as many as are owned at most
	since    time.Time    // of the oldest change in dirty; zero: none
	flight   time.Time    // of the oldest change under way; zero: none
	greeted  bool         // the peer is there, and what it should be
	inflight []int        // buckets of the batches under way
	touched  map[int]bool // buckets told since pulse last asked where the peer is
	polled   map[int]pncounter.Position

	at      map[int]pncounter.Position // run's: where the peer is, by bucket
	room    int                        // run's: pages in one round
	told    bool                       // run's: the last round told something
	broken  map[int]bool               // run's: buckets that cannot be told anything
	answers map[int]pncounter.Position // pulse's: where the peer last said it is
	refused string                     // pulse's: why the peer is refused; empty: it is not
}

func (l *link) own(buckets []int) {
	l.mu.Lock()
	l.owned = slices.Clone(buckets)
	l.mu.Unlock()
	signal(l.beat)
}

func (l *link) changed(bucket int) {
	l.mu.Lock()
	mine := slices.Contains(l.owned, bucket)
	if mine {
		l.dirty[bucket] = true
		if l.since.IsZero() {
			l.since = time.Now()
		}
	}
	l.mu.Unlock()
	if mine {
		signal(l.wake)
	}
}

func signal(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// lag is for how many seconds a change of this region has waited, 0 when none does.
func (l *link) lag() float64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	oldest := l.flight
	if oldest.IsZero() {
		oldest = l.since
	}
	if oldest.IsZero() {
		return 0
	}
	return time.Since(oldest).Seconds()
}

// pulse greets the peer every helloEvery, and every pollEvery compares where it is
// with where it is thought to be, until ctx ends.
func (l *link) pulse(ctx context.Context) {
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
		case <-l.beat:
		}
		start := time.Now()
		l.mu.Lock()
		owned := l.owned
		l.mu.Unlock()
		id := l.r.identity.Load()
		if len(owned) == 0 || id == nil { // nothing to say, or nobody to say it
			tick.Reset(lookEvery)
			continue
		}
		err := l.Remote.Hello(ctx, *id)
		if err == nil && (start.Sub(polled) >= pollEvery || !slices.Equal(owned, asked)) {
			if !slices.Equal(owned, asked) {
				n = 0
			}
			if err = l.poll(ctx, owned, n%lookAgain == 0); err == nil {
				polled, asked = start, owned
				n++
			}
		}
		if ctx.Err() != nil {
			return
		}
		l.note(err)
		pause := helloEvery - time.Since(start)
		switch {
		case l.refused != "":
			pause = refusedFor
		case err != nil:
			pause = retryAfter/2 + mrand.N(retryAfter/2)
		}
		tick.Reset(max(pause, 0))
	}
}

// poll asks where the peer is, and has run look at the buckets where that has
// changed, or at all. Of buckets that are being told meanwhile the answer may be
// old: what is told brings its own.
func (l *link) poll(ctx context.Context, owned []int, all bool) error {
	l.mu.Lock()
	l.touched = map[int]bool{}
	for _, b := range l.inflight {
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
		if all || !p.Done || p != l.answers[p.Bucket] {
			l.dirty[p.Bucket] = true
		}
		l.answers[p.Bucket] = p
	}
	return nil
}

// note takes how a greeting went, and says so in the log and the metrics.
func (l *link) note(err error) {
	reason := ""
	if errors.Is(err, pncounter.ErrRefused) {
		reason = err.Error()
	} else if err != nil {
		reason = l.refused // not answering does not make it right
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
	l.log.Debug().Err(err).Msg("the peer could not be told; trying again")
}

// run tells the peer what changed, until ctx ends: at once after a while in which
// nothing did, else at most once in Every, and as long as there is more one round
// after the other.
func (l *link) run(ctx context.Context) {
	pause := time.NewTimer(0)
	defer pause.Stop()
	<-pause.C
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
			rest = retryAfter/2 + mrand.N(retryAfter/2)
		case later:
			rest = unreadyFor
		case l.told && !more:
			rest = l.r.cfg.Every - time.Since(start)
		}
		if rest > 0 {
			pause.Reset(rest)
			select {
			case <-ctx.Done():
				return
			case <-pause.C:
			}
		}
		if more || later || err != nil {
			signal(l.wake)
		}
	}
}

// take is what a round is about: the buckets that may have changes.
func (l *link) take() (dirty map[int]bool, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.greeted {
		return nil, false
	}
	for b := range l.dirty {
		if !slices.Contains(l.owned, b) {
			delete(l.dirty, b)
			delete(l.at, b)
		}
	}
	for b, p := range l.polled {
		old, known := l.at[b]
		if known && old.Done && (p.Log != old.Log || p.Cursor < old.Cursor) {
			l.r.metrics.repairs.WithLabelValues(l.Name).Inc()
		}
		l.at[b] = p
	}
	dirty = l.dirty
	l.dirty, l.polled, l.flight, l.since = map[int]bool{}, nil, l.since, time.Time{}
	return dirty, true
}

// settle gives back what a round did not do.
func (l *link) settle(rest map[int]bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for b := range rest {
		l.dirty[b] = true
	}
	if len(rest) > 0 && !l.flight.IsZero() {
		l.since = l.flight
	}
	l.flight, l.inflight = time.Time{}, nil
}

// round tells the peer what changed. more says that there is something left to
// do at once, later that the peer was not ready for some of it.
func (l *link) round(ctx context.Context) (more, later bool, err error) {
	l.told = false
	dirty, ok := l.take()
	if !ok || len(dirty) == 0 {
		return false, false, nil
	}
	defer func() { l.settle(dirty) }()
	positions := make([]pncounter.Position, 0, len(dirty))
	for b := range dirty {
		at := l.at[b]
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
	l.told = true
	acks, err := l.Remote.Merge(ctx, batches)
	if err != nil {
		l.room = max(l.room/2, leastPages)
		return false, false, err
	}
	l.room = min(l.room+l.room/4, mostPages)
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
		l.log.Warn().Int("buckets", behind).Int("pages", refused).Msg("the peer knows a later life of this region's counts; they get higher incarnations")
	}
	return more, later, nil
}

// choose returns the batches to tell now, and the buckets whose logs must begin.
// Buckets of which there is nothing to tell go from dirty.
func (l *link) choose(ctx context.Context, all []pncounter.Batch, dirty map[int]bool) (batches []pncounter.Batch, begin []int, more bool, err error) {
	pages := 0
	var inflight []int
	for _, b := range all {
		at := l.at[b.Bucket]
		switch {
		case b.Partial: // it will be said when that is over
			delete(dirty, b.Bucket)
		case b.Log == 0:
			begin = append(begin, b.Bucket)
		case b.Forgotten:
			l.r.metrics.repairs.WithLabelValues(l.Name).Inc()
			if err := l.r.cfg.Local.Raise(ctx, b.Bucket, b.Log, nil); err != nil {
				return nil, nil, false, err
			}
			more = true
		case b.Log == at.Log && b.To == at.Cursor && (at.Done || !b.Complete):
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
	l.inflight = inflight
	for _, b := range inflight {
		l.touched[b] = true
		delete(l.polled, b)
	}
	return batches, begin, more, nil
}

// acked takes the answer to a batch.
func (l *link) acked(ctx context.Context, b pncounter.Batch, ack pncounter.Ack, dirty map[int]bool) (more bool, err error) {
	m := l.r.metrics
	m.merged.WithLabelValues(l.Name).Add(float64(ack.Changed))
	if ack.Malformed > 0 {
		m.malformed.WithLabelValues(l.Name).Add(float64(ack.Malformed))
		l.log.Warn().Int("pages", ack.Malformed).Int("bucket", b.Bucket).Msg("the peer's Redis holds counts that nobody can read; those that are ours are written anew")
	}
	switch ack.Status {
	case pncounter.Merged:
		delete(l.broken, b.Bucket)
		l.at[b.Bucket] = pncounter.Position{Bucket: b.Bucket, Log: ack.Log, Cursor: ack.Cursor, Done: ack.Done}
		if len(ack.Refused) > 0 {
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
	case pncounter.Behind:
		m.repairs.WithLabelValues(l.Name).Inc()
		return true, l.r.cfg.Local.Raise(ctx, b.Bucket, ack.High, nil)
	case pncounter.Gap:
		m.repairs.WithLabelValues(l.Name).Inc()
		l.at[b.Bucket] = pncounter.Position{Bucket: b.Bucket, Log: ack.Log, Cursor: ack.Cursor}
		return true, nil
	case pncounter.Failed:
		l.failed(ack.Err)
		if !l.broken[b.Bucket] {
			l.broken[b.Bucket] = true
			l.log.Warn().Err(ack.Err).Int("bucket", b.Bucket).Msg("a bucket of the peer cannot be told anything; the others go on")
		}
		return false, nil
	default: // it has no owner yet
		return false, nil
	}
}
