// Package fanout carries the updates of topics to their subscribers. It knows topics,
// versions and clients that take bytes. It does not know users, pages, or what an update
// means: an Encoder turns an update into bytes, once for all clients that get the same.
//
// A Hub has the newest update of every topic that somebody here wants, and attaches these
// topics at the store. Each client is a Subscriber in one of the hub's shards. A shard
// delivers a topic's first change at once and later ones at most once per interval, and
// always the newest.
package fanout

import (
	"context"
	"errors"
	"time"

	"github.com/rs/zerolog"

	"headcount/presence"
)

// Encoder writes the updates of one kind of topic for clients.
type Encoder interface {
	// Encode appends an update in a form that the caller of Subscribe named. A subscriber
	// that was sent a text with the same shown does not get this one, unless shown is 0.
	// Nobody gets an empty text. Encode is called under a shard's lock, once per update and
	// form.
	Encode(b []byte, u presence.Update, form Form) (encoded []byte, shown uint64)
}

// Form is one of the ways in which an Encoder writes an update. The fan-out only
// compares forms. 0 is the form of a subscription that names none.
type Form uint8

// Source has the topics of a kind that the hub's store does not have. It passes updates
// to Hub.Update, and marks them as stale itself. The hub calls its methods under its lock,
// so they must not block and must not call the hub.
type Source interface {
	Want(t presence.Topic) // from now on the hub needs the topic's updates
	Unwant(t presence.Topic)
}

// Watcher takes the updates of a kind that no client subscribes to. Update is called
// without the fan-out's locks.
type Watcher interface {
	Update(u presence.Update)
}

// NumberEncoder writes the number of a subscriber for its client. It is called under a
// shard's lock.
type NumberEncoder interface {
	AppendNumber(b []byte, n int64) []byte
}

// Client takes the bytes of one Subscriber. Its methods do not wait for whoever is at the
// other end. A shard calls Ping, Expire and Close without its lock.
type Client interface {
	// Busy reports whether the client has yet to take the last write. It is called under a
	// shard's lock. When the client has taken the write, Subscriber.Free must be called.
	Busy() bool
	// Try writes whole messages, and does not keep p. The error is ErrBusy while the client
	// is busy, and net.ErrClosed when it has ended or is about to. After any other error the
	// shard closes the client.
	Try(p []byte) error
	Close() error
	// Ping asks a silent client for a sign of life. If it returns false, the ping could not
	// be sent, and the shard calls Ping again soon.
	Ping() (sent bool)
	// Expire says that the client's time is over.
	Expire()
}

// ErrBusy says that a client has not taken the last write.
var ErrBusy = errors.New("the client has not taken what was sent")

// Store is the part of a store that a hub uses: the endpoints of a gateway, and the newest
// updates of topics.
type Store interface {
	presence.Updates
	Attach(ctx context.Context, gateway string, topics []presence.Topic) ([]presence.Update, error)
	Detach(ctx context.Context, gateway string, topics []presence.Topic) error
	// Missing returns those of the topics that the gateway is not attached to.
	Missing(ctx context.Context, gateway string, topics []presence.Topic) ([]presence.Topic, error)
}

// Config tunes a Hub. All of it is required but Buckets.
type Config struct {
	Gateway  string // this gateway in the store's endpoints, "name/incarnation"
	Store    Store
	Buckets  int // B, at most presence.DefaultBuckets, which is the default
	Numbers  NumberEncoder
	Shards   int
	Interval time.Duration        // least time between two updates of one topic to one subscriber
	Budget   float64              // deliveries a second of all shards, before the intervals of the largest topics grow
	Ping     time.Duration        // silence before a client is pinged
	Pong     time.Duration        // silence after that before it is closed
	Elapsed  func() time.Duration // goes on while the machine sleeps, see machine.NewStandstill
	Log      zerolog.Logger
}
