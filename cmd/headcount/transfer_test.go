package main

import (
	"bytes"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/rs/zerolog"

	"headcount/counter"
	"headcount/counter/countertest"
	"headcount/counter/local"
	"headcount/counter/transfer"
	"headcount/internal/pgtest"
	"headcount/internal/redistest"
	"headcount/internal/testkit"
	"headcount/presence"
)

var transferred = flag.Int("transferred", 600,
	"counters that TestServerExportAndImport transfers, beside sets and others")

// lines returns an export without its first line, which contains the time.
func lines(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}

	_, rest, _ := bytes.Cut(text, []byte("\n"))
	return string(rest)
}

// An export of a data directory is imported into PostgreSQL, and back: nothing is lost and nothing is added. For a
// million counters: go test ./cmd/headcount -run TestServerExportAndImport -transferred 1000000 -v -timeout 1h
func TestServerExportAndImport(t *testing.T) {
	dir := t.TempDir()
	server := pgtest.Start(t)
	postgres := server.Database(t)
	from, back := filepath.Join(dir, "from"), filepath.Join(dir, "back")

	store, err := local.Open(t.Context(), from, counter.BuiltinRules(), zerolog.Nop())
	if err != nil {
		t.Fatal(err)
	}
	countertest.Fill(t, store, *transferred)
	first, second, third := filepath.Join(dir, "1"), filepath.Join(dir, "2"), filepath.Join(dir, "3")

	status, _, said := runCommand(t, nil, "export", "--data-dir", from, "--file", first)
	if status != exitFailure || !strings.Contains(said, "in use by another process") {
		t.Errorf("while a server uses the directory: status %d, %s", status, said)
	}

	_ = os.Remove(first)
	if err := store.Close(); err != nil {
		t.Fatal(err)
	}

	must := func(args ...string) string {
		t.Helper()
		start := time.Now()
		status, _, said := runCommand(t, nil, args...)
		t.Logf("%s: %s\n%s", args[0], time.Since(start).Round(10*time.Millisecond), said)
		if status != exitOK {
			t.Fatalf("%s: status %d", args, status)
		}
		return said
	}

	// There and back.
	must("export", "--data-dir", from, "--file", first)
	must("import", "--postgres", postgres, "--file", first)
	must("export", "--postgres", postgres, "--file", second)
	must("import", "--data-dir", back, "--file", second)
	must("export", "--data-dir", back, "--file", third)

	want := lines(t, first)
	if n := strings.Count(want, "\n"); n < *transferred {
		t.Fatalf("the export has %d lines, want at least %d", n, *transferred)
	}

	if lines(t, second) != want || lines(t, third) != want {
		t.Error("the exports before and after differ")
	}

	// The same import again changes nothing.
	if said := must("import", "--postgres", postgres, "--file", third); !strings.Contains(said, "were there already") {
		t.Errorf("a second import prints %s", said)
	}
	fourth := filepath.Join(dir, "4")
	must("export", "--postgres", postgres, "--file", fourth)
	if lines(t, fourth) != want {
		t.Error("a second import changed the counters")
	}

	if *transferred > 10_000 {
		return // the rest is about the end of a file
	}

	// An export that was interrupted at any point can be resumed.
	text, err := os.ReadFile(first)
	if err != nil {
		t.Fatal(err)
	}

	cut := filepath.Join(dir, "cut")
	for _, at := range []int{0, 10, len(text) / 3, len(text) / 2, len(text) - 100, len(text) - 1, len(text)} {
		if err := os.WriteFile(cut, text[:at], 0o600); err != nil {
			t.Fatal(err)
		}
		must("export", "--data-dir", back, "--file", cut, "--resume")
		if lines(t, cut) != want {
			t.Errorf("interrupted after %d of %d bytes, the resumed export differs", at, len(text))
		}
	}
}

// An export has the counters of all sites or of one site. An import restores them, or moves them into another site.
func TestExportAndImportOfSites(t *testing.T) {
	dir := t.TempDir()
	at := func(name string) string { return filepath.Join(dir, name) }
	store, err := local.Open(t.Context(), at("from"), counter.BuiltinRules(), zerolog.Nop())
	if err != nil {
		t.Fatal(err)
	}

	shop, blog := presence.SiteOf("shop"), presence.SiteOf("blog")
	rules := counter.BuiltinRules().For([]presence.Site{shop, blog})
	for _, site := range []presence.Site{presence.DefaultSite, shop, blog} {
		for i := range 20 {
			c := counter.Change{
				Key: site.Qualify(fmt.Sprint("views:", i)), Verb: counter.Add, Delta: int64(len(site.String()) + i + 1),
			}
			c.Rule = rules.Find(c.Key)
			if r := store.Apply(t.Context(), []counter.Op{{Changes: []counter.Change{c}}})[0]; r.Err != nil {
				t.Fatal(r.Err)
			}
		}
	}

	if err := store.Close(); err != nil {
		t.Fatal(err)
	}

	must := func(args ...string) {
		t.Helper()
		if status, _, said := runCommand(t, nil, args...); status != exitOK {
			t.Fatalf("%v: status %d: %s", args, status, said)
		}
	}

	// The file has the names of sites, not their internal prefixes.
	must("export", "--data-dir", at("from"), "--file", at("all"))
	all := lines(t, at("all"))
	for site, n := range map[string]int{
		`"site":"shop"`: 20, `"site":"blog"`: 20, `"site":`: 40, `"key":"views:`: 60, `\u001f`: 0,
	} {
		if got := strings.Count(all, site); got != n {
			t.Errorf("the export of all sites has %s %d times, want %d", site, got, n)
		}
	}

	text, err := os.ReadFile(at("all"))
	if err != nil {
		t.Fatal(err)
	}
	for i := range 6 { // interrupted among the counters of each site
		if err := os.WriteFile(at("cut"), text[:len(text)*(i+1)/7], 0o600); err != nil {
			t.Fatal(err)
		}
		must("export", "--data-dir", at("from"), "--file", at("cut"), "--resume")
		if lines(t, at("cut")) != all {
			t.Errorf("interrupted after %d sevenths the export differs", i+1)
		}
	}

	must("import", "--data-dir", at("back"), "--file", at("all"))
	must("export", "--data-dir", at("back"), "--file", at("again"))
	if lines(t, at("again")) != all {
		t.Error("the imported counters differ")
	}

	for _, site := range []string{"shop", "default"} {
		must("export", "--data-dir", at("back"), "--site", site, "--file", at(site))
		one := lines(t, at(site))
		n := strings.Count(one, `"key":`)
		if n != 20 || strings.Contains(one, `"site":"blog"`) ||
			strings.Contains(one, `"site":"shop"`) != (site == "shop") {
			t.Errorf("the export of the site %s is %s", site, one)
		}
	}

	// The counters of a separate server become a site of this one.
	must("import", "--data-dir", at("moved"), "--site", "wiki", "--file", at("default"))
	must("export", "--data-dir", at("moved"), "--file", at("wiki"))
	got := lines(t, at("wiki"))
	want := strings.ReplaceAll(lines(t, at("default")), `{"key":`, `{"site":"wiki","key":`)
	if got != want {
		t.Errorf("counters moved into a site are %s\nwant %s", got, want)
	}

	// Impossible combinations of files and sites.
	for _, args := range [][]string{
		{
			"import", "--data-dir", at("mixed"), "--site", "wiki", "--file", at("all"),
		}, {"export", "--data-dir", at("back"), "--site", "No"}, {
			"import", "--data-dir", at("back"), "--site", "", "--file", at("all"),
		},
	} {
		if status, _, _ := runCommand(t, nil, args...); status == exitOK {
			t.Errorf("%v is accepted, want it refused", args)
		}
	}
}

// After an import was killed halfway, a second import restores everything.
func TestClockImportIsKilled(t *testing.T) {
	dir := t.TempDir()
	url := pgtest.Start(t).Database(t)
	from, file := filepath.Join(dir, "from"), filepath.Join(dir, "file")

	store, err := local.Open(t.Context(), from, counter.BuiltinRules(), zerolog.Nop())
	if err != nil {
		t.Fatal(err)
	}
	countertest.Fill(t, store, 3000)
	if err := store.Close(); err != nil {
		t.Fatal(err)
	}

	if status, _, said := runCommand(t, nil, "export", "--data-dir", from, "--file", file); status != exitOK {
		t.Fatal(said)
	}

	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}

	// The import waits for the rest of the file when it is killed.
	bin, argv, env := helperCommand("", "import", "--postgres", url)
	cmd := exec.CommandContext(t.Context(), bin, argv...)
	cmd.Env = env
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if _, err := in.Write(text[:len(text)*2/3]); err != nil { // the rest is never sent
		t.Fatal(err)
	}
	testkit.Eventually(t, "counters in PostgreSQL", func() bool {
		const is = "select to_regclass('headcount_counters') is not null"
		const some = "select exists (select from headcount_counters where key like 'views:%')"
		return pgtest.Query[bool](t, url, is) && pgtest.Query[bool](t, url, some)
	})

	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()

	status, _, said := runCommand(t, bytes.NewReader(text[:len(text)/2]), "import", "--postgres", url)
	if status != exitFailure || !strings.Contains(said, "it has no end") {
		t.Errorf("a file without its end: status %d, %s", status, said)
	}

	if status, _, said := runCommand(t, bytes.NewReader(text), "import", "--postgres", url); status != exitOK {
		t.Fatal(said)
	}

	status, out, said := runCommand(t, nil, "export", "--postgres", url)
	_, got, _ := strings.Cut(out, "\n")
	if status != exitOK || got != lines(t, file) {
		t.Errorf("after a kill and a second import PostgreSQL differs: status %d, %s", status, said)
	}
}

// Imports into Redis, alone and in front of PostgreSQL, and exports from both.
func TestServerExportsOfRedis(t *testing.T) {
	dir := t.TempDir()
	redis, front := redistest.Start(t), redistest.Start(t)
	pg := pgtest.Start(t)
	from := filepath.Join(dir, "from")
	store, err := local.Open(t.Context(), from, counter.BuiltinRules(), zerolog.Nop())
	if err != nil {
		t.Fatal(err)
	}

	countertest.Fill(t, store, 60)
	if err := store.Close(); err != nil {
		t.Fatal(err)
	}

	must := func(args ...string) {
		t.Helper()
		if status, _, said := runCommand(t, nil, args...); status != exitOK {
			t.Fatalf("%s: %d %s", args, status, said)
		}
	}

	first, second, alone := filepath.Join(dir, "1"), filepath.Join(dir, "2"), filepath.Join(dir, "3")
	postgres := pg.Database(t)

	must("export", "--data-dir", from, "--file", first)
	must("import", "--redis", front.URL(), "--postgres", postgres, "--file", first)
	must("export", "--redis", front.URL(), "--postgres", postgres, "--file", second)

	// Counters get greater incarnations in a Redis that is newer than they are.
	incarnation := regexp.MustCompile(`"version":"\d+-`)
	if incarnation.ReplaceAllString(lines(t, second), "") != incarnation.ReplaceAllString(lines(t, first), "") {
		t.Error("the export of Redis and PostgreSQL differs from their import")
	}

	must("import", "--redis", redis.URL(), "--file", first)
	must("export", "--redis", redis.URL(), "--file", alone)
	is, want := lines(t, alone), lines(t, first)
	if strings.Count(is, `"key"`) != strings.Count(want, `"key"`) || !strings.Contains(is, `"hashes"`) {
		t.Error("the export of Redis alone differs from its import")
	}

	// Redis does not know the names of members: their hashes pass through PostgreSQL unchanged.
	nameless := filepath.Join(dir, "5")
	other := pg.Database(t)
	must("import", "--postgres", other, "--file", alone)
	must("export", "--postgres", other, "--file", nameless)
	if lines(t, nameless) != lines(t, alone) {
		t.Error("the export of PostgreSQL differs from its import from Redis alone")
	}

	// A region has exact counters in PostgreSQL, and all others in Redis.
	region := redistest.Start(t)
	regional := filepath.Join(dir, "4")
	exacts := pg.Database(t)
	must("import", "--regions", "--redis", region.URL(), "--postgres", exacts, "--file", first)
	must("export", "--regions", "--redis", region.URL(), "--postgres", exacts, "--file", regional)
	if lines(t, regional) != lines(t, alone) {
		t.Error("the export of a region differs from its import")
	}
	all := pgtest.Query[int](t, exacts, "select count(*)::int from headcount_counters")
	exact := strings.Count(lines(t, first), `"kind":"exact"`)
	if all != exact || exact == 0 {
		t.Errorf("PostgreSQL has %d counters of a region, of which %d are exact", all, exact)
	}

	// An import is refused while a process has a lease.
	redis.Do(t, "HSET", "hc:{c}:leases", "10.0.0.1:7946",
		fmt.Sprint(time.Now().Add(time.Minute).UnixMilli(), " 1 gateway"))
	status, _, said := runCommand(t, nil, "import", "--redis", redis.URL(), "--file", first)
	if status != exitFailure || !strings.Contains(said, "10.0.0.1:7946") {
		t.Errorf("while a process runs an import gets status %d, %s", status, said)
	}
	redis.Do(t, "DEL", "hc:{c}:leases")

	refused := func(verb, says string) {
		t.Helper()
		status, _, said := runCommand(t, strings.NewReader(""), verb, "--redis", redis.URL())
		if status != exitFailure || !strings.Contains(said, says) {
			t.Errorf("%s: %d %s", verb, status, said)
		}
	}

	redis.Do(t, "HSET", "hc:{c}:facts", "format", "5", "counters", "4", "postgres", "none")
	refused("export", `their format is "4", this one knows 3`)
	refused("import", `their format is "4", this one knows 3`)

	// The counters of an earlier release are not touched. An import writes the new ones to another place, and only
	// a complete import is served.
	redis.Do(t, "HSET", "hc:{c}:facts", "counters", "2")
	refused("export", `their format is "2", this one knows 3`)
	refused("import", "bad file: it is empty")
	if is := redis.Do(t, "HGET", "hc:{c}:facts", "counters"); is != "2" {
		t.Errorf("after a failed import the counters are of format %v", is)
	}

	must("import", "--redis", redis.URL(), "--file", first)
	if is := redis.Do(t, "HGET", "hc:{c}:facts", "counters"); is != "3" {
		t.Errorf("after an import the counters are of format %v", is)
	}

	redis.Do(t, "HSET", "hc:{c}:facts", "postgres", "behind 2")
	refused("export", "give its --postgres, too")
	refused("import", "give its --postgres, too")
}

// A store without regions receives the totals of a region's sums, and those members of its sets that the file contains.
func TestServerImportOfARegion(t *testing.T) {
	const text = `{"format":1,"at":"2030-10-10T12:11:42Z"}
{"key":"likes:1","kind":"members","value":3,"updated":1,"version":"5-4","elsewhere":"0 0 eu/1/3/3/0/0"}
{"key":"likes:2","kind":"members","value":3,"updated":1,"version":"5-4","members":["a"],"elsewhere":"0 0 eu/1/3/2/0/0"}
{"key":"views:1","kind":"sum","value":7,"updated":1,"version":"5-4","elsewhere":"0 0 eu/1/3/3/0/0"}
{"counters":3,"deleted":0}
`
	for name, to := range map[string]transfer.Place{
		"a file": {Dir: t.TempDir()}, "PostgreSQL": {Postgres: pgtest.Start(t).Database(t)},
	} {
		flag := "--data-dir"
		value := to.Dir
		if to.Postgres != "" {
			flag = "--postgres"
			value = to.Postgres
		}

		if status, _, said := runCommand(t, strings.NewReader(text), "import", flag, value); status != exitOK {
			t.Fatalf("%s: %d %s", name, status, said)
		}

		target, err := to.OpenTarget(t.Context(), counter.BuiltinRules())
		if err != nil {
			t.Fatal(err)
		}

		store := target.Restorer.(counter.Store)
		join := counter.Change{
			Key: "likes:1", Rule: counter.BuiltinRules().Find("likes:1"), Verb: counter.Edit, Join: []string{"b"},
		}
		r := store.Apply(t.Context(), []counter.Op{{Changes: []counter.Change{join}}})[0]
		if r.Err != nil || r.Counters[0].Value != 1 {
			t.Errorf("%s: the change of one member returns %+v", name, r)
		}

		// Named members and the totals of sums were imported.
		read, err := store.Read(t.Context(), []string{"likes:1", "likes:2", "views:1"}, "a", 0)
		if err != nil || read[0].Value != 1 || read[1].Value != 1 || !read[1].Mine || read[2].Value != 7 {
			t.Errorf("%s: %+v, %v", name, read, err)
		}

		if err := target.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

// TestServerARegionKeepsWhatIsFromElsewhere: an import keeps what other regions have counted, even if the region has no
// name yet because none of its processes has started.
func TestServerARegionKeepsWhatIsFromElsewhere(t *testing.T) {
	const elsewhere = `"elsewhere":"0 0 eu/1/3/3/0/0"`
	const text = `{"format":1,"at":"2030-10-10T12:11:42Z"}
{"key":"views:1","kind":"sum","value":7,"updated":1,"version":"5-4",` + elsewhere + `}
{"key":"views:2","kind":"sum","value":7,"updated":1,"version":"5-4"}
{"counters":2,"deleted":0}
`
	redis := redistest.Start(t)
	stores := []string{"--regions", "--redis", redis.URL(), "--postgres", pgtest.Single(t).Database(t)}
	redis.Do(t, "HSET", "hc:{c}:facts", "format", "7", "counters", "2") // as after its use by an earlier release

	status, _, said := runCommand(t, strings.NewReader(text), append([]string{"import"}, stores...)...)
	if status != exitOK {
		t.Fatal(said)
	}

	status, out, said := runCommand(t, nil, append([]string{"export"}, stores...)...)
	if status != exitOK || strings.Count(out, elsewhere) != 1 || strings.Count(out, "elsewhere") != 1 {
		t.Errorf("status %d, %s; the export is %s", status, said, out)
	}

	if is := redis.Do(t, "HGET", "hc:{c}:facts", "counters"); is != "3" {
		t.Errorf("after the import the counters are of format %v", is)
	}
}

// An older file also has idempotency keys, which an import skips.
func TestImportOfAnOlderFile(t *testing.T) {
	const text = `{"format":1,"at":"2030-10-10T12:11:42Z"}
{"key":"views:1","kind":"sum","value":7,"updated":1,"version":"5-4"}
{"identities":[{"id":"AAAAAAAAAAAAAAAAAAAAAA","until":4000000000},{"id":"AAAAAAAAAAAAAAAAAAAAAQ","until":4000000000}]}
{"identities":[{"id":"AAAAAAAAAAAAAAAAAAAAAg","until":4000000000}]}
{"counters":1,"deleted":0}
`
	dir := t.TempDir()
	status, _, said := runCommand(t, strings.NewReader(text), "import", "--data-dir", dir)
	if status != exitOK || !strings.Contains(said, "1 counters imported in all") {
		t.Fatalf("the import gets status %d, %s", status, said)
	}

	status, out, said := runCommand(t, nil, "export", "--data-dir", dir)
	if status != exitOK || !strings.Contains(out, `"views:1"`) || strings.Contains(out, "identities") {
		t.Errorf("status %d, %s; the export is %s", status, said, out)
	}
}

func TestFilesThatAreNoExport(t *testing.T) {
	head := `{"format":1,"at":"2030-10-10T12:11:42Z"}` + "\n"
	for name, tc := range map[string]struct{ text, want string }{
		"empty":              {"", "it is empty"},
		"another format":     {`{"format":2}` + "\n", "its format is 2, this version knows 1"},
		"no export":          {"{}\n", "does not begin like an export"},
		"no JSON":            {"hello\n", "not JSON"},
		"no end":             {head, "it has no end"},
		"too few counters":   {head + `{"counters":1,"deleted":0}` + "\n", "its end says 1"},
		"a key that is none": {head + `{"key":"*","kind":"sum","value":1,"version":"1-1"}` + "\n", "bad key"},
		"a kind there isn't": {head + `{"key":"a","kind":"some","value":1,"version":"1-1"}` + "\n", "is not a kind"},
		"no version":         {head + `{"key":"a","kind":"sum","value":1,"version":"0-0"}` + "\n", "not a version"},
		"members missing": {
			head + `{"key":"a","kind":"members","value":2,"version":"1-1","members":["x"]}` + "\n",
			"1 members and the value 2",
		},
		"broken registers": {
			head + `{"key":"a","kind":"unique","value":2,"version":"1-1","registers":"AAAA"}` + "\n", "without a head",
		},
		"a strange line": {head + `{"x":1}` + "\n", "line 2: bad file: a line is neither a counter nor the end"},
		"later": {
			head + `{"key":"good","kind":"sum","value":1,"version":"1-1"}` + "\nhello\n",
			"line 3: bad file: a line is not JSON",
		},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			status, _, said := runCommand(t, strings.NewReader(tc.text), "import", "--data-dir", dir)
			if status != exitFailure || !strings.Contains(said, tc.want) || strings.Count(said, "\n") != 1 {
				t.Errorf("%d %q, want %q", status, said, tc.want)
			}

			_, out, _ := runCommand(t, nil, "export", "--data-dir", dir)
			if good := `"key":"good"`; strings.Contains(tc.text, good) != strings.Contains(out, good) {
				t.Errorf("the import must have exactly the counters before the bad line: %s", out)
			}
		})
	}
}

func TestTransfersThatCannotBe(t *testing.T) {
	dir := t.TempDir()
	there := filepath.Join(dir, "there")
	if err := os.WriteFile(there, nil, 0o600); err != nil {
		t.Fatal(err)
	}

	other := filepath.Join(dir, "other")
	const text = `{"no":"export"}`
	if err := os.WriteFile(other, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}

	store, err := local.Open(t.Context(), dir, counter.BuiltinRules(), zerolog.Nop())
	if err == nil {
		err = store.Close()
	}
	if err != nil {
		t.Fatal(err)
	}

	for name, tc := range map[string]struct {
		args   string
		status int
		want   string
	}{
		"no store":              {"export", exitSettings, "no store is named"},
		"no directory":          {"export --data-dir " + dir + "/none", exitFailure, "no counters to export"},
		"no URL":                {"import --postgres mysql://h", exitSettings, "--postgres"},
		"a region without both": {"export --regions --redis redis://h", exitSettings, "--regions"},
		"nobody answers":        {"export --postgres postgres://u:p@127.0.0.1:1/d", exitFailure, "unavailable"},
		"a file that is there":  {"export --data-dir " + dir + " --file " + there, exitFailure, "exists already"},
		"resume another file": {
			"export --data-dir " + dir + " --file " + other + " --resume", exitFailure, "does not begin like an export",
		},
		"a file there is not":   {"import --data-dir " + dir + " --file " + dir + "/none", exitFailure, "--file"},
		"resume without a file": {"export --data-dir " + dir + " --resume", exitSettings, "--resume"},
		"rules that are none": {
			fmt.Sprintf("import --data-dir %s --file %s --counters %s", dir, there, there), exitSettings, "--counters",
		},
	} {
		t.Run(name, func(t *testing.T) {
			status, _, said := runCommand(t, nil, strings.Fields(tc.args)...)
			if status != tc.status || !strings.Contains(said, tc.want) || strings.Count(said, "\n") != 1 {
				t.Errorf("%d %q, want %d with %q", status, said, tc.status, tc.want)
			}
		})
	}

	if is, err := os.ReadFile(other); err != nil || string(is) != text {
		t.Errorf("an existing file was changed: %q, %v", is, err)
	}
}

// TestServerAnExportMakesNothing: an export changes nothing in PostgreSQL, and creates nothing in a new database.
func TestServerAnExportMakesNothing(t *testing.T) {
	redis, postgres := redistest.Start(t).URL(), pgtest.Single(t).Database(t)
	for _, args := range [][]string{
		{"--postgres", postgres},
		{"--redis", redis, "--postgres", postgres},
		{"--redis", redis, "--postgres", postgres, "--regions"},
	} {
		status, _, said := runCommand(t, nil, append([]string{"export"}, args...)...)
		if status != exitSettings || !strings.Contains(said, "the database has no counters") {
			t.Errorf("export %s: status %d, %s", args, status, said)
		}

		tables := pgtest.Query[int](t, postgres,
			"select count(*)::int from pg_tables where schemaname = current_schema()")
		if tables != 0 {
			t.Errorf("export %s created %d tables, want none", args, tables)
		}
	}
}

// TestServerImportIntoNewStores: after an import into new stores, Redis and PostgreSQL, servers without this PostgreSQL
// are refused, and servers with it start with the imported counters.
func TestServerImportIntoNewStores(t *testing.T) {
	const text = `{"format":1,"at":"2030-10-10T12:11:42Z"}
{"key":"stock:1","kind":"exact","value":10,"updated":1,"version":"5-4"}
{"key":"views:1","kind":"sum","value":7,"updated":1,"version":"5-4"}
{"counters":2,"deleted":0}
`
	redis, postgres := redistest.Start(t).URL(), pgtest.Single(t).Database(t)
	both := []string{"--redis", redis, "--postgres", postgres}
	status, _, said := runCommand(t, strings.NewReader(text), append([]string{"import"}, both...)...)
	if status != exitOK {
		t.Fatal(said)
	}

	// The import has recorded in Redis that PostgreSQL is used.
	startServer(t, "--redis", redis).refused(t, "give this process their --postgres")
	s := startServer(t, both...).ready(t)
	defer s.stop(t)
	if is := s.call(t, "GET", "stock:1/exact", "") + s.call(t, "GET", "views:1/exact", ""); is != 17 {
		t.Errorf("the server's counters add up to %d, want 17", is)
	}
}
