package tiered_test

import (
	"testing"

	"github.com/rs/zerolog"

	"headcount/counter"
	"headcount/counter/countertest"
	"headcount/counter/tiered"
	"headcount/internal/pgtest"
	"headcount/internal/redistest"
)

func openBeside(t testing.TB, cfg tiered.Config) *tiered.Beside {
	t.Helper()
	cfg.Log = zerolog.New(zerolog.NewTestWriter(t)).Level(zerolog.InfoLevel)
	s, err := tiered.OpenBeside(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	closes(t, s)
	return s
}

func TestServerCopiesBeside(t *testing.T) {
	pg := pgtest.Single(t)
	countertest.RunCopies(t, func(t testing.TB) countertest.CopyStore {
		return openBeside(t, tiered.Config{Redis: redistest.Dial(t, redistest.Start(t).URL()), Postgres: pg.Database(t), Region: "us", Rules: counter.BuiltinRules()})
	})
}

func TestServerContractBeside(t *testing.T) {
	t.Parallel()
	server, pg := redistest.Start(t, redistest.Durable...), pgtest.Start(t)
	countertest.RunParts(t, countertest.Parts{
		"any history ends with the model's counters": "kinds of counters are in Redis or in PostgreSQL",
		"changes at the same time add up":            "batches of one of the two stores, which are killed",
	}, func(t testing.TB) countertest.Instance {
		server.Flush(t)
		cfg := tiered.Config{Redis: redistest.Dial(t, server.URL()), Postgres: pg.Database(t), Region: "us", Rules: countertest.Rules}
		return instance(t, func(t testing.TB) counter.Store { return openBeside(t, cfg) }, []*redistest.Server{server}, pg, 6)
	})
}
