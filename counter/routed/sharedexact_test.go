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
	"headcount/internal/rows/rowsredis"
)

// beginSharedExact returns a process with PostgreSQL beside Redis, which is ended when the test ends.
func (s *stores) beginSharedExact(t testing.TB) *process {
	t.Helper()
	p := &process{redis: rowsredis.New(rowsredis.Config{Conn: redistest.Dial(t, s.redis.URL())})}
	t.Cleanup(func() { _ = p.Close() })
	var err error
	p.shared, err = OpenSharedExact(t.Context(),
		SharedExactConfig{Owned: p.redis, URL: s.url, Rules: countertest.Rules, Log: zerolog.Nop()})
	if err != nil {
		t.Fatal(err)
	}

	p.own(t, p.shared.Rows(), owner.Config{})
	p.gateway = call.NewStore(p.shared.Rows(), countertest.Everywhere{Owner: p.owner}, countertest.Rules,
		call.Config{Stream: rand.Text()})
	p.Store = p.shared.NewStore(p.gateway)

	return p
}

func TestServerContractSharedExact(t *testing.T) {
	countertest.RunParts(t, countertest.Parts{
		"any history ends with the model's counters": "kinds of counters are in Redis or in PostgreSQL",
	}, func(t testing.TB) countertest.Instance {
		in := newStores(t)
		p := in.beginSharedExact(t)

		return countertest.Instance{Store: p, Crash: func(t testing.TB) counter.Store {
			hangUp(t, in.postgres, in.url)
			_ = p.Close()
			p = in.beginSharedExact(t)
			countertest.AwaitServed(t, p)

			return p
		}}
	})
}

// TestServerADatabaseWithRowsIsNotSharedExact: a PostgreSQL with counters of all kinds is refused for exact ones alone,
// because the others would be hidden.
func TestServerADatabaseWithRowsIsNotSharedExact(t *testing.T) {
	url := pgtest.Single(t).Database(t)
	whole := openAlone(t, url)
	must(t, whole, op("", add("s:1", 1)))
	if err := whole.Close(); err != nil {
		t.Fatal(err)
	}

	front := rowsredis.New(rowsredis.Config{Conn: redistest.Dial(t, redistest.Single(t).URL())})
	t.Cleanup(front.Close)
	_, err := OpenSharedExact(t.Context(), SharedExactConfig{
		Owned: front, URL: url, Rules: countertest.Rules, Log: zerolog.Nop(),
	})
	if !errors.Is(err, postgres.ErrConfig) || !strings.Contains(err.Error(), "--regions") {
		t.Errorf("opening it for exact counters alone returns %v, want ErrConfig about --regions", err)
	}

	_, err = Check(t.Context(), url, UseSharedExact)
	if !errors.Is(err, postgres.ErrConfig) || !strings.Contains(err.Error(), "--regions") {
		t.Errorf("a check of it returns %v, want ErrConfig about --regions", err)
	}
	if _, err := Check(t.Context(), url, UseAlone); err != nil {
		t.Errorf("a check for its present use returns %v, want no error", err)
	}
}
