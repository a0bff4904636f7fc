package routed

import (
	"bytes"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/rs/zerolog"

	"headcount/counter"
	"headcount/internal/pgtest"
	"headcount/internal/postgres"
	"headcount/internal/testkit"
)

// log is a log that several goroutines write.
type log struct {
	mu   sync.Mutex // guards text
	text bytes.Buffer
}

func (l *log) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()

	return l.text.Write(p)
}

func (l *log) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()

	return l.text.String()
}

// states is the last state that OnState reported.
type states struct {
	mu      sync.Mutex // guards the fields below
	up, any bool
}

func (s *states) StoreState(up bool) {
	s.mu.Lock()
	defer s.mu.Unlock()

	s.up = up
	s.any = true
}

// await waits until the newest state is up.
func (s *states) await(t testing.TB, up bool) {
	t.Helper()
	testkit.Eventually(t, fmt.Sprintf("the store is up: %t", up), func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		return s.any && s.up == up
	})
}

// TestServerSecondProcess: a second process takes everything over. The first one logs that once, and makes no further
// change of any kind.
func TestServerSecondProcess(t *testing.T) {
	server := pgtest.Single(t)
	url := server.Database(t)
	var said log
	var state states
	first := openAlone(t, url, func(c *AloneConfig) {
		c.Log = zerolog.New(&said).Level(zerolog.WarnLevel)
		c.OnState = &state
		c.TendEvery = 10 * time.Millisecond
	})

	state.await(t, true)
	must(t, first, op("", add("s:1", 1)))
	must(t, first, op("", add("e:1", 1)))

	second := openAlone(t, url)
	if c := must(t, second, op("", add("s:1", 1))); c.Value != 2 {
		t.Errorf("the second process makes the counter %+v, want 2", c)
	}

	// The first process finds out by a refused write. Until then it must not acknowledge anything.
	state.await(t, false)
	for _, key := range []string{"s:1", "s:2", "e:1"} {
		if r := change(t, first, op("", add(key, 1))); !errors.Is(r.Err, counter.ErrUnavailable) {
			t.Errorf("the first process changes %q: %+v, want ErrUnavailable", key, r)
		}
	}

	if !errors.Is(first.Ready(), errTaken) || !errors.Is(first.Cause(), errTaken) {
		t.Errorf("Ready and Cause of the first process are %v and %v, want errTaken", first.Ready(), first.Cause())
	}
	if text := said.String(); strings.Count(text, "\n") != 1 ||
		!strings.Contains(text, "another process has taken over") {
		t.Errorf("the log of the first process is %q, want one line about the takeover", text)
	}

	// The first process can still read, and does not disturb the second one.
	becomes(t, first, "s:1", 2)
	if err := first.Close(); err != nil {
		t.Error(err)
	}
	if c := must(t, second, op("", add("s:1", 1))); c.Value != 3 {
		t.Errorf("the second process makes the counter %+v, want 3", c)
	}

	must(t, second, op("", add("e:1", 1)))
}

// TestServerStartsWithoutPostgres: a process waits for a PostgreSQL that it cannot reach, which counts as down until
// then.
func TestServerStartsWithoutPostgres(t *testing.T) {
	server := pgtest.Start(t)
	url := server.Database(t)
	server.Kill()
	var state states
	s := openAlone(t, url, func(c *AloneConfig) { c.OnState = &state })
	state.await(t, false)
	for _, key := range []string{"s:1", "e:1"} {
		if r := change(t, s, op("", add(key, 1))); !errors.Is(r.Err, counter.ErrUnavailable) {
			t.Errorf("without PostgreSQL a change of %q returns %+v, want ErrUnavailable", key, r)
		}
	}
	if s.Cause() == nil {
		t.Error("PostgreSQL is away, and Cause returns nil")
	}

	server.Restart(t)
	state.await(t, true)
	must(t, s, op("", add("s:1", 1)))
	must(t, s, op("", add("e:1", 1)))

	if s.Cause() != nil || s.Ready() != nil {
		t.Errorf("PostgreSQL is up, and Cause and Ready return %v and %v", s.Cause(), s.Ready())
	}

	server.Kill()
	state.await(t, false)
	server.Restart(t)
	state.await(t, true)
	must(t, s, op("", add("s:1", 1)))
}

// TestServerDataOfAnEarlierRelease: data of an earlier release is refused in one sentence, and is not changed.
func TestServerDataOfAnEarlierRelease(t *testing.T) {
	server := pgtest.Single(t)
	url := server.Database(t)
	server.Exec(t, url, "create table headcount_migrations (version_id bigint, is_applied boolean)")
	server.Exec(t, url, "create table headcount_counters (key text)")

	_, err := OpenAlone(t.Context(), AloneConfig{URL: url, Log: zerolog.Nop()})
	text := fmt.Sprint(err)
	isOneSentence := strings.Contains(text, "headcount export --postgres URL") && !strings.Contains(text, "\n")
	if !errors.Is(err, postgres.ErrConfig) || !isOneSentence {
		t.Errorf("got %v, want ErrConfig in one sentence", err)
	}

	const tables = `select string_agg(relname, ' ' order by relname) from pg_class
		where relname like 'headcount%' and relkind = 'r'`
	if is := pgtest.Query[string](t, url, tables); is != "headcount_counters headcount_migrations" {
		t.Errorf("the tables are now %s, want those of the earlier release", is)
	}
}

// TestServerPeopleCanRead: all counters and all ledgers can be read in one place each.
func TestServerPeopleCanRead(t *testing.T) {
	url := pgtest.Single(t).Database(t)
	s := openAlone(t, url)
	must(t, s, op("", add("s:1", 3)))
	must(t, s, op("", add("e:1", 4)))
	bots := counter.Change{Key: "s:1", Rule: sum, Verb: counter.Adjust, Delta: -1, Reason: "bots", By: "ops"}
	c := must(t, s, op("", bots))
	must(t, s, op("", counter.Change{Key: "s:1", Rule: sum, Verb: counter.Reset, Reason: "a new year", By: "me"}))
	must(t, s, op("", add("s:gone", 3)))
	must(t, s, op("", counter.Change{Key: "s:gone", Rule: sum, Verb: counter.Delete}))

	const counters = `select string_agg(concat_ws(' ', key, kind, value, split_part(version, '-', 2)), ', ' order by key)
		from headcount_counters where updated_at > now() - interval '1 hour'`
	if got := pgtest.Query[string](t, url, counters); got != "e:1 exact 4 1, s:1 sum 0 3" {
		t.Errorf("the counters are %s", got)
	}

	const ledger = `select string_agg(concat_ws(' ', key, seq, op, before, delta, after, reason, author), ', '
		order by key, seq) from headcount_ledger`
	want := "e:1 1 increment 0 4 4  , s:1 1 adjust 3 -1 2 bots ops, s:1 2 reset 2 -2 0 a new year me"
	if got := pgtest.Query[string](t, url, ledger); got != want {
		t.Errorf("the ledgers are %s\nwant %s, of %+v", got, want, c)
	}
}
