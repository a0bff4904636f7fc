package pipeline

import (
	"cmp"
	"context"
	"fmt"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"

	"headcount/counter"
	"headcount/counter/cluster"
	"headcount/counter/counterredis"
	"headcount/counter/hot"
	"headcount/counter/local"
	"headcount/counter/tiered"
	"headcount/internal/redisconn"
)

const (
	// Writes that one process has under way at once in Redis. Each has what came together for its keys.
	redisQueues = 4

	// redisPace is how long changes of a hot key gather for one script in Redis. 20,000
	// changes a second need about 400 scripts then.
	redisPace = 2 * time.Millisecond

	// gathersOfInterval is how often a sharded sum is gathered within PersistInterval: what its
	// shards have gained is persisted by then, too.
	gathersOfInterval = 20
)

// Config says where counters are and how they are kept.
type Config struct {
	// Postgres is a URL, and DataDir is a directory. With Redis and PostgreSQL the latter is behind Redis, or beside it if
	// Cluster has peers; the directory is of use without them. Without all three counters are in memory.
	Redis             *redisconn.Conn // nil: not in Redis
	Postgres, DataDir string

	Cluster         *cluster.Process      // with Redis alone or with peers; else nil or of no use
	Rules           *counter.Rules        // required
	PersistInterval time.Duration         // as tiered.Config has it
	ColdAfter       time.Duration         // as tiered.Config has it
	HotRate         int                   // as hot.Config has it; default 1000
	Owner           counterredis.Owner    // says which buckets of sharded sums and of regions are this process's; default: all
	Registerer      prometheus.Registerer // required
	Log             zerolog.Logger
}

// Open opens the counters that the settings ask for. It fails when settings cannot work, not when a server does not
// answer. Close ends them, before the connections to Redis.
func Open(ctx context.Context, cfg Config) (*Counters, error) {
	c := &Counters{cfg: cfg}
	c.redis.counters, c.postgres.counters = c, c
	combining, err := c.openStore(ctx)
	if err != nil {
		_ = c.closeStores()
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
	case cfg.Cluster != nil && cfg.Cluster.HasPeers():
		return c.openShared(), nil
	case cfg.Cluster != nil && cfg.Postgres == "":
		c.where = "Redis"
		c.store = cfg.Cluster.NewStore(&c.redis)
		return cluster.Combining(), nil
	case cfg.Cluster != nil:
		c.openBehind()
		return cluster.CombiningOver(), nil
	case cfg.Redis != nil:
		return counter.CombinerConfig{Queues: redisQueues, Pace: redisPace, SeparateExact: cfg.Postgres != ""}, c.openRedis(ctx)
	case cfg.Postgres != "":
		return c.openPostgres(ctx)
	case cfg.DataDir != "":
		c.where = cfg.DataDir
		store, err := local.Open(ctx, cfg.DataDir, cfg.Rules, cfg.Log)
		if err != nil {
			return combining, fmt.Errorf("--data-dir: %w", err)
		}
		c.store = store
		return combining, nil
	default:
		c.where, c.store = "memory", local.InMemory(cfg.Rules)
		return counter.CombinerConfig{Instant: true}, nil
	}
}

// openShared opens the counters that are shared with other regions.
func (c *Counters) openShared() counter.CombinerConfig {
	c.where = "Redis"
	if beside := c.cfg.Cluster.Beside(); beside != nil {
		c.where = "Redis, and PostgreSQL beside it"
		c.cause = beside.Cause
		c.sql = beside
	}
	c.store = c.cfg.Cluster.NewSharedStore(&c.redis, &c.postgres)

	return c.cfg.Cluster.CombiningShared()
}

// openRedis opens a store in Redis, and what shards its busy sums.
func (c *Counters) openRedis(ctx context.Context) error {
	cfg, gather := &c.cfg, time.Duration(0) // the default
	var redis *counterredis.Store
	switch {
	case cfg.Postgres == "":
		c.where = "Redis"
		redis = counterredis.New(counterredis.Config{
			Conn: cfg.Redis, Rules: cfg.Rules, Registerer: cfg.Registerer, Log: cfg.Log, OnState: &c.redis,
		})
		c.store = redis
	default:
		c.where, gather = "Redis, and PostgreSQL behind it", cfg.PersistInterval/gathersOfInterval
		store, err := tiered.Open(ctx, tiered.Config{
			Redis: cfg.Redis, Postgres: cfg.Postgres, Rules: cfg.Rules,
			PersistInterval: cfg.PersistInterval, ColdAfter: cfg.ColdAfter,
			Registerer: cfg.Registerer, Log: cfg.Log, OnRedis: &c.redis, OnPostgres: &c.postgres,
		})
		if err != nil {
			return err
		}
		c.store, redis, c.cause, c.sql, c.ready = store, store.Redis(), store.Cause, store, store.Ready
	}
	c.store = hot.New(c.store, redis, hot.Config{
		Rate: cmp.Or(cfg.HotRate, 1000), Rules: cfg.Rules, Owner: cfg.Owner, Gather: gather, Registerer: cfg.Registerer, Log: cfg.Log,
	})
	return nil
}
