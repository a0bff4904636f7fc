package flags

import (
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"headcount/internal/setting"
)

type common struct {
	Listen  string        `type:"text" placeholder:"ADDR" default:":80" group:"net" help:"Where it listens."`
	Timeout time.Duration `default:"2s" help:"How long it waits."`
	Names   []string      `help:"Who is meant."`
	Numbers []int         `name:"n" help:"Which ones."`
	Share   float64
	Seed    uint64
	Retries int
	Quiet   bool   `help:"Say nothing."`
	Kept    string `flag:"-"`
}

type run struct {
	ConfigFile string `name:"config" hidden:""`
	PublicURL  string `help:"Where others find it."`
	Common     common `embed:""`
	where
	applied bool
}

type where struct {
	Directory string `env:"-" help:"Where it is."`
}

func (r *run) AfterApply() error {
	r.applied = true
	switch {
	case r.Common.Listen == "NOWHERE":
		return errors.New("it cannot be")
	case r.Common.Retries == 7:
		return setting.Errorf("retries", "it is 7; write 8")
	}
	return nil
}

func (r *run) Help() string { return "More of it." }

type program struct {
	Run   run      `cmd:"" default:"" help:"Run it."`
	Other struct{} `cmd:"" help:"Do something else."`
	Inner struct{} `cmd:"" hidden:"" help:"Nobody asks for it."`
}

// parse reads a command line over an environment and a file.
func parse(t *testing.T, p *program, out io.Writer, args ...string) (*Command, error) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "settings.json")
	if err := os.WriteFile(file, []byte(`{"seed":"8","share":"0.5","directory":"elsewhere"}`), 0o600); err != nil {
		t.Fatal(err)
	}

	s := Set{
		Name: "p", Description: "What it is.", Version: "p 1", Out: out, Groups: []Group{{"net", "Network"}},
		Variables: map[string]string{
			"P_CONFIG": file, "P_SEED": "7", "P_TIMEOUT": "", "P_DIRECTORY": "nowhere", "P_QUIET": "true",
		},
	}

	s.Add(p)
	return s.Parse(args)
}

func TestParse(t *testing.T) {
	var p program
	c, err := parse(t, &p, nil, "--public-url", "--dashes", "--directory=d", "--listen=a=b", "--names=x,y", "--names",
		"z", "--n", "-1", "--quiet", "--timeout", "1m", "--retries=3")
	if err != nil || c.Name != "run" {
		t.Fatal(c, err)
	}

	got := p.Run
	got.ConfigFile = "" // the path is random
	got.ConfigFile = ""
	want := run{PublicURL: "--dashes", where: where{"d"}, applied: true, Common: common{
		Listen: "a=b", Timeout: time.Minute, Names: []string{"x", "y", "z"}, Numbers: []int{-1}, Share: 0.5, Seed: 7,
		Retries: 3, Quiet: true,
	}}

	if !reflect.DeepEqual(got, want) {
		t.Errorf("got  %+v\nwant %+v", got, want)
	}

	// Defaults, and flags on both sides of the command.
	p = program{}
	if c, err := parse(t, &p, nil); err != nil || c.Name != "run" || p.Run.Common.Listen != ":80" ||
		p.Run.Common.Timeout != 2*time.Second || p.Run.Common.Quiet || p.Run.Directory != "elsewhere" {
		t.Errorf("%v, %v: the defaults are %+v", c, err, p.Run)
	}

	if c, err := parse(t, &p, nil, "--listen", "x", "run", "--quiet"); err != nil || c.Name != "run" ||
		p.Run.Common.Listen != "x" || !p.Run.Common.Quiet {
		t.Errorf("%v, %v: the command behind its flags is read as %+v", c, err, p.Run)
	}
	if c, err := parse(t, &p, nil, "other"); err != nil || c.Name != "other" {
		t.Errorf("the command other is read as %v, %v", c, err)
	}
}

// A variable often ends with a newline, as one made of a file or by echo does. Only a secret may have it on purpose.
func TestWhiteSpaceAroundVariables(t *testing.T) {
	type command struct {
		URL    string `name:"url" type:"text"`
		Secret string `type:"secret"`
		Most   int    `type:"number"`
	}

	parse := func(url string) (command, error) {
		var p struct {
			Run command `cmd:"" default:""`
		}
		s := Set{Name: "p", Variables: map[string]string{"P_URL": url, "P_SECRET": " a b\n", "P_MOST": "7\n"}}
		s.Add(&p)
		_, err := s.Parse(nil)

		return p.Run, err
	}

	got, err := parse(" redis://h\n")
	if want := (command{"redis://h", " a b\n", 7}); err != nil || got != want {
		t.Errorf("got %+v, %v; want %+v", got, err, want)
	}

	// A variable with white space alone was meant to have something.
	if got, err := parse("\n"); err == nil || !strings.Contains(err.Error(), "it is empty") {
		t.Errorf("a variable with white space alone gives %+v, %v", got, err)
	}
}

// An argument without a flag may be given once.
func TestValueThatStandsAlone(t *testing.T) {
	type command struct {
		Page  string `arg:"" help:"The page."`
		Quiet bool   `help:"Say nothing."`
	}

	for args, want := range map[string]string{
		"show a/b": "a/b", "show --quiet a": "a", "show a --quiet": "a", "show --page=a": "a", "show": "",
		"show a b": "unexpected argument b", "show --page=a b": "unexpected argument b",
	} {
		var p struct {
			Show command `cmd:""`
		}

		s := Set{Name: "p"}
		s.Add(&p)

		_, err := s.Parse(strings.Fields(args))
		refused := err != nil && strings.HasPrefix(err.Error(), want) && want != ""
		if !refused && (err != nil || p.Show.Page != want) {
			t.Errorf("%s: %q, %v; want %s", args, p.Show.Page, err, want)
		}
	}
}

func TestRefused(t *testing.T) {
	for args, want := range map[string]string{
		"nothing":                   "unexpected argument nothing; the commands are run, other",
		"run now":                   "unexpected argument now",
		"--quiet run run":           "the command run comes after --quiet",
		"--lisen=1":                 `unknown flag --lisen; did you mean "--listen"?`,
		"--something=1":             "unknown flag --something",
		"-x":                        "unknown flag -x",
		"other --listen=1":          "unknown flag --listen",
		"--listen 1 other":          "the command other comes after --listen",
		"--listen":                  "--listen: its value is missing; write --listen=VALUE",
		"--listen --quiet":          "--listen: its value is missing before --quiet",
		"--listen --help":           "--listen: its value is missing before --help",
		"--listen=":                 "--listen: it is empty",
		"--listen=NOWHERE":          "it cannot be; see p run --help",
		"--retries=7":               "--retries: it is 7; write 8",
		"--timeout soon":            "--timeout: it is not a duration",
		"--n 1,b":                   "--n: it is not a whole number",
		"--share much":              "--share: it is not a number",
		"--seed -1":                 "--seed: it is not a whole number from 0",
		"--quiet=maybe":             "--quiet: it is neither",
		"help nothing":              "unexpected argument nothing",
		"help run more":             "unexpected argument more",
		"--kept=1":                  "unknown flag --kept",
		"--checked=1":               "unknown flag --checked",
		"--config .":                "--config: read .: is a directory; name a file that can be read",
		"--retries=x --public-url=": "--retries",
	} {
		var p program
		_, err := parse(t, &p, nil, strings.Fields(args)...)
		if err == nil || !strings.HasPrefix(err.Error(), want) {
			t.Errorf("%s: got %v, want %s", args, err, want)
		}
	}
}

func TestHelp(t *testing.T) {
	for _, tc := range []struct {
		args string
		want []string // lines
		not  string
	}{
		{
			"--help", []string{
				"Usage: p <command> [flags]", "What it is.", "  run [flags]", "    Do something else.",
			}, "inner",
		},
		{"-h", []string{"Usage: p <command> [flags]"}, "listen"},
		{"help", []string{"Usage: p <command> [flags]"}, "inner"},
		{"help run", []string{"Usage: p run [flags]"}, "Do something else"},
		{"help run --help", []string{"Usage: p run [flags]"}, "Do something else"},
		{"help help", []string{"Usage: p <command> [flags]"}, "inner"},
		{"help --help", []string{"Usage: p <command> [flags]"}, "inner"},
		{"run --timeout=x --help", []string{
			"Usage: p run [flags]", "More of it.", "      --public-url=    Where others find it.",
			"      --timeout=2s     How long it waits. Default 2s.",
			"      --names=,...     Who is meant.", "      --quiet          Say nothing.", "Network",
			"  --listen=ADDR    Where it listens. Default :80.",
		}, "kept"},
		{"--version", []string{"p 1"}, "Usage"},
		{"other --version", []string{"p 1"}, "Usage"},
	} {
		var out bytes.Buffer
		var p program
		_, err := parse(t, &p, &out, strings.Fields(tc.args)...)
		if !errors.Is(err, ErrShown) {
			t.Errorf("%s: %v", tc.args, err)
		}

		// Whole lines are compared, so that the columns must be right, too.
		lines := strings.Split(out.String(), "\n")
		for _, want := range tc.want {
			if !slices.Contains(lines, want) {
				t.Errorf("%s: no line %q in\n%s", tc.args, want, out.String())
			}
		}

		if strings.Contains(out.String(), tc.not) {
			t.Errorf("%s: %q is in\n%s", tc.args, tc.not, out.String())
		}
	}
}

func TestLongLinesAreBroken(t *testing.T) {
	got := wrapped(strings.Repeat("word ", 20)+"\n\nand a "+strings.Repeat("x", 100), "    ")
	for line := range strings.Lines(got) {
		if len(strings.TrimSpace(line)) > 100 || len(line) > width+1 && !strings.Contains(line, "xxx") {
			t.Errorf("%q is too long", line)
		}
	}

	if strings.Join(strings.Fields(got), " ") != strings.TrimSpace(strings.Repeat("word ", 20))+" and a "+
		strings.Repeat("x", 100) {
		t.Errorf("words are lost in %q", got)
	}
}
