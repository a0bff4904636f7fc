package pagestable

import (
	"context"
	"database/sql"
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/rs/zerolog"

	"headcount/internal/postgres"
	"headcount/presence"
)

const (
	// A row that is as new stays, so the statement may be repeated and arrive late.
	put = `insert into headcount_pages as p (page, site, count, updated_at, incarnation, sequence)
		select page, site, count, updated_at, incarnation, sequence from ` + given + `
		on conflict (page, site) do update set count = excluded.count, updated_at = excluded.updated_at,
			incarnation = excluded.incarnation, sequence = excluded.sequence
			where (p.incarnation, p.sequence) < (excluded.incarnation, excluded.sequence)`
	lacking = `select g.place from ` + given + ` left join headcount_pages p on p.page = g.page and p.site = g.site
		where p.page is null or (p.incarnation, p.sequence) < (g.incarnation, g.sequence)`
	// Another process may have written a row since it was read.
	drop = `delete from headcount_pages p using ` + given + ` where p.page = g.page and p.site = g.site
		and p.incarnation = g.incarnation and p.sequence = g.sequence`
	given = `unnest($1::text[], $2::text[], $3::bigint[], $4::timestamptz[], $5::bigint[], $6::bigint[])
		with ordinality g (page, site, count, updated_at, incarnation, sequence, place)`

	occupied = `select page, site, count, incarnation, sequence from headcount_pages
		where count > 0 and (page, site) > ($1, $2) order by page, site limit $3`
	sweep = `delete from headcount_pages where count = 0 and ctid = any(array(
		select ctid from (select ctid, updated_at, row_number() over (order by updated_at desc) as place
			from headcount_pages where count = 0) e
		where place > $1 or updated_at < now() - interval '1 day' limit $2))`

	grantApp = `do $$ declare place text; begin
		select nspname into place from pg_class c join pg_namespace n on n.oid = c.relnamespace
			where c.oid = 'headcount_pages'::regclass;
		execute format('grant usage on schema %I to headcount_app', place);
		grant select on headcount_pages to headcount_app;
	end $$`
	mayGrant = `select to_regrole('headcount_app') is not null or rolsuper or rolcreaterole
		from pg_roles where rolname = current_user`
	adminSQL = "CREATE ROLE headcount_app NOLOGIN"

	// probe is a change, for postgres.DB. No page has that name.
	probe = `insert into headcount_pages (page) values ('')`
)

//go:embed migrations/*.sql
var embedded embed.FS

func tables() []postgres.Tables {
	migrations, err := fs.Sub(embedded, "migrations")
	if err != nil {
		panic(err) // the folder is embedded
	}

	const lockID = 0x6865616470616765 // "headpage"

	return []postgres.Tables{{Migrations: migrations, Versions: "headcount_pages_migrations", Lock: lockID}}
}

// pgRows are the rows in PostgreSQL.
type pgRows struct{ db *postgres.DB }

func openRows(ctx context.Context, url string) (*pgRows, error) {
	// What fails is logged by the Table, once for all its calls.
	db, err := postgres.Open(ctx, postgres.Config{
		URL: url, Tables: tables(), Near: "headcount_rows_migrations", Probe: probe, Log: zerolog.Nop(),
	})
	if err != nil {
		return nil, fmt.Errorf("pagestable: %w", err)
	}

	return &pgRows{db}, nil
}

func (r *pgRows) do(ctx context.Context, what string, fn func(context.Context, *pgxpool.Conn) error) error {
	err := postgres.Retry(func() error { return r.db.Do(ctx, fn) })
	if cause := r.db.Cause(); errors.Is(err, postgres.ErrAway) && cause != nil {
		err = fmt.Errorf("%w: %w", postgres.ErrAway, cause) // also if the call was not tried
	}
	if err != nil {
		return fmt.Errorf("pagestable: %s: %w", what, err)
	}

	return nil
}

func (r *pgRows) exec(ctx context.Context, what, sql string, args ...any) (affected int64, err error) {
	err = r.do(ctx, what, func(ctx context.Context, c *pgxpool.Conn) error {
		tag, err := c.Exec(ctx, sql, args...)
		affected = tag.RowsAffected()

		return postgres.First(ctx, err)
	})

	return affected, err
}

// columns returns counts as the columns of given, sorted: of two statements at the same time neither has a row for
// which the other one waits, and waits for a row of it.
func columns(counts []presence.Count) []any {
	slices.SortFunc(counts, func(a, b presence.Count) int { return strings.Compare(a.Page, b.Page) })

	n := len(counts)
	page, site := make([]string, n), make([]string, n)
	count, updated := make([]int64, n), make([]time.Time, n)
	incarnation, sequence := make([]int64, n), make([]int64, n)
	for i, c := range counts {
		of, key := presence.SplitName(c.Page)
		page[i] = key
		site[i] = of.Name()
		count[i] = c.Users
		updated[i] = time.Unix(presence.Seconds(c.Updated), 0)
		incarnation[i] = int64(c.Version.Incarnation)
		sequence[i] = int64(c.Version.Sequence)
	}

	return []any{page, site, count, updated, incarnation, sequence}
}

// Put implements rows.
func (r *pgRows) Put(ctx context.Context, counts []presence.Count) error {
	_, err := r.exec(ctx, "put", put, columns(counts)...)

	return err
}

// Lacking implements rows.
func (r *pgRows) Lacking(ctx context.Context, counts []presence.Count) (lacks []presence.Count, err error) {
	var place int
	args := columns(counts)
	err = r.query(ctx, "compare", []any{&place}, func() { lacks = append(lacks, counts[place-1]) }, lacking, args...)

	return lacks, err
}

// Occupied implements rows.
func (r *pgRows) Occupied(ctx context.Context, after string, limit int) (some []presence.Count, err error) {
	var page, name string
	var c presence.Count
	each := func() {
		site, _ := presence.ParseSite(name) // columns wrote it
		c.Page = site.Qualify(page)
		some = append(some, c)
	}
	of, key := presence.SplitName(after)
	to := []any{&page, &name, &c.Users, &c.Version.Incarnation, &c.Version.Sequence}
	err = r.query(ctx, "read", to, each, occupied, key, of.Name(), limit)

	return some, err
}

func (r *pgRows) query(ctx context.Context, what string, to []any, each func(), sql string, args ...any) error {
	return r.do(ctx, what, func(ctx context.Context, c *pgxpool.Conn) error {
		found, _ := c.Query(ctx, sql, args...) // ForEachRow returns the error
		_, err := pgx.ForEachRow(found, to, func() error {
			each()
			return nil
		})

		return err
	})
}

// Drop implements rows.
func (r *pgRows) Drop(ctx context.Context, counts []presence.Count) error {
	_, err := r.exec(ctx, "delete", drop, columns(counts)...)

	return err
}

// Sweep implements rows.
func (r *pgRows) Sweep(ctx context.Context) error {
	for {
		n, err := r.exec(ctx, "sweep", sweep, maxEmpty, maxRows)
		if err != nil || n < maxRows {
			return err
		}
	}
}

// Grant implements rows.
func (r *pgRows) Grant(ctx context.Context) (may bool, err error) {
	err = r.do(ctx, "grant", func(ctx context.Context, c *pgxpool.Conn) error {
		_, err := c.Conn().PgConn().Exec(ctx, postgres.MakeAppRole+";"+grantApp).ReadAll()
		may = postgres.Code(err) != "42501"
		if !may {
			return nil // it is no fault of PostgreSQL
		}

		return err
	})

	return may, err
}

// Close ends the connections.
func (r *pgRows) Close() { r.db.Close() }

// Check connects as a server does, and fails as it does, also when the database does not answer. It changes nothing.
// It returns what an administrator has to do before applications can read the table, or nothing.
func Check(ctx context.Context, url string) (admin string, err error) {
	_, err = postgres.Check(ctx, url, tables(), func(ctx context.Context, conn *sql.DB) error {
		var may bool
		if err := conn.QueryRowContext(ctx, mayGrant).Scan(&may); err != nil {
			return err
		}
		if !may {
			admin = adminSQL
		}

		return nil
	})

	return admin, err
}
