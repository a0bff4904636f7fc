package counterredis

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"headcount/counter"
	"headcount/internal/redisconn"
)

const followFor = 3 * time.Second // how long Follow waits for the subscription

// feed subscribes to the channels of all buckets and notifies the watchers of this process. The subscription begins
// with the first watch. It has no queue: the watches of the hub keep the newest update of each key.
type feed struct {
	s   *Store
	hub counter.Hub
	ctx context.Context // ends with the store
	// listener is notified of publications, or nil; it is set before run starts.
	listener Listener
	stop     context.CancelFunc
	once     sync.Once // starts run
	wg       sync.WaitGroup

	mu     sync.Mutex                 // guards all below
	up     map[*redis.PubSub]struct{} // connections, if all channels are subscribed; otherwise nil
	change chan struct{}              // closed when up changes
	pongs  map[string]func()          // by the text of the ping
	pings  uint64

	last    [Buckets]uint64            // sequence of the last publication of each bucket; 0: none since the subscription
	missing int                        // channels that are not subscribed yet
	hearing map[*redis.PubSub]struct{} // connections with subscribed channels
}

func newFeed(s *Store) *feed {
	f := &feed{s: s, change: make(chan struct{}), pongs: map[string]func(){}}
	f.ctx, f.stop = context.WithCancel(context.Background())
	return f
}

func (f *feed) close() {
	f.stop()
	f.once.Do(func() {}) // it does not start any more
	f.wg.Wait()
}

// Watch implements counter.Feed.
func (s *Store) Watch(changed func([]counter.Update), lost func()) counter.Watch {
	s.feed.once.Do(func() { s.feed.wg.Go(s.feed.run) })
	return &watch{Watch: s.feed.hub.Watch(changed, lost), feed: s.feed}
}

// watch is a watch of the hub that waits for the subscription.
type watch struct {
	counter.Watch
	feed *feed
}

// Follow also waits until everything that was published before has arrived, so the watch receives only later changes.
func (w *watch) Follow(ctx context.Context, keys ...string) error {
	ctx, cancel := context.WithTimeout(ctx, followFor)
	defer cancel()
	if err := w.feed.sync(ctx); err != nil {
		return fmt.Errorf("counterredis: follow %d counters: %w: %w", len(keys), counter.ErrUnavailable, err)
	}
	return w.Watch.Follow(ctx, keys...)
}

// sync returns when all channels are subscribed and everything that was published before the call has arrived: the
// answer to a ping comes after it.
func (f *feed) sync(ctx context.Context) error {
	for {
		f.mu.Lock()
		up, change := f.up, f.change
		var answered chan struct{}
		var text string
		if up != nil {
			f.pings++
			text, answered = strconv.FormatUint(f.pings, 10), make(chan struct{})
			left := len(up)
			f.pongs[text] = func() { // the caller holds mu
				if left--; left == 0 {
					close(answered)
				}
			}
		}
		f.mu.Unlock()
		var err error
		for ps := range up {
			err = errors.Join(err, ps.Ping(ctx, text))
		}
		select {
		case <-answered:
		case <-change: // a ping is lost only together with its connection
		case <-f.ctx.Done():
			err = f.ctx.Err()
		case <-ctx.Done():
			err = ctx.Err()
		}
		f.mu.Lock()
		delete(f.pongs, text)
		same := f.change == change
		f.mu.Unlock()
		switch {
		case f.ctx.Err() != nil || ctx.Err() != nil:
			return errors.Join(err, errors.New("redis: the subscription to changes is not up"))
		case answered != nil && same && err == nil:
			return nil
		}
	}
}

// run keeps the subscription up until the store is closed.
func (f *feed) run() {
	channels := make(map[string]int, Buckets)
	for b := range Buckets {
		channels[channel(b, f.s.cfg.Conn.DB)] = b
	}
	f.s.conn.Listen(f.ctx, redisconn.Subscription{Channels: channels, Listener: f})
}

// Begin implements redisconn.Listener.
func (f *feed) Begin() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.last, f.missing, f.hearing = [Buckets]uint64{}, Buckets, map[*redis.PubSub]struct{}{}
	f.set(nil)
}

// set sets up. The caller holds mu.
func (f *feed) set(up map[*redis.PubSub]struct{}) {
	f.up = up
	close(f.change)
	f.change = make(chan struct{})
}

// Subscribed implements redisconn.Listener. When all channels are subscribed, watchers have to read again.
func (f *feed) Subscribed(on *redis.PubSub, _ int) {
	f.mu.Lock()
	f.hearing[on] = struct{}{}
	f.missing--
	ready := f.missing == 0
	f.mu.Unlock()
	if ready {
		f.hub.MarkMissed()
		f.mu.Lock()
		f.set(f.hearing)
		f.mu.Unlock()
	}
}

// Pong implements redisconn.Listener.
func (f *feed) Pong(text string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if pong := f.pongs[text]; pong != nil {
		pong()
	}
}

// parseUpdates parses a publication of counter_updates.lua.
func parseUpdates(payload string) (sequence uint64, changes []counter.Notification, counters map[string]counter.Counter, err error) {
	lines := strings.Split(payload, "\n")
	if sequence, err = strconv.ParseUint(lines[0], 10, 64); err != nil || len(lines)%3 != 1 {
		return 0, nil, nil, errReply // not ours
	}
	changes, counters = make([]counter.Notification, 0, len(lines)/3), make(map[string]counter.Counter, len(lines)/3)
	for u := range slices.Chunk(lines[1:], 3) {
		c, _, fault := parseState(u[0], u[1])
		if fault != nil {
			err = errors.Join(err, fault)
			continue
		}
		counters[c.Key] = c
		is := counter.Notification{Key: c.Key, All: u[2] == "*"}
		if !is.All && u[2] != "" {
			for mark := range strings.SplitSeq(u[2], "\t") {
				if name, joined := strings.CutPrefix(mark, "+"); joined {
					is.Joined = append(is.Joined, name)
				} else {
					is.Left = append(is.Left, strings.TrimPrefix(mark, "-"))
				}
			}
		}
		changes = append(changes, is)
	}
	return sequence, changes, counters, err
}

// Heard implements redisconn.Listener. After a gap watchers have to read again.
func (f *feed) Heard(b int, payload string) {
	sequence, changes, counters, err := parseUpdates(payload)
	if sequence == 0 {
		return // not ours
	}
	f.mu.Lock()
	gap := f.last[b] != 0 && sequence != f.last[b]+1
	f.last[b] = sequence
	f.mu.Unlock()
	if f.listener != nil {
		f.listener.Changed(b)
	}
	if gap {
		f.s.conn.Metrics.Gaps.Inc()
	}
	if err != nil {
		f.s.cfg.Log.Error().Err(err).Int("bucket", b).Msg("changes of counters that cannot be read")
	}
	f.hub.Publish(changes, func(key string) counter.Counter { return counters[key] })
	if gap || err != nil {
		f.hub.MarkMissed()
	}
}
