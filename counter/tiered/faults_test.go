package tiered_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/prometheus/client_golang/prometheus"

	"headcount/counter"
	"headcount/counter/counterredis"
	"headcount/counter/countertest"
	"headcount/counter/tiered"
	"headcount/internal/pgtest"
	"headcount/internal/redistest"
	"headcount/internal/testkit"
)

var (
	kept     = []counter.Bucket{{Step: time.Second, Kept: time.Hour}, {Step: time.Hour, Kept: 24 * time.Hour}}
	views    = &counter.Rule{Match: "v:*", Kind: counter.Sum, Buckets: kept, Dimensions: []string{"shop"}}
	likes    = &counter.Rule{Match: "l:*", Kind: counter.Members}
	visitors = &counter.Rule{Match: "u:*", Kind: counter.Unique, Buckets: kept}
	stock    = &counter.Rule{Match: "k:*", Kind: counter.Exact, Ledger: counter.DefaultLedger}
)

func add(rule *counter.Rule, key string, delta int64) counter.Change {
	return counter.Change{Key: key, Rule: rule, Verb: counter.Add, Delta: delta}
}

// view is an increment under a dimension.
func view(key, shop string) counter.Change {
	c := add(views, key, 1)
	c.Dimensions = []counter.Dimension{{Name: "shop", Value: shop}}
	return c
}

func edit(rule *counter.Rule, key string, join, leave []string) counter.Change {
	return counter.Change{Key: key, Rule: rule, Verb: counter.Edit, Join: join, Leave: leave}
}

// ends is a reset, an adjustment by -3 or a DELETE.
func ends(rule *counter.Rule, key string, verb counter.Verb) counter.Change {
	c := counter.Change{Key: key, Rule: rule, Verb: verb}
	if verb != counter.Delete {
		c.Reason, c.By = "r", "b"
	}
	if verb == counter.Adjust {
		c.Delta = -3
	}
	return c
}

func op(id string, changes ...counter.Change) counter.Op {
	o := counter.Op{Changes: changes}
	if id != "" {
		o.IdempotencyKey = counter.NewIdempotencyKey("*", "", id)
	}
	return o
}

func apply(t testing.TB, s counter.Writer, o counter.Op) counter.Result {
	t.Helper()
	r := s.Apply(t.Context(), []counter.Op{o})[0]
	if r.Err != nil {
		t.Fatal(r.Err)
	}
	return r
}

func value(t testing.TB, s counter.Reader, key string) int64 {
	t.Helper()
	got, err := s.Read(t.Context(), []string{key}, "", 0)
	if err != nil {
		t.Fatal(err)
	}
	return got[0].Value
}

// row is the value of key in PostgreSQL, -1 if there is none.
func row(t testing.TB, url, key string) int64 {
	t.Helper()
	return pgtest.Query[int64](t, url, "select coalesce((select value from headcount_counters where key = $1), -1)", key)
}

// TestClockPostgresAway: sums that Redis has go on, others and exact counters do not, and the lag grows.
func TestClockPostgresAway(t *testing.T) {
	redis, pg := redistest.Start(t), pgtest.Single(t)
	registry := prometheus.NewRegistry()
	cfg := tiered.Config{Rules: countertest.Rules, Redis: redistest.Dial(t, redis.URL()), Postgres: pg.Database(t), PersistInterval: 50 * time.Millisecond, Registerer: registry}
	s := open(t, cfg)
	apply(t, s, op("", add(views, "v:hot", 1)))
	apply(t, s, op("", add(stock, "k:1", 1)))
	testkit.Eventually(t, "it is persisted", func() bool { return row(t, cfg.Postgres, "v:hot") == 1 })
	pg.Kill()
	for n := range int64(20) {
		if r := apply(t, s, op(fmt.Sprint(n), add(views, "v:hot", 1))); r.Counters[0].Value != n+2 {
			t.Fatalf("%+v", r)
		}
	}
	for _, o := range []counter.Op{op("", add(stock, "k:1", 1)), op("", add(stock, "k:new", 1)), op("", add(views, "v:new", 1))} {
		if r := s.Apply(t.Context(), []counter.Op{o})[0]; !errors.Is(r.Err, counter.ErrUnavailable) {
			t.Errorf("%+v: %+v", o, r)
		}
	}
	keys := []string{"k:1", "v:hot", "v:new"}
	if got, err := s.Read(t.Context(), keys, "", time.Second); err != nil || !got[0].Away || got[1].Value != 21 || got[1].Stale || got[1].Away || !got[2].Away || !got[2].Stale {
		t.Errorf("%+v, %v: what Redis has is read, and of all else is said that PostgreSQL is away", got, err)
	}
	if _, err := s.Read(t.Context(), keys, "", 0); !errors.Is(err, counter.ErrUnavailable) {
		t.Errorf("an exact read of all: %v", err)
	}
	if r := s.Apply(t.Context(), []counter.Op{op("", add(stock, "k:1", 1)), op("", add(views, "v:new", 1)), op("", add(views, "v:hot", 1))}); r[2].Err != nil || r[2].Counters[0].Value != 22 {
		t.Errorf("a counter in Redis does not wait for one that is not: %+v", r)
	}
	lag := func() float64 {
		families, err := registry.Gather()
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range families {
			if f.GetName() == "headcount_persist_lag_seconds" {
				return f.GetMetric()[0].GetGauge().GetValue()
			}
		}
		return -1
	}
	testkit.Eventually(t, "the lag grows", func() bool { return lag() > 0.5 })
	pg.Restart(t)
	testkit.Eventually(t, "it is persisted", func() bool { return row(t, cfg.Postgres, "v:hot") == 22 })
	apply(t, s, op("", add(views, "v:new", 1)))
	testkit.Eventually(t, "the lag is gone", func() bool { return lag() < 0.1 })
	testkit.Eventually(t, "exact counters are back", func() bool { return s.Apply(t.Context(), []counter.Op{op("e", add(stock, "k:1", 1))})[0].Err == nil })
	if got := value(t, s, "k:1"); got != 2 {
		t.Errorf("k:1 is %d", got)
	}
}

// TestServerALateAcknowledgementOfAnotherGeneration ends no checkpoint of this one, although they are numbered anew in each generation: what was set
// aside would never be persisted.
func TestServerALateAcknowledgementOfAnotherGeneration(t *testing.T) {
	s := open(t, tiered.Config{Rules: countertest.Rules, Redis: redistest.Dial(t, redistest.Start(t).URL()), Postgres: pgtest.Single(t).Database(t), PersistInterval: time.Hour})
	redis := s.Redis()
	apply(t, s, op("", add(views, "v:1", 7)))
	buckets, err := redis.Status(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	generation, number := buckets[0].Generation, buckets[0].Checkpoint
	draining := func() (n int) {
		all, err := redis.Status(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		for _, b := range all {
			if b.Draining == number {
				n++
			}
		}
		return n
	}
	if err := redis.Checkpoint(t.Context(), generation, number); err != nil || draining() != counterredis.Buckets {
		t.Fatalf("%d buckets have a checkpoint, %v", draining(), err)
	}
	if err := redis.Acknowledge(t.Context(), generation-1, number); err != nil || draining() != counterredis.Buckets {
		t.Errorf("%d buckets wait for their checkpoint to be persisted, want %d (%v)", draining(), counterredis.Buckets, err)
	}
	if err := redis.Acknowledge(t.Context(), generation, number); err != nil || draining() != 0 {
		t.Errorf("%d buckets wait for a checkpoint that is persisted, %v", draining(), err)
	}
}

// TestClockPendingBound: the number of changes that wait for PostgreSQL is bounded in each
// bucket. At the bound, changes of that bucket fail and others go on. Everything that
// was acknowledged is persisted later.
func TestClockPendingBound(t *testing.T) {
	const bound = 1 << 18
	redis, pg := redistest.Start(t), pgtest.Single(t)
	cfg := tiered.Config{Rules: countertest.Rules, Redis: redistest.Dial(t, redis.URL()), Postgres: pg.Database(t), PersistInterval: 50 * time.Millisecond}
	s := open(t, cfg)
	n := 0
	join := func() counter.Result {
		c := counter.Change{Key: "l:1", Rule: likes, Verb: counter.Edit}
		for range counter.MaxMembers {
			c.Join = append(c.Join, fmt.Sprint(n))
			n++
		}
		return s.Apply(t.Context(), []counter.Op{op("", c)})[0]
	}
	if r := join(); r.Err != nil {
		t.Fatal(r.Err)
	}
	apply(t, s, op("", add(views, "v:1", 1)))
	testkit.Eventually(t, "it is persisted", func() bool { return row(t, cfg.Postgres, "l:1") == int64(n) && row(t, cfg.Postgres, "v:1") == 1 })
	pg.Kill()
	// Nearly all of them are only said to wait.
	const said = bound - 6*counter.MaxMembers
	redis.Do(t, "HINCRBY", fmt.Sprintf("hc:{n%d}:s", counterredis.BucketOf("l:1")), "pending", said)
	persisted, made := n, int64(0)
	for r := join(); r.Err == nil; r = join() {
		if made = r.Counters[0].Value; n > persisted+bound-said+2*counter.MaxMembers {
			t.Fatalf("%d wait, and the bound is %d", n-persisted+said, bound)
		}
	}
	if waits := made - int64(persisted) + said; waits < bound-2*counter.MaxMembers {
		t.Fatalf("changes fail when %d wait", waits)
	}
	if r := join(); !errors.Is(r.Err, counter.ErrUnavailable) {
		t.Errorf("at the bound: %+v", r)
	}
	if r := apply(t, s, op("", add(views, "v:1", 1))); r.Counters[0].Value != 2 {
		t.Errorf("another bucket: %+v", r)
	}
	pg.Restart(t)
	testkit.Eventually(t, "it is persisted", func() bool { return row(t, cfg.Postgres, "l:1") == made && row(t, cfg.Postgres, "v:1") == 2 })
	if r := join(); r.Err != nil || r.Counters[0].Value != made+counter.MaxMembers {
		t.Errorf("after the bound: %+v", r)
	}
}

// TestClockPersistedWhileRedisIsFull: a Redis that takes no more writes still gives what it has, and so becomes emptier.
func TestClockPersistedWhileRedisIsFull(t *testing.T) {
	redis, pg := redistest.Start(t), pgtest.Single(t)
	cfg := tiered.Config{Rules: countertest.Rules, Redis: redistest.Dial(t, redis.URL()), Postgres: pg.Database(t), PersistInterval: 50 * time.Millisecond}
	s := open(t, cfg)
	for _, c := range []counter.Change{add(views, "v:1", 4), edit(likes, "l:1", []string{"b"}, nil), edit(visitors, "u:1", []string{"b"}, nil)} {
		apply(t, s, op("", c)) // they are in Redis while PostgreSQL is away
	}
	testkit.Eventually(t, "it is persisted", func() bool { return row(t, cfg.Postgres, "v:1") == 4 })
	pg.Kill()
	for _, c := range []counter.Change{add(views, "v:1", 1), edit(likes, "l:1", []string{"a"}, nil), edit(visitors, "u:1", []string{"a"}, nil)} {
		apply(t, s, op("", c))
	}
	redis.Do(t, "CONFIG", "SET", "maxmemory", 1)
	pg.Restart(t)
	testkit.Eventually(t, "all is persisted", func() bool {
		return row(t, cfg.Postgres, "v:1") == 5 && row(t, cfg.Postgres, "l:1") == 2 && row(t, cfg.Postgres, "u:1") == 2
	})
	redis.Do(t, "CONFIG", "SET", "maxmemory", 0)
	testkit.Eventually(t, "changes are made again", func() bool { return s.Apply(t.Context(), []counter.Op{op("x", add(views, "v:1", 1))})[0].Err == nil })
}

// TestClockRedisAway: reads that may lag answer what PostgreSQL has.
func TestClockRedisAway(t *testing.T) {
	redis, pg := redistest.Start(t), pgtest.Single(t)
	cfg := tiered.Config{Rules: countertest.Rules, Redis: redistest.Dial(t, redis.URL()), Postgres: pg.Database(t), PersistInterval: 20 * time.Millisecond}
	s := open(t, cfg)
	apply(t, s, op("", add(views, "v:1", 4), add(views, "v:2", 7)))
	apply(t, s, op("", add(stock, "k:1", 5)))
	testkit.Eventually(t, "it is persisted", func() bool { return row(t, cfg.Postgres, "v:2") == 7 })
	redis.Kill()
	if r := s.Apply(t.Context(), []counter.Op{op("", add(views, "v:1", 1))})[0]; !errors.Is(r.Err, counter.ErrUnavailable) {
		t.Errorf("%+v", r)
	}
	if _, err := s.Read(t.Context(), []string{"v:1"}, "", 0); !errors.Is(err, counter.ErrUnavailable) {
		t.Error(err)
	}
	if got, err := s.Read(t.Context(), []string{"v:1", "k:1"}, "", time.Second); err != nil ||
		got[0].Value != 4 || !got[0].Stale || got[0].Away || got[1].Value != 5 || got[1].Stale {
		t.Errorf("%+v, %v", got, err)
	}
	began := time.Now()
	_, err := s.Aggregate(t.Context(), "v:")
	if took := time.Since(began); !errors.Is(err, counter.ErrUnavailable) || took > 30*time.Second {
		t.Errorf("%v after %s", err, took)
	}
	redis.Restart(t)
	testkit.Eventually(t, "it is back", func() bool { return s.Apply(t.Context(), []counter.Op{op("x", add(views, "v:1", 1))})[0].Err == nil })
	if got := value(t, s, "v:1"); got != 5 {
		t.Errorf("%d", got)
	}
	// An export has the versions that clients have seen, also of counters that did not change after the loss.
	if err := s.Dump(t.Context(), "", func(c counter.Copy) error {
		got, err := s.Read(t.Context(), []string{c.Key}, "", 0)
		if err == nil && got[0].Version != c.Version {
			t.Errorf("%s has version %v, and %v in an export", c.Key, got[0].Version, c.Version)
		}
		return err
	}); err != nil {
		t.Error(err)
	}
}

// moves are the operations of id: one on two sums, and one on two exact counters.
func moves(id string) []counter.Op {
	return []counter.Op{op(id+"h", add(views, "v:1", 1), add(views, "v:2", 1)), op(id+"e", add(stock, "k:1", 1), add(stock, "k:2", 1))}
}

// whole checks that every operation was made in all of its parts or not at all, and
// returns how many were made.
func whole(t testing.TB, s counter.Reader) (sums, exact int64) {
	t.Helper()
	got, err := s.Read(t.Context(), []string{"v:1", "v:2", "k:1", "k:2"}, "", 0)
	if err != nil {
		t.Fatal(err)
	}
	if got[0].Value != got[1].Value || got[2].Value != got[3].Value {
		t.Fatalf("operations are torn apart: %+v", got)
	}
	return got[0].Value, got[2].Value
}

// TestClockRedisEmptiedWhileChangesGoOn: every operation is whole, nothing that was persisted
// is lost, nothing counts twice, and every operation that an idempotency key remembers was
// made.
func TestClockRedisEmptiedWhileChangesGoOn(t *testing.T) {
	redis, pg := redistest.Start(t), pgtest.Single(t)
	cfg := tiered.Config{Rules: countertest.Rules, Redis: redistest.Dial(t, redis.URL()), Postgres: pg.Database(t), PersistInterval: 50 * time.Millisecond}
	stores := []*tiered.Store{open(t, cfg), open(t, cfg)}
	made := int64(0)
	const rounds = 2
	for round := range rounds {
		ctx, stop := context.WithCancel(t.Context())
		var ids sync.Map
		var done atomic.Int64
		var wg sync.WaitGroup
		for c := range 6 {
			wg.Go(func() {
				for n := 0; ctx.Err() == nil; n++ {
					id := fmt.Sprintf("%d/%d/%d", round, c, n)
					ids.Store(id, true)
					for _, o := range moves(id) {
						for stores[c%2].Apply(t.Context(), []counter.Op{o})[0].Err != nil {
							time.Sleep(2 * time.Millisecond)
						}
					}
					done.Add(1)
				}
			})
		}
		more := func() {
			before := done.Load()
			testkit.Eventually(t, "changes are made", func() bool { return done.Load() >= before+30 })
		}
		more()
		if round%2 == 1 {
			pg.Kill()
			time.Sleep(time.Duration(rand.IntN(50)) * time.Millisecond)
			pg.Restart(t)
			more()
		}
		floor := row(t, cfg.Postgres, "v:1")
		redis.Kill()
		redis.Restart(t)
		more()
		stop()
		wg.Wait()
		if sums, _ := whole(t, stores[0]); sums < floor {
			t.Fatalf("round %d: %d, and %d were persisted", round, sums, floor)
		}
		// All operations are repeated: what was lost is made, and what was not lost is a
		// replay.
		ids.Range(func(id, _ any) bool {
			for _, o := range moves(id.(string)) {
				testkit.Eventually(t, "it is repeated", func() bool { return stores[0].Apply(t.Context(), []counter.Op{o})[0].Err == nil })
			}
			made++
			return true
		})
		if sums, exact := whole(t, stores[1]); sums != made || exact != made {
			t.Fatalf("round %d: %d and %d were made, want %d", round, sums, exact, made)
		}
		// The next round must not lose anything of this one.
		testkit.Eventually(t, "all is persisted", func() bool { return row(t, cfg.Postgres, "v:1") == made })
	}
	t.Logf("%d operations", 2*made)
}

// TestClockDimensionsWhilePostgresIsAway: they are counted, and told apart, and come to PostgreSQL later.
func TestClockDimensionsWhilePostgresIsAway(t *testing.T) {
	redis, pg := redistest.Start(t), pgtest.Single(t)
	cfg := tiered.Config{Rules: countertest.Rules, Redis: redistest.Dial(t, redis.URL()), Postgres: pg.Database(t), PersistInterval: 20 * time.Millisecond}
	s := open(t, cfg)
	apply(t, s, op("", view("v:1", "kept")))
	testkit.Eventually(t, "it is persisted", func() bool { return row(t, cfg.Postgres, "v:1") == 1 })
	pg.Kill()
	for from := range 3 { // more than PostgreSQL will keep
		var changes []counter.Change
		for n := range counter.MaxChanges - 1 {
			changes = append(changes, view("v:1", fmt.Sprint("shop ", from, n)))
		}
		apply(t, s, op("", append(changes, view("v:1", "kept"))...))
	}
	pg.Restart(t)
	const want = 3*counter.MaxChanges + 1
	testkit.Eventually(t, "it is persisted", func() bool { return row(t, cfg.Postgres, "v:1") == want })
	testkit.Eventually(t, "PostgreSQL answers", func() bool { _, _, err := s.Dimension(t.Context(), "v:1", "shop"); return err == nil })
	_, all, err := s.Dimension(t.Context(), "v:1", "shop")
	n := all.Other
	for _, of := range all.Values {
		n += of
	}
	if err != nil || n != want || len(all.Values) != counter.MaxValues || all.Values["kept"] != 4 {
		t.Errorf("%d under %d values, %d of the one that was kept, %v", n, len(all.Values), all.Values["kept"], err)
	}
}

// TestServerRedisEmptiedWhileItIsPersisted: a checkpoint that Redis forgets on its way takes nothing away from
// PostgreSQL. A lock holds it up in the midst of a bucket, which Redis tells of in one piece.
func TestServerRedisEmptiedWhileItIsPersisted(t *testing.T) {
	redis, pg := redistest.Start(t, "--hash-max-listpack-entries", "10000"), pgtest.Single(t)
	cfg := tiered.Config{Rules: countertest.Rules, Redis: redistest.Dial(t, redis.URL()), Postgres: pg.Database(t), PersistInterval: 20 * time.Millisecond}
	s := open(t, cfg)
	const counters = 1200
	var ops []counter.Op
	for n := 0; len(ops) < counters; n++ {
		if key := fmt.Sprint("v:", n); counterredis.BucketOf(key) == 0 {
			ops = append(ops, op("", add(views, key, 1)))
		}
	}
	made := func() { // once or more often: so many at once may take a busy machine longer than Redis is waited for
		testkit.Eventually(t, "all are made", func() bool {
			return !slices.ContainsFunc(s.Apply(t.Context(), ops), func(r counter.Result) bool {
				if r.Err != nil && !errors.Is(r.Err, counter.ErrUnavailable) {
					t.Fatal(r.Err)
				}
				return r.Err != nil
			})
		})
	}
	count := func() int64 {
		return pgtest.Query[int64](t, cfg.Postgres, "select count(*) from headcount_counters")
	}
	made()
	testkit.Eventually(t, "all are persisted", func() bool { return count() == counters })
	c, err := pgx.Connect(t.Context(), cfg.Postgres)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close(t.Context())
	if _, err := c.Exec(t.Context(), "begin; lock table headcount_counters in share mode"); err != nil {
		t.Fatal(err)
	}
	made()
	testkit.Eventually(t, "a checkpoint waits", func() bool {
		return pgtest.Query[bool](t, cfg.Postgres, "select exists (select from pg_locks where not granted)")
	})
	redis.Flush(t)
	if _, err := c.Exec(t.Context(), "rollback"); err != nil {
		t.Fatal(err)
	}
	for _, key := range []string{ops[0].Changes[0].Key, ops[counters-1].Changes[0].Key} {
		testkit.Eventually(t, "it answers", func() bool {
			got, err := s.Read(t.Context(), []string{key}, "", 0)
			return err == nil && got[0].Value >= 1
		})
	}
	if n := count(); n != counters {
		t.Errorf("%d counters are persisted, want %d", n, counters)
	}
}

// TestServerAGenerationThatPostgresDoesNotHave: PostgreSQL may fail, or the process die, after a generation has begun in
// Redis and before PostgreSQL has its number. The next generation empties Redis then, so no change may be
// acknowledged before.
func TestServerAGenerationThatPostgresDoesNotHave(t *testing.T) {
	redis, pg := redistest.Start(t), pgtest.Single(t)
	cfg := tiered.Config{Rules: countertest.Rules, Redis: redistest.Dial(t, redis.URL()), Postgres: pg.Database(t), PersistInterval: 20 * time.Millisecond}
	s := open(t, cfg)
	made := int64(0)
	try := func() {
		if r := s.Apply(t.Context(), []counter.Op{op("", add(views, "v:1", 1))})[0]; r.Err == nil {
			made++
		} else if !errors.Is(r.Err, counter.ErrUnavailable) {
			t.Fatal(r.Err)
		}
	}
	testkit.Eventually(t, "it is persisted", func() bool { try(); return row(t, cfg.Postgres, "v:1") > 0 })
	everything(t, s)
	pg.Exec(t, cfg.Postgres, `create function refuse() returns trigger language plpgsql as 'begin raise disk_full; end';
		create constraint trigger refuse after update on headcount_front deferrable initially deferred for each row execute function refuse()`)
	redis.Flush(t)
	testkit.Eventually(t, "a generation has begun in Redis", func() bool {
		try()
		return redis.Do(t, "HEXISTS", "hc:{n0}:s", "generation") == int64(1)
	})
	for range 20 {
		try()
	}
	pg.Exec(t, cfg.Postgres, "drop trigger refuse on headcount_front")
	for goal := made + 1; made < goal; {
		try()
	}
	everything(t, s)
	if is := row(t, cfg.Postgres, "v:1"); is != made {
		t.Errorf("PostgreSQL has %d of %d acknowledged changes", is, made)
	}
}
