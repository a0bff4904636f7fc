package e2e

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"headcount/internal/pgtest"
	"headcount/internal/redistest"
	"headcount/internal/servertest"
	"headcount/internal/testkit"
)

// The flags of the stores.
const (
	aFile     = "--data-dir"
	aDatabase = "--postgres"
	aRedis    = "--redis"
	both      = aRedis + " " + aDatabase
)

// stores maps the flags of the stores to their values in a test.
type stores map[string]string

func (s stores) flags(which string) (flags []string) {
	for _, flag := range strings.Fields(which) {
		flags = append(flags, flag+"="+s[flag])
	}

	return flags
}

// server returns the flags of a server.
func (s stores) server(which string, flags ...string) []string {
	return append(append(s.flags(which), "--cluster-listen="+servertest.FreeAddr()), flags...)
}

func newStores(t *testing.T, which string) stores {
	t.Helper()
	s := stores{aFile: t.TempDir()}
	if strings.Contains(which, aRedis) {
		s[aRedis] = redistest.Start(t).URL()
	}
	if strings.Contains(which, aDatabase) {
		s[aDatabase] = pgtest.Single(t).Database(t)
	}

	return s
}

// TestServerCountersOverAChangeOfStores writes counters of all kinds to a server, and starts others with other stores.
// Such a server has the counters, or it finds them elsewhere and names the command that moves them. Without the first
// store it cannot know of them, but the same command moves them.
func TestServerCountersOverAChangeOfStores(t *testing.T) {
	t.Parallel()
	const keeps, refuses, carried = "keeps", "refuses", "cannot know"
	type target struct{ stores, outcome string }

	// Of the targets of a store, one that keeps the counters is the last: it changes what there is. The refused
	// counters are moved, too, so that each store is exported and imported: an export does not know its target. Redis
	// alone loses only the members of sets, whose names it does not have; the import says so. Without any store there
	// is nothing to keep, or no place for it.
	for from, targets := range map[string][]target{
		aDatabase: {{aFile, carried}, {both, keeps}},
		aRedis:    {{both, keeps}},
		both:      {{aDatabase, refuses}, {aRedis, refuses}, {aFile, carried}},
		aFile: {
			{aFile + " " + aDatabase, refuses}, {aFile + " " + aRedis, refuses}, {aFile + " " + both, refuses},
		},
	} {
		t.Run("from "+from, func(t *testing.T) {
			t.Parallel()
			is := newStores(t, from+both)
			rules := "--counters=" + ruleFile(t)
			s := startWithKey(t, is.server(from, rules)...)
			writeAllKinds(t, s)
			all, want := allKinds(t, s), values(t, s) // an export has no idempotency keys

			// A server that ends waits only 2 s until everything is persisted; an export waits a minute.
			if from == both {
				headcount(t, nil, nil, append([]string{"export"}, is.flags(from)...)...)
			}

			if problem := s.end(); problem != "" {
				t.Fatal(problem)
			}

			for _, to := range targets {
				what := from + " then " + to.stores
				if to.outcome == keeps {
					awaitCounters(t, what, startWithKey(t, is.server(to.stores, rules)...), allKinds, all)
					continue
				}

				if to.outcome == refuses {
					endsWith(t, "headcount export --", is.server(to.stores)...)
				}

				into := newStores(t, to.stores)
				stores := strings.TrimPrefix(to.stores, aFile+" ")
				var exported bytes.Buffer
				headcount(t, nil, &exported, append([]string{"export"}, is.flags(from)...)...)
				headcount(t, &exported, nil, append([]string{"import", rules}, into.flags(stores)...)...)
				awaitCounters(t, what, startWithKey(t, into.server(stores, rules)...), values, want)
			}
		})
	}
}

// awaitCounters waits until a server has what it should.
func awaitCounters(t *testing.T, what string, s *server, read func(*testing.T, *server) string, want string) {
	t.Helper()
	got := ""
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("%s: it has\n%s\nwant\n%s", what, got, want)
		}
	})

	testkit.Eventually(t, what+": all that there was", func() bool {
		got = read(t, s)
		return got == want
	})
}

// writeAllKinds writes counters of all kinds. After that, allKinds always returns the same.
func writeAllKinds(t *testing.T, s *server) {
	t.Helper()
	for _, c := range [][3]string{
		{"POST", "views:1/increment", `{"delta":1000}`},
		{"POST", "views:1/adjust", `{"delta":-1,"reason":"r","by":"b"}`},
		{"POST", "sales:1/increment", `{"delta":5,"dimensions":{"country":"de"}}`},
		{"POST", "likes:1/members", `{"add":["ann","bob"]}`},
		{"POST", "visitors:1/members", `{"add":["x","y","z"]}`},
		{"POST", "stock:1/increment", `{"delta":10}`},
	} {
		if a := s.call(t, c[0], c[1], c[2]); a.status != http.StatusOK {
			t.Fatalf("%s: %d %s", c[1], a.status, a.body)
		}
	}

	s.call(t, "POST", "stock:1/decrement", `{"delta":4}`, withKey, "Idempotency-Key: once").lasting(t)
	s.call(t, "POST", "views:1/increment", "", withKey, "Idempotency-Key: once").lasting(t)

	testkit.Eventually(t, "the windows", func() bool { return strings.Contains(values(t, s), `"value":1001}`) })
}

// values returns everything about these counters, as text.
func values(t *testing.T, s *server) string {
	t.Helper()
	var text strings.Builder
	for _, key := range []string{"views:1", "sales:1", "likes:1", "visitors:1", "stock:1"} {
		var is struct{ Value int64 }
		a := s.call(t, "GET", key+"/exact", "")
		if json.Unmarshal([]byte(a.body), &is) != nil || a.status != http.StatusOK {
			t.Fatalf("%s: %d %s", key, a.status, a.body)
		}
		fmt.Fprintln(&text, key, is.Value, s.ledger(t, key))
	}

	for _, path := range []string{
		"views:1/window?last=12h", "visitors:1/window?last=12h", "sales:1/dimensions/country",
	} {
		fmt.Fprintln(&text, path, s.call(t, "GET", path, "").body)
	}

	for _, member := range []string{"ann", "eve"} {
		fmt.Fprintln(&text, member, *s.call(t, "GET", "likes:1/members/"+member, "").lasting(t).Member)
	}

	return text.String()
}

// allKinds returns values and the answers to repeated calls under an idempotency key.
func allKinds(t *testing.T, s *server) string {
	t.Helper()
	var text strings.Builder
	text.WriteString(values(t, s))

	for _, path := range []string{"stock:1/decrement", "views:1/increment"} {
		a := s.call(t, "POST", path, "", withKey, "Idempotency-Key: once")
		replay := a.status == http.StatusOK && a.header.Get("Idempotent-Replay") == "true"
		fmt.Fprintln(&text, path, replay, a.lasting(t).Value)
	}

	return text.String()
}

// TestServerDamagedFiles: a server with a damaged file in its data directory ends with one sentence that names the
// file, and leaves the file unchanged.
func TestServerDamagedFiles(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	flags := []string{"--data-dir=" + dir, "--counters=" + ruleFile(t)}
	s := startWithKey(t, flags...)

	writeAllKinds(t, s)
	for i := range 100 {
		s.call(t, "POST", fmt.Sprintf("likes:%d/members", i), `{"add":["`+strings.Repeat("x", 200)+`"]}`)
		do(t, "PUT", s.url+fmt.Sprintf("/-/me/follows/page%d", i), "")
	}

	if problem := s.end(); problem != "" {
		t.Fatal(problem)
	}

	page := os.Getpagesize()
	for _, name := range []string{"headcount.db", "counters.db"} {
		path := filepath.Join(dir, name)
		whole, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}

		for what, text := range map[string][]byte{
			// bbolt may reserve half of the file beyond its last page, which nobody would miss.
			"empty": {}, "cut off": whole[:3*page],
			"odd":       slices.Concat(whole[:2*page], bytes.Repeat([]byte("odd "), len(whole)/4-page/2)),
			"zeroed":    slices.Concat(whole[:2*page], make([]byte, len(whole)-2*page)),
			"another's": bytes.Repeat([]byte("no database"), 500),
		} {
			if err := os.WriteFile(path, text, 0o600); err != nil {
				t.Fatal(err)
			}

			if text := endsWith(t, path, flags...); !strings.Contains(text, "put a copy of it in its place") {
				t.Errorf("%s, %s: it does not say what to do:\n%s", name, what, text)
			}

			if left, err := os.ReadFile(path); err != nil || !bytes.Equal(left, text) {
				t.Errorf("%s, %s: it is %d bytes now, %v", name, what, len(left), err)
			}
		}

		if err := os.WriteFile(path, whole, 0o600); err != nil {
			t.Fatal(err)
		}
	}

	if got := allKinds(t, startWithKey(t, flags...)); !strings.Contains(got, "views:1 1000") {
		t.Errorf("with the files as they were: %s", got)
	}
}

// endsWith starts a server that must end by itself with one line that contains says, and returns its output.
func endsWith(t *testing.T, says string, flags ...string) (text string) {
	t.Helper()
	s, err := spawn(flags...)
	text = fmt.Sprint(err)
	if err == nil {
		defer s.Signal(syscall.SIGKILL)
		testkit.Eventually(t, "it ends", func() bool {
			select {
			case <-s.Ended():
				return true
			default:
			}

			if s.ready() {
				t.Fatalf("it is ready with %q", flags)
			}

			return false
		})

		text = s.log.String()
	}

	if strings.Count(text, says) != 1 {
		t.Errorf("%q: it says\n%s\nwant one line with %q", flags, text, says)
	}

	return text
}

// headcount runs a command, which must succeed.
func headcount(t *testing.T, in, out *bytes.Buffer, args ...string) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), program, args...)
	var said bytes.Buffer
	cmd.Stderr = &said

	if in != nil {
		cmd.Stdin = in
	}
	if out != nil {
		cmd.Stdout = out
	}

	if err := cmd.Run(); err != nil {
		t.Fatalf("%q: %v\n%s", args, err, &said)
	}
}
