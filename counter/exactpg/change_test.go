package exactpg

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
	"unicode"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/rs/zerolog"

	"headcount/counter"
	"headcount/counter/countertest"
	"headcount/internal/pgtest"
	"headcount/internal/postgres"
	"headcount/internal/testkit"
	"headcount/presence"
)

func parseRules(t testing.TB, text string) *counter.Rules {
	t.Helper()
	rules, err := counter.ParseRules([]byte(`{"rules":[` + text + `]}`))
	if err != nil {
		t.Fatal(err)
	}

	return rules.For([]presence.Site{presence.DefaultSite, presence.SiteOf("shop")})
}

// stock has special characters of LIKE and regular expressions, which have no meaning in a match.
const stock = `{"match":"e:%_.*","kind":"sum"},{"match":"e:one","kind":"exact","floor":0,"ceiling":3},` +
	`{"match":"e:o*","kind":"members"},` +
	`{"match":"e:*","kind":"exact","floor":0,"ceiling":1000},{"match":"free:*","kind":"exact","ledger":"1h"},` +
	`{"match":"*","kind":"sum"}`

// sold collects the counters that ServeSQL publishes.
type sold struct {
	mu  sync.Mutex
	all []counter.Counter
}

func (s *sold) changed(some []counter.Counter) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.all = append(s.all, some...)
}

func (s *sold) counters() []counter.Counter {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.all)
}

// serve runs ServeSQL until the test ends. When it returns, the function exists.
func serve(t testing.TB, s *Store, rules *counter.Rules) *sold {
	t.Helper()
	if !s.makeChange(t.Context(), rules) {
		t.Fatal("ServeSQL did not create the function")
	}

	out := &sold{}
	ctx, stop := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() { s.ServeSQL(ctx, rules, out.changed) })
	t.Cleanup(func() {
		stop()
		wg.Wait()
	})

	return out
}

// shop returns the URL of the database for a role that is only a member of headcount_app.
func shop(t testing.TB, server *pgtest.Server, url string) string {
	t.Helper()
	server.Exec(t, url, `do $$ begin
		if to_regrole('shop') is null then create role shop login; end if;
		grant headcount_app to shop;
	end $$`)

	return strings.Replace(url, "headcount@", "shop@", 1)
}

func connect(t testing.TB, url string) *pgx.Conn {
	t.Helper()
	c, err := pgx.Connect(t.Context(), url)
	if err != nil {
		t.Fatal(err)
	}

	t.Cleanup(func() { _ = c.Close(context.Background()) })
	return c
}

// change calls the function. id is an idempotency key, or empty.
func change(ctx context.Context, c interface {
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}, key string, delta int64, id string) (value int64, err error) {
	var with *string
	if id != "" {
		with = &id
	}

	err = c.QueryRow(ctx, `select headcount.change($1, $2, reason => 'order 7', author => 'shop', idempotency_key `+
		`=> $3)`, key, delta, with).Scan(&value)

	return value, err
}

func once(key, id string, rules *counter.Rules, delta int64) counter.Op {
	op := counter.Op{
		Changes: []counter.Change{
			{Key: key, Rule: rules.Find(key), Verb: counter.Add, Delta: delta, Reason: "order 7", By: "shop"},
		},
	}

	if id != "" {
		op.IdempotencyKey = counter.NewIdempotencyKey(key, "", id)
	}

	return op
}

// TestServerSQLArguments: what the function makes of its text arguments. All parts use one database.
func TestServerSQLArguments(t *testing.T) {
	server := pgtest.Single(t)
	url := server.Database(t)
	serve(t, open(t, url), parseRules(t, stock))
	server.Exec(t, url, `create collation public.loose (provider = icu, locale = 'und-u-ks-level1', deterministic = `+
		`false)`)
	app := connect(t, shop(t, server, url))

	t.Log("a key is hashed as in Go")
	hashesKeys(t, connect(t, url))
	t.Log("arguments may be columns of any collation")
	takesCollations(t, app)
	t.Log("the characters that CheckKey accepts are accepted")
	acceptsKeys(t, app)
}

func hashesKeys(t *testing.T, c *pgx.Conn) {
	// Texts of all lengths around the blocks of the hash, with characters of one to four bytes.
	letters := []rune("ab:1 äß€😀")
	for size := 0; size < 300; size += 1 + size/40 {
		text := ""
		for range size {
			text += string(letters[rand.IntN(len(letters))])
		}

		for space, key := range map[string]string{text: "k", "k" + text: text + "k"} {
			var id [16]byte
			if err := c.QueryRow(t.Context(), `select headcount.identity($1, $2)`, space, key).Scan(&id); err != nil {
				t.Fatal(err)
			}
			if want := counter.NewIdempotencyKey(space, "", key); id != want {
				t.Fatalf("the identity of %d bytes and %q is %x, want %x", len(space), space, id, want)
			}
		}
	}
}

func takesCollations(t *testing.T, c *pgx.Conn) {
	for n, collation := range []string{`"C"`, `"POSIX"`, `public.loose`} {
		var value int64
		err := c.QueryRow(t.Context(), strings.ReplaceAll(`select headcount.change(k, 1, k, k, k || $1, s)
			from (select 'e:é' collate ? as k, 'shop' collate ? as s) v`, "?", collation), fmt.Sprint(n)).Scan(&value)
		if err != nil || value != int64(n+1) {
			t.Errorf("with the collation %s the value is %d, %v; want %d", collation, value, err, n+1)
		}
	}
}

// acceptsKeys tries the first and last characters of all ranges.
func acceptsKeys(t *testing.T, c *pgx.Conn) {
	is := func(r rune) bool { return unicode.IsPrint(r) }
	tried := 0

	// Within a range of characters all are treated alike.
	for r := rune(1); r <= unicode.MaxRune; r++ {
		if r > 0x180 && is(r) == is(r-1) && is(r) == is(r+1) || r >= 0xd800 && r < 0xe000 {
			continue
		}

		tried++
		key := "e:" + string(r) + "a"
		_, err := change(t.Context(), c, key, 0, "")
		if err == nil || postgres.Code(err) != "22023" ||
			strings.Contains(err.Error(), " key: ") != (counter.CheckKey(key) != nil) {
			t.Errorf("%U: %v, want %v", r, err, counter.CheckKey(key))
		}
	}

	if tried < 1000 {
		t.Errorf("only %d characters were tried", tried)
	}
}

// TestServerSQLAndApplyAreOne makes the same random changes in two databases: in one by Apply alone, and in the other
// by Apply and by SQL.
func TestServerSQLAndApplyAreOne(t *testing.T) {
	server := pgtest.Single(t)
	rules := parseRules(t, stock)
	const changes = 1000

	urls := [2]string{server.Database(t), server.Database(t)}
	judge, mixed := open(t, urls[0]), open(t, urls[1])
	serve(t, mixed, rules)
	c := connect(t, shop(t, server, urls[1]))

	versions := map[string]counter.Version{}

	for n := range changes {
		if n == changes/3 || n == 2*changes/3 { // another retention of entries
			rules = parseRules(t, strings.Replace(stock, `"1h"`, []string{"0", `"2h"`}[n/(changes/2)], 1))
			if !mixed.makeChange(t.Context(), rules) {
				t.Fatal("ServeSQL did not take over the changed rules")
			}
		}

		key := []string{"e:one", "e:two", "e:%_", "free:1", "free:2"}[rand.IntN(5)]
		delta := []int64{1, -1, 2, -3, 500, -400, 1_000_000_000_000, -1_000_000_000_000}[rand.IntN(8)]
		id := ""
		if rand.IntN(3) == 0 {
			id = fmt.Sprint(rand.IntN(1 + n/2))
		}

		if rand.IntN(200) == 0 {
			op := counter.Op{Changes: []counter.Change{{Key: key, Rule: rules.Find(key), Verb: counter.Delete}}}
			apply(t, judge, op)
			apply(t, mixed, op)
			continue
		}

		// The first database is changed by Apply alone, the other one in either way.
		op := once(key, id, rules, delta)
		want := judge.Apply(t.Context(), []counter.Op{op})[0]

		var got int64
		var err error
		if rand.IntN(2) == 0 {
			got, err = change(t.Context(), c, key, delta, id)
			switch postgres.Code(err) {
			case "23514":
				err = counter.ErrBound
			case "22003":
				err = counter.ErrOverflow
			}
		} else if r := mixed.Apply(t.Context(), []counter.Op{op})[0]; r.Err == nil {
			got = r.Counters[0].Value
		} else {
			err = r.Err
		}
		cause := errors.Unwrap(want.Err)
		madeAlike := want.Err == nil && err == nil && got == want.Counters[0].Value
		refusedAlike := cause != nil && errors.Is(err, cause)
		if !madeAlike && !refusedAlike {
			t.Fatalf("change %d, of %q by %d with %q: %d and %v, want %+v", n, key, delta, id, got, err, want)
		}

		// A refused or repeated change does not change the version, and every other one raises it.
		read, err := mixed.Read(t.Context(), []string{key})
		if err != nil {
			t.Fatal(err)
		}
		v, was := read[0].Version, versions[key]
		made := want.Err == nil && !want.Replay
		if !made && read[0].Touched() && v != was {
			t.Fatalf("change %d of %q was not made, and yet its version went from %s to %s", n, key, was, v)
		}
		if made && (v.Compare(was) <= 0 || v.Sequence != want.Counters[0].Version.Sequence) {
			t.Fatalf("change %d of %q was made, and its version went from %s to %s", n, key, was, v)
		}

		if read[0].Touched() {
			versions[key] = read[0].Version
		}
	}

	sameLedgers(t, judge, mixed)
	sameRows(t, urls)
}

func sameLedgers(t *testing.T, judge, mixed *Store) {
	t.Helper()
	for _, key := range []string{"e:one", "e:two", "e:%_", "free:1", "free:2"} {
		if a, b := entries(t, judge, key), entries(t, mixed, key); a != b {
			t.Errorf("the ledgers of %q differ:\n%s\n%s", key, a, b)
		}
	}
}

// sameRows compares what the tables of two databases have, without what depends on the time.
func sameRows(t *testing.T, urls [2]string) {
	t.Helper()
	const rows = `select string_agg(concat_ws(' ', c.key, c.kind, value, entries, c.kept, s.kept,
			s.due - c.updated_at > interval '50 minutes'), e'\n' order by c.key)
		from headcount_counters c left join headcount_sweeps s using (key, incarnation)`
	var a, b string
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("the rows are\n%s\n%s", a, b)
		}
	})

	// Each store sweeps entries that are too old at its own time.
	testkit.Eventually(t, "the same rows", func() bool {
		a = pgtest.Query[string](t, urls[0], rows)
		b = pgtest.Query[string](t, urls[1], rows)

		return a == b
	})

	const ids = `select md5(string_agg(id::text, ' ' order by id)) from headcount_row_ids`
	if a, b := pgtest.Query[string](t, urls[0], ids), pgtest.Query[string](t, urls[1], ids); a != b {
		t.Errorf("the idempotency keys of the two databases differ:\n%s\n%s", a, b)
	}
}

// entries returns a ledger without its times.
func entries(t testing.TB, s *Store, key string) string {
	t.Helper()
	var text strings.Builder
	for after := uint64(0); ; {
		page, err := s.Ledger(t.Context(), key, after, counter.MaxLedger)
		if err != nil {
			t.Fatal(err)
		}

		for _, e := range page.Entries {
			after++
			if e.Seq != after || time.Since(e.At).Abs() > time.Hour {
				t.Fatalf("entry %+v follows number %d", e, after-1)
			}
			fmt.Fprintln(&text, e.Seq, e.Op, e.Delta, e.Before, e.After, e.Reason, e.By)
		}

		if !page.More {
			return text.String()
		}
	}
}

// TestServerSQLRefuses: a call that cannot be made is refused with its own code, and changes nothing.
func TestServerSQLRefuses(t *testing.T) {
	server := pgtest.Single(t)
	url := server.Database(t)
	s := open(t, url)
	rules := parseRules(t, stock)
	serve(t, s, rules)
	c := connect(t, shop(t, server, url))

	server.Exec(t, url, "insert into headcount_counters (key, kind, value, incarnation, sequence) values ('e:of "+
		"another kind', 'sum', 1, 1, 1)")
	apply(t, s, counter.Op{
		Changes: []counter.Change{
			{Key: "free:low", Rule: exact, Verb: counter.Adjust, Delta: -1 << 63, Reason: "r", By: "b"},
		},
	})

	// facts returns everything that a refused change could touch, even sequences.
	facts := func() string {
		return pgtest.Query[string](t, url, `select concat_ws(' ',
			(select string_agg(c::text, ',' order by key) from headcount_counters c),
			(select count(*) from headcount_ledger), (select count(*) from headcount_row_ids),
			(select count(*) from headcount_sweeps),
			(select last_value from headcount_changed_id_seq))`)
	}

	before := facts()
	long := func(n int) string { return "'" + strings.Repeat("ä", n) + "'" }
	for args, want := range map[string]string{
		`'e:one', -1`: "23514", `'e:one', 4`: "23514", `'e:two', 1001`: "23514",
		`'free:low', -1`: "22003",
		`'e:%_.', 1`:     "22023", `'e:other', 1`: "22023", `'views:1', 1`: "22023", `'e:of another kind', 1`: "22023",
		`null, 1`: "22023", `'', 1`: "22023", `'.', 1`: "22023", `'e:*', 1`: "22023", `e'e:\n', 1`: "22023",
		`e'e:1\n', 1`: "22023", `e'\x1fshop\x1fe:1', 1`: "22023",
		`e'e:\u200d', 1`: "22023", `e'e:\ufffd', 1`: "22023", long(129) + `, 1`: "22023",
		`'e:1', null`: "22023", `'e:1', 0`: "22023", `'e:1', 1000000000001`: "22023",
		`'e:1', -9223372036854775808`: "22023",
		`'e:1', 9223372036854775808`:  "42883", `'e:1', 1.5`: "42883",
		`'e:1', 1, ''`: "22023", `'e:1', 1, ` + long(201): "22023", `'e:1', 1, null, ''`: "22023",
		`'e:1', 1, author => ` + long(201): "22023",
		`'e:1', 1, idempotency_key => ''`:  "22023", `'e:1', 1, idempotency_key => ` + long(128): "22023",
		`'e:1', 1, site => 'none'`: "22023", `'e:1', 1, site => null`: "22023",
		`'e:1', 1, site => e'shop\x1f'`: "22023",
	} {
		_, err := c.Exec(t.Context(), `select headcount.change(`+args+`)`)
		var refused *pgconn.PgError
		if !errors.As(err, &refused) || refused.Code != want || strings.Contains(refused.Message, "\n") {
			t.Errorf("change(%s): %v, want %s", args, err, want)
		}

		// A transaction that catches the refusal can go on, and nothing was changed.
		if _, err := c.Exec(t.Context(),
			`do $do$ begin perform headcount.change(`+args+`); exception when others then null; end $do$`); err != nil {
			t.Errorf("change(%s): %v", args, err)
		}
	}

	if after := facts(); after != before {
		t.Errorf("after refused changes the database has\n%s\nand before\n%s", after, before)
	}

	for args, want := range map[string]int64{
		`'e:1', 1, ` + long(200) + `, ` + long(200) + `, ` + long(127): 1,
		`key => 'e:1', delta => 2::smallint, site => 'shop'`:           2, `e'e:\u200da', 5`: 5, `'e:ab.c', 7`: 7,
		`'e:''; drop table x --"$1{tables}', 6`: 6,
	} {
		var got int64
		if err := c.QueryRow(t.Context(), `select headcount.change(`+args+`)`).Scan(&got); err != nil || got != want {
			t.Errorf("change(%s): %d and %v, want %d", args, got, err, want)
		}
	}

	// The sites do not share their counters.
	name := presence.SiteOf("shop").Qualify("e:1")
	if read, err := s.Read(t.Context(), []string{name, "e:1"}); err != nil || read[0].Value != 2 || read[1].Value != 1 {
		t.Errorf("the counters of two sites are %+v, %v; want 2 and 1", read, err)
	}
}

// TestServerSQLTransaction: a change belongs to the caller until its commit. A repetition under one key changes
// nothing, whether it comes by SQL or by Apply.
func TestServerSQLTransaction(t *testing.T) {
	server := pgtest.Single(t)
	url := server.Database(t)
	s := open(t, url)
	rules := parseRules(t, stock)
	out := serve(t, s, rules)
	c := connect(t, shop(t, server, url))

	value := func(want int64) {
		t.Helper()
		if read, err := s.Read(t.Context(), []string{"e:one"}); err != nil || read[0].Value != want {
			t.Errorf("others read %+v, %v; want %d", read, err, want)
		}
	}

	sql := func(delta int64, id string, want int64) {
		t.Helper()
		if got, err := change(t.Context(), c, "e:one", delta, id); err != nil || got != want {
			t.Errorf("by SQL: %d and %v, want %d", got, err, want)
		}
	}

	// Nothing is visible to others before the commit, and nothing at all after a rollback.
	for _, isolation := range []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable} {
		for _, end := range []string{"rollback", "commit"} {
			if _, err := c.Exec(t.Context(), "begin isolation level "+string(isolation)); err != nil {
				t.Fatal(err)
			}

			sql(1, "", 1)
			sql(1, "first", 2)
			sql(1, "first", 2)
			value(0) // what others read

			if end == "commit" {
				sql(-2, "", 0)
			}

			if _, err := c.Exec(t.Context(), end); err != nil {
				t.Fatal(err)
			}
			value(0)
		}
		server.Exec(t, url, "delete from headcount_row_ids")
	}

	if e := entries(t, s, "e:one"); strings.Count(e, "\n") != 9 {
		t.Errorf("after three commits the ledger is\n%s", e)
	}

	// A key that was used by SQL is known to Apply, and the other way round.
	sql(3, "by SQL first", 3)
	if r := apply(t, s, once("e:one", "by SQL first", rules, -1)); !r.Replay || r.Counters[0].Value != 3 {
		t.Errorf("the repetition by Apply is %+v, want a replay with 3", r)
	}

	apply(t, s, once("e:one", "by HTTP first", rules, -1))
	sql(3, "by HTTP first", 2)

	// The keys of visitors are in another space.
	op := once("e:one", "", rules, -1)
	op.IdempotencyKey = counter.NewIdempotencyKey("e:one", "a visitor", "first")
	apply(t, s, op)
	sql(1, "first", 2)

	// An idempotency key outlives its counter, and a replay makes no counter.
	apply(t, s, counter.Op{Changes: []counter.Change{{Key: "e:one", Rule: exact, Verb: counter.Delete}}})
	sql(3, "by HTTP first", 0)
	if n := pgtest.Query[int](t, url, "select count(*) from headcount_counters"); n != 0 {
		t.Errorf("%d counters are left, want none", n)
	}

	// A day later the key is new.
	server.Exec(t, url, "update headcount_row_ids set until = until - interval '1 day'")
	sql(3, "by HTTP first", 3)

	testkit.Eventually(t, "the last value is passed on", func() bool {
		all := out.counters()
		return len(all) > 0 && all[len(all)-1].Value == 3
	})
}

// TestServerSQLRights: a member of headcount_app may call the function, and may do nothing else with Headcount.
func TestServerSQLRights(t *testing.T) {
	server := pgtest.Single(t)
	url := server.Database(t)
	serve(t, open(t, url), parseRules(t, stock))
	app := connect(t, shop(t, server, url))
	server.Exec(t, url, "do $$ begin if to_regrole('stranger') is null then create role stranger login; end if; end $$")
	stranger := connect(t, strings.Replace(url, "headcount@", "stranger@", 1))

	if _, err := change(t.Context(), app, "e:1", 1, "id"); err != nil {
		t.Error(err)
	}
	if _, err := change(t.Context(), stranger, "e:1", 1, ""); postgres.Code(err) != "42501" {
		t.Errorf("a call of a stranger returns %v, want 42501", err)
	}

	c := connect(t, url)

	// All tables and sequences of the catalog, so that new ones are tested, too.
	rows, _ := c.Query(t.Context(), `select c.oid::regclass::text, c.relkind::text from pg_class c where relkind in `+
		`('r', 'S') and relname like 'headcount%'`)
	type object struct{ Name, Kind string }
	objects, err := pgx.CollectRows(rows, pgx.RowToStructByPos[object])
	if err != nil || len(objects) < 14 {
		t.Fatalf("found %d tables and sequences, %v; want at least 14", len(objects), err)
	}

	refused := func(sql string) {
		t.Helper()
		if _, err := app.Exec(t.Context(), sql); postgres.Code(err) != "42501" {
			t.Errorf("%s returns %v, want 42501", sql, err)
		}
	}

	for _, o := range objects {
		if o.Kind == "S" {
			refused("select nextval('" + o.Name + "')")
		} else {
			for _, sql := range []string{
				"select from %s", "insert into %s default values", "delete from %s", "truncate %s", "drop table %s",
			} {
				refused(fmt.Sprintf(sql, o.Name))
			}
		}
	}

	for _, sql := range []string{
		"select headcount.identity('a', 'b')", "select headcount.xxhash64('a')", "select headcount.wrap64(1)",
		"select headcount.rotate64(1, 1)",
		"create function headcount.f() returns int language sql as 'select 1'", "create table headcount.t ()",
		"drop schema headcount cascade",
		"drop function headcount.change", "alter function headcount.change security invoker", "set role headcount",
	} {
		refused(sql)
	}
}

// TestServerSQLCannotBeMisled: the caller's search path, temporary schema and settings have no influence on the
// function.
func TestServerSQLCannotBeMisled(t *testing.T) {
	server := pgtest.Single(t)
	url := server.Database(t)
	serve(t, open(t, url), parseRules(t, stock))

	// Before PostgreSQL 15, PUBLIC had this right in the schema public.
	server.Exec(t, url, "create schema evil; grant all on schema evil, public to public")

	c := connect(t, shop(t, server, url))
	_, err := c.Exec(t.Context(), `
		create table evil.stolen (who text);
		grant all on evil.stolen to public;
		create temp table headcount_rules (place int, kind smallint, floor bigint, ceiling bigint,
			kept bigint, site text, match text);
		insert into headcount_rules values (0, 2, null, null, 0, 'default', '*');
		create temp table headcount_counters (key text);
		create temp table pg_class (key text);
		create function pg_temp.starts_with(text, text) returns bool language sql as
			'insert into evil.stolen values (current_user); select true';
		create function evil.starts_with(text, text) returns bool language sql as
			'insert into evil.stolen values (current_user); select true';
		create function public.format(text, text) returns text language sql as
			'insert into evil.stolen values (current_user); select $1';
		create function public.char_length(varchar) returns int language sql as
			'insert into evil.stolen values (current_user); select 1';
		create function evil.same(text, text) returns bool language sql as
			'insert into evil.stolen values (current_user); select true';
		create function evil.alike(name, text) returns bool language sql as
			'insert into evil.stolen values (current_user); select true';
		create operator evil.= (leftarg = text, rightarg = text, procedure = evil.same);
		create operator public.= (leftarg = name, rightarg = text, procedure = evil.alike);
		create function evil.joined(text, name) returns text language sql as
			'insert into evil.stolen values (current_user); select $1';
		create operator public.|| (leftarg = text, rightarg = name, procedure = evil.joined);
		set search_path = pg_temp, evil, public, pg_catalog;
		set standard_conforming_strings = off; set backslash_quote = on;
		set row_security = off; set timezone = 'Asia/Kathmandu';
		set default_transaction_isolation = serializable; set enable_indexscan = off;
		set intervalstyle = 'sql_standard'; set bytea_output = 'escape'`)

	if err != nil {
		t.Fatal(err)
	}

	for range 7 { // PostgreSQL caches plans after five calls
		if _, err := change(t.Context(), c, "views:1", 1, ""); postgres.Code(err) != "22023" {
			t.Errorf("a change without a rule returns %v, want 22023", err)
		}
		if _, err := change(t.Context(), c, "e:1", -1, "x"); postgres.Code(err) != "23514" {
			t.Errorf("a change below the floor returns %v, want 23514", err)
		}
	}

	if got, err := change(t.Context(), c, "e:1", 1, `\'`); err != nil || got != 1 {
		t.Errorf("the value is %d, %v; want 1", got, err)
	}

	if n := pgtest.Query[int](t, url, "select count(*) from evil.stolen"); n != 0 {
		t.Errorf("functions outside pg_catalog were called %d times, want 0", n)
	}
}

// TestServerSQLAndApplyAtOnce: with simultaneous changes by SQL and by Apply no change is lost, no bound is exceeded,
// and no caller waits for ever.
func TestServerSQLAndApplyAtOnce(t *testing.T) {
	server := pgtest.Single(t)
	url := server.Database(t)
	rules := parseRules(t, stock)
	stores := [2]*Store{open(t, url), open(t, url)}
	outs := [2]*sold{serve(t, stores[0], rules), serve(t, stores[1], rules)}
	app := shop(t, server, url)

	// Half of the callers use SQL and half use Apply, on the same three counters. Each free counter may change only
	// once.
	const callers = 8
	all := &simultaneous{T: t, rules: rules, keys: []string{"e:1", "e:2", "e:3"}, sum: map[string]int64{}}
	var wg sync.WaitGroup
	for n := range callers {
		c := connect(t, app)
		wg.Go(func() { all.bySQL(n, c) })
		wg.Go(func() { all.byApply(n, stores[n%2]) })
	}
	wg.Wait()

	read, err := stores[0].Read(t.Context(), all.keys)
	if err != nil {
		t.Fatal(err)
	}

	for i, key := range all.keys {
		if read[i].Value != all.sum[key] || read[i].Value < 0 {
			t.Errorf("%q is %d, want %d", key, read[i].Value, all.sum[key])
		}
		if n := strings.Count(entries(t, stores[0], key), "\n"); uint64(n) != read[i].Version.Sequence {
			t.Errorf("%q has had %d changes, and has %d entries, want as many", key, read[i].Version.Sequence, n)
		}
	}

	if n := pgtest.Query[int](t, url,
		"select count(*) from headcount_counters where key like 'free:%' and value <> 1"); n != 0 {
		t.Errorf("%d counters were changed twice under one key", n)
	}

	testkit.Eventually(t, "all is passed on", func() bool {
		return pgtest.Query[int](t, url, "select count(*) from headcount_changed") == 0
	})

	if len(outs[0].counters())+len(outs[1].counters()) == 0 {
		t.Error("no counter was published")
	}
}

// simultaneous are callers that change the same counters at the same time.
type simultaneous struct {
	*testing.T
	rules *counter.Rules
	keys  []string

	mu  sync.Mutex       // guards sum
	sum map[string]int64 // of what was acknowledged, by key
}

// callsOfEach is how many rounds each caller makes.
const callsOfEach = 60

func (all *simultaneous) made(key string, delta int64) {
	all.mu.Lock()
	defer all.mu.Unlock()

	all.sum[key] += delta
}

// free returns the name of a counter that two callers change under one idempotency key: of the n-th callers and the
// next ones, those by SQL and those by Apply.
func free(n, round int) string { return fmt.Sprint(n/2, "-", round) }

func (all *simultaneous) bySQL(n int, c *pgx.Conn) {
	for i := range callsOfEach {
		key := all.keys[rand.IntN(len(all.keys))]
		delta := int64(rand.IntN(7) - 3)
		if delta == 0 {
			delta = 1
		}

		// The caller may not read the table. Its failed transaction delays no other.
		before := int64(0)
		err := pgx.BeginFunc(all.Context(), c, func(tx pgx.Tx) error {
			if err := tx.QueryRow(all.Context(),
				"select count(*) from headcount_counters").Scan(&before); postgres.Code(err) != "42501" {
				all.Errorf("a read of the table returns %v, want 42501", err)
			}
			return errors.New("rolled back")
		})
		if err == nil {
			all.Error("a change that was rolled back returned no error")
		}

		// A refusal at a bound is right, since the others change the counter meanwhile. Any other error is not.
		_, err = change(all.Context(), c, key, delta, "")
		if err == nil {
			all.made(key, delta)
		} else if postgres.Code(err) != "23514" {
			all.Error(err)
		}

		id := free(n, i)
		if _, err := change(all.Context(), c, "free:"+id, 1, id); err != nil {
			all.Error(err)
		}
	}
}

func (all *simultaneous) byApply(n int, s *Store) {
	for i := range callsOfEach {
		one := once(all.keys[rand.IntN(len(all.keys))], "", all.rules, int64(rand.IntN(3)+1))
		id := free(n, i)

		// Two counters in one operation, in the other order than others lock them: a deadlock would be an error.
		both := counter.Op{Changes: []counter.Change{add("e:2", -1), add("e:1", 1)}}
		for j := range both.Changes {
			both.Changes[j].Rule = all.rules.Find("e:1")
		}

		ops := []counter.Op{one, both, once("free:"+id, id, all.rules, 1)}
		for j, r := range s.Apply(all.Context(), ops) {
			if r.Err != nil {
				isBounded := j < 2
				if !isBounded || !errors.Is(r.Err, counter.ErrBound) {
					all.Error(r.Err)
				}
				continue
			}

			switch j {
			case 0:
				all.made(one.Changes[0].Key, one.Changes[0].Delta)
			case 1:
				all.made("e:2", -1)
				all.made("e:1", 1)
			}
		}
	}
}

// TestClockSQLIsPublished: within a second a commit reaches the watchers of all processes, and a rollback never does.
// One process publishes it.
func TestClockSQLIsPublished(t *testing.T) {
	server := pgtest.Start(t)
	url := server.Database(t)
	rules := parseRules(t, stock)
	patient := func(c *Config) { c.PollEvery = time.Hour }
	stores := [3]*Store{open(t, url, patient), open(t, url, patient), open(t, url, patient)}
	awaitNotifications(t, stores[0], stores[2])
	awaitNotifications(t, stores[2], stores[0])

	outs := [2]*sold{serve(t, stores[0], rules), serve(t, stores[1], rules)}

	var listeners []*countertest.Listener
	for _, s := range stores {
		e, _ := countertest.Listen(t, s, "e:1", "e:2")
		listeners = append(listeners, e)
	}

	c := connect(t, shop(t, server, url))

	// A change that is rolled back.
	tx, err := c.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := change(t.Context(), tx, "e:2", 1, ""); err != nil {
		t.Fatal(err)
	}
	if err := tx.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}

	for n := range int64(5) {
		if _, err := change(t.Context(), c, "e:1", 1, ""); err != nil {
			t.Fatal(err)
		}

		watch := testkit.NewStopwatch(t)
		for _, e := range listeners {
			for _, u := range e.Until(t, fmt.Sprint(n+1), func(heard []counter.Update) bool {
				return len(heard) > 0 && heard[len(heard)-1].Counter.Value == n+1
			}) {
				if u.Counter.Key != "e:1" {
					t.Errorf("the rolled back change %+v was published", u)
				}
			}
		}

		if took := watch.Elapsed(); took > time.Second {
			t.Errorf("the watchers received change %d after %s, want 1s at most", n+1, took)
		}
	}

	passed := func() int { return len(outs[0].counters()) + len(outs[1].counters()) }
	testkit.Eventually(t, "all is passed on", func() bool { return passed() >= 5 })
	if n := passed(); n != 5 {
		t.Errorf("%d changes were published, want 5", n)
	}
}

// TestServerSQLOutlivesTheServer: changes that were made while no server ran are published by the next one. From then
// on its rules apply.
func TestServerSQLOutlivesTheServer(t *testing.T) {
	server := pgtest.Single(t)
	url := server.Database(t)
	first := open(t, url)
	if !first.makeChange(t.Context(), parseRules(t, stock)) {
		t.Fatal("ServeSQL did not create the function")
	}
	first.Close()

	c := connect(t, shop(t, server, url))

	// More changes than one transaction publishes.
	for n := range 2500 {
		if _, err := change(t.Context(), c, fmt.Sprint("free:", n), 1, ""); err != nil {
			t.Fatal(err)
		}
	}

	if _, err := change(t.Context(), c, "e:1", 1001, ""); postgres.Code(err) != "23514" {
		t.Errorf("a change above the ceiling of 1000 returns %v, want 23514", err)
	}

	out := serve(t, open(t, url), parseRules(t, `{"match":"e:*","kind":"exact","ceiling":2000,"ledger":0}`))
	testkit.Eventually(t, "all is passed on", func() bool {
		return len(out.counters()) == 2500
	})

	if got, err := change(t.Context(), c, "e:1", 1001, ""); err != nil || got != 1001 {
		t.Errorf("under a ceiling of 2000 the value is %d, %v; want 1001", got, err)
	}
	if _, err := change(t.Context(), c, "free:1", 1, ""); postgres.Code(err) != "22023" {
		t.Errorf("a change without a rule returns %v, want 22023", err)
	}
}

// TestServerSQLWithoutRights: if its user may create neither schema nor role, a server warns once, with commands for an
// administrator, and works otherwise. When the commands were run, its next start creates the function.
func TestServerSQLWithoutRights(t *testing.T) {
	server := pgtest.Start(t)
	url := server.Database(t)
	server.Exec(t, url, "create role managed login; create schema managed authorization managed; create schema two "+
		"authorization managed")

	managed := strings.Replace(url, "headcount@", "managed@", 1)
	var log bytes.Buffer
	s := open(t, managed, func(c *Config) { c.Log = zerolog.New(&log).Level(zerolog.WarnLevel) })
	rules := parseRules(t, stock)

	warned := func(want ...string) {
		t.Helper()
		if !s.makeChange(t.Context(), rules) {
			t.Error("ServeSQL will try again, though its user has no right")
		}

		text := log.String()
		log.Reset()
		if strings.Count(text, "\n") != min(len(want), 1) {
			t.Errorf("the log is\n%s", text)
		}
		for _, w := range want {
			if !strings.Contains(text, w) {
				t.Errorf("the log lacks %q:\n%s", w, text)
			}
		}
	}

	// The administrator follows the advice, step by step.
	warned("42501", "CREATE ROLE headcount_app NOLOGIN; CREATE SCHEMA IF NOT EXISTS headcount AUTHORIZATION managed;")
	apply(t, s, once("e:1", "", rules, 1))
	if c := s.db.Cause(); c != nil {
		t.Errorf("PostgreSQL cannot be used: %v", c)
	}

	server.Exec(t, url, "create schema if not exists headcount authorization managed")
	warned("42501", "CREATE ROLE headcount_app")

	server.Exec(t, url, "create role headcount_app nologin")
	warned()
	warned()
	if got, err := change(t.Context(), connect(t, shop(t, server, url)), "e:1", 1, ""); err != nil || got != 2 {
		t.Errorf("the value is %d, %v; want 2", got, err)
	}

	// The function runs with the rights of the server, so only the server's role may own it and its schema.
	for _, thing := range []string{"schema headcount", "function headcount.identity(key text, idempotency_key text)"} {
		server.Exec(t, url, "create role mallory; alter "+thing+" owner to mallory")
		mend := "ALTER " + strings.Replace(strings.Replace(thing, "schema", "SCHEMA", 1), "function", "FUNCTION", 1) +
			" OWNER TO managed"

		warned("belongs to another user", mend)
		server.Exec(t, url, mend+"; drop role mallory")
		warned()
	}

	// deploy/README.md uses a second role to replace the password. It acts as the first one.
	server.Exec(t, url, "create role second login in role managed; alter role second set role = managed")
	second := strings.Replace(url, "headcount@", "second@", 1)
	s = open(t, second, func(c *Config) { c.Log = zerolog.New(&log).Level(zerolog.WarnLevel) })
	warned()

	// A server with another schema in this database does not take over the function.
	s = open(t, managed+"&search_path=two", func(c *Config) { c.Log = zerolog.New(&log).Level(zerolog.WarnLevel) })
	warned("another schema")

	if n := pgtest.Query[int](t, url, "select count(*) from two.headcount_rules"); n == 0 {
		t.Error("the server has written no rules to its own schema")
	}
}

// TestServerSQLHoldsACounter: an application that keeps a transaction open delays only the counters that it has
// changed.
func TestServerSQLHoldsACounter(t *testing.T) {
	server := pgtest.Single(t)
	url := server.Database(t)
	rules := parseRules(t, stock)
	s := open(t, url)
	serve(t, s, rules)

	tx, err := connect(t, shop(t, server, url)).Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := change(t.Context(), tx, "e:1", 1, ""); err != nil {
		t.Fatal(err)
	}

	// Changes of the held counter fail, more often than a server may fail before it counts as away.
	var wg sync.WaitGroup
	for range 5 {
		wg.Go(func() {
			r := s.Apply(t.Context(), []counter.Op{once("e:1", "", rules, 1)})[0]
			if !errors.Is(r.Err, counter.ErrUnavailable) {
				t.Errorf("a change of the held counter returns %+v, want ErrUnavailable", r)
			}
		})
	}

	wg.Wait()
	apply(t, s, once("e:2", "", rules, 1))

	// In one call only the operations on held counters fail. One of these counters was created by the uncommitted
	// transaction.
	if _, err := change(t.Context(), tx, "free:2", 1, ""); err != nil {
		t.Fatal(err)
	}

	results := s.Apply(t.Context(), []counter.Op{
		once("e:1", "", rules, 1), once("e:2", "a", rules, 1), once("free:1", "", rules, 1),
		once("free:2", "", rules, 1), once("e:1", "", rules, 1), once("e:2", "a", rules, 1), once("e:2", "", rules, 1),
	})

	for i, want := range []int64{0, 2, 1, 0, 0, 2, 3} {
		r := results[i]
		if want == 0 {
			if !errors.Is(r.Err, counter.ErrUnavailable) {
				t.Errorf("operation %d, on a held counter: %+v, want ErrUnavailable", i, r)
			}
			continue
		}

		replay := i == 5
		if r.Err != nil || r.Replay != replay || !replay && r.Counters[0].Value != want {
			t.Errorf("%d: %+v, want %d", i, r, want)
		}
	}

	if err := s.db.Cause(); err != nil {
		t.Errorf("PostgreSQL cannot be used: %v", err)
	}

	if err := tx.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	if r := apply(t, s, once("e:1", "", rules, 1)); r.Counters[0].Value != 2 {
		t.Errorf("after the commit the change is answered %+v, want 2", r)
	}
}

// TestServerSQLThroughAPooler: applications may use any pooler, because the function needs no session state.
func TestServerSQLThroughAPooler(t *testing.T) {
	server := pgtest.Single(t)
	url := server.Database(t)
	serve(t, open(t, url), parseRules(t, stock))
	c := connect(t, server.Bouncer(t, url, "transaction")+"&default_query_exec_mode=simple_protocol")
	for n := range int64(3) {
		if got, err := change(t.Context(), c, "e:1", 1, fmt.Sprint(n)); err != nil || got != n+1 {
			t.Errorf("the value is %d, %v; want %d", got, err, n+1)
		}
	}
}
