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

// pingEvery is the time between two pings: a subscription that has not received one when the next is due is dead.
const pingEvery = 2 * time.Second

// Subscription is a subscription to channels that have numbers, such as those of buckets. It keeps no queue.
type Subscription struct {
	Channels map[string]int
	Ping     time.Duration // between two pings; default 2s
	Listener Listener
}

// Listener receives what is published to a subscription. On a newer Cluster that is several connections, each with a
// goroutine that calls.
type Listener interface {
	// Begin says that no channel is subscribed to, and that an attempt to subscribe to all begins.
	Begin()
	// Subscribed says that a channel is received from now on, on that connection.
	Subscribed(on *redis.PubSub, number int)
	// Heard receives what was published.
	Heard(number int, payload string)
	// Pong receives the text of a ping that was answered.
	Pong(text string)
}

// Listen keeps a subscription up until ctx ends. It replaces one that fails, or that receives not even its own pings.
func (s *Caller) Listen(ctx context.Context, sub Subscription) {
	sub.Ping = cmp.Or(sub.Ping, pingEvery)
	sub.Listener.Begin()
	for failed := 0; ctx.Err() == nil; {
		start := time.Now()
		err := s.listen(ctx, &sub)
		sub.Listener.Begin()

		if ctx.Err() != nil {
			return
		}
		if time.Since(start) > outage.MaxPause {
			failed = 0
		}

		failed++
		s.Metrics.ended.Inc()

		pause := outage.Pause(failed)
		s.conn.cfg.Log.Debug().Err(err).Stringer("retry_in", pause).Msg("subscription to redis ended")
		outage.Sleep(ctx, pause)
	}
}

// listen subscribes to all channels, and returns when one connection has ended: on a
// single server, with Sentinel and on a Cluster older than 7 there is one, on a newer
// Cluster one per master.
func (s *Caller) listen(ctx context.Context, sub *Subscription) error {
	c, err := s.Known(ctx)
	if err != nil {
		return err
	}

	if c.Publish == "PUBLISH" {
		names := make([]string, 0, len(sub.Channels))
		for name := range sub.Channels {
			names = append(names, name)
		}

		ps := c.Subscribe(ctx)
		return sub.hear(ctx, ps, names, len(names)+1, (*redis.PubSub).Subscribe, c.UniversalClient.Publish)
	}

	shards := map[*redis.Client][]string{}
	for name := range sub.Channels {
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
			// One command cannot name channels of several slots.
			errs <- sub.hear(ctx, m.SSubscribe(ctx), names, 1, (*redis.PubSub).SSubscribe, c.SPublish)
		})
	}

	err = <-errs
	c.Cluster.ReloadState(ctx)
	return err
}

var errSilent = errors.New("it hears nothing")

type (
	subscribeFunc = func(*redis.PubSub, context.Context, ...string) error
	publishFunc   = func(ctx context.Context, channel string, message any) *redis.IntCmd
)

// hear subscribes to the channels, up to perCommand at once, and runs the connection until it
// fails. go-redis would subscribe anew by itself, but not across slots, and would not say that it
// has: so at the first error it is closed.
//
// A ping is published the way all updates are, on a channel of this connection's own in the same slot. A former master
// that still runs would answer a PING, but does not receive what is published.
func (sub *Subscription) hear(
	ctx context.Context, ps *redis.PubSub, channels []string, perCommand int,
	subscribe subscribeFunc, publish publishFunc,
) error {
	own := channels[0] + "/" + crand.Text()
	var heard atomic.Bool

	heard.Store(true)
	ctx, cancel := context.WithCancelCause(ctx)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel(nil)
	wg.Go(func() {
		defer ps.Close() // ends Receive below
		cancel(sub.ping(ctx, &heard, func(ctx context.Context) error { return publish(ctx, own, "").Err() }))
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
			if !ok {
				continue
			}
			if m.Kind != "subscribe" && m.Kind != "ssubscribe" {
				return fmt.Errorf("%s from %s: its slot has moved", m.Kind, m.Channel)
			}
			sub.Listener.Subscribed(ps, n)
		case *redis.Pong:
			sub.Listener.Pong(m.Payload)
		case *redis.Message:
			if m.Channel == own {
				heard.Store(true)
			} else if n, ok := sub.Channels[m.Channel]; ok {
				sub.Listener.Heard(n, m.Payload)
			}
		}
	}
}

// ping publishes to the subscription itself until ctx ends, a ping fails, or one has not come back before the next.
func (sub *Subscription) ping(ctx context.Context, heard *atomic.Bool, publish func(context.Context) error) error {
	tick := time.NewTicker(sub.Ping)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}

		if !heard.Swap(false) {
			return errSilent
		}

		within, cancel := context.WithTimeout(ctx, sub.Ping)
		err := publish(within)
		cancel()
		if err != nil {
			return err
		}
	}
}
