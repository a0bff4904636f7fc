package owner

import (
	"context"
	"time"

	"headcount/internal/rows"
	"headcount/internal/wake"
)

// Tier is a store of rows in two tiers, see package rowstier.
type Tier interface {
	// ScanResident is rows.Store.Scan for the rows in the fast store.
	ScanResident(ctx context.Context, partition int, collection, after string, each func(string, []byte) error) error
	// Evict removes rows from the fast store, except those that the durable store does not have yet.
	Evict(partition int, names []rows.Name)
}

// coldLooks is how often evictEach looks for cold counters within one Config.ColdAfter.
const coldLooks = 4

// evictEach evicts the rows of counters that did not change for Config.ColdAfter from the fast store, again and again.
// The head of a counter has the time of its last change, so a pass needs no bookkeeping, only one scan of the heads.
func (o *Owner) evictEach() {
	for wake.Wait(o.ctx, max(o.cfg.ColdAfter/coldLooks, time.Millisecond), nil) {
		for _, p := range o.partitions() {
			o.evictCold(p.id, time.Now().Add(-o.cfg.ColdAfter))
		}
	}
}

// evictCold evicts the counters of a partition that last changed before a given time. Whatever fails is left to the
// next pass.
func (o *Owner) evictCold(partition int, before time.Time) {
	// One limit for the whole pass, so that a slow store ends it early.
	ctx, cancel := o.limited()
	defer cancel()

	var cold []head
	_ = o.cfg.Tier.ScanResident(ctx, partition, heads, "", func(key string, row []byte) error {
		h := head{key: key}
		// A head that cannot be decoded stays: nothing says how old it is.
		if h.decode(row) == nil && h.Updated < before.UnixMilli() {
			cold = append(cold, h)
		}
		return nil
	})

	for i := range cold {
		// The head goes last, because it says which other rows there are.
		var names []rows.Name
		for _, collection := range cold[i].collections() {
			err := o.cfg.Tier.ScanResident(ctx, partition, collection, "", func(field string, _ []byte) error {
				names = append(names, rows.Name{Collection: collection, Field: field})
				return nil
			})
			// The head must stay as long as some rows may be left that only it names.
			if err != nil {
				return
			}
		}
		o.cfg.Tier.Evict(partition, append(names, headOf(cold[i].key)))
	}
}
