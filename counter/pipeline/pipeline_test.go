package pipeline

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"

	"headcount/counter"
	"headcount/counter/cluster"
	"headcount/counter/countertest"
	"headcount/counter/limit"
	"headcount/internal/redistest"
	"headcount/internal/testkit"
	"headcount/presence"
)

func TestMain(m *testing.M) { testkit.Main(m, redistest.Stop) }

// asStore presents counters as a store: changes and calls on limits go through all layers.
type asStore struct {
	counter.Store // reads go to the store
	counters      *Counters
}

// Apply implements counter.Writer.
func (s asStore) Apply(ctx context.Context, ops []counter.Op) []counter.Result {
	results := make([]counter.Result, len(ops))
	for i := range ops {
		results[i] = s.counters.Change(ctx, ops[i])
	}
	return results
}

// Limit implements counter.Limiter.
func (s asStore) Limit(ctx context.Context, calls []limit.Request) []counter.LimitResult {
	results := make([]counter.LimitResult, len(calls))
	for i := range calls {
		results[i].Answer, results[i].Err = s.counters.Limit(ctx, calls[i])
	}
	return results
}

// Close implements counter.Store.
func (s asStore) Close() error { return s.counters.Close() }

// opened returns the counters that the settings ask for. They are closed when the test ends.
func opened(t testing.TB, cfg Config) asStore {
	t.Helper()
	cfg.Rules, cfg.Registerer = countertest.Rules, prometheus.NewRegistry()
	cfg.Log = zerolog.New(zerolog.NewTestWriter(t)).Level(zerolog.WarnLevel)
	c, err := Open(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return asStore{c.store, c}
}

// The contract of a store holds for the whole way of a change, through all layers in front of the store.
func TestContractInMemory(t *testing.T) {
	countertest.FewHistories(t)
	countertest.RunInBubble(t, func(t testing.TB) countertest.Instance {
		return countertest.Instance{Store: opened(t, Config{})}
	})
}

func TestContractInAFile(t *testing.T) {
	countertest.FewHistories(t)
	countertest.RunInBubble(t, func(t testing.TB) countertest.Instance {
		cfg := Config{DataDir: t.TempDir()}
		s := opened(t, cfg)

		return countertest.Instance{Store: s, Crash: func(t testing.TB) counter.Store {
			if err := s.Close(); err != nil {
				t.Error(err)
			}
			s = opened(t, cfg)

			return s
		}}
	})
}

// inRedis returns the part of a process that is alone in its cluster.
func inRedis(t testing.TB, url string) *cluster.Process {
	t.Helper()
	self := presence.Process{
		Name: "127.0.0.1:1", Incarnation: 1, Roles: []string{presence.RoleGateway, presence.RolePresence},
	}
	p, err := cluster.Open(t.Context(), cluster.Config{
		Self: self, Redis: redistest.Dial(t, url), Rules: countertest.Rules,
	})
	if err != nil {
		t.Fatal(err)
	}

	t.Cleanup(func() { _ = p.Close() })
	p.SetProcesses([]presence.Process{self})

	return p
}

func TestServerContractOverRedis(t *testing.T) {
	server := redistest.Single(t)
	countertest.RunParts(t, countertest.Parts{
		"any history ends with the model's counters": "stores and what stands in front of them are put together",
	}, func(t testing.TB) countertest.Instance {
		server.Flush(t)

		return countertest.Instance{Store: opened(t, Config{Cluster: inRedis(t, server.URL())})}
	})
}

// slow is a store whose changes wait until they are released. Its marks fail.
type slow struct {
	counter.Store
	release chan struct{}
}

func (s *slow) Apply(ctx context.Context, ops []counter.Op) []counter.Result {
	<-s.release
	return s.Store.Apply(ctx, ops)
}

func (s *slow) Mark(context.Context, string, int64, []string) error { return counter.ErrUnavailable }

// observed collects the results that an Observer receives.
type observed chan counter.Result

// Changed implements Observer.
func (o observed) Changed(results []counter.Result) {
	for _, r := range results {
		o <- r
	}
}

var (
	rules, _ = counter.ParseRules(
		[]byte(`{"rules":[{"match":"top:*","kind":"sum","buckets":["1m:1h"],"top":true},{"match":"*","kind":"sum"}]}`))
	one = func(key string) counter.Op {
		return counter.Op{Changes: []counter.Change{{Key: key, Rule: rules.Find(key), Verb: counter.Add, Delta: 1}}}
	}
)

// TestACallerIsGone: a change whose caller has given up is made and observed, even while the counters close.
func TestACallerIsGone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := &slow{countertest.InMemory(t, nil), make(chan struct{})}
		c, seen := New(store, rules, counter.CombinerConfig{}, zerolog.Nop()), make(observed, 1)
		c.Observe(seen)
		ctx, leave := context.WithCancel(t.Context())
		left := make(chan counter.Result)
		go func() { left <- c.Change(ctx, one("k")) }()
		synctest.Wait()
		leave()
		if r := <-left; !errors.Is(r.Err, counter.ErrUnavailable) {
			t.Errorf("a caller that gave up got %+v, want ErrUnavailable", r)
		}

		closed := make(chan error)
		go func() { closed <- c.Close() }()
		synctest.Wait()
		select {
		case err := <-closed:
			t.Fatalf("Close returned while a change was under way: %v", err)
		default:
		}

		close(store.release)
		if err := <-closed; err != nil {
			t.Error(err)
		}

		select {
		case r := <-seen:
			if r.Err != nil || r.Counters[0].Value != 1 {
				t.Errorf("%+v was observed, want success with 1", r)
			}
		default:
			t.Error("the change was not observed")
		}

		if r := c.Change(t.Context(), one("k")); !errors.Is(r.Err, counter.ErrUnavailable) {
			t.Errorf("a change after Close is answered %+v, want ErrUnavailable", r)
		}
	})
}

// TestAMarkFails: a change that could not be marked for a top list is neither acknowledged nor observed as made.
func TestAMarkFails(t *testing.T) {
	store := &slow{countertest.InMemory(t, nil), make(chan struct{})}
	close(store.release)
	c, seen := New(store, rules, counter.CombinerConfig{Instant: true}, zerolog.Nop()), make(observed, 2)
	t.Cleanup(func() { _ = c.Close() })
	c.Observe(seen)
	for key, made := range map[string]bool{"top:1": false, "other": true} {
		r := c.Change(t.Context(), one(key))
		if told := <-seen; (r.Err == nil) != made || (told.Err == nil) != made {
			t.Errorf("%q: %+v was answered, and %+v observed", key, r, told)
		}
	}
}

// TestReservationsExpire: reservations expire by themselves, never early and at most a second late. Observers and
// watchers of the counter are notified.
func TestReservationsExpire(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := New(countertest.InMemory(t, nil), countertest.Rules, counter.CombinerConfig{Instant: true}, zerolog.Nop())
		defer func() { _ = c.Close() }()
		const key = "e:1"
		of := func(change counter.Change) counter.Op {
			change.Key = key
			change.Rule = countertest.Rules.Find(key)
			return counter.Op{Changes: []counter.Change{change}}
		}

		hold := &counter.Hold{ID: "cart-7", For: 90 * time.Second}
		if r := c.Change(t.Context(), of(counter.Change{Verb: counter.Reserve, Delta: 3, Hold: hold})); r.Err != nil {
			t.Fatal(r.Err)
		}

		began := time.Now()

		seen := make(observed, 1)
		c.Observe(seen)
		told := make(chan []counter.Update, 1)
		watch := c.Watch(func(u []counter.Update) { told <- u }, nil)
		defer watch.Close()
		if err := watch.Follow(t.Context(), key); err != nil {
			t.Fatal(err)
		}

		ctx, stop := context.WithCancel(t.Context())
		var running sync.WaitGroup
		running.Go(func() { c.Run(ctx) })
		defer running.Wait()
		defer stop()

		r := <-seen
		late := time.Since(began) - hold.For
		if late < 0 || late > time.Second {
			t.Errorf("the reservation expired %s late, want 0 to 1s", late)
		}
		if r.Err != nil || r.Counters[0].Value != 0 || r.Reservation.Status != counter.Expired {
			t.Errorf("%+v was observed, want an expiry that leaves 0", r)
		}
		if u := <-told; u[0].Counter.Value != 0 || u[0].Counter.Reserved != 0 {
			t.Errorf("watchers received %+v, want 0 and nothing reserved", u)
		}
	})
}

// TestClockStates: the counters report whether their server can be reached, and each change of that.
func TestClockStates(t *testing.T) {
	server := redistest.Start(t)
	c := opened(t, Config{Cluster: inRedis(t, server.URL())}).counters
	changes := make(chan struct{}, 100)
	c.OnState(func() { changes <- struct{}{} })
	<-changes
	testkit.Eventually(t, "Redis can be reached", c.Up)
	if err := c.Ready(); err != nil || !c.Remote() || c.PostgresUp() || c.Where() != "Redis" {
		t.Errorf("%v, %t, %t, %s", err, c.Remote(), c.PostgresUp(), c.Where())
	}

	for len(changes) > 0 {
		<-changes
	}

	server.Kill()
	<-changes
	testkit.Eventually(t, "Redis cannot be reached", func() bool { return !c.Up() })
	if err := c.Ready(); err == nil || err.Error() != "the store of counters, Redis, cannot be reached" {
		t.Errorf("ready: %v", err)
	}
}
