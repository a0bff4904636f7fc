package persistent_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"headcount/counter"
	"headcount/counter/persistent"
	"headcount/counter/pgtest"
	"headcount/counter/redisstore"
	"headcount/presence/redistest"
)

// together runs each with two stores of each way to have PostgreSQL and one redis-server together.
func together(t *testing.T, each func(t *testing.T, stores [2]counter.Store, local *redisstore.Store, redis *redistest.Server, pg *pgtest.Server)) {
	rules, err := counter.ParseRules([]byte(`{"rules":[{"match":"k:*","kind":"exact"},{"match":"*","kind":"sum"}]}`))
	if err != nil {
		t.Fatal(err)
	}
	t.Run("in front", func(t *testing.T) {
		redis, pg := redistest.StartSecure(t), pgtest.Start(t)
		cfg := persistent.Config{Redis: redis.URL(), Postgres: pg.Database(t), PersistInterval: 50 * time.Millisecond}
		s := open(t, cfg)
		each(t, [2]counter.Store{s, open(t, cfg)}, s.Front(), redis, pg)
	})
	t.Run("beside", func(t *testing.T) {
		redis, pg := redistest.StartSecure(t), pgtest.Start(t)
		cfg := persistent.BesideConfig{Redis: redis.URL(), Postgres: pg.Database(t), Region: "us", Rules: rules}
		s := openBeside(t, cfg)
		each(t, [2]counter.Store{s, openBeside(t, cfg)}, s.Redis(), redis, pg)
	})
}

// TestDifferentBatchesUnderOneIdentity: of batches at the same moment one is made, whichever store decides it.
func TestDifferentBatchesUnderOneIdentity(t *testing.T) {
	one := func(t *testing.T, stores [2]counter.Store) {
		batches := []counter.Op{
			op("", add(views, "v:1", 1), add(views, "v:2", 1)),
			op("", add(stock, "k:1", 1), add(stock, "k:2", 1)),
			op("", add(views, "v:3", 1), add(stock, "k:3", 1)),
		}
		for i := range batches { // so that all are known
			apply(t, stores[0], batches[i])
		}
		const rounds = 40
		made := make([]int64, len(batches))
		for round := range rounds {
			results := make([]counter.Result, 2*len(batches))
			var all sync.WaitGroup
			for i := range results {
				o := batches[i%len(batches)]
				o.Identity = counter.IdentityOf("*", "", fmt.Sprint(round))
				all.Go(func() {
					time.Sleep(rand.N(2 * time.Millisecond)) // else those of Redis alone are always first
					results[i] = stores[(i+round)%2].Apply(t.Context(), []counter.Op{o})[0]
				})
			}
			all.Wait()
			n := 0
			for i, r := range results {
				if r.Err != nil {
					t.Fatal(r.Err)
				}
				if !r.Replay {
					made[i%len(batches)]++
					n++
				}
			}
			if n != 1 {
				t.Fatalf("round %d: %d batches were made under one identity", round, n)
			}
		}
		for i, n := range made {
			for _, c := range batches[i].Changes {
				if got := value(t, stores[1], c.Key); got != n+1 {
					t.Errorf("%s is %d, want %d", c.Key, got, n+1)
				}
			}
		}
		if slices.Contains(made, 0) {
			t.Logf("made: %v", made)
		}
	}
	together(t, func(t *testing.T, stores [2]counter.Store, _ *redisstore.Store, redis *redistest.Server, _ *pgtest.Server) {
		one(t, stores)
		if left := keysLike(t, redis, "hc:{n*}:k:*"); len(left) > 0 {
			t.Errorf("claims are left: %q", left)
		}
		if denied := redis.Denied(t); len(denied) > 0 {
			t.Errorf("redis.acl denies %q", denied)
		}
	})
	t.Run("on a cluster", func(t *testing.T) {
		cluster, pg := redistest.ThreeMasters(t), pgtest.Single(t)
		cluster.Flush(t)
		cfg := persistent.Config{Redis: cluster.URL(), Postgres: pg.Database(t), PersistInterval: 50 * time.Millisecond}
		one(t, [2]counter.Store{open(t, cfg), open(t, cfg)})
	})
}

func keysLike(t *testing.T, redis *redistest.Server, pattern string) []string {
	t.Helper()
	var keys []string
	for _, key := range redis.Do(t, "KEYS", pattern).([]any) {
		keys = append(keys, key.(string))
	}
	return keys
}

// TestClaimOfADeadProcess: a process dies after it has claimed an identity.
func TestClaimOfADeadProcess(t *testing.T) {
	together(t, func(t *testing.T, stores [2]counter.Store, local *redisstore.Store, redis *redistest.Server, pg *pgtest.Server) {
		s := stores[0]
		exact := func(id string) counter.Op { return op(id, add(stock, "k:1", 1), add(stock, "k:2", 1)) }
		sums := func(id string) counter.Op { return op(id, add(views, "v:1", 1), add(views, "v:2", 1)) }
		apply(t, s, exact(""))
		apply(t, s, sums(""))
		claimed := func(id string) (key string) {
			t.Helper()
			for _, before := range keysLike(t, redis, "hc:{n*}:k:*") {
				redis.Do(t, "DEL", before)
			}
			if known, err := local.Claim(t.Context(), []counter.Identity{op(id, add(views, "v", 1)).Identity}, "dead"); err != nil || known {
				t.Fatal(known, err)
			}
			keys := keysLike(t, redis, "hc:{n*}:k:*")
			if len(keys) != 1 {
				t.Fatalf("claims are %q", keys)
			}
			return keys[0]
		}

		// It may still be decided: the same batch goes on, another one may not, and what comes together with that one does.
		claimed("open")
		if r := s.Apply(t.Context(), []counter.Op{op("", add(views, "v:9", 1)), sums("open"), op("", add(views, "v:9", 1))}); r[0].Err != nil || r[2].Err != nil ||
			!errors.Is(r[1].Err, counter.ErrUnavailable) || !strings.Contains(r[1].Err.Error(), "Idempotency-Key") {
			t.Errorf("sums: %+v", r)
		}
		if got := value(t, s, "v:9"); got != 2 {
			t.Errorf("v:9 is %d, want 2", got)
		}
		if r := apply(t, s, exact("open")); r.Replay {
			t.Errorf("exact: %+v", r)
		}
		if r := apply(t, s, sums("open")); !r.Replay {
			t.Errorf("sums, after exact ones were made: %+v", r)
		}

		// It was not made, and cannot be any more.
		redis.Do(t, "HSET", claimed("over"), "dead", time.Now().Add(-time.Minute).UnixMilli())
		if r := apply(t, s, sums("over")); r.Replay {
			t.Errorf("sums: %+v", r)
		}
		if left := keysLike(t, redis, "hc:{n*}:k:*"); len(left) > 0 {
			t.Errorf("claims are left: %q", left)
		}

		// It was made, and Redis does not know.
		apply(t, s, exact("made"))
		for _, identity := range keysLike(t, redis, "hc:{n*}:i:*") {
			redis.Do(t, "DEL", identity)
		}
		redis.Do(t, "HSET", claimed("made"), "dead", time.Now().Add(-2*time.Second).UnixMilli())
		if r := apply(t, s, sums("made")); !r.Replay {
			t.Errorf("sums: %+v", r)
		}

		// Nobody can tell while PostgreSQL is away.
		redis.Do(t, "HSET", claimed("away"), "dead", time.Now().Add(-time.Minute).UnixMilli())
		pg.Kill()
		if r := s.Apply(t.Context(), []counter.Op{sums("away")})[0]; !errors.Is(r.Err, counter.ErrUnavailable) {
			t.Errorf("sums: %+v", r)
		}
		pg.Restart(t)
		until(t, "sums are made", func() bool {
			r := s.Apply(t.Context(), []counter.Op{sums("away")})[0]
			return r.Err == nil && !r.Replay
		})
		if got := value(t, s, "v:1"); got != 3 {
			t.Errorf("v:1 is %d, want 3", got)
		}
	})
}
