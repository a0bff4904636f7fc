package call

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"headcount/counter"
	"headcount/counter/limit"
	"headcount/counter/owner"
	"headcount/internal/rows"
	"headcount/internal/wake"
)

// Store is a counter.Store whose counters have owners. It sends changes to the owners, and reads rows itself. All
// methods may be called from any goroutine.
type Store struct {
	*owner.Reader
	rows  rows.Store
	rules *counter.Rules
	to    maker
	local *owner.Owner // nil unless this process owns everything
	away  func() error // why changes cannot be made now, or nil; a nil function: they always can
	hub   *counter.Hub
	dues  *owner.Dues

	stop   context.CancelFunc
	wg     sync.WaitGroup // waits for the watch
	ended  context.Context
	closed sync.Once
}

// maker makes calls: a Caller, which finds the owners, or a local owner of all partitions.
type maker interface {
	Do(ctx context.Context, call owner.Call) (owner.Answer, error)
	DoAll(ctx context.Context, calls []owner.Call) []owner.Outcome
}

var _ counter.Store = (*Store)(nil)

// startTimeout limits how long NewStore waits for the feed.
const startTimeout = time.Second

// NewStore returns a Store that sends changes to the owners that a directory names. Rules say which partition a counter
// is in. The store must be closed.
func NewStore(store rows.Store, owners Owners, rules *counter.Rules, cfg Config) *Store {
	s := newStore(store, New(owners, cfg), rules)
	begun := make(chan struct{}, 1)
	s.wg.Go(func() { s.watch(begun) })

	// An unavailable store must not delay the start. Watchers then miss the first changes, but are notified of that.
	select {
	case <-begun:
	case <-time.After(startTimeout):
	}

	return s
}

// NewLocal returns a Store whose counters are all owned by this process, which is the only user of the store of rows.
// Changes and their publication are then plain function calls.
func NewLocal(ctx context.Context, store rows.Store, rules *counter.Rules, cfg owner.Config) (*Store, error) {
	s := NewSole(store, rules, cfg, nil)
	// No other process uses the store, so the claims are never lost.
	if err := s.Own(ctx); err != nil {
		_ = s.Close()
		return nil, err
	}

	return s, nil
}

// awayAfter is how long a call waits while nobody knows yet that the server does not answer.
const awayAfter = 5 * time.Second

// NewSole is NewLocal for a store on a server, which may be unavailable. Changes fail until Own has claimed everything,
// and while away returns why the server is unavailable.
func NewSole(store rows.Store, rules *counter.Rules, cfg owner.Config, away func() error) *Store {
	// Publish changes directly to watchers in this process, not through the store.
	cfg.Hub = &counter.Hub{}
	o := owner.New(store, cfg)

	s := newStore(o.Rows(), o, rules)
	s.local = o
	s.away = away
	s.hub = cfg.Hub

	return s
}

// Own claims all partitions for a store of NewSole, from whichever process owns them.
func (s *Store) Own(ctx context.Context) error {
	if err := s.local.Own(ctx, everyPartition()...); err != nil {
		return fmt.Errorf("call: %w", err)
	}

	return nil
}

// Disown gives up all partitions, because another process has claimed them.
func (s *Store) Disown(ctx context.Context) error { return s.local.Release(ctx, everyPartition()...) }

// Owns reports whether this process owns all partitions, as far as it knows.
func (s *Store) Owns() bool {
	for id := range rows.Partitions {
		if !s.local.Owns(id) {
			return false
		}
	}

	return true
}

func everyPartition() []int {
	all := make([]int, rows.Partitions)
	for id := range all {
		all[id] = id
	}

	return all
}

func newStore(store rows.Store, to maker, rules *counter.Rules) *Store {
	s := &Store{rules: rules, to: to, hub: &counter.Hub{}}
	s.ended, s.stop = context.WithCancel(context.Background())
	s.rows = until{store, s.ended}
	s.Reader = owner.NewReader(s.rows, s.place)
	s.dues = owner.NewDues(s.rows)

	return s
}

// Close implements counter.Store.
func (s *Store) Close() error {
	s.closed.Do(func() {
		// From here on reads and changes fail; the owner ends after the current turn.
		s.stop()
		s.wg.Wait()
		if s.local != nil {
			s.local.Close()
		}
	})

	return nil
}

// until wraps a store of rows whose reads fail once a context has ended.
type until struct {
	rows.Store
	ctx context.Context
}

// Read implements rows.Store.
func (u until) Read(ctx context.Context, addresses []rows.Address) []rows.Found {
	if u.ctx.Err() == nil {
		return u.Store.Read(ctx, addresses)
	}

	found := make([]rows.Found, len(addresses))
	for i := range found {
		found[i].Err = fmt.Errorf("%w: this process has closed it", rows.ErrUnavailable)
	}

	return found
}

// Scan implements rows.Store.
func (u until) Scan(
	ctx context.Context, partition int, collection, after string, each func(string, []byte) error,
) error {
	if u.ctx.Err() != nil {
		return fmt.Errorf("%w: this process has closed it", rows.ErrUnavailable)
	}

	return u.Store.Scan(ctx, partition, collection, after, each)
}

// watch passes publications to the hub. It signals begun when it begins to receive them.
func (s *Store) watch(begun chan<- struct{}) {
	received := func(_ int, _ uint64, publication []byte) {
		// A malformed publication may concern any counter.
		if owner.Publication(publication, s.publish) != nil {
			s.hub.MarkMissed()
		}
	}
	missed := func() {
		s.hub.MarkMissed()
		wake.Signal(begun)
	}
	_ = s.rows.Watch(s.ended, received, missed)
}

func (s *Store) publish(u counter.Update) {
	one := []counter.Notification{{Key: u.Counter.Key, Joined: u.Joined, Left: u.Left, All: u.Reread}}
	s.hub.Publish(one, func(string) counter.Counter { return u.Counter })
}

// Watch implements counter.Feed.
func (s *Store) Watch(changed func([]counter.Update), lost func()) counter.Watch {
	return s.hub.Watch(changed, lost)
}

// do makes a call, unless the store is closed.
func (s *Store) do(ctx context.Context, call owner.Call) (owner.Answer, error) {
	ctx, cancel, err := s.begin(ctx)
	if err != nil {
		return owner.Answer{}, err
	}
	defer cancel()

	answer, err := s.to.Do(ctx, call)

	return answer, unavailable(err)
}

// begin returns the context of a call, or why it cannot be made.
func (s *Store) begin(ctx context.Context) (context.Context, context.CancelFunc, error) {
	if s.ended.Err() != nil {
		return nil, nil, fmt.Errorf("call: %w: this process has closed it", counter.ErrUnavailable)
	}
	if s.away == nil {
		return ctx, func() {}, nil
	}

	// Fail now, because the owner would repeat its commit without an end.
	if err := s.away(); err != nil {
		return nil, nil, fmt.Errorf("call: %w: %w", counter.ErrUnavailable, err)
	}
	ctx, cancel := context.WithTimeout(ctx, awayAfter)

	return ctx, cancel, nil
}

// unavailable converts the error of a call to one of a counter.Store.
func unavailable(err error) error {
	if err == nil {
		return nil
	}
	if errors.Is(err, owner.ErrNotOwner) {
		// This process has lost its partitions, or is shutting down.
		return fmt.Errorf("call: %w: %w", counter.ErrUnavailable, err)
	}

	return err
}

// Due implements counter.Reserver.
func (s *Store) Due(ctx context.Context) ([]counter.Due, error) {
	all, done, err := s.dues.Next(ctx)
	if err != nil || len(done) == 0 {
		return all, err
	}

	// done are the marks of seconds without reservations. If this fails, another process finds and deletes them when
	// it starts.
	_, _ = s.do(ctx, owner.Call{Partition: owner.ExactPartition, More: &owner.More{Rows: done}})

	return all, nil
}

// ForgetLimit implements counter.Limiter. It reads the states of all limits in the partition of the key.
func (s *Store) ForgetLimit(ctx context.Context, key string) error {
	// The names of the rows contain the algorithm and the window, so they have to be looked up.
	call, err := owner.ForgetLimit(ctx, s.rows, key)
	if err != nil || len(call.More.Rows) == 0 {
		return err
	}

	_, err = s.do(ctx, call)

	return err
}

// Limit implements counter.Limiter.
func (s *Store) Limit(ctx context.Context, requests []limit.Request) []counter.LimitResult {
	var parts gathered
	for i := range requests {
		// Every process asks the same owner about a name, so two requests cannot both take the last of a limit.
		partition := rows.PartitionOf(requests[i].Key)
		to := parts.at(partition)
		if to.call.More == nil {
			to.call.More = &owner.More{}
		}
		to.call.More.Limits = append(to.call.More.Limits, requests[i])
		to.indexes = append(to.indexes, i)
	}
	s.doAll(ctx, parts.calls)

	results := make([]counter.LimitResult, len(requests))
	for i := range parts.calls {
		one := &parts.calls[i]
		for at, index := range one.indexes {
			if one.Err != nil {
				results[index].Err = one.Err
			} else {
				results[index].Answer = one.More.Limits[at]
			}
		}
	}

	return results
}
