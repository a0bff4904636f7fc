package counterpg

import (
	"context"
	_ "embed" // for change.sql
	"errors"
	"fmt"
	"strings"
	"time"
	"unicode"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"headcount/counter"
	"headcount/internal/outage"
	"headcount/presence"
)

// changedEvery is the time between two looks for what headcount.change has changed. Subscribers and webhooks are
// promised a change within a second.
const changedEvery = 250 * time.Millisecond

const (
	// lockChange is taken by whoever replaces the function or its rules. The number is lockID + 2.
	lockChange = `select pg_advisory_xact_lock(7522525836385154416)`

	dropRules   = `delete from headcount_rules`
	insertRules = `insert into headcount_rules (site, place, kind, floor, ceiling, kept, match)
		select * from unnest($1::text[], $2::int[], $3::smallint[], $4::bigint[], $5::bigint[], $6::bigint[], $7::text[])`

	// readTables returns the server's user, the schema of the tables, whether those of the function are among them, and
	// whether the function is of those in another schema.
	readTables = `select quote_ident(current_user), n.nspname,
			to_regclass(quote_ident(n.nspname) || '.headcount_changed') is not null, exists (
			select from pg_proc p where p.pronamespace = to_regnamespace('headcount') and p.proname = 'change'
			and strpos(p.prosrc, '"' || replace(n.nspname, '"', '""') || '".headcount_counters') = 0)
		from pg_class c join pg_namespace n on n.oid = c.relnamespace where c.oid = 'headcount_counters'::regclass`
	readRights = `select quote_ident(current_user),
			(to_regrole('headcount_app') is not null or r.rolsuper or r.rolcreaterole)
			and case when to_regnamespace('headcount') is null then has_database_privilege(current_database(), 'CREATE')
				else has_schema_privilege('headcount', 'CREATE') end
		from pg_roles r where r.rolname = current_user`
	// readOwners returns what gives the schema and the functions to the server's user: whoever owns the schema may replace
	// what is in it, and the function runs with the rights of its owner.
	readOwners = `select coalesce(string_agg('ALTER ' || thing || ' OWNER TO ' || quote_ident(current_user), '; '), '')
		from (
		select 'SCHEMA headcount', nspowner from pg_namespace where nspname = 'headcount'
		union all
		select format('FUNCTION headcount.%I(%s)', proname, pg_get_function_identity_arguments(oid)), proowner from pg_proc
			where pronamespace = to_regnamespace('headcount') and proname = any('{wrap64,rotate64,xxhash64,identity,change}')
		) o (thing, owner) join pg_roles r on r.oid = owner
		where r.rolname <> current_user and not (r.rolsuper and thing like 'SCHEMA%')`
	makeSchema = `do $$ begin
		if to_regnamespace('headcount') is null then create schema headcount; end if;
	end $$`
	// Roles are of all databases: another server may make this one at the same time.
	makeRole = `do $$ begin
		if to_regrole('headcount_app') is null then create role headcount_app nologin; end if;
	exception when duplicate_object or unique_violation then null;
	end $$`
	grantRole = `grant usage on schema headcount to headcount_app;
		grant execute on function headcount.change to headcount_app`

	// takeChanged is one statement, so the counters are at least as new as the changes that it takes.
	takeChanged = `with taken as (delete from headcount_changed where ctid = any(array(
			select ctid from headcount_changed order by id limit $1 for update skip locked)) returning key)
		select c.key, c.kind, c.value, c.updated, c.incarnation, c.sequence, c.entries,
			c.set_id, c.ledger_id, c.kept, c.history_id, c.slots
		from headcount_counters c where c.key = any(array(select key from taken))`
)

//go:embed change.sql
var changeSQL string

//go:embed change_tables.sql
var changeTablesSQL string

// ServeSQL writes the rules for headcount.change to the database and makes the function. Then it calls changed with the
// counters that the function has changed, and publishes them, until ctx ends. Several processes share that work: each
// change is passed to one of them.
func (s *Store) ServeSQL(ctx context.Context, rules *counter.Rules, changed func([]counter.Counter)) {
	for made := false; ; {
		if !made {
			made = s.makeChange(ctx, rules)
		}
		for some := s.takeChanged(ctx); len(some) > 0; some = s.takeChanged(ctx) {
			changed(some)
		}
		if !outage.Sleep(ctx, changedEvery) {
			return
		}
	}
}

// makeChange writes the rules and makes the function. It reports whether that is done, or of no use to try again.
func (s *Store) makeChange(ctx context.Context, rules *counter.Rules) (done bool) {
	mend, why := "", error(nil)
	err := s.do(ctx, func(ctx context.Context, c *pgxpool.Conn) error {
		var in tables
		if why = c.QueryRow(ctx, readTables).Scan(&in.user, &in.schema, &in.made, &in.foreign); why != nil {
			return why
		}
		if why = in.makeTables(ctx, c); why != nil {
			return optional(why)
		}
		if why = writeRules(ctx, c, rules); why == nil {
			mend, why = in.makeFunction(ctx, c)
		}
		return optional(why)
	})
	if ctx.Err() != nil || errors.Is(err, ErrAway) || isHeld(err) { // somebody holds a lock
		return false
	}
	if err != nil {
		s.cfg.Log.Warn().Err(why).Str("mend", mend).
			Msg("counters: applications cannot call headcount.change in SQL; all else works")
	}
	return true
}

// optional has a right or a table that is missing say nothing about PostgreSQL: all else works without headcount.change.
func optional(err error) error {
	if ofClass(err, "42") {
		return callers{err}
	}
	return err
}

// tables is what readTables returns.
type tables struct {
	user, schema  string
	made, foreign bool
}

// makeTables makes the function's tables beside the others, unless they are there.
func (in *tables) makeTables(ctx context.Context, c *pgxpool.Conn) error {
	if in.made {
		return nil
	}
	text := strings.ReplaceAll(changeTablesSQL, "{tables}", pgx.Identifier{in.schema}.Sanitize())
	_, err := c.Conn().PgConn().Exec(ctx, lockChange+";"+text).ReadAll() // a simple query is one transaction
	return err
}

// writeRules replaces the rules in the database. So those of the process that started last hold.
func writeRules(ctx context.Context, c *pgxpool.Conn, rules *counter.Rules) error {
	var site, match []string
	var place []int32
	var kind []int16
	var floor, ceiling []*int64
	var kept []int64
	for _, rule := range rules.All() {
		of, _ := presence.SplitName(rule.Match)
		site, match, place = append(site, of.Name()), append(match, rule.Written()), append(place, int32(len(place)))
		kind, kept = append(kind, int16(rule.Kind)), append(kept, rule.Ledger.Milliseconds())
		floor, ceiling = append(floor, rule.Floor), append(ceiling, rule.Ceiling)
	}
	b := &pgx.Batch{}
	b.Queue("begin isolation level read committed")
	b.Queue(lockChange)
	b.Queue(dropRules)
	b.Queue(insertRules, site, place, kind, floor, ceiling, kept, match)
	b.Queue("commit")
	return c.SendBatch(ctx, b).Close()
}

// makeFunction makes or replaces the function, its schema and its role, each as far as that is permitted. With an error
// it returns what an operator can do about it.
func (in *tables) makeFunction(ctx context.Context, c *pgxpool.Conn) (mend string, err error) {
	var owners string
	if err := c.QueryRow(ctx, readOwners).Scan(&owners); err != nil {
		return "", err
	}
	switch {
	case owners != "" && !in.foreign:
		return "as an administrator: " + owners + "; then start a server again",
			callers{errors.New("the schema headcount, or a function in it, belongs to another user")}
	case in.foreign:
		return "drop the function to have it made for this server",
			callers{errors.New("the function is of counters in another schema of the database")}
	case strings.ContainsAny(in.schema, `'$`):
		return "give the schema another name",
			callers{fmt.Errorf("the name of the schema %q has a quote or a dollar sign", in.schema)}
	}
	fill := strings.NewReplacer("{tables}", pgx.Identifier{in.schema}.Sanitize(), "{printable}", printable())
	for _, part := range []string{makeSchema, fill.Replace(changeSQL), makeRole, grantRole} {
		// A simple query is one transaction.
		if _, err := c.Conn().PgConn().Exec(ctx, lockChange+";"+part).ReadAll(); err != nil {
			return "as an administrator: " + adminSQL(in.user) + "; then start a server again", err
		}
	}
	return "", nil
}

// adminSQL returns what an administrator has to do for a user without the rights to do so itself.
func adminSQL(user string) string {
	return "CREATE ROLE headcount_app NOLOGIN; CREATE SCHEMA IF NOT EXISTS headcount AUTHORIZATION " + user
}

// printable returns what a key may have as ranges of a bracket expression, in which only ASCII characters have a
// meaning.
func printable() string {
	text := strings.Builder{}
	text.WriteString(" -)+-~\u200c\u200d") // without *
	span := func(from, to, stride rune) {
		for r := from; r <= to; r += stride {
			switch {
			case r <= unicode.MaxASCII:
			case stride == 1:
				text.WriteString(string(r) + "-" + string(to))
				return
			default:
				text.WriteRune(r)
			}
		}
	}
	for _, table := range unicode.PrintRanges {
		for _, r := range table.R16 {
			span(rune(r.Lo), rune(r.Hi), rune(r.Stride))
		}
		for _, r := range table.R32 {
			span(rune(r.Lo), rune(r.Hi), rune(r.Stride))
		}
	}
	return text.String()
}

// takeChanged publishes some of what the function has changed, and returns it.
func (s *Store) takeChanged(ctx context.Context) (some []counter.Counter) {
	told := changes{}
	err := s.do(ctx, func(ctx context.Context, c *pgxpool.Conn) error {
		rows, _ := c.Query(ctx, takeChanged, readAtOnce) // records returns the error
		return optional(records(rows, func(key string, r *record) {
			some = append(some, r.Counter(key))
			told.add(key, nil)
		}))
	})
	if err != nil {
		return nil
	}
	if len(some) > 0 {
		s.feed.committed(told)
	}
	return some
}
