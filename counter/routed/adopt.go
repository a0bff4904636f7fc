package routed

import (
	"context"
	"errors"
	"fmt"
	"time"

	"headcount/counter"
	"headcount/counter/call"
	"headcount/counter/owner"
	"headcount/internal/outage"
	"headcount/internal/rows"
	"headcount/internal/rows/rowstier"
)

// A Redis that was used alone has exact counters as well, in partition owner.ExactPartition. A gateway brings these
// to the tables of exactpg, with their ledgers and the idempotency keys of that partition, and has their owner delete
// them. Only then are the rows of that partition brought to PostgreSQL, see package rowstier. Nobody uses exact
// counters until then, and gateways are not ready. No process without PostgreSQL runs meanwhile: the facts of the
// cluster refuse it.

var errAdopting = errors.New("counters in Redis are being copied into PostgreSQL")

// adoptedEvery is the time between two looks whether PostgreSQL has everything.
const adoptedEvery = 100 * time.Millisecond

// gate returns why exact counters cannot be used yet, or nil.
func (b *Behind) gate() error {
	if b.adopted.Load() {
		return nil
	}

	return fmt.Errorf("routed: %w: %w", counter.ErrUnavailable, errAdopting)
}

// awaitAdopted brings exact counters from Redis to PostgreSQL, and returns when all counters are there, or ctx ends.
func (b *Behind) awaitAdopted(ctx context.Context, owned *call.Store) {
	all := make([]int, rows.Partitions)
	for id := range all {
		all[id] = id
	}

	// Other processes may own partitions, so the front says how far all of them are.
	for {
		adopted, err := b.tier.Adopted(ctx, all...)
		if adopted {
			b.adopted.Store(true)
			b.postgres.Repeat()
			return
		}

		if err == nil {
			err = b.carryExact(ctx, owned)
		}
		if err != nil {
			b.cfg.Log.Debug().Err(err).Msg("counters: copying those of Redis into PostgreSQL")
		}

		if !outage.Sleep(ctx, adoptedEvery) {
			return
		}
	}
}

// mayAdopt returns why a partition cannot be brought to PostgreSQL yet: it has exact counters, which belong elsewhere.
func (b *Behind) mayAdopt(ctx context.Context, partition int) error {
	if partition != owner.ExactPartition {
		return nil
	}

	return owner.NewReader(b.tier, rows.PartitionOf).DumpExact(ctx, func(counter.Copy) error { return errAdopting })
}

// carriedAtOnce is how many exact counters one transaction brings over.
const carriedAtOnce = 200

// carryExact brings exact counters from Redis to PostgreSQL, if their partition says that PostgreSQL has not got it
// yet. It may be done again, and by several gateways at once: what PostgreSQL has is never replaced by something
// older.
func (b *Behind) carryExact(ctx context.Context, owned *call.Store) error {
	isDone, err := b.tier.Adopted(ctx, owner.ExactPartition)
	if err != nil || isDone {
		return err
	}

	var some []counter.Copy
	remembers := false
	flush := func() error {
		// What was made under an idempotency key is known there before its counter is.
		if !remembers {
			if err := b.carryIDs(ctx); err != nil {
				return err
			}
		}
		remembers = true

		copies := some
		some = nil

		return b.carry(ctx, owned, copies)
	}
	err = owner.NewReader(b.tier, rows.PartitionOf).DumpExact(ctx, func(c counter.Copy) error {
		some = append(some, c)
		if len(some) < carriedAtOnce {
			return nil
		}
		return flush()
	})
	if err != nil || len(some) == 0 {
		return err
	}

	return flush()
}

// carryIDs brings over the idempotency keys of exact counters.
func (b *Behind) carryIDs(ctx context.Context) error {
	front, ok := b.front.(rowstier.Front)
	if !ok {
		return nil
	}

	return front.Contents(ctx, func(partition int, _ []string, ids []rows.ID) error {
		if partition != owner.ExactPartition || len(ids) == 0 {
			return nil
		}

		return b.exact.Remember(ctx, ids)
	})
}

// carry brings some exact counters over.
func (b *Behind) carry(ctx context.Context, owned *call.Store, copies []counter.Copy) error {
	if _, err := b.exact.Restore(ctx, copies, b.cfg.Rules); err != nil {
		return err
	}

	// They are exact in Redis, whatever their rules say by now.
	ops := make([]counter.Op, len(copies))
	for i := range copies {
		gone := counter.Change{Key: copies[i].Key, Rule: &counter.Rule{Kind: counter.Exact}, Verb: counter.Delete}
		ops[i].Changes = []counter.Change{gone}
	}
	for _, result := range owned.Apply(ctx, ops) {
		if result.Err != nil {
			return result.Err
		}
	}

	return nil
}
