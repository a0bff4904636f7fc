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

// A Redis that was used without PostgreSQL has exact counters as well, in partition owner.ExactPartition. A gateway
// copies these to the tables of exactpg, with their ledgers and the idempotency keys of that partition, and has their
// owner delete them. Only then are the partition's remaining rows copied to PostgreSQL, see package rowstier. Until
// then no process uses exact counters, and gateways are not ready. Processes without PostgreSQL cannot run at the same
// time: their settings contradict those of the cluster, so they are refused at start (presence.ErrFacts).

var errAdopting = errors.New("counters in Redis are being copied into PostgreSQL")

// adoptedEvery is the time between two checks whether everything is in PostgreSQL.
const adoptedEvery = 100 * time.Millisecond

// gate returns why exact counters cannot be used yet, or nil.
func (t *Tiered) gate() error {
	if t.adopted.Load() {
		return nil
	}

	return fmt.Errorf("routed: %w: %w", counter.ErrUnavailable, errAdopting)
}

// awaitAdopted copies exact counters from Redis to PostgreSQL. It returns when all counters are there, or when ctx
// ends.
func (t *Tiered) awaitAdopted(ctx context.Context, owned *call.Store) {
	all := make([]int, rows.Partitions)
	for id := range all {
		all[id] = id
	}

	// Other processes may own partitions, so ask the fast store for the state of all partitions.
	for {
		adopted, err := t.tier.Adopted(ctx, all...)
		if adopted {
			t.adopted.Store(true)
			// Observers check the readiness of this process whenever they get a state, so send the last one again.
			t.postgres.Repeat()
			return
		}

		if err == nil {
			err = t.carryExact(ctx, owned)
		}
		if err != nil {
			t.cfg.Log.Debug().Err(err).Msg("counters: copying exact counters from Redis to PostgreSQL failed; retrying")
		}

		if !outage.Sleep(ctx, adoptedEvery) {
			return
		}
	}
}

// mayAdopt returns why a partition cannot be copied to PostgreSQL yet: it has exact counters, which belong in other
// tables.
func (t *Tiered) mayAdopt(ctx context.Context, partition int) error {
	if partition != owner.ExactPartition {
		return nil
	}

	// The first exact counter ends the dump.
	return owner.NewReader(t.tier, rows.PartitionOf).DumpExact(ctx, func(counter.Copy) error { return errAdopting })
}

// carriedAtOnce is how many exact counters one transaction copies.
const carriedAtOnce = 200

// carryExact copies exact counters from Redis to PostgreSQL, if the state of their partition says that this is not done
// yet. It may be repeated, and run in several gateways at once: nothing in PostgreSQL is ever replaced by something
// older.
func (t *Tiered) carryExact(ctx context.Context, owned *call.Store) error {
	isDone, err := t.tier.Adopted(ctx, owner.ExactPartition)
	if err != nil || isDone {
		return err
	}

	var some []counter.Copy
	remembers := false
	flush := func() error {
		// Copy the idempotency keys first, so that PostgreSQL knows a key before the counter that was changed with it.
		if !remembers {
			if err := t.carryIDs(ctx); err != nil {
				return err
			}
		}
		remembers = true

		copies := some
		some = nil

		return t.carry(ctx, owned, copies)
	}
	err = owner.NewReader(t.tier, rows.PartitionOf).DumpExact(ctx, func(c counter.Copy) error {
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

// carryIDs copies the idempotency keys of exact counters.
func (t *Tiered) carryIDs(ctx context.Context) error {
	// A store that cannot list its rows was never used alone, so it has no keys to carry.
	fast, ok := t.fast.(rowstier.Lister)
	if !ok {
		return nil
	}

	return fast.Contents(ctx, func(partition int, _ []string, ids []rows.ID) error {
		if partition != owner.ExactPartition || len(ids) == 0 {
			return nil
		}

		return t.exact.Remember(ctx, ids)
	})
}

// carry copies some exact counters.
func (t *Tiered) carry(ctx context.Context, owned *call.Store, copies []counter.Copy) error {
	// Write the counters to PostgreSQL before deleting them from Redis. A process that dies in between leaves them in
	// both, and the repetition deletes those in Redis.
	if _, err := t.exact.Restore(ctx, copies, t.cfg.Rules); err != nil {
		return err
	}

	// The counters in Redis are exact, even if their rules have another kind by now.
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
