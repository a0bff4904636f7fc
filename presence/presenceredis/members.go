package presenceredis

import (
	"context"
	"encoding/binary"
	"fmt"
	"slices"
	"strconv"
	"time"

	"headcount/presence"
	"headcount/scripts"
)

// member parses a field written by memberField and its value written by members.lua. now is
// the time of Redis. It drops a hold that has ended, unless the user is present by the hold
// alone.
func member(field, value string, now int64) (presence.Member, error) {
	if len(field) < 9 {
		return presence.Member{}, fmt.Errorf("%w: a member of %d bytes", ErrForeign, len(field))
	}

	m := presence.Member{
		User: presence.User(binary.BigEndian.Uint64([]byte(field[:8]))),
		Page: field[8:],
	}

	if value != "" {
		ms, err := strconv.ParseInt(value, 10, 64)
		if err != nil {
			return presence.Member{}, fmt.Errorf("%w: the end of a hold: %w", ErrForeign, err)
		}
		// A hold that alone keeps its user is returned even after its end, so that the owner removes the user.
		m.Alone = value[0] == '+'
		if m.Alone || ms > now {
			// Only the difference counts, so the clocks of Redis and of this process need not agree.
			m.Hold = time.Now().Add(time.Duration(ms-now) * time.Millisecond)
		}
	}

	return m, nil
}

func memberField(m presence.Member) string {
	b := make([]byte, 8, 8+len(m.Page))
	binary.BigEndian.PutUint64(b, uint64(m.User))

	return string(append(b, m.Page...))
}

// holdValue returns how much longer the hold lasts, for members.lua.
func holdValue(m presence.Member) string {
	if m.Hold.IsZero() {
		return ""
	}

	// The end of the hold is sent as a duration, to which members.lua adds the clock of Redis.
	left := strconv.FormatInt(max(time.Until(m.Hold).Milliseconds(), 0), 10)
	if m.Alone {
		return "+" + left
	}

	return left
}

// writeMembers runs members.lua for all changes, and before it resize.lua for partitions
// with too few or too many shards.
func (s *Store) writeMembers(ctx context.Context, changes []presence.Change, outcomes []presence.Outcome) {
	if err := s.learnFormat(ctx); err != nil {
		for i := range outcomes {
			outcomes[i].Err = err
		}
		return
	}

	lists := make([]pageList, len(changes))
	todo := make([]int, len(changes)) // indexes of changes

	s.mu.Lock()
	for i, c := range changes {
		todo[i] = i
		// The pages count as unwritten from here on, whatever becomes of the runs: one whose answer is lost may have
		// been carried out.
		lists[i] = s.unwrittenLocked(c)
	}
	s.mu.Unlock()

	for round := 1; len(todo) > 0; round++ {
		var runs []*scriptRun
		ends := make([]int, len(todo))

		s.mu.Lock()
		for k, i := range todo {
			shards := 1
			members := 0
			// After another claim the script refuses the change, whatever the number of shards.
			if p := &s.partitions[changes[i].Partition]; p.epoch == changes[i].Epoch {
				shards = p.shards
				members = p.members
			}

			runs = append(runs, s.memberRuns(changes[i], lists[i], shards, members)...)
			ends[k] = len(runs)
		}
		s.mu.Unlock()

		_ = s.conn.Run(ctx, runs) // each run has its error

		again := todo[:0] // overwrites todo behind the place that is read

		first := 0
		s.mu.Lock()
		for k, i := range todo {
			status, err := s.membersWrittenLocked(changes[i], runs[first:ends[k]])
			first = ends[k]

			// An earlier run failed or its answer was lost, or the number of shards has changed. All batches go once
			// more: that closes a gap, and they use the number that the reply has named.
			mayRepeat := round < retries && (status == statusGap || status == statusResharded)
			switch {
			case err != nil:
				outcomes[i].Err = err
			case mayRepeat:
				again = append(again, i)
			default:
				outcomes[i].Err = statusError(status)
			}
		}
		s.mu.Unlock()

		todo = again
	}
}

// membersWrittenLocked returns the status or error of the first of one change's runs that was not written.
func (s *Store) membersWrittenLocked(c presence.Change, runs []*scriptRun) (status byte, err error) {
	status = statusWritten
	for _, run := range runs {
		switch reply := run.Reply.(type) {
		case []any: // members.lua
			// Replies of a refused change have the true numbers, too: the next round needs them.
			if p := &s.partitions[c.Partition]; p.epoch == c.Epoch {
				p.shards = int(reply[1].(int64))
				p.members = int(reply[2].(int64))
			}

			if status == statusWritten {
				status = byte('0' + reply[0].(int64))
			}
		case int64: // reply of resize.lua; the next run has the same status
		default:
			if err == nil {
				err = run.Err
			}
		}
	}

	return status, err
}

// pageList is a list of unwritten pages for members.lua: each page after its length in
// two bytes. all says that the list replaces the one in Redis.
type pageList struct {
	all  bool
	text []byte
}

func (l *pageList) add(page string) {
	l.text = append(binary.BigEndian.AppendUint16(l.text, uint16(len(page))), page...)
}

// pagesIn parses a pageList of Redis, which may name a page more than once.
func pagesIn(text string) ([]string, error) {
	var pages []string
	seen := map[string]struct{}{}

	for text != "" {
		if len(text) < 2 {
			return nil, fmt.Errorf("%w: a list of pages", ErrForeign)
		}
		end := 2 + int(text[0])<<8 + int(text[1])
		if len(text) < end {
			return nil, fmt.Errorf("%w: a list of pages", ErrForeign)
		}

		page := text[2:end]
		if _, twice := seen[page]; !twice {
			seen[page] = struct{}{}
			pages = append(pages, page)
		}
		text = text[end:]
	}

	return pages, nil
}

// unwrittenLocked records the pages of a change as unwritten, and returns the list for Redis.
func (s *Store) unwrittenLocked(c presence.Change) pageList {
	p := &s.partitions[c.Partition]
	owned := p.epoch == c.Epoch
	list := pageList{all: owned && p.known}

	for _, pu := range c.Counts {
		if owned {
			p.unwritten[pu.Page] = struct{}{}
		}
		if !list.all {
			list.add(pu.Page)
		}
	}

	if list.all {
		for page := range p.unwritten { // those of an earlier change that could not be written, too
			list.add(page)
		}
	}

	return list
}

// memberRuns splits a change into batches. The first batch has the list of pages, so that Redis lists them as unwritten
// before any member changes. Before the batches the number of shards is adapted to the number of members.
func (s *Store) memberRuns(c presence.Change, list pageList, shards, members int) []*scriptRun {
	var runs []*scriptRun
	const flagsAt = 4 // of args

	drop := 0 // shards that a reset drops
	if c.Reset {
		// All members are written anew, so nothing is gained by moving the old ones first.
		drop = shards
		shards = shardsFor(len(c.Members))
	} else {
		runs = s.resizeRuns(c.Claim, shards, shardsAfter(c, shards, members))
		shards = shardsAfter(c, shards, members)
	}

	rest := c.Members
	departures := c.Departures
	if s.cfg.LastSeen == 0 {
		departures = nil
	}

	// There is a batch 0 even without members: it has the list of pages, and proves the claim.
	for batch := 0; batch == 0 || len(rest) > 0 || len(departures) > 0; batch++ {
		nm := min(len(rest), memberBatch)
		keys := append(make([]string, 0, 2+drop+min(nm, shards)),
			s.at().ownerKey(c.Partition), s.at().dirtyKey(c.Partition))
		args := make([]any, 0, 8+4*nm)

		if batch == 0 && drop > 0 {
			for i := range drop {
				keys = append(keys, s.at().memberKey(c.Partition, i))
			}
			args = append(args, c.Epoch, c.Generation, c.Sequence, batch, flag(list.all), drop, shards, list.text)
		} else {
			args = append(args, c.Epoch, c.Generation, c.Sequence, batch, flag(list.all), shards, 0, list.text)
		}
		list.text = nil // the first batch alone has it

		keys, args = s.splitByShard(keys, args, c.Partition, rest[:nm], shards)
		rest = rest[nm:]

		// Departures go into the runs that remove the users' last pages, so they cost no calls of their own.
		if n := min(len(departures), memberBatch); n > 0 {
			keys = append(keys, s.at().seenKey(c.Partition))
			args = s.appendDepartures(args, departures[:n])
			args[flagsAt] = args[flagsAt].(int) + 4
			departures = departures[n:]
		}

		if c.Complete && len(rest) == 0 {
			args[flagsAt] = args[flagsAt].(int) + 2 // this batch completes the members
		}

		runs = append(runs, &scriptRun{Script: scripts.Members, Keys: keys, Args: args})
	}

	return runs
}

// splitByShard appends the keys of the members' shards, and the changes in each shard. The
// last change of a member wins.
func (s *Store) splitByShard(
	keys []string, args []any, partition int, members []presence.MemberChange, shards int,
) ([]string, []any) {
	type part struct{ set, gone []presence.Member }
	parts := map[int]*part{}
	var order []int

	for _, m := range members {
		i := shardOf(m.User, shards)
		p := parts[i]
		if p == nil {
			p = &part{}
			parts[i] = p
			order = append(order, i)
		}

		// The script sets all members of a shard before it removes any, so none may be in both lists.
		if m.Gone {
			p.set = without(p.set, m.Member)
			p.gone = append(p.gone, m.Member)
		} else {
			p.gone = without(p.gone, m.Member)
			p.set = append(p.set, m.Member)
		}
	}

	for _, i := range order {
		p := parts[i]
		keys = append(keys, s.at().memberKey(partition, i))
		args = append(args, len(p.set))
		for _, m := range p.set {
			args = append(args, memberField(m), holdValue(m))
		}

		args = append(args, len(p.gone))
		for _, m := range p.gone {
			args = append(args, memberField(m))
		}
	}

	return keys, args
}

// shardsAfter returns how many shards the partition is to have after the change: enough
// for all members that it may add, or fewer if a third of them would do. The number
// falls by at most resizeSteps at a time.
func shardsAfter(c presence.Change, shards, members int) int {
	for _, m := range c.Members {
		if !m.Gone {
			members++
		}
	}

	fit := shardsFor(members)
	if fit > shards {
		return fit
	}
	// Fewer shards must suffice by far: otherwise a partition near a bound would move its members back and forth.
	if 3*fit < shards {
		return max(2*fit, shards-resizeSteps)
	}
	return shards
}

// resizeRuns returns the runs that change the number of shards.
func (s *Store) resizeRuns(c presence.Claim, from, to int) []*scriptRun {
	var runs []*scriptRun
	for from != to {
		// Redis serves nobody else during a run, so one run moves the members of a few shards.
		next := max(from-resizeSteps, to)
		if from < to {
			next = min(from+resizeSteps, to)
		}

		keys := []string{s.at().ownerKey(c.Partition)}
		for n := from; n != next; {
			last := n // the number of shards that includes the one that is added or removed
			if n < next {
				last++
				n++
			} else {
				n--
			}
			// A step moves users between these two shards only, see shardOf.
			keys = append(keys,
				s.at().memberKey(c.Partition, neighbour(last)), s.at().memberKey(c.Partition, last-1))
		}
		runs = append(runs, &scriptRun{
			Script: scripts.Resize,
			Keys:   keys,
			Args:   []any{c.Epoch, c.Generation, from, next},
		})

		from = next
	}

	return runs
}

func without(list []presence.Member, m presence.Member) []presence.Member {
	return slices.DeleteFunc(list, func(o presence.Member) bool { return o.User == m.User && o.Page == m.Page })
}
