package counterapi

import "github.com/prometheus/client_golang/prometheus"

// metrics counts calls by their outcome. Labels are fixed words, never a key.
type metrics struct {
	made, replayed, refused, limited, full, crowded, unavailable prometheus.Counter
	passed, stopped                                              prometheus.Counter // calls on limits, by outcome
	acknowledged                                                 prometheus.Histogram
}

func newMetrics(reg prometheus.Registerer, live *Live) *metrics {
	calls := prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "headcount_counter_calls_total",
		Help: "Calls that change counters, by what became of them: made, replayed, refused (409), limited (429), " +
			"full (429, as many counters as the rule's max); all calls that were answered 503, unavailable; and " +
			"public questions about history that were answered 429, crowded.",
	}, []string{"outcome"})
	limits := prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "headcount_limit_calls_total", Help: "Calls on limits, by what became of them: allowed, refused (429).",
	}, []string{"outcome"})
	acknowledged := prometheus.NewHistogram(prometheus.HistogramOpts{
		Name: "headcount_change_to_acknowledged_seconds", Help: "Time from a change of counters until the store " +
			"has answered, kept or refused.",
		Buckets: prometheus.ExponentialBuckets(0.0001, 2, 17),
	})

	if reg != nil {
		reg.MustRegister(calls, limits, acknowledged, prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "headcount_counters_followed", Help: "Counters that clients of this gateway look at live.",
		}, func() float64 { return float64(live.followed()) }))
	}

	return &metrics{
		acknowledged: acknowledged,
		made:         calls.WithLabelValues("made"),
		replayed:     calls.WithLabelValues("replayed"),
		refused:      calls.WithLabelValues("refused"),
		limited:      calls.WithLabelValues("limited"),
		full:         calls.WithLabelValues("full"),
		crowded:      calls.WithLabelValues("crowded"),
		unavailable:  calls.WithLabelValues("unavailable"),
		passed:       limits.WithLabelValues("allowed"),
		stopped:      limits.WithLabelValues("refused"),
	}
}
