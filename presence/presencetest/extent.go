package presencetest

import "testing"

// Extent is how much of a contract a set-up of a store takes with -short. Without -short
// each takes everything.
type Extent int

const (
	// Core is for a set-up of a store that another set-up tests in full.
	Core Extent = iota
	// Full is for the store in memory, and for one on one Redis server.
	Full
)

// core are the parts in which one set-up of a store can differ from another: slots and
// connections, sizes, what is published, and the models.
var core = map[string]bool{
	"many members and pages in one write are listed": true,
	"partitions written at once add up":              true,
	"any history of owners equals the model":         true,
	"all see who has a lease":                        true,
	"a watcher hears changes and follows":            true,
	"any history ends with the model's unread":       true,
	"records are saved":                              true,
	"a departure is remembered":                      true,
}

// runs reports whether a set-up takes a part.
func (e Extent) runs(part string) bool { return e == Full || core[part] || !testing.Short() }
