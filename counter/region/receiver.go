package region

import (
	"context"
	"errors"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"

	"headcount/counter/owner"
	"headcount/internal/rows"
	"headcount/internal/wake"
)

const (
	// pendingMost is the number of counters of a partition that wait to be merged. If there are more, the whole inbox of
	// the partition is read.
	pendingMost = 4096
	// mergeMost is the number of counters that one call merges.
	mergeMost = 256
	// mergeWithin limits one call.
	mergeWithin = 3 * time.Second
)

// receiver merges what one peer has written into its inbox here. It belongs to the goroutine of run, apart from the
// mailbox.
type receiver struct {
	Peer
	r    *Region
	log  zerolog.Logger
	wake chan struct{} // has capacity 1: something has come

	news, odd prometheus.Counter

	mail mailbox

	epochs  [rows.Partitions]uint64          // by which claims the partitions are owned that are read
	pending [rows.Partitions]map[string]bool // whether a repair has brought it
	whole   [rows.Partitions]*reading
	oddSaid bool
}

// reading is how far the whole inbox of a partition is read.
type reading struct{ after string }

func newReceiver(r *Region, p Peer) *receiver {
	return &receiver{
		Peer: p,
		r:    r,
		log:  r.cfg.Log.With().Str("peer", p.Name).Logger(),
		wake: make(chan struct{}, 1),
		news: r.metrics.news.WithLabelValues(p.Name),
		odd:  r.metrics.odd.WithLabelValues(p.Name),
	}
}

// watch hears the inbox until ctx ends.
func (v *receiver) watch(ctx context.Context) {
	heard := func(partition int, _ uint64, publication []byte) {
		keys, repair, ok := parseKeys(publication)
		v.mail.put(partition, keys, repair, ok)
		wake.Signal(v.wake)
	}
	missed := func() {
		v.mail.miss()
		wake.Signal(v.wake)
	}

	for {
		_ = v.In.Watch(ctx, heard, missed)
		if !wake.Wait(ctx, v.r.cfg.Every, nil) {
			return
		}
	}
}

// run merges until ctx ends.
func (v *receiver) run(ctx context.Context) {
	// A partition that comes to this process is read whole, and so is one whose owner has healed its store.
	for wake.Wait(ctx, v.r.cfg.Every, v.wake) {
		if v.r.misnamed.Load() {
			continue
		}

		v.own()
		v.collect()
		for again := true; again && ctx.Err() == nil; {
			again = v.round(ctx)
		}
	}
}

// own follows which partitions this process owns.
func (v *receiver) own() {
	epochs := v.r.epochs()
	for id, epoch := range epochs {
		if epoch == v.epochs[id] {
			continue
		}

		v.epochs[id] = epoch
		v.pending[id] = nil
		v.whole[id] = nil
		if epoch != 0 {
			v.whole[id] = &reading{}
		}
	}
}

// collect takes what has come.
func (v *receiver) collect() {
	missed, came := v.mail.take()
	for id := range v.epochs {
		if v.epochs[id] == 0 {
			continue
		}

		m := came[id]
		if v.pending[id] == nil {
			v.pending[id] = map[string]bool{}
		}
		for _, key := range m.keys {
			if !v.pending[id][key] {
				v.pending[id][key] = false
			}
		}
		for _, key := range m.repairs {
			v.pending[id][key] = true
		}
		if missed || m.overflow || len(v.pending[id]) > pendingMost {
			v.pending[id] = nil
			v.whole[id] = &reading{}
		}
	}
}

// round merges some counters of each partition, and reports whether there are more. What fails is tried again in the
// next pass of run.
func (v *receiver) round(ctx context.Context) (more bool) {
	for id := range v.epochs {
		if len(v.pending[id]) > 0 && v.some(ctx, id) {
			more = true
		}
		if v.whole[id] != nil && v.page(ctx, id) {
			more = true
		}
	}

	return more
}

// some merges some of the counters that have changed, and reports whether there are more.
func (v *receiver) some(ctx context.Context, id int) (more bool) {
	var keys []string
	var addresses []rows.Address
	for key := range v.pending[id] {
		if len(keys) == mergeMost {
			break
		}
		keys = append(keys, key)
		addresses = append(addresses, rows.Address{Partition: id, Name: shareRow(key)})
	}

	ctx, cancel := context.WithTimeout(ctx, mergeWithin)
	defer cancel()
	var hear owner.Hear
	for i, found := range v.In.Read(ctx, addresses) {
		if found.Err != nil {
			return false
		}
		v.add(&hear, keys[i], found.Value, v.pending[id][keys[i]])
	}
	if !v.merge(ctx, id, &hear) {
		return false
	}

	for _, key := range keys {
		delete(v.pending[id], key)
	}

	return len(v.pending[id]) > 0
}

// errEnough ends a scan.
var errEnough = errors.New("enough")

// page merges the next counters of a whole inbox, and reports whether there are more.
func (v *receiver) page(ctx context.Context, id int) (more bool) {
	ctx, cancel := context.WithTimeout(ctx, mergeWithin)
	defer cancel()

	var hear owner.Hear
	n := 0
	last := ""
	err := v.In.Scan(ctx, id, sharesOf, v.whole[id].after, func(key string, row []byte) error {
		v.add(&hear, key, row, true) // nobody knows what has brought it
		n++
		last = key
		if n == mergeMost {
			return errEnough
		}
		return nil
	})
	if err != nil && !errors.Is(err, errEnough) || !v.merge(ctx, id, &hear) {
		return false
	}

	if err == nil {
		v.whole[id] = nil
		return false
	}
	v.whole[id].after = last

	return true
}

// add adds a row to what is merged. One that nobody reads is left out: its sender writes it again with the next change.
func (v *receiver) add(hear *owner.Hear, key string, row []byte, repair bool) {
	if row == nil {
		return // the inbox has lost it, and its sender sends it again
	}
	one, err := parseShare(key, row)
	if err != nil {
		v.log.Warn().Err(err).Msg("a share of the peer cannot be read; run the same version in all regions")
		return
	}

	one.Repair = repair
	hear.Shares = append(hear.Shares, one)
}

// merge has the owner merge shares, and reports whether it did.
func (v *receiver) merge(ctx context.Context, id int, hear *owner.Hear) bool {
	if len(hear.Shares) == 0 {
		return true
	}

	hear.From = v.Name
	answer, err := v.r.owner.Do(ctx, owner.Call{Partition: id, More: &owner.More{Hear: hear}})
	if err != nil {
		return false
	}

	merged := answer.More.Merged
	v.news.Add(float64(merged.New))
	v.odd.Add(float64(merged.Odd))
	if merged.Odd > 0 && !v.oddSaid {
		v.oddSaid = true
		const what = "some counters of the peer cannot be merged: the rules here give them another kind, or their totals " +
			"overflow 64 bits; every region needs the same rules"
		v.log.Warn().Int("counters", merged.Odd).Msg(what)
	}

	return true
}
