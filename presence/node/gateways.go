package node

import (
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"headcount/presence"
	"headcount/presence/heartbeat"
)

const (
	// leaseGap is the longest time between two reads of the leases after which the node
	// still assumes that the gateways could reach it all the time.
	leaseGap = 3 * time.Second
	// lastRenewal is about the shortest time between the death of a gateway and the last
	// sight of its lease, which outlives the gateway (see package member).
	lastRenewal = time.Second
)

// gatewayList lists the gateways that may have users of a partition. Writers of known
// hold mu; the actors only load it.
type gatewayList struct {
	mu    sync.Mutex
	known atomic.Pointer[gatewayView] // nil: not known yet
}

// gatewayView is one immutable state of a gatewayList. Times are the node's clock.
type gatewayView struct {
	at   time.Duration // when the leases were last read
	live []*gateway
	gone []*gateway // died less than a presence timeout ago, which bounds them
}

// gateway is one incarnation of a gateway.
type gateway struct {
	heartbeat.Source
	since  time.Duration // if live: since when it could reach this node
	until  time.Duration // if dead: when its users time out
	logged atomic.Bool   // its silence was logged
}

// Gateways sets the gateways that have a lease. Until all of them have reported their
// users, the node completes no partition of which the store lacked users, and removes
// no user that an earlier owner stored. It stops waiting for a gateway that has sent
// nothing for a presence timeout. The caller calls Gateways before the first Own and
// after every renewal of its lease. While it cannot read the leases, no gateway becomes
// silent, and after more than leaseGap every gateway's silence is counted anew.
func (n *Node) Gateways(live []heartbeat.Source) {
	w := &n.gateways
	w.mu.Lock()
	defer w.mu.Unlock()

	next := &gatewayView{at: n.clock.now()}
	old := w.known.Load()

	for _, src := range live {
		g := &gateway{Source: src, since: next.at}

		// A gateway keeps its record, and the time since when it could reach this node, unless the node itself was
		// cut off from the leases in between.
		if old != nil && next.at-old.at <= leaseGap {
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

// Died reports that a process, last seen at the given time, ended without leaving the
// cluster, or is suspended. The users of a dead gateway stay until the presence timeout,
// because the gateway may come back. A store that lost data lacks these users, so until
// then the node completes no partition of which the store lacked users.
func (n *Node) Died(p presence.Process, seen time.Time) {
	now := n.clock.now()
	// 0 means that nobody died, and the clock begins at 0.
	n.death.Store(max(int64(now), 1))

	if !slices.Contains(p.Roles, presence.RoleGateway) {
		return
	}

	w := &n.gateways
	w.mu.Lock()
	defer w.mu.Unlock()

	// Readers hold the old view, so the new one gets lists of its own.
	next := &gatewayView{}
	if old := w.known.Load(); old != nil {
		*next = *old
	}

	next.gone = append(slices.Clone(next.gone), &gateway{
		Source: heartbeat.Source{Gateway: p.Name, Incarnation: p.Incarnation},
		until:  now - time.Since(seen) + n.cfg.PresenceTimeout - lastRenewal,
	})

	w.known.Store(next)
}

// logSilent logs, once, that a live gateway sends nothing.
func (n *Node) logSilent(g *gateway) {
	if g.logged.CompareAndSwap(false, true) {
		n.cfg.Log.Warn().Str("gateway", g.Gateway).
			Msg("a gateway has a lease but has not reported its users to this node; continuing without them. " +
				"Do UDP datagrams pass both ways?")
	}
}
