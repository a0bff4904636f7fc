package counterredis

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"headcount/counter"
)

// This file makes operations that one script cannot make: batches over several buckets of a Cluster, and changes of
// counters that may be in another bucket than their rule says.

// ReadWriter reads and changes counters.
type ReadWriter interface {
	counter.Writer
	Read(ctx context.Context, keys []string, member string, lag time.Duration) ([]counter.Reading, error)
	// Remembers reports whether an operation with the idempotency key of op was made.
	Remembers(ctx context.Context, op *counter.Op) (bool, error)
}

// ApplySplit makes ops in order with to. On a Cluster it splits batches, so that to gets operations of one bucket each.
func (s *Store) ApplySplit(ctx context.Context, ops []counter.Op, to ReadWriter) []counter.Result {
	c, err := s.conn.Known(ctx)
	if err != nil || c.Cluster == nil {
		return to.Apply(ctx, ops)
	}
	var results []counter.Result
	first := 0
	flush := func(end int) {
		if first < end {
			results = append(results, to.Apply(ctx, ops[first:end])...)
		}
	}
	for i := range ops {
		if ops[i].Check() == nil && s.crosses(&ops[i]) {
			flush(i)
			results = append(results, s.applyParts(ctx, &ops[i], to))
			first = i + 1
		}
	}
	flush(len(ops))
	return results
}

// crosses reports whether op needs several buckets, for its counters and its idempotency key.
func (s *Store) crosses(op *counter.Op) bool {
	b := s.changeBucket(&op.Changes[0])
	for i := range op.Changes {
		if s.changeBucket(&op.Changes[i]) != b {
			return true
		}
	}
	return op.IdempotencyKey != (counter.IdempotencyKey{}) && s.idempotencyBucket(op) != b
}

// applyParts makes op as one operation for each bucket. It finds conflicts before it makes the first part, except for
// those that concurrent changes cause.
func (s *Store) applyParts(ctx context.Context, op *counter.Op, to ReadWriter) counter.Result {
	fail := func(err error) counter.Result {
		var conflict *counter.Conflict
		if !errors.As(err, &conflict) {
			err = fmt.Errorf("counterredis: apply a batch: %w", err)
		}
		return counter.Result{Err: err}
	}
	known := false
	if op.IdempotencyKey != (counter.IdempotencyKey{}) {
		var err error
		if known, err = to.Remembers(ctx, op); err != nil {
			return fail(err)
		}
	}
	if known || len(op.Changes) > 1 {
		by, err := op.ReadFrom(ctx, to)
		if err == nil && known { // again, because the read may have found a loss of data and restored the counters
			known, err = to.Remembers(ctx, op)
		}
		if err == nil && !known {
			if err = s.findMisplaced(ctx, op, by); err == nil {
				err = refusal(op, by)
			}
		}
		if err != nil {
			return fail(err)
		}
		if known {
			return counter.Result{Counters: op.Counters(by), Replay: true}
		}
	}
	parts, at := s.split(op)
	result := counter.Result{Counters: make([]counter.Counter, len(op.Changes))}
	for n, r := range to.Apply(ctx, parts) {
		if r.Err != nil {
			return counter.Result{Err: r.Err}
		}
		// The first part decides whether this is a replay. So of two concurrent repetitions exactly one is.
		result.Replay = result.Replay || n == 0 && r.Replay
		for j, i := range at[n] {
			result.Counters[i] = r.Counters[j]
		}
	}
	if op.IdempotencyKey != (counter.IdempotencyKey{}) {
		_ = s.note(ctx, true, op) // if it fails, the idempotency keys of the parts still make a repetition a replay
	}
	return result
}

// split splits op by buckets. at has the indexes of the changes of each part.
func (s *Store) split(op *counter.Op) (parts []counter.Op, at [][]int) {
	by := map[int]int{}
	for i := range op.Changes {
		c := &op.Changes[i]
		b := s.changeBucket(c)
		n, ok := by[b]
		if !ok {
			n = len(parts)
			by[b] = n
			part := counter.Op{}
			if op.IdempotencyKey != (counter.IdempotencyKey{}) {
				part.IdempotencyKey = idempotencyKeyOfPart(op.IdempotencyKey, b)
			}
			parts, at = append(parts, part), append(at, nil)
		}
		parts[n].Changes, at[n] = append(parts[n].Changes, *c), append(at[n], i)
	}
	return parts, at
}

// idempotencyKeyOfPart returns the idempotency key of the part in bucket b of an operation with
// the idempotency key id. Like all of them it begins with the bits that select its bucket.
func idempotencyKeyOfPart(id counter.IdempotencyKey, b int) counter.IdempotencyKey {
	hash := sha256.Sum256(append(id[:], byte(b)))
	binary.LittleEndian.PutUint32(hash[:4], uint32(b))
	return counter.IdempotencyKey(hash[:len(id)])
}

// shardedBound is far below the 18 characters that counter_apply.lua permits a sharded sum.
const shardedBound = 1e16

// refusal returns why the counters by would refuse op, which only adds, or nil.
func refusal(op *counter.Op, by map[string]counter.Counter) error {
	after := maps.Clone(by)
	for i := range op.Changes {
		c := &op.Changes[i]
		have := after[c.Key].Or(c.Rule.Kind)
		if have.Kind == counter.Exact {
			return counter.Misplaced(have)
		}
		if have.IsSharded() && max(have.Value, -have.Value, have.Value+c.Delta, -have.Value-c.Delta) >= shardedBound {
			return fmt.Errorf("%w: %q", counter.ErrSharded, c.Key) // otherwise its part might be refused after others are made
		}
		if conflict := c.Refusal(have); conflict != nil {
			conflict.Value = by[c.Key].Value
			return conflict
		}
		have.Value += c.Delta
		after[c.Key] = have
	}
	return nil
}

// findMisplaced adds to by the counters of op that exist in the bucket that another rule gives them.
func (s *Store) findMisplaced(ctx context.Context, op *counter.Op, by map[string]counter.Counter) error {
	if s.cfg.Rules == nil {
		return nil
	}
	looked := make(map[string]bool, len(by))
	for key, c := range by {
		looked[key] = c.Kind != 0
	}
	found, err := s.elsewhere(ctx, []counter.Op{*op}, []int{0}, looked)
	maps.Copy(by, found)
	return err
}

// Apply implements counter.Writer, but a batch over several buckets of a Cluster is atomic only if its counters are
// exact.
func (s *Store) Apply(ctx context.Context, ops []counter.Op) []counter.Result {
	return s.ApplySplit(ctx, ops, alone{s})
}

// alone is a Store without PostgreSQL behind it, for operations of one bucket each.
type alone struct{ *Store }

// Apply implements counter.Writer.
func (s alone) Apply(ctx context.Context, ops []counter.Op) []counter.Result {
	results := make([]counter.Result, len(ops))
	var todo []int
	for i := range ops {
		if results[i].Err = ops[i].Check(); results[i].Err == nil {
			todo = append(todo, i)
		}
	}
	looked := map[string]bool{}
	for len(todo) > 0 {
		left := s.make(ctx, ops, todo, results, Unapplied{looked: looked})
		elsewhere, err := s.elsewhere(ctx, ops, left.Ops, looked)
		if err != nil {
			failing(results)(left.Ops, err)
			break
		}
		todo = slices.DeleteFunc(left.Ops, func(i int) bool {
			for j := range ops[i].Changes {
				if c := &ops[i].Changes[j]; elsewhere[c.Key].Kind != 0 {
					results[i] = counter.Result{Err: counter.Misplaced(elsewhere[c.Key])}
					return true
				}
			}
			return false
		})
	}
	return results
}

// elsewhere returns the counters of the operations todo that exist in the bucket that another rule gives them. It
// adds the keys that it has looked for to looked.
func (s *Store) elsewhere(ctx context.Context, ops []counter.Op, todo []int, looked map[string]bool) (map[string]counter.Counter, error) {
	var other []located // the bucket that another rule gives
	for _, i := range todo {
		for j := range ops[i].Changes {
			c := &ops[i].Changes[j]
			if looked[c.Key] {
				continue
			}
			looked[c.Key] = true
			if own, hash := s.changeBucket(c), hashBucket(c.Key); own != hash {
				other = append(other, located{c.Key, hash})
			} else if own != exactBucket {
				other = append(other, located{c.Key, exactBucket})
			}
		}
	}
	found := map[string]counter.Counter{}
	if len(other) == 0 {
		return found, nil
	}
	texts, err := s.states(ctx, other)
	if err != nil {
		return nil, err
	}
	for i, text := range texts {
		key := other[i].key
		if text == "" {
			continue
		}
		if found[key], _, err = parseState(key, text); err != nil {
			return nil, fmt.Errorf("%w: %w", counter.ErrUnavailable, err)
		}
	}
	return found, nil
}
