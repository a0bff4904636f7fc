package hot

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"headcount/counter"
	"headcount/counter/counterredis"
	"headcount/counter/tiered"
	"headcount/internal/pgtest"
	"headcount/internal/redistest"
	"headcount/internal/testkit"
)

// behind is a process with PostgreSQL behind Redis, that gathers only when it is told to.
func behind(t testing.TB, redis, postgres string) (s *Store, redisStore *counterredis.Store) {
	t.Helper()
	p, err := tiered.Open(t.Context(), tiered.Config{Redis: redistest.Dial(t, redis), Postgres: postgres, PersistInterval: 50 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	s = newStore(p, p.Redis(), Config{Rate: 1000, Rules: rules})
	t.Cleanup(func() { s.Close() })
	settled(t, "start", func() error { _, err := s.Read(t.Context(), []string{"k"}, "", 0); return err }) // the tables may not be made yet
	return s, p.Redis()
}

// persisted waits until all that is in Redis is in PostgreSQL, too.
func persisted(t testing.TB, redis *counterredis.Store) {
	t.Helper()
	testkit.Eventually(t, "all is persisted", func() bool {
		all, err := redis.Status(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		return !slices.ContainsFunc(all, func(b counterredis.Bucket) bool { return !b.Since.IsZero() || b.Draining != 0 })
	})
}

// settled calls until Redis and PostgreSQL agree again.
func settled(t testing.TB, what string, call func() error) {
	t.Helper()
	testkit.Eventually(t, what, func() bool {
		err := call()
		if err != nil && !errors.Is(err, counter.ErrUnavailable) {
			t.Fatalf("%s: %v", what, err)
		}
		return err == nil
	})
}

// spread makes a sharded sum of 120, of which nobody has gathered the last 20.
func spread(t testing.TB, s *Store, key string) {
	t.Helper()
	made(t, s, add(key, 100))
	if err := s.split(t.Context(), key); err != nil {
		t.Fatal(err)
	}
	for range 20 {
		made(t, s, add(key, 1))
	}
}

// TestServerAnOrderlyEndGathers what was added to shards, so PostgreSQL has it when Redis is empty at the next start.
func TestServerAnOrderlyEndGathers(t *testing.T) {
	server, postgres := redistest.Start(t, "--save", ""), pgtest.Single(t).Database(t)
	s, _ := behind(t, server.URL(), postgres)
	key := "k"
	spread(t, s, key)
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	server.Flush(t)
	s, _ = behind(t, server.URL(), postgres)
	exactly(t, s, key, 120)
}

// TestServerRedisLosesItsMemory while a sum is sharded. What was gathered and persisted comes back; what shards have that are still there
// is counted once, also when they had more than what was persisted.
func TestServerRedisLosesItsMemory(t *testing.T) {
	postgres := pgtest.Single(t)
	for name, shards := range map[string]bool{"all of it": false, "but the shards": true} {
		t.Run(name, func(t *testing.T) {
			server := redistest.Start(t, "--save", "")
			s, redis := behind(t, server.URL(), postgres.Database(t))
			key := "k"
			spread(t, s, key)
			if err := s.gatherKeys(t.Context(), key); err != nil {
				t.Fatal(err)
			}
			persisted(t, redis)
			for range 20 {
				made(t, s, add(key, 1))
			}
			before := exactly(t, s, key, 140)
			want := int64(120)
			if shards {
				want = 140
				lost := []any{"DEL"} // at once: what is lost in two goes begins two generations, and the first one's changes are lost
				for _, name := range server.Do(t, "KEYS", "hc:{*").([]any) {
					if name := fmt.Sprint(name); !strings.Contains(name, ":h:") {
						lost = append(lost, name)
					}
				}
				server.Do(t, lost...)
			} else {
				server.Flush(t)
			}
			settled(t, "read", func() error { _, err := s.Read(t.Context(), []string{key}, "", 0); return err })
			c := exactly(t, s, key, want)
			if c.Version.Incarnation <= before.Version.Incarnation {
				t.Errorf("%+v is not newer than %+v", c, before)
			}
			if !(process{s, redis}).isSharded(t, key) {
				t.Error("its bucket does not know that it is sharded")
			}
			for range 10 {
				made(t, s, add(key, 1))
			}
			exactly(t, s, key, want+10)
			settled(t, "merge", func() error { return s.merge(t.Context(), key) })
			exactly(t, s, key, want+10)
			// Again, under the new generation, and then to PostgreSQL and back.
			if err := s.split(t.Context(), key); err != nil {
				t.Fatal(err)
			}
			for range 10 {
				made(t, s, add(key, 1))
			}
			exactly(t, s, key, want+20)
			if err := s.merge(t.Context(), key); err != nil {
				t.Fatal(err)
			}
			persisted(t, redis)
			server.Flush(t)
			settled(t, "read", func() error { _, err := s.Read(t.Context(), []string{key}, "", 0); return err })
			exactly(t, s, key, want+20)
		})
	}
}
