package faults

import (
	"context"
	"fmt"
	"net"
	"regexp"
	"strings"
	"testing"
	"time"

	"headcount/internal/redistest"
	"headcount/internal/testkit"
)

var (
	restartLines = regexp.MustCompile(
		`"level":"info".*Redis was restarted, or another server took its place: it has everything`)
	lossLines = regexp.MustCompile(`"level":"warn".*(?:Redis|Cluster) (has lost the writes of its last ` +
		`([0-9a-zµ.]+)( or more)?|has been emptied): .*"`)
	lossMetrics = regexp.MustCompile(`(?m)^headcount_store_losses_total(?:\{lost="(\w+)"\})? (\d+)$`)
	lostCommits = regexp.MustCompile(`(?m)^headcount_owner_commits_total\{outcome="lost"\} [1-9]`)
)

// redisFault happens to a Redis and to the link that leads to it. count increments the counter for some time.
type redisFault func(t *testing.T, redis *redistest.Server, link *wire, count func(time.Duration))

// promoteReplica makes a replica that is in step the master.
func promoteReplica(t *testing.T, redis *redistest.Server, link *wire, _ func(time.Duration)) {
	host, port, _ := net.SplitHostPort(redis.Addr)
	replica := redistest.Start(t, "--replicaof", host+" "+port)
	role := func(s *redistest.Server, text string) {
		t.Helper()
		testkit.Eventually(t, text, func() bool {
			return strings.Contains(s.Do(t, "INFO", "replication").(string), text)
		})
	}

	role(replica, "master_link_status:up")
	role(redis, "state=online")
	redis.Do(t, "FAILOVER") // it waits until the replica is in step
	role(replica, "role:master")
	link.lead(replica.Addr)
}

// TestClockWhatRedisLost: a restart or failover of Redis without a loss is not reported as a loss. A true loss is
// reported in one log line, which says what is gone, and by the metric that the alert reads. A counter keeps all
// acknowledged changes: its owner writes again what Redis has lost.
func TestClockWhatRedisLost(t *testing.T) {
	t.Parallel()
	const (
		nothing    = ""
		commits    = "commits" // of counters alone, which their owner writes again
		writes     = "writes"
		everything = "everything"
	)
	for name, tc := range map[string]struct {
		durable bool
		// One after the other.
		faults  []redisFault
		lost    string
		atLeast time.Duration
	}{
		"nothing": {durable: true, faults: []redisFault{
			func(t *testing.T, redis *redistest.Server, _ *wire, _ func(time.Duration)) {
				shutdown(redis)
				redis.Restart(t)
			},
			func(t *testing.T, redis *redistest.Server, _ *wire, _ func(time.Duration)) {
				redis.Restart(t) // killed, with an AOF that is always written
			},
			promoteReplica,
		}},
		"killed without persistence": {lost: everything,
			faults: []redisFault{func(t *testing.T, redis *redistest.Server, _ *wire, _ func(time.Duration)) {
				redis.Restart(t)
			}}},
		"an older RDB": {lost: writes, atLeast: 1500 * time.Millisecond,
			faults: []redisFault{func(t *testing.T, redis *redistest.Server, _ *wire, count func(time.Duration)) {
				redis.Do(t, "SAVE")
				count(2 * time.Second)
				redis.Restart(t)
			}}},
		"an RDB without the very last change": {lost: commits,
			faults: []redisFault{func(t *testing.T, redis *redistest.Server, _ *wire, count func(time.Duration)) {
				redis.Do(t, "SAVE")
				count(0)
				redis.Restart(t)
			}}},
		"FLUSHALL": {lost: everything,
			faults: []redisFault{func(t *testing.T, redis *redistest.Server, _ *wire, _ func(time.Duration)) {
				redis.Flush(t)
			}}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var args []string
			if tc.durable {
				args = redistest.Durable
			}

			redis := redistest.Start(t, args...)
			link := newWire(t, redis.Addr, 0)
			m := newMember(name, allRoles, link.url(), nil, "--api-key="+counterKey)
			startAll(t, m)
			awaitReady(t, m)

			api := m.keyed()
			acknowledged := int64(0)
			count := func(d time.Duration) {
				t.Helper()
				for end := time.Now().Add(d); ; time.Sleep(20 * time.Millisecond) {
					// On a slow machine, Redis may be too slow for a single call.
					testkit.Eventually(t, "an increment", func() bool {
						c, err := api.Increment(t.Context(), "views:1", 1)
						acknowledged = max(acknowledged, c.Value)
						return err == nil
					})

					if time.Now().After(end) {
						return
					}
				}
			}

			for i, fault := range tc.faults {
				count(3 * time.Second) // by then the process has checked Redis
				fault(t, redis, link, count)
				testkit.Eventually(t, "the fault is logged", func() bool {
					return len(restartLines.FindAllString(m.log.String(), -1))+
						len(lossLines.FindAllString(m.log.String(), -1)) > i
				})

				testkit.Eventually(t, "the counter is served", func() bool {
					c, err := api.Increment(t.Context(), "views:1", 1)
					if err == nil && c.Value <= acknowledged {
						t.Errorf("the counter is %d, and %d increments were acknowledged", c.Value, acknowledged)
					}

					return err == nil
				})
			}

			if tc.lost != nothing {
				testkit.Eventually(t, "the owner logs that it writes commits again", func() bool {
					return strings.Contains(m.log.String(), "redis has lost commits of counters")
				})
			}

			// The metrics have the same loss as the log.
			_, _, text, err := get("http://" + m.admin + "/metrics")
			if err != nil {
				t.Fatal(err)
			}
			if is := lostCommits.MatchString(text); is != (tc.lost != nothing) {
				t.Errorf("commits of counters are lost: %v", is)
			}

			if tc.lost == commits {
				return // presence may have lost something as well, or nothing
			}

			for _, is := range lossMetrics.FindAllStringSubmatch(text, -1) {
				want := "0"
				if is[1] == tc.lost && tc.lost != nothing {
					want = "1"
				}
				if is[2] != want {
					t.Errorf("the metric is %s, want %s", is[0], want)
				}
			}

			lines := lossLines.FindAllStringSubmatch(m.log.String(), -1)
			restarts := len(restartLines.FindAllString(m.log.String(), -1))
			if tc.lost == nothing {
				if len(lines) != 0 || restarts != len(tc.faults) {
					t.Errorf("the log has the losses %q, and %d restarts without one; want %d restarts",
						lines, restarts, len(tc.faults))
				}

				return
			}

			if len(lines) != 1 || restarts != 0 || (lines[0][2] == "") != (tc.lost == everything) {
				t.Errorf("the log has the losses %q, and %d restarts without one; want one loss of %s",
					lines, restarts, tc.lost)
				return
			}
			if tc.lost == writes {
				t.Log(lines[0][0])
				if d, err := time.ParseDuration(lines[0][2]); err != nil || d < tc.atLeast || d > time.Minute {
					t.Errorf("the last %s (%v), want at least %s", d, err, tc.atLeast)
				}
			}
		})
	}
}

// One master of a Cluster comes back with all its data, and then with nothing.
func TestClockWhatAMasterOfAClusterLost(t *testing.T) {
	t.Parallel()
	cluster := redistest.StartCluster(t, 3, 0, redistest.Durable...)
	m := newMember("all", allRoles, cluster.URL(), nil, "--api-key="+counterKey)
	startAll(t, m)
	awaitReady(t, m)

	api := m.keyed()
	for i := range 150 {
		if _, err := api.Increment(t.Context(), fmt.Sprint("views:", i), 1); err != nil {
			t.Fatal(err)
		}
		time.Sleep(20 * time.Millisecond) // the process checks Redis every second
	}

	logged := func(what *regexp.Regexp) func() bool {
		return func() bool { return what.MatchString(m.log.String()) }
	}
	cluster.Masters[1].Restart(t)
	testkit.Eventually(t, "a restart without a loss", logged(restartLines))
	awaitReady(t, m)
	if lines := lossLines.FindAllString(m.log.String(), -1); len(lines) != 0 {
		t.Errorf("the log has losses: %q", lines)
	}

	cluster.Masters[1].Flush(t)
	testkit.Eventually(t, "the loss is logged",
		logged(regexp.MustCompile(`"level":"warn".*a master of the Redis Cluster has been emptied`)))
}

// shutdown ends a server as an operator does.
func shutdown(s *redistest.Server) {
	c := s.Client()
	defer c.Close()
	_ = c.Do(context.Background(), "SHUTDOWN").Err() // the server closes the connection
}
