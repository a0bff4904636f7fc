// Package faults breaks a cluster of real processes over real Redis servers and
// looks at it through clients' eyes: after every fault all counts at all
// gateways are exact again in time, none was ever negative, and no user who
// stayed was ever missing from one.
//
// A topology takes several faults one after the other, since what one left
// behind is what the next one meets. Topologies run side by side.
package faults

import (
	"fmt"
	"os"
	"sync"
	"testing"
	"text/tabwriter"
	"time"

	"headcount/internal/redistest"
	"headcount/internal/testkit"
)

var program string // the program, built with -race

func TestMain(m *testing.M) { os.Exit(testMain(m)) }

func testMain(m *testing.M) int {
	defer redistest.Stop()
	status := testkit.RunWithProgram(m, "4", &program) // these tests mostly wait, but every topology is seven processes or more
	table.print()
	return status
}

// result is one row of the fault table.
type result struct {
	fault string
	since string        // the moment from which the time counts
	exact time.Duration // until all counts everywhere were exact; negative: not in time
	// These are the largest distances from the truth of a count that a client saw,
	// beyond what leave-grace and the travel time of a change explain: of counts marked
	// stale, and of all others.
	err, stale int64
}

func (r result) seconds() string {
	if r.exact < 0 {
		return "never"
	}
	return fmt.Sprintf("%.1f", r.exact.Seconds())
}

func (r result) String() string {
	return fmt.Sprintf("%s: exact %s s after %s; largest error seen %d, in stale counts %d", r.fault, r.seconds(), r.since, r.err, r.stale)
}

// results is the fault table.
type results struct {
	mu   sync.Mutex
	rows []result
}

var table results

func (r *results) add(row result) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.rows = append(r.rows, row)
}

func (r *results) print() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.rows) == 0 {
		return
	}
	w := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "fault\tseconds to exact\tafter\tlargest error seen\tin stale counts")
	for _, row := range r.rows {
		fmt.Fprintf(w, "%s\t%s\t%s\t%d\t%d\n", row.fault, row.seconds(), row.since, row.err, row.stale)
	}
	_ = w.Flush()
}
