package pipeline

import (
	"context"

	"headcount/counter"
	"headcount/counter/cluster"
	"headcount/counter/routed"
)

// postgresQueues is how many writes one process has under way at once in PostgreSQL. Each has what came together for
// its keys.
const postgresQueues = 8

// openPostgres opens a store in PostgreSQL alone, which this process takes over from any other one. Exact counters have
// queues of their own, because an application may hold them for up to a second.
func (c *Counters) openPostgres(ctx context.Context) (counter.CombinerConfig, error) {
	c.where = "PostgreSQL"
	store, err := routed.OpenAlone(ctx, routed.AloneConfig{
		URL: c.cfg.Postgres, Rules: c.cfg.Rules, OnState: &c.postgres, Log: c.cfg.Log,
	})
	if err != nil {
		return counter.CombinerConfig{}, err
	}

	c.store = store
	c.database = store
	c.ready = store.Ready

	return counter.CombinerConfig{Queues: postgresQueues, SeparateExact: true}, nil
}

// openTiered opens a store in Redis with PostgreSQL behind it.
func (c *Counters) openTiered() counter.CombinerConfig {
	c.where = "Redis, and PostgreSQL behind it"
	tiered := c.cfg.Cluster.Tiered()
	c.store = c.cfg.Cluster.NewTieredStore(&c.redis, &c.postgres)
	c.database = tiered
	c.ready = tiered.Ready

	return cluster.TieredCombining()
}
