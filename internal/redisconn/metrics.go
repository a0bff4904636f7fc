package redisconn

import (
	"cmp"

	"github.com/prometheus/client_golang/prometheus"

	"headcount/scripts"
)

// Metrics are those of a Caller.
type Metrics struct {
	Commands prometheus.Counter // to be told of commands that were not sent by Run
	Gaps     prometheus.Counter // to be told of publications that were missed
	errors   prometheus.Counter
	seconds  prometheus.Histogram
	batches  prometheus.Histogram
	ended    prometheus.Counter                  // subscriptions
	runs     map[scripts.Name]prometheus.Counter // by script
}

func newMetrics(cfg *CallerConfig) *Metrics {
	prefix := cmp.Or(cfg.Metrics, "headcount_redis")
	runs := prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: prefix + "_script_runs_total", Help: "Runs of scripts sent to Redis, by script.",
	}, []string{"script"})
	m := &Metrics{
		Commands: prometheus.NewCounter(prometheus.CounterOpts{
			Name: prefix + "_commands_total", Help: "Commands sent to Redis, without those of subscriptions and of probes.",
		}),
		errors: prometheus.NewCounter(prometheus.CounterOpts{
			Name: prefix + "_errors_total", Help: "Calls to Redis that failed.",
		}),
		Gaps: prometheus.NewCounter(prometheus.CounterOpts{
			Name: prefix + "_publication_gaps_total", Help: "Gaps in the numbers of publications, after which a bucket is read again.",
		}),
		seconds: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: prefix + "_script_seconds", Help: "Time from sending a pipeline of scripts to Redis until it is answered.", Buckets: prometheus.ExponentialBuckets(0.0001, 2, 16),
		}),
		batches: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: prefix + "_batch_scripts", Help: "Scripts in one pipeline.", Buckets: prometheus.ExponentialBuckets(1, 2, 11),
		}),
		ended: prometheus.NewCounter(prometheus.CounterOpts{
			Name: prefix + "_subscriptions_ended_total", Help: "Subscriptions that ended and were made again.",
		}),
		runs: map[scripts.Name]prometheus.Counter{},
	}
	for _, name := range cfg.Scripts {
		m.runs[name] = runs.WithLabelValues(string(name))
	}
	if cfg.Registerer != nil {
		cfg.Registerer.MustRegister(m.Commands, m.Gaps, m.errors, m.seconds, m.batches, m.ended, runs)
	}
	return m
}
