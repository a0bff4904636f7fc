// Package conn has the connections of browsers: WebSockets, whose clients speak our protocol or Pusher's, and event
// streams. It parses and executes what a client sends, charges it to the client, and encodes what clients are sent.
//
//	clients.go   what all connections share: their number, their end
//	conn.go      one connection: how it begins, is read, pinged and closed
//	frames.go    the frames of a WebSocket; messages.go parses their texts
//	pages.go     what a message does; counters.go, where it is about counters
//	charge.go    what messages cost
//	dialect.go   in what ways clients speak; pusher.go and stream.go have one each
//	count.go     counts as clients are sent them
package conn

import (
	"context"
	"errors"
	"iter"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"

	"headcount/gateway/api"
	"headcount/gateway/bounds"
	"headcount/gateway/counterapi"
	"headcount/gateway/fanout"
	"headcount/gateway/notifier"
	"headcount/gateway/roster"
	"headcount/gateway/socket"
	"headcount/presence"
)

// Subprotocol is that of WebSockets with our own messages.
const Subprotocol = "headcount.v1"

// Config has what connections need of the other parts of a gateway. Every field is required.
type Config struct {
	Hub      *fanout.Hub
	Roster   *roster.Roster
	Unread   *notifier.Sums
	Live     *counterapi.Live
	Counters *counterapi.API
	Callers  *api.Callers
	Arrivals api.Arrivals

	Pollers   []*socket.Poller       // serve the connections whose clients have sent something
	NewTopics []*bounds.Rates        // of an address, and of all
	Limits    *prometheus.CounterVec // counts refusals, by the limit that was reached
	Group     *sync.WaitGroup        // connections, and the goroutines that they start

	PingInterval    time.Duration
	WriteTimeout    time.Duration
	ShutdownTimeout time.Duration // Drain gives clients at most half of it to move

	Log zerolog.Logger
}

// Clients are the connections of a gateway. Its methods may be called from any goroutine.
type Clients struct {
	cfg      Config
	crawlers crowd
	metrics  *metrics
	polled   atomic.Uint64 // counts the calls of Poller

	entry       sync.Mutex // orders Begin and Drain: no connection begins once draining is set
	connections atomic.Int64
	draining    atomic.Bool
}

// New returns Clients without a connection.
func New(cfg Config) *Clients { return &Clients{cfg: cfg, metrics: newMetrics()} }

// Connections returns the number of connections.
func (cs *Clients) Connections() int64 { return cs.connections.Load() }

// Poller returns the poller of the next connection: each in turn.
func (cs *Clients) Poller() *socket.Poller {
	return cs.cfg.Pollers[cs.polled.Add(1)%uint64(len(cs.cfg.Pollers))]
}

const closeReason = "this gateway is shutting down"

var errDraining = errors.New(closeReason)

// Open returns nil if connections may begin, or else the reason why not.
func (cs *Clients) Open() error {
	if cs.draining.Load() {
		return errDraining
	}

	return nil
}

// Begin counts a connection, and returns how many there are now, unless none may begin: Drain waits for those that have
// begun. Release ends what Begin began: the connection calls it at its end, and before that whoever refuses it.
func (cs *Clients) Begin() (connections int64, err error) {
	cs.entry.Lock()
	defer cs.entry.Unlock()

	if err := cs.Open(); err != nil {
		return 0, err
	}
	// With the lock: Drain waits for the group, which must not grow from 0 meanwhile.
	cs.cfg.Group.Add(1)

	return cs.connections.Add(1), nil
}

// Release ends what Begin began, and gives back the slot.
func (cs *Clients) Release(slot *bounds.Slot) {
	slot.Leave()
	cs.connections.Add(-1)
	cs.cfg.Group.Done()
}

// moveRate is how many clients a second a draining gateway asks to reconnect elsewhere, if
// the shutdown timeout permits.
const moveRate = 1000

// Drain closes all connections and returns when they have ended. First each client gets a
// message to reconnect after a random time. Then Drain closes the remaining connections
// with status 1012. When ctx ends, it closes the rest without a handshake. The users stay
// counted for the grace. The hub and the pollers must still be running.
//
// A client of Pusher connects again at once, and one that finds nobody listening waits for 15 s. So
// where this gateway is alone these clients stay until the end, and are then told to wait for a second.
func (cs *Clients) Drain(ctx context.Context, alone bool) {
	// From here on no connection begins. One that has begun, but is not in the hub yet, is sent away by enter.
	cs.entry.Lock()
	cs.draining.Store(true)
	cs.entry.Unlock()

	within := time.Duration(cs.connections.Load()) * time.Second / moveRate
	within = min(max(within, time.Second), cs.cfg.ShutdownTimeout*2/5) // and a tenth of it more below: under half

	// A random time for each, so that the other gateways do not get all clients at once.
	cs.each(func(c *conn) {
		if c.speech != pushers || !alone {
			c.dialect().move(c, rand.N(within))
		}
	})

	// First the clients have time to move, then to answer the close frame.
	done := make(chan struct{})
	go func() { // ends with the last connection; Close below ends them all
		cs.cfg.Group.Wait()
		close(done)
	}()

	select {
	case <-done:
	case <-ctx.Done():
	case <-time.After(within + within/10):
	}

	cs.each((*conn).sendAway)
	select {
	case <-done:
	case <-ctx.Done():
		// Close waits for no client, so the last connection ends soon.
		cs.each(func(c *conn) { _ = c.Close() })
		<-done
	}
}

// Connected returns the users who are on a page by one of these connections, with their qualified names. A user with
// several connections may come several times.
func (cs *Clients) Connected() iter.Seq2[presence.User, string] {
	return func(yield func(presence.User, string) bool) {
		for _, client := range cs.cfg.Hub.Clients() {
			c := client.(*conn)
			// Others only watch, or are crawlers.
			if cs.cfg.Roster.Has(c.user) && !yield(c.user, c.name) {
				return
			}
		}
	}
}

func (cs *Clients) each(do func(*conn)) {
	for _, client := range cs.cfg.Hub.Clients() {
		do(client.(*conn)) // every client of the hub is a *conn
	}
}
