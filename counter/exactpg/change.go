package exactpg

import (
	"context"
	"database/sql"
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
	"headcount/internal/postgres"
	"headcount/presence"
)

// changedEvery is the time between two checks for counters that headcount.change has changed. Subscribers and webhooks
// are promised a change within a second.
const changedEvery = 250 * time.Millisecond

const (
	// lockChange is held while the function or its rules are replaced. The number is lockID + 2.
	lockChange = `select pg_advisory_xact_lock(7522525836385154416)`

	dropRules   = `delete from headcount_rules`
	insertRules = `insert into headcount_rules (site, place, kind, floor, ceiling, kept, match)
		select * from unnest($1::text[], $2::int[], $3::text[], $4::bigint[], $5::bigint[], $6::bigint[], $7::text[])`

	// readPlace returns the server's user, the schema of the tables, and whether the function exists for tables in
	// another schema.
	readPlace = `select quote_ident(current_user), n.nspname, exists (
			select from pg_proc p where p.pronamespace = to_regnamespace('headcount') and p.proname = 'change'
			and strpos(p.prosrc, '"' || replace(n.nspname, '"', '""') || '".headcount_counters') = 0)
		from pg_class c join pg_namespace n on n.oid = c.relnamespace where c.oid = 'headcount_counters'::regclass`
	// readOwners returns the statements that give the schema and the functions to the server's user. The owner of the
	// schema may replace everything in it, and the function runs with the rights of its owner, so both must be the
	// server's user.
	readOwners = `select coalesce(string_agg('ALTER ' || thing || ' OWNER TO ' || quote_ident(current_user), '; '), '')
		from (
		select 'SCHEMA headcount', nspowner from pg_namespace where nspname = 'headcount'
		union all
		select format('FUNCTION headcount.%I(%s)', proname, pg_get_function_identity_arguments(oid)), proowner from pg_proc
			where pronamespace = to_regnamespace('headcount')
			and proname = any('{wrap64,rotate64,xxhash64,identity,misnamed,rule_of,locked,enter,hold,change,reserve,commit,
				cancel}')
		) o (thing, owner) join pg_roles r on r.oid = owner
		where r.rolname <> current_user and not (r.rolsuper and thing like 'SCHEMA%')`
	readRights = `select quote_ident(current_user),
			(to_regrole('headcount_app') is not null or r.rolsuper or r.rolcreaterole)
			and case when to_regnamespace('headcount') is null then has_database_privilege(current_database(), 'CREATE')
				else has_schema_privilege('headcount', 'CREATE') end
		from pg_roles r where r.rolname = current_user`
	makeSchema = `do $$ begin
		if to_regnamespace('headcount') is null then create schema headcount; end if;
	end $$`
	// Roles belong to all databases, so a server of another database may create this one at the same time.
	makeRole = `do $$ begin
		if to_regrole('headcount_app') is null then create role headcount_app nologin; end if;
	exception when duplicate_object or unique_violation then null;
	end $$`
	grantRole = `grant usage on schema headcount to headcount_app;
		grant execute on function headcount.change, headcount.reserve, headcount.commit, headcount.cancel to headcount_app`

	// takeChanged is one statement, so the counters that it reads are at least as new as the changes that it takes.
	takeChanged = `with taken as (delete from headcount_changed where ctid = any(array(
			select ctid from headcount_changed order by id limit $1 for update skip locked)) returning key)
		select ` + columns + ` from headcount_counters c where c.key = any(array(select key from taken))`
)

//go:embed change.sql
var changeSQL string

// ServeSQL writes the rules for headcount.change to the database and creates the function. Then it publishes the
// counters that the function has changed, and calls changed with them, until ctx ends. If several processes run it,
// each change is passed to one of them.
func (s *Store) ServeSQL(ctx context.Context, rules *counter.Rules, changed func([]counter.Counter)) {
	made := false
	for {
		// An outage or a lock may be in the way now, so each look tries again.
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

// obstacle is why the function cannot be created. Everything else works without it, so PostgreSQL is not treated as
// failed.
type obstacle struct {
	why  error
	mend string
}

// makeChange writes the rules and creates the function. It returns true if that is done, or if there is no use in
// retrying.
func (s *Store) makeChange(ctx context.Context, rules *counter.Rules) (done bool) {
	var found *obstacle
	err := s.do(ctx, "headcount.change", func(ctx context.Context, c *pgxpool.Conn) (err error) {
		found, err = makeFunction(ctx, c, rules)
		return err
	})
	if err != nil {
		return false // PostgreSQL is unavailable, or another session holds a lock
	}

	if found != nil {
		s.cfg.Log.Warn().Err(found.why).Str("mend", found.mend).
			Msg("counters: applications cannot call headcount.change in SQL; all else works")
	}

	return true
}

// makeFunction writes the rules, and creates or replaces the function, its schema and its role, each as far as the
// user's rights permit.
func makeFunction(ctx context.Context, c *pgxpool.Conn, rules *counter.Rules) (*obstacle, error) {
	var user, schema, owners string
	var foreign bool
	if err := c.QueryRow(ctx, readPlace).Scan(&user, &schema, &foreign); err != nil {
		return nil, postgres.First(ctx, err)
	}
	if err := writeRules(ctx, c, rules); err != nil {
		return nil, err
	}
	if err := c.QueryRow(ctx, readOwners).Scan(&owners); err != nil {
		return nil, err
	}

	switch {
	case foreign:
		return &obstacle{
			why:  errors.New("the function is of counters in another schema of the database"),
			mend: "drop the function to have it made for this server",
		}, nil
	case owners != "":
		return &obstacle{
			why:  errors.New("the schema headcount, or a function in it, belongs to another user"),
			mend: "as an administrator: " + owners + "; then start a server again",
		}, nil
	case strings.ContainsAny(schema, `'$`):
		// Such a name would end the quotes around the text of the functions.
		return &obstacle{
			why:  fmt.Errorf("the name of the schema %q has a quote or a dollar sign", schema),
			mend: "give the schema another name",
		}, nil
	}

	fill := strings.NewReplacer("{tables}", pgx.Identifier{schema}.Sanitize(), "{printable}", printable())
	for _, part := range []string{makeSchema, fill.Replace(changeSQL), makeRole, grantRole} {
		// A simple query is one transaction.
		_, err := c.Conn().PgConn().Exec(ctx, lockChange+";"+part).ReadAll()
		// Class 42 is for wrong statements and missing rights, and the statements are ours.
		if lacksRight := strings.HasPrefix(postgres.Code(err), "42"); lacksRight {
			return &obstacle{
				why: err, mend: "as an administrator: " + adminSQL(user) + "; then start a server again",
			}, nil
		}
		if err != nil {
			return nil, err
		}
	}

	return nil, nil
}

// writeRules replaces the rules in the database, so the process that started last determines them.
func writeRules(ctx context.Context, c *pgxpool.Conn, rules *counter.Rules) error {
	var site, kind, match []string
	var place []int32
	var floor, ceiling []*int64
	var kept []int64
	for i, rule := range rules.All() {
		of, _ := presence.SplitName(rule.Match)
		site = append(site, of.Name())
		match = append(match, rule.Written())
		place = append(place, int32(i))
		kind = append(kind, rule.Kind.String())
		kept = append(kept, rule.Ledger.Milliseconds())
		floor = append(floor, rule.Floor)
		ceiling = append(ceiling, rule.Ceiling)
	}

	b := &pgx.Batch{}
	b.Queue("begin isolation level read committed")
	// Otherwise two servers that start at once would both delete the old rules, and then both insert theirs.
	b.Queue(lockChange)
	b.Queue(dropRules)
	b.Queue(insertRules, site, place, kind, floor, ceiling, kept, match)
	b.Queue("commit")

	return c.SendBatch(ctx, b).Close()
}

// adminSQL returns what an administrator must execute for a user that lacks the rights.
func adminSQL(user string) string {
	return "CREATE ROLE headcount_app NOLOGIN; CREATE SCHEMA IF NOT EXISTS headcount AUTHORIZATION " + user
}

// AdminSQL returns what an administrator must execute before applications can call headcount.change, or nothing.
func AdminSQL(ctx context.Context, conn *sql.DB) (string, error) {
	var user, owners string
	var makesFunction bool
	if err := conn.QueryRowContext(ctx, readRights).Scan(&user, &makesFunction); err != nil {
		return "", err
	}
	if err := conn.QueryRowContext(ctx, readOwners).Scan(&owners); err != nil {
		return "", err
	}

	if owners == "" && !makesFunction {
		return adminSQL(user), nil
	}

	return owners, nil
}

// printable returns the characters of keys as ranges of a bracket expression, in which only ASCII characters have a
// special meaning.
func printable() string {
	var text strings.Builder
	text.WriteString(" -)+-~\u200c\u200d") // without *
	span := func(from, to, stride rune) {
		for r := from; r <= to; r += stride {
			switch {
			case r <= unicode.MaxASCII:
			// Without a gap the whole range takes three characters.
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

// takeChanged publishes some of the counters that the function has changed, and returns them.
func (s *Store) takeChanged(ctx context.Context) (some []counter.Counter) {
	var r scanned
	var keys []string
	each := func() {
		is := r.record()
		some = append(some, is.Counter(r.key))
		keys = append(keys, r.key)
	}
	// If this process dies before it publishes them, the others find them when they poll.
	if err := s.query(ctx, "changes in SQL", r.to(), each, takeChanged, readAtOnce); err != nil {
		return nil
	}
	s.feed.committed(keys)

	return some
}
