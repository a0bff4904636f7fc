package scripts

import (
	"io/fs"
	"regexp"
	"slices"
	"strings"
	"testing"
)

var includes = regexp.MustCompile(`(?m)^` + include + `(\S+)\n`)

// TestEveryFileIsAScriptOrIncluded compares the list of script names with the files.
func TestEveryFileIsAScriptOrIncluded(t *testing.T) {
	all, err := fs.Glob(files, "*.lua")
	if err != nil {
		t.Fatal(err)
	}

	included := map[string]bool{"mark.lua": true}
	for _, name := range slices.Concat(Presence, Webhooks, Rows) {
		for _, m := range includes.FindAllStringSubmatch(read(string(name)+".lua"), -1) {
			included[m[1]] = true
		}
	}

	for _, file := range all {
		name, _ := strings.CutSuffix(file, ".lua")
		if slices.Contains(slices.Concat(Presence, Webhooks, Rows), Name(name)) == included[file] {
			t.Errorf("%s is neither a script nor included, or both", file)
		}
		if includes.MatchString(read(file)) && included[file] {
			t.Errorf("%s is included and includes another", file)
		}
	}

	if n := len(all) - len(included); n != len(Presence)+len(Webhooks)+len(Rows) {
		t.Errorf("%d names for %d scripts", len(Presence), n)
	}
}

// TestOneEnvelope: only publish.lua builds what is published.
func TestOneEnvelope(t *testing.T) {
	for _, name := range slices.Concat(Presence, Webhooks, Rows) {
		own := read(string(name) + ".lua")
		source := name.Source()
		if includes.MatchString(source) {
			t.Errorf("%s has an include that was not resolved", name)
		}

		for i, line := range strings.Split(own, "\n") {
			if code, _, _ := strings.Cut(line, "--"); strings.Contains(code, "PUBLISH") ||
				strings.Contains(code, `'publications'`) {
				t.Errorf("%s.lua:%d: %q builds a publication, which only publish.lua may do", name, i+1, line)
			}
		}

		if publishes, included := strings.Contains(own, "publish("), strings.Contains(own,
			"--#include publish.lua"); publishes && !included {
			t.Errorf("%s publishes without publish.lua", name)
		}
	}
}
