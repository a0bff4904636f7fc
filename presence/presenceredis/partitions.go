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
	stampSize   = 16   // bytes of the stamp of fences, see fences.lua
	loadShards  = 64   // shards in one run of load.lua
	loadRuns    = 4    // runs of load.lua in one pipeline, which has its own deadline: some 10,000 members
	resizeSteps = 32   // shards split or merged in one run of resize.lua
	retries     = 3    // rounds for runs that found the run before them missing
)

// The status of a change, as scripts reply it.
const (
	statusWritten   = '0'
	statusFenced    = '1'
	statusLost      = '2'
	statusGap       = '3'
	statusResharded = '4' // the number of shards has changed
	statusLater     = '5' // a later change has been written
)

// errLater means that a later change overtook this one, whose counts are then not written.
// It is used within this package only.
var errLater = errors.New("a later change has been written")

// partition is the state of a partition that the store claimed. Store.mu guards it.
type partition struct {
	epoch uint64
	// unwritten are pages whose counts Redis lists as not written yet. known says that
	// the list in Redis has no other pages, so each change can replace it. Until then the
	// list in Redis only grows.
	unwritten map[string]struct{}
	known     bool
	// shards is the number of hashes with members, and members the number of members,
	// according to the last reply.
	shards, members int
}

// Write implements presence.Partitions. Members, and the list of pages that they
// change, are written before any count, so that a node that takes over in between knows
// which counts to correct.
func (s *Store) Write(ctx context.Context, changes []presence.Change) []presence.Outcome {
	outcomes := make([]presence.Outcome, len(changes))

	// Redis cannot detect that it has come back with old data, see lost. So the generation is checked after each write.
	s.writeMembers(ctx, changes, outcomes)
	s.lost(ctx, changes, outcomes)
	s.writeCounts(ctx, changes, outcomes)
	s.lost(ctx, changes, outcomes)

	s.mu.Lock()
	for i, c := range changes {
		// A later claim has begun a list of its own, which this change says nothing about.
		p := &s.partitions[c.Partition]
		if outcomes[i].Err != nil || p.epoch != c.Epoch {
			continue
		}
		for _, pu := range c.Counts {
			delete(p.unwritten, pu.Page)
		}
	}
	s.mu.Unlock()

	for i, c := range changes {
		// A later change of the same partition was written first, so these counts are those of that change or a later
		// one.
		if errors.Is(outcomes[i].Err, errLater) {
			outcomes[i].Counts, outcomes[i].Err = s.Counts(ctx, pagesOf(c))
		}

		if err := outcomes[i].Err; err != nil {
			outcomes[i] = presence.Outcome{Err: fmt.Errorf("presenceredis: write partition %d: %w", c.Partition, err)}
			continue
		}

		// Arrivals count only once the change is written: a failed change is written again, with its arrivals.
		s.minutes.arrived(c.Arrivals)
	}

	return outcomes
}

// lost refuses the changes whose claims are of an earlier generation. Redis cannot refuse
// them: if it came back with old data, it may have the old claims, too.
func (s *Store) lost(ctx context.Context, changes []presence.Change, outcomes []presence.Outcome) {
	generation, err := s.current(ctx)

	for i, c := range changes {
		o := &outcomes[i]
		// When the generation cannot be read it is 0, and nothing is acknowledged.
		if o.Err == nil && c.Generation != generation {
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

// cmpErr returns the error that matters more: a lasting one rather than ErrUnavailable.
func cmpErr(a, b error) error {
	// The actor repeats a change after ErrUnavailable. It must not do so when another part of the change was fenced.
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
		return fmt.Errorf("%w: members were moved to other shards meanwhile", presence.ErrUnavailable)
	case statusLater:
		return errLater
	case statusGap:
		return fmt.Errorf("%w: an earlier part of the change is missing", presence.ErrUnavailable)
	}

	return fmt.Errorf("%w: a script replied with the status %q", presence.ErrUnavailable, status)
}

func flag(b bool) int {
	if b {
		return 1
	}

	return 0
}
