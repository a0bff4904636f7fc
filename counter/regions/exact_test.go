package regions_test

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/rs/zerolog"

	"headcount/counter"
	"headcount/counter/counterpg"
	"headcount/counter/counterredis"
	"headcount/counter/tiered"
	"headcount/internal/pgtest"
	"headcount/internal/redistest"
)

// The built-in rules: stock is exact, with the floor 0.
var builtin = counter.BuiltinRules()

func ruled(key string, verb counter.Verb, delta int64) counter.Change {
	c := counter.Change{Key: key, Rule: builtin.Find(key), Verb: verb, Delta: delta}
	if verb == counter.Adjust || verb == counter.Reset {
		c.Reason, c.By = "r", "b"
	}
	return c
}

// sharing starts two regions with one PostgreSQL beside them.
func sharing(t *testing.T) (us, eu *region, postgres *pgtest.Server, database string) {
	t.Helper()
	postgres = pgtest.Start(t)
	database = postgres.Database(t)
	list := []*region{{name: "us"}, {name: "eu"}}
	for _, r := range list {
		r.server = redistest.Start(t)
		s, err := tiered.OpenBeside(t.Context(), tiered.Config{
			Redis: redistest.Dial(t, r.server.URL()), Postgres: database, Region: r.name, Rules: builtin, Log: zerolog.New(zerolog.NewTestWriter(t)).Level(zerolog.WarnLevel),
		})
		if err != nil {
			t.Fatal(err)
		}
		r.local, r.inner = s.Redis(), s
	}
	link(t, false, list)
	return list[0], list[1], postgres, database
}

// has is what a region knows exactly.
func (r *region) has(t testing.TB, key string, want int64) counter.Counter {
	t.Helper()
	c := read1(t, r.store, key)
	if c.Value != want {
		t.Errorf("%s has %+v, want %d", r.name, c, want)
	}
	return c
}

func TestClockRegionsShareExactCounters(t *testing.T) {
	t.Parallel()
	us, eu, postgres, database := sharing(t)
	both := []*region{us, eu}

	t.Run("never touched", func(t *testing.T) {
		if c := us.has(t, "stock:never", 0); c.Touched() || c.Approx {
			t.Errorf("%+v", c)
		}
		if c := us.has(t, "views:never", 0); !c.Approx {
			t.Errorf("%+v: another region may have counted it", c)
		}
	})

	t.Run("64 clients of both fight for the last 10", func(t *testing.T) {
		const key = "stock:fight"
		make1(t, us.store, ruled(key, counter.Add, 10))
		var got, refused atomic.Int64
		var wg sync.WaitGroup
		combiners := []*counter.Combiner{}
		for _, r := range both {
			combiners = append(combiners, counter.NewCombiner(r.store, counter.CombinerConfig{Queues: 4, SeparateExact: true}))
		}
		for i := range 64 {
			wg.Go(func() {
				r := combiners[i%2].Do(t.Context(), counter.Op{Changes: []counter.Change{ruled(key, counter.Add, -1)}})
				switch {
				case r.Err == nil && r.Counters[0].Value >= 0:
					got.Add(1)
				case errors.Is(r.Err, counter.ErrBound):
					refused.Add(1)
				default:
					t.Errorf("%+v", r)
				}
			})
		}
		wg.Wait()
		for _, c := range combiners {
			c.Close()
		}
		if got.Load() != 10 || refused.Load() != 54 {
			t.Errorf("%d got one and %d did not", got.Load(), refused.Load())
		}
		for _, r := range both {
			if c := r.has(t, key, 0); c.Approx {
				t.Errorf("%+v", c)
			}
			l, err := r.store.Ledger(t.Context(), key, 0, 100)
			if err != nil || len(l.Entries) != 11 {
				t.Fatalf("%d entries, %v", len(l.Entries), err)
			}
			before := int64(0)
			for i, e := range l.Entries {
				if e.Seq != uint64(i+1) || e.Before != before || e.Before+e.Delta != e.After {
					t.Errorf("entry %+v after %d", e, before)
				}
				before = e.After
			}
		}
	})

	t.Run("who watches is told in both", func(t *testing.T) {
		var mu sync.Mutex
		last := map[string]int64{}
		for _, r := range both {
			watch := r.store.Watch(func(updates []counter.Update) {
				mu.Lock()
				defer mu.Unlock()
				for _, u := range updates {
					last[r.name+" "+u.Counter.Key] = u.Counter.Value
					if u.Counter.Approx != (u.Counter.Kind != counter.Exact) {
						t.Errorf("%s is told %+v", r.name, u.Counter)
					}
				}
			}, nil)
			defer watch.Close()
			if err := watch.Follow(t.Context(), "stock:live", "views:live"); err != nil {
				t.Fatal(err)
			}
		}
		make1(t, us.store, ruled("stock:live", counter.Add, 7))
		make1(t, eu.store, ruled("views:live", counter.Add, 3))
		eventually(t, "both are told of both", func() (bool, string) {
			mu.Lock()
			defer mu.Unlock()
			return last["us stock:live"] == 7 && last["eu stock:live"] == 7 && last["us views:live"] == 3 && last["eu views:live"] == 3, fmt.Sprint(last)
		})
	})

	t.Run("a cut link changes nothing for exact ones", func(t *testing.T) {
		cut(true, both...)
		make1(t, us.store, ruled("stock:cut", counter.Add, 5))
		make1(t, us.store, ruled("views:cut", counter.Add, 5))
		if c := make1(t, eu.store, ruled("stock:cut", counter.Add, -2)); c.Value != 3 {
			t.Errorf("%+v", c)
		}
		make1(t, eu.store, ruled("views:cut", counter.Add, 2))
		us.has(t, "stock:cut", 3)
		us.has(t, "views:cut", 5)
		eu.has(t, "views:cut", 2)
		cut(false, both...)
		agree(t, map[string]int64{"stock:cut": 3, "views:cut": 7}, both...)
	})

	// A front would take what is in the Redis of a region for an old memory of its own; and its PostgreSQL has counters
	// of all kinds.
	t.Run("a front is no region's", func(t *testing.T) {
		make1(t, us.store, ruled("views:front", counter.Add, 3))
		eventually(t, "the region has its name", func() (bool, string) {
			name := us.server.Do(t, "HGET", fmt.Sprintf("hc:{n%d}:s", counterredis.BucketOf("views:front")), "region")
			return name == "us", fmt.Sprint(name)
		})
		front := func(redis, database string) *tiered.Store {
			s, err := tiered.Open(t.Context(), tiered.Config{Redis: redistest.Dial(t, redis), Postgres: database, PersistInterval: 20 * time.Millisecond, Log: zerolog.Nop()})
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = s.Close() })
			return s
		}
		refused := front(us.server.URL(), database).Apply(t.Context(), []counter.Op{{Changes: []counter.Change{ruled("views:front", counter.Add, 1)}}})[0]
		if !errors.Is(refused.Err, counter.ErrUnavailable) || !strings.Contains(refused.Err.Error(), "--peer") {
			t.Errorf("%+v", refused)
		}
		us.has(t, "views:front", 3)

		fronted, redis := postgres.Database(t), redistest.Start(t)
		make1(t, front(redis.URL(), fronted), ruled("views:front", counter.Add, 1))
		_, err := tiered.OpenBeside(t.Context(), tiered.Config{Redis: redistest.Dial(t, redis.URL()), Postgres: fronted, Region: "us", Rules: builtin, Log: zerolog.Nop()})
		if !errors.Is(err, counterpg.ErrConfig) {
			t.Errorf("beside a database with a front: %v", err)
		}
	})

	t.Run("PostgreSQL is away", func(t *testing.T) {
		make1(t, us.store, ruled("stock:away", counter.Add, 1))
		us.has(t, "stock:away", 1)
		postgres.Kill()
		if r := us.store.Apply(t.Context(), []counter.Op{{Changes: []counter.Change{ruled("stock:away", counter.Add, 1)}}})[0]; !errors.Is(r.Err, counter.ErrUnavailable) {
			t.Errorf("%+v", r)
		}
		if _, err := us.store.Read(t.Context(), []string{"stock:away"}, "", 0); !errors.Is(err, counter.ErrUnavailable) {
			t.Errorf("an exact read: %v", err)
		}
		if read, err := us.store.Read(t.Context(), []string{"stock:away"}, "", time.Nanosecond); err != nil || !read[0].Away || !read[0].Stale {
			t.Errorf("a read that may lag: %+v, %v", read, err)
		}
		make1(t, us.store, ruled("views:away", counter.Add, 1))
		agree(t, map[string]int64{"views:away": 1}, both...)
		for prefix, away := range map[string]bool{"views:aw": false, "stock:": true, "st": true, "": true} {
			_, err := us.store.Aggregate(t.Context(), prefix)
			if _, sizeErr := us.store.Size(t.Context(), prefix); errors.Is(err, counter.ErrUnavailable) != away || (sizeErr != nil) != away {
				t.Errorf("the aggregate of %q: %v; its size: %v", prefix, err, sizeErr)
			}
		}
		postgres.Restart(t)
		eventually(t, "exact counters are back", func() (bool, string) {
			r := eu.store.Apply(t.Context(), []counter.Op{{Changes: []counter.Change{ruled("stock:away", counter.Add, 1)}}})[0]
			return r.Err == nil, fmt.Sprint(r.Err)
		})
		eventually(t, "both have it", func() (bool, string) {
			a, err := us.store.Read(t.Context(), []string{"stock:away"}, "", 0)
			b, err1 := eu.store.Read(t.Context(), []string{"stock:away"}, "", 0)
			return err == nil && err1 == nil && a[0].Value == 2 && b[0].Value == 2, fmt.Sprint(a, b, err, err1)
		})
	})
}
