package rowsredis

import (
	"context"
	"strconv"
	"strings"
	"sync"

	"github.com/redis/go-redis/v9"

	"headcount/internal/redisconn"
	"headcount/internal/rows"
)

// Watch implements rows.Store. Neither function may block, or Redis ends the subscription.
func (s *Store) Watch(ctx context.Context, received func(int, uint64, []byte), missed func()) error {
	channels := make(map[string]int, rows.Partitions)
	for p := range rows.Partitions {
		channels[s.channel(p)] = p
	}

	listener := &watch{s: s, received: received, missed: missed}
	s.reads.Listen(ctx, redisconn.Subscription{Channels: channels, Listener: listener})

	return nil
}

// watch is one call of Watch. It implements redisconn.Listener.
type watch struct {
	s *Store

	mu       sync.Mutex // guards the fields below, and is held while the functions are called
	received func(partition int, number uint64, publication []byte)
	missed   func()
	// newest has the number of each partition's last publication since the subscription began; 0: there was none.
	newest       [rows.Partitions]uint64
	unsubscribed int // number of channels that are not subscribed yet
}

// Begin implements redisconn.Listener.
func (w *watch) Begin() {
	w.mu.Lock()
	defer w.mu.Unlock()

	w.newest = [rows.Partitions]uint64{}
	w.unsubscribed = rows.Partitions
}

// Subscribed implements redisconn.Listener.
func (w *watch) Subscribed(*redis.PubSub, int) {
	w.mu.Lock()
	defer w.mu.Unlock()

	// Only when the last channel is subscribed can publications no longer be missed.
	w.unsubscribed--
	if w.unsubscribed == 0 {
		w.missed()
	}
}

// Received implements redisconn.Listener. The payload has the form of rows_commit.lua.
func (w *watch) Received(partition int, payload string) {
	w.mu.Lock()
	defer w.mu.Unlock()

	first, rest, _ := strings.Cut(payload, " ")
	second, publication, ok := strings.Cut(rest, " ")
	number, err := strconv.ParseUint(first, 10, 64)
	before, malformed := strconv.ParseUint(second, 10, 64)
	if !ok || err != nil || malformed != nil {
		w.gap()
		w.missed() // the malformed publication may have concerned any row
		return
	}

	// Redis delivers publications at most once, and a failover may lose them with their commits.
	newest := w.newest[partition]
	// When a subscription begins, everything is read, so the first publication may follow any.
	isNext := newest == 0 || newest == before
	if !isNext {
		w.gap()
		w.missed()
	}
	w.newest[partition] = number
	w.received(partition, number, []byte(publication))
}

func (w *watch) gap() { w.s.reads.Metrics.Gaps.Inc() }

// Pong implements redisconn.Listener.
func (w *watch) Pong(string) {}
