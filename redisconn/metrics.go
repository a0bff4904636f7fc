package redisconn

import (
	"github.com/prometheus/client_golang/prometheus"
	"github.com/sony/gobreaker/v2"

	"headcount/scripts"
)

// Metrics are those of a Conn.
type Metrics struct {
	Commands prometheus.Counter // to be told of commands that were not sent by Run
	errors   prometheus.Counter
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
		runs: map[scripts.Name]prometheus.Counter{},
	}
	for name := range s.scripts {
		m.runs[name] = runs.WithLabelValues(string(name))
	}
	if s.cfg.Registerer == nil {
		return m
	}
	s.cfg.Registerer.MustRegister(m.Commands, m.errors, runs, prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: s.cfg.Metrics + "_breaker_state", Help: "0: calls go through, 1: one goes through as a probe, 2: they fail without trying.",
	}, func() float64 {
		switch s.breaker.State() {
		case gobreaker.StateClosed:
			return 0
		case gobreaker.StateHalfOpen:
			return 1
		}
		return 2
	}))
	return m
}
