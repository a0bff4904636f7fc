package cluster

import (
	"context"
	"errors"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"headcount/counter"
	"headcount/counter/call"
	"headcount/counter/owner"
	"headcount/counter/routed"
	"headcount/internal/rows"
)

const (
	// tieredTimeout is how long an owner waits for a commit when PostgreSQL is the durable store behind Redis: a claim
	// writes to both.
	tieredTimeout = 3 * time.Second
	// drainWithin limits how long Close waits until PostgreSQL has everything. The rest stays in Redis, and the next
	// owner drains it.
	drainWithin = 2 * time.Second
	// exactQueues is how many writes to exact counters one process may have in flight at once.
	exactQueues = 4
)

// useTier configures an owner to keep its counters in Redis, with PostgreSQL as the durable store behind it.
func (p *Process) useTier(cfg *owner.Config) {
	cfg.WriteTimeout = tieredTimeout
	cfg.ExactOutside = true
	cfg.Tier = p.cfg.Tiered.Tier()
	cfg.ColdAfter = p.cfg.ColdAfter

	if p.cfg.Registerer == nil {
		return
	}
	gauge := func(name, help string, is func() float64) {
		opts := prometheus.GaugeOpts{Name: name, Help: help}
		p.cfg.Registerer.MustRegister(prometheus.NewGaugeFunc(opts, is))
	}
	gauge("headcount_persist_lag_seconds",
		"Age of the oldest change that this process has made in Redis and not yet in PostgreSQL.",
		func() float64 { return p.cfg.Tiered.Lag().Seconds() })
	gauge("headcount_persist_rows",
		"Rows and idempotency keys that this process has changed in Redis and not yet in PostgreSQL.",
		func() float64 { return float64(p.cfg.Tiered.Dirty()) })
}

// Tiered returns the PostgreSQL behind Redis, nil if there is none.
func (p *Process) Tiered() *routed.Tiered { return p.cfg.Tiered }

// NewTieredStore is NewStore with PostgreSQL behind Redis. States may be nil.
func (p *Process) NewTieredStore(redis, postgres counter.States) counter.Store {
	store := p.cfg.Tiered.NewStore(p.NewStore(redis))
	if postgres != nil {
		p.cfg.Tiered.Observe(postgres)
	}

	return store
}

// TieredCombining is Combining for a Store of NewTieredStore. Exact counters have queues of their own, so that other
// counters wait neither for PostgreSQL nor for an application that has locked rows there.
func TieredCombining() counter.CombinerConfig {
	cfg := Combining()
	cfg.Queues = rows.Partitions + exactQueues
	cfg.QueueOf = func(op *counter.Op) (queue int, ok bool) {
		// A batch has exact counters only, or none.
		first := &op.Changes[0]
		if first.Rule == nil || !first.Rule.Kind.IsExact() {
			return call.PartitionOf(op)
		}

		return rows.Partitions + rows.PartitionOf(first.Key)%exactQueues, true
	}

	return cfg
}

// closeTiered waits a limited time until PostgreSQL has all counters that this process owned.
func (p *Process) closeTiered() error {
	if p.cfg.Tiered == nil {
		return nil
	}

	ctx, cancel := context.WithTimeout(context.Background(), drainWithin)
	defer cancel()
	err := p.cfg.Tiered.Close(ctx)

	// Nothing is lost: undrained rows are still in Redis.
	if errors.Is(err, counter.ErrUnavailable) {
		p.cfg.Log.Warn().Err(err).
			Msg("counters: shutting down before PostgreSQL has all changes; the next owner writes the rest from Redis")
		err = nil
	}

	return err
}
