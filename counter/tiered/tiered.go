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
	"headcount/internal/redisconn"
)

const (
	patience = 8 * time.Second // of an operation whose counters are on their way
	tryAgain = 2 * time.Millisecond
)

// Config tunes a Store. A zero field takes its default.
type Config struct {
	Redis    string // URL, as counterredis.Config has it; required
	Postgres string // URL, as counterpg.Config has it; required
	// PersistInterval is within what time a change is in PostgreSQL, default 1s. It is
	// looked for changes ten times as often.
	PersistInterval time.Duration
	// ColdAfter is how long after its last touch a counter leaves Redis, default 24h.
	ColdAfter time.Duration
	Dial      time.Duration  // as counterredis.Config has it
	Rules     *counter.Rules // say how long ledgers and steps are kept of counters that Redis had alone; default the built-in ones
	// ReadOnly is for an export: nothing is persisted, and nothing else written.
	ReadOnly   bool
	Registerer prometheus.Registerer // of the store's metrics; nil: none
	Log        zerolog.Logger
	OnRedis    counter.States   // optional
	OnPostgres counter.States   // optional
	Marks      *redisconn.Marks // as counterredis.Config has them
}

// Store is a counter.Store. Its methods may be called from any goroutine.
type Store struct {
	cfg     Config
	redis   *counterredis.Store
	pg      *counterpg.Store
	metrics metrics
	closed  atomic.Bool

	unready atomic.Pointer[error] // why counters of a Redis that had no PostgreSQL are not served yet

	healing chan struct{} // holds one: the right to find out whether Redis has lost its memory
	kick    chan struct{} // holds one: somebody waits for a cut
	stop    context.CancelFunc
	wg      sync.WaitGroup // the persist worker
}

var _ counter.Store = (*Store)(nil)

// Open returns a store over both. It fails as counterredis.Open and counterpg.Open do: when settings
// cannot work, not when one of the two does not answer. Close ends it.
func Open(ctx context.Context, cfg Config) (*Store, error) {
	cfg.PersistInterval = cmp.Or(cfg.PersistInterval, time.Second)
	cfg.ColdAfter = cmp.Or(cfg.ColdAfter, 24*time.Hour)
	cfg.Rules = cmp.Or(cfg.Rules, counter.BuiltinRules())
	pg, err := counterpg.Open(ctx, counterpg.Config{URL: cfg.Postgres, Behind: true, ReadOnly: cfg.ReadOnly, Log: cfg.Log, OnState: cfg.OnPostgres})
	if err != nil {
		return nil, err
	}
	redis, err := counterredis.Open(counterredis.Config{
		URL: cfg.Redis, Dial: cfg.Dial, Registerer: cfg.Registerer, Log: cfg.Log, OnState: cfg.OnRedis, Marks: cfg.Marks,
		Behind: &counterredis.Behind{Touch: cfg.ColdAfter / 8},
	})
	if err != nil {
		return nil, errors.Join(err, pg.Close())
	}
	s := &Store{cfg: cfg, redis: redis, pg: pg, metrics: newMetrics(cfg.Registerer), healing: make(chan struct{}, 1), kick: make(chan struct{}, 1)}
	run, stop := context.WithCancel(context.Background())
	s.stop = stop
	if !cfg.ReadOnly {
		s.wg.Go(func() { s.persist(run) })
	}
	return s, nil
}

// Close waits for what the store runs. What is not persisted is in Redis, and another process,
// or the next start, persists it.
func (s *Store) Close() error {
	if s.closed.Swap(true) {
		return nil
	}
	s.stop()
	s.wg.Wait()
	if !s.cfg.ReadOnly {
		s.persistLast()
	}
	return errors.Join(s.redis.Close(), s.pg.Close())
}

// Cause is why PostgreSQL cannot be used; nil: it can.
func (s *Store) Cause() error { return s.pg.Cause() }

// Front is what stands in front, for the parts of hot sums: they are in Redis alone.
func (s *Store) Front() *counterredis.Store { return s.redis }

// Limit is as counter.Limiter says. Limits are in Redis alone: a Redis that loses its memory
// forgets them.
func (s *Store) Limit(ctx context.Context, calls []limit.Call) []counter.LimitResult {
	return s.redis.Limit(ctx, calls)
}

// Apply is as counter.Writer says.
func (s *Store) Apply(ctx context.Context, ops []counter.Op) []counter.Result {
	began := time.Now()
	results := make([]counter.Result, len(ops))
	exact, others, apart := s.split(ops, results)
	if apart {
		s.apply(ctx, ops, exact, results)
		s.apply(ctx, ops, others, results)
	} else {
		s.apply(ctx, ops, append(exact, others...), results)
	}
	for i := range ops {
		// Redis soon knows nothing of it, and a read that may lag is then answered with what is remembered.
		if results[i].Err == nil && ops[i].Changes[0].Verb == counter.Delete {
			s.pg.Remember([]counter.Reading{{Counter: results[i].Counters[0]}}, "", began)
		}
	}
	return results
}

// split parts the operations whose rules are exact from the others, so that each part goes
// to its store at once. They are not apart when they have a counter or an identity in common:
// then all are in the first, in their order.
func (s *Store) split(ops []counter.Op, results []counter.Result) (exact, others []int, apart bool) {
	keys := map[string]bool{} // whether a rule of it is exact
	ids := map[counter.Identity]bool{}
	var all []int
	apart = true
	for i := range ops {
		op := &ops[i]
		if results[i].Err = op.Check(); results[i].Err != nil {
			continue
		}
		all = append(all, i)
		is := op.Changes[0].Rule.Kind == counter.Exact
		for j := range op.Changes {
			c := &op.Changes[j]
			was, ok := keys[c.Key]
			apart = apart && (!ok || was == is)
			keys[c.Key] = is
		}
		if op.Identity != (counter.Identity{}) {
			was, ok := ids[op.Identity]
			apart = apart && (!ok || was == is)
			ids[op.Identity] = is
		}
		if is {
			exact = append(exact, i)
		} else {
			others = append(others, i)
		}
	}
	if !apart {
		return all, nil, false
	}
	return exact, others, true
}

// apply makes the operations todo in their order, each where its counters are.
func (s *Store) apply(ctx context.Context, ops []counter.Op, todo []int, results []counter.Result) {
	deadline := time.Now().Add(patience)
	asked := map[counter.Identity]bool{}
	all := todo
	fail := func(at []int, err error) {
		for _, i := range at {
			results[i] = counter.Result{Err: fmt.Errorf("tiered: apply: %w", unavailable(err))}
		}
	}
	for tries := 0; len(todo) > 0; tries++ {
		if tries > 0 && (time.Now().After(deadline) || ctx.Err() != nil) {
			fail(todo, counterredis.ErrMoved)
			return
		}
		left := s.redis.MakeHot(ctx, ops, todo, asked, results)
		todo = left.Ops
		switch {
		case len(todo) == 0:
			continue
		case left.Lost:
			if err := s.heal(ctx, false); err != nil {
				fail(todo, err)
				return
			}
			continue
		case len(left.Cold) > 0:
			if err := s.load(ctx, left.Cold, ruleKinds(ops, todo), true); err != nil {
				if errors.Is(err, counterredis.ErrMoved) || errors.Is(err, counterredis.ErrLost) {
					s.pause(ctx)
					continue
				}
				// Nobody may change a counter whose row is not known. Those that are in Redis go on.
				var cold []int
				cold, todo = partition(todo, func(i int) bool { return left.Ways[i] == counterredis.Cold })
				fail(cold, err)
			}
			continue
		case left.Ask:
			if err := s.ask(ctx, ops, todo, asked); err != nil {
				var with []int
				with, todo = partition(todo, func(i int) bool { return ops[i].Identity != counter.Identity{} })
				fail(with, err)
			}
			continue
		}
		switch left.Ways[todo[0]] {
		case counterredis.Pg:
			n := 1
			for n < len(todo) && left.Ways[todo[n]] == counterredis.Pg {
				n++
			}
			made, err := s.applyExact(ctx, ops, todo[:n], left.Deleted, results)
			if err != nil {
				fail(todo[:n], err)
				made = n
			}
			todo = todo[made:]
		case counterredis.Both:
			err := s.misplaced(ctx, &ops[todo[0]])
			if errors.Is(err, counterredis.ErrMoved) || errors.Is(err, counterredis.ErrLost) {
				s.pause(ctx)
				continue
			}
			results[todo[0]] = counter.Result{Err: err}
			todo = todo[1:]
		}
	}
	s.replays(ctx, ops, all, results)
}

// unavailable is err as counter.ErrUnavailable.
func unavailable(err error) error {
	if errors.Is(err, counter.ErrUnavailable) {
		return err
	}
	return fmt.Errorf("%w: %w", counter.ErrUnavailable, err)
}

// pause waits for others.
func (s *Store) pause(ctx context.Context) {
	select {
	case <-ctx.Done():
	case <-time.After(tryAgain):
	}
}

func partition(list []int, is func(int) bool) (yes, no []int) {
	for _, i := range list {
		if is(i) {
			yes = append(yes, i)
		} else {
			no = append(no, i)
		}
	}
	return yes, no
}

// ruleKinds are the kinds that the first changes of counters would give them.
func ruleKinds(ops []counter.Op, todo []int) map[string]counter.Kind {
	kinds := map[string]counter.Kind{}
	for _, i := range todo {
		for j := range ops[i].Changes {
			if c := &ops[i].Changes[j]; kinds[c.Key] == 0 {
				kinds[c.Key] = c.Rule.Kind
			}
		}
	}
	return kinds
}

// ask looks behind for identities that Redis does not know, and has it know them.
func (s *Store) ask(ctx context.Context, ops []counter.Op, todo []int, asked map[counter.Identity]bool) error {
	var ids []counter.Identity
	for _, i := range todo {
		if id := ops[i].Identity; id != (counter.Identity{}) && !asked[id] {
			ids = append(ids, id)
		}
	}
	known, err := s.pg.Known(ctx, ids)
	if err == nil {
		err = s.redis.Note(ctx, known, nil, 0)
	}
	if err != nil {
		return err
	}
	for _, id := range ids {
		asked[id] = true
	}
	return nil
}

// applyExact makes operations on exact counters and returns how many of them were made or
// refused. Fewer than all: the next one is on another counter, or a replay, and is to be looked at anew.
func (s *Store) applyExact(ctx context.Context, ops []counter.Op, todo []int, deleted uint64, results []counter.Result) (n int, err error) {
	list := make([]counter.Op, len(todo))
	for n, i := range todo {
		list[n] = ops[i]
	}
	did, err := s.pg.ApplyExact(ctx, list, deleted)
	if err != nil {
		return 0, err
	}
	made, gone := did.Results, did.Gone
	var ids []counter.Identity
	for n, r := range made {
		results[todo[n]] = r
		if r.Err == nil && list[n].Identity != (counter.Identity{}) {
			ids = append(ids, list[n].Identity)
		}
	}
	if len(made) < len(todo) {
		for j := range list[len(made)].Changes {
			gone = append(gone, list[len(made)].Changes[j].Key)
		}
	}
	if len(ids)+len(gone) == 0 {
		return len(made), nil
	}
	if unnoted := s.redis.Note(ctx, ids, gone, did.Deleted); unnoted != nil {
		// They are made. Who repeats them finds that out, if they have an identity.
		for n := range made {
			if made[n].Err == nil {
				results[todo[n]] = counter.Result{Err: fmt.Errorf("tiered: apply: %w", unavailable(unnoted))}
			}
		}
	}
	return len(made), nil
}

// misplaced is why an operation that has counters in both stores cannot be made: one of them was made when its rule had
// another kind.
func (s *Store) misplaced(ctx context.Context, op *counter.Op) error {
	var keys []string
	for i := range op.Changes {
		if key := op.Changes[i].Key; !slices.Contains(keys, key) {
			keys = append(keys, key)
		}
	}
	found, err := s.read(ctx, keys, "", 0, true)
	if err != nil {
		return unavailable(err)
	}
	for _, c := range found {
		if c.Kind != 0 && (c.Kind == counter.Exact) != (op.Changes[0].Rule.Kind == counter.Exact) {
			return &counter.Conflict{Is: counter.ErrKind, Key: c.Key, Value: c.Value, Text: fmt.Sprintf("it is of kind %s, and others of the batch are elsewhere; change it by itself", c.Kind)}
		}
	}
	return counterredis.ErrMoved
}

// replays fills in the counters of replays, which may be anywhere. What they repeat is whole.
func (s *Store) replays(ctx context.Context, ops []counter.Op, todo []int, results []counter.Result) {
	for _, i := range todo {
		if results[i].Replay && results[i].Err == nil {
			results[i] = replay(&ops[i], func(keys []string) ([]counter.Reading, error) { return s.read(ctx, keys, "", 0, true) })
		}
	}
}

// Read is as counter.Reader says.
func (s *Store) Read(ctx context.Context, keys []string, member string, lag time.Duration) ([]counter.Reading, error) {
	out, err := s.read(ctx, keys, member, lag, false)
	if err == nil {
		return out, nil
	}
	if lag > 0 && ctx.Err() == nil && !s.closed.Load() {
		if old := s.pg.Recall(keys, member); old != nil {
			return old, nil
		}
		// What PostgreSQL has, or had when it was last read.
		if old, fault := s.pg.Read(ctx, keys, member, lag); fault == nil {
			for i := range old {
				if old[i].Kind != counter.Exact {
					old[i].Approx, old[i].Stale = true, true
				}
			}
			return old, nil
		}
	}
	return nil, fmt.Errorf("tiered: read %d counters: %w", len(keys), unavailable(err))
}

// read reads counters where they are. Those that are cold come to Redis.
func (s *Store) read(ctx context.Context, keys []string, member string, lag time.Duration, whole bool) ([]counter.Reading, error) {
	start := time.Now()
	var out []counter.Reading
	var places *counterredis.Places
	err := s.mend(ctx, func() (err error) {
		out, places, err = s.redis.ReadHot(ctx, keys, member, whole)
		return err
	})
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
		s.pg.Remember(out, member, start)
		return out, nil
	}
	found, err := s.pg.Read(ctx, rest, member, lag)
	if err != nil {
		return nil, err
	}
	var cold []string
	for n, i := range at {
		out[i] = found[n]
		if out[i].Kind != 0 && out[i].Kind != counter.Exact {
			cold = append(cold, keys[i])
			out[i].Version = since(out[i].Version, places.Generation)
		}
	}
	if len(cold) > 0 {
		if err := s.load(ctx, cold, nil, false); err != nil {
			s.cfg.Log.Debug().Err(err).Msg("counters: loading what was read")
		}
	}
	return out, nil
}

// mend calls do, and once more when do met a Redis that may have lost its memory, and it has not.
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

// since is the version of a counter of PostgreSQL under a generation of Redis: newer than
// what an earlier one may have had and lost.
func since(v counter.Version, generation uint64) counter.Version {
	if v != (counter.Version{}) && v.Incarnation < generation {
		v.Incarnation = generation
	}
	return v
}

// Ledger is as counter.Reader says.
func (s *Store) Ledger(ctx context.Context, key string, after uint64, limit int) (counter.Ledger, error) {
	fail := func(err error) (counter.Ledger, error) {
		return counter.Ledger{}, fmt.Errorf("tiered: ledger of %q: %w", key, unavailable(err))
	}
	if after >= 1<<63-1 {
		return counter.Ledger{}, nil
	}
	// First what is not persisted: what is missing in it is in PostgreSQL by then.
	var newer []counter.Entry
	var alone bool
	err := s.mend(ctx, func() (err error) {
		newer, alone, err = s.redis.LedgerHot(ctx, key, after, limit+1)
		return err
	})
	if err != nil {
		return fail(err)
	}
	var page counter.Ledger
	if !alone {
		if page, err = s.pg.Ledger(ctx, key, after, limit); err != nil {
			return fail(err)
		}
	}
	if page.More {
		return page, nil
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

// History is as counter.Reader says.
func (s *Store) History(ctx context.Context, key string, step time.Duration, from, to int64) (counter.Counter, []counter.Gain, error) {
	fail := func(err error) (counter.Counter, []counter.Gain, error) {
		return counter.Counter{}, nil, fmt.Errorf("tiered: history of %q: %w", key, unavailable(err))
	}
	// First what is not persisted: what is missing in it is in PostgreSQL by then.
	var st counter.State
	var gained map[int64]counter.Gain
	var alone, hot bool
	err := s.mend(ctx, func() (err error) {
		st, gained, alone, hot, err = s.redis.HistoryHot(ctx, key, step, from, to)
		return err
	})
	if err != nil {
		return fail(err)
	}
	var gains []counter.Gain
	if !alone {
		var behind counter.State
		if behind, gains, err = s.pg.Gains(ctx, key, step, from, to); err != nil {
			return fail(err)
		}
		if !hot {
			st = behind
		}
	}
	return st.Counter(key), st.With(merged(gained, gains), step, from, to), nil
}

// merged is what Redis and PostgreSQL have of the steps of a counter that are over, in order.
func merged(gained map[int64]counter.Gain, behind []counter.Gain) []counter.Gain {
	if len(gained) == 0 {
		return behind
	}
	for _, g := range behind {
		switch newer, ok := gained[g.Number]; {
		case !ok:
			gained[g.Number] = g
		case newer.Seen != nil && g.Seen != nil: // Redis may have only what was added since
			newer.Seen.Merge(*g.Seen)
		}
	}
	out := make([]counter.Gain, 0, len(gained))
	for _, number := range slices.Sorted(maps.Keys(gained)) {
		out = append(out, gained[number])
	}
	return out
}

// Dimension is as counter.Reader says.
func (s *Store) Dimension(ctx context.Context, key, name string) (counter.Counter, counter.Counted, error) {
	fail := func(err error) (counter.Counter, counter.Counted, error) {
		return counter.Counter{}, counter.Counted{}, fmt.Errorf("tiered: dimension %q of %q: %w", name, key, unavailable(err))
	}
	for try := 0; ; try++ {
		// First what is not persisted: what is missing in it is in PostgreSQL by then.
		hot, err := s.redis.DimensionHot(ctx, key, name)
		if errors.Is(err, counterredis.ErrLost) && try == 0 {
			if err = s.heal(ctx, false); err == nil {
				continue
			}
		}
		if err != nil {
			return fail(err)
		}
		var all counter.Counted
		var front counterpg.Front
		var out counter.Counter
		if hot == nil || !hot.Alone {
			if out, all, front, err = s.pg.Counted(ctx, key, name); err != nil {
				return fail(err)
			}
		}
		if hot == nil {
			return out, all, nil
		}
		if !hot.Alone && front.Generation != hot.Generation {
			if try > 0 {
				return fail(counterredis.ErrLost)
			}
			continue
		}
		for epoch, counts := range map[uint64][]counter.Count{hot.Taken: hot.Before, hot.Epoch: hot.Now} {
			if !hot.Alone && epoch <= front.Epoch { // it is persisted by now
				continue
			}
			for _, c := range counts {
				all.Add(c.Value, c.Count)
			}
		}
		return hot.State.Counter(key), all, nil
	}
}

// Mark is as counter.TopStore says.
func (s *Store) Mark(ctx context.Context, match string, number int64, keys []string) error {
	if err := s.redis.Mark(ctx, match, number, keys); err != nil {
		return fmt.Errorf("tiered: top: %w", unavailable(err))
	}
	return nil
}

// Marked is as counter.TopStore says: Redis has the marks, PostgreSQL the lists.
func (s *Store) Marked(ctx context.Context, match string) (map[int64][]string, error) {
	return s.redis.Marked(ctx, match)
}

// KeepTop is as counter.TopStore says.
func (s *Store) KeepTop(ctx context.Context, match string, step time.Duration, list counter.TopList, kept time.Duration, marks []string) error {
	if err := s.pg.KeepTop(ctx, match, step, list, kept, nil); err != nil {
		return err
	}
	if err := s.redis.Unmark(ctx, match, list.Number, marks); err != nil {
		return fmt.Errorf("tiered: top: %w", unavailable(err))
	}
	return nil
}

// TopLists is as counter.TopStore says.
func (s *Store) TopLists(ctx context.Context, match string, step time.Duration, from, to int64) ([]counter.TopList, error) {
	return s.pg.TopLists(ctx, match, step, from, to)
}

// Size is as counter.Reader says: it counts what is persisted.
func (s *Store) Size(ctx context.Context, prefix string) (int64, error) {
	n, err := s.pg.Size(ctx, prefix)
	if err != nil {
		return 0, unavailable(err)
	}
	return n, nil
}

// Aggregate is as counter.Reader says: PostgreSQL adds up, once it has everything that was changed before. Sums that
// are spread are read one by one, since their parts are in Redis alone.
func (s *Store) Aggregate(ctx context.Context, prefix string) (counter.Aggregate, error) {
	total := &counter.Total{}
	_, err := s.pg.Rows(ctx, nil) // nothing is persisted while it is away
	if err == nil {
		err = s.persistAll(ctx)
	}
	var spread []string
	if err == nil {
		spread, err = s.redis.Spread(ctx, prefix)
	}
	for some := range slices.Chunk(spread, counter.MaxKeys) {
		if err != nil {
			break
		}
		var found []counter.Reading
		if found, err = s.read(ctx, some, "", 0, true); err == nil {
			err = s.redis.AddWhole(ctx, total, found)
		}
	}
	if err == nil {
		err = s.pg.AddTo(ctx, total, prefix, spread)
	}
	if err != nil {
		return counter.Aggregate{}, fmt.Errorf("tiered: aggregate %q: %w", prefix, unavailable(err))
	}
	return total.Aggregate(prefix)
}

// coldSets begins the cursor of sets in PostgreSQL.
const coldSets = "cold:"

// Sets is as counter.Reader says: those in Redis, and then those in PostgreSQL, which has
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
	if err != nil {
		return nil, "", fmt.Errorf("tiered: %w", unavailable(err))
	}
	return keys, next, nil
}

// Watch is as counter.Feed says: Redis tells of hot counters, PostgreSQL of exact ones.
func (s *Store) Watch(told func([]counter.Update), lost func()) counter.Watch {
	return watchBoth(s.redis, s.pg, told, lost, func(keys []string) (hot, exact []string) { return keys, keys })
}
