package counterredis

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"headcount/counter"
	"headcount/internal/redisconn"
	"headcount/scripts"
)

// This file is for package tiered: Redis as the cache tier in front of PostgreSQL. scripts/README.md describes the keys
// that a bucket has in addition.

const (
	absentState = "-"
	deletedFlag = "x"
	lostReply   = "lost"

	// maxPending is how many changes of a bucket may wait to be persisted: counters, members, ledger entries and
	// idempotency keys. At the bound changes fail.
	maxPending  = 1 << 18
	page        = 500 // counters in one run of a script of a checkpoint
	stagedFor   = time.Minute
	stagePage   = 5000 // members in one run of counter_stage.lua
	evictAtOnce = 1000 // counters of a bucket in one run of counter_evict.lua
	stepsAtOnce = 8 << 20
	// maxCounted is how many values of a dimension have a count of their own between two checkpoints. It is greater
	// than counter.MaxValues, so that the values that PostgreSQL keeps are among them even after a long outage.
	maxCounted = 10 * counter.MaxValues
)

var (
	// ErrLost means that Redis may have lost data. Heal finds out.
	ErrLost = fmt.Errorf("%w: Redis may have lost data", counter.ErrUnavailable)
	// ErrMoved means that a counter was evicted or loaded meanwhile, and has to be read again.
	ErrMoved     = fmt.Errorf("%w: counters are moving between Redis and PostgreSQL", counter.ErrUnavailable)
	errRegion    = fmt.Errorf("%w: this Redis belongs to a region and shares its counters with others: give every process of the region its --region and --peer flags, and an export --regions", counter.ErrUnavailable)
	errAlone     = fmt.Errorf("%w: processes without --postgres use this Redis; end all of them, then start them with --postgres, and its counters are carried into PostgreSQL", counter.ErrUnavailable)
	errOlder     = fmt.Errorf("%w: the cluster fact postgres may be of an older release, which keeps what PostgreSQL does not have yet under other names; end all of its processes with SIGTERM, then start this release, or export with that one", counter.ErrUnavailable)
	errUncarried = fmt.Errorf("%w: counters in Redis have not been copied into PostgreSQL yet", counter.ErrUnavailable)
	errFull      = fmt.Errorf("%w: too many changes wait to be persisted", counter.ErrUnavailable)
)

func bucketKeys(b int, front bool) []string {
	keys := []string{countersKey(b), stateKey(b)}
	if front {
		for _, name := range []string{"d", "t", "j", "a"} {
			keys = append(keys, tag(b)+name)
		}
	}
	return keys
}

func drainedIDsKey(b int) string { return tag(b) + "u" }

// The keys that a checkpoint sets aside: registers, and the journals of members, history and dimensions. The last
// journal is in countedKey, which without PostgreSQL has all counts.
const (
	movedJournal   = "p"
	gainedJournal  = "b"
	countedJournal = "e"
)

var setAside = [...]string{"r", movedJournal, gainedJournal, countedJournal}

// asideKey returns the key to which a checkpoint sets it aside.
func asideKey(b int, name, key string) string { return counterKey(b, name+"t", key) }

func stepKey(b int, s counter.Slot, key string) string {
	return tag(b) + "v" + strconv.FormatUint(uint64(s.Step), 10) + ":" + strconv.FormatUint(uint64(s.Number), 10) + ":" + key
}
func stagedKey(b int, id string) string { return tag(b) + "y:" + id }

// inFront reports whether the store is the cache tier of PostgreSQL.
func (s *Store) inFront() bool { return s.cfg.Touch > 0 }

// touch returns Config.Touch in milliseconds.
func (s *Store) touch() int64 {
	if !s.inFront() {
		return 0
	}
	return max(s.cfg.Touch.Milliseconds(), 1)
}

// Placements has the placement of counters.
type Placements struct {
	Generation uint64
	Hot        []bool // the counter is resident, or does not exist
}

func (p *Placements) note(at int, state string, more []any) {
	p.Hot[at] = state != ""
	for _, g := range more {
		text, _ := g.(string)
		n, _ := strconv.ParseUint(text, 10, 64)
		p.Generation = max(p.Generation, n)
	}
}

// parsePast parses the journal of completed time buckets, which has no order.
func parsePast(reply any) ([]counter.Past, error) {
	var out []counter.Past
	for name, text := range pairs(reply) {
		value, kept, _ := strings.Cut(text, " ")
		slots, err := counter.ParseSlots(name + ":" + value)
		ms, err1 := strconv.ParseInt(kept, 10, 64)
		if err := errors.Join(err, err1); err != nil {
			return nil, fmt.Errorf("%w: %w", counter.ErrUnavailable, err)
		}
		out = append(out, counter.Past{Slot: slots[0], Kept: time.Duration(ms) * time.Millisecond})
	}
	return out, nil
}

// ResidentHistory is the part of a counter's history that is in Redis.
type ResidentHistory struct {
	Resident bool // if not, PostgreSQL has all of it
	State    counter.State
	Gained   map[int64]counter.Gain // time buckets that may not be persisted, by index
	Alone    bool                   // all there is
}

// HistoriesResident reads the parts of counters' histories that are in Redis.
func (s *Store) HistoriesResident(ctx context.Context, keys []string, step time.Duration, from, to int64) ([]ResidentHistory, error) {
	calls := make([]*redisconn.Call, len(keys))
	for i, key := range keys {
		b := hashBucket(key)
		k := bucketKeys(b, true)
		calls[i] = &redisconn.Call{
			Script: scripts.CounterHistory,
			Keys:   []string{k[0], k[1], stepsKey(b, key), k[2], k[3], counterKey(b, gainedJournal, key), asideKey(b, gainedJournal, key)},
			Args:   historyArgs(key, step, from, to),
		}
	}
	if err := s.conn.Run(ctx, calls); err != nil {
		return nil, err
	}
	out := make([]ResidentHistory, len(keys))
	for i, key := range keys {
		var err error
		if out[i], err = parseResidentHistory(calls[i], key, step, from, to); err != nil {
			return nil, err
		}
	}
	return out, nil
}

func parseResidentHistory(cl *redisconn.Call, key string, step time.Duration, from, to int64) (h ResidentHistory, err error) {
	if cl.Reply == lostReply {
		return h, ErrLost
	}
	row, _ := cl.Reply.([]any)
	if len(row) != 5 {
		return h, errReplied()
	}
	state, _ := row[0].(string)
	if state == "" {
		return h, nil
	}
	seen, err := parseSeen(row[4])
	if err != nil {
		return h, err
	}
	if _, h.State, err = parseState(key, state); err != nil {
		return h, fmt.Errorf("%w: %w", counter.ErrUnavailable, err)
	}
	h.Gained = map[int64]counter.Gain{}
	for _, g := range seen {
		h.Gained[g.Number] = g
	}
	for _, reply := range row[2:4] {
		past, err := parsePast(reply)
		if err != nil {
			return h, err
		}
		for _, p := range past {
			if n := int64(p.Number); time.Duration(p.Step)*time.Second == step && n >= from && n < to && h.State.Kind != counter.Unique {
				h.Gained[n] = counter.Gain{Number: n, Value: p.Value}
			}
		}
	}
	h.Resident, h.Alone = true, state == absentState || row[1] == int64(1)
	return h, nil
}

// ResidentDimension is the part of a dimension that is in Redis.
type ResidentDimension struct {
	State counter.State
	Alone bool // Drained and Counted are everything; otherwise they have to be added to PostgreSQL's counts
	// Drained has the counts up to the version Checkpoint, and Counted those from there to the version of the state.
	// PostgreSQL has the counts up to the version of its row.
	Checkpoint       counter.Version
	Drained, Counted []counter.Count
}

// DimensionResident reads the part of a dimension that is in Redis. It returns nil if the counter is not resident.
func (s *Store) DimensionResident(ctx context.Context, key, name string) (*ResidentDimension, error) {
	b := hashBucket(key)
	k := bucketKeys(b, true)
	cl := &redisconn.Call{
		Script: scripts.CounterDimension, Keys: []string{k[0], k[1], k[2], k[3], countedKey(b, key), asideKey(b, countedJournal, key)}, Args: []any{key, name},
	}
	if err := s.conn.Run(ctx, []*redisconn.Call{cl}); err != nil {
		return nil, err
	}
	if cl.Reply == lostReply {
		return nil, ErrLost
	}
	row, _ := cl.Reply.([]any)
	if len(row) != 5 {
		return nil, errReplied()
	}
	state, _ := row[0].(string)
	if state == "" {
		return nil, nil
	}
	text, _ := row[2].(string)
	d := &ResidentDimension{Alone: state == absentState || row[1] == int64(1)}
	var checkpoint counter.State
	var errs [4]error
	_, d.State, errs[0] = parseState(key, state)
	_, checkpoint, errs[1] = parseState(key, strings.TrimPrefix(text, deletedFlag))
	d.Checkpoint = checkpoint.Version
	d.Drained, errs[2] = parseCounts(row[3])
	d.Counted, errs[3] = parseCounts(row[4])
	if err := errors.Join(errs[:]...); err != nil {
		return nil, fmt.Errorf("%w: %w", counter.ErrUnavailable, err)
	}
	return d, nil
}

// LedgerResident returns the entries that may not be persisted. alone means that PostgreSQL has no others.
func (s *Store) LedgerResident(ctx context.Context, key string, after uint64, limit int) (entries []counter.Entry, alone bool, err error) {
	b := hashBucket(key)
	k := bucketKeys(b, true)
	cl := &redisconn.Call{
		Script: scripts.CounterLedger, Keys: []string{k[0], k[1], k[2], k[3], ledgerKey(b, key)},
		Args: []any{key, strconv.FormatUint(after+1, 10), limit},
	}
	if err := s.conn.Run(ctx, []*redisconn.Call{cl}); err != nil {
		return nil, false, err
	}
	if cl.Reply == lostReply {
		return nil, false, ErrLost
	}
	row, _ := cl.Reply.([]any)
	if len(row) != 3 {
		return nil, false, errReplied()
	}
	if row[0] == "" {
		return nil, false, nil
	}
	entries, err = parseEntries(row[2])
	return entries, row[0] == absentState || row[1] == int64(1), err
}

func errReplied() error { return fmt.Errorf("%w: %w", counter.ErrUnavailable, errReply) }

// parseEntries parses the reply of XRANGE in a script.
func parseEntries(reply any) ([]counter.Entry, error) {
	list, ok := reply.([]any)
	if !ok {
		return nil, errReplied()
	}
	var out []counter.Entry
	for _, v := range list {
		pair, _ := v.([]any)
		if len(pair) != 2 {
			return nil, errReplied()
		}
		m := redis.XMessage{Values: map[string]any{}}
		m.ID, _ = pair[0].(string)
		for name, text := range pairs(pair[1]) {
			m.Values[name] = text
		}
		e, err := parseEntry(m)
		if err != nil {
			return nil, fmt.Errorf("%w: %w", counter.ErrUnavailable, err)
		}
		out = append(out, e)
	}
	return out, nil
}

// Adopt confirms the buckets of a generation on the present runs of their servers. From now on counters that change
// get at least the incarnation life, because the last versions of the runs before may be lost.
func (s *Store) Adopt(ctx context.Context, generation, life uint64) error {
	return s.begin(ctx, "adopt", generation, life, time.Time{}, false)
}

// Begin empties all buckets and begins a generation in them, which serves no call until Confirm. Until asks, unknown
// idempotency keys have to be looked up in PostgreSQL. A bucket without a generation is emptied only if its counters
// were copied into PostgreSQL.
func (s *Store) Begin(ctx context.Context, generation, deleted uint64, asks time.Time, carried bool) error {
	return s.begin(ctx, "begin", generation, deleted, asks, carried)
}

// Confirm lets the buckets of a generation that has just begun serve calls, once PostgreSQL has its number.
func (s *Store) Confirm(ctx context.Context, generation uint64) error {
	return s.begin(ctx, "confirm", generation, 0, time.Time{}, false)
}

// Unmarked reports whether a bucket without a generation has counters. That is the case if Redis was used without
// PostgreSQL until now, and not if it lost its data.
func (s *Store) Unmarked(ctx context.Context) (unmarked bool, err error) {
	err = s.pipeline(ctx, func(pipe redis.Pipeliner) func() error {
		marks, regions, counters := make([]*redis.BoolCmd, Buckets), make([]*redis.BoolCmd, Buckets), make([]*redis.IntCmd, Buckets)
		for b := range Buckets {
			marks[b], regions[b] = pipe.HExists(ctx, stateKey(b), "generation"), pipe.HExists(ctx, stateKey(b), "region")
			counters[b] = pipe.HLen(ctx, countersKey(b))
		}
		return func() error {
			unmarked = false
			for b := range Buckets {
				if regions[b].Val() {
					return errRegion
				}
				unmarked = unmarked || !marks[b].Val() && counters[b].Val() > 0
			}
			return nil
		}
	})
	return unmarked, err
}

// Adoptable returns why counters without a generation cannot be copied into PostgreSQL now, or nil: processes without
// PostgreSQL may still change them.
func (s *Store) Adoptable(ctx context.Context) error {
	return s.conn.Do(ctx, func(ctx context.Context, c *redisconn.Client) error {
		facts, err := c.HMGet(ctx, factsKey, PostgresFact, "format").Result()
		if err == nil && facts[0] != PostgresBehind && (facts[0] != nil || facts[1] != nil) {
			err = redisconn.Answered(errAlone)
		}
		return err
	})
}

func (s *Store) begin(ctx context.Context, what string, generation, least uint64, asks time.Time, carried bool) error {
	var until int64
	if !asks.IsZero() {
		until = asks.UnixMilli()
	}
	calls := make([]*redisconn.Call, Buckets)
	for b := range calls {
		calls[b] = &redisconn.Call{
			Script: scripts.CounterBegin, Keys: append(bucketKeys(b, true), drainedIDsKey(b)),
			Args: []any{what, strconv.FormatUint(generation, 10), strconv.FormatUint(least, 10), until, tag(b), carried},
		}
	}
	if err := s.conn.Run(ctx, calls); err != nil {
		return err
	}
	for _, cl := range calls {
		switch cl.Reply {
		case int64(1):
		case int64(-1):
			return errRegion
		case int64(-2):
			return errUncarried
		default:
			return ErrMoved
		}
	}
	return nil
}

// Note notes the idempotency keys of operations that another store has made.
func (s *Store) Note(ctx context.Context, ops ...*counter.Op) error {
	return s.note(ctx, false, ops...)
}

func (s *Store) note(ctx context.Context, persists bool, ops ...*counter.Op) error {
	var calls []*redisconn.Call
	by := map[int]*redisconn.Call{}
	for _, op := range ops {
		b := s.idempotencyBucket(op)
		if by[b] == nil {
			by[b] = noteCall(b, 0, persists)
			calls = append(calls, by[b])
		}
		by[b].Keys = append(by[b].Keys, idempotencyKey(b, op.IdempotencyKey))
	}
	return s.conn.Run(ctx, calls)
}

// noteCall returns a run of counter_note.lua. The caller may add idempotency keys.
func noteCall(b int, deleted uint64, persists bool) *redisconn.Call {
	return &redisconn.Call{
		Script: scripts.CounterNote, Keys: []string{stateKey(b), tag(b) + "j"}, Args: []any{counter.IdempotencyKeyKept.Milliseconds(), strconv.FormatUint(deleted, 10), flag(persists)},
	}
}

// Remembers reports whether an operation with the idempotency key of op was made.
func (s *Store) Remembers(ctx context.Context, op *counter.Op) (yes bool, err error) {
	err = s.conn.Do(ctx, func(ctx context.Context, c *redisconn.Client) error {
		s.conn.Metrics.Commands.Inc()
		n, err := c.Exists(ctx, idempotencyKey(s.idempotencyBucket(op), op.IdempotencyKey)).Result()
		yes = n == 1
		return err
	})
	return yes, err
}
