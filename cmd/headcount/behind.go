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
		return routed.UseBeside
	default:
		return routed.UseBehind
	}
}

// openBehind opens the PostgreSQL behind Redis. What this process has of the counters closes it.
func (s *system) openBehind(ctx context.Context) (*routed.Behind, error) {
	return routed.OpenBehind(ctx, routed.BehindConfig{
		URL: s.cfg.Postgres, Rules: s.cfg.Rules, PersistInterval: s.cfg.PersistInterval, Log: s.log,
	})
}
