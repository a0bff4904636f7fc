// Package faults breaks a cluster of real processes over real Redis servers and observes it as clients do: after every
// fault all counts at all gateways are exact again in time, none was ever negative, and no user who stayed was ever
// missing from one.
//
// A topology suffers several faults one after the other, so that each fault meets the traces of the one before.
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

	// These tests mostly wait, but every topology has seven processes or more.
	return testkit.RunWithProgram(m, "4", &program)
}
