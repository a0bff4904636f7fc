package tiered_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"headcount/counter"
	"headcount/counter/countertest"
	"headcount/counter/tiered"
	"headcount/internal/pgtest"
	"headcount/internal/redistest"
	"headcount/internal/testkit"
)

// TestClockOlderMemory: Redis comes back, again and again, with a memory that lacks what was changed last, before a checkpoint or
// after it. What is persisted never falls, in value or version; no version is given twice with different values; and a
// subscriber, who takes greater versions alone, shows each counter's value after its next change.
func TestClockOlderMemory(t *testing.T) {
	const rounds = 4
	redis, pg := redistest.Start(t), pgtest.Single(t)
	cfg := tiered.Config{Rules: countertest.Rules, Redis: redistest.Dial(t, redis.URL()), Postgres: pg.Database(t), PersistInterval: 500 * time.Millisecond}
	stores := []*tiered.Store{open(t, cfg), open(t, cfg)}
	keys := []string{"v:1", "v:2", "l:1", "k:1"}

	var mu sync.Mutex
	values := map[string]map[counter.Version]int64{} // that were told under each version
	shown := map[string]counter.Counter{}
	for _, key := range keys {
		values[key] = map[counter.Version]int64{}
	}
	var missed atomic.Bool // the subscriber is to read again
	told := func(c counter.Counter) {
		if was, ok := values[c.Key][c.Version]; ok && was != c.Value && c.Touched() {
			t.Errorf("%q had %d at version %s, and now %d", c.Key, was, c.Version, c.Value)
		}
		values[c.Key][c.Version] = c.Value
	}
	show := func(c counter.Counter) {
		if told(c); c.Version.Compare(shown[c.Key].Version) > 0 {
			shown[c.Key] = c
		}
	}
	watch := stores[0].Watch(func(updates []counter.Update) {
		mu.Lock()
		defer mu.Unlock()
		for _, u := range updates {
			show(u.Counter)
		}
	}, func() { missed.Store(true) })
	defer watch.Close()
	follow := func() {
		testkit.Eventually(t, "the counters are followed", func() bool { return watch.Follow(t.Context(), keys...) == nil })
	}

	rows := map[string]counter.Counter{} // as they were last seen in PostgreSQL
	persisted := func() {
		for _, key := range keys {
			var value, incarnation, sequence int64
			text := pgtest.Query[string](t, cfg.Postgres, `select coalesce((select value || ' ' || incarnation || ' ' || sequence
				from headcount_counters where key = $1), '0 0 0')`, key)
			if _, err := fmt.Sscan(text, &value, &incarnation, &sequence); err != nil {
				t.Error(err)
			}
			version := counter.Version{Incarnation: uint64(incarnation), Sequence: uint64(sequence)}
			last := rows[key]
			if value < last.Value || version.Compare(last.Version) < 0 || value > last.Value && version == last.Version {
				t.Errorf("the row of %q is %d at version %s, and was %d at %s", key, value, version, last.Value, last.Version)
			}
			rows[key] = counter.Counter{Value: value, Version: version}
		}
	}
	for round := range rounds {
		follow()
		ctx, stop := context.WithCancel(t.Context())
		var made atomic.Int64
		var wg sync.WaitGroup
		change := func(s *tiered.Store, who string) bool {
			ops := []counter.Op{op("", add(views, "v:1", 1+rand.Int64N(9)), add(views, "v:2", 1+rand.Int64N(9))), op("", edit(likes, "l:1", []string{who}, nil)), op("", add(stock, "k:1", 1))}
			results, ok := s.Apply(t.Context(), ops), true
			mu.Lock()
			defer mu.Unlock()
			for _, r := range results {
				ok = ok && r.Err == nil
				for _, c := range r.Counters { // none with an error
					told(c)
				}
			}
			return ok
		}
		for c, s := range stores {
			wg.Go(func() {
				for n := 0; ctx.Err() == nil; n++ {
					if change(s, fmt.Sprint(round, "/", c, "/", n)) {
						made.Add(1)
					}
				}
			})
		}
		wg.Go(func() {
			for ctx.Err() == nil {
				persisted()
			}
		})
		more := func(n int64) {
			before := made.Load()
			testkit.Eventually(t, "changes are made", func() bool { return made.Load() >= before+n })
		}
		more(20)
		redis.Do(t, "SAVE")
		if more(3); round%2 == 1 {
			time.Sleep(rand.N(600 * time.Millisecond)) // until after the next checkpoint, perhaps
		}
		redis.Kill()
		redis.Restart(t)
		more(20)
		stop()
		wg.Wait()

		countertest.AwaitServed(t, stores[0])
		last := fmt.Sprint("last of ", round)
		testkit.Eventually(t, "a last change of all", func() bool { return change(stores[1], last) })
		testkit.Eventually(t, "the subscriber shows what there is", func() bool {
			again := missed.Swap(false)
			got, err := stores[1].Read(t.Context(), keys, "", 0)
			if err != nil {
				missed.Store(again)
				return false
			}
			mu.Lock()
			defer mu.Unlock()
			for _, r := range got {
				if again {
					show(r.Counter)
				}
				if r.Value < rows[r.Key].Value {
					t.Fatalf("round %d: %q is %d, and %d were persisted", round, r.Key, r.Value, rows[r.Key].Value)
				}
				if r.Value != shown[r.Key].Value {
					return false
				}
			}
			return true
		})
	}
}

// TestClockOlderMemoryOfAPersistedCheckpoint: Redis comes back with its memory of the moment when a checkpoint had just
// begun, which PostgreSQL has. Nothing of that checkpoint is persisted again.
func TestClockOlderMemoryOfAPersistedCheckpoint(t *testing.T) {
	redis, pg := redistest.Start(t), pgtest.Single(t)
	store := open(t, tiered.Config{
		Rules: countertest.Rules, Redis: redistest.Dial(t, redis.URL()), Postgres: pg.Database(t), PersistInterval: time.Hour,
	})
	w := &twins{store, countertest.InMemory(t, nil), []string{"v:1", "v:gone", "l:1", "u:1"}}
	changes := func(n int) []counter.Op {
		return []counter.Op{
			op("", view("v:1", "shop")), op("", view("v:1", fmt.Sprint(n))), op("", ends(views, "v:1", counter.Adjust)),
			op("", view("v:gone", "shop")), op("", ends(views, "v:gone", counter.Delete)),
			op("", view("v:gone", "new")), op("", ends(views, "v:gone", counter.Adjust)),
			op("", edit(likes, "l:1", []string{"a", fmt.Sprint(n)}, nil)),
			op("", edit(visitors, "u:1", []string{"a", fmt.Sprint(n)}, nil)),
		}
	}
	w.apply(t, changes(1)...)
	buckets, err := store.Redis().Status(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := store.Redis().Checkpoint(t.Context(), buckets[0].Generation, buckets[0].Checkpoint); err != nil {
		t.Fatal(err)
	}
	redis.Do(t, "SAVE")
	everything(t, store) // after it is persisted
	redis.Kill()
	redis.Restart(t)
	countertest.AwaitServed(t, store)
	w.same(t, "after the restart")
	w.apply(t, changes(2)...)
	w.same(t, "after further changes")
}

// TestServerPostgresWithOlderData: a checkpoint that Redis has dropped is not in a PostgreSQL that comes back with older data,
// after a failover to an asynchronous replica. Later ones are persisted.
func TestServerPostgresWithOlderData(t *testing.T) {
	pg := pgtest.Single(t)
	redis := redistest.Dial(t, redistest.Start(t).URL())
	cfg := tiered.Config{Rules: countertest.Rules, Redis: redis, Postgres: pg.Database(t), PersistInterval: 50 * time.Millisecond}
	s := open(t, cfg)
	for n := range int64(3) {
		apply(t, s, op("", add(views, "v:1", 1)))
		testkit.Eventually(t, "it is persisted", func() bool { return row(t, cfg.Postgres, "v:1") == n+1 })
	}
	pg.Exec(t, cfg.Postgres, "update headcount_front set epoch = epoch - 2")
	pg.Exec(t, cfg.Postgres, "update headcount_counters set value = 1, sequence = 1 where key = 'v:1'")
	apply(t, s, op("", add(views, "v:1", 1)))
	testkit.Eventually(t, "a later change is persisted", func() bool { return row(t, cfg.Postgres, "v:1") == 4 })
}
