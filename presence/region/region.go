package region

import (
	"cmp"
	"context"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"

	"headcount/presence/pncounter"
)

const (
	compareEvery    = 2 * time.Second        // between two reads of a peer's positions; greetings are twice as frequent
	readEvery       = 500 * time.Millisecond // between two reads of the peers' words
	applyEvery      = 10 * time.Second       // until the decision about silent peers is written again
	applyAloneEvery = time.Minute            // the same, in a region without peers
	// When this region's own Redis has not answered for longer than awayAfter, the peers do not count as silent, and
	// this region is silent itself.
	awayAfter = 3 * time.Second
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

// Config tunes a Replicator. A zero duration takes its default, except StaleAfter.
type Config struct {
	Local Local
	Peers []Peer
	// StaleAfter is how long a peer may be silent before totals leave it out; 0:
	// totals never leave a peer out.
	StaleAfter time.Duration
	Every      time.Duration         // least time between two rounds of a link; default 200ms
	Registerer prometheus.Registerer // registers the replicator's metrics; nil: there are none
	Log        zerolog.Logger
}

// Replicator replicates the buckets that Own sets. Its methods may be called from any
// goroutine.
type Replicator struct {
	cfg      Config
	links    []*link
	metrics  *metrics
	identity atomic.Pointer[string]

	mu        sync.Mutex // guards all below
	buckets   []int
	lookedAt  time.Time            // of the last look at the regions that succeeded, or the start of Run
	greetedAt map[string]time.Time // the last greeting of a peer, or the start of Run
	out       []string             // peers that totals leave out, as last decided or read
}

// New returns a Replicator that does nothing until Run.
func New(cfg Config) *Replicator {
	cfg.Every = cmp.Or(cfg.Every, 200*time.Millisecond)

	r := &Replicator{cfg: cfg, greetedAt: map[string]time.Time{}}
	r.metrics = newMetrics(r)
	for _, p := range cfg.Peers {
		r.links = append(r.links, newLink(r, p))
		r.metrics.peer(r.links[len(r.links)-1])
	}

	return r
}

// Own sets the buckets that this process replicates. Two processes may replicate the same
// bucket for a while, because a peer merges every change once.
func (r *Replicator) Own(buckets []int) {
	r.mu.Lock()
	r.buckets = slices.Clone(buckets)
	r.mu.Unlock()
	for _, l := range r.links {
		// The peer's positions in the new buckets have to be read before anything is sent.
		l.Look()
	}
}

// Changed marks a bucket whose counts may have changed. It does not block.
func (r *Replicator) Changed(bucket int) {
	for _, l := range r.links {
		l.Changed(bucket)
	}
}

// Run runs the replicator's goroutines. It returns when ctx and all goroutines have
// ended. Each peer has goroutines of its own, so a slow or absent peer does not delay the
// others.
func (r *Replicator) Run(ctx context.Context) error {
	var wg sync.WaitGroup
	for _, l := range r.links {
		wg.Go(func() { l.Run(ctx) })
	}

	wg.Go(func() { r.watch(ctx) })
	wg.Wait()

	return nil
}
