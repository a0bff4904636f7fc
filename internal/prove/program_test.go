package main

import (
	"go/build"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// The patches fit the Go that runs this test. Compiling and running the patched sources takes more CPU time than CI
// has: make replay ARGS='-times 20' compares the traces of a seed.
func TestPatchesFit(t *testing.T) {
	for _, p := range patches {
		text, err := os.ReadFile(filepath.Join(build.Default.GOROOT, "src", p.file))
		if err != nil {
			t.Fatal(err)
		}
		if n := strings.Count(string(text), p.old); n != 1 {
			t.Errorf("%s has the text to patch %d times, want once: %s", p.file, n, p.old)
		}
	}
}
