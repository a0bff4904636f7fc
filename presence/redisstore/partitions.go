package redisstore

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/cespare/xxhash/v2"
	"github.com/redis/go-redis/v9"

	"headcount/presence"
)

const (
	memberBatch = 400  // pages and members in one run of members.lua
	countBatch  = 300  // counts in one run of counts.lua
	fenceBatch  = 1000 // partitions in one run of fence.lua
	loadShares  = 16   // hashes of members in one run of load.lua
	retries     = 3    // rounds for what found that the batch before it was missing
)

// What scripts say of a change.
const (
	statusWritten = '0'
	statusFenced  = '1'
	statusLost    = '2'
	statusGap     = '3'
)

// partition is what a store remembers of one that it claimed; under Store.mu.
type partition struct {
	epoch uint64
	// unwritten are the pages that Redis may name as such. known says that there
	// are no others, so that the set may begin anew when all are written.
	unwritten map[string]struct{}
	known     bool
}

// Generation implements presence.Partitions: a hash over, for every master, what
// changes when it restarts, when another takes its place and when it is emptied.
func (s *Store) Generation(ctx context.Context) (uint64, error) {
	var parts []string
	err := s.do(ctx, func(ctx context.Context, c *client) error {
		var err error
		parts, err = s.generation(ctx, c)
		return err
	})
	if err != nil {
		return 0, fmt.Errorf("redisstore: generation: %w", err)
	}
	h := xxhash.New()
	for _, p := range parts {
		_, _ = h.WriteString(p + "\n")
	}
	return h.Sum64(), nil
}

func (s *Store) generation(ctx context.Context, c *client) ([]string, error) {
	var mu sync.Mutex
	var parts []string
	err := c.masters(ctx, func(ctx context.Context, m redis.Cmdable) error {
		pipe := m.Pipeline()
		server, replication := pipe.Info(ctx, "server"), pipe.Info(ctx, "replication")
		s.metrics.commands.Add(2)
		if _, err := pipe.Exec(ctx); err != nil {
			return err
		}
		if role := infoField(replication.Val(), "role"); role != "master" {
			return fmt.Errorf("%w: asked a %s for its generation; a master is being chosen", presence.ErrUnavailable, role)
		}
		mu.Lock()
		defer mu.Unlock()
		parts = append(parts, "run "+infoField(server.Val(), "run_id")+" "+infoField(replication.Val(), "master_replid"))
		return nil
	})
	if err != nil {
		return nil, err
	}
	slices.Sort(parts)
	// One token is enough for one server; the buckets' together reach all masters.
	tokens := 1
	if c.cluster != nil {
		tokens = s.cfg.Buckets
	}
	for created := false; ; created = true {
		pipe := c.Pipeline()
		got := make([]*redis.StringCmd, tokens)
		for b := range got {
			got[b] = pipe.Get(ctx, tokenKey(b))
		}
		s.metrics.commands.Add(float64(tokens))
		if _, err := pipe.Exec(ctx); err != nil && !errors.Is(err, redis.Nil) {
			return nil, err
		}
		pipe = c.Pipeline()
		missing := 0
		for b, g := range got {
			if errors.Is(g.Err(), redis.Nil) {
				pipe.SetNX(ctx, tokenKey(b), rand.Text(), 0)
				missing++
			} else if g.Err() != nil {
				return nil, g.Err()
			}
		}
		if missing == 0 {
			for _, g := range got {
				parts = append(parts, "token "+g.Val())
			}
			return parts, nil
		}
		if created {
			return nil, fmt.Errorf("%w: it was emptied just now", presence.ErrUnavailable)
		}
		s.metrics.commands.Add(float64(missing))
		if _, err := pipe.Exec(ctx); err != nil {
			return nil, err
		}
	}
}

// Claim implements presence.Partitions: the epochs first, then the fences.
func (s *Store) Claim(ctx context.Context, owner string, partitions []int, again bool) ([]presence.Claim, error) {
	if len(partitions) == 0 {
		return nil, nil
	}
	fail := func(err error) ([]presence.Claim, error) {
		return nil, fmt.Errorf("redisstore: claim %d partitions: %w", len(partitions), err)
	}
	generation, err := s.Generation(ctx)
	if err != nil {
		return fail(err)
	}
	gen := strconv.FormatUint(generation, 10)
	number := s.claims.Add(1)
	calls := make([]*call, len(partitions))
	for i, p := range partitions {
		calls[i] = &call{script: "claim", keys: []string{ownerKey(p), dirtyKey(p)}, args: []any{owner, gen, s.self, number}}
	}
	if err := s.run(ctx, calls); err != nil {
		return fail(err)
	}
	claims := make([]presence.Claim, len(partitions))
	clean := make([]bool, len(partitions))
	for i, p := range partitions {
		reply := calls[i].reply.([]any)
		epoch, err := strconv.ParseUint(reply[0].(string), 10, 64)
		if err != nil {
			return fail(fmt.Errorf("%w: partition %d was claimed again meanwhile", presence.ErrUnavailable, p))
		}
		former, err := strconv.ParseUint(reply[2].(string), 10, 64)
		if err != nil {
			return fail(fmt.Errorf("%w: partition %d has the epoch %q", presence.ErrUnavailable, p, reply[2]))
		}
		claims[i] = presence.Claim{Partition: p, Epoch: epoch, Generation: generation, Former: former}
		clean[i] = reply[1].(int64) == 0
	}
	if err := s.fence(ctx, claims, gen, again); err != nil {
		return fail(err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for i, c := range claims {
		if p := &s.partitions[c.Partition]; p.epoch < c.Epoch {
			*p = partition{epoch: c.Epoch, unwritten: map[string]struct{}{}, known: clean[i]}
		}
	}
	return claims, nil
}

// fence makes the claims known to every bucket.
func (s *Store) fence(ctx context.Context, claims []presence.Claim, gen string, again bool) error {
	var calls []*call
	for chunk := range slices.Chunk(claims, fenceBatch) {
		args := make([]any, 0, 4+2*len(chunk))
		args = append(args, gen, flag(again), s.floor.Load(), strings.Join(s.cfg.Peers, ","))
		for _, c := range chunk {
			args = append(args, c.Partition, c.Epoch)
		}
		for b := range s.cfg.Buckets {
			calls = append(calls, &call{script: "fence", keys: []string{stateKey(b), fenceKey(b), readyKey(b), logKey(b)}, args: args})
		}
	}
	return s.run(ctx, calls)
}

// Load implements presence.Partitions.
func (s *Store) Load(ctx context.Context, claims []presence.Claim) ([]presence.Snapshot, error) {
	calls := make([]*call, 0, len(claims)*shares/loadShares)
	for _, c := range claims {
		for first := 0; first < shares; first += loadShares {
			keys := make([]string, 0, 2+loadShares)
			keys = append(keys, ownerKey(c.Partition), dirtyKey(c.Partition))
			for i := range loadShares {
				keys = append(keys, memberKey(c.Partition, first+i))
			}
			calls = append(calls, &call{script: "load", keys: keys, args: []any{
				c.Epoch, strconv.FormatUint(c.Generation, 10), flag(first == 0),
			}})
		}
	}
	if err := s.run(ctx, calls); err != nil {
		return nil, fmt.Errorf("redisstore: load %d partitions: %w", len(claims), err)
	}
	now := time.Now()
	snaps := make([]presence.Snapshot, len(claims))
	for i, cl := range calls {
		claim := claims[i/(shares/loadShares)]
		snap := &snaps[i/(shares/loadShares)]
		reply := cl.reply.([]any)
		if err := statusError(byte('0' + reply[0].(int64))); err != nil {
			return nil, fmt.Errorf("redisstore: load partition %d: %w", claim.Partition, err)
		}
		for _, page := range reply[1].([]any) {
			snap.Pages = append(snap.Pages, page.(string))
		}
		fields := reply[2].([]any)
		for j := 0; j+1 < len(fields); j += 2 {
			m, err := member(fields[j].(string), fields[j+1].(string), now)
			if err != nil {
				return nil, fmt.Errorf("redisstore: load partition %d: %w: %w", claim.Partition, presence.ErrUnavailable, err)
			}
			snap.Members = append(snap.Members, m)
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for i, c := range claims {
		p := &s.partitions[c.Partition]
		if p.epoch != c.Epoch || p.known {
			continue
		}
		for _, page := range snaps[i].Pages {
			p.unwritten[page] = struct{}{}
		}
		p.known = true
	}
	return snaps, nil
}

// member reads what memberField and holdValue wrote. A hold that is over is none.
func member(field, value string, now time.Time) (presence.Member, error) {
	if len(field) < 9 {
		return presence.Member{}, fmt.Errorf("%w: a member of %d bytes", ErrForeign, len(field))
	}
	m := presence.Member{User: presence.User(binary.BigEndian.Uint64([]byte(field[:8]))), Page: field[8:]}
	if value != "" {
		ms, err := strconv.ParseInt(value, 10, 64)
		if err != nil {
			return presence.Member{}, fmt.Errorf("%w: the end of a hold: %w", ErrForeign, err)
		}
		if end := time.UnixMilli(ms); end.After(now) {
			m.Hold = end
		}
	}
	return m, nil
}

func memberField(m presence.Member) string {
	b := make([]byte, 8, 8+len(m.Page))
	binary.BigEndian.PutUint64(b, uint64(m.User))
	return string(append(b, m.Page...))
}

func holdValue(m presence.Member) string {
	if m.Hold.IsZero() {
		return ""
	}
	return strconv.FormatInt(m.Hold.UnixMilli(), 10)
}

// Write implements presence.Partitions. Members and the pages they touch are
// written before any count, so that whoever takes over a partition in between
// knows which counts to set right.
func (s *Store) Write(ctx context.Context, changes []presence.Change) []presence.Outcome {
	outcomes := make([]presence.Outcome, len(changes))
	s.writeMembers(ctx, changes, outcomes)
	s.writeCounts(ctx, changes, outcomes)
	s.mu.Lock()
	defer s.mu.Unlock()
	for i, c := range changes {
		if outcomes[i].Err != nil {
			outcomes[i] = presence.Outcome{Err: fmt.Errorf("redisstore: write partition %d: %w", c.Partition, outcomes[i].Err)}
			continue
		}
		if p := &s.partitions[c.Partition]; p.epoch == c.Epoch {
			for _, pu := range c.Counts {
				delete(p.unwritten, pu.Page)
			}
		}
	}
	return outcomes
}

// writeMembers runs members.lua for all changes.
func (s *Store) writeMembers(ctx context.Context, changes []presence.Change, outcomes []presence.Outcome) {
	var calls []*call
	var of []int // -> changes
	s.mu.Lock()
	for i, c := range changes {
		fresh := false
		if p := &s.partitions[c.Partition]; p.epoch == c.Epoch {
			fresh = p.known && len(p.unwritten) == 0
			for _, pu := range c.Counts {
				p.unwritten[pu.Page] = struct{}{}
			}
		}
		for _, cl := range s.memberCalls(c, fresh) {
			calls, of = append(calls, cl), append(of, i)
		}
	}
	s.mu.Unlock()
	for round := 1; len(calls) > 0; round++ {
		_ = s.run(ctx, calls) // each call has its error
		var gapCalls []*call
		var gapOf []int
		for k, cl := range calls {
			i := of[k]
			switch {
			case outcomes[i].Err != nil:
			case cl.err != nil:
				outcomes[i].Err = cl.err
			case cl.reply.(int64) == statusGap-'0' && round < retries:
				gapCalls, gapOf = append(gapCalls, cl), append(gapOf, i)
			default:
				outcomes[i].Err = statusError(byte('0' + cl.reply.(int64)))
			}
		}
		calls, of = gapCalls, gapOf
	}
}

// memberCalls divides a change into batches: its pages first, so that all of
// them are known as unwritten before the first member is changed.
func (s *Store) memberCalls(c presence.Change, fresh bool) []*call {
	gen := strconv.FormatUint(c.Generation, 10)
	pages, members := c.Counts, c.Members
	var calls []*call
	for batch := 0; batch == 0 || len(pages)+len(members) > 0; batch++ {
		np := min(len(pages), memberBatch)
		nm := min(len(members), memberBatch-np)
		keys := []string{ownerKey(c.Partition), dirtyKey(c.Partition)}
		args := make([]any, 0, 8+np+2*nm)
		args = append(args, c.Epoch, gen, c.Sequence, batch, flag(fresh), flag(c.Reset), np)
		for _, pu := range pages[:np] {
			args = append(args, pu.Page)
		}
		var set, gone [shares][]presence.Member
		for _, m := range members[:nm] {
			i := share(m.User, s.cfg.Partitions)
			if m.Gone { // of two changes of one member the later holds
				set[i], gone[i] = without(set[i], m.Member), append(gone[i], m.Member)
			} else {
				gone[i], set[i] = without(gone[i], m.Member), append(set[i], m.Member)
			}
		}
		for i := range shares {
			if len(set[i])+len(gone[i]) == 0 && (batch > 0 || !c.Reset) {
				continue
			}
			keys = append(keys, memberKey(c.Partition, i))
			args = append(args, len(set[i]))
			for _, m := range set[i] {
				args = append(args, memberField(m), holdValue(m))
			}
			args = append(args, len(gone[i]))
			for _, m := range gone[i] {
				args = append(args, memberField(m))
			}
		}
		calls = append(calls, &call{script: "members", keys: keys, args: args})
		pages, members = pages[np:], members[nm:]
	}
	return calls
}

func without(list []presence.Member, m presence.Member) []presence.Member {
	return slices.DeleteFunc(list, func(o presence.Member) bool { return o.User == m.User && o.Page == m.Page })
}

// group is the part of a change that one run of counts.lua has.
type group struct {
	change int
	counts []int // -> Change.Counts
	pages  []int // of counts: number of the page in the call
}

// countsCall is one run of counts.lua for one bucket.
type countsCall struct {
	call
	names  []string
	groups []group
}

// writeCounts runs counts.lua for the changes whose members are written: one
// call a bucket for all partitions together, unless there are many counts.
func (s *Store) writeCounts(ctx context.Context, changes []presence.Change, outcomes []presence.Outcome) {
	c, err := s.known(ctx)
	if err != nil {
		for i := range outcomes {
			if outcomes[i].Err == nil {
				outcomes[i].Err = err
			}
		}
		return
	}
	var todo []*countsCall
	for b, groups := range s.byBucket(changes, outcomes) {
		todo = append(todo, s.countCalls(b, c.publish, changes, groups)...)
	}
	for round := 1; len(todo) > 0; round++ {
		calls := make([]*call, len(todo))
		for i, cc := range todo {
			calls[i] = &cc.call
		}
		_ = s.run(ctx, calls) // each call has its error
		var gaps []*countsCall
		for _, cc := range todo {
			if s.counted(cc, outcomes, round < retries) {
				gaps = append(gaps, cc)
			}
		}
		todo = gaps
	}
}

// byBucket groups the counts of the changes by bucket, in the order of changes.
func (s *Store) byBucket(changes []presence.Change, outcomes []presence.Outcome) [][]group {
	buckets := make([][]group, s.cfg.Buckets)
	for i, c := range changes {
		if outcomes[i].Err != nil {
			continue
		}
		outcomes[i].Counts = make([]presence.Count, len(c.Counts))
		if c.Complete {
			for b := range buckets {
				buckets[b] = append(buckets[b], group{change: i})
			}
		}
		for j, pu := range c.Counts {
			b := presence.Bucket(pu.Page, s.cfg.Buckets)
			if n := len(buckets[b]); n == 0 || buckets[b][n-1].change != i {
				buckets[b] = append(buckets[b], group{change: i})
			}
			g := &buckets[b][len(buckets[b])-1]
			g.counts = append(g.counts, j)
		}
	}
	return buckets
}

// countCalls makes the calls of one bucket. A group may be divided over several;
// each says how many of the change's counts here came before, so that it does not
// matter where a repetition divides them.
func (s *Store) countCalls(b int, publish string, changes []presence.Change, groups []group) []*countsCall {
	prefix := pagePrefix(b)
	var calls []*countsCall
	var cc *countsCall
	var numbers map[string]int
	size := 0
	for _, g := range groups {
		c := changes[g.change]
		gen := strconv.FormatUint(c.Generation, 10)
		for before := 0; ; {
			if cc == nil || size >= countBatch {
				cc = &countsCall{call: call{script: "counts", keys: []string{stateKey(b), fenceKey(b), readyKey(b), logKey(b)}}}
				cc.args = append(cc.args, channel(b, s.db), publish, s.cfg.Partitions, s.floor.Load(), int(s.cfg.RememberFor.Seconds()), len(prefix), 0)
				calls, numbers, size = append(calls, cc), map[string]int{}, 0
			}
			n := min(len(g.counts)-before, countBatch-size)
			last := before+n == len(g.counts)
			cc.args = append(cc.args, c.Partition, c.Epoch, gen, c.Sequence, before, flag(last && c.Complete), n)
			part := group{change: g.change, counts: g.counts[before : before+n]}
			for _, j := range part.counts {
				pu := c.Counts[j]
				k, ok := numbers[pu.Page]
				if !ok {
					cc.names = append(cc.names, pu.Page)
					cc.keys = append(cc.keys, prefix+pu.Page)
					k = len(cc.names)
					numbers[pu.Page] = k
				}
				part.pages = append(part.pages, k)
				cc.args = append(cc.args, k, max(pu.Users, 0))
			}
			cc.groups = append(cc.groups, part)
			cc.args[6] = len(cc.groups)
			size += max(n, 1)
			before += n
			if last {
				break
			}
		}
	}
	return calls
}

// counted takes a call's reply into the outcomes. It reports whether the call
// found counts before its own missing and is to run again; unless it may.
func (s *Store) counted(cc *countsCall, outcomes []presence.Outcome, mayGap bool) (again bool) {
	if cc.err != nil {
		for _, g := range cc.groups {
			outcomes[g.change].Err = cmpErr(outcomes[g.change].Err, cc.err)
		}
		return false
	}
	reply := cc.reply.([]any)
	status := reply[1].(string)
	counts := make([]presence.Count, len(cc.names))
	for i, name := range cc.names {
		counts[i] = s.count(name, reply[2+i].(string), reply[0].(string))
	}
	for i, g := range cc.groups {
		switch err := statusError(status[i]); {
		case status[i] == statusGap && mayGap:
			again = true
		case err != nil:
			outcomes[g.change].Err = cmpErr(outcomes[g.change].Err, err)
		default:
			if o := &outcomes[g.change]; o.Counts != nil {
				for k, j := range g.counts {
					o.Counts[j] = counts[g.pages[k]-1]
				}
			}
		}
	}
	return again
}

// cmpErr is the error that says more: that of the contract for good before the
// one that passes.
func cmpErr(a, b error) error {
	if a == nil || errors.Is(a, presence.ErrUnavailable) {
		return b
	}
	return a
}

func statusError(status byte) error {
	switch status {
	case statusWritten:
		return nil
	case statusFenced:
		return presence.ErrFenced
	case statusLost:
		return presence.ErrLost
	case statusGap:
		return fmt.Errorf("%w: an earlier part of the change is missing", presence.ErrUnavailable)
	}
	return fmt.Errorf("%w: a script said %q", presence.ErrUnavailable, status)
}

func flag(b bool) int {
	if b {
		return 1
	}
	return 0
}
