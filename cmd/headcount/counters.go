package main

import (
	"context"
	"fmt"
	"path/filepath"

	"headcount/counter/counterfile"
	"headcount/counter/pipeline"
	"headcount/internal/setting"
	"headcount/presence/region"
)

// openPipeline opens the counters and limits of this process.
func (s *system) openPipeline(ctx context.Context) (err error) {
	cfg := pipeline.Config{
		Redis: s.cfg.Redis, Postgres: s.cfg.Postgres, DataDir: s.cfg.DataDir, Rules: s.cfg.Rules,
		PersistInterval: s.cfg.PersistInterval, ColdAfter: s.cfg.ColdAfter, HotRate: s.cfg.HotRate,
		Owner: &owner{member: s.member, self: s.cfg.AdvertiseAddr()}, Registerer: s.registry, Log: s.log,
	}
	if s.redis != nil {
		cfg.Marks = s.redis.Marks()
	}
	for _, peer := range s.cfg.Peers {
		name, url := region.SplitPeer(peer)
		cfg.Region, cfg.Peers = s.cfg.Region, append(cfg.Peers, pipeline.Peer{Name: name, URL: url})
	}
	if cfg.Redis == "" && cfg.Postgres != "" {
		if err := noCountersIn(cfg.DataDir); err != nil {
			return err
		}
	}
	if s.counters, err = pipeline.Open(ctx, cfg); err != nil {
		return refusedPostgres(err)
	}
	s.closers = append(s.closers, s.counters.Close)
	return nil
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
		return setting.Errorf("data-dir", "%s has counters, which are not served with --postgres; carry them over "+
			"(headcount export --data-dir %s | headcount import --postgres URL), then remove %s", dir, dir, filepath.Join(dir, counterfile.File))
	}
	return nil
}
