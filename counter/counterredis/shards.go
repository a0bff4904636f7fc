package counterredis

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"headcount/counter"
	"headcount/internal/redisconn"
	"headcount/presence"
	"headcount/scripts"
)

// This file is for package hot, which explains shards. The shards of a key are in 16 buckets, so in 16 slots: in every
// third bucket, so that every master of a Cluster has some.

// errMoved means that a shard takes no additions in that epoch, and that nothing was added.
var errMoved = fmt.Errorf("%w: it is not open", counter.ErrSharded)

func shardBucket(key string, shard int) int { return (hashBucket(key) + 3*shard) % Buckets }

// shardCall returns a run of counter_shard.lua.
func shardCall(what, key string, shard int, e counter.Epoch, more ...any) *redisconn.Call {
	b := shardBucket(key, shard)
	return &redisconn.Call{Script: scripts.CounterShard, Keys: []string{shardKey(b, key)}, Args: append([]any{what, e.String()}, more...)}
}

func parseShard(text string) (p counter.Shard, err error) {
	f := strings.Fields(text)
	if len(f) != 6 {
		return p, errReplied()
	}
	var errs [4]error
	var at int64
	p.Epoch, errs[0] = counter.ParseEpoch(f[0])
	p.Value, errs[1] = strconv.ParseInt(f[2], 10, 64)
	p.Sequence, errs[2] = strconv.ParseUint(f[3], 10, 64)
	at, errs[3] = strconv.ParseInt(f[4], 10, 64)
	if err := errors.Join(errs[:]...); err != nil {
		return p, fmt.Errorf("%w: shard %q: %w", counter.ErrUnavailable, text, err)
	}
	p.Updated = time.UnixMilli(at).UTC()
	return p, nil
}

// ShardAdd is an addition to a shard.
type ShardAdd struct {
	Key   string
	Shard int
	Epoch counter.Epoch
	Delta int64
}

// ShardAdded is the result of a ShardAdd. Err is counter.ErrSharded if the shard takes no additions in that epoch: then
// nothing was added. With any other error it is unknown whether something was added.
type ShardAdded struct {
	Shard counter.Shard
	Err   error
}

// AddToShards adds to shards, each by itself, in one round trip.
func (s *Store) AddToShards(ctx context.Context, adds []ShardAdd) []ShardAdded {
	calls := make([]*redisconn.Call, len(adds))
	for i, a := range adds {
		calls[i] = shardCall("add", a.Key, a.Shard, a.Epoch, strconv.FormatInt(a.Delta, 10))
	}
	_ = s.conn.Run(ctx, calls) // every call has its own error
	out := make([]ShardAdded, len(adds))
	for i, c := range calls {
		text, _ := c.Reply.(string)
		switch {
		case c.Err != nil:
			out[i].Err = c.Err
		case text == "moved":
			out[i].Err = errMoved
		default:
			out[i].Shard, out[i].Err = parseShard(text)
		}
	}
	return out
}

// OpenShards opens shards of key in an epoch, and reports whether all of them take additions. fresh means that the
// record contains nothing of its shards yet, so a shard that does not exist has lost nothing.
func (s *Store) OpenShards(ctx context.Context, key string, e counter.Epoch, fresh bool, shards []int) (open bool, err error) {
	calls := make([]*redisconn.Call, len(shards))
	for i, p := range shards {
		calls[i] = shardCall("open", key, p, e, flag(fresh))
	}
	if err := s.conn.Run(ctx, calls); err != nil {
		return false, err
	}
	return !slices.ContainsFunc(calls, func(c *redisconn.Call) bool { return c.Reply == "moved" }), nil
}

// CloseShards closes shards of key in an epoch, and returns their final values. They expire after kept; 0 means never.
func (s *Store) CloseShards(ctx context.Context, key string, e counter.Epoch, kept time.Duration, shards []int) ([]counter.Shard, error) {
	calls := make([]*redisconn.Call, len(shards))
	for i, p := range shards {
		calls[i] = shardCall("close", key, p, e, kept.Milliseconds())
	}
	if err := s.conn.Run(ctx, calls); err != nil {
		return nil, err
	}
	out := make([]counter.Shard, len(shards))
	for i := range shards {
		text, _ := calls[i].Reply.(string)
		is, err := parseShard(text)
		if err != nil {
			return nil, err
		}
		if is.Epoch == e { // otherwise it belongs to an incarnation of the sum that was lost
			out[i] = is
		}
	}
	return out, nil
}

// Shards reads all shards of keys in one round trip.
func (s *Store) Shards(ctx context.Context, keys []string) ([][counter.Shards]counter.Shard, error) {
	texts, err := s.texts(ctx, counter.Shards*len(keys), func(pipe redis.Pipeliner, i int) *redis.StringCmd {
		key := keys[i/counter.Shards]
		return pipe.Get(ctx, shardKey(shardBucket(key, i%counter.Shards), key))
	})
	if err != nil {
		return nil, err
	}
	out := make([][counter.Shards]counter.Shard, len(keys))
	for i, text := range texts {
		if text == "" {
			continue
		}
		if out[i/counter.Shards][i%counter.Shards], err = parseShard(text); err != nil {
			return nil, err
		}
	}
	return out, nil
}

// Sharded returns the records of the sharded sums of buckets, and perhaps of some that are merged again. An evicted one
// has only its key.
func (s *Store) Sharded(ctx context.Context, buckets []int) ([]counter.Counter, error) {
	c, err := s.conn.Known(ctx)
	if err != nil || len(buckets) == 0 {
		return nil, err
	}
	calls := perSlot(c, scripts.CounterSharded, buckets, func(b int) []string { return []string{shardedKey(b), countersKey(b)} })
	if err := s.conn.Run(ctx, calls); err != nil {
		return nil, err
	}
	var sums []counter.Counter
	for _, cl := range calls {
		for key, record := range pairs(cl.Reply) {
			sum, _, err := parseState(key, record)
			if err != nil {
				return nil, fmt.Errorf("%w: %w", counter.ErrUnavailable, err)
			}
			sums = append(sums, sum)
		}
	}
	return sums, nil
}

// ShardedKeys returns the keys of the sharded sums with prefix.
func (s *Store) ShardedKeys(ctx context.Context, prefix string) (keys []string, err error) {
	sums, err := s.Sharded(ctx, Owned(nil))
	for i := range sums {
		if presence.HasPrefix(sums[i].Key, prefix) {
			keys = append(keys, sums[i].Key)
		}
	}
	return keys, err
}

// AddWhole adds sharded sums to total, with what their shards have beyond their records.
func (s *Store) AddWhole(ctx context.Context, total *counter.Total, sums []counter.Counter) error {
	if err := s.whole(ctx, sums); err != nil {
		return err
	}
	for _, c := range sums {
		total.Add(counter.State{Kind: c.Kind, Value: c.Value, Version: c.Version})
	}
	return nil
}

// whole adds to sharded sums what their shards have beyond their records.
func (s *Store) whole(ctx context.Context, sums []counter.Counter) error {
	if len(sums) == 0 {
		return nil
	}
	keys := make([]string, len(sums))
	for i := range sums {
		keys[i] = sums[i].Key
	}
	shards, err := s.Shards(ctx, keys)
	if err != nil {
		return err
	}
	for i, c := range sums {
		sharding, err := counter.ParseSharding(c.Sharding)
		if err != nil {
			return fmt.Errorf("%w: %w", counter.ErrUnavailable, err)
		}
		sums[i] = sharding.With(c, &shards[i])
	}
	return nil
}
