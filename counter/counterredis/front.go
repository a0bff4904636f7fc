package counterredis

import (
	"context"
	"crypto/rand"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"headcount/counter"
	"headcount/counter/hyperloglog"
	"headcount/internal/redisconn"
	"headcount/scripts"
)

// This file is for package tiered, which says what a front is.

// Beside the keys of the package doc a bucket of a front has
//
//	hc:{n5}:d       hash: dirty counters, "x" when one was deleted since the last cut
//	hc:{n5}:t       hash: what was dirty at the cut that is on its way
//	hc:{n5}:w       hash: states of the cut, of counters that have changed since
//	hc:{n5}:j, :u   list: identities since the cut, and of the cut
//	hc:{n5}:a       zset: when counters were touched
//	hc:{n5}:p1:KEY, p2:KEY  hash: members that moved, in epochs of even and of odd number
//	hc:{n5}:o:KEY   stream: ledger of the cut, of a counter that was deleted since
//	hc:{n5}:b1:KEY, b2:KEY  hash: what a sum gained in steps that are over, and in which steps a unique saw
//	                somebody, in epochs of even and of odd number
//	hc:{n5}:e1:KEY, e2:KEY  hash: what a sum counted under dimensions, in epochs of even and of odd number
//	hc:{n5}:q:KEY   string: registers of the cut, of a unique that has changed since
//	hc:{n5}:y:ID    hash or string: a set or registers that are being loaded
//
// and the state of a counter is "-" when it does not exist.

const (
	absentState = "-"
	lostReply   = "lost"

	// maxPending is how much of a bucket may wait to be persisted: counters, members
	// that moved, ledger entries and identities. Then changes fail.
	maxPending  = 1 << 18
	page        = 500 // counters in one run of a script of a cut
	stagedFor   = time.Minute
	stagePage   = 5000 // members in one run of counter_stage.lua
	evictAtOnce = 1000 // counters of a bucket in one run of counter_evict.lua
	stepsAtOnce = 8 << 20
	// maxCounted is how many values of a dimension a counter tells apart between two cuts: more than are kept,
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
		for _, name := range []string{"d", "t", "w", "j", "a"} {
			keys = append(keys, tag(b)+name)
		}
	}
	return keys
}

func takenIdentitiesKey(b int) string          { return tag(b) + "u" }
func oldLedgerKey(b int, key string) string    { return tag(b) + "o:" + key }
func oldRegistersKey(b int, key string) string { return tag(b) + "q:" + key }
func countsKey(b int, e uint64, key string) string {
	return tag(b) + "e" + strconv.FormatUint(e%2+1, 10) + ":" + key
}

func stepKey(b int, s counter.Slot, key string) string {
	return tag(b) + "v" + strconv.FormatUint(uint64(s.Step), 10) + ":" + strconv.FormatUint(uint64(s.Number), 10) + ":" + key
}
func stagedKey(b int, id string) string { return tag(b) + "y:" + id }
func movedKey(b int, e uint64, key string) string {
	return tag(b) + "p" + strconv.FormatUint(e%2+1, 10) + ":" + key
}

func gainedKey(b int, e uint64, key string) string {
	return tag(b) + "b" + strconv.FormatUint(e%2+1, 10) + ":" + key
}

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

// HistoryResident returns the state of a counter and what it gained that may not be persisted, by the
// numbers of steps. alone: all there is. It is not hot when PostgreSQL has all.
func (s *Store) HistoryResident(ctx context.Context, key string, step time.Duration, from, to int64) (st counter.State, gained map[int64]counter.Gain, alone, hot bool, err error) {
	if err := s.open(); err != nil {
		return st, nil, false, false, err
	}
	cl := historyHotCall(key, step, from, to)
	if err := s.conn.Run(ctx, []*redisconn.Call{cl}); err != nil {
		return st, nil, false, false, err
	}
	return parseHistoryHot(cl, key, step, from, to)
}

// historyHotCall is a run of counter_history.lua in front.
func historyHotCall(key string, step time.Duration, from, to int64) *redisconn.Call {
	b := hashBucket(key)
	k := bucketKeys(b, true)
	return &redisconn.Call{
		Script: scripts.CounterHistory, Keys: []string{k[0], k[1], stepsKey(b, key), k[2], k[3], gainedKey(b, 0, key), gainedKey(b, 1, key)},
		Args: historyArgs(key, step, from, to),
	}
}

func parseHistoryHot(cl *redisconn.Call, key string, step time.Duration, from, to int64) (st counter.State, gained map[int64]counter.Gain, alone, hot bool, err error) {
	if cl.Reply == lostReply {
		return st, nil, false, false, ErrLost
	}
	row, _ := cl.Reply.([]any)
	if len(row) != 5 {
		return st, nil, false, false, errReplied()
	}
	state, _ := row[0].(string)
	if state == "" {
		return st, nil, false, false, nil
	}
	seen, err := parseSeen(row[4])
	if err != nil {
		return st, nil, false, false, err
	}
	if _, st, err = parseState(key, state); err != nil {
		return st, nil, false, false, fmt.Errorf("%w: %w", counter.ErrUnavailable, err)
	}
	gained = map[int64]counter.Gain{}
	for _, g := range seen {
		gained[g.Number] = g
	}
	for _, reply := range row[2:4] {
		past, err := parsePast(reply)
		if err != nil {
			return st, nil, false, false, err
		}
		for _, p := range past {
			if n := int64(p.Number); time.Duration(p.Step)*time.Second == step && n >= from && n < to && st.Kind != counter.Unique {
				gained[n] = counter.Gain{Number: n, Value: p.Value}
			}
		}
	}
	return st, gained, state == absentState || row[1] == int64(1), true, nil
}

// ResidentDimension is what a bucket knows of a dimension of a counter.
type ResidentDimension struct {
	State      counter.State
	Generation uint64
	Alone      bool // all there is; else it is to be added to what PostgreSQL has
	// Before is what was counted in the epoch Taken, that of the cut that is on its way, and Now in
	// Epoch. PostgreSQL has those up to its own.
	Epoch, Taken uint64
	Before, Now  []counter.Count
}

// DimensionResident reads a dimension of a counter; nil: the counter is not hot, and PostgreSQL has all.
func (s *Store) DimensionResident(ctx context.Context, key, name string) (*ResidentDimension, error) {
	if err := s.open(); err != nil {
		return nil, err
	}
	b := hashBucket(key)
	k := bucketKeys(b, true)
	cl := &redisconn.Call{
		Script: scripts.CounterDimension, Keys: []string{k[0], k[1], k[2], k[3], countsKey(b, 0, key), countsKey(b, 1, key)}, Args: []any{key, name},
	}
	if err := s.conn.Run(ctx, []*redisconn.Call{cl}); err != nil {
		return nil, err
	}
	if cl.Reply == lostReply {
		return nil, ErrLost
	}
	row, _ := cl.Reply.([]any)
	if len(row) != 7 {
		return nil, errReplied()
	}
	state, _ := row[0].(string)
	if state == "" {
		return nil, nil
	}
	d := &ResidentDimension{Alone: state == absentState || row[1] == int64(1)}
	var errs [6]error
	_, d.State, errs[0] = parseState(key, state)
	for i, n := range []*uint64{&d.Generation, &d.Epoch, &d.Taken} {
		text, _ := row[2+i].(string)
		*n, errs[1+i] = strconv.ParseUint(text, 10, 64)
	}
	d.Before, errs[4] = parseCounts(row[5])
	d.Now, errs[5] = parseCounts(row[6])
	if err := errors.Join(errs[:]...); err != nil {
		return nil, fmt.Errorf("%w: %w", counter.ErrUnavailable, err)
	}
	return d, nil
}

// LedgerResident returns entries that may not be persisted. alone: all there are.
func (s *Store) LedgerResident(ctx context.Context, key string, after uint64, limit int) (entries []counter.Entry, alone bool, err error) {
	if err := s.open(); err != nil {
		return nil, false, err
	}
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

// Bucket is what a bucket knows of what is behind.
type Bucket struct {
	Number       int
	Generation   uint64
	Good         bool // on this run of the server
	Epoch, Taken uint64
	Since        time.Time // of the oldest change that is not persisted; zero: none
	Left         uint64
	Now, Asks    time.Time
	Deleted      uint64
	Life         uint64 // least incarnation of a counter that changes; the generation when that is greater
}

// Ticket is for Load.
func (b *Bucket) Ticket() string {
	return strconv.FormatUint(b.Generation, 10) + " " + strconv.FormatUint(b.Left, 10)
}

// Status asks buckets, or all.
func (s *Store) Status(ctx context.Context, buckets ...int) ([]Bucket, error) {
	c, err := s.client(ctx)
	if err != nil {
		return nil, err
	}
	if len(buckets) == 0 {
		buckets = allBuckets()
	}
	calls := perSlot(c, scripts.CounterStatus, buckets, func(b int) []string { return []string{stateKey(b)} })
	if err := s.conn.Run(ctx, calls); err != nil {
		return nil, err
	}
	var out []Bucket
	for _, cl := range calls {
		rows, _ := cl.Reply.([]any)
		for _, r := range rows {
			f, _ := r.([]any)
			if len(f) != 10 || len(out) == len(buckets) {
				return nil, errReplied()
			}
			var n [10]uint64
			for i, v := range f {
				switch v := v.(type) {
				case string:
					n[i], _ = strconv.ParseUint(v, 10, 64)
				case int64:
					n[i] = uint64(v)
				}
			}
			b := Bucket{
				Number: buckets[len(out)], Generation: n[0], Good: n[1] == 1 && n[0] != 0, Epoch: n[2], Taken: n[3], Left: n[5],
				Now: time.UnixMilli(int64(n[6])), Asks: time.UnixMilli(int64(n[7])), Deleted: n[8], Life: n[9],
			}
			if n[4] != 0 {
				b.Since = time.UnixMilli(int64(n[4]))
			}
			out = append(out, b)
		}
	}
	if len(out) != len(buckets) {
		return nil, errReplied()
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
			err = errAlone
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
			Script: scripts.CounterBegin, Keys: append(bucketKeys(b, true), takenIdentitiesKey(b)),
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

// Entry is a counter to put into Redis.
type Entry struct {
	Key   string
	State counter.State // of its row; zero: there is none
	// Staged is from Stage or StageRegisters, of a set that is not empty.
	Staged string
}

// Load makes counters resident unless another process has done so already. The tickets are from before their rows were
// read, by bucket. Its error is ErrMoved when they have to be read again.
func (s *Store) Load(ctx context.Context, tickets map[int]string, entries []Entry) error {
	type entry struct {
		Key    string `json:"key"`
		State  string `json:"state"`
		Set    int    `json:"set,omitempty"`
		Staged int    `json:"staged,omitempty"`
	}
	by := map[int][]entry{}
	keys := map[int][]string{}
	if err := s.noteHot(ctx, entries); err != nil {
		return err
	}
	for _, e := range entries {
		b := hashBucket(e.Key)
		if keys[b] == nil {
			keys[b] = bucketKeys(b, true)
		}
		out := entry{Key: e.Key, State: formatState(e.State)}
		if e.Staged != "" {
			to := membersKey(b, e.Key)
			if e.State.Kind == counter.Unique {
				to = registersKey(b, e.Key)
			}
			keys[b] = append(keys[b], to, stagedKey(b, e.Staged))
			out.Set, out.Staged = len(keys[b])-1, len(keys[b])
		}
		by[b] = append(by[b], out)
	}
	var calls []*redisconn.Call
	for b, list := range by {
		text, err := json.Marshal(list)
		if err != nil {
			return err
		}
		calls = append(calls, &redisconn.Call{Script: scripts.CounterLoad, Keys: keys[b], Args: []any{tickets[b], string(text)}})
	}
	if err := s.conn.Run(ctx, calls); err != nil {
		return err
	}
	for _, cl := range calls {
		switch cl.Reply {
		case "ok":
		case lostReply:
			return ErrLost
		default:
			return ErrMoved
		}
	}
	return nil
}

// Stage puts members of key aside for Load. It begins with an empty staged, and goes on with
// what it returned.
func (s *Store) Stage(ctx context.Context, key, staged string, before int, members []string) (string, error) {
	hashes := make([]string, len(members))
	for i, m := range members {
		hashes[i] = counter.MemberHash(m)
	}
	return s.stage(ctx, key, staged, before, hashes)
}

// stage is Stage for members as they stand in a set.
func (s *Store) stage(ctx context.Context, key, staged string, before int, hashes []string) (string, error) {
	if staged == "" {
		staged = rand.Text()
	}
	for some := range slices.Chunk(hashes, stagePage) {
		cl := &redisconn.Call{Script: scripts.CounterStage, Keys: []string{stagedKey(hashBucket(key), staged)}, Args: []any{stagedFor.Milliseconds(), before}}
		for _, m := range some {
			cl.Args = append(cl.Args, m)
		}
		if err := s.conn.Run(ctx, []*redisconn.Call{cl}); err != nil {
			return "", err
		}
		before += len(some)
	}
	return staged, nil
}

// StageRegisters puts registers of key aside for Load.
func (s *Store) StageRegisters(ctx context.Context, key string, registers hyperloglog.Registers) (staged string, err error) {
	if registers.Empty() {
		return "", nil
	}
	staged = rand.Text()
	return staged, s.conn.Do(ctx, func(ctx context.Context, c *redisconn.Client) error {
		s.conn.Metrics.Commands.Inc()
		return c.Set(ctx, stagedKey(hashBucket(key), staged), registers.Bytes(), stagedFor).Err()
	})
}

func formatState(st counter.State) string {
	if st.Version == (counter.Version{}) {
		return absentState
	}
	return fmt.Sprintf("%s %d %d %d %d %d%s", st.Kind, st.Value, st.Updated, st.Version.Incarnation, st.Version.Sequence, st.Entries, st.AppendRest(nil))
}

// Cut ends an epoch of a generation in all buckets.
func (s *Store) Cut(ctx context.Context, generation, epoch uint64) error {
	c, err := s.conn.Known(ctx)
	if err != nil {
		return err
	}
	calls := perSlot(c, scripts.CounterCut, allBuckets(), func(b int) []string {
		k := bucketKeys(b, true)
		return []string{k[1], k[2], k[3], k[5], takenIdentitiesKey(b)}
	}, strconv.FormatUint(generation, 10), strconv.FormatUint(epoch, 10))
	if err := s.conn.Run(ctx, calls); err != nil {
		return err
	}
	for _, cl := range calls {
		if cl.Reply != "ok" {
			return ErrLost
		}
	}
	return nil
}

// Take calls each with the counters of the cut that ended epoch, a part at a time, and
// identities with the identities.
func (s *Store) Take(ctx context.Context, epoch uint64, each func([]counter.Cut) error, identities func([]counter.Identity) error) error {
	for b := range Buckets {
		err := s.takenOf(ctx, b, func(keys []string, flags map[string]string) error {
			taken, err := s.take(ctx, b, epoch, keys, flags)
			if err != nil {
				return err
			}
			return s.withSteps(ctx, b, taken, each)
		})
		if err != nil {
			return err
		}
		for from := int64(0); ; from += page {
			var texts []string
			err := s.conn.Do(ctx, func(ctx context.Context, c *redisconn.Client) (err error) {
				s.conn.Metrics.Commands.Inc()
				texts, err = c.LRange(ctx, takenIdentitiesKey(b), from, from+page-1).Result()
				return err
			})
			if err != nil {
				return err
			}
			if len(texts) == 0 {
				break
			}
			ids := make([]counter.Identity, len(texts))
			for i, text := range texts {
				if n, err := base64.RawURLEncoding.Decode(ids[i][:], []byte(text)); err != nil || n != len(ids[i]) {
					return errReplied()
				}
			}
			if err := identities(ids); err != nil {
				return err
			}
		}
	}
	return nil
}

// takenOf calls each with the counters of a bucket that were taken, perhaps with one twice.
func (s *Store) takenOf(ctx context.Context, b int, each func(keys []string, flags map[string]string) error) error {
	return s.scanDirty(ctx, bucketKeys(b, true)[3], each)
}

// scanDirty calls each with the counters of such a hash, perhaps with one twice.
func (s *Store) scanDirty(ctx context.Context, hash string, each func(keys []string, flags map[string]string) error) error {
	return s.scanHash(ctx, hash, page, func(pairs []string) error {
		flags := make(map[string]string, len(pairs)/2)
		var keys []string
		for i := 0; i+1 < len(pairs); i += 2 {
			if _, twice := flags[pairs[i]]; !twice {
				keys = append(keys, pairs[i])
			}
			flags[pairs[i]] = pairs[i+1]
		}
		for some := range slices.Chunk(keys, page) {
			if err := each(some, flags); err != nil {
				return err
			}
		}
		return nil
	})
}

func (s *Store) take(ctx context.Context, b int, epoch uint64, keys []string, flags map[string]string) ([]counter.Cut, error) {
	k := bucketKeys(b, true)
	cl := &redisconn.Call{Script: scripts.CounterTake, Keys: []string{k[0], k[4]}}
	for _, key := range keys {
		cl.Keys = append(cl.Keys, ledgerKey(b, key), oldLedgerKey(b, key), movedKey(b, epoch, key), registersKey(b, key), oldRegistersKey(b, key), gainedKey(b, epoch, key), countsKey(b, epoch, key))
		cl.Args = append(cl.Args, key)
	}
	if err := s.conn.Run(ctx, []*redisconn.Call{cl}); err != nil {
		return nil, err
	}
	rows, _ := cl.Reply.([]any)
	if len(rows) != len(keys) {
		return nil, errReplied()
	}
	out := make([]counter.Cut, len(keys))
	for i, key := range keys {
		row, _ := rows[i].([]any)
		if len(row) != 6 {
			return nil, errReplied()
		}
		t := counter.Cut{Key: key, Dropped: flags[key] == "x"}
		text, _ := row[0].(string)
		var err error
		if _, t.State, err = parseState(key, text); err != nil {
			return nil, fmt.Errorf("%w: %w", counter.ErrUnavailable, err)
		}
		if t.Entries, err = parseEntries(row[1]); err != nil {
			return nil, err
		}
		registers, _ := row[3].(string)
		if t.Registers, err = hyperloglog.Parse([]byte(registers)); err != nil {
			return nil, fmt.Errorf("%w: registers of %q: %w", counter.ErrUnavailable, key, err)
		}
		if t.Past, err = parsePast(row[4]); err != nil {
			return nil, err
		}
		if row[5] != int64(0) {
			if t.Counted, err = s.counted(ctx, b, epoch, key); err != nil {
				return nil, err
			}
		}
		if row[2] != int64(0) {
			var places map[string]string
			err := s.conn.Do(ctx, func(ctx context.Context, c *redisconn.Client) (err error) {
				s.conn.Metrics.Commands.Inc()
				places, err = c.HGetAll(ctx, movedKey(b, epoch, key)).Result()
				return err
			})
			if err != nil {
				return nil, err
			}
			for m, is := range places {
				switch {
				case m == "":
					t.Emptied = true
				case strings.HasPrefix(is, "1"):
					t.Joined = append(t.Joined, m)
				default:
					t.Left = append(t.Left, m)
				}
			}
		}
		out[i] = t
	}
	return out, nil
}

// counted reads what a counter of the cut counted.
func (s *Store) counted(ctx context.Context, b int, epoch uint64, key string) (out []counter.Count, err error) {
	var found map[string]string
	err = s.conn.Do(ctx, func(ctx context.Context, c *redisconn.Client) (err error) {
		s.conn.Metrics.Commands.Inc()
		found, err = c.HGetAll(ctx, countsKey(b, epoch, key)).Result()
		return err
	})
	for field, text := range found {
		name, value, _ := strings.Cut(field, ":")
		count, _, _ := strings.Cut(text, " ")
		n, err := strconv.ParseInt(count, 10, 64)
		if err != nil {
			return nil, fmt.Errorf("%w: what %q counted: %w", counter.ErrUnavailable, key, err)
		}
		out = append(out, counter.Count{Name: name, Value: value, Count: n})
	}
	return out, err
}

// withSteps calls each with counters of a cut, when it has read whom uniques saw in steps: of so many
// at a time that a process holds little more than stepsAtOnce bytes of them. Registers only grow, so they may
// be newer than the cut.
func (s *Store) withSteps(ctx context.Context, b int, taken []counter.Cut, each func([]counter.Cut) error) error {
	first, size := 0, 0
	for i := range taken {
		t := &taken[i]
		if t.State.Kind != counter.Unique || len(t.Past) == 0 {
			continue
		}
		n, err := s.readSteps(ctx, b, t)
		if err != nil {
			return err
		}
		if size += n; size > stepsAtOnce {
			if err := each(taken[first : i+1]); err != nil {
				return err
			}
			clear(taken[first : i+1])
			first, size = i+1, 0
		}
	}
	return each(taken[first:])
}

func (s *Store) readSteps(ctx context.Context, b int, t *counter.Cut) (size int, err error) {
	return size, s.conn.Do(ctx, func(ctx context.Context, c *redisconn.Client) error {
		pipe := c.Pipeline()
		texts := make([]*redis.StringCmd, len(t.Past))
		for i := range t.Past {
			texts[i] = pipe.Get(ctx, stepKey(b, t.Past[i].Slot, t.Key))
		}
		s.conn.Metrics.Commands.Add(float64(len(texts)))
		if _, err := pipe.Exec(ctx); err != nil && !errors.Is(err, redis.Nil) {
			return err
		}
		past := t.Past[:0]
		size = 0
		for i, cmd := range texts {
			text, err := cmd.Bytes()
			if errors.Is(err, redis.Nil) {
				continue // the counter was deleted since
			}
			if err != nil {
				return err
			}
			seen, err := hyperloglog.Parse(text)
			if err != nil {
				return fmt.Errorf("%q: %w", t.Key, err)
			}
			p := t.Past[i]
			p.Seen = &seen
			past, size = append(past, p), size+len(text)
		}
		t.Past = past
		return nil
	})
}

// Done forgets the cut that ended an epoch of a generation: it is persisted.
func (s *Store) Done(ctx context.Context, generation, epoch uint64) error {
	for b := range Buckets {
		k := bucketKeys(b, true)
		done := func(keys []string) error {
			cl := &redisconn.Call{
				Script: scripts.CounterDone, Keys: []string{k[1], k[0], k[3], k[4], takenIdentitiesKey(b)},
				Args: []any{strconv.FormatUint(generation, 10), strconv.FormatUint(epoch, 10)},
			}
			for _, key := range keys {
				cl.Keys = append(cl.Keys, ledgerKey(b, key), oldLedgerKey(b, key), movedKey(b, epoch, key), oldRegistersKey(b, key), gainedKey(b, epoch, key), countsKey(b, epoch, key))
				cl.Args = append(cl.Args, key)
			}
			return s.conn.Run(ctx, []*redisconn.Call{cl})
		}
		err := s.takenOf(ctx, b, func(keys []string, _ map[string]string) error { return done(keys) })
		if err == nil {
			err = done(nil)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// Evict lets counters go that nobody touched for so long and that are persisted. more:
// there may be more of them.
func (s *Store) Evict(ctx context.Context, after time.Duration) (gone int, more bool, err error) {
	calls := make([]*redisconn.Call, Buckets)
	for b := range calls {
		calls[b] = &redisconn.Call{Script: scripts.CounterEvict, Keys: bucketKeys(b, true), Args: []any{after.Milliseconds(), evictAtOnce, tag(b)}}
	}
	if err := s.conn.Run(ctx, calls); err != nil {
		return 0, false, err
	}
	for _, cl := range calls {
		n, _ := cl.Reply.(int64)
		gone += int(n)
		more = more || n == evictAtOnce
	}
	return gone, more, nil
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
