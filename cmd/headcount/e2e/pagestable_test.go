package e2e

import (
	"fmt"
	"net/url"
	"strings"
	"testing"
	"time"

	"headcount/internal/pgtest"
	"headcount/internal/redistest"
	"headcount/internal/testkit"
)

// table is headcount_pages as "page=count …", without the empty ones.
func table(t testing.TB, database string) string {
	t.Helper()
	return pgtest.Query[string](t, database, `select coalesce(string_agg(page || '=' || count, ' ' order by page), '')
		from headcount_pages where count > 0`)
}

// awaitTable waits until the table is what the test wants.
func awaitTable(t testing.TB, database, want string) {
	t.Helper()
	is := ""
	defer func() {
		if t.Failed() {
			t.Logf("the table is %q, want %q", is, want)
		}
	}()
	testkit.Eventually(t, "the table is "+want, func() bool {
		is = table(t, database)
		return is == want
	})
}

// TestServerPagesTable: visitors come and go by every process, and each row is what GET says. The dispatcher writes the
// table, so it matters whether it is in the visitors' process. TestClockPagesTableFaults has two processes with all
// roles.
func TestServerPagesTable(t *testing.T) {
	t.Parallel()
	p := pgtest.Single(t)
	for name, processes := range map[string]func(flags ...string) []*server{
		"PostgreSQL": func(flags ...string) []*server { return []*server{startWithKey(t, flags...)} },
		"a dispatcher apart": func(flags ...string) []*server {
			redis := redistest.Start(t).URL()
			startWithKey(t, overRedis(redis, append(flags, "--roles=dispatcher")...)...)
			return []*server{startWithKey(t, overRedis(redis, append(flags[:1:1], "--roles=gateway,presence")...)...)}
		},
	} {
		t.Run(name, func(t *testing.T) {
			database := p.Database(t)
			all := processes("--postgres="+database, "--pages-table=blog/*", "--pages-table=front")
			a, b := all[0], all[len(all)-1]

			const odd = `blog/it's "50 %"; \ --` + "\U0001F600 \u05D0"
			one, two := a.ws(t), b.ws(t)
			one.join("blog/1")
			two.join("blog/1")
			two.join(odd)
			two.join("shop/1")
			one.join("front")
			awaitTable(t, database, "blog/1=2 "+odd+"=1 front=1")

			says := a.get(t, "/"+url.PathEscape(odd)+"/counter").counter(t)
			row := pgtest.Query[string](t, database, `select version || ' ' ||
				to_char(updated_at at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS"Z"')
				from headcount_pages where page = $1 and site = 'default'`, odd)
			if want := says.Version + " " + *says.UpdatedAt; row != want {
				t.Errorf("the row has %s, GET has %s", row, want)
			}

			one.leave("blog/1")
			two.close()
			awaitTable(t, database, "front=1")
			const empty = "select count(*)::int from headcount_pages where count = 0"
			if n := pgtest.Query[int](t, database, empty); n != 2 {
				t.Errorf("%d empty rows, want 2", n)
			}

			role := fmt.Sprintf("app%d", names.Add(1))
			p.Exec(t, database, "create role "+role+"; grant headcount_app to "+role)
			p.Exec(t, database, "begin; set local role "+role+"; select * from headcount_pages; commit")
		})
	}
}

// TestClockPagesTableFaults: a process is killed, the table is locked, emptied, and PostgreSQL is away.
func TestClockPagesTableFaults(t *testing.T) {
	t.Parallel()
	p := pgtest.Start(t)
	database, redis := p.Database(t), redistest.Start(t).URL()
	flags := []string{"--postgres=" + database, "--pages-table=blog/*", "--presence-timeout=6s"}
	a, b := startWithKey(t, overRedis(redis, flags...)...), startWithKey(t, overRedis(redis, flags...)...)
	var goes, stays *client
	var pages, rest []string
	goes, stays = a.ws(t), b.ws(t)
	for i := range 20 { // pages of both owners
		page := fmt.Sprintf("blog/%02d", i)
		pages = append(pages, page+"=2")
		rest = append(rest, page+"=1")
		goes.join(page)
		stays.join(page)
	}

	awaitTable(t, database, strings.Join(pages, " "))

	a.kill()
	awaitTable(t, database, strings.Join(rest, " "))

	// While the table is locked all else goes on.
	locker := database + "&application_name=locker"
	p.Exec(t, locker, "begin; lock table headcount_pages")
	stays.leave("blog/00")
	another := b.ws(t)
	another.join("blog/01")
	another.awaitCount("blog/01", 2)
	testkit.Eventually(t, "the metrics say that it is behind", func() bool {
		return b.metric(t, "headcount_pages_table_lag_seconds") > 1 &&
			b.metric(t, "headcount_pages_table_failures_total") > 0
	})

	for range 3 {
		b.call(t, "POST", "stock:1/increment", "", withKey).lasting(t) // exact: it needs PostgreSQL
	}

	if !b.ready() {
		t.Error("it is not ready, for a lock")
	}

	p.Exec(t, locker, "commit")
	rest[1] = "blog/01=2"
	awaitTable(t, database, strings.Join(rest[1:], " "))

	// What it had is lost, and it is away.
	p.Exec(t, database, "truncate headcount_pages")
	p.Kill()
	another.leave("blog/01")
	testkit.Eventually(t, "the leave", func() bool { return b.count(t, url.PathEscape("blog/01")) == 1 })
	testkit.Eventually(t, "it is behind", func() bool { return b.metric(t, "headcount_pages_table_lag_seconds") > 2 })
	p.Restart(t)
	rest[1] = "blog/01=1"
	watch := testkit.NewStopwatch(t)
	awaitTable(t, database, strings.Join(rest[1:], " "))
	if took := watch.Elapsed(); took > 15*time.Second {
		t.Errorf("the table is right again after %s", took)
	}
}
