package node

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"headcount/internal/wake"
	"headcount/presence"
)

const (
	// claimGroup is how many partitions are claimed and loaded together.
	claimGroup = 16
	// generationPoll is how often the node asks for the store's generation, which shows
	// a loss of data before any write does.
	generationPoll = 2 * time.Second
	// fencedPause keeps two nodes that both believe they own a partition from claiming it
	// from each other in a loop: after the pause both see the same members.
	fencedPause = time.Second
)

// manager owns the set of actors. Only Run's goroutine uses it.
type manager struct {
	n          *Node
	wg         *sync.WaitGroup
	want       []int
	owned      map[int]*ownership
	fenced     map[int]fence // partitions lost to another owner
	unverified map[int]bool  // partitions not seen complete in the store since their claim
	retryIn    time.Duration // when the wanted partitions that were left out can be claimed; 0: there are none
}

// fence records when a partition was last lost, and until when the node does not claim it.
type fence struct{ at, until time.Time }

// fence records that the partition was lost. After the first loss the pause is short:
// usually the other node claimed the partition late, before it knew of this node.
func (m *manager) fence(id int) {
	now := time.Now()

	pause := fencedPause / 5
	if now.Sub(m.fenced[id].at) < 5*fencedPause {
		pause = fencedPause
	}

	m.fenced[id] = fence{at: now, until: now.Add(pause)}
}

type ownership struct {
	p    *partition
	stop context.CancelFunc
}

// release stops the partition's actor.
func (m *manager) release(id int) {
	o := m.owned[id]
	// Callers must not find the actor any more when it ends. The writer may have removed it already, after a fenced
	// write.
	m.n.actors[id].CompareAndSwap(o.p, nil)
	o.stop()
	delete(m.owned, id)
}

// reconcile makes the actors match the wanted partitions: it stops fenced and unwanted
// actors, claims again where the store lost data, and starts missing actors.
func (m *manager) reconcile(ctx context.Context) error {
	n := m.n
	m.retryIn = 0

	// Ask in this order: resumed sets wasSuspended before Ended becomes false.
	isUnnoticed := n.standstill.Ended()
	suspended := n.wasSuspended.Load()
	if isUnnoticed && !suspended {
		return nil // resumed is about to be called, and wakes the manager
	}

	if suspended {
		// Another node may have owned the partitions meanwhile; actors that claimed again with
		// their old users would overwrite the newer node's changes.
		for id := range m.owned {
			m.release(id)
		}
		n.wasSuspended.Store(false) // last, see hasStoodStill
	}

	m.releaseUnwanted()

	// A node that owns nothing leaves the store alone.
	if len(m.want) == 0 {
		return nil
	}

	generation, err := n.store.Generation(ctx)
	if err != nil {
		return fmt.Errorf("node: store generation: %w", err)
	}

	// First reclaim what is already owned: its changes wait for the claim.
	err = m.reclaim(ctx, generation)

	if len(n.want) > 0 || n.handingOver.Load() {
		return err // the set is outdated: it must take nothing from other nodes
	}

	missing := m.startMissing(ctx) // a partition that cannot be claimed again holds up no other
	return cmp.Or(err, missing)
}

// releaseUnwanted stops the actors whose partitions are unwanted, or are fenced because another node has claimed them.
func (m *manager) releaseUnwanted() {
	wanted := make(map[int]bool, len(m.want))
	for _, id := range m.want {
		wanted[id] = true
	}

	taken := 0 // wanted partitions that another node has claimed
	for id, o := range m.owned {
		// Whoever finds another node's claim removes the actor from the table: the writer, or reclaimGroup.
		fenced := m.n.actors[id].Load() != o.p
		if fenced {
			m.fence(id)
		}

		if fenced && wanted[id] {
			taken++
		}

		// A fenced actor ends even if its partition is wanted. Its users are those of before the other owner, so
		// startMissing loads them anew once the fence has passed.
		if fenced || !wanted[id] {
			m.release(id)
		}
	}

	if taken > 0 {
		m.n.cfg.Log.Warn().Int("partitions", taken).
			Msg("another node has claimed partitions of this node; releasing them until the nodes agree on the owners")
	}
}

// inGroups calls do with groups of ids until do says not to go on, and returns the first
// error. A partition whose data cannot be loaded must not leave others without an owner,
// so after a failure each partition of the group is tried alone.
//
// inGroups gives up when the fault is the whole store's: when the store does not answer
// either, so that an outage costs two calls, or when no partition of a group succeeds
// alone. The error does not tell, because a store may return ErrUnavailable for all faults.
func (m *manager) inGroups(ctx context.Context, ids []int, do func(group []int) (goOn bool, err error)) (first error) {
	groups := slices.Collect(slices.Chunk(ids, claimGroup))
	for failures := 0; len(groups) > 0 && failures <= claimGroup; {
		group := groups[0]
		groups = groups[1:]

		goOn, err := do(group)
		if !goOn {
			return nil
		}

		if err == nil {
			failures = 0
			continue
		}

		failures++ // in a row
		first = cmp.Or(first, err)

		_, err = m.n.store.Generation(ctx)
		if err != nil {
			return first // the store itself is away
		}

		if len(group) > 1 {
			groups = slices.Concat(slices.Collect(slices.Chunk(group, 1)), groups)
		}
	}

	return first
}

// reclaim claims again the partitions whose claims are of another generation, after
// which their actors write everything.
func (m *manager) reclaim(ctx context.Context, generation uint64) error {
	var ids []int
	for id, o := range m.owned {
		if o.p.out.needsClaim(generation) {
			ids = append(ids, id)
		}
	}

	if len(ids) == 0 {
		return nil
	}

	m.n.cfg.Log.Info().Int("partitions", len(ids)).
		Msg("the store was restarted, replaced or emptied; writing all presence data again")

	return m.inGroups(ctx, ids, func(group []int) (bool, error) { return true, m.reclaimGroup(ctx, group) })
}

func (m *manager) reclaimGroup(ctx context.Context, ids []int) error {
	claims, err := m.n.store.Claim(ctx, m.n.cfg.Name, ids, true)
	if err != nil {
		return fmt.Errorf("node: claim %d partitions again: %w", len(ids), err)
	}

	claims = slices.DeleteFunc(claims, func(c presence.Claim) bool {
		if c.Epoch == 0 { // another node claimed the partition while this one was cut off
			m.n.actors[c.Partition].Store(nil)
			wake.Signal(m.n.trouble)
		}

		return c.Epoch == 0
	})
	// Usually the store is empty. A store restored from an old copy has pages that the
	// actors do not know and must set to 0.
	snaps, err := m.n.store.Load(ctx, claims)
	if err != nil {
		return fmt.Errorf("node: load %d partitions again: %w", len(ids), err)
	}

	for i, c := range claims {
		p := m.owned[c.Partition].p

		// The outbox knows the claim before the mail arrives: rewrite compares the two, and a claim that was
		// overtaken by a newer one writes nothing.
		m.unverified[c.Partition] = true
		p.out.expect(c)

		// Only this goroutine ends actors, so the actor still reads its mail, and a full mailbox gets room.
		select {
		case p.mail <- &reclaimed{c, snaps[i]}:
		case <-ctx.Done():
			return ctx.Err()
		}
	}

	return nil
}

// startMissing claims the wanted partitions that are not owned, and starts their
// actors, a group at a time, so that the first actors serve while another node still
// owns the last partitions. It returns after generationPoll if it has started any, so that
// Run can notice a loss of data or a newer set; Run then calls it again at once.
func (m *manager) startMissing(ctx context.Context) error {
	var ids []int
	for _, id := range m.want {
		if m.owned[id] != nil {
			continue
		}

		if left := time.Until(m.fenced[id].until); left > 0 {
			// After the longest of the pauses one further call can claim all of them.
			m.retryIn = max(m.retryIn, left)
		} else {
			ids = append(ids, id)
		}
	}

	start := time.Now()
	had := len(m.owned)
	return m.inGroups(ctx, ids, func(group []int) (goOn bool, err error) {
		if len(m.n.want) > 0 || m.n.handingOver.Load() {
			return false, nil
		}

		// Run must not miss a loss of data for long, so the rest waits for its next call.
		if len(m.owned) > had && time.Since(start) > generationPoll {
			m.n.cfg.Log.Info().Int("partitions", len(m.owned)).Int("of", len(m.want)).Int64("users", m.n.users.Load()).
				Msg("partitions are being taken over")
			m.retryIn = time.Millisecond
			return false, nil
		}

		return true, m.startGroup(ctx, group)
	})
}

func (m *manager) startGroup(ctx context.Context, ids []int) error {
	claims, err := m.n.store.Claim(ctx, m.n.cfg.Name, ids, false)
	if err != nil {
		return fmt.Errorf("node: claim %d partitions: %w", len(ids), err)
	}

	// Load after claiming: the snapshots have everything that the last owner wrote, and its later writes are refused.
	snaps, err := m.n.store.Load(ctx, claims)
	if err != nil {
		return fmt.Errorf("node: load %d partitions: %w", len(ids), err)
	}

	for i, c := range claims {
		// The actor's goroutine does not run yet, so restore may touch its state.
		p := newPartition(m.n, c)
		p.restore(snaps[i])

		actx, stop := context.WithCancel(ctx)
		m.owned[c.Partition] = &ownership{p, stop}
		m.unverified[c.Partition] = true

		// Mail may come from here on; it waits in the mailbox until run reads it.
		m.n.actors[c.Partition].Store(p)
		m.n.claimed.Add(1)
		m.wg.Go(func() { p.run(actx) })
	}

	return nil
}

// checkComplete asks the store which partitions are not complete, and has their actors
// complete them again. It looks through the whole store for a partition that was never
// seen complete since its claim, and through a part of the store for the others.
func (m *manager) checkComplete(ctx context.Context) error {
	ask := func(ids []int, everywhere bool) (missing map[int]bool, err error) {
		if len(ids) == 0 {
			return nil, nil
		}

		list, err := m.n.store.Incomplete(ctx, ids, everywhere)
		if err != nil {
			return nil, fmt.Errorf("node: look for partitions that are not complete: %w", err)
		}

		missing = make(map[int]bool, len(list))
		for _, id := range list {
			missing[id] = true

			select {
			case m.owned[id].p.mail <- &incomplete{}:
			default: // the mailbox is full: the next check finds the partition again
			}
		}

		return missing, nil
	}

	// Once a partition was seen complete, it stays so unless the store loses data, and a sample of the buckets in each
	// round finds that.
	var fresh, known []int
	for id := range m.owned {
		if m.unverified[id] {
			fresh = append(fresh, id)
		} else {
			known = append(known, id)
		}
	}

	missing, err := ask(fresh, true)
	if err != nil {
		return err
	}

	for id := range m.unverified {
		if m.owned[id] == nil || !missing[id] {
			delete(m.unverified, id)
		}
	}

	_, err = ask(known, false)
	return err
}
