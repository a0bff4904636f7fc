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
	checkAll(t, "ownership.pml",
		[]string{"", "-DLOSS", "-DPRESENCE"},
		[]string{
			"-DNO_FENCE", "-DCLOCK_ALONE", "-DTAKES_BACK", "-DLOSS -DBACK_AND_LOST",
			"-DPRESENCE -DCLOCK_ALONE", "-DPRESENCE -DNO_NUMBERS", "-DPRESENCE -DFENCE_FALLS",
			"-DPRESENCE -DLATE_AND_AGAIN",
		})
}

// TestServerCalls: no order of calls, commits and takeovers makes a stream's change count twice or not at all.
func TestServerCalls(t *testing.T) {
	checkAll(t, "calls.pml",
		[]string{"", "-DMERGED"},
		[]string{
			"-DNO_FENCE", "-DNEW_NUMBER", "-DEARLY", "-DAPART", "-DJUDGED_AGAIN", "-DMERGED -DREFUSAL_FORGOTTEN",
			"-DFULL_ENDS", "-DDRAFT_REUSED", "-DMADE_UNSEEN",
		})
}

// TestServerBehind: no order of commits, drains, evictions, losses and takeovers makes one store lack what the other
// has had.
func TestServerBehind(t *testing.T) {
	checkAll(t, "behind.pml",
		[]string{""},
		[]string{
			"-DNO_UPTO", "-DNO_MARKS", "-DEVICTS_DIRTY", "-DKEEPS_COMPLETE -DCLAIMS=2 -DCOMMITS=3", "-DLOSS_UNSEEN",
			"-DDURABLE_UNFENCED", "-DUNACKNOWLEDGED", "-DLATE_CLAIM", "-DHELD_ON", "-DUNCONFIRMED",
		})
}

// checkAll has a model keep its assertions in each of its settings, and break one with each planted fault.
func checkAll(t *testing.T, model string, settings, faults []string) {
	t.Helper()
	for _, setting := range settings {
		t.Run("model "+setting, func(t *testing.T) {
			t.Parallel()
			if found := check(t, model, setting, "-O1"); found != "" {
				t.Error(found)
			}
		})
	}

	for _, fault := range faults {
		t.Run("planted "+fault, func(t *testing.T) {
			t.Parallel()
			// A fault is found so early that optimising takes longer.
			if check(t, model, fault, "-O0") == "" {
				t.Error("it is not found")
			}
		})
	}
}

// check looks at every state of a model, and returns the assertion that one of them breaks, or "".
func check(t *testing.T, model, setting, optimise string) string {
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
	run("gcc", optimise, "-w", "-DSAFETY", "-DCOLLAPSE", "-DMEMLIM=3000", "-o", "pan", "pan.c")
	said := run("./pan", "-m100000")

	if broken := regexp.MustCompile(`assertion violated .*`).Find(said); broken != nil {
		t.Logf("%s", broken)
		return string(broken)
	}
	isWhole := bytes.Contains(said, []byte("errors: 0")) && !bytes.Contains(said, []byte("not completed")) &&
		!bytes.Contains(said, []byte("max search depth too small"))
	if !isWhole {
		t.Fatalf("%s %s was not looked at as a whole:\n%s", model, setting, said)
	}

	return ""
}
