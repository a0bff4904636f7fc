// Package routed is a store of counters that keeps exact counters in PostgreSQL, changed in transactions, and all
// others with owners over rows. The rule of a key decides where its counter is.
//
// # Kinds that change
//
// A counter keeps its kind when its rule gets another one, so it may not be where its rule says. Before a side creates
// a counter, it therefore looks for it on the other side: an owner reads heads in partition owner.Outside ([Rows]), and
// exactpg asks [Elsewhere].
//
// # Batches
//
// The counters of a batch are either all exact or none of them is, and all batches share one space of idempotency keys.
// If all rows are in PostgreSQL, both sides keep the keys in one table. With Redis in front, owners do not know that
// table. So the owner of the idempotency key is asked before a batch of exact counters, and told of the key afterwards
// ([Config.SeparateKeys]).
package routed

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"headcount/counter"
	"headcount/counter/call"
	"headcount/counter/exactpg"
	"headcount/counter/owner"
)

// Config has the parts of a Store.
type Config struct {
	Owned *call.Store    // the counters of owners, which must have owner.Config.ExactOutside
	Exact *exactpg.Store // the exact counters
	Rules *counter.Rules
	// SeparateKeys says that the two sides do not share a table of idempotency keys.
	SeparateKeys bool
	// Durable reads what PostgreSQL has of the counters of owners. It is used for reads that may lag while Redis is
	// unavailable. Nil: there are no such reads.
	Durable *owner.Reader
	// Gate returns why exact counters cannot be used yet, or nil. A nil Gate means that they always can.
	Gate func() error
}

// Store is a counter.Store. All methods may be called from any goroutine. Close closes neither part.
type Store struct {
	*call.Store // everything that is not overridden below: histories, dimensions, limits, top lists
	cfg         Config
}

var (
	_ counter.Store    = (*Store)(nil)
	_ counter.Dumper   = (*Store)(nil)
	_ counter.Restorer = (*Store)(nil)
)

// New returns a Store over the two sides of cfg.
func New(cfg Config) *Store { return &Store{Store: cfg.Owned, cfg: cfg} }

// isExact reports whether the rule of key says that its counter is exact.
func (s *Store) isExact(key string) bool {
	rule := s.cfg.Rules.Find(key)

	return rule != nil && rule.Kind.IsExact()
}

// part splits keys by the side that has their counters.
func (s *Store) part(keys []string) (owned, exact []string) {
	for _, key := range keys {
		if s.isExact(key) {
			exact = append(exact, key)
		} else {
			owned = append(owned, key)
		}
	}

	return owned, exact
}

// Apply implements counter.Writer. The two sides run in parallel.
func (s *Store) Apply(ctx context.Context, ops []counter.Op) []counter.Result {
	if len(ops) == 1 {
		return s.applyOne(ctx, ops)
	}
	if s.allExact(ops) {
		return s.cfg.Exact.Apply(ctx, ops)
	}

	results := make([]counter.Result, len(ops))
	var owned, exact gathered

	flush := func() {
		var both sync.WaitGroup
		// Neither side waits for the other one's server.
		both.Go(func() { owned.apply(ctx, s.cfg.Owned, results) })
		exact.apply(ctx, s.cfg.Exact, results)
		both.Wait()
	}

	for i := range ops {
		op := &ops[i]
		way := s.wayOf(op)

		// If two operations have the same idempotency key, the later one is a replay, and must wait for the earlier
		// one.
		isRepeated := way == toExact && owned.hasBatch(op) || way == toOwners && exact.hasBatch(op)
		if isRepeated {
			flush()
		}

		switch way {
		case toNobody:
			results[i].Err = s.refusal(op)
		case toOwners:
			owned.add(op, i)
		case toExact:
			exact.add(op, i)
		case toBoth: // a batch of exact counters keeps its place in the order
			flush()
			results[i] = s.batch(ctx, op)
		}
	}
	flush()

	return results
}

// way is the side that carries out an operation.
type way int

const (
	toNobody way = iota // it is invalid, or cannot be carried out yet
	toOwners
	toExact
	toBoth // a batch of exact counters whose idempotency key an owner must know
)

func (s *Store) wayOf(op *counter.Op) way {
	if s.refusal(op) != nil {
		return toNobody
	}

	isExact := op.Changes[0].Rule.Kind.IsExact()
	ownerNeedsKey := s.cfg.SeparateKeys && op.OfBatch()
	switch {
	case !isExact:
		return toOwners
	case ownerNeedsKey:
		return toBoth
	default:
		return toExact
	}
}

// refusal returns why an operation cannot be carried out, or nil.
func (s *Store) refusal(op *counter.Op) error {
	err := op.Check()
	if err == nil && op.Changes[0].Rule.Kind.IsExact() {
		err = s.gate()
	}

	return err
}

func (s *Store) gate() error {
	if s.cfg.Gate == nil {
		return nil
	}

	return s.cfg.Gate()
}

// allExact reports whether exactpg carries out all operations, as is usual because a Combiner separates them.
func (s *Store) allExact(ops []counter.Op) bool {
	for i := range ops {
		if s.wayOf(&ops[i]) != toExact {
			return false
		}
	}

	return true
}

// applyOne carries out a single operation without the overhead of sorting operations by side.
func (s *Store) applyOne(ctx context.Context, ops []counter.Op) []counter.Result {
	switch s.wayOf(&ops[0]) {
	case toNobody:
		return []counter.Result{{Err: s.refusal(&ops[0])}}
	case toBoth:
		return []counter.Result{s.batch(ctx, &ops[0])}
	case toExact:
		return s.cfg.Exact.Apply(ctx, ops)
	default:
		return s.cfg.Owned.Apply(ctx, ops)
	}
}

// gathered are the operations for one side, with their indexes among all.
type gathered struct {
	ops []counter.Op
	at  []int
}

func (g *gathered) add(op *counter.Op, at int) {
	g.ops = append(g.ops, *op)
	g.at = append(g.at, at)
}

// hasBatch reports whether an operation in g has the idempotency key of op, if op is a batch. Other keys belong to one
// counter each.
func (g *gathered) hasBatch(op *counter.Op) bool {
	if len(g.ops) == 0 || !op.OfBatch() {
		return false
	}

	return slices.ContainsFunc(g.ops, func(other counter.Op) bool { return other.IdempotencyKey == op.IdempotencyKey })
}

// apply carries out the operations and stores their results.
func (g *gathered) apply(ctx context.Context, to counter.Writer, results []counter.Result) {
	if len(g.ops) == 0 {
		return
	}

	for i, result := range to.Apply(ctx, g.ops) {
		results[g.at[i]] = result
	}
	*g = gathered{}
}

// batch carries out a batch of exact counters whose idempotency key an owner must know.
func (s *Store) batch(ctx context.Context, op *counter.Op) counter.Result {
	// The key may have been used for a batch of other counters, of which exactpg knows nothing.
	known, err := s.cfg.Owned.Known(ctx, op.IdempotencyKey)
	if err != nil {
		return counter.Result{Err: err}
	}
	if known {
		return op.ReplayFrom(ctx, s)
	}

	result := s.cfg.Exact.Apply(ctx, []counter.Op{*op})[0]
	if result.Err != nil {
		return result
	}

	// If this fails, the caller gets an error and repeats the batch, which exactpg then recognizes as a replay.
	if err := s.cfg.Owned.Remember(ctx, op.IdempotencyKey); err != nil {
		return counter.Result{Err: err}
	}

	return result
}

// Read implements counter.Reader. While PostgreSQL is unavailable, a read that may lag marks exact counters as not
// readable instead of failing.
func (s *Store) Read(ctx context.Context, keys []string, member string, lag time.Duration) ([]counter.Reading, error) {
	all, err := s.readPlaced(ctx, keys, member, lag)
	if err != nil {
		return nil, err
	}
	s.findMisplaced(ctx, all, member)

	return all, nil
}

// readPlaced reads counters where their rules say that they are.
func (s *Store) readPlaced(
	ctx context.Context, keys []string, member string, lag time.Duration,
) ([]counter.Reading, error) {
	owned, exact := s.part(keys)
	if len(exact) == 0 {
		return s.readOwned(ctx, keys, member, lag)
	}

	var readings []counter.Reading
	var err error
	// Read both sides at the same time, so that the slower one alone decides how long this takes.
	var both sync.WaitGroup
	if len(owned) > 0 {
		both.Go(func() { readings, err = s.readOwned(ctx, owned, member, lag) })
	}
	exacts, exactErr := s.readExact(ctx, exact, lag)
	both.Wait()
	if err := errors.Join(err, exactErr); err != nil {
		return nil, fmt.Errorf("routed: read %d counters: %w", len(keys), err)
	}

	by := make(map[string]counter.Reading, len(keys))
	for _, one := range append(readings, exacts...) {
		by[one.Key] = one
	}

	all := make([]counter.Reading, len(keys))
	for i, key := range keys {
		all[i] = by[key]
	}

	return all, nil
}

// findMisplaced looks on the other side for counters that do not exist where their rules say: a counter stays where it
// is when its rule gets another kind. While the other side is unavailable they seem not to exist, as a counter that was
// never misplaced would.
func (s *Store) findMisplaced(ctx context.Context, all []counter.Reading, member string) {
	var missing []string
	for i := range all {
		if all[i].Kind == 0 && !all[i].Away {
			missing = append(missing, all[i].Key)
		}
	}
	if len(missing) == 0 {
		return
	}

	ctx, cancel := context.WithTimeout(ctx, lookWithin)
	defer cancel()

	found := map[string]counter.Reading{}
	owned, exact := s.part(missing) // by their rules, so each is looked for in the other's place
	if len(exact) > 0 {
		readings, _ := s.cfg.Owned.Read(ctx, exact, member, 0)
		for _, one := range readings {
			found[one.Key] = one
		}
	}
	if len(owned) > 0 && s.gate() == nil {
		counters, _ := s.cfg.Exact.Read(ctx, owned)
		for _, one := range counters {
			found[one.Key] = counter.Reading{Counter: one}
		}
	}

	for i := range all {
		if one := found[all[i].Key]; one.Kind != 0 {
			all[i] = one
		}
	}
}

// readOwned reads counters of owners. While Redis is unavailable, it returns PostgreSQL's values as stale.
func (s *Store) readOwned(
	ctx context.Context, keys []string, member string, lag time.Duration,
) ([]counter.Reading, error) {
	readings, err := s.cfg.Owned.Read(ctx, keys, member, lag)
	// PostgreSQL gets changes later than Redis, so it answers only reads that may lag.
	if err == nil || s.cfg.Durable == nil || lag == 0 {
		return readings, err
	}

	older, durableErr := s.cfg.Durable.Read(ctx, keys, member, lag)
	if durableErr != nil {
		return nil, err // the error of Redis, because that is the store the caller asked
	}

	for i := range older {
		older[i].Approx = true
		older[i].Stale = true
	}

	return older, nil
}

func (s *Store) readExact(ctx context.Context, keys []string, lag time.Duration) ([]counter.Reading, error) {
	var found []counter.Counter
	err := s.gate()
	if err == nil {
		found, err = s.cfg.Exact.Read(ctx, keys)
	}
	mayLag := lag > 0
	switch {
	case err == nil:
	case mayLag:
		// Such a reader prefers counters that are marked as unreadable to an error.
		return counter.Away(keys), nil
	default:
		return nil, err
	}

	readings := make([]counter.Reading, len(found))
	for i := range found {
		readings[i].Counter = found[i]
	}

	return readings, nil
}

// Ledger implements counter.Reader.
func (s *Store) Ledger(ctx context.Context, key string, after uint64, limit int) (counter.Ledger, error) {
	if s.isExact(key) {
		if err := s.gate(); err != nil {
			return counter.Ledger{}, err
		}

		return s.cfg.Exact.Ledger(ctx, key, after, limit)
	}

	return s.cfg.Owned.Ledger(ctx, key, after, limit)
}

// Reservations implements counter.Reserver.
func (s *Store) Reservations(ctx context.Context, key, after string, limit int) (counter.Reservations, error) {
	if err := s.gate(); err != nil {
		return counter.Reservations{}, err
	}

	return s.cfg.Exact.Reservations(ctx, key, after, limit)
}

// Due implements counter.Reserver. Only exact counters have reservations.
func (s *Store) Due(ctx context.Context) ([]counter.Due, error) {
	if err := s.gate(); err != nil {
		return nil, err
	}

	return s.cfg.Exact.Due(ctx)
}

// History implements counter.Reader.
func (s *Store) History(
	ctx context.Context, key string, step time.Duration, from, to int64,
) (counter.Counter, []counter.Gain, error) {
	if s.isExact(key) {
		// An exact counter has no history, but the answer has the counter, too.
		one, err := s.readOne(ctx, key)
		return one, nil, err
	}

	return s.cfg.Owned.History(ctx, key, step, from, to)
}

// Dimension implements counter.Reader.
func (s *Store) Dimension(ctx context.Context, key, name string) (counter.Counter, counter.Counted, error) {
	if s.isExact(key) {
		one, err := s.readOne(ctx, key)
		return one, counter.Counted{}, err
	}

	return s.cfg.Owned.Dimension(ctx, key, name)
}

// readOne reads an exact counter for a question about its history or dimensions, which it does not have.
func (s *Store) readOne(ctx context.Context, key string) (counter.Counter, error) {
	if err := s.gate(); err != nil {
		return counter.Counter{}, err
	}

	found, err := s.cfg.Exact.Read(ctx, []string{key})
	if err != nil {
		return counter.Counter{}, err
	}

	return found[0], nil
}

// Aggregate implements counter.Reader. It needs PostgreSQL only if the prefix may match exact counters.
func (s *Store) Aggregate(ctx context.Context, prefix string) (counter.Aggregate, error) {
	var total counter.Total
	err := s.cfg.Owned.AddTo(ctx, &total, prefix)
	if err == nil && s.cfg.Rules.AnyExact(prefix) {
		_, err = s.cfg.Exact.AddTo(ctx, &total, prefix)
	}
	if err != nil {
		return counter.Aggregate{}, err
	}

	return total.Aggregate(prefix)
}

// Size implements counter.Reader.
func (s *Store) Size(ctx context.Context, prefix string) (int64, error) {
	n, err := s.cfg.Owned.Size(ctx, prefix)
	if err != nil || !s.cfg.Rules.AnyExact(prefix) {
		return n, err
	}

	var total counter.Total
	exact, err := s.cfg.Exact.AddTo(ctx, &total, prefix)

	return n + exact, err
}

// Deleted implements counter.Dumper.
func (s *Store) Deleted(ctx context.Context) (uint64, error) {
	return both{s.cfg.Owned, s.cfg.Exact}.Deleted(ctx)
}

// Dump implements counter.Dumper.
func (s *Store) Dump(ctx context.Context, after string, each func(counter.Copy) error) error {
	return both{s.cfg.Owned, s.cfg.Exact}.Dump(ctx, after, each)
}

// Restore implements counter.Restorer. Each side restores all or none of its counters.
func (s *Store) Restore(ctx context.Context, all []counter.Copy, rules *counter.Rules) (restored int, err error) {
	// A counter keeps its kind, whatever its rule says. The tables of exact counters have no place for members.
	var owned, exact []counter.Copy
	for _, c := range all {
		if c.Kind.IsExact() {
			exact = append(exact, c)
		} else {
			owned = append(owned, c)
		}
	}

	if len(exact) > 0 {
		restored, err = s.cfg.Exact.Restore(ctx, exact, rules)
	}
	if err != nil || len(owned) == 0 {
		return restored, err
	}

	n, err := s.cfg.Owned.Restore(ctx, owned, rules)

	return restored + n, err
}

// RestoreDeleted implements counter.Restorer.
func (s *Store) RestoreDeleted(ctx context.Context, deleted uint64) error {
	if err := s.cfg.Owned.RestoreDeleted(ctx, deleted); err != nil {
		return err
	}

	return s.cfg.Exact.RestoreDeleted(ctx, deleted)
}

// ServeSQL lets applications change exact counters in SQL, see exactpg.Store.ServeSQL.
func (s *Store) ServeSQL(ctx context.Context, rules *counter.Rules, changed func([]counter.Counter)) {
	s.cfg.Exact.ServeSQL(ctx, rules, changed)
}

// Watch implements counter.Feed.
func (s *Store) Watch(changed func([]counter.Update), lost func()) counter.Watch {
	var mu sync.Mutex // both sides call changed
	one := func(updates []counter.Update) {
		mu.Lock()
		defer mu.Unlock()

		changed(updates)
	}
	missed := func() {
		if lost == nil {
			return
		}

		mu.Lock()
		defer mu.Unlock()

		lost()
	}

	return &watch{owned: s.cfg.Owned.Watch(one, missed), exact: s.cfg.Exact.Watch(one, missed), part: s.part}
}

// watch combines a watch of each side.
type watch struct {
	owned, exact counter.Watch
	part         func(keys []string) (owned, exact []string)
}

// Follow implements counter.Watch.
func (w *watch) Follow(ctx context.Context, keys ...string) error {
	owned, exact := w.part(keys)
	if err := w.owned.Follow(ctx, owned...); err != nil {
		return err
	}

	return w.exact.Follow(ctx, exact...)
}

// Unfollow implements counter.Watch.
func (w *watch) Unfollow(keys ...string) {
	owned, exact := w.part(keys)
	w.owned.Unfollow(owned...)
	w.exact.Unfollow(exact...)
}

// Close implements counter.Watch.
func (w *watch) Close() {
	w.owned.Close()
	w.exact.Close()
}
