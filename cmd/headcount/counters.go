package main

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"headcount/counter"
	"headcount/counter/counterfile"
	"headcount/counter/countermem"
	"headcount/counter/counterpg"
	"headcount/counter/counterredis"
	"headcount/counter/hot"
	"headcount/counter/regions"
	"headcount/counter/tiered"
	"headcount/gateway"
	"headcount/gateway/counterapi"
	"headcount/internal/setting"
	"headcount/internal/webhook"
	"headcount/presence/region"
)

// Writes that one process has under way at once in a store of its own server. Each has
// what came together for its keys.
const (
	redisLanes    = 4
	postgresLanes = 8

	// redisPace is how long changes of a hot key gather for one script in Redis. 20,000
	// changes a second need up to 200 scripts then.
	redisPace = 5 * time.Millisecond

	// lastPersist is how long a process that ends waits until PostgreSQL has what was changed.
	lastPersist = 2 * time.Second

	// gathersOfInterval is how often a hot sum is gathered within --persist-interval: what its
	// parts have gained is persisted by then, too.
	gathersOfInterval = 20
)

// counters are the counters and limits of this process: their store, and what combines calls
// in front of it.
type counters struct {
	where    string // says in the log where the store is
	store    counter.Store
	tops     *counter.TopTracker
	combiner *counter.Combiner
	limits   *counter.Limits
	distant  bool         // the store is a server of its own, and may be away
	cause    func() error // why PostgreSQL cannot be used; nil: there is none
	up       atomic.Bool
	behind   *behind                         // PostgreSQL with Redis; nil: there is none
	gateway  atomic.Pointer[gateway.Gateway] // to be told of changes of up; nil: not yet
}

// Up implements the State of gateway/counterapi.
func (c *counters) Up() bool { return c.up.Load() }

// behind is PostgreSQL behind Redis or beside it.
type behind struct {
	up       atomic.Bool
	answered atomic.Bool   // once is enough
	store    *tiered.Store // nil: PostgreSQL is beside Redis
}

// StoreState implements counter.States.
func (b *behind) StoreState(up bool) {
	b.up.Store(up)
	if up {
		b.answered.Store(true)
	}
}

// StoreState implements counter.States.
func (c *counters) StoreState(up bool) {
	c.up.Store(up)
	if g := c.gateway.Load(); g != nil {
		g.CountersChanged()
	}
}

// serve has a gateway told of changes of up.
func (c *counters) serve(g *gateway.Gateway) {
	c.gateway.Store(g)
	g.CountersChanged() // it may have changed before
}

// ready returns why counters cannot be served now, or nil.
func (c *counters) ready() error {
	if c.distant && !c.Up() {
		return c.away("the store of counters, " + c.where + ",")
	}
	if c.behind != nil && !c.behind.answered.Load() { // later, what is not exact goes on without it
		return c.away("PostgreSQL")
	}
	if c.behind != nil && c.behind.store != nil {
		return c.behind.store.Ready()
	}
	return nil
}

// away says that something cannot be reached, and of PostgreSQL why. Of Redis system.ready says why.
func (c *counters) away(what string) error {
	err := errors.New(what + " cannot be reached")
	if c.cause == nil {
		return err
	}
	if why := c.cause(); why != nil {
		return fmt.Errorf("%w: PostgreSQL: %w", err, why)
	}
	return err
}

// openCounters opens the store of counters that the settings ask for.
func (s *system) openCounters(ctx context.Context) (err error) {
	c := &counters{}
	var local *counterredis.Store // of a region with others
	lanes := counter.CombinerConfig{}
	switch {
	case len(s.cfg.Peers) > 0 && s.cfg.Postgres != "":
		c.where, c.distant, lanes.Lanes, lanes.Pace, lanes.Apart = "Redis, and PostgreSQL beside it", true, redisLanes, redisPace, true
		c.behind = &behind{}
		var store *tiered.Beside
		store, err = tiered.OpenBeside(ctx, tiered.BesideConfig{
			Redis: s.cfg.Redis, Postgres: s.cfg.Postgres, Region: s.cfg.Region, Rules: s.cfg.Rules,
			Registerer: s.registry, Log: s.log, OnRedis: c, OnPostgres: c.behind, Marks: s.redis.Marks(),
		})
		if err == nil {
			local = store.Redis()
			c.store, c.cause = s.spreading(store, local, 0), store.Cause
		}
	case s.cfg.Redis != "" && s.cfg.Postgres != "":
		c.where, c.distant, lanes.Lanes, lanes.Pace, lanes.Apart = "Redis, and PostgreSQL behind it", true, redisLanes, redisPace, true
		c.behind = &behind{}
		var store *tiered.Store
		store, err = tiered.Open(ctx, tiered.Config{
			Redis: s.cfg.Redis, Postgres: s.cfg.Postgres, PersistInterval: s.cfg.PersistInterval, ColdAfter: s.cfg.ColdAfter, Rules: s.cfg.Rules,
			Registerer: s.registry, Log: s.log, OnRedis: c, OnPostgres: c.behind, Marks: s.redis.Marks(),
		})
		if err == nil {
			c.store, c.cause = s.spreading(store, store.Front(), s.cfg.PersistInterval/gathersOfInterval), store.Cause
			c.behind.store = store
		}
	case s.cfg.Postgres != "":
		c.where, c.distant, lanes.Lanes = "PostgreSQL", true, postgresLanes
		var store *counterpg.Store
		if err = noCountersIn(s.cfg.DataDir); err == nil {
			store, err = counterpg.Open(ctx, counterpg.Config{URL: s.cfg.Postgres, Log: s.log, OnState: c})
		}
		if err == nil {
			c.store, c.cause = store, store.Cause
		}
	case s.cfg.Redis != "":
		c.where, c.distant, lanes.Lanes, lanes.Pace = "Redis", true, redisLanes, redisPace
		var store *counterredis.Store
		config := counterredis.Config{URL: s.cfg.Redis, Rules: s.cfg.Rules, Registerer: s.registry, Log: s.log, OnState: c, Marks: s.redis.Marks()}
		if len(s.cfg.Peers) > 0 {
			config.Region = s.cfg.Region
		}
		if store, err = counterredis.Open(config); err == nil {
			c.store = s.spreading(store, store, 0)
			if config.Region != "" {
				local = store
			}
		}
	case s.cfg.DataDir != "":
		c.where = s.cfg.DataDir
		if c.store, err = counterfile.Open(s.cfg.DataDir, counterfile.Config{Log: s.log}); err != nil {
			err = fmt.Errorf("--data-dir: %w", err)
		}
	default:
		c.where, lanes.Instant = "memory", true
		c.store = countermem.New(countermem.Config{})
	}
	if err != nil {
		return refusedPostgres(err)
	}
	if local != nil {
		if c.store, err = s.sharing(c.store, local); err != nil {
			return err
		}
	}
	s.closers = append(s.closers, c.store.Close)
	if c.behind != nil && c.behind.store != nil {
		s.closers = append(s.closers, func() error {
			ctx, cancel := context.WithTimeout(context.Background(), lastPersist)
			defer cancel()
			return c.behind.store.Persist(ctx)
		})
	}
	batches := prometheus.NewHistogram(prometheus.HistogramOpts{
		Name: "headcount_counter_batch_calls", Help: "Changes of counters that one write to their store combines.", Buckets: prometheus.ExponentialBuckets(1, 2, 13),
	})
	s.registry.MustRegister(batches)
	lanes.Batches = batches
	c.tops = counter.NewTopTracker(c.store, s.cfg.Rules, s.log)
	s.closers = append(s.closers, c.tops.Close)
	if err := s.openWebhooks(c.store); err != nil {
		return err
	}
	c.combiner = counter.NewCombiner(changer{c.store, c.tops, s.webhooks}, lanes)
	c.limits = counter.NewLimits(c.store, lanes)
	s.closers = append(s.closers, func() error { c.combiner.Close(); c.limits.Close(); return nil })
	s.counters = c
	return nil
}

// changer makes the changes of this process: the Combiner writes to it. What a change promises beside itself is done here,
// before the answer, also for callers that are gone by then.
type changer struct {
	counter.Writer
	tops     *counter.TopTracker
	webhooks *webhook.Service // nil: there are none
}

// Apply implements counter.Writer.
func (c changer) Apply(ctx context.Context, ops []counter.Op) []counter.Result {
	results := c.Writer.Apply(ctx, ops)
	c.tops.Note(ctx, ops, results)
	if c.webhooks != nil {
		c.webhooks.Changed(results)
	}
	return results
}

// noCountersIn refuses a data directory with counters that --postgres would hide.
func noCountersIn(dir string) error {
	if dir == "" {
		return nil
	}
	holds, err := counterfile.Holds(dir)
	if err != nil {
		return fmt.Errorf("--data-dir: %w", err)
	}
	if holds {
		return setting.Errorf("data-dir", "%s has counters, which nobody sees with --postgres; carry them over "+
			"(headcount export --data-dir %s | headcount import --postgres URL), then remove %s", dir, dir, filepath.Join(dir, counterfile.File))
	}
	return nil
}

// spreading is a store in Redis that spreads hot sums over parts. gather is the time between two
// gatherings, 0 for the default.
func (s *system) spreading(store counter.Store, parts *counterredis.Store, gather time.Duration) counter.Store {
	return hot.New(store, parts, hot.Config{
		Rate: s.cfg.HotRate, Rules: s.cfg.Rules, Owner: &owner{member: s.member, self: s.cfg.AdvertiseAddr()}, Gather: gather,
		Registerer: s.registry, Log: s.log,
	})
}

// sharing is a store over a Redis, local, that shares its counters with other regions.
func (s *system) sharing(store counter.Store, local *counterredis.Store) (counter.Store, error) {
	var peers []regions.Peer
	for _, peer := range s.cfg.Peers {
		name, url := region.SplitPeer(peer)
		opened, err := counterredis.Open(counterredis.Config{URL: url, Dial: peerDial, Log: s.log.With().Str("peer", name).Logger()})
		if err != nil {
			return nil, fmt.Errorf("--peer %s: %w", name, err)
		}
		s.closers = append(s.closers, opened.Close)
		peers = append(peers, regions.Peer{Name: name, Remote: opened})
	}
	return regions.New(store, regions.Config{
		Region: s.cfg.Region, Local: local, Peers: peers, Rules: s.cfg.Rules, Owner: &owner{member: s.member, self: s.cfg.AdvertiseAddr()}, Registerer: s.registry, Log: s.log,
	}), nil
}

// config is what a gateway needs of the counters.
func (c *counters) config(s *system) *counterapi.Config {
	cfg := &counterapi.Config{Rules: s.cfg.Rules, Combiner: c.combiner, Limits: c.limits, Tops: c.tops, Store: c.store, Registerer: s.registry, Log: s.log}
	if c.distant {
		cfg.State = c
	}
	return cfg
}
