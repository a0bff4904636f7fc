package redisconn

import (
	"cmp"

	"github.com/prometheus/client_golang/prometheus"
)

// Metrics are those of a Runner.
type Metrics struct {
	Commands prometheus.Counter // counts the commands that Run sends; other senders add theirs
	Gaps     prometheus.Counter // a Listener counts missed publications here
	errors   prometheus.Counter
	seconds  prometheus.Histogram
	ended    prometheus.Counter // subscriptions
}

func newMetrics(cfg *RunnerConfig) *Metrics {
	prefix := cmp.Or(cfg.Metrics, "headcount_redis")
	m := &Metrics{
		Commands: prometheus.NewCounter(prometheus.CounterOpts{
			Name: prefix + "_commands_total",
			Help: "Commands sent to Redis, without those of subscriptions and of probes.",
		}),
		errors: prometheus.NewCounter(prometheus.CounterOpts{
			Name: prefix + "_errors_total", Help: "Calls to Redis that failed.",
		}),
		Gaps: prometheus.NewCounter(prometheus.CounterOpts{
			Name: prefix + "_publication_gaps_total",
			Help: "Gaps in the numbers of publications, after which a bucket is read again.",
		}),
		seconds: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name:    prefix + "_script_seconds",
			Help:    "Time from sending a pipeline of scripts to Redis until it is answered.",
			Buckets: prometheus.ExponentialBuckets(0.0001, 2, 16),
		}),
		ended: prometheus.NewCounter(prometheus.CounterOpts{
			Name: prefix + "_subscriptions_ended_total", Help: "Subscriptions that ended and were made again.",
		}),
	}

	if cfg.Registerer != nil {
		cfg.Registerer.MustRegister(m.Commands, m.Gaps, m.errors, m.seconds, m.ended)
	}

	return m
}
