package presenceredis

import (
	"cmp"
	"context"
	"errors"
	"fmt"

	"headcount/presence"
)

const (
	memberBatch = 400  // members in one run of members.lua
	countBatch  = 300  // counts in one run of counts.lua
	fenceBatch  = 1000 // partitions in one run of fence.lua
	sealSize    = 16   // bytes of the seal of fences, see fences.lua
	loadShards  = 64   // hashes of members in one run of load.lua
	loadRuns    = 4    // runs of load.lua in one pipeline, which has its own deadline: some 10,000 members
	resizeSteps = 32   // hashes divided or joined in one run of resize.lua
	retries     = 3    // rounds for what found that the batch before it was missing
)

// What scripts say of a change.
const (
	statusWritten   = '0'
	statusFenced    = '1'
	statusLost      = '2'
	statusGap       = '3'
	statusResharded = '4' // members lie in another number of hashes
	statusLater     = '5' // a later change is written
)

// errLater is not for callers: the counts of a change that came after a later one
// are not written.
var errLater = errors.New("a later change is written")

// partition is what a store remembers of one that it claimed; under Store.mu.
type partition struct {
	epoch uint64
	// unwritten are the pages that Redis may name as such. known says that there
	// are no others, so that Redis gets a new list with each change, which has each
	// page once. Until they are known, the list there only grows.
	unwritten map[string]struct{}
	known     bool
	// shards is in how many hashes the members lie, members how many these are, as
	// of the last reply.
	shards, members int
}

// Write implements presence.Partitions. Members and the pages they touch are
// written before any count, so that whoever takes over a partition in between
// knows which counts to set right.
func (s *Store) Write(ctx context.Context, changes []presence.Change) []presence.Outcome {
	outcomes := make([]presence.Outcome, len(changes))
	s.writeMembers(ctx, changes, outcomes)
	s.lost(ctx, changes, outcomes)
	s.writeCounts(ctx, changes, outcomes)
	s.lost(ctx, changes, outcomes)
	s.mu.Lock()
	for i, c := range changes {
		if p := &s.partitions[c.Partition]; outcomes[i].Err == nil && p.epoch == c.Epoch {
			for _, pu := range c.Counts {
				delete(p.unwritten, pu.Page)
			}
		}
	}
	s.mu.Unlock()
	for i, c := range changes {
		if errors.Is(outcomes[i].Err, errLater) {
			outcomes[i].Counts, outcomes[i].Err = s.Counts(ctx, pagesOf(c))
		}
		if err := outcomes[i].Err; err != nil {
			outcomes[i] = presence.Outcome{Err: fmt.Errorf("presenceredis: write partition %d: %w", c.Partition, err)}
			continue
		}
		s.minutes.arrived(c.Arrivals)
	}
	return outcomes
}

// lost refuses the changes whose claims are of an older generation than the present one. Redis
// itself cannot tell: with its memory it may have got back the claims.
func (s *Store) lost(ctx context.Context, changes []presence.Change, outcomes []presence.Outcome) {
	generation, err := s.current(ctx)
	for i, c := range changes {
		if o := &outcomes[i]; o.Err == nil && c.Generation != generation {
			o.Err = cmp.Or(err, presence.ErrLost)
		}
	}
}

func pagesOf(c presence.Change) []string {
	pages := make([]string, len(c.Counts))
	for i, pu := range c.Counts {
		pages[i] = pu.Page
	}
	return pages
}

// cmpErr is the error that says more: that of the contract for good before the
// one that passes.
func cmpErr(a, b error) error {
	if a == nil || errors.Is(a, presence.ErrUnavailable) {
		return b
	}
	return a
}

func statusError(status byte) error {
	switch status {
	case statusWritten:
		return nil
	case statusFenced:
		return presence.ErrFenced
	case statusLost:
		return presence.ErrLost
	case statusResharded:
		return fmt.Errorf("%w: members were moved meanwhile", presence.ErrUnavailable)
	case statusLater:
		return errLater
	case statusGap:
		return fmt.Errorf("%w: an earlier part of the change is missing", presence.ErrUnavailable)
	}
	return fmt.Errorf("%w: a script said %q", presence.ErrUnavailable, status)
}

func flag(b bool) int {
	if b {
		return 1
	}
	return 0
}
