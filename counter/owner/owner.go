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
// another process has claimed the partition, this one gives it up, and its callers turn to the new owner. When the
// store has lost something, the owner claims again, and writes every row that it knows and the store may lack.
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
	"sync/atomic"
	"time"

	"headcount/counter"
	"headcount/internal/rows"
)

var (
	// ErrNotOwner means that this process does not own the partition. The caller repeats the call at the owner, which
	// knows whether it was made.
	ErrNotOwner = errors.New("not the owner")
	// ErrOld means that the stream has sent a later call, so no caller waits for this one. It was not made now.
	ErrOld = errors.New("a later call has overtaken this one")
)

// AnyRegion is the Config.Region of an owner that imports an export of some region without knowing the region's name.
// Such an owner may only restore counters, not change them.
const AnyRegion = "*"

// Config tunes an Owner. A zero field takes its default.
type Config struct {
	// Name identifies this run of the process. It must be unique, also among earlier runs.
	Name string
	// Queue is the maximum number of waiting changes, default 65,536. Beyond it calls fail with counter.ErrBusy.
	Queue int
	// Batch is the number of changes after which a turn takes no further call of a partition, default 4,096.
	Batch int
	// WriteTimeout limits one call of the store, default 3s. A commit without an answer is repeated. Negative: no
	// limit, for a store in memory.
	WriteTimeout time.Duration
	// RepeatAfter is the pause before a commit without an answer is repeated, default 100ms.
	RepeatAfter time.Duration
	// VerifyEvery is how often an owner checks that the store has lost nothing of a partition, default 1s. Negative:
	// never, for stores that lose nothing. Then the owner has no need to remember what it wrote.
	VerifyEvery time.Duration
	// HealRows is the number of rows after which a commit that restores lost rows is full, default 2,000.
	HealRows int
	// SweepEvery is how often an owner deletes expired rows, default 1m. Negative: never.
	SweepEvery time.Duration
	// Memory bounds the rows that are kept in memory, in bytes, default 64 MB: that much for the rows that were used
	// last, and as much again for the rows that were written last. Negative: none, for a store in memory.
	Memory int
	// Tier is the store if it is tiered: rows of counters that nobody changed for ColdAfter are evicted from its fast
	// store, and read from the durable one when they are needed. Nil: rows are not evicted.
	Tier      Tier
	ColdAfter time.Duration
	// ExactOutside says that owners do not have the exact counters. The store then answers reads of heads in partition
	// Outside.
	ExactOutside bool
	// Region is the name of this region if other regions share its counters, or AnyRegion.
	Region string
	// Shared is called after a commit with the keys of the counters whose shares must be sent to other regions. It must
	// not block. The epoch is that of the claim: under one claim, no key is left out.
	Shared func(partition int, epoch uint64, keys []string)
	// Hub receives the changes directly, for a process that is the only user of its store. Nil: they are published in
	// the store.
	Hub *counter.Hub
}

// InMemory is the Config of an owner whose store is in the memory of this process: rows are read from there, the store
// never blocks, and it loses nothing.
var InMemory = Config{Name: "only", WriteTimeout: -1, VerifyEvery: -1, Memory: -1}

func (cfg Config) withDefaults() Config {
	cfg.Queue = cmp.Or(cfg.Queue, 1<<16)
	cfg.Batch = cmp.Or(cfg.Batch, 4096)
	cfg.WriteTimeout = cmp.Or(cfg.WriteTimeout, 3*time.Second)
	cfg.RepeatAfter = cmp.Or(cfg.RepeatAfter, 100*time.Millisecond)
	cfg.VerifyEvery = cmp.Or(cfg.VerifyEvery, time.Second)
	cfg.HealRows = cmp.Or(cfg.HealRows, 2000)
	cfg.SweepEvery = cmp.Or(cfg.SweepEvery, time.Minute)
	cfg.Memory = cmp.Or(cfg.Memory, 64<<20)

	return cfg
}

// Owner owns partitions and changes their counters. All methods may be called from any goroutine.
type Owner struct {
	cfg   Config
	store rows.Store
	near  *residents // the counters of a store in memory, or nil; then store is the same value

	ctx  context.Context // ends with Close
	stop context.CancelFunc
	wg   sync.WaitGroup // verify, sweep, and claimAgain or commitAll of each partition that is unsure

	waiting atomic.Int64  // changes of all calls that are not answered
	cached  atomic.Int64  // rows in memory, as of a moment ago
	bytes   atomic.Int64  // of these rows
	healed  atomic.Uint64 // rows that were written again because the store had lost them

	// turn is a lock whose waiters may give up. Its holder owns the memory of all partitions, and the fields below.
	turn    turnLock
	memory  memory
	scratch scratch

	// claiming is a lock whose waiters may give up: Own makes one claim at a time. It is locked before turn.
	claiming   turnLock
	reclaiming turnLock      // one partition at a time is claimed again after a loss. It is locked before turn
	healing    chan struct{} // has capacity 1: one partition at a time is healed

	mu    sync.Mutex // guards the fields below
	owned [rows.Partitions]*partition
	busy  []*partition // partitions with calls in their queue; see partition.listed
}

// scratch has the buffers of a turn, which the next turn reuses.
type scratch struct {
	call      *pending // the call of the caller that has the turn, if no other goroutine can see it
	drafts    []*draft
	work      []*partition
	ready     []*partition
	complete  []*partition
	addresses []rows.Address
	commits   []rows.Commit
}

// New returns an Owner that owns nothing yet. Close ends it.
func New(store rows.Store, cfg Config) *Owner {
	o := &Owner{cfg: cfg.withDefaults(), store: store}
	o.turn = newTurnLock()
	o.claiming = newTurnLock()
	o.reclaiming = newTurnLock()
	o.healing = make(chan struct{}, 1)
	o.memory = newMemory(&o.cfg)
	// A store in memory answers reads itself, so it needs no cache, and its counters can be residents.
	if near, ok := store.(near); ok && o.cfg.Memory < 0 {
		o.near = newResidents(near)
		o.store = o.near
	}
	o.ctx, o.stop = context.WithCancel(context.Background())
	if o.cfg.VerifyEvery > 0 {
		o.wg.Go(o.verify)
	}
	if o.cfg.SweepEvery > 0 {
		o.wg.Go(o.sweep)
	}
	if o.cfg.Tier != nil {
		o.wg.Go(o.evictEach)
	}

	return o
}

// Rows returns the store of rows, including the counters that this owner keeps instead of the store. It is for reading
// only.
func (o *Owner) Rows() rows.Store { return o.store }

// Close gives up all partitions once the current turn has ended. Later calls fail with ErrNotOwner. It must be called
// only once.
func (o *Owner) Close() {
	// This ends a call of the store that is under way, so that the turn is free soon.
	o.stop()
	_ = o.turn.lock(nil, nil) // never unlocked, so that no turn can start a goroutine any more

	for _, p := range o.partitions() {
		o.giveUp(p)
	}
	// Goroutines that wait for the turn give up, because ctx has ended.
	o.wg.Wait()
}

// Own claims partitions from whichever process owns them now, and keeps those that this process already owns. After an
// error some may be claimed.
func (o *Owner) Own(ctx context.Context, partitions ...int) error {
	if err := o.wait(ctx, o.claiming); err != nil {
		return err
	}
	defer o.claiming.unlock()

	// Claiming a partition again would fence off this process itself.
	var wanted []rows.Former
	for _, id := range partitions {
		if o.partition(id) == nil {
			wanted = append(wanted, rows.Former{Partition: id})
		}
	}
	if len(wanted) == 0 {
		return nil
	}

	// Without the turn, because a store that does not answer must not hold up the partitions that are owned.
	claims, err := o.store.Claim(ctx, o.cfg.Name, wanted)
	if err != nil {
		return fmt.Errorf("owner: claim: %w", err)
	}

	// The time of ctx may be over, if only some of the claims had an answer.
	if err := o.lock(o.ctx); err != nil {
		return err
	}
	defer o.unlock()
	o.mu.Lock()
	defer o.mu.Unlock()

	for i, claim := range claims {
		id := wanted[i].Partition
		if claim.Err != nil {
			// A master of a Redis Cluster may be away. The partitions on other masters are owned all the same.
			err = fmt.Errorf("owner: claim of partition %d: %w", id, claim.Err)
			continue
		}
		o.owned[id] = newPartition(id, claim, &o.memory)
		o.owned[id].exactOutside = o.cfg.ExactOutside
	}

	return err
}

// Stats are figures about an Owner.
type Stats struct {
	Partitions int
	Waiting    int    // changes of calls that are not answered
	Rows       int    // in memory, as of a moment ago
	Bytes      int    // of these rows, estimated
	Healed     uint64 // rows written again after a store had lost some
}

// Stats returns figures about o.
func (o *Owner) Stats() Stats {
	return Stats{
		Partitions: len(o.partitions()),
		Waiting:    int(o.waiting.Load()),
		Rows:       int(o.cached.Load()),
		Bytes:      int(o.bytes.Load()),
		Healed:     o.healed.Load(),
	}
}

// Owns reports whether this process owns a partition, as far as it knows.
func (o *Owner) Owns(partition int) bool { return o.partition(partition) != nil }

// Release gives up partitions once the current turn has ended, the store has confirmed that it has lost nothing, and
// all lost rows of theirs are written again. From then on their calls fail with ErrNotOwner. If ctx ends first, the
// partitions are kept.
func (o *Owner) Release(ctx context.Context, partitions ...int) error {
	for {
		// Only this process has the rows that the store lost. The next owner would go on without them.
		for _, id := range partitions {
			if err := o.awaitHealed(ctx, id); err != nil {
				return err
			}
		}
		released, err := o.tryRelease(ctx, partitions)
		if released || err != nil {
			return err
		}
	}
}

// tryRelease gives up partitions, unless the store turns out to have lost rows of one. Then it gives up none.
func (o *Owner) tryRelease(ctx context.Context, partitions []int) (released bool, err error) {
	if err := o.lock(ctx); err != nil {
		return false, err
	}
	defer o.unlock()

	if o.cfg.VerifyEvery > 0 {
		o.check(o.these(partitions))
	}
	// The check may have given up some of them.
	owned := o.these(partitions)
	if slices.ContainsFunc(owned, o.isHealing) {
		return false, nil
	}
	for _, p := range owned {
		o.giveUp(p)
	}

	return true, nil
}

// these returns those of some partitions that this process owns.
func (o *Owner) these(partitions []int) (owned []*partition) {
	for _, id := range partitions {
		if p := o.partition(id); p != nil {
			owned = append(owned, p)
		}
	}

	return owned
}

// awaitHealed waits until all lost rows of a partition are written again.
func (o *Owner) awaitHealed(ctx context.Context, id int) error {
	o.mu.Lock()
	var healed chan struct{}
	if p := o.owned[id]; p != nil {
		healed = p.healed
	}
	o.mu.Unlock()
	if healed == nil {
		return nil
	}

	select {
	case <-healed:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("owner: lost rows are not written again yet: %w", context.Cause(ctx))
	}
}

func (o *Owner) partition(id int) *partition {
	o.mu.Lock()
	defer o.mu.Unlock()

	return o.owned[id]
}

// partitions returns all partitions that this process owns.
func (o *Owner) partitions() []*partition {
	o.mu.Lock()
	defer o.mu.Unlock()

	return slices.DeleteFunc(slices.Clone(o.owned[:]), func(p *partition) bool { return p == nil })
}

// lock takes the turn. It fails if ctx or the owner ends first, with ErrNotOwner or counter.ErrBusy.
func (o *Owner) lock(ctx context.Context) error { return o.wait(ctx, o.turn) }

// wait takes a lock, or fails as the method lock does.
func (o *Owner) wait(ctx context.Context, l turnLock) error {
	switch {
	case l.lock(ctx.Done(), o.ctx.Done()):
		return nil
	// An owner that has ended owns nothing any more.
	case o.ctx.Err() != nil:
		return ErrNotOwner
	default:
		return fmt.Errorf("owner: %w: %w", counter.ErrBusy, context.Cause(ctx))
	}
}

func (o *Owner) unlock() { o.turn.unlock() }
