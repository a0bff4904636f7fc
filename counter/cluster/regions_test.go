package cluster_test

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"headcount/counter"
	"headcount/counter/cluster"
	"headcount/internal/pgtest"
	"headcount/internal/redistest"
	"headcount/internal/testkit"
)

// builtin are the rules of these tests: stock is exact, with the floor 0.
var builtin = counter.BuiltinRules()

// sharing starts two regions that share one PostgreSQL. In each region one process owns everything, and the returned
// one serves.
func sharing(t *testing.T, database string) (us, eu *process) {
	t.Helper()
	names := []string{"us", "eu"}
	urls := []string{redistest.Start(t).URL(), redistest.Start(t).URL()}
	var serving []*process
	for i, name := range names {
		other := cluster.Peer{Name: names[1-i], Conn: redistest.Dial(t, urls[1-i])}
		w := &world{url: urls[i], with: func(cfg *cluster.Config) {
			cfg.Rules = builtin
			cfg.Region = name
			cfg.Peers = []cluster.Peer{other}
			cfg.Postgres = database
		}}

		w.start(t, owns)
		serving = append(serving, w.start(t, gateway))
	}

	return serving[0], serving[1]
}

func change(key string, verb counter.Verb, delta int64) counter.Op {
	return counter.Op{Changes: []counter.Change{{Key: key, Rule: builtin.Find(key), Verb: verb, Delta: delta}}}
}

// make1 makes an operation, which must succeed.
func (p *process) make1(t testing.TB, op counter.Op) counter.Counter {
	t.Helper()
	r := p.shared.Apply(t.Context(), []counter.Op{op})[0]
	if r.Err != nil {
		t.Fatalf("%+v: %v", op, r.Err)
	}

	return r.Counters[0]
}

func (p *process) read1(t testing.TB, key string) counter.Counter {
	t.Helper()
	read, err := p.shared.Read(t.Context(), []string{key}, "", 0)
	if err != nil {
		t.Fatal(err)
	}

	return read[0].Counter
}

// awaitValue waits until all have a value.
func awaitValue(t testing.TB, key string, want int64, all ...*process) {
	t.Helper()
	testkit.Eventually(t, fmt.Sprintf("%s is %d", key, want), func() bool {
		for _, p := range all {
			read, err := p.shared.Read(t.Context(), []string{key}, "", 0)
			if err != nil || read[0].Value != want {
				return false
			}
		}
		return true
	})
}

// TestServerRegionsShareExactCounters: exact counters are shared in PostgreSQL, and all others over links between the
// processes that own them.
func TestServerRegionsShareExactCounters(t *testing.T) {
	us, eu := sharing(t, pgtest.Single(t).Database(t))

	if c := us.read1(t, "stock:never"); c.Touched() || c.Approx {
		t.Errorf("an exact counter that was never changed is %+v", c)
	}
	if c := us.read1(t, "views:never"); !c.Approx {
		t.Errorf("%+v: another region may have counted it", c)
	}

	// The last part reads what the others leave.
	t.Log("64 clients of both fight for the last 10")
	fightForLast(t, us, eu)
	t.Log("who watches is told in both")
	hearInBoth(t, us, eu)
	t.Log("histories and aggregates are those of all")
	sumOfAll(t, us, eu)
}

// fightForLast: 64 clients of both regions each want one of the last 10, and exactly 10 get one.
func fightForLast(t *testing.T, us, eu *process) {
	both := []*process{us, eu}
	const key = "stock:fight"
	us.make1(t, change(key, counter.Add, 10))

	var got, refused atomic.Int64
	var wg sync.WaitGroup
	var combiners []*counter.Combiner
	for _, p := range both {
		combiners = append(combiners, counter.NewCombiner(p.shared, p.CombiningShared()))
	}

	for i := range 64 {
		wg.Go(func() {
			r := combiners[i%2].Do(t.Context(), change(key, counter.Add, -1))
			switch {
			case r.Err == nil:
				got.Add(1)
			case errors.Is(r.Err, counter.ErrBound):
				refused.Add(1)
			default:
				t.Errorf("a client got %+v, want one or a refusal", r)
			}
		})
	}
	wg.Wait()
	for _, c := range combiners {
		c.Close()
	}

	if got.Load() != 10 || refused.Load() != 54 {
		t.Errorf("%d clients got one, want 10, and %d were refused, want 54", got.Load(), refused.Load())
	}

	for _, p := range both {
		if c := p.read1(t, key); c.Value != 0 || c.Approx {
			t.Errorf("in the end the counter is %+v, want exactly 0", c)
		}
		l, err := p.shared.Ledger(t.Context(), key, 0, 100)
		if err != nil || len(l.Entries) != 11 {
			t.Fatalf("the ledger has %d entries, %v; want 11", len(l.Entries), err)
		}
	}
}

// hearInBoth: a watcher receives the changes of both regions.
func hearInBoth(t *testing.T, us, eu *process) {
	both := []*process{us, eu}
	var mu sync.Mutex
	last := map[string]int64{}
	for _, p := range both {
		watch := p.shared.Watch(func(updates []counter.Update) {
			mu.Lock()
			defer mu.Unlock()

			for _, u := range updates {
				last[p.self.Name+u.Counter.Key] = u.Counter.Value
				if u.Counter.Approx == u.Counter.Kind.IsExact() {
					t.Errorf("the watcher received %+v", u.Counter)
				}
			}
		}, nil)

		defer watch.Close()
		if err := watch.Follow(t.Context(), "stock:live", "views:live"); err != nil {
			t.Fatal(err)
		}
	}

	us.make1(t, change("stock:live", counter.Add, 7))
	eu.make1(t, change("views:live", counter.Add, 3))
	testkit.Eventually(t, "both are told of both", func() bool {
		mu.Lock()
		defer mu.Unlock()

		for _, p := range both {
			if last[p.self.Name+"stock:live"] != 7 || last[p.self.Name+"views:live"] != 3 {
				return false
			}
		}

		return true
	})
}

// sumOfAll: histories and aggregates include all regions.
func sumOfAll(t *testing.T, us, eu *process) {
	both := []*process{us, eu}
	us.make1(t, change("views:sum", counter.Add, 2))
	eu.make1(t, change("views:sum", counter.Add, 3))
	awaitValue(t, "views:sum", 5, both...)

	now := time.Now().Unix() / 60
	_, gains, err := us.shared.History(t.Context(), "views:sum", time.Minute, now-1, now+2)
	total := int64(0)
	for _, g := range gains {
		total += g.Value
	}

	if err != nil || total != 5 {
		t.Errorf("the gains are %+v, %v; want 5 in all", gains, err)
	}
	if is, err := eu.shared.Aggregate(t.Context(), "stock:"); err != nil || is.Value != 7 || is.Counters != 2 {
		t.Errorf("the stock of all regions is %+v, %v; want 7 in two counters", is, err)
	}
}

// TestServerPostgresAwaySharedExact: without PostgreSQL exact counters cannot be changed. All others, and the links,
// work on.
func TestServerPostgresAwaySharedExact(t *testing.T) {
	postgres := pgtest.Start(t)
	us, eu := sharing(t, postgres.Database(t))
	us.make1(t, change("stock:1", counter.Add, 1))

	postgres.Kill()
	r := us.shared.Apply(t.Context(), []counter.Op{change("stock:1", counter.Add, 1)})[0]
	if !errors.Is(r.Err, counter.ErrUnavailable) {
		t.Errorf("a change of an exact counter returns %+v, want ErrUnavailable", r)
	}
	if _, err := us.shared.Read(t.Context(), []string{"stock:1"}, "", 0); !errors.Is(err, counter.ErrUnavailable) {
		t.Errorf("an exact read returns %v, want ErrUnavailable", err)
	}
	read, err := us.shared.Read(t.Context(), []string{"stock:1"}, "", time.Nanosecond)
	if err != nil || !read[0].Away || !read[0].Stale {
		t.Errorf("a read that may lag returns %+v, %v; want it stale", read, err)
	}

	// Before the owner creates the counter, it checks whether PostgreSQL has it.
	us.make1(t, change("views:1", counter.Add, 1))
	awaitValue(t, "views:1", 1, us, eu)

	for prefix, away := range map[string]bool{"views:": false, "stock:": true, "st": true, "": true} {
		_, err := us.shared.Aggregate(t.Context(), prefix)
		_, sizeErr := us.shared.Size(t.Context(), prefix)
		if errors.Is(err, counter.ErrUnavailable) != away || (sizeErr != nil) != away {
			t.Errorf("the aggregate of %q: %v; its size: %v", prefix, err, sizeErr)
		}
	}

	postgres.Restart(t)
	testkit.Eventually(t, "exact counters are back", func() bool {
		return eu.shared.Apply(t.Context(), []counter.Op{change("stock:1", counter.Add, 1)})[0].Err == nil
	})
	awaitValue(t, "stock:1", 2, us, eu)
}
