package e2e

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"

	"headcount/internal/pgtest"
	"headcount/internal/redistest"
	"headcount/internal/servertest"
	"headcount/internal/testkit"
)

// TestServerPgBouncer: a pooler that gives each client its own connection of PostgreSQL is as good as PostgreSQL. The
// server and the check refuse any other pooler, in the same words.
func TestServerPgBouncer(t *testing.T) {
	t.Parallel()
	p := pgtest.Single(t)

	// run runs a command that must end by itself.
	run := func(t *testing.T, command string, flags ...string) (status int, out string) {
		ctx, cancel := context.WithTimeout(t.Context(), testkit.Timeout/3)
		defer cancel()
		for _, flag := range []string{"--listen=", "--admin-listen="} {
			flags = append(flags, flag+servertest.FreeAddr())
		}

		cmd := exec.CommandContext(ctx, program, append([]string{command}, flags...)...)
		cmd.Env = testkit.Environ()
		text, err := cmd.CombinedOutput()
		exit := (*exec.ExitError)(nil)
		if err != nil && !errors.As(err, &exit) {
			t.Fatal(err)
		}
		if exit != nil {
			status = exit.ExitCode()
		}

		return status, string(text)
	}

	for _, mode := range []string{"session", "transaction", "statement"} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			database := p.Database(t)
			flag := "--postgres=" + p.Bouncer(t, database, mode)
			status, checked := run(t, "check", flag)
			if mode == "session" {
				if status != 0 {
					t.Errorf("the check ends with %d:\n%s", status, checked)
				}

				s := startWithKey(t, flag)
				look := s.ws(t)
				for _, key := range []string{"views:1", "stock:1"} { // together their values may come in any order
					look.send(`{"type":"subscribe","counters":[` + quoted(key) + `]}`)
					look.awaitCounter(key, 0, false)
				}

				for i := range int64(3) {
					if is := s.call(t, "POST", "views:1/increment", "").lasting(t).Value; is != i+1 {
						t.Errorf("the value is %d after %d increments", is, i+1)
					}
				}
				look.awaitCounter("views:1", 3, false)

				// A change that does not use the pooler is received through it.
				testkit.Eventually(t, "the functions", func() bool {
					return pgtest.Query[bool](t, database,
						"select to_regproc('headcount.change') is not null and exists (select from headcount_rules)")
				})
				pgtest.Query[int64](t, database, "select headcount.change('stock:1', 3)")
				look.awaitCounter("stock:1", 3, false)
				return
			}

			// The other modes mix the sessions of several clients, but locks and notifications belong to a session.
			_, problem, _ := strings.Cut(checked, "wrong  --postgres: ")
			problem, _, _ = strings.Cut(problem, ".\n")
			if status != 1 || !strings.Contains(problem, "pool_mode") || strings.Count(checked, "wrong ") != 1 {
				t.Errorf("the check ends with %d:\n%s", status, checked)
			}

			status, text := run(t, "serve", "--log-format=json", flag)
			line := "headcount: --postgres: " + problem + "\n"
			if status != 2 || strings.Count(text, line) != 1 || strings.Contains(text, `"warn"`) {
				t.Errorf("the server ends with %d:\n%s\nwant 2 and %s", status, text, line)
			}

			// Nothing that the server tried stays set for other clients of the pooler.
			pooled := strings.TrimPrefix(flag, "--postgres=") + "&default_query_exec_mode=simple_protocol"
			for _, setting := range []string{"statement_timeout", "enable_seqscan"} {
				if is := pgtest.Query[string](t, pooled, "show "+setting); is == "10s" || is == "off" {
					t.Errorf("%s is %s for others from then on", setting, is)
				}
			}
		})
	}
}

// startBehindRedis starts two servers over one Redis.
func startBehindRedis(t testing.TB, flags ...string) []*server {
	t.Helper()
	redis := redistest.Start(t).URL()

	return []*server{
		startWithKey(t, overRedis(redis, flags...)...), startWithKey(t, overRedis(redis, flags...)...),
	}
}

// TestClockChangeInSQL: an application sells in a transaction of its own. Subscribers at every process receive the
// change within a second, a webhook receives it once, and SQL and HTTP share idempotency keys.
func TestClockChangeInSQL(t *testing.T) {
	t.Parallel()
	p := pgtest.Single(t)
	database := p.Database(t)
	hooks := newReceiver(t)
	all := startBehindRedis(t, "--postgres="+database, "--webhook=counter:stock:*>4="+hooks.URL,
		"--webhook-secret="+hookSecret)

	var clients []*client

	// Each process knows the key of a change in SQL, and SQL knows the key of a change by HTTP.
	for _, s := range all {
		c := s.ws(t)
		c.send(`{"type":"subscribe","counters":["stock:42"]}`)
		c.awaitCounter("stock:42", 0, false)
		clients = append(clients, c)
	}

	for _, is := range []string{
		"to_regclass('headcount_rules') is not null", "to_regproc('headcount.change') is not null",
		"exists (select from headcount_rules)",
	} {
		testkit.Eventually(t, is, func() bool { return pgtest.Query[bool](t, database, "select "+is) })
	}

	fastest := time.Hour                     // a busy machine may delay some
	for _, value := range []int64{9, 8, 7} { // the last two are still over the threshold
		delta := int64(-1)
		if value == 9 {
			delta = 9
		}

		is := pgtest.Query[int64](t, database, "select headcount.change('stock:42', $1, reason => 'order 7', "+
			"author => 'shop', idempotency_key => $2)", delta, fmt.Sprint("order ", value))
		if is != value {
			t.Errorf("it is %d, want %d", is, value)
		}

		watch := testkit.NewStopwatch(t)
		for _, c := range clients {
			c.awaitCounter("stock:42", value, false)
		}
		fastest = min(fastest, watch.Elapsed())
	}

	if fastest > time.Second {
		t.Errorf("clients receive a change after %s", fastest)
	}

	for _, s := range all {
		a := s.call(t, "POST", "stock:42/decrement", "", withKey, "Idempotency-Key: order 8")
		if is := a.lasting(t).Value; is != 7 || a.header.Get("Idempotent-Replay") != "true" {
			t.Errorf("order 8 by HTTP: %d and %v", is, a.header)
		}
	}

	all[0].call(t, "POST", "stock:42/decrement", "", withKey, "Idempotency-Key: order 10").lasting(t)
	if is := pgtest.Query[int64](t, database,
		"select headcount.change('stock:42', -1, idempotency_key => 'order 10')"); is != 6 {
		t.Errorf("order 10 by SQL: %d", is)
	}

	// A transaction that is rolled back leaves no entry.
	p.Exec(t, database, `do $$ begin perform headcount.change('stock:42', -7); raise 'it is sold'; `+
		`exception when check_violation then null; end $$`)
	ledger := all[0].ledger(t, "stock:42")
	if len(ledger) != 4 || ledger[1].Reason != "order 7" || ledger[1].By != "shop" {
		t.Errorf("the ledger is %+v", ledger)
	}

	testkit.Eventually(t, "the webhook", func() bool { return len(hooks.received("stock:42")) > 0 })

	// When a later event of the same webhook has arrived, nothing else is under way.
	pgtest.Query[int64](t, database, "select headcount.change('stock:43', 5)")
	hooks.await("stock:43", "counter.over")
	hooks.await("stock:42", "counter.over")
}

// TestClockPostgresIsAway: a process waits for a PostgreSQL that does not answer. For every cause, /readyz names it,
// and the log has one warning with it and one line for the end of the outage. One with newer tables is refused.
func TestClockPostgresIsAway(t *testing.T) {
	t.Parallel()
	p := pgtest.Start(t)
	database, another := p.Database(t), p.Database(t)
	admin := p.URL("postgres")

	p.Exec(t, admin, "create role visitor login password 'right'; create role headcount_app")
	p.Exec(t, admin, "create database theirs owner visitor")
	p.Exec(t, admin, "copy (select unnest(array['host all visitor all scram-sha-256', 'host all all all trust'])) to '"+
		pgtest.Query[string](t, admin, "select current_setting('hba_file')")+"'; select pg_reload_conf()")

	all := map[string]*server{}
	begin := func(name, postgres string, flags ...string) *server {
		t.Helper()
		s, err := spawn(append(flags, "--postgres="+postgres, "--api-key="+apiKey)...)
		if err != nil {
			t.Fatal(err)
		}
		all[name] = s

		t.Cleanup(func() {
			if problem := s.end(); problem != "" {
				t.Error(problem)
			}
		})

		return s
	}

	// away waits until s is not ready for a reason that contains cause. Its calls make the server notice that
	// PostgreSQL is away.
	away := func(s *server, cause string) {
		t.Helper()
		says := ""
		t.Cleanup(func() {
			if t.Failed() {
				t.Logf("/readyz: %s", says)
			}
		})

		testkit.Eventually(t, "/readyz says "+cause, func() bool {
			var calls sync.WaitGroup
			for range 3 {
				calls.Go(func() { _, _ = try("POST", s.url+root+"views:1/increment", "", withKey) })
			}
			calls.Wait()

			a, err := try("GET", s.admin+"/readyz", "")
			says = a.body
			return err == nil && a.status == http.StatusServiceUnavailable && strings.Contains(says, cause) &&
				strings.Count(strings.TrimSpace(says), "\n") == 0
		})
	}
	back := func() {
		t.Helper()
		for name, s := range all {
			testkit.Eventually(t, name+" is ready", s.ready)
		}
	}

	// It hangs, refuses connections, and starts up.
	p.Pause()
	hung := begin("a server that hangs", database)
	away(hung, "timeout")

	behind := begin("behind Redis", another, overRedis(redistest.Start(t).URL())...)
	away(behind, "timeout")
	p.Resume()
	back()
	behind.call(t, "POST", "views:1/increment", "").lasting(t) // so that Redis has the counter
	// It refuses the user or the database.

	away(begin("a wrong password", strings.Replace(p.URL("theirs"), "headcount@", "visitor:wrong@", 1)),
		"password authentication failed")
	away(begin("no such database", p.URL("missing")), `database "missing" does not exist`)

	p.Exec(t, admin, "create database missing")
	p.Exec(t, admin, "alter role visitor password 'wrong'")
	back()

	p.Pause()
	away(hung, "deadline exceeded")
	p.Resume()
	back()

	p.Kill()
	away(hung, "connection refused")

	started := p.StartUp(t)
	early := begin("a server that starts up", database)
	for _, s := range all {
		if s != behind {
			away(s, "SQLSTATE 57P03")
		}
	}

	// A server with Redis goes on without PostgreSQL, and notices the outage when it persists.
	testkit.Eventually(t, "a server with Redis logs each outage", func() bool {
		behind.call(t, "POST", "views:1/increment", "").lasting(t)
		return strings.Contains(behind.log.String(), "SQLSTATE 57P03")
	})
	started()
	back()

	for name, s := range all {
		testkit.Eventually(t, name+": the end of each outage is logged", func() bool {
			log := s.log.String()
			return strings.Count(log, "PostgreSQL works again") == strings.Count(log, "PostgreSQL cannot be used")
		})

		warnings, timeouts := 0, 0
		for line := range strings.Lines(s.log.String()) {
			about := func(other string) bool { return strings.Contains(line, other) }
			if !about(`"level":"warn"`) {
				continue
			}
			// A slow machine causes these warnings, too.
			if about("PostgreSQL still cannot be used") || about("Redis has no memory") || about("was suspended") {
				continue
			}
			if about("timeout") || about("deadline exceeded") { // of Redis, too
				timeouts++
				continue
			}

			if !about("PostgreSQL cannot be used") || !about(`"error":`) {
				t.Errorf("%s logs something else than the outage: %s", name, line)
				continue
			}
			warnings++
		}

		most := 3 // the server that hung has seen three outages
		if s == early {
			most = 1
		}
		if warnings+timeouts == 0 || warnings > most {
			t.Errorf("%s: %d warnings and %d of timeouts, want one or more, at most %d of the first:\n%s",
				name, warnings, timeouts, most, s.log)
		}
	}

	// A newer version has changed the tables.
	p.Exec(t, database, `insert into headcount_rows_migrations (version_id, is_applied) values (999, true)`)
	refused(t, "newer", "--postgres="+database)
}
