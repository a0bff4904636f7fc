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

// This file is for package tiered, which says what a front is.

// Beside the keys of the package doc a bucket of a front has
//
//	hc:{n5}:d       hash: counters that changed since the last checkpoint, "x" when one was deleted
//	hc:{n5}:t       hash: those of the checkpoint that is being persisted, see counter_drain.lua
//	hc:{n5}:j, :u   list: identities since the checkpoint, and of it
//	hc:{n5}:a       zset: when counters were touched
//	hc:{n5}:y:ID    hash or string: a set or registers that are being loaded
//
// and journals, of what changed since the last checkpoint; of the checkpoint they are set aside as pt, bt and et, and
// registers that have changed since as rt
//
//	hc:{n5}:p:KEY   hash: members that joined or left
//	hc:{n5}:b:KEY   hash: what a sum gained in steps that are over, and in which steps a unique saw somebody
//	hc:{n5}:e:KEY   hash: what a sum counted under dimensions
//
// and the state of a counter is "-" when it does not exist.

const (
	absentState = "-"
	deletedFlag = "x"
	lostReply   = "lost"

	// maxPending is how much of a bucket may wait to be persisted: counters, members
	// that moved, ledger entries and identities. Then changes fail.
	maxPending  = 1 << 18
	page        = 500 // counters in one run of a script of a checkpoint
	stagedFor   = time.Minute
	stagePage   = 5000 // members in one run of counter_stage.lua
	evictAtOnce = 1000 // counters of a bucket in one run of counter_evict.lua
	stepsAtOnce = 8 << 20
	// maxCounted is how many values of a dimension a counter tells apart between two checkpoints: more than are kept,
	// so that those that are kept already are among them, also while PostgreSQL is away.
	maxCounted = 10 * counter.MaxValues
)

var (
	// ErrLost says that Redis may have lost its memory: Heal finds out.
	ErrLost = fmt.Errorf("%w: Redis may have lost its memory", counter.ErrUnavailable)
	// ErrMoved says that something has to be looked at anew.
	ErrMoved     = fmt.Errorf("%w: counters are on their way between Redis and PostgreSQL", counter.ErrUnavailable)
	errRegion    = fmt.Errorf("%w: this Redis is a region's, and shares its counters with others: give every process of the region its --region and --peer flags", counter.ErrUnavailable)
	errAlone     = fmt.Errorf("%w: processes without --postgres use this Redis; end all of them, then start them with --postgres, and its counters are carried into PostgreSQL", counter.ErrUnavailable)
	errUncarried = fmt.Errorf("%w: counters in Redis were not carried into PostgreSQL yet", counter.ErrUnavailable)
	errFull      = fmt.Errorf("%w: too much waits to be persisted", counter.ErrUnavailable)
)

// Behind is what a front needs to know of what stands behind it.
type Behind struct {
	// Touch is how long after its last touch a read makes a counter young again.
	Touch time.Duration
}

func bucketKeys(b int, front bool) []string {
	keys := []string{countersKey(b), stateKey(b)}
	if front {
		for _, name := range []string{"d", "t", "j", "a"} {
			keys = append(keys, tag(b)+name)
		}
	}
	return keys
}

func drainedIdentitiesKey(b int) string { return tag(b) + "u" }

// What of a counter is set aside: registers, and the journals of members, of history and of dimensions. The last one is in
// countedKey: without a front that is not a journal but all there is.
const (
	movedJournal   = "p"
	gainedJournal  = "b"
	countedJournal = "e"
)

var setAside = [...]string{"r", movedJournal, gainedJournal, countedJournal}

// asideKey is where that is set aside by a checkpoint.
func asideKey(b int, name, key string) string { return counterKey(b, name+"t", key) }

func stepKey(b int, s counter.Slot, key string) string {
	return tag(b) + "v" + strconv.FormatUint(uint64(s.Step), 10) + ":" + strconv.FormatUint(uint64(s.Number), 10) + ":" + key
}
func stagedKey(b int, id string) string { return tag(b) + "y:" + id }
func (s *Store) touch() int64 {
	if s.cfg.Behind == nil {
		return 0
	}
	return max(s.cfg.Behind.Touch.Milliseconds(), 1)
}

// Placements says which counters are in Redis.
type Placements struct {
	Generation uint64
	Hot        []bool // it is in Redis, or does not exist
}

func (p *Placements) note(at int, state string, more []any) {
	p.Hot[at] = state != ""
	for _, g := range more {
		text, _ := g.(string)
		n, _ := strconv.ParseUint(text, 10, 64)
		p.Generation = max(p.Generation, n)
	}
}

// ReadResident reads those of keys that are in Redis.
func (s *Store) ReadResident(ctx context.Context, keys []string, member string) ([]counter.Reading, *Placements, error) {
	return s.read(ctx, keys, member)
}

// parsePast reads what counter_apply.lua keeps of steps that are over, in no order.
func parsePast(reply any) ([]counter.Past, error) {
	list, ok := reply.([]any)
	if !ok {
		return nil, errReplied()
	}
	var out []counter.Past
	for i := 0; i+1 < len(list); i += 2 {
		name, _ := list[i].(string)
		text, _ := list[i+1].(string)
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

// ResidentHistory is what a bucket knows of the history of a counter.
type ResidentHistory struct {
	Resident bool // else PostgreSQL has all
	State    counter.State
	Gained   map[int64]counter.Gain // what may not be persisted, by the numbers of steps
	Alone    bool                   // all there is
}

// HistoryResident reads the history of a counter.
func (s *Store) HistoryResident(ctx context.Context, key string, step time.Duration, from, to int64) (ResidentHistory, error) {
	all, err := s.HistoriesResident(ctx, []string{key}, step, from, to)
	if err != nil {
		return ResidentHistory{}, err
	}
	return all[0], nil
}

// HistoriesResident is HistoryResident of several counters.
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

// ResidentDimension is what a bucket knows of a dimension of a counter.
type ResidentDimension struct {
	State counter.State
	Alone bool // Drained and Counted are all there is; else they are to be added to what PostgreSQL has
	// Drained was counted up to version Checkpoint, and Counted from there to the state's. PostgreSQL has what was counted
	// up to the version of its row.
	Checkpoint       counter.Version
	Drained, Counted []counter.Count
}

// DimensionResident reads a dimension of a counter; nil: the counter is not resident, and PostgreSQL has all.
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

// LedgerResident returns entries that may not be persisted. alone: all there are.
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

// parseEntries reads a reply of XRANGE in a script.
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
		fields, _ := pair[1].([]any)
		for i := 0; i+1 < len(fields); i += 2 {
			name, _ := fields[i].(string)
			m.Values[name] = fields[i+1]
		}
		e, err := parseEntry(m)
		if err != nil {
			return nil, fmt.Errorf("%w: %w", counter.ErrUnavailable, err)
		}
		out = append(out, e)
	}
	return out, nil
}

// Adopt finds buckets of the generation good on the runs of their servers. From now on counters that change have at least
// the incarnation life: the last versions of the run before may be lost.
func (s *Store) Adopt(ctx context.Context, generation, life uint64) error {
	return s.begin(ctx, "adopt", generation, life, time.Time{}, false)
}

// Begin empties all buckets and begins a generation in them. Until asks, identities that
// are not known have to be looked for behind. A bucket without a generation is emptied only
// when its counters were carried behind.
func (s *Store) Begin(ctx context.Context, generation, deleted uint64, asks time.Time, carried bool) error {
	return s.begin(ctx, "begin", generation, deleted, asks, carried)
}

// Unmarked reports whether a bucket without a generation has counters: a Redis that had nothing behind
// it has them in all buckets, one that has lost its memory in none.
func (s *Store) Unmarked(ctx context.Context) (unmarked bool, err error) {
	err = s.pipeline(ctx, 3*Buckets, func(ctx context.Context, pipe redis.Pipeliner) func() error {
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

// Adoptable returns why counters without a generation cannot be carried behind now: processes that
// have nothing behind this Redis may change them.
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
			Script: scripts.CounterBegin, Keys: append(bucketKeys(b, true), drainedIdentitiesKey(b)),
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

// Note notes that operations were made elsewhere under their identities.
func (s *Store) Note(ctx context.Context, ops ...*counter.Op) error {
	return s.note(ctx, false, ops...)
}

func (s *Store) note(ctx context.Context, persists bool, ops ...*counter.Op) error {
	var calls []*redisconn.Call
	by := map[int]*redisconn.Call{}
	for _, op := range ops {
		b := s.identityBucket(op)
		if by[b] == nil {
			by[b] = noteCall(b, 0, persists)
			calls = append(calls, by[b])
		}
		by[b].Keys = append(by[b].Keys, identityKey(b, op.Identity))
	}
	return s.conn.Run(ctx, calls)
}

// noteCall is a run of counter_note.lua, to which identities may be added.
func noteCall(b int, deleted uint64, persists bool) *redisconn.Call {
	is := 0
	if persists {
		is = 1
	}
	return &redisconn.Call{
		Script: scripts.CounterNote, Keys: []string{stateKey(b), tag(b) + "j"}, Args: []any{counter.IdentityKept.Milliseconds(), strconv.FormatUint(deleted, 10), is},
	}
}

// Remembers reports whether an operation was made under the identity of op.
func (s *Store) Remembers(ctx context.Context, op *counter.Op) (yes bool, err error) {
	err = s.conn.Do(ctx, func(ctx context.Context, c *redisconn.Client) error {
		s.conn.Metrics.Commands.Inc()
		n, err := c.Exists(ctx, identityKey(s.identityBucket(op), op.Identity)).Result()
		yes = n == 1
		return err
	})
	return yes, err
}
