package counterredis

import (
	"cmp"
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

// This file is for package hot, which says what a part is. The parts of one key are in 16 different
// buckets, so in 16 slots: every third, which leaves no master of a Cluster without some.

// errMoved says that a part takes nothing in that epoch, and that nothing was added.
var errMoved = fmt.Errorf("%w: it is not open", counter.ErrSpread)

func partBucket(key string, part int) int { return (hashBucket(key) + 3*part) % Buckets }

// partCall is a run of counter_part.lua.
func partCall(what, key string, part int, e counter.Epoch, more ...any) *redisconn.Call {
	b := partBucket(key, part)
	return &redisconn.Call{Script: scripts.CounterPart, Keys: []string{partKey(b, key), stateKey(b)}, Args: append([]any{what, e.String()}, more...)}
}

func parsePart(text string) (p counter.Part, err error) {
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
		return p, fmt.Errorf("%w: part %q: %w", counter.ErrUnavailable, text, err)
	}
	p.Updated = time.UnixMilli(at).UTC()
	return p, nil
}

// PartAdd is a change of a part.
type PartAdd struct {
	Key   string
	Part  int
	Epoch counter.Epoch
	Delta int64
}

// PartAdded is what became of a PartAdd. Err is counter.ErrSpread when the part takes nothing in that epoch: then
// nothing was added. Else an error says that it is unknown whether it was.
type PartAdded struct {
	Part counter.Part
	Err  error
}

// AddParts adds to parts, each by itself, in one round trip.
func (s *Store) AddParts(ctx context.Context, adds []PartAdd) []PartAdded {
	calls := make([]*redisconn.Call, len(adds))
	for i, a := range adds {
		calls[i] = partCall("add", a.Key, a.Part, a.Epoch, strconv.FormatInt(a.Delta, 10))
	}
	closed := s.open()
	if closed == nil {
		_ = s.conn.Run(ctx, calls) // each call has its error
	}
	out := make([]PartAdded, len(adds))
	for i, c := range calls {
		text, _ := c.Reply.(string)
		switch {
		case closed != nil || c.Err != nil:
			out[i].Err = cmp.Or(closed, c.Err)
		case text == "moved":
			out[i].Err = errMoved
		default:
			out[i].Part, out[i].Err = parsePart(text)
		}
	}
	return out
}

// OpenParts opens parts of key in an epoch, and reports whether all of them take additions. fresh: the sum has nothing of
// its parts yet, so none of those that are not there has lost something that the sum has.
func (s *Store) OpenParts(ctx context.Context, key string, e counter.Epoch, fresh bool, parts []int) (open bool, err error) {
	calls := make([]*redisconn.Call, len(parts))
	for i, p := range parts {
		calls[i] = partCall("open", key, p, e, flag(fresh))
	}
	if err := s.conn.Run(ctx, calls); err != nil {
		return false, err
	}
	return !slices.ContainsFunc(calls, func(c *redisconn.Call) bool { return c.Reply == "moved" }), nil
}

// CloseParts closes parts of key in an epoch, and returns what they have for ever. They end after kept; 0: never.
func (s *Store) CloseParts(ctx context.Context, key string, e counter.Epoch, kept time.Duration, parts []int) ([]counter.Part, error) {
	calls := make([]*redisconn.Call, len(parts))
	for i, p := range parts {
		calls[i] = partCall("close", key, p, e, kept.Milliseconds())
	}
	if err := s.conn.Run(ctx, calls); err != nil {
		return nil, err
	}
	out := make([]counter.Part, len(parts))
	for i := range parts {
		text, _ := calls[i].Reply.(string)
		is, err := parsePart(text)
		if err != nil {
			return nil, err
		}
		if is.Epoch == e { // else it is of a life of the sum that was lost
			out[i] = is
		}
	}
	return out, nil
}

// Parts reads all parts of keys in one round trip.
func (s *Store) Parts(ctx context.Context, keys []string) (out [][counter.SubCounters]counter.Part, err error) {
	if err := s.open(); err != nil {
		return nil, err
	}
	err = s.conn.Do(ctx, func(ctx context.Context, c *redisconn.Client) error {
		pipe := c.Pipeline()
		texts := make([]*redis.StringCmd, 0, counter.SubCounters*len(keys))
		for _, key := range keys {
			for p := range counter.SubCounters {
				texts = append(texts, pipe.Get(ctx, partKey(partBucket(key, p), key)))
			}
		}
		s.conn.Metrics.Commands.Add(float64(len(texts)))
		if _, err := pipe.Exec(ctx); err != nil && !errors.Is(err, redis.Nil) {
			return err
		}
		out = make([][counter.SubCounters]counter.Part, len(keys))
		for i, cmd := range texts {
			text, err := cmd.Result()
			if errors.Is(err, redis.Nil) {
				continue
			}
			if err == nil {
				out[i/counter.SubCounters][i%counter.SubCounters], err = parsePart(text)
			}
			if err != nil {
				return err
			}
		}
		return nil
	})
	return out, err
}

// Hot returns the records of the sums of buckets that are spread, and perhaps of some that are whole again. What was evicted
// has only its key.
func (s *Store) Hot(ctx context.Context, buckets []int) ([]counter.Counter, error) {
	c, err := s.client(ctx)
	if err != nil || len(buckets) == 0 {
		return nil, err
	}
	calls := perSlot(c, scripts.CounterParts, buckets, func(b int) []string { return []string{hotKey(b), countersKey(b)} })
	if err := s.conn.Run(ctx, calls); err != nil {
		return nil, err
	}
	var sums []counter.Counter
	for _, cl := range calls {
		list, _ := cl.Reply.([]any)
		for i := 0; i+1 < len(list); i += 2 {
			key, _ := list[i].(string)
			record, _ := list[i+1].(string)
			sum, _, err := parseState(key, record)
			if err != nil {
				return nil, fmt.Errorf("%w: %w", counter.ErrUnavailable, err)
			}
			sums = append(sums, sum)
		}
	}
	return sums, nil
}

// Spread returns the keys of the sums with prefix that are spread.
func (s *Store) Spread(ctx context.Context, prefix string) (keys []string, err error) {
	sums, err := s.Hot(ctx, allBuckets())
	for i := range sums {
		if presence.HasPrefix(sums[i].Key, prefix) {
			keys = append(keys, sums[i].Key)
		}
	}
	return keys, err
}

// AddWhole adds sums to total, with what their parts have beyond what was read.
func (s *Store) AddWhole(ctx context.Context, total *counter.Total, sums []counter.Counter) error {
	if err := s.whole(ctx, sums); err != nil {
		return err
	}
	for _, c := range sums {
		total.Add(counter.State{Kind: c.Kind, Value: c.Value, Version: c.Version})
	}
	return nil
}

// whole adds to sums what their parts have beyond what was read.
func (s *Store) whole(ctx context.Context, sums []counter.Counter) error {
	if len(sums) == 0 {
		return nil
	}
	keys := make([]string, len(sums))
	for i := range sums {
		keys[i] = sums[i].Key
	}
	parts, err := s.Parts(ctx, keys)
	if err != nil {
		return err
	}
	for i, c := range sums {
		spread, err := counter.ParseSpread(c.Spread)
		if err != nil {
			return fmt.Errorf("%w: %w", counter.ErrUnavailable, err)
		}
		sums[i] = spread.With(c, &parts[i])
	}
	return nil
}
