package testkit

import (
	"fmt"
	"os"
	"time"

	"go.uber.org/goleak"

	"headcount/internal/marks"
)

// Main runs the tests of a package, calls stop to end the servers that they share, and exits. It fails when a goroutine
// is still left after Timeout. Some end late, such as that of go-redis that sleeps for a second after a failed dial.
func Main(m interface{ Run() int }, stop ...func()) {
	code := m.Run()
	for _, s := range stop {
		s()
	}
	marks.Report(os.Stdout)

	// A failed test may have left goroutines, but its own message is what matters.
	if code == 0 {
		start := time.Now()
		left := goleak.Find()
		for left != nil && time.Since(start) < Timeout {
			left = goleak.Find()
		}
		if left != nil {
			fmt.Fprintln(os.Stderr, left)
			code = 1
		}
	}

	os.Exit(code)
}
