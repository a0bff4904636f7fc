package counterredis

import (
	"context"
	"fmt"
	"strconv"
	"time"

	"github.com/redis/go-redis/v9"

	"headcount/counter"
	"headcount/internal/redisconn"
	"headcount/scripts"
)

// This file is for package tiered: Redis as the cache tier in front of PostgreSQL. scripts/README.md describes the keys
// that a bucket has in addition.

const (
	absentState = "-"
	deletedFlag = "x"
	lostReply   = "lost"

	// maxPending is how many changes of a bucket may wait to be persisted: counters, members, ledger entries and
	// idempotency keys. At the bound changes fail.
	maxPending  = 1 << 18
	page        = 500 // counters in one run of a script of a checkpoint
	stagedFor   = time.Minute
	stagePage   = 5000 // members in one run of counter_stage.lua
	evictAtOnce = 1000 // counters of a bucket in one run of counter_evict.lua
	stepsAtOnce = 8 << 20
	// maxCounted is how many values of a dimension have a count of their own between two checkpoints. It is greater
	// than counter.MaxValues, so that the values that PostgreSQL keeps are among them even after a long outage.
	maxCounted = 10 * counter.MaxValues
)

var (
	// ErrLost means that Redis may have lost data. Heal finds out.
	ErrLost = fmt.Errorf("%w: Redis may have lost data", counter.ErrUnavailable)
	// ErrMoved means that a counter was evicted or loaded meanwhile, and has to be read again.
	ErrMoved     = fmt.Errorf("%w: counters are moving between Redis and PostgreSQL", counter.ErrUnavailable)
	errRegion    = fmt.Errorf("%w: this Redis belongs to a region and shares its counters with others: give every process of the region its --region and --peer flags, and an export --regions", counter.ErrUnavailable)
	errAlone     = fmt.Errorf("%w: processes without --postgres use this Redis; end all of them, then start them with --postgres, and its counters are carried into PostgreSQL", counter.ErrUnavailable)
	errOlder     = fmt.Errorf("%w: the cluster fact postgres may be of an older release, which keeps what PostgreSQL does not have yet under other names; end all of its processes with SIGTERM, then start this release, or export with that one", counter.ErrUnavailable)
	errUncarried = fmt.Errorf("%w: counters in Redis have not been copied into PostgreSQL yet", counter.ErrUnavailable)
	errFull      = fmt.Errorf("%w: too many changes wait to be persisted", counter.ErrUnavailable)
)

func bucketKeys(b int, front bool) []string {
	keys := []string{countersKey(b), stateKey(b)}
	if front {
		for _, name := range []string{"d", "t", "j", "a"} {
			keys = append(keys, tag(b)+name)
		}
	}
	return keys
}

func drainedIDsKey(b int) string { return tag(b) + "u" }

// The keys that a checkpoint sets aside: registers, and the journals of members, history and dimensions. The last
// journal is in countedKey, which without PostgreSQL has all counts.
const (
	movedJournal   = "p"
	gainedJournal  = "b"
	countedJournal = "e"
)

var setAside = [...]string{"r", movedJournal, gainedJournal, countedJournal}

// asideKey returns the key to which a checkpoint sets it aside.
func asideKey(b int, name, key string) string { return counterKey(b, name+"t", key) }

func stepKey(b int, s counter.Slot, key string) string {
	return tag(b) + "v" + strconv.FormatUint(uint64(s.Step), 10) + ":" + strconv.FormatUint(uint64(s.Number), 10) + ":" + key
}
func stagedKey(b int, id string) string { return tag(b) + "y:" + id }

// inFront reports whether the store is the cache tier of PostgreSQL.
func (s *Store) inFront() bool { return s.cfg.Touch > 0 }

// touch returns Config.Touch in milliseconds.
func (s *Store) touch() int64 {
	if !s.inFront() {
		return 0
	}
	return max(s.cfg.Touch.Milliseconds(), 1)
}

// Placements has the placement of counters.
type Placements struct {
	Generation uint64
	Hot        []bool // the counter is resident, or does not exist
}

func (p *Placements) note(at int, state string, more []any) {
	p.Hot[at] = state != ""
	for _, g := range more {
		text, _ := g.(string)
		n, _ := strconv.ParseUint(text, 10, 64)
		p.Generation = max(p.Generation, n)
	}
}

func errReplied() error { return fmt.Errorf("%w: %w", counter.ErrUnavailable, errReply) }

// Adopt confirms the buckets of a generation on the present runs of their servers. From now on counters that change
// get at least the incarnation life, because the last versions of the runs before may be lost.
func (s *Store) Adopt(ctx context.Context, generation, life uint64) error {
	return s.begin(ctx, "adopt", generation, life, time.Time{}, false)
}

// Begin empties all buckets and begins a generation in them, which serves no call until Confirm. Until asks, unknown
// idempotency keys have to be looked up in PostgreSQL. A bucket without a generation is emptied only if its counters
// were copied into PostgreSQL.
func (s *Store) Begin(ctx context.Context, generation, deleted uint64, asks time.Time, carried bool) error {
	return s.begin(ctx, "begin", generation, deleted, asks, carried)
}

// Confirm lets the buckets of a generation that has just begun serve calls, once PostgreSQL has its number.
func (s *Store) Confirm(ctx context.Context, generation uint64) error {
	return s.begin(ctx, "confirm", generation, 0, time.Time{}, false)
}

// Unmarked reports whether a bucket without a generation has counters. That is the case if Redis was used without
// PostgreSQL until now, and not if it lost its data.
func (s *Store) Unmarked(ctx context.Context) (unmarked bool, err error) {
	err = s.pipeline(ctx, func(pipe redis.Pipeliner) func() error {
		marks, regions, counters := make([]*redis.BoolCmd, Buckets), make([]*redis.BoolCmd, Buckets), make([]*redis.IntCmd, Buckets)
		for b := range Buckets {
			marks[b], regions[b] = pipe.HExists(ctx, stateKey(b), "generation"), pipe.HExists(ctx, stateKey(b), "region")
			counters[b] = pipe.HLen(ctx, countersKey(b))
		}
		return func() error {
			unmarked = false
			for b := range Buckets {
				if regions[b].Val() {
					return errRegion
				}
				unmarked = unmarked || !marks[b].Val() && counters[b].Val() > 0
			}
			return nil
		}
	})
	return unmarked, err
}

// Adoptable returns why counters without a generation cannot be copied into PostgreSQL now, or nil: processes without
// PostgreSQL may still change them.
func (s *Store) Adoptable(ctx context.Context) error {
	return s.conn.Do(ctx, func(ctx context.Context, c *redisconn.Client) error {
		facts, err := c.HMGet(ctx, factsKey, PostgresFact, "format").Result()
		if err == nil && facts[0] != PostgresBehind && (facts[0] != nil || facts[1] != nil) {
			err = redisconn.Answered(errAlone)
		}
		return err
	})
}

func (s *Store) begin(ctx context.Context, what string, generation, least uint64, asks time.Time, carried bool) error {
	var until int64
	if !asks.IsZero() {
		until = asks.UnixMilli()
	}
	calls := make([]*redisconn.Call, Buckets)
	for b := range calls {
		calls[b] = &redisconn.Call{
			Script: scripts.CounterBegin, Keys: append(bucketKeys(b, true), drainedIDsKey(b)),
			Args: []any{what, strconv.FormatUint(generation, 10), strconv.FormatUint(least, 10), until, tag(b), carried},
		}
	}
	if err := s.conn.Run(ctx, calls); err != nil {
		return err
	}
	for _, cl := range calls {
		switch cl.Reply {
		case int64(1):
		case int64(-1):
			return errRegion
		case int64(-2):
			return errUncarried
		default:
			return ErrMoved
		}
	}
	return nil
}

// Note notes the idempotency keys of operations that another store has made.
func (s *Store) Note(ctx context.Context, ops ...*counter.Op) error {
	return s.note(ctx, false, ops...)
}

func (s *Store) note(ctx context.Context, persists bool, ops ...*counter.Op) error {
	var calls []*redisconn.Call
	by := map[int]*redisconn.Call{}
	for _, op := range ops {
		b := s.idempotencyBucket(op)
		if by[b] == nil {
			by[b] = noteCall(b, 0, persists)
			calls = append(calls, by[b])
		}
		by[b].Keys = append(by[b].Keys, idempotencyKey(b, op.IdempotencyKey))
	}
	return s.conn.Run(ctx, calls)
}

// noteCall returns a run of counter_note.lua. The caller may add idempotency keys.
func noteCall(b int, deleted uint64, persists bool) *redisconn.Call {
	return &redisconn.Call{
		Script: scripts.CounterNote, Keys: []string{stateKey(b), tag(b) + "j"}, Args: []any{counter.IdempotencyKeyKept.Milliseconds(), strconv.FormatUint(deleted, 10), flag(persists)},
	}
}

// Remembers reports whether an operation with the idempotency key of op was made.
func (s *Store) Remembers(ctx context.Context, op *counter.Op) (yes bool, err error) {
	err = s.conn.Do(ctx, func(ctx context.Context, c *redisconn.Client) error {
		s.conn.Metrics.Commands.Inc()
		n, err := c.Exists(ctx, idempotencyKey(s.idempotencyBucket(op), op.IdempotencyKey)).Result()
		yes = n == 1
		return err
	})
	return yes, err
}
