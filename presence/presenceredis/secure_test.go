package presenceredis_test

import (
	"context"
	"errors"
	"strings"
	"sync/atomic"
	"testing"

	"headcount/internal/redistest"
	"headcount/internal/testkit"
	"headcount/presence"
	"headcount/presence/presenceredis"
)

// secure returns a Redis behind TLS that must not refuse the user of deploy/redis.acl anything.
func secure(t *testing.T) *redistest.Server {
	s := redistest.StartSecure(t)
	nothingDenied(t, s)

	return s
}

// nothingDenied checks at the end of the test that the server has refused its users nothing.
func nothingDenied(t *testing.T, s *redistest.Server) {
	t.Cleanup(func() {
		for _, denied := range s.Denied(t) {
			t.Errorf("deploy/redis.acl does not permit: %s", denied)
		}
	})
}

// Regions share counts over TLS, as the user of deploy/redis.acl. One of them is a Cluster, whose clients use other
// commands.
func TestServerRegionsOverTLSOnCluster(t *testing.T) {
	t.Parallel()
	cluster, single := redistest.StartSecureCluster(t, 3), secure(t)
	for _, s := range cluster.Masters {
		nothingDenied(t, s)
	}

	us, eu := newWorld(t, cluster.URL(), "us"), newWorld(t, single.URL(), "eu", "us")
	us.fill(2000, 1) // before a log exists
	heard := listening(t, us.Store)
	// The first one may come before the subscription.
	testkit.Eventually(t, "a publication of the Cluster", func() bool {
		us.set("p", 1)
		us.set("p", 2)
		return heard()
	})

	// The pages from before the log must be listed for it.
	us.share(0, map[string]string{"eu": single.URL()})
	eu.share(0, map[string]string{"us": cluster.URL()})
	eu.set("p", 3)
	for _, w := range []*world{us, eu} {
		w.shows("p", 5)
		w.shows("page/0", 1)
		w.shows("page/1999", 1)
	}

	// The end of presence reaches the peer, too.
	us.set("p", 0)
	eu.shows("p", 3)
}

// listening watches all buckets until the test ends. The returned function reports whether an update has arrived.
func listening(t *testing.T, s *presenceredis.Store) (heard func() bool) {
	var came atomic.Bool
	watchAll(t, s, func(_ context.Context, p presence.Publication) {
		if len(p.Updates) > 0 {
			came.Store(true)
		}
	})
	return came.Load
}

// A client with a rediss:// URL rejects the certificate of another host. A client without TLS cannot connect to a
// server that requires TLS.
func TestServerTLSIsVerified(t *testing.T) {
	t.Parallel()
	server := secure(t)
	for name, url := range map[string]string{
		"another host": strings.Replace(server.URL(), "127.0.0.1", "localhost", 1),
		"without TLS":  strings.Replace(server.URL(), "rediss://", "redis://", 1),
	} {
		if _, err := open(t, url).Counts(t.Context(), []string{"p"}); !errors.Is(err, presence.ErrUnavailable) {
			t.Errorf("%s: %v, want ErrUnavailable", name, err)
		}
	}

	if _, err := open(t, server.URL()).Counts(t.Context(), []string{"p"}); err != nil {
		t.Errorf("with the documented settings: %v", err)
	}
}
