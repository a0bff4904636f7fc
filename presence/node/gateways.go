package node

import (
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"headcount/presence"
	"headcount/presence/heartbeat"
)

// listGap is how long the node may hear nothing of the leases before it no longer
// knows that the gateways could reach it all the time: the store was away.
const listGap = 3 * time.Second

// renewal is how long, at most, a gateway still had a lease after it was last seen
// with one.
const renewal = time.Second

// waited is which gateways may have users of a partition. Its writers hold mu; the
// actors read known.
type waited struct {
	mu    sync.Mutex
	known atomic.Pointer[gateways] // nil: not known yet
}

// gateways is what was known of them at one time. Nobody changes it.
type gateways struct {
	at   time.Duration // when the live gateways were last told, on the node's clock
	live []*gateway
	gone []*gateway // died less than a timeout ago; so they are bounded by the deaths in that time
}

// gateway is one life of a gateway.
type gateway struct {
	heartbeat.Source
	since time.Duration // it could reach this node since, as far as is known
	until time.Duration // when it has died: its users may be there until
	named atomic.Bool   // the log names it as one that tells nothing
}

// Gateways says which gateways are live now. Until all of these gateways have
// reported their users, the node completes no partition that it knows only in part,
// and removes no user that an earlier owner left. A gateway that has told nothing
// for a presence timeout is no longer waited for. Gateways is called before the
// first Own, and again with every renewal of the lease: time in which nothing was
// heard of the leases does not count as a gateway's silence.
func (n *Node) Gateways(live []heartbeat.Source) {
	w := &n.gateways
	w.mu.Lock()
	defer w.mu.Unlock()
	next := &gateways{at: n.clock.now()}
	old := w.known.Load()
	for _, src := range live {
		g := &gateway{Source: src, since: next.at}
		if old != nil && next.at-old.at <= listGap {
			if i := slices.IndexFunc(old.live, func(o *gateway) bool { return o.Source == src }); i >= 0 {
				g = old.live[i]
			}
		}
		next.live = append(next.live, g)
	}
	if old != nil {
		for _, g := range old.gone {
			if next.at < g.until {
				next.gone = append(next.gone, g)
			}
		}
	}
	w.known.Store(next)
}

// Died says that a process, which was last seen at that time, ended without leaving
// the cluster, or stands still. Had the store lost nothing, the users of a gateway
// that died would stay until the presence timeout. So the node completes no partition
// that it knows only in part until then: the gateway may come back.
func (n *Node) Died(p presence.Process, seen time.Time) {
	now := n.clock.now()
	n.death.Store(max(int64(now), 1))
	if !slices.Contains(p.Roles, presence.RoleGateway) {
		return
	}
	w := &n.gateways
	w.mu.Lock()
	defer w.mu.Unlock()
	next := &gateways{}
	if old := w.known.Load(); old != nil {
		*next = *old
	}
	next.gone = append(slices.Clone(next.gone), &gateway{
		Source: heartbeat.Source{Gateway: p.Name, Incarnation: p.Incarnation},
		until:  now - time.Since(seen) + n.cfg.PresenceTimeout - renewal,
	})
	w.known.Store(next)
}

// named logs, once in its life, that a live gateway tells nothing.
func (n *Node) named(g *gateway) {
	if g.named.CompareAndSwap(false, true) {
		n.cfg.Log.Warn().Str("gateway", g.Gateway).
			Msg("a gateway has a lease but does not tell this node of its users; going on without them. Do UDP datagrams pass both ways?")
	}
}
