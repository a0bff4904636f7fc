package node

import (
	"sync"

	"headcount/presence"
)

type memberKey struct {
	user presence.User
	page string
}

// outbox collects the changes that the store must get. A newer value of a key
// replaces the older one, so a slow or absent store delays changes but never costs
// more memory than one entry per member and page. The actor fills the outbox and
// the writer empties it; mu guards it.
type outbox struct {
	mu      sync.Mutex
	claim   presence.Claim // the next change is written under this claim
	members map[memberKey]presence.MemberChange
	counts  map[string]int64
	// arrivals has at most one entry per entry of members that there was since the last
	// write, and one per user for the user's site.
	arrivals map[memberKey]struct{}
	// reset and complete are those of the next change, see presence.Change.
	reset, complete bool
	check           bool   // the next change must prove the claim to the store
	batch           uint64 // generation of the changes that are collected now
	flying          bool   // generation gen-1 is being written
	queued          bool   // the writer knows that the outbox has something
	blocked         bool   // the claim is not valid: nothing is written until there is a new one
	// next is the newest claim in the mailbox. While blocked, an epoch of 0 says
	// that the manager is making a claim: earlier claims are fenced already.
	next presence.Claim
}

// needsClaim reports whether the manager must claim the partition again: the claim is of
// another generation, or a write has found it invalid, and the mailbox has no newer
// claim of this generation. Nothing is written until the actor has the new claim.
func (o *outbox) needsClaim(generation uint64) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.blocked = o.blocked || o.claim.Generation != generation
	if !o.blocked || o.next.Epoch != 0 && o.next.Generation == generation {
		return false
	}
	o.next = presence.Claim{}
	return true
}

// expect notes that the claim is about to be put into the mailbox.
func (o *outbox) expect(c presence.Claim) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.next = c
}

// take empties the outbox into a change and marks the change as under way. It
// returns false while the partition must be claimed again.
func (o *outbox) take(seq uint64) (presence.Change, bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.queued = false
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
	clear(o.members)
	clear(o.counts)
	clear(o.arrivals)
	o.reset, o.complete, o.check = false, false, false
	o.batch++
	o.flying = true
	return c, true
}

// written notes that the change under way is in the store, and returns its generation.
func (o *outbox) written() uint64 {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.flying = false
	return o.batch - 1
}

// superseded reports whether c's claim is a former claim of this node, so that
// this node's newer claim has fenced c.
func (o *outbox) superseded(c presence.Change) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.blocked || o.claim != c.Claim
}

// restore puts back a change that could not be written, except where the outbox has
// newer values. If the partition was claimed again meanwhile, the outbox has everything:
// who is in the change and not there has left since. Unless lost, the outbox counts as
// queued: the writer repeats the change.
func (o *outbox) restore(c presence.Change, lost bool) {
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
		o.reset, o.complete = o.reset || c.Reset, o.complete || c.Complete
		o.blocked = o.blocked || lost
	}
	for _, a := range c.Arrivals {
		o.arrivals[memberKey{a.User, a.Page}] = struct{}{}
	}
	o.queued, o.flying = !lost, false
}

// empty reports whether there is nothing to write. The caller holds mu.
func (o *outbox) empty() bool {
	return len(o.members) == 0 && len(o.counts) == 0 && !o.reset && !o.complete && !o.check
}
