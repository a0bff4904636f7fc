package presenceredis

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"headcount/internal/redisconn"
	"headcount/presence"
)

// watcher is one call of Watch. Its readers fill it, Watch's goroutine empties it.
type watcher struct {
	s    *Store
	wake chan struct{} // holds one: there is something

	mu      sync.Mutex
	feeds   map[int]*feed
	backlog []message
	bytes   int // of backlog
}

// feed is what a watcher knows of one bucket; under its mutex.
type feed struct {
	lost       bool   // the bucket must be read again; what comes before that is not worth keeping
	last       uint64 // sequence of the last publication; 0: none since the subscription
	subscribed bool   // the bucket was heard before
}

type message struct {
	bucket  int
	payload string
}

// Watch implements presence.Feed. On a single server, with Sentinel and on a
// Cluster older than 7 one subscription hears all buckets, on a newer Cluster
// one per master. A subscription that fails, or that hears nothing although it
// asks, is made anew, and its buckets are to be read again: at each attempt, so that
// counts go on while Redis answers and takes no subscription.
func (s *Store) Watch(ctx context.Context, buckets []int, fn func(presence.Publication)) error {
	w := &watcher{s: s, wake: make(chan struct{}, 1), feeds: make(map[int]*feed, len(buckets))}
	channels := make(map[string]int, len(buckets))
	for _, b := range buckets {
		w.feeds[b] = &feed{}
		channels[channel(b, s.db)] = b
	}
	var wg sync.WaitGroup
	defer wg.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	wg.Go(func() {
		s.conn.Listen(ctx, redisconn.Subscription{Channels: channels, Ping: s.ping, Listener: w})
	})
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-w.wake:
		}
		lost, todo := w.take()
		for _, b := range lost {
			fn(presence.Publication{Bucket: b, Lost: true})
		}
		for _, m := range todo {
			p, err := parsePublication(m.bucket, m.payload)
			if err != nil {
				s.cfg.Log.Error().Err(err).Int("bucket", m.bucket).Msg("publication cannot be read")
				p = presence.Publication{Bucket: m.bucket, Lost: true}
			}
			for _, u := range p.Updates {
				s.raiseFloor(u.Version.Incarnation)
			}
			fn(p)
		}
	}
}

// take empties the watcher: the buckets to read again, then what came since.
func (w *watcher) take() (lost []int, todo []message) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for b, f := range w.feeds {
		if f.lost {
			lost = append(lost, b)
			f.lost = false
		}
	}
	todo = w.backlog
	w.backlog, w.bytes = nil, 0
	return lost, todo
}

func (w *watcher) signal() {
	select {
	case w.wake <- struct{}{}:
	default:
	}
}

// markLost has the bucket read again. What waits of it is dropped: after that it
// would bring back endpoints that are gone.
func (w *watcher) markLost(bucket int) {
	kept := w.backlog[:0]
	w.bytes = 0
	for _, m := range w.backlog {
		if m.bucket != bucket {
			kept = append(kept, m)
			w.bytes += len(m.payload)
		}
	}
	w.backlog = kept
	w.feeds[bucket].lost = true
}

// Begin implements redisconn.Listener: what was heard before is read until it is heard again.
func (w *watcher) Begin() {
	w.mu.Lock()
	defer w.mu.Unlock()
	for b, f := range w.feeds {
		if f.subscribed {
			w.markLost(b)
		}
	}
	w.signal()
}

// Pong implements redisconn.Listener.
func (w *watcher) Pong(string) {}

// Subscribed notes that the bucket is heard from now on.
func (w *watcher) Subscribed(_ *redis.PubSub, bucket int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if f := w.feeds[bucket]; f != nil {
		f.last, f.subscribed = 0, true
		w.markLost(bucket)
		w.signal()
	}
}

// Heard takes a publication. At the bound, and after a gap, the bucket is to be
// read again instead.
func (w *watcher) Heard(bucket int, payload string) {
	head, _, _ := strings.Cut(payload, " ")
	sequence, err := strconv.ParseUint(head, 10, 64)
	w.mu.Lock()
	defer w.mu.Unlock()
	f := w.feeds[bucket]
	if f == nil || err != nil {
		return // not ours
	}
	gap := f.last != 0 && sequence != f.last+1
	f.last = sequence
	if gap {
		w.s.conn.Metrics.Gaps.Inc()
	}
	switch {
	case f.lost:
		return // it will be read again anyway
	case gap || w.bytes+len(payload) > w.s.cfg.Backlog:
		w.markLost(bucket)
	default:
		w.backlog = append(w.backlog, message{bucket, payload})
		w.bytes += len(payload)
	}
	w.signal()
}

var errPublication = errors.New("not a publication")

// parsePublication reads what publish.lua writes.
func parsePublication(bucket int, payload string) (presence.Publication, error) {
	p := presence.Publication{Bucket: bucket}
	head, rest, ok := strings.Cut(payload, "\n")
	flags := strings.Split(head, " ")
	if !ok || len(flags) != 4 {
		return p, errPublication
	}
	stale, without := flags[1] == "1", flags[3]
	p.Lost = flags[2] == "1"
	for rest != "" {
		var err error
		if rest[0] == 'c' {
			var c presence.Count
			if c, rest, err = cutCount(rest); err != nil {
				return p, err
			}
			c.Stale, c.Without = stale, without
			u := c.Update()
			if err := u.Topic.Check(); err != nil {
				return p, fmt.Errorf("%w: %w", errPublication, err)
			}
			p.Updates = append(p.Updates, u)
			continue
		}
		var r record
		if r, rest, err = cutRecord(rest); err != nil {
			return p, err
		}
		topic, err := presence.ParseTopic(r.topic)
		if err != nil {
			return p, fmt.Errorf("%w: %w", errPublication, err)
		}
		if r.what == "u" {
			p.Updates = append(p.Updates, r.update(topic, stale))
		} else {
			p.Endpoints = append(p.Endpoints, presence.Endpoint{Topic: topic, Gateway: r.text, Gone: r.what == "-"})
		}
	}
	return p, nil
}

// cutCount reads the first of some records, which is that of a count.
func cutCount(records string) (c presence.Count, rest string, err error) {
	const head, tail = 3, 23 // bytes before and after the page
	if len(records) < head || records[0] != 'c' || len(records) < head+tail+int(records[1])<<8+int(records[2]) {
		return c, "", fmt.Errorf("%w: a count of %d bytes", errPublication, len(records))
	}
	end := head + int(records[1])<<8 + int(records[2])
	number := func(bytes int) (n uint64) {
		for _, b := range []byte(records[end : end+bytes]) {
			n = n<<8 | uint64(b)
		}
		end += bytes
		return n
	}
	c.Page = records[head:end]
	c.Users = int64(number(5))
	if at := number(5); at > 0 {
		c.Updated = time.Unix(int64(at), 0).UTC()
	}
	c.Version = presence.Version{Incarnation: number(7), Sequence: number(6)}
	return c, records[end:], nil
}

// record is another record of a publication: the update of a topic ("u"), or an
// endpoint that has come ("+") or gone ("-").
type record struct {
	what, topic, text string // text is the update's value, or the gateway
	version           presence.Version
}

func (r record) update(t presence.Topic, stale bool) presence.Update {
	return presence.Update{Topic: t, Version: r.version, Stale: stale, Value: r.text}
}

// cutRecord reads the first of some records.
func cutRecord(records string) (r record, rest string, err error) {
	line, rest, ok := strings.Cut(records, "\n")
	if !ok {
		return r, "", errPublication
	}
	what, numbers, _ := strings.Cut(line, " ")
	var n [4]uint64 // two lengths; of an update then its version
	count := 0
	for ; numbers != "" && count < len(n); count++ {
		var field string
		field, numbers, _ = strings.Cut(numbers, " ")
		if n[count], err = strconv.ParseUint(field, 10, 64); err != nil {
			return r, "", fmt.Errorf("%w: %w", errPublication, err)
		}
	}
	known := what == "u" && count == 4 || (what == "+" || what == "-") && count == 2
	if !known || numbers != "" || n[0] > uint64(len(rest)) || n[1] > uint64(len(rest))-n[0] {
		return r, "", fmt.Errorf("%w: %q", errPublication, line)
	}
	end := n[0] + n[1]
	r = record{what, rest[:n[0]], rest[n[0]:end], presence.Version{Incarnation: n[2], Sequence: n[3]}}
	return r, rest[end:], nil
}
