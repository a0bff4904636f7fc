package rowstier

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"headcount/counter/simtest"
	"headcount/internal/rows"
)

// The simulation runs processes whose owners change one row of some partitions through a tier. Meanwhile calls of both
// stores and their answers get lost; processes die, end in order, are suspended and lose their partitions to others;
// the fast store is away or loses everything, the durable store is away or slow, and rows are evicted. Then everything
// heals, and both stores must have what was acknowledged. The seed decides what happens and when.

func TestSimulation(t *testing.T) {
	simtest.Check(t, 100, 15, func(seed uint64, notes *simtest.Notes) { newSimulation(seed, notes).run() })
}

// TestSimulationFindsPlantedFaults plants faults in the stores that break the protocol. Some seed has to fail.
func TestSimulationFindsPlantedFaults(t *testing.T) {
	for name, plant := range plantedFaults {
		t.Run(name, func(t *testing.T) {
			n, found := simtest.Finds(t, 30, 10, func(seed uint64, notes *simtest.Notes) {
				s := newSimulation(seed, notes)
				plant(s.stores)
				s.run()
			})
			t.Logf("%d of %d seeds found it", found, n)
			if found == 0 {
				t.Error("no seed failed with the planted fault")
			}
		})
	}
}

var plantedFaults = map[string]func(*stores){
	"a fast store that answers before it commits":    func(s *stores) { s.hastyFast = true },
	"a durable store that answers before it commits": func(s *stores) { s.hastyDurable = true },
	"a durable store that does not look at epochs":   func(s *stores) { s.trusting = true },
	"a fast store that forgets a row":                func(s *stores) { s.forgetful = true },
}

// How much happens in one seed.
const (
	simProcesses  = 3
	simPartitions = 2
	simFaults     = 16               // one after another; as number 16 count the losses that happen all the time
	simRest       = 10 * time.Second // without faults, at the end
)

type simulation struct {
	*simtest.Notes
	seed   uint64
	rand   *simtest.Dice // of the present fault, so that a replay may leave out other faults
	stores *stores
	stray  sync.WaitGroup

	mu        sync.Mutex // guards the fields below
	rolled    map[string]*simtest.Dice
	lost      float64 // share of the calls, and of the answers, that get lost
	slow      time.Duration
	processes []*process
	made      int
	route     [simPartitions]int // index in processes of the one that should own the partition
	isOver    bool               // owners make no more changes
}

func newSimulation(seed uint64, notes *simtest.Notes) *simulation {
	s := &simulation{
		Notes:  notes,
		seed:   seed,
		rand:   simtest.NewDice(seed, "faults"),
		rolled: map[string]*simtest.Dice{},
	}

	s.stores = newStores(notes, s.rand)
	lost := 0.05 * float64(s.rand.Below(3))
	if s.Makes(simFaults) {
		s.Logf("%v of all calls get lost, and as many answers", lost)
		s.lost = lost
	}

	return s
}

// dice returns the dice of that name.
func (s *simulation) dice(name string) *simtest.Dice {
	s.mu.Lock()
	defer s.mu.Unlock()

	d := s.rolled[name]
	if d == nil {
		d = simtest.NewDice(s.seed, name)
		s.rolled[name] = d
	}

	return d
}

// network returns the share of calls that get lost, and how slow the durable store is.
func (s *simulation) network() (lost float64, slow time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()

	return s.lost, s.slow
}

func (s *simulation) isRouted(p *process, partition int) bool {
	s.mu.Lock()
	defer s.mu.Unlock()

	return s.processes[s.route[partition]] == p
}

func (s *simulation) run() {
	for i := range simProcesses {
		s.processes = append(s.processes, s.newProcess(i))
	}

	for id := range simPartitions {
		s.move(id, s.rand.Below(simProcesses))
	}

	for _, p := range s.processes {
		p.begin()
	}

	for i := range simFaults {
		s.rand = simtest.NewDice(s.seed, fmt.Sprint("fault ", i))
		time.Sleep(s.rand.UpTo(time.Second))
		if s.Makes(i) {
			s.fault()
		}
	}

	s.healAll()
	// Owners still make changes in the first rest, so that what a fault has broken is used again before the check.
	time.Sleep(simRest)
	s.endTurns()
	time.Sleep(simRest)
	s.check()
	for _, p := range s.processes {
		p.kill()
	}

	s.stray.Wait()
}

// endTurns makes owners stop their changes.
func (s *simulation) endTurns() {
	s.mu.Lock()
	defer s.mu.Unlock()

	s.isOver = true
}

func (s *simulation) hasTurns() bool {
	s.mu.Lock()
	defer s.mu.Unlock()

	return !s.isOver
}

func (s *simulation) newProcess(slot int) *process {
	s.made++
	p := &process{name: fmt.Sprint("process ", s.made), slot: slot, of: s}
	p.tier = New(fastLink{p}, durableLink{p}, Config{Lists: 2})
	for id := range simPartitions {
		p.owners[id] = &partitionOwner{process: p, partition: id}
	}

	return p
}

// move makes a process own a partition soon.
func (s *simulation) move(id, to int) {
	s.mu.Lock()
	defer s.mu.Unlock()

	s.route[id] = to
}

// fault makes one thing go wrong.
func (s *simulation) fault() {
	i := s.rand.Below(simProcesses)
	p := s.processes[i]
	id := s.rand.Below(simPartitions)

	switch s.rand.Below(12) {
	case 0, 1:
		s.Fault("%s is killed", p.name)
		p.kill()
		s.replace(i)

	case 2:
		s.Fault("%s ends", p.name)
		p.end()
		s.replace(i)

	case 3:
		s.Fault("%s stands still, and loses its partitions", p.name)
		p.Suspend()
		s.moveAll(i)
		time.Sleep(s.rand.UpTo(3 * time.Second))
		p.Resume()

	case 4:
		s.Fault("%s stands still", p.name)
		p.Suspend()
		time.Sleep(s.rand.UpTo(2 * time.Second))
		p.Resume()

	case 5, 6:
		s.Fault("partition %d goes to %s", id, p.name)
		s.move(id, i)
	case 7, 8:
		lost := s.stores.loseAll()
		s.Fault("the fast store loses everything: %v", lost)
		time.Sleep(s.rand.UpTo(time.Second))
		s.stores.set(&s.stores.fastAway, false)

	case 9:
		s.Fault("the fast store is away")
		s.stores.set(&s.stores.fastAway, true)
		time.Sleep(s.rand.UpTo(2 * time.Second))
		s.stores.set(&s.stores.fastAway, false)

	case 10:
		s.Fault("the durable store is away")
		s.stores.set(&s.stores.durableAway, true)
		s.move(id, i)
		time.Sleep(s.rand.UpTo(3 * time.Second))
		s.stores.set(&s.stores.durableAway, false)

	case 11:
		s.Fault("the durable store is slow")
		s.setSlow(s.rand.UpTo(time.Second))
		for range 3 {
			s.move(id, s.rand.Below(simProcesses))
			time.Sleep(s.rand.UpTo(time.Second))
		}

		s.setSlow(0)
	}

	if s.rand.Chance(0.2) {
		s.stores.claimLate(p, id)
	}
}

func (s *simulation) setSlow(slow time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()

	s.slow = slow
}

// replace starts another process in place of one that has ended. Some process claims its partitions.
func (s *simulation) replace(i int) {
	p := s.newProcess(i)
	s.mu.Lock()
	s.processes[i] = p
	s.mu.Unlock()
	p.begin()

	time.Sleep(s.rand.UpTo(300 * time.Millisecond))
	for id := range simPartitions {
		if s.isRouted(p, id) {
			s.move(id, s.rand.Below(simProcesses))
		}
	}
}

// moveAll makes other processes own the partitions of a process.
func (s *simulation) moveAll(from int) {
	for id := range simPartitions {
		if s.isRouted(s.processes[from], id) {
			s.move(id, (from+1+s.rand.Below(simProcesses-1))%simProcesses)
		}
	}
}

// healAll ends all faults.
func (s *simulation) healAll() {
	s.mu.Lock()
	s.lost = 0
	s.mu.Unlock()
	for _, p := range s.processes {
		p.Resume()
	}
}

// check compares both stores with what was acknowledged, after everything has healed.
func (s *simulation) check() {
	for id := range simPartitions {
		owner := s.processes[s.route[id]].owners[id]
		if !owner.owns() {
			s.Failf("newest", "%s does not own partition %d", owner.name, id)
			continue
		}

		// Changes have ended for as long as a rest, which is many drains.
		if dirty := s.processes[s.route[id]].tier.Dirty(); dirty > 0 {
			s.Failf("once", "%s has %d rows to drain", owner.name, dirty)
		}
		fast, durable, acknowledged := s.stores.newest(id)
		if fast != (version{}) && fast != durable || durable.less(acknowledged) {
			s.Failf("once", "of partition %d the fast store has %v, the durable one %v, and %v was acknowledged",
				id, fast, durable, acknowledged)
		}
		// Every process reads, since each has its own view of where a row is.
		for _, p := range s.processes {
			found := p.tier.Read(context.Background(), []rows.Address{addressOf(id)})[0]
			if is := decodeVersion(found.Value); found.Err != nil || is != durable {
				s.Failf("newest", "%s reads %v of partition %d, %v; the durable store has %v",
					p.name, is, id, found.Err, durable)
			}
		}
	}
}

// process is one process with a tier, and an owner of each partition that it may get.
type process struct {
	simtest.Host
	name    string
	slot    int
	of      *simulation
	tier    *Store
	owners  [simPartitions]*partitionOwner
	tracked tracked
	done    sync.WaitGroup
}

func (p *process) begin() {
	for _, o := range p.owners {
		p.done.Go(o.run)
	}
}

// kill ends the process as a crash would.
func (p *process) kill() {
	p.of.stores.end(p)
	// The calls of a dead process do not arrive any more. Its goroutines still have to return, but no fault waits for
	// that.
	p.of.stray.Go(func() {
		p.tier.stop()
		p.tier.wg.Wait()
		p.done.Wait()
	})
}

// end makes the process give up its partitions and drain what is left. If that takes too long, the process is killed.
func (p *process) end() {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()

	for _, o := range p.owners {
		// An owner in the middle of a commit keeps its turn, and may be waiting for a store that is away.
		for !o.end() && ctx.Err() == nil {
			time.Sleep(10 * time.Millisecond)
		}
	}
	if ctx.Err() != nil {
		p.kill()
		return
	}

	_ = p.tier.Close(ctx)
	p.of.stores.end(p)
	p.done.Wait()
}

// partitionOwner owns a partition, and changes its row: by the rules of package counter/owner, with one row and one
// call at a time.
type partitionOwner struct {
	*process
	partition int

	isAtWork   atomic.Bool // the process owns the partition, or tries to
	isClaiming atomic.Bool
	hasSent    atomic.Bool // the tier has sent the commit

	turn          sync.Mutex // guards the fields below
	epoch, number uint64     // epoch 0: the partition is not owned
	isKnown       bool
	row           version // the row in memory, if isKnown
	rowFrom       uint64  // number of the commit that wrote row
	losses        int     // how many losses the fast store had had when the last commit arrived
	hasEnded      bool
}

func (o *partitionOwner) owns() bool {
	o.turn.Lock()
	defer o.turn.Unlock()

	return o.epoch != 0
}

// end gives the partition up for good, unless a commit of it is under way.
func (o *partitionOwner) end() bool {
	if !o.turn.TryLock() {
		return false
	}
	defer o.turn.Unlock()

	o.hasEnded = true
	if o.epoch != 0 {
		o.release()
	}

	return true
}

func (o *partitionOwner) release() {
	o.of.stores.trace.release(o)
	o.giveUp()
}

func (o *partitionOwner) giveUp() {
	o.isAtWork.Store(false)
	o.epoch = 0
	o.number = 0
	o.isKnown = false
	o.row = version{}
	o.rowFrom = 0
}

// run owns and changes the partition until the process ends.
func (o *partitionOwner) run() {
	dice := o.of.dice(fmt.Sprint(o.name, " owner ", o.partition))
	for {
		time.Sleep(50*time.Millisecond + dice.UpTo(400*time.Millisecond))
		if !o.Alive() || !o.of.hasTurns() || !o.makeTurn(dice) {
			return
		}
	}
}

// makeTurn does something, and reports whether there will be another turn.
func (o *partitionOwner) makeTurn(dice *simtest.Dice) bool {
	o.turn.Lock()
	defer o.turn.Unlock()

	isRouted := o.of.isRouted(o.process, o.partition)
	does := dice.Below(20)
	isAsked := !isRouted && does < 10 // by the process that should own the partition
	switch {
	case o.hasEnded:
		return false
	case o.epoch == 0:
		if isRouted {
			o.own()
		}
	case isAsked:
		o.release()
	case does < 12:
		o.change(dice)
	case does < 15:
		o.verify()
	default:
		o.evict()
	}

	return true
}

// call is what a call of the tier is for.
type call struct {
	who  string
	kind callKind

	owner *partitionOwner // of a commit
	of    change
}

type callKind int

const (
	drains callKind = iota // or another call that is not an owner's
	takesOver
	turns // of an owner
)

type callKey struct{}

func callOf(ctx context.Context) call {
	c, _ := ctx.Value(callKey{}).(call)
	if c.who == "" {
		c.who = "drain"
	}

	return c
}

func (o *partitionOwner) context(kind callKind) context.Context {
	who := fmt.Sprint("owner ", o.partition, " ", kind)

	return context.WithValue(context.Background(), callKey{}, call{who: who, kind: kind})
}

// committing returns the context of a commit.
func (o *partitionOwner) committing(c change) context.Context {
	is := callOf(o.context(turns))
	is.owner = o
	is.of = c

	return context.WithValue(context.Background(), callKey{}, is)
}

// own claims the partition from whoever owns it now.
func (o *partitionOwner) own() {
	o.isAtWork.Store(true)
	claim, ok := o.claim()
	if !ok || claim.Epoch == 0 {
		o.isAtWork.Store(false)
		return
	}
	o.epoch = claim.Epoch
	o.number = claim.Number
}

func (o *partitionOwner) claim() (claim rows.Claim, ok bool) {
	o.isClaiming.Store(true)
	defer o.isClaiming.Store(false)
	ctx, cancel := context.WithTimeout(o.context(takesOver), 20*time.Second)
	defer cancel()

	claims, err := o.tier.Claim(ctx, o.name, []rows.Former{{Partition: o.partition, Epoch: o.epoch}})
	if err == nil {
		claim = claims[0]
		err = claim.Err
	}
	o.of.Logf("%s claims partition %d from %d: %+v, %v", o.name, o.partition, o.epoch, claim, err)
	if !o.Alive() {
		return claim, false
	}
	o.of.stores.trace.ended(o, claim, err)

	return claim, err == nil
}

// change judges a change of the row in memory, or first reads the row.
func (o *partitionOwner) change(dice *simtest.Dice) {
	// Now and then an owner reads the row though it has it, as after an eviction from memory.
	base := o.row
	if !o.isKnown || dice.Chance(0.2) {
		ctx, cancel := context.WithTimeout(o.context(turns), 5*time.Second)
		found := o.tier.Read(ctx, []rows.Address{addressOf(o.partition)})[0]
		cancel()
		if found.Err != nil || !o.Alive() {
			return
		}

		base = decodeVersion(found.Value)
	}

	value := base.next(o.epoch)
	value.serial = o.of.stores.newSerial()
	o.commit(change{after: o.number, number: o.number + 1, base: base, value: value})
}

// verify makes an empty commit.
func (o *partitionOwner) verify() { o.commit(change{after: o.number, number: o.number + 1}) }

func (o *partitionOwner) evict() {
	if !o.of.stores.hasInFast(o.partition) {
		return
	}
	o.of.stores.trace.evict(o)
	o.tier.Evict(o.partition, []rows.Name{addressOf(o.partition).Name})
}

// change is a commit of an owner.
type change struct {
	after, number uint64
	base, value   version // a value without an epoch changes nothing
	heals         bool
}

// commit makes a commit, and repeats it until its outcome is known.
func (o *partitionOwner) commit(c change) {
	for attempt := 0; o.Alive() && o.epoch != 0; attempt++ {
		commit := rows.Commit{
			Partition: o.partition, Epoch: o.epoch, After: c.after, Number: c.number, At: time.Now(),
		}
		if c.value.epoch != 0 {
			commit.Rows = []rows.Row{{Name: addressOf(o.partition).Name, Value: c.value.encode()}}
		}

		ctx, cancel := context.WithTimeout(o.committing(c), 3*time.Second)
		o.hasSent.Store(false)
		err := o.tier.Commit(ctx, []rows.Commit{commit})[0]
		cancel()
		if !o.Alive() {
			return
		}

		o.of.Logf("%s commits to partition %d: %+v, %v", o.name, o.partition, c, err)

		var fenced *rows.Fenced
		var lost *rows.Lost
		// After an earlier attempt without an answer the commit may have been made, whatever a later one says.
		isNotMade := attempt == 0 && errors.Is(err, rows.ErrFull)
		isUnwanted := !c.heals && !o.of.isRouted(o.process, o.partition)
		switch {
		case err == nil:
			o.land(c)
			return
		case errors.As(err, &fenced), errors.As(err, &lost):
			o.of.stores.trace.refused(o, &commit)
			healed, isOver := o.heal(c)
			if isOver {
				return
			}

			c = healed

		case isNotMade:
			return
		case isUnwanted:
			o.release()
			return
		default:
			// A former claim may arrive between two attempts.
			if o.of.dice(fmt.Sprint(o.name, " late claims ", o.partition)).Chance(0.1) {
				o.of.stores.claimLate(o.process, o.partition)
			}
			time.Sleep(100 * time.Millisecond)
		}
	}
}

func (o *partitionOwner) land(c change) {
	o.number = c.number
	if c.value.epoch != 0 {
		o.isKnown = true
		o.row = c.value
		o.rowFrom = c.number
		o.of.stores.acknowledge(o.process, o.partition, c.value, o.losses)
	}
}

// heal claims the partition again after the store has refused a commit. It returns the commit to make next: what the
// store may lack, or the same commit if the outcome of the claim is unknown.
func (o *partitionOwner) heal(c change) (next change, isOver bool) {
	claim, ok := o.claim()
	switch {
	case !o.Alive():
		return c, true
	case !ok:
		return c, false
	case claim.Epoch == 0:
		o.giveUp()
		return c, true
	}

	// The claim shows that the commit in doubt was made, so it is acknowledged and not made again.
	if claim.Number == c.number && c.number > o.number {
		o.land(c)
	}
	o.epoch = claim.Epoch
	next = change{after: claim.Number, number: max(o.number, claim.Number) + 1, heals: true}
	if o.isKnown && o.rowFrom > claim.Number {
		next.value = o.row
	}

	return next, false
}

// version of a row. The serial says which change made it.
type version struct {
	epoch    uint64
	sequence int
	serial   int
}

// next returns the version of the next change, under an epoch.
func (v version) next(epoch uint64) version {
	return version{epoch: max(v.epoch, epoch), sequence: v.sequence + 1}
}

func (v version) less(other version) bool {
	return v.epoch < other.epoch || v.epoch == other.epoch && v.sequence < other.sequence
}

func (v version) encode() []byte { return fmt.Appendf(nil, "%d %d %d", v.epoch, v.sequence, v.serial) }

// decodeVersion is the inverse of encode. An empty value is the zero version.
func decodeVersion(b []byte) (v version) {
	_, _ = fmt.Sscan(string(b), &v.epoch, &v.sequence, &v.serial)

	return v
}

func addressOf(partition int) rows.Address {
	return rows.Address{Partition: partition, Name: rows.Name{Collection: "c", Field: "f"}}
}

// isRow reports whether a row is the one that owners change.
func isRow(name rows.Name) bool { return name == addressOf(0).Name }

// valueOf returns the row that a commit writes, if it does.
func valueOf(c *rows.Commit) (row rows.Row, writes bool) {
	i := slices.IndexFunc(c.Rows, func(r rows.Row) bool { return isRow(r.Name) })
	if i < 0 {
		return row, false
	}

	return c.Rows[i], true
}
