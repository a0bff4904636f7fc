package node

import (
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"headcount/presence"
	"headcount/presence/heartbeat"
)

// leaseGap is how long the node may hear nothing of the leases before it no longer
// knows that the gateways could reach it all the time: the store was away.
const leaseGap = 3 * time.Second

// lastRenewal is how long, at most, a gateway still had a lease after it was last seen
// with one.
const lastRenewal = time.Second

// gatewayList is which gateways may have users of a partition. Its writers hold mu; the
// actors read known.
type gatewayList struct {
	mu    sync.Mutex
	known atomic.Pointer[gatewayView] // nil: not known yet
}

// gatewayView is what was known of them at one time. Nobody changes it.
type gatewayView struct {
	at   time.Duration // when the live gateways were last told, on the node's clock
	live []*gateway
	gone []*gateway // died less than a timeout ago; so they are bounded by the deaths in that time
}

// gateway is one life of a gateway.
type gateway struct {
	heartbeat.Source
	since  time.Duration // it could reach this node since, as far as is known
	until  time.Duration // when it has died: its users may be there until
	logged atomic.Bool   // the log names it as one that tells nothing
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
	next := &gatewayView{at: n.clock.now()}
	old := w.known.Load()
	for _, src := range live {
		g := &gateway{Source: src, since: next.at}
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

// logSilent logs, once in its life, that a live gateway tells nothing.
func (n *Node) logSilent(g *gateway) {
	if g.logged.CompareAndSwap(false, true) {
		n.cfg.Log.Warn().Str("gateway", g.Gateway).
			Msg("a gateway has a lease but does not tell this node of its users; going on without them. Do UDP datagrams pass both ways?")
	}
}
