package main

import (
	"context"
	"fmt"
	"path/filepath"

	"headcount/cmd/headcount/config"
	"headcount/counter/local"
	"headcount/counter/pipeline"
	"headcount/counter/routed"
	"headcount/counter/transfer"
	"headcount/internal/setting"
)

// placeOf returns where the counters of a server are.
func placeOf(cfg *config.Server) *transfer.Place {
	return &transfer.Place{
		Dir: cfg.DataDir, Redis: cfg.Redis, Postgres: cfg.Postgres, Regions: len(cfg.Peers) > 0,
	}
}

// openTiered opens the PostgreSQL behind Redis. What this process has of the counters closes it.
func (s *system) openTiered(ctx context.Context) (*routed.Tiered, error) {
	return routed.OpenTiered(ctx, routed.TieredConfig{
		URL: s.cfg.Postgres, Rules: s.cfg.Rules, PersistInterval: s.cfg.PersistInterval, Log: s.log,
	})
}

// openPipeline opens the counters and limits of this process.
func (s *system) openPipeline(ctx context.Context) (err error) {
	cfg := pipeline.Config{
		Cluster: s.owners, Postgres: s.cfg.Postgres, DataDir: s.cfg.DataDir, Rules: s.cfg.Rules,
		Registerer: s.registry, Log: s.log,
	}
	// Over Redis a data directory is refused by the settings.
	if cfg.Cluster == nil && cfg.Postgres != "" {
		if err := noCountersIn(cfg.DataDir); err != nil {
			return err
		}
	}

	s.counters, err = pipeline.Open(ctx, cfg)
	if err != nil {
		return err
	}
	// The pipeline uses the stores that were opened before it, so it is closed before them.
	s.closers = append(s.closers, s.counters.Close)

	return nil
}

// noCountersIn refuses a data directory with counters that --postgres would hide.
func noCountersIn(dir string) error {
	if dir == "" {
		return nil
	}

	holds, err := local.Holds(dir)
	if err != nil {
		return fmt.Errorf("--data-dir: %w", err)
	}

	if holds {
		return setting.Errorf("data-dir", "%s has counters, which are not served with --postgres; carry them over "+
			"(headcount export --data-dir %s | headcount import --postgres URL), then remove %s", dir, dir,
			filepath.Join(dir, local.File))
	}

	return nil
}
