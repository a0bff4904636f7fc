package simulate

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"headcount/cmd/headcount/flags"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// command is a short run against the server.
func command(f *fake) *Command {
	return &Command{
		URL: []string{f.URL}, Users: 12, Pages: 3, Tabs: 3, Duration: 2 * time.Second, Churn: 1, KillFraction: 0.4, Seed: 7,
		LeaveGrace: f.grace, PongTimeout: f.pong, PresenceTimeout: time.Millisecond, settle: time.Second,
	}
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

func TestAnHonestServerPasses(t *testing.T) {
	t.Parallel()
	f := newFake(t)
	r, err := run(t, command(f))
	if err != nil || !r.OK || r.WrongCounts != 0 {
		t.Fatalf("Run = %v, report %+v", err, r)
	}
	if len(r.Checkpoints) != 3 || !r.SiteChecked || r.Counts == 0 || r.BytesReceived == 0 || r.Connects < 12 {
		t.Errorf("report %+v", r)
	}
	if r.Churn == nil || r.Churn.Left == 0 || r.Churn.Came <= 12 || r.Churn.Moved == 0 {
		t.Errorf("churn %+v", r.Churn)
	}
	if r.JoinToSeen.Samples == 0 || r.JoinToSeen.P50 <= 0 || r.JoinToSeen.Max < r.JoinToSeen.P50 {
		t.Errorf("latency %+v", r.JoinToSeen)
	}
	t.Logf("%+v %+v", *r.Churn, r.Checkpoints)
}

func TestABrokenServerIsFoundOut(t *testing.T) {
	t.Parallel()
	const soon = 300 * time.Millisecond
	for name, tc := range map[string]struct {
		after  time.Duration
		breaks func(*fake)
		says   string
	}{
		"one too many":          {soon, func(f *fake) { f.lie = 1 }, "the true count is"},
		"the whole site is off": {soon, func(f *fake) { f.starLie = 1 }, `page "*"`},
		"negative":              {soon, func(f *fake) { f.lie = -100 }, " -"},
		"versions fall":         {soon, func(f *fake) { f.backward = true }, "version went back"},
		"ghosts":                {soon, func(f *fake) { f.ghosts = true }, "the true count is"},
		"joiner not counted":    {0, func(f *fake) { f.late = true }, "does not include the user who joined"}, // on a busy machine few join later
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := newFake(t)
			c := command(f)
			c.Duration, c.Pages, c.KillFraction = time.Second, 40, 0 // nobody vanishes, so there is nothing to wait for
			if tc.after == 0 {
				f.set(tc.breaks)
			} else {
				time.AfterFunc(tc.after, func() { f.set(tc.breaks) })
			}
			r, err := run(t, c)
			if !errors.Is(err, ErrWrong) || r.OK || r.WrongCounts == 0 || !strings.Contains(strings.Join(r.Wrong, "\n"), tc.says) {
				t.Errorf("Run = %v, wrong %d: %q", err, r.WrongCounts, r.Wrong)
			}
		})
	}
}

func TestTroubleIsNoWrongCount(t *testing.T) {
	t.Parallel()
	for name, trouble := range map[string]func(*fake){
		"all connections lost":     (*fake).drop,
		"clients are sent away":    func(f *fake) { f.tell(`{"type":"reconnect","after_ms":100}`) },
		"clients are rate limited": func(f *fake) { f.tell(`{"type":"error","code":"rate_limited","message":"slow down"}`) },
		"ids are signed anew": func(f *fake) {
			f.set(func(f *fake) { f.signing += "x" })
			f.drop()
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := newFake(t)
			c := command(f)
			c.settle, c.KillFraction = 0, 0
			go func() {
				time.Sleep(time.Second)
				trouble(f)
			}()
			r, err := run(t, c)
			if err != nil || r.Drops+r.SentAway < 10 {
				t.Errorf("Run = %v, %d lost, %d sent away, %q", err, r.Drops, r.SentAway, r.Wrong)
			}
		})
	}
}

func TestSeveralGatewaysAndOneDies(t *testing.T) {
	t.Parallel()
	f := newFake(t)
	c := command(f)
	other, stop := proxy(t, f.URL)
	c.URL = append(c.URL, other)
	c.settle = 0
	go func() {
		time.Sleep(time.Second)
		stop()
	}()
	if r, err := run(t, c); err != nil || r.Drops == 0 {
		t.Errorf("Run = %v, %d lost, %q", err, r.Drops, r.Wrong)
	}
}

func TestTokens(t *testing.T) {
	t.Parallel()
	f := newFake(t)
	f.secret = "a secret of at least thirty-two bytes"
	c := command(f)
	c.JWTSecret = f.secret
	if r, err := run(t, c); err != nil {
		t.Errorf("Run = %v, %q", err, r.Wrong)
	}
	c.JWTSecret = "another"
	if _, err := run(t, c); err == nil || errors.Is(err, ErrWrong) || !strings.Contains(err.Error(), "--jwt-secret") {
		t.Errorf("Run with another secret = %v", err)
	}
}

func TestOthersOnTheSiteAreSeen(t *testing.T) {
	t.Parallel()
	f := newFake(t)
	f.starLie = 5 // five others who stay
	if r, err := run(t, command(f)); err != nil || !r.SiteChecked {
		t.Errorf("with others who stay: Run = %v, %q", err, r.Wrong)
	}
}

const log = `10.0.0.1 - - [17/May/2015:10:00:00 +0000] "GET /a?x=1 HTTP/1.1" 200 1 "-" "one"
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
	if err := os.WriteFile(path, []byte(strings.ReplaceAll(log, "LONG", strings.Repeat("x", 200))), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestReplay(t *testing.T) {
	t.Parallel()
	f := newFake(t)
	c := command(f)
	c.Replay, c.Speed, c.Dwell = writeLog(t), 20_000, 5*time.Minute
	r, err := run(t, c)
	if err != nil || r.RefusedJoins != 2 {
		t.Fatalf("Run = %v, %+v", err, r)
	}
	p := *r.Replay
	if p.Lines != 8 || p.BadLines != 1 || p.Requests != 7 || p.Visitors != 4 || p.Visits != 5 || p.MostPresent != 3 || p.BadPages != 2 {
		t.Errorf("replay %+v", p)
	}
	if r.Pages != 4 || len(r.Checkpoints) != 4 {
		t.Errorf("%d pages, checkpoints %+v", r.Pages, r.Checkpoints)
	}
}

func TestReplayFindsAServerThatAcceptsEverything(t *testing.T) {
	t.Parallel()
	f := newFake(t)
	f.acceptAll = true
	c := command(f)
	c.Replay, c.Speed = writeLog(t), 20_000
	if r, err := run(t, c); !errors.Is(err, ErrWrong) {
		t.Errorf("Run = %v, %+v", err, r.Wrong)
	}
}

func TestReplayWantsPagesWithoutVisitors(t *testing.T) {
	t.Parallel()
	f := newFake(t)
	f.pages["/b"] = map[string]int{"somebody": 1}
	c := command(f)
	c.Replay = writeLog(t)
	if _, err := run(t, c); err == nil || !strings.Contains(err.Error(), `"/b"`) {
		t.Errorf("Run = %v", err)
	}
}

func TestScenarios(t *testing.T) {
	t.Parallel()
	for name := range scenarios {
		if name == "counters" { // is about another server
			continue
		}
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := newFake(t)
			c := command(f)
			c.Scenario, c.Users, c.Duration, c.PID, c.KillFraction = name, 10, time.Second, []int{os.Getpid()}, 0
			r, err := run(t, c)
			if err != nil || r.Scenario != name || r.Figures["window_s"] <= 0 || r.Server == nil || r.Server.RSSEndBytes == 0 {
				t.Errorf("Run = %v, %+v", err, r)
			}
		})
	}
}

// A person gets the figures of a scenario as lines.
func TestScenarioForPeople(t *testing.T) {
	t.Parallel()
	c := command(newFake(t))
	c.Scenario, c.Duration, c.KillFraction = "idle", 100*time.Millisecond, 0
	var out bytes.Buffer
	if err := c.Run(t.Context(), &out, io.Discard); err != nil || !strings.HasPrefix(out.String(), "run ") || !strings.Contains(out.String(), "\nmeasured       window s: 0.") {
		t.Errorf("Run = %v\n%s", err, out.String())
	}
}

// The run says so at once when there is no server, and waits for one that is not ready.
func TestNobodyAnswers(t *testing.T) {
	t.Parallel()
	f := newFake(t)
	c := command(f)
	f.Close()
	if r, err := run(t, c); err == nil || !strings.Contains(err.Error(), "nothing answers at "+f.URL) || r.Seconds > readyLimit.Seconds() {
		t.Errorf("Run = %v after %v s", err, r.Seconds)
	}
	var out bytes.Buffer
	c.JSON = false
	if err := c.Run(t.Context(), &out, io.Discard); err == nil || strings.Contains(err.Error(), "/counter") || out.Len() > 0 {
		t.Errorf("Run = %v\n%s", err, out.String())
	}
}

// The last checkpoints are within the duration, and take half of it at most.
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
			c := &Command{URL: []string{"http://127.0.0.1:1"}}
			change(c)
			var out bytes.Buffer
			err := c.Run(t.Context(), &out, io.Discard)
			if !errors.Is(err, ErrSettings) || !strings.Contains(err.Error(), flag+": ") || strings.Contains(err.Error(), "\n") {
				t.Errorf("Run = %v", err)
			}
			if out.Len() > 0 {
				t.Errorf("wrote %q", out.String())
			}
		})
	}
}

func TestFlags(t *testing.T) {
	t.Parallel()
	var all struct {
		Simulate Command `cmd:"" default:""`
	}
	set := flags.Set{Out: io.Discard}
	set.Add(&all)
	if _, err := set.Parse(strings.Fields("--url http://a --url http://b --kill-fraction 0 --pid 1 --pid 2 --scenario idle --json")); err != nil {
		t.Fatal(err)
	}
	c := all.Simulate
	if cfg := c.withDefaults(); cfg.check() != nil {
		t.Errorf("the defaults cannot work: %v", cfg.check())
	}
	c.Users = 0
	if cfg := c.withDefaults(); cfg.check() == nil {
		t.Error("--users 0 is taken for the default")
	}
	c.Users = 100
	if len(c.URL) != 2 || c.Users != 100 || c.Duration != 30*time.Second || c.Speed != 600 || c.Dwell != 5*time.Minute ||
		c.LeaveGrace != 2*time.Second || len(c.PID) != 2 || !c.JSON || c.KillFraction != 0 {
		t.Errorf("parsed %+v", c)
	}
}

func TestInterrupted(t *testing.T) {
	t.Parallel()
	f := newFake(t)
	c := command(f)
	c.Duration = time.Hour
	ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
	defer cancel()
	var out, progress bytes.Buffer
	began := time.Now()
	if err := c.Run(ctx, &out, &progress); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("Run = %v", err)
	}
	if d := time.Since(began); d > 5*time.Second {
		t.Errorf("it took %s", d)
	}
	if !strings.Contains(out.String(), "wrong counts") {
		t.Errorf("report %q", out.String())
	}
}
