// Package owners is the directory of which process owns which partition of the counters.
//
// A ring over the processes says which one should own a partition, and the claim in the store says which one does
// (package rows). A claim is safe at any moment, so this package affects only speed: a wrong guess costs a caller some
// time, but never causes a wrong value.
//
// # Taking over
//
// A process takes over a partition that the ring assigns to it: at once when the ring changes, or when the first call
// for the partition arrives. Before it claims, it asks all other processes that it can reach to give up the partition.
// So the former owner first writes what it has acknowledged, and calls move without an error.
//
// Each process reads the leases for itself, so for up to a second processes may have different rings. A process that is
// called but does not own the partition names the process that does: the one that has asked it to give up the
// partition, or the one in its own ring. The caller turns there at once, and keeps doing so until its own ring changes.
//
// # Unreachable processes
//
// When a process finds that another one refuses connections, or does not answer for a second, it asks all others. If
// none can reach it, they all leave it out of their rings for some seconds, and the next process in the ring takes its
// partitions. If any can, only a link is cut: calls over that link fail, and no partition moves (as in SWIM by Das,
// Gupta and Motivala, 2002). If the process has died, its lease ends some seconds later, and all rings change.
//
// A slow machine must not make partitions move back and forth. So a process may be left out again only 10 s later, or 2
// s later if it refuses connections. It takes part again at once when it turns out to be alive.
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
	// quietFor is the minimum time before a process is left out again. It is refusedFor for a process that refuses
	// connections, because that is rarely a mistake.
	quietFor   = 10 * time.Second
	refusedFor = 2 * time.Second
	// askWithin limits how long the others are asked, and so how long a process that does not answer delays a claim.
	askWithin = time.Second
	// probeWithin gives the others enough time to find out that a process does not answer.
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

// Directory knows the owners, as far as this process does, and makes the local owner own the partitions that it should.
// Its methods may be called from any goroutine.
type Directory struct {
	cfg  Config
	ctx  context.Context // ends with Close
	stop context.CancelFunc
	wg   sync.WaitGroup // waits for pullEach, and for confirm of each suspected process
	pull chan struct{}  // has capacity 1: the ring has changed

	// taking is a lock whose waiters may give up: this process makes one claim at a time.
	taking chan struct{}

	mu     sync.Mutex // guards the fields below
	owning []string   // the processes with the role
	all    []string   // these, and others that may still own partitions
	out    map[string]absence
	doubts map[string]bool // processes about which the others are being asked
	whole  []string        // the owner of each partition by the ring; empty: there is none
	of     []string        // likewise, without those that are left out
	moved  map[int]string  // owners that other processes have named, until the ring changes
}

// absence records that a process is left out.
type absence struct {
	since time.Time
	over  bool // the process takes part again, and is remembered only for quietFor
}

// New returns a Directory without any processes. The caller must call Close.
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
	// A process that owns nothing has nothing to take over.
	if cfg.Local != nil {
		d.wg.Go(d.pullEach)
	}

	return d
}

// Close ends the claims of this process. The local owner keeps what it owns. It is called only once.
func (d *Directory) Close() {
	d.stop()
	d.wg.Wait()
}

// SetProcesses sets which processes should own partitions, and which exist at all: one that is shutting down may keep
// partitions until it is asked for them.
func (d *Directory) SetProcesses(owning, all []string) {
	d.mu.Lock()
	defer d.mu.Unlock()

	d.owning = slices.Clone(owning)
	d.all = slices.Clone(all)
	for name := range d.out {
		if !slices.Contains(all, name) {
			// If a process starts again under that name, it is another one, of which nothing is known yet.
			delete(d.out, name)
		}
	}
	d.whole = assign(d.owning)
	d.assignLocked()
}

// assign returns the owner of each partition in the ring of the given processes.
func assign(owning []string) []string {
	of := make([]string, rows.Partitions)
	table := ring.New(owning, nil, rows.Partitions, 1)
	for id := range of {
		of[id], _ = table.Node(id)
	}

	return of
}

// assignLocked rebuilds the ring from the processes that are not left out.
func (d *Directory) assignLocked() {
	d.of = d.whole
	if present := slices.DeleteFunc(slices.Clone(d.owning), d.isOutLocked); len(present) < len(d.owning) {
		d.of = assign(present)
	}
	// What others have named was right by the former ring.
	clear(d.moved)
	wake.Signal(d.pull)
}

// isOutLocked reports whether a process is left out.
func (d *Directory) isOutLocked(name string) bool {
	gone, is := d.out[name]

	return is && !gone.over
}

// OwnerOf implements call.Owners.
func (d *Directory) OwnerOf(partition int) call.Owner {
	// The process that should own it instead has not asked for it yet.
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

	// No timer ends an absence: it ends when somebody asks for an owner.
	d.readmitLocked()
	if name, is := d.moved[partition]; is {
		return name
	}
	// No process is known yet.
	if d.of == nil {
		return ""
	}

	return d.of[partition]
}

// move records the owner that another process has named for a partition.
func (d *Directory) move(partition int, to string) {
	d.mu.Lock()
	defer d.mu.Unlock()

	// Without the role this process cannot own it, so that whoever names it is wrong.
	mine := to == d.cfg.Self && d.cfg.Local == nil
	if !mine && slices.Contains(d.all, to) {
		d.moved[partition] = to
	}
}

// forget drops what other processes have said about a partition.
func (d *Directory) forget(partition int) {
	d.mu.Lock()
	defer d.mu.Unlock()

	delete(d.moved, partition)
}

// readmitLocked ends the absence of processes that were left out for long enough.
func (d *Directory) readmitLocked() {
	changed := false
	for name, gone := range d.out {
		age := time.Since(gone.since)
		if age >= leftOut && !gone.over {
			d.out[name] = absence{since: gone.since, over: true}
			changed = true
		}
		// Until then leaveOut has to know how recent the last absence was.
		if age >= quietFor {
			delete(d.out, name)
		}
	}
	if changed {
		d.assignLocked()
	}
}

// suspect asks the others whether they can reach a process that this one cannot, and leaves it out if none can.
func (d *Directory) suspect(name string, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()

	// All calls to the process fail at once, and one question to the others is enough.
	if d.doubts[name] || d.isOutLocked(name) || d.ctx.Err() != nil {
		return
	}
	d.doubts[name] = true
	d.wg.Go(func() {
		if !d.othersReach(name) {
			d.leaveOut(name, err)
		}

		// Only now, when it may be left out, so that no second question about it begins in between.
		d.mu.Lock()
		defer d.mu.Unlock()
		delete(d.doubts, name)
	})
}

// othersReach reports whether any of the other processes can reach the named one.
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
				// One process that reaches the named one is enough, so the others need not go on.
				reached.Store(true)
				cancel()
			}
		})
	}
	wg.Wait()

	return reached.Load()
}

// Probe implements link.Process. If this process cannot reach the named one either, it leaves it out as well.
func (d *Directory) Probe(ctx context.Context, name string) bool {
	return name == d.cfg.Self || d.reach(ctx, name)
}

// leaveOut leaves an unreachable process out of the ring, unless it was left out too recently.
func (d *Directory) leaveOut(name string, err error) {
	least := quietFor
	// The machine has answered that nothing listens, so this is no matter of a slow network.
	if errors.Is(err, syscall.ECONNREFUSED) {
		least = refusedFor
	}

	d.mu.Lock()
	defer d.mu.Unlock()

	d.readmitLocked()
	if before, is := d.out[name]; is && time.Since(before.since) < least {
		return
	}
	d.out[name] = absence{since: time.Now()}
	d.assignLocked()
}

// takeBack ends the absence of the process that should own a partition, because another process has reached it.
func (d *Directory) takeBack(partition int) {
	d.mu.Lock()
	defer d.mu.Unlock()

	name := d.whole[partition]
	if d.isOutLocked(name) {
		// The absence stays known, so that the process is not left out again at once.
		d.out[name] = absence{since: d.out[name].since, over: true}
		d.assignLocked()
	}
}

// there makes calls to another process.
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
		// When the call is repeated, the ring has left the process out if nobody reaches it.
		t.d.forget(c.Partition)
		t.d.suspect(t.name, err)
	case errors.As(err, &moved):
		t.d.takeBack(c.Partition) // it was asked because another process is left out, but it can reach that process
		t.d.move(c.Partition, moved.To)
	case errors.Is(err, owner.ErrNotOwner):
		t.d.forget(c.Partition) // it has just lost the partition
	}

	return answer, err
}

// Do makes a call, of this process or another one, if this process owns the partition or should own it. It implements
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
		d.takeBack(c.Partition) // another process has claimed it in the meantime
	}

	return answer, err
}

// Release implements link.Process.
func (d *Directory) Release(ctx context.Context, to string, partitions []int) error {
	if d.cfg.Local == nil {
		return nil
	}

	// Record the new owner before the release, so that calls from now on are sent there.
	for _, partition := range partitions {
		d.move(partition, to)
	}

	return d.cfg.Local.Release(ctx, partitions...)
}

// claimFor claims a partition because a call for it has arrived. The error is owner.ErrNotOwner if another process
// should own the partition and can be reached.
func (d *Directory) claimFor(ctx context.Context, partition int) error {
	// The sender may already know that the process in the ring cannot be reached.
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
		// Another process may have named the one that nobody reaches, so the ring decides again.
		d.forget(partition)
	}

	return d.take(ctx, partition)
}

// reach reports whether a process can be reached, and leaves it out if not.
func (d *Directory) reach(ctx context.Context, name string) bool {
	ctx, cancel := context.WithTimeout(ctx, askWithin)
	defer cancel()

	err := d.cfg.Peer(name).Ping(ctx)
	// Any other error comes from a process that lives, or from a caller with too little time.
	if !errors.Is(err, link.ErrUnreachable) {
		return true
	}
	d.leaveOut(name, err)

	d.mu.Lock()
	defer d.mu.Unlock()

	return !d.isOutLocked(name) // if it was left out too recently, it counts as slow and not as unreachable
}

// take claims the partitions that no other process should own.
func (d *Directory) take(ctx context.Context, partitions ...int) error {
	select {
	case d.taking <- struct{}{}:
		defer func() { <-d.taking }()
	case <-ctx.Done():
		return fmt.Errorf("owners: %w", context.Cause(ctx))
	}

	// Another caller may have claimed some of them while this one waited.
	missing := slices.DeleteFunc(slices.Clone(partitions), d.cfg.Local.Owns)
	if len(missing) == 0 {
		return nil
	}
	d.askOthers(ctx, missing)

	ctx, cancel := context.WithTimeout(ctx, claimWithin)
	defer cancel()

	return d.cfg.Local.Own(ctx, missing...)
}

// askOthers asks all other processes to give up partitions, and returns when each has answered or proved unreachable.
func (d *Directory) askOthers(ctx context.Context, partitions []int) {
	ctx, cancel := context.WithTimeout(ctx, askWithin)
	defer cancel()

	var wg sync.WaitGroup
	for _, name := range d.others() {
		wg.Go(func() {
			// Errors do not matter: the claim is safe even against an owner that keeps its partition.
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

	ownOrOut := func(name string) bool { return name == d.cfg.Self || d.isOutLocked(name) }

	return slices.DeleteFunc(slices.Clone(d.all), ownOrOut)
}

// pullEach takes the partitions that the ring assigns to this process, whenever the ring changes.
func (d *Directory) pullEach() {
	for {
		select {
		case <-d.pull:
		case <-d.ctx.Done():
			return
		}

		// A further change of the ring ends the pause.
		for !d.pullOnce() {
			if !wake.Wait(d.ctx, retryEvery, d.pull) {
				return
			}
		}
	}
}

// pullOnce takes the partitions that this process should own, and reports whether it owns them all now.
func (d *Directory) pullOnce() bool {
	var mine []int
	d.mu.Lock()
	for id, name := range d.of {
		if name == d.cfg.Self {
			mine = append(mine, id)
		}
	}
	d.mu.Unlock()

	// Without the lock, since a claim may take as long as the store does.
	return d.take(d.ctx, mine...) == nil
}
