package region

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"

	"headcount/counter/owner"
	"headcount/counter/share"
	"headcount/internal/rows"
	"headcount/internal/wake"
)

const (
	// mergeMost is the maximum number of counters that one call merges.
	mergeMost = 256
	// mergeWithin limits one call.
	mergeWithin = 3 * time.Second
)

// receiver merges the shares that one peer has written into its inbox here.
type receiver struct {
	Peer
	backlogs // the shares that are not merged yet; may be used from any goroutine
	r        *Region
	log      zerolog.Logger
	wake     chan struct{} // has capacity 1: there is something to merge

	news, rejected prometheus.Counter

	rejectionLogged bool // only run uses it
}

func newReceiver(r *Region, p Peer) *receiver {
	return &receiver{
		Peer:     p,
		r:        r,
		log:      r.cfg.Log.With().Str("peer", p.Name).Logger(),
		wake:     make(chan struct{}, 1),
		news:     r.metrics.news.WithLabelValues(p.Name),
		rejected: r.metrics.rejected.WithLabelValues(p.Name),
	}
}

// watch adds the publications of the inbox to the backlog until ctx ends.
func (v *receiver) watch(ctx context.Context) {
	received := func(partition int, _ uint64, publication []byte) {
		// An unreadable publication may concern any counter, so all have to be compared.
		keys, repair, ok := parseKeys(publication)
		if ok {
			v.addPublished(partition, keys, repair)
		} else {
			v.miss(partition)
		}
		wake.Signal(v.wake)
	}
	missed := func() {
		v.missAll()
		wake.Signal(v.wake)
	}

	for {
		// The error does not matter: when a watch begins, it reports a gap.
		_ = v.Inbox.Watch(ctx, received, missed)
		if !wake.Wait(ctx, v.r.cfg.Every, nil) {
			return
		}
	}
}

// run merges until ctx ends.
func (v *receiver) run(ctx context.Context) {
	for wake.Wait(ctx, v.r.cfg.Every, v.wake) {
		// The counters here belong to another region, and must not be mixed with those of the peer.
		if v.r.misnamed.Load() {
			continue
		}
		for again := true; again && ctx.Err() == nil; {
			again = v.round(ctx)
		}
	}
}

// round merges some counters of each partition, and reports whether there are more. Failed merges are repeated in the
// next round.
func (v *receiver) round(ctx context.Context) (more bool) {
	for id := range rows.Partitions {
		j, ok := v.take(id, mergeMost)
		if !ok {
			continue
		}

		// One call at a time, because all partitions share the owner's turns with this region's own changes.
		merged := false
		if j.comparesAll {
			merged = v.page(ctx, id, &j)
		} else {
			merged = v.some(ctx, id, &j)
		}
		// A failed merge waits for the next round, so that an outage is not met with attempts without a pause.
		if merged && (j.more || j.comparesAll) {
			more = true
		}
	}

	return more
}

// some merges the counters of a job, and reports whether that succeeded.
func (v *receiver) some(ctx context.Context, id int, j *job) (merged bool) {
	defer func() {
		// Whatever fails, the counters stay to be merged.
		if !merged {
			v.putBack(id, j)
		}
	}()
	ctx, cancel := context.WithTimeout(ctx, mergeWithin)
	defer cancel()

	addresses := make([]rows.Address, len(j.keys))
	for i, key := range j.keys {
		addresses[i] = rows.Address{Partition: id, Name: shareRow(key)}
	}
	var received owner.ReceivedShares
	for i, found := range v.Inbox.Read(ctx, addresses) {
		if found.Err != nil {
			return false
		}
		v.add(&received, j.keys[i], found.Value, j.repairs[i])
	}

	return v.merge(ctx, id, &received)
}

// errEnough ends a scan.
var errEnough = errors.New("enough")

// page merges the next page of a whole inbox, and reports whether that succeeded.
func (v *receiver) page(ctx context.Context, id int, j *job) (merged bool) {
	ctx, cancel := context.WithTimeout(ctx, mergeWithin)
	defer cancel()

	var received owner.ReceivedShares
	n := 0
	last := ""
	err := v.Inbox.Scan(ctx, id, sharesOf, j.after, func(key string, row []byte) error {
		v.add(&received, key, row, true) // unknown whether a repair wrote the row, so treat it as one
		n++
		last = key
		if n == mergeMost {
			return errEnough
		}
		return nil
	})
	isAll := err == nil
	isRead := isAll || errors.Is(err, errEnough)
	if !isRead {
		return false
	}

	merged = v.merge(ctx, id, &received)
	if !merged {
		return false
	}

	if isAll {
		last = ""
	}
	// After the merge, so that a page whose merge failed is read again.
	v.pageDone(id, j, last)

	return true
}

// add adds a row to the shares that are merged. It leaves out a malformed row, which the sender replaces at the next
// change.
func (v *receiver) add(received *owner.ReceivedShares, key string, row []byte, repair bool) {
	if row == nil {
		return // the inbox has lost the row; the sender notices and sends it again
	}
	is, err := share.Parse(row)
	if err != nil {
		err = fmt.Errorf("%q: %w", key, err)
		v.log.Warn().Err(err).Msg("the peer's state of a counter is malformed; run the same version in all regions")
		return
	}

	received.Shares = append(received.Shares, owner.ReceivedShare{Key: key, Share: is, Repair: repair})
}

// merge makes the owner merge shares, and reports whether that succeeded.
func (v *receiver) merge(ctx context.Context, id int, received *owner.ReceivedShares) bool {
	if len(received.Shares) == 0 {
		return true
	}

	received.From = v.Name
	// The call has no stream: what fails is put back, and merging twice changes nothing.
	answer, err := v.r.owner.Do(ctx, owner.Call{Partition: id, More: &owner.More{Received: received}})
	if err != nil {
		return false
	}

	merged := answer.More.Merged
	v.news.Add(float64(merged.New))
	v.rejected.Add(float64(merged.Rejected))
	// Log this only once: rules change only when processes start, so every merge would say the same.
	if merged.Rejected > 0 && !v.rejectionLogged {
		v.rejectionLogged = true
		const what = "some counters of the peer cannot be merged: the rules here give them another kind, or " +
			"their totals overflow 64 bits; every region needs the same rules"
		v.log.Warn().Int("counters", merged.Rejected).Msg(what)
	}

	return true
}
