package tiered_test

import (
	"flag"
	"fmt"
	"io"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/rs/zerolog"

	"headcount/counter"
	"headcount/counter/countertest"
	"headcount/counter/tiered"
	"headcount/internal/pgtest"
	"headcount/internal/redistest"
	"headcount/internal/testkit"
)

func TestMain(m *testing.M) {
	if err := flag.Set("rapid.checks", strconv.Itoa(countertest.FewChecks)); err != nil {
		panic(err)
	}
	testkit.Main(m, redistest.Stop, pgtest.Stop)
}

// open returns a store that ends with the test.
func open(t testing.TB, cfg tiered.Config) *tiered.Store {
	t.Helper()
	cfg.Log = zerolog.New(zerolog.NewTestWriter(t)).Level(zerolog.InfoLevel)
	s, err := tiered.Open(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	closes(t, s)
	return s
}

// closes has a store end with the test.
func closes(t testing.TB, s io.Closer) {
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Errorf("Close: %v", err)
		}
	})
}

// instance is two stores that begin opens. After a crash another process goes on. The first crash and then one in every
// crashes also kills Redis or PostgreSQL.
func instance(t testing.TB, begin func(testing.TB) counter.Store, redis []*redistest.Server, pg *pgtest.Server, every int) countertest.Instance {
	s := begin(t)
	crashes := 0
	return countertest.Instance{
		Store: s,
		Peer:  begin(t),
		Crash: func(t testing.TB) counter.Store {
			switch {
			case crashes%every != 0:
			case crashes/every%2 == 0:
				redis[crashes/every/2%len(redis)].Restart(t)
			default:
				pg.Restart(t)
			}
			crashes++
			if err := s.Close(); err != nil { // it leaves in Redis what is not persisted, as a killed process does
				t.Error(err)
			}
			s = begin(t)
			countertest.AwaitServed(t, s)
			return s
		},
		Cut: func(t testing.TB) func() {
			for _, server := range redis {
				server.Kill()
			}
			pg.Kill()
			return func() {
				pg.Restart(t)
				for _, server := range redis {
					server.Restart(t)
				}
			}
		},
	}
}

func TestServerContractOnOneServer(t *testing.T) {
	t.Parallel()
	server, pg := redistest.StartSecure(t, redistest.Durable...), pgtest.Start(t)
	countertest.RunParts(t, countertest.Parts{
		"any history ends with the model's counters": "counters are loaded and persisted on the way",
		"changes at the same time add up":            "counters are persisted meanwhile, and both servers are killed",
	}, func(t testing.TB) countertest.Instance {
		server.Flush(t)
		cfg := tiered.Config{Redis: redistest.Dial(t, server.URL()), Postgres: pg.Database(t), PersistInterval: 100 * time.Millisecond, Rules: countertest.Rules}
		return instance(t, func(t testing.TB) counter.Store { return open(t, cfg) }, []*redistest.Server{server}, pg, 6)
	})
}

func TestServerContractOnCluster(t *testing.T) {
	t.Parallel()
	cluster, pg := redistest.StartCluster(t, 3, 0, redistest.Durable...), pgtest.Start(t)
	countertest.RunParts(t, countertest.Parts{
		"any history ends with the model's counters": "checkpoints have counters of several slots",
		"changes at the same time add up":            "batches over several masters, some of which are killed",
	}, func(t testing.TB) countertest.Instance {
		cluster.Flush(t)
		cfg := tiered.Config{Redis: redistest.Dial(t, cluster.URL()), Postgres: pg.Database(t), PersistInterval: 100 * time.Millisecond, Rules: countertest.Rules}
		return instance(t, func(t testing.TB) counter.Store { return open(t, cfg) }, cluster.Masters, pg, 12)
	})
}

// TestServerALargeSetIsLoadedOnce: many visitors ask for a large set that is not in Redis. It comes there once, and not within a
// call, which may not wait for as long as that lasts.
func TestServerALargeSetIsLoadedOnce(t *testing.T) {
	server := redistest.Start(t)
	pg := pgtest.Single(t)
	url := pg.Database(t)
	cfg := tiered.Config{Rules: countertest.Rules, Redis: redistest.Dial(t, server.URL()), Postgres: url, PersistInterval: time.Hour}
	s := open(t, cfg)
	const members, readers = 100_000, 24
	apply(t, s, op("", edit(likes, "l:1", []string{"7"}, nil)))
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	pg.Exec(t, url, fmt.Sprintf("insert into headcount_members (set_id, member) select set_id, g::text from headcount_counters, generate_series(8, %d) g where key = 'l:1'", members+6))
	pg.Exec(t, url, fmt.Sprintf("update headcount_counters set value = %d where key = 'l:1'", members))
	server.Flush(t)
	s = open(t, cfg)
	countertest.AwaitServed(t, s)
	server.Do(t, "CONFIG", "RESETSTAT")
	var wg sync.WaitGroup
	for range readers {
		wg.Go(func() {
			read, err := s.Read(t.Context(), []string{"l:1"}, "7", 0)
			if err != nil || read[0].Value != members || !read[0].Mine {
				t.Errorf("%+v, %v", read, err)
			}
		})
	}
	wg.Wait()
	testkit.Eventually(t, "the set can be changed", func() bool {
		r := s.Apply(t.Context(), []counter.Op{op("", edit(likes, "l:1", []string{"new"}, nil))})[0]
		return r.Err == nil && r.Counters[0].Value == members+1
	})
	stats := server.Do(t, "INFO", "commandstats").(string)
	_, stats, _ = strings.Cut(stats, "cmdstat_pexpire:calls=") // each script that stages members makes one
	calls, _, _ := strings.Cut(stats, ",")
	if staged, err := strconv.Atoi(calls); err != nil || staged == 0 || staged > 4*members/5000 { // a busy machine may fail a first try
		t.Errorf("members were staged in %q steps", calls)
	}
}

func TestServerCopies(t *testing.T) {
	pg := pgtest.Single(t)
	countertest.RunCopies(t, func(t testing.TB) countertest.CopyStore {
		return open(t, tiered.Config{Redis: redistest.Dial(t, redistest.Start(t).URL()), Postgres: pg.Database(t), PersistInterval: 100 * time.Millisecond})
	})
}
