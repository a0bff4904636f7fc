package counter

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"slices"
	"time"

	"github.com/cespare/xxhash/v2"

	"headcount/counter/limit"
	"headcount/presence"
)

// Bounds of one operation and one read.
const (
	MaxChanges         = 1000              // of one Op
	MaxMembers         = 1000              // added and removed by one Change, together
	MaxDelta           = 1_000_000_000_000 // absolute value of the Delta of Add
	MaxLedger          = 1000              // entries of one page of a ledger
	MaxKeys            = 100               // of one Read by a client
	MaxText            = 200               // code points of a reason or an author
	IdempotencyKeyKept = 24 * time.Hour    // how long an idempotency key is remembered
)

// Verb is what a Change does.
type Verb uint8

// The verbs. Processes of several releases send each other their numbers, so these never change. A former release had a
// verb with the number 6.
const (
	Add    Verb = 1 // adds Delta to a Sum or Exact
	Adjust Verb = 2 // adds any Delta but 0 to a Sum or Exact, with Reason and By
	Reset  Verb = 3 // makes the value 0 and removes all members, for any kind, with Reason and By
	Edit   Verb = 4 // adds Join to Members or Unique and removes Leave from Members
	Delete Verb = 5 // deletes the counter with its members, registers, ledger and history
	Set    Verb = 7 // gives an Exact the value Delta, within its bounds, with Reason and By

	Reserve Verb = 8  // takes Delta out of an Exact until its reservation is committed, or is cancelled or expires
	Commit  Verb = 9  // ends a reservation; its amount stays taken
	Cancel  Verb = 10 // ends a reservation and gives its amount back
	Expire  Verb = 11 // does so when its time has come, and nothing before
)

// Change is one change of one counter.
type Change struct {
	Key  string
	Rule *Rule // the first that fits Key; it gives a new counter its kind, and an Exact its bounds
	Verb Verb
	// Delta is not 0, except for Set, whose value it is. Its absolute value is at most MaxDelta for an Add that is not
	// Merged.
	Delta int64
	// Merged is how many changes the Combiner merged into this one; 0 or 1 means none. It merges additions to counters
	// whose rule says Sum. A store refuses a merged change with ErrKind when the counter was created with another kind,
	// and the Combiner then makes the changes one by one.
	Merged      int
	Join, Leave []string    // distinct, at most MaxMembers together
	Reason, By  string      // optional for Add to an Exact
	Dimensions  []Dimension // for Add to a Sum; with distinct names of the rule
	Hold        *Hold       // for Reserve, Commit, Cancel and Expire
}

// Dimension is one value of one of a rule's dimensions.
type Dimension struct{ Name, Value string }

// IdempotencyKey is the hash of an Idempotency-Key. The zero IdempotencyKey means that there is none.
type IdempotencyKey [16]byte

// NewIdempotencyKey returns the hash of an Idempotency-Key. Space is the counter's key, or "*" for batches;
// caller is empty for API keys, which share one space, and otherwise the caller's own identity. An idempotency
// key begins with 32 bits of the hash of the counter's key, so that a store with several partitions can keep it with
// the counter; those of batches are distributed evenly.
func NewIdempotencyKey(space, caller, key string) IdempotencyKey {
	b := make([]byte, 0, 64)
	for _, part := range [...]string{space, caller} {
		// With their lengths no two different inputs have the same bytes.
		b = binary.AppendUvarint(b, uint64(len(part)))
		b = append(b, part...)
	}
	b = append(b, key...)
	hash := sha256.Sum256(b)

	// A store with several partitions finds the counter's by these bits.
	if space != "*" {
		binary.LittleEndian.PutUint32(hash[:4], uint32(xxhash.Sum64String(space)))
	}

	return IdempotencyKey(hash[:16])
}

// Of reports whether id belongs to that space. It is wrong with a probability of 2^-32.
func (id IdempotencyKey) Of(space string) bool {
	return space != "*" && binary.LittleEndian.Uint32(id[:4]) == uint32(xxhash.Sum64String(space))
}

// Op is one operation. Its changes are judged in order and made together or not at all; of a batch whose counters are
// not exact, each owner makes its part. An Op of several changes has only Add, and a key may occur several times;
// either all of their rules are Exact or none is.
type Op struct {
	Changes        []Change
	IdempotencyKey IdempotencyKey
}

// OfBatch reports whether the idempotency key of op belongs to the space of batches, in which operations on other
// counters may have the same one.
func (op *Op) OfBatch() bool {
	return op.IdempotencyKey != (IdempotencyKey{}) && !(len(op.Changes) == 1 && op.IdempotencyKey.Of(op.Changes[0].Key))
}

// Found has the counters of an operation, as a store had them before it.
type Found struct {
	Readings []Reading // of each counter once
	At       []int     // the index in Readings of each change's counter
}

// exactReader is the part of a store that ReadFrom needs.
type exactReader interface {
	Read(ctx context.Context, keys []string, member string, lag time.Duration) ([]Reading, error)
}

// ReadFrom returns op's counters, read exactly from a store.
func (op *Op) ReadFrom(ctx context.Context, from exactReader) (Found, error) {
	keys := make([]string, 0, len(op.Changes))
	index := make(map[string]int, len(op.Changes))
	is := Found{At: make([]int, len(op.Changes))}
	for i := range op.Changes {
		key := op.Changes[i].Key
		// A batch may change a key several times, and Read takes each key once.
		at, seen := index[key]
		if !seen {
			at = len(keys)
			index[key] = at
			keys = append(keys, key)
		}
		is.At[i] = at
	}

	var err error
	is.Readings, err = from.Read(ctx, keys, "", 0)

	return is, err
}

// ReplayFrom returns the result of a replay of op, which is the counters that a store has now.
func (op *Op) ReplayFrom(ctx context.Context, from exactReader) Result {
	now, err := op.ReadFrom(ctx, from)
	if err != nil {
		return Result{Err: err}
	}

	counters := make([]Counter, len(op.Changes))
	for i, at := range now.At {
		counters[i] = now.Readings[at].Or(op.Changes[i].Rule.Kind)
	}

	return Result{Replay: true, Counters: counters}
}

// Check returns an ErrOp that says why op is invalid, or nil. It does not check keys, members and texts, which the
// parser of the call has checked.
func (op *Op) Check() error {
	if n := len(op.Changes); n == 0 || n > MaxChanges {
		return fmt.Errorf("%w: %d changes", ErrOp, n)
	}

	for i := range op.Changes {
		c := &op.Changes[i]
		if err := c.check(); err != nil {
			return err
		}
		// Exact counters may be in another store, and no transaction spans two.
		if c.Rule.Kind.IsExact() != op.Changes[0].Rule.Kind.IsExact() {
			return fmt.Errorf("%w: only one of %q and %q is exact", ErrOp, op.Changes[0].Key, c.Key)
		}
		if c.Verb != Add && len(op.Changes) > 1 {
			return fmt.Errorf("%w: %q is not the only change and does not add", ErrOp, c.Key)
		}
	}

	return nil
}

// check checks a change by itself.
func (c *Change) check() error {
	if c.Rule == nil {
		return fmt.Errorf("%w: a change of %q without a rule", ErrOp, c.Key)
	}

	switch c.Verb {
	case Add, Adjust:
		if c.Delta == 0 {
			return fmt.Errorf("%w: a change of %q by 0", ErrOp, c.Key)
		}
	case Edit:
		if n := len(c.Join) + len(c.Leave); n == 0 || n > MaxMembers {
			return fmt.Errorf("%w: %d members of %q", ErrOp, n, c.Key)
		}
	case Reserve, Commit, Cancel, Expire:
		return c.checkHold()
	case Reset, Delete, Set: // need nothing more
	default:
		return fmt.Errorf("%w: verb %d of %q", ErrOp, c.Verb, c.Key)
	}

	return nil
}

// Result is the result of one Op.
type Result struct {
	// Counters has the counter of each change, in order, after the whole operation and perhaps after others of the same
	// write. It is nil with Err.
	Counters []Counter
	// Reservation is that of a Reserve, Commit, Cancel or Expire, as it is then; nil otherwise.
	Reservation *Reservation
	// Replay says that nothing was changed, because the idempotency key was remembered, or because the reservation is
	// already as it should be.
	Replay bool
	// Err is nil, a *Conflict (nothing was changed), ErrUnavailable (op may have been made) or ErrOp.
	Err error
}

// Writer is the part of a store that changes counters.
type Writer interface {
	// Apply makes ops in order, in one durable step. When it returns, each operation whose Err is nil is as durable
	// as the store promises, together with its idempotency key, and every later Read sees it. The results are in the
	// order of ops.
	//
	// A refused operation does not affect the others. An operation whose idempotency key is remembered, also from
	// earlier in the same call, is a replay. Apply may be called from any goroutine, also for the same keys at the same
	// time. The Combiner's context ends only after its WriteTimeout.
	Apply(ctx context.Context, ops []Op) []Result
}

// Reading is a counter, and whether one member is in it.
type Reading struct {
	Counter
	Mine bool // always false for kinds other than Members
	// Away says that the counter cannot be read now, although others can: in a store of two servers one is unavailable.
	// Counter has only its Key, and is Stale.
	Away bool
}

// Away returns readings of counters that cannot be read now.
func Away(keys []string) []Reading {
	out := make([]Reading, len(keys))
	for i, key := range keys {
		out[i] = Reading{Counter: Counter{Key: key, Approx: true, Stale: true}, Away: true}
	}

	return out
}

// Entry is one change in a ledger.
type Entry struct {
	Seq    uint64    `json:"seq"` // from 1 without gaps; entries expire in order
	At     time.Time `json:"at"`
	Op     LedgerOp  `json:"op"`
	Delta  int64     `json:"delta"`
	Before int64     `json:"before"`
	After  int64     `json:"after"` // Before + Delta
	Reason string    `json:"reason,omitempty"`
	By     string    `json:"by,omitempty"`
}

// LedgerOp is the call that made an entry.
type LedgerOp uint8

// The ops. Stores keep their numbers, so these never change.
const (
	LedgerIncrement LedgerOp = 1 // Add upwards
	LedgerDecrement LedgerOp = 2 // Add downwards
	LedgerAdjust    LedgerOp = 3
	LedgerReset     LedgerOp = 4
	LedgerSet       LedgerOp = 5
	LedgerReserve   LedgerOp = 6
	LedgerCommit    LedgerOp = 7
	LedgerCancel    LedgerOp = 8
	LedgerExpire    LedgerOp = 9
)

var ledgerNames = [...]string{
	LedgerIncrement: "increment", LedgerDecrement: "decrement", LedgerAdjust: "adjust", LedgerReset: "reset",
	LedgerSet: "set", LedgerReserve: "reserve", LedgerCommit: "commit", LedgerCancel: "cancel", LedgerExpire: "expire",
}

// String returns the op's name in answers.
func (o LedgerOp) String() string {
	if int(o) < len(ledgerNames) {
		return ledgerNames[o]
	}

	return ""
}

// MarshalText implements encoding.TextMarshaler.
func (o LedgerOp) MarshalText() ([]byte, error) { return []byte(o.String()), nil }

// ParseLedgerOp returns the op with that name, or 0.
func ParseLedgerOp(name string) LedgerOp {
	// The first name is empty, and that of no op.
	return LedgerOp(max(slices.Index(ledgerNames[1:], name)+1, 0))
}

// Ledger is a page of a ledger.
type Ledger struct {
	Entries []Entry
	More    bool // there are newer entries
}

// MarshalJSON returns the form of a page that clients see, {"entries":[…],"next":8}, with times in whole seconds. next
// is the last seq of the page, and missing on the last page.
func (l Ledger) MarshalJSON() ([]byte, error) {
	// A copy, because times are shortened below; and one that is not nil, which would be written as null.
	page := struct {
		Entries []Entry `json:"entries"`
		Next    uint64  `json:"next,omitempty"`
	}{Entries: append([]Entry{}, l.Entries...)}
	for i := range page.Entries {
		e := &page.Entries[i]
		e.At = e.At.UTC().Truncate(time.Second)
		if l.More {
			page.Next = e.Seq
		}
	}

	return json.Marshal(page)
}

// Aggregate is the sum of all counters with a prefix, or the estimate of their union when they are of kind Unique.
type Aggregate struct {
	Counters int64
	Value    int64
}

// Reader is the part of a store that reads. Its methods may be called from any goroutine. Their errors are
// ErrUnavailable unless their comment says more.
type Reader interface {
	// Read returns the counters of keys, which are distinct and valid, in order, each with whether member is in it (an
	// empty member is in none). A counter that does not exist has only its Key. With lag 0 the answer contains
	// everything that any process acknowledged before the call began; otherwise it may be up to lag old, and Stale
	// or Away while a part of the store is unavailable.
	Read(ctx context.Context, keys []string, member string, lag time.Duration) ([]Reading, error)
	// Ledger returns at most limit entries with a Seq greater than after, oldest first, or none if the counter has no
	// ledger.
	Ledger(ctx context.Context, key string, after uint64, limit int) (Ledger, error)
	// History returns a counter and the increments of its time buckets of length step, with the indexes from from to
	// to-1, oldest first. Expired buckets are missing, and those without an increment may be. A bucket of a unique
	// may have 12 KB: see Archive.
	History(ctx context.Context, key string, step time.Duration, from, to int64) (Counter, []Gain, error)
	// Dimension returns a counter and the counts of a dimension's values.
	Dimension(ctx context.Context, key, name string) (Counter, Counted, error)
	// Aggregate returns the aggregate of all counters of one site whose name begins with prefix; the empty prefix means
	// all counters of the default site. Each counter is read at some moment of the call and contains everything that
	// was acknowledged before the call. The error is a *Conflict with ErrOverflow when the sum overflows, and with
	// ErrKind when uniques are mixed with other kinds.
	Aggregate(ctx context.Context, prefix string) (Aggregate, error)
	// Size returns about how many counters of one site have a name that begins with prefix. It may miss recent changes,
	// and does not block other calls.
	Size(ctx context.Context, prefix string) (int64, error)
	// Sets returns some keys of sets and the cursor for the next call. The first cursor is empty, and so is the cursor
	// after the last keys. A set that exists during the whole iteration is returned at least once; keys of other kinds
	// may be returned, too.
	Sets(ctx context.Context, cursor string) (keys []string, next string, err error)
}

// Update is the newest state of a counter that changed.
type Update struct {
	Counter Counter // has the zero Version if it was deleted
	// Joined and Left are members that joined and left. The update that names a member may come after another one of
	// the same version. With Reread they are incomplete, and a watcher that needs the members has to read them.
	Joined, Left []string
	Reread       bool
}

// Watch is a subscription to changes of some keys. Its methods may be called from any goroutine.
type Watch interface {
	// Follow adds keys. Every change that is made after Follow returns is delivered, or a newer one instead. Following
	// a key twice is following it once.
	Follow(ctx context.Context, keys ...string) error
	// Unfollow removes keys. An update under way may still be delivered.
	Unfollow(keys ...string)
	// Close ends the watch. No callback runs when it returns, nor later.
	Close()
}

// Feed publishes changes within a process.
type Feed interface {
	// Watch begins a watch that follows no key yet. A goroutine of the feed calls changed with updates of different
	// keys, one call at a time; changed must not call Close. If changed is slow, newer updates of a key replace older
	// ones, so at most one per followed key waits. The feed calls lost when it may have missed changes: then the
	// watcher has to read the keys that it follows.
	Watch(changed func([]Update), lost func()) Watch
}

// LimitResult is the result of one request to a limit. Err is nil or ErrUnavailable; then the cost was counted as a
// whole or not at all.
type LimitResult struct {
	limit.Answer
	Err error
}

// Limiter is the part of a store that keeps limits. Keys of limits and of counters are independent. A state expires
// when it no longer affects any request.
type Limiter interface {
	// Limit judges requests in order, as package limit does, each by the state of its Name and by the store's clock.
	// The caller has checked them. A permitted request is as durable as a change of a counter before Limit returns, so
	// neither several processes nor a crash permit more than the limit. A refused request changes nothing. Limit may be
	// called from any goroutine.
	Limit(ctx context.Context, requests []limit.Request) []LimitResult
	// ForgetLimit deletes the states of a key, of all algorithms and windows, so that nothing has passed. It may be
	// repeated. Its error is ErrUnavailable.
	ForgetLimit(ctx context.Context, key string) error
}

// Store is a whole store. Callers take the smallest part that they need.
type Store interface {
	Writer
	Reader
	Reserver
	Feed
	Limiter
	TopStore
	// Close stops the store's goroutines. Calls under way and later calls fail with ErrUnavailable. The caller closes
	// all watches first.
	Close() error
}

// NewIncarnation returns the incarnation of a counter that is created now, in a store that has deleted no counter
// with an incarnation greater than deleted.
func NewIncarnation(now time.Time, deleted uint64) uint64 {
	return max(uint64(max(now.UnixMilli(), 1)), deleted+1)
}

// Version is the version of a counter.
type Version = presence.Version
