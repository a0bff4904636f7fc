// Package faults breaks a cluster of real processes over real Redis servers and
// looks at it through clients' eyes: after every fault all counts at all
// gateways are exact again in time, none was ever negative, and no user who
// stayed was ever missing from one.
//
// A topology takes several faults one after the other, since what one left
// behind is what the next one meets. Topologies run side by side.
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
	// these tests mostly wait, but every topology is seven processes or more
	return testkit.RunWithProgram(m, "4", &program)
}
