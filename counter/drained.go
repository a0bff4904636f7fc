package counter

import "headcount/counter/hyperloglog"

// Drained is a counter on its way from Redis to PostgreSQL, as a checkpoint has it, with what became of it since the
// checkpoint before.
type Drained struct {
	Key     string
	State   State // zero: it does not exist
	Deleted bool  // since the checkpoint before; this is its next life, if any
	Entries []Entry
	Emptied bool // those who were members before are none
	Joined  []string
	Left    []string
	// Registers are all of a counter of kind Unique.
	Registers hyperloglog.Registers
	// Past is what it gained in steps that are over. Of a Unique it is what was seen in steps, also
	// in running ones, since the checkpoint before or longer: it is to be merged into what is known.
	Past []Past
	// Counted is what it counted under dimensions.
	Counted []Count
}

// Count is what a counter counted under one value of a dimension; the empty value stands for those
// that were not told apart.
type Count struct {
	Name, Value string
	Count       int64
}
