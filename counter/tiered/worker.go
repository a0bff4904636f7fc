package tiered

import (
	"cmp"
	"context"
	"errors"
	"math"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"headcount/counter"
	"headcount/counter/counterpg"
	"headcount/counter/counterredis"
	"headcount/counter/hyperloglog"
	"headcount/internal/outage"
	"headcount/internal/wake"
)

const (
	leastTick = 5 * time.Millisecond
	hurries   = 10 * time.Millisecond // shortest time between two checkpoints that callers wait for
	evictMost = 30 * time.Second      // longest time between two evictions
	lastRound = 2 * time.Second       // for persistLast
	largeSet  = 500                   // members; loadLarge loads larger sets
	largeIn   = 10 * time.Minute      // for one of them
)

// registerLag registers the metric of s.lag.
func (s *Store) registerLag(to prometheus.Registerer) {
	if to != nil {
		to.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "headcount_persist_lag_seconds", Help: "Age of the oldest change of a counter that is in Redis and not in PostgreSQL.",
		}, func() float64 { return time.Duration(s.lag.Load()).Seconds() }))
	}
}

// hurry makes the worker persist soon.
func (s *Store) hurry() {
	wake.Signal(s.kick)
}

// persist is the worker: it persists changes and evicts unused counters until ctx ends. Its tick leaves the last tenth
// of the interval for the checkpoint itself.
func (s *Store) persist(ctx context.Context) {
	ticker := time.NewTicker(max(s.cfg.PersistInterval/10, leastTick))
	defer ticker.Stop()
	evicting := min(max(s.cfg.ColdAfter/8, s.cfg.PersistInterval), evictMost)
	evicted := time.Now()
	failed := false
	for {
		hurry := false
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		case <-s.kick:
			hurry = true
		}
		err := s.round(ctx, hurry)
		if ctx.Err() != nil {
			return
		}
		if (err != nil) != failed && !errors.Is(err, counterpg.ErrAway) {
			if failed = err != nil; failed {
				s.cfg.Log.Warn().Err(err).Msg("counters: what is in Redis cannot be persisted now")
			} else {
				s.cfg.Log.Info().Msg("counters: what is in Redis is persisted again")
			}
		}
		if err == nil && time.Since(evicted) >= evicting {
			evicted = time.Now()
			for more := true; more && ctx.Err() == nil; {
				var gone int
				// While PostgreSQL is unavailable, nothing is evicted.
				if _, err = s.pg.Rows(ctx, nil); err == nil {
					gone, more, err = s.redis.Evict(ctx, s.cfg.ColdAfter)
				}
				if more = more && gone > 0; err != nil {
					break
				}
			}
		}
		pause := time.Duration(0)
		switch {
		case s.Ready() != nil:
			pause = time.Second
		case hurry:
			pause = hurries
		}
		outage.Sleep(ctx, pause)
	}
}

// persistLast waits until PostgreSQL has everything, when the process ends in an orderly way. So after the last process
// PostgreSQL alone has all counters. Whatever it cannot persist in time stays in Redis for the next process.
func (s *Store) persistLast() {
	ctx, cancel := context.WithTimeout(context.Background(), lastRound)
	defer cancel()
	_, err := s.pg.Rows(ctx, nil) // nothing is persisted while it is away
	var all []counterredis.Bucket
	if err == nil {
		all, err = s.redis.Status(ctx)
	}
	if err == nil {
		if slices.ContainsFunc(all, func(b counterredis.Bucket) bool { return !b.Good }) {
			return // healing and adopting are left to a process that stays
		}
		err = s.persistAll(ctx)
	}
	if err != nil {
		s.cfg.Log.Info().Err(err).Msg("counters: what changed last is in Redis alone; the next server persists it")
	}
}

// round persists changes that are old enough, or with hurry all changes.
func (s *Store) round(ctx context.Context, hurry bool) error {
	all, err := s.redis.Status(ctx)
	if err != nil {
		return err
	}
	due, lag := hurry, time.Duration(0)
	for _, b := range all {
		if !b.Good {
			return s.heal(ctx, true)
		}
		if !b.Since.IsZero() {
			lag = max(lag, b.Now.Sub(b.Since))
		}
		due = due || b.Draining != 0 && lag > s.cfg.PersistInterval // the process that drained it has died
	}
	s.lag.Store(int64(lag))
	s.unready.Store(nil)
	if !due && lag < s.cfg.PersistInterval*17/20 {
		return nil
	}
	var generation, done uint64
	busy, err := s.pg.Persist(ctx, func(ctx context.Context, p *counterpg.Persisting) (number, deleted uint64, err error) {
		number, deleted, err = s.checkpoint(ctx, p, all)
		generation, done = p.Generation, number
		return number, deleted, err
	})
	if errors.Is(err, counterredis.ErrLost) {
		return s.heal(ctx, true)
	}
	if err != nil || busy || done == 0 {
		return err
	}
	// If the process dies before this, the next checkpoint acknowledges.
	if err := s.redis.Acknowledge(ctx, generation, done); err != nil {
		return err
	}
	s.lag.Store(0)
	return nil
}

// checkpoint writes the next checkpoint, and returns its number. all has the buckets from before p. If another process
// has persisted since, that looks like a loss of data, and heal finds that there was none.
func (s *Store) checkpoint(ctx context.Context, p *counterpg.Persisting, all []counterredis.Bucket) (number, deleted uint64, err error) {
	dirty := false
	number = math.MaxUint64 // a PostgreSQL that came back with older data may lack checkpoints that Redis has dropped
	for _, b := range all {
		if b.Generation != p.Generation || b.Checkpoint <= p.Checkpoint {
			return 0, 0, counterredis.ErrLost
		}
		if b.Draining != 0 && b.Draining == p.Checkpoint { // it is persisted, and the process that did so has died
			// Later changes are left to the next round.
			return 0, 0, s.redis.Acknowledge(ctx, p.Generation, p.Checkpoint)
		}
		dirty = dirty || !b.Since.IsZero()
		number = min(number, cmp.Or(b.Draining, b.Checkpoint))
	}
	if !dirty {
		return 0, 0, nil
	}
	if err := s.redis.Checkpoint(ctx, p.Generation, number); err != nil {
		return 0, 0, err
	}
	err = s.redis.Drain(ctx, p.Generation, number, func(drained []counter.Drained) error {
		return p.Write(ctx, drained)
	}, func(ids []counter.IdempotencyKey) error { return p.IdempotencyKeys(ctx, ids) })
	if err != nil {
		return 0, 0, err
	}
	// A bucket that lost its data meanwhile has reported counters as not existing.
	if all, err = s.redis.Status(ctx); err != nil {
		return 0, 0, err
	}
	for _, b := range all {
		if !b.Good || b.Generation != p.Generation || b.Checkpoint != number+1 {
			return 0, 0, counterredis.ErrLost
		}
		deleted = max(deleted, b.Deleted)
	}
	if len(p.Refused) > 0 {
		s.cfg.Log.Error().Strs("counters", p.Refused).Msg("counters that are exact in PostgreSQL were not persisted from Redis: the rules of two processes differ")
	}
	return number, deleted, nil
}

// heal finds out whether Redis has lost data, and then begins a new generation. One call at a time does so. With adopts
// it also adopts the counters of a Redis that had no PostgreSQL.
func (s *Store) heal(ctx context.Context, adopts bool) error {
	if err := s.Ready(); err != nil && !adopts {
		return err
	}
	select {
	case s.healing <- struct{}{}:
		defer func() { <-s.healing }()
	case <-ctx.Done():
		return unavailable(context.Cause(ctx))
	}
	var begun uint64
	err := s.pg.Regenerate(ctx, func(ctx context.Context, f counterpg.Front) (_ uint64, err error) {
		begun, err = s.generation(ctx, f, adopts)
		return begun, err
	})
	if err == nil && begun != 0 {
		// Not before PostgreSQL has the number: it would be replaced by the next generation, and the changes in it lost.
		err = s.redis.Confirm(ctx, begun)
	}
	return during("looking whether Redis has lost its memory", err)
}

// generation begins a new generation in Redis and returns its number, or 0 when Redis has lost nothing that was
// persisted.
func (s *Store) generation(ctx context.Context, f counterpg.Front, adopts bool) (uint64, error) {
	all, err := s.redis.Status(ctx)
	if err != nil {
		return 0, err
	}
	next := max(uint64(f.Now.UnixMilli()), f.Generation+1, f.Deleted+1)
	good, whole := true, true
	for _, b := range all {
		next = max(next, b.Generation+1, b.Deleted+1, b.Life+1)
		good = good && b.Good
		whole = whole && b.Generation == f.Generation && b.Generation != 0 && b.Checkpoint > f.Checkpoint
	}
	switch {
	case good && whole:
		return 0, nil // another call was faster
	case whole:
		return 0, s.redis.Adopt(ctx, f.Generation, next)
	}
	unmarked, err := s.redis.Unmarked(ctx)
	if err != nil {
		return 0, err
	}
	if unmarked {
		if !adopts {
			s.hurry()
			return 0, errCarrying
		}
		if err := s.adopt(ctx); err != nil {
			return 0, err
		}
	}
	asks, deleted := time.Time{}, f.Deleted
	if unmarked { // PostgreSQL got the highest deleted incarnation and the idempotency keys of Redis
		for _, b := range all {
			deleted = max(deleted, b.Deleted)
		}
	}
	if f.IdempotencyKeys || unmarked {
		asks = all[0].Now.Add(counter.IdempotencyKeyKept)
	}
	if err := s.redis.Begin(ctx, next, deleted, asks, unmarked); err != nil {
		return 0, err
	}
	if !unmarked {
		s.cfg.Log.Warn().Uint64("generation", next).Msg("counters: Redis has no memory of them, or an old one, or another Redis is in front of this PostgreSQL; what is persisted comes back from there")
	}
	return next, nil
}

// tickets has the tickets of buckets, and their generation.
type tickets struct {
	of         map[int]string
	generation uint64
}

func (s *Store) tickets(ctx context.Context, keys []string) (tickets, error) {
	var numbers []int
	seen := map[int]bool{}
	for _, key := range keys {
		if b := counterredis.BucketOf(key); !seen[b] {
			seen[b] = true
			numbers = append(numbers, b)
		}
	}
	buckets, err := s.redis.Status(ctx, numbers...)
	if err != nil {
		return tickets{}, err
	}
	t := tickets{of: map[int]string{}}
	for i := range buckets {
		if !buckets[i].Good {
			return tickets{}, counterredis.ErrLost
		}
		t.of[buckets[i].Number] = buckets[i].Ticket()
		t.generation = max(t.generation, buckets[i].Generation)
	}
	return t, nil
}

// load makes counters resident. With wanted, Redis also notes those that do not exist. It returns the counters that
// stay in PostgreSQL because they are exact. Large sets are left to loadLarge; the error is then ErrMoved.
func (s *Store) load(ctx context.Context, keys []string, wanted bool) (misplaced map[string]counter.Counter, err error) {
	t, err := s.tickets(ctx, keys)
	if err != nil {
		return nil, err
	}
	rows, err := s.pg.Rows(ctx, keys)
	if err != nil {
		return nil, err
	}
	misplaced = map[string]counter.Counter{}
	done := map[string]bool{}
	var later error
	var entries []counterredis.Entry
	for _, key := range keys {
		st := rows[key]
		if done[key] || st.Kind == 0 && !wanted {
			continue
		}
		done[key] = true
		if st.Kind == counter.Exact {
			misplaced[key] = st.Counter(key)
			continue
		}
		if st.Kind == counter.Members && st.Value > largeSet {
			select {
			case s.large <- key:
			default:
			}
			later = counterredis.ErrMoved
			continue
		}
		e, err := s.stage(ctx, key, st)
		if err != nil {
			return nil, err
		}
		e.State.Version = since(e.State.Version, t.generation)
		entries = append(entries, e)
	}
	if len(entries) > 0 {
		err = s.redis.Load(ctx, t.of, entries)
	}
	return misplaced, cmp.Or(err, later)
}

// loadLarge makes large sets resident, one after the other, until ctx ends. That may take longer than a call waits, and
// several calls want the same one.
func (s *Store) loadLarge(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case key := <-s.large:
			if err := s.loadSet(ctx, key); err != nil {
				s.cfg.Log.Debug().Err(err).Msg("counters: loading a large set")
			}
		}
	}
}

// loadSet makes a large set resident. Meanwhile other counters of its bucket are evicted, so it takes the ticket when
// all members are staged, and looks whether what it has staged is still the newest, and all of it still there.
func (s *Store) loadSet(ctx context.Context, key string) error {
	ctx, cancel := context.WithTimeout(ctx, largeIn)
	defer cancel()
	_, places, err := s.redis.ReadResident(ctx, []string{key}, "")
	if err != nil || places.Hot[0] {
		return err
	}
	number := counterredis.BucketOf(key)
	before, err := s.redis.Status(ctx, number)
	if err != nil {
		return err
	}
	e, err := s.stage(ctx, key, counter.State{Kind: counter.Members})
	if err != nil {
		return err
	}
	after, err := s.redis.Status(ctx, number)
	if err != nil {
		return err
	}
	rows, err := s.pg.Rows(ctx, []string{key})
	if err != nil {
		return err
	}
	was, is := before[0], after[0]
	if rows[key].Version != e.State.Version || is.Generation != was.Generation || is.Life != was.Life {
		return counterredis.ErrMoved
	}
	e.State.Version = since(e.State.Version, is.Generation)
	return s.redis.Load(ctx, map[int]string{number: is.Ticket()}, []counterredis.Entry{e})
}

// stage copies the members or registers of a counter to Redis, where the counter gets them when it becomes resident. It
// returns the counter as of the same moment.
func (s *Store) stage(ctx context.Context, key string, st counter.State) (e counterredis.Entry, err error) {
	e = counterredis.Entry{Key: key, State: st}
	switch st.Kind {
	case counter.Members:
		n := 0
		e.State, err = s.pg.Set(ctx, key, func(members []string) (err error) {
			e.Staged, err = s.redis.Stage(ctx, key, e.Staged, n, members)
			n += len(members)
			return err
		})
	case counter.Unique:
		var registers hyperloglog.Registers
		if e.State, registers, err = s.pg.Registers(ctx, key); err == nil && e.State.Kind == counter.Unique {
			e.Staged, err = s.redis.StageRegisters(ctx, key, registers)
		}
	}
	if err == nil && e.State.Kind != st.Kind {
		err = counterredis.ErrMoved
	}
	return e, err
}
