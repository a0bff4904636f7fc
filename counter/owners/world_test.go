package owners_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"headcount/counter"
	"headcount/counter/call"
	"headcount/counter/link"
	"headcount/counter/owner"
	"headcount/counter/owners"
	"headcount/internal/rows"
	"headcount/internal/rows/rowsmem"
	"headcount/internal/testkit"
	"headcount/internal/wake"
)

func TestMain(m *testing.M) { testkit.Main(m) }

var rules = func() *counter.Rules {
	parsed, err := counter.ParseRules([]byte(`{"rules": [{"match": "*", "kind": "sum"}]}`))
	if err != nil {
		panic(err)
	}

	return parsed
}()

// roundTrip is how long a commit and a claim take.
const roundTrip = time.Millisecond

// world is a store, and processes over it with links between them.
type world struct {
	t     *testing.T
	store *rowsmem.Store

	mu        sync.Mutex // guards the fields below
	processes map[string]*process
	claims    int                // so far
	cut       map[[2]string]bool // pairs of processes between which nothing passes
}

// process is one process. It owns partitions unless it is a gateway alone.
type process struct {
	w         *world
	name      string
	owner     *owner.Owner // nil for a gateway
	directory *owners.Directory
	client    *link.Client
	server    *link.Server
	caller    *call.Caller

	dead   chan struct{} // closed by kill
	serves sync.WaitGroup

	mu     sync.Mutex // guards the fields below
	frozen chan struct{}
	conns  []net.Conn
}

func newWorld(t *testing.T) *world {
	t.Helper()
	w := &world{t: t, store: rowsmem.New(rowsmem.Config{}), processes: map[string]*process{}, cut: map[[2]string]bool{}}
	t.Cleanup(func() {
		for _, p := range w.processes {
			p.thaw()
			p.close()
		}
	})

	return w
}

// start begins a process.
func (w *world) start(name string, owning bool) *process {
	p := &process{w: w, name: name, dead: make(chan struct{})}
	cfg := owners.Config{Self: name, Peer: func(name string) owners.Peer { return p.client.To(name) }}
	if owning {
		p.owner = owner.New(&store{w.store, p}, owner.Config{Name: name, VerifyEvery: -1})
		cfg.Local = p.owner
	}
	p.client = link.NewClient(p.dial, time.Now)
	p.directory = owners.New(cfg)
	p.server = link.NewServer(p.directory, time.Now)
	p.caller = call.New(p.directory, call.Config{Stream: name})

	w.mu.Lock()
	w.processes[name] = p
	w.mu.Unlock()

	return p
}

// ring notifies all processes who owns, as their leases do after a while.
func (w *world) ring(owning ...string) {
	w.mu.Lock()
	defer w.mu.Unlock()

	var all []string
	for name, p := range w.processes {
		if !p.isDead() {
			all = append(all, name)
		}
	}
	for _, p := range w.processes {
		p.directory.SetProcesses(owning, all)
	}
}

// ringInOrder notifies one process after another who owns, and then waits for a while.
func (w *world) ringInOrder(order []string, owning ...string) {
	for _, name := range order {
		w.processes[name].directory.SetProcesses(owning, order)
		time.Sleep(300 * time.Millisecond)
	}
	time.Sleep(time.Second)
}

// separate cuts two processes off from each other, or ends that.
func (w *world) separate(a, b string, cut bool) {
	w.mu.Lock()
	defer w.mu.Unlock()

	w.cut[[2]string{a, b}] = cut
	w.cut[[2]string{b, a}] = cut
}

func (w *world) isCut(a, b string) bool {
	w.mu.Lock()
	defer w.mu.Unlock()

	return w.cut[[2]string{a, b}]
}

// dial makes a link of p to another process.
func (p *process) dial(ctx context.Context, addr string) (io.ReadWriteCloser, []byte, error) {
	p.w.mu.Lock()
	to := p.w.processes[addr]
	p.w.mu.Unlock()

	for p.w.isCut(p.name, addr) || p.stands() || to.stands() {
		if !wake.Wait(ctx, time.Millisecond, nil) {
			return nil, nil, context.Cause(ctx)
		}
	}
	if to.isDead() || p.isDead() {
		return nil, nil, syscall.ECONNREFUSED
	}

	mine, theirs := net.Pipe()
	p.keep(mine)
	to.keep(theirs)
	to.serves.Go(func() { to.server.Serve(&end{theirs, to, p}, []byte("key")) })

	return &end{mine, p, to}, []byte("key"), nil
}

func (p *process) keep(conn net.Conn) {
	p.mu.Lock()
	defer p.mu.Unlock()

	p.conns = append(p.conns, conn)
}

// end is one end of a link. It passes nothing while one of the processes stands still, or they are cut off from each
// other.
type end struct {
	net.Conn
	own, other *process
}

func (e *end) Read(b []byte) (int, error) {
	n, err := e.Conn.Read(b)
	e.own.pass()

	return n, err
}

func (e *end) Write(b []byte) (int, error) {
	e.own.pass()
	e.other.pass()
	for e.own.w.isCut(e.own.name, e.other.name) {
		time.Sleep(time.Millisecond)
		if e.own.isDead() || e.other.isDead() {
			return 0, io.ErrClosedPipe
		}
	}

	return e.Conn.Write(b)
}

// pass waits while the process stands still.
func (p *process) pass() {
	p.mu.Lock()
	frozen := p.frozen
	p.mu.Unlock()

	if frozen != nil {
		select {
		case <-frozen:
		case <-p.dead:
		}
	}
}

// stands reports whether the process stands still.
func (p *process) stands() bool {
	p.mu.Lock()
	defer p.mu.Unlock()

	return p.frozen != nil && !p.isDead()
}

func (p *process) freeze() {
	p.mu.Lock()
	defer p.mu.Unlock()

	if p.frozen == nil {
		p.frozen = make(chan struct{})
	}
}

func (p *process) thaw() {
	p.mu.Lock()
	defer p.mu.Unlock()

	if p.frozen != nil {
		close(p.frozen)
		p.frozen = nil
	}
}

func (p *process) isDead() bool {
	select {
	case <-p.dead:
		return true
	default:
		return false
	}
}

// kill ends the process at once: its connections break, and it writes nothing more.
func (p *process) kill() {
	close(p.dead)
	p.mu.Lock()
	defer p.mu.Unlock()

	for _, conn := range p.conns {
		_ = conn.Close()
	}
}

// close ends everything that runs in the process.
func (p *process) close() {
	if !p.isDead() {
		p.kill()
	}
	p.directory.Close()
	p.client.Close()
	p.server.Close()
	p.serves.Wait()
	if p.owner != nil {
		p.owner.Close()
	}
}

// store is how a process reaches the store.
type store struct {
	*rowsmem.Store
	p *process
}

var errDead = fmt.Errorf("%w: the process is dead", rows.ErrUnavailable)

func (s *store) Claim(ctx context.Context, name string, partitions []rows.Former) ([]rows.Claim, error) {
	time.Sleep(roundTrip)
	s.p.pass()
	if s.p.isDead() {
		return nil, errDead
	}
	s.p.w.mu.Lock()
	s.p.w.claims += len(partitions)
	s.p.w.mu.Unlock()

	return s.Store.Claim(ctx, name, partitions)
}

func (s *store) Commit(ctx context.Context, commits []rows.Commit) []error {
	time.Sleep(roundTrip)
	s.p.pass()
	if s.p.isDead() {
		return slices.Repeat([]error{errDead}, len(commits))
	}

	return s.Store.Commit(ctx, commits)
}

// load increments a counter of each fourth partition all the time, through one gateway.
type load struct {
	stop context.CancelFunc
	wg   sync.WaitGroup

	mu      sync.Mutex // guards the fields below
	made    map[string]int64
	unknown map[string]int64
	failed  int
	longest time.Duration // the longest time that a call waited
}

// keys has one key for each partition.
var keys = func() []string {
	keys := make([]string, rows.Partitions)
	for i, found := 0, 0; found < rows.Partitions; i++ {
		key := fmt.Sprint("k", i)
		if at := rows.PartitionOf(key); keys[at] == "" {
			keys[at] = key
			found++
		}
	}

	return keys
}()

// change starts to increment counters through p.
func (p *process) change(each time.Duration) *load {
	ctx, stop := context.WithCancel(context.Background())
	l := &load{stop: stop, made: map[string]int64{}, unknown: map[string]int64{}}
	for partition, key := range keys {
		if partition%4 > 0 {
			continue // a part of the partitions suffices
		}
		l.wg.Go(func() {
			for wake.Wait(ctx, each, nil) {
				l.increment(p, partition, key)
			}
		})
	}

	return l
}

func (l *load) increment(p *process, partition int, key string) {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()

	change := counter.Change{Key: key, Rule: rules.Find(key), Verb: counter.Add, Delta: 1}
	began := time.Now()
	answer, err := p.caller.Do(ctx, owner.Call{
		Partition: partition, Ops: []counter.Op{{Changes: []counter.Change{change}}},
	})
	took := time.Since(began)

	l.mu.Lock()
	defer l.mu.Unlock()
	l.longest = max(l.longest, took)
	isMade := err == nil && answer.Results[0].Err == nil
	switch {
	case isMade:
		l.made[key]++
	case errors.Is(err, counter.ErrBusy):
		l.failed++
	default: // without an answer it may have been made
		l.failed++
		l.unknown[key]++
	}
}

// forget returns the longest wait since the last call of forget.
func (l *load) forget() time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()

	longest := l.longest
	l.longest = 0

	return longest
}

// end ends the load, and compares the values with what was acknowledged.
func (w *world) end(loads ...*load) {
	w.t.Helper()
	for _, l := range loads {
		l.stop()
		l.wg.Wait()
	}

	reader := owner.NewReader(w.store, rows.PartitionOf)
	found, err := reader.Read(context.Background(), keys, "", 0)
	if err != nil {
		w.t.Fatal(err)
	}

	for _, r := range found {
		least, most := int64(0), int64(0)
		for _, l := range loads {
			least += l.made[r.Key]
			most += l.made[r.Key] + l.unknown[r.Key]
		}

		if v := r.Counter.Value; v < least || v > most {
			w.t.Errorf("%s is %d, want %d to %d", r.Key, v, least, most)
		}
	}
}
