package headcount_test

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

var (
	// recordedTest is a test in Go: its directory and its function.
	recordedTest = regexp.MustCompile("`([a-z0-9/]+)\\.((?:Test|Fuzz)[A-Za-z0-9]+)`")
	// recordedTitle is a test of the browser client: its file and its title.
	recordedTitle = regexp.MustCompile("`(web/[a-z0-9/-]+\\.test\\.js)`: ([^|]+) \\|")
	// promiseName is a row of the table of names.
	promiseName = regexp.MustCompile(`(?m)^\| ([a-z ]+) \| [a-z]`)
)

// Each fault of the track record names the promise that it broke, and what holds it now, which must exist.
func TestTrackRecordIsTrue(t *testing.T) {
	faults := recordedFaults(t)
	if len(faults) < 60 {
		t.Fatalf("docs/track-record.md has only %d faults: was it read?", len(faults))
	}

	names := promiseNames(t)
	for _, fault := range faults {
		for _, name := range strings.Split(fault.broke, ", ") {
			if name != "–" && !slices.Contains(names, name) {
				t.Errorf("%s: docs/promises.md has no promise %q", fault.seen, name)
			}
		}

		// A fault without a test must say so.
		tests := recordedTest.FindAllStringSubmatch(fault.held, -1)
		titles := recordedTitle.FindAllStringSubmatch(fault.held, -1)
		if len(tests)+len(titles) == 0 && !strings.HasPrefix(fault.held, "none") {
			t.Errorf("%s: neither a test nor \"none\" is named", fault.seen)
		}

		// A code span of another form would not be checked.
		if spans := strings.Count(fault.held, "`") / 2; spans != len(tests)+len(titles) {
			t.Errorf("%s: it has %d code spans, and %d tests", fault.seen, spans, len(tests)+len(titles))
		}

		// The parenthesis belongs to the match: without it, any longer name with this beginning would do.
		for _, test := range tests {
			if !declares(t, test[1]+"/*_test.go", "func "+test[2]+"(t *testing.T) {") {
				t.Errorf("%s: %s has no %s", fault.seen, test[1], test[2])
			}
		}
		for _, test := range titles {
			if !strings.Contains(textOf(t, test[1]), "test('"+test[2]+"'") {
				t.Errorf("%s: %s has no test %q", fault.seen, test[1], test[2])
			}
		}
	}
}

// brokenPromise matches where a simulation reports a broken promise.
var brokenPromise = regexp.MustCompile(`\.(?:Failf|broken)\("([^"]*)", ?`)

// Simulations name promises as docs/promises.md does.
func TestSimulationsNamePromises(t *testing.T) {
	names := append(promiseNames(t), "–")
	for _, files := range []string{"counter/call/*_test.go", "counter/region/*_test.go", "presence/member/*_test.go"} {
		sources, err := filepath.Glob(files)
		if err != nil {
			t.Fatal(err)
		}

		found := 0
		for _, source := range sources {
			for _, broken := range brokenPromise.FindAllStringSubmatch(textOf(t, source), -1) {
				found++
				if !slices.Contains(names, broken[1]) {
					t.Errorf("%s: docs/promises.md has no promise %q", source, broken[1])
				}
			}
		}

		// Once the reports have another form, the expression matches none of them and this test would check nothing.
		if found < 5 {
			t.Errorf("%s name only %d promises: were they read?", files, found)
		}
	}
}

// recordedFault is a row of docs/track-record.md.
type recordedFault struct{ seen, broke, held string }

func recordedFaults(t *testing.T) (faults []recordedFault) {
	t.Helper()
	for line := range strings.Lines(textOf(t, "docs/track-record.md")) {
		// The last cell keeps its closing bar: recordedTitle ends a title there.
		cells := strings.Split(strings.TrimSpace(line), " | ")
		if !strings.HasPrefix(line, "| ") || strings.HasPrefix(line, "| what users saw") {
			continue
		}
		if len(cells) != 4 {
			t.Fatalf("a row has %d cells: %s", len(cells), line)
		}

		seen := strings.TrimPrefix(cells[0], "| ")
		faults = append(faults, recordedFault{seen, cells[2], cells[3]})
	}

	return faults
}

func promiseNames(t *testing.T) (names []string) {
	t.Helper()
	_, table, found := strings.Cut(textOf(t, "docs/promises.md"), "\n| name | promise |")
	if !found {
		t.Fatal("docs/promises.md has no table of names")
	}

	for _, row := range promiseName.FindAllStringSubmatch(table, -1) {
		names = append(names, row[1])
	}

	return names
}

// named matches a function, a method or a script that a model names: its directory, or its file without the ending, and
// its name.
var named = regexp.MustCompile(`\[([a-z]+(?:/\w+)*)\.(?:(\w+)\.)?(\w+)\]`)

// TestModelsNameWhatIsThere: the functions and scripts that the formal models name exist.
func TestModelsNameWhatIsThere(t *testing.T) {
	models, err := filepath.Glob("internal/models/*.pml")
	if err != nil || len(models) == 0 {
		t.Fatal("no models", err)
	}

	for _, model := range models {
		names := named.FindAllStringSubmatch(textOf(t, model), -1)
		if len(names) < 10 {
			t.Errorf("%s names only %d functions", model, len(names))
		}

		for _, name := range names {
			path := name[1]
			of, function := name[2], name[3]
			switch {
			case function == "lua":
				textOf(t, path+".lua") // fails if it is missing
			case of == "":
				if !declares(t, path+"/*.go", "func "+function+"(") {
					t.Errorf("%s: %s has no %s", model, path, function)
				}
			default:
				if !declaresMethod(t, path+"/*.go", of, function) {
					t.Errorf("%s: %s has no %s.%s", model, path, of, function)
				}
			}
		}
	}
}

// declares reports whether one of the files that match a pattern has a line with this beginning.
func declares(t *testing.T, files, line string) bool {
	t.Helper()
	return matches(t, files, "(?m)^"+regexp.QuoteMeta(line))
}

func declaresMethod(t *testing.T, files, of, method string) bool {
	t.Helper()
	return matches(t, files, `(?m)^func \(\w+ \*?`+of+`\) `+method+`\(`)
}

func matches(t *testing.T, files, expression string) bool {
	t.Helper()
	names, err := filepath.Glob(files)
	if err != nil {
		t.Fatal(err)
	}

	wanted := regexp.MustCompile(expression)
	return slices.ContainsFunc(names, func(name string) bool { return wanted.MatchString(textOf(t, name)) })
}

func textOf(t *testing.T, name string) string {
	t.Helper()
	text, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}

	return string(text)
}
