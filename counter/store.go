package counter

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"time"

	"github.com/cespare/xxhash/v2"

	"headcount/counter/limit"
	"headcount/presence"
)

// Bounds of one operation and one read.
const (
	MaxChanges   = 1000              // of one Op
	MaxMembers   = 1000              // added and removed by one Change, together
	MaxDelta     = 1_000_000_000_000 // of Add, either way
	MaxLedger    = 1000              // entries of one page of a ledger
	MaxKeys      = 100               // of one Read from outside
	MaxText      = 200               // code points of a reason or an author
	IdentityKept = 24 * time.Hour    // how long an identity is remembered
)

// Verb is what a Change does.
type Verb uint8

// The verbs. Their numbers may be kept by stores: they never change.
const (
	Add     Verb = 1 // Delta, for a Sum or Exact
	Adjust  Verb = 2 // Delta, any but 0, for a Sum or Exact, with Reason and By
	Reset   Verb = 3 // to 0 and no members, any kind, with Reason and By
	Edit    Verb = 4 // members to Join and Leave, for Members; for Unique to Join alone
	Delete  Verb = 5 // the counter, its members, registers and ledger are gone
	Reshard Verb = 6 // a step of a sharded Sum; for stores in Redis alone
	Set     Verb = 7 // an Exact to Delta, within its bounds, with Reason and By
)

// Change is one change of one counter.
type Change struct {
	Key  string
	Rule *Rule // the first that fits Key; it gives a new counter its kind, and an Exact its bounds
	Verb Verb
	// Delta is not 0, but for Set, of which it is the value. That of Add is at most MaxDelta either way, but when Merged.
	Delta int64
	// Merged is how many changes the Combiner made one of: 0 or 1 for none. It
	// merges what rules call Sum. A store refuses, with ErrKind, a merged change of
	// a counter that was made as another kind; the Combiner makes them one by one.
	Merged      int
	Join, Leave []string     // distinct, at most MaxMembers together
	Reason, By  string       // of Add to an Exact optional
	Dimensions  []Dimension  // of Add to a Sum; of distinct names, which the rule has
	Reshard     *ReshardStep // of Reshard
}

// Dimension is one value under one name of the rule's.
type Dimension struct{ Name, Value string }

// Identity stands for an Idempotency-Key in its space. The zero Identity is none.
type Identity [16]byte

// IdentityOf is the identity of the key that a caller sent. Space is the counter's
// key, or "*" for batches; caller is empty for API keys, which share theirs, and
// else the caller's own identity. It begins with 32 bits of a hash of the space, so
// that a store in many parts can keep it where the counter is; those of batches
// are spread.
func IdentityOf(space, caller, key string) Identity {
	b := make([]byte, 0, 64)
	for _, part := range [...]string{space, caller} {
		b = binary.AppendUvarint(b, uint64(len(part)))
		b = append(b, part...)
	}
	b = append(b, key...)
	hash := sha256.Sum256(b)
	if space != "*" {
		binary.LittleEndian.PutUint32(hash[:4], uint32(xxhash.Sum64String(space)))
	}
	return Identity(hash[:16])
}

// Of reports whether id is of that space, but for a chance of one in 2^32.
func (id Identity) Of(space string) bool {
	return space != "*" && binary.LittleEndian.Uint32(id[:4]) == uint32(xxhash.Sum64String(space))
}

// Op is one operation: its changes are judged in their order and made all or
// not at all; a Redis Cluster may leave one in part whose counters are not exact, see package counterredis. An Op of several changes has only Add, of any keys, also of one
// key several times; the rules of all are Exact, or none is.
type Op struct {
	Changes  []Change
	Identity Identity
}

// OfBatch reports whether op has an identity of a batch, under which operations on any other counters may come.
func (op *Op) OfBatch() bool {
	return op.Identity != (Identity{}) && !(len(op.Changes) == 1 && op.Identity.Of(op.Changes[0].Key))
}

// Keys are those of its counters, each once.
func (op *Op) Keys() []string {
	keys := make([]string, 0, len(op.Changes))
	seen := make(map[string]bool, len(op.Changes))
	for i := range op.Changes {
		if key := op.Changes[i].Key; !seen[key] {
			seen[key] = true
			keys = append(keys, key)
		}
	}
	return keys
}

// ReadFrom returns its counters as they are in a store, exactly and by key.
func (op *Op) ReadFrom(ctx context.Context, from interface {
	Read(ctx context.Context, keys []string, member string, lag time.Duration) ([]Reading, error)
}) (map[string]Counter, error) {
	found, err := from.Read(ctx, op.Keys(), "", 0)
	if err != nil {
		return nil, err
	}
	by := make(map[string]Counter, len(found))
	for _, r := range found {
		by[r.Key] = r.Counter
	}
	return by, nil
}

// Counters are those of its changes, as they are in by.
func (op *Op) Counters(by map[string]Counter) []Counter {
	out := make([]Counter, len(op.Changes))
	for i := range op.Changes {
		out[i] = by[op.Changes[i].Key].Or(op.Changes[i].Rule.Kind)
	}
	return out
}

// Check says, with ErrOp, why no store may take op, or nil. It does not look at
// keys, members and texts: who made the Op has checked them.
func (op *Op) Check() error {
	if n := len(op.Changes); n == 0 || n > MaxChanges {
		return fmt.Errorf("%w: %d changes", ErrOp, n)
	}
	for i := range op.Changes {
		c := &op.Changes[i]
		switch {
		case c.Rule == nil:
			return fmt.Errorf("%w: a change of %q without a rule", ErrOp, c.Key)
		case (c.Rule.Kind == Exact) != (op.Changes[0].Rule.Kind == Exact):
			return fmt.Errorf("%w: only one of %q and %q is exact", ErrOp, op.Changes[0].Key, c.Key)
		case c.Verb != Add && len(op.Changes) > 1:
			return fmt.Errorf("%w: %q is not the only change and does not add", ErrOp, c.Key)
		case (c.Verb == Add || c.Verb == Adjust) && c.Delta == 0:
			return fmt.Errorf("%w: a change of %q by 0", ErrOp, c.Key)
		case c.Verb == Edit && (len(c.Join)+len(c.Leave) == 0 || len(c.Join)+len(c.Leave) > MaxMembers):
			return fmt.Errorf("%w: %d members of %q", ErrOp, len(c.Join)+len(c.Leave), c.Key)
		case c.Verb < Add || c.Verb > Set, (c.Verb == Reshard) != (c.Reshard != nil):
			return fmt.Errorf("%w: verb %d of %q", ErrOp, c.Verb, c.Key)
		}
	}
	return nil
}

// Result is what became of one Op.
type Result struct {
	// Counters has one for each change, in order, as it is after the whole
	// operation, and perhaps after others that went with it. It is nil with Err.
	Counters []Counter
	Replay   bool // nothing was changed: the identity is remembered
	// Err is nil, a *Conflict (nothing was changed), ErrUnavailable (nothing was
	// changed, or it is unknown) or ErrOp.
	Err error
}

// Writer is the half of a store that changes counters.
type Writer interface {
	// Apply makes ops, in their order, in one durable step: when it returns, each
	// operation whose Err is nil is as safe as the store promises, with the
	// identity under which it was made, and every later Read has it. The results
	// are in the order of ops.
	//
	// An op that is refused does not touch the others. An op whose identity is
	// remembered, also from earlier in the same call, is a replay. Apply may be
	// called from any goroutine, also for the same keys at the same time. The
	// Combiner passes a context that ends only after its WriteTimeout.
	Apply(ctx context.Context, ops []Op) []Result
}

// Reading is a counter as one reader sees it.
type Reading struct {
	Counter
	Mine bool // the member asked about is in the set; false for kinds that know none
}

// Entry is one change in a ledger.
type Entry struct {
	Seq                  uint64 // from 1 without gaps; old entries go in order
	At                   time.Time
	Op                   LedgerOp
	Delta, Before, After int64 // Before + Delta = After
	Reason, By           string
}

// LedgerOp says which call made an entry.
type LedgerOp uint8

// The ops. Their numbers are kept by stores: they never change.
const (
	LedgerIncrement LedgerOp = 1 // Add upwards
	LedgerDecrement LedgerOp = 2 // Add downwards
	LedgerAdjust    LedgerOp = 3
	LedgerReset     LedgerOp = 4
	LedgerSet       LedgerOp = 5
)

var ledgerNames = [...]string{LedgerIncrement: "increment", LedgerDecrement: "decrement", LedgerAdjust: "adjust", LedgerReset: "reset", LedgerSet: "set"}

// String is the outside name.
func (o LedgerOp) String() string {
	if int(o) < len(ledgerNames) {
		return ledgerNames[o]
	}
	return ""
}

// Ledger is a page of a ledger.
type Ledger struct {
	Entries []Entry
	More    bool // there are newer entries
}

// Aggregate is the sum of the values of all counters with a prefix that exist, or the
// estimate of their union when they are of kind Unique.
type Aggregate struct {
	Counters int64
	Value    int64
}

// Reader is the half of a store that reads. Its methods may be called from any
// goroutine. Their errors are ErrUnavailable, but where they say more.
type Reader interface {
	// Read returns the counters of keys, distinct and valid, in their order, each
	// with whether member is in it (an empty member is in none). A counter never
	// touched has only its Key. With lag 0, everything acknowledged by any process
	// before the call began is in the answer; else it may be as much as lag old,
	// and when the store is away the answer may be Stale.
	Read(ctx context.Context, keys []string, member string, lag time.Duration) ([]Reading, error)
	// Ledger returns at most limit entries with a Seq greater than after, oldest
	// first. A counter without a ledger has an empty one.
	Ledger(ctx context.Context, key string, after uint64, limit int) (Ledger, error)
	// History returns a counter, and what it gained in steps of that length, from the
	// step with the number from to that before to, oldest first. Steps without a gain
	// may be missing, and steps that are not kept any more are. A step of a Unique may
	// have 12 KB: see Archive.
	History(ctx context.Context, key string, step time.Duration, from, to int64) (Counter, []Gain, error)
	// Dimension returns a counter, and what it counted under the values of a dimension.
	Dimension(ctx context.Context, key, name string) (Counter, Counted, error)
	// Aggregate is over the counters of one site whose name begins with prefix, also the
	// empty one, which is of the default site, each as it was at some moment of the call, with everything that was
	// acknowledged before it. A sum that leaves 64 bits is a *Conflict of ErrOverflow, kind Unique beside other kinds one of ErrKind.
	Aggregate(ctx context.Context, prefix string) (Aggregate, error)
	// Size returns about how many counters of one site have a name that begins with prefix. It may leave out
	// what changed lately, and holds nobody up.
	Size(ctx context.Context, prefix string) (int64, error)
	// Sets returns keys of sets, some at a time, and the cursor for the next ones. The
	// first cursor is empty, and so is that after the last. A set that exists all the
	// while is returned at least once; a key that is no set's may be, too.
	Sets(ctx context.Context, cursor string) (keys []string, next string, err error)
}

// Update is the newest of a counter that changed.
type Update struct {
	Counter Counter // with the zero Version: it was deleted
	// Joined and Left are the members whose place changed since the last update of
	// the counter. When Reread is set they do not tell all: who wants to know reads.
	Joined, Left []string
	Reread       bool
}

// Watch is one watcher's. Its methods may be called from any goroutine.
type Watch interface {
	// Follow adds keys. Every change that is made after Follow returned is told,
	// or a newer one in its place. Following twice is following once.
	Follow(ctx context.Context, keys ...string) error
	// Unfollow takes keys away. An update under way may still come.
	Unfollow(keys ...string)
	// Close ends the watch; when it returns, no call is under way nor comes.
	Close()
}

// Feed tells of changes.
type Feed interface {
	// Watch begins a watch that follows nothing yet. It calls told with updates
	// of different keys, one call at a time, from a goroutine of the feed's; told
	// must not call Close. A slow told costs updates, not memory: those of one key
	// overwrite each other, so no more wait than keys are followed. A feed that
	// may have missed changes calls lost: read again what is followed.
	Watch(told func([]Update), lost func()) Watch
}

// LimitResult is what became of one call on a limit. Err is nil or ErrUnavailable: then it is
// unknown whether the cost was counted, never in part.
type LimitResult struct {
	limit.Answer
	Err error
}

// Limiter is the part of a store that keeps limits, apart from counters: a limit's key and a
// counter's have nothing to do with each other. States end by themselves, when they count for
// nothing any more.
type Limiter interface {
	// Limit judges calls, which have been checked, in their order, as package limit does, each by the
	// state of its Name, by the store's clock. What it lets pass is as safe as the store promises
	// of counters before it returns: neither two processes nor a crash let more pass. What is
	// refused changes nothing. Limit may be called from any goroutine.
	Limit(ctx context.Context, calls []limit.Call) []LimitResult
}

// Store is all of a store. Callers take the smallest part they need.
type Store interface {
	Writer
	Reader
	Feed
	Limiter
	TopStore
	// Close ends what the store runs. Calls under way or after it fail with
	// ErrUnavailable. Watches are closed before.
	Close() error
}

// States is told when a store that is a server of its own comes and goes, from one
// goroutine; it begins with away. It must not block.
type States interface{ StoreState(up bool) }

// NewIncarnation is that of a counter made now, by a store that has deleted
// none with an incarnation greater than deleted.
func NewIncarnation(now time.Time, deleted uint64) uint64 {
	return max(uint64(max(now.UnixMilli(), 1)), deleted+1)
}

// Version is the version of a counter; presence has the word.
type Version = presence.Version
