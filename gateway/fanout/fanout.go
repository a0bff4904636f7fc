// Package fanout carries the updates of topics to those who want them. It knows
// topics, versions and clients that take bytes. It does not know users, pages, or
// what an update means: an Encoder turns an update into bytes, once for all who
// get the same ones.
//
// A Hub has the newest update of every topic that somebody here wants, and keeps
// the store told of these topics. Each client is a Subscriber in one of the hub's
// shards. A shard delivers: the first change of a topic at once, later ones at
// most once per interval, always the newest.
package fanout

import (
	"context"
	"errors"
	"time"

	"github.com/rs/zerolog"

	"headcount/presence"
)

// Encoder says how the updates of one kind of topic look to a client.
type Encoder interface {
	// Encode appends an update in a form that the caller of Subscribe named. A
	// subscriber that has a form with the same shown is not sent this one, unless
	// shown is 0. Nobody is sent an empty form. It is called under a shard's
	// lock, once per update and form.
	Encode(b []byte, u presence.Update, form Form) (encoded []byte, shown uint64)
	// Exact reports whether the version of an update alone says what a client sees
	// of it.
	Exact(u presence.Update) bool
}

// Form is one of the ways in which an Encoder writes an update. The fan-out only
// compares forms. 0 is the form of a subscription that names none.
type Form uint8

// Source has the topics of a kind that the hub's store does not have. It hands updates
// to Hub.Update, and says itself when they are stale. Its methods are called under
// the hub's lock, so they wait for nothing and do not call the hub.
type Source interface {
	Want(t presence.Topic)   // its updates are wanted from now on
	Unwant(t presence.Topic) // they are not wanted any more
}

// Watcher takes the updates of a kind that no client subscribes to. Update is
// called without the fan-out's locks.
type Watcher interface {
	Update(u presence.Update)
}

// NumberEncoder says how a subscriber's own number looks to its client. It is
// called under a shard's lock.
type NumberEncoder interface {
	AppendNumber(b []byte, n int64) []byte
}

// Sink takes bytes for one client, and never waits for it.
type Sink interface {
	// Busy reports whether the client has yet to take what was written last. It is
	// called under a shard's lock. When that ends, somebody calls Subscriber.Free.
	Busy() bool
	// Try writes whole messages; p is not kept. The error is ErrBusy while the
	// client is busy, and net.ErrClosed when it has ended or is about to. With any
	// other error the shard closes the sink.
	Try(p []byte) error
	Close() error
}

// Client is who a Subscriber stands for. A shard's sweep calls Ping, Expire and
// Close, without its lock.
type Client interface {
	Sink
	Ping() (sent bool) // it has been silent; when the ping could not be sent it is asked again soon
	Expire()           // its time is over
}

// ErrBusy says that a client has not taken the last write.
var ErrBusy = errors.New("the client has not taken what was sent")

// Store is what a hub needs of a store: the topics that a gateway has
// subscribers for, and their newest updates.
type Store interface {
	Attach(ctx context.Context, life string, topics []presence.Topic) ([]presence.Update, error)
	Detach(ctx context.Context, life string, topics []presence.Topic) error
	// Missing returns those of the topics that the store lacks for that life.
	Missing(ctx context.Context, life string, topics []presence.Topic) ([]presence.Topic, error)
	Updates(ctx context.Context, topics []presence.Topic) ([]presence.Update, error)
}

// Config tunes a Hub. All of it is required.
type Config struct {
	Life     string // of this gateway, "name/incarnation": an endpoint in the store ends with it
	Store    Store
	Numbers  NumberEncoder
	Shards   int
	Interval time.Duration // least time between two updates of one topic to one subscriber
	Budget   float64       // deliveries a second of all shards, before the intervals of the largest topics grow
	Ping     time.Duration // silence before a client is pinged
	Pong     time.Duration // silence after that before it is closed
	Log      zerolog.Logger
}
