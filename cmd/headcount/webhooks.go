package main

import (
	"fmt"

	"headcount/counter/cluster"
	"headcount/internal/setting"
	"headcount/presence"
	"headcount/presence/presenceredis"
	"headcount/webhook"
	"headcount/webhook/webhookmem"
	"headcount/webhook/webhookredis"
)

// checkWebhooks parses and checks the webhooks.
func (c *Config) checkWebhooks() error {
	var err error
	if c.Hooks, err = webhook.Parse(c.Webhooks, c.AllSites.Names()); err != nil {
		return setting.Errorf("webhook", "%s", err)
	}

	c.HookKeys = nil
	for _, secret := range c.WebhookSecrets {
		key, err := webhook.ParseSecret(secret)
		if err != nil {
			return setting.Errorf("webhook-secret", "%s", err)
		}
		c.HookKeys = append(c.HookKeys, key)
	}

	if len(c.Hooks) > 0 && len(c.HookKeys) == 0 {
		return setting.Errorf("webhook-secret", "it is required with --webhook: receivers verify by it that this "+
			"server sent a message; make one by: echo whsec_$(openssl rand -base64 32)")
	}

	return nil
}

// facts returns the facts that the processes of the region must agree on. A process without webhooks
// leaves out the format of their data.
func (c *Config) facts() presenceredis.Facts {
	f := presenceredis.Facts{Region: c.Region, Secret: checkValue(c.ClusterSecrets), Counters: cluster.Format}
	owns := c.HasRole(presence.RolePresence)
	if c.HasRole(presence.RoleGateway) || owns {
		switch {
		case c.Postgres == "":
			f.Postgres = presenceredis.PostgresNone
		case len(c.Peers) > 0:
			f.Postgres = presenceredis.PostgresSharedExact
		default:
			f.Postgres = presenceredis.PostgresTiered
		}
	}
	if len(c.Hooks) > 0 {
		f.Webhooks = webhookredis.Format
	}

	return f
}

// openWebhooks opens the webhooks of this process, and connects them to its counters. Without any nothing is reported.
func (s *system) openWebhooks() error {
	cfg := s.cfg
	s.webhooks = webhook.New(webhook.Config{})
	if len(cfg.Hooks) == 0 {
		return nil
	}

	var store webhook.Store
	switch {
	case s.redis != nil:
		opened := webhookredis.New(s.redis, s.registry)
		store = opened
		s.closers = append(s.closers, opened.Close)
	case cfg.DataDir != "":
		opened, err := webhookmem.Open(cfg.DataDir, cfg.Hooks)
		if err != nil {
			return fmt.Errorf("--data-dir: %w", err)
		}
		store = opened
		s.closers = append(s.closers, opened.Close)
	default:
		s.log.Info().Msg("--data-dir is not set: this process keeps the events of --webhook in memory, and those " +
			"not sent are lost when it ends")
		store = webhookmem.New()
	}

	config := webhook.Config{
		Hooks:      cfg.Hooks,
		Keys:       cfg.HookKeys,
		Store:      store,
		Pages:      s.store,
		Users:      s.member,
		Settle:     cfg.WebhookSettle,
		Registerer: s.registry,
		Log:        s.log,
	}
	if s.counters != nil { // only a gateway has counters
		config.Counters = s.counters
	}

	s.webhooks = webhook.New(config)

	if s.counters != nil {
		s.counters.Observe(s.webhooks)
	}

	return nil
}
