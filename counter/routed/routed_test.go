package routed

import (
	"testing"

	"github.com/rs/zerolog"

	"headcount/counter"
	"headcount/counter/countertest"
	"headcount/internal/pgtest"
	"headcount/internal/redistest"
	"headcount/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m, pgtest.Stop, redistest.Stop) }

// openAlone returns a store that is closed when the test ends, unless it was closed before.
func openAlone(t testing.TB, url string, with ...func(*AloneConfig)) *Alone {
	t.Helper()
	cfg := AloneConfig{URL: url, Rules: countertest.Rules, Log: zerolog.Nop()}
	for _, w := range with {
		w(&cfg)
	}
	s, err := OpenAlone(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })

	return s
}

// hangUp ends all connections to the database, whatever they are doing.
func hangUp(t testing.TB, server *pgtest.Server, url string) {
	t.Helper()
	name := pgtest.Query[string](t, url, "select current_database()")
	server.Exec(t, server.URL("postgres"),
		"select pg_terminate_backend(pid) from pg_stat_activity where datname = '"+name+"'")
}

func alone(t testing.TB) countertest.Instance {
	server := pgtest.Single(t)
	url := server.Database(t)
	s := openAlone(t, url)
	crashes := 0

	return countertest.Instance{
		Store: s,
		Crash: func(t testing.TB) counter.Store {
			// A killed process breaks its connections. Sometimes the server is killed, too.
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

			s = openAlone(t, url)
			return s
		},
		Cut: func(t testing.TB) func() {
			server.Kill()
			return func() { server.Restart(t) }
		},
	}
}

func TestServerContractAlone(t *testing.T) {
	countertest.RunParts(t, countertest.Parts{
		"any history ends with the model's counters": "exact counters are judged in SQL",
		"64 bits are kept to the last":               "columns have types",
		"many members and changes at once":           "a commit is one statement",
		"steps of time add up":                       "exact counters have theirs in tables",
		"ledger in pages":                            "exact counters have theirs in tables",
		"a merged change":                            "exact counters are not merged",
		"aggregates":                                 "of two stores",
		"sets are listed":                            "scans of two stores",
		"a watcher hears what it follows":            "two feeds",
		"a watcher hears a delete once":              "two feeds",
		"a store that is away":                       "the server is killed",
		"a closed store is unavailable, and says so": "two stores",
	}, alone)
}

func TestServerCopiesAlone(t *testing.T) {
	server := pgtest.Single(t)
	countertest.RunCopies(t, func(t testing.TB) countertest.CopyStore {
		return openAlone(t, server.Database(t), func(c *AloneConfig) { c.Rules = counter.BuiltinRules() })
	})
}
