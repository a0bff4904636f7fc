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
	hotRate  = 1000             // calls a second, from which a queue is hot
	hotLeast = 4                // and so many of them in one write
	stall    = time.Millisecond // a hot queue in which nobody came for this long writes
)

// queues stand in front of a store. While a write of a queue is under way the calls of its keys gather, and go as one when
// it has ended; a lone call goes at once. An O is what is asked for, and an R is what becomes of it.
type batchQueues[O, R any] struct {
	cfg   CombinerConfig
	all   []batchQueue[O, R]
	wg    sync.WaitGroup // the goroutines of queues
	calls sync.Pool      // of *call
}

// batchWriter makes the writes of one queue, one at a time.
type batchWriter[O, R any] interface {
	// write answers calls.
	write(ctx context.Context, calls []*call[O, R])
}

// queue has at most one write under way.
type batchQueue[O, R any] struct {
	of *batchQueues[O, R]
	to batchWriter[O, R]

	mu      sync.Mutex // guards all below
	busy    bool       // somebody writes, and will look at queue before the end
	closed  bool
	queue   []*call[O, R]
	waiting int // sizes in queue

	writing []*call[O, R] // owned by whoever made busy true
	began   time.Time     // when the last write began; likewise
}

// call is something asked for on its way.
type call[O, R any] struct {
	op     O
	size   int // in CombinerConfig.QueueSize and Batch
	result R
	done   chan struct{} // holds one: result is there
}

func (c *call[O, R]) answer(result R) {
	c.result = result
	c.done <- struct{}{}
}

// newQueues returns n queues.
func newQueues[O, R any](n int, cfg CombinerConfig, writer func() batchWriter[O, R]) *batchQueues[O, R] {
	g := &batchQueues[O, R]{cfg: cfg, all: make([]batchQueue[O, R], n)}
	g.calls.New = func() any { return &call[O, R]{done: make(chan struct{}, 1)} }
	for i := range g.all {
		g.all[i].of, g.all[i].to = g, writer()
	}
	return g
}

// queueOf is the number of a key's queue among some.
func queueOf(key string, among int) int { return int(xxhash.Sum64String(key) % uint64(among)) }

// do has op written, and returns what became of it. When ctx ends before, or op cannot be taken, the error is
// ErrUnavailable; in the first case op may yet be written.
func (g *batchQueues[O, R]) do(ctx context.Context, queue int, op O, size int) (result R, err error) {
	l := &g.all[queue]
	one := g.calls.Get().(*call[O, R])
	one.op, one.size = op, size
	lead, err := l.enter(one)
	switch {
	case err != nil:
		g.put(one)
		return result, err
	case lead && g.cfg.Instant:
		l.writing = append(l.writing[:0], one)
		l.write(context.Background())
		l.hand()
		<-one.done // it is there, whatever became of ctx
		result = one.result
		g.put(one)
		return result, nil
	case lead:
		l.writing = append(l.writing[:0], one)
		go l.run() // awaited by close
	}
	select {
	case <-one.done:
	case <-ctx.Done():
		// one is not put back: the queue will answer it.
		return result, fmt.Errorf("combining: %w: %w, and the call may yet be carried out", ErrUnavailable, context.Cause(ctx))
	}
	result = one.result
	g.put(one)
	return result, nil
}

// close waits for all that was taken. Calls after it fail with ErrUnavailable.
func (g *batchQueues[O, R]) close() {
	for i := range g.all {
		l := &g.all[i]
		l.mu.Lock()
		l.closed = true
		l.mu.Unlock()
	}
	g.wg.Wait()
}

func (g *batchQueues[O, R]) put(one *call[O, R]) {
	*one = call[O, R]{done: one.done}
	g.calls.Put(one)
}

// enter takes one in. lead says that the queue was idle: the caller sees to the
// write, and one is in no queue.
func (l *batchQueue[O, R]) enter(one *call[O, R]) (lead bool, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.closed:
		return false, fmt.Errorf("combining: %w: the process ends", ErrUnavailable)
	case !l.busy:
		l.busy = true
		l.of.wg.Add(1) // under mu and not closed: before close waits
		return true, nil
	case l.waiting+one.size > l.of.cfg.QueueSize:
		return false, ErrBusy
	}
	l.queue = append(l.queue, one)
	l.waiting += one.size
	return false, nil
}

// hand ends a write of a caller's own: what gathered meanwhile is not its work.
func (l *batchQueue[O, R]) hand() {
	if l.take() {
		go l.run() // awaited by close
	}
}

// write answers the calls in writing, and keeps none of them.
func (l *batchQueue[O, R]) write(ctx context.Context) {
	l.to.write(ctx, l.writing)
	clear(l.writing)
}

// run writes until nothing is left.
func (l *batchQueue[O, R]) run() {
	for {
		began, calls := time.Now(), len(l.writing)
		since := began.Sub(l.began)
		l.began = began
		ctx, cancel := context.WithTimeout(context.Background(), l.of.cfg.WriteTimeout)
		l.write(ctx)
		cancel()
		// Who was answered just now and calls again goes with the next write rather
		// than with the one after.
		runtime.Gosched()
		if l.of.cfg.Pace > 0 && calls >= hotLeast && float64(calls) >= hotRate*since.Seconds() {
			l.pause(began.Add(l.of.cfg.Pace))
		}
		if !l.take() {
			return
		}
	}
}

// pause lets calls gather until then, or until no more come.
func (l *batchQueue[O, R]) pause(until time.Time) {
	for waiting := -1; ; {
		l.mu.Lock()
		now, closed := l.waiting, l.closed
		l.mu.Unlock()
		left := time.Until(until)
		if now == waiting || now >= l.of.cfg.Batch || left <= 0 || closed {
			return
		}
		waiting = now
		time.Sleep(min(stall, left))
	}
}

// take moves what gathered, up to a batch, to the next write. When there is
// nothing the queue is idle again and the write's owner is done.
func (l *batchQueue[O, R]) take() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	n, size := 0, 0
	for n < len(l.queue) && (n == 0 || size+l.queue[n].size <= l.of.cfg.Batch) {
		size += l.queue[n].size
		n++
	}
	if n == 0 {
		l.busy = false
		if cap(l.queue) > 1024 { // after a rush
			l.queue, l.writing = nil, nil
		}
		l.of.wg.Done()
		return false
	}
	l.writing = append(l.writing[:0], l.queue[:n]...)
	rest := copy(l.queue, l.queue[n:])
	clear(l.queue[rest:])
	l.queue = l.queue[:rest]
	l.waiting -= size
	return true
}
