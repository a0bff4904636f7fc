package tiered

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"

	"headcount/counter"
	"headcount/counter/counterpg"
	"headcount/counter/counterredis"
	"headcount/counter/limit"
	"headcount/internal/outage"
	"headcount/internal/redisconn"
)

const (
	patience = 8 * time.Second // of an operation whose counters are being loaded or evicted
	tryAgain = 10 * time.Millisecond
)

// Config tunes a Store or a Beside. A zero field takes its default.
type Config struct {
	Redis    *redisconn.Conn // required
	Postgres string          // URL, as counterpg.Config has it; required
	Region   string          // of a Beside, as counterredis.Config has it
	// PersistInterval is the time within which a change is persisted, default 1s. The worker looks for changes ten times
	// as often.
	PersistInterval time.Duration
	// ColdAfter is how long after its last use a counter is evicted, default 24h.
	ColdAfter time.Duration
	Rules     *counter.Rules // default: the built-in ones
	// ReadOnly is for an export: the store persists and writes nothing.
	ReadOnly   bool
	Registerer prometheus.Registerer // of the store's metrics; nil: none
	Log        zerolog.Logger
	OnRedis    counter.States // optional
	OnPostgres counter.States // optional
}

// Store is a counter.Store. Its methods may be called from any goroutine.
type Store struct {
	cfg Config
	router
	closed atomic.Bool
	lag    atomic.Int64 // age of the oldest change that is not persisted, in nanoseconds

	unready atomic.Pointer[error] // why counters of a Redis that had no PostgreSQL are not served yet

	healing chan struct{} // holds one: the right to find out whether Redis has lost data
	kick    chan struct{} // holds one: a caller waits for a checkpoint
	large   chan string   // sets for loadLarge; if it is full, the next call asks again
	stop    context.CancelFunc
	wg      sync.WaitGroup // persist and loadLarge
}

var _ counter.Store = (*Store)(nil)

// Open returns a store over both. Like counterpg.Open it fails if settings cannot work, not if a server does not
// answer. The caller closes it before the connection to Redis.
func Open(ctx context.Context, cfg Config) (*Store, error) {
	cfg.PersistInterval = cmp.Or(cfg.PersistInterval, time.Second)
	cfg.ColdAfter = cmp.Or(cfg.ColdAfter, 24*time.Hour)
	both, err := openBoth(ctx, cfg, counterpg.Config{ReadOnly: cfg.ReadOnly}, cfg.ColdAfter/8)
	if err != nil {
		return nil, err
	}
	s := &Store{
		cfg: cfg, router: both,
		healing: make(chan struct{}, 1), kick: make(chan struct{}, 1), large: make(chan string, 16),
	}
	s.hot = resident{s}
	s.registerLag(cfg.Registerer)
	run, stop := context.WithCancel(context.Background())
	s.stop = stop
	if !cfg.ReadOnly {
		s.wg.Go(func() { s.persist(run) })
		s.wg.Go(func() { s.loadLarge(run) })
	}
	return s, nil
}

// openBoth opens PostgreSQL, and returns a router over both.
func openBoth(ctx context.Context, cfg Config, behind counterpg.Config, touch time.Duration) (router, error) {
	behind.URL, behind.Behind, behind.Log, behind.OnState = cfg.Postgres, true, cfg.Log, cfg.OnPostgres
	pg, err := counterpg.Open(ctx, behind)
	if err != nil {
		return router{}, err
	}
	redis := counterredis.New(counterredis.Config{
		Conn: cfg.Redis, Region: cfg.Region, Touch: touch, Registerer: cfg.Registerer, Log: cfg.Log, OnState: cfg.OnRedis,
	})
	return router{hot: redis, redis: redis, pg: pg, rules: cmp.Or(cfg.Rules, counter.BuiltinRules())}, nil
}

// Close implements counter.Store. What it cannot persist stays in Redis until another process, or the next start,
// persists it.
func (s *Store) Close() error {
	if s.closed.Swap(true) {
		return nil
	}
	if !s.cfg.ReadOnly {
		s.persistLast()
	}
	s.stop()
	s.wg.Wait()
	return errors.Join(s.redis.Close(), s.pg.Close())
}

// Limit implements counter.Limiter. Limits are in Redis alone: a Redis that loses its memory
// forgets them.
func (s *Store) Limit(ctx context.Context, calls []limit.Call) []counter.LimitResult {
	return s.redis.Limit(ctx, calls)
}

// resident has the counters that are not exact: in Redis, or in PostgreSQL if they are not resident.
type resident struct{ *Store }

// Apply implements counter.Writer.
func (s resident) Apply(ctx context.Context, ops []counter.Op) []counter.Result {
	return s.redis.ApplySplit(ctx, ops, inOneBucket{s})
}

// inOneBucket makes operations that need one bucket each, if Redis is a Cluster.
type inOneBucket struct{ resident }

// Apply implements counter.Writer.
func (s inOneBucket) Apply(ctx context.Context, ops []counter.Op) []counter.Result {
	deadline := time.Now().Add(patience)
	asked := map[counter.IdempotencyKey]bool{}
	results := make([]counter.Result, len(ops))
	todo := make([]int, len(ops))
	for i := range ops {
		todo[i] = i
	}
	fail := func(at []int, err error) {
		for _, i := range at {
			results[i] = counter.Result{Err: during("apply", err)}
		}
	}
	for tries := 0; len(todo) > 0; tries++ {
		if tries > 0 && (time.Now().After(deadline) || ctx.Err() != nil) {
			fail(todo, counterredis.ErrMoved)
			break
		}
		left := s.redis.ApplyResident(ctx, ops, todo, asked, results)
		todo = left.Ops
		switch {
		case len(todo) == 0:
		case left.Lost:
			if err := s.heal(ctx, false); err != nil {
				fail(todo, err)
				todo = nil
			}
		case len(left.Unknown) > 0:
			todo = s.loadUnknown(ctx, ops, todo, left.Unknown, results)
		case left.Ask:
			if err := s.ask(ctx, ops, todo, asked); err != nil {
				todo = slices.DeleteFunc(todo, func(i int) bool {
					with := ops[i].IdempotencyKey != counter.IdempotencyKey{}
					if with {
						fail([]int{i}, err)
					}
					return with
				})
			}
		}
	}
	for i := range ops { // the counters of a replay may be in Redis or in PostgreSQL
		if results[i].Replay && results[i].Err == nil {
			results[i] = s.replay(ctx, &ops[i])
		}
	}
	return results
}

// loadUnknown makes unknown counters resident. It sets the results of operations that cannot be made, and returns the
// others of todo.
func (s inOneBucket) loadUnknown(ctx context.Context, ops []counter.Op, todo []int, unknown []string, results []counter.Result) []int {
	misplaced, err := s.load(ctx, unknown, true)
	if errors.Is(err, counterredis.ErrMoved) || errors.Is(err, counterredis.ErrLost) {
		outage.Sleep(ctx, tryAgain)
		return todo
	}
	return slices.DeleteFunc(todo, func(i int) bool {
		for _, key := range ops[i].Keys() {
			switch c, is := misplaced[key]; {
			case err != nil && slices.Contains(unknown, key): // it cannot be changed; operations on resident counters go on
				results[i] = counter.Result{Err: during("apply", err)}
				return true
			case is:
				results[i] = counter.Result{Err: counter.Misplaced(c)}
				return true
			}
		}
		return false
	})
}

// Remembers reports whether an operation was made under the idempotency key of op, also when only PostgreSQL knows it.
func (s inOneBucket) Remembers(ctx context.Context, op *counter.Op) (yes bool, err error) {
	asks := false
	err = s.mend(ctx, func() (err error) {
		if yes, err = s.redis.Remembers(ctx, op); yes || err != nil {
			return err
		}
		home, err := s.redis.Status(ctx, 0)
		if err == nil && !home[0].Good {
			err = counterredis.ErrLost
		}
		asks = err == nil && home[0].Asks.After(home[0].Now)
		return err
	})
	if err != nil || yes || !asks {
		return yes, err
	}
	known, err := s.pg.Known(ctx, []counter.IdempotencyKey{op.IdempotencyKey})
	return len(known) > 0, err
}

// unavailable wraps err, unless it is nil, as counter.ErrUnavailable.
func unavailable(err error) error {
	if err == nil || errors.Is(err, counter.ErrUnavailable) {
		return err
	}
	return fmt.Errorf("%w: %w", counter.ErrUnavailable, err)
}

// during is unavailable that also names what was done.
func during(what string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("tiered: %s: %w", what, unavailable(err))
}

// ask looks up idempotency keys in PostgreSQL that Redis does not have, and notes them in Redis.
func (s *Store) ask(ctx context.Context, ops []counter.Op, todo []int, asked map[counter.IdempotencyKey]bool) error {
	by := map[counter.IdempotencyKey]*counter.Op{}
	for _, i := range todo {
		if id := ops[i].IdempotencyKey; id != (counter.IdempotencyKey{}) && !asked[id] {
			by[id] = &ops[i]
		}
	}
	known, err := s.pg.Known(ctx, slices.Collect(maps.Keys(by)))
	if err == nil {
		made := make([]*counter.Op, len(known))
		for i, id := range known {
			made[i] = by[id]
		}
		err = s.redis.Note(ctx, made...)
	}
	if err != nil {
		return err
	}
	for id := range by {
		asked[id] = true
	}
	return nil
}

// Read implements counter.Reader. Those that are not in Redis come there. While Redis is away, a read that may lag
// returns what PostgreSQL has, as stale.
func (s resident) Read(ctx context.Context, keys []string, member string, lag time.Duration) ([]counter.Reading, error) {
	var out []counter.Reading
	var places *counterredis.Placements
	err := s.mend(ctx, func() (err error) {
		out, places, err = s.redis.ReadResident(ctx, keys, member)
		return err
	})
	if err != nil && lag > 0 {
		if old, fault := s.pg.Read(ctx, keys, member, 0); fault == nil {
			for i := range old {
				old[i].Approx, old[i].Stale = true, true
			}
			return old, nil
		}
	}
	if err != nil {
		return nil, err
	}
	var rest []string
	var at []int
	for i, key := range keys {
		if !places.Hot[i] {
			rest, at = append(rest, key), append(at, i)
		}
	}
	if len(rest) == 0 {
		return out, nil
	}
	found, err := s.readBehind(ctx, rest, member, lag)
	if err != nil {
		return nil, err
	}
	var cold []string
	for n, i := range at {
		out[i] = found[n]
		if out[i].Kind != 0 && out[i].Kind != counter.Exact {
			out[i].Version = since(out[i].Version, places.Generation)
			cold = append(cold, keys[i])
		}
	}
	if len(cold) > 0 {
		if _, err := s.load(ctx, cold, false); err != nil {
			s.cfg.Log.Debug().Err(err).Msg("counters: loading what was read")
		}
	}
	return out, nil
}

// mend calls do, and once more after healing if do found that Redis may have lost data.
func (s *Store) mend(ctx context.Context, do func() error) error {
	err := do()
	if !errors.Is(err, counterredis.ErrLost) {
		return err
	}
	if err := s.heal(ctx, false); err != nil {
		return err
	}
	return do()
}

// since returns the version of a row under a generation of Redis: newer than any version that an earlier generation may
// have lost.
func since(v counter.Version, generation uint64) counter.Version {
	if v != (counter.Version{}) && v.Incarnation < generation {
		v.Incarnation = generation
	}
	return v
}

// Ledger implements counter.Reader.
func (s resident) Ledger(ctx context.Context, key string, after uint64, limit int) (counter.Ledger, error) {
	if after >= 1<<63-1 {
		return counter.Ledger{}, nil
	}
	// Redis first: whatever is persisted after this read is in PostgreSQL by the next one.
	var newer []counter.Entry
	var alone bool
	err := s.mend(ctx, func() (err error) {
		newer, alone, err = s.redis.LedgerResident(ctx, key, after, limit+1)
		return err
	})
	var page counter.Ledger
	if err == nil && !alone {
		page, err = s.pg.Ledger(ctx, key, after, limit)
	}
	if err != nil || page.More {
		return page, during(fmt.Sprintf("ledger of %q", key), err)
	}
	for _, e := range newer {
		if n := len(page.Entries); n > 0 && e.Seq <= page.Entries[n-1].Seq {
			continue
		}
		if len(page.Entries) == limit {
			page.More = true
			break
		}
		page.Entries = append(page.Entries, e)
	}
	return page, nil
}

// History implements counter.Reader.
func (s resident) History(ctx context.Context, key string, step time.Duration, from, to int64) (counter.Counter, []counter.Gain, error) {
	states, gains, err := s.histories(ctx, []string{key}, step, from, to)
	if err != nil {
		return counter.Counter{}, nil, during(fmt.Sprintf("history of %q", key), err)
	}
	return states[0].Counter(key), gains[0], nil
}

// merged returns the completed time buckets that Redis and PostgreSQL have, in order.
func merged(gained, behind []counter.Gain) []counter.Gain {
	if len(gained) == 0 {
		return behind
	}
	by := map[int64]counter.Gain{}
	for _, g := range gained {
		by[g.Number] = g
	}
	for _, g := range behind {
		switch newer, ok := by[g.Number]; {
		case !ok:
			by[g.Number] = g
		case newer.Seen != nil && g.Seen != nil: // Redis may have only what was added since
			newer.Seen.Merge(*g.Seen)
		}
	}
	out := make([]counter.Gain, 0, len(by))
	for _, number := range slices.Sorted(maps.Keys(by)) {
		out = append(out, by[number])
	}
	return out
}

// Dimension implements counter.Reader.
func (s resident) Dimension(ctx context.Context, key, name string) (counter.Counter, counter.Counted, error) {
	// Redis first: whatever is persisted after this read is in PostgreSQL by the next one.
	var is *counterredis.ResidentDimension
	err := s.mend(ctx, func() (err error) {
		is, err = s.redis.DimensionResident(ctx, key, name)
		return err
	})
	var row counter.Counter
	var all counter.Counted
	if err == nil && (is == nil || !is.Alone) {
		row, all, err = s.pg.Dimension(ctx, key, name)
	}
	if err != nil || is == nil {
		return row, all, during(fmt.Sprintf("dimension %q of %q", name, key), err)
	}
	add := func(upTo counter.Version, counts []counter.Count) {
		if is.Alone || row.Version.Compare(upTo) < 0 { // otherwise the row has them
			for _, c := range counts {
				all.Add(c.Value, c.Count)
			}
		}
	}
	add(is.Checkpoint, is.Drained)
	add(is.State.Version, is.Counted)
	return is.State.Counter(key), all, nil
}

// Mark implements counter.TopStore.
func (s *Store) Mark(ctx context.Context, match string, number int64, keys []string) error {
	return during("top", s.redis.Mark(ctx, match, number, keys))
}

// Marked implements counter.TopStore: Redis has the marks, PostgreSQL the lists.
func (s *Store) Marked(ctx context.Context, match string) (map[int64][]string, error) {
	return s.redis.Marked(ctx, match)
}

// KeepTop implements counter.TopStore.
func (s *Store) KeepTop(ctx context.Context, match string, step time.Duration, list counter.TopList, kept time.Duration, marks []string) error {
	if err := s.pg.KeepTop(ctx, match, step, list, kept, nil); err != nil {
		return err
	}
	return during("top", s.redis.Unmark(ctx, match, list.Number, marks))
}

// TopLists implements counter.TopStore.
func (s *Store) TopLists(ctx context.Context, match string, step time.Duration, from, to int64) ([]counter.TopList, error) {
	return s.pg.TopLists(ctx, match, step, from, to)
}

// Size implements counter.Reader: it counts what is persisted.
func (s *Store) Size(ctx context.Context, prefix string) (int64, error) {
	n, err := s.pg.Size(ctx, prefix)
	return n, unavailable(err)
}

// Aggregate implements counter.Reader: PostgreSQL adds up, once it has everything that was changed before. Sums that
// are sharded are read one by one, since their shards are in Redis alone.
func (s *Store) Aggregate(ctx context.Context, prefix string) (counter.Aggregate, error) {
	total := &counter.Total{}
	_, err := s.pg.Rows(ctx, nil) // nothing is persisted while one of the two is away
	if err == nil {
		_, err = s.redis.Status(ctx, 0)
	}
	if err == nil {
		err = s.persistAll(ctx)
	}
	var sharded []string
	if err == nil {
		sharded, err = s.redis.ShardedKeys(ctx, prefix)
	}
	for some := range slices.Chunk(sharded, counter.MaxKeys) {
		if err != nil {
			break
		}
		var found []counter.Reading
		if found, err = s.router.Read(ctx, some, "", 0); err == nil {
			sums := make([]counter.Counter, len(found))
			for i := range found {
				sums[i] = found[i].Counter
			}
			err = s.redis.AddWhole(ctx, total, sums)
		}
	}
	if err == nil {
		err = s.pg.AddTo(ctx, total, prefix, sharded)
	}
	if err != nil {
		return counter.Aggregate{}, during(fmt.Sprintf("aggregate %q", prefix), err)
	}
	return total.Aggregate(prefix)
}

// coldSets precedes cursors of PostgreSQL.
const coldSets = "cold:"

// Sets implements counter.Reader: those in Redis, and then those in PostgreSQL, which has
// every set that was not in Redis before.
func (s *Store) Sets(ctx context.Context, cursor string) (keys []string, next string, err error) {
	cold, isCold := strings.CutPrefix(cursor, coldSets)
	if isCold {
		keys, next, err = s.pg.Sets(ctx, cold)
	} else {
		keys, next, err = s.redis.Sets(ctx, cursor)
	}
	if next != "" && isCold || next == "" && !isCold {
		next = coldSets + next
	}
	return keys, next, during("sets", err)
}
