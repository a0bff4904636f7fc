// Package models has formal models in Promela of protocols that no test can try in every order. The checker Spin, which
// Debian has, explores all states of each model.
package models

import (
	"bytes"
	"fmt"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sync/errgroup"

	"headcount/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// TestServerOwnership: no order of claims, pauses, late messages and clocks that go back breaks an assertion of the
// model. Each planted fault breaks one.
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
// one has had.
func TestServerBehind(t *testing.T) {
	checkAll(t, "behind.pml",
		[]string{"", "-DFINE -DCOMMITS=1"},
		[]string{
			"-DNO_UPTO", "-DNO_MARKS", "-DEVICTS_DIRTY", "-DKEEPS_COMPLETE -DCLAIMS=2 -DCOMMITS=3", "-DLOSS_UNSEEN",
			"-DDURABLE_UNFENCED", "-DUNACKNOWLEDGED", "-DLATE_CLAIM", "-DHELD_ON", "-DUNCONFIRMED",
		})
}

// checkAll checks that a model keeps its assertions in each setting, and breaks one with each planted fault. It is a
// single test, because nothing in it depends on time.
func checkAll(t *testing.T, model string, settings, faults []string) {
	t.Helper()
	var all errgroup.Group
	all.SetLimit(runtime.GOMAXPROCS(0))

	for _, setting := range settings {
		all.Go(func() error {
			broken, err := check(t.TempDir(), model, setting, "-O1")
			if broken != "" {
				t.Errorf("%s %s: %s", model, setting, broken)
			}
			return err
		})
	}

	for _, fault := range faults {
		all.Go(func() error {
			// A fault is found so soon that optimization would take longer.
			broken, err := check(t.TempDir(), model, fault, "-O0")
			if err == nil && broken == "" {
				t.Errorf("%s %s: the planted fault is not found", model, fault)
			}
			return err
		})
	}

	if err := all.Wait(); err != nil {
		t.Fatal(err)
	}
}

// check explores every state of a model in an empty directory. It returns the assertion that one of them breaks, or "".
func check(dir, model, setting, optimise string) (broken string, err error) {
	file, err := filepath.Abs(model)
	if err != nil {
		return "", err
	}

	var said []byte
	commands := [][]string{
		append(append([]string{"spin"}, strings.Fields(setting)...), "-a", file),
		// Only assertions are checked, within this much memory.
		{"gcc", optimise, "-w", "-DSAFETY", "-DMEMLIM=3000", "-o", "pan", "pan.c"},
		{"./pan", "-m100000"},
	}
	for _, command := range commands {
		cmd := exec.Command(command[0], command[1:]...)
		cmd.Dir = dir
		if said, err = cmd.CombinedOutput(); err != nil {
			return "", fmt.Errorf("%s: %w; run make setup if it is missing\n%s", command[0], err, said)
		}
	}

	if broken := regexp.MustCompile(`assertion violated .*`).Find(said); broken != nil {
		return string(broken), nil
	}
	isWhole := bytes.Contains(said, []byte("errors: 0")) && !bytes.Contains(said, []byte("not completed")) &&
		!bytes.Contains(said, []byte("max search depth too small"))
	if !isWhole {
		return "", fmt.Errorf("%s %s was not explored completely:\n%s", model, setting, said)
	}

	return "", nil
}
