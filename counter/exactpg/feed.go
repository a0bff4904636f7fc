package exactpg

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"maps"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"headcount/counter"
	"headcount/internal/outage"
	"headcount/internal/wake"
)

const (
	channel     = "headcount_counters"
	readAtOnce  = 1000    // keys in one statement
	maxOutgoing = 1 << 16 // keys that wait to be sent; beyond it, other processes read everything that they follow
	maxPayload  = 7700    // PostgreSQL takes payloads under 8,000 bytes
	// notifyPause is the minimum time between two notifications. Later commits join the next one.
	notifyPause = 5 * time.Millisecond
	retryEvery  = 200 * time.Millisecond // while PostgreSQL is unavailable
	dialTimeout = 2 * time.Second
)

// feed records which followed counters may have changed, and which changes other processes must be notified of.
type feed struct {
	self string // identifies this process in notifications
	hub  counter.Hub
	news chan struct{} // has capacity 1: dirty is not empty
	out  chan struct{} // has capacity 1: outgoing is not empty

	mu       sync.Mutex          // guards the fields below
	dirty    map[string]struct{} // followed keys that may have changed
	outgoing map[string]struct{} // keys that were committed here and are to be sent
	flood    bool                // outgoing overflowed
}

func newFeed() *feed {
	return &feed{
		self:     rand.Text(),
		news:     make(chan struct{}, 1),
		out:      make(chan struct{}, 1),
		dirty:    map[string]struct{}{},
		outgoing: map[string]struct{}{},
	}
}

// committed adds keys of counters that this process has changed.
func (f *feed) committed(keys []string) {
	if len(keys) == 0 {
		return
	}

	f.mu.Lock()
	defer f.mu.Unlock()

	for _, key := range keys {
		f.heardLocked(key)
		if len(f.outgoing) < maxOutgoing {
			f.outgoing[key] = struct{}{}
		} else {
			f.flood = true
		}
	}
	wake.Signal(f.out)
}

// addChanged adds keys of counters that another process has changed.
func (f *feed) addChanged(keys []string) {
	f.mu.Lock()
	defer f.mu.Unlock()

	for _, key := range keys {
		f.heardLocked(key)
	}
}

func (f *feed) heardLocked(key string) {
	// What nobody follows is dropped, so dirty has no more keys than are followed.
	if f.hub.Followed(key) {
		f.dirty[key] = struct{}{}
		wake.Signal(f.news)
	}
}

// recheck schedules everything that is followed to be read and published again.
func (f *feed) recheck() { f.addChanged(f.hub.Keys()) }

// take returns some of the keys that may have changed.
func (f *feed) take() (some []string) {
	f.mu.Lock()
	defer f.mu.Unlock()

	for key := range f.dirty {
		// The rest comes with the next call, so that a statement has a bound.
		if len(some) == readAtOnce {
			break
		}
		some = append(some, key)
		delete(f.dirty, key)
	}

	return some
}

// publishEach reads the counters that may have changed and publishes them, until ctx ends. Only this goroutine calls
// Hub.Publish, and each of its reads sees everything that the previous one saw, so versions are published in order.
func (s *Store) publishEach(ctx context.Context) {
	f := s.feed
	poll := time.NewTicker(s.cfg.PollEvery)
	defer poll.Stop()

	published := map[string]counter.Version{} // the last version of each followed key

	for {
		select {
		case <-ctx.Done():
			return
		case <-f.news:
		case <-poll.C:
			// Keys that nobody follows any more would stay for ever.
			maps.DeleteFunc(published, func(key string, _ counter.Version) bool { return !f.hub.Followed(key) })
			f.recheck()
		}

		for some := f.take(); len(some) > 0; some = f.take() {
			now, err := s.States(ctx, some)
			if err != nil {
				// take has removed these keys from the dirty ones, and their changes are still unpublished.
				f.addChanged(some)
				if !outage.Sleep(ctx, retryEvery) {
					return
				}
				continue
			}
			f.hub.Publish(news(published, some, now), func(key string) counter.Counter {
				is := now[key]
				return is.Counter(key)
			})
		}
	}
}

// news returns the keys whose version differs from the last published one, and records the new versions.
func news(published map[string]counter.Version, keys []string, now map[string]counter.State) []counter.Notification {
	var all []counter.Notification
	for _, key := range keys {
		// If a key was never published, it may have changed since its watchers first read it, so publish it.
		version := now[key].Version
		before, known := published[key]
		if known && before == version {
			continue
		}
		published[key] = version
		all = append(all, counter.Notification{Key: key})
	}

	return all
}

// Watch begins a watch as counter.Feed does. Missed changes are published later, so lost is never called. A counter may
// be published once with the value that it had when it was followed.
func (s *Store) Watch(changed func([]counter.Update), lost func()) counter.Watch {
	return s.feed.hub.Watch(changed, lost)
}

// message is the payload of a notification.
type message struct {
	From string   `json:"f"`
	All  bool     `json:"a,omitempty"` // any counter may have changed
	Keys []string `json:"k,omitempty"`
}

// notify sends the keys that were committed here to the other processes, until ctx ends.
func (s *Store) notify(ctx context.Context) {
	const send = `select pg_notify('` + channel + `', p) from unnest($1::text[]) p`
	var payloads []string // taken from outgoing, and not sent yet
	for {
		if len(payloads) == 0 {
			select {
			case <-ctx.Done():
				return
			case <-s.feed.out:
			}
			payloads = s.feed.payloads()
		}

		// Not within the transaction of a change: there a NOTIFY makes all commits of the database wait for each other.
		err := s.do(ctx, "notify", func(ctx context.Context, c *pgxpool.Conn) error {
			_, err := c.Exec(ctx, send, payloads)
			return err
		})
		pause := retryEvery
		if err == nil {
			payloads = nil
			pause = notifyPause
		}
		if !outage.Sleep(ctx, pause) {
			return
		}
	}
}

// payloads takes all outgoing keys, packed into as few payloads as possible.
func (f *feed) payloads() (all []string) {
	f.mu.Lock()
	outgoing := f.outgoing
	flood := f.flood
	f.outgoing = map[string]struct{}{}
	f.flood = false
	f.mu.Unlock()

	if flood {
		return []string{encode(message{From: f.self, All: true})}
	}

	m := message{From: f.self}
	size := 0
	for key := range maps.Keys(outgoing) {
		// The size in the payload, with a comma.
		n := len(encode(key)) + 1
		if size+n > maxPayload {
			all = append(all, encode(m))
			m.Keys = nil
			size = 0
		}
		m.Keys = append(m.Keys, key)
		size += n
	}
	if len(m.Keys) > 0 {
		all = append(all, encode(m))
	}

	return all
}

func encode(v any) string {
	b, err := json.Marshal(v)
	if err != nil {
		panic(err) // cannot happen: strings can always be encoded
	}

	return string(b)
}

// listen receives the keys that other processes committed, until ctx ends.
func (s *Store) listen(ctx context.Context) {
	for ctx.Err() == nil {
		err := s.awaitNotifications(ctx)
		s.cfg.Log.Debug().Err(err).Msg("counters: listening for notifications of PostgreSQL failed; retrying")
		outage.Sleep(ctx, retryEvery)
	}
}

// awaitNotifications listens on a connection of its own until it fails.
func (s *Store) awaitNotifications(ctx context.Context) error {
	dialling, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	// LISTEN belongs to a session, so a connection of the pool would not do.
	c, err := pgx.ConnectConfig(dialling, s.db.ConnConfig())
	if err != nil {
		return err
	}
	defer func() {
		// Also when ctx has ended, so that the server drops the session at once.
		closing, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
		defer cancel()
		_ = c.Close(closing) // errors do not matter any more
	}()
	if _, err := c.Exec(dialling, "listen "+channel); err != nil {
		return err
	}

	// Notifications of earlier commits were missed.
	s.feed.recheck()
	for {
		n, err := c.WaitForNotification(ctx)
		if err != nil {
			return err
		}

		var m message
		if err := json.Unmarshal([]byte(n.Payload), &m); err != nil {
			return fmt.Errorf("a notification of %d bytes: %w", len(n.Payload), err)
		}
		switch {
		case m.From == s.feed.self:
			// The notification is this process's own, which marked its changes when it committed them.
		case m.All:
			s.feed.recheck()
		default:
			s.feed.addChanged(m.Keys)
		}
	}
}
