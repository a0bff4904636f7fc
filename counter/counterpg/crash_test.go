package counterpg

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"headcount/counter"
	"headcount/counter/countertest"
	"headcount/internal/outage"
	"headcount/internal/pgtest"
	"headcount/internal/testkit"
)

func TestClockServerKilledInALoop(t *testing.T) {
	const clients = 16
	const rounds = 3
	server := pgtest.Single(t)
	url := server.Database(t)
	stores := []*Store{open(t, url), open(t, url)}
	ctx, stop := context.WithCancel(t.Context())
	var made, refused atomic.Int64
	var wg sync.WaitGroup
	for c := range clients {
		wg.Go(func() {
			for n := 0; ctx.Err() == nil; n++ {
				for {
					r := stores[c%2].Apply(t.Context(), countertest.Moved(fmt.Sprintf("%d/%d", c, n)))[0]
					if r.Err == nil {
						made.Add(1)
						break
					}
					if !errors.Is(r.Err, counter.ErrUnavailable) {
						t.Error(r.Err)
						return
					}
					refused.Add(1)
					time.Sleep(5 * time.Millisecond)
				}
			}
		})
	}
	more := func(n *atomic.Int64, by int64) {
		before := n.Load()
		testkit.Eventually(t, fmt.Sprintf("%d more", by), func() bool { return n.Load() >= before+by })
	}
	for range rounds {
		more(&made, 50)
		server.Kill()
		more(&refused, 2*clients)
		server.Restart(t)
	}
	more(&made, 50)
	stop()
	wg.Wait()
	countertest.Whole(t, stores[0], made.Load())
	t.Logf("%d operations, %d refused", made.Load(), refused.Load())
}

// TestClockIDsAfterAFailover: an asynchronous replica that takes the place of its server may give out a block of ids again,
// with which a process has made no set that was replicated.
func TestClockIDsAfterAFailover(t *testing.T) {
	server := pgtest.Single(t)
	url := server.Database(t)
	a := open(t, url)
	apply(t, a, with("", edit("m:lost", []string{"x"}, nil)))
	server.Exec(t, url, "select setval('headcount_ids', (select set_id from headcount_counters), false)")
	server.Exec(t, url, "truncate headcount_counters, headcount_members")
	server.Restart(t)
	b := open(t, url)
	time.Sleep(1100 * time.Millisecond) // after a second the pool replaces a dead connection without an error
	for n := range 4 {
		for name, s := range map[string]*Store{"a": a, "b": b} {
			testkit.Eventually(t, "a set is made", func() bool {
				set := with("", edit(fmt.Sprint("m:", name, n), []string{name}, nil))
				return s.Apply(t.Context(), []counter.Op{set})[0].Err == nil
			})
		}
	}
	if n := pgtest.Query[int64](t, url, "select count(distinct set_id) from headcount_counters"); n != 8 {
		t.Errorf("8 sets have %d ids", n)
	}
}

func TestClockStartsWithoutServer(t *testing.T) {
	server := pgtest.Single(t)
	url := server.Database(t)
	server.Kill()
	state := &states{}
	s := open(t, url, func(c *Config) { c.OnState = state })
	state.await(t, false)
	watch := testkit.NewStopwatch(t)
	if r := s.Apply(t.Context(), []counter.Op{with("", add("e:1", 1))})[0]; !errors.Is(r.Err, counter.ErrUnavailable) || errors.Is(r.Err, ErrConfig) {
		t.Fatalf("%+v", r)
	}
	if d := watch.Elapsed(); d > time.Second {
		t.Errorf("that took %s", d)
	}
	server.Restart(t)
	state.await(t, true)
	apply(t, s, with("", add("e:1", 1)))
}

// hears waits until s hears what another store commits.
func hears(t *testing.T, s, another *Store) {
	t.Helper()
	e, _ := countertest.Listen(t, s, "e:0")
	now := apply(t, another, with("", add("e:0", 1))).Counters[0].Value
	e.Until(t, "a store hears another", func(heard []counter.Update) bool {
		return len(heard) > 0 && heard[len(heard)-1].Counter.Value == now
	})
}

// TestClockSilentServer: a server hangs. Calls fail, then fail at once, and work again when
// the server goes on.
func TestClockSilentServer(t *testing.T) {
	t.Parallel()
	server := pgtest.Start(t)
	state := &states{}
	s := open(t, server.Database(t), func(c *Config) { c.OnState = state })
	state.await(t, true)
	apply(t, s, with("", add("e:1", 1)))
	server.Pause()
	var tries sync.WaitGroup
	for try := range outage.TripAfter {
		tries.Go(func() {
			// Without a deadline: a caller who leaves within dialTimeout is no sign of a server that does not answer.
			if r := s.Apply(t.Context(), []counter.Op{with(fmt.Sprint(try), add("e:1", 1))})[0]; !errors.Is(r.Err, counter.ErrUnavailable) {
				t.Errorf("%+v", r)
			}
		})
	}
	tries.Wait()
	watch := testkit.NewStopwatch(t)
	if _, err := s.Read(t.Context(), []string{"e:2"}, "", 0); !errors.Is(err, counter.ErrUnavailable) {
		t.Fatal(err)
	}
	if d := watch.Elapsed(); d > 100*time.Millisecond {
		t.Errorf("it is known not to answer, and a call took %s", d)
	}
	server.Resume()
	state.await(t, true)
	for try := range outage.TripAfter {
		apply(t, s, with(fmt.Sprint(try), add("e:1", 1)))
	}
	if got := apply(t, s, with("", add("e:1", 1))); got.Counters[0].Value != 2+outage.TripAfter {
		t.Errorf("%+v", got)
	}
}

// TestClockALongCallIsNoProbe: while a checkpoint is written after an outage, other calls are let
// through.
func TestClockALongCallIsNoProbe(t *testing.T) {
	server := pgtest.Single(t)
	s := open(t, server.Database(t), func(c *Config) { c.Behind = true })
	exactly := func() error {
		return s.Apply(t.Context(), []counter.Op{with("", add("e:1", 1))})[0].Err
	}
	if err := exactly(); err != nil {
		t.Fatal(err)
	}
	server.Kill()
	for s.breaker.Closed() {
		if exactly() == nil {
			t.Fatal("a change without a server")
		}
	}
	server.Restart(t)
	writing, free := make(chan struct{}), make(chan struct{})
	begun := sync.OnceFunc(func() { close(writing) }) // it is written again when its end is too late for the server
	var wg sync.WaitGroup
	defer wg.Wait()
	defer close(free)
	wg.Go(func() {
		for {
			_, err := s.Persist(t.Context(), func(context.Context, *Persisting) (uint64, uint64, error) {
				begun()
				<-free
				return 0, 0, nil
			})
			if err == nil {
				return
			}
			time.Sleep(time.Millisecond)
		}
	})
	<-writing
	if err := exactly(); err != nil {
		t.Errorf("while a checkpoint is written: %v", err)
	}
}

// TestServerRefusals: these servers answer and refuse to work.
func TestServerRefusals(t *testing.T) {
	t.Parallel()
	server := pgtest.Start(t)
	url := server.Database(t)
	server.Exec(t, url, "create role app login; grant all on schema public to app; alter database d1 owner to app")
	state := &states{}
	s := open(t, strings.Replace(url, "headcount@", "app@", 1), func(c *Config) { c.OnState = state })
	apply(t, s, with("", add("e:1", 1)))
	want := int64(1)
	for _, tc := range []struct {
		name, cut, mend string // statements of the superuser
	}{
		{name: "a server that only reads", cut: "alter database d1 set default_transaction_read_only = on", mend: "alter database d1 set default_transaction_read_only = off"},
		{name: "a disk that is full", cut: `create function full_disk() returns trigger language plpgsql as $$ begin raise exception 'no space left on device' using errcode = '53100'; end $$;
			create trigger full_disk before insert on headcount_ledger for each statement execute function full_disk()`, mend: "drop trigger full_disk on headcount_ledger"},
		{name: "no more connections", cut: "alter role app connection limit 0", mend: "alter role app connection limit -1"},
		{name: "no permission", cut: "alter table headcount_counters owner to headcount", mend: "alter table headcount_counters owner to app"},
		{name: "no permission to write", cut: "revoke update on headcount_counters from app", mend: "grant update on headcount_counters to app"},
		{name: "no login", cut: "alter role app nologin", mend: "alter role app login"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			state.await(t, true)
			server.Exec(t, url, tc.cut)
			hangUp(t, server, url)
			op := with(tc.name, add("e:1", 1))
			for n := range 2 * outage.TripAfter {
				if r := s.Apply(t.Context(), []counter.Op{op})[0]; !errors.Is(r.Err, counter.ErrUnavailable) {
					t.Fatalf("%+v", r)
				}
				if n == outage.TripAfter {
					state.await(t, false)
				}
				// Reads between the changes end no outage.
				_, _ = s.Read(t.Context(), []string{"e:1"}, "", 0)
			}
			server.Exec(t, url, "set default_transaction_read_only = off")
			server.Exec(t, url, tc.mend)
			want++
			var r counter.Result
			testkit.Eventually(t, "it works again", func() bool {
				r = s.Apply(t.Context(), []counter.Op{op})[0]
				return r.Err == nil
			})
			if r.Replay || r.Counters[0].Value != want {
				t.Errorf("%+v, want %d", r, want)
			}
		})
	}
}

// TestServerStuckWriter: a process stops while it holds locks. Others go on when the server
// has released the locks, which it does after 5 s, and here sooner.
func TestServerStuckWriter(t *testing.T) {
	url := pgtest.Single(t).Database(t)
	s, stuck := open(t, url), open(t, url)
	apply(t, s, with("", add("e:1", 1)))
	locked, release := make(chan struct{}), make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		ops := []counter.Op{with("", add("e:1", 1))}
		w := stuck.newStep(ops)
		err := stuck.do(context.Background(), func(ctx context.Context, c *pgxpool.Conn) error {
			if err := w.read(ctx, c, ops); err != nil {
				return err
			}
			w.judge(ops)
			var is string
			const limit = "idle_in_transaction_session_timeout"
			if err := c.QueryRow(ctx, "select current_setting($1), set_config($1, '100', false)", limit).Scan(&is, new(string)); err != nil || is != "5s" {
				t.Errorf("%s is %q, %v", limit, is, err)
			}
			close(locked)
			<-release
			return w.write(context.Background(), c)
		})
		if !errors.Is(err, counter.ErrUnavailable) {
			t.Errorf("it wrote without its locks: %v", err)
		}
	})
	<-locked
	testkit.Eventually(t, "the lock is released", func() bool {
		return s.Apply(t.Context(), []counter.Op{with("x", add("e:1", 1))})[0].Err == nil
	})
	close(release)
	wg.Wait()
	if got, err := s.Read(t.Context(), []string{"e:1"}, "", 0); err != nil || got[0].Value != 2 {
		t.Errorf("%+v, %v", got, err)
	}
}
