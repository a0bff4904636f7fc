package counterpg

import (
	"fmt"
	"testing"
	"time"

	"headcount/counter"
	"headcount/internal/pgtest"
	"headcount/internal/testkit"
)

// until repeats a query until its number is want.
func until(t testing.TB, url, sql string, want int) {
	t.Helper()
	testkit.Eventually(t, fmt.Sprintf("%s: %d", sql, want), func() bool { return pgtest.Query[int](t, url, sql) == want })
}

func often(c *Config) { c.SweepEvery = 20 * time.Millisecond }

func TestServerIdempotencyKeysAreForgottenAfterADay(t *testing.T) {
	server := pgtest.Single(t)
	url := server.Database(t)
	s := open(t, url) // it does not sweep in time
	apply(t, s, with("a", add("e:1", 1)))
	if r := apply(t, s, with("a", add("e:1", 1))); !r.Replay {
		t.Errorf("%+v", r)
	}
	day := "update headcount_identities set until = until - 86400000"
	server.Exec(t, url, day)
	if r := apply(t, s, with("a", add("e:1", 1))); r.Replay || r.Counters[0].Value != 2 {
		t.Errorf("a day later: %+v", r)
	}
	if r := apply(t, s, with("a", add("e:1", 1))); !r.Replay {
		t.Errorf("%+v", r)
	}
	// These are too many for one transaction.
	server.Exec(t, url, fmt.Sprintf("insert into headcount_identities select gen_random_uuid(), 1 from generate_series(1, %d)", 2*sweepRows+10))
	open(t, url, often)
	until(t, url, "select count(*) from headcount_identities", 1)
	if r := apply(t, s, with("a", add("e:1", 1))); !r.Replay {
		t.Errorf("what is young was forgotten: %+v", r)
	}
}

func TestServerWhatWasResetOrDeletedIsSweptAway(t *testing.T) {
	server := pgtest.Single(t)
	url := server.Database(t)
	s := open(t, url, often)
	apply(t, s, with("", edit("m:1", []string{"a"}, nil)))
	server.Exec(t, url, fmt.Sprintf("insert into headcount_members select set_id, 'x' || n from headcount_counters, generate_series(1, %d) n where key = 'm:1'", 2*sweepRows+10))
	server.Exec(t, url, fmt.Sprintf("update headcount_counters set value = value + %d where key = 'm:1'", 2*sweepRows+10))
	apply(t, s, with("", counter.Change{Key: "m:1", Rule: members, Verb: counter.Reset, Reason: "r", By: "b"}))
	apply(t, s, with("", edit("m:1", []string{"b", "c"}, nil)))
	until(t, url, "select count(*) from headcount_members", 2)
	until(t, url, "select count(*) from headcount_ledger", 1)
	apply(t, s, with("", add("e:1", 1)))
	see := counter.Change{Key: "u:1", Rule: &counter.Rule{Match: "u:*", Kind: counter.Unique}, Verb: counter.Edit, Join: []string{"a"}}
	apply(t, s, with("", see))
	if n := pgtest.Query[int](t, url, "select octet_length(registers) from headcount_registers"); n > 40 {
		t.Errorf("one member takes %d bytes", n)
	}
	for _, key := range []string{"m:1", "e:1", "u:1"} {
		apply(t, s, with("", counter.Change{Key: key, Rule: exact, Verb: counter.Delete}))
	}
	for _, table := range []string{"counters", "members", "registers", "ledger", "sweeps"} {
		until(t, url, "select count(*) from headcount_"+table, 0)
	}
}

func TestServerEntriesAreKeptAsLongAsTheRuleSays(t *testing.T) {
	server := pgtest.Single(t)
	url := server.Database(t)
	s := open(t, url, often)
	short := &counter.Rule{Match: "e:*", Kind: counter.Exact, Ledger: time.Hour}
	change := func(rule *counter.Rule, key string) {
		t.Helper()
		apply(t, s, with("", counter.Change{Key: key, Rule: rule, Verb: counter.Add, Delta: 1}))
	}
	for range 3 {
		change(short, "e:1")
		change(exact, "e:2")
	}
	// Two hours pass.
	server.Exec(t, url, "update headcount_ledger set at = at - 7200000; update headcount_sweeps set due = due - 7200000")
	change(exact, "e:2")
	const entries = "select count(*) from headcount_ledger l join headcount_counters c using (ledger_id) where key = "
	until(t, url, entries+"'e:1'", 0)
	change(short, "e:1")
	page, err := s.Ledger(t.Context(), "e:1", 0, 10)
	if err != nil || len(page.Entries) != 1 || page.Entries[0].Seq != 4 || page.Entries[0].Before != 3 {
		t.Errorf("%+v, %v", page, err)
	}
	until(t, url, entries+"'e:2'", 4)
	// The rule changes: what is too old by the new rule goes.
	change(short, "e:2")
	until(t, url, entries+"'e:2'", 2)
	always := &counter.Rule{Match: "e:*", Kind: counter.Exact}
	change(always, "e:2")
	server.Exec(t, url, "update headcount_ledger set at = at - 7200000")
	until(t, url, entries+"'e:1'", 1) // it is looked at later
	until(t, url, entries+"'e:2'", 3)
}

// TestServerHistoryIsForgotten: what was gained is kept as long as the rule says, also of counters that
// nobody touches any more.
func TestServerHistoryIsForgotten(t *testing.T) {
	server := pgtest.Single(t)
	url := server.Database(t)
	s := open(t, url, often)
	views := &counter.Rule{Match: "v:*", Kind: counter.Sum, Buckets: []counter.Bucket{{Step: time.Second, Kept: time.Hour}}}
	view := counter.Change{Key: "v:1", Rule: views, Verb: counter.Add, Delta: 1}
	apply(t, s, with("", view))
	gone := view
	gone.Key = "v:gone"
	apply(t, s, with("", gone))
	for pgtest.Query[int](t, url, "select count(distinct history_id) from headcount_gains") < 2 {
		apply(t, s, with("", view))
		apply(t, s, with("", gone))
	}
	gone.Verb, gone.Delta = counter.Delete, 0
	apply(t, s, with("", gone))
	until(t, url, "select count(distinct history_id) from headcount_gains", 1)
	// Two hours in which nothing happens, and half of what is due is in many rows.
	server.Exec(t, url, "update headcount_gains set number = number - 7200")
	server.Exec(t, url, fmt.Sprintf("insert into headcount_gains select history_id, step, number - 10 - n, 1 from (select * from headcount_gains limit 1) g, generate_series(1, %d) n", sweepRows+10))
	server.Exec(t, url, "insert into headcount_gains select history_id, step, number + 4000, 1 from headcount_gains order by number desc limit 1")
	server.Exec(t, url, "update headcount_sweeps set due = due - 7200000 where step = 1")
	until(t, url, "select count(*) from headcount_gains", 1)
	if n := pgtest.Query[int](t, url, "select count(*) from headcount_sweeps where step = 1 and due > extract(epoch from now()) * 1000"); n != 1 {
		t.Errorf("%d sweeps wait for what is left, want 1", n)
	}
	server.Exec(t, url, "update headcount_gains set number = number - 7200")
	server.Exec(t, url, "update headcount_sweeps set due = 0 where step = 1")
	until(t, url, "select count(*) from headcount_gains", 0)
	until(t, url, "select count(*) from headcount_sweeps", 0)
	for pgtest.Query[int](t, url, "select count(*) from headcount_sweeps where step = 1") < 1 { // it begins anew
		apply(t, s, with("", view))
	}
}
