package call

import (
	"context"
	"fmt"
	"strconv"
	"sync"
	"time"

	"headcount/counter"
	"headcount/counter/limit"
	"headcount/counter/owner"
	"headcount/internal/rows"
	"headcount/internal/wake"
)

// Store is a counter.Store whose counters have owners. It sends changes to them, and reads rows itself. All methods may
// be called from any goroutine.
type Store struct {
	*owner.Reader
	rows   rows.Store
	rules  *counter.Rules
	caller *Caller
	hub    counter.Hub

	stop  context.CancelFunc
	wg    sync.WaitGroup // the watch
	ended context.Context
}

var _ counter.Store = (*Store)(nil)

// startTimeout is how long a start waits for the feed.
const startTimeout = time.Second

// NewStore returns a Store that finds owners with owners. Rules say where a counter is. Close ends the store.
func NewStore(store rows.Store, owners Owners, rules *counter.Rules, cfg Config) *Store {
	s := &Store{rules: rules, caller: New(owners, cfg)}
	s.ended, s.stop = context.WithCancel(context.Background())
	s.rows = until{store, s.ended}
	s.Reader = owner.NewReader(s.rows, s.place)
	begun := make(chan struct{}, 1)
	s.wg.Go(func() { s.watch(begun) })

	// A store that is away must not hold up the start; then watchers miss the beginning, and are told.
	select {
	case <-begun:
	case <-time.After(startTimeout):
	}

	return s
}

// Close implements counter.Store.
func (s *Store) Close() error {
	s.stop()
	s.wg.Wait()

	return nil
}

// until is a store of rows that cannot be read any more when a context has ended.
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
		found[i].Err = fmt.Errorf("%w: it is closed", rows.ErrUnavailable)
	}

	return found
}

// Scan implements rows.Store.
func (u until) Scan(ctx context.Context, partition int, collection, after string, each func(string, []byte) error) error {
	if u.ctx.Err() != nil {
		return fmt.Errorf("%w: it is closed", rows.ErrUnavailable)
	}

	return u.Store.Scan(ctx, partition, collection, after, each)
}

// watch passes publications to the hub. It signals begun with the first.
func (s *Store) watch(begun chan<- struct{}) {
	heard := func(_ int, _ uint64, publication []byte) {
		// What is malformed may name any counter.
		if owner.Publication(publication, s.publish) != nil {
			s.hub.MarkMissed()
		}
	}
	missed := func() {
		s.hub.MarkMissed()
		wake.Signal(begun)
	}
	_ = s.rows.Watch(s.ended, heard, missed)
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
	if s.ended.Err() != nil {
		return owner.Answer{}, fmt.Errorf("call: %w: it is closed", counter.ErrUnavailable)
	}

	return s.caller.Do(ctx, call)
}

// exactPartition has all exact counters, so that a batch of them is one commit.
const exactPartition = 0

// place returns the partition of a counter.
func (s *Store) place(key string) int {
	if rule := s.rules.Find(key); rule != nil && rule.Kind == counter.Exact {
		return exactPartition
	}

	return rows.PartitionOf(key)
}

// Apply implements counter.Writer. What several partitions have of a batch that is not exact is made separately.
func (s *Store) Apply(ctx context.Context, ops []counter.Op) []counter.Result {
	results := make([]counter.Result, len(ops))
	calls := map[int]*part{}
	for i := range ops {
		if err := ops[i].Check(); err != nil {
			results[i].Err = err
			continue
		}
		results[i] = counter.Result{Counters: make([]counter.Counter, len(ops[i].Changes)), Replay: true}
		for partition, changes := range s.split(&ops[i]) {
			one := calls[partition]
			if one == nil {
				one = &part{call: owner.Call{Partition: partition}}
				calls[partition] = one
			}
			one.add(i, &ops[i], changes)
		}
	}

	var made sync.WaitGroup
	for _, one := range calls {
		made.Go(func() { one.answer, one.err = s.do(ctx, one.call) })
	}
	made.Wait()

	for _, one := range calls {
		one.join(results)
	}

	return results
}

// split returns which changes of op belong to which partition, by index.
func (s *Store) split(op *counter.Op) map[int][]int {
	by := map[int][]int{}
	for i := range op.Changes {
		partition := s.place(op.Changes[i].Key)
		by[partition] = append(by[partition], i)
	}

	return by
}

// part is what one partition has of some operations.
type part struct {
	call    owner.Call
	ops     []int   // of each of the call's operations, the index of the whole one
	changes [][]int // the indexes of its changes there

	answer owner.Answer
	err    error
}

func (p *part) add(i int, op *counter.Op, changes []int) {
	own := *op
	if len(changes) < len(op.Changes) {
		own.Changes = make([]counter.Change, len(changes))
		for at, c := range changes {
			own.Changes[at] = op.Changes[c]
		}
	}

	p.call.Ops = append(p.call.Ops, own)
	p.ops = append(p.ops, i)
	p.changes = append(p.changes, changes)
}

// join puts the results of the part into those of the whole operations.
func (p *part) join(results []counter.Result) {
	for at, i := range p.ops {
		whole := &results[i]
		own := counter.Result{Err: p.err}
		if p.err == nil {
			own = p.answer.Results[at]
		}

		whole.Replay = whole.Replay && own.Replay
		if own.Err != nil {
			*whole = counter.Result{Err: own.Err}
		}
		if whole.Err != nil {
			continue
		}
		for c, change := range p.changes[at] {
			whole.Counters[change] = own.Counters[c]
		}
	}
}

// Limit implements counter.Limiter.
func (s *Store) Limit(ctx context.Context, calls []limit.Call) []counter.LimitResult {
	by := map[int][]int{}
	for i := range calls {
		partition := rows.PartitionOf(calls[i].Key)
		by[partition] = append(by[partition], i)
	}

	results := make([]counter.LimitResult, len(calls))
	for partition, indexes := range by {
		call := owner.Call{Partition: partition}
		for _, i := range indexes {
			call.Limits = append(call.Limits, calls[i])
		}

		answer, err := s.do(ctx, call)
		for at, i := range indexes {
			if err != nil {
				results[i].Err = err
			} else {
				results[i].Answer = answer.Limits[at]
			}
		}
	}

	return results
}

// The candidates and the lists of a rule are in the partition of its match.

func marksOf(match string) string { return "marks:" + match }

// fieldOf returns a field that sorts as its number.
func fieldOf(number int64) string { return fmt.Sprintf("%016x", number) }

// Mark implements counter.TopStore.
func (s *Store) Mark(ctx context.Context, match string, number int64, keys []string) error {
	call := owner.Call{Partition: rows.PartitionOf(match)}
	for _, key := range keys {
		name := rows.Name{Collection: marksOf(match), Field: fieldOf(number) + key}
		call.Rows = append(call.Rows, rows.Row{Name: name, Value: []byte{1}})
	}
	_, err := s.do(ctx, call)

	return err
}

// Marked implements counter.TopStore.
func (s *Store) Marked(ctx context.Context, match string) (map[int64][]string, error) {
	marked := map[int64][]string{}
	each := func(field string, _ []byte) error {
		number, err := strconv.ParseInt(field[:16], 16, 64)
		if err != nil {
			return fmt.Errorf("mark %q: %w", field, owner.ErrMalformed)
		}
		marked[number] = append(marked[number], field[16:])
		return nil
	}
	if err := s.rows.Scan(ctx, rows.PartitionOf(match), marksOf(match), "", each); err != nil {
		return nil, fmt.Errorf("call: marks: %w: %w", counter.ErrUnavailable, err)
	}

	return marked, nil
}

func listsOf(match string, step time.Duration) string { return "top:" + step.String() + ":" + match }

// KeepTop implements counter.TopStore.
func (s *Store) KeepTop(ctx context.Context, match string, step time.Duration, list counter.TopList, kept time.Duration, marks []string) error {
	name := rows.Name{Collection: listsOf(match, step), Field: fieldOf(list.Number)}
	call := owner.Call{Partition: rows.PartitionOf(match)}
	call.Rows = append(call.Rows,
		rows.Row{Name: name, Value: owner.EncodeGained(list.Most)},
		owner.Expiry(name, counter.ForgetAt(list.Number, step, kept)))
	for _, key := range marks {
		call.Rows = append(call.Rows, rows.Row{Name: rows.Name{Collection: marksOf(match), Field: fieldOf(list.Number) + key}})
	}
	_, err := s.do(ctx, call)

	return err
}

// TopLists implements counter.TopStore.
func (s *Store) TopLists(ctx context.Context, match string, step time.Duration, from, to int64) ([]counter.TopList, error) {
	var lists []counter.TopList
	each := func(field string, value []byte) error {
		number, err := strconv.ParseInt(field, 16, 64)
		if err != nil {
			return fmt.Errorf("list %q: %w", field, owner.ErrMalformed)
		}
		if number >= to {
			return errEnough
		}
		most, err := owner.DecodeGained(value)
		lists = append(lists, counter.TopList{Number: number, Most: most})
		return err
	}

	after := ""
	if from > 0 {
		after = fieldOf(from - 1)
	}
	err := s.rows.Scan(ctx, rows.PartitionOf(match), listsOf(match, step), after, each)
	if err != nil && err != errEnough {
		return nil, fmt.Errorf("call: lists: %w: %w", counter.ErrUnavailable, err)
	}

	return lists, nil
}

var errEnough = fmt.Errorf("enough")

// Histories implements counter.TopStore.
func (s *Store) Histories(ctx context.Context, keys []string, step time.Duration, from, to int64) ([][]counter.Gain, error) {
	return counter.HistoriesOf(ctx, s.Reader, keys, step, from, to)
}

// Everywhere says that one owner in this process owns all partitions.
func Everywhere(o *owner.Owner) Owners { return everywhere{o} }

type everywhere struct{ o *owner.Owner }

func (e everywhere) OwnerOf(int) Owner { return e.o }
