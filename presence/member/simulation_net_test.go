package member

import (
	"bytes"
	"context"
	"errors"
	"hash/fnv"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"sync"
	"sync/atomic"
	"syscall"
	"testing/synctest"
	"time"
)

// errDead is the error of every call of a killed process, so that its goroutines end without any effect.
var errDead = errors.New("the process is dead")

// network connects the processes and clients of one simulation. Its time is that of the bubble, and its random numbers
// come from the seed.
type network struct {
	seed    uint64
	weather atomic.Pointer[weather]
	// cuts maps a pair of names ([2]string) to a channel (chan struct{}) that is closed when the link is healed. Until
	// then nothing from the first reaches the second: datagrams are lost, and calls arrive afterwards, as TCP delivers
	// them.
	cuts sync.Map

	mu    sync.Mutex
	lives map[string]*life // the present one of each name
}

// weather says which fractions of the datagrams are lost, repeated and late. Calls and connections, which use TCP, are
// only slowed down.
type weather struct {
	lost, repeated, late float64
	delay                time.Duration // of those that are late, at most
}

func newNetwork(seed uint64) *network {
	n := &network{seed: seed, lives: map[string]*life{}}
	n.weather.Store(&weather{})

	return n
}

// chance returns the source of random numbers with that name.
func chance(seed uint64, name string) *rand.Rand {
	h := fnv.New64a()
	_, _ = io.WriteString(h, name)

	return rand.New(rand.NewPCG(seed, h.Sum64()))
}

// life is one run of one process, as the rest of the world sees it.
type life struct {
	name string
	net  *network
	dead chan struct{}

	mu       sync.Mutex
	ice      chan struct{} // closed when the life is thawed; nil while it is not frozen
	ends     map[*pipeEnd]struct{}
	socket   *socket
	listener *listener
	calls    http.Handler

	chance *rand.Rand // under mu
}

// live begins a life, which replaces the former life of that name.
func (n *network) live(name string, incarnation uint64) *life {
	l := &life{
		name: name, net: n, dead: make(chan struct{}), ends: map[*pipeEnd]struct{}{},
		// Each life has random numbers of its own, so the order of its calls does not change those of other lives.
		chance: chance(n.seed+incarnation, name),
	}
	l.socket = &socket{l: l, in: make(chan []byte, 4096), closed: make(chan struct{})}
	l.listener = &listener{l: l, in: make(chan net.Conn, 256), closed: make(chan struct{})}

	n.mu.Lock()
	defer n.mu.Unlock()
	n.lives[name] = l

	return l
}

func (n *network) find(name string) *life {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.lives[name]
}

// cut reports whether a link is cut, and returns a channel that is closed when the link is healed.
func (n *network) cut(from, to string) (healed chan struct{}, cut bool) {
	until, cut := n.cuts.Load([2]string{from, to})
	if !cut {
		return nil, false
	}

	return until.(chan struct{}), true
}

func (n *network) cutLink(from, to string) { n.cuts.Store([2]string{from, to}, make(chan struct{})) }

func (n *network) healLink(from, to string) {
	if until, cut := n.cuts.LoadAndDelete([2]string{from, to}); cut {
		close(until.(chan struct{}))
	}
}

// lost reports whether a datagram from one name to another is lost.
func (n *network) lost(from, to string) bool {
	_, cut := n.cut(from, to)
	return cut
}

// kill ends the life at once. If noticed, the machine still works and closes the connections, so that clients notice.
// Otherwise clients just receive nothing any more.
func (l *life) kill(noticed bool) {
	l.mu.Lock()
	defer l.mu.Unlock()

	close(l.dead)

	for e := range l.ends {
		if noticed {
			_ = e.Conn.Close()
		} else {
			e.muteLocked()
		}
	}
}

// freeze suspends the life. What is being done at this moment is done to its end: a goroutine that stops with a lock
// would stop the clock, since synctest does not take a goroutine that waits for a lock for idle.
func (l *life) freeze() {
	synctest.Wait()

	l.mu.Lock()
	defer l.mu.Unlock()

	l.ice = make(chan struct{})
}

func (l *life) thaw() {
	l.mu.Lock()
	defer l.mu.Unlock()

	if l.ice != nil {
		close(l.ice)
		l.ice = nil
	}
}

// pass waits while the life is frozen, and fails if the life has ended. It takes no context, since the timers of a
// suspended process do not run either.
func (l *life) pass() error {
	for {
		l.mu.Lock()
		ice := l.ice
		l.mu.Unlock()

		if ice != nil {
			select {
			case <-ice:
				continue
			case <-l.dead:
			}
		}

		select {
		case <-l.dead:
			return errDead
		default:
			return nil
		}
	}
}

// moving reports whether the life receives and sends datagrams.
func (l *life) moving() bool {
	select {
	case <-l.dead:
		return false
	default:
	}

	l.mu.Lock()
	defer l.mu.Unlock()
	return l.ice == nil
}

// toss returns a random number below 1, and a duration below d.
func (l *life) toss(d time.Duration) (float64, time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.chance.Float64(), time.Duration(l.chance.Int64N(int64(d) + 1))
}

// socket is a life's net.PacketConn.
type socket struct {
	l      *life
	in     chan []byte // datagrams that do not fit are lost
	once   sync.Once
	closed chan struct{}
}

type address string

// Resolve implements heartbeat.Resolver.
func (*network) Resolve(_ context.Context, name string) (net.Addr, error) { return address(name), nil }

func (a address) Network() string { return "memory" }
func (a address) String() string  { return string(a) }

func (s *socket) WriteTo(b []byte, to net.Addr) (int, error) {
	if !s.l.moving() || s.l.net.lost(s.l.name, to.String()) {
		return len(b), nil
	}

	w := s.l.net.weather.Load()
	luck, _ := s.l.toss(0)
	if luck < w.lost {
		return len(b), nil
	}

	copies := 1
	luck, _ = s.l.toss(0)
	if luck < w.repeated {
		copies = 2
	}

	b = bytes.Clone(b)
	for range copies {
		_, delay := s.l.toss(time.Millisecond)
		luck, more := s.l.toss(w.delay)
		if luck < w.late {
			delay += more
		}

		// The address is resolved on arrival: the datagram may reach the next life of that name.
		time.AfterFunc(delay, func() {
			if l := s.l.net.find(to.String()); l != nil && l.moving() {
				select {
				case l.socket.in <- b:
				default:
				}
			}
		})
	}

	return len(b), nil
}

func (s *socket) ReadFrom(b []byte) (int, net.Addr, error) {
	select {
	case d := <-s.in:
		return copy(b, d), address(""), nil
	case <-s.closed:
	case <-s.l.dead:
	}

	return 0, nil, net.ErrClosed
}

func (s *socket) LocalAddr() net.Addr              { return address(s.l.name) }
func (s *socket) SetDeadline(time.Time) error      { return nil }
func (s *socket) SetReadDeadline(time.Time) error  { return nil }
func (s *socket) SetWriteDeadline(time.Time) error { return nil }

func (s *socket) Close() error {
	s.once.Do(func() { close(s.closed) })
	return nil
}

// RoundTrip implements http.RoundTripper for the calls between processes.
func (l *life) RoundTrip(req *http.Request) (*http.Response, error) {
	body, err := io.ReadAll(req.Body)
	if err != nil {
		return nil, err
	}
	if err := l.pass(); err != nil { // the process stood still, or has ended, before it could send anything
		return nil, err
	}

	ctx := req.Context()
	luck, delay := l.toss(2 * time.Millisecond)
	if err := wait(ctx, delay); err != nil {
		return nil, err
	}

	to := l.net.find(req.URL.Host)
	if to == nil || to.ended() {
		return nil, &net.OpError{Op: "dial", Net: "memory", Err: syscall.ECONNREFUSED}
	}

	healed, cut := l.net.cut(l.name, to.name)

	// Of the lost calls half do not arrive, and half arrive and lose their answer.
	lost := l.net.weather.Load().lost
	if luck < lost/8 {
		return nil, syscall.ECONNRESET
	}
	answerLost := luck < lost/4

	answer := make(chan *http.Response, 1)
	go func() {
		// The link may heal long after the caller gave up. The call arrives all the same, as TCP delivers it.
		if cut {
			select {
			case <-healed:
			case <-l.dead: // its connections have ended with it
				return
			}
		}

		if to.pass() != nil {
			return
		}

		in := req.Clone(context.WithoutCancel(ctx))
		in.Body = io.NopCloser(bytes.NewReader(body))
		in.RequestURI = req.URL.RequestURI()
		in.RemoteAddr = l.name
		in.Host = req.URL.Host

		w := httptest.NewRecorder()
		to.calls.ServeHTTP(w, in)
		if to.pass() == nil {
			answer <- w.Result()
		}
	}()

	var resp *http.Response
	select {
	case resp = <-answer:
	case <-to.dead:
		return nil, syscall.ECONNRESET
	case <-ctx.Done():
		return nil, ctx.Err()
	}

	if err := l.pass(); err != nil {
		return nil, err
	}
	if answerLost {
		return nil, syscall.ECONNRESET
	}

	return resp, nil
}

func (l *life) ended() bool {
	select {
	case <-l.dead:
		return true
	default:
		return false
	}
}

func wait(ctx context.Context, d time.Duration) error {
	if d <= 0 {
		return ctx.Err()
	}
	t := time.NewTimer(d)
	defer t.Stop()

	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// listener accepts the clients of a life.
type listener struct {
	l      *life
	in     chan net.Conn
	once   sync.Once
	closed chan struct{}
}

func (n *listener) Accept() (net.Conn, error) {
	select {
	case c := <-n.in:
		return c, nil
	case <-n.closed:
	case <-n.l.dead:
	}

	return nil, net.ErrClosed
}

func (n *listener) Close() error   { n.once.Do(func() { close(n.closed) }); return nil }
func (n *listener) Addr() net.Addr { return address(n.l.name) }

// dial connects a client to the life of that name.
func (n *network) dial(name string) (*pipeEnd, error) {
	refused := &net.OpError{Op: "dial", Net: "memory", Err: syscall.ECONNREFUSED}
	l := n.find(name)
	if l == nil {
		return nil, refused
	}
	here, there := net.Pipe()
	server, client := &pipeEnd{Conn: there, l: l}, &pipeEnd{Conn: here}

	l.mu.Lock()
	defer l.mu.Unlock()

	select {
	case <-l.dead:
	case <-l.listener.closed:
	default:
		select {
		// A full backlog refuses clients, as the kernel does.
		case l.listener.in <- server:
			l.ends[server] = struct{}{}
			return client, nil
		default:
		}
	}

	return nil, refused
}

// pipeEnd is one end of a connection between a client and a gateway.
type pipeEnd struct {
	net.Conn
	l *life // the life that this end belongs to; nil for a client's

	mu    sync.Mutex
	muted bool
}

// mute makes this side silent: it neither sends nor receives anything any more, and the other side does not notice.
func (e *pipeEnd) mute() {
	if e.l != nil {
		e.l.mu.Lock()
		defer e.l.mu.Unlock()
	}
	e.muteLocked()
}

func (e *pipeEnd) muteLocked() {
	e.mu.Lock()
	defer e.mu.Unlock()

	e.muted = true
	// A deadline in the past ends calls that already wait.
	_ = e.Conn.SetDeadline(time.Unix(1, 0))
}

func (e *pipeEnd) gone() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.muted
}

func (e *pipeEnd) pass() error {
	if e.gone() {
		return errDead
	}

	if e.l != nil {
		return e.l.pass()
	}

	return nil
}

func (e *pipeEnd) Read(b []byte) (int, error) {
	n, err := e.Conn.Read(b)
	// A process that was frozen or killed during the read must not see the bytes.
	if late := e.pass(); late != nil {
		return 0, late
	}

	return n, err
}

func (e *pipeEnd) Write(b []byte) (int, error) {
	if err := e.pass(); err != nil {
		return 0, err
	}

	return e.Conn.Write(b)
}

func (e *pipeEnd) Close() error {
	if e.l != nil {
		e.l.mu.Lock()
		delete(e.l.ends, e)
		e.l.mu.Unlock()
	}

	if e.gone() {
		return nil
	}

	return e.Conn.Close()
}

func (e *pipeEnd) deadline(set func(time.Time) error, t time.Time) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.muted {
		return nil
	}

	return set(t)
}

func (e *pipeEnd) SetDeadline(t time.Time) error     { return e.deadline(e.Conn.SetDeadline, t) }
func (e *pipeEnd) SetReadDeadline(t time.Time) error { return e.deadline(e.Conn.SetReadDeadline, t) }
func (e *pipeEnd) SetWriteDeadline(t time.Time) error {
	return e.deadline(e.Conn.SetWriteDeadline, t)
}
