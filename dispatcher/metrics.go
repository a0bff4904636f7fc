package dispatcher

import "github.com/prometheus/client_golang/prometheus"

type metrics struct {
	received, reread, pushed, failed prometheus.Counter
	batches                          prometheus.Histogram
}

func newMetrics(registerer prometheus.Registerer) metrics {
	counter := func(name, help string) prometheus.Counter {
		return prometheus.NewCounter(prometheus.CounterOpts{Name: name, Help: help})
	}
	m := metrics{
		received: counter("headcount_publications_total", "Updates that the dispatcher received from the store."),
		reread: counter("headcount_buckets_reread_total",
			"Reads of a whole bucket, because it is new here or publications may have been lost."),
		pushed: counter("headcount_pushes_total", "Updates delivered to gateways."),
		failed: counter("headcount_push_failures_total",
			"Batches of updates that could not be delivered to a gateway; they are sent again."),
		batches: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name:    "headcount_push_batch_updates",
			Help:    "Updates in one batch to a gateway.",
			Buckets: prometheus.ExponentialBuckets(1, 2, 11),
		}),
	}
	if registerer != nil {
		registerer.MustRegister(m.received, m.reread, m.pushed, m.failed, m.batches)
	}
	return m
}
