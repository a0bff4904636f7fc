package postgres

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/trace"

	"headcount/internal/tracing"
)

// Settings of a new session. They are statements, because PgBouncer would refuse them as startup parameters.
const (
	sessionSettings = `set default_transaction_isolation = 'read committed';` +
		// Every statement finds its rows by an index. Without these settings, a plan made while a table was empty would
		// scan it when it is full.
		`set plan_cache_mode = 'force_generic_plan'; set enable_seqscan = off; set jit = off;` +
		`set enable_hashjoin = off; set enable_mergejoin = off;` +
		// What is acknowledged must be on disk, whatever the database's default is.
		`select set_config('synchronous_commit', 'on', false) where current_setting('synchronous_commit') = 'off';`
	// An application may hold a lock. The wait for it must be much shorter than callTimeout, so that it is not taken
	// for a server that does not answer. If a process stops within a transaction, its locks are released.
	sessionTimeouts = `set statement_timeout = 10000; set idle_in_transaction_session_timeout = 5000;` +
		`set lock_timeout = 1000;`
)

// ofPrisma are parameters that only Prisma knows. Applications often share their URL with us, and PostgreSQL would
// refuse every connection with such a parameter.
var ofPrisma = []string{
	"connection_limit", "pgbouncer", "pool_timeout", "schema", "socket_timeout", "sslaccept", "sslidentity",
	"statement_cache_size",
}

// Ignored returns the parameters without effect in a URL that CheckURL accepts.
func Ignored(url string) (names []string) {
	pc, err := pgxpool.ParseConfig(url)
	// CheckURL refuses such a URL, and says why.
	if err != nil {
		return nil
	}
	for _, name := range ofPrisma {
		if _, given := pc.ConnConfig.RuntimeParams[name]; given {
			names = append(names, name)
		}
	}

	return names
}

// CheckURL returns what is wrong with the URL of a database, or nothing. It quotes no part of the URL, which may
// contain a password.
func CheckURL(url string) (problem string) {
	const hint = "write postgres://user:password@host:5432/database"
	if !strings.HasPrefix(url, "postgres://") && !strings.HasPrefix(url, "postgresql://") {
		return "it does not begin with postgres://; " + hint
	}
	if _, err := pgxpool.ParseConfig(url); err != nil {
		return "it is not a URL of PostgreSQL; " + hint
	}

	return ""
}

// configure returns the configuration for the database of url. Its errors quote no part of the URL, which may contain a
// password.
func configure(url string) (*pgxpool.Config, error) {
	if problem := CheckURL(url); problem != "" {
		return nil, fmt.Errorf("postgres: %w: %s", ErrConfig, problem)
	}
	pc, err := pgxpool.ParseConfig(url)
	if err != nil { // cannot happen: CheckURL has parsed it
		return nil, fmt.Errorf("postgres: %w: URL of PostgreSQL: %w", ErrConfig, err)
	}

	// The name shows administrators whose connection it is.
	cc := pc.ConnConfig
	for _, name := range ofPrisma {
		delete(cc.RuntimeParams, name)
	}
	cc.RuntimeParams["application_name"] = "headcount"
	cc.RuntimeParams["client_encoding"] = "UTF8"

	cc.Tracer = traced{}
	cc.ConnectTimeout = cmp.Or(cc.ConnectTimeout, dialTimeout)
	cc.DefaultQueryExecMode = pgx.QueryExecModeCacheStatement
	cc.AfterConnect = begin(sessionSettings + sessionTimeouts)

	return pc, nil
}

// begin returns a hook that sets up a session with statements.
func begin(statements string) pgconn.AfterConnectFunc {
	return func(ctx context.Context, c *pgconn.PgConn) error {
		_, err := c.Exec(ctx, statements).ReadAll()
		return err
	}
}

// poolerProbes is how many connections refusePooler compares. If the address stands for fewer poolers than that, two of
// the connections lead to the same one.
const poolerProbes = 4

// refusePooler fails, with ErrConfig, if it finds a pooler that gives each transaction of a connection another backend,
// as PgBouncer does in its modes transaction and statement. There a session cannot have settings, locks and prepared
// statements of its own. The test itself sets nothing, because a setting would leak to other clients of the pooler.
func refusePooler(ctx context.Context, cc *pgx.ConnConfig) error {
	// Without the statements of a new session, which would leak to other clients of a pooler.
	config := cc.Config.Copy()
	config.AfterConnect = nil

	var backends []string // one for each connection; all connections stay open until the end
	for range poolerProbes {
		c, err := pgconn.ConnectConfig(ctx, config)
		if err != nil {
			return err
		}
		defer c.Close(context.WithoutCancel(ctx))

		first, again, err := backendsOf(ctx, c)
		if err != nil {
			return fewConnections(err, len(backends))
		}

		// A pooler invents the PID of a connection, so the real one means that there is no pooler.
		direct := first == strconv.FormatUint(uint64(c.PID()), 10)
		if direct {
			return nil
		}

		// Two transactions of this connection had different backends, or two connections had the same one.
		shared := first != again || slices.Contains(backends, first)
		if shared {
			return fmt.Errorf("%w: a connection pooler answers that shares connections to PostgreSQL "+
				"between its clients, as PgBouncer does with pool_mode transaction or statement; "+
				"give the address of PostgreSQL itself, or set pool_mode = session", ErrConfig)
		}

		backends = append(backends, first)
	}

	return nil
}

// fewConnections returns the error for a connection that a pooler refused although only few are open.
func fewConnections(err error, open int) error {
	if open == 0 {
		return err
	}

	const few = "a connection pooler answers, and gives %d connections at once (PgBouncer's default_pool_size): %w"
	return fmt.Errorf(few, open, err)
}

// backendsOf returns the PIDs of the backends of two transactions of c. It uses simple queries, because a prepared
// statement would stay with its backend.
func backendsOf(ctx context.Context, c *pgconn.PgConn) (first, again string, err error) {
	for _, pid := range []*string{&first, &again} {
		results, err := c.Exec(ctx, "select pg_backend_pid()").ReadAll()
		if err != nil {
			return "", "", err
		}
		*pid = string(results[0].Rows[0][0])
	}

	return first, again, nil
}

// traced adds a span for each query of a traced request. The span does not contain the query.
type traced struct{}

// TraceQueryStart implements pgx.QueryTracer.
func (traced) TraceQueryStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
	ctx, _ = tracing.Start(ctx, "postgresql") // TraceQueryEnd ends it

	return ctx
}

// TraceQueryEnd implements pgx.QueryTracer. If ctx has a recorded span, it is the one of TraceQueryStart.
func (traced) TraceQueryEnd(ctx context.Context, _ *pgx.Conn, data pgx.TraceQueryEndData) {
	span := trace.SpanFromContext(ctx)
	// The text stays out of the trace, because it may quote values.
	if data.Err != nil {
		span.SetStatus(codes.Error, "")
	}
	span.End()
}
