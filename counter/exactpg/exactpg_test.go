package exactpg

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/rs/zerolog"

	"headcount/counter"
	"headcount/counter/countertest"
	"headcount/internal/pgtest"
	"headcount/internal/postgres"
	"headcount/internal/rows/rowspg"
	"headcount/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m, pgtest.Stop) }

// open returns a store that is closed when the test ends.
func open(t testing.TB, url string, with ...func(*Config)) *Store {
	t.Helper()
	db, err := rowspg.Open(t.Context(), rowspg.Config{
		URL: url, OtherTables: []postgres.Tables{Tables()}, Readable: Readable, Log: zerolog.Nop(),
	})
	if err != nil {
		t.Fatal(err)
	}

	cfg := Config{DB: db.DB(), Log: zerolog.Nop()}
	for _, w := range with {
		w(&cfg)
	}
	s := New(cfg)
	t.Cleanup(func() {
		s.Close()
		db.Close()
	})

	return s
}

var exact = &counter.Rule{Match: "e:*", Kind: counter.Exact, Ledger: counter.DefaultLedger}

func add(key string, delta int64) counter.Change {
	return counter.Change{Key: key, Rule: exact, Verb: counter.Add, Delta: delta}
}

func drop(key string) counter.Change {
	return counter.Change{Key: key, Rule: exact, Verb: counter.Delete}
}

func with(id string, changes ...counter.Change) counter.Op {
	op := counter.Op{Changes: changes}
	if id != "" {
		op.IdempotencyKey = counter.NewIdempotencyKey("*", "", id)
	}

	return op
}

// apply makes one op, which must succeed.
func apply(t testing.TB, s *Store, op counter.Op) counter.Result {
	t.Helper()
	r := s.Apply(t.Context(), []counter.Op{op})[0]
	if r.Err != nil {
		t.Fatal(r.Err)
	}

	return r
}

// until repeats a query until it returns the number want.
func until(t testing.TB, url, sql string, want int) {
	t.Helper()
	testkit.Eventually(t, fmt.Sprintf("%s: %d", sql, want),
		func() bool { return pgtest.Query[int](t, url, sql) == want })
}

// TestServerIdempotencyKeysOfADay: after a day a key is new again, even while its table still has it.
func TestServerIdempotencyKeysOfADay(t *testing.T) {
	server := pgtest.Single(t)
	url := server.Database(t)
	s := open(t, url)

	for n := range int64(2) {
		if r := apply(t, s, with("a", add("e:1", 1))); r.Replay || r.Counters[0].Value != n+1 {
			t.Errorf("on day %d the first use of the key: %+v, want %d and no replay", n, r, n+1)
		}
		if r := apply(t, s, with("a", add("e:1", 1))); !r.Replay {
			t.Errorf("on day %d the second use of the key: %+v, want a replay", n, r)
		}
		server.Exec(t, url, "update headcount_row_ids set until = until - interval '1 day'")
	}

	// A refused operation leaves its key unused.
	floor := int64(0)
	bounded := &counter.Rule{Match: "e:*", Kind: counter.Exact, Floor: &floor}
	down := counter.Change{Key: "e:2", Rule: bounded, Verb: counter.Add, Delta: -1}

	results := s.Apply(t.Context(), []counter.Op{with("b", down), with("", add("e:2", 1)), with("b", down)})
	if !errors.Is(results[0].Err, counter.ErrBound) || results[2].Err != nil || results[2].Replay {
		t.Errorf("want a refusal, and then success with the same key: %+v", results)
	}
}

// TestServerLedgersAreSwept: entries are kept as long as the current rule says, and those of a deleted counter are
// removed.
func TestServerLedgersAreSwept(t *testing.T) {
	server := pgtest.Single(t)
	url := server.Database(t)
	s := open(t, url, func(c *Config) { c.SweepEvery = 20 * time.Millisecond })

	short := &counter.Rule{Match: "e:*", Kind: counter.Exact, Ledger: time.Hour}
	always := &counter.Rule{Match: "e:*", Kind: counter.Exact}

	change := func(rule *counter.Rule, key string) {
		t.Helper()
		apply(t, s, with("", counter.Change{Key: key, Rule: rule, Verb: counter.Add, Delta: 1}))
	}

	for range 3 {
		change(short, "e:1")
		change(exact, "e:2")
	}

	const twoHours = "update headcount_ledger set at = at - interval '2 hours';"

	// The entries become two hours old, and a sweep is due.
	server.Exec(t, url, twoHours+"update headcount_sweeps set due = due - interval '2 hours'")

	change(exact, "e:2")
	const entries = "select count(*) from headcount_ledger where key = "
	until(t, url, entries+"'e:1'", 0)

	change(short, "e:1")
	page, err := s.Ledger(t.Context(), "e:1", 0, 10)
	if err != nil || len(page.Entries) != 1 || page.Entries[0].Seq != 4 || page.Entries[0].Before != 3 {
		t.Errorf("the ledger is %+v, %v; want entry 4 alone", page, err)
	}

	until(t, url, entries+"'e:2'", 4)

	// A new rule removes entries that it considers too old.
	change(short, "e:2")
	until(t, url, entries+"'e:2'", 2)

	change(always, "e:2")
	until(t, url, "select count(*) from headcount_sweeps where key = 'e:2'", 0)

	server.Exec(t, url, twoHours)
	until(t, url, entries+"'e:2'", 3)

	// More entries than one transaction removes.
	apply(t, s, with("", drop("e:1")))
	server.Exec(t, url, fmt.Sprintf(`insert into headcount_ledger
		select key, incarnation, 100 + n, at, op, delta, before, after, reason, author
		from headcount_ledger, generate_series(1, %d) n where key = 'e:2' and seq = 6`, 2*sweepAtOnce))
	apply(t, s, with("", drop("e:2")))
	apply(t, s, with("", add("e:2", 1)))
	until(t, url, "select count(*) from headcount_ledger", 1)
	until(t, url, "select count(*) from headcount_sweeps", 1)
}

// TestServerOtherProcessesAreNotified: a process publishes the changes of other processes, even without a notification.
func TestServerOtherProcessesAreNotified(t *testing.T) {
	server := pgtest.Single(t)
	url := server.Database(t)
	never := func(c *Config) { c.PollEvery = time.Hour }
	from := open(t, url, never)
	to := open(t, url, never)
	ear, _ := countertest.Listen(t, to, "e:1", "e:2")
	awaitNotifications(t, from, to)

	apply(t, from, with("", add("e:1", 5)))
	ear.Until(t, "5", func(heard []counter.Update) bool {
		return len(heard) > 0 && heard[len(heard)-1].Counter.Value == 5
	})

	apply(t, from, with("", drop("e:1")))
	heard := ear.Until(t, "the delete", func(heard []counter.Update) bool {
		return len(heard) > 0 && !heard[len(heard)-1].Counter.Touched()
	})

	// The watcher first received the value from before the change.
	began := slices.IndexFunc(heard, func(u counter.Update) bool { return u.Counter.Value == 5 })
	if changes := heard[began:]; len(changes) > 2 {
		t.Errorf("the watcher received %+v, want one change, perhaps twice", changes)
	}

	// This process notices a change without a notification, because it polls.
	polls := open(t, url, func(c *Config) { c.PollEvery = 50 * time.Millisecond })

	ear, _ = countertest.Listen(t, polls, "e:2")
	server.Exec(t, url, `insert into headcount_counters (key, kind, value, incarnation, sequence) values ('e:2', `+
		`'exact', 9, 1, 1)`)
	ear.Until(t, "a change without a notification", func(heard []counter.Update) bool {
		return len(heard) > 0 && heard[len(heard)-1].Counter.Value == 9
	})
}

// awaitNotifications waits until one store receives changes of another.
func awaitNotifications(t testing.TB, from, to *Store) {
	t.Helper()
	ear, _ := countertest.Listen(t, to, "e:hears")

	ear.Until(t, "a change", func(heard []counter.Update) bool {
		apply(t, from, with("", add("e:hears", 1)))
		return len(heard) > 0
	})
}

// TestClockServerKilledWhileItChanges: PostgreSQL is killed. Acknowledged changes stay, and a repeated change is made
// once.
func TestClockServerKilledWhileItChanges(t *testing.T) {
	const clients = 16
	server := pgtest.Start(t)
	url := server.Database(t)
	stores := []*Store{open(t, url), open(t, url)}

	ctx, stop := context.WithCancel(t.Context())
	var made, refused atomic.Int64
	var wg sync.WaitGroup

	// insist repeats a change until it is acknowledged, under the same key.
	insist := func(s *Store, ops []counter.Op) {
		for {
			err := s.Apply(t.Context(), ops)[0].Err
			if err == nil {
				made.Add(1)
				return
			}

			if !errors.Is(err, counter.ErrUnavailable) {
				t.Error(err)
				return
			}
			refused.Add(1)
			time.Sleep(5 * time.Millisecond)
		}
	}

	for c := range clients {
		wg.Go(func() {
			for n := 0; ctx.Err() == nil; n++ {
				insist(stores[c%2], countertest.Moved(fmt.Sprintf("%d/%d", c, n)))
			}
		})
	}

	more := func(n *atomic.Int64, by int64) {
		before := n.Load()
		testkit.Eventually(t, fmt.Sprintf("%d more", by), func() bool { return n.Load() >= before+by })
	}
	for range 3 {
		more(&made, 50)
		server.Kill()
		more(&refused, 2*clients)
		server.Restart(t)
	}
	more(&made, 50)
	stop()
	wg.Wait()

	// Every acknowledged change was applied exactly once, in the value and in the ledger.
	for key, want := range map[string]int64{"e:1": made.Load(), "e:2": -made.Load(), "e:3": made.Load()} {
		read, err := stores[0].Read(t.Context(), []string{key})
		if err != nil || read[0].Value != want {
			t.Errorf("%q is %+v, %v, want %d", key, read, err, want)
		}
		const n = "select count(*) from headcount_ledger where key = $1"
		if got := pgtest.Query[int64](t, url, n, key); got != made.Load() {
			t.Errorf("%q has %d entries, want %d", key, got, made.Load())
		}
	}
}
