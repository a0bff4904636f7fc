package counter

import (
	"cmp"
	"context"
	"errors"
	"time"
)

// CombinerConfig tunes a Combiner. A zero field takes its default.
type CombinerConfig struct {
	// Queues is how many writes may be under way at once, default 1. A key has
	// always the same queue. A file takes 1: one fsync for all that came together.
	Queues int
	// SeparateExact gives operations with exact counters so many queues of their own: their store is another one,
	// for which the other operations do not wait.
	SeparateExact bool
	// QueueSize is how many changes may wait in one queue, default 65,536. Beyond it a
	// call fails at once with ErrBusy.
	QueueSize int
	// Batch is how many changes one write has at most, default 4,096; an Op is
	// never parted.
	Batch int
	// WriteTimeout is the time one write may take, default 10s.
	WriteTimeout time.Duration
	// Pace is how long, at most, changes gather after a write began, while changes
	// come fast: over hotRate operations a second in a queue. A queue that is not hot does not wait,
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
	cfg.Queues = cmp.Or(cfg.Queues, 1)
	cfg.QueueSize = cmp.Or(cfg.QueueSize, 1<<16)
	cfg.Batch = cmp.Or(cfg.Batch, 4096)
	cfg.WriteTimeout = cmp.Or(cfg.WriteTimeout, 10*time.Second)
	return cfg
}

// Combiner stands in front of a Writer. While a write of a queue is under way
// the operations of its keys gather, and go as one when it has ended; a lone
// operation goes at once. Its methods may be called from any goroutine.
type Combiner struct {
	cfg    CombinerConfig
	queues *batchQueues[Op, Result]
}

// NewCombiner returns a Combiner in front of to.
func NewCombiner(to Writer, cfg CombinerConfig) *Combiner {
	cfg = cfg.withDefaults()
	n := cfg.Queues
	if cfg.SeparateExact {
		n *= 2
	}
	return &Combiner{cfg, newQueues(n, cfg, func() batchWriter[Op, Result] { return &writing{to: to, batches: cfg.Batches} })}
}

// Do makes op, and returns when it is safe or refused. When ctx ends before,
// op is left alone: it may yet be made, and the error is ErrUnavailable. The
// changes of op must not be changed after the call; the counters of the result
// may be those of other callers too, and must not be changed either.
func (c *Combiner) Do(ctx context.Context, op Op) Result {
	if err := op.Check(); err != nil {
		return Result{Err: err}
	}
	queue := queueOf(op.Changes[0].Key, c.cfg.Queues)
	if c.cfg.SeparateExact && op.Changes[0].Rule.Kind == Exact {
		queue += c.cfg.Queues
	}
	result, err := c.queues.do(ctx, queue, op, len(op.Changes))
	if err != nil {
		return Result{Err: err}
	}
	return result
}

// Close waits for all that was taken. Calls after it fail with ErrUnavailable.
func (c *Combiner) Close() { c.queues.close() }

// writing makes the writes of a queue. It keeps the room that one needs for the next.
type writing struct {
	to      Writer
	batches Batches

	ops  []Op
	at   []int         // for each call the index of its op in ops
	sums map[sumOf]int // ops that more may be merged into
	own  []Change      // the changes of merged ops: those of callers stay as they are
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

// write makes the operations of calls and answers them.
func (w *writing) write(ctx context.Context, calls []*call[Op, Result]) {
	if w.batches != nil {
		w.batches.Observe(float64(len(calls)))
	}
	w.gather(calls)
	results := w.to.Apply(ctx, w.ops)
	again := calls[:0]
	for i, one := range calls {
		at := w.at[i]
		if results[at].Err != nil && errors.As(results[at].Err, new(*Conflict)) && w.ops[at].Changes[0].Merged > 1 {
			again = append(again, one) // perhaps not each of them is refused
			continue
		}
		one.answer(results[at])
	}
	clear(w.ops) // what waits for the next write holds nothing of this one
	if len(again) > 0 {
		w.ops = w.ops[:0]
		for _, one := range again {
			w.ops = append(w.ops, one.op)
		}
		for i, r := range w.to.Apply(ctx, w.ops) {
			again[i].answer(r)
		}
	}
	clear(w.ops)
	clear(w.own)
	if cap(w.ops) > 1024 { // after a rush
		*w = writing{to: w.to, batches: w.batches}
	}
}

// gather fills ops from calls. Changes of one sum in one direction become one:
// in one direction, so that each of them could have been made alone where all
// of them can, and so that the version moves.
func (w *writing) gather(calls []*call[Op, Result]) {
	w.ops, w.at, w.own = w.ops[:0], w.at[:0], w.own[:0]
	if len(calls) == 1 {
		w.ops, w.at = append(w.ops, calls[0].op), append(w.at, 0)
		return
	}
	if w.sums == nil {
		w.sums = map[sumOf]int{}
	}
	clear(w.sums)
	if cap(w.own) < len(calls) { // it must not move while ops point into it
		w.own = make([]Change, 0, 2*len(calls))
	}
	for _, one := range calls {
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
