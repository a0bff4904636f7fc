package routed

import (
	"testing"

	"headcount/counter"
	"headcount/internal/pgtest"
)

// TestServerAnImportUnderOtherRules: an import whose rules are not those of the server, as without --counters, makes no
// counter one of another kind. A server with the right rules then has all of them.
func TestServerAnImportUnderOtherRules(t *testing.T) {
	parse := func(text string) *counter.Rules {
		rules, err := counter.ParseRules([]byte(text))
		if err != nil {
			t.Fatal(err)
		}

		return rules
	}
	others := parse(`{"rules":[{"match":"set:*","kind":"exact"},{"match":"*","kind":"sum"}]}`)
	own := parse(`{"rules":[{"match":"set:*","kind":"members"},{"match":"*","kind":"exact"}]}`)

	url := pgtest.Single(t).Database(t)
	importing := openAlone(t, url, func(c *AloneConfig) { c.Rules = others })
	version := counter.Version{Incarnation: 1, Sequence: 1}
	set := counter.Copy{Key: "set:1", State: counter.State{Kind: counter.Members, Value: 1, Version: version}}
	set.Members = []string{"a"}
	exact := counter.Copy{Key: "stock:1", State: counter.State{Kind: counter.Exact, Value: 5, Version: version}}
	if n, err := importing.Restore(t.Context(), []counter.Copy{set, exact}, others); n != 2 || err != nil {
		t.Fatalf("%d counters are restored, %v; want 2", n, err)
	}
	if err := importing.Close(); err != nil {
		t.Fatal(err)
	}

	s := openAlone(t, url, func(c *AloneConfig) { c.Rules = own })
	read, err := s.Read(t.Context(), []string{set.Key, exact.Key}, "a", 0)
	if err != nil || !read[0].Mine || read[0].Kind != counter.Members || read[1].Value != 5 {
		t.Errorf("the server reads %+v, %v; want a in the set, and the value 5", read, err)
	}

	leave := counter.Change{Key: set.Key, Rule: own.Find(set.Key), Verb: counter.Edit, Leave: []string{"a"}}
	take := counter.Change{Key: exact.Key, Rule: own.Find(exact.Key), Verb: counter.Add, Delta: -2}
	for _, c := range []counter.Change{leave, take} {
		r := s.Apply(t.Context(), []counter.Op{{Changes: []counter.Change{c}}})[0]
		if r.Err != nil || r.Counters[0].Version.Sequence != 2 {
			t.Errorf("a change of %s returns %+v, want the second version", c.Key, r)
		}
	}
}
