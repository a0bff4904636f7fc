package counterpg

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"headcount/counter"
	"headcount/internal/outage"
)

// note says whether the tables are there now.
func (s *Store) note(err error) {
	if err != nil {
		s.failed(err)
		return
	}
	s.ready.Store(true)
}

// Cause is why PostgreSQL cannot be used; nil: it can. Any goroutine may call it.
func (s *Store) Cause() error {
	if s.up() {
		return nil
	}
	return s.breaker.LastFailure()
}

func (s *Store) up() bool { return s.ready.Load() && s.breaker.Up() }

// failed notes why PostgreSQL could not be used, on one line: of several addresses each has its own.
func (s *Store) failed(why error) {
	s.breaker.Failed(errors.New(strings.Join(strings.Fields(why.Error()), " ")))
}

// tend prepares the tables, asks for a server that does not answer, and says
// when it comes and goes.
func (s *Store) tend(ctx context.Context) {
	ticker := time.NewTicker(outage.ProbeEvery)
	defer ticker.Stop()
	was, first := false, true
	away := outage.Log{Log: s.cfg.Log, What: "counters: PostgreSQL", Mend: "the server waits for it: see whether it runs, and what headcount check says of it"}
	for ctx.Err() == nil {
		if !s.ready.Load() && !first {
			trying, cancel := context.WithTimeout(ctx, migrateTimeout)
			s.note(s.prepare(trying))
			cancel()
		}
		up := s.up()
		if s.ready.Load() && !up {
			// One call that the breaker lets through ends the outage, whoever makes it. Reads do not end that of changes.
			if s.do(ctx, s.probe) == nil {
				s.breaker.Probed()
			}
			up = s.up()
		}
		if up != was || first {
			if s.cfg.OnState != nil {
				s.cfg.OnState.StoreState(up)
			}
			was, first = up, false
		}
		if cause := s.Cause(); up || cause != nil && ctx.Err() == nil {
			away.Note(cause)
		}
		select {
		case <-ctx.Done():
		case <-s.breaker.Changed:
		case <-ticker.C:
		}
	}
}

var (
	errClosed = errors.New("it is closed")
	errSilent = errors.New("it did not answer a moment ago")
)

// callers marks an error of a caller's function, which says nothing about PostgreSQL.
type callers struct{ error }

func (c callers) Unwrap() error { return c.error }

func (c callers) Is(target error) bool { return target == outage.ErrNotItsFault }

// do runs fn on a connection, unless PostgreSQL is known not to answer. A
// transaction that fn left open is rolled back. Its error is counter.ErrUnavailable.
func (s *Store) do(ctx context.Context, fn func(context.Context, *pgxpool.Conn) error) error {
	return s.doFor(ctx, callTimeout, fn)
}

// doLong is do for what takes long. While PostgreSQL was away one call at a time finds out
// whether it is back, and all others fail until that one has ended: so it must not be this.
func (s *Store) doLong(ctx context.Context, timeout time.Duration, fn func(context.Context, *pgxpool.Conn) error) error {
	if err := s.do(ctx, func(ctx context.Context, c *pgxpool.Conn) error { return c.Ping(ctx) }); err != nil {
		return err
	}
	return s.doFor(ctx, timeout, fn)
}

// probe makes a change and takes it back.
func (s *Store) probe(ctx context.Context, c *pgxpool.Conn) error {
	if s.cfg.ReadOnly {
		return c.Ping(ctx)
	}
	b := &pgx.Batch{}
	b.Queue("begin isolation level read committed")
	b.Queue(lockRows, []string{"*" + s.feed.self}) // no counter has such a key
	b.Queue("rollback")
	return c.SendBatch(ctx, b).Close()
}

// doFor is do with another timeout.
func (s *Store) doFor(ctx context.Context, timeout time.Duration, fn func(context.Context, *pgxpool.Conn) error) error {
	away := func(err error) error { return fmt.Errorf("%w: %w", ErrAway, err) }
	if s.closed.Load() {
		return away(errClosed)
	}
	if !s.ready.Load() {
		return away(s.breaker.LastFailure())
	}
	done, err := s.breaker.Allow()
	if err != nil {
		return away(errSilent)
	}
	start := time.Now()
	call, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	c, err := s.pool.Acquire(call)
	connected := err == nil
	if connected {
		err = fn(call, c)
		if c.Conn().PgConn().TxStatus() != 'I' && !c.Conn().IsClosed() {
			if _, fault := c.Exec(call, "rollback"); fault != nil { // Release gives up what is not idle
				s.cfg.Log.Debug().Err(fault).Msg("counters: rolling back")
			}
		}
		c.Release()
	}
	switch {
	case err == nil || connected && answered(err):
		done(nil)
	case errors.As(err, new(callers)):
		done(outage.ErrNotItsFault)
	case ctx.Err() != nil && time.Since(start) < dialTimeout:
		done(outage.ErrNotItsFault)
	default:
		done(err)
		s.failed(err)
		if connected && refuses(err) {
			s.breaker.Refused()
		}
		if moved(err) || code(err) == "" && call.Err() == nil {
			s.pool.Reset() // the other connections have the same end
		}
		return away(err)
	}
	if err != nil {
		return fmt.Errorf("%w: %w", counter.ErrUnavailable, err)
	}
	return nil
}

// exec carries out one statement.
func (s *Store) exec(ctx context.Context, sql string, args ...any) error {
	return s.do(ctx, func(ctx context.Context, c *pgxpool.Conn) error {
		_, err := c.Exec(ctx, sql, args...)
		return err
	})
}

// query carries out one statement, and calls each for each row, when its columns are in to.
func (s *Store) query(ctx context.Context, to []any, each func() error, sql string, args ...any) error {
	return s.do(ctx, func(ctx context.Context, c *pgxpool.Conn) error {
		rows, _ := c.Query(ctx, sql, args...) // ForEachRow returns the error
		_, err := pgx.ForEachRow(rows, to, each)
		return err
	})
}

// retry makes a transaction, and makes it anew when it was surely rolled back.
func retry(transaction func() error) (err error) {
	for range tries {
		if err = transaction(); err == nil || !again(err) {
			break
		}
	}
	return err
}

// during is err, or nil, with what was done.
func during(what string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("counterpg: %s: %w", what, err)
}

// code is the SQLSTATE of err, or nothing.
func code(err error) string {
	var e *pgconn.PgError
	if errors.As(err, &e) {
		return e.Code
	}
	return ""
}

// answered reports whether err is the word of a server that is able to serve.
func answered(err error) bool {
	// Connections, an operator's or a timeout's hand, the server itself.
	return code(err) != "" && !ofClass(err, "08", "57", "XX") && !refuses(err)
}

// refuses reports whether err is that of a server that may carry out reads and refuses changes: it is read-only, a right or
// a table is missing, its disk or memory is full, or its system fails.
func refuses(err error) bool { return ofClass(err, "25006", "42", "53", "58") }

// ofClass reports whether the SQLSTATE of err begins with one of classes.
func ofClass(err error, classes ...string) bool {
	c := code(err)
	return slices.ContainsFunc(classes, func(class string) bool { return strings.HasPrefix(c, class) })
}

// moved reports whether err says that the server is not, or no more, the one to
// write to.
func moved(err error) bool {
	switch code(err) {
	case "25006", "57P01", "57P02", "57P03":
		return true
	}
	return false
}

// again reports whether err says that a transaction was surely rolled back and
// may succeed when it is made anew.
func again(err error) bool {
	switch code(err) {
	case "40001", "40P01":
		return true
	}
	return errors.Is(err, errDead)
}

// errDead marks the failure of a connection before anything was written.
var errDead = errors.New("the connection was dead")

// dead is the error of a first round trip, marked when the connection is to blame.
func dead(ctx context.Context, err error) error {
	if err != nil && (code(err) == "" || moved(err)) && ctx.Err() == nil {
		return fmt.Errorf("%w: %w", errDead, err)
	}
	return err
}
