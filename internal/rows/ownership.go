package rows

import "time"

// Ownership is what a store knows about a partition besides its rows. The stores that decide in Go, and not in a
// script, share its rules.
type Ownership struct {
	Owner  string
	Epoch  uint64
	Number uint64 // of the newest commit
}

// Claim makes owner the owner of the partition, unless another process has claimed it after the caller's former claim.
func (o *Ownership) Claim(owner string, former uint64, now time.Time) Claim {
	// A caller without a former claim takes the partition from any owner.
	overtaken := former != 0 && o.Epoch > former
	if overtaken && o.Owner != owner {
		return Claim{}
	}

	o.Owner = owner
	// The clock keeps epochs growing even if the store has lost them; the other two, even if the clock goes back.
	o.Epoch = max(uint64(now.UnixMilli()), o.Epoch+1, former+1)

	return Claim{Epoch: o.Epoch, Number: o.Number}
}

// Refuses returns why a commit must not be made: *Fenced, *Lost or nil.
func (o *Ownership) Refuses(c *Commit) error {
	switch {
	case c.Epoch != o.Epoch:
		// This comes first, because numbers say nothing about commits of another owner.
		return &Fenced{Epoch: o.Epoch}
	case c.Number == o.Number:
		return nil // the commit is a repetition
	case c.After != o.Number:
		return &Lost{Number: o.Number}
	default:
		return nil
	}
}

// Has reports whether the store already has a commit. The commit must not be one that is refused.
func (o *Ownership) Has(c *Commit) bool { return c.Number == o.Number }

// Remembered returns *Known if IDs of the commit are remembered at its time. Until returns the expiry of an ID, or the
// zero time.
func (c *Commit) Remembered(until func(ID) time.Time) error {
	// Most commits have none, and need no list.
	if len(c.IDs)+len(c.Asked) == 0 {
		return nil
	}

	var known []ID
	for _, ids := range [][]ID{c.IDs, c.Asked} {
		for _, id := range ids {
			// A Commit brings its own time, so that a repetition is judged like the first attempt.
			if ends := until(id); ends.After(c.At) {
				known = append(known, ID{Bytes: id.Bytes, Until: ends})
			}
		}
	}
	if len(known) == 0 {
		return nil
	}

	return &Known{IDs: known}
}
