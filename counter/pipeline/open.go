package pipeline

import (
	"context"
	"fmt"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"

	"headcount/counter"
	"headcount/counter/cluster"
	"headcount/counter/local"
)

// Config says where counters are and how they are kept.
type Config struct {
	// Cluster has the counters in Redis, if there is one. Postgres is a URL, and DataDir a directory; they are of use
	// without a Cluster, which has a PostgreSQL of its own. Without all three counters are in memory.
	Cluster           *cluster.Process
	Postgres, DataDir string

	Rules      *counter.Rules        // required
	Registerer prometheus.Registerer // required
	Log        zerolog.Logger
}

// Open opens the counters that the settings ask for. It fails when settings cannot work, not when a server does not
// answer. Close ends them, before the connections to Redis.
func Open(ctx context.Context, cfg Config) (*Counters, error) {
	c := &Counters{cfg: cfg}
	c.redis.counters = c
	c.postgres.counters = c

	combining, err := c.openStore(ctx)
	if err != nil {
		return nil, err
	}

	batches := prometheus.NewHistogram(prometheus.HistogramOpts{
		Name: "headcount_counter_batch_calls", Help: "Changes of counters that one write to their store combines.",
		Buckets: prometheus.ExponentialBuckets(1, 2, 13),
	})
	cfg.Registerer.MustRegister(batches)
	combining.Batches = batches
	c.begin(cfg.Rules, combining, cfg.Log)

	return c, nil
}

// openStore opens the store, and what stands between it and the Combiner. It returns how calls are combined.
func (c *Counters) openStore(ctx context.Context) (combining counter.CombinerConfig, err error) {
	switch cfg := &c.cfg; {
	case cfg.Cluster != nil:
		return c.openCluster(), nil
	case cfg.Postgres != "":
		return c.openPostgres(ctx)
	case cfg.DataDir != "":
		c.where = cfg.DataDir
		store, err := local.Open(ctx, cfg.DataDir, cfg.Rules, cfg.Log)
		if err != nil {
			return combining, fmt.Errorf("--data-dir: %w", err)
		}
		c.store = store
		c.ready = store.Writable
		return combining, nil
	default:
		// Memory waits for nothing, so changes that wait for each other would only be later.
		c.where = "memory"
		c.store = local.InMemory(cfg.Rules)
		return counter.CombinerConfig{Instant: true}, nil
	}
}

// openCluster opens counters in Redis: shared with other regions, in front of PostgreSQL, or alone.
func (c *Counters) openCluster() counter.CombinerConfig {
	switch process := c.cfg.Cluster; {
	case process.HasPeers():
		return c.openShared()
	case process.Tiered() != nil:
		return c.openTiered()
	default:
		c.where = "Redis"
		c.store = process.NewStore(&c.redis)
		return cluster.Combining()
	}
}

// openShared opens the counters that are shared with other regions.
func (c *Counters) openShared() counter.CombinerConfig {
	c.where = "Redis"
	if shared := c.cfg.Cluster.SharedExact(); shared != nil {
		c.where = "Redis, and PostgreSQL beside it"
		c.database = shared
	}
	c.store = c.cfg.Cluster.NewSharedStore(&c.redis, &c.postgres)

	return c.cfg.Cluster.CombiningShared()
}
