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
	// Writes that one process has under way at once in a store of its own server. Each has what came together for its keys.
	redisLanes    = 4
	postgresLanes = 8

	// redisPace is how long changes of a hot key gather for one script in Redis. 20,000
	// changes a second need up to 200 scripts then.
	redisPace = 5 * time.Millisecond

	// gathersOfInterval is how often a hot sum is gathered within PersistInterval: what its
	// parts have gained is persisted by then, too.
	gathersOfInterval = 20

	// peerDial is how long it may take to connect to a peer. With TLS that takes three round trips.
	peerDial = 2 * time.Second
)

// Config says where counters are and how they are kept.
type Config struct {
	// Redis and Postgres are URLs, and DataDir is a directory. With both URLs PostgreSQL is behind Redis, or with Peers beside
	// it; the directory is of use without them. Without all three counters are in memory.
	Redis, Postgres, DataDir string
	Region                   string // the name of this region; required with Peers
	Peers                    []Peer // the other regions; they need Redis

	Rules           *counter.Rules // required
	PersistInterval time.Duration  // as tiered.Config has it
	ColdAfter       time.Duration  // as tiered.Config has it
	HotRate         int            // as hot.Config has it; required with Redis
	Owner           hot.Owner      // says which buckets of hot sums and of regions are this process's; default: all
	Marks           *redisconn.Marks
	Registerer      prometheus.Registerer // required
	Log             zerolog.Logger
}

// Peer is another region: its name, and the URL of its Redis.
type Peer struct{ Name, URL string }

// Open opens the counters that the settings ask for. It fails when settings cannot work, not when a server does not answer.
func Open(ctx context.Context, cfg Config) (_ *Counters, err error) {
	c := &Counters{cfg: cfg}
	c.redis.counters, c.postgres.counters = c, c
	defer func() {
		if err != nil {
			_ = c.closeStores()
		}
	}()
	if err = c.openStore(ctx); err != nil {
		return nil, err
	}
	batches := prometheus.NewHistogram(prometheus.HistogramOpts{
		Name: "headcount_counter_batch_calls", Help: "Changes of counters that one write to their store combines.", Buckets: prometheus.ExponentialBuckets(1, 2, 13),
	})
	cfg.Registerer.MustRegister(batches)
	c.begin(c.store, cfg.Rules, cfg.combiner(batches), cfg.Log)
	return c, nil
}

// combiner is how calls are combined in front of the store.
func (cfg *Config) combiner(batches counter.Batches) counter.CombinerConfig {
	switch {
	case cfg.Redis != "":
		return counter.CombinerConfig{Lanes: redisLanes, Pace: redisPace, Apart: cfg.Postgres != "", Batches: batches}
	case cfg.Postgres != "":
		return counter.CombinerConfig{Lanes: postgresLanes, Batches: batches}
	default:
		return counter.CombinerConfig{Instant: cfg.DataDir == "", Batches: batches}
	}
}

// Where says where the counters are.
func (c *Counters) Where() string {
	switch cfg := &c.cfg; {
	case cfg.Redis != "" && cfg.Postgres != "" && len(cfg.Peers) > 0:
		return "Redis, and PostgreSQL beside it"
	case cfg.Redis != "" && cfg.Postgres != "":
		return "Redis, and PostgreSQL behind it"
	case cfg.Redis != "":
		return "Redis"
	case cfg.Postgres != "":
		return "PostgreSQL"
	case cfg.DataDir != "":
		return cfg.DataDir
	default:
		return "memory"
	}
}

// openStore opens the store, and in front of it what stands between it and the Combiner.
func (c *Counters) openStore(ctx context.Context) (err error) {
	switch {
	case c.cfg.Redis != "":
		return c.openRedis(ctx)
	case c.cfg.Postgres != "":
		var store *counterpg.Store
		if store, err = counterpg.Open(ctx, counterpg.Config{URL: c.cfg.Postgres, Log: c.cfg.Log, OnState: &c.postgres}); err == nil {
			c.store, c.cause = store, store.Cause
		}
		return err
	case c.cfg.DataDir != "":
		store, err := counterfile.Open(c.cfg.DataDir, counterfile.Config{Log: c.cfg.Log})
		if err != nil {
			return fmt.Errorf("--data-dir: %w", err)
		}
		c.store = store
		return nil
	default:
		c.store = countermem.New(countermem.Config{})
		return nil
	}
}

// openRedis opens a store in Redis, and in front of it what spreads hot sums and what shares counters with other regions.
func (c *Counters) openRedis(ctx context.Context) (err error) {
	cfg := &c.cfg
	var redis *counterredis.Store
	gather := time.Duration(0) // the default
	switch {
	case cfg.Postgres == "":
		redis, err = c.openRedisAlone()
	case len(cfg.Peers) > 0:
		redis, err = c.openBeside(ctx)
	default:
		redis, err = c.openTiered(ctx)
		gather = cfg.PersistInterval / gathersOfInterval
	}
	if err != nil {
		return err
	}
	c.store = hot.New(c.store, redis, hot.Config{
		Rate: cfg.HotRate, Rules: cfg.Rules, Owner: cfg.Owner, Gather: gather, Registerer: cfg.Registerer, Log: cfg.Log,
	})
	if len(cfg.Peers) == 0 {
		return nil
	}
	peers, err := c.openPeers()
	if err != nil {
		return err
	}
	c.store = regions.New(c.store, regions.Config{
		Region: cfg.Region, Local: redis, Peers: peers, Rules: cfg.Rules, Owner: cfg.Owner, Registerer: cfg.Registerer, Log: cfg.Log,
	})
	return nil
}

func (c *Counters) openRedisAlone() (*counterredis.Store, error) {
	config := counterredis.Config{URL: c.cfg.Redis, Rules: c.cfg.Rules, Registerer: c.cfg.Registerer, Log: c.cfg.Log, OnState: &c.redis, Marks: c.cfg.Marks}
	if len(c.cfg.Peers) > 0 {
		config.Region = c.cfg.Region
	}
	store, err := counterredis.Open(config)
	if err != nil {
		return nil, err
	}
	c.store = store
	return store, nil
}

// openBeside opens PostgreSQL beside Redis.
func (c *Counters) openBeside(ctx context.Context) (*counterredis.Store, error) {
	store, err := tiered.OpenBeside(ctx, tiered.BesideConfig{
		Redis: c.cfg.Redis, Postgres: c.cfg.Postgres, Region: c.cfg.Region, Rules: c.cfg.Rules,
		Registerer: c.cfg.Registerer, Log: c.cfg.Log, OnRedis: &c.redis, OnPostgres: &c.postgres, Marks: c.cfg.Marks,
	})
	if err != nil {
		return nil, err
	}
	c.store, c.cause = store, store.Cause
	return store.Redis(), nil
}

// openTiered opens PostgreSQL behind Redis.
func (c *Counters) openTiered(ctx context.Context) (*counterredis.Store, error) {
	store, err := tiered.Open(ctx, tiered.Config{
		Redis: c.cfg.Redis, Postgres: c.cfg.Postgres, PersistInterval: c.cfg.PersistInterval, ColdAfter: c.cfg.ColdAfter, Rules: c.cfg.Rules,
		Registerer: c.cfg.Registerer, Log: c.cfg.Log, OnRedis: &c.redis, OnPostgres: &c.postgres, Marks: c.cfg.Marks,
	})
	if err != nil {
		return nil, err
	}
	c.store, c.cause, c.tiered = store, store.Cause, store
	return store.Front(), nil
}

// openPeers opens the Redis of each other region. It does not wait for an answer.
func (c *Counters) openPeers() (peers []regions.Peer, err error) {
	for _, p := range c.cfg.Peers {
		opened, err := counterredis.Open(counterredis.Config{URL: p.URL, Dial: peerDial, Log: c.cfg.Log.With().Str("peer", p.Name).Logger()})
		if err != nil {
			return nil, fmt.Errorf("--peer %s: %w", p.Name, err)
		}
		c.peers = append(c.peers, opened)
		peers = append(peers, regions.Peer{Name: p.Name, Remote: opened})
	}
	return peers, nil
}
