package redisstore

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"

	"headcount/counter"
)

const (
	pingEvery    = 2 * time.Second // a subscription that hears nothing for two of them is dead
	resubscribe  = 100 * time.Millisecond
	resubscribeM = 2 * time.Second // the longest pause between two tries
	followFor    = 3 * time.Second // how long Follow waits for the subscription
)

// feed hears the channels of all buckets and tells the watchers of this process. Its
// subscription begins with the first watch. It keeps no queue: the watches of the
// hub keep the newest update of each key.
type feed struct {
	s    *Store
	hub  counter.Hub
	ctx  context.Context // ends with the store
	stop context.CancelFunc
	once sync.Once // starts run
	wg   sync.WaitGroup

	mu     sync.Mutex                 // guards all below
	up     map[*redis.PubSub]struct{} // connections that hear all their channels; nil while any does not
	change chan struct{}              // closed when up changes
	pongs  map[string]func()          // by the text of the ping
	pings  uint64
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

// Watch is as counter.Feed says.
func (s *Store) Watch(told func([]counter.Update), lost func()) counter.Watch {
	s.feed.once.Do(func() { s.feed.wg.Go(s.feed.run) })
	return &watch{Watch: s.feed.hub.Watch(told, lost), feed: s.feed}
}

// watch is the hub's, which follows when the subscription hears.
type watch struct {
	counter.Watch
	feed *feed
}

// Follow also waits until all that was published before has arrived, so that the
// watch hears only what comes after.
func (w *watch) Follow(ctx context.Context, keys ...string) error {
	ctx, cancel := context.WithTimeout(ctx, followFor)
	defer cancel()
	if err := w.feed.sync(ctx); err != nil {
		return fmt.Errorf("redisstore: follow %d counters: %w: %w", len(keys), counter.ErrUnavailable, err)
	}
	return w.Watch.Follow(ctx, keys...)
}

// sync returns when the subscription is there and has heard all that was published
// before the call: what answers a ping comes after that.
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
			f.pongs[text] = func() { // called with mu
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
		case <-change: // a ping that is lost was on a connection that is
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
			return errors.Join(err, errors.New("redis tells of no changes"))
		case answered != nil && same && err == nil:
			return nil
		}
	}
}

// set says which connections hear.
func (f *feed) set(up map[*redis.PubSub]struct{}) {
	f.mu.Lock()
	f.up = up
	close(f.change)
	f.change = make(chan struct{})
	f.mu.Unlock()
}

// run keeps the subscription up until the store is closed.
func (f *feed) run() {
	for failed := 0; f.ctx.Err() == nil; {
		start := time.Now()
		err := f.listen(f.ctx)
		f.set(nil)
		if f.ctx.Err() != nil {
			return
		}
		if time.Since(start) > resubscribeM {
			failed = 0
		}
		failed++
		d := min(resubscribe<<min(failed-1, 10), resubscribeM)
		f.s.cfg.Log.Debug().Err(err).Stringer("retry_in", d).Msg("subscription to changes of counters ended")
		select {
		case <-f.ctx.Done():
		case <-time.After(d/2 + rand.N(d/2)):
		}
	}
}

// ears are the subscriptions of one listen, and what they have heard of each bucket.
type ears struct {
	f        *feed
	channels map[string]int // buckets

	mu      sync.Mutex // guards all below: on a Cluster there are several connections
	last    [Buckets]uint64
	missing int // channels that are not subscribed yet
	all     map[*redis.PubSub]struct{}
}

// listen subscribes to all buckets, and returns when one subscription has ended: on a
// single server, with Sentinel and on a Cluster older than 7 there is one, on a newer
// Cluster one per master.
func (f *feed) listen(ctx context.Context) error {
	c, err := f.s.conn.Known(ctx)
	if err != nil {
		return err
	}
	e := &ears{f: f, channels: make(map[string]int, Buckets), missing: Buckets, all: map[*redis.PubSub]struct{}{}}
	names := make([]string, Buckets)
	for b := range names {
		names[b] = channel(b, f.s.conn.DB)
		e.channels[names[b]] = b
	}
	if c.Publish == "PUBLISH" {
		return e.hear(ctx, c.Subscribe(ctx), names, (*redis.PubSub).Subscribe)
	}
	shards := map[*redis.Client][]string{}
	for _, name := range names {
		m, err := c.Cluster.MasterForKey(ctx, name)
		if err != nil {
			c.Cluster.ReloadState(ctx)
			return err
		}
		shards[m] = append(shards[m], name)
	}
	// One that ends takes the others with it: the buckets may have moved.
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	errs := make(chan error, len(shards))
	var wg sync.WaitGroup
	defer wg.Wait()
	for m, names := range shards {
		wg.Go(func() {
			defer cancel()
			errs <- e.hear(ctx, m.SSubscribe(ctx), names, func(ps *redis.PubSub, ctx context.Context, names ...string) error {
				for _, name := range names { // one command cannot name channels of several slots
					if err := ps.SSubscribe(ctx, name); err != nil {
						return err
					}
				}
				return nil
			})
		})
	}
	err = <-errs
	c.Cluster.ReloadState(ctx)
	return err
}

var errSilent = errors.New("it hears nothing")

// hear runs one connection until it fails. go-redis would subscribe anew by itself,
// and would not say that it has: so at the first error it is closed.
func (e *ears) hear(ctx context.Context, ps *redis.PubSub, names []string, subscribe func(*redis.PubSub, context.Context, ...string) error) error {
	e.mu.Lock()
	e.all[ps] = struct{}{}
	e.mu.Unlock()
	var heard atomic.Bool
	heard.Store(true)
	ctx, cancel := context.WithCancelCause(ctx)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel(nil)
	wg.Go(func() {
		defer ps.Close() // ends Receive below
		tick := time.NewTicker(pingEvery)
		defer tick.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
			if !heard.Swap(false) {
				cancel(errSilent)
				return
			}
			if err := ps.Ping(ctx); err != nil {
				cancel(err)
				return
			}
		}
	})
	if err := subscribe(ps, ctx, names...); err != nil {
		return err
	}
	for {
		msg, err := ps.Receive(ctx)
		if err != nil {
			return errors.Join(context.Cause(ctx), err)
		}
		heard.Store(true)
		switch m := msg.(type) {
		case *redis.Subscription:
			b, ok := e.channels[m.Channel]
			if !ok {
				continue
			}
			if m.Kind != "subscribe" && m.Kind != "ssubscribe" {
				return fmt.Errorf("%s from bucket %d: its slot has moved", m.Kind, b)
			}
			e.subscribed()
		case *redis.Pong:
			e.f.mu.Lock()
			if pong := e.f.pongs[m.Payload]; pong != nil {
				pong()
			}
			e.f.mu.Unlock()
		case *redis.Message:
			if b, ok := e.channels[m.Channel]; ok {
				e.heard(b, m.Payload)
			}
		}
	}
}

// subscribed counts channels; when all are heard, what was missed before is lost.
func (e *ears) subscribed() {
	e.mu.Lock()
	e.missing--
	ready := e.missing == 0
	e.mu.Unlock()
	if ready {
		e.f.hub.Lose()
		e.f.set(e.all)
	}
}

// update is one of a publication of counter_apply.lua.
type update struct {
	Key    string   `json:"key"`
	State  string   `json:"state"`
	All    bool     `json:"all"`
	Joined []string `json:"joined"`
	Left   []string `json:"left"`
}

// heard tells of a publication, "sequence [updates]". After a gap all is lost.
func (e *ears) heard(b int, payload string) {
	head, text, _ := strings.Cut(payload, " ")
	sequence, err := strconv.ParseUint(head, 10, 64)
	if err != nil {
		return // not ours
	}
	e.mu.Lock()
	gap := e.last[b] != 0 && sequence != e.last[b]+1
	e.last[b] = sequence
	e.mu.Unlock()
	var updates []update
	if err := json.Unmarshal([]byte(text), &updates); err != nil {
		e.f.s.cfg.Log.Error().Err(err).Int("bucket", b).Msg("changes of counters that cannot be read")
		gap = true
	}
	told := make([]counter.Told, 0, len(updates))
	counters := make(map[string]counter.Counter, len(updates))
	for _, u := range updates {
		c, _, err := parseState(u.Key, u.State)
		if err != nil {
			e.f.s.cfg.Log.Error().Err(err).Int("bucket", b).Msg("changes of counters that cannot be read")
			gap = true
			continue
		}
		counters[u.Key] = c
		told = append(told, counter.Told{Key: u.Key, Joined: u.Joined, Left: u.Left, All: u.All})
	}
	e.f.hub.Tell(told, func(key string) counter.Counter { return counters[key] })
	if gap {
		e.f.hub.Lose()
	}
}
