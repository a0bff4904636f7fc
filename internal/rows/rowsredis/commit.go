package rowsredis

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"headcount/internal/redisconn"
	"headcount/internal/rows"
	"headcount/scripts"
)

// Commit implements rows.Store.
func (s *Store) Commit(ctx context.Context, commits []rows.Commit) []error {
	errs := make([]error, len(commits))
	// Whether it is a Cluster decides how many commits a run may have.
	c, err := s.writes.Known(ctx)
	if err != nil {
		fill(errs, s.commitError(err))
		return errs
	}

	spans := groups(c, len(commits), func(i int) int { return sizeOf(&commits[i]) })
	runs := make([]*redisconn.ScriptRun, len(spans))
	for i, span := range spans {
		runs[i] = s.commitRun(c, commits[span.first:span.end])
	}
	// The error of Run is only the first one of the runs. Each run has its own error, and others may have succeeded.
	_ = s.writes.Run(ctx, runs)

	for i, span := range spans {
		s.outcomes(runs[i], commits[span.first:span.end], errs[span.first:span.end])
	}

	return errs
}

func fill(errs []error, err error) {
	for i := range errs {
		errs[i] = err
	}
}

// sizeOf estimates the number of arguments of a commit.
func sizeOf(c *rows.Commit) int { return 16 + 3*len(c.IDs) + 3*len(c.Asked) + 2*len(c.Rows) }

// commitRun returns the run of the script that makes commits.
func (s *Store) commitRun(c *client, commits []rows.Commit) *redisconn.ScriptRun {
	// Allocate the arguments of a large batch only once.
	size := 0
	for i := range commits {
		size += sizeOf(&commits[i])
	}

	run := &redisconn.ScriptRun{Script: scripts.RowsCommit, Args: make([]any, 0, size)}
	run.Args = append(run.Args, c.Publish)
	for i := range commits {
		s.appendCommit(run, &commits[i])
	}

	return run
}

// appendCommit appends the keys and arguments of a commit in the order of rows_commit.lua.
func (s *Store) appendCommit(run *redisconn.ScriptRun, c *rows.Commit) {
	firstKey := len(run.Keys)
	firstArg := len(run.Args)

	// Without a channel the script publishes nothing. The channel decides, because a publication may be empty.
	channel := ""
	if c.Publication != nil {
		channel = s.channel(c.Partition)
	}
	run.Keys = append(run.Keys, s.ownerKey(c.Partition))
	run.Args = append(run.Args, 0, 0, c.Epoch, c.After, c.Number, c.At.UnixMilli(), channel, c.Publication)

	// Also send the lifetime of an ID as a duration, because Redis expires it by its own clock.
	run.Args = append(run.Args, len(c.IDs)+len(c.Asked))
	for i := range c.IDs {
		id := &c.IDs[i]
		run.Keys = append(run.Keys, s.idKey(c.Partition, id))
		run.Args = append(run.Args, id.Until.UnixMilli(), max(id.Until.Sub(c.At).Milliseconds(), 0))
	}
	for i := range c.Asked {
		run.Keys = append(run.Keys, s.idKey(c.Partition, &c.Asked[i]))
		run.Args = append(run.Args, "", 0)
	}

	s.appendRows(run, c)

	// With these lengths the script finds the next commit even if it refuses this one.
	run.Args[firstArg] = len(run.Keys) - firstKey
	run.Args[firstArg+1] = len(run.Args) - firstArg
}

// change is what a commit puts into a collection and deletes from it.
type change struct {
	collection string
	puts       []any // fields and values
	deletes    []any // fields
}

// changesOf groups the rows of a commit by collection.
func changesOf(c *rows.Commit) []change {
	// Keep the order of the rows, unlike a map, so that a repeated commit is identical.
	var changes []change
	at := map[string]int{}
	for i := range c.Rows {
		row := &c.Rows[i]
		n, ok := at[row.Collection]
		if !ok {
			n = len(changes)
			at[row.Collection] = n
			changes = append(changes, change{collection: row.Collection})
		}

		if row.Value == nil {
			changes[n].deletes = append(changes[n].deletes, row.Field)
		} else {
			changes[n].puts = append(changes[n].puts, row.Field, row.Value)
		}
	}

	return changes
}

func (s *Store) appendRows(run *redisconn.ScriptRun, c *rows.Commit) {
	changes := changesOf(c)
	run.Args = append(run.Args, len(changes))
	for i := range changes {
		one := &changes[i]

		// The lengths must precede the lists, because the script cannot tell fields from values otherwise.
		run.Keys = append(run.Keys, s.collectionKey(c.Partition, one.collection))
		run.Args = append(run.Args, len(one.puts), len(one.deletes))
		run.Args = append(run.Args, one.puts...)
		run.Args = append(run.Args, one.deletes...)
	}
}

// outcomes sets the errors of the commits in a run.
func (s *Store) outcomes(run *redisconn.ScriptRun, commits []rows.Commit, errs []error) {
	if run.Err != nil {
		fill(errs, s.commitError(run.Err))
		return
	}

	// Each commit has its own reply: one may be refused and the next one made.
	for i, reply := range list(run.Reply) {
		errs[i] = s.outcome(&commits[i], list(reply))
	}
}

// outcome converts the script's reply for a commit to an error.
func (s *Store) outcome(c *rows.Commit, reply []any) error {
	switch reply[0] {
	case "made":
		return nil
	case "fenced":
		epoch, err := s.number(c.Partition, "epoch", reply[1])
		if err != nil {
			return err
		}
		return &rows.Fenced{Epoch: epoch}
	case "lost":
		number, err := s.number(c.Partition, "number", reply[1])
		if err != nil {
			return err
		}
		return &rows.Lost{Number: number}
	default:
		return s.known(c, reply[1:])
	}
}

// known converts the script's reply about remembered IDs to an error. The reply has the position of each among the IDs
// of c, and its expiry.
func (s *Store) known(c *rows.Commit, reply []any) error {
	known := &rows.Known{}
	for ; len(reply) > 1; reply = reply[2:] {
		position, _ := reply[0].(int64)
		ends, _ := reply[1].(string)
		id := idAt(c, int(position))
		until, err := strconv.ParseInt(ends, 10, 64)
		if err != nil {
			return malformed(s.idKey(c.Partition, id), "time", ends)
		}

		known.IDs = append(known.IDs, rows.ID{Bytes: id.Bytes, Until: time.UnixMilli(until)})
	}

	return known
}

// idAt returns an ID of a commit by its position: first the IDs that it uses, then those that it asks for.
func idAt(c *rows.Commit, position int) *rows.ID {
	if position < len(c.IDs) {
		return &c.IDs[position]
	}

	return &c.Asked[position-len(c.IDs)]
}

// commitError returns the error of a commit if Redis did not answer or refused the script.
func (s *Store) commitError(err error) error {
	// A call that was not sent has made nothing. Neither has one that a full Redis refused, because Redis refuses the
	// first write of a run, so the other commits in the run were not made either.
	full := isFull(err) || errors.Is(err, redisconn.ErrAway) && isFull(s.conn.Cause())
	if full {
		return fmt.Errorf("%w: %v", rows.ErrFull, err) // not %w: the error must not match rows.ErrUnavailable, too
	}

	return err
}

// isFull reports whether an error comes from a full Redis. Redis 6.2 puts a sentence of its own before the code.
func isFull(err error) bool {
	return err != nil && strings.Contains(err.Error(), "OOM command not allowed")
}
