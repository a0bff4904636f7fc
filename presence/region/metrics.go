package region

import (
	"slices"

	"github.com/prometheus/client_golang/prometheus"
)

type metrics struct {
	r                                    *Replicator
	merged, malformed, repairs, failures *prometheus.CounterVec
	refused, out                         *prometheus.GaugeVec
	all                                  []prometheus.Collector
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
		malformed: counter("headcount_region_malformed_total", "Pages of the peer that held what nobody can read."),
		repairs:   counter("headcount_region_repairs_total", "Buckets told again because the peer was not where it was thought to be."),
		failures:  counter("headcount_region_failures_total", "Rounds that failed because the peer, or this region's store, did not answer."),
		refused:   gauge("headcount_region_refused", "1: counts are not shared with the peer, because it is not what the settings say; see the log."),
		out:       gauge("headcount_region_left_out", "1: the peer is silent and left out of totals."),
	}
	m.all = []prometheus.Collector{m.merged, m.malformed, m.repairs, m.failures, m.refused, m.out}
	return m
}

// peer adds what a link can say, and has its counters shown from 0.
func (m *metrics) peer(l *link) {
	for _, c := range []*prometheus.CounterVec{m.merged, m.malformed, m.repairs, m.failures} {
		c.WithLabelValues(l.Name)
	}
	m.refused.WithLabelValues(l.Name)
	m.out.WithLabelValues(l.Name)
	labels := prometheus.Labels{"peer": l.Name}
	m.all = append(m.all,
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "headcount_region_lag_seconds", Help: "How long the oldest change has waited that the peer has not got; 0: it has all.", ConstLabels: labels,
		}, l.lag),
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "headcount_region_heard_seconds", Help: "Time since the peer was heard.", ConstLabels: labels,
		}, func() float64 { return m.r.heardFor(l.Name) }),
	)
}

// leave shows which peers are left out.
func (m *metrics) leave(out []string) {
	for _, p := range m.r.cfg.Peers {
		value := 0.0
		if slices.Contains(out, p.Name) {
			value = 1
		}
		m.out.WithLabelValues(p.Name).Set(value)
	}
}
