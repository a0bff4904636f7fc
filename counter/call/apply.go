package call

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"fmt"

	"headcount/counter"
	"headcount/counter/owner"
	"headcount/internal/rows"
)

// place returns the partition of a counter, by its rule.
func (s *Store) place(key string) int { return placeUnder(key, s.rules.Find(key)) }

// placeOf returns the partition of the counter that c changes, by the rule in c.
func placeOf(c *counter.Change) int { return placeUnder(c.Key, c.Rule) }

func placeUnder(key string, rule *counter.Rule) int {
	if rule == nil {
		return rows.PartitionOf(key)
	}

	return placeOfKind(key, rule.Kind)
}

// placeOfKind returns the partition in which a counter is made.
func placeOfKind(key string, kind counter.Kind) int {
	// A batch of exact counters is made as a whole, so one partition has all of them.
	if kind.IsExact() {
		return owner.ExactPartition
	}

	return rows.PartitionOf(key)
}

// homeOf returns the partition that remembers the idempotency key of a batch. Package exactpg computes the same in SQL.
func homeOf(id counter.IdempotencyKey) int {
	return int(binary.LittleEndian.Uint32(id[:]) % rows.Partitions)
}

// partKey returns the idempotency key for one partition's part of a batch.
func partKey(id counter.IdempotencyKey, partition int) counter.IdempotencyKey {
	hash := sha256.Sum256(append(id[:], byte(partition)))

	return counter.IdempotencyKey(hash[:len(id)])
}

// Apply implements counter.Writer. A batch with counters in several partitions is made in parts, see applyParts.
func (s *Store) Apply(ctx context.Context, ops []counter.Op) []counter.Result {
	if len(ops) == 1 {
		return s.applyOne(ctx, ops)
	}

	results := make([]counter.Result, len(ops))
	var waiting gathered
	for i := range ops {
		op := &ops[i]
		if err := op.Check(); err != nil {
			results[i].Err = err
			continue
		}

		partition, whole := PartitionOf(op)
		if !whole {
			// Operations are made in order, and this one has parts in many partitions.
			s.flush(ctx, &waiting, results)
			results[i] = s.applyParts(ctx, op)
			continue
		}

		if !waiting.fits(partition, op) {
			s.flush(ctx, &waiting, results)
		}
		waiting.add(partition, op, i)
	}
	s.flush(ctx, &waiting, results)

	return results
}

// applyOne makes a single operation with as little overhead as possible. Its owner validates it.
func (s *Store) applyOne(ctx context.Context, ops []counter.Op) []counter.Result {
	partition, whole := PartitionOf(&ops[0])
	if !whole {
		return []counter.Result{s.applyParts(ctx, &ops[0])}
	}

	// The owner returns the results in the caller's order.
	answer, err := s.do(ctx, owner.Call{Partition: partition, Ops: ops})
	if err != nil {
		return []counter.Result{{Err: err}}
	}

	return answer.Results
}

// PartitionOf returns the partition of an operation. whole reports whether that partition has every counter of the
// operation, and remembers its idempotency key.
func PartitionOf(op *counter.Op) (partition int, whole bool) {
	if len(op.Changes) == 0 {
		return 0, true
	}

	partition = placeOf(&op.Changes[0])
	// One change elsewhere is enough: then the batch is made in parts.
	for i := 1; i < len(op.Changes); i++ {
		if placeOf(&op.Changes[i]) != partition {
			return partition, false
		}
	}

	return partition, !op.OfBatch() || homeOf(op.IdempotencyKey) == partition
}

// gathered collects whole operations for the owners: one call for each partition.
type gathered struct {
	calls []part
}

// part is a call, with the indexes of its results.
type part struct {
	call    owner.Call
	indexes []int
	changes int // and members
	owner.Outcome
}

// Bounds of one call, because one commit has to hold all of it, and one frame of package link.
const (
	callChanges = 4096 // of numbers and of members
	callIDs     = 1000
)

func (g *gathered) find(partition int) *part {
	for i := range g.calls {
		if g.calls[i].call.Partition == partition {
			return &g.calls[i]
		}
	}

	return nil
}

// fits reports whether op may be added to the call to a partition.
func (g *gathered) fits(partition int, op *counter.Op) bool {
	to := g.find(partition)

	// An empty call has room for any operation.
	return to == nil || to.changes+changesOf(op) <= callChanges && len(to.call.Ops) < callIDs
}

// changesOf returns how many changes an operation makes. Each member is one, because a change of a set may have many.
func changesOf(op *counter.Op) (n int) {
	for i := range op.Changes {
		n += max(1, len(op.Changes[i].Join)+len(op.Changes[i].Leave))
	}

	return n
}

// at returns the call to a partition, and adds one if necessary. The pointer is valid until the next call is added.
func (g *gathered) at(partition int) *part {
	if to := g.find(partition); to != nil {
		return to
	}
	g.calls = append(g.calls, part{call: owner.Call{Partition: partition}})

	return &g.calls[len(g.calls)-1]
}

func (g *gathered) add(partition int, op *counter.Op, index int) {
	to := g.at(partition)
	to.call.Ops = append(to.call.Ops, *op)
	to.indexes = append(to.indexes, index)
	to.changes += changesOf(op)
}

// flush makes the calls, and stores their results.
func (s *Store) flush(ctx context.Context, g *gathered, results []counter.Result) {
	s.doAll(ctx, g.calls)
	for i := range g.calls {
		one := &g.calls[i]
		for at, index := range one.indexes {
			if one.Err != nil {
				// The error of a call is that of all its operations.
				results[index] = counter.Result{Err: one.Err}
				continue
			}
			results[index] = one.Results[at]
		}
	}

	g.calls = nil
}

// doTogether makes all parts of a batch, if this process owns all counters and nothing refuses one of them. Otherwise
// it makes nothing. After an error nothing was made.
func (s *Store) doTogether(ctx context.Context, parts []part) (made bool, err error) {
	if s.local == nil {
		return false, nil
	}

	ctx, cancel, err := s.begin(ctx)
	if err != nil {
		return false, err
	}
	defer cancel()

	outcomes, made, err := s.local.DoTogether(ctx, callsOf(parts))
	for i, outcome := range outcomes {
		parts[i].set(outcome)
	}

	return made, unavailable(err)
}

func callsOf(parts []part) []owner.Call {
	calls := make([]owner.Call, len(parts))
	for i := range parts {
		calls[i] = parts[i].call
	}

	return calls
}

func (p *part) set(outcome owner.Outcome) {
	p.Outcome = outcome
	p.Err = unavailable(outcome.Err)
}

// doAll makes calls to different partitions.
func (s *Store) doAll(ctx context.Context, parts []part) {
	// A single call needs no goroutine.
	if len(parts) == 1 {
		parts[0].Answer, parts[0].Err = s.do(ctx, parts[0].call)
		return
	}

	ctx, cancel, err := s.begin(ctx)
	if err != nil {
		for i := range parts {
			parts[i].Err = err
		}
		return
	}
	defer cancel()

	for i, outcome := range s.to.DoAll(ctx, callsOf(parts)) {
		parts[i].set(outcome)
	}
}

// applyParts makes a batch that several partitions have, as one operation for each of them. If this process owns all of
// them, it makes them together. Otherwise it finds out what refuses the batch before it makes the first part, so that
// only a concurrent change can have it made in part.
//
// All batches share one space of idempotency keys, and each key has a home. A part has a key derived for its partition,
// so that a repetition makes what is missing and nothing twice. The home remembers the key itself when all parts are
// made: from then on it is known for any batch.
func (s *Store) applyParts(ctx context.Context, op *counter.Op) counter.Result {
	if err := op.Check(); err != nil {
		return counter.Result{Err: err}
	}

	known, err := s.known(ctx, op.IdempotencyKey)
	if err != nil {
		return counter.Result{Err: err}
	}

	if known {
		return op.ReplayFrom(ctx, s)
	}

	parts := split(op)
	made, err := s.doTogether(ctx, parts)
	if err != nil {
		return counter.Result{Err: err}
	}
	if made {
		return s.joined(ctx, op, parts)
	}

	// If there is only one part, nothing can be made halfway, so its owner alone judges it: a reader may not see that
	// the part was made before.
	if len(parts) > 1 {
		before, err := op.ReadFrom(ctx, s)
		if err != nil {
			return counter.Result{Err: err}
		}
		if err := refusal(op, before); err != nil {
			return counter.Result{Err: err}
		}
	}

	// Each partition makes its part independently. If some parts fail, a repetition makes them.
	s.doAll(ctx, parts)

	return s.joined(ctx, op, parts)
}

// joined joins the results of the parts of a batch, and has the home of its idempotency key remember what was made.
func (s *Store) joined(ctx context.Context, op *counter.Op, parts []part) counter.Result {
	result := join(op, parts)
	if result.Err == nil {
		// If this fails, a repetition is still a replay, by the keys of the parts.
		_, _ = s.remember(ctx, op.IdempotencyKey)
	}

	return result
}

// Known reports whether a batch with that idempotency key was made, in this store or another one.
func (s *Store) Known(ctx context.Context, id counter.IdempotencyKey) (bool, error) {
	return s.known(ctx, id)
}

// Remember remembers the idempotency key of a batch that another store has made.
func (s *Store) Remember(ctx context.Context, id counter.IdempotencyKey) error {
	_, err := s.remember(ctx, id)

	return err
}

// known reports whether a batch with that idempotency key was made.
func (s *Store) known(ctx context.Context, id counter.IdempotencyKey) (bool, error) {
	if id == (counter.IdempotencyKey{}) {
		return false, nil
	}

	// The home of the key knows, whatever partitions the batch has counters in.
	more := owner.More{Asked: []counter.IdempotencyKey{id}}
	answer, err := s.do(ctx, owner.Call{Partition: homeOf(id), More: &more})
	if err != nil {
		return false, err
	}

	return answer.More.Known[0], nil
}

// remember makes the home of an idempotency key remember it.
func (s *Store) remember(ctx context.Context, id counter.IdempotencyKey) (owner.Answer, error) {
	if id == (counter.IdempotencyKey{}) {
		return owner.Answer{}, nil
	}

	more := owner.More{Remembered: []counter.IdempotencyKey{id}}

	return s.do(ctx, owner.Call{Partition: homeOf(id), More: &more})
}

// refusal returns why a batch would be refused, given the counters before it, or nil.
func refusal(op *counter.Op, before counter.Found) error {
	added := make([]int64, len(before.Readings)) // a key may occur several times
	for i := range op.Changes {
		c := &op.Changes[i]
		at := before.At[i]
		is := &before.Readings[at].Counter
		*is = is.Or(c.Rule.Kind) // the first change of a new counter decides its kind

		have := *is
		have.Value += added[at]
		if conflict := c.Refusal(have); conflict != nil {
			conflict.Value = is.Value
			return conflict
		}

		added[at] += c.Delta
	}

	return nil
}

// split splits a batch by partition. The parts share their memory, because a batch is large.
func split(op *counter.Op) []part {
	places := make([]int, len(op.Changes))
	var sizes [rows.Partitions]int
	for i := range op.Changes {
		places[i] = placeOf(&op.Changes[i])
		sizes[places[i]]++
	}

	changes := make([]counter.Change, len(op.Changes))
	indexes := make([]int, len(op.Changes))
	parts := make([]part, 0, rows.Partitions)
	var at [rows.Partitions]int // the part of each partition
	from := 0
	for partition, size := range sizes {
		if size == 0 {
			continue
		}

		// Each part gets exactly the room that it will fill, so that its appends stay out of the next one.
		own := counter.Op{Changes: changes[from : from : from+size]}
		if op.IdempotencyKey != (counter.IdempotencyKey{}) {
			own.IdempotencyKey = partKey(op.IdempotencyKey, partition)
		}
		// This index differs from the partition's number, since partitions without changes have no part.
		at[partition] = len(parts)
		parts = append(parts, part{
			call:    owner.Call{Partition: partition, Ops: []counter.Op{own}},
			indexes: indexes[from : from : from+size],
		})
		from += size
	}

	for i := range op.Changes {
		to := &parts[at[places[i]]]
		to.call.Ops[0].Changes = append(to.call.Ops[0].Changes, op.Changes[i])
		to.indexes = append(to.indexes, i)
	}

	return parts
}

// join combines the results of the parts of a batch. The first part decides whether the batch is a replay, so of two
// concurrent repetitions exactly one is.
func join(op *counter.Op, parts []part) counter.Result {
	whole := counter.Result{Counters: make([]counter.Counter, len(op.Changes))}
	for i := range parts {
		one := &parts[i]
		if one.Err != nil {
			// Not %w: the part's error may say that nothing was made, but other parts may have been.
			return counter.Result{Err: fmt.Errorf("call: %w: a part of a batch: %v", counter.ErrUnavailable, one.Err)}
		}

		own := &one.Results[0]
		// The counter was changed after applyParts had looked at it, so other parts may have been made.
		if own.Err != nil {
			return counter.Result{Err: own.Err}
		}
		if i == 0 {
			whole.Replay = own.Replay
		}
		for at, index := range one.indexes {
			whole.Counters[index] = own.Counters[at]
		}
	}

	return whole
}
