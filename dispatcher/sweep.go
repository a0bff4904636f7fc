package dispatcher

import (
	"context"
	"slices"
	"time"

	"headcount/presence"
)

const (
	sweepEvery = time.Second
	// endedFor is how long a gateway must have ended before its endpoints are dropped.
	endedFor  = 2 * time.Second
	dropBatch = 500 // endpoints in one call of the store
	dropLimit = 2 * time.Second
)

// sweep drops the endpoints of ended gateways from the buckets, until ctx ends. It finds
// these endpoints in the dispatcher's own copy, so it costs the store nothing while there
// are none. If a dispatcher stops before it has dropped all of them, the next dispatcher of
// the bucket finds the rest.
func (d *Dispatcher) sweep(ctx context.Context, buckets []int) {
	since := map[string]time.Time{} // by gateway: when it was first found to have ended

	tick := time.NewTicker(sweepEvery)
	defer tick.Stop()

	for {
		select {
		case <-ctx.Done():
			return
		case now := <-tick.C:
			for _, gateway := range d.ended(since, now) {
				d.drop(ctx, buckets, gateway)
			}
		}
	}
}

// ended returns the gateways with endpoints that ended at least endedFor ago.
func (d *Dispatcher) ended(since map[string]time.Time, now time.Time) (gateways []string) {
	d.mu.Lock()
	defer d.mu.Unlock()

	// Without endpoints there is nothing to drop, and a gateway that attaches again begins anew.
	for gateway := range since {
		if d.queues[gateway] == nil {
			delete(since, gateway)
		}
	}

	for gateway := range d.queues {
		first, known := since[gateway]
		switch {
		// The gateway runs, perhaps again: should it end, the time begins anew.
		case !d.cfg.Gateways.Ended(gateway):
			delete(since, gateway)
		case !known:
			since[gateway] = now
		case now.Sub(first) >= endedFor:
			gateways = append(gateways, gateway)
		}
	}

	return gateways
}

// drop detaches the gateway from all topics of the buckets. A bucket that cannot be written
// holds up no other, and the next sweep tries again.
func (d *Dispatcher) drop(ctx context.Context, buckets []int, gateway string) {
	dropped := 0
	var failed error

	for _, b := range buckets {
		for batch := range slices.Chunk(d.attached(b, gateway), dropBatch) {
			// A gateway that only seemed to have ended may be back by now.
			if ctx.Err() != nil || !d.cfg.Gateways.Ended(gateway) {
				return
			}

			// A bucket whose server does not answer holds up the others no longer than this.
			dctx, cancel := context.WithTimeout(ctx, dropLimit)
			err := d.cfg.Store.Detach(dctx, gateway, batch)
			cancel()

			if err != nil {
				// The other buckets are tried all the same, since each may be on another server.
				failed = err
				break
			}

			dropped += len(batch)
		}
	}

	if failed != nil && ctx.Err() == nil {
		d.cfg.Log.Warn().Err(failed).Str("gateway", gateway).
			Msg("the endpoints of a gateway that is gone could not be dropped; retrying")
	}

	if dropped > 0 { // otherwise the endpoints were detached meanwhile
		d.cfg.Log.Info().Str("gateway", gateway).Int("endpoints", dropped).
			Msg("the endpoints of a gateway that is gone were dropped")
	}
}

// attached returns the topics of the bucket that the gateway is attached to.
func (d *Dispatcher) attached(bucket int, gateway string) (topics []presence.Topic) {
	d.mu.Lock()
	defer d.mu.Unlock()

	for topic, gateways := range d.endpoints[bucket] {
		if gateways.Has(gateway) {
			topics = append(topics, topic)
		}
	}

	return topics
}
