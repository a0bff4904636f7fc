package presenceredis

import (
	"cmp"
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

	"headcount/internal/redisconn"
	"headcount/presence"
	"headcount/scripts"
)

const (
	memberBatch = 400  // members in one run of members.lua
	countBatch  = 300  // counts in one run of counts.lua
	fenceBatch  = 1000 // partitions in one run of fence.lua
	sealSize    = 16   // bytes of the seal of fences, see fences.lua
	loadShards  = 64   // hashes of members in one run of load.lua
	loadRuns    = 4    // runs of load.lua in one pipeline, which has its own deadline: some 10,000 members
	resizeSteps = 32   // hashes divided or joined in one run of resize.lua
	retries     = 3    // rounds for what found that the batch before it was missing
)

// What scripts say of a change.
const (
	statusWritten   = '0'
	statusFenced    = '1'
	statusLost      = '2'
	statusGap       = '3'
	statusResharded = '4' // members lie in another number of hashes
	statusLater     = '5' // a later change is written
)

// errLater is not for callers: the counts of a change that came after a later one
// are not written.
var errLater = errors.New("a later change is written")

// partition is what a store remembers of one that it claimed; under Store.mu.
type partition struct {
	epoch uint64
	// unwritten are the pages that Redis may name as such. known says that there
	// are no others, so that Redis gets a new list with each change, which has each
	// page once. Until they are known, the list there only grows.
	unwritten map[string]struct{}
	known     bool
	// shards is in how many hashes the members lie, members how many these are, as
	// of the last reply.
	shards, members int
}

// fences is what a store remembers of a bucket; under Store.mu. The bucket's seal
// changes with every claim. While it stays, the epochs found valid under it are valid.
type fences struct {
	run   uint64   // number of the last run of counts.lua
	seal  string   // as the last run said it
	valid []uint64 // by partition: the epoch that was found valid under it
}

// Generation implements presence.Partitions: a hash over, for every master, what
// changes when it restarts, when another takes its place and when it is emptied.
func (s *Store) Generation(ctx context.Context) (uint64, error) {
	var parts []string
	_, reached := s.generations.get()
	err := s.do(ctx, func(ctx context.Context, c *client) error {
		var err error
		parts, err = s.generation(ctx, c)
		return err
	})
	if err != nil {
		return 0, fmt.Errorf("presenceredis: generation: %w", err)
	}
	h := xxhash.New()
	for _, p := range parts {
		_, _ = h.WriteString(p + "\n")
	}
	s.generations.set(h.Sum64(), reached)
	return h.Sum64(), nil
}

func (s *Store) generation(ctx context.Context, c *client) ([]string, error) {
	var mu sync.Mutex
	var parts []string
	err := c.Masters(ctx, func(ctx context.Context, m redis.Cmdable) error {
		pipe := m.Pipeline()
		server, replication := pipe.Info(ctx, "server"), pipe.Info(ctx, "replication")
		s.conn.Metrics.Commands.Add(2)
		if _, err := pipe.Exec(ctx); err != nil {
			return err
		}
		if role := redisconn.InfoField(replication.Val(), "role"); role != "master" {
			return fmt.Errorf("%w: asked a %s for its generation; a master is being chosen", presence.ErrUnavailable, role)
		}
		mu.Lock()
		defer mu.Unlock()
		parts = append(parts, "run "+redisconn.InfoField(server.Val(), "run_id")+" "+redisconn.InfoField(replication.Val(), "master_replid"))
		return nil
	})
	if err != nil {
		return nil, err
	}
	slices.Sort(parts)
	for created := false; ; created = true {
		tokens, err := s.readTokens(ctx, c)
		if err != nil {
			return nil, err
		}
		pipe := c.Pipeline()
		missing := 0
		for b, token := range tokens {
			if token == "" {
				pipe.SetNX(ctx, tokenKey(b), rand.Text(), 0)
				missing++
			}
		}
		if missing == 0 {
			for _, token := range tokens {
				parts = append(parts, "token "+token)
			}
			return parts, nil
		}
		if created {
			return nil, fmt.Errorf("%w: it was emptied just now", presence.ErrUnavailable)
		}
		s.conn.Metrics.Commands.Add(float64(missing))
		if _, err := pipe.Exec(ctx); err != nil {
			return nil, err
		}
	}
}

// tokens is how many buckets have a token: one is enough for one server, the
// buckets' together reach all masters of a Cluster.
func (s *Store) tokens(c *client) int {
	if c.Cluster != nil {
		return s.cfg.Buckets
	}
	return 1
}

// readTokens reads them. One that is missing is empty: the server has been emptied.
func (s *Store) readTokens(ctx context.Context, c *client) ([]string, error) {
	pipe := c.Pipeline()
	got := make([]*redis.StringCmd, s.tokens(c))
	for b := range got {
		got[b] = pipe.Get(ctx, tokenKey(b))
	}
	s.conn.Metrics.Commands.Add(float64(len(got)))
	if _, err := pipe.Exec(ctx); err != nil && !errors.Is(err, redis.Nil) {
		return nil, err
	}
	tokens := make([]string, len(got))
	for b, g := range got {
		if g.Err() != nil && !errors.Is(g.Err(), redis.Nil) {
			return nil, g.Err()
		}
		tokens[b] = g.Val()
	}
	return tokens, nil
}

// Claim implements presence.Partitions: the epochs first, then the fences.
func (s *Store) Claim(ctx context.Context, owner string, partitions []int, again bool) ([]presence.Claim, error) {
	if len(partitions) == 0 {
		return nil, nil
	}
	fail := func(err error) ([]presence.Claim, error) {
		return nil, fmt.Errorf("presenceredis: claim %d partitions: %w", len(partitions), err)
	}
	generation, err := s.Generation(ctx)
	if err != nil {
		return fail(err)
	}
	generationText := strconv.FormatUint(generation, 10)
	number := s.claims.Add(1)
	calls := make([]*call, len(partitions))
	s.mu.Lock()
	for i, p := range partitions {
		before := uint64(0)
		if again {
			before = s.partitions[p].epoch
		}
		calls[i] = &call{
			Script: scripts.Claim, Keys: []string{ownerKey(p), dirtyKey(p)}, Args: []any{owner, generationText, s.self, number, before},
		}
	}
	s.mu.Unlock()
	if err := s.run(ctx, calls); err != nil {
		return fail(err)
	}
	claims := make([]presence.Claim, len(partitions))
	clean := make([]bool, len(partitions))
	for i, p := range partitions {
		reply := calls[i].Reply.([]any)
		epoch, err := strconv.ParseUint(reply[0].(string), 10, 64)
		if err != nil {
			return fail(fmt.Errorf("%w: partition %d was claimed again meanwhile", presence.ErrUnavailable, p))
		}
		former, err := strconv.ParseUint(reply[2].(string), 10, 64)
		if err != nil {
			return fail(fmt.Errorf("%w: partition %d has the epoch %q", presence.ErrUnavailable, p, reply[2]))
		}
		claims[i] = presence.Claim{Partition: p, Epoch: epoch, Generation: generation, Former: former, Whole: reply[5].(int64) == 1}
		if former > 0 { // epochs are milliseconds, see claim.lua
			claims[i].Held = time.Duration(epoch-former) * time.Millisecond
		}
		clean[i] = reply[1].(int64) == 0
	}
	if err := s.fence(ctx, claims, generationText, again); err != nil {
		return fail(err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for i, c := range claims {
		if p := &s.partitions[c.Partition]; p.epoch < c.Epoch {
			reply := calls[i].Reply.([]any)
			*p = partition{
				epoch: c.Epoch, unwritten: map[string]struct{}{}, known: clean[i],
				shards: max(1, int(reply[3].(int64))), members: int(reply[4].(int64)),
			}
		}
	}
	return claims, nil
}

// fence makes the claims known to every bucket, unless they were refused.
func (s *Store) fence(ctx context.Context, claims []presence.Claim, generation string, again bool) error {
	var calls []*call
	claims = slices.DeleteFunc(slices.Clone(claims), func(c presence.Claim) bool { return c.Epoch == 0 })
	slices.SortFunc(claims, func(a, b presence.Claim) int { return a.Partition - b.Partition })
	for chunk := range slices.Chunk(claims, fenceBatch) {
		args := make([]any, 0, 5+2*len(chunk))
		args = append(args, generation, flag(again), s.floor.Load(), strings.Join(s.cfg.Peers, ","), rand.Text()[:sealSize])
		for _, c := range chunk {
			args = append(args, c.Partition, c.Epoch)
		}
		for b := range s.cfg.Buckets {
			calls = append(calls, &call{Script: scripts.Fence, Keys: []string{stateKey(b), fenceKey(b), readyKey(b), logKey(b)}, Args: args})
		}
	}
	return s.run(ctx, calls)
}

// Incomplete implements presence.Partitions: one command a bucket, and one bucket
// at a time unless everywhere.
func (s *Store) Incomplete(ctx context.Context, partitions []int, everywhere bool) (missing []int, err error) {
	if len(partitions) == 0 {
		return nil, nil
	}
	members := make([]any, len(partitions))
	for i, p := range partitions {
		members[i] = p
	}
	buckets := []int{int(s.looks.Add(1) % uint64(s.cfg.Buckets))}
	if everywhere {
		buckets = buckets[:0]
		for b := range s.cfg.Buckets {
			buckets = append(buckets, b)
		}
	}
	answers := make([]*redis.BoolSliceCmd, len(buckets))
	err = s.do(ctx, func(ctx context.Context, c *client) error {
		pipe := c.Pipeline()
		for i, b := range buckets {
			answers[i] = pipe.SMIsMember(ctx, readyKey(b), members...)
		}
		s.conn.Metrics.Commands.Add(float64(len(buckets)))
		_, err := pipe.Exec(ctx)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("presenceredis: look for partitions that are not complete: %w", err)
	}
	for i, p := range partitions {
		if slices.ContainsFunc(answers, func(a *redis.BoolSliceCmd) bool { return !a.Val()[i] }) {
			missing = append(missing, p)
		}
	}
	return missing, nil
}

// Load implements presence.Partitions. It reads a bounded number of members at a
// time, each with a deadline of its own, so that many take long, but do not fail.
func (s *Store) Load(ctx context.Context, claims []presence.Claim) ([]presence.Snapshot, error) {
	var calls []*call
	var of []int // -> claims
	s.mu.Lock()
	for i, c := range claims {
		shards := 1
		if p := &s.partitions[c.Partition]; p.epoch == c.Epoch {
			shards = p.shards
		}
		for first := 0; first < shards; first += loadShards {
			keys := []string{ownerKey(c.Partition), dirtyKey(c.Partition)}
			for j := first; j < min(first+loadShards, shards); j++ {
				keys = append(keys, memberKey(c.Partition, j))
			}
			calls, of = append(calls, &call{Script: scripts.Load, Keys: keys, Args: []any{
				c.Epoch, strconv.FormatUint(c.Generation, 10), flag(first == 0), shards,
			}}), append(of, i)
		}
	}
	s.mu.Unlock()
	snaps := make([]presence.Snapshot, len(claims))
	for len(calls) > 0 {
		n := min(loadRuns, len(calls))
		if err := s.run(ctx, calls[:n]); err != nil {
			return nil, fmt.Errorf("presenceredis: load %d partitions: %w", len(claims), err)
		}
		for k, cl := range calls[:n] {
			if err := loaded(cl, &snaps[of[k]]); err != nil {
				return nil, fmt.Errorf("presenceredis: load partition %d: %w", claims[of[k]].Partition, err)
			}
		}
		calls, of = calls[n:], of[n:]
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

// loaded adds what one run of load.lua found.
func loaded(cl *call, snap *presence.Snapshot) error {
	reply := cl.Reply.([]any)
	if err := statusError(byte('0' + reply[0].(int64))); err != nil {
		return err
	}
	pages, err := pagesIn(reply[1].(string))
	if err != nil {
		return fmt.Errorf("%w: %w", presence.ErrUnavailable, err)
	}
	snap.Pages = append(snap.Pages, pages...)
	now, err := strconv.ParseInt(reply[3].(string), 10, 64)
	if err != nil {
		return fmt.Errorf("%w: the time of Redis: %w", presence.ErrUnavailable, err)
	}
	fields := reply[2].([]any)
	for j := 0; j+1 < len(fields); j += 2 {
		m, err := member(fields[j].(string), fields[j+1].(string), now)
		if err != nil {
			return fmt.Errorf("%w: %w", presence.ErrUnavailable, err)
		}
		snap.Members = append(snap.Members, m)
	}
	return nil
}

// member reads what memberField and members.lua wrote. now is the time of Redis. A hold that is
// over is none, unless only the hold kept the user there.
func member(field, value string, now int64) (presence.Member, error) {
	if len(field) < 9 {
		return presence.Member{}, fmt.Errorf("%w: a member of %d bytes", ErrForeign, len(field))
	}
	m := presence.Member{User: presence.User(binary.BigEndian.Uint64([]byte(field[:8]))), Page: field[8:]}
	if value != "" {
		ms, err := strconv.ParseInt(value, 10, 64)
		if err != nil {
			return presence.Member{}, fmt.Errorf("%w: the end of a hold: %w", ErrForeign, err)
		}
		if m.Alone = value[0] == '+'; m.Alone || ms > now {
			m.Hold = time.Now().Add(time.Duration(ms-now) * time.Millisecond)
		}
	}
	return m, nil
}

func memberField(m presence.Member) string {
	b := make([]byte, 8, 8+len(m.Page))
	binary.BigEndian.PutUint64(b, uint64(m.User))
	return string(append(b, m.Page...))
}

// holdValue is how long the hold lasts still, for members.lua.
func holdValue(m presence.Member) string {
	if m.Hold.IsZero() {
		return ""
	}
	left := strconv.FormatInt(max(time.Until(m.Hold).Milliseconds(), 0), 10)
	if m.Alone {
		return "+" + left
	}
	return left
}

// Write implements presence.Partitions. Members and the pages they touch are
// written before any count, so that whoever takes over a partition in between
// knows which counts to set right.
func (s *Store) Write(ctx context.Context, changes []presence.Change) []presence.Outcome {
	outcomes := make([]presence.Outcome, len(changes))
	s.writeMembers(ctx, changes, outcomes)
	s.lost(ctx, changes, outcomes)
	s.writeCounts(ctx, changes, outcomes)
	s.lost(ctx, changes, outcomes)
	s.mu.Lock()
	for i, c := range changes {
		if p := &s.partitions[c.Partition]; outcomes[i].Err == nil && p.epoch == c.Epoch {
			for _, pu := range c.Counts {
				delete(p.unwritten, pu.Page)
			}
		}
	}
	s.mu.Unlock()
	for i, c := range changes {
		if errors.Is(outcomes[i].Err, errLater) {
			outcomes[i].Counts, outcomes[i].Err = s.Counts(ctx, pagesOf(c))
		}
		if err := outcomes[i].Err; err != nil {
			outcomes[i] = presence.Outcome{Err: fmt.Errorf("presenceredis: write partition %d: %w", c.Partition, err)}
			continue
		}
		s.minutes.arrived(c.Arrivals)
	}
	return outcomes
}

// lost refuses the changes whose claims are of an older generation than the present one. Redis
// itself cannot tell: with its memory it may have got back the claims.
func (s *Store) lost(ctx context.Context, changes []presence.Change, outcomes []presence.Outcome) {
	generation, err := s.current(ctx)
	for i, c := range changes {
		if o := &outcomes[i]; o.Err == nil && c.Generation != generation {
			o.Err = cmp.Or(err, presence.ErrLost)
		}
	}
}

func pagesOf(c presence.Change) []string {
	pages := make([]string, len(c.Counts))
	for i, pu := range c.Counts {
		pages[i] = pu.Page
	}
	return pages
}

// writeMembers runs members.lua for all changes, and before it resize.lua where the
// members lie in too few or too many hashes.
func (s *Store) writeMembers(ctx context.Context, changes []presence.Change, outcomes []presence.Outcome) {
	lists := make([]pageList, len(changes))
	todo := make([]int, len(changes)) // -> changes
	s.mu.Lock()
	for i, c := range changes {
		todo[i] = i
		lists[i] = s.unwritten(c)
	}
	s.mu.Unlock()
	for round := 1; len(todo) > 0; round++ {
		var calls []*call
		ends := make([]int, len(todo))
		s.mu.Lock()
		for k, i := range todo {
			shards, members := 1, 0
			if p := &s.partitions[changes[i].Partition]; p.epoch == changes[i].Epoch {
				shards, members = p.shards, p.members
			}
			calls = append(calls, memberCalls(changes[i], lists[i], shards, members)...)
			ends[k] = len(calls)
		}
		s.mu.Unlock()
		_ = s.run(ctx, calls) // each call has its error
		again := todo[:0]
		first := 0
		s.mu.Lock()
		for k, i := range todo {
			status, err := s.membersWritten(changes[i], calls[first:ends[k]])
			first = ends[k]
			switch {
			case err != nil:
				outcomes[i].Err = err
			case (status == statusGap || status == statusResharded) && round < retries:
				again = append(again, i)
			default:
				outcomes[i].Err = statusError(status)
			}
		}
		s.mu.Unlock()
		todo = again
	}
}

// membersWritten takes in what became of one change's calls: the status or error of
// the first that was not written. Under mu.
func (s *Store) membersWritten(c presence.Change, calls []*call) (status byte, err error) {
	status = statusWritten
	for _, cl := range calls {
		switch reply := cl.Reply.(type) {
		case []any: // members.lua
			if p := &s.partitions[c.Partition]; p.epoch == c.Epoch {
				p.shards, p.members = int(reply[1].(int64)), int(reply[2].(int64))
			}
			if st := byte('0' + reply[0].(int64)); status == statusWritten {
				status = st
			}
		case int64: // resize.lua, whose word the next call repeats
		default:
			if err == nil {
				err = cl.Err
			}
		}
	}
	return status, err
}

// pageList is a list of pages as members.lua takes it: each page after its length,
// in two bytes. all says that Redis is to know no other pages as unwritten.
type pageList struct {
	all  bool
	text []byte
}

func (l *pageList) add(page string) {
	l.text = append(binary.BigEndian.AppendUint16(l.text, uint16(len(page))), page...)
}

// pagesIn reads a pageList that Redis has, which may name a page more than once.
func pagesIn(text string) ([]string, error) {
	var pages []string
	seen := map[string]struct{}{}
	for text != "" {
		if len(text) < 2 || len(text)-2 < int(text[0])<<8+int(text[1]) {
			return nil, fmt.Errorf("%w: a list of pages", ErrForeign)
		}
		end := 2 + int(text[0])<<8 + int(text[1])
		page := text[2:end]
		if _, twice := seen[page]; !twice {
			seen[page] = struct{}{}
			pages = append(pages, page)
		}
		text = text[end:]
	}
	return pages, nil
}

// unwritten notes the pages of a change as unwritten, and returns what Redis has to
// note. Under mu.
func (s *Store) unwritten(c presence.Change) pageList {
	var list pageList
	p := &s.partitions[c.Partition]
	if p.epoch == c.Epoch {
		list.all = p.known
	}
	if list.all && len(p.unwritten) > 0 { // a change before this one could not be written
		for _, pu := range c.Counts {
			p.unwritten[pu.Page] = struct{}{}
		}
		for page := range p.unwritten {
			list.add(page)
		}
		return list
	}
	for _, pu := range c.Counts {
		if p.epoch == c.Epoch {
			p.unwritten[pu.Page] = struct{}{}
		}
		list.add(pu.Page)
	}
	return list
}

// memberCalls divides a change into batches. The first one has all pages, so that they
// are known as unwritten before the first member is changed. The members lie in so
// many hashes, which are made to suit their number first.
func memberCalls(c presence.Change, list pageList, shards, members int) []*call {
	generation := strconv.FormatUint(c.Generation, 10)
	var calls []*call
	const flagsAt = 4 // of args
	drop := 0         // hashes that a reset drops
	if c.Reset {
		drop = shards
		shards = shardsFor(len(c.Members))
	} else {
		calls = resizeCalls(c.Claim, shards, shardsAfter(c, shards, members))
		shards = shardsAfter(c, shards, members)
	}
	rest := c.Members
	for batch := 0; batch == 0 || len(rest) > 0; batch++ {
		nm := min(len(rest), memberBatch)
		keys := append(make([]string, 0, 2+drop+min(nm, shards)), ownerKey(c.Partition), dirtyKey(c.Partition))
		args := make([]any, 0, 8+4*nm)
		if batch == 0 && drop > 0 {
			for i := range drop {
				keys = append(keys, memberKey(c.Partition, i))
			}
			args = append(args, c.Epoch, generation, c.Sequence, batch, flag(list.all), drop, shards, list.text)
		} else {
			args = append(args, c.Epoch, generation, c.Sequence, batch, flag(list.all), shards, 0, list.text)
		}
		list.text = nil
		keys, args = splitByShard(keys, args, c.Partition, rest[:nm], shards)
		if rest = rest[nm:]; c.Complete && len(rest) == 0 {
			args[flagsAt] = args[flagsAt].(int) + 2 // the last batch: with it the members are whole
		}
		calls = append(calls, &call{Script: scripts.Members, Keys: keys, Args: args})
	}
	return calls
}

// splitByShard appends the keys of the hashes that the members lie in, and what is to
// change there. Of two changes of one member the later holds.
func splitByShard(keys []string, args []any, partition int, members []presence.MemberChange, shards int) ([]string, []any) {
	type part struct{ set, gone []presence.Member }
	parts := map[int]*part{}
	var order []int
	for _, m := range members {
		i := shardOf(m.User, shards)
		p := parts[i]
		if p == nil {
			p = &part{}
			parts[i] = p
			order = append(order, i)
		}
		if m.Gone {
			p.set, p.gone = without(p.set, m.Member), append(p.gone, m.Member)
		} else {
			p.gone, p.set = without(p.gone, m.Member), append(p.set, m.Member)
		}
	}
	for _, i := range order {
		p := parts[i]
		keys = append(keys, memberKey(partition, i))
		args = append(args, len(p.set))
		for _, m := range p.set {
			args = append(args, memberField(m), holdValue(m))
		}
		args = append(args, len(p.gone))
		for _, m := range p.gone {
			args = append(args, memberField(m))
		}
	}
	return keys, args
}

// shardsAfter is how many hashes the members are to lie in when the change is
// written: as many as suit all it may add, and fewer when a third would do. It
// falls by resizeSteps at a time.
func shardsAfter(c presence.Change, shards, members int) int {
	for _, m := range c.Members {
		if !m.Gone {
			members++
		}
	}
	switch fit := shardsFor(members); {
	case fit > shards:
		return fit
	case 3*fit < shards:
		return max(2*fit, shards-resizeSteps)
	}
	return shards
}

// resizeCalls has the members lie in another number of hashes, some steps a call.
func resizeCalls(c presence.Claim, from, to int) []*call {
	generation := strconv.FormatUint(c.Generation, 10)
	var calls []*call
	for from != to {
		next := max(from-resizeSteps, to)
		if from < to {
			next = min(from+resizeSteps, to)
		}
		keys := []string{ownerKey(c.Partition)}
		for n := from; n != next; {
			last := n // the number with the hash that begins or ends
			if n < next {
				last++
				n++
			} else {
				n--
			}
			keys = append(keys, memberKey(c.Partition, neighbour(last)), memberKey(c.Partition, last-1))
		}
		calls = append(calls, &call{Script: scripts.Resize, Keys: keys, Args: []any{c.Epoch, generation, from, next}})
		from = next
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
	names      []string
	groups     []group
	generation string
	bucket     int
	counts     []count // of the groups
	continues  bool    // with a change that the call before it has begun
}

// count is one count in a call.
type count struct {
	page, partition int
	users           int64
}

// Arguments of counts.lua.
const (
	runAt    = 7
	sealAt   = 9
	claimsAt = 10
	countsAt = 11
)

// noSeal is no bucket's seal.
const noSeal = "-"

// pack makes the claims and the counts arguments.
func (cc *countsCall) pack(changes []presence.Change) {
	slices.SortStableFunc(cc.counts, func(a, b count) int { return a.page - b.page })
	claims := make([]byte, 0, 8*len(cc.groups))
	for _, g := range cc.groups {
		c := changes[g.change]
		claims = binary.BigEndian.AppendUint16(claims, uint16(c.Partition))
		claims = appendNumber(claims, c.Epoch, 6)
	}
	text := make([]byte, 0, 9*len(cc.counts))
	for i, n := 0, 0; i < len(cc.counts); i += n {
		for n = 1; i+n < len(cc.counts) && cc.counts[i+n].page == cc.counts[i].page; {
			n++
		}
		text = binary.BigEndian.AppendUint16(text, uint16(n))
		for _, c := range cc.counts[i : i+n] {
			text = binary.LittleEndian.AppendUint16(text, uint16(c.partition))
			text = appendNumber(text, uint64(max(c.users, 0)), 5)
		}
	}
	cc.Args[claimsAt], cc.Args[countsAt] = claims, text
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
		todo = append(todo, s.countCalls(b, c.Publish, changes, groups)...)
	}
	s.counting.Lock()
	defer s.counting.Unlock()
	for round := 1; len(todo) > 0; round++ {
		calls := make([]*call, len(todo))
		s.mu.Lock()
		for i, cc := range todo {
			s.number(cc, changes)
			calls[i] = &cc.call
		}
		s.mu.Unlock()
		_ = s.run(ctx, calls) // each call has its error
		var again []*countsCall
		for i, cc := range todo {
			// Nothing goes on from a call that failed.
			may := round < retries && (!cc.continues || len(again) > 0 && again[len(again)-1] == todo[i-1])
			if s.counted(cc, changes, outcomes, may) {
				again = append(again, cc)
			}
		}
		todo = again
	}
}

// number gives a call the next number of its bucket, and the seal when all its epochs
// were found valid under it. Under mu.
func (s *Store) number(cc *countsCall, changes []presence.Change) {
	f := &s.fences[cc.bucket]
	f.run++
	cc.Args[runAt], cc.Args[sealAt] = f.run, f.seal
	for _, g := range cc.groups {
		if c := changes[g.change]; f.seal == "" || f.valid[c.Partition] != c.Epoch {
			cc.Args[sealAt] = noSeal
			return
		}
	}
}

// sealed notes the epochs that a call found valid, under which seal.
func (s *Store) sealed(cc *countsCall, changes []presence.Change, status, seal string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f := &s.fences[cc.bucket]
	if f.seal != seal {
		f.seal, f.valid = seal, make([]uint64, s.cfg.Partitions)
	}
	for i, g := range cc.groups {
		if status[i] == statusWritten {
			c := changes[g.change]
			f.valid[c.Partition] = c.Epoch
		}
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
// then a run says that it goes on where the one before it ended, so that none completes
// a partition while counts from before are missing.
func (s *Store) countCalls(b int, publish string, changes []presence.Change, groups []group) []*countsCall {
	slices.SortStableFunc(groups, func(a, b group) int { return changes[a.change].Partition - changes[b.change].Partition })
	prefix := pagePrefix(b)
	var calls []*countsCall
	var cc *countsCall
	var numbers map[string]int
	size := 0
	for _, g := range groups {
		c := changes[g.change]
		generation := strconv.FormatUint(c.Generation, 10)
		for before := 0; ; {
			if cc == nil || size >= countBatch || cc.generation != generation {
				cc = &countsCall{generation: generation, bucket: b, continues: before > 0, call: call{
					Script: scripts.Counts,
					Keys:   []string{stateKey(b), fenceKey(b), readyKey(b), logKey(b), emptiesKey(b), runKey(b, s.self)},
					Args: []any{channel(b, s.db), publish, s.cfg.Partitions, s.floor.Load(), int(s.cfg.RememberFor.Seconds()), len(prefix), generation,
						nil, flag(before > 0), nil, nil, nil, flag(s.cfg.PageStats > 0)},
				}}
				calls, numbers, size = append(calls, cc), map[string]int{}, 0
			}
			n := min(len(g.counts)-before, countBatch-size)
			last := before+n == len(g.counts)
			part := group{change: g.change, counts: g.counts[before : before+n], pages: make([]int, 0, n)}
			if last && c.Complete {
				cc.Args = append(cc.Args, c.Partition)
			}
			for _, j := range part.counts {
				pu := c.Counts[j]
				k, ok := numbers[pu.Page]
				if !ok {
					cc.names = append(cc.names, pu.Page)
					cc.Keys = append(cc.Keys, prefix+pu.Page)
					k = len(cc.names)
					numbers[pu.Page] = k
				}
				part.pages = append(part.pages, k)
				cc.counts = append(cc.counts, count{k, c.Partition, pu.Users})
			}
			cc.groups = append(cc.groups, part)
			size += max(n, 1)
			before += n
			if last {
				if cc.continues {
					cc = nil // what becomes of it is nothing to other changes
				}
				break
			}
		}
	}
	for _, cc := range calls {
		cc.pack(changes)
	}
	return calls
}

// appendNumber appends the last bytes of a number, the highest first.
func appendNumber(to []byte, n uint64, bytes int) []byte {
	for i := bytes - 1; i >= 0; i-- {
		to = append(to, byte(n>>(8*i)))
	}
	return to
}

// counted takes a call's reply into the outcomes. It reports whether the call came
// out of turn and is to run again; unless it may.
func (s *Store) counted(cc *countsCall, changes []presence.Change, outcomes []presence.Outcome, mayAgain bool) (again bool) {
	reply, ok := cc.Reply.([]any)
	if cc.Err == nil && (!ok || len(reply) == 1) { // late, or a gap
		if mayAgain {
			return true
		}
		for _, g := range cc.groups { // what made the gap says more
			outcomes[g.change].Err = cmp.Or(outcomes[g.change].Err, statusError(statusGap))
		}
		return false
	}
	if cc.Err != nil {
		for _, g := range cc.groups {
			outcomes[g.change].Err = cmpErr(outcomes[g.change].Err, cc.Err)
		}
		return false
	}
	status := reply[1].(string)
	if status != "" {
		s.sealed(cc, changes, status, reply[7].(string))
	}
	s.noteEmptyPages(cc.bucket, int(reply[2].(int64)), reply[3] == "1")
	counts := make([]presence.Count, len(cc.names))
	stale, without, records := reply[0] == "1", reply[4].(string), reply[5].(string)
	for i := range counts {
		var err error
		if counts[i], records, err = cutCount(records); err != nil {
			cc.Err = fmt.Errorf("%w: counts.lua returned %w", presence.ErrUnavailable, err)
			return s.counted(cc, changes, outcomes, false)
		}
		counts[i].Page, counts[i].Stale, counts[i].Without = cc.names[i], stale, without // not a piece of a long text
		s.raiseFloor(counts[i].Version.Incarnation)
	}
	s.minutes.countsEnded(cc, reply[6].(string))
	for i, g := range cc.groups {
		if status != "" && status[i] != statusWritten {
			outcomes[g.change].Err = cmpErr(outcomes[g.change].Err, statusError(status[i]))
			continue
		}
		if o := &outcomes[g.change]; o.Counts != nil {
			for k, j := range g.counts {
				o.Counts[j] = counts[g.pages[k]-1]
			}
		}
	}
	return false
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
	case statusResharded:
		return fmt.Errorf("%w: members were moved meanwhile", presence.ErrUnavailable)
	case statusLater:
		return errLater
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
