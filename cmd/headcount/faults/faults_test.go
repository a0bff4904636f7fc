package faults

import (
	"errors"
	"net/http"
	"os"
	"testing"
	"time"

	"headcount/client"
	"headcount/internal/redistest"
	"headcount/internal/testkit"
)

// killed is the crash of a process, which is started again afterwards.
func killed(name string, m *member) fault {
	return fault{
		name: name, since: "the crash", during: time.Second,
		damage: func(*testing.T) time.Time {
			at := time.Now()
			m.kill()
			return at
		},
		mend: func(t *testing.T) { again(t, m) },
	}
}

// TestClockOneFaultAfterTheOther has crashes, a process that hangs, and a Redis that loses everything, in one cluster.
func TestClockOneFaultAfterTheOther(t *testing.T) {
	t.Parallel()
	redis := redistest.Start(t)
	top := newTopology(t, redis.URL(), nil)
	top.suffer(t, killed("kill -9 of a gateway", top.gateways[0]))
	top.suffer(t, killed("kill -9 of a presence node", top.nodes[0]))
	top.suffer(t, killed("kill -9 of a dispatcher", top.dispatchers[0]))
	freeze(t, top, top.nodes[1])

	top.suffer(t, fault{
		name: "FLUSHALL", since: "FLUSHALL", during: time.Second,
		damage: func(t *testing.T) time.Time {
			redis.Flush(t)
			return time.Now()
		},
	})

	top.suffer(t, fault{
		name: "Redis killed and restarted empty", since: "its return", during: time.Second,
		damage: func(t *testing.T) time.Time {
			redis.Kill()
			redis.Restart(t)
			return time.Now()
		},
	})
}

// freeze lets a presence node hang for so long that others take over.
func freeze(t *testing.T, top *topology, zombie *member) {
	top.suffer(t, fault{
		name: "SIGSTOP of a presence node", since: "SIGSTOP", during: time.Second,
		damage: func(*testing.T) time.Time {
			at := time.Now()
			zombie.pause()
			return at
		},
	})

	// While the zombie sleeps, users come and go under other owners.
	stop := top.crowd.Churn(t.Context()) // without the zombie's knowledge
	time.Sleep(3 * time.Second)
	stop()

	top.suffer(t, fault{
		name: "SIGCONT of it when others have taken over", since: "SIGCONT", during: time.Millisecond,
		damage: func(*testing.T) time.Time {
			time.Sleep(time.Second) // users who leave now belong to other owners, and the zombie never knew them
			zombie.resume()
			return time.Now()
		},
		mend: func(t *testing.T) { awaitReady(t, zombie) },
	})
}

// The dead process was gateway, presence node and dispatcher in one. Its users are gone in time, even with a presence
// timeout much shorter than the default, which TestClockOneFaultAfterTheOther has.
func TestClockAWholeProcessDies(t *testing.T) {
	t.Parallel()
	top := newWholes(t, redistest.Start(t).URL(), "--presence-timeout=3s", "--heartbeat-interval=1s")
	top.suffer(t, killed("kill -9 of a process that has all roles, with a presence timeout of 3 s", top.members[0]))
}

func TestClockRedisAway(t *testing.T) {
	t.Parallel()
	redis := redistest.Start(t, "--appendonly", "yes")
	top := newTopology(t, redis.URL(), nil)
	c := top.crowd

	away := func(t *testing.T, gone, back func(), lasts time.Duration) time.Time {
		const unwatched = "read once and watched by nobody"
		for i, g := range top.gateways {
			if n, err := c.Get(t.Context(), i, unwatched); err != nil || n.Stale {
				t.Errorf("GET %q from %s: %+v, %v", unwatched, g.name, n, err)
			}
		}

		// At once everything must be marked as stale, in frames and in answers.
		start, cut := time.Now(), c.Lost()
		gone()
		testkit.Within(t, 15*time.Second, "every process is not ready and every count is stale", func() bool {
			for _, m := range top.members {
				status, _, _, err := get("http://" + m.admin + "/readyz")
				if err != nil || status != http.StatusServiceUnavailable {
					return false
				}
			}
			for i := range top.gateways {
				fresh := 0
				connected := c.Look(i, func(n client.Count) {
					if !n.Stale {
						fresh++
					}
				})
				if !connected || fresh > 0 {
					return false
				}
			}
			return true
		})

		for i, g := range top.gateways {
			for _, page := range append([]string{site, unwatched}, pages...) {
				if n, err := c.Get(t.Context(), i, page); err != nil || !n.Stale {
					t.Errorf("GET %q from %s: %+v, %v", page, g.name, n, err)
				}
			}

			no := (*client.Error)(nil)
			_, _, err := g.api("").Hold(t.Context(), "home")
			if !errors.As(err, &no) || no.Status != http.StatusServiceUnavailable || no.RetryAfter < time.Second {
				t.Errorf("a hold at %s: %v", g.name, err)
			}
		}

		time.Sleep(time.Until(start.Add(lasts)))
		for i, g := range top.gateways {
			connected := c.Look(i, func(n client.Count) {
				if !n.Stale {
					t.Errorf("a watcher of %s: %+v is not stale", g.name, n)
				}
			})
			if !connected {
				t.Errorf("a watcher of %s was cut off", g.name)
			}
		}

		// No client may notice the outage by a lost connection.
		if n := c.Lost() - cut; n > 0 {
			t.Errorf("%d connections ended in the outage, want none", n)
		}

		back()
		return time.Now()
	}

	top.suffer(t, fault{name: "Redis frozen for 12 s", since: "its return", // longer than any lease and timeout
		damage: func(t *testing.T) time.Time { return away(t, redis.Pause, redis.Resume, 12*time.Second) },
		mend:   func(t *testing.T) { awaitReady(t, top.members...) }})
	top.suffer(t, fault{name: "Redis killed, back with its data after 5 s", since: "its return",
		damage: func(t *testing.T) time.Time {
			return away(t, redis.Kill, func() { redis.Restart(t) }, 5*time.Second)
		},
		mend: func(t *testing.T) { awaitReady(t, top.members...) }})
}

// master checks that the former replica has taken over.
func master(t *testing.T, s *redistest.Server) {
	t.Helper()
	if role := s.Do(t, "ROLE").([]any)[0]; role != "master" {
		t.Errorf("the replica is a %v", role)
	}
}

func TestClockRedisCluster(t *testing.T) {
	t.Parallel()
	redis := redistest.StartCluster(t, 3, 3)
	top := newTopology(t, redis.URL(), nil)
	top.suffer(t, fault{name: "Redis Cluster: a master killed, its replica takes over", since: "the crash",
		during: time.Second,
		damage: func(*testing.T) time.Time {
			at := time.Now()
			redis.Masters[0].Kill()
			return at
		},
		mend: func(t *testing.T) {
			master(t, redis.Replicas[0])
			redis.Masters[0].Restart(t)
		},
	})

	top.suffer(t, killed("Redis Cluster: kill -9 of a presence node", top.nodes[2]))
}

func TestClockSentinel(t *testing.T) {
	t.Parallel()
	redis := redistest.StartSentinel(t)
	top := newTopology(t, redis.URL(), nil)
	top.suffer(t, fault{name: "Sentinel: the master killed", since: "the crash", during: time.Second,
		damage: func(*testing.T) time.Time {
			at := time.Now()
			redis.Master.Kill()
			return at
		},
		mend: func(t *testing.T) { master(t, redis.Replica) },
	})
	top.suffer(t, killed("Sentinel: kill -9 of a gateway", top.gateways[1]))
}

func TestClockBadNetwork(t *testing.T) {
	t.Parallel()
	redis := redistest.Start(t)
	var proxies []*proxy
	top := newTopology(t, redis.URL(), func() *proxy {
		p := newProxy(t, 0.2)
		proxies = append(proxies, p)
		return p
	}, "--cluster-secret=of the faults")

	top.suffer(t, fault{name: "20 % of datagrams lost, repeated, reordered, all the time",
		since: "the last join or leave",
		damage: func(*testing.T) time.Time {
			for _, p := range proxies {
				p.bad.Store(true)
			}

			time.Sleep(15 * time.Second)
			return time.Now()
		},
		mend: func(t *testing.T) {
			var lost, twice, late int64
			for _, p := range proxies {
				lost += p.lost.Load()
				twice += p.twice.Load()
				late += p.late.Load()
			}

			t.Logf("%d datagrams lost, %d repeated, %d late", lost, twice, late)
			if min(lost, twice, late) < 100 {
				t.Error("this is no bad network")
			}
		}})

	if os.Getenv("HEADCOUNT_MORE_FAULTS") != "" { // two faults at once exceed the promise of the contract
		top.suffer(t, killed("kill -9 of a presence node on that network", top.nodes[0]))
	}
}
