package counterredis

import (
	"context"
	"encoding/base64"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"headcount/counter"
	"headcount/counter/hyperloglog"
	"headcount/internal/redisconn"
	"headcount/scripts"
)

// This file moves checkpoints from Redis to PostgreSQL, for package tiered.

// Bucket is the state of a bucket of the cache tier.
type Bucket struct {
	Number     int
	Generation uint64
	Good       bool // checked on this run of the server
	// Checkpoint is the number of the next checkpoint, and Draining that of the one that is being drained, or 0.
	Checkpoint, Draining uint64
	Since                time.Time // time of the oldest change that is not persisted, or zero
	Left                 uint64
	Now, Asks            time.Time
	Deleted              uint64
	Life                 uint64 // lowest incarnation of a counter that changes, unless the generation is greater
}

// Ticket returns the ticket for Load.
func (b *Bucket) Ticket() string {
	return strconv.FormatUint(b.Generation, 10) + " " + strconv.FormatUint(b.Left, 10)
}

// Status returns the state of the given buckets, or of all.
func (s *Store) Status(ctx context.Context, buckets ...int) ([]Bucket, error) {
	c, err := s.conn.Known(ctx)
	if err != nil {
		return nil, err
	}
	if len(buckets) == 0 {
		buckets = Owned(nil)
	}
	calls := perSlot(c, scripts.CounterStatus, buckets, func(b int) []string { return []string{stateKey(b)} })
	if err := s.conn.Run(ctx, calls); err != nil {
		return nil, err
	}
	var out []Bucket
	for _, cl := range calls {
		rows, _ := cl.Reply.([]any)
		for _, r := range rows {
			f, _ := r.([]any)
			if len(f) != 10 || len(out) == len(buckets) {
				return nil, errReplied()
			}
			var n [10]uint64
			for i, v := range f {
				switch v := v.(type) {
				case string:
					n[i], _ = strconv.ParseUint(v, 10, 64)
				case int64:
					n[i] = uint64(v)
				}
			}
			b := Bucket{
				Number: buckets[len(out)], Generation: n[0], Good: n[1] == 1 && n[0] != 0, Checkpoint: n[2], Draining: n[3], Left: n[5],
				Now: time.UnixMilli(int64(n[6])), Asks: time.UnixMilli(int64(n[7])), Deleted: n[8], Life: n[9],
			}
			if n[4] != 0 {
				b.Since = time.UnixMilli(int64(n[4]))
			}
			out = append(out, b)
		}
	}
	if len(out) != len(buckets) {
		return nil, errReplied()
	}
	return out, nil
}

// Checkpoint begins the checkpoint with that number in all buckets of a generation.
func (s *Store) Checkpoint(ctx context.Context, generation, number uint64) error {
	c, err := s.conn.Known(ctx)
	if err != nil {
		return err
	}
	calls := perSlot(c, scripts.CounterCheckpoint, Owned(nil), func(b int) []string {
		k := bucketKeys(b, true)
		return []string{k[1], k[2], k[3], k[4], drainedIDsKey(b)}
	}, checkpointArgs(generation, number)...)
	// exactBucket comes first: then the idempotency key of a batch is in no older checkpoint than its parts.
	for _, some := range [][]*redisconn.Call{calls[:1], calls[1:]} {
		if err := s.conn.Run(ctx, some); err != nil {
			return err
		}
	}
	for _, cl := range calls {
		if cl.Reply != "ok" {
			return ErrLost
		}
	}
	return nil
}

func checkpointArgs(generation, number uint64) []any {
	return []any{strconv.FormatUint(generation, 10), strconv.FormatUint(number, 10)}
}

// Drain calls each with the counters of a checkpoint, some at a time, and keys with its idempotency keys.
// Repeating it gives the same counters.
func (s *Store) Drain(ctx context.Context, generation, number uint64, each func([]counter.Drained) error, keys func([]counter.IdempotencyKey) error) error {
	for b := range Buckets {
		err := s.scanTaken(ctx, b, func(keys []string) error {
			drained, err := s.drain(ctx, b, generation, number, keys)
			if err != nil {
				return err
			}
			return s.withSteps(ctx, b, drained, each)
		})
		if err != nil {
			return err
		}
		if err := s.drainIdempotencyKeys(ctx, b, keys); err != nil {
			return err
		}
	}
	return nil
}

func (s *Store) drainIdempotencyKeys(ctx context.Context, b int, each func([]counter.IdempotencyKey) error) error {
	for from := int64(0); ; from += page {
		var texts []string
		err := s.conn.Do(ctx, func(ctx context.Context, c *redisconn.Client) (err error) {
			s.conn.Metrics.Commands.Inc()
			texts, err = c.LRange(ctx, drainedIDsKey(b), from, from+page-1).Result()
			return err
		})
		if err != nil || len(texts) == 0 {
			return err
		}
		ids := make([]counter.IdempotencyKey, len(texts))
		for i, text := range texts {
			if n, err := base64.RawURLEncoding.Decode(ids[i][:], []byte(text)); err != nil || n != len(ids[i]) {
				return errReplied()
			}
		}
		if err := each(ids); err != nil {
			return err
		}
	}
}

// scanTaken calls each with the keys of a bucket that are in the checkpoint, possibly with a key twice.
func (s *Store) scanTaken(ctx context.Context, b int, each func(keys []string) error) error {
	return s.scanHash(ctx, bucketKeys(b, true)[3], page, func(pairs []string) error {
		var keys []string
		for i := 0; i+1 < len(pairs); i += 2 {
			keys = append(keys, pairs[i])
		}
		slices.Sort(keys)
		for some := range slices.Chunk(slices.Compact(keys), page) {
			if err := each(some); err != nil {
				return err
			}
		}
		return nil
	})
}

// checkpointCall returns a run of a script on counters of a checkpoint.
func checkpointCall(script scripts.Name, b int, generation, number uint64, keys []string) *redisconn.Call {
	k := bucketKeys(b, true)
	cl := &redisconn.Call{Script: script, Keys: slices.Clone(k[:4]), Args: checkpointArgs(generation, number)}
	for _, key := range keys {
		cl.Keys = append(cl.Keys, ledgerKey(b, key))
		for _, name := range setAside {
			cl.Keys = append(cl.Keys, counterKey(b, name, key))
		}
		for _, name := range setAside {
			cl.Keys = append(cl.Keys, asideKey(b, name, key))
		}
		cl.Args = append(cl.Args, key)
	}
	return cl
}

func (s *Store) drain(ctx context.Context, b int, generation, number uint64, keys []string) ([]counter.Drained, error) {
	cl := checkpointCall(scripts.CounterDrain, b, generation, number, keys)
	if err := s.conn.Run(ctx, []*redisconn.Call{cl}); err != nil {
		return nil, err
	}
	if cl.Reply == lostReply {
		return nil, ErrLost
	}
	rows, _ := cl.Reply.([]any)
	if len(rows) != len(keys) {
		return nil, errReplied()
	}
	var out []counter.Drained
	for i, key := range keys {
		if rows[i] == int64(0) {
			continue
		}
		row, _ := rows[i].([]any)
		if len(row) != 6 {
			return nil, errReplied()
		}
		d, err := parseDrained(key, row)
		if err == nil && row[3] != int64(0) {
			err = s.drainMoved(ctx, b, &d)
		}
		if err == nil && row[5] != int64(0) {
			err = s.drainCounted(ctx, b, &d)
		}
		if err != nil {
			return nil, err
		}
		out = append(out, d)
	}
	return out, nil
}

// parseDrained parses a row of counter_drain.lua.
func parseDrained(key string, row []any) (d counter.Drained, err error) {
	d.Key = key
	text, _ := row[0].(string)
	text, d.Deleted = strings.CutPrefix(text, deletedFlag)
	if _, d.State, err = parseState(key, text); err != nil {
		return d, fmt.Errorf("%w: %w", counter.ErrUnavailable, err)
	}
	if d.Entries, err = parseEntries(row[1]); err != nil {
		return d, err
	}
	registers, _ := row[2].(string)
	if d.Registers, err = hyperloglog.Parse([]byte(registers)); err != nil {
		return d, fmt.Errorf("%w: registers of %q: %w", counter.ErrUnavailable, key, err)
	}
	d.Past, err = parsePast(row[4])
	return d, err
}

func (s *Store) readAside(ctx context.Context, b int, journal, key string) (fields map[string]string, err error) {
	err = s.conn.Do(ctx, func(ctx context.Context, c *redisconn.Client) (err error) {
		s.conn.Metrics.Commands.Inc()
		fields, err = c.HGetAll(ctx, asideKey(b, journal, key)).Result()
		return err
	})
	return fields, err
}

func (s *Store) drainMoved(ctx context.Context, b int, d *counter.Drained) error {
	places, err := s.readAside(ctx, b, movedJournal, d.Key)
	for m, is := range places {
		switch {
		case m == "":
			d.Emptied = true
		case strings.HasPrefix(is, "1"):
			d.Joined = append(d.Joined, m)
		default:
			d.Left = append(d.Left, m)
		}
	}
	return err
}

func (s *Store) drainCounted(ctx context.Context, b int, d *counter.Drained) error {
	found, err := s.readAside(ctx, b, countedJournal, d.Key)
	for field, text := range found {
		name, value, _ := strings.Cut(field, ":")
		count, _, _ := strings.Cut(text, " ")
		n, err := strconv.ParseInt(count, 10, 64)
		if err != nil {
			return fmt.Errorf("%w: dimensions of %q: %w", counter.ErrUnavailable, d.Key, err)
		}
		d.Counted = append(d.Counted, counter.Count{Name: name, Value: value, Count: n})
	}
	return err
}

// withSteps calls each with counters of a checkpoint, after reading the time buckets of uniques. It reads as many at
// a time as have about stepsAtOnce bytes. They may be newer than the checkpoint, because registers only grow.
func (s *Store) withSteps(ctx context.Context, b int, drained []counter.Drained, each func([]counter.Drained) error) error {
	first, size := 0, 0
	for i := range drained {
		t := &drained[i]
		if t.State.Kind != counter.Unique || len(t.Past) == 0 {
			continue
		}
		n, err := s.readSteps(ctx, b, t)
		if err != nil {
			return err
		}
		if size += n; size > stepsAtOnce {
			if err := each(drained[first : i+1]); err != nil {
				return err
			}
			clear(drained[first : i+1])
			first, size = i+1, 0
		}
	}
	return each(drained[first:])
}

func (s *Store) readSteps(ctx context.Context, b int, t *counter.Drained) (size int, err error) {
	texts, err := s.texts(ctx, len(t.Past), func(pipe redis.Pipeliner, i int) *redis.StringCmd {
		return pipe.Get(ctx, stepKey(b, t.Past[i].Slot, t.Key))
	})
	if err != nil {
		return 0, err
	}
	past := t.Past[:0]
	for i, text := range texts {
		if text == "" {
			continue // the counter has been deleted
		}
		seen, err := hyperloglog.Parse([]byte(text))
		if err != nil {
			return 0, fmt.Errorf("%w: %q: %w", counter.ErrUnavailable, t.Key, err)
		}
		p := t.Past[i]
		p.Seen = &seen
		past, size = append(past, p), size+len(text)
	}
	t.Past = past
	return size, nil
}

// Acknowledge drops a checkpoint that PostgreSQL has.
func (s *Store) Acknowledge(ctx context.Context, generation, number uint64) error {
	for b := range Buckets {
		acknowledge := func(keys []string) error {
			cl := checkpointCall(scripts.CounterAcknowledge, b, generation, number, keys)
			cl.Keys = append(cl.Keys, drainedIDsKey(b))
			return s.conn.Run(ctx, []*redisconn.Call{cl})
		}
		err := s.scanTaken(ctx, b, acknowledge)
		if err == nil {
			err = acknowledge(nil)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// Evict evicts persisted counters that were not used for that long. more means that there may be further ones.
func (s *Store) Evict(ctx context.Context, after time.Duration) (gone int, more bool, err error) {
	calls := make([]*redisconn.Call, Buckets)
	for b := range calls {
		calls[b] = &redisconn.Call{Script: scripts.CounterEvict, Keys: bucketKeys(b, true), Args: []any{after.Milliseconds(), evictAtOnce, tag(b)}}
	}
	if err := s.conn.Run(ctx, calls); err != nil {
		return 0, false, err
	}
	for _, cl := range calls {
		n, _ := cl.Reply.(int64)
		gone += int(n)
		more = more || n == evictAtOnce
	}
	return gone, more, nil
}
