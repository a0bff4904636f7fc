package member

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"headcount/internal/setting"
	"headcount/presence"
	"headcount/presence/heartbeat"
	"headcount/presence/ring"
)

const (
	renewEvery = 900 * time.Millisecond
	leaseTTL   = 2700 * time.Millisecond
	renewLimit = 2 * time.Second // for one renewal
	// absentFor is how long a process must be missing, while the store answered all the
	// time, before it counts as gone.
	absentFor = 1500 * time.Millisecond
	// settling is how long a starting process only watches, so that it does not take
	// what others own: after an outage of the store or a loss of data they need this
	// time to renew their leases.
	settling = 2*renewEvery - 100*time.Millisecond
	// factsPoll is how often a starting process looks for the cluster facts.
	factsPoll = 200 * time.Millisecond
	// factsSettling is how long a starting process has its lease before it takes part:
	// by then all processes that waited for the same facts have theirs.
	factsSettling = 2 * factsPoll
	// nameWait is how long a restarted process waits for its own former lease to end.
	nameWait = leaseTTL + 2*time.Second
	// generationEvery is how often a gateway's process checks whether the store lost
	// the endpoints.
	generationEvery = 2 * renewEvery

	// A presence node proves all its claims checkAfter after the owners changed or its
	// lease was late: by then new owners have made their claims. With every renewal it
	// also proves one of checkRounds parts, for a few commands a second.
	checkAfter  = 3 * time.Second
	checkRounds = int(5 * time.Minute / renewEvery)
)

// lease is the state of membership: this process's lease and those of the others. Only
// membership's goroutine uses it.
type lease struct {
	members            map[string]*sighting
	renewed            time.Time // last renewal that succeeded
	missed             bool      // the last renewal failed
	since              time.Time // since when the store has answered every call
	leased             time.Time // first renewal that succeeded
	waiting            bool      // the last answer was ErrNoFacts, or ErrNameTaken before the first lease
	restarted          bool      // the process waited for the lease of its former run to end
	newborn            bool      // the process waited for facts or that lease, and no call has failed since
	settled            bool      // the process takes part
	nodes, dispatchers []string  // the members of the table
	check              time.Time // when the node must prove all its claims; zero: not scheduled
	round              int       // of proving a part of the claims
	attach             time.Time // when the gateway must attach its topics again; zero: not scheduled
}

// sighting is a process as its lease last showed it.
type sighting struct {
	presence.Process
	at     time.Time
	joined bool // its lease has had roles, which a starting process adds when it takes part
}

// membership renews the lease and follows the leases of the other processes, until ctx
// ends.
func (m *Member) membership(ctx context.Context) error {
	begun := time.Now()
	tick := time.NewTicker(renewEvery)
	defer tick.Stop()
	soon := time.NewTimer(time.Hour) // while the process starts: before the next tick
	soon.Stop()
	defer soon.Stop()
	hurry := m.renewSoon // nil after one early renewal, until the next tick: disagreeing datagrams may be many
	failed := 0          // 1 once the first of a series of failures was logged
	for {
		err := m.renew(ctx)
		if err == nil {
			failed = 0
		}
		first := m.lease.renewed.IsZero()
		switch {
		case ctx.Err() != nil:
			return nil
		case errors.Is(err, presence.ErrNameTaken) && (!first || time.Since(begun) > nameWait):
			return fmt.Errorf("%w; every process needs an --advertise of its own", err)
		case m.lease.waiting:
			soon.Reset(factsPoll)
		case err == nil && !m.lease.settled:
			soon.Reset(time.Until(m.lease.settles()))
		case errors.Is(err, presence.ErrFacts) && first:
			return err // only a starting process must fit the facts; a running one stays
		case err != nil && failed == 0 && first:
			m.log.Info().Err(err).Msg("waiting for the cluster")
			failed++
		case err != nil && failed == 0:
			m.log.Warn().Err(err).Msg("the lease could not be renewed; trying again")
			failed++
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
			hurry = m.renewSoon
		case <-soon.C:
		case <-m.renewNow:
		case <-hurry:
			hurry = nil
		}
	}
}

// renew renews the lease, and updates the table from the processes that have one.
func (m *Member) renew(ctx context.Context) error {
	rctx, cancel := context.WithTimeout(ctx, renewLimit)
	defer cancel()
	self, l := m.self, &m.lease
	l.settled = l.settled || !l.leased.IsZero() && !time.Now().Before(l.settles())
	if m.leaving.Load() && !m.alone || !l.settled && !l.newborn {
		// A starting or leaving process has a lease but owns nothing. In a new cluster
		// (newborn) all processes announce their roles at once, so that their first tables
		// are the same. So does a process that is back before its former lease ended:
		// nobody else takes its partitions, so they change hands only once.
		self.Roles = nil
	}
	processes, err := m.parts.Store.Renew(rctx, self, leaseTTL)
	now := time.Now()
	taken := errors.Is(err, presence.ErrNameTaken) && l.leased.IsZero()
	if l.restarted = l.restarted || taken; taken || errors.Is(err, presence.ErrNoFacts) {
		if !l.waiting {
			l.waiting, l.newborn, l.since = true, true, now
			if taken {
				m.log.Info().Err(err).Msg("waiting for the cluster")
			}
		}
		return err
	}
	l.waiting = false
	if err != nil {
		l.missed, l.newborn = true, false
		return err
	}
	lapsed := now.Sub(l.renewed) > leaseTTL
	if again := !l.attach.IsZero() && now.After(l.attach); m.parts.Gateway != nil && (again || lapsed && !l.renewed.IsZero()) {
		// The dispatchers may have dropped this gateway's endpoints, or be about to.
		m.parts.Gateway.StoreBack()
		l.attach = time.Time{}
		if lapsed {
			l.attach = now.Add(renewLimit)
		}
	}
	late := l.missed || now.Sub(l.renewed) > 2*renewEvery
	l.missed = false
	if late && !(l.newborn && l.leased.IsZero()) { // a process that waited for the facts has watched since then
		l.since = now
	}
	if l.leased.IsZero() {
		l.leased = now
		if l.restarted {
			m.died(&sighting{Process: presence.Process{Name: self.Name}, at: now})
		}
	}
	m.sight(processes, now, late)
	m.publishMembers()
	l.renewed = now
	if !l.settled {
		return nil
	}
	m.proveClaims(now, late)
	return m.adopt(now)
}

// settles returns when this process, which has its lease, takes part.
func (l *lease) settles() time.Time {
	at := l.since.Add(settling)
	if company := l.leased.Add(factsSettling); company.After(at) {
		return company
	}
	return at
}

// proveClaims makes the node prove some of its claims, or all of them when the lease
// was late or l.check has come.
func (m *Member) proveClaims(now time.Time, late bool) {
	if m.parts.Node == nil {
		return
	}
	l := &m.lease
	l.round++
	switch due := !l.check.IsZero() && now.After(l.check); {
	case late:
		m.parts.Node.Check(0, 1)
		l.check = now.Add(checkAfter)
	case due:
		m.parts.Node.Check(0, 1)
		l.check = time.Time{}
	default:
		m.parts.Node.Check(l.round%checkRounds, checkRounds)
	}
}

// sight records which processes have leases. After a gap in the store's answers no
// process counts as missing at once.
func (m *Member) sight(processes []presence.Process, now time.Time, gap bool) {
	seen := m.lease.members
	if gap {
		for _, s := range seen {
			s.at = now
		}
	}
	for _, other := range processes {
		if !m.loopback || setting.IsLoopback(other.Name) {
			old := seen[other.Name]
			if old != nil && old.Incarnation != other.Incarnation && len(old.Roles) > 0 {
				m.died(old)
			}
			joined := old != nil && old.joined && old.Incarnation == other.Incarnation || len(other.Roles) > 0
			if joined && (old == nil || !old.joined) && other.Name != m.self.Name {
				m.log.Info().Str("member", other.Name).Strs("roles", other.Roles).Msg("a process has joined")
			}
			seen[other.Name] = &sighting{other, now, joined}
		}
	}
}

// view says which incarnations of processes had leases at a time.
type view struct {
	incarnations map[string]bool
	at           time.Time
}

// adopt derives the table from the processes that are live now. It makes no slow call,
// so that it judges all processes at the same moment.
func (m *Member) adopt(now time.Time) error {
	l := &m.lease
	var nodes, dispatchers []string
	incarnations := map[string]bool{}
	gateways := []heartbeat.Source{}
	for name, s := range l.members {
		if now.Sub(s.at) >= absentFor {
			delete(l.members, name)
			m.gone(s)
			continue
		}
		incarnations[presence.IncarnationName(name, s.Incarnation)] = true
		if slices.Contains(s.Roles, presence.RoleGateway) {
			gateways = append(gateways, heartbeat.Source{Gateway: name, Incarnation: s.Incarnation})
		}
		if slices.Contains(s.Roles, presence.RolePresence) {
			nodes = append(nodes, name)
		}
		if slices.Contains(s.Roles, presence.RoleDispatcher) {
			dispatchers = append(dispatchers, name)
		}
	}
	if m.parts.Node != nil {
		m.parts.Node.Gateways(gateways)
	}
	m.view.Store(&view{incarnations, now})
	slices.Sort(nodes)
	slices.Sort(dispatchers)
	old := m.table.Load()
	if old != nil && slices.Equal(nodes, l.nodes) && slices.Equal(dispatchers, l.dispatchers) {
		return nil
	}
	t, err := ring.New(nodes, dispatchers, m.partitions, m.buckets)
	if err != nil {
		return err
	}
	l.nodes, l.dispatchers = nodes, dispatchers
	if old != nil && old.Hash() == t.Hash() {
		return nil
	}
	l.check = now.Add(checkAfter)
	m.applyTable(old, t)
	if !m.alone {
		m.log.Info().Int("nodes", len(nodes)).Int("dispatchers", len(dispatchers)).
			Int("partitions", len(t.PartitionsOf(m.self.Name))).Int("buckets", len(t.BucketsOf(m.self.Name))).
			Msg("the cluster changed")
	}
	return nil
}

// gone handles that a process has left or died. The dispatchers drop its endpoints by
// themselves, see Ended.
func (m *Member) gone(dead *sighting) {
	switch {
	case len(dead.Roles) > 0:
		m.log.Warn().Str("member", dead.Name).Msg("a process is gone")
		m.died(dead)
	case dead.joined:
		m.log.Info().Str("member", dead.Name).Msg("a process has left")
	}
}

// died notifies the node that a process ended without leaving the cluster.
func (m *Member) died(dead *sighting) {
	if m.parts.Node != nil {
		m.parts.Node.Died(dead.Process, dead.at)
	}
}

// followGeneration makes the gateway attach its topics again when the store lost data,
// until ctx ends. It has its own goroutine, so that a slow store does not delay the
// lease.
func (m *Member) followGeneration(ctx context.Context) error {
	var known uint64 // 0: no generation was read yet
	look := func() {
		rctx, cancel := context.WithTimeout(ctx, renewLimit)
		defer cancel()
		generation, err := m.parts.Store.Generation(rctx)
		if err != nil {
			return // the store logs its errors itself
		}
		if known != 0 && generation != known {
			m.parts.Gateway.StoreAway()
			m.parts.Gateway.StoreBack()
		}
		known = generation
	}
	for ctx.Err() == nil {
		if m.up.Load() {
			look()
		}
		sleep(ctx, generationEvery)
	}
	return nil
}

// publishMembers stores the processes that have joined, for Members.
func (m *Member) publishMembers() {
	members := make([]presence.Process, 0, len(m.lease.members))
	for _, s := range m.lease.members {
		if s.joined {
			members = append(members, s.Process)
		}
	}
	slices.SortFunc(members, func(a, b presence.Process) int { return strings.Compare(a.Name, b.Name) })
	m.members.Store(&members)
}

// Members returns the live processes that have joined, sorted by name. A process without
// roles is leaving. This process is among them once it takes part. Callers must not
// change the slice.
func (m *Member) Members() []presence.Process {
	if members := m.members.Load(); members != nil {
		return *members
	}
	return nil
}

// Ended reports whether an incarnation of a gateway seems to be over: it has no lease,
// and the leases were read less than two renewals ago. A gateway that could not renew
// its lease in time may still run; it attaches its topics again, see renew.
func (m *Member) Ended(incarnation string) bool {
	v := m.view.Load()
	return v != nil && !v.incarnations[incarnation] && time.Since(v.at) < 2*renewEvery
}
