package region

import (
	"cmp"
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"

	"headcount/counter/owner"
	"headcount/internal/rows"
	"headcount/internal/wake"
)

// Peer is another region.
type Peer struct {
	Name   string
	Rows   rows.Store // the peer's own, which this region only reads
	Outbox rows.Store // this region's inbox there
	Inbox  rows.Store // the peer's inbox here
}

// Config tunes a Region. A zero field takes its default.
type Config struct {
	Name       string     // of this region; required
	Process    string     // the name of this process, as in owner.Config; required
	Store      rows.Store // of this region; required
	Peers      []Peer
	Every      time.Duration // shortest time between two rounds of a link; default 200ms
	Registerer prometheus.Registerer
	Log        zerolog.Logger
}

// Region shares the counters that this process owns with other regions. Its methods may be called from any goroutine.
type Region struct {
	cfg       Config
	owner     *owner.Owner
	reader    *owner.Reader
	metrics   *metrics
	links     []*link
	receivers []*receiver
	misnamed  atomic.Bool // the store belongs to a region of another name

	stop context.CancelFunc
	wg   sync.WaitGroup // waits for everything that Start starts
}

// New returns a Region that does nothing until Start.
func New(cfg Config) *Region {
	cfg.Every = cmp.Or(cfg.Every, 200*time.Millisecond)

	return &Region{cfg: cfg, reader: owner.NewReader(cfg.Store, rows.PartitionOf), metrics: newMetrics(cfg.Registerer)}
}

// Shared is owner.Config.Shared of the owner that Start gets.
func (r *Region) Shared(partition int, epoch uint64, keys []string) {
	for _, l := range r.links {
		l.committed(partition, epoch, keys) // must come before the wake-up, so that the link finds the counters
		l.Changed(partition)
	}
}

// Start begins to share the counters of an owner. It is called only once, before the owner owns anything.
func (r *Region) Start(of *owner.Owner) {
	r.owner = of
	ctx, stop := context.WithCancel(context.Background())
	r.stop = stop
	for _, p := range r.cfg.Peers {
		l := newLink(r, p, r.metrics)
		r.links = append(r.links, l)
		r.receivers = append(r.receivers, newReceiver(r, p))
		registerLag(r.cfg.Registerer, l)
	}

	// This needs a second loop, because the goroutines read both lists.
	for i, v := range r.receivers {
		r.wg.Go(func() { v.watch(ctx) })
		r.wg.Go(func() { v.run(ctx) })
		r.wg.Go(func() { r.links[i].Run(ctx) })
	}
	r.wg.Go(func() { r.follow(ctx) })
}

// Close stops the sharing. It is called only once, before the owner is closed. The next owner sends what is still
// unsent.
func (r *Region) Close() {
	r.stop()
	r.wg.Wait()
}

// follow tracks which partitions the owner owns.
func (r *Region) follow(ctx context.Context) {
	var before [rows.Partitions]uint64
	for n := 0; wake.Wait(ctx, r.cfg.Every, nil); n++ {
		epochs := r.owner.Epochs()
		r.own(&epochs, epochs != before)
		before = epochs

		// Check again from time to time: a store that has lost everything has also lost the name.
		if n%compareEvery == 0 {
			r.checkName(ctx, &epochs)
		}
	}
}

// own starts sharing the partitions with nonzero epochs, and stops sharing the others. It is called even if nothing
// changed, because a partition that was claimed and given up in between may have left a backlog.
func (r *Region) own(epochs *[rows.Partitions]uint64, changed bool) {
	for i, l := range r.links {
		l.own(epochs)
		r.receivers[i].own(epochs)
		if changed {
			l.Look()
			wake.Signal(r.receivers[i].wake)
		}
	}
}

// checkName checks that the store has the name of this region. If the store has none, the owner of the row writes it.
func (r *Region) checkName(ctx context.Context, epochs *[rows.Partitions]uint64) {
	is, err := r.reader.Region(ctx)
	if err != nil {
		return
	}

	isOther := is != "" && is != r.cfg.Name
	wasOther := r.misnamed.Swap(isOther)
	switch {
	case isOther == wasOther:
	case isOther:
		const what = "this store belongs to another region, so counters are not replicated; correct --region"
		r.cfg.Log.Error().Str("store_region", is).Str("our_region", r.cfg.Name).Msg(what)
	default:
		r.cfg.Log.Info().Msg("this store does not belong to another region any more: replicating counters")
	}
	if is != "" {
		return
	}

	// After an error, the next check tries again.
	call := owner.NameRegion(r.cfg.Name)
	isOwner := epochs[call.Partition] != 0
	if isOwner {
		_, _ = r.owner.Do(ctx, call)
	}
}

type metrics struct {
	sent, news, rejected, comparisons, failures *prometheus.CounterVec
}

func newMetrics(reg prometheus.Registerer) *metrics {
	count := func(name, help string) *prometheus.CounterVec {
		return prometheus.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help}, []string{"peer"})
	}
	m := &metrics{
		sent: count("headcount_counters_region_sent_total",
			"Counters that were sent to the peer."),
		news: count("headcount_counters_region_merges_total",
			"Counters of the peer with changes that this region did not have."),
		rejected: count("headcount_counters_region_odd_total",
			"Counters of the peer that could not be merged: their kind differs here, or the total exceeds 64 bits."),
		comparisons: count("headcount_counters_region_repairs_total",
			"Partitions whose counters were all compared with the peer."),
		failures: count("headcount_counters_region_failures_total",
			"Rounds that failed because the peer, or this region's Redis, did not answer."),
	}
	if reg != nil {
		reg.MustRegister(m.sent, m.news, m.rejected, m.comparisons, m.failures)
	}

	return m
}

// registerLag registers the lag of a link.
func registerLag(reg prometheus.Registerer, l *link) {
	if reg == nil {
		return
	}

	reg.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name:        "headcount_counters_region_lag_seconds",
		Help:        "Age of the oldest change that the peer does not have; 0 if it has all changes.",
		ConstLabels: prometheus.Labels{"peer": l.Name},
	}, func() float64 { return l.Lag().Seconds() }))
}
