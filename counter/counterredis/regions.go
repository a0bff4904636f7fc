package counterredis

import (
	"cmp"
	"context"
	"fmt"
	"strconv"
	"strings"

	"github.com/redis/go-redis/v9"

	"headcount/counter"
	"headcount/internal/redisconn"
	"headcount/scripts"
)

// This file is for package regions. scripts/README.md describes the keys that a bucket has in addition.

func remotesKey(b int) string { return tag(b) + "f" }
func logKey(b int) string     { return tag(b) + "log" }
func goneKey(b int) string    { return tag(b) + "gone" }

const lineFields = 7

// Line is the state of a counter in a batch: counter_log.lua has the fields.
type Line [lineFields]string

// Size returns its length in bytes.
func (l *Line) Size() (n int) {
	for _, field := range l {
		n += len(field)
	}
	return n
}

// Position is how far a region has the log of another region's bucket. With the zero Position it needs the whole
// bucket.
type Position struct {
	Log    string
	Cursor uint64
}

// parsePosition parses "log position". During the transfer of a whole bucket the text has another form.
func parsePosition(text string) Position {
	f := strings.Fields(text)
	if len(f) != 2 {
		return Position{}
	}
	n, err := strconv.ParseUint(f[1], 10, 64)
	if err != nil {
		return Position{}
	}
	return Position{f[0], n}
}

// Batch has the changes of a bucket for another region.
type Batch struct {
	Bucket   int
	From, To Position
	All      bool // the log does not reach back to the position, so the whole bucket has to be sent
	More     bool // the log continues after To
	Lines    []Line
}

// Outgoing returns the changes after the given positions in the logs of buckets, at most limit counters of each.
func (s *Store) Outgoing(ctx context.Context, buckets []int, at []Position, limit int) ([]Batch, error) {
	calls := make([]*redisconn.Call, len(buckets))
	for i, b := range buckets {
		calls[i] = s.logCall(b, at[i].Log, at[i].Cursor, limit)
	}
	if err := s.conn.Run(ctx, calls); err != nil {
		return nil, fmt.Errorf("counterredis: logs of %d buckets: %w", len(buckets), err)
	}
	out := make([]Batch, len(buckets))
	for i, cl := range calls {
		log, to, word, lines, err := s.parseLog(cl.Reply)
		if err != nil {
			return nil, fmt.Errorf("counterredis: log of bucket %d: %w", buckets[i], err)
		}
		out[i] = Batch{Bucket: buckets[i], From: at[i], To: Position{log, to}, All: word == "all", More: word == "more", Lines: lines}
	}
	return out, nil
}

// Scan reads all lines of a bucket, some at a time. It may miss concurrent changes, which are in the log.
type Scan struct {
	s      *Store
	bucket int
	hashes []string // still to be scanned, the first one from cursor on
	cursor uint64
	keys   []string // found but not read yet
}

// Scan returns a Scan from the beginning of a bucket.
func (s *Store) Scan(b int) *Scan {
	return &Scan{s: s, bucket: b, hashes: []string{countersKey(b), remotesKey(b)}} // the second one has deleted counters
}

// Next returns about limit lines at most, and whether there may be more. It may be called again after an error.
func (c *Scan) Next(ctx context.Context, limit int) (lines []Line, more bool, err error) {
	for len(c.keys) == 0 && len(c.hashes) > 0 {
		if err := c.find(ctx, limit); err != nil {
			return nil, false, fmt.Errorf("counterredis: scan bucket %d: %w", c.bucket, err)
		}
	}
	if len(c.keys) == 0 {
		return nil, false, nil
	}
	cl := c.s.logCall(c.bucket, "keys", 0, 0)
	some := c.keys[:min(limit, len(c.keys))]
	for _, key := range some {
		cl.Args = append(cl.Args, key)
	}
	n := uint64(0)
	if err = c.s.conn.Run(ctx, []*redisconn.Call{cl}); err == nil {
		_, n, _, lines, err = c.s.parseLog(cl.Reply)
	}
	if err == nil && (n == 0 || n > uint64(len(some))) {
		err = errReplied()
	}
	if err != nil {
		return nil, false, fmt.Errorf("counterredis: read %d counters of bucket %d: %w", len(some), c.bucket, err)
	}
	c.keys = c.keys[n:]
	return lines, len(c.keys)+len(c.hashes) > 0, nil
}

// find adds a page of keys.
func (c *Scan) find(ctx context.Context, limit int) error {
	hash := c.hashes[0]
	return c.s.conn.Do(ctx, func(ctx context.Context, client *redisconn.Client) error {
		c.s.conn.Metrics.Commands.Inc()
		pairs, next, err := client.HScan(ctx, hash, c.cursor, "", int64(limit)).Result()
		if err != nil {
			return err
		}
		for i := 0; i < len(pairs); i += 2 {
			if hash == countersKey(c.bucket) || !strings.Contains(pairs[i+1], "/") {
				c.keys = append(c.keys, pairs[i])
			}
		}
		if c.cursor = next; next == 0 {
			c.hashes = c.hashes[1:]
		}
		return nil
	})
}

func (s *Store) logCall(b int, log string, cursor uint64, limit int) *redisconn.Call {
	return &redisconn.Call{
		Script: scripts.CounterLog, Keys: []string{countersKey(b), stateKey(b), remotesKey(b), logKey(b)},
		Args: []any{s.cfg.Region, log, strconv.FormatUint(cursor, 10), limit},
	}
}

func (s *Store) parseLog(reply any) (log string, to uint64, word string, lines []Line, err error) {
	row, _ := reply.([]any)
	if len(row) < 3 || (len(row)-3)%lineFields != 0 {
		return "", 0, "", nil, errReplied()
	}
	texts := make([]string, len(row))
	for i := range row {
		texts[i], _ = row[i].(string)
	}
	if texts[2] == "other" {
		return "", 0, "", nil, fmt.Errorf("this Redis has counted as region %q, and cannot count as %q: correct --region", texts[0], s.cfg.Region)
	}
	if texts[1] != "" {
		if to, err = strconv.ParseUint(texts[1], 10, 64); err != nil {
			return "", 0, "", nil, errReplied()
		}
	}
	for i := 3; i < len(texts); i += lineFields {
		lines = append(lines, Line(texts[i:i+lineFields]))
	}
	return texts[0], to, texts[2], lines, nil
}

// Positions returns how far this region has the logs of another one. It is called before a batch is sent, so it also
// checks that the format is still the same.
func (s *Store) Positions(ctx context.Context, of string, buckets []int) ([]Position, error) {
	err := s.conn.Do(ctx, func(ctx context.Context, c *redisconn.Client) error {
		s.conn.Metrics.Commands.Inc()
		return accept(ctx, c)
	})
	var texts []string
	if err == nil {
		texts, err = s.texts(ctx, len(buckets), func(pipe redis.Pipeliner, i int) *redis.StringCmd {
			return pipe.HGet(ctx, stateKey(buckets[i]), "from:"+of)
		})
	}
	if err != nil {
		return nil, fmt.Errorf("counterredis: positions of %d buckets: %w", len(buckets), err)
	}
	out := make([]Position, len(buckets))
	for i, text := range texts {
		out[i] = parsePosition(text)
	}
	return out, nil
}

// Mode is the kind of a Message.
type Mode string

// The modes.
const (
	ModeLog   Mode = "log"   // the part of the log between two positions
	ModeBegin Mode = "begin" // the whole bucket follows; Word names the transfer
	ModePage  Mode = "all"   // a page of it
	ModeEnd   Mode = "end"   // the last page, after which the receiver has the log up to a position
)

// Message is a Batch with its mode.
type Message struct {
	Batch
	Mode Mode
	Word string // for ModeBegin and ModeEnd
}

// Ack is the reply to a Message.
type Ack struct {
	Other string   // the name of the receiving region if it is not the expected one: nothing was merged
	At    Position // the receiver's new position
	News  int      // counters with changes that the receiver did not have
	Odd   int      // counters that could not be merged: of another kind here, or with totals beyond 64 bits
	Older bool     // for ModeBegin: the receiver has more of the log than the sender, which has lost data
}

// NoRegion is the name of a region before its first process has started.
const NoRegion = "?"

// Merge merges messages of the region from, those of one bucket in order. The name of this region must be to.
func (s *Store) Merge(ctx context.Context, from, to string, messages []Message) ([]Ack, error) {
	c, err := s.conn.Known(ctx)
	if err != nil {
		return nil, err
	}
	calls := make([]*redisconn.Call, len(messages))
	for i := range messages {
		calls[i] = s.mergeCall(c, from, to, &messages[i])
	}
	if err := s.conn.Run(ctx, calls); err != nil {
		return nil, fmt.Errorf("counterredis: merge %d messages: %w", len(messages), err)
	}
	out := make([]Ack, len(messages))
	for i, cl := range calls {
		row, _ := cl.Reply.([]any)
		if len(row) < 4 {
			return nil, errReplied()
		}
		more := ""
		if len(row) > 4 {
			more, _ = row[4].(string)
		}
		at, _ := row[1].(string)
		news, _ := row[2].(int64)
		odd, _ := row[3].(int64)
		if row[0] == "unready" {
			out[i].Other = cmp.Or(at, NoRegion)
		} else {
			out[i] = Ack{At: parsePosition(at), News: int(news), Odd: int(odd), Older: more == "older"}
		}
	}
	return out, nil
}

func (s *Store) mergeCall(c *redisconn.Client, from, to string, t *Message) *redisconn.Call {
	b := t.Bucket
	cl := &redisconn.Call{
		Script: scripts.CounterMerge,
		Keys:   []string{countersKey(b), stateKey(b), remotesKey(b), logKey(b), goneKey(b), tag(b) + "free"},
		Args:   []any{c.Publish, channel(b, s.cfg.Conn.DB), from, to, string(t.Mode)},
	}
	place := strconv.FormatUint(t.To.Cursor, 10)
	if t.Mode == ModeLog {
		cl.Args = append(cl.Args, t.To.Log, strconv.FormatUint(t.From.Cursor, 10), place)
	} else {
		cl.Args = append(cl.Args, t.Word, t.To.Log, place)
	}
	for _, l := range t.Lines {
		key := l[0]
		for _, field := range l {
			cl.Args = append(cl.Args, field)
		}
		cl.Args = append(cl.Args, len(cl.Keys)+1)
		cl.Keys = append(cl.Keys, membersKey(b, key), registersKey(b, key))
		if l[3] == "0" { // the counter was never deleted
			continue
		}
		cl.Keys = append(cl.Keys, ledgerKey(b, key), stepsKey(b, key), countedKey(b, key))
		for _, step := range counter.BucketSteps {
			cl.Keys = append(cl.Keys, gainsKey(b, step, key))
		}
	}
	return cl
}

// Listener is notified when counters of a bucket may have changed. It must not block.
type Listener interface{ Changed(bucket int) }

// Listen sets the listener, which a goroutine of the store calls until the store is closed. Listen is called once,
// before any Watch. Notifications may be lost.
func (s *Store) Listen(l Listener) {
	s.feed.listener = l
	s.feed.once.Do(func() { s.feed.wg.Go(s.feed.run) })
}
