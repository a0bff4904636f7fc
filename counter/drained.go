package counter

import "headcount/counter/hyperloglog"

// Drained is one counter of a checkpoint, on its way from Redis to PostgreSQL: its state, and what changed since the
// checkpoint before.
type Drained struct {
	Key     string
	State   State // zero: the counter does not exist
	Deleted bool  // deleted since the checkpoint before; State, if not zero, is a new incarnation
	Entries []Entry
	Emptied bool // all earlier members are gone; Joined has the present ones
	Joined  []string
	Left    []string
	// Registers has all registers of a unique.
	Registers hyperloglog.Registers
	// Past has the increments of completed time buckets. For a unique it has registers of time buckets, also of
	// running ones, which have to be merged into the stored ones.
	Past []Past
	// Counted has the increments of values of dimensions.
	Counted []Count
}

// Count is the increment of one value of a dimension. The empty value stands for all values beyond MaxValues.
type Count struct {
	Name, Value string
	Count       int64
}
