// Package counterredis keeps counters in Redis: a single server, Sentinel or Cluster, 6.2 or newer, without modules.
// The scripts counter_*.lua of package scripts make all changes. They judge as [counter.Judge] does.
//
// # Buckets
//
// A counter is in one of 64 buckets, by a hash of its key. A bucket is a hash tag: everything about a counter is in one
// slot, so one script may change it. The number of buckets is a constant, so processes cannot disagree about it. On a
// single server, also with Sentinel, one run of a script makes all changes of one Apply. On a Cluster a run has the
// keys of one bucket, and the runs of several buckets go in one pipeline.
// scripts/README.md describes every key.
//
// # Members
//
// A member is kept as the first 84 bits of the SHA-256 of its name, in 14 characters. Two of a million members have the
// same ones with a probability of 1 in 4*10^13. Finding two such names on purpose takes 2^42 attempts, and gains
// nothing but two members that count as one. Names are published to watchers, and not stored.
//
// # Registers and history
//
// A unique is a HyperLogLog of Redis: PFADD reports whether a register changed, and PFCOUNT is the value, which is kept
// in the state. Package hyperloglog reads the same bytes.
//
// The running time buckets of a sum are part of the state, so a change in the same bucket writes nothing else. A
// completed bucket is appended to a string. Expired ones are cut off many at a time, and the string expires with the
// last one. A time bucket of a unique is a HyperLogLog by itself, which expires; a list of them serves reads and
// deletes.
//
// # Operations of several buckets
//
// No decision involves two buckets. Counters whose rule is exact are all in bucket 0, with their idempotency keys, so a
// batch of them is one run of one script, also on a Cluster. Any other batch is made counter by counter: on a Cluster
// it is split into one operation for each bucket, with an idempotency key that is derived from the batch's (batch.go).
// If a process dies in between, a repetition with the same key makes the rest, and nothing twice.
//
// A rule may have been changed from exact to another kind, or back. So before a counter is created, it is looked for in
// the bucket that the other kind gives. If it is there, the change is refused with [counter.ErrKind].
//
// # Limits
//
// The state of a limit is one key, in no bucket. A call is one run of counter_limit.lua, which judges as package limit
// does. The server's clock counts, so clocks of processes may differ. The key expires when it no longer affects any
// call. It takes about 150 bytes, and with the algorithm log 40 more for each of at most 10,000 permitted calls. If the
// memory of Redis is full, calls that need a new key fail.
//
// # Outages
//
// A call that Redis did not answer may have been made: it fails with ErrUnavailable, and may be repeated with its
// idempotency key. A call on a limit has none, so its cost may have been counted. While Redis does not answer or
// refuses writes, all calls fail at once; package redisconn finds out when it is back. The store is as durable as the
// server's settings make it: appendfsync always, or replicas and WAIT.
package counterredis

import (
	"context"
	"encoding/base64"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/cespare/xxhash/v2"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/redis/go-redis/v9"
	"github.com/rs/zerolog"

	"headcount/counter"
	"headcount/internal/redisconn"
	"headcount/scripts"
)

// Buckets is the number of buckets. It never changes: it is part of what is in Redis.
const Buckets = 64

// Format is the number of the format of counters in Redis: keys, values, publications, and batches between regions. A
// change that an older release could misread or damage raises it: 2 has exact counters in bucket 0, journals of
// checkpoints, and publications in lines. Processes write it to the cluster facts and compare it there (package
// presenceredis). The oldest releases wrote none.
const Format = 2

const (
	factsKey   = "hc:{c}:facts"
	formatFact = "counters"

	// PostgresFact is the cluster fact that says where PostgreSQL is, for all processes that have counters.
	PostgresFact   = "postgres"
	PostgresNone   = "none"
	PostgresBehind = "behind 2" // Redis is its cache tier; "behind" is of older releases, with other keys for what is not persisted yet
	PostgresBeside = "beside"   // it has the exact counters of all regions
)

// ErrFront means that a Redis, which was opened without PostgreSQL, is the cache tier of one.
var ErrFront = errors.New("the counters of this Redis are persisted in PostgreSQL; give its --postgres, too")

// ErrFormat says that the counters in this Redis are of another format.
var ErrFormat = errors.New("the counters in this Redis are of another format")

// accept refuses counters of another format before anything is read or changed. Facts that have another number, but not
// the format of counters, were written by a release before that format.
func accept(ctx context.Context, c *redisconn.Client) error {
	facts, err := c.HMGet(ctx, factsKey, formatFact, "format", "seed").Result()
	if err != nil {
		return err
	}
	is, numbered := facts[0].(string)
	if is == strconv.Itoa(Format) || !numbered && facts[1] == nil && facts[2] == nil {
		return nil
	}
	return redisconn.Answered(fmt.Errorf("%w: theirs is %q, this version knows %d; use the version that wrote them, or see \"Upgrades\" in deploy/README.md", ErrFormat, is, Format))
}

const (
	memberWidth = 14   // characters of a member; WIDTH in counter_set.lua
	maxNamed    = 1000 // members that one update names; with more, watchers read again
	maxApply    = 4096 // changes in one run of a script
)

// Config tunes a Store. A zero field takes its default.
type Config struct {
	Conn       *redisconn.Conn       // required
	Registerer prometheus.Registerer // of the store's metrics; nil: none
	Log        zerolog.Logger
	OnState    counter.States // optional
	// Touch is above 0 if Redis is the cache tier of PostgreSQL, whose package tiered calls the methods of front.go. It is
	// how long after a counter's last use a read notes its use again.
	Touch time.Duration
	// Rules decide which counters are exact. Nil if PostgreSQL has the exact counters.
	Rules *counter.Rules
	// Region is the name of this region if it shares its counters with others (package regions), or empty. Not with Touch.
	Region string
}

// Store is a counter.Store in Redis. Its methods may be called from any goroutine.
type Store struct {
	cfg  Config
	conn *redisconn.Caller
	feed *feed
}

var _ counter.Store = (*Store)(nil)

// accept is the store's redisconn.CallerConfig.Accept.
func (s *Store) accept(ctx context.Context, c *redisconn.Client) error {
	if err := accept(ctx, c); err != nil {
		return err
	}
	pipe := c.Pipeline()
	facts := pipe.HMGet(ctx, factsKey, PostgresFact, "format")
	front := make([]*redis.BoolCmd, Buckets)
	for b := range Buckets {
		front[b] = pipe.HExists(ctx, stateKey(b), "generation")
	}
	if _, err := pipe.Exec(ctx); err != nil {
		return err
	}
	if s.inFront() { // until this process may change the fact, or ends
		switch is := facts.Val(); {
		case is[0] == PostgresNone:
			return redisconn.Answered(errAlone)
		case is[0] == PostgresBeside:
			return redisconn.Answered(errRegion)
		case is[0] != PostgresBehind && is[1] != nil:
			return redisconn.Answered(errOlder)
		}
		return nil
	}
	if slices.ContainsFunc(front, func(is *redis.BoolCmd) bool { return is.Val() }) {
		return redisconn.Answered(ErrFront)
	}
	return nil
}

// pipeline sends the commands that queue queues. Then it calls the function that queue returned, unless that is nil.
func (s *Store) pipeline(ctx context.Context, queue func(redis.Pipeliner) func() error) error {
	return s.conn.Do(ctx, func(ctx context.Context, c *redisconn.Client) error {
		pipe := c.Pipeline()
		then := queue(pipe)
		s.conn.Metrics.Commands.Add(float64(pipe.Len()))
		if pipe.Len() > 0 {
			if _, err := pipe.Exec(ctx); err != nil && !errors.Is(err, redis.Nil) {
				return err
			}
		}
		if then == nil {
			return nil
		}
		return then()
	})
}

// texts sends n commands in a pipeline and returns their replies, which are empty for keys and fields that do not exist.
func (s *Store) texts(ctx context.Context, n int, command func(pipe redis.Pipeliner, i int) *redis.StringCmd) ([]string, error) {
	texts := make([]string, n)
	return texts, s.pipeline(ctx, func(pipe redis.Pipeliner) func() error {
		replies := make([]*redis.StringCmd, n)
		for i := range replies {
			replies[i] = command(pipe, i)
		}
		return func() error {
			for i, reply := range replies { // Exec returned only the first error, perhaps that a key does not exist
				if err := reply.Err(); err != nil && !errors.Is(err, redis.Nil) {
					return err
				}
				texts[i] = reply.Val()
			}
			return nil
		}
	})
}

// New returns a store in the Redis of cfg.Conn. The caller closes it before the connection.
func New(cfg Config) *Store {
	s := &Store{cfg: cfg}
	s.conn = cfg.Conn.Caller(redisconn.CallerConfig{
		Scripts: scripts.Counters, Unavailable: counter.ErrUnavailable, Accept: s.accept, Bounded: true,
		Registerer: cfg.Registerer, Metrics: "headcount_counters_redis", OnState: cfg.OnState,
	})
	s.feed = newFeed(s)
	return s
}

// Close implements counter.Store.
func (s *Store) Close() error {
	s.feed.close()
	s.conn.Close()
	return nil
}

func tag(b int) string { return "hc:{n" + strconv.Itoa(b) + "}:" }

func countersKey(b int) string { return tag(b) + "c" }
func stateKey(b int) string    { return tag(b) + "s" }

// counterKey returns a key of one counter in bucket b. scripts/README.md explains the names.
func counterKey(b int, name, key string) string { return tag(b) + name + ":" + key }

func ledgerKey(b int, key string) string    { return counterKey(b, "l", key) }
func membersKey(b int, key string) string   { return counterKey(b, "m", key) }
func countedKey(b int, key string) string   { return counterKey(b, countedJournal, key) }
func stepsKey(b int, key string) string     { return counterKey(b, "v", key) }
func registersKey(b int, key string) string { return counterKey(b, "r", key) }
func gainsKey(b int, step time.Duration, key string) string {
	return counterKey(b, "g"+strconv.Itoa(int(step/time.Second)), key)
}
func shardedKey(b int) string { return tag(b) + "h" }

// shardKey returns the key of the shard of key in bucket b.
func shardKey(b int, key string) string { return counterKey(b, "h", key) }

func idempotencyKey(b int, id counter.IdempotencyKey) string {
	return tag(b) + "i:" + base64.RawURLEncoding.EncodeToString(id[:])
}

// channel returns the channel of a bucket. It names the database, because channels are shared by all databases.
func channel(b, db int) string { return tag(b) + "n/" + strconv.Itoa(db) }

// Owner decides which buckets a process serves. For a while several processes, or none, may regard themselves as the
// owner of a bucket.
type Owner interface{ Owns(bucket int) bool }

// Owned returns the buckets of o, or all buckets if o is nil.
func Owned(o Owner) []int {
	owned := make([]int, 0, Buckets)
	for b := range Buckets {
		if o == nil || o.Owns(b) {
			owned = append(owned, b)
		}
	}
	return owned
}

// perSlot returns the runs of a script over buckets: one run, or on a Cluster one for each bucket.
func perSlot(c *redisconn.Client, script scripts.Name, buckets []int, keys func(b int) []string, args ...any) (calls []*redisconn.Call) {
	for i, b := range buckets {
		if i == 0 || c.Cluster != nil {
			calls = append(calls, &redisconn.Call{Script: script, Args: args})
		}
		last := calls[len(calls)-1]
		last.Keys = append(last.Keys, keys(b)...)
	}
	return calls
}

// exactBucket has the counters whose rules are exact, and the idempotency keys of batches.
const exactBucket = 0

// BucketOf returns the bucket of a counter that is not exact.
func BucketOf(key string) int { return hashBucket(key) }

func hashBucket(key string) int { return int(uint32(xxhash.Sum64String(key)) % Buckets) }

// bucketOf returns the bucket that the rule of key gives.
func (s *Store) bucketOf(key string) int {
	if s.cfg.Rules != nil {
		if rule := s.cfg.Rules.Find(key); rule != nil && rule.Kind == counter.Exact {
			return exactBucket
		}
	}
	return hashBucket(key)
}

// changeBucket returns the bucket of the counter that c changes.
func (s *Store) changeBucket(c *counter.Change) int {
	if s.cfg.Rules != nil && c.Rule.Kind == counter.Exact {
		return exactBucket
	}
	return hashBucket(c.Key)
}

// idempotencyBucket returns the bucket that remembers the idempotency key of op: that of its counter; for a batch
// exactBucket; for a part of a batch the bucket of the part, whose number the idempotency key begins with.
func (s *Store) idempotencyBucket(op *counter.Op) int {
	b := s.changeBucket(&op.Changes[0])
	if b == exactBucket || !op.OfBatch() {
		return b
	}
	if part := binary.LittleEndian.Uint32(op.IdempotencyKey[:4]); part < Buckets {
		return int(part)
	}
	return exactBucket
}

// names has the keys of one run of a script and their indexes.
type names struct {
	front   bool // a bucket has six keys and not two
	shared  bool // and three more, for other regions
	list    []string
	at      map[string]int // from 1
	buckets map[int]int    // index of each bucket in the run, from 1
	order   []int          // buckets
}

func (s *Store) newNames() *names {
	return &names{front: s.inFront(), shared: s.cfg.Region != "", at: map[string]int{}, buckets: map[int]int{}}
}

func (n *names) key(name string) int {
	at, ok := n.at[name]
	if !ok {
		n.list = append(n.list, name)
		at = len(n.list)
		n.at[name] = at
	}
	return at
}

func (n *names) bucket(b int) int {
	at, ok := n.buckets[b]
	if !ok {
		for _, key := range bucketKeys(b, n.front) {
			n.key(key)
		}
		if n.shared {
			for _, key := range []string{remotesKey(b), logKey(b), goneKey(b)} {
				n.key(key)
			}
		}
		n.order = append(n.order, b)
		at = len(n.order)
		n.buckets[b] = at
	}
	return at
}

var errState = errors.New("a state that cannot be read")

// parseState parses a record of counter_apply.lua. The empty text is that of a counter that does not exist.
func parseState(key, text string) (counter.Counter, counter.State, error) {
	var st counter.State
	if text == "" || text == absentState {
		return counter.Counter{Key: key}, st, nil
	}
	var f [6]string
	rest, more := text, true
	for i := range f {
		if !more {
			return counter.Counter{}, st, fmt.Errorf("%w: %q of %q", errState, text, key)
		}
		f[i], rest, more = strings.Cut(rest, " ")
	}
	var ok bool
	var errs [6]error
	st.Kind, ok = counter.ParseKind(f[0])
	st.Value, errs[0] = strconv.ParseInt(f[1], 10, 64)
	st.Updated, errs[1] = strconv.ParseInt(f[2], 10, 64)
	st.Version.Incarnation, errs[2] = strconv.ParseUint(f[3], 10, 64)
	st.Version.Sequence, errs[3] = strconv.ParseUint(f[4], 10, 64)
	st.Entries, errs[4] = strconv.ParseUint(f[5], 10, 64)
	if more {
		errs[5] = st.ParseRest(rest)
	}
	if err := errors.Join(errs[:]...); err != nil || !ok {
		return counter.Counter{}, st, fmt.Errorf("%w: %q of %q: %w", errState, text, key, err)
	}
	c := st.Counter(key)
	if st.Version.Sequence == 0 && !c.IsSharded() { // deleted in another region: see markOf in counter_merge.lua
		return counter.Counter{Key: key}, counter.State{}, nil
	}
	return c, st, nil
}
