package counterpg

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/rs/zerolog"

	"headcount/counter"
	"headcount/counter/countertest"
	"headcount/internal/pgtest"
	"headcount/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m, pgtest.Stop) }

// open returns a store that ends with the test, unless it was closed before.
func open(t testing.TB, url string, with ...func(*Config)) *Store {
	t.Helper()
	cfg := Config{URL: url, Log: zerolog.Nop()}
	for _, w := range with {
		w(&cfg)
	}
	s, err := Open(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Errorf("Close: %v", err)
		}
	})
	return s
}

// hangUp ends all connections of the database, in the middle of what they do.
func hangUp(t testing.TB, server *pgtest.Server, url string) {
	t.Helper()
	name := pgtest.Query[string](t, url, "select current_database()")
	server.Exec(t, server.URL("postgres"), "select pg_terminate_backend(pid) from pg_stat_activity where datname = '"+name+"'")
}

func instance(t testing.TB) countertest.Instance {
	server := pgtest.Single(t)
	url := server.Database(t)
	s := open(t, url)
	crashes := 0
	return countertest.Instance{
		Store: s,
		Peer:  open(t, url),
		Crash: func(t testing.TB) counter.Store {
			// A process that is killed leaves connections that end; sometimes the
			// server is killed too.
			if crashes%8 == 0 {
				server.Kill()
				server.Restart(t)
			} else {
				hangUp(t, server, url)
			}
			crashes++
			if err := s.Close(); err != nil {
				t.Error(err)
			}
			s = open(t, url)
			return s
		},
		Cut: func(t testing.TB) func() {
			server.Kill()
			return func() { server.Restart(t) }
		},
	}
}

func TestServerContractInPostgres(t *testing.T) {
	countertest.RunParts(t, countertest.Parts{
		"any history ends with the model's counters": "SQL makes the changes",
		"64 bits are kept to the last":               "SQL adds up",
		"many members and changes at once":           "sizes of statements",
		"steps of time add up":                       "rows of their own, and SQL that adds them up",
		"marks of what gained most":                  "SQL sorts",
		"ledger in pages":                            "rows of their own",
		"aggregates":                                 "SQL adds up, by patterns of its own",
		"sets are listed":                            "SQL sorts by a collation",
		"a watcher hears what it follows":            "notifications of PostgreSQL",
		"64 clients fight for the last 10":           "locks of rows",
		"changes at the same time add up":            "locks of rows",
		"a store that is away":                       "errors of connections",
		"limits end as the model's":                  "SQL keeps the windows",
		"64 clients fight for 100":                   "locks of rows",
	}, instance)
}

var (
	exact   = &counter.Rule{Match: "e:*", Kind: counter.Exact, Ledger: counter.DefaultLedger}
	members = &counter.Rule{Match: "m:*", Kind: counter.Members, Ledger: counter.DefaultLedger}
)

func add(key string, delta int64) counter.Change {
	return counter.Change{Key: key, Rule: exact, Verb: counter.Add, Delta: delta}
}

func edit(key string, join, leave []string) counter.Change {
	return counter.Change{Key: key, Rule: members, Verb: counter.Edit, Join: join, Leave: leave}
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

// states is what OnState said last.
type states struct {
	mu      sync.Mutex
	up, any bool
}

func (s *states) StoreState(up bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.up, s.any = up, true
}

// await waits until the newest state is up.
func (s *states) await(t testing.TB, up bool) {
	t.Helper()
	testkit.Eventually(t, fmt.Sprintf("the store is up: %t", up), func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		return s.any && s.up == up
	})
}

func TestBadSettings(t *testing.T) {
	for name, url := range map[string]string{
		"no URL":        "",
		"another store": "redis://localhost",
		"a bad port":    "postgres://u:secret@localhost:99999/d",
		"a bad mode":    "postgres://u:secret@localhost/d?sslmode=perhaps",
	} {
		_, err := Open(t.Context(), Config{URL: url})
		if !errors.Is(err, ErrConfig) || strings.Contains(err.Error(), "secret") || strings.Contains(err.Error(), "\n") {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestServerDatabasesThatCannotBeUsedAreRefused(t *testing.T) {
	server := pgtest.Single(t)
	newer := server.Database(t)
	if err := open(t, newer).Close(); err != nil {
		t.Fatal(err)
	}
	server.Exec(t, newer, "insert into headcount_migrations (version_id, is_applied) values (99, true)")
	_, err := Open(t.Context(), Config{URL: newer, Log: zerolog.Nop()})
	if !errors.Is(err, ErrNewer) || !errors.Is(err, ErrConfig) || strings.Contains(err.Error(), "\n") {
		t.Errorf("a newer database: %v", err)
	}
	server.Exec(t, server.URL("postgres"), "create database latin encoding 'LATIN1' template template0")
	if _, err = Open(t.Context(), Config{URL: server.URL("latin"), Log: zerolog.Nop()}); !errors.Is(err, ErrConfig) || !strings.Contains(err.Error(), "UTF8") {
		t.Errorf("a database in LATIN1: %v", err)
	}
}

func TestServerManyProcessesMakeTheTablesAtOnce(t *testing.T) {
	server := pgtest.Single(t)
	url := server.Database(t)
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			state := &states{}
			s, err := Open(t.Context(), Config{URL: url, Log: zerolog.Nop(), OnState: state})
			if err != nil {
				t.Error(err)
				return
			}
			defer s.Close()
			state.await(t, true)
			if r := s.Apply(t.Context(), []counter.Op{with("", add("e:1", 1))})[0]; r.Err != nil {
				t.Error(r.Err)
			}
		})
	}
	wg.Wait()
	if n := pgtest.Query[int64](t, url, "select value from headcount_counters where key = 'e:1'"); n != 4 {
		t.Errorf("the counter is %d", n)
	}
	if n := pgtest.Query[int](t, url, "select count(*) from headcount_migrations where version_id = 1"); n != 1 {
		t.Errorf("the first migration was made %d times", n)
	}
}

func TestServerCopies(t *testing.T) {
	server := pgtest.Single(t)
	countertest.RunCopies(t, func(t testing.TB) countertest.CopyStore { return open(t, server.Database(t)) })
}

// A URL that an application with Prisma shares works.
func TestServerTakesAURLOfPrisma(t *testing.T) {
	url := pgtest.Single(t).Database(t)
	sign := "?"
	if strings.Contains(url, "?") {
		sign = "&"
	}
	s := open(t, url+sign+"schema=public&pgbouncer=true&connection_limit=5&pool_timeout=10")
	if _, err := s.Read(t.Context(), []string{"k"}, "", 0); err != nil {
		t.Error(err)
	}
}
