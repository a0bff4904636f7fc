package pgstore

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/rs/zerolog"
	"github.com/sony/gobreaker/v2"

	"headcount/counter"
	"headcount/counter/pgtest"
)

// moves is the operation of id: one more on e:1, and a move from e:2 to e:3.
func moves(id string) counter.Op { return with(id, add("e:1", 1), add("e:2", -1), add("e:3", 1)) }

// client is a process that changes counters until it is killed. It prints what it tries
// and what was acknowledged.
func client(url string) {
	s, err := Open(context.Background(), Config{URL: url, Log: zerolog.Nop()})
	if err != nil {
		fmt.Println("fault", err)
		return
	}
	c := counter.NewCombiner(s, counter.CombinerConfig{Lanes: 4})
	var say sync.Mutex
	print := func(what, id string) {
		say.Lock()
		defer say.Unlock()
		fmt.Println(what, id)
	}
	var wg sync.WaitGroup
	for worker := range 8 {
		wg.Go(func() {
			for n := 0; ; n++ {
				id := fmt.Sprintf("%d/%d/%d", os.Getpid(), worker, n)
				print("try", id)
				if r := c.Do(context.Background(), moves(id)); r.Err != nil {
					print("fault", r.Err.Error())
					return
				}
				print("ack", id)
			}
		})
	}
	wg.Wait()
}

// whole checks that n operations were made, each once.
func whole(t testing.TB, s *Store, n int64) {
	t.Helper()
	got, err := s.Read(t.Context(), []string{"e:1", "e:2", "e:3"}, "", 0)
	if err != nil {
		t.Fatal(err)
	}
	for i, want := range []int64{n, -n, n} {
		if got[i].Value != want {
			t.Errorf("%q is %d, want %d", got[i].Key, got[i].Value, want)
		}
		at := int64(0)
		for after := uint64(0); ; {
			page, err := s.Ledger(t.Context(), got[i].Key, after, counter.MaxLedger)
			if err != nil {
				t.Fatal(err)
			}
			for _, e := range page.Entries {
				if e.Seq != after+1 || e.Before != at || e.Before+e.Delta != e.After {
					t.Fatalf("%q: entry %+v after %d with %d", got[i].Key, e, after, at)
				}
				after, at = e.Seq, e.After
			}
			if !page.More {
				break
			}
		}
		if at != want {
			t.Errorf("the ledger of %q leads to %d, want %d", got[i].Key, at, want)
		}
	}
}

func TestClientKilledInALoop(t *testing.T) {
	url := pgtest.Single(t).Database(t)
	s := open(t, url)
	var made int64
	for round := range 12 {
		cmd := exec.Command(os.Args[0])
		cmd.Env = append(os.Environ(), "PGSTORE_CLIENT="+url)
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		open, acknowledged := map[string]bool{}, map[string]bool{}
		lines := bufio.NewScanner(out)
		end := 40 + rand.IntN(400)
		for n := 0; lines.Scan(); n++ {
			what, id, _ := strings.Cut(lines.Text(), " ")
			switch what {
			case "try":
				open[id] = true
			case "ack":
				delete(open, id)
				acknowledged[id] = true
			default:
				t.Errorf("round %d: %s", round, lines.Text())
			}
			if n == end {
				if err := cmd.Process.Kill(); err != nil {
					t.Fatal(err)
				}
			}
		}
		_ = cmd.Wait() // it was killed
		for id := range acknowledged {
			if r := apply(t, s, moves(id)); !r.Replay {
				t.Fatalf("round %d: %s was acknowledged and is not remembered", round, id)
			}
		}
		for id := range open { // what was not answered is repeated
			apply(t, s, moves(id))
		}
		made += int64(len(acknowledged) + len(open))
		whole(t, s, made)
	}
	t.Logf("%d operations", made)
}

func TestServerKilledInALoop(t *testing.T) {
	const clients, rounds = 16, 6
	server := pgtest.Start(t)
	url := server.Database(t)
	stores := []*Store{open(t, url), open(t, url)}
	ctx, stop := context.WithCancel(t.Context())
	var made, refused atomic.Int64
	var wg sync.WaitGroup
	for c := range clients {
		wg.Go(func() {
			for n := 0; ctx.Err() == nil; n++ {
				for {
					r := stores[c%2].Apply(t.Context(), []counter.Op{moves(fmt.Sprintf("%d/%d", c, n))})[0]
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
	for range rounds {
		for before := made.Load(); made.Load() < before+50; {
			time.Sleep(time.Millisecond)
		}
		server.Kill()
		for before := refused.Load(); refused.Load() < before+2*clients; {
			time.Sleep(time.Millisecond)
		}
		server.Restart(t)
	}
	for before := made.Load(); made.Load() < before+50; {
		time.Sleep(time.Millisecond)
	}
	stop()
	wg.Wait()
	whole(t, stores[0], made.Load())
	t.Logf("%d operations, %d refused", made.Load(), refused.Load())
}

func TestStartsWithoutServer(t *testing.T) {
	server := pgtest.Start(t)
	url := server.Database(t)
	server.Kill()
	state := newStates()
	s := open(t, url, func(c *Config) { c.OnState = state })
	state.await(t, false)
	start := time.Now()
	if r := s.Apply(t.Context(), []counter.Op{with("", add("e:1", 1))})[0]; !errors.Is(r.Err, counter.ErrUnavailable) || errors.Is(r.Err, ErrConfig) {
		t.Fatalf("%+v", r)
	}
	if d := time.Since(start); d > time.Second {
		t.Errorf("that took %s", d)
	}
	server.Restart(t)
	state.await(t, true)
	apply(t, s, with("", add("e:1", 1)))
}

// hears waits until s hears what another store commits. Until then its cache may be
// emptied at any moment.
func hears(t *testing.T, s, another *Store) {
	t.Helper()
	lagging := func() counter.Reading {
		got, err := s.Read(t.Context(), []string{"e:0"}, "", time.Hour)
		if err != nil {
			t.Fatal(err)
		}
		return got[0]
	}
	lagging()
	apply(t, another, with("", add("e:0", 1)))
	for end := time.Now().Add(time.Minute); lagging().Value != 1; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("a store does not hear another")
		}
	}
}

// TestSilentServer: a server hangs. Calls fail, then fail at once, and work again when
// the server goes on.
func TestSilentServer(t *testing.T) {
	server := pgtest.Start(t)
	state := newStates()
	url := server.Database(t)
	s := open(t, url, func(c *Config) { c.OnState = state })
	state.await(t, true)
	hears(t, s, open(t, url))
	apply(t, s, with("", add("e:1", 1)))
	lagging := func() counter.Reading {
		t.Helper()
		got, err := s.Read(t.Context(), []string{"e:1"}, "", time.Minute)
		if err != nil {
			t.Fatal(err)
		}
		return got[0]
	}
	server.Pause()
	for try := range tripAfter {
		ctx, cancel := context.WithTimeout(t.Context(), dialTimeout+100*time.Millisecond)
		r := s.Apply(ctx, []counter.Op{with(fmt.Sprint(try), add("e:1", 1))})[0]
		cancel()
		if !errors.Is(r.Err, counter.ErrUnavailable) {
			t.Fatalf("%+v", r)
		}
	}
	start := time.Now()
	if _, err := s.Read(t.Context(), []string{"e:2"}, "", 0); !errors.Is(err, counter.ErrUnavailable) {
		t.Fatal(err)
	}
	if d := time.Since(start); d > 100*time.Millisecond {
		t.Errorf("it is known not to answer, and a call took %s", d)
	}
	if got := lagging(); got.Value != 1 || got.Stale {
		t.Errorf("%+v", got)
	}
	s.cache.expire("e:1")
	if got := lagging(); got.Value != 1 || !got.Stale {
		t.Errorf("%+v", got)
	}
	if _, err := s.Read(t.Context(), []string{"e:1", "e:2"}, "", time.Minute); !errors.Is(err, counter.ErrUnavailable) {
		t.Errorf("nothing is known of e:2: %v", err)
	}
	server.Resume()
	state.await(t, true)
	for try := range tripAfter {
		apply(t, s, with(fmt.Sprint(try), add("e:1", 1)))
	}
	if got := apply(t, s, with("", add("e:1", 1))); got.Counters[0].Value != 2+tripAfter {
		t.Errorf("%+v", got)
	}
}

// TestALongCallIsNoProbe: while a cut is written after an outage, other calls are let
// through.
func TestALongCallIsNoProbe(t *testing.T) {
	server := pgtest.Start(t)
	s := open(t, server.Database(t), func(c *Config) { c.Behind = true })
	exactly := func() error {
		_, err := s.ApplyExact(t.Context(), []counter.Op{with("", add("e:1", 1))}, Behind{})
		return err
	}
	if err := exactly(); err != nil {
		t.Fatal(err)
	}
	server.Kill()
	for s.breaker.State() == gobreaker.StateClosed {
		if exactly() == nil {
			t.Fatal("a change without a server")
		}
	}
	server.Restart(t)
	writing, free := make(chan struct{}), make(chan struct{})
	var wg sync.WaitGroup
	defer wg.Wait()
	defer close(free)
	wg.Go(func() {
		for {
			_, err := s.Persist(t.Context(), func(context.Context, *Persisting) (uint64, uint64, error) {
				close(writing)
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
		t.Errorf("while a cut is written: %v", err)
	}
}

// TestRefusals: these servers answer and refuse to work.
func TestRefusals(t *testing.T) {
	server := pgtest.Start(t, "max_connections=12", "superuser_reserved_connections=2")
	url := server.Database(t)
	server.Exec(t, url, "create role app login; grant all on schema public to app; alter database d1 owner to app")
	s := open(t, strings.Replace(url, "headcount@", "app@", 1))
	apply(t, s, with("", add("e:1", 1)))
	want := int64(1)
	for _, tc := range []struct {
		name        string
		cut, mend   string // statements of the superuser
		connections int    // that another client takes
	}{
		{name: "a server that only reads", cut: "alter database d1 set default_transaction_read_only = on", mend: "alter database d1 set default_transaction_read_only = off"},
		{name: "a disk that is full", cut: `create function full_disk() returns trigger language plpgsql as $$ begin raise exception 'no space left on device' using errcode = '53100'; end $$;
			create trigger full_disk before insert on headcount_ledger for each statement execute function full_disk()`, mend: "drop trigger full_disk on headcount_ledger"},
		{name: "no more connections", connections: 10},
		{name: "no permission", cut: "alter table headcount_counters owner to headcount", mend: "alter table headcount_counters owner to app"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if tc.cut != "" {
				server.Exec(t, url, tc.cut)
			}
			hangUp(t, server, url)
			var others []*pgx.Conn
			for tries := 0; len(others) < tc.connections && tries < 1000; tries++ {
				c, err := pgx.Connect(t.Context(), strings.Replace(server.URL("postgres"), "headcount@", "app@", 1))
				if err == nil {
					others = append(others, c)
					continue
				}
				hangUp(t, server, url) // the store was faster
			}
			op := with(tc.name, add("e:1", 1))
			for range 2 * tripAfter {
				if r := s.Apply(t.Context(), []counter.Op{op})[0]; !errors.Is(r.Err, counter.ErrUnavailable) {
					t.Fatalf("%+v", r)
				}
			}
			for _, c := range others {
				if err := c.Close(t.Context()); err != nil {
					t.Error(err)
				}
			}
			if tc.mend != "" {
				c, err := pgx.Connect(t.Context(), url)
				if err != nil {
					t.Fatal(err)
				}
				defer c.Close(context.Background())
				for _, statement := range []string{"set default_transaction_read_only = off", tc.mend} {
					if _, err := c.Exec(t.Context(), statement); err != nil {
						t.Fatal(err)
					}
				}
			}
			want++
			for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(20 * time.Millisecond) {
				r := s.Apply(t.Context(), []counter.Op{op})[0]
				if r.Err == nil {
					if r.Replay || r.Counters[0].Value != want {
						t.Errorf("%+v, want %d", r, want)
					}
					return
				}
				if time.Now().After(deadline) {
					t.Fatal(r.Err)
				}
			}
		})
	}
}

// TestConnectionsHungUp ends connections in the middle of calls.
func TestConnectionsHungUp(t *testing.T) {
	server := pgtest.Single(t)
	url := server.Database(t)
	s := open(t, url)
	const clients, each, hangUps = 8, 100, 8
	var made atomic.Int64
	var wg sync.WaitGroup
	for c := range clients {
		wg.Go(func() {
			for n := range each {
				for s.Apply(t.Context(), []counter.Op{moves(fmt.Sprintf("%d/%d", c, n))})[0].Err != nil {
					time.Sleep(5 * time.Millisecond)
				}
				made.Add(1)
			}
		})
	}
	for hung := range int64(hangUps) {
		for made.Load() < (hung+1)*clients*each/(hangUps+1) {
			time.Sleep(time.Millisecond)
		}
		hangUp(t, server, url)
	}
	wg.Wait()
	s.pool.Reset() // nobody may have used some connections since the last of them were ended
	whole(t, s, clients*each)
}

// TestStuckWriter: a process stops while it holds locks. Others go on when the server
// has released the locks.
func TestStuckWriter(t *testing.T) {
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
			close(locked)
			<-release
			return w.write(context.Background(), c)
		})
		if !errors.Is(err, counter.ErrUnavailable) {
			t.Errorf("it wrote without its locks: %v", err)
		}
	})
	<-locked
	deadline := time.Now().Add(20 * time.Second)
	for s.Apply(t.Context(), []counter.Op{with("x", add("e:1", 1))})[0].Err != nil {
		if time.Now().After(deadline) {
			t.Fatal("the lock is held for ever")
		}
	}
	close(release)
	wg.Wait()
	if got, err := s.Read(t.Context(), []string{"e:1"}, "", 0); err != nil || got[0].Value != 2 {
		t.Errorf("%+v, %v", got, err)
	}
}
