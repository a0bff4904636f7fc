// Package fanout delivers the updates of topics to their subscribers. It knows topics, versions and clients that accept
// bytes. It knows nothing about users or pages, nor about the meaning of an update: an Encoder encodes each update once
// for all clients that get the same bytes.
//
// A Hub has the newest update of every topic that has subscribers in this process, and attaches these topics in the
// store. Each client is a Subscriber in one of the hub's shards. A shard delivers the first change of a topic at once
// and later ones at most once per interval, always the newest.
package fanout

import (
	"context"
	"errors"
	"time"

	"github.com/rs/zerolog"

	"headcount/presence"
)

// Encoder encodes the updates of one kind of topic for clients.
type Encoder interface {
	// Encode appends the encoding of an update in the form that the caller of Subscribe chose. If shown is not 0,
	// subscribers that were last sent an encoding with the same shown do not get this one. An empty encoding is sent to
	// no subscriber. Encode is called under a shard's lock, once per update and form.
	Encode(b []byte, u presence.Update, form Form) (encoded []byte, shown uint64)
}

// Form selects one of the encodings of an Encoder. This package only compares forms. 0 is the form of a subscription
// that does not choose one.
type Form uint8

// Source supplies the updates of a kind of topic that the hub's store does not have. It passes them to Hub.Update, and
// marks them as stale itself. The hub calls its methods while holding its lock, so they must neither block nor call the
// hub.
type Source interface {
	Want(t presence.Topic) // from now on the hub needs updates of the topic
	Unwant(t presence.Topic)
}

// Watcher receives the updates of a kind to which no client can subscribe. Update is called without any lock of this
// package.
type Watcher interface {
	Update(u presence.Update)
}

// NumberEncoder encodes the number of a subscriber for its client. It is called under a shard's lock.
type NumberEncoder interface {
	AppendNumber(b []byte, n int64) []byte
}

// Client accepts the bytes of one Subscriber. Its methods must not wait for the remote side. A shard calls Ping, Expire
// and Close without holding its lock.
type Client interface {
	// Busy reports whether the last write has not been completed yet. It is called under a shard's lock. Once the write
	// is complete, Subscriber.Free must be called.
	Busy() bool
	// Try writes whole messages, and does not keep p. The error is ErrBusy while the client is busy, and net.ErrClosed
	// when it has ended or is about to. After any other error the shard closes the client.
	Try(p []byte) error
	Close() error
	// Ping asks a silent client for a sign of life. If it returns false, the ping could not be sent, and the shard
	// calls Ping again soon.
	Ping() (sent bool)
	// Expire is called when the client's time is over.
	Expire()
}

// ErrBusy means that a client's last write is not complete yet.
var ErrBusy = errors.New("the client's last write is not complete")

// Store is the part of a store that a hub uses: the endpoints of a gateway, and the newest updates of topics.
type Store interface {
	presence.Updates
	Attach(ctx context.Context, gateway string, topics []presence.Topic) ([]presence.Update, error)
	Detach(ctx context.Context, gateway string, topics []presence.Topic) error
	// Missing returns the topics to which the gateway is not attached in the store.
	Missing(ctx context.Context, gateway string, topics []presence.Topic) ([]presence.Topic, error)
}

// Config tunes a Hub. All fields except Buckets are required.
type Config struct {
	Gateway  string // this gateway in the store's endpoints, "name/incarnation"
	Store    Store
	Buckets  int // B, at most presence.DefaultBuckets, which is the default
	Numbers  NumberEncoder
	Shards   int
	Interval time.Duration        // minimum time between two updates of one topic to one subscriber
	Budget   float64              // deliveries per second of all shards; above it the largest topics slow down
	Ping     time.Duration        // silence before a client is pinged
	Pong     time.Duration        // further silence after which it is closed
	Elapsed  func() time.Duration // a clock that does not stop while the machine sleeps, see machine.NewStandstill
	Log      zerolog.Logger
}
