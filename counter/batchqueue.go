package counter

import (
	"context"
	"fmt"
	"runtime"
	"sync"
	"time"

	"github.com/cespare/xxhash/v2"
)

const (
	busyRate  = 1000             // items a second from which a queue is busy
	busyItems = 4                // a write of fewer items never makes a queue busy
	stall     = time.Millisecond // a busy queue stops waiting when no item came for this long
)

// batchQueues gather the items for a store. While a write of a queue is under way, further items for its keys wait;
// they go together in the next write. An item for an idle queue is written at once. C is its content, R its result.
type batchQueues[C, R any] struct {
	cfg   CombinerConfig
	all   []batchQueue[C, R]
	wg    sync.WaitGroup // the writes under way, by goroutines and by callers
	items sync.Pool      // of *item
}

// batchWriter makes the writes of one queue, one at a time.
type batchWriter[C, R any] interface {
	// write carries out items in one write and answers each of them.
	write(ctx context.Context, items []*item[C, R])
}

// batchQueue has at most one write under way.
type batchQueue[C, R any] struct {
	of *batchQueues[C, R]
	to batchWriter[C, R]

	mu          sync.Mutex // guards the fields up to pendingSize
	busy        bool       // a write is under way, and its owner calls take when it ends
	closed      bool
	pending     []*item[C, R] // for the next write
	pendingSize int           // sum of their sizes

	// Owned by the goroutine that set busy, so without a lock.
	writing []*item[C, R]
	began   time.Time // start of the last write
}

// item is one element of a batch on its way to the store: an operation, or a request to a limit.
type item[C, R any] struct {
	op     C
	size   int // as QueueSize and Batch of CombinerConfig count it
	result R
	done   chan struct{} // has capacity 1, so that answer never blocks
}

func (it *item[C, R]) answer(result R) {
	it.result = result
	it.done <- struct{}{}
}

func newQueues[C, R any](n int, cfg CombinerConfig, writer func() batchWriter[C, R]) *batchQueues[C, R] {
	g := &batchQueues[C, R]{cfg: cfg, all: make([]batchQueue[C, R], n)}
	g.items.New = func() any { return &item[C, R]{done: make(chan struct{}, 1)} }
	for i := range g.all {
		g.all[i].of, g.all[i].to = g, writer()
	}
	return g
}

// queueOf returns which of n queues has the items for key.
func queueOf(key string, n int) int { return int(xxhash.Sum64String(key) % uint64(n)) }

// do carries out op and returns its result. The error is ErrUnavailable when the queue is full or closed, and when ctx
// ends first; in the last case op may still be carried out.
func (g *batchQueues[C, R]) do(ctx context.Context, queue int, op C, size int) (result R, err error) {
	q := &g.all[queue]
	one := g.items.Get().(*item[C, R])
	one.op = op
	one.size = size

	leads, err := q.enter(one)
	if err != nil {
		// The queue did not take it, so nobody will answer it any more.
		g.put(one)
		return result, err
	}
	if leads {
		// The queue was idle, so writing belongs to this caller.
		q.writing = append(q.writing[:0], one)
		// Not by the caller itself, who may leave while others already wait for the next write.
		go q.run() // close waits for it
	}

	select {
	case <-one.done:
	case <-ctx.Done():
		// The item must not go back to the pool: the queue still holds it and will answer it.
		return result, errLeft(ctx)
	}

	result = one.result
	g.put(one)

	return result, nil
}

// errLeft is the error for a caller that did not wait for its answer.
func errLeft(ctx context.Context) error {
	return fmt.Errorf("combining: %w: %w, and the call may yet be carried out", ErrUnavailable, context.Cause(ctx))
}

// close waits until every accepted item is answered. Later ones fail with ErrUnavailable.
func (g *batchQueues[C, R]) close() {
	for i := range g.all {
		q := &g.all[i]
		q.mu.Lock()
		// From here on no item begins a write, so that wg can only fall.
		q.closed = true
		q.mu.Unlock()
	}

	g.wg.Wait()
}

func (g *batchQueues[C, R]) put(one *item[C, R]) {
	// The channel is empty, and can be used again: its answer was received, or there never was one.
	*one = item[C, R]{done: one.done}
	g.items.Put(one)
}

// enter accepts an item. leads reports that the queue was idle: then the item is not in pending, and the caller has to
// begin its write.
func (q *batchQueue[C, R]) enter(one *item[C, R]) (leads bool, err error) {
	q.mu.Lock()
	defer q.mu.Unlock()

	switch {
	case q.closed:
		return false, fmt.Errorf("combining: %w: the process ends", ErrUnavailable)
	case !q.busy:
		// An idle queue takes any item, however large.
		q.busy = true
		q.of.wg.Add(1) // before close can wait, because close sets closed under mu first
		return true, nil
	// At the bound the caller learns at once that nothing was made.
	case q.pendingSize+one.size > q.of.cfg.QueueSize:
		return false, ErrBusy
	}

	q.pending = append(q.pending, one)
	q.pendingSize += one.size

	return false, nil
}

// write carries out the items in writing, and drops its references to them.
func (q *batchQueue[C, R]) write(ctx context.Context) {
	q.to.write(ctx, q.writing)
	clear(q.writing)
}

// run writes until no item is pending.
func (q *batchQueue[C, R]) run() {
	for {
		began := time.Now()
		isBusy := q.isBusy(began.Sub(q.began))
		q.began = began

		// A write goes on when a caller leaves, because others may be in it.
		ctx, cancel := context.WithTimeout(context.Background(), q.of.cfg.WriteTimeout)
		q.write(ctx)
		cancel()

		// Let the callers run that were just answered: if they call again, they make it into the next write.
		runtime.Gosched()
		if isBusy {
			q.pause(began.Add(q.of.cfg.Pace))
		}
		if !q.take() {
			return
		}
	}
}

// isBusy reports whether the items of a write have come so fast, since the last one began, that further ones are worth
// a wait.
func (q *batchQueue[C, R]) isBusy(since time.Duration) bool {
	items := len(q.writing)

	return q.of.cfg.Pace > 0 && items >= busyItems && float64(items) >= busyRate*since.Seconds()
}

// pause lets items gather until a time, a full batch, or a millisecond in which no item came.
func (q *batchQueue[C, R]) pause(until time.Time) {
	for before := -1; ; {
		q.mu.Lock()
		size := q.pendingSize
		isClosed := q.closed
		q.mu.Unlock()

		left := time.Until(until)
		// If none came since the last look, waiting would only delay those that are here.
		if size == before || size >= q.of.cfg.Batch || left <= 0 || isClosed {
			return
		}

		before = size
		time.Sleep(min(stall, left))
	}
}

// take moves at most one batch from pending to writing. It returns false, and makes the queue idle, when none is
// pending.
func (q *batchQueue[C, R]) take() bool {
	q.mu.Lock()
	defer q.mu.Unlock()

	n := 0
	size := 0
	// An item is never split, so a large one goes alone.
	for n < len(q.pending) && (n == 0 || size+q.pending[n].size <= q.of.cfg.Batch) {
		size += q.pending[n].size
		n++
	}
	if n == 0 {
		q.idleLocked()
		return false
	}

	q.writing = append(q.writing[:0], q.pending[:n]...)
	// The rest moves to the front, so that the queue reuses its memory, and what is behind it is cleared for the
	// collector.
	rest := copy(q.pending, q.pending[n:])
	clear(q.pending[rest:])
	q.pending = q.pending[:rest]
	q.pendingSize -= size

	return true
}

// idleLocked ends the writes of the queue until the next item.
func (q *batchQueue[C, R]) idleLocked() {
	q.busy = false
	// The memory of a burst is given back.
	if cap(q.pending) > 1024 {
		q.pending = nil
		q.writing = nil
	}
	q.of.wg.Done()
}
