package counterredis

import (
	"context"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"headcount/counter"
	"headcount/internal/redisconn"
)

// marksPage is the number of marks that one command reads or deletes.
const marksPage = 1000

func marksKey(b int, match string) string { return tag(b) + "z:" + match }

// topKey returns the key of a list. It is in no bucket and has no hash tag, so lists are distributed over a Cluster.
func topKey(match string, step time.Duration, number int64) string {
	return "hc:top:" + strconv.Itoa(int(step/time.Second)) + ":" + strconv.FormatInt(number, 10) + ":" + match
}

// Marked implements counter.TopStore.
func (s *Store) Marked(ctx context.Context, match string) (map[int64][]string, error) {
	out := map[int64][]string{}
	seen := map[string]bool{}
	err := s.scanBuckets(ctx, func(pipe redis.Pipeliner, b int, cursor uint64) *redis.ScanCmd {
		return pipe.SScan(ctx, marksKey(b, match), cursor, "", marksPage)
	}, func(texts []string) error {
		for _, text := range texts {
			number, key, _ := strings.Cut(text, ":")
			n, err := strconv.ParseInt(number, 10, 64)
			if err != nil {
				return err
			}
			if !seen[text] {
				seen[text] = true
				out[n] = append(out[n], key)
			}
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("counterredis: top: %w", err)
	}
	return out, nil
}

// KeepTop implements counter.TopStore. A list expires.
func (s *Store) KeepTop(ctx context.Context, match string, step time.Duration, list counter.TopList, kept time.Duration, marks []string) error {
	text, err := json.Marshal(list.Most)
	if err != nil { // impossible: strings and numbers can be marshalled
		panic(err)
	}
	err = s.conn.Do(ctx, func(ctx context.Context, c *redisconn.Client) error {
		s.conn.Metrics.Commands.Inc()
		return c.Set(ctx, topKey(match, step, list.Number), text, kept+3*step).Err()
	})
	if err == nil {
		err = s.Unmark(ctx, match, list.Number, marks)
	}
	if err != nil {
		return fmt.Errorf("counterredis: top: %w", err)
	}
	return nil
}

// Mark implements counter.TopStore.
func (s *Store) Mark(ctx context.Context, match string, number int64, keys []string) error {
	err := s.eachMark(ctx, match, number, keys, func(pipe redis.Pipeliner, set string, marks []any) {
		pipe.SAdd(ctx, set, marks...)
	})
	if err != nil {
		return fmt.Errorf("counterredis: top: %w", err)
	}
	return nil
}

// Unmark deletes marks of a time bucket.
func (s *Store) Unmark(ctx context.Context, match string, number int64, keys []string) error {
	return s.eachMark(ctx, match, number, keys, func(pipe redis.Pipeliner, set string, marks []any) {
		pipe.SRem(ctx, set, marks...)
	})
}

// eachMark calls queue with the marks of keys in each bucket, and sends the queued commands.
func (s *Store) eachMark(ctx context.Context, match string, number int64, keys []string, queue func(pipe redis.Pipeliner, set string, marks []any)) error {
	if len(keys) == 0 {
		return nil
	}
	by := map[int][]any{}
	for _, key := range keys {
		b := hashBucket(key)
		by[b] = append(by[b], strconv.FormatInt(number, 10)+":"+key)
	}
	return s.pipeline(ctx, func(pipe redis.Pipeliner) func() error {
		for b, marks := range by {
			queue(pipe, marksKey(b, match), marks)
		}
		return nil
	})
}

// TopLists implements counter.TopStore.
func (s *Store) TopLists(ctx context.Context, match string, step time.Duration, from, to int64) (out []counter.TopList, err error) {
	texts, err := s.texts(ctx, int(max(to-from, 0)), func(pipe redis.Pipeliner, i int) *redis.StringCmd {
		return pipe.Get(ctx, topKey(match, step, from+int64(i)))
	})
	if err != nil {
		return nil, fmt.Errorf("counterredis: top: %w", err)
	}
	for i, text := range texts {
		if text == "" {
			continue // no counter gained anything
		}
		l := counter.TopList{Number: from + int64(i)}
		if err := json.Unmarshal([]byte(text), &l.Most); err != nil {
			return nil, fmt.Errorf("counterredis: top: %w: %w", counter.ErrUnavailable, err)
		}
		out = append(out, l)
	}
	return out, nil
}
