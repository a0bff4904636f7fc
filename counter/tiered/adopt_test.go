package tiered_test

import (
	"encoding/hex"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/rs/zerolog"

	"headcount/counter"
	"headcount/counter/counterredis"
	"headcount/counter/countertest"
	"headcount/counter/tiered"
	"headcount/internal/pgtest"
	"headcount/internal/redistest"
	"headcount/internal/servertest"
	"headcount/internal/testkit"
)

// alone opens a Redis as a server without PostgreSQL does.
func alone(t testing.TB, url string) *counterredis.Store {
	t.Helper()
	s := counterredis.New(counterredis.Config{Conn: redistest.Dial(t, url), Rules: counter.BuiltinRules(), Log: zerolog.Nop()})
	return s
}

// everything is what an export has of a store, but for incarnations, which adoption may raise.
func everything(t testing.TB, s counter.Dumper) map[string]counter.Copy {
	t.Helper()
	all := map[string]counter.Copy{}
	for _, c := range countertest.Everything(t, s) {
		c.Version.Incarnation = 0
		all[c.Key] = c
	}
	return all
}

// A Redis that had no PostgreSQL gets one: all its counters are carried there, and go on.
func TestServerCountersOfARedisAreAdopted(t *testing.T) {
	cluster := redistest.ThreeMasters(t)
	url := pgtest.Single(t).Database(t)
	before := alone(t, cluster.URL())
	const n = 300
	countertest.Fill(t, before, n)
	want := everything(t, before)
	idempotencyKeys := map[string]time.Time{}
	if err := before.DumpIdempotencyKeys(t.Context(), func(some []counter.IdempotencyKeyCopy) error {
		for _, id := range some {
			idempotencyKeys[hex.EncodeToString(id.IdempotencyKey[:])] = id.Until
		}
		return nil
	}); err != nil || len(idempotencyKeys) < n {
		t.Fatalf("%d idempotency keys, %v", len(idempotencyKeys), err)
	}
	if err := before.Close(); err != nil {
		t.Fatal(err)
	}

	// The first processes are killed on the way, each a little later.
	cfg := tiered.Config{Redis: redistest.Dial(t, cluster.URL()), Postgres: url, PersistInterval: 50 * time.Millisecond}
	for d := time.Millisecond; d < 200*time.Millisecond; d *= 2 {
		killed, err := tiered.Open(t.Context(), tiered.Config{Redis: cfg.Redis, Postgres: cfg.Postgres, Log: zerolog.Nop()})
		if err != nil {
			t.Fatal(err)
		}
		time.Sleep(d)
		_ = killed.Close()
	}
	other := open(t, cfg)
	var log servertest.Log
	cfg.Log = zerolog.New(&log)
	s, err := tiered.Open(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	closes(t, s)
	testkit.Eventually(t, "counters are served", func() bool {
		_, err := s.Read(t.Context(), []string{"views:1"}, "", 0)
		return err == nil
	})
	got := everything(t, s)
	for key, c := range want {
		if !reflect.DeepEqual(got[key], c) {
			t.Errorf("%q is\n%+v, was\n%+v", key, got[key], c)
		}
	}
	if strings.Contains(log.String(), "no memory") {
		t.Errorf("nothing was lost, and the log says %s", log.String())
	}
	if len(got) != len(want) {
		t.Errorf("%d counters, there were %d", len(got), len(want))
	}
	carried := pgtest.Query[map[string]int64](t, url, `select jsonb_object_agg(replace(id::text, '-', ''), until) from headcount_identities`)
	if len(carried) != len(idempotencyKeys) {
		t.Errorf("%d idempotency keys, there were %d", len(carried), len(idempotencyKeys))
	}
	for id, until := range idempotencyKeys {
		if off := time.UnixMilli(carried[id]).Sub(until).Abs(); off > time.Minute { // Redis says only how long is left, of a day
			t.Fatalf("an idempotency key is remembered %s longer or shorter", off)
		}
	}

	apply(t, s, op("", add(views, "views:7", 1)))
	apply(t, other, op("", add(stock, "stock:2", 1)))
	if v, k := value(t, other, "views:7"), value(t, s, "stock:2"); v != 9 || k != 4 {
		t.Errorf("they go on with %d and %d", v, k)
	}
	// Members whose names nobody has told are known when they are named.
	edit := func(c counter.Change) int64 {
		t.Helper()
		c.Key, c.Rule, c.Verb = "likes:0", likes, counter.Edit
		apply(t, s, counter.Op{Changes: []counter.Change{c}})
		return value(t, s, "likes:0")
	}
	mine := func(member string) bool {
		t.Helper()
		r, err := s.Read(t.Context(), []string{"likes:0"}, member, 0)
		if err != nil {
			t.Fatal(err)
		}
		return r[0].Mine
	}
	if n := edit(counter.Change{Join: []string{"é/ü"}}); n != 2 || !mine("é/ü") || mine("a") {
		t.Errorf("one who is a member joins: %d members", n)
	}
	if n := edit(counter.Change{Leave: []string{"é/ü"}}); n != 1 || mine("é/ü") {
		t.Errorf("a member leaves: %d members", n)
	}
	if n := edit(counter.Change{Join: []string{"é/ü"}}); n != 2 {
		t.Errorf("it comes back: %d members", n)
	}
	if n := edit(counter.Change{Leave: []string{"user 0"}}); n != 1 {
		t.Errorf("another leaves: %d members", n)
	}
	everything(t, s) // PostgreSQL has it now
	cluster.Flush(t)
	testkit.Eventually(t, "an emptied Redis heals", func() bool {
		r, err := s.Read(t.Context(), []string{"likes:0"}, "é/ü", 0)
		return err == nil && r[0].Value == 1 && r[0].Mine && !r[0].Stale
	})
	everything(t, s) // the masters were emptied one after the other, and each may have begun a generation
	if n := edit(counter.Change{Join: []string{"user 0", "b"}}); n != 3 {
		t.Errorf("after all was loaded again there are %d members", n)
	}
}

// Nothing is carried over, and nothing removed, while processes without PostgreSQL may run,
// or when PostgreSQL has another counter of the same key.
func TestServerAdoptionIsRefused(t *testing.T) {
	for name, tc := range map[string]struct {
		prepare func(t *testing.T, redis *redistest.Server, postgres string)
		says    string
	}{
		"processes without PostgreSQL run": {func(t *testing.T, redis *redistest.Server, _ string) {
			redis.Do(t, "HSET", "hc:{c}:facts", "counters", counterredis.Format, "postgres", "none")
		}, "without --postgres"},
		"another counter of the same key": {func(t *testing.T, _ *redistest.Server, postgres string) {
			redis := redistest.Start(t)
			s := open(t, tiered.Config{Redis: redistest.Dial(t, redis.URL()), Postgres: postgres, PersistInterval: 50 * time.Millisecond})
			apply(t, s, op("", add(views, "v:1", 3)))
			testkit.Eventually(t, "it is persisted", func() bool { return row(t, postgres, "v:1") == 3 })
		}, "each have a counter"},
	} {
		t.Run(name, func(t *testing.T) {
			redis, postgres := redistest.Single(t), pgtest.Single(t).Database(t)
			tc.prepare(t, redis, postgres)
			before := alone(t, redis.URL())
			apply(t, before, op("", add(views, "v:1", 5)))
			if err := before.Close(); err != nil {
				t.Fatal(err)
			}
			var log servertest.Log
			s, err := tiered.Open(t.Context(), tiered.Config{Redis: redistest.Dial(t, redis.URL()), Postgres: postgres, Log: zerolog.New(&log)})
			if err != nil {
				t.Fatal(err)
			}
			closes(t, s)
			testkit.Eventually(t, "the log says why", func() bool { return strings.Contains(log.String(), tc.says) })
			if r := s.Apply(t.Context(), []counter.Op{op("", add(views, "v:1", 1))})[0]; r.Err == nil {
				t.Errorf("a change is answered with %+v", r)
			}
			after := alone(t, redis.URL())
			closes(t, after)
			if v := value(t, after, "v:1"); v != 5 {
				t.Errorf("it is %d in Redis, was 5", v)
			}
		})
	}
}
