package region_test

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/rs/zerolog"

	"headcount/counter"
	"headcount/counter/call"
	"headcount/counter/owner"
	"headcount/counter/region"
	"headcount/counter/simtest"
	"headcount/hyperloglog"
	"headcount/internal/rows"
)

// The simulation runs two or three regions, each with its own store, processes and gateways, and links between them.
// Gateways change some counters all the time. Meanwhile links are cut, slow, and lose calls and answers; processes are
// killed, and partitions move; a store loses its newest changes, or comes back empty or older; a region joins later.
// Then everything heals, and all regions must have the same totals: those of the acknowledged changes. The seed decides
// what happens.

func TestSimulation(t *testing.T) {
	simtest.Check(t, 24, 10, func(seed uint64, notes *simtest.Notes) { newSimulation(seed, plan{}, notes).run() })
}

// TestSimulationFindsPlantedFaults plants faults in how shares are merged, kept and sent. Each seed has to find each of
// them.
func TestSimulationFindsPlantedFaults(t *testing.T) {
	for name, planted := range map[string]plan{
		"a share added instead of replaced":  {adds: true},
		"a loss that an inbox does not tell": {hidesLosses: true, empties: true},
		"a reset not sent":                   {noReset: true},
	} {
		t.Run(name, func(t *testing.T) {
			n, found := simtest.Finds(t, 4, 2, func(seed uint64, notes *simtest.Notes) {
				newSimulation(seed, planted, notes).run()
			})
			if found < int64(n) {
				t.Errorf("%d of %d seeds found the planted fault, want all", found, n)
			}
		})
	}
}

// plan says which fault is planted.
type plan struct {
	adds, hidesLosses, noReset bool
	empties                    bool // one of the faults is an emptied store
}

// How much happens in one seed.
const (
	simProcesses = 2 // of each region
	simWorkers   = 2
	simFaults    = 9               // one after another; as number 9 count the losses that happen all the time
	simLoud      = 4 * time.Second // how long the counters change that are quiet later
	simHeal      = 3 * time.Second // for owners to heal what a store lost
	simSettle    = 5 * time.Second // for regions to receive everything
)

type simulation struct {
	*simtest.Notes
	seed    uint64
	planted plan
	rand    *simtest.Dice // of the present fault
	regions []*simRegion
	stray   sync.WaitGroup

	slow time.Duration // of links, each way

	mu    sync.Mutex // guards the fields below
	cuts  map[[2]string]bool
	lost  float64 // share of the calls and answers on links that get lost
	made  int
	sums  map[string]int64
	seen  map[string]*hyperloglog.Registers
	likes map[string]int64
	lossy bool // members were lost with a store: no other region knows them
}

// simRegion is one region.
type simRegion struct {
	name    string
	of      *simulation
	home    *journal
	inboxes map[string]*journal // of the others, in the same Redis
	busy    sync.WaitGroup      // changes under way
	end     context.CancelFunc  // of the watch

	mu        sync.Mutex // guards the fields below
	joined    bool
	paused    bool
	steady    time.Time // since when no partition has moved
	processes []*process
	route     [rows.Partitions]int
	versions  map[string]counter.Version // of each key, as watchers received it
	values    map[string]int64           // by key and version
}

type process struct {
	simtest.Host
	name   string
	of     *simRegion
	owner  *owner.Owner
	region *region.Region
}

var (
	simSum     = &counter.Rule{Match: "sum*", Kind: counter.Sum}
	simMembers = &counter.Rule{Match: "members*", Kind: counter.Members}
	simUnique  = &counter.Rule{Match: "unique*", Kind: counter.Unique}

	// Counters that are not reset must be what was acknowledged.
	simKeys = []simKey{
		{key: "sum1", rule: simSum},
		{key: "sum2", rule: simSum, quiet: true},
		{key: "members1", rule: simMembers},
		{key: "unique1", rule: simUnique},
		{key: "sum reset", rule: simSum, resets: true},
		{key: "members reset", rule: simMembers, resets: true},
		{key: "unique reset", rule: simUnique, resets: true},
	}
)

type simKey struct {
	key    string
	rule   *counter.Rule
	resets bool // is also reset and deleted
	quiet  bool // changes only in the beginning
}

func newSimulation(seed uint64, planted plan, notes *simtest.Notes) *simulation {
	s := &simulation{
		Notes:   notes,
		seed:    seed,
		planted: planted,
		rand:    simtest.NewDice(seed, "faults"),
		cuts:    map[[2]string]bool{},
		sums:    map[string]int64{},
		seen:    map[string]*hyperloglog.Registers{"unique1": {}},
		likes:   map[string]int64{},
	}

	lost := 0.1 * float64(s.rand.Below(3))
	if s.Makes(simFaults) {
		s.Logf("of what goes over links %v get lost", lost)
		s.lost = lost
	}
	s.slow = time.Millisecond << s.rand.Below(9)

	names := []string{"us", "eu", "ap"}[:2+s.rand.Below(2)]
	for _, name := range names {
		r := &simRegion{
			name: name, of: s, home: newJournal(), inboxes: map[string]*journal{},
			versions: map[string]counter.Version{}, values: map[string]int64{},
		}

		for _, other := range names {
			if other != name {
				r.inboxes[other] = newJournal()
				r.inboxes[other].adds = planted.adds
				r.inboxes[other].hidesLosses = planted.hidesLosses
			}
		}

		s.regions = append(s.regions, r)
	}

	return s
}

func (s *simulation) run() {
	late := s.rand.Below(2)
	for i, r := range s.regions {
		if i < len(s.regions)-late || s.planted.empties {
			s.join(r)
		}
	}

	stop := make(chan struct{})
	var workers sync.WaitGroup
	for _, r := range s.regions {
		for w := range simWorkers {
			workers.Go(func() { r.work(w, stop) })
		}
	}

	for i := range simFaults {
		s.rand = simtest.NewDice(s.seed, fmt.Sprint("fault ", i))
		time.Sleep(s.rand.UpTo(3 * time.Second))
		if s.Makes(i) {
			s.fault()
		}
	}

	s.rand = simtest.NewDice(s.seed, "end")
	if s.planted.empties {
		s.loseAll(s.joined(), true)
	}

	s.healAll()
	time.Sleep(s.rand.UpTo(time.Second))
	close(stop)
	workers.Wait()
	time.Sleep(simSettle)
	s.check()
	s.epilogue()

	for _, r := range s.regions {
		for _, p := range r.processes {
			p.kill()
		}

		r.end()
	}

	s.stray.Wait() // a commit under way may still arrive
}

// joined returns one of the regions that have joined.
func (s *simulation) joined() *simRegion {
	for {
		r := s.regions[s.rand.Below(len(s.regions))]
		if r.joined {
			return r
		}
	}
}

// join starts a region.
func (s *simulation) join(r *simRegion) {
	s.Fault("%s joins", r.name)
	ctx, end := context.WithCancel(context.Background())
	r.end = end
	go r.home.watches.Watch(ctx, r.heard, func() {})

	var all []*process
	for range simProcesses {
		all = append(all, r.newProcess())
	}
	r.mu.Lock()
	r.joined = true
	r.processes = all
	r.mu.Unlock()

	for _, id := range partitions() {
		r.move(id, s.rand.Below(simProcesses))
	}
}

// partitions returns the partitions of the keys, and the one that has the name of the region.
func partitions() []int {
	all := []int{0}
	for _, k := range simKeys {
		all = append(all, rows.PartitionOf(k.key))
	}
	slices.Sort(all)

	return slices.Compact(all)
}

// newProcess starts a process of a region.
func (r *simRegion) newProcess() *process {
	s := r.of
	s.mu.Lock()
	s.made++
	p := &process{name: fmt.Sprint(r.name, " ", s.made), of: r}
	s.mu.Unlock()

	store := p.near(r.home, "home")
	cfg := region.Config{Name: r.name, Process: p.name, Store: store, Log: zerolog.Nop()}
	for _, other := range s.regions {
		if other == r {
			continue
		}
		cfg.Peers = append(cfg.Peers, region.Peer{
			Name:   other.name,
			Rows:   p.far(other, other.home, "home"),
			Outbox: p.far(other, other.inboxes[r.name], "out"),
			Inbox:  p.near(r.inboxes[other.name], other.name),
		})
	}

	p.region = region.New(cfg)
	p.owner = owner.New(store, owner.Config{
		Name: p.name, WriteTimeout: time.Second, Region: r.name, Shared: p.region.Shared,
	})
	p.region.Start(p.owner)
	s.stray.Go(p.pull)

	return p
}

// pull claims what the process should own and does not own, like package owners whenever the lease is renewed. A
// process that stood still finds out late that another one has taken a partition, and by then that one may be dead.
func (p *process) pull() {
	for p.Alive() {
		for _, id := range partitions() {
			if p.of.OwnerOf(id) == call.Owner(p) && !p.owner.Owns(id) {
				_ = p.owner.Own(context.Background(), id)
			}
		}
		time.Sleep(time.Second)
	}
}

// near is the way of a process to a store of its own region.
func (p *process) near(to *journal, name string) *way {
	dice := simtest.NewDice(p.of.of.seed, p.name+" "+name)

	return &way{
		to: to, dice: dice, most: 2 * time.Millisecond,
		passes: p.Alive,
		lost:   func() float64 { return 0 },
		note:   p.notes(name),
	}
}

// notes returns the function that notes the claims and commits of a process in a store.
func (p *process) notes(store string) func(string, ...any) {
	return func(format string, args ...any) {
		p.of.of.Logf("%s, store %s: %s", p.name, store, fmt.Sprintf(format, args...))
	}
}

// far is the way to a store of another region.
func (p *process) far(other *simRegion, to *journal, name string) *way {
	s := p.of.of
	dice := simtest.NewDice(s.seed, p.name+" to "+other.name+" "+name)
	passes := func() bool {
		alive := p.Alive()
		s.mu.Lock()
		defer s.mu.Unlock()
		return alive && !s.cuts[[2]string{p.of.name, other.name}]
	}

	late := func(arrive func()) {
		after := dice.UpTo(6 * time.Second)
		s.stray.Go(func() {
			time.Sleep(after)
			arrive()
		})
	}

	noReset := s.planted.noReset && name == "out"

	return &way{
		to: to, dice: dice, most: s.slow, passes: passes, lost: s.lossOf, late: late, noReset: noReset,
		note: p.notes(other.name + " " + name),
	}
}

func (p *process) kill() {
	p.Die()
	p.region.Close()
	p.owner.Close()
}

// move makes a process claim a partition, and gateways route to it.
func (r *simRegion) move(id, to int) {
	r.mu.Lock()
	p := r.processes[to]
	r.route[id] = to
	r.steady = time.Now()
	r.mu.Unlock()

	r.of.stray.Go(func() {
		for !p.IsDead() && p.owner.Own(context.Background(), id) != nil {
			time.Sleep(50 * time.Millisecond)
		}
	})
}

// OwnerOf implements call.Owners.
func (r *simRegion) OwnerOf(id int) call.Owner {
	r.mu.Lock()
	defer r.mu.Unlock()

	if !r.joined {
		return nil
	}

	return r.processes[r.route[id]]
}

// Do implements call.Owner.
func (p *process) Do(ctx context.Context, one owner.Call) (owner.Answer, error) {
	time.Sleep(time.Millisecond)
	if p.IsDead() {
		<-ctx.Done()
		return owner.Answer{}, counter.ErrUnavailable
	}

	answer, err := p.owner.Do(ctx, one)
	if err != nil && p.of.OwnerOf(one.Partition) == call.Owner(p) {
		_ = p.owner.Own(ctx, one.Partition)
	}
	if p.IsDead() {
		<-ctx.Done()
		return owner.Answer{}, counter.ErrUnavailable
	}

	return answer, err
}

// fault makes one thing go wrong.
func (s *simulation) fault() {
	r := s.joined()
	switch s.rand.Below(9) {
	case 8:
		s.standStill(r)
	case 0:
		s.Fault("a process of %s is killed", r.name)
		r.replace(s.rand.Below(simProcesses))
	case 1:
		all := partitions()
		id := all[s.rand.Below(len(all))]
		s.Fault("partition %d of %s moves", id, r.name)
		r.move(id, s.rand.Below(simProcesses))

	case 2, 3:
		s.cut(r)
	case 4:
		s.loseTail(r)
	case 5:
		s.loseAll(r, true)
	case 6:
		s.loseAll(r, false)
	default:
		for _, late := range s.regions {
			if !late.joined {
				s.join(late)
			}
		}
	}
}

// standStill suspends a process. It loses its partitions meanwhile, and does not know that when it resumes.
func (s *simulation) standStill(r *simRegion) {
	i := s.rand.Below(simProcesses)
	s.Fault("a process of %s stands still", r.name)
	p := r.processes[i]
	p.Suspend()
	for _, id := range partitions() {
		if r.route[id] == i {
			r.move(id, (i+1)%simProcesses)
		}
	}
	time.Sleep(s.rand.UpTo(4 * time.Second))
	p.Resume()
}

// cut cuts a link, in one direction or both, for a while.
func (s *simulation) cut(r *simRegion) {
	other := s.regions[s.rand.Below(len(s.regions))]
	both := s.rand.Chance(0.5)
	s.Fault("%s is cut from %s, %v", r.name, other.name, both)
	s.setCut(r, other, true)
	if both {
		s.setCut(other, r, true)
	}

	after := s.rand.UpTo(15 * time.Second)
	s.stray.Go(func() {
		time.Sleep(after)
		s.setCut(r, other, false)
		s.setCut(other, r, false)
	})
}

func (s *simulation) setCut(from, to *simRegion, cut bool) {
	s.mu.Lock()
	defer s.mu.Unlock()

	s.cuts[[2]string{from.name, to.name}] = cut
}

// replace kills a process and starts another one in its place.
func (r *simRegion) replace(i int) {
	r.processes[i].kill()
	p := r.newProcess()
	r.mu.Lock()
	r.processes[i] = p
	route := r.route
	r.mu.Unlock()

	time.Sleep(r.of.rand.UpTo(500 * time.Millisecond))
	for _, id := range partitions() {
		if route[id] == i {
			r.move(id, r.of.rand.Below(simProcesses))
		}
	}
}

// loseTail makes a region's store lose its newest writes, while its owners live.
func (s *simulation) loseTail(r *simRegion) {
	if time.Since(r.steady) < 2*time.Second {
		return
	}

	s.Fault("the store of %s loses its tail", r.name)
	r.back(time.Now().Add(-s.rand.UpTo(time.Second)))
	time.Sleep(simHeal) // an owner that died before it has healed the loss would lose it for good
}

func (r *simRegion) back(to time.Time) {
	r.home.back(to)
	for _, inbox := range r.inboxes {
		inbox.back(to)
	}
}

// loseAll makes a region's store come back empty or older. By then all other regions have received everything, and no
// process remembers what was lost.
func (s *simulation) loseAll(r *simRegion, empty bool) {
	if !s.regions[1].joined {
		return // there are no other regions
	}

	r.pause(true)
	lost := s.lossOf()
	s.healLinks()
	time.Sleep(simSettle)
	s.Fault("the store of %s comes back, empty: %v", r.name, empty)

	s.mu.Lock()
	s.lossy = true
	s.mu.Unlock()
	for _, p := range r.processes {
		p.kill()
	}

	to := s.Start.Add(-time.Second)
	if !empty {
		to = time.Now().Add(-s.rand.UpTo(30 * time.Second))
	}
	r.back(to)
	r.mu.Lock()
	for i := range r.processes {
		r.processes[i] = nil
	}

	r.mu.Unlock()
	for i := range r.processes {
		p := r.newProcess()
		r.mu.Lock()
		r.processes[i] = p
		r.mu.Unlock()
	}

	for _, id := range partitions() {
		r.move(id, s.rand.Below(simProcesses))
	}

	// Changes that it makes to an older value, before it has received what it lost, may be lost.
	if !empty {
		time.Sleep(simSettle)
	}
	r.pause(false)

	s.mu.Lock()
	defer s.mu.Unlock()
	s.lost = lost
}

// pause makes the gateways of a region stop their changes, and waits for the answers to those under way.
func (r *simRegion) pause(on bool) {
	r.mu.Lock()
	r.paused = on
	r.mu.Unlock()
	if on {
		r.busy.Wait()
	}
}

func (s *simulation) healLinks() {
	s.mu.Lock()
	defer s.mu.Unlock()

	clear(s.cuts)
	s.lost = 0
}

// lossOf returns which share of the calls on links gets lost.
func (s *simulation) lossOf() float64 {
	s.mu.Lock()
	defer s.mu.Unlock()

	return s.lost
}

// healAll ends all faults.
func (s *simulation) healAll() {
	s.Logf("everything heals")
	for _, r := range s.regions {
		if !r.joined {
			s.join(r)
		}
		for _, id := range partitions() {
			r.move(id, r.route[id])
		}
	}

	s.stray.Go(func() {
		time.Sleep(time.Millisecond)
		s.healLinks()
	})

	time.Sleep(15 * time.Second) // until links that were cut for longer are healed
	s.healLinks()
}

// heard checks what watchers receive: no version goes back, except to that of no counter.
func (r *simRegion) heard(_ int, _ uint64, publication []byte) {
	if len(publication) == 0 {
		return // no details: any counter may have changed
	}

	err := owner.Publication(publication, func(u counter.Update) {
		r.mu.Lock()
		defer r.mu.Unlock()

		key, v := u.Counter.Key, u.Counter.Version
		before := r.versions[key]
		if v != (counter.Version{}) && v.Compare(before) < 0 {
			r.of.Failf("ordered", "%s: %s goes back from %v to %v", r.name, key, before, v)
		}
		if v != (counter.Version{}) {
			r.versions[key] = v
		}
		r.noteLocked(key, v, u.Counter.Value)
	})

	if err != nil {
		r.of.Failf("–", "%v", err)
	}
}

// noteLocked notes the value that a version has. The caller holds mu.
func (r *simRegion) noteLocked(key string, v counter.Version, value int64) {
	if v == (counter.Version{}) {
		return
	}

	at := fmt.Sprint(key, v)
	if is, ok := r.values[at]; ok && is != value {
		r.of.Failf("ordered", "%s: %s is %d and %d", r.name, at, is, value)
	}
	r.values[at] = value
}
