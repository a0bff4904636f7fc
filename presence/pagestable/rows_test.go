package pagestable

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"headcount/internal/pgtest"
	"headcount/internal/testkit"
	"headcount/presence"
)

func TestMain(m *testing.M) { testkit.Main(m, pgtest.Stop) }

// TestServerRows: each call has the right effect in PostgreSQL.
func TestServerRows(t *testing.T) {
	server := pgtest.Single(t)
	url := server.Database(t)
	r, err := openRows(t.Context(), url)
	if err != nil {
		t.Fatal(err)
	}

	defer r.Close()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}

	const all = `select coalesce(string_agg(concat_ws(' ', site, page, count, version), ', ' order by site, page), '')
		from headcount_pages`
	want := func(want string) {
		t.Helper()
		if is := pgtest.Query[string](t, url, all); is != want {
			t.Errorf("the rows are %q, want %q", is, want)
		}
	}

	shop := presence.SiteOf("shop").Qualify("a")
	odd := `it's "50 %" \ ` + strings.Repeat("\U0001F600", presence.MaxPageLength-14)
	must(r.Put(t.Context(), []presence.Count{count("b", 2, 5), count(shop, 1, 1), count("a", 3, 4)}))
	want("default a 3 1-4, default b 2 1-5, shop a 1 1-1")
	younger := count("a", 9, 1)
	younger.Version.Incarnation = 2
	must(r.Put(t.Context(), []presence.Count{younger, count("b", 7, 4), count(odd, 1, 1)}))
	must(r.Put(t.Context(), []presence.Count{count("a", 3, 1<<40), count(odd, 0, 2)}))
	want("default a 9 2-1, default b 2 1-5, default " + odd + " 0 1-2, shop a 1 1-1")
	const at = "select updated_at from headcount_pages where page = 'a' limit 1"
	if is := pgtest.Query[time.Time](t, url, at); is.Unix() != 1 {
		t.Errorf("the row was updated at %s", is)
	}

	var read []string
	for after := ""; ; {
		some, err := r.Occupied(t.Context(), after, 2)
		must(err)
		if len(some) == 0 {
			break
		}
		for _, c := range some {
			read = append(read, fmt.Sprint(c.Page, "=", c.Users, "@", c.Version))
		}

		after = some[len(some)-1].Page
	}

	if is, want := strings.Join(read, " "), "a=9@2-1 "+shop+"=1@1-1 b=2@1-5"; is != want {
		t.Errorf("the rows with users are %q, want %q", is, want)
	}

	must(r.Drop(t.Context(), []presence.Count{count("b", 2, 5), count("a", 3, 4), count(odd, 0, 9)}))
	want("default a 9 2-1, default " + odd + " 0 1-2, shop a 1 1-1")

	server.Exec(t, url, `truncate headcount_pages;
		insert into headcount_pages (page, count, updated_at)
			select 'recent ' || n, 0, now() - n * interval '1 second' from generate_series(1, 1000) n
			union all select 'old ' || n, 0, now() - interval '25 hours' from generate_series(1, 2 * 10000 + 7) n
			union all select 'in use', 1, now() - interval '25 hours'`)

	must(r.Sweep(t.Context()))
	const sum = `select concat_ws(' ', count(*), count(*) filter (where page like 'recent%')) from headcount_pages`
	if is := pgtest.Query[string](t, url, sum); is != "1001 1000" {
		t.Errorf("the rows and their sum are %s, want \"1001 1000\"", is)
	}

	server.Exec(t, url, `insert into headcount_pages (page, count, updated_at)
		select 'many ' || n, 0, now() - interval '2 hours' from generate_series(1, 100000) n`)
	must(r.Sweep(t.Context()))
	if is := pgtest.Query[string](t, url, sum); is != "100001 1000" {
		t.Errorf("the rows and their sum are %s, want \"100001 1000\"", is)
	}

	server.Exec(t, url, "create role joe login; create role nobody login")
	must(r.Grant(t.Context()))
	must(r.Grant(t.Context()))
	server.Exec(t, url, "grant headcount_app to joe")
	for sql, may := range map[string]bool{
		"joe; select count(*) from headcount_pages":    true,
		"joe; update headcount_pages set count = 9":    false,
		"nobody; select count(*) from headcount_pages": false,
	} {
		err := r.Do(t.Context(), func(ctx context.Context, c *pgxpool.Conn) error {
			_, err := c.Conn().PgConn().Exec(ctx, "begin; set local role "+sql+"; commit").ReadAll()
			return err
		})

		if (err == nil) != may {
			t.Errorf("after %s the error is %v", sql, err)
		}
	}
}

// TestServerLeastRights: a user that may create tables and nothing else keeps the table. Applications can read it as
// soon as their role exists.
func TestServerLeastRights(t *testing.T) {
	server := pgtest.Start(t)
	url := server.Database(t)
	server.Exec(t, url, "create role least login; create schema theirs authorization least")
	mine := strings.Replace(url, "postgres://headcount@", "postgres://least@", 1) + "&search_path=theirs"
	r, err := openRows(t.Context(), mine)
	if err != nil {
		t.Fatal(err)
	}

	defer r.Close()
	if err := r.Grant(t.Context()); err != nil {
		t.Error(err)
	}
	if err := r.Put(t.Context(), []presence.Count{count("a", 1, 1)}); err != nil {
		t.Error(err)
	}

	server.Exec(t, url, "create role headcount_app; create role joe; grant headcount_app to joe")
	if err := r.Grant(t.Context()); err != nil {
		t.Error(err)
	}

	server.Exec(t, url, "begin; set local role joe; select * from theirs.headcount_pages; commit")
}
