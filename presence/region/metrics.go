package region

import (
	"slices"

	"github.com/prometheus/client_golang/prometheus"

	"headcount/presence"
)

// Stats returns the figures of the peers, in the order of Config.Peers. Any
// goroutine may call it.
func (r *Replicator) Stats() []presence.PeerStats {
	r.mu.Lock()
	// As with the buckets, a decision replaces the list.
	out := r.out
	r.mu.Unlock()

	stats := make([]presence.PeerStats, len(r.links))
	for i, l := range r.links {
		stats[i] = presence.PeerStats{
			Name:    l.Name,
			Lag:     l.Lag().Seconds(),
			Heard:   r.silentFor(l.Name).Seconds(),
			LeftOut: slices.Contains(out, l.Name),
		}
	}

	return stats
}

type metrics struct {
	r                                    *Replicator
	merged, malformed, repairs, failures *prometheus.CounterVec
	refused, out                         *prometheus.GaugeVec
}

func newMetrics(r *Replicator) *metrics {
	counter := func(name, help string) *prometheus.CounterVec {
		return prometheus.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help}, []string{"peer"})
	}
	gauge := func(name, help string) *prometheus.GaugeVec {
		return prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: name, Help: help}, []string{"peer"})
	}

	m := &metrics{
		r:         r,
		merged:    counter("headcount_region_merges_total", "Pages whose change was news to the peer."),
		malformed: counter("headcount_region_malformed_total", "Pages of the peer whose data could not be read."),
		repairs:   counter("headcount_region_repairs_total", "Buckets resent from the peer's actual position."),
		failures: counter("headcount_region_failures_total",
			"Rounds that failed because the peer, or this region's store, did not answer."),
		refused: gauge("headcount_region_refused",
			"1: counts are not shared with the peer, because it is not what the settings say; see the log."),
		out: gauge("headcount_region_left_out", "1: the peer is silent and left out of totals."),
	}

	if reg := r.cfg.Registerer; reg != nil {
		reg.MustRegister(m.merged, m.malformed, m.repairs, m.failures, m.refused, m.out)
	}

	return m
}

// peer registers the metrics of a link, and exports its counters from 0 on.
func (m *metrics) peer(l *link) {
	for _, c := range []*prometheus.CounterVec{m.merged, m.malformed, m.repairs, m.failures} {
		c.WithLabelValues(l.Name)
	}
	m.refused.WithLabelValues(l.Name)
	m.out.WithLabelValues(l.Name)

	if m.r.cfg.Registerer == nil {
		return
	}

	labels := prometheus.Labels{"peer": l.Name}
	m.r.cfg.Registerer.MustRegister(
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name:        "headcount_region_lag_seconds",
			Help:        "Age of the oldest change that the peer does not have; 0: it has all changes.",
			ConstLabels: labels,
		}, func() float64 { return l.Lag().Seconds() }),
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "headcount_region_heard_seconds", Help: "Time since the peer's last greeting.", ConstLabels: labels,
		}, func() float64 { return m.r.silentFor(l.Name).Seconds() }),
	)
}

// setLeftOut sets the metrics of the peers that totals leave out.
func (m *metrics) setLeftOut(out []string) {
	// All of them, so that a peer that is included again goes back to 0.
	for _, p := range m.r.cfg.Peers {
		value := 0.0
		if slices.Contains(out, p.Name) {
			value = 1
		}
		m.out.WithLabelValues(p.Name).Set(value)
	}
}
