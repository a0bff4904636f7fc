package dispatcher

import "github.com/prometheus/client_golang/prometheus"

type metrics struct {
	received, reread, pushed, failed prometheus.Counter
	batches                          prometheus.Histogram
}

func newMetrics() metrics {
	counter := func(name, help string) prometheus.Counter {
		return prometheus.NewCounter(prometheus.CounterOpts{Name: name, Help: help})
	}
	return metrics{
		received: counter("headcount_publications_total", "Updates that the dispatcher received from the store."),
		reread:   counter("headcount_buckets_reread_total", "Reads of a whole bucket, because it is new here or publications may have been lost."),
		pushed:   counter("headcount_pushes_total", "Updates delivered to gateways."),
		failed:   counter("headcount_push_failures_total", "Batches of updates that could not be delivered to a gateway; they are sent again."),
		batches: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "headcount_push_batch_updates", Help: "Updates in one batch to a gateway.", Buckets: prometheus.ExponentialBuckets(1, 2, 11),
		}),
	}
}

// Register registers the dispatcher's metrics.
func (d *Dispatcher) Register(reg prometheus.Registerer) {
	reg.MustRegister(d.metrics.received, d.metrics.reread, d.metrics.pushed, d.metrics.failed, d.metrics.batches)
}
