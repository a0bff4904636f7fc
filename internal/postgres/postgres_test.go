package postgres

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"testing/fstest"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/rs/zerolog"

	"headcount/internal/outage"
	"headcount/internal/pgtest"
	"headcount/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m, pgtest.Stop) }

// tables returns Tables with numbers, which the statements create.
func tables(statements string) Tables {
	file := &fstest.MapFile{Data: []byte("-- +goose Up\n" + statements)}

	return Tables{
		Migrations: fstest.MapFS{"00001_numbers.sql": file}, Versions: "numbers_migrations", Lock: 1,
		Former: "old_numbers", Mend: "export them",
	}
}

const create = "create table numbers (n bigint not null);"

const insert = "insert into numbers values (1)"

func config(url string) Config {
	return Config{URL: url, Tables: []Tables{tables(create)}, Probe: insert, Log: zerolog.Nop()}
}

func open(t testing.TB, cfg Config) *DB {
	t.Helper()
	db, err := Open(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(db.Close)

	return db
}

// exec runs a statement through db.
func exec(t testing.TB, db *DB, sql string) error {
	return db.Do(t.Context(), func(ctx context.Context, c *pgxpool.Conn) error {
		_, err := c.Exec(ctx, sql)
		return err
	})
}

func TestSettingsThatCannotWork(t *testing.T) {
	for name, url := range map[string]string{
		"no URL":        "",
		"another store": "redis://localhost",
		"a bad port":    "postgres://u:secret@localhost:99999/d",
		"a bad mode":    "postgres://u:secret@localhost/d?sslmode=perhaps",
	} {
		_, err := Open(t.Context(), config(url))
		text := fmt.Sprint(err)
		if !errors.Is(err, ErrConfig) || strings.Contains(text, "secret") || strings.Contains(text, "\n") {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestServerDatabasesThatCannotBeUsed(t *testing.T) {
	server := pgtest.Single(t)

	newer := server.Database(t)
	open(t, config(newer)).Close()
	server.Exec(t, newer, "insert into numbers_migrations (version_id, is_applied) values (99, true)")
	server.Exec(t, server.URL("postgres"), "create database latin encoding 'LATIN1' template template0")

	former := server.Database(t)
	server.Exec(t, former, "create table old_numbers ()")

	for url, want := range map[string]struct {
		err  error
		text string
	}{
		former: {ErrConfig, "the table old_numbers of an earlier release; export them"},

		newer:               {ErrNewer, "of version 99, this program knows version 1"},
		server.URL("latin"): {ErrConfig, "make one with ENCODING 'UTF8'"},
		server.Bouncer(t, server.Database(t), "transaction"): {ErrConfig, "or set pool_mode = session"},
	} {
		_, err := Open(t.Context(), config(url))
		if !errors.Is(err, want.err) || !errors.Is(err, ErrConfig) || !strings.Contains(err.Error(), want.text) {
			t.Errorf("got %v, want %q", err, want.text)
		}
	}
}

// TestServerURLsOfApplications: a pooler that keeps sessions apart works, and so do the parameters of Prisma.
func TestServerURLsOfApplications(t *testing.T) {
	server := pgtest.Single(t)
	for _, url := range []string{
		server.Bouncer(t, server.Database(t), "session"),
		server.Database(t) + "&schema=public&pgbouncer=true&connection_limit=5&pool_timeout=10",
	} {
		if err := exec(t, open(t, config(url)), insert); err != nil {
			t.Errorf("%s: %v", url, err)
		}
	}
}

func TestServerManyProcessesMakeTheTablesAtOnce(t *testing.T) {
	url := pgtest.Single(t).Database(t)

	// All of them find no tables before the first one has created them.
	slow := config(url)
	slow.Tables = []Tables{tables("select pg_sleep(0.3);" + create)}

	var all sync.WaitGroup
	for range 4 {
		all.Go(func() {
			db, err := Open(t.Context(), slow)
			if err != nil {
				t.Error(err)
				return
			}
			defer db.Close()
			if err := exec(t, db, insert); err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()

	const applied = "select count(*) from numbers_migrations where version_id = 1"
	if n := pgtest.Query[int](t, url, applied); n != 1 {
		t.Errorf("the migration was made %d times", n)
	}
}

// TestServerTransactionsThatFail: failed transactions are rolled back, and a statement that the server refuses is no
// outage.
func TestServerTransactionsThatFail(t *testing.T) {
	url := pgtest.Single(t).Database(t)
	db := open(t, config(url))

	for range 2 * outage.TripAfter {
		err := db.Do(t.Context(), func(ctx context.Context, c *pgxpool.Conn) error {
			for _, sql := range []string{"begin", insert, "select 1 / 0"} {
				if _, err := c.Exec(ctx, sql); err != nil {
					return err
				}
			}

			return nil
		})

		if Code(err) != "22012" || errors.Is(err, ErrAway) {
			t.Fatalf("got %v, want the error of the server", err)
		}
	}

	if err := exec(t, db, insert); err != nil {
		t.Errorf("after failed statements the cause is %v, want none", err)
	}
	if n := pgtest.Query[int](t, url, "select count(*) from numbers"); n != 1 {
		t.Errorf("the table has %d rows, want the one of the successful transaction", n)
	}
}

// TestClockSilentServer: a server hangs. Calls fail after a timeout, then at once, and work when the server goes on.
func TestClockSilentServer(t *testing.T) {
	server := pgtest.Start(t)
	db := open(t, config(server.Database(t)))
	if err := exec(t, db, insert); err != nil {
		t.Fatal(err)
	}

	server.Pause()

	var tries sync.WaitGroup
	for range outage.TripAfter {
		tries.Go(func() {
			if err := exec(t, db, insert); !errors.Is(err, ErrAway) {
				t.Errorf("a call to the silent server returns %v", err)
			}
		})
	}
	tries.Wait()

	// One call every half second is let through.
	testkit.Eventually(t, "a call fails at once", func() bool { return errors.Is(exec(t, db, insert), errSilent) })

	server.Resume()
	testkit.Eventually(t, "it is up", func() bool { return db.Cause() == nil })
	if err := exec(t, db, insert); err != nil {
		t.Error(err)
	}
}
