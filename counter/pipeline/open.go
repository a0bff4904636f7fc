package pipeline

import (
	"context"
	"fmt"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"

	"headcount/counter"
	"headcount/counter/counterfile"
	"headcount/counter/countermem"
	"headcount/counter/counterpg"
	"headcount/counter/counterredis"
	"headcount/counter/hot"
	"headcount/counter/regions"
	"headcount/counter/tiered"
	"headcount/internal/redisconn"
)

const (
	// Writes that one process has under way at once in a store of its own server. Each has what came together for
	// its keys.
	redisLanes    = 4
	postgresLanes = 8

	// redisPace is how long changes of a hot key gather for one script in Redis. 20,000
	// changes a second need up to 200 scripts then.
	redisPace = 5 * time.Millisecond

	// gathersOfInterval is how often a sharded sum is gathered within PersistInterval: what its
	// shards have gained is persisted by then, too.
	gathersOfInterval = 20

	// peerDial is how long it may take to connect to a peer. With TLS that takes three round trips.
	peerDial = 2 * time.Second
)

// Config says where counters are and how they are kept.
type Config struct {
	// Redis and Postgres are URLs, and DataDir is a directory. With both URLs PostgreSQL is behind Redis, or with Peers
	// beside it; the directory is of use without them. Without all three counters are in memory.
	Redis, Postgres, DataDir string
	Peers                    []Peer // the other regions; they need Redis
	Region                   string // the name of this region; empty without Peers

	Rules           *counter.Rules // required
	PersistInterval time.Duration  // as tiered.Config has it
	ColdAfter       time.Duration  // as tiered.Config has it
	HotRate         int            // as hot.Config has it; required with Redis
	Owner           hot.Owner      // says which buckets of sharded sums and of regions are this process's; default: all
	Marks           *redisconn.Marks
	Registerer      prometheus.Registerer // required
	Log             zerolog.Logger
}

// Peer is another region: its name, and the URL of its Redis.
type Peer struct{ Name, URL string }

// Open opens the counters that the settings ask for. It fails when settings cannot work, not when a server does not
// answer.
func Open(ctx context.Context, cfg Config) (*Counters, error) {
	c := &Counters{cfg: cfg}
	c.redis.counters, c.postgres.counters = c, c
	lanes, err := c.openStore(ctx)
	if err != nil {
		_ = c.closeStores()
		return nil, err
	}
	batches := prometheus.NewHistogram(prometheus.HistogramOpts{
		Name: "headcount_counter_batch_calls", Help: "Changes of counters that one write to their store combines.",
		Buckets: prometheus.ExponentialBuckets(1, 2, 13),
	})
	cfg.Registerer.MustRegister(batches)
	lanes.Batches = batches
	c.begin(cfg.Rules, lanes, cfg.Log)
	return c, nil
}

// openStore opens the store, and what stands between it and the Combiner. It returns how calls are combined.
func (c *Counters) openStore(ctx context.Context) (lanes counter.CombinerConfig, err error) {
	switch cfg := &c.cfg; {
	case cfg.Redis != "":
		return counter.CombinerConfig{Lanes: redisLanes, Pace: redisPace, Apart: cfg.Postgres != ""}, c.openRedis(ctx)
	case cfg.Postgres != "":
		c.where = "PostgreSQL"
		store, err := counterpg.Open(ctx, counterpg.Config{URL: cfg.Postgres, Log: cfg.Log, OnState: &c.postgres})
		if err == nil {
			c.store, c.cause = store, store.Cause
		}
		return counter.CombinerConfig{Lanes: postgresLanes}, err
	case cfg.DataDir != "":
		c.where = cfg.DataDir
		store, err := counterfile.Open(cfg.DataDir, counterfile.Config{Log: cfg.Log})
		if err != nil {
			return lanes, fmt.Errorf("--data-dir: %w", err)
		}
		c.store = store
		return lanes, nil
	default:
		c.where, c.store = "memory", countermem.New(countermem.Config{})
		return counter.CombinerConfig{Instant: true}, nil
	}
}

// openRedis opens a store in Redis, and what shards its busy sums and shares its counters with other regions.
func (c *Counters) openRedis(ctx context.Context) error {
	cfg, gather := &c.cfg, time.Duration(0) // the default
	var redis *counterredis.Store
	switch {
	case cfg.Postgres == "":
		c.where = "Redis"
		store, err := counterredis.Open(counterredis.Config{
			URL: cfg.Redis, Region: cfg.Region, Rules: cfg.Rules,
			Registerer: cfg.Registerer, Log: cfg.Log, OnState: &c.redis, Marks: cfg.Marks,
		})
		if err != nil {
			return err
		}
		c.store, redis = store, store
	case len(cfg.Peers) > 0:
		c.where = "Redis, and PostgreSQL beside it"
		store, err := tiered.OpenBeside(ctx, tiered.BesideConfig{
			Redis: cfg.Redis, Postgres: cfg.Postgres, Region: cfg.Region, Rules: cfg.Rules,
			Registerer: cfg.Registerer, Log: cfg.Log, OnRedis: &c.redis, OnPostgres: &c.postgres, Marks: cfg.Marks,
		})
		if err != nil {
			return err
		}
		c.store, redis, c.cause = store, store.Redis(), store.Cause
	default:
		c.where, gather = "Redis, and PostgreSQL behind it", cfg.PersistInterval/gathersOfInterval
		store, err := tiered.Open(ctx, tiered.Config{
			Redis: cfg.Redis, Postgres: cfg.Postgres, Rules: cfg.Rules,
			PersistInterval: cfg.PersistInterval, ColdAfter: cfg.ColdAfter,
			Registerer: cfg.Registerer, Log: cfg.Log, OnRedis: &c.redis, OnPostgres: &c.postgres, Marks: cfg.Marks,
		})
		if err != nil {
			return err
		}
		c.store, redis, c.cause, c.tiered = store, store.Front(), store.Cause, store
	}
	c.store = hot.New(c.store, redis, hot.Config{
		Rate: cfg.HotRate, Rules: cfg.Rules, Owner: cfg.Owner, Gather: gather, Registerer: cfg.Registerer, Log: cfg.Log,
	})
	if len(cfg.Peers) == 0 {
		return nil
	}
	return c.openRegions(redis)
}

// openRegions opens the Redis of each other region, and what shares counters with them. It does not wait for an answer.
func (c *Counters) openRegions(local *counterredis.Store) error {
	cfg := regions.Config{
		Region: c.cfg.Region, Local: local, Rules: c.cfg.Rules, Owner: c.cfg.Owner,
		Registerer: c.cfg.Registerer, Log: c.cfg.Log,
	}
	for _, p := range c.cfg.Peers {
		log := c.cfg.Log.With().Str("peer", p.Name).Logger()
		opened, err := counterredis.Open(counterredis.Config{URL: p.URL, Dial: peerDial, Log: log})
		if err != nil {
			return fmt.Errorf("--peer %s: %w", p.Name, err)
		}
		c.peers = append(c.peers, opened)
		cfg.Peers = append(cfg.Peers, regions.Peer{Name: p.Name, Remote: opened})
	}
	c.store = regions.New(c.store, cfg)
	return nil
}
