package rowspg

import (
	"testing"
	"time"

	"github.com/rs/zerolog"

	"headcount/internal/pgtest"
	"headcount/internal/rows"
	"headcount/internal/rows/rowstest"
	"headcount/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m, pgtest.Stop) }

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
	t.Cleanup(s.Close)

	return s
}

func TestServerContractOfRows(t *testing.T) {
	server := pgtest.Single(t)
	rowstest.Run(t, func(t *testing.T) rows.Store {
		return open(t, server.Database(t), func(c *Config) { c.PollEvery = 10 * time.Millisecond })
	})
}
