package counter

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"time"

	"github.com/cespare/xxhash/v2"
)

// CombinerConfig tunes a Combiner. A zero field takes its default.
type CombinerConfig struct {
	// Lanes is how many writes may be under way at once, default 1. A key has
	// always the same lane. A file takes 1: one fsync for all that came together.
	Lanes int
	// Apart gives operations with exact counters so many lanes of their own: their store is another one,
	// for which the other operations do not wait.
	Apart bool
	// Queue is how many changes may wait in one lane, default 65,536. Beyond it a
	// call fails at once with ErrBusy.
	Queue int
	// Batch is how many changes one write has at most, default 4,096; an Op is
	// never parted.
	Batch int
	// WriteTimeout is the time one write may take, default 10s.
	WriteTimeout time.Duration
	// Pace is how long, at most, changes gather after a write began, while changes
	// come fast: over hotRate operations a second in a lane. A lane that is not hot does not wait,
	// and neither does a hot one once nobody comes any more. Default 0: never.
	Pace time.Duration
	// Instant says that the store waits for nothing but the processor (memory):
	// a lone operation is made by its caller, and has no goroutine and no timeout.
	Instant bool
	// Batches is told how many calls each write combines; nil: nobody is.
	Batches Batches
}

// Batches takes the sizes of batches. A prometheus.Observer is one.
type Batches interface{ Observe(size float64) }

func (cfg CombinerConfig) withDefaults() CombinerConfig {
	cfg.Lanes = cmp.Or(cfg.Lanes, 1)
	cfg.Queue = cmp.Or(cfg.Queue, 1<<16)
	cfg.Batch = cmp.Or(cfg.Batch, 4096)
	cfg.WriteTimeout = cmp.Or(cfg.WriteTimeout, 10*time.Second)
	return cfg
}

const (
	hotRate  = 1000             // operations a second, from which a lane is hot
	hotLeast = 4                // and so many of them in one write
	stall    = time.Millisecond // a hot lane in which nobody came for this long writes
)

// Combiner stands in front of a Writer. While a write of a lane is under way
// the operations of its keys gather, and go as one when it has ended; a lone
// operation goes at once. Its methods may be called from any goroutine.
type Combiner struct {
	to    Writer
	cfg   CombinerConfig
	lanes []lane
	wg    sync.WaitGroup // the goroutines of lanes
	calls sync.Pool      // of *call
}

// lane has at most one write under way.
type lane struct {
	c *Combiner

	mu      sync.Mutex // guards all below
	busy    bool       // somebody writes, and will look at queue before the end
	closed  bool
	queue   []*call
	waiting int // changes in queue

	w writing // owned by whoever made busy true
}

// call is one operation on its way.
type call struct {
	op     Op
	result Result
	done   chan struct{} // holds one: result is there
}

// NewCombiner returns a Combiner in front of to.
func NewCombiner(to Writer, cfg CombinerConfig) *Combiner {
	cfg = cfg.withDefaults()
	lanes := cfg.Lanes
	if cfg.Apart {
		lanes *= 2
	}
	c := &Combiner{to: to, cfg: cfg, lanes: make([]lane, lanes)}
	c.calls.New = func() any { return &call{done: make(chan struct{}, 1)} }
	for i := range c.lanes {
		c.lanes[i].c = c
	}
	return c
}

// Do makes op, and returns when it is safe or refused. When ctx ends before,
// op is left alone: it may yet be made, and the error is ErrUnavailable. The
// changes of op must not be changed after the call; the counters of the result
// may be those of other callers too, and must not be changed either.
func (c *Combiner) Do(ctx context.Context, op Op) Result {
	if err := op.Check(); err != nil {
		return Result{Err: err}
	}
	l := c.lane(&op)
	one := c.calls.Get().(*call)
	one.op = op
	lead, err := l.enter(one)
	switch {
	case err != nil:
		c.put(one)
		return Result{Err: err}
	case lead && c.cfg.Instant:
		l.w.calls = append(l.w.calls[:0], one)
		l.write(context.Background())
		l.hand()
		<-one.done // it is there, whatever became of ctx
		result := one.result
		c.put(one)
		return result
	case lead:
		l.w.calls = append(l.w.calls[:0], one)
		go l.run() // awaited by Close
	}
	select {
	case <-one.done:
	case <-ctx.Done():
		// one is not put back: the lane will answer it.
		return Result{Err: fmt.Errorf("combining: %w: %w, and the change may yet be made", ErrUnavailable, context.Cause(ctx))}
	}
	result := one.result
	c.put(one)
	return result
}

func (c *Combiner) lane(op *Op) *lane {
	if len(c.lanes) == 1 {
		return &c.lanes[0]
	}
	at := int(xxhash.Sum64String(op.Changes[0].Key) % uint64(c.cfg.Lanes))
	if c.cfg.Apart && op.Changes[0].Rule.Kind == Exact {
		at += c.cfg.Lanes
	}
	return &c.lanes[at]
}

// Close waits for all that was taken. Calls after it fail with ErrUnavailable.
func (c *Combiner) Close() {
	for i := range c.lanes {
		l := &c.lanes[i]
		l.mu.Lock()
		l.closed = true
		l.mu.Unlock()
	}
	c.wg.Wait()
}

func (c *Combiner) put(one *call) {
	one.op, one.result = Op{}, Result{}
	c.calls.Put(one)
}

// enter takes one in. lead says that the lane was idle: the caller sees to the
// write, and one is in no queue.
func (l *lane) enter(one *call) (lead bool, err error) {
	n := len(one.op.Changes)
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.closed:
		return false, fmt.Errorf("combining: %w: the process ends", ErrUnavailable)
	case !l.busy:
		l.busy = true
		l.c.wg.Add(1) // under mu and not closed: before Close waits
		return true, nil
	case l.waiting+n > l.c.cfg.Queue:
		return false, ErrBusy
	}
	l.queue = append(l.queue, one)
	l.waiting += n
	return false, nil
}

// hand ends a write of a caller's own: what gathered meanwhile is not its work.
func (l *lane) hand() {
	if l.take() {
		go l.run() // awaited by Close
	}
}

// run writes until nothing is left.
func (l *lane) run() {
	for {
		began, calls := time.Now(), len(l.w.calls)
		since := began.Sub(l.w.began)
		l.w.began = began
		ctx, cancel := context.WithTimeout(context.Background(), l.c.cfg.WriteTimeout)
		l.write(ctx)
		cancel()
		// Who was answered just now and calls again goes with the next write rather
		// than with the one after.
		runtime.Gosched()
		if l.c.cfg.Pace > 0 && calls >= hotLeast && float64(calls) >= hotRate*since.Seconds() {
			l.pause(began.Add(l.c.cfg.Pace))
		}
		if !l.take() {
			return
		}
	}
}

// pause lets changes gather until then, or until no more come.
func (l *lane) pause(until time.Time) {
	for waiting := -1; ; {
		l.mu.Lock()
		now, closed := l.waiting, l.closed
		l.mu.Unlock()
		left := time.Until(until)
		if now == waiting || now >= l.c.cfg.Batch || left <= 0 || closed {
			return
		}
		waiting = now
		time.Sleep(min(stall, left))
	}
}

// take moves what gathered, up to a batch, to the next write. When there is
// nothing the lane is idle again and the write's owner is done.
func (l *lane) take() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	n, changes := 0, 0
	for n < len(l.queue) && (n == 0 || changes+len(l.queue[n].op.Changes) <= l.c.cfg.Batch) {
		changes += len(l.queue[n].op.Changes)
		n++
	}
	if n == 0 {
		l.busy = false
		if cap(l.queue) > 1024 { // after a rush
			l.queue, l.w = nil, writing{}
		}
		l.c.wg.Done()
		return false
	}
	l.w.calls = append(l.w.calls[:0], l.queue[:n]...)
	rest := copy(l.queue, l.queue[n:])
	clear(l.queue[rest:])
	l.queue = l.queue[:rest]
	l.waiting -= changes
	return true
}

// writing is the room that one write needs, kept for the next.
type writing struct {
	calls []*call
	began time.Time // when the last write began
	ops   []Op
	at    []int         // for each call the index of its op in ops
	sums  map[sumOf]int // ops that more may be merged into
	own   []Change      // the changes of merged ops: those of callers stay as they are
}

type sumOf struct {
	key string
	up  bool
}

// mergeable reports whether op is a change that may become part of a sum.
func (op *Op) mergeable() bool {
	c := &op.Changes[0]
	return len(op.Changes) == 1 && c.Verb == Add && c.Rule.Kind == Sum && op.Identity == Identity{} && len(c.Dimensions) == 0
}

// write makes the calls in w and answers them.
func (l *lane) write(ctx context.Context) {
	w := &l.w
	if l.c.cfg.Batches != nil {
		l.c.cfg.Batches.Observe(float64(len(w.calls)))
	}
	w.gather()
	results := l.c.to.Apply(ctx, w.ops)
	again := w.calls[:0]
	for i, one := range w.calls {
		at := w.at[i]
		if results[at].Err != nil && errors.As(results[at].Err, new(*Conflict)) && w.ops[at].Changes[0].Merged > 1 {
			again = append(again, one) // perhaps not each of them is refused
			continue
		}
		one.result = results[at]
		one.done <- struct{}{}
	}
	clear(w.ops) // what waits for the next write holds nothing of this one
	if len(again) > 0 {
		w.ops = w.ops[:0]
		for _, one := range again {
			w.ops = append(w.ops, one.op)
		}
		for i, r := range l.c.to.Apply(ctx, w.ops) {
			again[i].result = r
			again[i].done <- struct{}{}
		}
	}
	clear(w.ops)
	clear(w.calls)
	clear(w.own)
}

// gather fills ops from calls. Changes of one sum in one direction become one:
// in one direction, so that each of them could have been made alone where all
// of them can, and so that the version moves.
func (w *writing) gather() {
	w.ops, w.at, w.own = w.ops[:0], w.at[:0], w.own[:0]
	if len(w.calls) == 1 {
		w.ops, w.at = append(w.ops, w.calls[0].op), append(w.at, 0)
		return
	}
	if w.sums == nil {
		w.sums = map[sumOf]int{}
	}
	clear(w.sums)
	if cap(w.own) < len(w.calls) { // it must not move while ops point into it
		w.own = make([]Change, 0, 2*len(w.calls))
	}
	for _, one := range w.calls {
		if !one.op.mergeable() {
			// What comes after it stays after it.
			for i := range one.op.Changes {
				delete(w.sums, sumOf{one.op.Changes[i].Key, true})
				delete(w.sums, sumOf{one.op.Changes[i].Key, false})
			}
			w.at, w.ops = append(w.at, len(w.ops)), append(w.ops, one.op)
			continue
		}
		c := &one.op.Changes[0]
		sum := sumOf{c.Key, c.Delta > 0}
		at, ok := w.sums[sum]
		if ok && w.merge(at, c) {
			w.at = append(w.at, at)
			continue
		}
		w.sums[sum] = len(w.ops)
		w.at, w.ops = append(w.at, len(w.ops)), append(w.ops, one.op)
	}
}

// merge adds c to the op at, unless that leaves 64 bits.
func (w *writing) merge(at int, c *Change) bool {
	op := &w.ops[at]
	delta, over := plus(op.Changes[0].Delta, c.Delta)
	if over {
		return false
	}
	if op.Changes[0].Merged == 0 {
		w.own = append(w.own, op.Changes[0])
		op.Changes = w.own[len(w.own)-1:]
		op.Changes[0].Merged = 1
	}
	op.Changes[0].Delta = delta
	op.Changes[0].Merged++
	return true
}
