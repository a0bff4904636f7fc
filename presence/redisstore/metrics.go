package redisstore

import (
	"github.com/prometheus/client_golang/prometheus"
	"github.com/sony/gobreaker/v2"
)

type metrics struct {
	commands prometheus.Counter
	errors   prometheus.Counter
	runs     map[string]prometheus.Counter // by script
	all      []prometheus.Collector
}

func newMetrics(s *Store) *metrics {
	runs := prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "headcount_redis_script_runs_total", Help: "Runs of scripts sent to Redis, by script.",
	}, []string{"script"})
	m := &metrics{
		commands: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "headcount_redis_commands_total", Help: "Commands sent to Redis, without those of subscriptions.",
		}),
		errors: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "headcount_redis_errors_total", Help: "Calls to Redis that failed.",
		}),
		runs: map[string]prometheus.Counter{},
	}
	for name := range s.scripts {
		m.runs[name] = runs.WithLabelValues(name)
	}
	m.all = []prometheus.Collector{m.commands, m.errors, runs, prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "headcount_redis_breaker_state", Help: "0: calls go through, 1: one goes through as a probe, 2: they fail without trying.",
	}, func() float64 {
		switch s.breaker.State() {
		case gobreaker.StateClosed:
			return 0
		case gobreaker.StateHalfOpen:
			return 1
		}
		return 2
	})}
	return m
}

// Collectors are the store's metrics.
func (s *Store) Collectors() []prometheus.Collector { return s.metrics.all }
