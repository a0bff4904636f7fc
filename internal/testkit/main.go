package testkit

import (
	"fmt"
	"os"
	"time"

	"go.uber.org/goleak"

	"headcount/internal/marks"
)

// Main runs the tests of a package, ends the servers that they share, and exits. It
// fails when a goroutine is left after Timeout: some end late, such as one of go-redis
// that sleeps for a second after each dial that failed.
func Main(m interface{ Run() int }, stop ...func()) {
	code := m.Run()
	for _, s := range stop {
		s()
	}
	// After the servers have ended, which may still reach marked places.
	marks.Report(os.Stdout)

	// A test that failed may have left anything; its own message is what matters.
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
