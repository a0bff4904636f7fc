// Package models has formal models in Promela of what no test can try in every order. Spin, which Debian has, looks at
// all states of each one.
package models

import (
	"bytes"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"headcount/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// TestServerOwnership: no order of claims, pauses, late messages and clocks that go back breaks an assertion of the
// model, and each planted fault does.
func TestServerOwnership(t *testing.T) {
	for what, setting := range map[string]string{
		"counters": "", "counters whose store loses its tail": "-DLOSS", "presence": "-DPRESENCE",
	} {
		if found := check(t, "ownership.pml", setting); found != "" {
			t.Errorf("%s: %s", what, found)
		}
	}

	for _, faulty := range []string{
		"-DNO_FENCE", "-DCLOCK_ALONE", "-DTAKES_BACK", "-DLOSS -DBACK_AND_LOST",
		"-DPRESENCE -DCLOCK_ALONE", "-DPRESENCE -DNO_NUMBERS", "-DPRESENCE -DFENCE_FALLS",
		"-DPRESENCE -DLATE_AND_AGAIN",
	} {
		if check(t, "ownership.pml", faulty) == "" {
			t.Errorf("%s is not found", faulty)
		}
	}
}

// check looks at every state of a model, and returns the assertion that one of them breaks, or "".
func check(t *testing.T, model, setting string) string {
	t.Helper()
	file, err := filepath.Abs(model)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	run := func(name string, args ...string) []byte {
		t.Helper()
		cmd := exec.Command(name, args...)
		cmd.Dir = dir
		said, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("%s: %v; run make setup if it is missing\n%s", name, err, said)
		}

		return said
	}

	flags := strings.Fields(setting)
	run("spin", append(flags, "-a", file)...)
	// Only assertions are checked, with at most so many MB.
	run("gcc", "-O2", "-w", "-DSAFETY", "-DCOLLAPSE", "-DMEMLIM=3000", "-o", "pan", "pan.c")
	said := run("./pan", "-m100000")

	if broken := regexp.MustCompile(`assertion violated .*`).Find(said); broken != nil {
		return string(broken)
	}
	isWhole := bytes.Contains(said, []byte("errors: 0")) && !bytes.Contains(said, []byte("not completed")) &&
		!bytes.Contains(said, []byte("max search depth too small"))
	if !isWhole {
		t.Fatalf("%s %s was not looked at as a whole:\n%s", model, setting, said)
	}

	return ""
}
