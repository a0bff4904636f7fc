package presenceredis_test

import (
	"context"
	"sync"
	"testing"
	"time"

	"headcount/internal/redistest"
	"headcount/internal/testkit"
	"headcount/presence"
	"headcount/presence/presenceredis"
)

// A former master that was not demoted keeps its connections, but no change is published there any more. Subscriptions
// must move to the new master.
func TestServerSubscriptionsLeaveAFormerMasterThatLivesOn(t *testing.T) {
	t.Parallel()
	s := redistest.StartSentinel(t)
	failover(t, s.URL(), func() {
		s.Master.Do(t, "ACL", "SETUSER", "default", "-slaveof", "-replicaof")
		s.Sentinels[0].Do(t, "SENTINEL", "FAILOVER", redistest.MasterName)
	})
}

// follow watches all buckets until the test ends, and reads lost ones like a dispatcher. The returned function returns
// the newest count of a page.
func (c *cluster) follow(pages ...string) (users func(page string) int64) {
	var mu sync.Mutex
	newest := map[string]presence.Count{}

	take := func(n presence.Count) {
		mu.Lock()
		defer mu.Unlock()
		if n.Newer(newest[n.Page]) {
			newest[n.Page] = n
		}
	}

	watchAll(c.t, c.s, func(ctx context.Context, p presence.Publication) {
		for _, u := range p.Updates {
			n, _ := presence.CountOf(u)
			take(n)
		}

		for _, page := range pages {
			if p.Lost && presence.Bucket(page, presence.DefaultBuckets) == p.Bucket {
				if got, err := c.s.Counts(ctx, []string{page}); err == nil {
					take(got[0])
				}
			}
		}
	})

	return func(page string) int64 {
		mu.Lock()
		defer mu.Unlock()
		return newest[page].Users
	}
}

// A follower that cannot subscribe polls the counts.
func TestClockAFollowerThatHearsNothingReads(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	c := start(t, open(t, server.URL()))
	users := c.follow("p")

	c.set(0, "p", 1)
	testkit.Eventually(t, "the first count", func() bool { return users("p") == 1 })

	// The running subscription ends, and no new one is permitted.
	server.Do(t, "ACL", "SETUSER", "default", "-subscribe")
	server.Do(t, "CLIENT", "KILL", "TYPE", "pubsub")
	c.set(0, "p", 2)
	testkit.Within(t, 10*time.Second, "a count that nobody hears", func() bool { return users("p") == 2 })

	// A follower that could never subscribe polls as well.
	users = c.follow("p")
	testkit.Within(t, 10*time.Second, "a count for one who could never subscribe",
		func() bool { return users("p") == 2 })
}

// When a slot moves to another master, the subscription to its channel follows.
func TestClockSubscriptionsFollowASlotThatMoves(t *testing.T) {
	t.Parallel()
	servers := redistest.StartCluster(t, 2, 0)
	c := start(t, open(t, servers.URL()))
	users := c.follow("p")

	// The bucket's hash tag determines the slot of its keys and of its channel.
	key := presenceredis.BucketKey(presence.Bucket("p", presence.DefaultBuckets), "")
	slot := int(servers.Masters[0].Do(t, "CLUSTER", "KEYSLOT", key).(int64))

	for n := range int64(4) {
		c.set(0, "p", n+1)
		testkit.Within(t, 10*time.Second, "the count after a move", func() bool { return users("p") == n+1 })
		servers.Migrate(t, slot, int(n%2))
	}
}
