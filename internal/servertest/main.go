package servertest

import (
	"fmt"
	"os"
	"testing"

	"go.uber.org/goleak"
)

// Main runs the tests of a package, ends the servers that they share, and exits. It
// fails when a goroutine is left.
func Main(m *testing.M, stop ...func()) {
	code := m.Run()
	for _, s := range stop {
		s()
	}
	if err := goleak.Find(); err != nil && code == 0 {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}
