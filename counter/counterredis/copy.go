package counterredis

import (
	"cmp"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"headcount/counter"
	"headcount/counter/hyperloglog"
	"headcount/internal/redisconn"
	"headcount/scripts"
)

const (
	dumpAtOnce = 200  // counters in one pipeline
	scanAtOnce = 1000 // keys in one step of a SCAN, and entries of a ledger in one reply
)

var (
	_ counter.Dumper   = (*Store)(nil)
	_ counter.Restorer = (*Store)(nil)
)

// An export or import of a Redis without PostgreSQL must run while no process changes counters, because it reads and
// writes some counters at a time.

// Deleted implements counter.Dumper.
func (s *Store) Deleted(ctx context.Context) (highest uint64, err error) {
	all, err := s.deleted(ctx)
	if err != nil {
		return 0, fmt.Errorf("counterredis: dump: %w", err)
	}
	return slices.Max(all), nil
}

// deleted returns the highest incarnation that each bucket has deleted.
func (s *Store) deleted(ctx context.Context) ([]uint64, error) {
	all := make([]uint64, Buckets)
	texts, err := s.texts(ctx, Buckets, func(pipe redis.Pipeliner, b int) *redis.StringCmd {
		return pipe.HGet(ctx, stateKey(b), "deleted")
	})
	for b, text := range texts {
		if text != "" && err == nil {
			all[b], err = strconv.ParseUint(text, 10, 64)
		}
	}
	return all, err
}

// Dump implements counter.Dumper, but see above about concurrent changes.
func (s *Store) Dump(ctx context.Context, after string, each func(counter.Copy) error) error {
	var keys []located
	for b := range Buckets {
		all, err := s.keysIn(ctx, b)
		if err != nil {
			return fmt.Errorf("counterredis: dump: %w", err)
		}
		for _, key := range all {
			if key > after {
				keys = append(keys, located{key, b})
			}
		}
	}
	slices.SortFunc(keys, func(a, b located) int { return cmp.Compare(a.key, b.key) })
	for some := range slices.Chunk(keys, dumpAtOnce) {
		copies, err := s.dump(ctx, some)
		if err != nil {
			return fmt.Errorf("counterredis: dump: %w", err)
		}
		for _, one := range copies {
			if err := each(one); err != nil {
				return err
			}
		}
	}
	return nil
}

// located is a counter and its bucket, which may not be the one that its present rule gives.
type located struct {
	key    string
	bucket int
}

func (s *Store) states(ctx context.Context, keys []located) ([]string, error) {
	return s.texts(ctx, len(keys), func(pipe redis.Pipeliner, i int) *redis.StringCmd {
		return pipe.HGet(ctx, countersKey(keys[i].bucket), keys[i].key)
	})
}

// dump reads counters with everything that Redis keeps of them.
func (s *Store) dump(ctx context.Context, keys []located) (copies []counter.Copy, err error) {
	calls := make([]*redisconn.Call, len(keys))
	for i, in := range keys {
		b, key := in.bucket, in.key
		cl := &redisconn.Call{Script: scripts.CounterDump, Args: []any{key}}
		cl.Keys = []string{countersKey(b), remotesKey(b), membersKey(b, key), registersKey(b, key), countedKey(b, key), stepsKey(b, key)}
		for _, step := range counter.BucketSteps {
			cl.Keys = append(cl.Keys, gainsKey(b, step, key))
		}
		calls[i] = cl
	}
	if err := s.conn.Run(ctx, calls); err != nil {
		return nil, err
	}
	for i, in := range keys {
		c, err := parseCopy(in.key, calls[i].Reply)
		if err != nil {
			return nil, fmt.Errorf("%w: %q: %w", counter.ErrUnavailable, in.key, err)
		}
		if c.Kind == 0 { // deleted meanwhile
			continue
		}
		if c.Ledger, err = s.wholeLedger(ctx, in); err != nil {
			return nil, err
		}
		copies = append(copies, c)
	}
	if err := s.complete(ctx, copies); err != nil {
		return nil, err
	}
	for i := range copies {
		copies[i].Sharding = nil
	}
	return slices.DeleteFunc(copies, func(c counter.Copy) bool { return c.Version.Sequence == 0 }), nil // deleted elsewhere, see counter_merge.lua
}

// complete adds to copies of sharded sums what their shards have beyond their records.
func (s *Store) complete(ctx context.Context, copies []counter.Copy) error {
	var sums []counter.Counter
	var at []int // where they are in copies
	for i := range copies {
		if sum := copies[i].Counter(copies[i].Key); sum.IsSharded() {
			sums, at = append(sums, sum), append(at, i)
		}
	}
	err := s.whole(ctx, sums)
	for n, sum := range sums {
		c := &copies[at[n]]
		for i := range c.Slots { // shards have gained this in the last seconds
			if slot := &c.Slots[i]; slot.Step != 0 {
				slot.Value = counter.Saturated(slot.Value, sum.Value-c.Value)
			}
		}
		c.Value, c.Version = sum.Value, sum.Version
	}
	return err
}

// wholeLedger reads the entries of a counter, some at a time.
func (s *Store) wholeLedger(ctx context.Context, in located) (entries []counter.Entry, err error) {
	for after := uint64(0); ; {
		some, _, err := s.ledger(ctx, in, false, after, scanAtOnce)
		if err != nil {
			return nil, err
		}
		if entries = append(entries, some...); len(some) < scanAtOnce {
			return entries, nil
		}
		after = some[len(some)-1].Seq
	}
}

// parseCopy parses the reply of counter_dump.lua.
func parseCopy(key string, reply any) (c counter.Copy, err error) {
	row, _ := reply.([]any)
	if len(row) != 7 {
		return c, errReplied()
	}
	state, _ := row[0].(string)
	if _, c.State, err = parseState(key, state); err != nil {
		return c, err
	}
	c.Key = key
	c.Elsewhere, _ = row[1].(string)
	registers, _ := row[3].(string)
	var errs [3]error
	c.Registers, errs[0] = hyperloglog.Parse([]byte(registers))
	errs[1] = addDimensions(&c, row[4])
	errs[2] = addSteps(&c, row[5], row[6])
	for part, text := range pairs(row[2]) {
		for ; part != "parts" && len(text) >= memberWidth; text = text[memberWidth:] {
			c.Hashes = append(c.Hashes, text[:memberWidth])
		}
	}
	slices.Sort(c.Hashes)
	return c, errors.Join(errs[:]...)
}

// addDimensions adds the fields of dimensions to c.
func addDimensions(c *counter.Copy, reply any) error {
	fields, err := parseCounts(reply)
	if err != nil {
		return err
	}
	slices.SortFunc(fields, func(a, b counter.Count) int { return cmp.Compare(a.Value, b.Value) })
	for _, f := range fields {
		name, value, _ := strings.Cut(f.Value, ":")
		if is := c.Dimension(name); value == "" {
			is.Other = f.Count
		} else {
			is.Values[value] = f.Count
		}
	}
	slices.SortFunc(c.Dimensions, func(a, b counter.DimensionCopy) int { return cmp.Compare(a.Name, b.Name) })
	return nil
}

// addSteps adds time buckets to c: those of a unique from seen, and those of a sum from histories.
func addSteps(c *counter.Copy, seen, histories any) error {
	for name, text := range pairs(seen) {
		slots, err := counter.ParseSlots(name + ":0")
		registers, err1 := hyperloglog.Parse([]byte(text))
		if err := errors.Join(err, err1); err != nil {
			return err
		}
		c.Steps = append(c.Steps, counter.StepCopy{Step: slots[0].Step, Number: int64(slots[0].Number), Seen: &registers})
	}
	texts, _ := histories.([]any)
	for i, step := range counter.BucketSteps[:min(len(texts), len(counter.BucketSteps))] {
		text, _ := texts[i].(string)
		gains, err := parseGains(text)
		if err != nil {
			return err
		}
		for _, g := range gains {
			c.Steps = append(c.Steps, counter.StepCopy{Step: uint32(step / time.Second), Number: g.Number, Value: g.Value})
		}
	}
	slices.SortFunc(c.Steps, func(a, b counter.StepCopy) int {
		return cmp.Or(cmp.Compare(a.Step, b.Step), cmp.Compare(a.Number, b.Number))
	})
	return nil
}

// Restore implements counter.Restorer, but only each counter by itself is atomic.
func (s *Store) Restore(ctx context.Context, copies []counter.Copy, rules *counter.Rules) (restored int, err error) {
	fail := func(err error) (int, error) { return restored, fmt.Errorf("counterredis: restore: %w", err) }
	deleted, err := s.deleted(ctx)
	if err != nil {
		return fail(err)
	}
	keys := make([]located, len(copies))
	for i := range copies {
		keys[i] = located{copies[i].Key, s.copyBucket(&copies[i])}
	}
	texts, err := s.states(ctx, keys)
	if err != nil {
		return fail(err)
	}
	is := make([]counter.Copy, len(copies))
	for i := range is {
		is[i].Key = copies[i].Key
		if _, is[i].State, err = parseState(is[i].Key, texts[i]); err != nil {
			return fail(err)
		}
	}
	if err := s.complete(ctx, is); err != nil {
		return fail(err)
	}
	var calls []*redisconn.Call
	for i := range copies {
		c := copies[i]
		if !c.Replaces(&is[i].State, deleted[s.copyBucket(&c)]) {
			continue
		}
		cl, err := s.restoring(ctx, &c, texts[i], rules)
		if err != nil {
			return fail(err)
		}
		calls = append(calls, cl)
	}
	if err := s.conn.Run(ctx, calls); err != nil {
		return fail(err)
	}
	for _, cl := range calls {
		if cl.Reply != int64(1) {
			return fail(fmt.Errorf("%w: a counter has changed meanwhile; stop all processes of this Redis, and import again", counter.ErrUnavailable))
		}
		restored++
	}
	return restored, nil
}

// copyBucket returns the bucket of a copy, by its own kind and not by the rules of the import.
func (s *Store) copyBucket(c *counter.Copy) int {
	if s.cfg.Rules != nil && c.Kind == counter.Exact {
		return exactBucket
	}
	return hashBucket(c.Key)
}

// restoring returns the run of counter_restore.lua for a copy.
func (s *Store) restoring(ctx context.Context, c *counter.Copy, was string, rules *counter.Rules) (*redisconn.Call, error) {
	b, staged := s.copyBucket(c), ""
	hashes := slices.Clone(c.Hashes)
	for _, m := range c.Members {
		hashes = append(hashes, counter.MemberHash(m))
	}
	if len(hashes) > 0 {
		var err error
		if staged, err = s.stage(ctx, c.Key, "", 0, hashes); err != nil {
			return nil, err
		}
	}
	cl := &redisconn.Call{Script: scripts.CounterRestore, Keys: []string{
		countersKey(b), membersKey(b, c.Key), registersKey(b, c.Key), ledgerKey(b, c.Key), stepsKey(b, c.Key), stagedKey(b, staged), countedKey(b, c.Key),
		remotesKey(b), stateKey(b),
	}}
	cl.Args = []any{c.Key, was, formatState(c.State), c.Registers.Bytes(), flag(staged != ""), c.Elsewhere, len(c.Ledger)}
	if c.Registers.Empty() {
		cl.Args[3] = ""
	}
	for _, e := range c.Ledger {
		cl.Args = append(cl.Args, fmt.Sprintf("%d-%d", e.Seq, e.At.UnixMilli()), e.Op.String(), e.Delta, e.After, e.Reason, e.By)
	}
	fields := []any{}
	for _, d := range c.Dimensions {
		fields = append(fields, d.Name+":", fmt.Sprintf("%d %d", d.Other, len(d.Values)))
		for value, n := range d.Values {
			fields = append(fields, d.Name+":"+value, n)
		}
	}
	cl.Args = append(append(cl.Args, len(fields)/2), fields...)
	_, kept := c.Kept(rules)
	texts := make([]strings.Builder, len(counter.BucketSteps))
	var seen []any
	for _, step := range c.Steps {
		length := time.Duration(step.Step) * time.Second
		if step.Seen != nil {
			ends := (step.Number+2)*int64(step.Step)*1000 + kept(step.Step).Milliseconds()
			seen = append(seen, fmt.Sprintf("%d:%d", step.Step, step.Number), step.Seen.Bytes(), ends)
		} else if i := slices.Index(counter.BucketSteps, length); i >= 0 {
			fmt.Fprintf(&texts[i], "%d:%d ", step.Number, step.Value)
		}
	}
	for i, step := range counter.BucketSteps {
		cl.Keys = append(cl.Keys, gainsKey(b, step, c.Key))
		cl.Args = append(cl.Args, texts[i].String(), (kept(uint32(step/time.Second)) + 3*step).Milliseconds())
	}
	cl.Args = append(cl.Args, seen...)
	return cl, nil
}

// DumpIdempotencyKeys calls each with the remembered idempotency keys, some at a time.
func (s *Store) DumpIdempotencyKeys(ctx context.Context, each func([]counter.IdempotencyKeyCopy) error) error {
	var mu sync.Mutex  // masters are read concurrently
	var names []string // SCAN may return one twice
	err := s.conn.Do(ctx, func(ctx context.Context, c *redisconn.Client) error {
		names = names[:0]
		return c.Masters(ctx, func(ctx context.Context, m redis.Cmdable) error {
			for cursor := uint64(0); ; {
				s.conn.Metrics.Commands.Inc()
				keys, next, err := m.Scan(ctx, cursor, "hc:{n*}:i:*", scanAtOnce).Result()
				if err != nil {
					return err
				}
				mu.Lock()
				names = append(names, keys...)
				mu.Unlock()
				if cursor = next; cursor == 0 {
					return nil
				}
			}
		})
	})
	if err != nil {
		return fmt.Errorf("counterredis: dump: %w", err)
	}
	slices.Sort(names)
	for some := range slices.Chunk(slices.Compact(names), scanAtOnce) {
		var copies []counter.IdempotencyKeyCopy
		if err := s.pipeline(ctx, func(pipe redis.Pipeliner) func() error {
			left := make([]*redis.DurationCmd, len(some))
			for i, name := range some {
				left[i] = pipe.TTL(ctx, name)
			}
			return func() error {
				now := time.Now()
				for i, name := range some {
					_, text, _ := strings.Cut(name, ":i:")
					id, err := base64.RawURLEncoding.DecodeString(text)
					if err == nil && len(id) == len(counter.IdempotencyKey{}) && left[i].Val() > 0 {
						copies = append(copies, counter.IdempotencyKeyCopy{IdempotencyKey: counter.IdempotencyKey(id), Until: now.Add(left[i].Val())})
					}
				}
				return nil
			}
		}); err != nil {
			return fmt.Errorf("counterredis: dump: %w", err)
		}
		if err := each(copies); err != nil {
			return err
		}
	}
	return nil
}

// RestoreDeleted implements counter.Restorer.
func (s *Store) RestoreDeleted(ctx context.Context, deleted uint64) error {
	is, err := s.deleted(ctx)
	if err == nil {
		err = s.pipeline(ctx, func(pipe redis.Pipeliner) func() error {
			for b, before := range is {
				if before < deleted {
					pipe.HSet(ctx, stateKey(b), "deleted", deleted)
				}
			}
			return nil
		})
	}
	if err != nil {
		return fmt.Errorf("counterredis: restore: %w", err)
	}
	return nil
}

// Leases returns the leases of the processes that use this Redis.
func (s *Store) Leases(ctx context.Context) (live []string, err error) {
	err = s.conn.Do(ctx, func(ctx context.Context, c *redisconn.Client) error {
		s.conn.Metrics.Commands.Inc()
		all, err := c.HGetAll(ctx, "hc:{c}:leases").Result()
		live = nil
		for name, text := range all {
			end, _, _ := strings.Cut(text, " ")
			if ms, err := strconv.ParseInt(end, 10, 64); err == nil && time.UnixMilli(ms).After(time.Now()) {
				live = append(live, name)
			}
		}
		return err
	})
	return live, err
}

// Leave evicts counters whose rows will be replaced. All their changes must be persisted.
func (s *Store) Leave(ctx context.Context, keys []string) error {
	by := map[int]*redisconn.Call{}
	var calls []*redisconn.Call
	for _, key := range keys {
		b := hashBucket(key)
		if by[b] == nil {
			by[b] = &redisconn.Call{Script: scripts.CounterEvict, Keys: bucketKeys(b, true), Args: []any{0, 0, tag(b)}}
			calls = append(calls, by[b])
		}
		by[b].Args = append(by[b].Args, key)
	}
	if err := s.conn.Run(ctx, calls); err != nil {
		return err
	}
	for _, cl := range calls {
		if cl.Reply == int64(-1) {
			return ErrMoved
		}
	}
	return nil
}

// NoteDeleted notes the highest incarnation that PostgreSQL deleted.
func (s *Store) NoteDeleted(ctx context.Context, deleted uint64) error {
	calls := make([]*redisconn.Call, Buckets)
	for b := range calls {
		calls[b] = noteCall(b, deleted, false)
	}
	return s.conn.Run(ctx, calls)
}
