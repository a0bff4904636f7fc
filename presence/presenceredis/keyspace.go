package presenceredis

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/redis/go-redis/v9"

	"headcount/internal/redisconn"
)

// Formats of the data in Redis: keys, fields, values and publications. Format 1 was not in the facts. Format 2 had a
// field for each partition of a page, and 64 shards in each partition; format 3 a hash for each page, and a set of
// unwritten pages; format 4 had the progress of each partition's last change in the fences of a bucket.
//
// A Redis that was begun with formatNumbered keeps it, because its processes may be of an older release. In all else
// the two are the same.
const (
	formatNumbered = "5" // hash tags are numbered: p0, p1, …
	formatEven     = "6" // hash tags are spread evenly over the slots of a Cluster
)

// learnAgain is the pause after which a watcher tries again, while Redis does not say its format.
const learnAgain = 50 * time.Millisecond

// keyspace makes the keys of partitions and buckets.
type keyspace struct {
	format     string
	partitions []string       // by partition: what its keys begin with
	buckets    []string       // by bucket, likewise
	byTag      map[string]int // from the hash tag to the bucket
}

// newKeyspace returns the keyspace of a format, which is formatNumbered or formatEven.
func newKeyspace(format string, partitions, buckets int) *keyspace {
	tags := redisconn.EvenTags
	if format == formatNumbered {
		tags = numberedTags
	}

	k := &keyspace{format: format, byTag: map[string]int{}}
	for _, tag := range tags("p", partitions) {
		k.partitions = append(k.partitions, prefix+"{"+tag+"}:")
	}
	// Scans return keys alone, so byTag leads from a key back to its bucket.
	for b, tag := range tags("b", buckets) {
		k.buckets = append(k.buckets, prefix+"{"+tag+"}:")
		k.byTag[tag] = b
	}

	return k
}

func numberedTags(letter string, n int) []string {
	tags := make([]string, n)
	for i := range tags {
		tags[i] = letter + strconv.Itoa(i)
	}

	return tags
}

// learnFormat learns the format of the data in Redis, before this process makes its first key. A Redis without facts is
// a new one. Should a process of an older release begin it at this very moment, this process is refused for its facts.
func (s *Store) learnFormat(ctx context.Context) error {
	// Once learned it holds: data does not change its format while it is in use.
	if s.keys.Load() != nil {
		return nil
	}

	var format string
	// Not by Store.do, which calls learnFormat.
	err := s.conn.Do(ctx, func(ctx context.Context, c *client) (err error) {
		s.conn.Metrics.Commands.Inc()
		format, err = c.HGet(ctx, factsKey, formatFact).Result()
		if errors.Is(err, redis.Nil) {
			return nil
		}

		return err
	})
	if err != nil {
		return fmt.Errorf("presenceredis: the format of the data: %w", err)
	}

	if format != formatNumbered {
		format = formatEven // of any other format Renew says what to do
	}

	// At the start many ask at the same time, and a keyspace takes milliseconds to make.
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.keys.Load() == nil {
		s.keys.Store(newKeyspace(format, s.cfg.Partitions, s.cfg.Buckets))
	}

	return nil
}

// do runs fn with Redis, as redisconn.Runner.Do does. fn may make keys.
func (s *Store) do(ctx context.Context, fn func(context.Context, *client) error) error {
	if err := s.learnFormat(ctx); err != nil {
		return err
	}

	return s.conn.Do(ctx, fn)
}

// known returns the client when there is one. From then on the caller may make keys.
func (s *Store) known(ctx context.Context) (*client, error) {
	if err := s.learnFormat(ctx); err != nil {
		return nil, err
	}

	return s.conn.Known(ctx)
}

// rekey gives the keys another format: that of another region's Redis, which may have been emptied and begun anew.
func (s *Store) rekey(format string) {
	k := s.keys.Load()
	if k == nil || k.format != format {
		s.keys.Store(newKeyspace(format, s.cfg.Partitions, s.cfg.Buckets))
	}
}

// at returns what makes keys. The caller has called learnFormat, do or known.
func (s *Store) at() *keyspace { return s.keys.Load() }

func (k *keyspace) ownerKey(p int) string { return k.partitions[p] + "o" }
func (k *keyspace) dirtyKey(p int) string { return k.partitions[p] + "d" }
func (k *keyspace) seenKey(p int) string  { return k.partitions[p] + "s" }

func (k *keyspace) memberKey(p, shard int) string {
	return k.partitions[p] + "m:" + strconv.Itoa(shard)
}

func (k *keyspace) stateKey(b int) string               { return k.buckets[b] + "s" }
func (k *keyspace) fenceKey(b int) string               { return k.buckets[b] + "f" }
func (k *keyspace) runKey(b int, process string) string { return k.buckets[b] + "w:" + process }
func (k *keyspace) readyKey(b int) string               { return k.buckets[b] + "r" }
func (k *keyspace) endpointsKey(b int) string           { return k.buckets[b] + "e" }
func (k *keyspace) logKey(b int) string                 { return k.buckets[b] + "l" }
func (k *keyspace) emptiesKey(b int) string             { return k.buckets[b] + "z" }
func (k *keyspace) tokenKey(b int) string               { return k.buckets[b] + "t" }
func (k *keyspace) pagePrefix(b int) string             { return k.buckets[b] + "c:" }

func (k *keyspace) minutesKey(b int, page string) string { return k.buckets[b] + "x:" + page }

func (k *keyspace) visitsKey(b int, hour int64, page string) string {
	return k.buckets[b] + "y:" + strconv.FormatInt(hour, 10) + ":" + page
}

func (k *keyspace) daysKey(b int, page string) string { return k.buckets[b] + "d:" + page }

// registersKey is of the visitors of one day, and spareKey is in use only while a script adds to them.
func (k *keyspace) registersKey(b int, day int64, page string) string {
	return k.buckets[b] + "v:" + strconv.FormatInt(day, 10) + ":" + page
}

func (k *keyspace) spareKey(b int) string { return k.buckets[b] + "v" }

func (k *keyspace) historyKey(b int, page string) string { return k.buckets[b] + "h:" + page }
func (k *keyspace) onceKey(b int, hash string) string    { return k.buckets[b] + "i:" + hash }
func (k *keyspace) recordKey(b int, user string) string  { return k.buckets[b] + "u:" + user }

// channel returns the bucket's channel. Its name has the number of the database, because
// pub/sub does not know databases.
func (k *keyspace) channel(b, db int) string { return k.buckets[b] + "n/" + strconv.Itoa(db) }
