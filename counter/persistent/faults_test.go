package persistent_test

import (
	"bufio"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"

	"headcount/counter"
	"headcount/counter/hyperloglog"
	"headcount/counter/persistent"
	"headcount/counter/pgtest"
	"headcount/counter/redisstore"
	"headcount/presence/redistest"
)

var (
	views    = &counter.Rule{Match: "v:*", Kind: counter.Sum}
	likes    = &counter.Rule{Match: "l:*", Kind: counter.Members}
	visitors = &counter.Rule{Match: "u:*", Kind: counter.Unique}
	stock    = &counter.Rule{Match: "k:*", Kind: counter.Exact, Ledger: counter.DefaultLedger}
)

func add(rule *counter.Rule, key string, delta int64) counter.Change {
	return counter.Change{Key: key, Rule: rule, Verb: counter.Add, Delta: delta}
}

func op(id string, changes ...counter.Change) counter.Op {
	o := counter.Op{Changes: changes}
	if id != "" {
		o.Identity = counter.IdentityOf("*", "", id)
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

// until waits until ok reports true.
func until(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(2 * time.Minute); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("never: %s", what)
		}
	}
}

// row is the value of key in PostgreSQL, -1 if there is none.
func row(t testing.TB, url, key string) int64 {
	t.Helper()
	return pgtest.Query[int64](t, url, "select coalesce((select value from headcount_counters where key = $1), -1)", key)
}

// TestAnEmptiedRedisHeals: everything that was persisted comes back under a greater
// incarnation, with members, ledger and identities.
func TestAnEmptiedRedisHeals(t *testing.T) {
	redis, pg := redistest.Start(t), pgtest.Single(t)
	cfg := persistent.Config{Redis: redis.URL(), Postgres: pg.Database(t), PersistInterval: 50 * time.Millisecond}
	s := open(t, cfg)
	apply(t, s, op("a", add(views, "v:1", 7)))
	apply(t, s, op("", counter.Change{Key: "v:1", Rule: views, Verb: counter.Adjust, Delta: 3, Reason: "r", By: "b"}))
	apply(t, s, op("", add(stock, "k:1", 5)))
	before := apply(t, s, op("b", counter.Change{Key: "l:1", Rule: likes, Verb: counter.Edit, Join: []string{"x", "y"}})).Counters[0]
	until(t, "it is persisted", func() bool { return row(t, cfg.Postgres, "l:1") == 2 && row(t, cfg.Postgres, "v:1") == 10 })
	for round := range 3 {
		if round == 1 {
			redis.Flush(t)
		} else {
			redis.Kill()
			redis.Restart(t)
		}
		until(t, "it answers", func() bool {
			_, err := s.Read(t.Context(), []string{"v:1"}, "", 0)
			return err == nil
		})
		got, err := s.Read(t.Context(), []string{"v:1", "l:1", "k:1", "v:none"}, "x", 0)
		if err != nil || got[0].Value != 10 || got[1].Value != 2 || !got[1].Mine || got[2].Value != 5 || got[3].Touched() {
			t.Fatalf("round %d: %+v, %v", round, got, err)
		}
		if got[1].Version.Incarnation <= before.Version.Incarnation {
			t.Errorf("round %d: %s after %s", round, got[1].Version, before.Version)
		}
		before = got[1].Counter
		for id, c := range map[string]counter.Change{"a": add(views, "v:1", 7), "b": {Key: "l:1", Rule: likes, Verb: counter.Edit, Join: []string{"z"}}} {
			if r := apply(t, s, op(id, c)); !r.Replay {
				t.Errorf("round %d: %+v: its identity is forgotten", round, r)
			}
		}
		if l, err := s.Ledger(t.Context(), "v:1", 0, 10); err != nil || len(l.Entries) != 1 || l.Entries[0].After != 10 {
			t.Errorf("round %d: %+v, %v", round, l, err)
		}
		if a, err := s.Aggregate(t.Context(), ""); err != nil || a != (counter.Aggregate{Counters: 3, Value: 17}) {
			t.Errorf("round %d: %+v, %v", round, a, err)
		}
	}
	if r := apply(t, s, op("", counter.Change{Key: "l:1", Rule: likes, Verb: counter.Edit, Join: []string{"x", "z"}})); r.Counters[0].Value != 3 {
		t.Errorf("%+v", r)
	}
}

// TestAMemberWhoLeavesAndComesBackBetweenTwoCuts: a cut says where a member is in the
// end, and PostgreSQL may have that already.
func TestAMemberWhoLeavesAndComesBackBetweenTwoCuts(t *testing.T) {
	redis, pg := redistest.Start(t), pgtest.Single(t)
	cfg := persistent.Config{Redis: redis.URL(), Postgres: pg.Database(t), PersistInterval: 200 * time.Millisecond}
	s := open(t, cfg)
	edit := func(join, leave []string) counter.Op {
		return op("", counter.Change{Key: "l:back", Rule: likes, Verb: counter.Edit, Join: join, Leave: leave})
	}
	apply(t, s, edit([]string{"x", "y"}, nil))
	until(t, "they are persisted", func() bool { return row(t, cfg.Postgres, "l:back") == 2 })
	// Both are in one call of the store, and so in one cut.
	for _, r := range s.Apply(t.Context(), []counter.Op{edit(nil, []string{"x"}), edit([]string{"x", "z"}, nil)}) {
		if r.Err != nil {
			t.Fatal(r.Err)
		}
	}
	until(t, "who came back is persisted", func() bool { return row(t, cfg.Postgres, "l:back") == 3 })
	redis.Flush(t)
	for member, want := range map[string]bool{"x": true, "y": true, "z": true, "none": false} {
		until(t, "it answers", func() bool {
			got, err := s.Read(t.Context(), []string{"l:back"}, member, 0)
			return err == nil && got[0].Mine == want && got[0].Value == 3
		})
	}
}

// TestColdCountersLeaveAndComeBack: reads and writes bring them back, also a large set.
func TestColdCountersLeaveAndComeBack(t *testing.T) {
	redis, pg := redistest.Start(t), pgtest.Single(t)
	cfg := persistent.Config{Redis: redis.URL(), Postgres: pg.Database(t), PersistInterval: 20 * time.Millisecond, ColdAfter: 100 * time.Millisecond}
	s := open(t, cfg)
	const members = 12_000
	for from := 0; from < members; from += counter.MaxMembers {
		c := counter.Change{Key: "l:1", Rule: likes, Verb: counter.Edit}
		for m := range counter.MaxMembers {
			c.Join = append(c.Join, fmt.Sprint("member ", from+m))
		}
		apply(t, s, op("", c))
	}
	version := apply(t, s, op("", add(views, "v:1", 7))).Counters[0].Version
	empty := func() bool {
		for _, key := range redis.Do(t, "KEYS", "*").([]any) {
			if name := key.(string); strings.HasSuffix(name, "}:c") || strings.Contains(name, "}:m:") || strings.Contains(name, "}:p") {
				return false
			}
		}
		return true
	}
	for round := range int64(3) {
		until(t, "Redis is empty", empty)
		got, err := s.Read(t.Context(), []string{"l:1", "v:1"}, "member 11999", 0)
		if err != nil || got[0].Value != members+round || !got[0].Mine || got[1].Value != 7 || got[1].Version != version {
			t.Fatalf("%+v, %v", got, err)
		}
		until(t, "Redis is empty", empty)
		if r := apply(t, s, op("", counter.Change{Key: "l:1", Rule: likes, Verb: counter.Edit, Join: []string{"member 5", fmt.Sprint("new ", round)}})); r.Counters[0].Value != members+round+1 {
			t.Fatalf("%+v", r)
		}
	}
	lagging := func() counter.Reading {
		t.Helper()
		got, err := s.Read(t.Context(), []string{"v:1"}, "", time.Hour)
		if err != nil {
			t.Fatal(err)
		}
		return got[0]
	}
	if got := lagging(); got.Value != 7 {
		t.Fatalf("%+v", got)
	}
	apply(t, s, op("", counter.Change{Key: "v:1", Rule: views, Verb: counter.Delete}))
	until(t, "it is deleted there, too", func() bool { return row(t, cfg.Postgres, "v:1") == -1 })
	until(t, "Redis is empty", empty)
	if got := lagging(); got.Touched() {
		t.Errorf("a read that may lag says what was before this process deleted it: %+v", got)
	}
	if r := apply(t, s, op("", add(views, "v:1", 1))); r.Counters[0].Value != 1 || r.Counters[0].Version.Incarnation <= version.Incarnation {
		t.Errorf("%+v after %s", r, version)
	}
}

// TestPostgresAway: sums go on, exact counters do not, and the lag grows.
func TestPostgresAway(t *testing.T) {
	redis, pg := redistest.Start(t), pgtest.Start(t)
	registry := prometheus.NewRegistry()
	cfg := persistent.Config{Redis: redis.URL(), Postgres: pg.Database(t), PersistInterval: 50 * time.Millisecond, Registerer: registry}
	s := open(t, cfg)
	apply(t, s, op("", add(views, "v:hot", 1)))
	apply(t, s, op("", add(stock, "k:1", 1)))
	until(t, "it is persisted", func() bool { return row(t, cfg.Postgres, "v:hot") == 1 })
	pg.Kill()
	for n := range int64(20) {
		if r := apply(t, s, op(fmt.Sprint(n), add(views, "v:hot", 1))); r.Counters[0].Value != n+2 {
			t.Fatalf("%+v", r)
		}
	}
	for _, o := range []counter.Op{op("", add(stock, "k:1", 1)), op("", add(stock, "k:new", 1)), op("", add(views, "v:hot", 1), add(stock, "k:1", 1)), op("", add(views, "v:new", 1), add(stock, "k:1", 1))} {
		if r := s.Apply(t.Context(), []counter.Op{o})[0]; !errors.Is(r.Err, counter.ErrUnavailable) {
			t.Errorf("%+v: %+v", o, r)
		}
	}
	if r := s.Apply(t.Context(), []counter.Op{op("", add(stock, "k:1", 1)), op("", add(views, "v:hot", 1))}); r[1].Err != nil {
		t.Errorf("a hot counter does not wait for an exact one: %+v", r)
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
	until(t, "the lag grows", func() bool { return lag() > 0.5 })
	pg.Restart(t)
	until(t, "it is persisted", func() bool { return row(t, cfg.Postgres, "v:hot") == 22 })
	until(t, "the lag is gone", func() bool { return lag() < 0.1 })
	until(t, "exact counters are back", func() bool { return s.Apply(t.Context(), []counter.Op{op("e", add(stock, "k:1", 1))})[0].Err == nil })
	if got := value(t, s, "k:1"); got != 2 {
		t.Errorf("k:1 is %d", got)
	}
}

// TestALateDoneOfAnotherGeneration ends no cut of this one, although epochs begin anew with each generation: what was set
// aside would never be persisted.
func TestALateDoneOfAnotherGeneration(t *testing.T) {
	s := open(t, persistent.Config{Redis: redistest.Start(t).URL(), Postgres: pgtest.Single(t).Database(t), PersistInterval: time.Hour})
	redis := s.Front()
	apply(t, s, op("", add(views, "v:1", 7)))
	buckets, err := redis.Status(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	generation, epoch := buckets[0].Generation, buckets[0].Epoch
	taken := func() (n int) {
		all, err := redis.Status(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		for _, b := range all {
			if b.Taken == epoch {
				n++
			}
		}
		return n
	}
	if err := redis.Cut(t.Context(), generation, epoch); err != nil || taken() != redisstore.Buckets {
		t.Fatalf("%d buckets are cut, %v", taken(), err)
	}
	if err := redis.Done(t.Context(), generation-1, epoch); err != nil || taken() != redisstore.Buckets {
		t.Errorf("%d buckets wait for their cut to be persisted, want %d (%v)", taken(), redisstore.Buckets, err)
	}
	if err := redis.Done(t.Context(), generation, epoch); err != nil || taken() != 0 {
		t.Errorf("%d buckets wait for a cut that is persisted, %v", taken(), err)
	}
}

// cold waits until Redis has no counter.
func cold(t testing.TB, servers ...*redistest.Server) {
	t.Helper()
	until(t, "Redis is empty", func() bool {
		for _, redis := range servers {
			for _, key := range redis.Do(t, "KEYS", "*").([]any) {
				if strings.HasSuffix(key.(string), "}:c") {
					return false
				}
			}
		}
		return true
	})
}

// TestColdCountersGoOn: while PostgreSQL is away, counters that Redis does not hold are changed, also by
// a process that starts meanwhile. What is known of them is told as stale. When PostgreSQL is back, each is
// what it was and what was added, once; and so it is after Redis has lost its memory.
func TestColdCountersGoOn(t *testing.T) {
	t.Parallel()
	t.Run("one server", func(t *testing.T) {
		t.Parallel()
		redis := redistest.Start(t)
		coldCountersGoOn(t, redis.URL(), []*redistest.Server{redis}, redis.Flush)
	})
	t.Run("Cluster", func(t *testing.T) {
		t.Parallel()
		cluster := redistest.StartCluster(t, 3, 0)
		coldCountersGoOn(t, cluster.URL(), cluster.Masters, cluster.Flush)
	})
}

func coldCountersGoOn(t *testing.T, url string, redis []*redistest.Server, flush func(testing.TB)) {
	pg := pgtest.Start(t)
	cfg := persistent.Config{Redis: url, Postgres: pg.Database(t), PersistInterval: 20 * time.Millisecond, ColdAfter: 100 * time.Millisecond}
	first := open(t, cfg)
	edit := func(key string, join, leave []string) counter.Op {
		return op("", counter.Change{Key: key, Rule: likes, Verb: counter.Edit, Join: join, Leave: leave})
	}
	before := map[string]counter.Counter{}
	for _, o := range []counter.Op{
		op("", add(views, "v:1", 7)), op("", add(hits, "h:1", 2)), op("", see("u:1", "a", "b")), op("", greet("a", "b")), edit("l:1", []string{"a", "b", "c"}, nil), edit("l:gone", []string{"a"}, nil),
	} {
		c := apply(t, first, o).Counters[0]
		before[c.Key] = c
	}
	cold(t, redis...)
	pg.Kill()
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	first = open(t, cfg)
	second := open(t, cfg)
	stale := map[string]counter.Counter{}
	change := func(s counter.Store, want int64, o counter.Op) {
		t.Helper()
		c := apply(t, s, o).Counters[0]
		if was := before[c.Key]; c.Value != want || !c.Stale || !c.Approx || c.Version.Compare(was.Version) < 0 {
			t.Errorf("%+v after %+v, want %d, stale", c, was, want)
		}
		before[c.Key], stale[c.Key] = c, c
	}
	change(first, 5, op("once", add(views, "v:1", 5)))
	if r := apply(t, second, op("once", add(views, "v:1", 5))); !r.Replay || r.Counters[0].Value != 5 || !r.Counters[0].Stale {
		t.Errorf("%+v", r)
	}
	change(second, 3, op("", add(views, "v:1", -2), add(views, "v:new", 3)))
	change(first, -1, op("", add(views, "v:below", -1)))
	change(first, 1, op("", add(hits, "h:1", 1)))
	began := time.Now().Unix()
	change(first, 2, edit("l:1", []string{"b", "d"}, []string{"a", "none"}))
	change(second, 2, edit("l:1", nil, []string{"a"})) // again
	change(second, 1, edit("l:1", nil, []string{"b"}))
	change(first, 2, edit("l:1", []string{"b"}, nil))
	change(first, 2, edit("l:new", []string{"x", "y"}, []string{"z"}))
	change(first, 0, edit("l:gone", nil, []string{"a"}))
	change(first, 1, op("", see("u:1", "c")))
	change(second, 2, op("", see("u:new", "a", "b")))
	change(second, 2, op("", greet("b", "c")))
	if got, err := first.Read(t.Context(), []string{"v:1", "l:1"}, "d", time.Second); err != nil || got[0].Value != 3 || !got[0].Stale || got[1].Value != 2 || !got[1].Mine {
		t.Errorf("%+v, %v", got, err)
	}
	for _, c := range []counter.Change{
		{Key: "v:1", Rule: views, Verb: counter.Adjust, Delta: 1, Reason: "r", By: "b"}, {Key: "v:1", Rule: views, Verb: counter.Reset, Reason: "r", By: "b"},
		{Key: "l:1", Rule: likes, Verb: counter.Delete}, add(stock, "v:1", 1),
	} {
		if r := first.Apply(t.Context(), []counter.Op{op("", c)})[0]; !errors.Is(r.Err, counter.ErrUnavailable) {
			t.Errorf("%+v without the row: %+v", c, r)
		}
	}
	if _, err := first.Read(t.Context(), []string{"v:1"}, "", 0); !errors.Is(err, counter.ErrUnavailable) {
		t.Errorf("an exact read: %v", err)
	}
	// The step in which the row gained is over by now, for what was added.
	until(t, "the next second", func() bool { return time.Now().Unix() > began })
	change(first, 2, op("", add(hits, "h:1", 1)))
	if r := first.Apply(t.Context(), []counter.Op{op("", add(views, "l:new", 1))})[0]; !errors.Is(r.Err, counter.ErrKind) {
		t.Errorf("a number for a set: %+v", r)
	}
	var told sync.Map
	w := second.Watch(func(updates []counter.Update) {
		for _, u := range updates {
			if !u.Counter.Stale {
				told.Store(u.Counter.Key, u.Counter.Value)
			}
		}
	}, nil)
	defer w.Close()
	if err := w.Follow(t.Context(), "v:1"); err != nil {
		t.Fatal(err)
	}

	pg.Restart(t)
	want := map[string]int64{"v:1": 10, "v:new": 3, "v:below": -1, "h:1": 4, "l:1": 3, "l:new": 2, "l:gone": 0, "u:1": 3, "u:new": 2, "g:1": 3}
	check := func(s counter.Store) {
		t.Helper()
		for key, value := range want {
			var got []counter.Reading
			until(t, "it answers exactly", func() (ok bool) {
				var err error
				got, err = s.Read(t.Context(), []string{key}, "", 0)
				return err == nil
			})
			if got[0].Value != value || got[0].Stale || got[0].Version.Compare(stale[key].Version) <= 0 {
				t.Errorf("%+v after %+v, want %d", got[0], stale[key], value)
			}
		}
		for member, in := range map[string]bool{"a": false, "b": true, "c": true, "d": true, "none": false} {
			if got, err := s.Read(t.Context(), []string{"l:1"}, member, 0); err != nil || got[0].Mine != in {
				t.Errorf("%s: %+v, %v", member, got, err)
			}
		}
		for _, step := range []time.Duration{time.Second, time.Hour} {
			if total, _ := gained(t, s, "h:1", step); total != want["h:1"] {
				t.Errorf("it gained %d in steps of %s", total, step)
			}
		}
		if n, _ := greeted(t, s, time.Hour); n != want["g:1"] {
			t.Errorf("it saw %d in the hour", n)
		}
		if a, err := s.Aggregate(t.Context(), "v:"); err != nil || a != (counter.Aggregate{Counters: 3, Value: 12}) {
			t.Errorf("%+v, %v", a, err)
		}
	}
	check(first)
	until(t, "its watchers are told the whole value", func() bool { v, _ := told.Load("v:1"); return v == int64(10) })
	until(t, "all is persisted", func() bool {
		for key, value := range want {
			if row(t, cfg.Postgres, key) != value {
				return false
			}
		}
		return true
	})
	flush(t)
	check(second)
	if r := apply(t, second, op("once", add(views, "v:1", 5))); !r.Replay || r.Counters[0].Value != 10 {
		t.Errorf("%+v", r)
	}
}

// TestKilledWithLooseCounters: processes that change cold and new counters are killed while PostgreSQL is
// away, comes and goes. Every operation that was acknowledged is made once, in all of its parts.
func TestKilledWithLooseCounters(t *testing.T) {
	t.Parallel()
	redis, pg := redistest.Start(t), pgtest.Start(t)
	cfg := persistent.Config{Redis: redis.URL(), Postgres: pg.Database(t), PersistInterval: 20 * time.Millisecond, ColdAfter: 50 * time.Millisecond}
	s := open(t, cfg)
	apply(t, s, op("", add(views, "v:1", 1))) // Redis has a generation
	made := int64(0)
	for round := range 2 {
		cold(t, redis)
		pg.Kill()
		var back sync.WaitGroup
		pending, acknowledged := run(t, cfg, 40+rand.IntN(100), "loose", func(line int) {
			if line == 20 && round%2 == 1 {
				back.Go(func() { pg.Restart(t) })
			}
		})
		back.Wait()
		if round%2 == 0 {
			pg.Restart(t)
		}
		for _, id := range append(acknowledged, pending...) {
			o := relative(id)
			var r counter.Result
			until(t, "it is repeated", func() bool { r = s.Apply(t.Context(), []counter.Op{o})[0]; return r.Err == nil })
			if !r.Replay && !slices.Contains(pending, id) {
				t.Fatalf("%s was acknowledged and is not remembered", id)
			}
		}
		made += int64(len(pending) + len(acknowledged))
		for _, prefix := range []string{"v:a", "v:b"} {
			until(t, "they add up", func() bool {
				a, err := s.Aggregate(t.Context(), prefix)
				if err == nil && a.Value != made {
					t.Fatalf("round %d: %s is %d, %d were made", round, prefix, a.Value, made)
				}
				return err == nil
			})
		}
	}
	until(t, "all is persisted", func() bool {
		return pgtest.Query[int64](t, cfg.Postgres, "select coalesce(sum(value), 0)::bigint from headcount_counters where key like 'v:a%'") == made
	})
}

// TestRefusedBatches: a batch that is refused leaves a note that a counter is in
// PostgreSQL, although it is not. The next batch, on that counter too, is refused for
// its own reason. What was only judged is not told to who reads.
func TestRefusedBatches(t *testing.T) {
	s := open(t, persistent.Config{Redis: redistest.Start(t).URL(), Postgres: pgtest.Single(t).Database(t)})
	was := apply(t, s, op("", add(stock, "k:1", 5))).Counters[0]
	apply(t, s, op("", add(views, "v:1", 7)))
	apply(t, s, op("", counter.Change{Key: "l:1", Rule: likes, Verb: counter.Edit, Join: []string{"x"}}))
	seats := &counter.Rule{Match: "k:*", Kind: counter.Exact, Floor: new(int64), Ledger: counter.DefaultLedger}
	for _, o := range []counter.Op{
		op("", add(stock, "a:1", 1), add(views, "v:1", 1), add(seats, "k:1", -9)),
		op("", add(stock, "k:1", 1), add(views, "a:1", 1), add(views, "l:1", 1)),
	} {
		if r := s.Apply(t.Context(), []counter.Op{o})[0]; !errors.As(r.Err, new(*counter.Conflict)) {
			t.Errorf("%+v: %+v", o, r)
		}
		if got, err := s.Read(t.Context(), []string{"k:1"}, "", time.Hour); err != nil || got[0].Value != was.Value || got[0].Version != was.Version {
			t.Errorf("%+v, %v after what was refused; it was %+v", got, err, was)
		}
	}
	if r := apply(t, s, op("", add(views, "a:1", 1), add(stock, "k:1", 1))); r.Counters[0].Value != 1 || r.Counters[1].Value != 6 {
		t.Errorf("%+v", r)
	}
}

// TestPendingBound: the number of changes that wait for PostgreSQL is bounded in each
// bucket. At the bound, changes of that bucket fail and others go on. Everything that
// was acknowledged is persisted later.
func TestPendingBound(t *testing.T) {
	const bound = 1 << 18
	redis, pg := redistest.Start(t), pgtest.Start(t)
	cfg := persistent.Config{Redis: redis.URL(), Postgres: pg.Database(t), PersistInterval: 50 * time.Millisecond}
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
	until(t, "it is persisted", func() bool { return row(t, cfg.Postgres, "l:1") == int64(n) && row(t, cfg.Postgres, "v:1") == 1 })
	pg.Kill()
	persisted, made := n, int64(0)
	for r := join(); r.Err == nil; r = join() {
		if made = r.Counters[0].Value; n > persisted+bound+2*counter.MaxMembers {
			t.Fatalf("%d wait, and the bound is %d", n-persisted, bound)
		}
	}
	if waits := made - int64(persisted); waits < bound-2*counter.MaxMembers {
		t.Fatalf("changes fail when %d wait", waits)
	}
	if r := join(); !errors.Is(r.Err, counter.ErrUnavailable) {
		t.Errorf("at the bound: %+v", r)
	}
	if r := apply(t, s, op("", add(views, "v:1", 1))); r.Counters[0].Value != 2 {
		t.Errorf("another bucket: %+v", r)
	}
	pg.Restart(t)
	until(t, "it is persisted", func() bool { return row(t, cfg.Postgres, "l:1") == made && row(t, cfg.Postgres, "v:1") == 2 })
	if r := join(); r.Err != nil || r.Counters[0].Value != made+counter.MaxMembers {
		t.Errorf("after the bound: %+v", r)
	}
}

// TestRedisAway: reads that may lag answer what is known.
func TestRedisAway(t *testing.T) {
	redis, pg := redistest.Start(t), pgtest.Single(t)
	cfg := persistent.Config{Redis: redis.URL(), Postgres: pg.Database(t), PersistInterval: 20 * time.Millisecond}
	s := open(t, cfg)
	apply(t, s, op("", add(views, "v:1", 4)))
	until(t, "it is persisted", func() bool { return row(t, cfg.Postgres, "v:1") == 4 })
	redis.Kill()
	if r := s.Apply(t.Context(), []counter.Op{op("", add(views, "v:1", 1))})[0]; !errors.Is(r.Err, counter.ErrUnavailable) {
		t.Errorf("%+v", r)
	}
	if _, err := s.Read(t.Context(), []string{"v:1"}, "", 0); !errors.Is(err, counter.ErrUnavailable) {
		t.Error(err)
	}
	if got, err := s.Read(t.Context(), []string{"v:1"}, "", time.Second); err != nil || got[0].Value != 4 || !got[0].Stale {
		t.Errorf("%+v, %v", got, err)
	}
	redis.Restart(t)
	until(t, "it is back", func() bool { return s.Apply(t.Context(), []counter.Op{op("x", add(views, "v:1", 1))})[0].Err == nil })
	if got := value(t, s, "v:1"); got != 5 {
		t.Errorf("%d", got)
	}
}

// moves are the operations of id: one on two hot counters, and one on a hot and an exact
// counter.
func moves(id string) []counter.Op {
	return []counter.Op{op(id+"h", add(views, "v:1", 1), add(views, "v:2", 1)), op(id+"b", add(views, "v:3", 1), add(stock, "k:3", 1))}
}

// relative is the operation of id on two of many counters.
func relative(id string) counter.Op {
	n := len(id) * int(id[len(id)-1]) % 7
	return op(id, add(views, fmt.Sprint("v:a", n), 1), add(views, fmt.Sprint("v:b", n*3%7), 1))
}

// client is a process that changes counters until it is killed. It prints what it tries
// and what was acknowledged.
func client(redis, postgres, what string) {
	s, err := persistent.Open(context.Background(), persistent.Config{Redis: redis, Postgres: postgres, PersistInterval: 20 * time.Millisecond, Log: zerolog.Nop()})
	ops := moves
	if what == "loose" {
		ops = func(id string) []counter.Op { return []counter.Op{relative(id)} }
	}
	if err != nil {
		fmt.Println("fault", err)
		return
	}
	var say sync.Mutex
	var wg sync.WaitGroup
	for worker := range 4 {
		wg.Go(func() {
			for n := 0; ; n++ {
				id := fmt.Sprintf("%d/%d/%d", os.Getpid(), worker, n)
				for _, what := range []string{"try", "ack"} {
					for what == "ack" {
						failed := func(r counter.Result) bool { return r.Err != nil }
						if !slices.ContainsFunc(s.Apply(context.Background(), ops(id)), failed) {
							break
						}
						time.Sleep(time.Millisecond)
					}
					say.Lock()
					fmt.Println(what, id)
					say.Unlock()
				}
			}
		})
	}
	wg.Wait()
}

// run starts a client that makes such operations, and kills it after so many lines. seen is called
// with the number of each.
func run(t testing.TB, cfg persistent.Config, lines int, ops string, seen func(line int)) (open, acknowledged []string) {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), "PERSISTENT_REDIS="+cfg.Redis, "PERSISTENT_POSTGRES="+cfg.Postgres, "PERSISTENT_OPS="+ops)
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	state := map[string]string{}
	text := bufio.NewScanner(out)
	for n := 0; text.Scan(); n++ {
		what, id, _ := strings.Cut(text.Text(), " ")
		if what == "fault" {
			t.Error(text.Text())
		}
		state[id] = what
		seen(n)
		if n == lines {
			if err := cmd.Process.Kill(); err != nil {
				t.Fatal(err)
			}
		}
	}
	_ = cmd.Wait() // it was killed
	for id, what := range state {
		if what == "ack" {
			acknowledged = append(acknowledged, id)
		} else {
			open = append(open, id)
		}
	}
	return open, acknowledged
}

// whole checks that every operation was made in all of its parts or not at all, and
// returns how many were made.
func whole(t testing.TB, s counter.Store) (hot, both int64) {
	t.Helper()
	got, err := s.Read(t.Context(), []string{"v:1", "v:2", "v:3", "k:3"}, "", 0)
	if err != nil {
		t.Fatal(err)
	}
	if got[0].Value != got[1].Value || got[2].Value != got[3].Value {
		t.Fatalf("operations are torn apart: %+v", got)
	}
	return got[0].Value, got[2].Value
}

// TestProcessKilledInALoop: the value is what was acknowledged, plus what landed
// unanswered. Redis keeps its memory.
func TestProcessKilledInALoop(t *testing.T) {
	redis, pg := redistest.Start(t), pgtest.Single(t)
	cfg := persistent.Config{Redis: redis.URL(), Postgres: pg.Database(t), PersistInterval: 50 * time.Millisecond}
	s := open(t, cfg)
	made := int64(0)
	for range 8 {
		pending, acknowledged := run(t, cfg, 30+rand.IntN(150), "moves", func(int) {})
		for _, id := range append(acknowledged, pending...) {
			for _, o := range moves(id) {
				var r counter.Result
				until(t, "it is repeated", func() bool { r = s.Apply(t.Context(), []counter.Op{o})[0]; return r.Err == nil })
				if !r.Replay && !strings.Contains(strings.Join(pending, " "), id) {
					t.Fatalf("%s was acknowledged and is not remembered", id)
				}
			}
		}
		made += int64(len(pending) + len(acknowledged))
		if hot, both := whole(t, s); hot != made || both != made {
			t.Fatalf("%d and %d were made, want %d", hot, both, made)
		}
	}
	until(t, "all is persisted", func() bool { return row(t, cfg.Postgres, "v:1") == made && row(t, cfg.Postgres, "v:3") == made })
}

// TestRedisEmptiedWhileChangesGoOn: every operation is whole, nothing that was persisted
// is lost, nothing counts twice, and every operation that an identity remembers was
// made.
func TestRedisEmptiedWhileChangesGoOn(t *testing.T) {
	redis, pg := redistest.Start(t), pgtest.Start(t)
	cfg := persistent.Config{Redis: redis.URL(), Postgres: pg.Database(t), PersistInterval: 50 * time.Millisecond}
	stores := []*persistent.Store{open(t, cfg), open(t, cfg)}
	made := int64(0)
	for round := range 4 {
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
			for before := done.Load(); done.Load() < before+30; {
				time.Sleep(time.Millisecond)
			}
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
		if hot, _ := whole(t, stores[0]); hot < floor {
			t.Fatalf("round %d: %d, and %d were persisted", round, hot, floor)
		}
		// All operations are repeated: what was lost is made, and what was not lost is a
		// replay.
		ids.Range(func(id, _ any) bool {
			for _, o := range moves(id.(string)) {
				until(t, "it is repeated", func() bool { return stores[0].Apply(t.Context(), []counter.Op{o})[0].Err == nil })
			}
			made++
			return true
		})
		if hot, both := whole(t, stores[1]); hot != made || both != made {
			t.Fatalf("round %d: %d and %d were made, want %d", round, hot, both, made)
		}
		// The next round must not lose anything of this one.
		until(t, "all is persisted", func() bool { return row(t, cfg.Postgres, "v:1") == made })
	}
	t.Logf("%d operations", 2*made)
}

func see(key string, members ...string) counter.Change {
	return counter.Change{Key: key, Rule: visitors, Verb: counter.Edit, Join: members}
}

// TestUniquesComeBack: registers survive a Redis that loses its memory, and leave it and come
// back when they are cold; what is in them is not new again.
func TestUniquesComeBack(t *testing.T) {
	redis, pg := redistest.Start(t), pgtest.Single(t)
	cfg := persistent.Config{Redis: redis.URL(), Postgres: pg.Database(t), PersistInterval: 20 * time.Millisecond, ColdAfter: 100 * time.Millisecond}
	s := open(t, cfg)
	var all []string
	for n := range 3000 {
		all = append(all, fmt.Sprint("visitor ", n))
	}
	var want hyperloglog.Registers
	for some := range slices.Chunk(all, counter.MaxMembers) {
		apply(t, s, op("", see("u:many", some...)))
		want.Add(some...)
	}
	apply(t, s, op("", see("u:few", "a", "b")))
	apply(t, s, op("", see("u:reset", "a", "b")))
	apply(t, s, op("", counter.Change{Key: "u:reset", Rule: visitors, Verb: counter.Reset, Reason: "r", By: "b"}))
	before := apply(t, s, op("once", see("u:few", "c"))).Counters[0]
	until(t, "it is persisted", func() bool { return row(t, cfg.Postgres, "u:few") == 3 && row(t, cfg.Postgres, "u:reset") == 0 })
	check := func(what string) {
		t.Helper()
		until(t, "it answers", func() bool {
			_, err := s.Read(t.Context(), []string{"u:few"}, "", 0)
			return err == nil
		})
		for _, c := range []counter.Change{see("u:many", all[:1000]...), see("u:few", "a", "c")} {
			was := value(t, s, c.Key)
			if got := apply(t, s, op("", c)).Counters[0]; got.Value != was || got.Kind != counter.Unique {
				t.Errorf("%s: %+v after %d", what, got, was)
			}
		}
		if many, few, reset := value(t, s, "u:many"), value(t, s, "u:few"), value(t, s, "u:reset"); many != want.Count() || few != 3 || reset != 0 {
			t.Errorf("%s: %d, want %d; %d; %d", what, many, want.Count(), few, reset)
		}
		if a, err := s.Aggregate(t.Context(), "u:"); err != nil || a.Counters != 3 || a.Value < want.Count() || a.Value > want.Count()+4 {
			t.Errorf("%s: %+v, %v", what, a, err)
		}
	}
	check("hot")
	redis.Flush(t)
	check("after a loss of memory")
	if r := apply(t, s, op("once", see("u:few", "d"))); !r.Replay || r.Counters[0].Version.Incarnation <= before.Version.Incarnation {
		t.Errorf("%+v after %+v", r, before)
	}
	until(t, "Redis is empty", func() bool {
		for _, key := range redis.Do(t, "KEYS", "*").([]any) {
			if name := key.(string); strings.HasSuffix(name, "}:c") || strings.Contains(name, "}:r:") || strings.Contains(name, "}:q:") {
				return false
			}
		}
		return true
	})
	if a, err := s.Aggregate(t.Context(), "u:"); err != nil || a.Counters != 3 || a.Value < want.Count() {
		t.Errorf("all are cold: %+v, %v", a, err)
	}
	check("after all were cold")
	apply(t, s, op("", counter.Change{Key: "u:many", Rule: visitors, Verb: counter.Delete}))
	until(t, "it is deleted there, too", func() bool { return row(t, cfg.Postgres, "u:many") == -1 })
}

// meanwhile makes one change after the other until stop, which waits for the last.
func meanwhile(t *testing.T, s counter.Writer, change func(n int) counter.Op) (stop func()) {
	ended := make(chan struct{})
	ctx, cancel := context.WithCancel(t.Context())
	go func() { // awaited by stop
		defer close(ended)
		for n := 0; ctx.Err() == nil; n++ {
			if r := s.Apply(t.Context(), []counter.Op{change(n)})[0]; r.Err != nil {
				t.Error(r.Err)
				return
			}
		}
	}()
	return func() {
		cancel()
		<-ended
	}
}

// TestRegistersAreOfTheirCut: while members are added and reset, PostgreSQL never has registers of
// another moment than the counter's value.
func TestRegistersAreOfTheirCut(t *testing.T) {
	redis, pg := redistest.Start(t), pgtest.Single(t)
	cfg := persistent.Config{Redis: redis.URL(), Postgres: pg.Database(t), PersistInterval: 5 * time.Millisecond}
	s := open(t, cfg)
	stop := meanwhile(t, s, func(n int) counter.Op {
		if n%100 == 99 {
			return op("", counter.Change{Key: "u:1", Rule: visitors, Verb: counter.Reset, Reason: "r", By: "b"})
		}
		return op("", see("u:1", fmt.Sprint("visitor ", n)))
	})
	seen := map[int64]bool{}
	until(t, "different values are persisted", func() bool {
		found := pgtest.Query[string](t, cfg.Postgres, `select coalesce((select value || ' ' || encode(coalesce(registers, ''), 'hex')
			from headcount_counters left join headcount_registers using (set_id) where key = 'u:1'), '0 ')`)
		value, text, _ := strings.Cut(found, " ")
		bytes, err := hex.DecodeString(text)
		r, err1 := hyperloglog.Parse(bytes)
		n, err2 := strconv.ParseInt(value, 10, 64)
		if err := errors.Join(err, err1, err2); err != nil || r.Count() != n {
			t.Fatalf("value %d, registers of %d, %v", n, r.Count(), err)
		}
		seen[n] = true
		return len(seen) > 10
	})
	stop()
}

var hits = &counter.Rule{Match: "h:*", Kind: counter.Sum, Buckets: []counter.Bucket{{Step: time.Second, Kept: time.Hour}, {Step: time.Hour, Kept: 24 * time.Hour}}}

// gained is what a counter gained in steps of that length, and in how many.
func gained(t testing.TB, s counter.Reader, key string, step time.Duration) (total int64, steps int) {
	t.Helper()
	until(t, "it answers", func() bool {
		_, gains, err := s.History(t.Context(), key, step, 0, 1<<32)
		total, steps = 0, len(gains)
		for _, g := range gains {
			total += g.Value
		}
		return err == nil
	})
	return total, steps
}

// TestHistoryComesBack: what was gained survives a Redis that loses its memory, and leaves it and
// comes back with its counter; a step goes on where it was.
func TestHistoryComesBack(t *testing.T) {
	redis, pg := redistest.Start(t), pgtest.Single(t)
	cfg := persistent.Config{Redis: redis.URL(), Postgres: pg.Database(t), PersistInterval: 20 * time.Millisecond, ColdAfter: 100 * time.Millisecond}
	s := open(t, cfg)
	want := int64(0)
	hit := func(steps int) {
		for _, n := gained(t, s, "h:1", time.Second); n < steps; _, n = gained(t, s, "h:1", time.Second) {
			apply(t, s, op("", add(hits, "h:1", 3), add(stock, "k:1", 1), add(hits, "h:1", 2)))
			want += 5
		}
	}
	check := func(what string) {
		t.Helper()
		for _, step := range []time.Duration{time.Second, time.Hour} {
			if total, _ := gained(t, s, "h:1", step); total != want {
				t.Errorf("%s: it gained %d in steps of %s, want %d", what, total, step, want)
			}
		}
		if n := value(t, s, "h:1"); n != want {
			t.Errorf("%s: it is %d, want %d", what, n, want)
		}
	}
	empty := func() bool {
		for _, key := range redis.Do(t, "KEYS", "*").([]any) {
			if name := key.(string); strings.HasSuffix(name, "}:c") || strings.Contains(name, "}:b") || strings.Contains(name, "}:g") {
				return false
			}
		}
		return true
	}
	hit(2)
	check("hot")
	until(t, "Redis is empty", empty)
	check("cold")
	hit(3)
	check("hot again")
	until(t, "it is persisted", func() bool { return row(t, cfg.Postgres, "h:1") == want })
	redis.Flush(t)
	check("after a loss of memory")
	hit(5)
	check("and it goes on")
	apply(t, s, op("", counter.Change{Key: "h:1", Rule: hits, Verb: counter.Delete}))
	if total, _ := gained(t, s, "h:1", time.Second); total != 0 {
		t.Errorf("%d after a delete", total)
	}
	want = 0
	until(t, "it is deleted there, too", func() bool { return row(t, cfg.Postgres, "h:1") == -1 })
	hit(1)
	check("its next life")
}

var guests = &counter.Rule{Match: "g:*", Kind: counter.Unique, Buckets: []counter.Bucket{{Step: time.Second, Kept: time.Hour}, {Step: time.Hour, Kept: 24 * time.Hour}}}

func greet(members ...string) counter.Change {
	return counter.Change{Key: "g:1", Rule: guests, Verb: counter.Edit, Join: members}
}

// greeted is how many g:1 saw in steps of that length, and in how many of these.
func greeted(t testing.TB, s counter.Reader, step time.Duration) (members int64, steps int) {
	t.Helper()
	var all hyperloglog.Union
	until(t, "it answers", func() bool {
		_, gains, err := s.History(t.Context(), "g:1", step, 0, 1<<32)
		for _, g := range gains {
			all.Merge(*g.Seen)
		}
		steps = len(gains)
		return err == nil
	})
	return all.Count(), steps
}

// TestStepsOfUniquesComeBack: whom a unique saw in steps survives a Redis that loses its memory, leaves
// it with its counter, and is whole when the parts of a step are in both.
func TestStepsOfUniquesComeBack(t *testing.T) {
	redis, pg := redistest.Start(t), pgtest.Single(t)
	cfg := persistent.Config{Redis: redis.URL(), Postgres: pg.Database(t), PersistInterval: 20 * time.Millisecond, ColdAfter: 100 * time.Millisecond}
	s := open(t, cfg)
	var want []string
	came := func(member string) {
		if apply(t, s, op("", greet(member))); !slices.Contains(want, member) {
			want = append(want, member)
		}
	}
	saw := func(what string) (steps int) {
		t.Helper()
		for _, b := range guests.Buckets {
			n, all := greeted(t, s, b.Step)
			if n != int64(len(want)) {
				t.Fatalf("%s: %d in steps of %s, want %d", what, n, b.Step, len(want))
			}
			steps = max(steps, all)
		}
		return steps
	}
	empty := func() bool {
		for _, key := range redis.Do(t, "KEYS", "*").([]any) {
			if name := key.(string); strings.HasSuffix(name, "}:c") || strings.Contains(name, "}:v") || strings.Contains(name, "}:b") {
				return false
			}
		}
		return true
	}
	came("a")
	for saw("hot") < 2 {
		came("a")
	}
	came("b")
	until(t, "Redis is empty", empty)
	saw("cold")
	came("a") // who is in the counter is not new to it, perhaps to the step
	came("c")
	steps := saw("hot again")
	until(t, "c is persisted, and so is the step", func() bool { return row(t, cfg.Postgres, "g:1") == 3 })
	redis.Flush(t)
	saw("after a loss of memory")
	for saw("and it goes on") < steps+2 {
		came("d")
	}
	apply(t, s, op("", counter.Change{Key: "g:1", Rule: guests, Verb: counter.Delete}))
	want = nil
	saw("after a delete")
	came("e")
	saw("its next life")
	until(t, "the life before is gone there, too", func() bool {
		return pgtest.Query[int](t, cfg.Postgres, "select count(*) from headcount_gains g join headcount_counters c on c.history_id = g.history_id where key = 'g:1' and step = 3600") == 1
	})
	until(t, "Redis is empty", empty)
	saw("cold again")
	// What comes after a delete in one call of the store is of the next life.
	for _, r := range s.Apply(t.Context(), []counter.Op{op("", counter.Change{Key: "g:1", Rule: guests, Verb: counter.Delete}), op("", greet("f", "g"))}) {
		if r.Err != nil {
			t.Fatal(r.Err)
		}
	}
	want = []string{"f", "g"}
	until(t, "Redis is empty", empty)
	saw("after a delete and an add together")
}

// TestHistoryIsOfItsCut: in PostgreSQL the gains of all steps add up to the value at any moment.
func TestHistoryIsOfItsCut(t *testing.T) {
	redis, pg := redistest.Start(t), pgtest.Single(t)
	cfg := persistent.Config{Redis: redis.URL(), Postgres: pg.Database(t), PersistInterval: 5 * time.Millisecond}
	s := open(t, cfg)
	stop := meanwhile(t, s, func(n int) counter.Op {
		if n%500 == 499 {
			return op("", counter.Change{Key: "h:1", Rule: hits, Verb: counter.Delete})
		}
		return op("", add(hits, "h:1", 1))
	})
	seen := map[int64]bool{}
	began := time.Now()
	until(t, "different values are persisted", func() bool {
		found := pgtest.Query[string](t, cfg.Postgres, `select coalesce((select concat_ws(' ', value,
			coalesce((select sum(gain) from headcount_gains g where g.history_id = c.history_id and step = 1), 0), ltrim(slots))
			from headcount_counters c where key = 'h:1'), '0 0')`)
		f := strings.SplitN(found, " ", 3)
		value, err := strconv.ParseInt(f[0], 10, 64)
		sum, err1 := strconv.ParseInt(f[1], 10, 64)
		if len(f) == 3 {
			slots, err := counter.ParseSlots(f[2])
			if err != nil {
				t.Fatal(err)
			}
			for _, slot := range slots {
				if slot.Step == 1 {
					sum += slot.Value
				}
			}
		}
		if err := errors.Join(err, err1); err != nil || sum != value {
			t.Fatalf("%q: %d were gained, %v", found, sum, err)
		}
		seen[value] = true
		return len(seen) > 10 && time.Since(began) > 2*time.Second // some seconds are over
	})
	stop()
}

var sales = &counter.Rule{Match: "s:*", Kind: counter.Sum, Dimensions: []string{"shop"}}

func sale(key, shop string) counter.Change {
	c := add(sales, key, 1)
	c.Dimensions = []counter.Dimension{{Name: "shop", Value: shop}}
	return c
}

// sold is what was counted under the dimension shop, in all shops.
func sold(t testing.TB, s counter.Reader, key string) (total int64) {
	t.Helper()
	until(t, "it answers", func() bool {
		_, all, err := s.Dimension(t.Context(), key, "shop")
		total = all.Other
		for _, n := range all.Values {
			total += n
		}
		return err == nil
	})
	return total
}

// TestDimensionsAreOfTheirCut: at any moment what was counted under a dimension adds up to the value, in
// PostgreSQL and for who reads while cuts are on their way, also of operations that have a part in both.
func TestDimensionsAreOfTheirCut(t *testing.T) {
	redis, pg := redistest.Start(t), pgtest.Single(t)
	cfg := persistent.Config{Redis: redis.URL(), Postgres: pg.Database(t), PersistInterval: 5 * time.Millisecond}
	s := open(t, cfg)
	stop := meanwhile(t, s, func(n int) counter.Op {
		shop := fmt.Sprint("shop ", n%3)
		switch {
		case n%200 == 199:
			return op("", counter.Change{Key: "s:1", Rule: sales, Verb: counter.Delete})
		case n%10 == 5:
			return op("", sale("s:1", shop), add(stock, "k:1", 1), sale("s:2", shop))
		default:
			return op("", sale("s:1", shop), sale("s:2", shop))
		}
	})
	seen := map[int64]bool{}
	began := time.Now()
	until(t, "different values are persisted", func() bool {
		before := value(t, s, "s:2")
		n := sold(t, s, "s:2")
		// PostgreSQL has the shops of an operation on both before Redis makes its part.
		if after := value(t, s, "s:2"); n < before || n > after+1 {
			t.Fatalf("%d are counted under shops, of a value from %d to %d", n, before, after)
		}
		for _, key := range []string{"s:1", "s:2"} {
			found := pgtest.Query[string](t, cfg.Postgres, `select concat_ws(' ', coalesce(max(c.value), 0), coalesce(sum(d.count), 0)) from headcount_counters c
				left join headcount_dimensions d on d.history_id = c.history_id and c.history_id <> 0 where key = $1`, key)
			if value, sum, _ := strings.Cut(found, " "); value != sum {
				t.Fatalf("%q is %s in PostgreSQL, %s are counted under shops", key, value, sum)
			}
		}
		seen[n] = true
		return len(seen) > 20 && time.Since(began) > time.Second
	})
	stop()
	want := value(t, s, "s:2")
	until(t, "all is persisted", func() bool { return row(t, cfg.Postgres, "s:2") == want })
	redis.Flush(t)
	if n := sold(t, s, "s:2"); n != want {
		t.Errorf("%d are counted after a loss of memory, want %d", n, want)
	}
	apply(t, s, op("", sale("s:2", "shop 1"), add(stock, "k:1", 1)))
	if n := sold(t, s, "s:2"); n != want+1 {
		t.Errorf("%d are counted after one more, want %d", n, want+1)
	}
}

// TestDimensionsWhilePostgresIsAway: they are counted, and told apart, and come to PostgreSQL later.
func TestDimensionsWhilePostgresIsAway(t *testing.T) {
	redis, pg := redistest.Start(t), pgtest.Start(t)
	cfg := persistent.Config{Redis: redis.URL(), Postgres: pg.Database(t), PersistInterval: 20 * time.Millisecond}
	s := open(t, cfg)
	apply(t, s, op("", sale("s:1", "kept")))
	until(t, "it is persisted", func() bool { return row(t, cfg.Postgres, "s:1") == 1 })
	pg.Kill()
	for from := range 3 { // more than PostgreSQL will keep
		var changes []counter.Change
		for n := range counter.MaxChanges - 1 {
			changes = append(changes, sale("s:1", fmt.Sprint("shop ", from, n)))
		}
		apply(t, s, op("", append(changes, sale("s:1", "kept"))...))
	}
	pg.Restart(t)
	const want = 3*counter.MaxChanges + 1
	until(t, "it is persisted", func() bool { return row(t, cfg.Postgres, "s:1") == want })
	until(t, "PostgreSQL answers", func() bool { _, _, err := s.Dimension(t.Context(), "s:1", "shop"); return err == nil })
	_, all, err := s.Dimension(t.Context(), "s:1", "shop")
	if n := sold(t, s, "s:1"); err != nil || n != want || len(all.Values) != counter.MaxValues || all.Values["kept"] != 4 {
		t.Errorf("%d under %d values, %d of the one that was kept, %v", n, len(all.Values), all.Values["kept"], err)
	}
}

// TestRedisEmptiedWhileItIsPersisted: a cut that Redis forgets on its way takes nothing away from
// PostgreSQL. A lock holds the cut up in the midst of a bucket, which Redis tells of in one piece.
func TestRedisEmptiedWhileItIsPersisted(t *testing.T) {
	redis, pg := redistest.Start(t, "--hash-max-listpack-entries", "10000"), pgtest.Single(t)
	cfg := persistent.Config{Redis: redis.URL(), Postgres: pg.Database(t), PersistInterval: 20 * time.Millisecond}
	s := open(t, cfg)
	const counters = 1200
	var ops []counter.Op
	for n := 0; len(ops) < counters; n++ {
		if key := fmt.Sprint("v:", n); redisstore.BucketOf(key) == 0 {
			ops = append(ops, op("", add(views, key, 1)))
		}
	}
	made := func() {
		for _, r := range s.Apply(t.Context(), ops) {
			if r.Err != nil {
				t.Fatal(r.Err)
			}
		}
	}
	count := func() int64 {
		return pgtest.Query[int64](t, cfg.Postgres, "select count(*) from headcount_counters")
	}
	made()
	until(t, "all are persisted", func() bool { return count() == counters })
	c, err := pgx.Connect(t.Context(), cfg.Postgres)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close(t.Context())
	if _, err := c.Exec(t.Context(), "begin; lock table headcount_counters in share mode"); err != nil {
		t.Fatal(err)
	}
	made()
	until(t, "a cut waits", func() bool {
		return pgtest.Query[bool](t, cfg.Postgres, "select exists (select from pg_locks where not granted)")
	})
	redis.Flush(t)
	if _, err := c.Exec(t.Context(), "rollback"); err != nil {
		t.Fatal(err)
	}
	for _, key := range []string{ops[0].Changes[0].Key, ops[counters-1].Changes[0].Key} {
		until(t, "it answers", func() bool {
			got, err := s.Read(t.Context(), []string{key}, "", 0)
			return err == nil && got[0].Value >= 1
		})
	}
	if n := count(); n != counters {
		t.Errorf("%d counters are persisted, want %d", n, counters)
	}
}
