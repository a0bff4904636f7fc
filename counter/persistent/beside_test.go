package persistent_test

import (
	"flag"
	"testing"

	"github.com/rs/zerolog"

	"headcount/counter"
	"headcount/counter/persistent"
	"headcount/counter/pgtest"
	"headcount/counter/storetest"
	"headcount/presence/redistest"
)

var contractBeside = flag.Bool("beside", false, "run the whole contract over Redis and PostgreSQL beside each other, which takes a minute and a half")

// ofBoth are the parts of the contract in which what a store in Redis and one in PostgreSQL promise does not follow from what each
// of them promises by itself: operations, identities and answers are of both.
var ofBoth = []string{
	"an operation of many changes is all or none",
	"an identity is made once",
	"one identity at the same time",
	"changes at the same time add up",
	"aggregates",
	"a crash loses nothing that was acknowledged",
}

func openBeside(t testing.TB, cfg persistent.BesideConfig) *persistent.Beside {
	t.Helper()
	cfg.Log = zerolog.New(zerolog.NewTestWriter(t)).Level(zerolog.InfoLevel)
	s, err := persistent.OpenBeside(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	closes(t, s)
	return s
}

func TestCopiesBeside(t *testing.T) {
	pg := pgtest.Single(t)
	storetest.RunCopies(t, func(t testing.TB) storetest.CopyStore {
		return openBeside(t, persistent.BesideConfig{Redis: redistest.Start(t).URL(), Postgres: pg.Database(t), Region: "us", Rules: counter.BuiltinRules()})
	})
}

// The contract as far as both stores take part. All of it: go test ./counter/persistent -run TestContractBeside -beside. A third of
// that time are the random histories with their crashes, a third the opening of a database and two stores for each part, and the
// rest waits for clocks: steps that end, limits that come back, servers that are away.
func TestContractBeside(t *testing.T) {
	parts := ofBoth
	if *contractBeside {
		parts = nil
	}
	rules, err := counter.ParseRules([]byte(`{"rules":[{"match":"e:*","kind":"exact"},{"match":"k:*","kind":"exact"},{"match":"l","kind":"exact"},{"match":"*","kind":"sum"}]}`))
	if err != nil {
		t.Fatal(err)
	}
	server := redistest.Start(t, redistest.Durable...)
	storetest.Run(t, func(t testing.TB) storetest.Instance {
		server.Flush(t)
		pg := pgtest.Single(t)
		cfg := persistent.BesideConfig{Redis: server.URL(), Postgres: pg.Database(t), Region: "us", Rules: rules}
		crashes := 0
		return storetest.Instance{
			Store: openBeside(t, cfg),
			Peer:  openBeside(t, cfg),
			Crash: func(t testing.TB) counter.Store {
				switch crashes % 12 {
				case 0:
					server.Restart(t)
				case 6:
					pg.Restart(t)
				}
				crashes++
				s := openBeside(t, cfg)
				storetest.AwaitServed(t, s)
				return s
			},
			Cut: func(t testing.TB) func() {
				server.Kill()
				pg.Kill()
				return func() {
					pg.Restart(t)
					server.Restart(t)
				}
			},
		}
	}, parts...)
}
