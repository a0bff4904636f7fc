package node

import (
	"context"
	"errors"
	"time"

	"headcount/internal/marks"
	"headcount/internal/outage"
	"headcount/internal/wake"
	"headcount/presence"
)

var (
	fencedWrite = marks.Sometimes("a write of presence is refused by the fence")
	claimLost   = marks.Sometimes("a claim of presence is lost with the store's memory")
)

// writeBatch bounds the members and counts in one call to the store, so that one busy
// partition does not delay all others for long. The last outbox may exceed it.
const writeBatch = 16384

// write is the node's only writer. While a call to the store is in flight, changes
// gather in the outboxes: a slow store gets large batches, and a lone change does not
// wait. A partition whose change failed waits for a pause, but does not hold up others.
// In an outage each partition fails once and then waits, too, so the calls stay few.
func (n *Node) write(ctx context.Context) {
	seq := uint64(0)
	failed := 0
	var again []*partition // their changes must be repeated after the pause

	retry := time.NewTimer(time.Hour)
	retry.Stop()
	defer retry.Stop()

	for {
		var p *partition

		select {
		case <-ctx.Done():
			return
		case <-retry.C:
			for _, p := range again {
				// The channel has room: these count as queued, so their actors have not put them there.
				n.ready <- p
			}
			again = nil
			continue
		case p = <-n.ready:
		}

		batch, changes := n.collect(p, &seq)
		// Every outbox of the batch waits for a new claim.
		if len(changes) == 0 {
			continue
		}

		n.batches.Observe(float64(len(changes)))

		waiting := len(again)
		outcomes := n.store.Write(ctx, changes)
		again = append(again, n.outcomes(batch, changes, outcomes)...)

		// A pause that is running already is not extended by further failures.
		switch {
		case len(again) == 0:
			failed = 0
		case waiting == 0:
			failed++
			retry.Reset(outage.Pause(failed))
		}
	}
}

// collect takes the outboxes of p and of all other ready partitions, up to writeBatch. It
// numbers the changes, continuing from seq.
func (n *Node) collect(p *partition, seq *uint64) (batch []*partition, changes []presence.Change) {
	for size := 0; p != nil; {
		*seq++
		if c, ok := p.out.take(*seq); ok {
			batch = append(batch, p)
			changes = append(changes, c)
			size += len(c.Members) + len(c.Counts)
			if size >= writeBatch {
				break
			}
		}

		select {
		// Nothing is waited for: what is not ready now gathers while the call to the store is under way.
		case p = <-n.ready:
		default:
			p = nil
		}
	}

	return batch, changes
}

// outcomes reports the outcomes of changes to the actors, and returns the partitions whose
// changes must be repeated.
func (n *Node) outcomes(
	batch []*partition, changes []presence.Change, outcomes []presence.Outcome,
) (again []*partition) {
	for i, o := range outcomes {
		p := batch[i]
		c := changes[i]
		fenced := errors.Is(o.Err, presence.ErrFenced)
		ownerChanged := fenced && !p.out.superseded(c)
		claimInvalid := fenced || errors.Is(o.Err, presence.ErrLost)

		switch {
		case o.Err == nil:
			n.written.Add(1)
			n.counts.Add(int64(len(c.Counts)))
			// May wait for a full mailbox. No actor ever waits for the writer, so the wait ends.
			p.post(&stored{batch: p.out.written(), counts: o.Counts})
		case ownerChanged:
			fencedWrite.Reached()
			// The change is dropped: another node decides about these users now, and the manager ends this actor.
			n.fenced.Add(1)
			n.actors[c.Partition].CompareAndSwap(p, nil)
			wake.Signal(n.trouble)
		case claimInvalid:
			claimLost.Reached()
			n.failures.Add(1)
			// Restored before the manager and the actor hear of it, so that the next claim finds everything in the
			// outbox.
			p.out.restore(c, true)
			wake.Signal(n.trouble)
			p.post(&refused{})
		default:
			n.failures.Add(1)
			p.out.restore(c, false)
			again = append(again, p)
		}
	}

	return again
}
