package counterapi

import (
	"fmt"
	"strconv"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"headcount/counter"
	"headcount/gateway/bounds"
)

// vote makes users of one address change a counter each, and returns how many of the changes were made.
func (s *served) vote(t *testing.T, from, users int, key func(n int) string, lines func(n int) []string) (made int) {
	t.Helper()
	for n := from; n < from+users; n++ {
		w := s.do("POST /"+key(n)+"/increment", "", append(lines(n), "User: "+strconv.Itoa(n))...)
		switch w.Code {
		case 200:
			made++
		case 429:
			wantProblem(t, w, 429, "")
		default:
			t.Fatalf("%d %s", w.Code, w.Body)
		}
	}

	return made
}

func anonymous(n int) []string { return []string{fmt.Sprintf("Headcount-Id: id %d", n)} }
func withToken(int) []string   { return nil }
func same(int) string          { return "votes:same" }
func fresh(n int) string       { return fmt.Sprintf("votes:%d", n) }

// Identities cost nothing, so an address may not make more changes, however many identities it brings.
func TestAnAddressIsBoundedWhoeverItSaysItIs(t *testing.T) {
	for name, tc := range map[string]struct {
		key      func(int) string
		lines    func(int) []string
		bound    *bounds.Bound
		users    int
		existing bool
	}{
		"anonymous users of one counter": {same, anonymous, bounds.IdentitiesOfChanges, 2000, true},
		"users with tokens":              {same, withToken, bounds.ChangesOfAddress, 3000, true},
		"new counters":                   {fresh, withToken, bounds.NewCounters, 900, false},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := serve(t, nil)
				// In a bubble no time passes during the calls, so exactly the burst is made.
				if made := s.vote(t, 0, tc.users, tc.key, tc.lines); made != tc.bound.Burst {
					t.Errorf("%d changes were made at once, want %d", made, tc.bound.Burst)
				}

				time.Sleep(time.Second)
				if made := s.vote(t, tc.users, tc.users, tc.key, tc.lines); made != tc.bound.PerSecond {
					t.Errorf("%d changes were made a second later, want %d", made, tc.bound.PerSecond)
				}

				if w := s.do("POST /votes:same/increment", "", key); w.Code != 200 {
					t.Errorf("a call with an API key is answered %d, want 200", w.Code)
				}

				// Whoever has made a change before is not locked out by the flood.
				time.Sleep(10 * time.Second)
				if made := s.vote(t, 0, 10, tc.key, tc.lines); made != 10 {
					t.Errorf("%d of the first 10 users may change again, want all", made)
				}
			})
		})
	}
}

// Under an open rule visitors can create at most max counters. Existing ones work on, and servers may create more.
func TestTheNumberOfOpenCountersIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		parsed, err := counter.ParseRules([]byte(`{"rules":[{"match":"votes:*","kind":"sum",` +
			`"public":["increment"],"max":5},{"match":"*","kind":"sum"}]}`))
		if err != nil {
			t.Fatal(err)
		}

		registry := prometheus.NewRegistry()
		s := serve(t, func(cfg *Config) { cfg.Rules, cfg.Registerer = parsed, registry })

		for _, key := range []string{"votes:a", "votes:b", "others:1", "others:2"} {
			s.want("POST /"+key+"/increment", "", 200, one(key, "sum", 1, "1"))
		}

		if made := s.vote(t, 0, 10, fresh, withToken); made != 3 {
			t.Errorf("%d counters were made beside two, want 3", made)
		}
		// The bound is on counters and not on changes: a full rule must not stop the counters that exist.
		if made := s.vote(t, 0, 3, fresh, withToken); made != 3 {
			t.Errorf("%d of 3 counters can still be changed", made)
		}

		s.want("POST /votes:c/increment", "", 200, one("votes:c", "sum", 1, "1"))
		wantProblem(t, s.do("POST /votes:x/increment", "", "User: x"), 429, "see max")

		if full := callsWith(t, registry, "full"); full != 8 {
			t.Errorf("%v calls are counted as full, want 8", full)
		}

		// After a while the number of counters is read again.
		for _, key := range []string{"votes:a", "votes:b", "votes:c"} {
			s.want("DELETE /"+key, "", 204, "")
		}

		time.Sleep(sizeAge + time.Second)
		if made := s.vote(t, 10, 10, fresh, withToken); made != 2 {
			t.Errorf("after 3 of 6 were deleted %d were made, want 2", made)
		}
	})
}

// callsWith returns how many changes had that outcome.
func callsWith(t *testing.T, from prometheus.Gatherer, name string) float64 {
	t.Helper()
	families, err := from.Gather()
	if err != nil {
		t.Fatal(err)
	}

	for _, f := range families {
		for _, m := range f.GetMetric() {
			if f.GetName() == "headcount_counter_calls_total" && m.GetLabel()[0].GetValue() == name {
				return m.GetCounter().GetValue()
			}
		}
	}

	t.Fatal("the metric does not exist")
	return 0
}
