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

// probes measure how long it takes from when a user sends a join until another client, which has subscribed to that
// page, holds a count that includes the user. Every probe has a page of its own, on which nothing else changes. With
// several gateways, its two clients are on different ones. It joins about once a second at most, so that the gateway's
// --update-interval delays no count. The measured time includes that of the simulator, which reads many connections.
type probes struct {
	gate    sync.RWMutex // held for reading while a probe joins and leaves, and for writing by checkpoints
	latency latencies
	missed  atomic.Int64 // joins that the other client did not see within the settling time
}

const (
	probeCount = 8
	probePause = 600 * time.Millisecond // the shortest pause; the longest is twice that
)

// A sighting is a count that the watcher of a probe received.
type sighting struct {
	count int64
	at    time.Time
}

// probe starts the probes. stop ends them.
func (c *crowd) probe(ctx context.Context) (stop func()) {
	probing, cancel := context.WithCancel(ctx)
	var group sync.WaitGroup

	for i := range probeCount {
		page := c.name + "-probe" + strconv.Itoa(i)
		seen := make(chan sighting, 64)
		// The watcher and the joiner are on different gateways, so that the count goes the whole way.
		watcher := c.start(&tab{
			user:    c.newUser(),
			watched: holdings([]string{page}),
			seen: func(_ *tab, n *client.Count, at time.Time) {
				select {
				case seen <- sighting{n.Count, at}:
				default: // full, because the probe is not looking
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
				// Otherwise the next join could be taken for seen because of an old count.
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

// probeOnce joins, waits until the watcher sees it, and leaves. It reports false when one of the clients is not
// connected.
func (c *crowd) probeOnce(ctx context.Context, page string, watcher, joiner *tab, seen <-chan sighting) bool {
	c.probes.gate.RLock()
	defer c.probes.gate.RUnlock()

	// The time to reconnect is not what a probe measures.
	if !watcher.look(nil) || !joiner.look(nil) {
		return false
	}

	// Older counts may still wait here.
	for len(seen) > 0 {
		<-seen
	}

	before := c.stats.upsets()
	began := time.Now()
	joiner.move(page)
	s, ok := c.await(ctx, seen, func(s sighting) bool { return s.count > 0 })

	undisturbed := ctx.Err() == nil && c.stats.upsets() == before
	if undisturbed && ok {
		c.probes.latency.add(s.at.Sub(began))
	} else if undisturbed {
		c.probes.missed.Add(1)
	}

	joiner.move("")
	return true
}

// await receives sightings until one is wanted or the settling time is over.
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
