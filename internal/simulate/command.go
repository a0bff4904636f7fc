// Package simulate is `headcount simulate`: it fills a running server with WebSocket clients that come, leave, move,
// reload and die. It knows at every moment how many users really are on each page: the truth. At checkpoints it
// compares the truth with what every client and every gateway says.
//
// It is a black box client: it knows the outside contract through package client and uses none of the server's code, so
// it cannot repeat a mistake of that code.
//
// The count of the whole site, `*`, must be the count found at the start plus this run's users. So nobody else should
// use the server meanwhile. If `*` moves before the run has begun, the run does not check it, and the report says so.
//
// Files, from the bottom up: page.go (which pages are allowed), socket.go (how connections end), tab.go (one client and
// its reconnects), user.go (whose tab it is), truth.go, crowd.go (all clients), checkpoint.go (the truth against what
// clients hold), probe.go (latency), then the files that drive a crowd: churn.go, replay.go with accesslog.go,
// scenarios.go. The scenario "counters" has files of its own: tally.go (the truth about one counter), quota.go (about
// one limit), calls.go (HTTP calls, repeated until they are answered), subscriber.go, lasting.go (who changes
// counters), lastingcheck.go. stay.go has the Crowd of tests. command.go joins all parts, and report.go writes the
// report.
package simulate

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"net/url"
	"strconv"
	"syscall"
	"time"
)

var (
	// ErrWrong means that the run was completed and a count was wrong.
	ErrWrong = errors.New("wrong counts")
	// ErrSettings means that the flags cannot work. The run opened no connection.
	ErrSettings = errors.New("settings")

	errInterrupted = errors.New("interrupted")
)

// Command holds the flags of `headcount simulate`. Package flags fills in the defaults.
type Command struct {
	URL             []string      `name:"url" default:"http://127.0.0.1:8080" placeholder:"URL" help:"A gateway's address; repeat it to spread the clients over several."`
	Users           int           `name:"users" default:"100" help:"Users present at the same time, at most."`
	Pages           int           `name:"pages" default:"10" help:"Pages that the users visit; the first pages get the most visits."`
	Duration        time.Duration `name:"duration" default:"30s" help:"How long the run takes once all users have come, with its checkpoints. Of a scenario: what is measured; the final checkpoint comes after it."`
	Churn           float64       `name:"churn" default:"0.05" help:"Fraction of the users that leave or come each second; as many others move, reload, open or close a tab."`
	Tabs            int           `name:"tabs" default:"2" help:"Connections a user has, at most."`
	KillFraction    float64       `name:"kill-fraction" default:"0.3" help:"Fraction of departures without a close frame: the connection ends, is reset, or, while the run is long enough for the server to notice, falls silent, in equal parts."`
	Seed            uint64        `name:"seed" default:"1" help:"Seed of everything random."`
	JSON            bool          `name:"json" help:"Print the report as one JSON object."`
	PID             []int         `name:"pid" placeholder:"PID" help:"Process of the server, to report its CPU time and memory; repeatable."`
	JWTSecret       string        `name:"jwt-secret" placeholder:"SECRET" help:"Sign HS256 tokens with it, as the server's --jwt-secret; without it everyone is anonymous."`
	APIKeys         []string      `name:"api-key" type:"each" placeholder:"KEY" help:"One of the server's --api-key, which the scenario counters needs."`
	Scenario        string        `name:"scenario" placeholder:"NAME" help:"Run a measurement instead: idle, storm, fanout, hidden, churn, slow or counters."`
	Site            string        `name:"site" env:"-" placeholder:"NAME" help:"One of the server's --site, whose pages and counters are used. Without it the first one."`
	Replay          string        `name:"replay" placeholder:"FILE" help:"Replay a web server's access log (common or combined format) as visits."`
	Dwell           time.Duration `name:"dwell" default:"5m" help:"How long a visitor of the log stays after a request, in the log's time."`
	Speed           float64       `name:"speed" default:"600" help:"Seconds of the log per second."`
	LeaveGrace      time.Duration `name:"leave-grace" default:"2s" help:"The server's --leave-grace."`
	PongTimeout     time.Duration `name:"pong-timeout" default:"5s" help:"The server's --pong-timeout."`
	PresenceTimeout time.Duration `name:"presence-timeout" default:"7s" help:"The server's --presence-timeout."`

	settle time.Duration // 0: the contract's 10 s; tests of wrong counts do not wait that long
}

// Help is printed above the flags.
func (c *Command) Help() string {
	return "Users come, move, reload, leave and vanish. At checkpoints nobody does: every client's count and every " +
		"gateway's answers must equal the number of users who are really there, on each page and, as the server is " +
		"otherwise quiet, on the whole site. When the server was started with other times than the defaults, give " +
		"the same ones here.\n\n" +
		"Ctrl-C ends the run early, with its report. Exit status: 1 when a count was wrong or the run could not be " +
		"completed, 2 when the flags cannot work."
}

// Bounds of the flags. For more than this, one process is the wrong tool.
const (
	maxPages = 20_000
	maxTabs  = 100
	maxChurn = 100.0
)

// Run does what the flags say. It writes the report to out and, while it works, its progress to progress. The error
// wraps ErrSettings when the flags cannot work, and ErrWrong when a count was wrong. When ctx ends the run early, that
// is no error, but the report says so. Run ends everything that it started before it returns.
func (c *Command) Run(ctx context.Context, out, progress io.Writer) error {
	// First, because plan may read a long log.
	if err := c.check(); err != nil {
		return err
	}
	p, err := c.plan()
	if err != nil {
		return err
	}

	// What every run needs beside its users: watchers, both clients of each probe, and handshakes under way.
	watchers := len(c.URL) * (len(p.pages)/watchPages + 1)
	p.limit += watchers + 2*probeCount + maxDials

	if err := enoughFiles(p.limit + maxGraves + getsAtOnce*len(c.URL) + 64); err != nil {
		return err
	}

	// Before the first connection, because the report says how much CPU and memory the run has cost the server.
	server, err := newProcesses(c.PID)
	if err != nil {
		return fmt.Errorf("%w: --pid: %w: give the id of a running process", ErrSettings, err)
	}

	crowd := newCrowd(c, p, server)
	stop := crowd.showProgress(progress)
	err = crowd.run(ctx)
	// Before the progress stops: all clients may take seconds to end.
	crowd.close()
	stop()

	if err != nil && ctx.Err() != nil { // the end of ctx has caused the error, whatever it says
		err = errInterrupted
	}
	if errors.Is(err, errNobody) && !c.JSON {
		return fmt.Errorf("simulate: %w", err) // nothing has happened that a report could show
	}
	report := crowd.report(err)
	if werr := report.write(out, c.JSON); werr != nil {
		return fmt.Errorf("simulate: write the report: %w", werr)
	}

	interrupted := err == errInterrupted //nolint:errorlint
	if err != nil && !interrupted {
		return fmt.Errorf("simulate: %w", err)
	}
	// After the errors: a run that ended early has compared too little to judge the counts.
	if report.WrongCounts > 0 {
		return fmt.Errorf("simulate: %w: %d, first: %s", ErrWrong, report.WrongCounts, report.Wrong[0])
	}

	return nil
}

// enoughFiles refuses a run that needs more open files than this process may have. Go has
// raised that to the hard limit.
func enoughFiles(need int) error {
	var limit syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &limit); err != nil {
		return fmt.Errorf("simulate: read the limit of open files: %w", err)
	}

	if uint64(need) > uint64(limit.Cur) { // on FreeBSD Cur is signed
		return fmt.Errorf("%w: --users, --tabs: the run needs up to %d open files and may open %d: "+
			"give smaller numbers or raise `ulimit -Hn`", ErrSettings, need, limit.Cur)
	}

	return nil
}

// A plan is what a run does with a crowd, and what it needs for it.
type plan struct {
	scenario string   // as the report calls it
	name     string   // of the run on the server: prefix of pages and token subjects
	made     int      // how many pages are made for the run; 0: the pages are those of a log
	pages    []string // every page that the run will use
	limit    int      // connections at once, at most; Run adds those that every run needs
	probing  bool     // whether probes measure latency meanwhile
	work     func(*crowd, context.Context) error
}

// topics returns the pages and the whole site.
func (p *plan) topics() []string { return append([]string{wholeSite}, p.pages...) }

// plan returns what the flags ask for. With --replay it reads the log.
func (c *Command) plan() (p plan, err error) {
	scenario := cmp.Or(c.Scenario, "mixed")
	if c.Replay != "" {
		scenario = "replay"
		p, err = planReplay(c)
	} else {
		p = scenarios[scenario](c)
	}
	p.scenario = scenario
	p.name = runName(c.Seed)
	for i := range p.made {
		p.pages = append(p.pages, p.name+"/page "+strconv.Itoa(i))
	}

	return p, err
}

// run takes a crowd from the first dial to the last check.
func (c *crowd) run(ctx context.Context) error {
	if err := c.open(ctx); err != nil {
		return err
	}

	// Nobody else uses pages that are made for the run, but there may be visitors on those of a log.
	if c.made == 0 && len(c.pages) > 0 {
		if err := c.expectEmpty(ctx); err != nil {
			return err
		}
	}

	if c.probing {
		stop := c.probe(ctx)
		defer stop()
	}

	return c.work(c, ctx)
}

// check refuses flags that cannot work. Its error is one line that names the flag and
// says what to do.
func (c *Command) check() error {
	bad := func(flag, format string, args ...any) error {
		return fmt.Errorf("%w: --%s: %s", ErrSettings, flag, fmt.Sprintf(format, args...))
	}
	for _, raw := range c.URL {
		u, err := url.Parse(raw)
		if err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https" {
			return bad("url", "%q is not the address of a gateway: give http://HOST:PORT or https://HOST", raw)
		}
		if u.RawQuery != "" || u.Fragment != "" || u.User != nil {
			return bad("url", "%q: leave out user, query and fragment", u.Redacted())
		}
	}

	within := func(value, least, most int) bool { return least <= value && value <= most }
	fraction := func(value, most float64) bool { return value >= 0 && value <= most } // not NaN
	positive := c.Speed > 0 && !math.IsInf(c.Speed, 0)
	switch {
	case c.Users < 1:
		return bad("users", "%d: give at least 1", c.Users)
	case !within(c.Pages, 1, maxPages):
		return bad("pages", "%d: give 1 to %d", c.Pages, maxPages)
	case !within(c.Tabs, 1, maxTabs):
		return bad("tabs", "%d: give 1 to %d", c.Tabs, maxTabs)
	case c.Duration <= 0:
		return bad("duration", "%s: give a positive duration", c.Duration)
	case !fraction(c.Churn, maxChurn):
		return bad("churn", "%v: give 0 to %v users per user and second", c.Churn, maxChurn)
	case !fraction(c.KillFraction, 1):
		return bad("kill-fraction", "%v: give 0 to 1", c.KillFraction)
	case c.Dwell <= 0:
		return bad("dwell", "%s: give a positive duration", c.Dwell)
	case !positive:
		return bad("speed", "%v: give a positive number, 600 plays a day in 144 seconds", c.Speed)
	case c.LeaveGrace < 0:
		return bad("leave-grace", "%s: give 0 or more", c.LeaveGrace)
	case c.PongTimeout <= 0:
		return bad("pong-timeout", "%s: give a positive duration", c.PongTimeout)
	case c.PresenceTimeout <= 0:
		return bad("presence-timeout", "%s: give a positive duration", c.PresenceTimeout)
	}

	if c.Scenario == "" {
		return nil
	}
	if scenarios[c.Scenario] == nil {
		return bad("scenario", "%q is unknown: give idle, storm, fanout, hidden, churn, slow or counters", c.Scenario)
	}
	if c.Scenario == "counters" && len(c.APIKeys) == 0 {
		return bad("api-key", "the scenario counters needs one: give one of the server's --api-key")
	}
	if c.Replay != "" {
		return bad("scenario", "it does not work together with --replay: leave one of the two out")
	}
	return nil
}
