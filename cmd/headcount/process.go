package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"

	"headcount/dispatcher"
	"headcount/gateway"
	"headcount/presence"
	"headcount/presence/cluster"
	"headcount/presence/heartbeat"
	"headcount/presence/node"
	"headcount/presence/region"
	"headcount/presence/ring"
)

const (
	renewEvery = 900 * time.Millisecond
	leaseTTL   = 2700 * time.Millisecond
	renewLimit = 2 * time.Second // for one renewal
	// absentFor is how long a process must be missing, while the store answered
	// all the time, until it counts as gone: after an outage of the store it may
	// only not have renewed its lease yet.
	absentFor = 1500 * time.Millisecond
	// settling is how long a starting process only looks on. After an outage of
	// the store, or a loss, the others may not have renewed their leases yet: by
	// then they have, and it does not take for its own what is theirs.
	settling = 2*renewEvery - 100*time.Millisecond
	// nameWait is how long a starting process waits for its own former lease.
	nameWait = leaseTTL + 2*time.Second
	// generationEvery is the number of renewals between two looks at whether the
	// store lost the endpoints.
	generationEvery = 2
	// handOver is how long a leaving process works on, so that the others take
	// over what it owned before it is gone.
	handOver = 2*renewEvery + 500*time.Millisecond

	// A presence node proves its claims this long after the owners changed or its
	// lease was late, when nobody claims what was its own any more. At every
	// renewal it proves some, all of them in five minutes: a few commands a second.
	checkAfter  = 3 * time.Second
	checkRounds = int(5 * time.Minute / renewEvery)

	holdRetry = 100 * time.Millisecond // until a partition's next owner is known
)

// regionStore is the store that a region's processes share.
type regionStore interface {
	presence.Store
	presence.Processes
	// DropGateway takes a dead gateway out of all endpoints.
	DropGateway(ctx context.Context, gateway string) error
}

// datagrams carries beats and replies to other processes.
type datagrams interface {
	SendBeat(to string, b *heartbeat.Beat)
	SendReply(to string, r *heartbeat.Reply)
	SetTable(hash uint64)
	Run(ctx context.Context) error
}

// calls carries counts and holds to other processes.
type calls interface {
	PushCounts(ctx context.Context, addr string, counts []presence.Count) error
	Hold(ctx context.Context, addr string, u presence.User, page string, on bool) error
}

// process is one member of a region's cluster, with any of the roles. What is
// its own goes through memory, everything else through datagrams and calls.
type process struct {
	self       presence.Process
	partitions int
	buckets    int
	store      regionStore
	datagrams  datagrams
	calls      calls
	trusts     func(name string) bool // may this member be spoken to; nil: all may
	log        zerolog.Logger

	// By role; nil without it.
	gateway    *gateway.Gateway
	node       *node.Node
	dispatcher *dispatcher.Dispatcher
	regions    *region.Replicator // with the dispatcher

	table   atomic.Pointer[ring.Table]
	members atomic.Pointer[[]presence.Process] // who is there, sorted by name
	lives   atomic.Pointer[map[string]bool]    // of the gateways that are there; nil: not known yet
	up      atomic.Bool                        // the store answers
	read    atomic.Bool                        // complete counts have been read once
	leaving atomic.Bool
	turned  chan struct{} // holds one: up has changed
	hurry   chan struct{} // holds one: renew now, somebody has another table

	tableChanges, disagreements prometheus.Counter

	// membership's own
	seen               map[string]*sighting
	renewed            time.Time // last success
	missed             bool      // the last renewal failed
	since              time.Time // of an unbroken row of successes
	settled            bool      // it takes part
	nodes, dispatchers []string  // that the table is of
	check              time.Time // when the node is to prove all its claims; zero: in its turn
	round              int       // of proving some claims
	attach             time.Time // when the gateway is to attach its pages once more; zero: it need not
	generation         uint64
}

// sighting is a process as this one last saw it alive.
type sighting struct {
	presence.Process
	at time.Time
}

// newProcess returns a process that lacks its store, its connections to others
// and its roles; until run it takes only storeState.
func newProcess(self presence.Process, partitions, buckets int, log zerolog.Logger) *process {
	return &process{
		self: self, partitions: partitions, buckets: buckets, log: log,
		turned: make(chan struct{}, 1),
		hurry:  make(chan struct{}, 1),
		seen:   map[string]*sighting{},
		tableChanges: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "headcount_ring_changes_total", Help: "Times the owners of partitions or buckets changed.",
		}),
		disagreements: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "headcount_ring_disagreements_total", Help: "Datagrams from processes that saw other owners at that moment.",
		}),
	}
}

func (p *process) has(role string) bool { return slices.Contains(p.self.Roles, role) }

// sendBeat carries a beat to the owner of its partition, if there is one.
func (p *process) sendBeat(b *heartbeat.Beat) {
	t := p.table.Load()
	if t == nil {
		return
	}
	switch owner, ok := t.Node(b.Partition); {
	case !ok:
	case owner == p.self.Name:
		p.node.Deliver(b)
	default:
		p.datagrams.SendBeat(owner, b)
	}
}

func (p *process) receiveBeat(b *heartbeat.Beat) {
	if p.node != nil {
		p.node.Deliver(b)
	}
}

func (p *process) sendReply(to string, r *heartbeat.Reply) {
	if to == p.self.Name {
		p.receiveReply(r)
	} else {
		p.datagrams.SendReply(to, r)
	}
}

func (p *process) receiveReply(r *heartbeat.Reply) {
	if p.gateway != nil {
		p.gateway.Receive(r)
	}
}

// pushCounts sends counts to a gateway.
func (p *process) pushCounts(ctx context.Context, to string, counts []presence.Count) error {
	if to == p.self.Name && p.gateway != nil {
		p.gateway.Push(counts)
		return nil
	}
	return p.calls.PushCounts(ctx, to, counts)
}

func (p *process) receiveCounts(_ string, counts []presence.Count) {
	if p.gateway != nil {
		p.gateway.Push(counts)
	}
}

// hold has the owner of the user's partition take or end a hold. While the
// partition changes hands it asks again, as long as ctx lasts.
func (p *process) hold(ctx context.Context, u presence.User, page string, on bool) error {
	for {
		err := p.holdOnce(ctx, u, page, on)
		if !errors.Is(err, node.ErrNotOwner) && !errors.Is(err, cluster.ErrNotOwner) {
			return err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("hold: %w: %w", presence.ErrUnavailable, err)
		case <-time.After(holdRetry):
		}
	}
}

func (p *process) holdOnce(ctx context.Context, u presence.User, page string, on bool) error {
	t := p.table.Load()
	if t == nil {
		return node.ErrNotOwner
	}
	switch owner, ok := t.Node(u.Partition(p.partitions)); {
	case !ok:
		return node.ErrNotOwner
	case owner == p.self.Name:
		return p.node.Hold(ctx, u, page, on)
	default:
		return p.calls.Hold(ctx, owner, u, page, on)
	}
}

func (p *process) receiveHold(ctx context.Context, u presence.User, page string, on bool) error {
	if p.node == nil {
		return node.ErrNotOwner
	}
	return p.node.Hold(ctx, u, page, on)
}

// disagree is told that another process has another table. Usually one of the
// two has not heard yet of who came or went.
func (p *process) disagree(string, uint64) {
	p.disagreements.Inc()
	select {
	case p.hurry <- struct{}{}:
	default:
	}
}

// storeState is told when the store comes and goes, by any goroutine.
func (p *process) storeState(up bool) {
	p.up.Store(up)
	select {
	case p.turned <- struct{}{}:
	default:
	}
}

// followStore tells the gateway when the store comes and goes, until ctx ends.
func (p *process) followStore(ctx context.Context) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-p.turned:
		}
		if p.up.Load() {
			p.gateway.StoreBack()
		} else {
			p.gateway.StoreAway()
		}
	}
}

// ready says why the process cannot do its roles now, or nil.
func (p *process) ready() error {
	t := p.table.Load()
	switch {
	case p.leaving.Load():
		return errors.New("the process is shutting down")
	case !p.up.Load():
		return presence.ErrUnavailable
	case t == nil:
		return errors.New("the process has not joined its cluster yet")
	}
	if p.node != nil {
		for _, id := range t.PartitionsOf(p.self.Name) {
			if !p.node.Owns(id) {
				return errors.New("the presence node is taking over its partitions")
			}
		}
	}
	if p.gateway != nil {
		if _, ok := t.Node(0); !ok {
			return errors.New("no presence node is known")
		}
		if !p.read.Load() {
			return errors.New("the counts are not complete yet")
		}
	}
	return nil
}

// run owns the process's goroutines until ctx ends. An error says that the
// process cannot take part.
func (p *process) run(ctx context.Context) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var wg sync.WaitGroup
	start := func(run func(context.Context) error) {
		wg.Go(func() {
			if err := run(ctx); err != nil && ctx.Err() == nil {
				cancel(err)
			}
		})
	}
	start(p.datagrams.Run)
	start(p.membership)
	if p.node != nil {
		start(p.node.Run)
	}
	if p.dispatcher != nil {
		start(p.dispatcher.Run)
	}
	if p.regions != nil {
		start(p.regions.Run)
	}
	if p.gateway != nil {
		start(p.gateway.Run)
		start(p.followStore)
	}
	wg.Wait()
	if err := context.Cause(ctx); !errors.Is(err, context.Canceled) {
		return err
	}
	return nil
}

// membership keeps the lease and follows who else has one, until ctx ends.
func (p *process) membership(ctx context.Context) error {
	begun := time.Now()
	tick := time.NewTicker(renewEvery)
	defer tick.Stop()
	failed := 0 // in a row, not told of more than once
	for n := 0; ; n++ {
		err := p.renew(ctx)
		if err == nil {
			failed = 0
		}
		switch {
		case ctx.Err() != nil:
			return nil
		case errors.Is(err, presence.ErrFacts) && p.renewed.IsZero():
			return err // a running process stays: it is the starting ones that must fit
		case errors.Is(err, presence.ErrNameTaken) && (!p.renewed.IsZero() || time.Since(begun) > nameWait):
			return fmt.Errorf("%w; every process needs an --advertise of its own", err)
		case err != nil && failed == 0 && p.renewed.IsZero():
			p.log.Info().Err(err).Msg("waiting for the cluster")
			failed++
		case err != nil && failed == 0:
			p.log.Warn().Err(err).Msg("the lease could not be renewed; trying again")
			failed++
		case err != nil: // it has been said
		case n%generationEvery == 0 || !p.read.Load():
			p.watchStore(ctx)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		case <-p.hurry: // at most once in two ticks, however much disagreement there is
			select {
			case <-ctx.Done():
				return nil
			case <-tick.C:
			}
		}
	}
}

// renew renews the lease and takes over what follows from who is there.
func (p *process) renew(ctx context.Context) error {
	rctx, cancel := context.WithTimeout(ctx, renewLimit)
	defer cancel()
	self := p.self
	p.settled = p.settled || !p.since.IsZero() && time.Since(p.since) >= settling
	if p.leaving.Load() || !p.settled {
		self.Roles = nil // still, or already there, but nothing is ours
	}
	processes, err := p.store.Renew(rctx, self, leaseTTL)
	if err != nil {
		p.missed = true
		return err
	}
	now := time.Now()
	lapsed := now.Sub(p.renewed) > leaseTTL
	if again := !p.attach.IsZero() && now.After(p.attach); p.gateway != nil && (again || lapsed && !p.renewed.IsZero()) {
		// The others may have dropped our endpoints, or may just be doing it.
		p.gateway.StoreBack()
		p.attach = time.Time{}
		if lapsed {
			p.attach = now.Add(renewLimit)
		}
	}
	late := p.missed || now.Sub(p.renewed) > 2*renewEvery
	p.missed = false
	if late {
		p.since = now
	}
	p.sight(processes, now, late)
	p.showMembers()
	p.renewed = now
	if !p.settled {
		return nil
	}
	if p.node != nil {
		p.round++
		switch due := !p.check.IsZero() && now.After(p.check); {
		case late:
			p.node.Check(0, 1)
			p.check = now.Add(checkAfter)
		case due:
			p.node.Check(0, 1)
			p.check = time.Time{}
		default:
			p.node.Check(p.round%checkRounds, checkRounds)
		}
	}
	return p.adopt(ctx)
}

// sight notes who is there. After a gap nobody is missed at once.
func (p *process) sight(processes []presence.Process, now time.Time, gap bool) {
	if gap {
		for _, s := range p.seen {
			s.at = now
		}
	}
	for _, other := range processes {
		if p.trusts == nil || p.trusts(other.Name) {
			if p.seen[other.Name] == nil && other.Name != p.self.Name {
				p.log.Info().Str("process", other.Name).Strs("roles", other.Roles).Msg("a process is there")
			}
			p.seen[other.Name] = &sighting{other, now}
		}
	}
}

// adopt makes the table what the processes that are there make of it.
func (p *process) adopt(ctx context.Context) error {
	var nodes, dispatchers []string
	lives := map[string]bool{}
	for name, s := range p.seen {
		if time.Since(s.at) >= absentFor {
			delete(p.seen, name)
			p.gone(ctx, s.Process)
			continue
		}
		lives[gateway.LifeName(name, s.Incarnation)] = true
		if slices.Contains(s.Roles, rolePresence) {
			nodes = append(nodes, name)
		}
		if slices.Contains(s.Roles, roleDispatcher) {
			dispatchers = append(dispatchers, name)
		}
	}
	if old := p.lives.Swap(&lives); p.gateway != nil && (old == nil || !maps.Equal(*old, lives)) {
		p.gateway.OthersChanged()
	}
	slices.Sort(nodes)
	slices.Sort(dispatchers)
	if p.table.Load() != nil && slices.Equal(nodes, p.nodes) && slices.Equal(dispatchers, p.dispatchers) {
		return nil
	}
	t, err := ring.New(nodes, dispatchers, p.partitions, p.buckets)
	if err != nil {
		return err
	}
	p.nodes, p.dispatchers = nodes, dispatchers
	old := p.table.Load()
	if old != nil && old.Hash() == t.Hash() {
		return nil
	}
	p.table.Store(t)
	p.tableChanges.Inc()
	p.check = time.Now().Add(checkAfter)
	p.datagrams.SetTable(t.Hash())
	if p.node != nil && !p.leaving.Load() {
		p.node.Own(t.PartitionsOf(p.self.Name))
	}
	if p.dispatcher != nil && !p.leaving.Load() {
		p.dispatcher.Own(t.BucketsOf(p.self.Name))
		if p.regions != nil {
			p.regions.Own(t.BucketsOf(p.self.Name))
		}
	}
	if p.gateway != nil {
		p.gateway.OwnersChanged(p.moved(old, t))
	}
	p.log.Info().Int("nodes", len(nodes)).Int("dispatchers", len(dispatchers)).
		Int("partitions", len(t.PartitionsOf(p.self.Name))).Int("buckets", len(t.BucketsOf(p.self.Name))).
		Msg("the cluster changed")
	return nil
}

// moved is the partitions that have another owner in t than in old, which may be nil.
func (p *process) moved(old, t *ring.Table) (partitions []int) {
	for id := range p.partitions {
		was, had := "", false
		if old != nil {
			was, had = old.Node(id)
		}
		if now, has := t.Node(id); now != was || has != had {
			partitions = append(partitions, id)
		}
	}
	return partitions
}

// alive reports whether the life of a gateway still lasts, as far as is known.
func (p *process) alive(life string) bool {
	lives := p.lives.Load()
	return lives == nil || (*lives)[life]
}

// gone clears up after a process that died: the dispatcher of the first bucket
// takes its gateway out of the endpoints.
func (p *process) gone(ctx context.Context, dead presence.Process) {
	if len(dead.Roles) == 0 {
		p.log.Info().Str("process", dead.Name).Msg("a process has left")
	} else {
		p.log.Warn().Str("process", dead.Name).Msg("a process is gone")
	}
	t := p.table.Load()
	if t == nil || !slices.Contains(dead.Roles, roleGateway) {
		return
	}
	if d, ok := t.Dispatcher(0); !ok || d != p.self.Name {
		return
	}
	dctx, cancel := context.WithTimeout(ctx, renewLimit)
	defer cancel()
	if err := p.store.DropGateway(dctx, dead.Name); err != nil {
		p.log.Warn().Err(err).Str("process", dead.Name).Msg("its endpoints could not be dropped; they cost failing pushes")
	}
}

// watchStore has the gateway attach again when the store lost data, and finds
// out when counts can be read for the first time.
func (p *process) watchStore(ctx context.Context) {
	if p.gateway == nil {
		return
	}
	rctx, cancel := context.WithTimeout(ctx, renewLimit)
	defer cancel()
	generation, err := p.store.Generation(rctx)
	if err != nil {
		return // the store says so itself
	}
	if p.generation != 0 && generation != p.generation {
		p.gateway.StoreAway()
		p.gateway.StoreBack()
	}
	p.generation = generation
	if !p.read.Load() {
		counts, err := p.store.Counts(rctx, []string{presence.Site})
		if err == nil && !counts[0].Stale {
			p.read.Store(true)
		}
	}
}

// leave hands over what the process owns and ends its lease. run must go on
// until it returns.
func (p *process) leave(ctx context.Context) {
	p.leaving.Store(true)
	if t := p.table.Load(); t != nil && p.alone(t) {
		p.end(ctx)
		return
	}
	select {
	case p.hurry <- struct{}{}:
	default:
	}
	select {
	case <-ctx.Done():
	case <-time.After(handOver):
	}
	p.end(ctx)
}

// alone reports whether nobody could take over.
func (p *process) alone(t *ring.Table) bool {
	return len(t.PartitionsOf(p.self.Name)) == p.partitions && len(t.BucketsOf(p.self.Name)) == p.buckets ||
		p.node == nil && p.dispatcher == nil
}

func (p *process) end(ctx context.Context) {
	lctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), renewLimit)
	defer cancel()
	if err := p.store.Leave(lctx, p.self); err != nil {
		p.log.Warn().Err(err).Msg("the lease could not be ended; it runs out by itself")
	}
}
