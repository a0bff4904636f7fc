package link

import (
	"context"
	"errors"
	"io"
	"sync"
	"time"

	"headcount/counter"
	"headcount/counter/owner"
	"headcount/internal/rows"
)

const (
	// underWay is how many calls of one connection are made at a time. Further ones wait in the connection. A process
	// sends one call for each partition, again each second, and each takes longest at most.
	underWay = 16 * rows.Partitions
	// longest is how long a call may take here. Its sender has repeated it by then.
	longest = 10 * time.Second
)

// Process does what other processes ask for.
type Process interface {
	Do(ctx context.Context, call owner.Call) (owner.Answer, error)
	// Release gives partitions up for the process with that name, and returns when everything that was acknowledged is
	// in the store.
	Release(ctx context.Context, to string, partitions []int) error
	// Probe reports whether this process can reach the one with that name.
	Probe(ctx context.Context, name string) bool
}

// Server makes the calls that other processes send to this one. Its methods may be called from any goroutine.
type Server struct {
	process Process
	clock   Clock
	rules   owner.Rules
	ctx     context.Context // ends with Close
	stop    context.CancelFunc

	mu     sync.Mutex // guards closed, and wg until it is set
	closed bool
	wg     sync.WaitGroup // Serve
}

// NewServer returns a Server that has p do what is asked. The clock is that of its clients. Close ends it.
func NewServer(p Process, clock Clock) *Server {
	s := &Server{process: p, clock: clock}
	s.ctx, s.stop = context.WithCancel(context.Background())

	return s
}

// Close ends all connections, and waits until the calls under way have ended. It is called once.
func (s *Server) Close() {
	s.mu.Lock()
	s.closed = true
	s.mu.Unlock()

	s.stop()
	s.wg.Wait()
}

// Serve makes the calls that come from a connection until it ends, or until Close. The key is that of its signatures.
func (s *Server) Serve(stream io.ReadWriteCloser, key []byte) {
	defer stream.Close()
	if !s.begin() {
		return
	}
	defer s.wg.Done()

	ctx, end := context.WithCancel(s.ctx)
	c := &served{
		server: s,
		ctx:    ctx,
		out:    make(chan []byte, underWay),
		slots:  make(chan struct{}, underWay),
	}
	c.wg.Go(func() {
		defer end()
		_ = pump(newWriter(stream, key, fromServer), c.out, ctx.Done()) // the client makes a new connection
	})
	closed := context.AfterFunc(ctx, func() { _ = stream.Close() }) // wakes the reader

	// What ends the connection is of no interest: the client makes a new one.
	_ = c.read(newReader(stream, key, fromClient))
	end()
	closed()
	c.wg.Wait()
}

// served is a connection of another process.
type served struct {
	server *Server
	ctx    context.Context // ends with the connection
	out    chan []byte     // payloads for the client
	slots  chan struct{}   // one for each call under way
	wg     sync.WaitGroup  // the writer, and the calls under way
}

// read begins the calls that come, until the connection ends.
func (c *served) read(r *reader) error {
	for {
		payload, err := r.read()
		if err != nil {
			return err
		}
		m, body, err := parse(payload)
		if err != nil {
			return err
		}

		if m.what == askNothing {
			c.send(message{id: m.id}.appendTo(nil)) // at once, whatever else is under way
			continue
		}
		select {
		case c.slots <- struct{}{}:
		case <-c.ctx.Done():
			return c.ctx.Err()
		}
		c.wg.Go(func() {
			defer func() { <-c.slots }()
			c.send(c.server.answer(c.ctx, m, body))
		})
	}
}

// send has a payload written, unless the connection ends.
func (c *served) send(payload []byte) {
	select {
	case c.out <- payload:
	case <-c.ctx.Done():
	}
}

func (s *Server) begin() bool {
	s.mu.Lock()
	defer s.mu.Unlock()

	if s.closed {
		return false
	}
	s.wg.Add(1)

	return true
}

// answer carries out what is asked, and returns the payload of the answer.
func (s *Server) answer(ctx context.Context, m message, body []byte) []byte {
	ctx, cancel := context.WithTimeout(ctx, longest)
	defer cancel()

	answer := message{id: m.id}
	result, err := s.carryOut(ctx, m.what, body)
	if err != nil {
		answer.what = howOf(err)
		result = textOf(err)
	}

	return append(answer.appendTo(make([]byte, 0, 16+len(result))), result...)
}

// refusal is an error about a call that cannot be made here.
type refusal struct{ error }

func (s *Server) carryOut(ctx context.Context, what byte, body []byte) ([]byte, error) {
	switch what {
	case askRelease:
		return nil, s.release(ctx, body)
	case askProbe:
		if s.process.Probe(ctx, string(body)) {
			return []byte{1}, nil
		}
		return []byte{0}, nil
	case askCall:
		return s.call(ctx, body)
	}

	return nil, refusal{errors.New("this version does not know what is asked; run the same version everywhere")}
}

// errLate is the error of a call that came after its sender had given up, for instance because a link stalled. Others
// may have been answered since, and what they were told stands.
var errLate = errors.New("the sender of the call has given up")

// call makes a call, unless its sender has given up.
func (s *Server) call(ctx context.Context, body []byte) ([]byte, error) {
	call, err := owner.ParseCall(body, &s.rules)
	if err != nil {
		return nil, refusal{err}
	}

	call.Until = s.clock.toLocal(call.Until)
	if !call.Until.IsZero() {
		// It may also wait here, for a claim or for the store.
		within, cancel := context.WithDeadline(ctx, call.Until)
		defer cancel()
		ctx = within
	}
	if ctx.Err() != nil {
		return nil, errLate
	}

	answer, err := s.process.Do(ctx, *call)
	if err != nil {
		return nil, err
	}

	return owner.AppendAnswer(nil, call, &answer), nil
}

func (s *Server) release(ctx context.Context, body []byte) error {
	to, partitions, err := parseRelease(body)
	if err != nil {
		return refusal{err}
	}

	return s.process.Release(ctx, to, partitions)
}

// textOf returns what is said of an error.
func textOf(err error) []byte {
	var moved *Moved
	if errors.As(err, &moved) {
		return []byte(moved.To)
	}

	return []byte(err.Error())
}

// howOf returns how a call ended that has an error.
func howOf(err error) byte {
	var refused refusal
	var moved *Moved
	switch {
	case errors.As(err, &refused):
		return endedRefused
	case errors.As(err, &moved):
		return endedMoved
	case errors.Is(err, owner.ErrNotOwner):
		return endedNotOwner
	case errors.Is(err, owner.ErrOld):
		return endedOld
	case errors.Is(err, counter.ErrBusy):
		return endedBusy
	}

	return endedUnavailable
}
