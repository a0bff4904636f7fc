package redisconn_test

import (
	"context"
	"errors"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/rs/zerolog"

	"headcount/internal/outage"
	"headcount/internal/redisconn"
	"headcount/internal/redistest"
	"headcount/internal/servertest"
	"headcount/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m, redistest.Stop) }

var errUnavailable = errors.New("unavailable")

// state is the last state that the Runner reported.
type state struct {
	mu sync.Mutex
	up bool
}

func (s *state) StoreState(up bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.up = up
}

func (s *state) is() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.up
}

// stateChan receives the reported states.
type stateChan chan bool

func (s stateChan) StoreState(up bool) { s <- up }

func open(t *testing.T, url string) (*redisconn.Conn, *servertest.Log) {
	t.Helper()
	log := &servertest.Log{}
	conn, err := redisconn.Open(redisconn.Config{URL: url, Log: zerolog.New(log)})
	if err != nil {
		t.Fatal(err)
	}

	t.Cleanup(func() {
		if err := conn.Close(); err != nil {
			t.Error(err)
		}
	})

	return conn, log
}

func TestOpen(t *testing.T) {
	for url, good := range map[string]bool{
		"redis://127.0.0.1:1/0":                  true,
		"redis://127.0.0.1:1/?addr=127.0.0.1:2":  true,
		"redis://127.0.0.1:1/0?master_name=m":    true,
		"":                                       false,
		"http://127.0.0.1:1":                     false,
		"redis://127.0.0.1:1/?nonsense=1":        false,
		"redis://127.0.0.1:1/x":                  false,
		"redis://127.0.0.1:1/?addr=a&nonsense=1": false,
	} {
		conn, err := redisconn.Open(redisconn.Config{URL: url})
		if good != (err == nil) || !good && !errors.Is(err, redisconn.ErrConfig) {
			t.Errorf("Open(%q): %v", url, err)
		}

		if conn != nil {
			if err := conn.Close(); err != nil {
				t.Errorf("Close of %q: %v", url, err)
			}
		}
	}
}

// TestClockOneOutageIsReportedOnce: an outage causes one line of the log, and every store is notified.
func TestClockOneOutageIsReportedOnce(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	conn, log := open(t, server.URL())

	states := []*state{{}, {}}
	callers := make([]*redisconn.Runner, len(states))
	for i, s := range states {
		callers[i] = conn.Runner(redisconn.RunnerConfig{Unavailable: errUnavailable, OnState: s})
	}
	all := func(up bool) func() bool {
		return func() bool { return states[0].is() == up && states[1].is() == up }
	}
	testkit.Eventually(t, "both learn that Redis is there", all(true))

	server.Kill()

	// A call of one store meets the outage, and the other store is notified as well.
	testkit.Eventually(t, "both stores are notified of the outage", func() bool {
		err := callers[0].Do(t.Context(), ping)
		if err != nil && !errors.Is(err, errUnavailable) {
			t.Fatalf("the call returns %v", err)
		}
		return all(false)()
	})

	testkit.Eventually(t, "the log says so", func() bool { return log.Count("cannot be used") > 0 })
	server.Restart(t)
	testkit.Eventually(t, "both learn that it is back", all(true))

	if away, back := log.Count("cannot be used"), log.Count("works again"); away != 1 || back != 1 {
		t.Errorf("the log has %d lines about the outage and %d about its end, want 1 and 1: %s",
			away, back, log.String())
	}
}

func ping(ctx context.Context, c *redisconn.Client) error { return c.Ping(ctx).Err() }

// TestServerWhatOneStoreRefusesIsServedToOthers: neither a refusal by Accept nor an unreadable reply of one store is an
// outage for the others. A closed store makes no more calls.
func TestServerWhatOneStoreRefusesIsServedToOthers(t *testing.T) {
	t.Parallel()
	conn, log := open(t, redistest.Single(t).URL())
	refuses, serves := &state{}, &state{}

	errForeign := errors.New("a foreign format")
	var mu sync.Mutex
	foreign := true

	refusing := conn.Runner(redisconn.RunnerConfig{
		Unavailable: errUnavailable, OnState: refuses,
		Accept: func(context.Context, *redisconn.Client) error {
			mu.Lock()
			defer mu.Unlock()
			if foreign {
				return redisconn.Answered(errForeign)
			}
			return nil
		},
	})
	serving := conn.Runner(redisconn.RunnerConfig{Unavailable: errUnavailable, OnState: serves})

	// More refusals than the number of failures that opens the breaker.
	for range 10 {
		if err := refusing.Do(t.Context(), ping); !errors.Is(err, errForeign) || !errors.Is(err, errUnavailable) {
			t.Fatalf("before Accept has accepted: %v", err)
		}

		if _, err := refusing.Known(t.Context()); !errors.Is(err, errForeign) {
			t.Fatalf("before Accept has accepted: %v", err)
		}

		if err := serving.Do(t.Context(), func(context.Context, *redisconn.Client) error {
			return redisconn.Answered(errForeign)
		}); !errors.Is(err, errForeign) {
			t.Fatal(err)
		}
	}

	closed := conn.Runner(redisconn.RunnerConfig{Unavailable: errUnavailable})
	closed.Close()
	closed.Close() // a second Close does nothing
	if err := closed.Do(t.Context(), ping); !errors.Is(err, errUnavailable) {
		t.Error(err)
	}
	if _, err := closed.Known(t.Context()); !errors.Is(err, errUnavailable) {
		t.Error(err)
	}

	if err := serving.Do(t.Context(), ping); err != nil {
		t.Errorf("a call of the other store returns %v", err)
	}
	testkit.Eventually(t, "the reason in the log", func() bool {
		return serves.is() && log.Count(errForeign.Error()) == 1
	})

	if refuses.is() || conn.Cause() != nil {
		t.Errorf("up=%t was reported, with the cause %v", refuses.is(), conn.Cause())
	}

	mu.Lock()
	foreign = false
	mu.Unlock()
	testkit.Eventually(t, "Accept is asked again though nobody calls", refuses.is)
	if err := refusing.Do(t.Context(), ping); err != nil {
		t.Error(err)
	}
}

// TestServerADenialIsOfOneStore: if the Redis user lacks the right to the keys of one store, the other stores can still
// be used.
func TestServerADenialIsOfOneStore(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	err := server.Client().Do(t.Context(),
		"ACL", "SETUSER", "some", "on", ">secret", "+@all", "&*", "~hc:{b*", "~hc:{n*").Err()
	if err != nil {
		t.Fatal(err)
	}

	conn, log := open(t, "redis://some:secret@"+server.Addr+"/0")
	states := make(chan bool, 64)
	serving := conn.Runner(redisconn.RunnerConfig{Unavailable: errUnavailable, OnState: stateChan(states)})
	denied := conn.Runner(redisconn.RunnerConfig{Unavailable: errUnavailable})

	testkit.Eventually(t, "Redis is there", func() bool { return serving.Do(t.Context(), ping) == nil && <-states })

	for range 20 {
		if err := denied.Do(t.Context(), func(ctx context.Context, c *redisconn.Client) error {
			return c.Set(ctx, "hc:{w:hook}:t", "", 0).Err()
		}); err == nil {
			t.Fatal("the user has the right to the key, so the test proves nothing")
		}

		if err := serving.Do(t.Context(), func(ctx context.Context, c *redisconn.Client) error {
			return c.Set(ctx, "hc:{b1}:x", "", 0).Err()
		}); err != nil {
			t.Fatalf("a call of the other store returns %v", err)
		}
		time.Sleep(outage.ProbeEvery / 5) // the probe runs meanwhile
	}

	if conn.Cause() != nil || len(states) > 0 || log.Count("cannot be used") > 0 {
		t.Errorf("the cause is %v, there were %d changes of state, and the log is %s",
			conn.Cause(), len(states), log.String())
	}
}

// TestServerWordsOfRefusals: every way in which Redis refuses a write or a connection is recognized.
func TestServerWordsOfRefusals(t *testing.T) {
	t.Parallel()
	type command []any
	server := redistest.Start(t)
	admin := server.Client().Conn() // stays open while the server accepts no other connections
	defer admin.Close()
	do := func(cmd ...any) {
		t.Helper()
		if err := admin.Do(t.Context(), cmd...).Err(); err != nil {
			t.Fatalf("%v: %v", cmd, err)
		}
	}

	// write returns the error of a new connection, on which a key is written by a command and by a script.
	write := func() error {
		conn, err := redisconn.Open(redisconn.Config{URL: "redis://headcount:secret@" + server.Addr + "/0"})
		if err != nil {
			t.Fatal(err)
		}

		defer conn.Close()

		caller := conn.Runner(redisconn.RunnerConfig{Unavailable: errUnavailable})
		return caller.Do(t.Context(), func(ctx context.Context, c *redisconn.Client) error {
			const missing = "0000000000000000000000000000000000000000"
			err := c.Set(ctx, "x", "y", 0).Err()
			if err == nil {
				err = c.EvalSha(ctx, missing, []string{"x"}).Err()
			}
			if redis.HasErrorPrefix(err, "NOSCRIPT") {
				return nil
			}

			return err
		})
	}

	// A BGSAVE without a directory fails, and from then on Redis refuses writes.
	dir, err := admin.ConfigGet(t.Context(), "dir").Result()
	if err != nil {
		t.Fatal(err)
	}
	if err := os.RemoveAll(dir["dir"]); err != nil {
		t.Fatal(err)
	}

	do("ACL", "SETUSER", "headcount", "on", ">secret", "~*", "&*", "+@all")
	const tooMany = "ERR max number of clients"
	for _, tc := range []struct {
		begins        string
		denial        bool
		refuse, serve []command
	}{
		{"OOM", false, []command{{"CONFIG", "SET", "maxmemory", "1"}}, []command{{"CONFIG", "SET", "maxmemory", "0"}}},
		{
			"NOREPLICAS", false, []command{{"CONFIG", "SET", "min-replicas-to-write", "1"}},
			[]command{{"CONFIG", "SET", "min-replicas-to-write", "0"}},
		},
		{
			"READONLY", false,
			[]command{{"CONFIG", "SET", "replica-serve-stale-data", "yes"}, {"REPLICAOF", "127.0.0.1", "1"}},
			[]command{{"REPLICAOF", "NO", "ONE"}},
		},
		{
			"MISCONF", false,
			[]command{
				{"CONFIG", "SET", "stop-writes-on-bgsave-error", "yes"}, {"CONFIG", "SET", "save", "3600 1"},
				{"SET", "x", "y"}, {"BGSAVE"},
			},
			[]command{{"CONFIG", "SET", "save", ""}, {"CONFIG", "SET", "stop-writes-on-bgsave-error", "no"}},
		},
		{
			"WRONGPASS", false, []command{{"ACL", "SETUSER", "headcount", "resetpass", ">other"}},
			[]command{{"ACL", "SETUSER", "headcount", "resetpass", ">secret"}},
		},
		{
			"NOPERM", true, []command{{"ACL", "SETUSER", "headcount", "-@write"}},
			[]command{{"ACL", "SETUSER", "headcount", "+@all"}},
		},
		{
			"NOPERM", true, []command{{"ACL", "SETUSER", "headcount", "-evalsha"}},
			[]command{{"ACL", "SETUSER", "headcount", "+@all"}},
		},
		{
			tooMany, false, []command{{"CONFIG", "SET", "maxclients", "1"}},
			[]command{{"CONFIG", "SET", "maxclients", "1000"}},
		},
	} {
		for _, cmd := range tc.refuse {
			do(cmd...)
		}

		var err error
		testkit.Eventually(t, tc.begins, func() bool { // a BGSAVE fails only after its answer
			err = write()
			return err != nil
		})

		reason := redisconn.RefusedBy(err)
		var reply redis.Error
		// Redis closes the connection directly after its answer.
		isLost := tc.begins == tooMany && !errors.As(err, &reply)
		if !isLost && (!strings.HasPrefix(reason, tc.begins) || redisconn.IsDenial(reason) != tc.denial) {
			t.Errorf("%q was recognized as %q, want %q; a denial: %t", err, reason, tc.begins, tc.denial)
		}

		for _, cmd := range tc.serve {
			do(cmd...)
		}

		if err := write(); err != nil {
			t.Errorf("after the end of %s a write returns %v", tc.begins, err)
		}
	}
}

// TestServerBounded: however many calls one store makes, connections are left for the others.
func TestServerBounded(t *testing.T) {
	t.Parallel()
	conn, _ := open(t, redistest.Single(t).URL()+"?pool_size=4")
	many := conn.Runner(redisconn.RunnerConfig{Unavailable: errUnavailable, Bounded: true})
	other := conn.Runner(redisconn.RunnerConfig{Unavailable: errUnavailable})

	began, end := make(chan struct{}), make(chan struct{})
	var wg sync.WaitGroup
	defer wg.Wait()

	for range 10 {
		wg.Go(func() {
			if err := many.Do(context.Background(), func(context.Context, *redisconn.Client) error {
				began <- struct{}{}
				<-end
				return nil
			}); err != nil {
				t.Error(err)
			}
		})
	}

	<-began
	<-began

	select {
	case <-began:
		t.Error("one store used more than three of four connections at the same time")
	case <-time.After(50 * time.Millisecond):
	}

	if err := other.Do(t.Context(), ping); err != nil {
		t.Error(err)
	}

	// A caller may stop waiting for a connection.
	late, cancel := context.WithCancel(t.Context())
	cancel()
	if err := many.Do(late, ping); !errors.Is(err, errUnavailable) || !errors.Is(err, context.Canceled) {
		t.Errorf("a caller that gave up its wait got %v", err)
	}

	close(end)
	for range 8 { // the other calls were only waiting
		<-began
	}
}

// TestClockCloseWaitsForNoSilentServer: Close returns soon even if Redis does not answer, because a process that ends
// has only a few seconds.
func TestClockCloseWaitsForNoSilentServer(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	conn, err := redisconn.Open(redisconn.Config{URL: server.URL(), Log: zerolog.Nop()})
	if err != nil {
		t.Fatal(err)
	}
	up := &state{}
	caller := conn.Runner(redisconn.RunnerConfig{Unavailable: errUnavailable, OnState: up})
	testkit.Eventually(t, "Redis is reached", up.is)

	server.Pause()
	defer server.Resume()

	// As many hanging calls as it takes to open the breaker.
	var calls sync.WaitGroup
	for range outage.TripAfter {
		calls.Go(func() { _ = caller.Do(t.Context(), ping) })
	}
	calls.Wait()
	testkit.Eventually(t, "it is away", func() bool { return !up.is() })
	time.Sleep(outage.ProbeEvery + 200*time.Millisecond) // until the next probe is under way

	watch := testkit.NewStopwatch(t)
	if err := conn.Close(); err != nil || watch.Elapsed() > 2*time.Second {
		t.Errorf("Close took %s, %v", watch.Elapsed(), err)
	}
}

// TestClockAServerOfAClusterHangs: the masters are found without the server that hangs.
func TestClockAServerOfAClusterHangs(t *testing.T) {
	t.Parallel()
	cluster := redistest.StartCluster(t, 3, 1)
	conn, _ := open(t, cluster.URL()+"&addr="+cluster.Replicas[0].Addr)
	caller := conn.Runner(redisconn.RunnerConfig{Unavailable: errUnavailable})

	masters := func() error {
		return caller.Do(t.Context(), func(ctx context.Context, c *redisconn.Client) error {
			return c.Masters(ctx, func(ctx context.Context, m redis.Cmdable) error { return m.Ping(ctx).Err() })
		})
	}

	testkit.Eventually(t, "the masters answer", func() bool { return masters() == nil })
	cluster.Replicas[0].Pause()
	defer cluster.Replicas[0].Resume()

	for range 30 { // the client asks one of the four servers, at random, for the slots
		watch := testkit.NewStopwatch(t)
		if err := masters(); err != nil || watch.Elapsed() > 2*time.Second {
			t.Fatalf("a call to the masters took %s, %v", watch.Elapsed(), err)
		}
	}
}
