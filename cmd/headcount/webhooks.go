package main

import (
	"fmt"

	"headcount/webhook"
	"headcount/webhook/webhookmem"
	"headcount/webhook/webhookredis"
)

// openWebhooks opens the webhooks of this process, and connects them to its counters. Without any nothing is reported.
func (s *system) openWebhooks() error {
	cfg := s.cfg
	// A service without hooks accepts and forgets everything, so its callers need not ask whether there is one.
	s.webhooks = webhook.New(webhook.Config{})
	if len(cfg.Hooks) == 0 {
		return nil
	}

	var store webhook.Store
	switch {
	// Every process of the region may send any event, so what is pending is where all of them see it.
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

	// The pipeline was opened first, with nobody to report to.
	if s.counters != nil {
		s.counters.Observe(s.webhooks)
	}

	return nil
}
