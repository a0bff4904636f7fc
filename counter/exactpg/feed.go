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
	maxOutgoing = 1 << 16 // keys that wait to be sent; with more, other processes read everything that they follow
	maxPayload  = 7700    // PostgreSQL takes payloads under 8,000 bytes
	// notifyPause is the least time between two notifications. What is committed meanwhile goes with the next one.
	notifyPause = 5 * time.Millisecond
	retryEvery  = 200 * time.Millisecond // while PostgreSQL is away
	dialTimeout = 2 * time.Second
)

// feed knows what is followed, what of it may have changed, and what other processes are to be notified of.
type feed struct {
	self string // names this process in notifications
	hub  counter.Hub
	news chan struct{} // has capacity 1: dirty has something
	out  chan struct{} // has capacity 1: outgoing has something

	mu       sync.Mutex          // guards the fields below
	dirty    map[string]struct{} // keys that somebody follows and that may have changed
	outgoing map[string]struct{} // keys that were committed here, to be sent
	flood    bool                // outgoing was full
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

// committed takes keys of counters that this process has changed.
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

// heard takes keys of counters that another process has changed.
func (f *feed) heard(keys []string) {
	f.mu.Lock()
	defer f.mu.Unlock()

	for _, key := range keys {
		f.heardLocked(key)
	}
}

func (f *feed) heardLocked(key string) {
	if f.hub.Followed(key) {
		f.dirty[key] = struct{}{}
		wake.Signal(f.news)
	}
}

// recheck has everything that is followed read and published again.
func (f *feed) recheck() { f.heard(f.hub.Keys()) }

// take takes some of the keys that may have changed.
func (f *feed) take() (some []string) {
	f.mu.Lock()
	defer f.mu.Unlock()

	for key := range f.dirty {
		if len(some) == readAtOnce {
			break
		}
		some = append(some, key)
		delete(f.dirty, key)
	}

	return some
}

// publishEach reads what may have changed and publishes it, until ctx ends. It alone calls Hub.Publish, and each of its
// reads sees all that the one before saw, so no version is published after a newer one.
func (s *Store) publishEach(ctx context.Context) {
	f := s.feed
	poll := time.NewTicker(s.cfg.PollEvery)
	defer poll.Stop()

	published := map[string]counter.Version{} // the last version of each key that is followed

	for {
		select {
		case <-ctx.Done():
			return
		case <-f.news:
		case <-poll.C:
			maps.DeleteFunc(published, func(key string, _ counter.Version) bool { return !f.hub.Followed(key) })
			f.recheck()
		}

		for some := f.take(); len(some) > 0; some = f.take() {
			now, err := s.States(ctx, some)
			if err != nil {
				f.heard(some)
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

// news returns those of keys that differ from what was published last, and notes that they are published now.
func news(published map[string]counter.Version, keys []string, now map[string]counter.State) []counter.Notification {
	var all []counter.Notification
	for _, key := range keys {
		// What was never published may have changed before: its watchers may have read what it was.
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

// Watch begins a watch as counter.Feed does. What was missed is published later, so lost is never called. A counter may
// be published once as it was when it was followed.
func (s *Store) Watch(changed func([]counter.Update), lost func()) counter.Watch {
	return s.feed.hub.Watch(changed, lost)
}

// message is the payload of a notification.
type message struct {
	From string   `json:"f"`
	All  bool     `json:"a,omitempty"` // anything may have changed
	Keys []string `json:"k,omitempty"`
}

// notify sends what was committed here to the other processes, until ctx ends.
func (s *Store) notify(ctx context.Context) {
	const send = `select pg_notify('` + channel + `', p) from unnest($1::text[]) p`
	var payloads []string // taken, not sent yet
	for {
		if len(payloads) == 0 {
			select {
			case <-ctx.Done():
				return
			case <-s.feed.out:
			}
			payloads = s.feed.payloads()
		}

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

// payloads takes what is to be sent, in as few payloads as hold it.
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
		panic(err) // strings can always be encoded
	}

	return string(b)
}

// listen hears what other processes committed, until ctx ends.
func (s *Store) listen(ctx context.Context) {
	for ctx.Err() == nil {
		err := s.hear(ctx)
		s.cfg.Log.Debug().Err(err).Msg("counters: listening to PostgreSQL")
		outage.Sleep(ctx, retryEvery)
	}
}

// hear listens on a connection of its own until it fails.
func (s *Store) hear(ctx context.Context) error {
	dialling, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	c, err := pgx.ConnectConfig(dialling, s.db.ConnConfig())
	if err != nil {
		return err
	}
	defer func() {
		closing, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
		defer cancel()
		_ = c.Close(closing) // it is of no use any more
	}()
	if _, err := c.Exec(dialling, "listen "+channel); err != nil {
		return err
	}

	// What was committed before was not heard.
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
		case m.All:
			s.feed.recheck()
		default:
			s.feed.heard(m.Keys)
		}
	}
}
