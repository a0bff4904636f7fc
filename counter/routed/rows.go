package routed

import (
	"context"
	"time"

	"headcount/counter"
	"headcount/counter/exactpg"
	"headcount/counter/owner"
	"headcount/internal/rows"
)

// Rows returns a store of rows that has the heads of exact counters in partition owner.Outside.
func Rows(store rows.Store, exact *exactpg.Store) rows.Store {
	return withExact{Store: store, exact: exact}
}

type withExact struct {
	rows.Store
	exact *exactpg.Store
	// optional: while PostgreSQL is unavailable, owners create counters without looking for them there
	optional bool
}

// lookWithin limits how long PostgreSQL may delay owners that can continue without it.
const lookWithin = 200 * time.Millisecond

// Read implements rows.Store.
func (w withExact) Read(ctx context.Context, addresses []rows.Address) []rows.Found {
	var keys []string
	var outside, inside []int // indexes
	var others []rows.Address

	// Partition Outside exists in no store of rows, so its addresses are not passed on.
	for i, at := range addresses {
		if at.Partition == owner.Outside {
			keys = append(keys, at.Field)
			outside = append(outside, i)
		} else {
			others = append(others, at)
			inside = append(inside, i)
		}
	}
	if len(keys) == 0 {
		return w.Store.Read(ctx, addresses)
	}

	found := make([]rows.Found, len(addresses))
	states, err := w.states(ctx, keys)

	// A counter that is not exact looks like one that does not exist.
	for i, key := range keys {
		found[outside[i]].Err = err
		if is, ok := states[key]; ok {
			found[outside[i]].Value = owner.EncodeHead(is)
		}
	}
	if len(others) == 0 {
		return found
	}

	for i, one := range w.Store.Read(ctx, others) {
		found[inside[i]] = one
	}

	return found
}

// states returns the exact counters among keys.
func (w withExact) states(ctx context.Context, keys []string) (map[string]counter.State, error) {
	if !w.optional {
		return w.exact.States(ctx, keys)
	}

	ctx, cancel := context.WithTimeout(ctx, lookWithin)
	defer cancel()
	states, err := w.exact.States(ctx, keys)
	if err != nil {
		return nil, nil // as if there were none
	}

	return states, nil
}

// Elsewhere returns an exactpg.Config.Elsewhere that looks among the counters of owners. Store must not be wrapped by
// [Rows].
func Elsewhere(store rows.Store) func(ctx context.Context, keys []string) ([]counter.Counter, error) {
	read := owner.NewReader(store, rows.PartitionOf)

	return func(ctx context.Context, keys []string) (found []counter.Counter, err error) {
		readings, err := read.Read(ctx, keys, "", 0)
		for _, one := range readings {
			if one.Kind != 0 {
				found = append(found, one.Counter)
			}
		}
		return found, err
	}
}
