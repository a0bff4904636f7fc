package call_test

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"headcount/counter"
	"headcount/counter/call"
	"headcount/counter/owner"
	"headcount/counter/simtest"
	"headcount/internal/rows"
)

// The simulation runs owners, gateways and a store, with its own clock, network and faults. Gateways change some
// counters all the time. Meanwhile calls, commits and answers get lost, come late and twice; owners die, are suspended
// and lose their partitions to others; the store is away, full, or loses its newest changes. Then everything heals, and
// the counters must be what was acknowledged. The seed decides what happens and when.

func TestSimulation(t *testing.T) {
	simtest.Check(t, 150, 20, func(seed uint64, notes *simtest.Notes) { newSimulation(seed, notes).run() })
}

// TestSimulationFindsPlantedFaults plants faults in the store that break the protocol. Some seed has to fail.
func TestSimulationFindsPlantedFaults(t *testing.T) {
	for name, plant := range map[string]func(*world){
		"an answer before the commit": func(w *world) { w.hasty = true },
		"no fence":                    func(w *world) { w.trust = true },
		"a forgotten replay":          func(w *world) { w.forget = true },
		"a loss that nobody notices":  func(w *world) { w.complete = true },
	} {
		t.Run(name, func(t *testing.T) {
			n, found := simtest.Finds(t, 30, 6, func(seed uint64, notes *simtest.Notes) {
				s := newSimulation(seed, notes)
				plant(s.world)
				s.run()
			})

			t.Logf("%d of %d seeds found it", found, n)
			if found == 0 {
				t.Error("no seed failed with the planted fault")
			}
		})
	}
}

// How much happens in one seed.
const (
	simProcesses = 3
	simGateways  = 3
	simWorkers   = 3               // of each gateway
	simFaults    = 12              // one after another; as number 12 count the losses that happen all the time
	simHeal      = 3 * time.Second // for owners to heal what the store lost
	simRest      = 5 * time.Second // without faults, at the end
)

// faults has the probability that a message of each sort gets lost.
type faults struct {
	store    float64 // of commits, of calls of webhooks, and of their answers
	calls    float64
	receiver float64 // of messages of webhooks, and of their answers
}

type simulation struct {
	*simtest.Notes
	seed  uint64
	rand  *simtest.Dice // of the present fault, so that a replay may leave out other faults
	world *world
	stray sync.WaitGroup // calls whose callers have given up
	keys  []string

	hooked  *hooked
	hooking sync.WaitGroup // waits for the webhooks of all lives

	mu        sync.Mutex // guards the fields below
	faults    faults
	rolled    map[string]*simtest.Dice // by name
	processes []*process
	made      int                    // how many processes were started so far
	route     [rows.Partitions]int   // partition -> index in processes, as gateways know it
	expected  map[string]*expected   // by key
	versions  map[string]int64       // key and version -> value
	ids       map[string]*identified // by idempotency key
	lives     [simGateways]*life     // the present ones
	sender    int                    // the gateway that sends the events of webhooks
	resting   bool                   // some counters are left unchanged from now on
}

// expected is the value that a counter must have in the end.
type expected struct {
	sum   int64   // of what was acknowledged
	maybe []int64 // deltas that were neither acknowledged nor refused
}

// identified is a change with an idempotency key.
type identified struct {
	key         string
	delta       int64
	changed     int // acknowledgements that were no replay
	unknown     bool
	acknowledge bool
}

func newSimulation(seed uint64, notes *simtest.Notes) *simulation {
	r := simtest.NewDice(seed, "faults")
	s := &simulation{
		Notes:    notes,
		seed:     seed,
		rand:     r,
		rolled:   map[string]*simtest.Dice{},
		world:    newWorld(r),
		expected: map[string]*expected{},
		versions: map[string]int64{},
		ids:      map[string]*identified{},
	}

	s.hooked = newHooked(s)
	lost := faults{store: 0.1 * float64(r.Below(3)) / 2, calls: 0.1 * float64(r.Below(3)) / 2}
	lost.receiver = 0.2 * float64(r.Below(3))
	if s.Makes(simFaults) {
		s.Logf("of what goes to the store %v get lost, of calls %v, of messages of webhooks %v",
			lost.store, lost.calls, lost.receiver)
		s.faults = lost
	}
	for i := range 6 {
		s.keys = append(s.keys, fmt.Sprint("sum", i), fmt.Sprint("stock", i))
	}

	for _, key := range s.keys {
		s.expected[key] = &expected{}
	}

	return s
}

var (
	simFloor = int64(0)
	simSum   = &counter.Rule{Match: "sum*", Kind: counter.Sum}
	simStock = &counter.Rule{Match: "stock*", Kind: counter.Exact, Floor: &simFloor}
)

func ruleOf(key string) *counter.Rule {
	if key[1] == 'u' {
		return simSum
	}
	return simStock
}

// dice returns the dice of that name.
func (s *simulation) dice(who, what string, partition int) *simtest.Dice {
	s.mu.Lock()
	defer s.mu.Unlock()

	name := fmt.Sprint(who, " ", what, " ", partition)
	d := s.rolled[name]
	if d == nil {
		d = simtest.NewDice(s.seed, name)
		s.rolled[name] = d
	}

	return d
}

func (s *simulation) chances() faults {
	s.mu.Lock()
	defer s.mu.Unlock()

	return s.faults
}

// busy returns how many of the keys still change.
func (s *simulation) busy() int {
	s.mu.Lock()
	defer s.mu.Unlock()

	if s.resting {
		return len(s.keys) / 2
	}

	return len(s.keys)
}

// routeOf returns who should own a partition.
func (s *simulation) routeOf(id int) int {
	s.mu.Lock()
	defer s.mu.Unlock()

	return s.route[id]
}

func (s *simulation) run() {
	for range simProcesses {
		s.processes = append(s.processes, s.newProcess())
	}

	for _, id := range s.partitions() {
		s.move(id, s.rand.Below(simProcesses))
	}

	stop := make(chan struct{})
	var gateways sync.WaitGroup
	for g := range simGateways {
		gateways.Go(func() { s.gateway(g, stop) })
	}

	for i := range simFaults {
		s.rand = simtest.NewDice(s.seed, fmt.Sprint("fault ", i))
		time.Sleep(s.rand.UpTo(2 * time.Second))
		if s.Makes(i) {
			s.fault()
		}
	}

	s.healAll()
	time.Sleep(simRest)
	close(stop)
	// The check needs final values, so no change may be under way any more.
	s.wait("a call has no answer", gateways.Wait)
	s.wait("a call is on its way", s.stray.Wait)

	s.check()
	s.checkHooks()
	for _, l := range s.lives {
		l.kill()
	}

	s.wait("webhooks do not end", s.hooking.Wait)
	for _, p := range s.processes {
		p.kill()
	}
}

// wait waits for something that has to end soon.
func (s *simulation) wait(what string, end func()) {
	ended := make(chan struct{})
	go func() {
		end()
		close(ended)
	}()

	// Without this, a call that waits for ever would end the test without a word about its seed.
	select {
	case <-ended:
	case <-time.After(time.Minute):
		panic(fmt.Sprintf("seed %d: %s", s.seed, what))
	}
}

// partitions returns the partitions of the keys.
func (s *simulation) partitions() []int {
	var all []int
	for _, key := range s.keys {
		all = append(all, rows.PartitionOf(key))
	}
	slices.Sort(all)

	return slices.Compact(all)
}

func (s *simulation) newProcess() *process {
	s.made++
	p := &process{name: fmt.Sprint("process ", s.made), of: s}
	p.owner = owner.New(p, owner.Config{Name: p.name, WriteTimeout: time.Second, HealRows: 3})

	return p
}

// move makes a process claim a partition, and gateways route to it.
func (s *simulation) move(id, to int) {
	s.mu.Lock()
	p := s.processes[to]
	s.route[id] = to
	s.mu.Unlock()

	dice := s.dice(p.name, "moves", id)
	s.stray.Go(func() {
		for p.Alive() && p.owner.Own(context.Background(), id) != nil {
			time.Sleep(50*time.Millisecond + dice.UpTo(time.Millisecond))
		}
	})
}

// OwnerOf implements call.Owners.
func (s *simulation) OwnerOf(id int) call.Owner {
	s.mu.Lock()
	defer s.mu.Unlock()

	return s.processes[s.route[id]]
}

// fault makes one thing go wrong.
func (s *simulation) fault() {
	i := s.rand.Below(simProcesses)
	p := s.processes[i]
	defer s.hookFault()()

	switch s.rand.Below(8) {
	case 0, 1:
		s.Fault("%s is killed", p.name)
		s.replace(i)
	case 2:
		s.Fault("%s stands still, and loses its partitions", p.name)
		p.Suspend()
		s.moveAll(i)
		time.Sleep(s.rand.UpTo(3 * time.Second))
		p.Resume()

	case 3:
		s.Fault("%s stands still", p.name)
		p.Suspend()
		time.Sleep(s.rand.UpTo(3 * time.Second))
		p.Resume()

	case 4:
		all := s.partitions()
		id := all[s.rand.Below(len(all))]
		s.Fault("%s claims partition %d", p.name, id)
		s.move(id, i)

	case 5:
		s.Fault("the store lost %d changes", s.world.loseTail(s.rand))
		time.Sleep(simHeal) // an owner that died or stood still before it has healed the loss would lose it for good
	case 6:
		s.Fault("the store is away")
		s.set(&s.world.away, true)
		time.Sleep(s.rand.UpTo(4 * time.Second))
		s.set(&s.world.away, false)

	case 7:
		s.Fault("the store is full")
		s.set(&s.world.full, true)
		time.Sleep(s.rand.UpTo(2 * time.Second))
		s.set(&s.world.full, false)
	}

	s.world.repeatOne(s.rand)
}

func (s *simulation) set(flag *bool, value bool) {
	s.world.mu.Lock()
	defer s.world.mu.Unlock()

	*flag = value
}

// replace kills a process and starts another one in its place. Some process claims its partitions.
func (s *simulation) replace(i int) {
	p := s.processes[i]
	var owned []int
	for _, id := range s.partitions() {
		if s.routeOf(id) == i {
			owned = append(owned, id)
		}
	}
	p.kill()
	s.world.orphan(owned)

	s.mu.Lock()
	s.processes[i] = s.newProcess()
	s.mu.Unlock()

	// As long as it takes others to notice the death. Until then calls find no owner.
	time.Sleep(s.rand.UpTo(500 * time.Millisecond))
	for _, id := range owned {
		s.move(id, s.rand.Below(simProcesses))
	}
}

// moveAll makes other processes claim the partitions of a process.
func (s *simulation) moveAll(from int) {
	for _, id := range s.partitions() {
		if s.routeOf(id) == from {
			s.move(id, (from+1+s.rand.Below(simProcesses-1))%simProcesses)
		}
	}
}

// healAll ends all faults.
func (s *simulation) healAll() {
	s.mu.Lock()
	s.faults = faults{}
	// Half of the counters rest, so that a loss in them has to be healed although nobody changes them any more.
	s.resting = true
	s.mu.Unlock()
	for _, p := range s.processes {
		p.Resume()
	}

	// A process may have been fenced by one that has died since. Then nobody owns its partitions until they are claimed
	// again.
	for _, id := range s.partitions() {
		s.move(id, s.routeOf(id))
	}
}
