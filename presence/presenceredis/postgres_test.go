package presenceredis_test

import (
	"errors"
	"testing"

	"headcount/internal/redistest"
	"headcount/presence"
	"headcount/presence/presenceredis"
)

// Gateways and presence nodes agree on the place of PostgreSQL. PostgreSQL can only be added while none of them runs.
// The same holds for data that this release stores in another form than the former release.
func TestServerProcessesAgreeOnPostgres(t *testing.T) {
	server := redistest.Single(t)
	start := func(name, postgres string) (*presenceredis.Store, error) {
		t.Helper()
		s := open(t, server.URL(), quick, func(c *presenceredis.Config) { c.Facts.Postgres = postgres })
		role := presence.RoleGateway
		if postgres == "" {
			role = presence.RoleDispatcher
		}

		_, err := renew(t, s, presence.Process{Name: name, Incarnation: 1, Roles: []string{role}})
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
			t.Errorf("a process with another setting: %v, want ErrFacts", err)
		}
	}

	a := must(start("a:1", "none"))
	must(start("no-counters:1", ""))
	refused(start("b:1", "behind 2"))
	refused(start("b:1", "beside"))
	end(a, "a:1")

	// When the last process has ended, PostgreSQL may be added.
	b := must(start("b:1", "behind 2"))
	if is := fact(); is != "behind 2" {
		t.Errorf("the fact is %v, want \"behind 2\"", is)
	}

	refused(start("a:1", "none"))
	end(b, "b:1")
	refused(start("a:1", "none")) // even if no process runs

	lease := func(roles string) { server.Do(t, "HSET", "hc:{c}:leases", "old:1", "9999999999999 1 "+roles) }
	for _, older := range [][]any{
		{"HSET", "hc:{c}:facts", "postgres", "behind"}, {"HDEL", "hc:{c}:facts", "postgres"},
	} {
		server.Do(t, older...)
		for _, roles := range []string{"dispatcher,gateway", "presence,dispatcher"} {
			lease(roles)
			refused(start("b:1", "behind 2"))
		}
		lease("") // as a process that starts or ends
		if _, err := start("b:1", "behind 2"); !errors.Is(err, presence.ErrUnavailable) {
			t.Errorf("a process that has to wait: %v, want ErrUnavailable", err)
		}

		// Dispatchers have no part in this fact, so an older one may run on.
		lease("dispatcher")
		end(must(start("b:1", "behind 2")), "b:1")
		refused(start("old:2", "behind"))
	}

	// Dispatchers, which do not write it, may have started first.
	server.Do(t, "HDEL", "hc:{c}:facts", "postgres")
	must(start("c:1", "none"))
	if is := fact(); is != "none" {
		t.Errorf("the fact is %v, want \"none\"", is)
	}
}
