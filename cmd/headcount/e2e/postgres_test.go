package e2e

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"headcount/counter/pgtest"
	"headcount/internal/testkit"
	"headcount/servertest"
)

// TestPgBouncer: a pooler whose clients have a connection of PostgreSQL each is as good as PostgreSQL. Any other is refused,
// by the server and by the check, in the same words.
func TestPgBouncer(t *testing.T) {
	t.Parallel()
	p := pgtest.Single(t)
	// run is a command that must end.
	run := func(t *testing.T, command string, flags ...string) (status int, out string) {
		ctx, cancel := context.WithTimeout(t.Context(), testkit.Timeout/3)
		defer cancel()
		for _, flag := range []string{"--listen=", "--admin-listen="} {
			flags = append(flags, flag+servertest.FreeAddr())
		}
		cmd := exec.CommandContext(ctx, program, append([]string{command}, flags...)...)
		cmd.Env = slices.DeleteFunc(os.Environ(), func(v string) bool { return strings.HasPrefix(v, "HEADCOUNT_") })
		text, err := cmd.CombinedOutput()
		if exit := (*exec.ExitError)(nil); err != nil && !errors.As(err, &exit) {
			t.Fatal(err)
		} else if exit != nil {
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
				s, direct := startWithKey(t, flag), startWithKey(t, "--postgres="+database)
				look := s.ws(t)
				look.send(`{"type":"subscribe","counters":["views:1"]}`)
				look.awaitCounter("views:1", 0, false)
				for i := range int64(3) {
					if is := direct.call(t, "POST", "views:1/increment", "").lasting(t).Value; is != i+1 {
						t.Errorf("%d after %d increments", is, i+1)
					}
				}
				look.awaitCounter("views:1", 3, false)
				if is := s.exact(t, "views:1"); is != 3 {
					t.Errorf("through the pooler it is %d, want 3", is)
				}
				return
			}
			_, problem, _ := strings.Cut(checked, "wrong  --postgres: ")
			problem, _, _ = strings.Cut(problem, ".\n")
			if status != 1 || !strings.Contains(problem, "pool_mode") || strings.Count(checked, "wrong ") != 1 {
				t.Errorf("the check ends with %d:\n%s", status, checked)
			}
			status, text := run(t, "serve", "--log-format=json", flag)
			if line := "headcount: --postgres: " + problem + "\n"; status != 2 || strings.Count(text, line) != 1 || strings.Contains(text, `"warn"`) {
				t.Errorf("the server ends with %d:\n%s\nwant 2 and %s", status, text, line)
			}
			for _, setting := range []string{"statement_timeout", "enable_seqscan"} { // other clients of the pooler
				if is := pgtest.Query[string](t, strings.TrimPrefix(flag, "--postgres=")+"&default_query_exec_mode=simple_protocol", "show "+setting); is == "10s" || is == "off" {
					t.Errorf("%s is %s for others from then on", setting, is)
				}
			}
		})
	}
}
