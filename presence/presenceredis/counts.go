package presenceredis

import (
	"cmp"
	"context"
	"encoding/binary"
	"fmt"
	"slices"

	"headcount/presence"
	"headcount/scripts"
)

// group is the part of a change that is in one run of counts.lua.
type group struct {
	change int
	counts []int // indexes into Change.Counts
	pages  []int // for each of counts: the number of its page in the run
}

// countsRun is one run of counts.lua for one bucket.
type countsRun struct {
	scriptRun
	names      []string
	groups     []group
	generation uint64
	bucket     int
	counts     []count // of the groups
	continues  bool    // its first group continues the last group of the run before it
}

// count is one count in a run.
type count struct {
	page, partition int
	users           int64
}

// Arguments of counts.lua.
const (
	runAt    = 7
	stampAt  = 9
	claimsAt = 10
	countsAt = 11
)

// noStamp is different from every stamp.
const noStamp = "-"

// pack encodes the claims and the counts as arguments.
func (run *countsRun) pack(changes []presence.Change) {
	// counts.lua takes the pages in the order of the keys, and the counts of each one after the other.
	slices.SortStableFunc(run.counts, func(a, b count) int { return a.page - b.page })

	claims := make([]byte, 0, 8*len(run.groups))
	for _, g := range run.groups {
		c := changes[g.change]
		claims = binary.BigEndian.AppendUint16(claims, uint16(c.Partition))
		claims = appendNumber(claims, c.Epoch, 6)
	}

	text := make([]byte, 0, 9*len(run.counts))
	for i, n := 0, 0; i < len(run.counts); i += n {
		n = 1 // counts of the same page, from i on
		for i+n < len(run.counts) && run.counts[i+n].page == run.counts[i].page {
			n++
		}

		text = binary.BigEndian.AppendUint16(text, uint16(n))
		for _, c := range run.counts[i : i+n] {
			text = binary.LittleEndian.AppendUint16(text, uint16(c.partition))
			text = appendNumber(text, uint64(max(c.users, 0)), 5)
		}
	}

	run.Args[claimsAt], run.Args[countsAt] = claims, text
}

// writeCounts runs counts.lua for the changes whose members are written: one run per bucket for all partitions
// together, or several if there are many counts.
func (s *Store) writeCounts(ctx context.Context, changes []presence.Change, outcomes []presence.Outcome) {
	c, err := s.known(ctx)
	if err != nil {
		for i := range outcomes {
			if outcomes[i].Err == nil {
				outcomes[i].Err = err
			}
		}
		return
	}

	var todo []*countsRun
	for b, groups := range s.byBucket(changes, outcomes) {
		todo = append(todo, s.countRuns(b, c.Publish, changes, groups)...)
	}

	// Buckets refuse runs out of order, so no other goroutine may send between the numbering and the end of the run.
	s.counting.Lock()
	defer s.counting.Unlock()
	for round := 1; len(todo) > 0; round++ {
		runs := make([]*scriptRun, len(todo))

		s.mu.Lock()
		for i, run := range todo {
			// Under the number of the round before, the script would take a run for late.
			s.numberLocked(run, changes)
			runs[i] = &run.scriptRun
		}
		s.mu.Unlock()

		_ = s.conn.Run(ctx, runs) // each run has its error

		var again []*countsRun
		for i, run := range todo {
			// A run that continues another one is repeated only if that one is.
			follows := !run.continues || len(again) > 0 && again[len(again)-1] == todo[i-1]
			if s.counted(run, changes, outcomes, follows && round < retries) {
				again = append(again, run)
			}
		}

		todo = again
	}
}

// numberLocked gives a run the next number of its bucket, and the stamp if all its epochs are valid under it.
func (s *Store) numberLocked(run *countsRun, changes []presence.Change) {
	f := &s.fences[run.bucket]
	// Numbers of runs that are lost stay unused. Only a run that continues another one needs the one before it.
	f.run++
	run.Args[runAt] = f.run
	run.Args[stampAt] = f.stamp

	for _, g := range run.groups {
		c := changes[g.change]
		// One epoch that is not known to be valid has the script check all of the run.
		if f.stamp == "" || f.valid[c.Partition] != c.Epoch {
			run.Args[stampAt] = noStamp
			return
		}
	}
}

// checked records the epochs that a run found valid under stamp.
func (s *Store) checked(run *countsRun, changes []presence.Change, status, stamp string) {
	s.mu.Lock()
	defer s.mu.Unlock()

	f := &s.fences[run.bucket]
	if f.stamp != stamp {
		f.stamp = stamp
		f.valid = make([]uint64, s.cfg.Partitions) // what was valid under the old stamp may be invalid now
	}

	for i, g := range run.groups {
		if status[i] == statusWritten {
			c := changes[g.change]
			f.valid[c.Partition] = c.Epoch
		}
	}
}

// byBucket groups the counts of the changes by bucket, in the order of changes.
func (s *Store) byBucket(changes []presence.Change, outcomes []presence.Outcome) [][]group {
	buckets := make([][]group, s.cfg.Buckets)

	for i, c := range changes {
		if outcomes[i].Err != nil {
			continue
		}

		outcomes[i].Counts = make([]presence.Count, len(c.Counts))

		// A change that completes its partition goes to every bucket, also without counts there.
		if c.Complete {
			for b := range buckets {
				buckets[b] = append(buckets[b], group{change: i})
			}
		}

		for j, pu := range c.Counts {
			b := presence.Bucket(pu.Page, s.cfg.Buckets)
			n := len(buckets[b])
			begun := n > 0 && buckets[b][n-1].change == i
			if !begun {
				buckets[b] = append(buckets[b], group{change: i})
			}

			g := &buckets[b][len(buckets[b])-1]
			g.counts = append(g.counts, j)
		}
	}

	return buckets
}

// countRuns returns the runs for one bucket. A group may span several runs; each of them then says that it continues
// the one before it, so that no run completes a partition while earlier counts are missing.
func (s *Store) countRuns(b int, publish string, changes []presence.Change, groups []group) []*countsRun {
	// numbers.lua changes a page fastest when the partitions come in order.
	byPartition := func(a, b group) int { return changes[a.change].Partition - changes[b.change].Partition }
	slices.SortStableFunc(groups, byPartition)

	var runs []*countsRun
	var run *countsRun
	var numbers map[string]int // by page: its number in run
	size := 0                  // of run

	for _, g := range groups {
		c := changes[g.change]

		for before := 0; ; {
			// A run names one generation, and has no more counts than Redis may be busy with at a time.
			if run == nil || size >= countBatch || run.generation != c.Generation {
				run = s.newCountsRun(b, publish, c.Generation, before > 0)
				runs = append(runs, run)
				numbers = map[string]int{}
				size = 0
			}

			n := min(len(g.counts)-before, countBatch-size)
			last := before+n == len(g.counts)
			if last && c.Complete {
				run.Args = append(run.Args, c.Partition)
			}

			run.add(g.change, c, g.counts[before:before+n], numbers, s.at().pagePrefix(b))
			size += max(n, 1) // a group without counts has a claim all the same
			before += n

			if last {
				if run.continues {
					run = nil // its failure must not concern other changes
				}
				break
			}
		}
	}

	for _, run := range runs {
		run.pack(changes)
	}

	return runs
}

func (s *Store) newCountsRun(b int, publish string, generation uint64, continues bool) *countsRun {
	return &countsRun{generation: generation, bucket: b, continues: continues, scriptRun: scriptRun{
		Script: scripts.Counts,
		Keys: []string{
			s.at().stateKey(b), s.at().fenceKey(b), s.at().readyKey(b), s.at().logKey(b), s.at().emptiesKey(b),
			s.at().runKey(b, s.self),
		},
		// numberLocked and pack fill in the nil arguments.
		Args: []any{
			s.at().channel(b, s.cfg.Conn.DB), publish, s.cfg.Partitions, s.highest.Load(),
			int(s.cfg.RememberFor.Seconds()), len(s.at().pagePrefix(b)), generation,
			nil, flag(continues), nil, nil, nil, s.minutes.kept(),
		},
	}}
}

// add adds a group with these counts of a change. A page of several changes is one key of the run.
func (run *countsRun) add(change int, c presence.Change, counts []int, numbers map[string]int, prefix string) {
	part := group{change: change, counts: counts, pages: make([]int, 0, len(counts))}

	for _, j := range counts {
		pu := c.Counts[j]
		k, ok := numbers[pu.Page]
		if !ok {
			run.names = append(run.names, pu.Page)
			run.Keys = append(run.Keys, prefix+pu.Page)
			k = len(run.names)
			numbers[pu.Page] = k
		}

		part.pages = append(part.pages, k)
		run.counts = append(run.counts, count{k, c.Partition, pu.Users})
	}

	run.groups = append(run.groups, part)
}

// appendNumber appends the low bytes of a number, big-endian.
func appendNumber(to []byte, n uint64, bytes int) []byte {
	for i := bytes - 1; i >= 0; i-- {
		to = append(to, byte(n>>(8*i)))
	}

	return to
}

// counted copies a run's reply into the outcomes. It reports whether the run came out of order and must run again, if
// mayAgain.
func (s *Store) counted(
	run *countsRun, changes []presence.Change, outcomes []presence.Outcome, mayAgain bool,
) (again bool) {
	if run.Err != nil {
		for _, g := range run.groups {
			outcomes[g.change].Err = cmpErr(outcomes[g.change].Err, run.Err)
		}
		return false
	}

	reply, ok := run.Reply.([]any)
	// The only element is "late" or "gap": a later run was carried out, or an earlier one is missing.
	outOfOrder := !ok || len(reply) == 1
	if outOfOrder && mayAgain {
		return true
	}
	if outOfOrder {
		for _, g := range run.groups { // an existing error is the cause of the gap, and stays
			outcomes[g.change].Err = cmp.Or(outcomes[g.change].Err, statusError(statusGap))
		}
		return false
	}

	status := reply[1].(string)
	if status != "" {
		s.checked(run, changes, status, reply[7].(string))
	}

	// Each reply reports the bucket's empty pages, so that no process has to look for them.
	s.noteEmptyPages(run.bucket, int(reply[2].(int64)), reply[3] == "1")

	counts, err := run.parse(reply)
	for i := range counts {
		s.raiseHighest(counts[i].Version.Incarnation) // those before a malformed record have been published, too
	}
	if err != nil {
		run.Err = err
		return s.counted(run, changes, outcomes, false)
	}

	// A minute that has ended is reported once, to the run that found it, so this process has to write it.
	s.minutes.minutesEnded(run.bucket, reply[6].(string))

	for i, g := range run.groups {
		// Other partitions of the run are written all the same.
		if status != "" && status[i] != statusWritten {
			outcomes[g.change].Err = cmpErr(outcomes[g.change].Err, statusError(status[i]))
			continue
		}

		for k, j := range g.counts {
			outcomes[g.change].Counts[j] = counts[g.pages[k]-1]
		}
	}

	return false
}

// parse returns the counts of a run in the order of its names, up to a record that is malformed.
func (run *countsRun) parse(reply []any) ([]presence.Count, error) {
	counts := make([]presence.Count, len(run.names))
	stale := reply[0] == "1"
	without := reply[4].(string)
	records := reply[5].(string)

	for i := range counts {
		c, rest, err := cutCount(records)
		if err != nil {
			return counts[:i], fmt.Errorf("%w: counts.lua returned %w", presence.ErrUnavailable, err)
		}

		c.Page = run.names[i] // the same name, so as not to retain records
		c.Stale = stale
		c.Without = without
		counts[i] = c
		records = rest
	}

	return counts, nil
}
