package counterpg

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"headcount/internal/outage"
	"headcount/internal/wake"
)

const (
	channel = "headcount_counters"
	// Keys that wait to be sent; with more the others read all they follow.
	maxOutgoing = 1 << 16
	// PostgreSQL takes payloads under 8,000 bytes.
	maxPayload = 7700
	maxItem    = 4000 // of one key; beyond it the members are not named
	// notifyPause is the least time between two notifications. What comes meanwhile
	// goes with the next.
	notifyPause = 5 * time.Millisecond
	retryEvery  = 200 * time.Millisecond // while PostgreSQL is away
)

// message is the payload of a notification.
type message struct {
	From string `json:"f"`
	All  bool   `json:"a,omitempty"` // read again all that is followed
	Keys []item `json:"k,omitempty"`
}

// item is a key that changed. Of a set without members that moved all are looked at again.
type item struct {
	Key   string   `json:"k"`
	Moved []string `json:"m,omitempty"`
}

// committed takes what this process committed.
func (f *feed) committed(some changes) {
	f.mu.Lock()
	for key, moved := range some {
		f.heard(key, moved)
		if _, waits := f.outgoing[key]; !waits && len(f.outgoing) == maxOutgoing {
			f.flood = true
		} else {
			f.outgoing.add(key, moved)
		}
	}
	f.mu.Unlock()
	wake.Signal(f.out)
}

// notify sends what was committed here to the other processes until ctx ends.
func (s *Store) notify(ctx context.Context) {
	f := s.feed
	var payloads []string // taken, not sent yet
	for {
		if len(payloads) == 0 {
			select {
			case <-ctx.Done():
				return
			case <-f.out:
			}
			payloads = f.payloads()
		}
		err := s.exec(ctx, `select pg_notify('`+channel+`', p) from unnest($1::text[]) p`, payloads)
		pause := retryEvery
		if err == nil {
			payloads, pause = nil, notifyPause
		}
		if !outage.Sleep(ctx, pause) {
			return
		}
	}
}

// payloads takes what is to be sent, in as few payloads as hold it.
func (f *feed) payloads() []string {
	f.mu.Lock()
	outgoing, flood := f.outgoing, f.flood
	f.outgoing, f.flood = changes{}, false
	f.mu.Unlock()
	if flood {
		return []string{encode(message{From: f.self, All: true})}
	}
	var out []string
	m, size := message{From: f.self}, 0
	for key, moved := range outgoing {
		it := item{key, moved}
		n := len(encode(it))
		if n > maxItem {
			it.Moved = nil
			n = len(encode(it))
		}
		if size+n > maxPayload {
			out = append(out, encode(m))
			m.Keys, size = nil, 0
		}
		m.Keys = append(m.Keys, it)
		size += n + 1
	}
	if len(m.Keys) > 0 {
		out = append(out, encode(m))
	}
	return out
}

func encode(v any) string {
	b, err := json.Marshal(v)
	if err != nil { // strings and numbers always marshal
		panic(err)
	}
	return string(b)
}

// listen hears what other processes committed until ctx ends.
func (s *Store) listen(ctx context.Context) {
	for ctx.Err() == nil {
		if s.ready.Load() {
			err := s.hear(ctx)
			s.cfg.Log.Debug().Err(err).Msg("counters: listening to PostgreSQL")
		}
		outage.Sleep(ctx, retryEvery)
	}
}

// hear listens on one connection until it fails.
func (s *Store) hear(ctx context.Context) error {
	dialling, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	c, err := pgx.ConnectConfig(dialling, s.pool.Config().ConnConfig)
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
	cancel()
	// What was committed before the connection stood was not heard.
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
		if m.From == s.feed.self {
			continue
		}
		s.receive(&m)
	}
}

func (s *Store) receive(m *message) {
	if m.All {
		s.feed.recheck()
		return
	}
	s.feed.mu.Lock()
	defer s.feed.mu.Unlock()
	for _, it := range m.Keys {
		s.feed.heard(it.Key, it.Moved)
	}
}
