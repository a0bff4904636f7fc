// Package owners knows which process owns which partition of the counters.
//
// A ring over the processes says who should own a partition, and the claim in the store says who does (package rows). A
// claim is safe at any moment, so everything here is about speed alone: a wrong guess costs a caller some time, and
// never a wrong value.
//
// # Taking over
//
// A process takes a partition when the ring gives it to it: at once when the ring changes, or when the first call for
// it comes. Before it claims, it asks all others that it can reach to give the partition up. So whoever has it writes
// what it has acknowledged first, and its calls move without an error.
//
// Leases are read by each process for itself, so for up to a second processes have different rings. Who is asked and
// does not own a partition says who does: the process that has asked it to give the partition up, or that of its ring.
// The caller turns there at once, and keeps to it until its own ring changes.
//
// # Unreachable processes
//
// Whoever finds that a process refuses connections, or says nothing for a second, asks the others. If none can reach
// it, all of those leave it out of their rings for some seconds, and the next process by the ring takes its partitions.
// If one can, a link alone is cut: then calls on that link fail, and no partition moves (as in SWIM by Das, Gupta and
// Motivala, 2002). The lease of a process that died ends some seconds later, and the ring of everybody changes.
//
// A slow machine must not make partitions wander. So a process is left out again 10 s later at the earliest, or 2 s
// later if it refuses connections, and takes part again at once when it turns out to be alive.
package owners

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"headcount/counter/call"
	"headcount/counter/link"
	"headcount/counter/owner"
	"headcount/internal/rows"
	"headcount/internal/wake"
	"headcount/presence/ring"
)

const (
	// leftOut is how long an unreachable process is left out. Its lease ends earlier if it died.
	leftOut = 5 * time.Second
	// quietFor is the least time between two times that a process is left out, and refusedFor that for one that refuses
	// connections: that is seldom a mistake.
	quietFor   = 10 * time.Second
	refusedFor = 2 * time.Second
	// askWithin limits how long the others are asked, and so how long a silent one holds up a claim.
	askWithin = time.Second
	// probeWithin is long enough for the others to find out that a process says nothing.
	probeWithin = askWithin + 100*time.Millisecond
	// claimWithin limits one claim.
	claimWithin = 3 * time.Second
	// retryEvery is the pause after a claim that failed.
	retryEvery = 200 * time.Millisecond
)

// Peer is another process.
type Peer interface {
	call.Owner
	Release(ctx context.Context, to string, partitions []int) error
	Ping(ctx context.Context) error
	Probe(ctx context.Context, name string) (bool, error)
}

// Config tunes a Directory.
type Config struct {
	Self  string                 // the name of this process
	Local *owner.Owner           // nil: this process owns nothing
	Peer  func(name string) Peer // another process by its name
}

// Directory knows the owners, as far as this process does, and has the local owner own what it should. Its methods may
// be called from any goroutine.
type Directory struct {
	cfg  Config
	ctx  context.Context // ends with Close
	stop context.CancelFunc
	wg   sync.WaitGroup // pullEach, and confirm for each process that is suspected
	pull chan struct{}  // has capacity 1: the ring has changed

	// taking is a lock that a caller may stop waiting for: one claim of this process is under way at a time.
	taking chan struct{}

	mu     sync.Mutex // guards the fields below
	owning []string   // the processes with the role
	all    []string   // these and others that may own something yet
	out    map[string]absence
	doubts map[string]bool // processes about which the others are being asked
	whole  []string        // the owner of each partition by the ring; empty: there is none
	of     []string        // likewise, without those that are left out
	moved  map[int]string  // the owners of partitions by the word of others, until the ring changes
}

// absence says since when a process is left out.
type absence struct {
	since time.Time
	over  bool // it takes part again, and is remembered for quietFor only
}

// New returns a Directory without any process. Close ends it.
func New(cfg Config) *Directory {
	d := &Directory{
		cfg:    cfg,
		pull:   make(chan struct{}, 1),
		taking: make(chan struct{}, 1),
		out:    map[string]absence{},
		doubts: map[string]bool{},
		moved:  map[int]string{},
	}
	d.ctx, d.stop = context.WithCancel(context.Background())
	if cfg.Local != nil {
		d.wg.Go(d.pullEach)
	}

	return d
}

// Close ends the claims of this process. The local owner keeps what it owns. It is called once.
func (d *Directory) Close() {
	d.stop()
	d.wg.Wait()
}

// SetProcesses says which processes should own partitions, and which are there at all: one that is about to leave may
// own some until they are asked for.
func (d *Directory) SetProcesses(owning, all []string) {
	d.mu.Lock()
	defer d.mu.Unlock()

	d.owning = slices.Clone(owning)
	d.all = slices.Clone(all)
	for name := range d.out {
		if !slices.Contains(all, name) {
			delete(d.out, name)
		}
	}
	d.whole = assign(d.owning)
	d.assign()
}

// assign returns the owner of each partition by the ring of processes.
func assign(owning []string) []string {
	of := make([]string, rows.Partitions)
	table := ring.New(owning, nil, rows.Partitions, 1)
	for id := range of {
		of[id], _ = table.Node(id)
	}

	return of
}

// assign makes the ring anew of those that are not left out. The caller has mu.
func (d *Directory) assign() {
	d.of = d.whole
	if present := slices.DeleteFunc(slices.Clone(d.owning), d.isOut); len(present) < len(d.owning) {
		d.of = assign(present)
	}
	clear(d.moved)
	wake.Signal(d.pull)
}

// isOut reports whether a process is left out. The caller has mu.
func (d *Directory) isOut(name string) bool {
	gone, is := d.out[name]

	return is && !gone.over
}

// OwnerOf implements call.Owners.
func (d *Directory) OwnerOf(partition int) call.Owner {
	// Whoever should own it instead has not asked for it yet.
	if d.cfg.Local != nil && d.cfg.Local.Owns(partition) {
		return d
	}

	name := d.nameOf(partition)
	switch {
	case name == "":
		return nil
	case name == d.cfg.Self:
		return d
	}

	return there{d, name}
}

func (d *Directory) nameOf(partition int) string {
	d.mu.Lock()
	defer d.mu.Unlock()

	d.readmit()
	if name, is := d.moved[partition]; is {
		return name
	}
	if d.of == nil {
		return ""
	}

	return d.of[partition]
}

// move notes the owner of a partition by the word of another process.
func (d *Directory) move(partition int, to string) {
	d.mu.Lock()
	defer d.mu.Unlock()

	mine := to == d.cfg.Self && d.cfg.Local == nil
	if !mine && slices.Contains(d.all, to) {
		d.moved[partition] = to
	}
}

// forget forgets where a partition has moved.
func (d *Directory) forget(partition int) {
	d.mu.Lock()
	defer d.mu.Unlock()

	delete(d.moved, partition)
}

// readmit lets those take part again who were left out for long enough. The caller has mu.
func (d *Directory) readmit() {
	changed := false
	for name, gone := range d.out {
		age := time.Since(gone.since)
		if age >= leftOut && !gone.over {
			d.out[name] = absence{since: gone.since, over: true}
			changed = true
		}
		if age >= quietFor {
			delete(d.out, name)
		}
	}
	if changed {
		d.assign()
	}
}

// suspect asks the others whether they can reach a process that this one cannot, and leaves it out if none can.
func (d *Directory) suspect(name string, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()

	if d.doubts[name] || d.isOut(name) || d.ctx.Err() != nil {
		return
	}
	d.doubts[name] = true
	d.wg.Go(func() {
		if !d.othersReach(name) {
			d.leaveOut(name, err)
		}

		d.mu.Lock()
		defer d.mu.Unlock()
		delete(d.doubts, name)
	})
}

// othersReach reports whether one of the other processes can reach the one with that name.
func (d *Directory) othersReach(name string) bool {
	ctx, cancel := context.WithTimeout(d.ctx, probeWithin)
	defer cancel()

	var reached atomic.Bool
	var wg sync.WaitGroup
	for _, other := range d.others() {
		if other == name {
			continue
		}
		wg.Go(func() {
			if is, err := d.cfg.Peer(other).Probe(ctx, name); err == nil && is {
				reached.Store(true)
				cancel()
			}
		})
	}
	wg.Wait()

	return reached.Load()
}

// Probe implements link.Process. If this process cannot reach that one either, it leaves it out as well.
func (d *Directory) Probe(ctx context.Context, name string) bool {
	return name == d.cfg.Self || d.reach(ctx, name)
}

// leaveOut leaves a process out of the ring that could not be reached, if the last time was long enough ago.
func (d *Directory) leaveOut(name string, err error) {
	least := quietFor
	if errors.Is(err, syscall.ECONNREFUSED) {
		least = refusedFor
	}

	d.mu.Lock()
	defer d.mu.Unlock()

	d.readmit()
	if before, is := d.out[name]; is && time.Since(before.since) < least {
		return
	}
	d.out[name] = absence{since: time.Now()}
	d.assign()
}

// takeBack lets the process that should own a partition take part again, because somebody has reached it.
func (d *Directory) takeBack(partition int) {
	d.mu.Lock()
	defer d.mu.Unlock()

	name := d.whole[partition]
	if d.isOut(name) {
		d.out[name] = absence{since: d.out[name].since, over: true}
		d.assign()
	}
}

// there makes calls in another process.
type there struct {
	d    *Directory
	name string
}

// Do implements call.Owner.
func (t there) Do(ctx context.Context, c owner.Call) (owner.Answer, error) {
	answer, err := t.d.cfg.Peer(t.name).Do(ctx, c)
	var moved *link.Moved
	switch {
	case err == nil:
	case errors.Is(err, link.ErrUnreachable):
		t.d.forget(c.Partition)
		t.d.suspect(t.name, err)
	case errors.As(err, &moved):
		t.d.takeBack(c.Partition) // it was asked because another one is left out, which it can reach
		t.d.move(c.Partition, moved.To)
	case errors.Is(err, owner.ErrNotOwner):
		t.d.forget(c.Partition) // it has just lost the partition
	}

	return answer, err
}

// Do makes a call of this process or of another one, if this process owns the partition or should. It implements
// call.Owner and link.Process.
func (d *Directory) Do(ctx context.Context, c owner.Call) (owner.Answer, error) {
	local := d.cfg.Local
	if local == nil {
		return owner.Answer{}, owner.ErrNotOwner
	}

	if !local.Owns(c.Partition) {
		if err := d.claimFor(ctx, c.Partition); err != nil {
			return owner.Answer{}, err
		}
	}

	answer, err := local.Do(ctx, c)
	if errors.Is(err, owner.ErrNotOwner) {
		d.takeBack(c.Partition) // another process has claimed it meanwhile
	}

	return answer, err
}

// Release implements link.Process.
func (d *Directory) Release(ctx context.Context, to string, partitions []int) error {
	if d.cfg.Local == nil {
		return nil
	}

	// Before they are released: who asks for one of them from now on is sent on.
	for _, partition := range partitions {
		d.move(partition, to)
	}

	return d.cfg.Local.Release(ctx, partitions...)
}

// claimFor claims a partition for which a call came. The error is owner.ErrNotOwner if another process should own it,
// and can be reached.
func (d *Directory) claimFor(ctx context.Context, partition int) error {
	// Who sent the call may know already that the process of the ring cannot be reached.
	for name := d.nameOf(partition); name != d.cfg.Self; name = d.nameOf(partition) {
		if name == "" {
			return owner.ErrNotOwner
		}
		if d.reach(ctx, name) {
			return &link.Moved{To: name}
		}
		if err := ctx.Err(); err != nil {
			return fmt.Errorf("owners: %w", context.Cause(ctx))
		}
		d.forget(partition)
	}

	return d.take(ctx, partition)
}

// reach reports whether a process can be reached. If not, it is left out.
func (d *Directory) reach(ctx context.Context, name string) bool {
	ctx, cancel := context.WithTimeout(ctx, askWithin)
	defer cancel()

	err := d.cfg.Peer(name).Ping(ctx)
	if !errors.Is(err, link.ErrUnreachable) {
		return true
	}
	d.leaveOut(name, err)

	d.mu.Lock()
	defer d.mu.Unlock()

	return !d.isOut(name) // it was left out a moment ago, so now it counts as slow
}

// take claims partitions that nobody else should own.
func (d *Directory) take(ctx context.Context, partitions ...int) error {
	select {
	case d.taking <- struct{}{}:
		defer func() { <-d.taking }()
	case <-ctx.Done():
		return fmt.Errorf("owners: %w", context.Cause(ctx))
	}

	missing := slices.DeleteFunc(slices.Clone(partitions), d.cfg.Local.Owns)
	if len(missing) == 0 {
		return nil
	}
	d.askOthers(ctx, missing)

	ctx, cancel := context.WithTimeout(ctx, claimWithin)
	defer cancel()

	return d.cfg.Local.Own(ctx, missing...)
}

// askOthers asks all other processes to give partitions up, and returns when each has answered or could not be reached.
func (d *Directory) askOthers(ctx context.Context, partitions []int) {
	ctx, cancel := context.WithTimeout(ctx, askWithin)
	defer cancel()

	var wg sync.WaitGroup
	for _, name := range d.others() {
		wg.Go(func() {
			err := d.cfg.Peer(name).Release(ctx, d.cfg.Self, partitions)
			if errors.Is(err, link.ErrUnreachable) {
				d.suspect(name, err)
			}
		})
	}
	wg.Wait()
}

// others returns the other processes that are not left out.
func (d *Directory) others() []string {
	d.mu.Lock()
	defer d.mu.Unlock()

	return slices.DeleteFunc(slices.Clone(d.all), func(name string) bool { return name == d.cfg.Self || d.isOut(name) })
}

// pullEach takes the partitions that the ring gives to this process, whenever it changes.
func (d *Directory) pullEach() {
	for {
		select {
		case <-d.pull:
		case <-d.ctx.Done():
			return
		}

		for !d.pullOnce() {
			if !wake.Wait(d.ctx, retryEvery, d.pull) {
				return
			}
		}
	}
}

// pullOnce takes what this process should own. It reports whether that is so now.
func (d *Directory) pullOnce() bool {
	var mine []int
	d.mu.Lock()
	for id, name := range d.of {
		if name == d.cfg.Self {
			mine = append(mine, id)
		}
	}
	d.mu.Unlock()

	return d.take(d.ctx, mine...) == nil
}
