package client

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// The program of docs/guide.md compiles next to a checkout, in both ways that the guide describes.
func TestServerProgramOfTheGuide(t *testing.T) {
	guide, err := os.ReadFile("../docs/guide.md")
	if err != nil {
		t.Fatal(err)
	}
	_, section, _ := strings.Cut(string(guide), "## From a program in Go\n")
	section, _, _ = strings.Cut(section, "\n## ")

	one := func(pattern string) string {
		t.Helper()
		found := regexp.MustCompile(pattern).FindStringSubmatch(section)
		if found == nil {
			t.Fatalf("the guide has no %s", pattern)
		}
		return found[1]
	}

	program, workspace := one("(?s)```go\n(.*?)```"), one("(?s)```sh\n(.*?)```")
	replaced := one("`(go mod edit [^`]+)`") + "\n" + one("`(go mod tidy)`") + "\n"
	begin, _, _ := strings.Cut(workspace, "\n")

	// Each way runs in an empty directory next to the checkout, as the guide says.
	checkout, err := filepath.Abs("..")
	if err != nil {
		t.Fatal(err)
	}
	for name, commands := range map[string]string{"workspace": workspace, "replace": begin + "\n" + replaced} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			if err := os.Symlink(checkout, filepath.Join(dir, "headcount")); err != nil {
				t.Fatal(err)
			}
			write := "cat >main.go <<'END'\n" + program + "END\n"
			begin, rest, _ := strings.Cut(commands, "\n")
			script := "set -e\n" + begin + "\n" + write + rest + "go vet .\n"

			cmd := exec.Command("sh", "-c", script)
			cmd.Dir, cmd.Env = dir, append(os.Environ(), "GOFLAGS=", "GOWORK=")
			if said, err := cmd.CombinedOutput(); err != nil {
				t.Errorf("%v\n%s", err, said)
			}
		})
	}
}
