package webhookredis

import (
	"errors"
	"testing"

	"headcount/internal/redistest"
	"headcount/internal/testkit"
	"headcount/webhook"
	"headcount/webhook/webhooktest"
)

func TestMain(m *testing.M) { testkit.Main(m, redistest.Stop) }

func open(t *testing.T, url string) *Store {
	t.Helper()
	s := New(redistest.Dial(t, url), nil)
	t.Cleanup(func() { _ = s.Close() })
	return s
}

func TestServerInRedis(t *testing.T) {
	server := redistest.Single(t)
	webhooktest.Run(t, func(t *testing.T) webhook.Store { return open(t, server.URL()) })
	for _, key := range server.Client().Keys(t.Context(), "*").Val() {
		if ttl := server.Client().TTL(t.Context(), key).Val(); ttl <= 0 || ttl > webhook.KeptFor {
			t.Errorf("the key %s expires in %s", key, ttl)
		}
	}

	// A closed store makes no calls to Redis, and its errors are those of an outage.
	s := open(t, server.URL())
	_ = s.Close()
	hook := webhooktest.Hooks(t)[0].ID
	if _, _, err := s.Take(t.Context(), hook); !errors.Is(err, webhook.ErrUnavailable) {
		t.Errorf("Take of a closed store returns %v", err)
	}

	change := webhook.Change{Hook: hook, Subject: "a/1", Is: "1"}
	if _, _, err := s.Report(t.Context(), []webhook.Change{change}); !errors.Is(err, webhook.ErrUnavailable) {
		t.Errorf("Report of a closed store returns %v", err)
	}
}

func TestServerOverACluster(t *testing.T) {
	cluster := redistest.ThreeMasters(t)
	webhooktest.Run(t, func(t *testing.T) webhook.Store { return open(t, cluster.URL()) })
}
