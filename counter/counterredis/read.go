package counterredis

import (
	"context"
	"fmt"
	"iter"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"headcount/counter"
	"headcount/counter/hyperloglog"
	"headcount/internal/redisconn"
	"headcount/presence"
	"headcount/scripts"
)

const (
	scanCount   = 1000 // counters in one step of an aggregate
	unionAtOnce = 100  // registers in one step of an aggregate, of 12 KB each
)

// Read implements counter.Reader. No answer lags or is stale.
func (s *Store) Read(ctx context.Context, keys []string, member string, _ time.Duration) ([]counter.Reading, error) {
	out, _, err := s.ReadResident(ctx, keys, member)
	if err != nil {
		return nil, fmt.Errorf("counterredis: read %d counters: %w", len(keys), err)
	}
	return out, nil
}

// reading is a run of counter_read.lua.
type reading struct {
	names *names
	args  []any
	at    []int // for each counter, its index in the question
}

// ReadResident reads the resident counters of keys, which without PostgreSQL are all. In front of PostgreSQL it also returns
// their placements.
func (s *Store) ReadResident(ctx context.Context, keys []string, member string) ([]counter.Reading, *Placements, error) {
	c, err := s.conn.Known(ctx)
	if err != nil {
		return nil, nil, err
	}
	hash := ""
	if member != "" {
		hash = counter.MemberHash(member)
	}
	by := map[int]*reading{} // by bucket; on a single server everything is in -1
	for i, key := range keys {
		b, p := s.bucketOf(key), -1
		if c.Cluster != nil {
			p = b
		}
		if by[p] == nil {
			by[p] = &reading{names: s.newNames(), args: []any{hash, s.touch()}}
		}
		r := by[p]
		r.names.bucket(b)
		r.args = append(r.args, key, r.names.at[countersKey(b)], r.names.key(membersKey(b, key)))
		r.at = append(r.at, i)
	}
	readings := slices.Collect(maps.Values(by))
	calls := make([]*redisconn.Call, len(readings))
	for i, r := range readings {
		calls[i] = &redisconn.Call{Script: scripts.CounterRead, Keys: r.names.list, Args: r.args}
	}
	if err := s.conn.Run(ctx, calls); err != nil {
		return nil, nil, err
	}
	out := make([]counter.Reading, len(keys))
	places := &Placements{Hot: make([]bool, len(keys))}
	for i, r := range readings {
		if err := r.parse(calls[i].Reply, keys, out, places); err != nil {
			return nil, nil, err
		}
	}
	return out, places, nil
}

// parse parses the reply into out and places.
func (r *reading) parse(reply any, keys []string, out []counter.Reading, places *Placements) error {
	if reply == lostReply {
		return ErrLost
	}
	list, _ := reply.([]any)
	if len(list) != len(r.at) {
		return errReplied()
	}
	for j, at := range r.at {
		row, _ := list[j].([]any)
		if len(row) < 2 {
			return errReplied()
		}
		state, _ := row[0].(string)
		c, _, err := parseState(keys[at], state)
		if err != nil {
			return fmt.Errorf("%w: %w", counter.ErrUnavailable, err)
		}
		out[at] = counter.Reading{Counter: c, Mine: row[1] == int64(1)}
		places.note(at, state, row[2:])
	}
	return nil
}

// pairs returns the pairs of texts in a list, like the reply of HGETALL in a script.
func pairs(reply any) iter.Seq2[string, string] {
	list, _ := reply.([]any)
	return func(yield func(string, string) bool) {
		for i := 0; i+1 < len(list); i += 2 {
			name, _ := list[i].(string)
			text, _ := list[i+1].(string)
			if !yield(name, text) {
				return
			}
		}
	}
}

// Aggregate implements counter.Reader.
func (s *Store) Aggregate(ctx context.Context, prefix string) (counter.Aggregate, error) {
	total := &counter.Total{}
	if err := s.AddTo(ctx, total, prefix); err != nil {
		return counter.Aggregate{}, err
	}
	return total.Aggregate(prefix)
}

// AddTo adds all counters with prefix to total, each as it was at some moment of the call.
func (s *Store) AddTo(ctx context.Context, total *counter.Total, prefix string) error {
	states := map[string]string{}
	match := escape(prefix) + "*"
	err := s.scanBuckets(ctx, func(pipe redis.Pipeliner, b int, cursor uint64) *redis.ScanCmd {
		return pipe.HScan(ctx, countersKey(b), cursor, match, scanCount)
	}, func(pairs []string) error {
		for i := 0; i+1 < len(pairs); i += 2 {
			if presence.HasPrefix(pairs[i], prefix) {
				states[pairs[i]] = pairs[i+1]
			}
		}
		return nil
	})
	if err == nil {
		err = s.add(ctx, total, states)
	}
	if err != nil {
		return fmt.Errorf("counterredis: aggregate %q: %w", prefix, err)
	}
	return nil
}

// Size implements counter.Reader. It reads the keys of one bucket after the other.
func (s *Store) Size(ctx context.Context, prefix string) (n int64, err error) {
	for b := range Buckets {
		keys, err := s.keysIn(ctx, b)
		if err != nil {
			return 0, fmt.Errorf("counterredis: size of %q: %w", prefix, err)
		}
		for _, key := range keys {
			if presence.HasPrefix(key, prefix) {
				n++
			}
		}
	}
	return n, nil
}

// keysIn returns the keys of the counters in a bucket.
func (s *Store) keysIn(ctx context.Context, b int) (keys []string, err error) {
	err = s.conn.Do(ctx, func(ctx context.Context, c *redisconn.Client) (err error) {
		s.conn.Metrics.Commands.Inc()
		keys, err = c.HKeys(ctx, countersKey(b)).Result()
		return err
	})
	return keys, err
}

// Sets implements counter.Reader. The cursor is the number of a bucket. It also returns keys whose kind Redis does
// not know, because PostgreSQL has the counter.
func (s *Store) Sets(ctx context.Context, cursor string) (keys []string, next string, err error) {
	b := 0
	if cursor != "" {
		if b, err = strconv.Atoi(cursor); err != nil {
			return nil, "", fmt.Errorf("counterredis: sets: %w", err)
		}
	}
	err = s.scanHash(ctx, countersKey(b), scanCount, func(pairs []string) error {
		for i := 0; i+1 < len(pairs); i += 2 {
			if c, _, err := parseState(pairs[i], pairs[i+1]); err != nil || c.Kind == counter.Members {
				keys = append(keys, pairs[i])
			}
		}
		return nil
	})
	if err != nil {
		return nil, "", fmt.Errorf("counterredis: sets: %w", err)
	}
	if b++; b < Buckets {
		next = strconv.Itoa(b)
	}
	return keys, next, nil
}

// add adds counters to total.
func (s *Store) add(ctx context.Context, total *counter.Total, states map[string]string) error {
	var uniques []string
	var split []counter.Counter
	for key, text := range states {
		c, st, err := parseState(key, text)
		if err != nil {
			return fmt.Errorf("%w: %w", counter.ErrUnavailable, err)
		}
		if c.IsSharded() {
			split = append(split, c)
			continue
		}
		total.Add(st)
		if st.Kind == counter.Unique {
			uniques = append(uniques, key)
		}
	}
	if err := s.AddWhole(ctx, total, split); err != nil {
		return err
	}
	if total.Mixed() {
		return nil // there is no union of mixed kinds
	}
	for some := range slices.Chunk(uniques, unionAtOnce) {
		texts, err := s.texts(ctx, len(some), func(pipe redis.Pipeliner, i int) *redis.StringCmd {
			return pipe.Get(ctx, registersKey(hashBucket(some[i]), some[i]))
		})
		if err != nil {
			return err
		}
		for i, text := range texts {
			if text == "" {
				continue // after a reset
			}
			r, err := hyperloglog.Parse([]byte(text))
			if err != nil {
				return fmt.Errorf("%w: %q: %w", counter.ErrUnavailable, some[i], err)
			}
			total.Merge(r)
		}
	}
	return nil
}

// scanBuckets scans all buckets concurrently, a page of each at a time: scan queues the next page of a bucket, and each
// receives it. A scan may return an element twice.
func (s *Store) scanBuckets(ctx context.Context, scan func(pipe redis.Pipeliner, b int, cursor uint64) *redis.ScanCmd, each func(page []string) error) error {
	cursors := make(map[int]uint64, Buckets)
	for b := range Buckets {
		cursors[b] = 0
	}
	for len(cursors) > 0 {
		err := s.pipeline(ctx, func(pipe redis.Pipeliner) func() error {
			scans := make(map[int]*redis.ScanCmd, len(cursors))
			for b, cursor := range cursors {
				scans[b] = scan(pipe, b, cursor)
			}
			return func() error {
				for b, of := range scans {
					page, cursor, err := of.Result()
					if err == nil {
						err = redisconn.Answered(each(page))
					}
					if err != nil {
						return err
					}
					if cursors[b] = cursor; cursor == 0 {
						delete(cursors, b)
					}
				}
				return nil
			}
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// scanHash calls each with the fields and values of a hash, a page at a time. It may return a field twice.
func (s *Store) scanHash(ctx context.Context, key string, count int64, each func(pairs []string) error) error {
	for cursor := uint64(0); ; {
		var pairs []string
		err := s.conn.Do(ctx, func(ctx context.Context, c *redisconn.Client) (err error) {
			s.conn.Metrics.Commands.Inc()
			pairs, cursor, err = c.HScan(ctx, key, cursor, "", count).Result()
			return err
		})
		if err == nil {
			err = each(pairs)
		}
		if err != nil || cursor == 0 {
			return err
		}
	}
}

// escape returns prefix as a Redis pattern that matches it literally.
func escape(prefix string) string {
	var b strings.Builder
	for i := range len(prefix) {
		if strings.IndexByte(`*?[]^\`, prefix[i]) >= 0 {
			b.WriteByte('\\')
		}
		b.WriteByte(prefix[i])
	}
	return b.String()
}
