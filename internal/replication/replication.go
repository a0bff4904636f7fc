// Package replication keeps a peer, another region, up to date with the buckets of this region. Package presence/region
// replicates counts with it, and counter/region counters.
//
// A [Link] decides when which bucket is sent. For each owned bucket it knows whether the bucket may have changes that
// the peer lacks, and the peer's position in the bucket's log. A [Protocol] knows what a position means, makes the
// batches and sends them; its merges must be idempotent, because a Link repeats every batch whose acknowledgement it
// did not receive.
//
// The first change after a pause is sent at once. After that a round sends all dirty buckets every Config.Every, or at
// once while a round leaves changes unsent. A separate goroutine greets the peer twice in each Config.CompareEvery, so
// that no change waits for the reply. Every second greeting also reads the peer's positions and marks all buckets. This
// comparison corrects every wrong state of a Link: a lost notification, a batch that the peer lost after its
// acknowledgement, a peer that was emptied or restored from older data, and a bucket that another process has sent
// meanwhile.
//
// # Faults
//
//   - A batch or its acknowledgement is lost: the bucket is sent again from the last position that is known.
//   - The peer does not know the log, or the log does not reach back: the Protocol begins a new log (counts), or sends
//     the whole bucket by pages (counters).
//   - The peer does not answer: nothing is sent until a greeting succeeds, at most half a second after it can be
//     reached. The bound of a round is halved, down to 256 items.
//   - The peer is refused: nothing is sent, and it is greeted again after half a second at most.
//   - The peer cannot accept a bucket: the other buckets are sent, and this one is tried again after 200 ms.
//   - This process loses a bucket: the bucket's entry is dropped. It gets a bucket: the position is read from the peer.
//
// # Bounds
//
// A Link holds one entry for each bucket. A round has 32,768 pages or 16,384 counters at most; the rest follows at
// once.
package replication

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"headcount/internal/outage"
	"headcount/internal/wake"
)

const (
	retryAfter = 500 * time.Millisecond // longest pause after a failure
	laterAfter = 200 * time.Millisecond // pause after a bucket that cannot be sent or accepted yet
	minItems   = 256                    // least bound of the items in a round
)

// ErrRefused is the error of a Protocol's Greet when the peer must not be sent anything. That may end at any moment: a
// peer whose store was emptied is refused until it has written its name again.
var ErrRefused = errors.New("the peer is refused")

// At is a bucket and the peer's position in its log.
type At[P any] struct {
	Bucket   int
	Position P
}

// Outcome is the result of a round for one bucket.
type Outcome int

// The outcomes.
const (
	Unchanged Outcome = iota // nothing was sent: the next change or comparison marks the bucket again
	Sent                     // the peer has everything
	More                     // another round has to follow at once
	Later                    // the bucket cannot be sent or accepted yet; it is sent again after a pause
)

// Result is the outcome of a bucket, and the peer's position after it.
type Result[P any] struct {
	Position P
	Outcome  Outcome
}

// Protocol replicates to one peer. A Link calls Send from one goroutine and Owned, Greet and Positions from another
// one.
type Protocol[P any] interface {
	// Owned returns the buckets that this process replicates. Two processes may own a bucket at the same time.
	Owned() []int
	// Greet reports to the peer that this region is alive, and returns ErrRefused if nothing may be sent to the peer.
	Greet(ctx context.Context) error
	// Positions returns the peer's position in each bucket. It gets the positions that the Link believes in, which are
	// zero at first.
	Positions(ctx context.Context, believed []At[P]) ([]P, error)
	// Send sends the changes after the positions, about limit items at most, and returns a Result for each position.
	// After an error all of them are sent again.
	Send(ctx context.Context, from []At[P], limit int) ([]Result[P], error)
	// Failed receives the error of a failed greeting, comparison or round, except ErrRefused. Both goroutines call it.
	Failed(err error)
}

// Config tunes a Link. All fields are required.
type Config struct {
	Every        time.Duration // least time between two rounds
	CompareEvery time.Duration // between two comparisons of the peer's positions
	MaxItems     int           // of a round; a failure halves its bound and a success raises it again
}

// entry is an owned bucket.
type entry[P any] struct {
	at     P
	known  bool // at was read from the peer, or acknowledged
	dirty  bool // there may be changes after at
	rounds int  // number of ended rounds: a position that was read during a round is outdated
	// since is the time of the oldest known change that waits to be sent, and sending the time of the oldest one that
	// is being sent; zero: none is known.
	since, sending time.Time
}

// Link replicates to one peer. Its methods may be called from any goroutine.
type Link[P any] struct {
	cfg      Config
	protocol Protocol[P]
	wake     chan struct{} // holds one: there may be something to send
	look     chan struct{} // holds one: the next greeting is due

	mu      sync.Mutex // guards all below
	entries map[int]*entry[P]
	ready   bool // the last greeting succeeded

	limit int // only send: bound of the items in a round
}

// New returns a Link that does nothing until Run.
func New[P any](protocol Protocol[P], cfg Config) *Link[P] {
	return &Link[P]{
		cfg:      cfg,
		protocol: protocol,
		wake:     make(chan struct{}, 1),
		look:     make(chan struct{}, 1),
		entries:  map[int]*entry[P]{},
		// Less than the bound at first, because nothing is known of the link yet.
		limit: cfg.MaxItems / 4,
	}
}

// Run replicates until ctx ends.
func (l *Link[P]) Run(ctx context.Context) {
	var wg sync.WaitGroup
	// Two goroutines, because a greeting waits for a reply, and changes must not.
	wg.Go(func() { l.send(ctx) })
	wg.Go(func() { l.greet(ctx) })
	wg.Wait()
}

// Changed marks a bucket that may have changes. It does not block.
func (l *Link[P]) Changed(bucket int) {
	l.mu.Lock()
	e := l.entries[bucket]
	if e != nil {
		e.dirty = true
		// The oldest change that waits is what Lag reports.
		if e.since.IsZero() {
			e.since = time.Now()
		}
	}
	l.mu.Unlock()

	// Another process sends the buckets that are not owned here.
	if e != nil {
		wake.Signal(l.wake)
	}
}

// Look makes the Link greet the peer now. It is called after the result of Owned has changed.
func (l *Link[P]) Look() { wake.Signal(l.look) }

// Lag returns the age of the oldest known change that the peer does not have, or 0.
func (l *Link[P]) Lag() time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()

	lag := time.Duration(0)
	for _, e := range l.entries {
		since := first(e.sending, e.since)
		if !since.IsZero() {
			lag = max(lag, time.Since(since))
		}
	}

	return lag
}

// first returns a, or b if a is zero.
func first(a, b time.Time) time.Time {
	if a.IsZero() {
		return b
	}
	return a
}

// greet greets the peer and compares its positions until ctx ends.
func (l *Link[P]) greet(ctx context.Context) {
	var owned []int
	next := time.NewTimer(0)
	defer next.Stop()

	for n := 0; ; {
		select {
		case <-ctx.Done():
			return
		case <-next.C:
		case <-l.look:
		}

		start := time.Now()
		now := l.protocol.Owned()
		if !slices.Equal(now, owned) {
			owned = now
			n = 0 // the positions of buckets that are new here are not known
			l.own(owned)
		}

		// A process without buckets has nothing to say, and the owners greet the peer.
		if len(owned) == 0 {
			next.Reset(l.cfg.CompareEvery / 2)
			continue
		}

		err := l.protocol.Greet(ctx)
		greeted := err == nil
		if greeted && n%2 == 0 { // a part of the peer may be away: buckets of the others go on
			err = l.compare(ctx)
		}

		if ctx.Err() != nil {
			return
		}

		pause := l.cfg.CompareEvery/2 - time.Since(start)
		n++
		if err != nil {
			// So that the next greeting compares: during a failure anything may have been missed.
			n = 0
			pause = outage.Jitter(retryAfter)
		}

		isFailure := err != nil && !errors.Is(err, ErrRefused)
		if isFailure {
			l.protocol.Failed(err)
		}

		l.mu.Lock()
		// This does not depend on the comparison: positions that are known already still hold if it failed.
		l.ready = greeted
		l.mu.Unlock()

		wake.Signal(l.wake)
		next.Reset(max(pause, 0))
	}
}

// own replaces the owned buckets.
func (l *Link[P]) own(buckets []int) {
	l.mu.Lock()
	defer l.mu.Unlock()

	old := l.entries
	l.entries = map[int]*entry[P]{}
	for _, b := range buckets {
		// A bucket that stays keeps what is known of the peer.
		l.entries[b] = cmp.Or(old[b], &entry[P]{})
	}
}

// compare takes over the peer's positions and marks all buckets, but for the positions of buckets that were sent
// meanwhile.
func (l *Link[P]) compare(ctx context.Context) error {
	l.mu.Lock()
	var believed []At[P]
	var entries []*entry[P]
	var rounds []int

	for b, e := range l.entries {
		believed = append(believed, At[P]{b, e.at})
		entries = append(entries, e)
		rounds = append(rounds, e.rounds)
	}
	l.mu.Unlock()

	found, err := l.protocol.Positions(ctx, believed)
	if err != nil {
		return err
	}

	l.mu.Lock()
	defer l.mu.Unlock()
	for i, e := range entries {
		// Even if the position is as expected, since a notification may have been lost.
		e.dirty = true
		// Otherwise the acknowledgement of a round is newer than what was read.
		if e.rounds == rounds[i] {
			e.at = found[i]
			e.known = true
		}
	}

	return nil
}

// send sends changes until ctx ends.
func (l *Link[P]) send(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-l.wake:
		}

		start := time.Now()
		outcome, err := l.round(ctx)
		if ctx.Err() != nil {
			return
		}

		rest := time.Duration(0)
		switch {
		case err != nil:
			rest = outage.Jitter(retryAfter)
		case outcome == Later:
			rest = laterAfter
		// What changes meanwhile goes together.
		case outcome == Sent:
			rest = l.cfg.Every - time.Since(start)
		}

		if rest > 0 && !outage.Sleep(ctx, rest) {
			return
		}

		// The buckets are still marked, and no further change may come to signal it.
		if err != nil || outcome > Sent {
			wake.Signal(l.wake)
		}
	}
}

// round sends the dirty buckets once, and returns the greatest of their outcomes.
func (l *Link[P]) round(ctx context.Context) (greatest Outcome, err error) {
	start := time.Now()
	var from []At[P]
	var entries []*entry[P]

	l.mu.Lock()
	for b, e := range l.entries {
		if !l.ready || !e.dirty || !e.known {
			continue
		}
		from = append(from, At[P]{b, e.at})
		entries = append(entries, e)

		// A change during the round marks the bucket again.
		e.dirty = false
		e.sending = e.since
		e.since = time.Time{}
	}
	l.mu.Unlock()

	if len(from) == 0 {
		return Unchanged, nil
	}

	results, err := l.protocol.Send(ctx, from, l.limit)
	if err != nil && ctx.Err() == nil {
		l.protocol.Failed(err)
	}

	l.mu.Lock()
	defer l.mu.Unlock()
	for i, e := range entries {
		left := err != nil
		if err == nil {
			greatest = max(greatest, results[i].Outcome)
			left = results[i].Outcome > Sent
			if results[i].Outcome != Unchanged { // otherwise a comparison may have a newer position by now
				e.at = results[i].Position
			}
			if left {
				e.sending = first(e.sending, start)
			}
		}

		if left {
			e.dirty = true
			e.since = first(e.sending, e.since)
		}
		// This counts after a failure, too: the peer may have merged the batch, and then the position that compare has
		// read meanwhile is outdated.
		e.rounds++
		e.sending = time.Time{}
	}

	if err != nil {
		l.limit = max(l.limit/2, minItems)
	} else if greatest > Unchanged {
		// A round that sent nothing does not show that more would have fitted.
		l.limit = min(l.limit+l.limit/4, l.cfg.MaxItems)
	}

	return greatest, err
}
