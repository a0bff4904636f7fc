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
	compareEvery   = 10      // pause between two comparisons of positions, in units of Config.Every: 2 s
	maxItems       = 16384   // approximate limit of one round; see itemBytes
	partitionItems = 256     // limit for one partition in one round
	itemBytes      = 256     // a share counts as one item, plus one for each itemBytes of its size
	maxBytes       = 1 << 20 // of one partition in one round

	// takeAgain is how long a link waits after another process has taken over the inbox. By then that process has found
	// out if it does not own the partition.
	takeAgain = 1500 * time.Millisecond
)

// link sends the changes of this region to one peer. It implements replication.Protocol. Only Send uses the fields
// without a comment that says otherwise.
type link struct {
	Peer
	*replication.Link[Position]
	backlogs // the changes that the peer lacks; may be used from any goroutine
	r        *Region
	there    *owner.Reader // reads the peer's rows
	log      zerolog.Logger

	sent, comparisons, failures prometheus.Counter

	failing    atomic.Bool // the current failure has been logged
	loggedName string      // unexpected name of the peer's region, if it was logged; only Greet uses it
	claims     [rows.Partitions]inboxClaim
}

// inboxClaim is the claim of a partition of the inbox.
type inboxClaim struct {
	homeEpoch uint64 // epoch of this process's claim of the partition at home
	epoch     uint64
	number    uint64 // of the newest commit that this process knows the inbox to have
	valid     bool
	overtaken time.Time // when another process took over the partition of the inbox; zero: none did
}

// position returns the position that the inbox has if it has lost nothing.
func (c *inboxClaim) position() Position { return Position{Epoch: c.homeEpoch, Number: c.number} }

func newLink(r *Region, p Peer, m *metrics) *link {
	l := &link{
		Peer:        p,
		r:           r,
		there:       owner.NewReader(p.Rows, rows.PartitionOf),
		log:         r.cfg.Log.With().Str("peer", p.Name).Logger(),
		sent:        m.sent.WithLabelValues(p.Name),
		comparisons: m.comparisons.WithLabelValues(p.Name),
		failures:    m.failures.WithLabelValues(p.Name),
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

// Greet implements replication.Protocol. It checks that the peer is the expected region.
func (l *link) Greet(ctx context.Context) error {
	// The counters here are another region's, and must not arrive under this one's name.
	if l.r.misnamed.Load() {
		return replication.ErrRefused
	}

	name, err := l.there.Region(ctx)
	if err != nil {
		return err
	}

	isNews := name != "" && name != l.loggedName
	switch {
	case name == l.Name:
		if l.loggedName != "" {
			l.log.Info().Msg("the peer has the expected name again: replicating counters")
		}
		l.loggedName = ""
		return nil
	case isNews:
		const what = "counters are not replicated to this peer: its region has another name; correct --peer"
		l.log.Warn().Str("region", name).Msg(what)
		l.loggedName = name
	}

	return replication.ErrRefused // its name is wrong, or missing because none of its processes has started yet
}

// Positions implements replication.Protocol. It reads the positions of the inbox.
func (l *link) Positions(ctx context.Context, believed []replication.At[Position]) ([]Position, error) {
	addresses := make([]rows.Address, len(believed))
	for i, at := range believed {
		addresses[i] = rows.Address{Partition: at.Bucket, Name: positionRow}
	}

	positions := make([]Position, len(believed))
	for i, found := range l.Outbox.Read(ctx, addresses) {
		if found.Err != nil {
			return nil, fmt.Errorf("region: positions of %s: %w", l.Name, found.Err)
		}
		positions[i] = parsePosition(found.Value)
	}

	return positions, nil
}

// Failed implements replication.Protocol. Only the first failure in a row is logged as a warning.
func (l *link) Failed(err error) {
	l.failures.Inc()
	if l.failing.Swap(true) {
		l.log.Debug().Err(err).Msg("replicating counters to the peer failed; retrying")
		return
	}
	l.log.Warn().Err(err).Msg("counters cannot be replicated to the peer; retrying until they can")
}

// batch is what one round sends for a partition.
type batch struct {
	job
	partition int
	result    *replication.Result[Position]
	asked     []string // counters whose shares are sent: those of the job, or those of the page
	nextPage  string   // cursor of the next page; empty: this is the last one
	commit    rows.Commit
	shared    int // number of shares in the commit
}

// Send implements replication.Protocol. It sends the changed counters of a partition, or the next page of a comparison.
func (l *link) Send(
	ctx context.Context, from []replication.At[Position], limit int,
) ([]replication.Result[Position], error) {
	results := make([]replication.Result[Position], len(from))
	var batches []*batch
	items := 0
	for i, at := range from {
		results[i].Position = at.Position
		// The round is full, and the next one goes on here.
		if items >= limit {
			results[i].Outcome = replication.More
			continue
		}

		b := l.pick(at, min(partitionItems, limit))
		if b != nil {
			b.result = &results[i]
			batches = append(batches, b)
			// How much a page of a comparison has is known only when it has been read, so it counts as one.
			items += max(len(b.asked), 1)
		}
	}

	err := l.send(ctx, batches)
	for _, b := range batches {
		l.putBack(b.partition, &b.job) // puts back the counters that the peer did not acknowledge
	}
	if err != nil {
		return nil, err
	}

	if l.failing.Swap(false) {
		l.log.Info().Msg("counters are replicated to the peer again")
	}

	return results, nil
}

// send sends the batches whose partitions of the inbox can be claimed.
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

// pick returns the next batch for a partition, nil if there is nothing to send.
func (l *link) pick(at replication.At[Position], most int) *batch {
	c := &l.claims[at.Bucket]
	// Nobody but this process writes under this claim, so a different position means that the inbox has lost commits.
	inboxLost := c.valid && at.Position != c.position()
	// A comparison that is due finds what is missing anyway.
	if inboxLost && !l.isComparing(at.Bucket) {
		l.miss(at.Bucket)
	}

	// The picked counters leave the backlog, and are put back unless the peer acknowledges them.
	j, ok := l.take(at.Bucket, most)
	if !ok {
		return nil
	}
	if j.begins {
		l.comparisons.Inc()
	}
	// The partition was claimed again at home, so this process may not be the one that last wrote to the inbox.
	if c.homeEpoch != j.epoch {
		*c = inboxClaim{homeEpoch: j.epoch}
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
		// The other process may be a former owner that was slow, so take the inbox back.
		if !c.overtaken.IsZero() && time.Since(c.overtaken) > takeAgain {
			is.Epoch = 0
		}
		wanted = append(wanted, b)
		former = append(former, is)
	}
	if len(wanted) == 0 {
		return claimed, nil
	}

	claims, err := l.Outbox.Claim(ctx, l.r.cfg.Process, former)
	if err != nil {
		return nil, fmt.Errorf("region: claim the inbox at %s: %w", l.Name, err)
	}
	for i, b := range wanted {
		c := &l.claims[b.partition]
		isComplete := c.take(claims[i])
		// A comparison that is just beginning finds what is missing, so it need not restart.
		mustRestart := !isComplete && !b.begins
		switch {
		case !c.valid:
			// Another process has claimed it, and may own the partition at home by now.
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

// take records a claim that the peer's store has granted, and reports whether the inbox still has everything that was
// written under c.
func (c *inboxClaim) take(granted rows.Claim) (complete bool) {
	if granted.Epoch == 0 {
		if c.overtaken.IsZero() {
			c.overtaken = time.Now()
		}
		return false
	}

	// If another process was the owner in between, it may have written older shares.
	complete = granted.Number >= c.number && c.overtaken.IsZero()
	c.overtaken = time.Time{}
	c.epoch = granted.Epoch
	c.number = granted.Number
	c.valid = true

	return complete
}

// fill asks the owner for the shares of the batches.
func (l *link) fill(ctx context.Context, batches []*batch) error {
	calls := make([]owner.Call, len(batches))
	for i, b := range batches {
		if b.comparesAll {
			var err error
			b.asked, b.nextPage, err = l.r.reader.SharedKeys(ctx, b.partition, b.after, partitionItems)
			if err != nil {
				return err
			}
		}
		calls[i] = owner.Call{Partition: b.partition, More: &owner.More{Shares: b.asked}}
	}
	if len(calls) == 0 {
		return nil
	}

	// The owner answers after a commit, so each share reflects one moment.
	for i, outcome := range l.r.owner.DoAll(ctx, calls) {
		if outcome.Err != nil {
			// The whole round fails, and what was picked for it goes back into the backlogs.
			return fmt.Errorf("region: shares for %s: %w", l.Name, outcome.Err)
		}
		batches[i].fill(outcome.More)
	}

	return nil
}

// fill adds shares to the commit, until it is large.
func (b *batch) fill(answer *owner.MoreAnswer) {
	size := 0
	for i, key := range b.asked {
		s := &answer.Shares[i]
		if s.Kind == 0 && s.Deletion == 0 {
			continue // the counter is not shared, or has never existed
		}
		// This comes before the share is added, so that a batch always has one.
		if size > maxBytes {
			b.cut(i)
			return
		}

		value := s.Append(make([]byte, 0, 64))
		size += len(key) + len(value)
		b.commit.Rows = append(b.commit.Rows, rows.Row{Name: shareRow(key), Value: value})
	}
}

// cut leaves the counters from index from on to the next batch.
func (b *batch) cut(from int) {
	if b.comparesAll {
		b.nextPage = owner.After(b.after, b.asked[from-1])
	}
	b.more = true
	b.asked = b.asked[:from]
}

// compare removes from the pages all shares that the peer already has.
func (l *link) compare(ctx context.Context, batches []*batch) error {
	var addresses []rows.Address
	for _, b := range batches {
		if !b.comparesAll {
			continue
		}
		for _, row := range b.commit.Rows {
			addresses = append(addresses, rows.Address{Partition: b.partition, Name: row.Name})
		}
	}
	if len(addresses) == 0 {
		return nil
	}

	// One read for all, since each is a round trip to another region.
	found := l.Outbox.Read(ctx, addresses)
	for _, b := range batches {
		if !b.comparesAll {
			continue
		}

		n := len(b.commit.Rows)
		if err := b.dropKnown(found[:n]); err != nil {
			return fmt.Errorf("region: compare with %s: %w", l.Name, err)
		}
		found = found[n:]
	}

	return nil
}

// dropKnown removes from the commit the rows that the inbox already has.
func (b *batch) dropKnown(found []rows.Found) error {
	var lacking []rows.Row
	for i, row := range b.commit.Rows {
		if found[i].Err != nil {
			return found[i].Err
		}
		// Equal shares have equal encodings.
		if !bytes.Equal(found[i].Value, row.Value) {
			lacking = append(lacking, row)
		}
	}
	b.commit.Rows = lacking

	return nil
}

// commit writes the batches into the inbox, and handles the outcomes.
func (l *link) commit(ctx context.Context, batches []*batch) error {
	var made []*batch
	var commits []rows.Commit
	for _, b := range batches {
		b.shared = len(b.commit.Rows)
		// The last page is committed in any case. Otherwise the position in the inbox would be that of the former
		// claim, and look like a loss.
		isLastPage := b.comparesAll && b.nextPage == ""
		if b.shared == 0 && !isLastPage {
			l.acknowledge(b) // the peer has all shares of this page, or none of them are shared
			continue
		}

		l.prepareCommit(b)
		made = append(made, b)
		commits = append(commits, b.commit)
	}
	if len(commits) == 0 {
		return nil
	}

	var failed error
	for i, err := range l.Outbox.Commit(ctx, commits) {
		// One partition may fail while others are acknowledged.
		if err := l.handleOutcome(made[i], err); err != nil {
			failed = fmt.Errorf("region: send to %s: %w", l.Name, err)
		}
	}

	return failed
}

// prepareCommit adds the fields and rows that every commit needs.
func (l *link) prepareCommit(b *batch) {
	c := &l.claims[b.partition]
	var keys []string
	for _, row := range b.commit.Rows {
		keys = append(keys, row.Field)
	}

	// The position is also stored in a row, which shows without a commit whether the inbox has lost any.
	b.commit.Partition = b.partition
	b.commit.Epoch = c.epoch
	b.commit.After = c.number
	b.commit.Number = c.number + 1
	b.commit.At = time.Now()
	at := Position{Epoch: c.homeEpoch, Number: b.commit.Number}
	b.commit.Rows = append(b.commit.Rows, rows.Row{Name: positionRow, Value: at.encode()})
	if len(keys) > 0 {
		// A comparison may bring changes that further regions lack, so it is marked as a repair.
		b.commit.Publication = encodeKeys(keys, b.comparesAll)
	}
}

// handleOutcome handles the outcome of a commit. The error means that the peer did not answer.
func (l *link) handleOutcome(b *batch, err error) error {
	c := &l.claims[b.partition]
	var fenced *rows.Fenced
	var lost *rows.Lost
	switch {
	case err == nil:
		c.number++
		l.sent.Add(float64(b.shared))
		l.acknowledge(b)
		return nil
	case errors.Is(err, rows.ErrFull):
		// For certain nothing was written, so the claim is still good.
		b.result.Outcome = replication.Later
		return nil
	}

	// A new claim fences off commits that are still on their way, and its number says which ones have arrived.
	c.valid = false
	b.result.Outcome = replication.More
	if errors.As(err, &fenced) || errors.As(err, &lost) {
		claimsAgain.Reached()
		return nil
	}

	return err
}

// acknowledge records that the peer has a batch, and sets the batch's result.
func (l *link) acknowledge(b *batch) {
	b.result.Position = l.claims[b.partition].position()
	b.result.Outcome = replication.Sent
	if b.more || b.comparesAll {
		b.result.Outcome = replication.More
	}

	if b.comparesAll {
		l.pageDone(b.partition, &b.job, b.nextPage)
		return
	}
	// What is left are the counters that did not fit into the commit; Send puts them back.
	b.keys = b.keys[len(b.asked):]
	b.repairs = b.repairs[len(b.asked):]
}
