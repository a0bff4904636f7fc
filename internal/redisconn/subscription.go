package redisconn

import (
	"cmp"
	"context"
	crand "crypto/rand"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"

	"headcount/internal/outage"
)

// pingEvery is the time between two pings. If a ping has not come back when the next one is due, the subscription is
// dead.
const pingEvery = 2 * time.Second

// Subscription describes a subscription to numbered channels, such as those of buckets. It keeps no queue.
type Subscription struct {
	Channels map[string]int
	Ping     time.Duration // time between two pings; default 2s
	Listener Listener
}

// Listener receives the publications of a subscription. On a newer Cluster the subscription consists of several
// connections, and each has a goroutine that calls the Listener.
type Listener interface {
	// Begin is called before an attempt to subscribe to all channels. At that point no channel is subscribed to.
	Begin()
	// Subscribed is called when a channel is received from now on, over the given connection.
	Subscribed(on *redis.PubSub, number int)
	// Received is called with a publication.
	Received(number int, payload string)
	// Pong is called with the text of a ping that was answered.
	Pong(text string)
}

// Listen keeps a subscription alive until ctx ends. It replaces a subscription that fails, or that does not receive its
// own pings.
func (s *Runner) Listen(ctx context.Context, sub Subscription) {
	sub.Ping = cmp.Or(sub.Ping, pingEvery)
	sub.Listener.Begin()
	for failed := 0; ctx.Err() == nil; {
		start := time.Now()
		err := s.listen(ctx, &sub)
		// Before the pause, since publications are missed from now on.
		sub.Listener.Begin()

		if ctx.Err() != nil {
			return
		}
		// The subscription had worked, so this failure is the first of its series.
		if time.Since(start) > outage.MaxPause {
			failed = 0
		}

		failed++
		s.Metrics.ended.Inc()

		pause := outage.Pause(failed)
		s.conn.cfg.Log.Debug().Err(err).Stringer("retry_in", pause).
			Msg("the subscription to Redis ended; subscribing again")
		outage.Sleep(ctx, pause)
	}
}

// listen subscribes to all channels, and returns when any connection has ended. It uses one connection for each master
// on a Cluster of version 7 or newer, and otherwise a single one.
func (s *Runner) listen(ctx context.Context, sub *Subscription) error {
	c, err := s.Known(ctx)
	if err != nil {
		return err
	}

	// An ordinary publication reaches subscribers at any server, so one connection is enough.
	if c.Publish == "PUBLISH" {
		names := make([]string, 0, len(sub.Channels))
		for name := range sub.Channels {
			names = append(names, name)
		}

		ps := c.Subscribe(ctx)
		return sub.subscribe(ctx, ps, names, len(names)+1, (*redis.PubSub).Subscribe, c.UniversalClient.Publish)
	}

	shards := map[*redis.Client][]string{}
	for name := range sub.Channels {
		m, err := c.Cluster.MasterForKey(ctx, name)
		if err != nil {
			// The next attempt must not use the same old list of slots.
			c.Cluster.ReloadState(ctx)
			return err
		}
		shards[m] = append(shards[m], name)
	}

	// When one connection ends, end the others, too: the buckets may have moved.
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()

	// With room for all of them, because only the first is received.
	errs := make(chan error, len(shards))
	var wg sync.WaitGroup
	defer wg.Wait()

	for m, names := range shards {
		wg.Go(func() {
			defer cancel()
			// On a Cluster one command cannot name channels of several slots.
			errs <- sub.subscribe(ctx, m.SSubscribe(ctx), names, 1, (*redis.PubSub).SSubscribe, c.SPublish)
		})
	}

	err = <-errs
	c.Cluster.ReloadState(ctx)
	return err
}

var errSilent = errors.New("it receives nothing")

type (
	subscribeFunc = func(*redis.PubSub, context.Context, ...string) error
	publishFunc   = func(ctx context.Context, channel string, message any) *redis.IntCmd
)

// subscribe subscribes to the channels, up to perCommand at once, and serves the connection until it fails. It closes
// the connection at the first error: go-redis would resubscribe by itself, but not across slots, and without reporting
// it.
//
// A ping is published like any update, on a channel of this connection's own in the same slot. A former master that
// still runs would answer a PING, but does not receive what is published.
func (sub *Subscription) subscribe(
	ctx context.Context, ps *redis.PubSub, channels []string, perCommand int,
	subscribe subscribeFunc, publish publishFunc,
) error {
	own := channels[0] + "/" + crand.Text()
	var received atomic.Bool

	// No ping has been sent yet, so none is missing.
	received.Store(true)
	ctx, cancel := context.WithCancelCause(ctx)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel(nil)
	wg.Go(func() {
		defer ps.Close() // ends Receive below
		cancel(sub.ping(ctx, &received, func(ctx context.Context) error { return publish(ctx, own, "").Err() }))
	})

	for names := range slices.Chunk(append(channels, own), perCommand) {
		if err := subscribe(ps, ctx, names...); err != nil {
			return err
		}
	}

	for {
		msg, err := ps.Receive(ctx)
		if err != nil {
			return errors.Join(context.Cause(ctx), err)
		}

		switch m := msg.(type) {
		case *redis.Subscription:
			n, ok := sub.Channels[m.Channel]
			// The channel of the pings is no channel of the Listener.
			if !ok {
				continue
			}
			if m.Kind != "subscribe" && m.Kind != "ssubscribe" {
				// The server says so when the slot leaves it; the next attempt finds the new master.
				return fmt.Errorf("%s from %s: its slot has moved", m.Kind, m.Channel)
			}
			sub.Listener.Subscribed(ps, n)
		case *redis.Pong:
			sub.Listener.Pong(m.Payload)
		case *redis.Message:
			if m.Channel == own {
				received.Store(true)
			} else if n, ok := sub.Channels[m.Channel]; ok {
				sub.Listener.Received(n, m.Payload)
			}
		}
	}
}

// ping publishes to the subscription itself. It ends when ctx ends, a ping fails, or a ping has not come back before
// the next one is due.
func (sub *Subscription) ping(ctx context.Context, received *atomic.Bool, publish func(context.Context) error) error {
	tick := time.NewTicker(sub.Ping)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}

		// The last ping has not come back: this may be a former master that lives on.
		if !received.Swap(false) {
			return errSilent
		}

		// A ping that takes longer is late in any case.
		within, cancel := context.WithTimeout(ctx, sub.Ping)
		err := publish(within)
		cancel()
		if err != nil {
			return err
		}
	}
}
