package cluster

import (
	"context"
	"errors"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"

	"headcount/counter"
	"headcount/counter/owner"
	"headcount/internal/rows"
)

// metrics are the metrics of a Process. It implements call.Observer.
type metrics struct {
	calls       *prometheus.CounterVec
	callSeconds prometheus.Histogram

	commits       *prometheus.CounterVec
	commitSeconds prometheus.Histogram
	claims        *prometheus.CounterVec
}

func newMetrics() *metrics {
	// Create all series at once: a series that first appears with its first event shows no increase, so an alert would
	// miss that event.
	outcomes := func(name, help string, all ...string) *prometheus.CounterVec {
		counters := prometheus.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help}, []string{"outcome"})
		for _, outcome := range all {
			counters.WithLabelValues(outcome)
		}

		return counters
	}
	seconds := func(name, help string) prometheus.Histogram {
		return prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: name, Help: help, Buckets: prometheus.ExponentialBuckets(0.000_25, 2, 16),
		})
	}

	return &metrics{
		calls: outcomes("headcount_owner_calls_total",
			"Calls of this process to the owners of counters, by outcome: made, busy (not made), "+
				"unavailable (unknown).",
			"made", "busy", "unavailable"),
		callSeconds: seconds("headcount_owner_call_seconds",
			"Duration of calls to the owners of counters, including retries."),
		commits: outcomes("headcount_owner_commits_total",
			"Commits of partitions that this process owns, by outcome: made, known (an idempotency key was used "+
				"before), fenced (another process owns the partition), lost (Redis has lost commits), full, "+
				"unavailable (unknown).",
			"made", "known", "fenced", "lost", "full", "unavailable"),
		commitSeconds: seconds("headcount_owner_commit_seconds",
			"Duration of a batch of commits in Redis."),
		claims: outcomes("headcount_owner_claims_total",
			"Claims of partitions by this process, by outcome: made, refused (another process has a newer "+
				"claim), failed.",
			"made", "refused", "failed"),
	}
}

// register registers the metrics, including those that read from p.
func (m *metrics) register(with prometheus.Registerer, p *Process) {
	with.MustRegister(m.calls, m.callSeconds)
	// Series that stay 0 here would look like an owner without work.
	if p.owner == nil {
		return
	}

	with.MustRegister(m.commits, m.commitSeconds, m.claims)
	gauge := func(name, help string, of func(owner.Stats) int) {
		with.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: name, Help: help}, func() float64 {
			return float64(of(p.owner.Stats()))
		}))
	}
	gauge("headcount_owner_partitions", "Partitions of counters that this process owns.",
		func(s owner.Stats) int { return s.Partitions })
	gauge("headcount_owner_waiting", "Changes that wait in the partitions of this process.",
		func(s owner.Stats) int { return s.Waiting })
	gauge("headcount_owner_rows", "Rows of counters in the memory of this process.",
		func(s owner.Stats) int { return s.Rows })
	gauge("headcount_owner_rows_bytes", "Estimated memory of these rows, at most 64 MB.",
		func(s owner.Stats) int { return s.Bytes })
	with.MustRegister(prometheus.NewCounterFunc(prometheus.CounterOpts{
		Name: "headcount_owner_healed_rows_total",
		Help: "Rows that this process wrote again because Redis had lost them, or may have.",
	}, func() float64 { return float64(p.owner.Stats().Healed) }))
}

// Called implements call.Observer.
func (m *metrics) Called(took time.Duration, err error) {
	outcome := "made"
	switch {
	case err == nil:
	// Nothing was made, so this is no outage.
	case errors.Is(err, counter.ErrBusy):
		outcome = "busy"
	default:
		outcome = "unavailable"
	}

	m.calls.WithLabelValues(outcome).Inc()
	m.callSeconds.Observe(took.Seconds())
}

// measured is a store of rows whose commits and claims are counted, and whose losses are logged.
type measured struct {
	rows.Store
	metrics    *metrics
	log        zerolog.Logger
	lossLogged atomic.Int64 // when a loss was last logged, unix ms
}

// lossLoggedEvery is the minimum time between two log lines about losses, because each partition notices a loss
// separately.
const lossLoggedEvery = 10 * time.Second

// Claim implements rows.Store.
func (s *measured) Claim(ctx context.Context, name string, partitions []rows.Former) ([]rows.Claim, error) {
	claims, err := s.Store.Claim(ctx, name, partitions)
	if err != nil {
		// None of them was claimed, as far as this process knows.
		s.metrics.claims.WithLabelValues("failed").Add(float64(len(partitions)))
		return claims, err
	}

	for i := range claims {
		s.metrics.claims.WithLabelValues(claimOutcome(&claims[i])).Inc()
	}

	return claims, nil
}

func claimOutcome(claim *rows.Claim) string {
	switch {
	case claim.Err != nil:
		return "failed"
	case claim.Epoch == 0:
		return "refused"
	}

	return "made"
}

// Commit implements rows.Store.
func (s *measured) Commit(ctx context.Context, commits []rows.Commit) []error {
	began := time.Now()
	errs := s.Store.Commit(ctx, commits)
	s.metrics.commitSeconds.Observe(time.Since(began).Seconds())
	for i, err := range errs {
		s.metrics.commits.WithLabelValues(commitOutcome(&commits[i], err)).Inc()
		s.logLoss(&commits[i], err)
	}

	return errs
}

// logLoss logs that Redis has lost commits, or a claim.
func (s *measured) logLoss(c *rows.Commit, err error) {
	if !isLost(c, err) {
		return
	}

	now := time.Now().UnixMilli()
	before := s.lossLogged.Load()
	isSoon := now-before < lossLoggedEvery.Milliseconds()
	if isSoon {
		return
	}

	// If several goroutines notice a loss at the same time, only one logs it.
	isOurs := s.lossLogged.CompareAndSwap(before, now)
	if !isOurs {
		return
	}
	s.log.Warn().Int("partition", c.Partition).
		Msg("redis has lost commits of counters; their owners write again what they have in memory")
}

// isLost reports whether Redis refused a commit because it has lost earlier commits, or has lost the claim and with it
// all data.
func isLost(c *rows.Commit, err error) bool {
	var fenced *rows.Fenced
	if errors.As(err, &fenced) {
		return fenced.Epoch < c.Epoch
	}

	var lost *rows.Lost

	return errors.As(err, &lost)
}

func commitOutcome(c *rows.Commit, err error) string {
	var fenced *rows.Fenced
	var known *rows.Known
	switch {
	case err == nil:
		return "made"
	case isLost(c, err):
		// A fence of a lower epoch is a loss, so this comes before the fence.
		return "lost"
	case errors.As(err, &fenced):
		return "fenced"
	case errors.As(err, &known):
		return "known"
	case errors.Is(err, rows.ErrFull):
		return "full"
	}

	return "unavailable"
}
