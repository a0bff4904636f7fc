package routed

import (
	"context"

	"headcount/counter"
	"headcount/counter/exactpg"
	"headcount/counter/owner"
	"headcount/internal/rows"
)

// Rows returns a store of rows that has the heads of exact counters in partition owner.Outside.
func Rows(store rows.Store, exact *exactpg.Store) rows.Store { return withExact{store, exact} }

type withExact struct {
	rows.Store
	exact *exactpg.Store
}

// Read implements rows.Store.
func (w withExact) Read(ctx context.Context, addresses []rows.Address) []rows.Found {
	var keys []string
	var outside, inside []int // indexes
	var others []rows.Address
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
	states, err := w.exact.States(ctx, keys)
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

// Elsewhere returns an exactpg.Config.Elsewhere that looks among the counters of owners. Store is without [Rows].
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
