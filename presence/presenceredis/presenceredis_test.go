package presenceredis_test

import (
	"context"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/rs/zerolog"

	"headcount/internal/redistest"
	"headcount/internal/testkit"
	"headcount/presence"
	"headcount/presence/presenceredis"
	"headcount/presence/presencetest"
)

func TestMain(m *testing.M) { testkit.Main(m, redistest.Stop) }

// open returns a store that ends with the test.
func open(t testing.TB, url string, with ...func(*presenceredis.Config)) *presenceredis.Store {
	t.Helper()
	cfg := presenceredis.Config{
		Conn: redistest.Dial(t, url), Log: zerolog.New(zerolog.NewTestWriter(t)),
		Facts: presenceredis.Facts{Region: "local", Secret: "k"},
	}

	for _, w := range with {
		w(&cfg)
	}

	s := presenceredis.Open(cfg)

	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Errorf("Close: %v", err)
		}
	})
	return s
}

// upTo returns the numbers below n: all partitions, or all buckets.
func upTo(n int) []int {
	all := make([]int, n)
	for i := range all {
		all[i] = i
	}

	return all
}

// watchAll watches all buckets until the test ends.
func watchAll(t testing.TB, s *presenceredis.Store, fn func(context.Context, presence.Publication)) {
	ctx, stop := context.WithCancel(context.Background())
	done := make(chan struct{})

	go func() {
		defer close(done)
		s.Watch(ctx, upTo(presence.DefaultBuckets), func(p presence.Publication) { fn(ctx, p) })
	}()

	t.Cleanup(func() {
		stop()
		<-done
	})
}

// forContract applies the settings that the contract needs.
func forContract(c *presenceredis.Config) {
	c.PageStats = time.Hour
	c.PageDays = 400
	c.LastSeen = time.Hour
	c.FactsWait = 50 * time.Millisecond
}

// The whole contract works over TLS, as the user that deploy/redis.acl documents, and Redis refuses that user nothing.
// The store sends only commands of Redis 6.2, the oldest supported version.
func TestServerContract(t *testing.T) {
	server := secure(t)
	presencetest.Run(t, func(t testing.TB) presencetest.Store {
		server.Flush(t)
		return open(t, server.URL(), forContract)
	})

	// INFO lists the commands that this server has received, also those of the test: ACL, FLUSHALL and INFO.
	known := strings.Fields("eval evalsha script|load info ping get setnx set hmget hget hset hdel hlen hgetall " +
		"hincrby sadd srem scard smismember sscan unlink expire persist ttl getrange setrange append strlen mget " +
		"mset zadd zcard zrange zrangebyscore zrem zscore exists pfcount pfmerge scan publish subscribe time " +
		"client|setname hello select flushall")

	for line := range strings.Lines(server.Do(t, "INFO", "commandstats").(string)) {
		name, _, ok := strings.Cut(strings.TrimPrefix(line, "cmdstat_"), ":")
		if ok && strings.HasPrefix(line, "cmdstat_") && !slices.Contains(known, name) {
			t.Errorf("the store sends %s, which Redis 6.2 may lack", name)
		}
	}
}

// The URL names one server, which reports that it is part of a Cluster.
func TestServerContractOnCluster(t *testing.T) {
	presencetest.RunParts(t, presencetest.Parts{
		"many members and pages in one write are listed": "one write has keys of several slots",
		"partitions written at once add up":              "partitions are on several masters",
		"any history of owners equals the model":         "partitions are on several masters",
		"all see who has a lease":                        "leases are in one slot, facts in another",
		"a watcher hears changes and follows":            "sharded channels, on several connections",
		"any history ends with the model's unread":       "users and pages are in different slots",
		"records are saved":                              "records are in the slots of their users",
		"a departure is remembered":                      "departures are in the slots of their users",
		"the running day is remembered":                  "days are in the slots of their pages",
	}, func(t testing.TB) presencetest.Store {
		return open(t, redistest.ThreeMasters(t).Masters[2].URL(), forContract)
	})
}

func TestServerASlowWatcherIsToldToReadAgain(t *testing.T) {
	s := open(t, redistest.Single(t).URL(), func(c *presenceredis.Config) { c.Backlog = 64 << 10 })
	presencetest.SlowWatcher(t, s)
}
