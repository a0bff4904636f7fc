package regions

import (
	"context"
	"crypto/rand"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"

	"headcount/counter/counterredis"
	"headcount/internal/replication"
)

const (
	compareEvery = 10          // times Config.Every, 2 s, between two comparisons of positions
	maxItems     = 16384       // of one round, about: its counters, and one for each itemBytes of them
	bucketItems  = 256         // of one bucket in one round
	itemBytes    = 256         // bytes that count as one item
	warnEvery    = time.Minute // between two warnings about lost data
)

// link replicates counters to one peer. It implements replication.Protocol. Only Send uses the fields without another
// comment.
type link struct {
	Peer
	*replication.Link[counterredis.Position]
	s   *Store
	log zerolog.Logger

	news, odd, all, failures prometheus.Counter

	failing   atomic.Bool       // the failure was logged
	said      string            // the unexpected name of the peer's region that was logged
	oddSaid   bool              // it was logged that counters cannot be merged
	lost      time.Time         // when a loss of data was last logged
	transfers map[int]*transfer // buckets that are being sent whole
}

// transfer is the state of a bucket that is sent whole, because its log does not reach back to the peer's position.
// Until the end of the transfer the peer has the zero Position.
type transfer struct {
	scan  *counterredis.Scan
	to    counterredis.Position // the log's position at the beginning: later changes follow from the log
	word  string                // names the transfer at the peer
	begun bool                  // the peer knows the transfer
	ended bool                  // scan has nothing after lines
	lines []counterredis.Line   // read but not acknowledged
	size  int                   // of lines, in items
}

func newLink(s *Store, p Peer, m *metrics) *link {
	l := &link{
		Peer: p, s: s, log: s.cfg.Log.With().Str("peer", p.Name).Logger(), transfers: map[int]*transfer{},
		news: m.news.WithLabelValues(p.Name), odd: m.odd.WithLabelValues(p.Name), all: m.all.WithLabelValues(p.Name),
		failures: m.failures.WithLabelValues(p.Name),
	}
	l.Link = replication.New(l, replication.Config{Every: s.cfg.Every, CompareEvery: compareEvery * s.cfg.Every, MaxItems: maxItems})
	return l
}

// Owned returns the buckets of this process.
func (l *link) Owned() []int { return counterredis.Owned(l.s.cfg.Owner) }

// Greet implements replication.Protocol. It does nothing, because the peer checks the name of its region with each
// batch.
func (l *link) Greet(context.Context) error { return nil }

// Positions reads the peer's positions in the logs.
func (l *link) Positions(ctx context.Context, believed []replication.At[counterredis.Position]) ([]counterredis.Position, error) {
	buckets := make([]int, len(believed))
	for i, at := range believed {
		buckets[i] = at.Bucket
	}
	return l.Remote.Positions(ctx, l.s.cfg.Region, buckets)
}

// Failed counts a failure. The first one is logged as a warning.
func (l *link) Failed(err error) {
	l.failures.Inc()
	if l.failing.Swap(true) {
		l.log.Debug().Err(err).Msg("replicating counters to the peer failed; trying again")
		return
	}
	l.log.Warn().Err(err).Msg("counters cannot be replicated to the peer; trying again until they can")
}

// Send sends the log after each position. For a bucket whose log does not reach back to the position it sends the
// next page of the whole bucket.
func (l *link) Send(ctx context.Context, from []replication.At[counterredis.Position], limit int) ([]replication.Result[counterredis.Position], error) {
	results := make([]replication.Result[counterredis.Position], len(from))
	var messages []counterredis.Message
	var of []int // the index in results of each message
	items := 0
	batches, err := l.outgoing(ctx, from, min(bucketItems, limit))
	if err != nil {
		return nil, err
	}
	for i, at := range from {
		b, t := batches[at.Bucket], l.transfers[at.Bucket]
		results[i].Position = at.Position
		switch {
		case t == nil && b.To == b.From && len(b.Lines) == 0: // nothing has changed
		case items >= limit: // in the next round
			results[i].Outcome = replication.More
		case t == nil:
			items += size(b.Lines)
			messages, of = append(messages, counterredis.Message{Batch: b, Mode: counterredis.ModeLog}), append(of, i)
		default:
			if err := t.read(ctx); err != nil {
				delete(l.transfers, at.Bucket) // another server may answer, where the cursor of the scan has no meaning
				return nil, err
			}
			items += t.size
			if !t.begun {
				messages, of = append(messages, t.message(at.Bucket, counterredis.ModeBegin, nil)), append(of, i)
			}
			mode := counterredis.ModePage
			if t.ended {
				mode = counterredis.ModeEnd
			}
			messages, of = append(messages, t.message(at.Bucket, mode, t.lines)), append(of, i)
		}
	}
	if len(messages) > 0 {
		acks, err := l.Remote.Merge(ctx, l.s.cfg.Region, l.Name, messages)
		if err != nil {
			return nil, err
		}
		for i := range acks {
			l.show(&acks[i])
			l.acked(&messages[i], &acks[i], &results[of[i]])
		}
	}
	if l.failing.Swap(false) {
		l.log.Info().Msg("counters are replicated to the peer again")
	}
	return results, nil
}

// outgoing returns the batches of buckets that are not sent whole, and begins the transfers of those that have to be.
func (l *link) outgoing(ctx context.Context, from []replication.At[counterredis.Position], limit int) (map[int]counterredis.Batch, error) {
	var buckets []int
	var positions []counterredis.Position
	for _, at := range from {
		if at.Position != (counterredis.Position{}) { // another process may have sent the whole bucket
			delete(l.transfers, at.Bucket)
		}
		if l.transfers[at.Bucket] == nil {
			buckets, positions = append(buckets, at.Bucket), append(positions, at.Position)
		}
	}
	found, err := l.s.cfg.Local.Outgoing(ctx, buckets, positions, limit)
	if err != nil {
		return nil, err
	}
	batches := map[int]counterredis.Batch{}
	for _, b := range found {
		batches[b.Bucket] = b
		if b.All {
			l.transfers[b.Bucket] = &transfer{scan: l.s.cfg.Local.Scan(b.Bucket), to: b.To, word: rand.Text()}
		}
	}
	return batches, nil
}

// size returns the size of lines in items.
func size(lines []counterredis.Line) int {
	bytes := 0
	for i := range lines {
		bytes += lines[i].Size()
	}
	return len(lines) + bytes/itemBytes
}

// read reads the next page, unless the last one has not been acknowledged yet.
func (t *transfer) read(ctx context.Context) error {
	for !t.ended && t.size < bucketItems {
		lines, more, err := t.scan.Next(ctx, bucketItems)
		if err != nil {
			return err
		}
		t.lines, t.ended = append(t.lines, lines...), !more
		t.size = size(t.lines)
	}
	return nil
}

func (t *transfer) message(b int, mode counterredis.Mode, lines []counterredis.Line) counterredis.Message {
	return counterredis.Message{Batch: counterredis.Batch{Bucket: b, To: t.to, Lines: lines}, Mode: mode, Word: t.word}
}

// acked sets the result of a bucket from the acknowledgement of its last message.
func (l *link) acked(message *counterredis.Message, ack *counterredis.Ack, result *replication.Result[counterredis.Position]) {
	switch t := l.transfers[message.Bucket]; {
	case ack.Other == counterredis.NoRegion: // no process of the peer has started yet
		result.Outcome = replication.Later
		return
	case ack.Other != "": // the wrong region: send nothing until the next comparison
		result.Outcome = replication.Sent
		return
	case message.Mode == counterredis.ModeBegin:
		t.begun = true
		l.all.Inc()
	case message.Mode == counterredis.ModePage:
		t.lines, t.size = nil, 0
	case message.Mode == counterredis.ModeEnd:
		delete(l.transfers, message.Bucket)
	}
	result.Position = ack.At
	switch {
	case message.Mode == counterredis.ModeEnd && ack.At != message.To:
		// The peer lost data, or another process sends the bucket, too.
		result.Outcome = replication.Later
	case message.Mode != counterredis.ModeLog || message.More || ack.At != message.To:
		result.Outcome = replication.More
	default:
		result.Outcome = replication.Sent
	}
}

// show counts and logs an acknowledgement.
func (l *link) show(ack *counterredis.Ack) {
	l.news.Add(float64(ack.News))
	l.odd.Add(float64(ack.Odd))
	switch {
	case ack.Other == counterredis.NoRegion:
	case ack.Other != l.said:
		if l.said = ack.Other; ack.Other != "" {
			l.log.Warn().Str("region", ack.Other).Msg("counters are not replicated to this peer: its region has another name; correct --peer")
		} else {
			l.log.Info().Msg("the peer has the expected name again: replicating counters")
		}
	}
	if ack.Older && time.Since(l.lost) > warnEvery { // all buckets report it, but one line is enough
		l.lost = time.Now()
		l.log.Warn().Msg("Redis of this region lost data: changes of counters that had not been replicated yet are gone")
	}
	if ack.Odd > 0 && !l.oddSaid {
		l.oddSaid = true
		l.log.Warn().Int("counters", ack.Odd).Msg("the peer cannot merge some counters: its rules give them another kind, or their totals overflow 64 bits; every region needs the same rules")
	}
}
