package owner

import (
	"context"
	"time"

	"headcount/internal/rows"
	"headcount/internal/wake"
)

// Tier is a fast store in front of a lasting one, see package rowstier.
type Tier interface {
	// ScanResident is rows.Store.Scan for the rows that are in the fast store.
	ScanResident(ctx context.Context, partition int, collection, after string, each func(string, []byte) error) error
	// Evict has rows leave the fast store, except those that the lasting one has not got yet.
	Evict(partition int, names []rows.Name)
}

// coldLooks is how often cold counters are looked for within Config.ColdAfter.
const coldLooks = 4

// evictEach has the rows of counters leave the fast store that nobody has changed for Config.ColdAfter, again and
// again. Its rows say when a counter was changed, so nothing has to be remembered, and a look costs one scan of heads.
func (o *Owner) evictEach() {
	for wake.Wait(o.ctx, max(o.cfg.ColdAfter/coldLooks, time.Millisecond), nil) {
		for _, p := range o.partitions() {
			o.evictCold(p.id, time.Now().Add(-o.cfg.ColdAfter))
		}
	}
}

// evictCold evicts what a partition has of counters that were changed before a moment. What fails is evicted another
// time.
func (o *Owner) evictCold(partition int, before time.Time) {
	ctx, cancel := o.limited()
	defer cancel()

	var cold []head
	_ = o.cfg.Tier.ScanResident(ctx, partition, heads, "", func(key string, row []byte) error {
		h := head{key: key}
		if h.decode(row) == nil && h.Updated < before.UnixMilli() {
			cold = append(cold, h)
		}
		return nil
	})

	for i := range cold {
		// The head goes last: it says what other rows there are.
		var names []rows.Name
		for _, collection := range cold[i].collections() {
			err := o.cfg.Tier.ScanResident(ctx, partition, collection, "", func(field string, _ []byte) error {
				names = append(names, rows.Name{Collection: collection, Field: field})
				return nil
			})
			if err != nil {
				return
			}
		}
		o.cfg.Tier.Evict(partition, append(names, headOf(cold[i].key)))
	}
}
