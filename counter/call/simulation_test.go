package call_test

import (
	"context"
	"flag"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"headcount/counter"
	"headcount/counter/call"
	"headcount/counter/owner"
	"headcount/internal/rows"
)

// The simulation runs owners, gateways and a store with a clock, a network and faults of its own. Gateways change some
// counters all the time. Meanwhile calls, commits and answers get lost, come late and twice; owners die, stand still
// and lose their partitions to others; the store is away, full, or loses its newest changes. Then everything heals, and
// the counters must be what was acknowledged. The seed decides what happens and when.

var (
	simSeed  = flag.Uint64("seed", 0, "replay the simulation of this seed, with its log")
	simSeeds = flag.Int("seeds", 150, "number of seeds to simulate")
	simFirst = flag.Uint64("first", 1, "the first of these seeds")
)

func TestSimulation(t *testing.T) {
	if *simSeed != 0 {
		wrong := simulate(t, *simSeed, nil, true)
		for _, line := range wrong {
			t.Error(line)
		}
		return
	}

	seeds := *simSeeds
	if testing.Short() {
		seeds = min(seeds, 20)
	}
	forSeeds(seeds, func(seed uint64) bool {
		wrong := simulate(t, seed, nil, false)
		for _, line := range wrong {
			t.Errorf("seed %d: %s\nreplay: go test ./counter/call -run Simulation -seed %d", seed, line, seed)
		}
		return len(wrong) == 0
	})
}

// TestSimulationFindsPlantedFaults has the store do what makes the protocol wrong.
func TestSimulationFindsPlantedFaults(t *testing.T) {
	for name, plant := range map[string]func(*world){
		"an answer before the commit": func(w *world) { w.hasty = true },
		"no fence":                    func(w *world) { w.trust = true },
		"a forgotten replay":          func(w *world) { w.forget = true },
		"a loss that nobody notices":  func(w *world) { w.complete = true },
	} {
		t.Run(name, func(t *testing.T) {
			most := 30
			if testing.Short() {
				most = 6
			}
			var found atomic.Int64
			forSeeds(most, func(seed uint64) bool {
				wrong := simulate(t, seed, plant, false)
				if len(wrong) > 0 {
					found.Add(1)
				}
				return true
			})
			t.Logf("%d of %d seeds found it", found.Load(), most)
			if found.Load() == 0 {
				t.Error("no seed found it")
			}
		})
	}
}

// forSeeds calls one for the seeds, on all cores, until it returns false.
func forSeeds(n int, one func(seed uint64) bool) {
	next := make(chan uint64, n)
	for i := range n {
		next <- *simFirst + uint64(i)
	}
	close(next)

	var mu sync.Mutex
	var workers sync.WaitGroup
	stopped := false
	for range runtime.GOMAXPROCS(0) {
		workers.Go(func() {
			for seed := range next {
				mu.Lock()
				stop := stopped
				mu.Unlock()
				if stop {
					return
				}

				if !one(seed) {
					mu.Lock()
					stopped = true
					mu.Unlock()
				}
			}
		})
	}
	workers.Wait()
}

// simulate runs a seed and returns what was wrong.
func simulate(t *testing.T, seed uint64, plant func(*world), log bool) (wrong []string) {
	t.Helper()
	t.Run(fmt.Sprint(seed), func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			s := newSimulation(seed)
			s.verbose = log
			if plant != nil {
				plant(s.world)
			}
			s.run()
			wrong = s.wrong
			if log {
				for _, line := range s.lines {
					t.Log(line)
				}
			}
		})
	})

	return wrong
}

// How much happens in one seed.
const (
	simProcesses = 3
	simGateways  = 3
	simWorkers   = 3 // of each gateway
	simFaults    = 12
	simHeal      = 3 * time.Second // for owners to heal what the store lost
	simRest      = 8 * time.Second // without faults, at the end
)

// faults says how often what gets lost.
type faults struct {
	store float64 // of commits, and of their answers
	calls float64
}

type simulation struct {
	seed    uint64
	verbose bool
	rand    *dice // of the one who makes faults
	world   *world
	start   time.Time
	stray   sync.WaitGroup // calls that nobody waits for
	keys    []string

	mu        sync.Mutex // guards the fields below
	faults    faults
	rolled    map[string]*dice // by name
	processes []*process
	made      int                    // processes so far
	route     [rows.Partitions]int   // partition -> index in processes, as gateways know it
	expected  map[string]*expected   // by key
	versions  map[string]int64       // key and version -> value
	ids       map[string]*identified // by idempotency key
	wrong     []string
	lines     []string
}

// expected is what a counter must be in the end.
type expected struct {
	sum   int64   // of what was acknowledged
	maybe []int64 // was neither acknowledged nor refused
}

// identified is a change with an idempotency key.
type identified struct {
	key         string
	delta       int64
	changed     int // acknowledgements that are no replay
	unknown     bool
	acknowledge bool
}

func newSimulation(seed uint64) *simulation {
	r := newDice(seed, "faults")
	s := &simulation{
		seed:     seed,
		rand:     r,
		rolled:   map[string]*dice{},
		world:    newWorld(r),
		start:    time.Now(),
		expected: map[string]*expected{},
		versions: map[string]int64{},
		ids:      map[string]*identified{},
	}
	s.faults = faults{store: 0.1 * float64(r.below(3)) / 2, calls: 0.1 * float64(r.below(3)) / 2}
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
func (s *simulation) dice(who, what string, partition int) *dice {
	s.mu.Lock()
	defer s.mu.Unlock()

	name := fmt.Sprint(who, " ", what, " ", partition)
	d := s.rolled[name]
	if d == nil {
		d = newDice(s.seed, name)
		s.rolled[name] = d
	}

	return d
}

func (s *simulation) chances() faults {
	s.mu.Lock()
	defer s.mu.Unlock()

	return s.faults
}

// routeOf returns who should own a partition.
func (s *simulation) routeOf(id int) int {
	s.mu.Lock()
	defer s.mu.Unlock()

	return s.route[id]
}

func (s *simulation) logf(format string, args ...any) {
	if !s.verbose {
		return
	}

	s.mu.Lock()
	defer s.mu.Unlock()

	s.lines = append(s.lines, fmt.Sprintf("%8.3f  ", time.Since(s.start).Seconds())+fmt.Sprintf(format, args...))
}

func (s *simulation) failf(format string, args ...any) {
	s.mu.Lock()
	defer s.mu.Unlock()

	s.wrong = append(s.wrong, fmt.Sprintf("after %.3f s: ", time.Since(s.start).Seconds())+fmt.Sprintf(format, args...))
}

func (s *simulation) run() {
	for range simProcesses {
		s.processes = append(s.processes, s.newProcess())
	}
	for _, id := range s.partitions() {
		s.move(id, s.rand.below(simProcesses))
	}

	stop := make(chan struct{})
	var gateways sync.WaitGroup
	for g := range simGateways {
		gateways.Go(func() { s.gateway(fmt.Sprint("gateway ", g), stop) })
	}

	for range simFaults {
		time.Sleep(s.rand.upTo(2 * time.Second))
		s.fault()
	}
	s.healAll()
	time.Sleep(simRest)
	close(stop)
	s.wait("a call has no answer", gateways.Wait)
	s.wait("a call is on its way", s.stray.Wait)

	s.check()
	for _, p := range s.processes {
		p.kill()
	}
}

// wait waits for what must end soon now.
func (s *simulation) wait(what string, end func()) {
	ended := make(chan struct{})
	go func() {
		end()
		close(ended)
	}()

	select {
	case <-ended:
	case <-time.After(time.Minute):
		for _, line := range s.lines {
			fmt.Println(line)
		}
		panic(fmt.Sprintf("seed %d: %s", s.seed, what))
	}
}

// partitions returns those of the keys.
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
	p := &process{name: fmt.Sprint("process ", s.made), of: s, resumed: make(chan struct{})}
	close(p.resumed)
	p.owner = owner.New(p, owner.Config{Name: p.name, WriteTimeout: time.Second, HealRows: 3})

	return p
}

// move has a process claim a partition, and tells the gateways.
func (s *simulation) move(id, to int) {
	s.mu.Lock()
	p := s.processes[to]
	s.route[id] = to
	s.mu.Unlock()

	dice := s.dice(p.name, "moves", id)
	s.stray.Go(func() {
		for p.alive() && p.owner.Own(context.Background(), id) != nil {
			time.Sleep(50*time.Millisecond + dice.upTo(time.Millisecond))
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
	i := s.rand.below(simProcesses)
	p := s.processes[i]

	switch s.rand.below(8) {
	case 0, 1:
		s.logf("%s is killed", p.name)
		s.replace(i)
	case 2:
		s.logf("%s stands still, and loses its partitions", p.name)
		p.suspend()
		s.moveAll(i)
		time.Sleep(s.rand.upTo(3 * time.Second))
		p.resume()
	case 3:
		s.logf("%s stands still", p.name)
		p.suspend()
		time.Sleep(s.rand.upTo(3 * time.Second))
		p.resume()
	case 4:
		all := s.partitions()
		id := all[s.rand.below(len(all))]
		s.logf("%s claims partition %d", p.name, id)
		s.move(id, i)
	case 5:
		s.logf("the store lost %d changes", s.world.loseTail())
		time.Sleep(simHeal) // what an owner has not healed when it dies or stands still is lost
	case 6:
		s.logf("the store is away")
		s.set(&s.world.away, true)
		time.Sleep(s.rand.upTo(4 * time.Second))
		s.set(&s.world.away, false)
	case 7:
		s.logf("the store is full")
		s.set(&s.world.full, true)
		time.Sleep(s.rand.upTo(2 * time.Second))
		s.set(&s.world.full, false)
	}

	s.world.repeatOne()
}

func (s *simulation) set(flag *bool, value bool) {
	s.world.mu.Lock()
	defer s.world.mu.Unlock()

	*flag = value
}

// replace kills a process and starts another one in its place. Somebody claims its partitions.
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

	time.Sleep(s.rand.upTo(500 * time.Millisecond))
	for _, id := range owned {
		s.move(id, s.rand.below(simProcesses))
	}
}

// moveAll has others claim the partitions of a process.
func (s *simulation) moveAll(from int) {
	for _, id := range s.partitions() {
		if s.routeOf(id) == from {
			s.move(id, (from+1+s.rand.below(simProcesses-1))%simProcesses)
		}
	}
}

// healAll ends all faults.
func (s *simulation) healAll() {
	s.mu.Lock()
	s.faults = faults{}
	s.mu.Unlock()
	for _, p := range s.processes {
		p.resume()
	}

	// A process that was fenced by one that has died since owns nothing.
	for _, id := range s.partitions() {
		s.move(id, s.routeOf(id))
	}
}
