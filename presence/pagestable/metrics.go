package pagestable

import "github.com/prometheus/client_golang/prometheus"

type metrics struct{ failures, left prometheus.Counter }

func newMetrics(reg prometheus.Registerer, lag func() float64) metrics {
	m := metrics{
		failures: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "headcount_pages_table_failures_total",
			Help: "Statements with counts for headcount_pages that failed; they are repeated.",
		}),
		left: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "headcount_pages_table_left_out_total",
			Help: "Changes left out of headcount_pages because too many waited; the next comparison brings them.",
		}),
	}
	if reg != nil {
		reg.MustRegister(m.failures, m.left, prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "headcount_pages_table_lag_seconds",
			Help: "Age of the oldest change of a count of this process's pages that headcount_pages lacks.",
		}, lag))
	}

	return m
}
