package region

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"

	"headcount/counter/owner"
	"headcount/internal/marks"
	"headcount/internal/replication"
	"headcount/internal/rows"
)

var (
	claimsAgain = marks.Sometimes("a link claims an inbox again")
)

const (
	compareEvery   = 10      // times Config.Every, 2 s, between two comparisons of positions
	maxItems       = 16384   // of one round, about: its counters, and one for each itemBytes of them
	partitionItems = 256     // of one partition in one round
	itemBytes      = 256     // bytes that count as one item
	maxBytes       = 1 << 20 // of one partition in one round

	// takeAgain is how long a link waits for the process that has overtaken it. If that one does not own the partition,
	// it has found that out by then.
	takeAgain = 1500 * time.Millisecond
)

// link sends the changes of this region to one peer. It implements replication.Protocol. Only Send uses the fields
// without another comment.
type link struct {
	Peer
	*replication.Link[Position]
	backlogs // what the peer lacks. It may be used from any goroutine
	r        *Region
	there    *owner.Reader // of the peer's rows
	log      zerolog.Logger

	sent, whole, failures prometheus.Counter

	failing atomic.Bool // the failure was logged
	said    string      // the unexpected name of the peer's region that was logged; only Greet uses it
	claims  [rows.Partitions]claim
}

// claim is the right to write a partition of the inbox.
type claim struct {
	home      uint64 // epoch of this process's claim of the partition at home
	epoch     uint64
	number    uint64 // of the newest commit that the inbox has, as far as this process knows
	valid     bool
	overtaken time.Time // by another process; zero: it is not
}

// position is where the inbox is if it has lost nothing.
func (c *claim) position() Position { return Position{Epoch: c.home, Number: c.number} }

func newLink(r *Region, p Peer, m *metrics) *link {
	l := &link{
		Peer:     p,
		r:        r,
		there:    owner.NewReader(p.There, rows.PartitionOf),
		log:      r.cfg.Log.With().Str("peer", p.Name).Logger(),
		sent:     m.sent.WithLabelValues(p.Name),
		whole:    m.whole.WithLabelValues(p.Name),
		failures: m.failures.WithLabelValues(p.Name),
	}
	l.Link = replication.New(l, replication.Config{
		Every:        r.cfg.Every,
		CompareEvery: compareEvery * r.cfg.Every,
		MaxItems:     maxItems,
	})

	return l
}

// Owned implements replication.Protocol.
func (l *link) Owned() []int { return l.owned() }

// Greet implements replication.Protocol. It looks whether the peer is the region that it should be.
func (l *link) Greet(ctx context.Context) error {
	if l.r.misnamed.Load() {
		return replication.ErrRefused
	}

	name, err := l.there.Region(ctx)
	if err != nil {
		return err
	}

	isNews := name != "" && name != l.said
	switch {
	case name == l.Name:
		if l.said != "" {
			l.log.Info().Msg("the peer has the expected name again: replicating counters")
		}
		l.said = ""
		return nil
	case isNews:
		const what = "counters are not replicated to this peer: its region has another name; correct --peer"
		l.log.Warn().Str("region", name).Msg(what)
		l.said = name
	}

	return replication.ErrRefused // it has another name, or no process of it has started yet
}

// Positions implements replication.Protocol. It reads how far the inbox is.
func (l *link) Positions(ctx context.Context, believed []replication.At[Position]) ([]Position, error) {
	addresses := make([]rows.Address, len(believed))
	for i, at := range believed {
		addresses[i] = rows.Address{Partition: at.Bucket, Name: positionRow}
	}

	positions := make([]Position, len(believed))
	for i, found := range l.Out.Read(ctx, addresses) {
		if found.Err != nil {
			return nil, fmt.Errorf("region: positions of %s: %w", l.Name, found.Err)
		}
		positions[i] = parsePosition(found.Value)
	}

	return positions, nil
}

// Failed implements replication.Protocol. The first failure is logged as a warning.
func (l *link) Failed(err error) {
	l.failures.Inc()
	if l.failing.Swap(true) {
		l.log.Debug().Err(err).Msg("replicating counters to the peer failed; trying again")
		return
	}
	l.log.Warn().Err(err).Msg("counters cannot be replicated to the peer; trying again until they can")
}

// batch is what a round sends of a partition.
type batch struct {
	job
	partition int
	result    *replication.Result[Position]
	asked     []string // counters whose shares are sent: those of the job, or of a page of all
	next      string   // where the next page begins; empty: this is the last one
	commit    rows.Commit
	shared    int // how many shares are in it
}

// Send implements replication.Protocol. It sends what has changed, or the next page of all counters of a partition.
func (l *link) Send(
	ctx context.Context, from []replication.At[Position], limit int,
) ([]replication.Result[Position], error) {
	results := make([]replication.Result[Position], len(from))
	var batches []*batch
	items := 0
	for i, at := range from {
		results[i].Position = at.Position
		if items >= limit {
			results[i].Outcome = replication.More
			continue
		}

		b := l.pick(at, min(partitionItems, limit))
		if b != nil {
			b.result = &results[i]
			batches = append(batches, b)
			items += max(len(b.asked), 1)
		}
	}

	err := l.send(ctx, batches)
	for _, b := range batches {
		l.putBack(b.partition, &b.job) // what has not landed
	}
	if err != nil {
		return nil, err
	}

	if l.failing.Swap(false) {
		l.log.Info().Msg("counters are replicated to the peer again")
	}

	return results, nil
}

// send sends batches, as far as the partitions of the inbox can be claimed.
func (l *link) send(ctx context.Context, batches []*batch) error {
	claimed, err := l.claim(ctx, batches)
	if err == nil {
		err = l.fill(ctx, claimed)
	}
	if err == nil {
		err = l.compare(ctx, claimed)
	}
	if err == nil {
		err = l.commit(ctx, claimed)
	}

	return err
}

// pick returns what has to be sent of a partition, nil if there is nothing.
func (l *link) pick(at replication.At[Position], most int) *batch {
	c := &l.claims[at.Bucket]
	hasLost := c.valid && at.Position != c.position()
	if hasLost && !l.compares(at.Bucket) {
		l.miss(at.Bucket)
	}

	// What is picked leaves the backlog, and comes back unless it lands.
	j, ok := l.take(at.Bucket, most)
	if !ok {
		return nil
	}
	if j.begins {
		l.whole.Inc()
	}
	// The partition was claimed anew at home, so this process may be another one to its inboxes.
	if c.home != j.epoch {
		*c = claim{home: j.epoch}
	}

	return &batch{job: j, partition: at.Bucket, asked: j.keys}
}

// claim claims the partitions of the inbox that batches need, and returns the batches that can be sent.
func (l *link) claim(ctx context.Context, batches []*batch) (claimed []*batch, err error) {
	var wanted []*batch
	var former []rows.Former
	for _, b := range batches {
		c := &l.claims[b.partition]
		if c.valid {
			claimed = append(claimed, b)
			continue
		}

		is := rows.Former{Partition: b.partition, Epoch: c.epoch}
		// The other process may have been late, and not the owner at home any more.
		if !c.overtaken.IsZero() && time.Since(c.overtaken) > takeAgain {
			is.Epoch = 0
		}
		wanted = append(wanted, b)
		former = append(former, is)
	}
	if len(wanted) == 0 {
		return claimed, nil
	}

	claims, err := l.Out.Claim(ctx, l.r.cfg.Process, former)
	if err != nil {
		return nil, fmt.Errorf("region: claim the inbox at %s: %w", l.Name, err)
	}
	for i, b := range wanted {
		c := &l.claims[b.partition]
		isComplete := c.take(claims[i])
		// A comparison that begins now finds what is missing.
		mustRestart := !isComplete && !b.begins
		switch {
		case !c.valid:
			b.result.Outcome = replication.Later
		case mustRestart:
			l.restart(b.partition)
			b.result.Outcome = replication.More
		default:
			claimed = append(claimed, b)
		}
	}

	return claimed, nil
}

// take makes c what the peer's store has granted, and reports whether the inbox has all that was written under c.
func (c *claim) take(granted rows.Claim) (complete bool) {
	if granted.Epoch == 0 {
		if c.overtaken.IsZero() {
			c.overtaken = time.Now()
		}
		return false
	}

	// Another process may have written older shares.
	complete = granted.Number >= c.number && c.overtaken.IsZero()
	c.overtaken = time.Time{}
	c.epoch = granted.Epoch
	c.number = granted.Number
	c.valid = true

	return complete
}

// fill asks the owner for the shares of batches.
func (l *link) fill(ctx context.Context, batches []*batch) error {
	calls := make([]owner.Call, len(batches))
	for i, b := range batches {
		if b.whole {
			var err error
			b.asked, b.next, err = l.r.reader.SharedKeys(ctx, b.partition, b.after, partitionItems)
			if err != nil {
				return err
			}
		}
		calls[i] = owner.Call{Partition: b.partition, More: &owner.More{Shares: b.asked}}
	}
	if len(calls) == 0 {
		return nil
	}

	// An owner answers with what is committed, so a share is as of one moment.
	for i, outcome := range l.r.owner.DoAll(ctx, calls) {
		if outcome.Err != nil {
			return fmt.Errorf("region: shares for %s: %w", l.Name, outcome.Err)
		}
		batches[i].fill(outcome.More)
	}

	return nil
}

// fill puts shares into the commit, until it is large.
func (b *batch) fill(answer *owner.MoreAnswer) {
	size := 0
	for i, key := range b.asked {
		s := &answer.Shares[i]
		if s.Kind == 0 && s.Died == 0 {
			continue // it is not shared, or it has never existed
		}
		if size > maxBytes {
			b.cut(i)
			return
		}

		value := s.Append(make([]byte, 0, 64))
		size += len(key) + len(value)
		b.commit.Rows = append(b.commit.Rows, rows.Row{Name: shareRow(key), Value: value})
	}
}

// cut leaves all counters from that one on to the next batch.
func (b *batch) cut(from int) {
	if b.whole {
		b.next = owner.After(b.after, b.asked[from-1])
	}
	b.more = true
	b.asked = b.asked[:from]
}

// compare takes out of pages what the peer has.
func (l *link) compare(ctx context.Context, batches []*batch) error {
	var addresses []rows.Address
	for _, b := range batches {
		if !b.whole {
			continue
		}
		for _, row := range b.commit.Rows {
			addresses = append(addresses, rows.Address{Partition: b.partition, Name: row.Name})
		}
	}
	if len(addresses) == 0 {
		return nil
	}

	found := l.Out.Read(ctx, addresses)
	for _, b := range batches {
		if !b.whole {
			continue
		}

		var lacking []rows.Row
		for i, row := range b.commit.Rows {
			if found[i].Err != nil {
				return fmt.Errorf("region: compare with %s: %w", l.Name, found[i].Err)
			}
			if !bytes.Equal(found[i].Value, row.Value) {
				lacking = append(lacking, row)
			}
		}
		found = found[len(b.commit.Rows):]
		b.commit.Rows = lacking
	}

	return nil
}

// commit writes batches into the inbox, and goes on with what became of them.
func (l *link) commit(ctx context.Context, batches []*batch) error {
	var made []*batch
	var commits []rows.Commit
	for _, b := range batches {
		b.shared = len(b.commit.Rows)
		isLastPage := b.whole && b.next == ""
		if b.shared == 0 && !isLastPage {
			l.land(b) // the peer has this page, or nothing of it is shared
			continue
		}

		l.complete(b)
		made = append(made, b)
		commits = append(commits, b.commit)
	}
	if len(commits) == 0 {
		return nil
	}

	var failed error
	for i, err := range l.Out.Commit(ctx, commits) {
		if err := l.settle(made[i], err); err != nil {
			failed = fmt.Errorf("region: send to %s: %w", l.Name, err)
		}
	}

	return failed
}

// complete adds to a commit what every one has.
func (l *link) complete(b *batch) {
	c := &l.claims[b.partition]
	var keys []string
	for _, row := range b.commit.Rows {
		keys = append(keys, row.Field)
	}

	// The row with the position tells without a commit whether the inbox has lost one.
	b.commit.Partition = b.partition
	b.commit.Epoch = c.epoch
	b.commit.After = c.number
	b.commit.Number = c.number + 1
	b.commit.At = time.Now()
	at := Position{Epoch: c.home, Number: b.commit.Number}
	b.commit.Rows = append(b.commit.Rows, rows.Row{Name: positionRow, Value: at.encode()})
	if len(keys) > 0 {
		// What a whole partition brings may be news to further regions.
		b.commit.Publication = encodeKeys(keys, b.whole)
	}
}

// settle goes on with the outcome of a commit. The error says that the peer did not answer.
func (l *link) settle(b *batch, err error) error {
	c := &l.claims[b.partition]
	var fenced *rows.Fenced
	var lost *rows.Lost
	switch {
	case err == nil:
		c.number++
		l.sent.Add(float64(b.shared))
		l.land(b)
		return nil
	case errors.Is(err, rows.ErrFull):
		b.result.Outcome = replication.Later
		return nil
	}

	// After a new claim nothing of before arrives any more, and its number says what has arrived.
	c.valid = false
	b.result.Outcome = replication.More
	if errors.As(err, &fenced) || errors.As(err, &lost) {
		claimsAgain.Reached()
		return nil
	}

	return err
}

// land says what follows a batch that the peer has.
func (l *link) land(b *batch) {
	b.result.Position = l.claims[b.partition].position()
	b.result.Outcome = replication.Sent
	if b.more || b.whole {
		b.result.Outcome = replication.More
	}

	if b.whole {
		l.turn(b.partition, &b.job, b.next)
		return
	}
	// The rest was too much for one commit.
	b.keys = b.keys[len(b.asked):]
	b.repairs = b.repairs[len(b.asked):]
}
