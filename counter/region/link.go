package region

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"

	"headcount/counter/owner"
	"headcount/internal/replication"
	"headcount/internal/rows"
)

const (
	compareEvery   = 10      // times Config.Every, 2 s, between two comparisons of positions
	maxItems       = 16384   // of one round, about: its counters, and one for each itemBytes of them
	partitionItems = 256     // of one partition in one round
	itemBytes      = 256     // bytes that count as one item
	maxBytes       = 1 << 20 // of one partition in one round

	// takeAgain is how long a link waits for the process that has overtaken it. If that one does not own the partition,
	// it has found that out by then.
	takeAgain = 3 * time.Second
)

// link sends the changes of this region to one peer. It implements replication.Protocol. Only Send uses the fields without
// another comment.
type link struct {
	Peer
	*replication.Link[Position]
	r     *Region
	there *owner.Reader // of the peer's rows
	log   zerolog.Logger

	sent, whole, failures prometheus.Counter

	failing   atomic.Bool // the failure was logged
	said      string      // the unexpected name of the peer's region that was logged; only Greet uses it
	claims    map[int]*claim
	transfers map[int]*transfer // partitions that are being sent whole
}

// claim is the right to write a partition of the inbox.
type claim struct {
	home      uint64 // epoch of this process's claim of the partition at home
	epoch     uint64
	number    uint64
	valid     bool
	overtaken time.Time // by another process; zero: it is not
}

// transfer is the state of a partition that is sent whole.
type transfer struct {
	to    Position // of the log at the beginning: later changes follow from the log
	after string   // see owner.Reader.SharedKeys
}

func newLink(r *Region, p Peer, m *metrics) *link {
	l := &link{
		Peer:      p,
		r:         r,
		there:     owner.NewReader(p.There, rows.PartitionOf),
		log:       r.cfg.Log.With().Str("peer", p.Name).Logger(),
		sent:      m.sent.WithLabelValues(p.Name),
		whole:     m.whole.WithLabelValues(p.Name),
		failures:  m.failures.WithLabelValues(p.Name),
		claims:    map[int]*claim{},
		transfers: map[int]*transfer{},
	}
	l.Link = replication.New(l, replication.Config{
		Every:        r.cfg.Every,
		CompareEvery: compareEvery * r.cfg.Every,
		MaxItems:     maxItems,
	})

	return l
}

// Owned implements replication.Protocol.
func (l *link) Owned() []int { return l.r.logs.owned() }

// Greet implements replication.Protocol. It looks whether the peer is the region that it should be.
func (l *link) Greet(ctx context.Context) error {
	if l.r.misnamed.Load() {
		return replication.ErrRefused
	}

	name, err := l.there.Region(ctx)
	switch {
	case err != nil:
		return err
	case name == l.Name:
		if l.said != "" {
			l.log.Info().Msg("the peer has the expected name again: replicating counters")
		}
		l.said = ""
		return nil
	case name != "" && name != l.said:
		const what = "counters are not replicated to this peer: its region has another name; correct --peer"
		l.log.Warn().Str("region", name).Msg(what)
		l.said = name
	}

	return replication.ErrRefused // it has another name, or no process of it has started yet
}

// Positions implements replication.Protocol.
func (l *link) Positions(ctx context.Context, believed []replication.At[Position]) ([]Position, error) {
	partitions := make([]int, len(believed))
	for i, at := range believed {
		partitions[i] = at.Bucket
	}

	return l.positions(ctx, partitions)
}

// positions reads how far the peer is.
func (l *link) positions(ctx context.Context, partitions []int) ([]Position, error) {
	addresses := make([]rows.Address, len(partitions))
	for i, id := range partitions {
		addresses[i] = rows.Address{Partition: id, Name: positionRow}
	}

	positions := make([]Position, len(partitions))
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
	partition int
	result    *replication.Result[Position]
	transfer  *transfer // nil: from the log
	keys      []string
	places    []uint64 // of the keys in the log
	next      string   // for transfer.after
	to        Position // that the peer has after the batch; of a transfer, only the last page has one
	more      bool     // others follow

	commit rows.Commit
	shared int // how many shares are in it
}

// Send implements replication.Protocol. It sends the log after each position, and of a partition whose log does not reach
// back to the position the next page of all counters.
func (l *link) Send(
	ctx context.Context, from []replication.At[Position], limit int,
) ([]replication.Result[Position], error) {
	results := make([]replication.Result[Position], len(from))
	var batches []*batch
	items := 0
	for i, at := range from {
		results[i].Position = at.Position
		b := l.pick(at, limit)
		switch {
		case b == nil: // nothing has changed
		case items >= limit:
			results[i].Outcome = replication.More
		default:
			b.result = &results[i]
			batches = append(batches, b)
			items += max(len(b.keys), 1)
		}
	}

	batches, err := l.claim(ctx, batches)
	if err == nil {
		err = l.fill(ctx, batches)
	}
	if err == nil {
		err = l.compare(ctx, batches)
	}
	if err == nil {
		err = l.commit(ctx, batches)
	}
	if err != nil {
		return nil, err
	}

	if l.failing.Swap(false) {
		l.log.Info().Msg("counters are replicated to the peer again")
	}

	return results, nil
}

// pick returns what has to be sent of a partition, nil if there is nothing.
func (l *link) pick(at replication.At[Position], limit int) *batch {
	c := l.r.logs.after(at.Bucket, at.Position, min(partitionItems, limit))
	if !c.owned {
		delete(l.transfers, at.Bucket)
		return nil
	}

	b := &batch{partition: at.Bucket, to: c.end, more: c.more}
	if c.whole {
		b.transfer = l.transfer(at.Bucket, c.end)
		return b
	}

	// Another process may have sent the whole partition.
	delete(l.transfers, at.Bucket)
	if len(c.entries) == 0 && c.end == at.Position {
		return nil
	}
	for _, e := range c.entries {
		b.keys = append(b.keys, e.key)
		b.places = append(b.places, e.place)
	}
	if c.more {
		b.to.Place = b.places[len(b.places)-1]
	}

	return b
}

// transfer returns the transfer of a partition, which begins now if there is none.
func (l *link) transfer(partition int, end Position) *transfer {
	t := l.transfers[partition]
	if t == nil || t.to.Epoch != end.Epoch {
		t = &transfer{to: end}
		l.transfers[partition] = t
		l.whole.Inc()
	}

	return t
}

// claim claims the partitions of the inbox that batches need, and returns the batches that can be sent. A batch whose
// position has turned out to be wrong is made again.
func (l *link) claim(ctx context.Context, batches []*batch) ([]*batch, error) {
	var wanted []*batch
	var former []rows.Former
	for _, b := range batches {
		c := l.claims[b.partition]
		if c == nil || c.home != b.to.Epoch {
			c = &claim{home: b.to.Epoch}
			l.claims[b.partition] = c
		}
		if c.valid {
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
		return batches, nil
	}

	claims, err := l.Out.Claim(ctx, l.r.cfg.Process, former)
	if err != nil {
		return nil, fmt.Errorf("region: claim the inbox at %s: %w", l.Name, err)
	}
	for i, b := range wanted {
		c := l.claims[b.partition]
		// What the inbox has lost may be pages that the transfer takes for sent, so it begins again.
		if claims[i].Number < c.number && b.transfer != nil {
			delete(l.transfers, b.partition)
			b.transfer = l.transfer(b.partition, b.to)
		}
		c.take(claims[i])
	}

	return l.trueUp(ctx, batches)
}

// take makes c what the peer's store has granted.
func (c *claim) take(granted rows.Claim) {
	if granted.Epoch == 0 {
		if c.overtaken.IsZero() {
			c.overtaken = time.Now()
		}
		return
	}

	c.overtaken = time.Time{}
	c.epoch = granted.Epoch
	c.number = granted.Number
	c.valid = true
}

// trueUp returns the batches that begin where the peer is. It says for the others where that is.
func (l *link) trueUp(ctx context.Context, batches []*batch) ([]*batch, error) {
	partitions := make([]int, len(batches))
	for i, b := range batches {
		partitions[i] = b.partition
	}
	positions, err := l.positions(ctx, partitions)
	if err != nil {
		return nil, err
	}

	var ready []*batch
	for i, b := range batches {
		switch {
		case !l.claims[b.partition].valid:
			b.result.Outcome = replication.Later
		case positions[i] != b.result.Position:
			b.result.Position = positions[i]
			b.result.Outcome = replication.More
		default:
			ready = append(ready, b)
		}
	}

	return ready, nil
}

// fill asks the owner for the shares of batches.
func (l *link) fill(ctx context.Context, batches []*batch) error {
	calls := make([]owner.Call, len(batches))
	for i, b := range batches {
		if b.transfer != nil {
			if err := l.page(ctx, b); err != nil {
				return err
			}
		}
		calls[i] = owner.Call{Partition: b.partition, More: &owner.More{Shares: b.keys}}
	}
	if len(calls) == 0 {
		return nil
	}

	for i, outcome := range l.r.owner.DoAll(ctx, calls) {
		if outcome.Err != nil {
			return fmt.Errorf("region: shares for %s: %w", l.Name, outcome.Err)
		}
		batches[i].take(outcome.More)
	}

	return nil
}

// page finds the next counters of a transfer.
func (l *link) page(ctx context.Context, b *batch) (err error) {
	b.keys, b.next, err = l.r.reader.SharedKeys(ctx, b.partition, b.transfer.after, partitionItems)
	if err != nil {
		return err
	}
	b.to = b.transfer.to
	b.more = b.next != ""

	return nil
}

// take puts shares into the commit, until it is large.
func (b *batch) take(answer *owner.MoreAnswer) {
	size := 0
	for i, key := range b.keys {
		s := &answer.Shares[i]
		if s.Kind == 0 && s.Died == 0 {
			continue // it is not shared, or it has never existed
		}
		if size > maxBytes {
			b.cut(i)
			return
		}

		value := encodeShare(s)
		size += len(key) + len(value)
		b.commit.Rows = append(b.commit.Rows, rows.Row{Name: shareRow(key), Value: value})
	}
}

// cut leaves all keys from that one on to the next batch.
func (b *batch) cut(from int) {
	b.more = true
	if b.transfer == nil {
		b.to.Place = b.places[from-1]
		return
	}

	b.next = owner.After(b.transfer.after, b.keys[from-1])
}

// compare takes out of transfers what the peer has.
func (l *link) compare(ctx context.Context, batches []*batch) error {
	var addresses []rows.Address
	for _, b := range batches {
		if b.transfer == nil {
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
		if b.transfer == nil {
			continue
		}

		var lacking []rows.Row
		for i, row := range b.commit.Rows {
			if found[i].Err != nil {
				return fmt.Errorf("region: compare with %s: %w", l.Name, found[i].Err)
			}
			if !sameShare(found[i].Value, row.Value) {
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
		if b.shared == 0 && b.transfer != nil && b.more {
			b.landed() // the peer has this page
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
	c := l.claims[b.partition]
	var keys []string
	for _, row := range b.commit.Rows {
		keys = append(keys, row.Field)
	}
	if b.transfer == nil || !b.more {
		b.commit.Rows = append(b.commit.Rows, rows.Row{Name: positionRow, Value: b.to.encode()})
	}

	b.commit.Partition = b.partition
	b.commit.Epoch = c.epoch
	b.commit.After = c.number
	b.commit.Number = c.number + 1
	b.commit.At = time.Now()
	if len(keys) > 0 {
		// What a whole partition brings may be news to further regions.
		b.commit.Publication = encodeKeys(keys, b.transfer != nil)
	}
}

// settle goes on with the outcome of a commit. The error says that the peer did not answer.
func (l *link) settle(b *batch, err error) error {
	c := l.claims[b.partition]
	var fenced *rows.Fenced
	var lost *rows.Lost
	switch {
	case err == nil:
		c.number++
		l.sent.Add(float64(b.shared))
		b.landed()
		if b.transfer != nil && !b.more {
			delete(l.transfers, b.partition)
		}
		return nil
	case errors.Is(err, rows.ErrFull):
		b.result.Outcome = replication.Later
		return nil
	}

	// After a new claim nothing of before arrives any more, and it is known what has arrived.
	c.valid = false
	b.result.Outcome = replication.More
	if errors.As(err, &fenced) || errors.As(err, &lost) {
		return nil
	}

	return err
}

// landed says what follows a batch that the peer has.
func (b *batch) landed() {
	b.result.Outcome = replication.Sent
	if b.more || b.transfer != nil {
		b.result.Outcome = replication.More
	}

	switch {
	case b.transfer == nil:
		b.result.Position = b.to
	case b.more:
		b.transfer.after = b.next
	default:
		b.result.Position = b.to
	}
}
