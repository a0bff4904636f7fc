package member

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"headcount/internal/outage"
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
	// settling is how long a starting process only watches. After an outage or a loss of
	// data the owners need this time to renew their leases; a process that takes part
	// earlier would claim their partitions.
	settling = 2*renewEvery - 100*time.Millisecond
	// factsPoll is how often a starting process looks for the cluster facts.
	factsPoll = 200 * time.Millisecond
	// factsSettling is how long a starting process has its lease before it takes part. By
	// then all processes that waited for the same facts have their leases.
	factsSettling = 2 * factsPoll
	// nameWait is for how long the store must say that another run has this process's name before the process ends.
	// Its own former lease ends earlier: after a restart, and when the store came back with older data, which may have
	// that lease.
	nameWait = leaseTTL + 2*time.Second
	// clockTolerance is how far the clock of this machine may be from the store's without a line in the log.
	clockTolerance = 5 * time.Second
	// generationEvery is how often a gateway's process checks whether the store lost
	// the endpoints.
	generationEvery = 2 * renewEvery

	// A presence node checks all its claims checkAfter after the owners changed or its
	// lease was late; by then new owners have made their claims. With every renewal it
	// also checks one of checkRounds parts, which costs a few commands a second.
	checkAfter  = 3 * time.Second
	checkRounds = int(5 * time.Minute / renewEvery)
)

// lease is the state of membership: this process's lease and those of the others. Only
// membership's goroutine uses it.
type lease struct {
	members            map[string]*sighting
	renewed            time.Time // last renewal that succeeded
	taken, stillTaken  time.Time // the first and the last of the answers that another run has the name; zero: none
	missed             bool      // the last renewal failed
	since              time.Time // the store has answered every call since then
	leased             time.Time // first renewal that succeeded
	waiting            bool      // the last answer was ErrNoFacts, or ErrNameTaken before the first lease
	restarted          bool      // the process waited for the end of its former run's lease
	newborn            bool      // the process waited for facts or that end, and no call has failed since
	settled            bool      // the process takes part
	nodes, dispatchers []string  // the members of the table
	check              time.Time // when the node must check all its claims; zero: not scheduled
	round              int       // number of the renewal; selects the part of the claims to check
	attach             time.Time // when the gateway must attach its topics again; zero: not scheduled
	clockDiffers       bool      // the clock of this machine was not the store's at the last renewal
}

// sighting is a process as described by its lease when it was last read.
type sighting struct {
	presence.Process
	at     time.Time
	joined bool // the lease has had roles, which a starting process adds when it takes part
	greets bool // it has a dispatcher that greets gateways
	began  bool // this is the first sight of the run
}

// membership renews the lease and follows the leases of the other processes, until ctx or the lease ends.
func (m *Member) membership(ctx context.Context) error {
	tick := time.NewTicker(renewEvery)
	defer tick.Stop()

	soon := time.NewTimer(time.Hour) // renewals before the next tick, while the process starts
	soon.Stop()
	defer soon.Stop()

	hurry := m.renewSoon // nil after one early renewal, until the next tick: disagreeing datagrams may be many
	logged := false      // the first of a series of failures was logged

	for {
		err := m.renew(ctx)
		if err == nil {
			logged = false
		}

		first := m.lease.renewed.IsZero()
		lostName := m.lease.nameLost(err, time.Now())
		misfit := errors.Is(err, presence.ErrFacts) && first // a running process stays, whatever the facts

		switch {
		case ctx.Err() != nil:
			return nil
		case errors.Is(err, errEnded):
			return nil // nothing is left to follow
		case lostName:
			return fmt.Errorf("%w; every process needs an --advertise of its own", err)
		case m.lease.waiting:
			soon.Reset(factsPoll)
		case err == nil:
			if !m.lease.settled {
				soon.Reset(time.Until(m.lease.settles()))
			}
		case misfit:
			return err
		case logged: // and nothing new to say
		case first:
			m.log.Info().Err(err).Msg("waiting for the cluster")
			logged = true
		default:
			m.log.Warn().Err(err).Msg("the lease could not be renewed; retrying")
			logged = true
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

// errEnded is the error of a renewal after the end of the lease.
var errEnded = errors.New("the lease has ended")

// renew renews the lease, and updates the table from the processes that have one. After end it returns errEnded: a
// renewal would make the lease anew, and the process would seem to run for another leaseTTL.
func (m *Member) renew(ctx context.Context) error {
	m.renewing <- struct{}{}
	defer func() { <-m.renewing }()

	if m.ended {
		return errEnded
	}

	rctx, cancel := context.WithTimeout(ctx, renewLimit)
	defer cancel()

	l := &m.lease
	// Decide this before the lease is renewed, so that this renewal already has the roles. A process whose calls
	// failed has not watched the others meanwhile.
	began := time.Now()
	watches := !l.leased.IsZero() && !l.late(began)
	l.settled = l.settled || watches && !began.Before(l.settles())

	asked := time.Now()
	processes, storeTime, err := m.parts.Store.Renew(rctx, m.announced(), leaseTTL)
	now := time.Now()

	// Before the first lease, it is that of the former run.
	taken := errors.Is(err, presence.ErrNameTaken) && l.leased.IsZero()
	l.restarted = l.restarted || taken
	if taken || errors.Is(err, presence.ErrNoFacts) {
		m.await(err, now, taken)
		return err
	}

	l.waiting = false
	if err != nil {
		l.missed = true
		// The process has not watched the others all the time, so it has to settle as any other does.
		l.newborn = false
		return err
	}

	m.observeClock(storeTime, asked)
	// reattach needs the former value of renewed, which tells for how long the lease had lapsed.
	m.reattach(now)

	// After a gap it is unknown which processes were missing in the meantime, so restart the time of watching them.
	late := l.late(now)
	l.missed = false
	if late && !(l.newborn && l.leased.IsZero()) { // a newborn process has watched since it began to wait
		l.since = now
	}

	// The former run of this process ended without leaving: its lease had to end by itself.
	if l.leased.IsZero() {
		l.leased = now
		if l.restarted {
			m.died(&sighting{Process: presence.Process{Name: m.self.Name}, at: now})
		}
	}

	m.sight(processes, now, late)
	m.publishMembers()
	l.renewed = now

	// A process that has not settled owns nothing, and may not have seen all others.
	if l.settled {
		m.checkClaims(now, late)
		m.deriveTable(now)
	}

	if m.parts.Owners != nil {
		m.parts.Owners.SetProcesses(m.present())
	}

	return nil
}

// announced returns this process as its lease describes it to the others.
func (m *Member) announced() presence.Process {
	self := m.self
	leaving := m.leaving.Load() && !m.alone
	starting := !m.lease.settled && !m.lease.newborn
	if leaving || starting {
		// A starting or leaving process has a lease without roles, so it owns nothing. The
		// exception is newborn: in a new cluster all processes announce their roles at
		// once, so that their first tables are the same; and a process that restarted
		// before its former lease ended takes its partitions back before another process
		// claims them.
		self.Roles = nil
	}
	if slices.Contains(self.Roles, presence.RoleDispatcher) {
		self.Roles = append(slices.Clone(self.Roles), greets)
	}

	return self
}

// await records that the process has to wait until the cluster has facts, or until the lease of its former run ends.
func (m *Member) await(err error, now time.Time, taken bool) {
	l := &m.lease
	if l.waiting {
		return
	}

	l.waiting = true
	l.newborn = true
	l.since = now
	if taken {
		m.log.Info().Err(err).Msg("waiting for the cluster")
	}
}

// observeClock takes the store's time from a renewal, and logs once when the clock of this machine differs from it.
func (m *Member) observeClock(store, asked time.Time) {
	m.clock.Observe(store, asked)

	ahead := time.Duration(m.wall().UnixMilli()-m.clock.Now().UnixMilli()) * time.Millisecond
	differs := ahead.Abs() > clockTolerance
	if differs && !m.lease.clockDiffers {
		m.log.Warn().Stringer("ahead", ahead).
			Msg("the clocks of this process and of the store differ; presence uses the store's clock, tokens and " +
				"times of history use this one: let both keep time by NTP")
	}
	m.lease.clockDiffers = differs
}

// reattach makes the gateway attach its topics again after its lease had lapsed, at once and again after renewLimit:
// dispatchers that saw no lease may have dropped the gateway's endpoints, or be about to do so.
func (m *Member) reattach(now time.Time) {
	l := &m.lease
	lapsed := now.Sub(l.renewed) > leaseTTL
	due := lapsed && !l.renewed.IsZero() // not before the first lease: nothing is attached yet
	again := !l.attach.IsZero() && now.After(l.attach)

	if m.parts.Gateway == nil || !due && !again {
		return
	}

	m.parts.Gateway.StoreBack()

	l.attach = time.Time{}
	if lapsed {
		l.attach = now.Add(renewLimit)
	}
}

// late reports whether there is a gap between the last renewal and one at the given time.
func (l *lease) late(now time.Time) bool { return l.missed || now.Sub(l.renewed) > 2*renewEvery }

// nameLost takes the end of a renewal at now, and reports whether the name belongs to another process, since it stays
// taken: this process's own former lease would have expired.
func (l *lease) nameLost(err error, now time.Time) bool {
	if err == nil {
		l.taken, l.stillTaken = time.Time{}, time.Time{}
	}
	if !errors.Is(err, presence.ErrNameTaken) {
		return false
	}

	// When this process or the store stood still, the last renewal of the former run may have arrived only now.
	if now.Sub(l.stillTaken) > 2*renewEvery {
		l.taken = now
	}
	l.stillTaken = now

	return now.Sub(l.taken) > nameWait
}

// settles returns the time from which this process, which has its lease, takes part.
func (l *lease) settles() time.Time {
	at := l.since.Add(settling)
	if company := l.leased.Add(factsSettling); company.After(at) {
		return company
	}

	return at
}

// checkClaims makes the node check some of its claims, or all of them when the lease was
// late or the time l.check has come.
func (m *Member) checkClaims(now time.Time, late bool) {
	if m.parts.Node == nil {
		return
	}

	l := &m.lease
	l.round++
	due := !l.check.IsZero() && now.After(l.check)

	switch {
	// Other processes may have claimed partitions during the gap, or be about to. So check all claims now, and once
	// more when those processes have settled.
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

// sight records which processes have leases. After a gap in the store's answers the time
// for which a process has been missing begins again.
func (m *Member) sight(processes []presence.Process, now time.Time, gap bool) {
	seen := m.lease.members
	if gap {
		for _, s := range seen {
			s.at = now
		}
	}
	for _, other := range processes {
		// Nothing reaches a process on another machine while messages are not signed.
		if m.loopback && !setting.IsLoopback(other.Name) {
			continue
		}

		greeter := slices.Contains(other.Roles, greets)
		other.Roles = slices.DeleteFunc(slices.Clone(other.Roles), func(role string) bool { return role == greets })

		old := seen[other.Name]
		replaced := old != nil && old.Incarnation != other.Incarnation
		// Another run has the name, so the former one has ended. If it had left, its lease would have had no roles.
		if replaced && len(old.Roles) > 0 {
			m.died(old)
		}

		began := old == nil || replaced
		if began && m.parts.Datagrams != nil {
			m.parts.Datagrams.Began(other.Name)
		}

		hadRoles := old != nil && old.joined
		joined := len(other.Roles) > 0 || hadRoles && !replaced
		if joined && !hadRoles && other.Name != m.self.Name {
			m.log.Info().Str("member", other.Name).Strs("roles", other.Roles).Msg("a process has joined")
		}

		seen[other.Name] = &sighting{other, now, joined, greeter, began}
	}
}

// view is the set of incarnations of processes that had leases at a time.
type view struct {
	incarnations map[string]bool
	at           time.Time
}

// deriveTable derives the table from the processes that are live now. It makes no slow call, so
// that one moment applies to all processes.
func (m *Member) deriveTable(now time.Time) {
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
		// Before applyTable: an owner has to know for whose reports it waits.
		m.parts.Node.Gateways(gateways)
	}

	m.expectGreetings(now)
	m.view.Store(&view{incarnations, now})
	slices.Sort(nodes)
	slices.Sort(dispatchers)

	// The same members always make the same table.
	old := m.table.Load()
	if old != nil && slices.Equal(nodes, l.nodes) && slices.Equal(dispatchers, l.dispatchers) {
		return
	}

	t := ring.New(nodes, dispatchers, m.partitions, m.buckets)
	l.nodes = nodes
	l.dispatchers = dispatchers
	l.check = now.Add(checkAfter)
	m.applyTable(old, t)

	if !m.alone {
		m.log.Info().Int("nodes", len(nodes)).Int("dispatchers", len(dispatchers)).
			Int("partitions", len(t.PartitionsOf(m.self.Name))).Int("buckets", len(t.BucketsOf(m.self.Name))).
			Msg("the cluster changed")
	}
}

// expectGreetings notes which dispatchers greet this process.
func (m *Member) expectGreetings(now time.Time) {
	var names []string
	for name, s := range m.lease.members {
		if s.greets && name != m.self.Name {
			names = append(names, name)
		}
	}

	m.greetings.expect(names, func(name string) bool { return m.lease.members[name].began }, now)
}

// gone handles a process that has left or died. The dispatchers drop its endpoints
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
// until ctx ends. It runs in a goroutine of its own, so that a slow answer does not delay
// the lease.
func (m *Member) followGeneration(ctx context.Context) error {
	var known uint64 // 0: no generation was read yet
	look := func() {
		rctx, cancel := context.WithTimeout(ctx, renewLimit)
		defer cancel()

		generation, err := m.parts.Store.Generation(rctx)
		if err != nil {
			return // the store logs its errors itself
		}

		// A store of another generation has lost the endpoints, so the gateway attaches its topics again.
		if known != 0 && generation != known {
			m.parts.Gateway.StoreAway()
			m.parts.Gateway.StoreBack()
		}

		known = generation
	}

	for ctx.Err() == nil {
		// When an outage ends, followStore has the topics attached again in any case.
		if m.up.Load() {
			look()
		}

		outage.Sleep(ctx, generationEvery)
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

// present returns the processes that have a lease, sorted by name. Unlike Members, it has no process that is gone.
func (m *Member) present() []presence.Process {
	present := make([]presence.Process, 0, len(m.lease.members))
	// A process that is starting or leaving is among them: it has a lease without roles.
	for _, s := range m.lease.members {
		present = append(present, s.Process)
	}
	slices.SortFunc(present, func(a, b presence.Process) int { return strings.Compare(a.Name, b.Name) })

	return present
}

// Members returns the live processes that have joined, sorted by name, and this process
// among them once it takes part. A process without roles is leaving. Callers must not
// change the slice.
func (m *Member) Members() []presence.Process {
	if members := m.members.Load(); members != nil {
		return *members
	}

	return nil
}

// Ended reports whether an incarnation of a gateway seems to have ended: it has no lease,
// and the leases were read less than two renewals ago. A gateway that could not renew its
// lease in time may still run; in that case it attaches its topics again, see renew.
func (m *Member) Ended(incarnation string) bool {
	v := m.view.Load()
	// Leases that were read long ago prove nothing.
	return v != nil && !v.incarnations[incarnation] && time.Since(v.at) < 2*renewEvery
}
