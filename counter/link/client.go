package link

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"

	"headcount/counter"
	"headcount/counter/owner"
)

// inFlight is how many frames of a connection may wait to be written. A process sends another one at most one call per
// partition, so senders hardly ever block.
const inFlight = 128

// pingEvery is the minimum time between two pings of a process that has not answered a call. The process answers pings
// at once, even while its store does not respond.
const pingEvery = 50 * time.Millisecond

// silence is how long a ping may stay unanswered before the connection counts as dead, checked when a call times out. A
// call times out after a second, and its first ping is sent within twice pingEvery.
const silence = 800 * time.Millisecond

// errClosed ends the calls in progress when the client closes.
var errClosed = errors.New("the process ends")

// ErrUnreachable is wrapped by the errors of calls to a process that cannot be reached: it refuses connections, or it
// does not answer at all. A process whose store is slow is reachable.
var ErrUnreachable = errors.New("the process cannot be reached")

// ErrRefused is wrapped by the error of a Dial if the process runs but serves no counters. Such a process gets no
// calls, but it does not count as unreachable.
var ErrRefused = errors.New("the process accepts no links for counters")

// Moved is the error of a call to a process that does not own the partition, but knows which process does or should. It
// is also an owner.ErrNotOwner.
type Moved struct{ To string }

// Error implements error.
func (m *Moved) Error() string { return fmt.Sprintf("%v: %s is", owner.ErrNotOwner, m.To) }

func (m *Moved) Unwrap() error { return owner.ErrNotOwner }

var errSilent = fmt.Errorf("%w: it does not answer", ErrUnreachable)

// Dial connects to the process at addr, and returns the key for signatures, nil without cluster secrets.
type Dial func(ctx context.Context, addr string) (conn io.ReadWriteCloser, key []byte, err error)

// Client makes calls in other processes. Its methods may be called from any goroutine.
type Client struct {
	dial  Dial
	clock Clock
	ctx   context.Context // ends with Close
	stop  context.CancelFunc
	wg    sync.WaitGroup // two goroutines for each connection

	mu    sync.Mutex // guards peers
	peers map[string]*Peer
}

// NewClient returns a Client that makes connections with dial. It uses the clock to tell the other processes until when
// they may make its calls. The caller must call Close.
func NewClient(dial Dial, clock Clock) *Client {
	c := &Client{dial: dial, clock: clock, peers: map[string]*Peer{}}
	c.ctx, c.stop = context.WithCancel(context.Background())

	return c
}

// Close ends all connections and waits for their goroutines. Calls in progress fail. It is called only once.
func (c *Client) Close() {
	// Before the connections are dropped: whoever makes another one meanwhile looks at this afterwards.
	c.stop()

	c.mu.Lock()
	for _, p := range c.peers {
		p.drop()
	}
	c.mu.Unlock()
	c.wg.Wait()
}

// To returns the process at addr. The first call makes the connection.
func (c *Client) To(addr string) *Peer {
	c.mu.Lock()
	defer c.mu.Unlock()

	p := c.peers[addr]
	if p == nil {
		p = &Peer{client: c, addr: addr, dialing: make(chan struct{}, 1)}
		c.peers[addr] = p
	}

	return p
}

// Peer is another process. Its methods may be called from any goroutine.
type Peer struct {
	client  *Client
	addr    string
	dialing chan struct{} // a lock whose waiters may give up: one connection is made at a time

	mu   sync.Mutex // guards conn
	conn *conn      // nil: there is none
}

// Do implements call.Owner. Its errors are those of owner.Owner. If the process cannot be reached, the error wraps
// counter.ErrUnavailable and that of the connection.
func (p *Peer) Do(ctx context.Context, call owner.Call) (owner.Answer, error) {
	// The clocks of two processes may differ, so the deadline travels by that of the cluster.
	call.Until = p.client.clock.toCluster(call.Until)
	body, err := p.ask(ctx, askCall, func(b []byte) []byte { return owner.AppendCall(b, &call) })
	if err != nil {
		return owner.Answer{}, err
	}

	// Behind an answer that cannot be read the call may have been made.
	answer, err := owner.ParseAnswer(body, &call)
	if err != nil {
		return owner.Answer{}, fmt.Errorf("call of %s: %w: %w", p.addr, counter.ErrUnavailable, err)
	}

	return answer, nil
}

// Release asks the process to hand partitions over to another one, and returns when it has. Then everything that it
// acknowledged is in the store.
func (p *Peer) Release(ctx context.Context, to string, partitions []int) error {
	_, err := p.ask(ctx, askRelease, func(b []byte) []byte { return appendRelease(b, to, partitions) })

	return err
}

// Ping checks that the process answers.
func (p *Peer) Ping(ctx context.Context) error {
	_, err := p.ask(ctx, askNothing, func(b []byte) []byte { return b })

	return err
}

// Probe asks the process whether it can reach the named one.
func (p *Peer) Probe(ctx context.Context, name string) (bool, error) {
	answer, err := p.ask(ctx, askProbe, func(b []byte) []byte { return append(b, name...) })

	return len(answer) == 1 && answer[0] == 1, err
}

// ask sends a frame and returns the body of the answer.
func (p *Peer) ask(ctx context.Context, what byte, body func([]byte) []byte) ([]byte, error) {
	c, err := p.connect(ctx)
	if err != nil {
		return nil, fmt.Errorf("call of %s: %w: %w", p.addr, counter.ErrUnavailable, err)
	}

	answer, err := c.ask(ctx, what, body)
	if err != nil {
		return nil, fmt.Errorf("call of %s: %w", p.addr, err)
	}

	return answer, nil
}

// connect returns the connection, and makes one if necessary.
func (p *Peer) connect(ctx context.Context) (*conn, error) {
	if c := p.current(); c != nil {
		return c, nil
	}

	select {
	case p.dialing <- struct{}{}:
		defer func() { <-p.dialing }()
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}

	if c := p.current(); c != nil {
		return c, nil // another caller has just made it
	}
	if p.client.ctx.Err() != nil {
		return nil, errClosed
	}

	began := time.Now()
	stream, key, err := p.client.dial(ctx, p.addr)
	hadLittleTime := ctx.Err() != nil && time.Since(began) < silence
	switch {
	case err == nil:
	case errors.Is(err, ErrRefused):
		return nil, err
	case hadLittleTime: // the time was too short to call the process unreachable
		return nil, context.Cause(ctx)
	default:
		return nil, fmt.Errorf("%w: %w", ErrUnreachable, err)
	}

	// The connection is set before its goroutines start, so that lose finds it when they end at once.
	c := newConn(stream, key)
	p.mu.Lock()
	p.conn = c
	p.mu.Unlock()
	p.client.wg.Go(c.write)
	p.client.wg.Go(func() { c.read(); p.lose(c) })
	if p.client.ctx.Err() != nil {
		p.drop() // Close may have dropped all connections just before this one was set
	}

	return c, nil
}

func (p *Peer) current() *conn {
	p.mu.Lock()
	defer p.mu.Unlock()

	return p.conn
}

// lose forgets a connection that has ended.
func (p *Peer) lose(c *conn) {
	p.mu.Lock()
	defer p.mu.Unlock()

	if p.conn == c {
		p.conn = nil
	}
}

// drop ends the connection.
func (p *Peer) drop() {
	if c := p.current(); c != nil {
		c.end(errClosed)
	}
}

// conn is a connection to another process.
type conn struct {
	stream io.ReadWriteCloser
	key    []byte
	out    chan []byte   // payloads for write
	gone   chan struct{} // closed by end

	mu        sync.Mutex // guards the fields below
	err       error      // why it ended; nil while it lasts
	last      uint64     // id of the last call
	lastFrame time.Time  // when the last frame came
	pinged    time.Time  // when the last ping was sent
	waiting   map[uint64]chan<- answer
}

// answer is the outcome of a call.
type answer struct {
	how  byte
	body []byte
}

func newConn(stream io.ReadWriteCloser, key []byte) *conn {
	return &conn{
		stream:  stream,
		key:     key,
		out:     make(chan []byte, inFlight),
		gone:    make(chan struct{}),
		waiting: map[uint64]chan<- answer{},
	}
}

// end ends the connection and all calls that wait on it. Only the first call has an effect.
func (c *conn) end(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()

	if c.err != nil {
		return
	}
	c.err = err
	// Calls see gone, and then ask for the cause, so the cause is set first.
	close(c.gone)
	_ = c.stream.Close() // the connection is unusable, so its error does not matter
}

func (c *conn) cause() error {
	c.mu.Lock()
	defer c.mu.Unlock()

	return c.err
}

func (c *conn) ask(ctx context.Context, what byte, body func([]byte) []byte) ([]byte, error) {
	// The call is registered before its frame is sent, so no answer comes too early.
	id, answered := c.expect()
	defer c.forget(id)

	payload := body(message{id, what}.appendTo(make([]byte, 0, 256)))
	// The other process would end the connection for such a frame, and with it all other calls.
	if len(payload) > maxFrame {
		return nil, fmt.Errorf("%w: a call of %d bytes", counter.ErrOp, len(payload))
	}

	select {
	case c.out <- payload:
	case <-c.gone:
		return nil, fmt.Errorf("%w: %w", counter.ErrUnavailable, c.cause())
	case <-ctx.Done():
		return nil, c.late(ctx)
	}

	// The answer may wait for a slow store. Pings find out whether the process itself is still there.
	slow := time.NewTimer(pingEvery)
	defer slow.Stop()
	for {
		select {
		case a := <-answered:
			return a.body, errorOf(a)
		case <-c.gone:
			return nil, fmt.Errorf("%w: %w", counter.ErrUnavailable, c.cause())
		case <-ctx.Done():
			return nil, c.late(ctx)
		case now := <-slow.C:
			c.ping(now)
			slow.Reset(pingEvery)
		}
	}
}

// ping sends a ping, unless one was sent a moment ago.
func (c *conn) ping(now time.Time) {
	c.mu.Lock()
	// An unanswered ping is not followed by another, because late measures the silence since the last one.
	due := c.answersLocked() && now.Sub(c.pinged) >= pingEvery
	if due {
		c.pinged = now
	}
	c.mu.Unlock()
	if !due {
		return
	}

	select {
	case c.out <- message{id: noID, what: askNothing}.appendTo(nil):
	default: // the queue is full, and the answers to its frames serve as well
	}
}

// answersLocked reports whether a frame has arrived since the last ping.
func (c *conn) answersLocked() bool { return !c.lastFrame.Before(c.pinged) }

// late returns the error of a call that timed out. If even a ping got no answer, late ends the connection: the next
// attempt makes a new one, which shows whether the other process is reachable.
func (c *conn) late(ctx context.Context) error {
	c.mu.Lock()
	silent := !c.answersLocked() && time.Since(c.pinged) >= silence
	c.mu.Unlock()

	if silent {
		c.end(errSilent)
		return fmt.Errorf("%w: %w", counter.ErrUnavailable, errSilent)
	}

	return fmt.Errorf("%w: %w", counter.ErrUnavailable, context.Cause(ctx))
}

// expect registers a call, and returns its id and the channel for its answer.
func (c *conn) expect() (uint64, <-chan answer) {
	c.mu.Lock()
	defer c.mu.Unlock()

	c.last++
	// The channel has room, so that an answer that nobody waits for any more holds up no other.
	answered := make(chan answer, 1)
	c.waiting[c.last] = answered

	return c.last, answered
}

func (c *conn) forget(id uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()

	delete(c.waiting, id)
}

// write writes payloads until the connection ends.
func (c *conn) write() {
	w := newWriter(c.stream, c.key, fromClient)
	if err := pump(w, c.out, c.gone); err != nil {
		c.end(err)
	}
}

// pump writes payloads until gone is closed. It flushes only when none is left, so that frames share packets under
// load.
func pump(w *writer, payloads <-chan []byte, gone <-chan struct{}) error {
	for {
		select {
		case payload := <-payloads:
			if err := w.write(payload); err != nil {
				return err
			}
		case <-gone:
			return nil
		}

		if len(payloads) > 0 {
			continue
		}
		if err := w.flush(); err != nil {
			return err
		}
	}
}

// read delivers answers until the connection ends.
func (c *conn) read() {
	r := newReader(c.stream, c.key, fromServer)
	for {
		payload, err := r.read()
		if err != nil {
			c.end(err)
			return
		}
		m, body, err := parse(payload)
		if err != nil {
			c.end(err)
			return
		}

		c.mu.Lock()
		c.lastFrame = time.Now()
		answered := c.waiting[m.id]
		delete(c.waiting, m.id)
		c.mu.Unlock()

		// There is none for the answer to a ping, or when its caller has given up.
		if answered != nil {
			answered <- answer{m.what, body} // never blocks: it has room for the only answer
		}
	}
}

// errorOf converts an answer to an error.
func errorOf(a answer) error {
	switch a.how {
	case ended:
		return nil
	case endedNotOwner:
		return owner.ErrNotOwner
	case endedMoved:
		return &Moved{To: string(a.body)}
	case endedOld:
		return owner.ErrOld
	case endedBusy:
		return counter.ErrBusy
	case endedRefused:
		return fmt.Errorf("%w: %s", counter.ErrOp, a.body)
	}

	// Also what only a newer release knows: the call may have been made.
	return fmt.Errorf("%w: %s", counter.ErrUnavailable, a.body)
}
