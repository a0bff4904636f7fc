package presenceredis

import (
	"context"
	"fmt"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"headcount/internal/redisconn"
)

const (
	lookEvery     = time.Second // how often the store checks for a loss of data
	evictionLooks = 10          // one of so many checks also looks for evictions; INFO costs Redis more
	// sayAgain is the least time between two lines about evictions. A loss within this time after an eviction is taken
	// for a part of it.
	sayAgain = time.Minute
)

// The values of the metric's label.
const (
	lostWrites     = "writes" // the last writes
	lostKeys       = "keys"   // some keys, by eviction
	lostEverything = "everything"
)

func newLosses(registerer prometheus.Registerer) *prometheus.CounterVec {
	losses := prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "headcount_store_losses_total",
		Help: "Losses of data that Redis had acknowledged to this process, by extent: the last writes, " +
			"keys that were evicted, or everything.",
	}, []string{"lost"})

	for _, what := range []string{lostWrites, lostKeys, lostEverything} {
		losses.WithLabelValues(what) // so that the first loss is an increase
	}

	if registerer != nil {
		registerer.MustRegister(losses)
	}

	return losses
}

// watchLosses logs and counts losses of data in Redis, from the time when this process takes
// part until ctx ends. It only informs operators: presence nodes write everything again in
// any case.
func (s *Store) watchLosses(ctx context.Context) {
	tick := time.NewTicker(lookEvery)
	defer tick.Stop()

	l := lossLog{store: s, evictions: evictionLog{store: s}}
	for looks := 0; ; looks++ {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}

		// Until this process is accepted, the data may be that of another cluster.
		if s.factsMode() == wasAccepted {
			l.look(ctx, looks%evictionLooks == 0)
		}
	}
}

// lossLog logs and counts what Redis has lost since the last look. watchLosses alone uses it.
type lossLog struct {
	store     *Store
	tokens    []string // as they were when nothing was missing
	evictions evictionLog
}

// look looks for a loss. It looks for evictions as well if it is asked to.
func (l *lossLog) look(ctx context.Context, withEvictions bool) {
	var found redisconn.Kept
	emptied := false
	what := "Redis"
	// After an error, the next look finds the loss.
	_ = l.store.do(ctx, func(ctx context.Context, c *client) (err error) {
		if c.Cluster != nil {
			what = "a master of the Redis Cluster"
		}

		found, err = l.store.cfg.Conn.Marks.Look(ctx, c)
		if err != nil {
			return err
		}

		// A mark alone cannot show that everything is gone: it may be the one key that was evicted.
		emptied, err = l.emptied(ctx, c, found.Missing)
		return err
	})

	// After a loss, look for evictions at once: one of them may have dropped the mark.
	if withEvictions || found.Lost > 0 {
		l.evictions.look(ctx)
	}

	// A new token alone shows no loss: Generation writes one when a former server is back.
	everything := emptied && found.Missing
	evicted := found.Lost > 0 && l.evictions.lately() // the mark was among the keys that were dropped
	s := l.store
	switch {
	case everything:
		s.losses.WithLabelValues(lostEverything).Inc()
		s.cfg.Log.Warn().Msg(what + " has been emptied: follows, unread counts and counters that only Redis had " +
			"are gone; presence is written again")
	case evicted: // evictions.look has logged it
	case found.Lost > 0:
		s.losses.WithLabelValues(lostWrites).Inc()
		s.logLostWrites(what, found)
	case found.Restarted:
		s.cfg.Log.Info().Msg("Redis was restarted, or another server took its place: " +
			"it has everything that it acknowledged to this process")
	}
}

// emptied reports whether a token has been replaced since the last look. missing says whether a mark is missing, too.
func (l *lossLog) emptied(ctx context.Context, c *client, missing bool) (emptied bool, err error) {
	tokens, err := l.store.readTokens(ctx, c)
	if err != nil {
		return false, err
	}

	for i, was := range l.tokens {
		emptied = emptied || was != "" && was != tokens[i]
	}

	if emptied == missing { // otherwise Redis was emptied between the two reads
		l.tokens = tokens
	}

	return emptied, nil
}

func (s *Store) logLostWrites(what string, found redisconn.Kept) {
	// How many writes are lost is unknown. A mark has the time of its write, so it is known how old the lost ones are.
	lost := found.Lost.Round(time.Millisecond)
	how := ""
	if found.Missing {
		how = " or more" // how much this process wrote before its first check is unknown
	}

	s.cfg.Log.Warn().Stringer("lost", lost).Msg(fmt.Sprintf(
		"%s has lost the writes of its last %s%s: follows, unread counts and counters that only Redis has lack what "+
			"changed then; presence is written again", what, lost, how))
}

// evictionLog logs and counts what Redis drops because its memory is full. watchLosses alone uses it.
type evictionLog struct {
	store   *Store
	watched redisconn.Evictions
	last    time.Time // when evictions were last found
	said    time.Time // when the log last said so
	keys    int64     // dropped since then
}

// lately reports whether Redis evicted keys so recently that the missing keys may be among them.
func (l *evictionLog) lately() bool { return !l.last.IsZero() && time.Since(l.last) < sayAgain }

func (l *evictionLog) look(ctx context.Context) {
	var found redisconn.Evicted
	err := l.store.do(ctx, func(ctx context.Context, c *client) (err error) {
		found, err = l.watched.Look(ctx, c)
		return err
	})
	if err != nil {
		return // the next check finds it
	}

	log := &l.store.cfg.Log
	// Warn of the policy before the first key is lost, when it can still be corrected.
	if found.Changed {
		if found.Policy == "" {
			log.Info().Msg("Redis drops no keys any more when its memory is full")
		} else {
			log.Warn().Str("maxmemory_policy", found.Policy).Msg(
				"Redis drops keys when its memory is full, which loses idempotency keys, follows, unread counts and " +
					"counters: set maxmemory-policy noeviction")
		}
	}

	if found.Keys > 0 {
		l.last = time.Now()
		l.keys += found.Keys
		l.store.losses.WithLabelValues(lostKeys).Inc()
	}
	// Eviction goes on while memory is full, so keys are added up between two lines.
	if l.keys > 0 && time.Since(l.said) >= sayAgain {
		log.Warn().Int64("keys", l.keys).Str("maxmemory_policy", found.Policy).Msg(
			"Redis has evicted keys because its memory is full: follows, unread counts and counters that only Redis " +
				"has may be gone, and repeated calls may count again; presence is written again. Give it memory, " +
				"and set maxmemory-policy noeviction")
		l.keys = 0
		l.said = time.Now()
	}
}
