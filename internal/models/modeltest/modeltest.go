// Package modeltest makes Spin search for a run of a formal model that does the same as a simulation has done. Only
// tests import it.
package modeltest

import (
	"bytes"
	"fmt"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// Follower is the path of a program that searches a model for a run like a trace: see trace.h.
type Follower string

// New builds the program from the model in a file, with its settings. Build it once for all traces: compiling it takes
// longer than following a hundred of them.
func New(t *testing.T, model string, settings ...string) Follower {
	t.Helper()
	model, err := filepath.Abs(model)
	if err != nil {
		t.Fatal(err)
	}

	dir := t.TempDir()
	for _, args := range [][]string{
		slices.Concat([]string{"spin", "-DTRACE"}, settings, []string{"-a", model}),
		{"gcc", "-w", "-DSAFETY", "-DNOREDUCE", "-DVECTORSZ=4096", "-o", "pan", "pan.c"},
	} {
		cmd := exec.Command(args[0], args[1:]...)
		cmd.Dir = dir
		if said, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%s: %v; run make setup if it is missing\n%s", args[0], err, said)
		}
	}

	return Follower(filepath.Join(dir, "pan"))
}

// Bit returns a bool as the text of a trace has it.
func Bit(is bool) int {
	if is {
		return 1
	}

	return 0
}

var (
	followed = regexp.MustCompile(`trace: \d+ of \d+ events`)
	isWhole  = regexp.MustCompile(`assertion violated .*event\[0\]!=254`)
)

// Follow reports whether a trace is a run of the model. If not, the first far of its events are one. The text has a
// line for each event.
func (f Follower) Follow(t *testing.T, text string) (isRun bool, far int) {
	t.Helper()
	cmd := exec.Command(string(f), "-m100000", "-w18")
	cmd.Dir = filepath.Dir(string(f)) // where it writes the run that it finds
	cmd.Stdin = strings.NewReader(text)
	said, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, said)
	}

	of := 0
	_, err = fmt.Sscanf(string(followed.Find(said)), "trace: %d of %d events", &far, &of)
	if lines := strings.Count(text, "\n"); err != nil || of != lines {
		t.Fatalf("%d events were not read:\n%s", lines, said)
	}
	if isWhole.Match(said) {
		return true, far
	}
	if !bytes.Contains(said, []byte("errors: 0")) || bytes.Contains(said, []byte("max search depth too small")) {
		t.Fatalf("an assertion of the model is broken, or the search was not complete:\n%s", said)
	}

	return false, far
}

// Traces are the traces of a simulation, whose actions are of type A. In its world, of type W, faults can be planted.
type Traces[A, W any] struct {
	Model Follower
	Of    func(seed uint64, plant ...func(W)) [][]A // returns the traces of a seed
	Text  func(trace []A) string
	Name  func(A) string // of the kind of an action
	// Pair returns the index of an action that may neither be missing nor change places with the next one.
	Pair func(trace []A) int
}

// Follow checks that the traces of seeds are runs of the model, and that they are none when an action is missing or two
// have changed places. must are kinds of actions, each of which must be in some trace.
func (s *Traces[A, W]) Follow(t *testing.T, seeds uint64, must []string) {
	t.Helper()
	seen := map[string]int{}
	for seed := uint64(1); seed <= seeds; seed++ {
		for _, trace := range s.Of(seed) {
			if isRun, far := s.follow(t, trace); !isRun {
				t.Errorf("seed %d: no run after %d of %d actions: %+v", seed, far, len(trace), trace[far])
			}
			for _, one := range trace {
				seen[s.Name(one)]++
			}

			i := s.Pair(trace)
			if isRun, _ := s.follow(t, slices.Delete(slices.Clone(trace), i, i+1)); isRun {
				t.Errorf("seed %d: the trace without %+v is a run, too", seed, trace[i])
			}
			trace[i], trace[i+1] = trace[i+1], trace[i]
			if isRun, _ := s.follow(t, trace); isRun {
				t.Errorf("seed %d: the trace with %+v after the next action is a run, too", seed, trace[i+1])
			}
		}
	}

	t.Log(seen)
	for _, what := range must {
		if seen[what] == 0 {
			t.Errorf("no trace has an action %s", what)
		}
	}
}

// Refuse checks that each planted fault leads to a trace that is no run of the model.
func (s *Traces[A, W]) Refuse(t *testing.T, faults map[string]func(W)) {
	t.Helper()
	for name, plant := range faults {
		found := false
		for seed := uint64(1); !found && seed <= 20; seed++ {
			for _, trace := range s.Of(seed, plant) {
				isRun, _ := s.follow(t, trace)
				found = found || !isRun
			}
		}
		if !found {
			t.Errorf("all traces with %s are runs of the model", name)
		}
	}
}

func (s *Traces[A, W]) follow(t *testing.T, trace []A) (isRun bool, far int) {
	t.Helper()

	return s.Model.Follow(t, s.Text(trace))
}
