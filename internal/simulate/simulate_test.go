package simulate

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"os"
	osexec "os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"headcount/client"
	"headcount/cmd/headcount/flags"
	"headcount/internal/servertest"
	"headcount/internal/testkit"
)

var program string

func TestMain(m *testing.M) { testkit.Main(withProgram{m}) }

type withProgram struct{ m *testing.M }

func (w withProgram) Run() int { return testkit.RunWithProgram(w.m, "4", &program) }

func exec(args ...string) *osexec.Cmd { return osexec.Command(program, args...) }

// command returns a short simulation against servers of serve. What the contract promises within 10 s may take minutes
// here, because the machine may be busy.
func command(urls ...string) *Command {
	return &Command{
		URL: urls, Users: 12, Pages: 3, Tabs: 3, Duration: 2 * time.Second, Churn: 1, KillFraction: 0.4, Seed: 7,
		Dwell: time.Minute, Speed: 600,
		LeaveGrace: 200 * time.Millisecond, PongTimeout: 2 * time.Second, PresenceTimeout: time.Second,
		settle: testkit.Timeout,
	}
}

// lastingCommand returns a short simulation of durable counters.
func lastingCommand(urls ...string) *Command {
	c := command(urls...)
	c.Users = 8
	c.Pages = 2
	c.Duration = 400 * time.Millisecond
	c.KillFraction = 0.2
	c.Scenario = "counters"
	c.APIKeys = []string{apiKey}

	return c
}

func run(t *testing.T, c *Command) (Report, error) {
	t.Helper()
	c.JSON = true

	var out bytes.Buffer
	err := c.Run(t.Context(), &out, io.Discard)
	var r Report

	if jerr := json.Unmarshal(out.Bytes(), &r); jerr != nil {
		t.Fatalf("report: %v: %q after %v", jerr, out.String(), err)
	}

	return r, err
}

func TestServerAnHonestServerPasses(t *testing.T) {
	t.Parallel()

	c := command((&proxy{}).start(t, serve(t)).URL)
	c.Duration = 20 * time.Second // long enough for some users to vanish

	r, err := run(t, c)

	if err != nil || !r.OK || r.WrongCounts != 0 {
		t.Fatalf("Run = %v, report %+v", err, r)
	}

	if len(r.Checkpoints) < 3 || !r.SiteChecked || r.Counts == 0 || r.BytesReceived == 0 || r.Connects < 12 {
		t.Errorf("report %+v", r)
	}

	if r.Churn == nil || r.Churn.Left == 0 || r.Churn.Came <= 12 || r.Churn.Moved == 0 || r.Churn.Vanished == 0 {
		t.Errorf("churn %+v", r.Churn)
	}

	if r.JoinToSeen.Samples == 0 || r.JoinToSeen.P50 <= 0 || r.JoinToSeen.Max < r.JoinToSeen.P50 {
		t.Errorf("latency %+v", r.JoinToSeen)
	}
}

func TestServerAnHonestServerOfCountersPasses(t *testing.T) {
	t.Parallel()

	c := lastingCommand(serve(t))
	c.Duration = roundTime + 2*time.Second

	r, err := run(t, c)
	if err != nil || !r.OK || r.WrongCounts != 0 {
		t.Fatalf("Run = %v, report %+v", err, r)
	}

	if n := len(r.Checkpoints); n != 2 || r.Checkpoints[1].Name != "final" || r.Checkpoints[0].Counters != 10 ||
		r.Counters != 10 {
		t.Errorf("report %+v", r)
	}

	for _, name := range []string{"calls", "calls_per_s", "p50_ms", "p99_ms", "retries", "refused", "cut_connections"} {
		if r.Figures[name] <= 0 {
			t.Errorf("%s is %v", name, r.Figures[name])
		}
	}
}

// Reconnects and repeated calls do not cause wrong counts.
func TestServerTroubleIsNoWrongCount(t *testing.T) {
	t.Parallel()

	every10th := func(status int) func(*proxy) {
		return func(p *proxy) { p.refuses = status }
	}

	for name, tc := range map[string]struct {
		lasting bool
		trouble func(p *proxy)
		felt    func(r Report) float64
	}{
		"connections are lost":    {false, nil, func(r Report) float64 { return float64(r.Drops) }},
		"subscribers are cut off": {true, nil, func(r Report) float64 { return float64(r.Drops) }},
		"clients are sent away": {false, inFrames("unread", func(p *proxy, _ bool, m message) {
			p.lie(m, "type", "reconnect")
			m["after_ms"] = 1000
		}), func(r Report) float64 { return float64(r.SentAway) }},
		"answers that it is away": {
			true, every10th(http.StatusServiceUnavailable), func(r Report) float64 { return r.Figures["unavailable"] },
		},
		"answers that it is too much": {
			true, every10th(http.StatusTooManyRequests), func(r Report) float64 { return r.Figures["limited"] },
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := &proxy{}
			if tc.trouble != nil && name != "clients are sent away" {
				tc.trouble(p)
			}
			p.start(t, serve(t))

			c := command(p.URL)
			if tc.lasting {
				c = lastingCommand(p.URL)
				c.Duration = roundTime
			}

			// The trouble begins when all clients are connected. A gateway may send its clients away ten times at most:
			// if it never stopped, no time would be left for counting.
			begin := time.AfterFunc(time.Second, func() {
				if name == "clients are sent away" {
					p.mu.Lock()
					tc.trouble(p)
					said := p.says
					p.says = func(first bool, m message) bool { return p.lied < 10 && said(first, m) }
					p.mu.Unlock()
				}

				p.cut()
			})

			defer begin.Stop()

			r, err := run(t, c)
			if err != nil || tc.felt(r) == 0 {
				t.Errorf("Run = %v, %v felt, report %+v", err, tc.felt(r), r)
			}
		})
	}
}

func TestServerSeveralGatewaysAndOneDies(t *testing.T) {
	t.Parallel()

	server := serve(t)
	dies := (&proxy{}).start(t, server)

	// The second gateway stops accepting, and then all its connections end.
	stop := time.AfterFunc(time.Second, func() {
		dies.server.Listener.Close()
		dies.cut()
		dies.server.CloseClientConnections()
	})
	defer stop.Stop()

	if r, err := run(t, command(server, dies.URL)); err != nil || r.Drops == 0 {
		t.Errorf("Run = %v, %d lost, %q", err, r.Drops, r.Wrong)
	}
}

func TestServerTokens(t *testing.T) {
	t.Parallel()

	c := command(serve(t, "--jwt-secret="+jwtSecret))
	c.JWTSecret = jwtSecret
	c.Duration = time.Second
	if r, err := run(t, c); err != nil {
		t.Errorf("Run = %v, %q", err, r.Wrong)
	}

	// Wrong settings end a run with a remedy, not with wrong counts.
	c.JWTSecret = "another"
	wrong := *c

	counters := *c
	counters.Scenario = "counters"
	counters.APIKeys = []string{"another key"}
	counters.JWTSecret = jwtSecret

	anonymous := *c
	anonymous.URL = []string{serve(t)}

	for words, c := range map[string]*Command{
		"give --jwt-secret the same value":   &wrong,
		"give --api-key one of the server's": &counters,
		"takes no tokens":                    &anonymous,
	} {
		r, err := run(t, c)
		if err == nil || errors.Is(err, ErrWrong) || !strings.Contains(err.Error(), words) ||
			r.WrongCounts != 0 {
			t.Errorf("Run = %v, %q, want %q", err, r.Wrong, words)
		}
	}
}

const accessLog = `10.0.0.1 - - [17/May/2015:10:00:00 +0000] "GET /a?x=1 HTTP/1.1" 200 1 "-" "one"
10.0.0.1 - - [17/May/2015:10:00:10 +0000] "GET /b HTTP/1.1" 200 1 "-" "one"
10.0.0.2 - - [17/May/2015:10:00:05 +0000] "GET /a HTTP/1.1" 200 1 "-" "one"
not a line
10.0.0.2 - - [17/May/2015:10:00:20 +0000] "GET /LONG HTTP/1.1" 200 1 "-" "one"
10.0.0.3 - - [17/May/2015:10:00:30 +0000] "OPTIONS * HTTP/1.1" 200 1 "-" "one"
10.0.0.1 - - [17/May/2015:10:30:00 +0000] "GET /a%20b HTTP/1.1" 200 1 "-" "one"
10.0.0.1 - - [17/May/2015:10:30:00 +0000] "GET /c HTTP/1.1" 200 1 "-" "two"
`

func writeLog(t *testing.T) string {
	path := filepath.Join(t.TempDir(), "access.log")
	text := strings.ReplaceAll(accessLog, "LONG", strings.Repeat("x", 200))
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
	}

	return path
}

func TestServerReplay(t *testing.T) {
	t.Parallel()
	c := command(serve(t))
	c.Replay = writeLog(t)
	c.Speed = 20_000
	c.Dwell = 5 * time.Minute

	r, err := run(t, c)
	if err != nil || r.RefusedJoins != 2 {
		t.Fatalf("Run = %v, %+v", err, r)
	}

	// The numbers of the log above, counted by hand.
	p := *r.Replay
	if p.Lines != 8 || p.BadLines != 1 || p.Requests != 7 || p.Visitors != 4 || p.Visits != 5 || p.MostPresent != 3 ||
		p.BadPages != 2 {
		t.Errorf("replay %+v", p)
	}

	if r.Pages != 4 || len(r.Checkpoints) != 4 {
		t.Errorf("%d pages, checkpoints %+v", r.Pages, r.Checkpoints)
	}
}

// A visitor who is already on a page of the log would make every count of that page look wrong. A visitor on another
// page does not.
func TestServerReplayWantsPagesWithoutVisitors(t *testing.T) {
	t.Parallel()
	server := serve(t, "--presence-timeout=1m")
	if _, _, err := client.NewAPI(client.Config{URL: server}).Hold(t.Context(), "/b"); err != nil {
		t.Fatal(err)
	}

	c := command(server)
	c.Replay = writeLog(t)
	if _, err := run(t, c); err == nil || !strings.Contains(err.Error(), `"/b"`) {
		t.Errorf("Run = %v", err)
	}

	if r, err := run(t, command(server)); err != nil || !r.SiteChecked {
		t.Errorf("with others who stay: Run = %v, %q", err, r.Wrong)
	}
}

func TestServerScenarios(t *testing.T) {
	t.Parallel()
	for name := range scenarios {
		if name == "mixed" || name == "counters" { // these have their own tests
			continue
		}
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := command(serve(t))
			c.Scenario = name
			c.Users = 10
			c.Duration = time.Second
			c.PID = []int{os.Getpid()}
			c.KillFraction = 0

			r, err := run(t, c)
			if err != nil || r.Scenario != name || r.Figures["window_s"] <= 0 || r.Server == nil ||
				r.Server.RSSEndBytes == 0 {
				t.Errorf("Run = %v, %+v", err, r)
			}
		})
	}
}

// Without --json the figures of a scenario are lines of text.
func TestServerScenarioForPeople(t *testing.T) {
	t.Parallel()
	c := command(serve(t))
	c.Scenario = "idle"
	c.Duration = 100 * time.Millisecond
	c.KillFraction = 0

	var out bytes.Buffer
	err := c.Run(t.Context(), &out, io.Discard)
	if err != nil || !strings.HasPrefix(out.String(), "run ") ||
		!strings.Contains(out.String(), "\nmeasured       window s: 0.") {
		t.Errorf("Run = %v\n%s", err, out.String())
	}
}

// A run ends early when no server answers, with or without --json. It waits only for a server that is not ready yet.
func TestServerNobodyAnswers(t *testing.T) {
	t.Parallel()
	c := command("http://" + servertest.FreeAddr())
	r, err := run(t, c)
	if err == nil || !strings.Contains(err.Error(), "nothing answers at "+c.URL[0]) ||
		r.Seconds > readyLimit.Seconds() {
		t.Errorf("Run = %v after %v s", err, r.Seconds)
	}

	var out bytes.Buffer
	c.JSON = false
	err = c.Run(t.Context(), &out, io.Discard)
	if err == nil || strings.Contains(err.Error(), "/counter") || out.Len() > 0 {
		t.Errorf("Run = %v\n%s", err, out.String())
	}
}

// The last checkpoints are within the duration, and take at most half of it.
func TestLastChecks(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct{ duration, grace, want time.Duration }{
		{30 * time.Second, 2 * time.Second, 5 * time.Second},
		{30 * time.Second, 0, time.Second},
		{4 * time.Second, 2 * time.Second, 2 * time.Second},
	} {
		if got := lastChecks(tc.duration, tc.grace); got != tc.want {
			t.Errorf("lastChecks(%s, %s) = %s, want %s", tc.duration, tc.grace, got, tc.want)
		}
	}
}

func TestSettingsThatCannotWork(t *testing.T) {
	t.Parallel()
	for flag, change := range map[string]func(*Command){
		"--url":              func(c *Command) { c.URL = []string{"ws://x"} },
		"--users":            func(c *Command) { c.Users = -1 },
		"--users, --tabs":    func(c *Command) { c.Users, c.Tabs = 1_000_000_000, 1 },
		"--pages":            func(c *Command) { c.Pages = maxPages + 1 },
		"--tabs":             func(c *Command) { c.Tabs = maxTabs + 1 },
		"--duration":         func(c *Command) { c.Duration = -1 },
		"--churn":            func(c *Command) { c.Churn = -1 },
		"--kill-fraction":    func(c *Command) { c.KillFraction = 2 },
		"--dwell":            func(c *Command) { c.Dwell = -1 },
		"--speed":            func(c *Command) { c.Speed = -1 },
		"--leave-grace":      func(c *Command) { c.LeaveGrace = -1 },
		"--pong-timeout":     func(c *Command) { c.PongTimeout = -1 },
		"--presence-timeout": func(c *Command) { c.PresenceTimeout = -1 },
		"--scenario":         func(c *Command) { c.Scenario = "party" },
		"--api-key":          func(c *Command) { c.Scenario = "counters" },
		"--replay":           func(c *Command) { c.Replay = "no/such/file" },
		"--pid":              func(c *Command) { c.PID = []int{-5} },
	} {
		t.Run(flag, func(t *testing.T) {
			c := parseFlags(t, "--url=http://127.0.0.1:1")
			change(c)

			var out bytes.Buffer
			err := c.Run(t.Context(), &out, io.Discard)
			if !errors.Is(err, ErrSettings) || !strings.Contains(err.Error(), flag+": ") ||
				strings.Contains(err.Error(), "\n") {
				t.Errorf("Run = %v", err)
			}

			if out.Len() > 0 {
				t.Errorf("wrote %q", out.String())
			}
		})
	}
}

// parseFlags reads flags as the program does.
func parseFlags(t *testing.T, args ...string) *Command {
	t.Helper()
	var all struct {
		Simulate Command `cmd:"" default:""`
	}

	set := flags.Set{Out: io.Discard}
	set.Add(&all)
	if _, err := set.Parse(args); err != nil {
		t.Fatal(err)
	}

	return &all.Simulate
}

func TestFlags(t *testing.T) {
	t.Parallel()
	if c := parseFlags(t); c.check() != nil || len(c.URL) != 1 || c.URL[0] != "http://127.0.0.1:8080" {
		t.Errorf("the defaults cannot work: %v, %+v", c.check(), c)
	}

	if parseFlags(t, "--users=0").check() == nil {
		t.Error("--users 0 is taken for the default")
	}

	c := parseFlags(t, strings.Fields(
		"--url http://a --url http://b --kill-fraction 0 --pid 1 --pid 2 --scenario idle --json")...)
	if len(c.URL) != 2 || c.Users != 100 || c.Duration != 30*time.Second || c.Speed != 600 ||
		c.Dwell != 5*time.Minute || c.LeaveGrace != 2*time.Second || len(c.PID) != 2 || !c.JSON ||
		c.KillFraction != 0 {
		t.Errorf("parsed %+v", c)
	}
}

// writes is a function as io.Writer.
type writes func(text string)

func (w writes) Write(p []byte) (int, error) { w(string(p)); return len(p), nil }

func TestClockInterrupted(t *testing.T) {
	t.Parallel()
	c := command(serve(t))
	c.Duration = time.Hour

	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()

	var watch *testkit.Stopwatch
	interrupt := writes(func(text string) {
		if strings.Contains(text, "churning:") && watch == nil {
			watch = testkit.NewStopwatch(t)
			cancel()
		}
	})

	var out bytes.Buffer
	if err := c.Run(ctx, &out, interrupt); err != nil {
		t.Errorf("Run = %v", err)
	}

	if d := watch.Elapsed(); d > 10*time.Second {
		t.Errorf("it took %s", d)
	}

	// An interrupted run checks what it has seen so far.
	if !strings.Contains(out.String(), "interrupted ") || !strings.Contains(out.String(), "wrong counts   0") {
		t.Errorf("report %q", out.String())
	}
}
