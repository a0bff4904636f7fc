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

// PartOf is a part as it was read. A part that is not there is zero.
type PartOf struct {
	counter.Part
	Epoch   counter.Epoch
	Updated time.Time
	Open    bool
}

func parsePart(text string) (p PartOf, err error) {
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
	p.Updated, p.Open = time.UnixMilli(at).UTC(), f[1] == "s"
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
	PartOf
	Err error
}

// AddParts adds to parts, each by itself, in one round trip.
func (s *Store) AddParts(ctx context.Context, adds []PartAdd) []PartAdded {
	out := make([]PartAdded, len(adds))
	todo := make([]int, len(adds))
	for i := range adds {
		todo[i] = i
	}
	w := s.wait(ctx)
	for err := s.open(); len(todo) > 0; {
		calls := make([]*redisconn.Call, len(todo))
		for n, i := range todo {
			a := &adds[i]
			calls[n] = partCall("add", a.Key, a.Part, a.Epoch, strconv.FormatInt(a.Delta, 10))
		}
		if err == nil {
			_ = s.conn.Run(ctx, calls) // each call has its error
		}
		var again []int
		for n, i := range todo {
			text, ok := calls[n].Reply.(string)
			switch {
			case err != nil:
				out[i].Err = err
			case calls[n].Err != nil:
				out[i].Err = calls[n].Err
			case !ok:
				out[i].Err = errReplied()
			case text == "moved":
				out[i].Err = errMoved
			case text == "busy":
				again = append(again, i)
			default:
				out[i].PartOf, out[i].Err = parsePart(text)
			}
		}
		if todo = again; len(todo) > 0 {
			err = w.held()
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

// CloseParts closes parts of key in an epoch, and returns what they have for ever, and when the newest of them changed. One
// that has lost its memory has nothing, which the sum takes for an older reading. They end after kept; 0: never.
func (s *Store) CloseParts(
	ctx context.Context, key string, e counter.Epoch, kept time.Duration, parts []int,
) (out []counter.Part, updated time.Time, err error) {
	calls := make([]*redisconn.Call, len(parts))
	for i, p := range parts {
		calls[i] = partCall("close", key, p, e, kept.Milliseconds())
	}
	if err := s.conn.Run(ctx, calls); err != nil {
		return nil, updated, err
	}
	out = make([]counter.Part, len(parts))
	for i := range parts {
		text, _ := calls[i].Reply.(string)
		is, err := parsePart(text)
		if err != nil {
			return nil, updated, err
		}
		if is.Epoch != e { // it is of a life of the sum that was lost
			continue
		}
		if out[i] = is.Part; is.Updated.After(updated) {
			updated = is.Updated
		}
	}
	return out, updated, nil
}

// Parts reads all parts of keys in one round trip.
func (s *Store) Parts(ctx context.Context, keys []string) (out [][counter.SubCounters]PartOf, err error) {
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
		out = make([][counter.SubCounters]PartOf, len(keys))
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
func (s *Store) AddWhole(ctx context.Context, total *counter.Total, read []counter.Reading) error {
	states := map[string]counter.State{}
	for i := range read {
		r := &read[i]
		st := counter.State{Kind: r.Kind, Value: r.Value, Version: r.Version}
		if r.IsSpread() {
			st.Spread = &r.Spread
			states[r.Key] = st
			continue
		}
		total.Add(st)
	}
	return s.addWhole(ctx, total, states)
}

func (s *Store) addWhole(ctx context.Context, total *counter.Total, spread map[string]counter.State) error {
	if err := s.whole(ctx, spread); err != nil {
		return err
	}
	for _, st := range spread {
		total.Add(st)
	}
	return nil
}

// whole adds to hot sums, by their keys, what their parts have beyond that.
func (s *Store) whole(ctx context.Context, states map[string]counter.State) error {
	if len(states) == 0 {
		return nil
	}
	keys := make([]string, 0, len(states))
	for key := range states {
		keys = append(keys, key)
	}
	parts, err := s.Parts(ctx, keys)
	if err != nil {
		return err
	}
	for i, key := range keys {
		st := states[key]
		c := st.Counter(key)
		spread, err := counter.ParseSpread(c.Spread)
		if err != nil {
			return fmt.Errorf("%w: %w", counter.ErrUnavailable, err)
		}
		in, _ := InEpoch(spread.Epoch, &parts[i])
		c = spread.With(c, in)
		st.Value, st.Version, st.Spread = c.Value, c.Version, nil
		states[key] = st
	}
	return nil
}

// InEpoch is what parts have in that epoch, and when the newest of them changed; those of another have nothing.
func InEpoch(e counter.Epoch, parts *[counter.SubCounters]PartOf) (in *[counter.SubCounters]counter.Part, updated time.Time) {
	in = new([counter.SubCounters]counter.Part)
	for i := range parts {
		if parts[i].Epoch != e || parts[i].Sequence == 0 {
			continue
		}
		if in[i] = parts[i].Part; parts[i].Updated.After(updated) {
			updated = parts[i].Updated
		}
	}
	return in, updated
}
