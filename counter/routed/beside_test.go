package routed

import (
	"crypto/rand"
	"errors"
	"strings"
	"testing"

	"github.com/rs/zerolog"

	"headcount/counter"
	"headcount/counter/call"
	"headcount/counter/countertest"
	"headcount/counter/owner"
	"headcount/internal/pgtest"
	"headcount/internal/postgres"
	"headcount/internal/redistest"
	"headcount/internal/rows"
	"headcount/internal/rows/rowsredis"
	"headcount/internal/testkit"
)

// regional is the gateway and the owner of a region that has exact counters in PostgreSQL. It owns everything.
type regional struct {
	*Store
	beside  *Beside
	front   *rowsredis.Store
	owner   *owner.Owner
	gateway *call.Store
}

// beginBeside returns a process, which does not end with the test.
func beginBeside(t testing.TB, redis, url string, rules *counter.Rules) *regional {
	t.Helper()
	p := &regional{front: rowsredis.New(rowsredis.Config{Conn: redistest.Dial(t, redis)})}
	var err error
	p.beside, err = OpenBeside(t.Context(), BesideConfig{Owned: p.front, URL: url, Rules: rules, Log: zerolog.Nop()})
	if err != nil {
		t.Fatal(err)
	}

	p.owner = owner.New(p.beside.Rows(), owner.Config{Name: rand.Text(), ExactOutside: true})
	all := make([]int, rows.Partitions)
	for id := range all {
		all[id] = id
	}
	testkit.Eventually(t, "everything is claimed", func() bool { return p.owner.Own(t.Context(), all...) == nil })
	p.gateway = call.NewStore(p.beside.Rows(), call.Everywhere(p.owner), rules, call.Config{Stream: rand.Text()})
	p.Store = p.beside.Over(p.gateway)

	return p
}

// Close implements counter.Store.
func (p *regional) Close() error {
	if p.gateway == nil {
		return nil
	}

	_ = p.gateway.Close()
	p.gateway = nil
	p.owner.Close()
	p.beside.Close()
	p.front.Close()

	return nil
}

func TestServerContractBeside(t *testing.T) {
	countertest.RunParts(t, countertest.Parts{
		"any history ends with the model's counters": "kinds of counters are in Redis or in PostgreSQL",
		"changes at the same time add up":            "batches of one of the two stores",
	}, func(t testing.TB) countertest.Instance {
		redis := redistest.Single(t)
		redis.Flush(t)
		server := pgtest.Single(t)
		url := server.Database(t)
		p := beginBeside(t, redis.URL(), url, countertest.Rules)
		t.Cleanup(func() { _ = p.Close() })

		return countertest.Instance{Store: p, Crash: func(t testing.TB) counter.Store {
			hangUp(t, server, url)
			_ = p.Close()
			p = beginBeside(t, redis.URL(), url, countertest.Rules)
			countertest.AwaitServed(t, p)

			return p
		}}
	})
}

func TestServerCopiesBeside(t *testing.T) {
	countertest.RunCopies(t, func(t testing.TB) countertest.CopyStore {
		p := beginBeside(t, redistest.Start(t).URL(), pgtest.Single(t).Database(t), counter.BuiltinRules())
		t.Cleanup(func() { _ = p.Close() })

		return p
	})
}

// TestServerADatabaseWithRowsIsNotBeside: its counters of other kinds would be hidden.
func TestServerADatabaseWithRowsIsNotBeside(t *testing.T) {
	url := pgtest.Single(t).Database(t)
	whole := openAlone(t, url)
	must(t, whole, op("", add("s:1", 1)))
	if err := whole.Close(); err != nil {
		t.Fatal(err)
	}

	front := rowsredis.New(rowsredis.Config{Conn: redistest.Dial(t, redistest.Single(t).URL())})
	t.Cleanup(front.Close)
	_, err := OpenBeside(t.Context(), BesideConfig{Owned: front, URL: url, Rules: countertest.Rules, Log: zerolog.Nop()})
	if !errors.Is(err, postgres.ErrConfig) || !strings.Contains(err.Error(), "--regions") {
		t.Errorf("it opens, %v", err)
	}
	if _, err := Check(t.Context(), url, UseBeside); !errors.Is(err, postgres.ErrConfig) || !strings.Contains(err.Error(), "--regions") {
		t.Errorf("a check of it says %v", err)
	}
	if _, err := Check(t.Context(), url, UseAlone); err != nil {
		t.Errorf("a check of what it is says %v", err)
	}
}
