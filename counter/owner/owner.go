// Package owner changes counters: those of the partitions that this process owns.
//
// Every key has one owner, so the owner judges changes in memory and nobody else writes what it judged. It commits rows
// that have absolute values ([rows.Store]) and answers only then.
//
// # A turn
//
// Calls gather while a turn is under way. A turn takes all of them, partition by partition:
//
//  1. A draft judges the operations in order on the rows in memory ([counter.Judge]). When a row is missing there, the
//     turn reads all missing rows at once, and the draft begins again.
//  2. The drafts become commits, and the store makes them in one call.
//  3. A draft whose commit was made moves into memory, and its calls are answered. Any other draft is dropped, so
//     nothing has to be undone.
//
// # Calls
//
// The sender of calls is a stream, and its calls to a partition are numbered. The answer to a call is a row, written in
// the same commit as the changes of the call. So a repeated call, also to another owner, gets the same answer and
// changes nothing.
//
// # Faults
//
// A commit whose outcome is unknown is repeated until it is known; its partition waits meanwhile, others do not. When
// another process has claimed the partition, this one gives it up, and its callers turn to the new owner. When the store
// has lost something, the owner claims again, and writes every row that it knows and the store may lack.
//
// # Versions
//
// The first change of a counter under a new epoch raises the incarnation of its version to the epoch. So no version
// that was lost with a store's tail comes again with another value.
package owner

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"headcount/counter"
	"headcount/counter/limit"
	"headcount/internal/rows"
	"headcount/internal/wake"
)

var (
	// ErrNotOwner means that this process does not own the partition. The owner has the answer to a repetition.
	ErrNotOwner = errors.New("not the owner")
	// ErrOld means that the stream has sent a later call, so nobody waits for this one. It was not made now.
	ErrOld = errors.New("a later call has overtaken this one")
)

// Config tunes an Owner. A zero field takes its default.
type Config struct {
	// Name is that of this process. No other process has it, nor has this one before a restart.
	Name string
	// Queue is the number of changes that may wait, default 65,536. Calls beyond it fail with counter.ErrBusy.
	Queue int
	// Batch is the number of changes after which a turn takes no further call of a partition, default 4,096.
	Batch int
	// WriteTimeout is the longest time that one call of the store may take, default 3s. A commit without an answer is
	// repeated.
	WriteTimeout time.Duration
	// RepeatAfter is the pause before a commit without an answer is repeated, default 100ms.
	RepeatAfter time.Duration
	// VerifyEvery is how often an owner makes sure that the store has lost nothing of a partition, default 1s. Negative:
	// never, for stores that lose nothing.
	VerifyEvery time.Duration
	// Memory is the size of the rows that are kept in memory, in bytes, default 64 MB. Beyond it those go that were not used
	// for the longest time.
	Memory int
}

func (cfg Config) withDefaults() Config {
	cfg.Queue = cmp.Or(cfg.Queue, 1<<16)
	cfg.Batch = cmp.Or(cfg.Batch, 4096)
	cfg.WriteTimeout = cmp.Or(cfg.WriteTimeout, 3*time.Second)
	cfg.RepeatAfter = cmp.Or(cfg.RepeatAfter, 100*time.Millisecond)
	cfg.VerifyEvery = cmp.Or(cfg.VerifyEvery, time.Second)
	cfg.Memory = cmp.Or(cfg.Memory, 64<<20)

	return cfg
}

// Owner owns partitions and changes their counters. All methods may be called from any goroutine.
type Owner struct {
	cfg   Config
	store rows.Store

	ctx  context.Context // ends with Close
	stop context.CancelFunc
	wg   sync.WaitGroup // verify, and settle of each partition that is unsure

	// turn is a lock that a caller may stop waiting for. Who has it owns the memory of all partitions; settle alone reads
	// the commit of a partition that is unsure without it.
	turn chan struct{}

	mu      sync.Mutex // guards the fields below
	owned   [rows.Partitions]*partition
	waiting int // changes of all calls that are not answered
}

// New returns an Owner that owns nothing yet. Close ends it.
func New(store rows.Store, cfg Config) *Owner {
	o := &Owner{cfg: cfg.withDefaults(), store: store, turn: make(chan struct{}, 1)}
	o.ctx, o.stop = context.WithCancel(context.Background())
	if o.cfg.VerifyEvery > 0 {
		o.wg.Go(o.verify)
	}

	return o
}

// Close gives up all partitions once the turn under way has ended. Later calls fail with ErrNotOwner. It is called once.
func (o *Owner) Close() {
	o.stop()
	o.turn <- struct{}{} // for ever, so that no turn begins a goroutine any more

	for _, p := range o.partitions() {
		o.giveUp(p)
	}
	o.wg.Wait()
}

// Own claims partitions, whoever owns them now. Those that this process owns already stay as they are.
func (o *Owner) Own(ctx context.Context, partitions ...int) error {
	if err := o.lock(ctx); err != nil {
		return err
	}
	defer o.unlock()

	var wanted []rows.Former
	for _, id := range partitions {
		if o.partition(id) == nil {
			wanted = append(wanted, rows.Former{Partition: id})
		}
	}
	if len(wanted) == 0 {
		return nil
	}

	claims, err := o.store.Claim(ctx, o.cfg.Name, wanted)
	if err != nil {
		return fmt.Errorf("owner: claim: %w", err)
	}

	o.mu.Lock()
	defer o.mu.Unlock()

	for i, claim := range claims {
		id := wanted[i].Partition
		o.owned[id] = newPartition(id, claim)
	}

	return nil
}

// Owns reports whether this process owns a partition, as far as it knows.
func (o *Owner) Owns(partition int) bool { return o.partition(partition) != nil }

// Release gives partitions up once the turn under way has ended. Their calls fail with ErrNotOwner from then on.
func (o *Owner) Release(ctx context.Context, partitions ...int) error {
	if err := o.lock(ctx); err != nil {
		return err
	}
	defer o.unlock()

	for _, id := range partitions {
		if p := o.partition(id); p != nil {
			o.giveUp(p)
		}
	}

	return nil
}

func (o *Owner) partition(id int) *partition {
	o.mu.Lock()
	defer o.mu.Unlock()

	return o.owned[id]
}

// partitions returns all that this process owns.
func (o *Owner) partitions() []*partition {
	o.mu.Lock()
	defer o.mu.Unlock()

	return slices.DeleteFunc(slices.Clone(o.owned[:]), func(p *partition) bool { return p == nil })
}

// Call is some work for one partition, to which all of its keys belong.
type Call struct {
	Partition int
	Stream    string // who sends it
	Number    uint64 // greater than that of the stream's former call to the partition; a repetition has the same one
	// Repeated says that the call was sent before. Only then may another copy of it arrive after its answer.
	Repeated bool

	Ops    []counter.Op
	Limits []limit.Call
	Rows   []rows.Row // written as they are
}

// Answer is the answer to a call.
type Answer struct {
	Results []counter.Result // of the operations, in order, as counter.Writer returns them
	Limits  []limit.Answer   // in order
}

// pending is a call that is not answered yet.
type pending struct {
	*Call
	changes int
	answer  Answer
	err     error
	done    chan struct{} // closed with the answer
	ready   chan struct{} // has capacity 1; a value means that the call waits for a turn
}

func newPending(call *Call) *pending {
	one := &pending{Call: call, done: make(chan struct{}), ready: make(chan struct{}, 1)}
	for i := range call.Ops {
		one.changes += len(call.Ops[i].Changes)
	}
	one.changes += len(call.Limits) + len(call.Rows)

	return one
}

// Do makes a call, and answers when everything is durable. The error is ErrNotOwner, ErrOld, counter.ErrBusy (nothing was made) or counter.ErrUnavailable: repeat the
// call.
func (o *Owner) Do(ctx context.Context, call *Call) (Answer, error) {
	one := newPending(call)
	if err := o.enqueue(one); err != nil {
		return Answer{}, err
	}

	for {
		// Whoever gets the turn makes all calls that wait, so most callers find theirs answered.
		select {
		case <-one.done:
			return one.answer, one.err
		case o.turn <- struct{}{}:
			o.makeTurn()
			o.unlock()
		case <-ctx.Done():
			return Answer{}, o.withdraw(ctx, one)
		}

		// The turn left a call alone if its partition is unsure.
		select {
		case <-one.done:
			return one.answer, one.err
		case <-one.ready:
		case <-ctx.Done():
			return Answer{}, o.withdraw(ctx, one)
		}
	}
}

func (o *Owner) enqueue(one *pending) error {
	o.mu.Lock()
	defer o.mu.Unlock()

	p := o.owned[one.Partition]
	if p == nil || o.ctx.Err() != nil {
		return ErrNotOwner
	}
	if o.waiting > 0 && o.waiting+one.changes > o.cfg.Queue {
		return counter.ErrBusy
	}

	o.waiting += one.changes
	p.queue = append(p.queue, one)

	return nil
}

// withdraw takes a call back whose caller waits no longer, and returns the error for it. What is in a turn may be made.
func (o *Owner) withdraw(ctx context.Context, one *pending) error {
	o.mu.Lock()
	defer o.mu.Unlock()

	if p := o.owned[one.Partition]; p != nil {
		before := len(p.queue)
		p.queue = slices.DeleteFunc(p.queue, func(other *pending) bool { return other == one })
		o.waiting -= one.changes * (before - len(p.queue))
	}

	return fmt.Errorf("owner: %w: %w", counter.ErrUnavailable, context.Cause(ctx))
}

// answer answers a call.
func (o *Owner) answer(one *pending, a Answer, err error) {
	o.mu.Lock()
	o.waiting -= one.changes
	o.mu.Unlock()

	one.answer = a
	one.err = err
	close(one.done)
}

func (o *Owner) lock(ctx context.Context) error {
	select {
	case o.turn <- struct{}{}:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("owner: %w", context.Cause(ctx))
	case <-o.ctx.Done():
		return ErrNotOwner
	}
}

func (o *Owner) unlock() { <-o.turn }

// makeTurn makes the calls that wait. The caller has the turn.
func (o *Owner) makeTurn() {
	drafted := o.judge(o.take())

	var dirty []*partition
	var commits []rows.Commit
	for _, p := range drafted {
		if p.draft.empty() {
			o.land(p) // nothing was changed, and what the answers say is committed
			continue
		}

		p.commit = p.draft.commit()
		dirty = append(dirty, p)
		commits = append(commits, p.commit)
	}

	o.commit(dirty, commits)
	o.forget()
}

// take moves waiting calls into the turn, and returns the partitions that have any.
func (o *Owner) take() []*partition {
	o.mu.Lock()
	defer o.mu.Unlock()

	var work []*partition
	for _, p := range o.owned {
		if p == nil || p.unsure || len(p.queue) == 0 {
			continue
		}

		p.take(o.cfg.Batch)
		p.callQueue() // those that were left wait for another turn
		work = append(work, p)
	}

	return work
}

// judge drafts the calls of partitions, reading the rows that are missing, and returns the partitions whose drafts are
// complete.
func (o *Owner) judge(work []*partition) []*partition {
	now := time.Now()
	complete := make([]*partition, 0, len(work))
	for len(work) > 0 {
		var incomplete []*partition
		for _, p := range work {
			p.judge(now)
			switch {
			case p.draft.malformed != nil:
				o.fail(p, fmt.Errorf("owner: %w: %w", ErrMalformed, p.draft.malformed))
			case len(p.draft.missing) > 0:
				incomplete = append(incomplete, p)
			default:
				complete = append(complete, p)
			}
		}

		work = o.read(incomplete)
	}

	return complete
}

// read reads the rows that the drafts of partitions miss, and returns the partitions that have them now.
func (o *Owner) read(work []*partition) []*partition {
	var addresses []rows.Address
	for _, p := range work {
		for name := range p.draft.missing {
			addresses = append(addresses, rows.Address{Partition: p.id, Name: name})
		}
	}
	if len(addresses) == 0 {
		return nil
	}

	ctx, cancel := context.WithTimeout(o.ctx, o.cfg.WriteTimeout)
	defer cancel()
	errs := map[int]error{}
	for i, found := range o.store.Read(ctx, addresses) {
		at := addresses[i]
		if found.Err != nil {
			errs[at.Partition] = found.Err
			continue
		}
		p := work[slices.IndexFunc(work, func(p *partition) bool { return p.id == at.Partition })]
		p.rows.put(at.Name, row{value: found.Value, number: p.number}, rowSize(at.Name, found.Value))
	}

	return slices.DeleteFunc(work, func(p *partition) bool {
		err := errs[p.id]
		if err != nil {
			o.fail(p, fmt.Errorf("owner: read: %w: %w", counter.ErrUnavailable, err))
		}
		return err != nil
	})
}

// commit makes the commits of partitions and goes on with the outcomes. The caller has the turn.
func (o *Owner) commit(partitions []*partition, commits []rows.Commit) {
	if len(commits) == 0 {
		return
	}

	errs := o.write(commits)
	for i, p := range partitions {
		o.settled(p, errs[i])
	}
}

// write makes commits, with a limit in time.
func (o *Owner) write(commits []rows.Commit) []error {
	ctx, cancel := context.WithTimeout(o.ctx, o.cfg.WriteTimeout)
	defer cancel()

	return o.store.Commit(ctx, commits)
}

// settled goes on with p when the outcome of its commit is known, or unknown. The caller has the turn.
func (o *Owner) settled(p *partition, err error) {
	var fenced *rows.Fenced
	var lost *rows.Lost
	var known *rows.Known

	switch {
	case err == nil:
		p.number = p.commit.Number
		o.land(p)
	case errors.As(err, &known):
		p.learn(known.IDs)
		o.requeue(p)
	case errors.As(err, &lost), errors.As(err, &fenced):
		o.heal(p) // or give it up, if another process has claimed it
	case errors.Is(err, rows.ErrFull):
		o.fail(p, fmt.Errorf("owner: %w: %w", counter.ErrBusy, err))
	default:
		o.doubt(p)
	}
}

// land moves the draft of p into memory and answers its calls.
func (o *Owner) land(p *partition) {
	answers := p.landDraft()
	for i, one := range p.calls {
		o.answer(one, answers[i].Answer, answers[i].err)
	}
	p.calls = nil
}

// fail answers the calls in the turn of p with an error. Nothing of them was made.
func (o *Owner) fail(p *partition, err error) {
	for _, one := range p.calls {
		o.answer(one, Answer{}, err)
	}
	p.calls = nil
	p.draft = nil
}

// giveUp ends the ownership of p and sends its callers elsewhere. The caller has the turn.
func (o *Owner) giveUp(p *partition) {
	o.fail(p, ErrNotOwner)

	o.mu.Lock()
	if o.owned[p.id] == p {
		o.owned[p.id] = nil
	}
	queue := p.queue
	p.queue = nil
	o.mu.Unlock()

	for _, one := range queue {
		o.answer(one, Answer{}, ErrNotOwner)
	}
}

// requeue puts the calls in the turn of p before those that wait. A later turn judges them anew.
func (o *Owner) requeue(p *partition) {
	o.mu.Lock()
	defer o.mu.Unlock()

	p.queue = append(p.calls, p.queue...)
	p.calls = nil
	p.draft = nil
	p.callQueue()
}

// heal claims p again and writes every row that the store may lack, or gives p up if another process has claimed it. The
// calls in the turn of p are judged anew after that. The caller has the turn.
func (o *Owner) heal(p *partition) {
	o.requeue(p)

	ctx, cancel := context.WithTimeout(o.ctx, o.cfg.WriteTimeout)
	claims, err := o.store.Claim(ctx, o.cfg.Name, []rows.Former{{Partition: p.id, Epoch: p.epoch}})
	cancel()
	if err != nil {
		// The claim may have been granted. An empty commit, repeated until the store answers, leads here again.
		p.commit = p.nothing()
		o.doubt(p)
		return
	}
	if claims[0].Epoch == 0 {
		o.giveUp(p)
		return
	}

	p.commit = p.healing(claims[0])
	o.commit([]*partition{p}, []rows.Commit{p.commit})
}

// doubt leaves p to a goroutine of its own, because the outcome of its commit is unknown. Until it is known the turns
// leave p alone.
func (o *Owner) doubt(p *partition) {
	o.mu.Lock()
	defer o.mu.Unlock()

	p.unsure = true
	o.wg.Go(func() { o.settle(p) })
}

// settle repeats the commit of p until its outcome is known. An earlier attempt may still reach a store that is full now
// but not then, so a full store decides nothing.
func (o *Owner) settle(p *partition) {
	err := error(rows.ErrUnavailable)
	for errors.Is(err, rows.ErrUnavailable) || errors.Is(err, rows.ErrFull) {
		if !wake.Wait(o.ctx, o.cfg.RepeatAfter, nil) {
			return
		}
		err = o.write([]rows.Commit{p.commit})[0]
	}

	if o.lock(o.ctx) != nil {
		return
	}
	defer o.unlock()

	o.mu.Lock()
	p.unsure = false
	released := o.owned[p.id] != p
	p.callQueue()
	o.mu.Unlock()

	// The callers of a partition that was released meanwhile have turned to its next owner, which finds what was made.
	if !released {
		o.settled(p, err)
	}
}

// verify finds out, also without any traffic, whether the store has lost something.
func (o *Owner) verify() {
	const parts = 5 // of the partitions, one after another, so that the store does not get all at once
	for turn := 0; wake.Wait(o.ctx, o.cfg.VerifyEvery/parts, nil); turn++ {
		if o.lock(o.ctx) != nil {
			return
		}
		o.verifyEach(turn%parts, parts)
		o.unlock()
	}
}

// verifyEach makes empty commits of the partitions whose number is part modulo parts. The caller has the turn.
func (o *Owner) verifyEach(part, parts int) {
	var idle []*partition
	var commits []rows.Commit
	for _, p := range o.partitions() {
		if p.id%parts != part || o.isUnsure(p) {
			continue
		}

		p.commit = p.nothing()
		idle = append(idle, p)
		commits = append(commits, p.commit)
	}

	o.commit(idle, commits)
}

func (o *Owner) isUnsure(p *partition) bool {
	o.mu.Lock()
	defer o.mu.Unlock()

	return p.unsure
}

// forget keeps the rows in memory within their size. The caller has the turn.
func (o *Owner) forget() {
	size := 0
	for _, p := range o.partitions() {
		size += p.rows.size + p.ids.size
	}
	if size < o.cfg.Memory/2 {
		return
	}

	// What was used since the last time is the younger half.
	for _, p := range o.partitions() {
		p.rows.age()
		p.ids.age()
	}
}
