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
	compareEvery = 10          // times Config.Every, 2 s: between two comparisons of how far the peer has the logs
	maxItems     = 16384       // in one round, about: counters, and each itemBytes of them
	bucketItems  = 256         // of one bucket in one round
	itemBytes    = 256         // that count as an item of their own
	warnEvery    = time.Minute // between two warnings about lost memory
)

// link replicates counters to one peer. It is the replication.Protocol of its Link. What is not explained otherwise only
// Send uses.
type link struct {
	Peer
	*replication.Link[counterredis.Position]
	s   *Store
	log zerolog.Logger

	news, odd, all, failures prometheus.Counter

	failing   atomic.Bool       // the log has said that the link fails
	said      string            // the name of the wrong region there, as the log has it
	oddSaid   bool              // the log has said that counters cannot be merged
	lost      time.Time         // when the log has said that memory is lost
	transfers map[int]*transfer // buckets that are being sent whole
}

// transfer is the state of a bucket that is sent whole, because its log does not reach back to the peer's position. Until
// its end the peer has no position, which is the zero one.
type transfer struct {
	scan  *counterredis.Scan
	to    counterredis.Position // what changes from the beginning on is in the log after it
	word  string                // its name at the peer
	begun bool                  // the peer knows the word
	ended bool                  // scan has nothing after lines
	lines []counterredis.Line   // read, and not acknowledged
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
func (l *link) Owned() []int { return l.s.owned() }

// Greet does nothing: the peer checks the name of its region with each batch.
func (l *link) Greet(context.Context) error { return nil }

// Positions reads how far the peer has the logs.
func (l *link) Positions(ctx context.Context, believed []replication.At[counterredis.Position]) ([]counterredis.Position, error) {
	buckets := make([]int, len(believed))
	for i, at := range believed {
		buckets[i] = at.Bucket
	}
	return l.Remote.Positions(ctx, l.s.cfg.Region, buckets)
}

// Failed counts a failure. The log warns of the first one.
func (l *link) Failed(err error) {
	l.failures.Inc()
	if l.failing.Swap(true) {
		l.log.Debug().Err(err).Msg("changes of counters could not be told to the peer; trying again")
		return
	}
	l.log.Warn().Err(err).Msg("changes of counters cannot be told to the peer; trying again until they can")
}

// Send sends what follows the positions in the logs, or, where a log does not reach back to the position, the whole
// bucket, of which a round has a page.
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
				delete(l.transfers, at.Bucket) // the server may be another one, in which the scan means nothing
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
		l.log.Info().Msg("changes of counters are told to the peer again")
	}
	return results, nil
}

// outgoing returns the batches of buckets that are not sent whole. It begins to send those whole that it must.
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

// size is the size of lines in items.
func size(lines []counterredis.Line) int {
	bytes := 0
	for i := range lines {
		bytes += lines[i].Size()
	}
	return len(lines) + bytes/itemBytes
}

// read reads the next page, unless one is not acknowledged yet.
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

// acked makes the result of a bucket from the acknowledgement of its last message.
func (l *link) acked(message *counterredis.Message, ack *counterredis.Ack, result *replication.Result[counterredis.Position]) {
	switch t := l.transfers[message.Bucket]; {
	case ack.Other != "" && ack.Other != counterredis.NoRegion: // nothing until the next comparison
		result.Outcome = replication.Sent
		return
	case !ack.Merged: // nobody has been there yet, or the bucket is frozen
		result.Outcome = replication.Later
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
		// The peer lost its memory, or another process sends the bucket, too.
		result.Outcome = replication.Later
	case message.Mode != counterredis.ModeLog || message.More || ack.At != message.To:
		result.Outcome = replication.More
	default:
		result.Outcome = replication.Sent
	}
}

// show shows an acknowledgement in the log and the metrics.
func (l *link) show(ack *counterredis.Ack) {
	l.news.Add(float64(ack.News))
	l.odd.Add(float64(ack.Odd))
	switch {
	case ack.Other == counterredis.NoRegion:
	case ack.Other != l.said:
		if l.said = ack.Other; ack.Other != "" {
			l.log.Warn().Str("region", ack.Other).Msg("counters are not shared with this peer: the region there has another name; correct --peer")
		} else {
			l.log.Info().Msg("counters are shared with this peer again")
		}
	}
	if ack.Older && time.Since(l.lost) > warnEvery { // once for all buckets
		l.lost = time.Now()
		l.log.Warn().Msg("the Redis of this region has come back empty, or with an older memory than the peer has heard of: what counters had gained since, and no region had heard of, is lost")
	}
	if ack.Odd > 0 && !l.oddSaid {
		l.oddSaid = true
		l.log.Warn().Int("counters", ack.Odd).Msg("the peer cannot take some counters: rules give them another kind there, or their totals leave 64 bits; every region needs the same rules")
	}
}
