package presence

import (
	"cmp"
	"strings"
)

// Report is what a process says of itself to people who look at a dashboard.
type Report struct {
	// Load has metrics of the process by their names; one about a peer as
	// name{peer}. Totals count since the process started.
	Load map[string]float64
	// Top are the pages that most users are on, most first, of the buckets the
	// process distributes.
	Top []PageUsers
}

// TopPages bounds Report.Top.
const TopPages = 100

// Compare orders pages by users, most first, then by name.
func (p PageUsers) Compare(o PageUsers) int {
	return cmp.Or(cmp.Compare(o.Users, p.Users), strings.Compare(p.Page, o.Page))
}
