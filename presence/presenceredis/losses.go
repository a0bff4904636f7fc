package presenceredis

import (
	"context"
	"fmt"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"headcount/internal/redisconn"
)

// lookEvery is how often the store checks for a loss of data.
const lookEvery = time.Second

// The values of the metric's label.
const (
	lostWrites     = "writes" // the last writes
	lostEverything = "everything"
)

func newLosses(registerer prometheus.Registerer) *prometheus.CounterVec {
	losses := prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "headcount_store_losses_total", Help: "Losses of data that Redis had acknowledged to this process, by extent: the last writes, or everything.",
	}, []string{"lost"})
	for _, what := range []string{lostWrites, lostEverything} {
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
	var tokens []string
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		if s.factsMode() != wasAccepted {
			continue
		}
		var found redisconn.Kept
		emptied, what := false, "Redis"
		_ = s.conn.Do(ctx, func(ctx context.Context, c *client) error { // after an error the next look finds it
			if c.Cluster != nil {
				what = "a master of the Redis Cluster"
			}
			var err error
			if found, err = s.cfg.Conn.Marks.Look(ctx, c); err != nil {
				return err
			}
			is, err := s.readTokens(ctx, c)
			for i, was := range tokens {
				emptied = emptied || err == nil && was != "" && was != is[i]
			}
			if err == nil && emptied == found.Missing { // otherwise Redis was emptied between the two reads
				tokens = is
			}
			return err
		})
		switch lost := found.Lost.Round(time.Millisecond); {
		case emptied && found.Missing:
			s.losses.WithLabelValues(lostEverything).Inc()
			s.cfg.Log.Warn().Msg(what + " has been emptied: follows, unread counts and counters that only Redis had are gone; presence is written again")
		case found.Lost > 0:
			s.losses.WithLabelValues(lostWrites).Inc()
			how := ""
			if found.Missing {
				how = " or more"
			}
			s.cfg.Log.Warn().Stringer("lost", lost).Msg(fmt.Sprintf(
				"%s has lost the writes of its last %s%s: follows, unread counts and counters that only Redis has lack what changed then; presence is written again", what, lost, how))
		case found.Restarted:
			s.cfg.Log.Info().Msg("Redis was restarted, or another server took its place: it has everything that it acknowledged to this process")
		}
	}
}
