// Package faults breaks clusters of real processes over real Redis servers and observes them as clients do. After every
// fault all counts at all gateways must be exact again in time. No count may ever be negative, or lack a user who
// stays.
//
// A topology suffers several faults one after the other, so that each fault meets what the one before has left behind.
// Topologies run in parallel.
package faults

import (
	"os"
	"testing"

	"headcount/internal/redistest"
	"headcount/internal/testkit"
)

var program string // the program, built with -race

func TestMain(m *testing.M) { os.Exit(testMain(m)) }

func testMain(m *testing.M) int {
	defer redistest.Stop()

	// No more than 4 at the same time: these tests mostly wait, but most topologies have seven processes or more.
	return testkit.RunWithProgram(m, "4", &program)
}
