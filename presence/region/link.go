package region

import (
	"context"
	"errors"

	"github.com/rs/zerolog"

	"headcount/internal/replication"
	"headcount/presence/pncounter"
)

const (
	bucketPages = 500   // of one bucket in one round
	maxPages    = 32768 // of all buckets in one round, about
)

// link replicates counts to one peer. It is the replication.Protocol of its Link.
type link struct {
	Peer
	*replication.Link[pncounter.Position]
	r       *Replicator
	log     zerolog.Logger
	refused string       // why the peer is refused; empty: it is not; used by Greet only
	broken  map[int]bool // buckets that the peer failed to merge; used by Send only
}

func newLink(r *Replicator, p Peer) *link {
	l := &link{Peer: p, r: r, log: r.cfg.Log.With().Str("peer", p.Name).Logger(), broken: map[int]bool{}}
	l.Link = replication.New(l, replication.Config{Every: r.cfg.Every, CompareEvery: compareEvery, MaxItems: maxPages})

	return l
}

// Owned returns no buckets before the region has an identity to greet with.
func (l *link) Owned() []int {
	if l.r.identity.Load() == nil {
		return nil
	}

	l.r.mu.Lock()
	defer l.r.mu.Unlock()
	// Own replaces the list and nobody writes to it, so it may be read without the lock.
	return l.r.buckets
}

// Greet greets the peer, and reports in the log and the metrics whether the peer is refused.
func (l *link) Greet(ctx context.Context) error {
	// A greeting would pass the last counts of this region off as those of now. What can still be read is sent.
	if l.r.isAway() {
		return nil
	}

	err := l.Remote.Hello(ctx, *l.r.identity.Load())
	refused := errors.Is(err, pncounter.ErrRefused)
	if err != nil && !refused {
		return err // a refused peer that does not answer stays refused
	}

	reason := ""
	value := 0.0
	if refused {
		reason = err.Error()
		value = 1
	}

	changed := reason != l.refused
	if changed && refused {
		l.log.Warn().Err(err).Msg("counts are not shared with the peer")
	}
	if changed && !refused {
		l.log.Info().Msg("counts are shared with the peer again")
	}

	// Logged only when it changes: a peer is greeted for as long as it is refused.
	l.refused = reason
	l.r.metrics.refused.WithLabelValues(l.Name).Set(value)

	if err != nil {
		return replication.ErrRefused
	}
	return nil
}

// Positions reads the peer's positions, and counts the buckets of which the peer has lost data.
func (l *link) Positions(
	ctx context.Context, believed []replication.At[pncounter.Position],
) ([]pncounter.Position, error) {
	buckets := make([]int, len(believed))
	for i, at := range believed {
		buckets[i] = at.Bucket
	}

	found, err := l.Remote.Positions(ctx, buckets)
	if err != nil {
		return nil, err
	}

	for i, at := range believed {
		old := at.Position
		lost := found[i].Log != old.Log || found[i].Cursor < old.Cursor
		// A peer that has not had the whole log yet has lost nothing.
		if old.Done && lost {
			l.r.metrics.repairs.WithLabelValues(l.Name).Inc()
		}
	}

	return found, nil
}

// Failed counts a failure.
func (l *link) Failed(err error) {
	l.r.metrics.failures.WithLabelValues(l.Name).Inc()
	l.log.Debug().Err(err).Msg("changes could not be sent to the peer; retrying")
}

// Send sends the changes after the positions in the logs. It begins a new log for a bucket whose log the peer could
// not merge.
func (l *link) Send(
	ctx context.Context, from []replication.At[pncounter.Position], limit int,
) ([]replication.Result[pncounter.Position], error) {
	positions := make([]pncounter.Position, len(from))
	results := make([]replication.Result[pncounter.Position], len(from))
	for i, at := range from {
		positions[i] = at.Position
		positions[i].Bucket = at.Bucket
		results[i].Position = positions[i]
	}

	// A single bucket must not use up the round.
	all, err := l.r.cfg.Local.Outgoing(ctx, positions, min(bucketPages, limit))
	if err != nil {
		return nil, err
	}

	var batches []pncounter.Batch
	var of, begin []int // of: the index in results of each batch
	pages := 0
	for i, b := range all {
		at := positions[i]
		// A batch without pages is sent all the same, if it tells the peer that it has the log up to its end.
		unchanged := b.Log == at.Log && b.To == at.Cursor && (at.Done || !b.Complete)

		switch {
		case b.Partial: // Changed marks the bucket again when it is complete
		case b.Log == 0: // the bucket has no log yet
			begin = append(begin, b.Bucket)
			results[i].Outcome = replication.Later
		case b.Forgotten: // the peer may have missed that a page became empty
			l.r.metrics.repairs.WithLabelValues(l.Name).Inc()
			results[i].Outcome = l.raise(ctx, b.Bucket, b.Log, nil)
		case unchanged:
		case pages >= limit: // in the next round
			results[i].Outcome = replication.More
		default:
			pages += len(b.Pages)
			batches = append(batches, b)
			of = append(of, i)
		}
	}

	// One scan of all keys makes the logs of all of them.
	if len(begin) > 0 {
		if err := l.r.cfg.Local.BeginLogs(ctx, begin); err != nil {
			l.Failed(err) // the buckets that have logs go on
		}
	}

	if len(batches) > 0 {
		err = l.merge(ctx, batches, func(i int) *replication.Result[pncounter.Position] { return &results[of[i]] })
	}

	return results, err
}

// merge has the peer merge batches, and makes the result of each from its acknowledgement.
func (l *link) merge(
	ctx context.Context, batches []pncounter.Batch, result func(i int) *replication.Result[pncounter.Position],
) error {
	acks, err := l.Remote.Merge(ctx, batches)
	if err != nil {
		return err
	}

	behind := 0  // buckets
	refused := 0 // pages
	for i, ack := range acks {
		l.acked(ctx, batches[i], ack, result(i))
		refused += len(ack.Refused)
		if ack.Status == pncounter.Behind {
			behind++
		}
	}

	// One line for a whole round, since a loss of data concerns all buckets at once.
	if behind+refused > 0 {
		l.log.Warn().Int("buckets", behind).Int("pages", refused).
			Msg("this region's Redis has lost counts that the peer still has; the present counts are sent again, " +
				"with higher incarnations than the lost ones")
	}

	return nil
}

// acked makes the result of a batch from its acknowledgement.
func (l *link) acked(
	ctx context.Context, b pncounter.Batch, ack pncounter.Ack, result *replication.Result[pncounter.Position],
) {
	m := l.r.metrics
	m.merged.WithLabelValues(l.Name).Add(float64(ack.Changed))

	if ack.Malformed > 0 {
		m.malformed.WithLabelValues(l.Name).Add(float64(ack.Malformed))
		l.log.Warn().Int("pages", ack.Malformed).Int("bucket", b.Bucket).
			Msg("the peer's Redis holds counts that cannot be read; this region's counts among them are written again")
	}

	// Unless a case below says otherwise, the bucket has more to send.
	result.Outcome = replication.More
	switch ack.Status {
	case pncounter.Merged:
		delete(l.broken, b.Bucket)
		result.Position = pncounter.Position{Bucket: b.Bucket, Log: ack.Log, Cursor: ack.Cursor, Done: ack.Done}
		if len(ack.Refused) > 0 { // the peer ignored these pairs: send them again, raised
			pages := make([]string, len(ack.Refused))
			for i, at := range ack.Refused {
				pages[i] = b.Pages[at].Page
			}
			result.Outcome = l.raise(ctx, b.Bucket, ack.High, pages)
		} else if !b.More {
			result.Outcome = replication.Sent
		}
	case pncounter.Behind: // this region has lost data, and the peer knows its old pairs
		m.repairs.WithLabelValues(l.Name).Inc()
		result.Outcome = l.raise(ctx, b.Bucket, ack.High, nil)
	case pncounter.Gap: // the peer has less than the link believed: go on from there
		m.repairs.WithLabelValues(l.Name).Inc()
		result.Position = pncounter.Position{Bucket: b.Bucket, Log: ack.Log, Cursor: ack.Cursor}
	case pncounter.Failed:
		l.Failed(ack.Err)
		// Logged once: it is tried again for as long as it lasts.
		if !l.broken[b.Bucket] {
			l.broken[b.Bucket] = true
			l.log.Warn().Err(ack.Err).Int("bucket", b.Bucket).
				Msg("the peer cannot accept changes of a bucket; retrying (other buckets are not affected)")
		}
		result.Outcome = replication.Later
	case pncounter.Unready: // the bucket has no owner at the peer yet
		result.Outcome = replication.Later
	}
}

// raise gives pages of this region, or without pages a log, numbers above high, and returns when the bucket is sent
// again.
func (l *link) raise(ctx context.Context, bucket int, high uint64, pages []string) replication.Outcome {
	if err := l.r.cfg.Local.Raise(ctx, bucket, high, pages); err != nil {
		l.Failed(err)

		return replication.Later
	}
	return replication.More
}
