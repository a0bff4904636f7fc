package main

import (
	"context"

	"headcount/counter/routed"
	"headcount/presence"
)

// hasCounters reports whether this process owns counters, or serves them.
func (s *system) hasCounters() bool {
	return s.cfg.HasRole(presence.RolePresence) || s.cfg.HasRole(presence.RoleGateway)
}

// postgresUse returns how the counters use PostgreSQL.
func (c *Config) postgresUse() routed.Use {
	switch {
	case c.Redis == "":
		return routed.UseAlone
	case len(c.Peers) > 0:
		return routed.UseSharedExact
	default:
		return routed.UseTiered
	}
}

// openTiered opens the PostgreSQL behind Redis. What this process has of the counters closes it.
func (s *system) openTiered(ctx context.Context) (*routed.Tiered, error) {
	return routed.OpenTiered(ctx, routed.TieredConfig{
		URL: s.cfg.Postgres, Rules: s.cfg.Rules, PersistInterval: s.cfg.PersistInterval, Log: s.log,
	})
}
