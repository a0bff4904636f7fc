package redisconn

import (
	"github.com/prometheus/client_golang/prometheus"

	"headcount/scripts"
)

// Metrics are those of a Conn.
type Metrics struct {
	Commands prometheus.Counter // to be told of commands that were not sent by Run
	Gaps     prometheus.Counter // to be told of publications that were missed
	errors   prometheus.Counter
	seconds  prometheus.Histogram
	batches  prometheus.Histogram
	ended    prometheus.Counter                  // subscriptions
	runs     map[scripts.Name]prometheus.Counter // by script
}

func newMetrics(s *Conn) *Metrics {
	runs := prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: s.cfg.Metrics + "_script_runs_total", Help: "Runs of scripts sent to Redis, by script.",
	}, []string{"script"})
	m := &Metrics{
		Commands: prometheus.NewCounter(prometheus.CounterOpts{
			Name: s.cfg.Metrics + "_commands_total", Help: "Commands sent to Redis, without those of subscriptions.",
		}),
		errors: prometheus.NewCounter(prometheus.CounterOpts{
			Name: s.cfg.Metrics + "_errors_total", Help: "Calls to Redis that failed.",
		}),
		Gaps: prometheus.NewCounter(prometheus.CounterOpts{
			Name: s.cfg.Metrics + "_publication_gaps_total", Help: "Gaps in the numbers of publications, after which a bucket is read again.",
		}),
		seconds: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: s.cfg.Metrics + "_script_seconds", Help: "Time from sending a pipeline of scripts to Redis until it is answered.", Buckets: prometheus.ExponentialBuckets(0.0001, 2, 16),
		}),
		batches: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: s.cfg.Metrics + "_batch_scripts", Help: "Scripts in one pipeline.", Buckets: prometheus.ExponentialBuckets(1, 2, 11),
		}),
		ended: prometheus.NewCounter(prometheus.CounterOpts{
			Name: s.cfg.Metrics + "_subscriptions_ended_total", Help: "Subscriptions that ended and were made again.",
		}),
		runs: map[scripts.Name]prometheus.Counter{},
	}
	for name := range s.scripts {
		m.runs[name] = runs.WithLabelValues(string(name))
	}
	if s.cfg.Registerer == nil {
		return m
	}
	s.cfg.Registerer.MustRegister(m.Commands, m.Gaps, m.errors, m.seconds, m.batches, m.ended, runs, prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: s.cfg.Metrics + "_breaker_state", Help: "0: calls go through, 1: one goes through as a probe, 2: they fail without trying.",
	}, func() float64 { return float64(s.breaker.State()) })) // closed, half open, open
	return m
}
