package main

import (
	"context"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"

	"headcount/counter"
	"headcount/counter/countertest"
	"headcount/counter/limit"
	"headcount/internal/redistest"
	"headcount/internal/webhook"
	"headcount/presence"
	"headcount/presence/member"
	"headcount/presence/presencemem"
	"headcount/presence/presenceredis"
)

// asStore is the counters of a process as a store: what is changed and what asks a limit goes the way that calls go.
type asStore struct {
	counter.Store
	*counters
	close func()
}

// Apply implements counter.Writer.
func (s asStore) Apply(ctx context.Context, ops []counter.Op) []counter.Result {
	results := make([]counter.Result, len(ops))
	for i := range ops {
		results[i] = s.combiner.Do(ctx, ops[i])
	}
	return results
}

// Limit implements counter.Limiter.
func (s asStore) Limit(ctx context.Context, calls []limit.Call) []counter.LimitResult {
	results := make([]counter.LimitResult, len(calls))
	for i := range calls {
		results[i].Answer, results[i].Err = s.limits.Do(ctx, calls[i])
	}
	return results
}

// Close implements counter.Store.
func (s asStore) Close() error { s.close(); return nil }

// openedCounters is the counters of a process with these settings, and a webhook that is told of them.
func openedCounters(t testing.TB, cfg Config) asStore {
	t.Helper()
	cfg.Rules, cfg.HotRate, cfg.WebhookSettle = countertest.Rules, 1000, time.Second
	var err error
	if cfg.Hooks, err = webhook.Parse([]string{"counter:*>5=http://127.0.0.1:1/"}, []presence.Site{presence.DefaultSite}); err != nil {
		t.Fatal(err)
	}
	log := zerolog.New(zerolog.NewTestWriter(t)).Level(zerolog.WarnLevel)
	s := &system{cfg: cfg, log: log, registry: prometheus.NewRegistry(), store: presencemem.New(presencemem.Config{})}
	s.member = member.New(member.Config{Self: presence.Process{Name: localName, Roles: []string{presence.RoleGateway}}, Log: log})
	if cfg.Redis != "" {
		if s.redis, err = presenceredis.Open(presenceredis.Config{URL: cfg.Redis, Log: log}); err != nil {
			t.Fatal(err)
		}
		s.closers = append(s.closers, s.redis.Close)
	}
	if err := s.openCounters(t.Context()); err != nil {
		t.Fatal(err)
	}
	closed := false
	close := func() {
		if !closed {
			closed = true
			s.close()
		}
	}
	t.Cleanup(close)
	return asStore{s.counters.store, s.counters, close}
}

// TestContractOfCounters: the whole way of a change keeps the contract of a store, with all that stands in front of one.
func TestContractOfCounters(t *testing.T) {
	t.Run("memory", func(t *testing.T) {
		countertest.Run(t, countertest.Brief, func(t testing.TB) countertest.Instance {
			return countertest.Instance{Store: openedCounters(t, Config{})}
		})
	})
	t.Run("file", func(t *testing.T) {
		countertest.Run(t, countertest.Brief, func(t testing.TB) countertest.Instance {
			cfg := Config{DataDir: t.TempDir()}
			s := openedCounters(t, cfg)
			return countertest.Instance{Store: s, Crash: func(t testing.TB) counter.Store {
				s.close()
				s = openedCounters(t, cfg)
				return s
			}}
		})
	})
	t.Run("Redis", func(t *testing.T) {
		server := redistest.Start(t, redistest.Durable...)
		countertest.Run(t, countertest.Core, func(t testing.TB) countertest.Instance {
			server.Flush(t)
			cfg := Config{Redis: server.URL()}
			return countertest.Instance{Store: openedCounters(t, cfg), Peer: openedCounters(t, cfg), Crash: func(t testing.TB) counter.Store {
				server.Restart(t)
				s := openedCounters(t, cfg)
				countertest.AwaitServed(t, s)
				return s
			}}
		})
	})
}
