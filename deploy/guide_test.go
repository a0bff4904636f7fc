package deploy_test

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// The guide explains every alert, and says what to do.
func TestGuideHasEveryAlert(t *testing.T) {
	names := func(name, pattern string) (all []string) {
		t.Helper()
		for _, found := range regexp.MustCompile(pattern).FindAllStringSubmatch(string(file(t, name)), -1) {
			all = append(all, found[1])
		}

		return all
	}

	// Three columns, none of them empty.
	guide := names("README.md", "(?m)^\\| `(Headcount[A-Za-z]+)` \\| [^|]{20,} \\| [^|]{20,} \\|$")
	alerts := names("alerts.yaml", `(?m)^ +- alert: (\w+)$`)
	if len(alerts) == 0 || !slices.Equal(guide, alerts) {
		t.Errorf("the guide has  %q,\nalerts.yaml has %q", guide, alerts)
	}
}

// The numbers of formats in the guide are those of the program.
func TestGuideHasEveryFormat(t *testing.T) {
	guide := string(file(t, "README.md"))

	// newest returns the number of the last migration of a package.
	newest := func(pkg string) (n int) {
		migrations, err := filepath.Glob("../" + pkg + "/migrations/*.sql")
		if err != nil || len(migrations) == 0 {
			t.Fatal(pkg, migrations, err)
		}

		if _, err := fmt.Sscanf(filepath.Base(slices.Max(migrations)), "%d_", &n); err != nil {
			t.Fatal(pkg, err)
		}

		return n
	}

	// The row of the guide's table, and where the code has its number.
	for row, source := range map[string]struct{ file, pattern string }{
		"datagrams between processes": {
			"../presence/heartbeat/datagram.go", `(?m)^\tversion += (\d+)$`,
		},
		"calls between processes": {"../presence/rpc/rpc.go", `(?m)^\tformat += (\d+)$`},
		"presence, follows and unread in Redis, and links between regions": {
			"../presence/presenceredis/keyspace.go", `(?m)^\tformatEven += "(\d+)"`,
		},
		"counters in Redis":                {"../counter/cluster/format.go", `(?m)^const Format = (\d+)$`},
		"webhooks in Redis":                {"../webhook/webhookredis/webhookredis.go", `(?m)^const Format = (\d+)$`},
		"tables of rows in PostgreSQL":     {"", fmt.Sprint(newest("internal/rows/rowspg"))},
		"tables of counters in PostgreSQL": {"", fmt.Sprint(newest("counter/exactpg"))},
		"table of pages in PostgreSQL":     {"", fmt.Sprint(newest("presence/pagestable"))},
		"`headcount.db` in `--data-dir`": {
			"../presence/presencemem/disk.go", `(?m)^\tformat += \[\]byte\("(\d+)"\)$`,
		},
		"`counters.db` in `--data-dir`": {
			"../internal/rows/rowsfile/commit.go", `(?m)^\tformat += \[\]byte\("(\d+)"\)$`,
		},
		"`webhooks.db` in `--data-dir`": {
			"../webhook/webhookmem/webhookmem.go", `(?m)^\tformat += \[\]byte\("(\d+)"\)$`,
		},
		"`present` in `--data-dir`": {
			"../presence/presencemem/present.go", `presentMagic = "headcount present (\d+)\\n"`,
		},
		"the file of an export": {"../counter/transfer/transfer.go", `(?m)^const Format = (\d+)$`},
		"frames for browsers":   {"../gateway/conn/clients.go", `"headcount\.v(\d+)"`},
	} {
		number := source.pattern
		if source.file != "" {
			text, err := os.ReadFile(source.file)
			if err != nil {
				t.Fatal(err)
			}

			found := regexp.MustCompile(source.pattern).FindSubmatch(text)
			if found == nil {
				t.Errorf("%s lacks the number of the format", source.file)
				continue
			}

			number = string(found[1])
		}
		if want := "| " + row + " | " + number + " |"; !strings.Contains(guide, want) {
			t.Errorf("the guide lacks %q", want)
		}
	}
}

// The guide says how to replace every secret: each setting that is a secret, contains one, or names the file of one.
func TestGuideRotatesEverySecret(t *testing.T) {
	source, err := os.ReadFile("../cmd/headcount/config/config.go")
	if err != nil {
		t.Fatal(err)
	}

	secrets := []string{"redis", "peer", "postgres", "jwks-url", "tls-key", "domain"}
	for _, found := range regexp.MustCompile(
		"name:\"([a-z-]+)\" type:\"[a-z]+\" placeholder:\"[^\"]*(SECRET|KEY)").FindAllSubmatch(source, -1) {
		secrets = append(secrets, string(found[1]))
	}

	if len(secrets) < 6+5 {
		t.Errorf("only %q were found", secrets)
	}

	_, chapter, _ := strings.Cut(string(file(t, "README.md")), "\n## Rotating secrets\n")
	for _, name := range secrets {
		if !strings.Contains(chapter, "`--"+name+"`") {
			t.Errorf("the guide does not say how to replace --%s", name)
		}
	}
}
