package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/rs/zerolog"

	"headcount/cmd/headcount/config"
	"headcount/cmd/headcount/probe"
	"headcount/internal/servertest"
	"headcount/internal/setting"
	"headcount/internal/testkit"
)

// runCommand runs a command of the program in this process, with nothing in its environment.
func runCommand(t *testing.T, stdin io.Reader, args ...string) (status int, stdout, stderr string) {
	t.Helper()
	return runWith(t, nil, stdin, args...)
}

// runWith is runCommand with variables in the environment.
func runWith(t *testing.T, env map[string]string, stdin io.Reader, args ...string) (status int, stdout, stderr string) {
	t.Helper()
	var out, errs bytes.Buffer
	status = program{args: args, environ: environ(env), stdin: stdin, stdout: &out, stderr: &errs}.run()
	return status, out.String(), errs.String()
}

// environ returns env in the form of os.Environ.
func environ(env map[string]string) (all []string) {
	for name, value := range env {
		all = append(all, name+"="+value)
	}

	return all
}

// runProcess runs a command to its end.
func runProcess(t *testing.T, env []string, name string, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), testkit.Timeout)
	defer cancel()

	cmd := exec.CommandContext(ctx, name, args...)
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	cmd.Env = env

	err := cmd.Run()
	if exit := (*exec.ExitError)(nil); err != nil && !errors.As(err, &exit) {
		t.Fatalf("%s %q: %v", name, args, err)
	}

	return cmd.ProcessState.ExitCode(), out.String(), errs.String()
}

func TestExitStatus(t *testing.T) {
	for name, tc := range map[string]struct {
		args   []string
		env    map[string]string
		code   int
		stdout string // the line begins with stdout
		stderr string // the only line contains stderr
	}{
		"help":          {args: []string{"--help"}, stdout: "Usage: headcount <command>"},
		"help of serve": {args: []string{"serve", "--help"}, stdout: "Usage: headcount serve [flags]"},
		"help despite bad settings": {
			args: []string{"--help"}, env: map[string]string{"HEADCOUNT_LEAVE_GRACE": "x"},
			stdout: "Usage: headcount <command>",
		},
		"version": {args: []string{"version"}, stdout: "headcount "},
		"version beside variables": {
			args: []string{"version"}, env: map[string]string{
				"HEADCOUNT_LEAVE_GRACE": "x", "HEADCOUNT_CONFIG": "/nowhere",
			}, stdout: "headcount ",
		},
		"version of serve": {
			args: []string{"serve", "--version"}, env: map[string]string{"HEADCOUNT_LEAVE_GRACE": "x"},
			stdout: "headcount ",
		},
		"a variable named version": {
			args: []string{"version"}, env: map[string]string{"HEADCOUNT_VERSION": "v1.2.3"}, stdout: "headcount ",
		},
		"unknown command":           {args: []string{"count"}, code: 2, stderr: "count"},
		"argument after a command":  {args: []string{"serve", "now"}, code: 2, stderr: "now"},
		"unknown flag":              {args: []string{"--lisen", ":1"}, code: 2, stderr: "--lisen"},
		"unknown flag of serve":     {args: []string{"serve", "--lisen=:1"}, code: 2, stderr: "--lisen"},
		"unknown short flag":        {args: []string{"-x"}, code: 2, stderr: "-x"},
		"serve flag for another":    {args: []string{"--listen=:1", "version"}, code: 2, stderr: "--listen"},
		"a line break in a setting": {args: []string{"--region", "a\nb\r\nc"}, code: 2, stderr: "--region"},
		"a line break in a command": {args: []string{"a\nb"}, code: 2, stderr: "a b"},
		"simulate, unknown flag":    {args: []string{"simulate", "--usrs=1"}, code: 2, stderr: "--usrs"},
		"healthcheck, nobody there": {
			args: []string{"healthcheck", "--admin-listen=127.0.0.1:1"}, code: 1, stderr: "127.0.0.1:1",
		},
		"healthcheck, no address": {
			args: []string{"healthcheck", "--admin-listen=here"}, code: 1, stderr: "--admin-listen",
		},
	} {
		t.Run(name, func(t *testing.T) {
			code, stdout, stderr := runWith(t, tc.env, nil, tc.args...)
			if code != tc.code {
				t.Errorf("exit status %d, want %d", code, tc.code)
			}

			if !strings.HasPrefix(stdout, tc.stdout) || tc.stdout == "" && stdout != "" {
				t.Errorf("stdout %q, want %q…", stdout, tc.stdout)
			}

			if tc.stderr == "" && stderr != "" {
				t.Errorf("stderr %q, want none", stderr)
			}
			if tc.stderr != "" && (!strings.Contains(stderr, tc.stderr) || strings.Count(stderr, "\n") != 1 ||
				!strings.HasSuffix(stderr, "\n")) {
				t.Errorf("stderr %q, want one line with %q", stderr, tc.stderr)
			}
		})
	}
}

// The server starts, logs once that it serves and once that its key is weak, and ends with status 0.
func TestClockServeUntilSignal(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), testkit.Timeout)
	defer cancel()

	bin, argv, env := helperCommand("serves", "--listen=127.0.0.1:0", "--admin-listen=127.0.0.1:0", "--log-format=json",
		"--api-key=weak", "--api-key=weaker")
	cmd := exec.CommandContext(ctx, bin, argv...)
	cmd.Env = env

	errs, err := cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}

	admin, said := "", ""
	for lines := bufio.NewScanner(errs); lines.Scan(); {
		said += lines.Text() + "\n"
		var line struct{ Admin, Message string }
		if err := json.Unmarshal(lines.Bytes(), &line); err != nil {
			t.Errorf("not a line of JSON: %q", lines.Text())
		}
		admin += line.Admin

		if line.Message != "headcount is serving" {
			continue
		}

		// The server is ready: healthcheck must say so, and then the server must end.
		if err := servertest.Ready(ctx, admin); err != nil {
			t.Error(err)
		}
		if code, _, stderr := runCommand(t, nil, "healthcheck", "--admin-listen", admin); code != 0 {
			t.Errorf("healthcheck: exit status %d, %q", code, stderr)
		}
		if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
			t.Error(err)
		}
	}

	// The log ends with the process.
	cmd.Wait() // ProcessState has the exit status
	if code := cmd.ProcessState.ExitCode(); code != 0 || admin == "" {
		t.Errorf("exit status %d, admin address %q, after:\n%s", code, admin, said)
	}

	for _, once := range []string{"headcount is serving", "--api-key is shorter than 16 bytes"} {
		if n := strings.Count(said, once); n != 1 {
			t.Errorf("it says %d times %q:\n%s", n, once, said)
		}
	}
}

// The log has no addresses of clients, also where the HTTP server writes them into its messages.
func TestTheLogHasNoAddressesOfClients(t *testing.T) {
	for said, want := range map[string]string{
		"http: TLS handshake error from 192.0.2.7:51564: EOF\n": "http: TLS handshake error from …: EOF",
		"http: TLS handshake error from [2001:db8::7%eth0]:1: read tcp [::1]:443->[2001:db8::7%eth0]:1: timeout": "" +
			"http: TLS handshake error from …: read tcp …->…: timeout",
		"http2: server: error reading preface from client 192.0.2.7:1: bogus greeting": "" +
			"http2: server: error reading preface from client …: bogus greeting",
	} {
		var log bytes.Buffer
		httpServer(nil, zerolog.New(&log)).ErrorLog.Print(said)

		var line struct{ Message string }
		if err := json.Unmarshal(log.Bytes(), &line); err != nil || line.Message != want {
			t.Errorf("got %s, %v; want %s", log.String(), err, want)
		}
	}
}

func TestServerHealthcheck(t *testing.T) {
	code := http.StatusOK
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/healthz" {
			t.Errorf("healthcheck asked for %s, want /healthz", r.URL.Path)
		}
		w.WriteHeader(code)
	}))
	defer server.Close()

	addr := server.Listener.Addr().String()
	_, port, _ := strings.Cut(addr, ":")

	// With an address without a host, or for all hosts, healthcheck asks the loopback.
	for _, admin := range []string{addr, ":" + port, "0.0.0.0:" + port} {
		if err := healthcheck(t.Context(), admin); err != nil {
			t.Errorf("%s: %v", admin, err)
		}
	}

	// In a container the settings may be in a file.
	file := writeFile(t, `{"admin-listen":"`+addr+`","update-interval":"1s"}`)
	env := map[string]string{"HEADCOUNT_CONFIG": file}
	if status, _, stderr := runWith(t, env, nil, "healthcheck"); status != exitOK {
		t.Errorf("with a file of settings: status %d, %s", status, stderr)
	}

	code = http.StatusServiceUnavailable
	if err := healthcheck(t.Context(), addr); err == nil || !strings.Contains(err.Error(), "503") {
		t.Errorf("a 503 gives %v, want an error that names it", err)
	}
}

// The tests below run this test binary as the program, with another serve function.

const helperVariable = "TEST_HEADCOUNT_SERVE"

// TestMain runs the program instead of tests when a test runs this binary as the program.
func TestMain(m *testing.M) {
	name, ok := os.LookupEnv(helperVariable)
	if !ok {
		os.Exit(m.Run())
	}

	os.Exit(program{
		args: os.Args[1:], environ: os.Environ(), stdin: os.Stdin, stdout: os.Stdout, stderr: os.Stderr,
		serve: serves[name],
	}.run())
}

var serves = map[string]func(context.Context, config.Server, zerolog.Logger) error{
	"":       func(context.Context, config.Server, zerolog.Logger) error { return nil },
	"serves": serve,
	"fails":  func(context.Context, config.Server, zerolog.Logger) error { return errors.New("the roof is on fire") },
	"refuse": func(context.Context, config.Server, zerolog.Logger) error {
		return setting.Errorf("listen", "no; use another")
	},
	"drains": func(ctx context.Context, _ config.Server, _ zerolog.Logger) error {
		os.Stdout.WriteString("ready\n")
		<-ctx.Done()
		os.Stdout.WriteString("draining\n")
		time.Sleep(10 * time.Millisecond)
		return nil
	},
	"hangs": func(ctx context.Context, _ config.Server, _ zerolog.Logger) error {
		os.Stdout.WriteString("ready\n")
		<-ctx.Done()
		os.Stdout.WriteString("draining\n")
		select {}
	},
	"logs": func(_ context.Context, c config.Server, log zerolog.Logger) error {
		log.Debug().Msg("hidden")
		log.Info().Str("region", c.Region).Msg("shown")
		return nil
	},
}

func helperCommand(serve string, args ...string) (name string, argv, env []string) {
	return os.Args[0], args, testkit.Environ(helperVariable + "=" + serve)
}

func helper(t *testing.T, serve string, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	name, argv, env := helperCommand(serve, args...)
	return runProcess(t, env, name, argv...)
}

func TestServerServeFails(t *testing.T) {
	code, _, stderr := helper(t, "fails")
	if code != 1 || !strings.Contains(stderr, `"level":"error"`) || !strings.Contains(stderr, "the roof is on fire") {
		t.Errorf("exit status %d, stderr %q", code, stderr)
	}

	code, _, stderr = helper(t, "refuse")
	if code != 2 || stderr != "headcount: --listen: no; use another\n" {
		t.Errorf("exit status %d, stderr %q", code, stderr)
	}
}

func TestServerLog(t *testing.T) {
	for format, want := range map[string]string{
		"": `"message":"shown"`, "json": `"message":"shown"`, "console": "INF shown region=local",
	} {
		args := []string{"--jwt-secret", "hunter2"}
		if format != "" {
			args = append(args, "--log-format", format)
		}
		code, stdout, stderr := helper(t, "logs", args...)
		if code != 0 || stdout != "" || !strings.Contains(stderr, want) || strings.Contains(stderr, "hidden") {
			t.Errorf("format %q: exit status %d, stdout %q, stderr %q", format, code, stdout, stderr)
		}

		// A short secret causes a warning, which must not show it.
		if !strings.Contains(stderr, "--jwt-secret is shorter than 16 bytes") || strings.Contains(stderr, "hunter2") {
			t.Errorf("format %q: no warning of a short secret, or the secret itself: %q", format, stderr)
		}
	}

	if _, _, stderr := helper(t, "logs", "--log-level", "debug"); !strings.Contains(stderr, "hidden") {
		t.Errorf("debug is not logged: %q", stderr)
	}
}

func TestClockSignals(t *testing.T) {
	for name, tc := range map[string]struct {
		serve   string
		signals []os.Signal
		code    int
	}{
		"SIGPIPE is none, and SIGTERM drains": {"drains", []os.Signal{syscall.SIGPIPE, syscall.SIGTERM}, 0},
		"a second SIGTERM ends it":            {"hangs", []os.Signal{syscall.SIGTERM, syscall.SIGTERM}, 1},
		"two SIGINT, as from Ctrl-C":          {"hangs", []os.Signal{os.Interrupt, os.Interrupt}, 1},
	} {
		t.Run(name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), testkit.Timeout)
			defer cancel()

			bin, argv, env := helperCommand(tc.serve, "--region", "eu")
			cmd := exec.CommandContext(ctx, bin, argv...)
			cmd.Env = env

			out, err := cmd.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}

			// The helper reports its state on stdout, so that each signal is sent in the right state.
			lines := bufio.NewScanner(out)
			wait := func(want string) {
				if !lines.Scan() || lines.Text() != want {
					t.Errorf("got %q, %v, want %q", lines.Text(), lines.Err(), want)
				}
			}

			wait("ready")
			for i, s := range tc.signals {
				if i == len(tc.signals)-1 && tc.serve == "hangs" {
					wait("draining") // otherwise two signals may arrive as one
				}
				if err := cmd.Process.Signal(s); err != nil {
					t.Error(err)
				}
			}
			for lines.Scan() { // Wait would close the pipe early
			}
			cmd.Wait() // ProcessState has the exit status

			if code := cmd.ProcessState.ExitCode(); code != tc.code {
				t.Errorf("exit status %d, want %d", code, tc.code)
			}
		})
	}
}

func TestVersionLine(t *testing.T) {
	version = "v1.2.3"
	defer func() { version = "" }()
	if got := versionLine(); !strings.HasPrefix(got, "headcount v1.2.3 ") || !strings.Contains(got, " go1.") {
		t.Errorf("the version line is %q", got)
	}
}

// Load balancers that must not lose all gateways at once may begin to ask while the store is away already.
func TestReadyWithoutAStoreThatWasReached(t *testing.T) {
	cfg := settings(t)
	sys, err := newSystem(t.Context(), cfg, listeners{}, zerolog.Nop())
	if err != nil {
		t.Fatal(err)
	}
	defer sys.close()

	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- sys.run(ctx) }()
	defer func() {
		stop()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}()

	admin := adminHandler(ctx, sys, probe.New(cfg.Proxies, cfg.BasePath))
	expect := func(path string, want int) {
		t.Helper()
		w := httptest.NewRecorder()
		admin.ServeHTTP(w, httptest.NewRequest(http.MethodGet, path, nil))
		if w.Code != want {
			t.Errorf("%s: %d %s, want %d", path, w.Code, w.Body, want)
		}
	}

	sys.member.StoreState(false)
	expect("/readyz?exclude=store", http.StatusServiceUnavailable)

	// The process waits until it is ready, as it does to say so in its log. Nobody asks it from outside.
	sys.member.StoreState(true)
	logReady(ctx, sys, zerolog.Nop())

	sys.member.StoreState(false)
	expect("/readyz", http.StatusServiceUnavailable)
	expect("/readyz?exclude=store", http.StatusOK)
}
