package presenceredis

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"headcount/presence"
	"headcount/presence/pncounter"
	"headcount/scripts"
)

const (
	selfField = ".self" // in regionsKey: the region's identity
	outField  = ".out"  // in regionsKey: peers left out of totals

	// nameHeld is how long a region must be silent before another identity may use its
	// name, usually that region itself after its Redis lost data.
	nameHeld = 3 * time.Second

	relogBatch = 500 // pages in one run of relog.lua
)

// Outgoing returns, for each position, the batch after it, with at most limit pages. A batch
// with Log 0 means that the bucket has no log with all pages; BeginLogs makes one.
func (s *Store) Outgoing(ctx context.Context, positions []pncounter.Position, limit int) ([]pncounter.Batch, error) {
	if err := s.learnFormat(ctx); err != nil {
		return nil, err
	}

	runs := make([]*scriptRun, len(positions))
	for i, p := range positions {
		runs[i] = &scriptRun{
			Script: scripts.Log,
			Keys:   []string{s.at().stateKey(p.Bucket), s.at().logKey(p.Bucket), s.at().readyKey(p.Bucket)},
			Args:   []any{s.cfg.Partitions, p.Log, p.Cursor, limit},
		}
	}

	// One bucket with foreign data must not stop the link. Only when no run has an answer is Redis itself away.
	if err := s.conn.Run(ctx, runs); err != nil && noneRan(runs) {
		return nil, fmt.Errorf("presenceredis: read %d logs: %w", len(positions), err)
	}

	batches := make([]pncounter.Batch, len(positions))
	var owns []*scriptRun
	var of []int // for each of owns: the index of its batch
	for i, run := range runs {
		if run.Err != nil { // a bucket that cannot be read must not delay the others
			batches[i] = pncounter.Batch{Bucket: positions[i].Bucket, Log: positions[i].Log, Partial: true}
			continue
		}

		var pages []string
		batches[i], pages = s.outgoing(run.Reply.([]any), positions[i], limit)
		if len(pages) == 0 {
			continue
		}
		// Another script reads the pairs, because a script declares its keys, and the pages are known only now.
		owns = append(owns, s.ownRun(batches[i].Bucket, pages))
		of = append(of, i)
	}

	if err := s.readPairs(ctx, batches, owns, of); err != nil {
		return nil, fmt.Errorf("presenceredis: read pairs: %w", err)
	}

	return batches, nil
}

// outgoing parses a reply of log.lua. It returns the batch after a position, still without pairs, and its pages.
func (s *Store) outgoing(reply []any, at pncounter.Position, limit int) (b pncounter.Batch, pages []string) {
	n := numbers(reply[:3])
	b = pncounter.Batch{Region: s.cfg.Facts.Region, Bucket: at.Bucket, Log: n[0], To: n[1], Floor: n[2]}
	if b.Log == 0 {
		return b, nil
	}
	// In another log the peer's cursor means nothing, so the batch begins at 0.
	if b.Log == at.Log {
		b.From = at.Cursor
	}

	outcome := reply[3].(int64)
	b.Partial = outcome == 0
	b.Complete = outcome == 1
	b.Forgotten = outcome == 2
	if b.Partial {
		return b, nil
	}

	logged := reply[4:] // pages, each with its number in the log
	if len(logged) == 2*limit {
		// There may be more. The batch ends with its last page, and not with the log: the peer's cursor must not pass
		// pages that it did not get.
		b.To, _ = strconv.ParseUint(logged[len(logged)-1].(string), 10, 64)
		b.Complete = false
		b.More = true
	}
	for j := 0; j < len(logged); j += 2 {
		pages = append(pages, logged[j].(string))
	}

	return b, pages
}

// readPairs runs owns, and appends the pairs in their replies to the batches in of.
func (s *Store) readPairs(ctx context.Context, batches []pncounter.Batch, owns []*scriptRun, of []int) error {
	if err := s.conn.Run(ctx, owns); err != nil && noneRan(owns) {
		return err
	}

	for k, own := range owns {
		b := &batches[of[k]]
		if own.Err != nil {
			// Without its pairs the batch would move the peer's cursor past these pages.
			b.Partial = true
			continue
		}

		prefix := len(s.at().pagePrefix(b.Bucket))
		reply := own.Reply.([]any)
		for j, key := range own.Keys[2:] {
			p := pncounter.Pair{
				Incarnation: uint64(reply[3*j].(int64)),
				Increments:  reply[3*j+1].(int64),
				Decrements:  reply[3*j+2].(int64),
			}
			// A page that was forgotten since, or is not written again yet, has no pair to send.
			if p.Incarnation > 0 {
				b.Pages = append(b.Pages, pncounter.PagePair{Page: key[prefix:], Pair: p})
			}
		}
	}

	return nil
}

// aboutTheKey reports whether err is about one key, which is missing or of another type,
// and not about the server.
func aboutTheKey(err error) bool {
	return errors.Is(err, redis.Nil) || redis.HasErrorPrefix(err, "WRONGTYPE")
}

func noneRan(runs []*scriptRun) bool {
	return !slices.ContainsFunc(runs, func(run *scriptRun) bool { return run.Err == nil })
}

func numbers(values []any) []uint64 {
	n := make([]uint64, len(values))
	for i, v := range values {
		n[i] = uint64(v.(int64))
	}

	return n
}

// numbersIn parses count whole numbers, separated by spaces. A number that is missing or
// malformed is 0. ok says that text has just these numbers.
func numbersIn(text string, count int) (n []uint64, ok bool) {
	fields := strings.Split(text, " ")
	n = make([]uint64, count)
	ok = len(fields) == count

	for i, field := range fields[:min(count, len(fields))] {
		var err error
		n[i], err = strconv.ParseUint(field, 10, 64)
		ok = ok && err == nil
	}

	return n, ok
}

// BeginLogs makes logs with all pages, for buckets to which a process without peers has
// written. It returns the first error about a bucket; the other buckets have their logs.
func (s *Store) BeginLogs(ctx context.Context, buckets []int) (first error) {
	logs := make(map[int]string, len(buckets))
	for _, b := range buckets {
		// The log begins before the scan, so a page that changes meanwhile is in it, whether the scan sees it or not.
		log, err := s.relog(ctx, b, 0, nil, "")
		first = cmp.Or(first, err)
		if err == nil {
			logs[b] = log
		}
	}

	if len(logs) == 0 {
		return first
	}

	err := s.eachPage(ctx, func(ctx context.Context, bucket int, pages []string) error {
		if logs[bucket] == "" {
			return nil
		}
		_, err := s.relog(ctx, bucket, 0, pages, "")
		return err
	})
	if err != nil {
		return fmt.Errorf("presenceredis: begin %d logs: %w", len(buckets), err)
	}

	// Mark the logs as complete. This has no effect on a log that has begun meanwhile, which lacks pages.
	for b, log := range logs {
		_, err := s.relog(ctx, b, 0, nil, log)
		first = cmp.Or(first, err)
	}

	return first
}

// relog runs relog.lua for pages of a bucket, and returns the number of the bucket's log.
func (s *Store) relog(
	ctx context.Context, bucket int, high uint64, pages []string, complete string,
) (log string, err error) {
	if err := s.learnFormat(ctx); err != nil {
		return "", err
	}

	prefix := s.at().pagePrefix(bucket)

	var runs []*scriptRun
	// There is a run even without pages: it begins the log, or says which one there is.
	for first := 0; first == 0 || first < len(pages); first += relogBatch {
		run := &scriptRun{
			Script: scripts.Relog,
			Keys:   []string{s.at().stateKey(bucket), s.at().logKey(bucket)},
			Args:   []any{high, len(prefix), complete},
		}
		for _, page := range pages[first:min(first+relogBatch, len(pages))] {
			run.Keys = append(run.Keys, prefix+page)
		}
		runs = append(runs, run)
	}

	if err := s.conn.Run(ctx, runs); err != nil {
		return "", fmt.Errorf("presenceredis: log of bucket %d: %w", bucket, err)
	}

	return runs[0].Reply.(string), nil
}

// Raise gives the pairs of pages, or without pages the bucket's log, a number above high
// and above all incarnations that this process knows.
func (s *Store) Raise(ctx context.Context, bucket int, high uint64, pages []string) error {
	// The peer may know an incarnation of this region that nobody here remembers.
	s.raiseHighest(high)

	_, err := s.relog(ctx, bucket, s.highest.Load(), pages, "")
	return err
}

// sweepPages is how many pages of a log one call of Sweep checks.
const sweepPages = 200

// Sweep removes forgotten pages from a bucket's log. It checks some pages, beginning at a
// rank, and returns the next rank, which is 0 after the last page. It also looks whether the
// bucket has too many pages without users. Scripts that change the counts of this region
// report that, but those of other regions change alone while nobody comes here.
func (s *Store) Sweep(ctx context.Context, bucket, rank int) (next int, err error) {
	var pages []string
	err = s.do(ctx, func(ctx context.Context, c *client) error {
		s.conn.Metrics.Commands.Add(3)

		pipe := c.Pipeline()
		last := int64(rank + sweepPages - 1)
		logged := pipe.ZRange(ctx, s.at().logKey(bucket), int64(rank), last)
		empties := pipe.ZCard(ctx, s.at().emptiesKey(bucket))
		sweeps := pipe.HMGet(ctx, s.at().stateKey(bucket), "sweep", "swept")
		if _, err := pipe.Exec(ctx); err != nil {
			return err
		}

		pages = logged.Val()
		requested, ended := sweeps.Val()[0], sweeps.Val()[1]
		s.noteEmptyPages(bucket, int(empties.Val()), requested != ended)

		return nil
	})

	// The script that reads the pairs of pages removes those that are forgotten from the log.
	if err == nil && len(pages) > 0 {
		err = s.conn.Run(ctx, []*scriptRun{s.ownRun(bucket, pages)})
	}
	if err != nil {
		return 0, fmt.Errorf("presenceredis: sweep the log of bucket %d: %w", bucket, err)
	}

	if len(pages) < sweepPages {
		return 0, nil
	}
	// Pages that were removed have moved others to lower ranks. The next round checks those.
	return rank + sweepPages, nil
}

func (s *Store) ownRun(bucket int, pages []string) *scriptRun {
	prefix := s.at().pagePrefix(bucket)
	run := &scriptRun{
		Script: scripts.Own,
		Keys:   []string{s.at().stateKey(bucket), s.at().logKey(bucket)},
		Args:   []any{len(prefix)},
	}

	for _, page := range pages {
		run.Keys = append(run.Keys, prefix+page)
	}

	return run
}

// ApplyPeers makes the buckets' totals include the peers in, and leave out the peers in
// out. It forgets all other peers.
func (s *Store) ApplyPeers(ctx context.Context, buckets []int, in, out []string) error {
	c, err := s.known(ctx)
	if err != nil {
		return err
	}

	runs := make([]*scriptRun, len(buckets))
	for i, b := range buckets {
		run := &scriptRun{
			Script: scripts.Peers,
			Keys:   []string{s.at().stateKey(b), s.at().readyKey(b), s.at().logKey(b)},
			Args:   []any{s.at().channel(b, s.cfg.Conn.DB), c.Publish, s.cfg.Partitions},
		}

		for _, name := range in {
			run.Args = append(run.Args, name, 1)
		}
		for _, name := range out {
			run.Args = append(run.Args, name, 0)
		}
		runs[i] = run
	}

	if err := s.conn.Run(ctx, runs); err != nil {
		return fmt.Errorf("presenceredis: peers of %d buckets: %w", len(buckets), err)
	}

	return nil
}

// Regions returns the data about regions in this region's Redis.
func (s *Store) Regions(ctx context.Context) (pncounter.Regions, error) {
	r := pncounter.Regions{Words: map[string]string{}}

	err := s.do(ctx, func(ctx context.Context, c *client) error {
		s.conn.Metrics.Commands.Inc()
		fields, err := c.HGetAll(ctx, regionsKey).Result()

		for name, value := range fields {
			switch name {
			case selfField:
				r.Identity = value
			case outField:
				r.Out = strings.FieldsFunc(value, func(c rune) bool { return c == ',' })
			default:
				r.Words[name] = value
			}
		}
		return err
	})
	if err != nil {
		return pncounter.Regions{}, fmt.Errorf("presenceredis: regions: %w", err)
	}

	return r, nil
}

// Identify gives the region an identity, unless it has one, and returns the region's identity.
func (s *Store) Identify(ctx context.Context, identity string) (string, error) {
	err := s.do(ctx, func(ctx context.Context, c *client) error {
		s.conn.Metrics.Commands.Add(2)
		// Processes that start together each bring an identity; the first one stays.
		if err := c.HSetNX(ctx, regionsKey, selfField, identity).Err(); err != nil {
			return err
		}

		var err error
		identity, err = c.HGet(ctx, regionsKey, selfField).Result()
		return err
	})
	if err != nil {
		return "", fmt.Errorf("presenceredis: identity of the region: %w", err)
	}
	return identity, nil
}

// DecideOut stores the region's decision about the peers that totals leave out.
func (s *Store) DecideOut(ctx context.Context, out []string) error {
	err := s.do(ctx, func(ctx context.Context, c *client) error {
		s.conn.Metrics.Commands.Inc()
		return c.HSet(ctx, regionsKey, outField, strings.Join(out, ",")).Err()
	})
	if err != nil {
		return fmt.Errorf("presenceredis: store which regions are left out: %w", err)
	}
	return nil
}

// Peer is the Redis of another region. Any goroutine may call its methods.
type Peer struct {
	s *Store
	// self is this region, name the other one.
	self, name string
}

// NewPeer returns the region called name, whose Redis is s. self is the name of this
// region. s must have the same numbers of partitions and buckets as this region's store.
func NewPeer(s *Store, self, name string) *Peer { return &Peer{s, self, name} }

// Hello greets the peer, and checks that it is the region of the settings. Its errors are
// pncounter.ErrRefused, and presence.ErrUnavailable, after which the caller tries again.
func (p *Peer) Hello(ctx context.Context, identity string) error {
	run := &scriptRun{
		Script: scripts.Hello,
		Keys:   []string{factsKey, regionsKey},
		Args:   []any{p.self, identity, nameHeld.Milliseconds()},
	}
	if err := p.s.conn.Run(ctx, []*scriptRun{run}); err != nil {
		return err
	}

	reply := run.Reply.([]any)
	switch reply[0].(string) {
	case "missing":
		return fmt.Errorf("%w: no process of that region has started yet", presence.ErrUnavailable)
	case "taken":
		return fmt.Errorf("%w: another region called %q writes there; give each region its own --region",
			pncounter.ErrRefused, p.self)
	}

	facts := map[string]string{}
	for i := 1; i+1 < len(reply); i += 2 {
		facts[reply[i].(string)] = reply[i+1].(string)
	}

	if got := facts["region"]; got != p.name {
		return fmt.Errorf("%w: the region there calls itself %q, not %q; correct --peer",
			pncounter.ErrRefused, presence.Excerpt(got), p.name)
	}
	if format := facts[formatFact]; format != formatNumbered && format != formatEven {
		return fmt.Errorf("%w: format is %q here and %q there; all regions must run with the same",
			pncounter.ErrRefused, formatEven, presence.Excerpt(format))
	}
	// Before any key is made: the peer's Redis may have been emptied, and begun in the other format.
	p.s.rekey(facts[formatFact])

	// With other numbers, or another hash, the same page would be in another bucket there.
	for _, fact := range [][2]string{
		{"partitions", strconv.Itoa(p.s.cfg.Partitions)}, {"buckets", strconv.Itoa(p.s.cfg.Buckets)}, {"seed", seed},
	} {
		if got := facts[fact[0]]; got != fact[1] {
			return fmt.Errorf("%w: %s is %q here and %q there; all regions must run with the same",
				pncounter.ErrRefused, fact[0], fact[1], presence.Excerpt(got))
		}
	}
	return nil
}

// Positions returns how far the peer has received this region's logs of buckets: 0 for a
// bucket of which it has nothing.
func (p *Peer) Positions(ctx context.Context, buckets []int) ([]pncounter.Position, error) {
	positions := make([]pncounter.Position, len(buckets))
	err := p.s.do(ctx, func(ctx context.Context, c *client) error {
		pipe := c.Pipeline()
		got := make([]*redis.StringCmd, len(buckets))
		for i, b := range buckets {
			got[i] = pipe.HGet(ctx, p.s.at().stateKey(b), peerField+p.self)
		}

		p.s.conn.Metrics.Commands.Add(float64(len(buckets)))
		// A bucket whose key is another program's counts as one of which the peer has nothing. Merge then says what
		// is wrong.
		if _, err := pipe.Exec(ctx); err != nil && !aboutTheKey(err) {
			return err
		}

		for i, g := range got {
			if err := g.Err(); err != nil && !aboutTheKey(err) {
				return err
			}

			positions[i].Bucket = buckets[i]
			if n, ok := numbersIn(g.Val(), 4); ok {
				positions[i].Log = n[0]
				positions[i].Cursor = n[1]
				positions[i].Done = n[3] == 1
			}
		}

		return nil
	})
	if err != nil {
		return nil, err
	}
	return positions, nil
}

// Merge sends batches, at most one per bucket, to the peer. An error concerns all of them.
func (p *Peer) Merge(ctx context.Context, batches []pncounter.Batch) ([]pncounter.Ack, error) {
	c, err := p.s.known(ctx)
	if err != nil {
		return nil, err
	}

	runs := make([]*scriptRun, len(batches))
	for i, b := range batches {
		prefix := p.s.at().pagePrefix(b.Bucket)
		run := &scriptRun{
			Script: scripts.Merge,
			Keys: append(make([]string, 0, 3+len(b.Pages)),
				p.s.at().stateKey(b.Bucket), p.s.at().readyKey(b.Bucket), p.s.at().emptiesKey(b.Bucket)),
			Args: append(make([]any, 0, 13+3*len(b.Pages)),
				p.s.at().channel(b.Bucket, p.s.cfg.Conn.DB), c.Publish, p.s.cfg.Partitions,
				int(p.s.cfg.RememberFor.Seconds()), len(prefix), b.Region, b.Log, b.From, b.To, b.Floor,
				flag(b.Complete), flag(p.s.cfg.PageDays > 0)),
		}

		for _, pp := range b.Pages {
			run.Keys = append(run.Keys, prefix+pp.Page)
			run.Args = append(run.Args, pp.Incarnation, pp.Increments, pp.Decrements)
		}
		runs[i] = run
	}
	// A bucket that cannot be merged says so in its own result, and does not hold up the others.
	if err := p.s.conn.Run(ctx, runs); err != nil && noneRan(runs) {
		return nil, err
	}

	acks := make([]pncounter.Ack, len(batches))
	for i, run := range runs {
		if run.Err != nil {
			// The error concerns this bucket alone.
			acks[i] = pncounter.Ack{Status: pncounter.Failed, Err: run.Err}
			continue
		}
		reply := run.Reply.([]any)
		n := numbers(reply[1:4])
		acks[i] = pncounter.Ack{
			Status: pncounter.Status(reply[0].(int64)), Log: n[0], Cursor: n[1], High: n[2],
			Done: reply[4].(int64) == 1, Changed: int(reply[5].(int64)), Malformed: int(reply[6].(int64)),
		}

		// These are minutes of the peer's totals, and this process alone has their report, so it writes them there.
		p.s.minutes.minutesEnded(batches[i].Bucket, reply[7].(string))
		for _, at := range reply[8:] {
			acks[i].Refused = append(acks[i].Refused, int(at.(int64)))
		}
	}

	return acks, nil
}
