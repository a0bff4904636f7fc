package simulate

import (
	"context"
	"math/rand/v2"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"headcount/client"
)

// probes measure how long it takes from a user's sending join until another
// client, a subscriber of that page, holds a count with the user in it. Every
// probe has a page of its own, so that no other change is in the way, and, with
// several gateways, its two clients are on different ones. It joins at most about
// once a second, so that the gateway's update-interval never holds a count
// back. The time includes the simulator's own: it reads many connections.
type probes struct {
	gate    sync.RWMutex // read-held while somebody is on a probe's page
	latency latencies
	missed  atomic.Int64 // joins that nobody saw within the settling time
}

const (
	probeCount = 8
	probePause = 600 * time.Millisecond // at least, and at most twice that
)

// A sighting is a count that the watching client of a probe received.
type sighting struct {
	count int64
	at    time.Time
}

// probe starts the probes. The function that it returns ends them.
func (c *crowd) probe(ctx context.Context) (stop func()) {
	probing, cancel := context.WithCancel(ctx)
	var group sync.WaitGroup

	for i := range probeCount {
		page := c.name + "-probe" + strconv.Itoa(i)
		seen := make(chan sighting, 64)
		// Of several gateways it has another one than the client that joins, so that the count has the whole way to go.
		watcher := c.start(&tab{
			user:    c.newUser(),
			watched: holdings([]string{page}),
			seen: func(_ *tab, n *client.Count, at time.Time) {
				select {
				case seen <- sighting{n.Count, at}:
				default: // a probe that is not looking misses nothing
				}
			},
		}, i%len(c.cfg.URL))

		joiner := c.start(&tab{user: c.newUser()}, (i+1)%len(c.cfg.URL))

		rng := rand.New(rand.NewPCG(c.cfg.Seed, uint64(i)+1))

		group.Go(func() {
			for {
				pause := probePause + time.Duration(rng.Float64()*float64(probePause))
				if sleep(probing, pause) != nil {
					return
				}
				// Its leave must have been seen, or the next probe would take the old count for its own join.
				if c.probeOnce(probing, page, watcher, joiner, seen) {
					c.await(probing, seen, func(s sighting) bool { return s.count == 0 })
				}
			}
		})
	}

	return func() {
		cancel()
		group.Wait()
	}
}

// probeOnce joins, waits to be seen, and leaves again. It reports false when it
// could not join.
func (c *crowd) probeOnce(ctx context.Context, page string, watcher, joiner *tab, seen <-chan sighting) bool {
	c.probes.gate.RLock()
	defer c.probes.gate.RUnlock()

	// A client that is reconnecting would measure the reconnect.
	if !watcher.look(nil) || !joiner.look(nil) {
		return false
	}

	// Older counts may still wait here, and would be taken for an answer to this join.
	for len(seen) > 0 {
		<-seen
	}

	before := c.stats.upsets()
	began := time.Now()

	// The clock starts before the join is sent, as the user's own would.
	joiner.move(page)
	s, ok := c.await(ctx, seen, func(s sighting) bool { return s.count > 0 })
	undisturbed := ctx.Err() == nil && c.stats.upsets() == before // a reconnect is not what is measured
	if undisturbed && ok {
		c.probes.latency.add(s.at.Sub(began))
	} else if undisturbed {
		c.probes.missed.Add(1)
	}

	joiner.move("")
	return true
}

// await takes sightings until one is the wanted or the settling time is over.
func (c *crowd) await(ctx context.Context, seen <-chan sighting, wanted func(sighting) bool) (sighting, bool) {
	limit := time.NewTimer(c.settle)
	defer limit.Stop()

	for {
		select {
		case s := <-seen:
			if wanted(s) {
				return s, true
			}
		case <-limit.C:
			return sighting{}, false
		case <-ctx.Done():
			return sighting{}, false
		}
	}
}
