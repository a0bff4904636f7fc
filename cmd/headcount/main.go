// Command headcount is a real-time presence counter: it counts the users on each page of a
// site. `headcount serve` is the server; `headcount simulate` is a simulated crowd to try
// the server with.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/signal"
	"runtime"
	"runtime/debug"
	"strings"
	"syscall"
	"time"
	"unicode"

	"github.com/mattn/go-isatty"
	"github.com/rs/zerolog"

	"headcount/cmd/headcount/config"
	"headcount/cmd/headcount/dump"
	"headcount/cmd/headcount/flags"
	"headcount/cmd/headcount/probe"
	"headcount/cmd/headcount/top"
	"headcount/counter"
	"headcount/internal/postgres"
	"headcount/internal/setting"
	"headcount/internal/simulate"
)

// Exit statuses.
const (
	exitOK       = 0 // also after SIGTERM or SIGINT
	exitFailure  = 1
	exitSettings = 2 // after exactly one line on stderr, with the setting and a remedy
)

// version is set by the linker: -X main.version=v1.2.3.
var version string

// commands describes the command line to package flags.
type commands struct {
	Serve       serveCommand       `cmd:"" default:"" help:"Run the server (the default). Settings that seldom need a change are in deploy/README.md."`
	Check       checkCommand       `cmd:"" help:"Check everything that a server with these settings needs, and report problems."`
	Top         top.Command        `cmd:"" help:"Show the dashboard in this terminal."`
	Explain     top.Explain        `cmd:"" help:"Print what the count of a page is made of: headcount explain PAGE."`
	Simulate    simulate.Command   `cmd:"" help:"Send a simulated crowd to a server and check every count."`
	Export      dump.Export        `cmd:"" help:"Write all counters of a store into a file."`
	Import      dump.Import        `cmd:"" help:"Put the counters of a file into a store."`
	Version     versionCommand     `cmd:"" help:"Print the version."`
	Healthcheck healthcheckCommand `cmd:"" hidden:"" help:"Ask /healthz of the admin address, for container health checks."`
}

type serveCommand struct {
	ConfigFile string        `name:"config" type:"text" placeholder:"FILE" help:"A file with a JSON object of settings. Its keys are the names of flags without the leading dashes; a repeatable flag takes a list."`
	Config     config.Server `embed:""`
}

// AfterApply checks the settings after they have been read.
func (c *serveCommand) AfterApply() error { return c.Config.Validate() }

type versionCommand struct{}

// healthcheckCommand has all settings, because the file of the server's settings may have any of them.
type healthcheckCommand struct {
	ConfigFile string        `name:"config" type:"text" placeholder:"FILE" help:"A file with a JSON object of settings, as serve reads it."`
	Config     config.Server `embed:""`
}

const description = `How many people are here, right now? A real-time presence counter gateway.

Every flag is also an environment variable: --update-interval is HEADCOUNT_UPDATE_INTERVAL. The variable of a repeatable flag takes values separated by commas. An empty variable counts as not set. A flag wins over its variable, the variable over the file of --config, and the file over the default.`

func main() {
	os.Exit(program{
		args: os.Args[1:], environ: os.Environ(),
		stdin: os.Stdin, stdout: os.Stdout, stderr: os.Stderr, terminal: isatty.IsTerminal(os.Stderr.Fd()),
		serve: serveProcess,
	}.run())
}

// program is one run of the program, with everything outside that it uses. Tests replace
// these parts.
type program struct {
	args           []string
	environ        []string // as os.Environ has it
	stdin          io.Reader
	stdout, stderr io.Writer
	terminal       bool // whether stderr is a terminal
	serve          func(context.Context, config.Server, zerolog.Logger) error
}

// run returns the exit status.
func (p program) run() int {
	// Before anything is parsed or opened, so that no signal ends the process half way.
	ctx, stop := interruptible(context.Background())
	defer stop()

	var c commands
	command, err := p.parse(&c)
	// Help was asked for, so it is on stdout already and no mistake.
	if errors.Is(err, flags.ErrShown) {
		return exitOK
	}
	if err != nil {
		return p.fail(exitSettings, err)
	}

	switch command {
	case "serve":
		return p.runServe(ctx, c.Serve.Config)
	case "check":
		err = c.Check.run(ctx, p.stdout)
	case "top":
		err = c.Top.Run(ctx, p.stdout)
	case "explain":
		err = c.Explain.Run(ctx, p.stdout)
	case "simulate":
		err = c.Simulate.Run(ctx, p.stdout, p.stderr)
	case "export":
		err = c.Export.Run(ctx, p.stdout, p.stderr)
	case "import":
		// The rules are read here, as serve reads them, because package dump knows no settings of a server.
		var rules *counter.Rules
		rules, err = config.ReadRules(c.Import.Counters)
		if err == nil {
			err = c.Import.Run(ctx, rules, p.stdin, p.stderr)
		}
	case "version":
		_, err = fmt.Fprintln(p.stdout, versionLine())
	case "healthcheck":
		err = healthcheck(ctx, c.Healthcheck.Config.AdminListen)
	}

	return p.end(err)
}

// end returns the exit status of a command that ended with err, and prints the error.
func (p program) end(err error) int {
	// A setting may turn out wrong only when it is used; it is status 2 even then.
	refused := refusal(err)
	switch {
	case err == nil:
		return exitOK
	case errors.Is(err, errFaults):
		return exitFailure // the check has printed its findings already
	case refused != nil:
		return p.fail(exitSettings, refused)
	case errors.Is(err, simulate.ErrSettings):
		return p.fail(exitSettings, err)
	default:
		return p.fail(exitFailure, err)
	}
}

// refusal returns the setting that cannot work, of an error that is about one, or nil. Of PostgreSQL that is also a
// database that cannot be used.
func refusal(err error) error {
	var refused *setting.Error
	if errors.As(err, &refused) {
		return refused
	}

	if errors.Is(err, postgres.ErrConfig) {
		// What stands before is the path by which the error came, which means nothing to the operator.
		_, problem, _ := strings.Cut(err.Error(), postgres.ErrConfig.Error()+": ")
		return setting.Errorf("postgres", "%s", problem)
	}

	return nil
}

// parse fills in c, checks it and returns the command's name.
func (p program) parse(c *commands) (string, error) {
	set := flags.Set{
		Name:        "headcount",
		Description: description,
		Version:     versionLine(),
		Out:         p.stdout,
		Variables:   map[string]string{},
		Groups: []flags.Group{
			{Key: "addresses", Title: "Addresses"},
			{Key: "cluster", Title: "Store and cluster"},
			{Key: "counters", Title: "Counters"},
			{Key: "times", Title: "Times"},
			{Key: "limits", Title: "Limits"},
			{Key: "identity", Title: "Identity and access"},
			{Key: "webhooks", Title: "Webhooks"},
			{Key: "log", Title: "Log"},
		},
	}

	for _, variable := range p.environ {
		name, value, _ := strings.Cut(variable, "=")
		set.Variables[name] = value
	}

	set.Add(c)
	command, err := set.Parse(p.args)
	if err != nil {
		return "", err
	}

	// After Parse, which reports a wrong flag first: a misspelt variable beside it would hide it.
	unknown, err := set.Strangers()
	c.Serve.Config.Strangers = unknown
	c.Check.Config.Strangers = unknown

	return command.Name, err
}

// fail prints the error as one line, even if its text has several, and returns status.
func (p program) fail(status int, err error) int {
	// The contract promises one line, and an error of the system or of a library may have several.
	line := strings.Join(strings.FieldsFunc(err.Error(), unicode.IsControl), " ")
	fmt.Fprintln(p.stderr, "headcount: "+line)
	return status
}

func (p program) runServe(ctx context.Context, cfg config.Server) int {
	signal.Ignore(syscall.SIGPIPE) // the server keeps running when the reader of its log ends
	log := p.logger(cfg)

	for _, warning := range cfg.Warnings() {
		log.Warn().Msg(warning)
	}

	err := p.serve(ctx, cfg, log)
	// One line without the logger's time and level, as for a setting that is refused at the start.
	if refused := refusal(err); refused != nil {
		return p.fail(exitSettings, refused)
	}

	if err != nil {
		log.Error().Err(err).Msg("the process ends because of an error")
		return exitFailure
	}

	return exitOK
}

// logger returns a logger that writes to stderr. User ids, tokens, secrets and keys are
// never logged.
func (p program) logger(cfg config.Server) zerolog.Logger {
	// UTC in milliseconds, so that the logs of processes in several zones can be merged.
	zerolog.TimeFieldFormat = "2006-01-02T15:04:05.000Z07:00"
	zerolog.TimestampFunc = func() time.Time { return time.Now().UTC() }

	out := p.stderr
	forPeople := cfg.LogFormat == "console" || cfg.LogFormat == "" && p.terminal
	if forPeople {
		out = zerolog.ConsoleWriter{Out: p.stderr, TimeFormat: "15:04:05.000", NoColor: !p.terminal}
	}

	level, err := zerolog.ParseLevel(cfg.LogLevel)
	if err != nil {
		panic(err) // cannot happen: Validate has checked the level
	}

	return zerolog.New(out).Level(level).With().Timestamp().Logger()
}

// interruptible returns a context that the first SIGTERM or SIGINT ends. The second signal
// ends the process at once. stop restores the former handling of signals.
func interruptible(parent context.Context) (ctx context.Context, stop func()) {
	ctx, cancel := context.WithCancel(parent)
	signals := make(chan os.Signal, 2) // two count; a third changes nothing

	signal.Notify(signals, syscall.SIGTERM, os.Interrupt)

	stopped := make(chan struct{})
	gone := make(chan struct{})
	go func() { // stop waits for it
		defer close(gone)
		for _, act := range []func(){cancel, func() { os.Exit(exitFailure) }} {
			select {
			case <-signals:
				act()
			case <-stopped:
				return
			}
		}
	}()

	return ctx, func() {
		signal.Stop(signals)
		close(stopped)
		<-gone
		cancel()
	}
}

// adminURL returns the URL by which a process on the same machine reaches an admin address.
func adminURL(admin string) string {
	host, port, _ := net.SplitHostPort(admin)
	// A wildcard is listened on but cannot be dialled.
	if setting.IsWildcard(admin) {
		host = "localhost"
	}
	return "http://" + net.JoinHostPort(host, port)
}

// healthcheck checks that a server on this machine is alive.
func healthcheck(ctx context.Context, admin string) error {
	// Health checks come with a flag of their own, which Validate never sees.
	if _, _, err := setting.SplitAddress(admin); err != nil {
		return fmt.Errorf("--admin-listen: %q is not an address: %w; write host:port", admin, err)
	}

	status, _, err := probe.Ask(ctx, 3*time.Second, http.MethodGet, adminURL(admin)+"/healthz", nil)
	if err == nil && status != http.StatusOK {
		err = fmt.Errorf("healthz: status %d", status)
	}

	return err
}

// versionLine returns the output of `headcount version`: the version, the revision that
// it was built from, and the version of Go.
func versionLine() string {
	v := version
	revision := ""
	modified := ""
	// A program that was built without the linker's flag names the version of its module.
	if info, ok := debug.ReadBuildInfo(); ok {
		if v == "" {
			v = info.Main.Version
		}
		for _, s := range info.Settings {
			switch s.Key {
			case "vcs.revision":
				revision = s.Value
			case "vcs.modified":
				if s.Value == "true" {
					modified = ", modified"
				}
			}
		}
	}

	if v == "" {
		v = "(devel)"
	}

	line := "headcount " + v
	if revision != "" {
		line += " (" + revision + modified + ")"
	}

	return line + " " + runtime.Version() + " " + runtime.GOOS + "/" + runtime.GOARCH
}
