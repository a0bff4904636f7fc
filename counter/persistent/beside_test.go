package persistent_test

import (
	"testing"

	"github.com/rs/zerolog"

	"headcount/counter"
	"headcount/counter/persistent"
	"headcount/counter/pgtest"
	"headcount/counter/storetest"
	"headcount/presence/redistest"
)

func openBeside(t testing.TB, cfg persistent.BesideConfig) *persistent.Beside {
	t.Helper()
	cfg.Log = zerolog.New(zerolog.NewTestWriter(t)).Level(zerolog.InfoLevel)
	s, err := persistent.OpenBeside(t.Context(), cfg)
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

func TestCopiesBeside(t *testing.T) {
	pg := pgtest.Single(t)
	storetest.RunCopies(t, func(t testing.TB) storetest.CopyStore {
		return openBeside(t, persistent.BesideConfig{Redis: redistest.Start(t).URL(), Postgres: pg.Database(t), Region: "us", Rules: counter.BuiltinRules()})
	})
}
