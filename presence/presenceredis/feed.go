package presenceredis

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"

	"github.com/redis/go-redis/v9"

	"headcount/internal/outage"
	"headcount/internal/redisconn"
	"headcount/internal/wake"
	"headcount/presence"
)

// watcher is one call of Watch. Its readers fill it, Watch's goroutine empties it.
type watcher struct {
	s    *Store
	wake chan struct{} // holds one: there is something to read

	mu      sync.Mutex
	begun   bool // an attempt to subscribe has begun
	feeds   map[int]*feed
	backlog []message
	bytes   int // of backlog
}

// feed is what a watcher knows of one bucket. The watcher's mutex guards it.
type feed struct {
	lost bool   // the bucket must be read again, so publications before that are dropped
	last uint64 // sequence of the last publication; 0: none since the subscription
}

type message struct {
	bucket  int
	payload string
}

// Watch implements presence.Feed. One subscription covers all buckets, or on a Cluster
// of version 7 and later one per master. A subscription that fails, or whose pings are
// not answered, is replaced. Every attempt has its buckets read again, so that counts go
// on while Redis answers but takes no subscription.
func (s *Store) Watch(ctx context.Context, buckets []int, fn func(presence.Publication)) {
	// The channels have the hash tags, which depend on the format of the data.
	for s.learnFormat(ctx) != nil {
		if !outage.Sleep(ctx, learnAgain) {
			return
		}
	}

	w := &watcher{s: s, wake: make(chan struct{}, 1), feeds: make(map[int]*feed, len(buckets))}
	channels := make(map[string]int, len(buckets))
	for _, b := range buckets {
		w.feeds[b] = &feed{}
		channels[s.at().channel(b, s.cfg.Conn.DB)] = b
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
			return
		case <-w.wake:
		}

		// A lost bucket has no backlog, so no order between the two is needed.
		lost, todo := w.take()
		for _, b := range lost {
			fn(presence.Publication{Bucket: b, Lost: true})
		}

		for _, m := range todo {
			p, err := parsePublication(m.bucket, m.payload)
			if err != nil {
				s.cfg.Log.Error().Err(err).Int("bucket", m.bucket).
					Msg("a publication is malformed; reading its bucket again")
				p = presence.Publication{Bucket: m.bucket, Lost: true}
			}
			for _, u := range p.Updates {
				s.raiseHighest(u.Version.Incarnation)
			}

			fn(p)
		}
	}
}

// take empties the watcher: it returns the buckets to read again, and then the backlog.
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

// markLostLocked marks the bucket to be read again, and drops its backlog, which would bring back endpoints that have
// gone by then.
func (w *watcher) markLostLocked(bucket int) {
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

// Begin implements redisconn.Listener: an attempt to subscribe begins. Except for the first attempt, the buckets are
// marked as lost at once, because it is unknown how long the subscription will be down.
func (w *watcher) Begin() {
	w.mu.Lock()
	defer w.mu.Unlock()

	if !w.begun {
		w.begun = true
		return
	}

	for b := range w.feeds {
		w.markLostLocked(b)
	}

	wake.Signal(w.wake)
}

// Pong implements redisconn.Listener.
func (w *watcher) Pong(string) {}

// Subscribed implements redisconn.Listener.
func (w *watcher) Subscribed(_ *redis.PubSub, bucket int) {
	w.mu.Lock()
	defer w.mu.Unlock()

	if f := w.feeds[bucket]; f != nil {
		// What was published before this connection subscribed did not reach it, whatever the next sequence is.
		f.last = 0
		w.markLostLocked(bucket)
		wake.Signal(w.wake)
	}
}

// Received implements redisconn.Listener. Beyond the bound, and after a gap, it marks the bucket to be read again
// instead of keeping the publication.
func (w *watcher) Received(bucket int, payload string) {
	head, _, _ := strings.Cut(payload, " ")
	sequence, err := strconv.ParseUint(head, 10, 64)

	w.mu.Lock()
	defer w.mu.Unlock()

	f := w.feeds[bucket]
	if f == nil || err != nil {
		return // not a publication of ours
	}

	gap := f.last != 0 && sequence != f.last+1
	// Also of a publication that is dropped, so that the next one does not count as a gap.
	f.last = sequence
	if gap {
		w.s.conn.Metrics.Gaps.Inc()
	}

	// A slow watcher loses what waits for it, instead of memory of this process: reading the bucket gives the newest
	// state.
	full := w.bytes+len(payload) > w.s.cfg.Backlog
	switch {
	case f.lost:
		return // the bucket will be read again anyway
	case gap, full:
		w.markLostLocked(bucket)
	default:
		w.backlog = append(w.backlog, message{bucket, payload})
		w.bytes += len(payload)
	}

	wake.Signal(w.wake)
}

var errPublication = errors.New("not a publication")

// parsePublication parses what publish.lua writes.
func parsePublication(bucket int, payload string) (presence.Publication, error) {
	p := presence.Publication{Bucket: bucket}

	head, rest, ok := strings.Cut(payload, "\n")
	flags := strings.Split(head, " ")
	if !ok || len(flags) != 4 {
		return p, errPublication
	}

	stale := flags[1] == "1"
	without := flags[3] // for counts alone
	// The script asks for it when more has changed than its records say, as when the last partition is complete.
	p.Lost = flags[2] == "1"

	for rest != "" {
		// Nearly all records are counts, and these are binary because text would cost Redis and every reader more.
		if rest[0] == 'c' {
			c, others, err := cutCount(rest)
			if err != nil {
				return p, err
			}
			rest = others

			c.Stale = stale
			c.Without = without
			u := c.Update()
			if err := u.Topic.Check(); err != nil {
				return p, fmt.Errorf("%w: %w", errPublication, err)
			}
			p.Updates = append(p.Updates, u)
			continue
		}

		r, others, err := cutRecord(rest)
		if err != nil {
			return p, err
		}
		rest = others

		topic, err := presence.ParseTopic(r.topic)
		if err != nil {
			return p, fmt.Errorf("%w: %w", errPublication, err)
		}

		if r.what == "u" {
			p.Updates = append(p.Updates, r.update(topic, stale))
		} else {
			gone := r.what == "-"
			p.Endpoints = append(p.Endpoints, presence.Endpoint{Topic: topic, Gateway: r.text, Gone: gone})
		}
	}

	return p, nil
}

// cutCount parses the first of records, which must be a count, and returns the others.
func cutCount(records string) (c presence.Count, rest string, err error) {
	const head, tail = 3, 23 // bytes before and after the page
	if len(records) < head || records[0] != 'c' {
		return c, "", fmt.Errorf("%w: a count of %d bytes", errPublication, len(records))
	}

	end := head + int(records[1])<<8 + int(records[2])
	if len(records) < end+tail {
		return c, "", fmt.Errorf("%w: a count of %d bytes", errPublication, len(records))
	}

	number := func(bytes int) (n uint64) {
		for _, b := range []byte(records[end : end+bytes]) {
			n = n<<8 | uint64(b)
		}
		end += bytes
		return n
	}

	// The numbers follow the page in this order, and number moves on with every call.
	c.Page = records[head:end]
	c.Users = int64(number(5))
	c.Updated = presence.TimeOf(int64(number(5)))
	c.Version = presence.Version{Incarnation: number(7), Sequence: number(6)}

	return c, records[end:], nil
}

// record is any other record of a publication: the update of a topic ("u"), or an
// endpoint that was attached ("+") or detached ("-").
type record struct {
	what, topic, text string // text is the update's value, or the gateway
	version           presence.Version
}

func (r record) update(t presence.Topic, stale bool) presence.Update {
	return presence.Update{Topic: t, Version: r.version, Stale: stale, Value: r.text}
}

// cutRecord parses the first of records, and returns the others.
func cutRecord(records string) (r record, rest string, err error) {
	line, rest, ok := strings.Cut(records, "\n")
	if !ok {
		return r, "", errPublication
	}

	what, numbers, _ := strings.Cut(line, " ")
	var n [4]uint64 // two lengths, and the version of an update
	count := 0
	for ; numbers != "" && count < len(n); count++ {
		field, others, _ := strings.Cut(numbers, " ")
		numbers = others

		n[count], err = strconv.ParseUint(field, 10, 64)
		if err != nil {
			return r, "", fmt.Errorf("%w: %w", errPublication, err)
		}
	}

	update := what == "u" && count == 4
	endpoint := (what == "+" || what == "-") && count == 2
	// Whatever the lengths say, nothing beyond the text is read: any client of Redis can publish here.
	fits := n[0] <= uint64(len(rest)) && n[1] <= uint64(len(rest))-n[0] // the sum could overflow
	if !update && !endpoint || numbers != "" || !fits {
		return r, "", fmt.Errorf("%w: %q", errPublication, line)
	}

	end := n[0] + n[1]
	r = record{what, rest[:n[0]], rest[n[0]:end], presence.Version{Incarnation: n[2], Sequence: n[3]}}
	return r, rest[end:], nil
}
