package presenceredis_test

import (
	"errors"
	"testing"
	"time"

	"headcount/internal/redistest"
	"headcount/presence"
	"headcount/presence/presenceredis"
)

// Processes agree on where PostgreSQL is. It is added while no other process runs.
func TestProcessesAgreeOnPostgres(t *testing.T) {
	server := redistest.Single(t)
	start := func(name, postgres string) (*presenceredis.Store, error) {
		t.Helper()
		s := open(t, server.URL(), quick, func(c *presenceredis.Config) { c.Facts.Postgres = postgres })
		_, err := renew(t, s, presence.Process{Name: name, Incarnation: 1})
		return s, err
	}
	end := func(s *presenceredis.Store, name string) {
		t.Helper()
		if err := s.Leave(t.Context(), presence.Process{Name: name, Incarnation: 1}); err != nil {
			t.Fatal(err)
		}
	}
	fact := func() any { return server.Do(t, "HMGET", "hc:{c}:facts", "postgres").([]any)[0] }
	must := func(s *presenceredis.Store, err error) *presenceredis.Store {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	refused := func(_ *presenceredis.Store, err error) {
		t.Helper()
		if !errors.Is(err, presence.ErrFacts) {
			t.Errorf("a process that differs: %v", err)
		}
	}

	a := must(start("a:1", "none"))
	must(start("no-counters:1", ""))
	refused(start("b:1", "behind"))
	refused(start("b:1", "beside"))
	end(a, "a:1")
	refused(start("b:1", "behind")) // a process is left
	server.Do(t, "DEL", "hc:{c}:leases")
	b := must(start("b:1", "behind"))
	if is := fact(); is != "behind" {
		t.Errorf("the fact is %v", is)
	}
	refused(start("a:1", "none"))
	end(b, "b:1")
	refused(start("a:1", "none")) // also when nobody runs

	// Where the fact is missing it is not known whether others run without PostgreSQL.
	server.Do(t, "HDEL", "hc:{c}:facts", "postgres")
	server.Do(t, "HSET", "hc:{c}:leases", "old:1", "9999999999999 1 gateway")
	c := must(start("c:1", "behind"))
	if is := fact(); is != nil {
		t.Errorf("beside an older release the fact is %v", is)
	}
	server.Do(t, "HDEL", "hc:{c}:leases", "old:1")
	if _, err := c.Renew(t.Context(), presence.Process{Name: "c:1", Incarnation: 1}, time.Minute); err != nil || fact() != "behind" {
		t.Errorf("alone: %v, the fact is %v", err, fact())
	}
}
