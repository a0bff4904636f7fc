package node

import (
	"sync"
	"time"

	"headcount/internal/marks"
	"headcount/presence"
)

type memberKey struct {
	user presence.User
	page string
}

// outbox collects the changes for the store, in numbered batches. A newer value of a key
// replaces the older one, so a slow or unavailable store delays changes but costs at most
// one entry per member and page. The actor fills the outbox and the writer empties it; mu
// guards it.
type outbox struct {
	mu      sync.Mutex
	claim   presence.Claim // of the next change
	members map[memberKey]presence.MemberChange
	counts  map[string]int64
	// arrivals is bounded like members: one entry for each member that was added since
	// the last write, and one per user for the user's site.
	arrivals map[memberKey]struct{}
	// departures has one entry at most for each user who left since the last write. departing
	// are those of the change in flight: a question may come before the store has them.
	departures, departing map[presence.User]time.Time
	// reset and complete are those of the next change, see presence.Change.
	reset, complete bool
	check           bool   // the next change is written even if it is empty, to prove the claim
	batch           uint64 // number of the batch that is being collected
	state           writeState
	changing        bool // the change last taken is more than a check
	blocked         bool // the claim is invalid: nothing is written until the actor has a new claim
	// next is the newest claim in the mailbox. While blocked, an epoch of 0 means that
	// the manager is about to make a claim, which fences all earlier ones.
	next presence.Claim
}

// writeState says what the writer does with an outbox.
type writeState uint8

const (
	idle     writeState = iota
	queued              // the partition is in Node.ready, or the writer is about to put it there
	inFlight            // the batch before the current one is being written
)

// needsClaim reports whether the manager must claim the partition again: the claim is
// of another generation, or a write found it invalid, and the mailbox has no newer
// claim of this generation. Nothing is written until the actor has the new claim.
func (o *outbox) needsClaim(generation uint64) bool {
	o.mu.Lock()
	defer o.mu.Unlock()

	o.blocked = o.blocked || o.claim.Generation != generation

	claimed := o.next.Epoch != 0 && o.next.Generation == generation
	if !o.blocked || claimed {
		return false
	}

	// From here on every earlier claim in the mailbox is too old.
	o.next = presence.Claim{}
	return true
}

// expect records that the claim is about to be put into the mailbox.
func (o *outbox) expect(c presence.Claim) {
	o.mu.Lock()
	defer o.mu.Unlock()

	o.next = c
}

// take empties the outbox into a change, which is in flight from then on. It returns
// false while the claim is invalid.
func (o *outbox) take(seq uint64) (presence.Change, bool) {
	o.mu.Lock()
	defer o.mu.Unlock()

	// The writer is the only caller, and flush queues an outbox once, so there is one change in flight at most.
	marks.Must(o.state == queued, "one change of a partition is on its way to the store")
	o.state = idle
	if o.blocked {
		return presence.Change{}, false
	}

	c := presence.Change{
		Claim:    o.claim,
		Reset:    o.reset,
		Complete: o.complete,
		Sequence: seq,
		Members:  make([]presence.MemberChange, 0, len(o.members)),
		Counts:   make([]presence.PageUsers, 0, len(o.counts)),
	}

	for _, m := range o.members {
		c.Members = append(c.Members, m)
	}

	for page, users := range o.counts {
		c.Counts = append(c.Counts, presence.PageUsers{Page: page, Users: users})
	}

	for a := range o.arrivals {
		c.Arrivals = append(c.Arrivals, presence.Arrival{User: a.user, Page: a.page})
	}

	// Departures in flight stay readable for Node.Users until the store has them.
	if len(o.departures) > 0 {
		for u, at := range o.departures {
			c.Departures = append(c.Departures, presence.Departure{User: u, At: at})
		}
		o.departing = o.departures
		o.departures = map[presence.User]time.Time{}
	}

	o.changing = o.changedLocked()
	clear(o.members)
	clear(o.counts)
	clear(o.arrivals)
	o.reset = false
	o.complete = false
	o.check = false

	o.batch++
	o.state = inFlight

	return c, true
}

// written records that the change in flight is in the store, and returns its batch.
func (o *outbox) written() uint64 {
	o.mu.Lock()
	defer o.mu.Unlock()

	// A change that came meanwhile is not queued here. The actor queues it when the writer tells it that this batch is
	// in the store (partition.stored).
	o.state = idle
	o.departing = nil

	// take has begun the next batch already.
	return o.batch - 1
}

// superseded reports whether a newer claim of this node, rather than another node's,
// fenced c.
func (o *outbox) superseded(c presence.Change) bool {
	o.mu.Lock()
	defer o.mu.Unlock()

	return o.blocked || o.claim != c.Claim
}

// restore puts back a change that was not written, except where the outbox has newer
// values. If the partition was claimed again meanwhile, only arrivals and departures are put
// back: rewrite has put every member into the outbox, and a member missing there has left since.
// invalid says that the store refused the claim; otherwise the writer queues the outbox
// again.
func (o *outbox) restore(c presence.Change, invalid bool) {
	o.mu.Lock()
	defer o.mu.Unlock()

	if o.claim == c.Claim {
		for _, m := range c.Members {
			if _, newer := o.members[memberKey{m.User, m.Page}]; !newer {
				o.members[memberKey{m.User, m.Page}] = m
			}
		}

		for _, pu := range c.Counts {
			if _, newer := o.counts[pu.Page]; !newer {
				o.counts[pu.Page] = pu.Users
			}
		}

		o.reset = o.reset || c.Reset
		o.complete = o.complete || c.Complete
		o.blocked = o.blocked || invalid
	}

	// No rewrite would repeat arrivals and departures, so these are put back in any case.
	for _, a := range c.Arrivals {
		o.arrivals[memberKey{a.User, a.Page}] = struct{}{}
	}

	for _, d := range c.Departures {
		if _, newer := o.departures[d.User]; !newer {
			o.departures[d.User] = d.At
		}
	}

	o.departing = nil
	o.state = queued
	if invalid {
		o.state = idle // the actor queues it again when it has a new claim
	}
}

// departed returns when the user departed, if the store does not have it yet; otherwise zero.
func (o *outbox) departed(u presence.User) time.Time {
	o.mu.Lock()
	defer o.mu.Unlock()

	if at, newer := o.departures[u]; newer {
		return at
	}
	return o.departing[u]
}

// emptyLocked reports whether there is nothing to write.
func (o *outbox) emptyLocked() bool { return !o.changedLocked() && !o.check }

// changedLocked reports whether there are changes to write. A check is none.
func (o *outbox) changedLocked() bool {
	return len(o.members) > 0 || len(o.counts) > 0 || o.reset || o.complete
}

// settled reports whether the store has all changes. A check of the claim that is pending or in flight does not count.
func (o *outbox) settled() bool {
	o.mu.Lock()
	defer o.mu.Unlock()

	isOnItsWay := o.state == inFlight && o.changing

	return !o.blocked && !isOnItsWay && !o.changedLocked()
}
