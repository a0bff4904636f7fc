package owner

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"headcount/counter"
	"headcount/counter/limit"
	"headcount/counter/share"
	"headcount/internal/rows"
	"headcount/internal/wake"
)

// Call is some work for one partition, to which all of its keys belong.
type Call struct {
	Partition int
	// Stream identifies the sender, and Number is greater than that of the stream's previous call to the partition. A
	// repeated call has the same number. A sender in the same process, whose calls cannot get lost, has no stream.
	Stream string
	Number uint64
	// Repeated says that the call was sent before. Only then can another copy of it arrive after its answer.
	Repeated bool
	// Until is when the sender gives up, the zero time if that is unknown. A call that arrives over a link is not made
	// after that time.
	Until time.Time

	Ops  []counter.Op
	More *More // nil: the call has only operations
}

// More is the work of a call besides operations. It is a separate struct because few calls have any, and calls are
// many.
type More struct {
	Limits     []limit.Request
	Rows       []Expiring               // written unchanged
	Asked      []counter.IdempotencyKey // distinct; the answer says which are remembered
	Remembered []counter.IdempotencyKey // distinct; remembered from now on

	Restore  *Restore
	Shares   []string        // keys of counters whose shares the answer has
	Received *ReceivedShares // shares of another region to merge

	sweep *swept // internal: part of a sweep
}

// Answer is the answer to a call.
type Answer struct {
	Results []counter.Result // of the operations, in order, as counter.Writer returns them
	More    *MoreAnswer      // nil if the call has no More
}

// MoreAnswer is the answer to the More of a call.
type MoreAnswer struct {
	Limits []limit.Answer // in order
	Known  []bool         // in the order of Asked

	Restored int           // number of counters that Restore replaced or created
	Shares   []share.Share // in order
	Merged   Merged        // the result of ReceivedShares
}

// size returns the number of changes of a call, which the bounds of the queue and of a turn count.
func (c *Call) size() int {
	n := 0
	if m := c.More; m != nil {
		n = len(m.Limits) + len(m.Rows) + len(m.Asked) + len(m.Remembered) + len(m.Shares)
		if m.Restore != nil {
			n += len(m.Restore.Copies)
		}
		if m.Received != nil {
			n += len(m.Received.Shares)
		}
	}
	for i := range c.Ops {
		n += len(c.Ops[i].Changes)
	}

	return n
}

// ids returns the number of idempotency keys of a call.
func (c *Call) ids() int {
	n := 0
	if m := c.More; m != nil {
		n = len(m.Asked) + len(m.Remembered)
	}
	for i := range c.Ops {
		if c.Ops[i].IdempotencyKey != (counter.IdempotencyKey{}) {
			n++
		}
	}

	return n
}

// pending is a call that is not answered yet.
type pending struct {
	Call
	changes int // its size, as counted in Owner.waiting

	// The holder of the turn writes these.
	answered  bool
	withdrawn bool // its caller has left, so it is not judged again
	answer    Answer
	err       error

	// Both are nil while only its own caller can answer the call.
	done  chan struct{} // closed when the call is answered
	ready chan struct{} // has capacity 1; a value means that the caller should make the next turn
}

// awaitable allows other goroutines to answer the call.
func (one *pending) awaitable() {
	one.done = make(chan struct{})
	one.ready = make(chan struct{}, 1)
}

// Do makes a call, and returns once everything is durable. The error is counter.ErrBusy if nothing was made. After
// ErrNotOwner, ErrOld or counter.ErrUnavailable the caller repeats the call.
func (o *Owner) Do(ctx context.Context, call Call) (Answer, error) {
	// Without contention, the call needs neither a queue nor a channel.
	if o.turn.tryLock() {
		return o.doNow(ctx, &call)
	}

	one := &pending{Call: call, changes: call.size()}
	one.awaitable()
	if err := o.enqueue(one); err != nil {
		return Answer{}, err
	}

	return o.await(ctx, one)
}

// doNow makes a call with the turn that the caller has, and ends the turn.
func (o *Owner) doNow(ctx context.Context, call *Call) (Answer, error) {
	// Reuse the memory of the last call, which no other goroutine could see.
	one := o.scratch.call
	if one == nil {
		one = &pending{}
	}
	o.scratch.call = nil
	one.Call = *call

	err := o.enterTurn(one)
	if err != nil {
		o.unlock()
		return Answer{}, err
	}
	// The call has to wait: its partition is unsure, or the store knew an idempotency key. So make it awaitable before
	// the turn ends.
	if !one.answered {
		one.awaitable()
		o.unlock()
		return o.await(ctx, one)
	}

	answer := one.answer
	err = one.err
	// The struct is reused, and must not keep the operations of this call in memory.
	*one = pending{}
	o.scratch.call = one
	o.unlock()

	return answer, err
}

// Outcome is the answer to one of several calls, or its error.
type Outcome struct {
	Answer
	Err error
}

// DoAll makes calls to different partitions, each independently of the others, as Do does. Without contention they
// share one turn.
func (o *Owner) DoAll(ctx context.Context, calls []Call) []Outcome {
	outcomes := make([]Outcome, len(calls))
	if err := o.lock(ctx); err != nil {
		for i := range outcomes {
			outcomes[i].Err = err
		}
		return outcomes
	}

	// All calls enter their queues before the turn, so that one commit of the store has them all.
	all := make([]pending, len(calls))
	for i := range calls {
		all[i] = pending{Call: calls[i], changes: calls[i].size()}
		outcomes[i].Err = o.enqueue(&all[i])
	}
	o.makeTurn()
	o.awaitAll(ctx, all, outcomes)

	return outcomes
}

// DoTogether makes calls to different partitions in one turn. If one of them would be refused or has to wait, it makes
// none of them and reports that. Its error is counter.ErrBusy, or why the turn or the store cannot be had; then none of
// them was made either.
func (o *Owner) DoTogether(ctx context.Context, calls []Call) (outcomes []Outcome, made bool, err error) {
	changes := 0
	for i := range calls {
		changes += calls[i].size()
	}
	// These calls enter no queue, but a full one refuses them like any others.
	if o.isFull(changes) {
		return nil, false, counter.ErrBusy
	}
	if err := o.lock(ctx); err != nil {
		return nil, false, err
	}

	// Calls that wait are left for the next turn: if this one makes nothing, its drafts are dropped.
	all := make([]pending, len(calls))
	work := o.scratch.work[:0]
	o.mu.Lock()
	for i := range calls {
		p := o.owned[calls[i].Partition]
		if p == nil || p.unsure {
			continue
		}
		all[i].Call = calls[i]
		p.calls = append(p.calls, &all[i])
		work = append(work, p)
	}
	o.mu.Unlock()
	o.scratch.work = work

	now := time.Now()
	drafted := o.judge(work, now)
	if len(drafted) < len(calls) || slices.ContainsFunc(all, refuses) {
		// Nothing of the drafts has left this turn, so nothing has to be undone.
		for _, p := range work {
			o.end(p)
		}
		o.unlock()
		return nil, false, unreadable(all)
	}

	o.keep(drafted, now)
	outcomes = make([]Outcome, len(calls))
	o.awaitAll(ctx, all, outcomes)

	return outcomes, true, nil
}

// unreadable returns the error of a call for which the store could not be read, or nil.
func unreadable(all []pending) error {
	for i := range all {
		if errors.Is(all[i].err, counter.ErrUnavailable) {
			return all[i].err
		}
	}

	return nil
}

// refuses reports whether the judgement of a call refuses one of its operations.
func refuses(one pending) bool {
	isRefused := func(r counter.Result) bool { return r.Err != nil }

	return one.err != nil || slices.ContainsFunc(one.answer.Results, isRefused)
}

// awaitAll ends the turn that the caller has, and waits for the calls that it did not answer. A call whose outcome is
// known already is in no queue.
func (o *Owner) awaitAll(ctx context.Context, all []pending, outcomes []Outcome) {
	// This comes before the end of the turn, since from then on other goroutines may answer the calls.
	for i := range all {
		if !all[i].answered {
			all[i].awaitable()
		}
	}
	o.unlock()

	for i := range all {
		one := &all[i]
		switch {
		case outcomes[i].Err != nil:
		case one.done == nil:
			outcomes[i] = Outcome{one.answer, one.err}
		default:
			outcomes[i].Answer, outcomes[i].Err = o.await(ctx, one)
		}
	}
}

// await waits for the answer to a call in a queue. The caller that gets the turn makes all waiting calls, so most
// callers find theirs answered.
func (o *Owner) await(ctx context.Context, one *pending) (Answer, error) {
	for {
		if o.turn.lock(one.done, ctx.Done()) {
			o.makeTurn()
			o.unlock()
		}

		// The turn skipped the call, since its partition is unsure.
		select {
		case <-one.done:
			return one.answer, one.err
		case <-one.ready:
		case <-ctx.Done():
			return o.withdraw(ctx, one)
		}
	}
}

// enterTurn makes a turn with a call and with the waiting ones. If no other call waits, this one bypasses the queue and
// is not counted in waiting. The caller has the turn.
func (o *Owner) enterTurn(one *pending) error {
	o.mu.Lock()
	p := o.owned[one.Partition]
	// If calls wait, all of them share this turn, so that newcomers who find the turn free never pass them by.
	if p == nil || p.unsure || len(o.busy) > 0 {
		one.changes = one.size()
		err := o.enqueueLocked(one)
		o.mu.Unlock()
		if err == nil {
			o.makeTurn()
		}
		return err
	}
	o.mu.Unlock()

	// No other call waits for the partition, so this one need not pass through the queue.
	p.calls = append(p.calls, one)
	o.scratch.work = append(o.scratch.work[:0], p)
	o.make(o.scratch.work)

	return nil
}

func (o *Owner) enqueue(one *pending) error {
	o.mu.Lock()
	defer o.mu.Unlock()

	return o.enqueueLocked(one)
}

// enqueueLocked puts a call into the queue of its partition.
func (o *Owner) enqueueLocked(one *pending) error {
	p := o.owned[one.Partition]
	// The caller asks the directory for the new owner.
	if p == nil {
		return ErrNotOwner
	}
	if o.isFull(one.changes) {
		return counter.ErrBusy
	}

	o.waiting.Add(int64(one.changes))
	p.queue = append(p.queue, one)
	o.listLocked(p)

	return nil
}

// isFull reports whether the queue has no room for a number of changes. An empty queue has room for any number.
func (o *Owner) isFull(changes int) bool {
	waiting := int(o.waiting.Load())

	return waiting > 0 && waiting+changes > o.cfg.Queue
}

// listLocked makes the next turn look into the queue of p.
func (o *Owner) listLocked(p *partition) {
	if !p.listed && !p.unsure {
		p.listed = true
		o.busy = append(o.busy, p)
	}
}

// withdraw takes back a call whose caller stops waiting. It returns the answer if there is one by now, and otherwise
// the error. A change that is already on its way to the store may still be made.
func (o *Owner) withdraw(ctx context.Context, one *pending) (Answer, error) {
	// Wait for the turn: it reads the operations of the call, and the caller may reuse their memory afterwards.
	if o.turn.lock(one.done, o.ctx.Done()) {
		defer o.unlock()
	}
	select {
	case <-one.done:
		return one.answer, one.err
	default:
	}

	o.mu.Lock()
	defer o.mu.Unlock()

	p := o.owned[one.Partition]
	if p != nil && slices.Contains(p.queue, one) {
		p.queue = slices.DeleteFunc(p.queue, func(other *pending) bool { return other == one })
		o.waiting.Add(-int64(one.changes))
	}
	// If its commit is in doubt, the call is still in the partition's turn, and must not be judged again.
	one.withdrawn = true

	return Answer{}, fmt.Errorf("owner: %w: %w", counter.ErrUnavailable, context.Cause(ctx))
}

// answer gives a call the answer of its draft. The caller has the turn.
func (o *Owner) answer(one *pending) {
	if one.changes > 0 {
		o.waiting.Add(-int64(one.changes))
	}
	one.answered = true
	// If done is nil, the call's own caller has the turn, and looks at answered.
	if one.done != nil {
		close(one.done)
	}
}

// refuse answers a call with an error. The caller has the turn.
func (o *Owner) refuse(one *pending, err error) {
	one.answer = Answer{}
	one.err = err
	o.answer(one)
}

// turnIDs is the number of idempotency keys after which a turn takes no further call of a partition.
const turnIDs = 1000

// takeLocked moves waiting calls into the turn, but only one of each stream, since a second one may be a repetition of
// the first.
func (p *partition) takeLocked(most int) {
	// The usual case, without a map.
	if len(p.queue) == 1 {
		p.calls = append(p.calls, p.queue[0])
		p.queue[0] = nil
		p.queue = p.queue[:0]
		return
	}

	streams := map[string]bool{}
	changes := 0
	ids := 0

	left := p.queue[:0:0]
	for _, one := range p.queue {
		full := changes >= most || ids >= turnIDs
		if full || streams[one.Stream] {
			left = append(left, one)
			continue
		}

		// Calls without a stream may share a turn.
		streams[one.Stream] = one.Stream != ""
		changes += one.changes
		ids += one.ids()
		p.calls = append(p.calls, one)
	}
	p.queue = left
}

// callQueueLocked wakes the callers in the queue, so that one of them makes a turn.
func (p *partition) callQueueLocked() {
	if p.unsure {
		return
	}

	for _, one := range p.queue {
		wake.Signal(one.ready) // before the call is awaitable, ready is nil: then its caller has the turn
	}
}

// Expiring is a row that a call writes, and when it expires; the zero time: never.
type Expiring struct {
	rows.Row
	Until time.Time
}
