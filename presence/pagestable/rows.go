package pagestable

import (
	"context"
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
	// A row that is as new is not even locked, and stays, so the statement may be repeated and arrive late.
	put = `insert into headcount_pages as p (page, site, count, updated_at, incarnation, sequence)
		select * from ` + given + ` where not exists (select from headcount_pages h where h.page = g.page
			and h.site = g.site and (h.incarnation, h.sequence) >= (g.incarnation, g.sequence))
		on conflict (page, site) do update set count = excluded.count, updated_at = excluded.updated_at,
			incarnation = excluded.incarnation, sequence = excluded.sequence
			where (p.incarnation, p.sequence) < (excluded.incarnation, excluded.sequence)`
	// Another process may have written a row since it was read.
	drop = `delete from headcount_pages p using ` + given + ` where p.page = g.page and p.site = g.site
		and p.incarnation = g.incarnation and p.sequence = g.sequence`
	given = `unnest($1::text[], $2::text[], $3::bigint[], $4::timestamptz[], $5::bigint[], $6::bigint[])
		g (page, site, count, updated_at, incarnation, sequence)`

	occupied = `select page, site, count, incarnation, sequence from headcount_pages
		where count > 0 and (page, site) > ($1, $2) order by page, site limit $3`
	sweep = `delete from headcount_pages where count = 0 and ctid = any(array(
		select ctid from (select ctid, updated_at, row_number() over (order by updated_at desc) as place
			from headcount_pages where count = 0) e
		where place > $1 or updated_at < now() - interval '1 day' limit $2))`

	// Without the right to do that nothing happens here: headcount.change logs a warning with what an administrator has
	// to do.
	grant = `do $$ begin
		if to_regrole('headcount_app') is null then create role headcount_app nologin; end if;
		grant select on headcount_pages to headcount_app;
		execute format('grant usage on schema %s to headcount_app', (select relnamespace::regnamespace
			from pg_class where oid = 'headcount_pages'::regclass));
	exception when insufficient_privilege or duplicate_object or unique_violation then null;
	end $$`

	// probe is a change, for postgres.DB. No page has that name.
	probe = `insert into headcount_pages (page) values ('')`
)

//go:embed migrations/*.sql
var embedded embed.FS

// Tables returns the table as a database has to have it.
func Tables() []postgres.Tables {
	migrations, err := fs.Sub(embedded, "migrations")
	if err != nil {
		panic(err) // the folder is embedded
	}

	const lockID = 0x6865616470616765 // "headpage"

	return []postgres.Tables{{Migrations: migrations, Versions: "headcount_pages_migrations", Lock: lockID}}
}

// pgRows are the rows in PostgreSQL.
type pgRows struct{ *postgres.DB }

func openRows(ctx context.Context, url string) (pgRows, error) {
	// What fails is logged by the Table, once for all its calls.
	db, err := postgres.Open(ctx, postgres.Config{
		URL: url, Tables: Tables(), Near: "headcount_rows_migrations", Probe: probe, Log: zerolog.Nop(),
	})

	return pgRows{db}, err
}

func (r pgRows) exec(ctx context.Context, sql string, args ...any) (affected int64, err error) {
	do := func(ctx context.Context, c *pgxpool.Conn) error {
		tag, err := c.Exec(ctx, sql, args...)
		affected = tag.RowsAffected()

		return postgres.First(ctx, err)
	}
	// All these statements may be repeated, see put and drop.
	err = postgres.Retry(func() error { return r.Do(ctx, do) })

	// A call that was not tried does not say why.
	if cause := r.Cause(); errors.Is(err, postgres.ErrAway) && cause != nil {
		err = fmt.Errorf("%w: %w", postgres.ErrAway, cause)
	}

	return affected, err
}

// change carries out a statement with counts. It sorts the counts, so that all statements lock their rows in the same
// order and cannot deadlock.
func (r pgRows) change(ctx context.Context, sql string, counts []presence.Count) error {
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

	_, err := r.exec(ctx, sql, page, site, count, updated, incarnation, sequence)

	return err
}

// Put implements rows.
func (r pgRows) Put(ctx context.Context, counts []presence.Count) error {
	return r.change(ctx, put, counts)
}

// Drop implements rows.
func (r pgRows) Drop(ctx context.Context, counts []presence.Count) error {
	return r.change(ctx, drop, counts)
}

// Occupied implements rows.
func (r pgRows) Occupied(ctx context.Context, after string, limit int) (some []presence.Count, err error) {
	of, key := presence.SplitName(after)
	err = r.Do(ctx, func(ctx context.Context, conn *pgxpool.Conn) error {
		found, _ := conn.Query(ctx, occupied, key, of.Name(), limit) // CollectRows returns the error
		some, err = pgx.CollectRows(found, func(row pgx.CollectableRow) (c presence.Count, err error) {
			var page, name string
			err = row.Scan(&page, &name, &c.Users, &c.Version.Incarnation, &c.Version.Sequence)
			site, _ := presence.ParseSite(name) // change wrote it
			c.Page = site.Qualify(page)

			return c, err
		})

		return err
	})

	return some, err
}

// Sweep implements rows.
func (r pgRows) Sweep(ctx context.Context) error {
	for {
		// In parts, so that none of them holds locks for long.
		n, err := r.exec(ctx, sweep, maxEmpty, maxRows)
		if err != nil || n < maxRows {
			return err
		}
	}
}

// Grant implements rows.
func (r pgRows) Grant(ctx context.Context) error {
	_, err := r.exec(ctx, grant)

	return err
}
