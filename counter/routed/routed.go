// Package routed is a store of counters whose exact ones are in PostgreSQL, judged in transactions, and all others with
// owners over rows. The rule of a key says where its counter is.
//
// # Kinds that change
//
// A counter keeps its kind when its rule gets another one, so it may be where its rule does not look. Each side looks
// once at the other one before it makes a counter: an owner reads heads in partition owner.Outside ([Rows]), and
// exactpg asks [Elsewhere].
//
// # Batches
//
// Either all counters of a batch are exact or none is, and all batches share one space of idempotency keys. Where
// rows are in PostgreSQL alone, both sides keep these in one table. Redis in front of it does not know that table, so
// there a batch of exact counters asks the owner of its idempotency key before, and notes it afterwards
// ([Config.Notes]).
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

// Config says of what a Store consists.
type Config struct {
	Owned *call.Store    // the counters that owners have; its owners have owner.Config.ExactOutside
	Exact *exactpg.Store // the exact ones
	Rules *counter.Rules
	// Notes says that the two do not share the memory of idempotency keys.
	Notes bool
	// Back reads what PostgreSQL has of the counters of owners, for reads that may lag while Redis is away; nil: nobody
	// does.
	Back *owner.Reader
	// Gate says why exact counters cannot be used yet, or nil; nil: they always can.
	Gate func() error
}

// Store is a counter.Store. All methods may be called from any goroutine. Close closes neither part.
type Store struct {
	*call.Store // whatever is not below: histories, dimensions, limits, top lists
	cfg         Config
}

var (
	_ counter.Store    = (*Store)(nil)
	_ counter.Dumper   = (*Store)(nil)
	_ counter.Restorer = (*Store)(nil)
)

// New returns a Store over both.
func New(cfg Config) *Store { return &Store{Store: cfg.Owned, cfg: cfg} }

// isExact reports whether the rule of key says that its counter is exact.
func (s *Store) isExact(key string) bool {
	rule := s.cfg.Rules.Find(key)

	return rule != nil && rule.Kind.IsExact()
}

// part divides keys by the side that has their counters.
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

// Apply implements counter.Writer. Neither side waits for the other.
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
		both.Go(func() { owned.apply(ctx, s.cfg.Owned, results) })
		exact.apply(ctx, s.cfg.Exact, results)
		both.Wait()
	}

	for i := range ops {
		op := &ops[i]
		way := s.wayOf(op)

		// Of two operations with the same idempotency key the later one is a replay.
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
		case toBoth: // it keeps its order among the others
			flush()
			results[i] = s.batch(ctx, op)
		}
	}
	flush()

	return results
}

// way is who makes an operation.
type way int

const (
	toNobody way = iota // it is not valid, or cannot be made yet
	toOwners
	toExact
	toBoth // a batch of exact counters, whose idempotency key an owner has to know
)

func (s *Store) wayOf(op *counter.Op) way {
	if s.refusal(op) != nil {
		return toNobody
	}

	isExact := op.Changes[0].Rule.Kind.IsExact()
	isNoted := s.cfg.Notes && op.OfBatch()
	switch {
	case !isExact:
		return toOwners
	case isNoted:
		return toBoth
	default:
		return toExact
	}
}

// refusal returns why nobody makes an operation, or nil.
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

// allExact reports whether exactpg makes all operations, as it does when a Combiner separates them.
func (s *Store) allExact(ops []counter.Op) bool {
	for i := range ops {
		if s.wayOf(&ops[i]) != toExact {
			return false
		}
	}

	return true
}

// applyOne makes a lone operation without a detour.
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

// gathered are operations for one side, and where they are among all.
type gathered struct {
	ops []counter.Op
	at  []int
}

func (g *gathered) add(op *counter.Op, at int) {
	g.ops = append(g.ops, *op)
	g.at = append(g.at, at)
}

// hasBatch reports whether an operation has the idempotency key of op, if that is one of batches. Any other key belongs
// to one counter.
func (g *gathered) hasBatch(op *counter.Op) bool {
	if len(g.ops) == 0 || !op.OfBatch() {
		return false
	}

	return slices.ContainsFunc(g.ops, func(other counter.Op) bool { return other.IdempotencyKey == op.IdempotencyKey })
}

// apply makes the operations and notes their results.
func (g *gathered) apply(ctx context.Context, to counter.Writer, results []counter.Result) {
	if len(g.ops) == 0 {
		return
	}

	for i, result := range to.Apply(ctx, g.ops) {
		results[g.at[i]] = result
	}
	*g = gathered{}
}

// batch makes a batch of exact counters whose idempotency key an owner has to know.
func (s *Store) batch(ctx context.Context, op *counter.Op) counter.Result {
	known, err := s.cfg.Owned.Known(ctx, op.IdempotencyKey)
	if err != nil {
		return counter.Result{Err: err}
	}
	if known {
		return s.replay(ctx, op)
	}

	result := s.cfg.Exact.Apply(ctx, []counter.Op{*op})[0]
	if result.Err != nil {
		return result
	}

	// Without an answer here the caller repeats, and is a replay then.
	if err := s.cfg.Owned.Remember(ctx, op.IdempotencyKey); err != nil {
		return counter.Result{Err: err}
	}

	return result
}

// replay returns the result of a replay: the present counters.
func (s *Store) replay(ctx context.Context, op *counter.Op) counter.Result {
	by, err := op.ReadFrom(ctx, s)
	if err != nil {
		return counter.Result{Err: err}
	}

	return counter.Result{Replay: true, Counters: op.Counters(by)}
}

// Read implements counter.Reader. It reads counters where they are. While PostgreSQL is away, a read that may lag
// says of exact counters that they cannot be read.
func (s *Store) Read(ctx context.Context, keys []string, member string, lag time.Duration) ([]counter.Reading, error) {
	owned, exact := s.part(keys)
	if len(exact) == 0 {
		return s.readOwned(ctx, keys, member, lag)
	}

	var readings []counter.Reading
	var err error
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

// readOwned reads counters of owners. While Redis is away, what PostgreSQL has of them is stale.
func (s *Store) readOwned(
	ctx context.Context, keys []string, member string, lag time.Duration,
) ([]counter.Reading, error) {
	readings, err := s.cfg.Owned.Read(ctx, keys, member, lag)
	if err == nil || s.cfg.Back == nil || lag == 0 {
		return readings, err
	}

	older, backErr := s.cfg.Back.Read(ctx, keys, member, lag)
	if backErr != nil {
		return nil, err // of Redis, which is what a caller has to know
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

// readOne reads an exact counter, which has neither a history nor dimensions.
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

// Aggregate implements counter.Reader. It needs PostgreSQL only where a counter may be exact.
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

// Restore implements counter.Restorer, all or none of each side: a counter goes where its rule says.
func (s *Store) Restore(ctx context.Context, all []counter.Copy, rules *counter.Rules) (restored int, err error) {
	// A rule may have changed since the export, and says where the counter is from now on.
	var owned, exact []counter.Copy
	for _, c := range all {
		if s.isExact(c.Key) {
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

// ServeSQL has applications change exact counters in SQL, see exactpg.Store.ServeSQL.
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

// watch is a watch of both sides.
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
