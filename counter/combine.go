package counter

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"sync"
	"time"
)

// CombinerConfig tunes a Combiner. A zero field takes its default.
type CombinerConfig struct {
	// Queues is the number of queues, each of which has one write under way; default 1. All operations of a key go to
	// the same queue. A file needs 1 queue, so that one fsync serves all waiting operations.
	Queues int
	// QueueOf returns the queue of an operation, or false: then the operation is made by itself, and no other waits for
	// it. Default: a queue by the key of the first change.
	QueueOf func(op *Op) (queue int, ok bool)
	// SeparateExact doubles the queues and gives half of them to exact counters. It is for stores that keep exact
	// counters in another server: when that one is slow, the other operations need not wait for it.
	SeparateExact bool
	// QueueSize is the maximum number of changes that wait in one queue, default 65,536. Beyond it a call fails at
	// once with ErrBusy.
	QueueSize int
	// Batch is the maximum number of changes in one write, default 4,096. An Op is never split, so a larger one is
	// written alone.
	Batch int
	// WriteTimeout is the longest time that a write may take, default 10s.
	WriteTimeout time.Duration
	// LimitTimeout is the longest time that a call on a limit may take, with its wait in the queue; default: no limit
	// but WriteTimeout for the write.
	LimitTimeout time.Duration
	// Pace is the shortest time between the starts of two writes of a busy queue, one that gets over busyRate
	// operations a second. It ends early when no operation arrives for a millisecond. Default 0: no pause.
	Pace time.Duration
	// Instant is for a store in memory, which waits for nothing: each operation is made by its caller, and nothing is
	// combined.
	Instant bool
	// Batches observes how many calls each write combines. It may be nil.
	Batches Batches
}

// Batches observes the sizes of batches. A prometheus.Observer implements it.
type Batches interface{ Observe(size float64) }

func (cfg CombinerConfig) withDefaults() CombinerConfig {
	cfg.Queues = cmp.Or(cfg.Queues, 1)
	cfg.QueueSize = cmp.Or(cfg.QueueSize, 1<<16)
	cfg.Batch = cmp.Or(cfg.Batch, 4096)
	cfg.WriteTimeout = cmp.Or(cfg.WriteTimeout, 10*time.Second)
	return cfg
}

// Combiner combines operations for a Writer. While a write of a queue is under way, further operations of its keys wait
// and then go together in the next write; a lone operation is written at once. Its methods may be called from any
// goroutine.
type Combiner struct {
	cfg    CombinerConfig
	to     Writer
	queues *batchQueues[Op, Result]

	mu     sync.Mutex // guards the fields below; wg until closed is set
	closed bool
	alone  int            // changes of the operations that are made by themselves
	wg     sync.WaitGroup // these operations
}

// NewCombiner returns a Combiner that writes to to.
func NewCombiner(to Writer, cfg CombinerConfig) *Combiner {
	cfg = cfg.withDefaults()
	n := cfg.Queues
	if cfg.SeparateExact {
		n *= 2
	}
	writer := func() batchWriter[Op, Result] { return &combining{to: to, batches: cfg.Batches} }

	return &Combiner{cfg: cfg, to: to, queues: newQueues(n, cfg, writer)}
}

// Do makes op and returns when the store has kept or refused it. When ctx ends first, the error is ErrUnavailable and
// op may still be made. The caller must not modify op's changes after the call, nor the counters of the result, which
// several callers may share.
func (c *Combiner) Do(ctx context.Context, op Op) Result {
	if err := op.Check(); err != nil {
		return Result{Err: err}
	}

	if c.cfg.Instant {
		return c.doInstantly(op)
	}

	queue, ok := c.queueOf(&op)
	if !ok {
		return c.doAlone(ctx, op)
	}

	result, err := c.queues.do(ctx, queue, op, len(op.Changes))
	if err != nil {
		return Result{Err: err}
	}

	return result
}

// doInstantly makes an operation. What has begun is made, also if the caller leaves.
func (c *Combiner) doInstantly(op Op) Result {
	if c.cfg.Batches != nil {
		c.cfg.Batches.Observe(1)
	}

	return c.to.Apply(context.Background(), []Op{op})[0]
}

// queueOf returns the queue of an operation, if it has one.
func (c *Combiner) queueOf(op *Op) (queue int, ok bool) {
	if c.cfg.QueueOf != nil {
		return c.cfg.QueueOf(op)
	}

	queue = queueOf(op.Changes[0].Key, c.cfg.Queues)
	if c.cfg.SeparateExact && op.Changes[0].Rule.Kind.IsExact() {
		// The second half of the queues is theirs, since an application may lock them in PostgreSQL.
		queue += c.cfg.Queues
	}

	return queue, true
}

// doAlone makes an operation that is in no queue. Like one in a queue, it is made whether its caller waits or not.
func (c *Combiner) doAlone(ctx context.Context, op Op) Result {
	if err := c.beginAlone(len(op.Changes)); err != nil {
		return Result{Err: err}
	}

	// The channel has room for the result, so that the goroutine ends even if the caller has left.
	made := make(chan Result, 1)
	go func() { // Close waits for it
		defer c.endAlone(len(op.Changes))
		within, cancel := context.WithTimeout(context.WithoutCancel(ctx), c.cfg.WriteTimeout)
		defer cancel()
		made <- c.to.Apply(within, []Op{op})[0]
	}()

	select {
	case result := <-made:
		return result
	case <-ctx.Done():
		return Result{Err: errLeft(ctx)}
	}
}

// beginAlone accepts an operation of some changes, as a queue does.
func (c *Combiner) beginAlone(changes int) error {
	c.mu.Lock()
	defer c.mu.Unlock()

	if c.closed {
		return fmt.Errorf("combining: %w: the process ends", ErrUnavailable)
	}
	// An operation that comes while no other is being made is accepted, however large.
	if c.alone > 0 && c.alone+changes > c.cfg.QueueSize {
		return ErrBusy
	}
	c.alone += changes
	c.wg.Add(1)

	return nil
}

func (c *Combiner) endAlone(changes int) {
	c.mu.Lock()
	defer c.mu.Unlock()

	c.alone -= changes
	c.wg.Done()
}

// Close waits until every accepted operation is answered. Later calls fail with ErrUnavailable.
func (c *Combiner) Close() {
	c.mu.Lock()
	c.closed = true
	c.mu.Unlock()

	// From here on no operation begins by itself, so wg can only fall.
	c.wg.Wait()
	c.queues.close()
}

// combining makes the writes of one queue. It reuses its slices and map for the next write.
type combining struct {
	to      Writer
	batches Batches

	ops  []Op
	at   []int            // for each item, the index of its operation in ops
	open map[mergeKey]int // operations in ops that further changes may be merged into, by index
	own  []Change         // changes of merged operations: copies, because those of callers must stay as they are
}

// mergeKey names changes that may be merged: additions to one sum in one direction.
type mergeKey struct {
	key string
	up  bool
}

// mergeable reports whether op may be merged with others. An idempotency key or a dimension would be lost in a merged
// change.
func (op *Op) mergeable() bool {
	c := &op.Changes[0]
	isPlain := op.IdempotencyKey == IdempotencyKey{} && len(c.Dimensions) == 0

	return isPlain && len(op.Changes) == 1 && c.Verb == Add && c.Rule.Kind.Gains()
}

// write makes the operations of items and answers them. When a merged operation is refused, its parts are made again
// one by one: the sum of them may overflow, or the counter may turn out not to be a sum, where a single part would
// pass.
func (w *combining) write(ctx context.Context, items []*item[Op, Result]) {
	if w.batches != nil {
		w.batches.Observe(float64(len(items)))
	}

	w.gather(items)
	results := w.to.Apply(ctx, w.ops)
	// In place, because each item has been read when its place is overwritten.
	again := items[:0]
	for i, one := range items {
		at := w.at[i]
		// An outage is no refusal: the merged change may have been made, so its parts must not be made again.
		isRefused := results[at].Err != nil && errors.As(results[at].Err, new(*Conflict))
		if isRefused && w.ops[at].Changes[0].Merged > 1 {
			again = append(again, one)
			continue
		}
		one.answer(results[at])
	}
	// Reused slices must keep no request alive.
	clear(w.ops)
	w.writeEach(ctx, again)

	clear(w.ops)
	clear(w.own)
	// The memory of a burst is given back.
	if cap(w.ops) > 1024 {
		*w = combining{to: w.to, batches: w.batches}
	}
}

// writeEach makes the operations of items without merging them, and answers the items.
func (w *combining) writeEach(ctx context.Context, items []*item[Op, Result]) {
	if len(items) == 0 {
		return
	}

	w.ops = w.ops[:0]
	for _, one := range items {
		w.ops = append(w.ops, one.op)
	}
	for i, r := range w.to.Apply(ctx, w.ops) {
		items[i].answer(r)
	}
}

// gather fills ops from items, and merges additions to one sum. Only additions in the same direction are merged: then
// the merged change passes only if each of its parts would have passed by itself, and it never becomes a change by 0,
// which would leave the version as it is.
func (w *combining) gather(items []*item[Op, Result]) {
	w.ops = w.ops[:0]
	w.at = w.at[:0]
	w.own = w.own[:0]
	// A lone operation, which most are, needs no map.
	if len(items) == 1 {
		w.add(items[0])
		return
	}

	if w.open == nil {
		w.open = map[mergeKey]int{}
	}
	clear(w.open)
	// The operations point into own, so append must never move it.
	if cap(w.own) < len(items) {
		w.own = make([]Change, 0, 2*len(items))
	}

	for _, one := range items {
		if !one.op.mergeable() {
			// Additions after this operation must not be merged into one before it, or they would overtake it.
			w.endMerging(&one.op)
			w.add(one)
			continue
		}

		c := &one.op.Changes[0]
		key := mergeKey{c.Key, c.Delta > 0}
		at, isOpen := w.open[key]
		if isOpen && w.merge(at, c) {
			w.at = append(w.at, at)
			continue
		}

		// There was nothing to merge it into, or the sum of both did not fit. Later ones are merged into this one.
		w.open[key] = len(w.ops)
		w.add(one)
	}
}

// add adds the operation of an item by itself.
func (w *combining) add(one *item[Op, Result]) {
	w.at = append(w.at, len(w.ops))
	w.ops = append(w.ops, one.op)
}

// endMerging has no later addition to the counters of an operation merged into one before it.
func (w *combining) endMerging(op *Op) {
	for i := range op.Changes {
		delete(w.open, mergeKey{op.Changes[i].Key, true})
		delete(w.open, mergeKey{op.Changes[i].Key, false})
	}
}

// merge adds c to the operation at index at. It returns false when the sum of the deltas overflows 64 bits.
func (w *combining) merge(at int, c *Change) bool {
	op := &w.ops[at]
	delta, over := plus(op.Changes[0].Delta, c.Delta)
	if over {
		return false
	}

	// The changes of callers must stay as they are.
	if op.Changes[0].Merged == 0 {
		w.own = append(w.own, op.Changes[0])
		op.Changes = w.own[len(w.own)-1:]
		op.Changes[0].Merged = 1
	}
	op.Changes[0].Delta = delta
	op.Changes[0].Merged++

	return true
}
