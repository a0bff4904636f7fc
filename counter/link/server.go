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
	// sends one call per partition and repeats it each second, and each one takes at most longest.
	underWay = 16 * rows.Partitions
	// longest limits the time of one call here. By then its sender has repeated it.
	longest = 10 * time.Second
)

// Process carries out the requests of other processes.
type Process interface {
	Do(ctx context.Context, call owner.Call) (owner.Answer, error)
	// Release hands partitions over to the named process, and returns when everything that was acknowledged is in the
	// store.
	Release(ctx context.Context, to string, partitions []int) error
	// Probe reports whether this process can reach the named one.
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

// NewServer returns a Server that passes requests to p. The clock must be that of its clients. The caller must call
// Close.
func NewServer(p Process, clock Clock) *Server {
	s := &Server{process: p, clock: clock}
	s.ctx, s.stop = context.WithCancel(context.Background())

	return s
}

// Close ends all connections, and waits for the calls in progress. It is called only once.
func (s *Server) Close() {
	s.mu.Lock()
	// From here on no Serve begins, so that none is added to wg while Close waits for it.
	s.closed = true
	s.mu.Unlock()

	s.stop()
	s.wg.Wait()
}

// Serve makes the calls that arrive over a connection, until the connection ends or Close is called. The key is that of
// the signatures.
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
		// A client that takes no answers must not go on sending calls: this ends the reader, too.
		defer end()
		_ = pump(newWriter(stream, key, fromServer), c.out, ctx.Done()) // after an error the client reconnects
	})
	closed := context.AfterFunc(ctx, func() { _ = stream.Close() }) // unblocks the reader

	// Errors do not matter: the client makes a new connection.
	_ = c.read(newReader(stream, key, fromClient))
	// Nobody can receive the answers to calls that are still under way, so these need not go on.
	end()
	closed()
	c.wg.Wait()
}

// served is a connection of another process.
type served struct {
	server *Server
	ctx    context.Context // ends with the connection
	out    chan []byte     // payloads for the client
	slots  chan struct{}   // one for each call in progress
	wg     sync.WaitGroup  // waits for the writer, and the calls in progress
}

// read starts the requests that arrive, until the connection ends.
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
			c.send(message{id: m.id}.appendTo(nil)) // at once, whatever else is in progress
			continue
		}
		// At the bound nothing more is read, so further calls wait at the client.
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

// send queues a payload, unless the connection has ended.
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
	// Under mu, so that Close waits for each connection that began before it.
	s.wg.Add(1)

	return true
}

// answer carries out a request, and returns the payload of the answer.
func (s *Server) answer(ctx context.Context, m message, body []byte) []byte {
	ctx, cancel := context.WithTimeout(ctx, longest)
	defer cancel()

	answer := message{id: m.id}
	result, err := s.carryOut(ctx, m.what, body)
	if err != nil {
		// The caller has to know whether something may have been made.
		answer.what = howOf(err)
		result = textOf(err)
	}

	return append(answer.appendTo(make([]byte, 0, 16+len(result))), result...)
}

// refusal is an error about a request that this process cannot carry out.
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

	return nil, refusal{errors.New("this version does not know the request; run the same version everywhere")}
}

// errLate is the error of a call that arrived after its sender had given up, for example because the link stalled.
// Other calls may have been answered since, and making this one now could contradict those answers.
var errLate = errors.New("the sender of the call has given up")

// call makes a call, unless its sender has given up.
func (s *Server) call(ctx context.Context, body []byte) ([]byte, error) {
	call, err := owner.ParseCall(body, &s.rules)
	if err != nil {
		return nil, refusal{err}
	}

	call.Until = s.clock.toLocal(call.Until)
	// As long as the clock of the cluster is unknown, calls have no deadline.
	if !call.Until.IsZero() {
		// The call may also have to wait here, for a claim or for the store, so the sender's deadline applies.
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

// textOf returns the text that is sent for an error.
func textOf(err error) []byte {
	var moved *Moved
	if errors.As(err, &moved) {
		return []byte(moved.To)
	}

	return []byte(err.Error())
}

// howOf returns the outcome that is sent for an error.
func howOf(err error) byte {
	var refused refusal
	var moved *Moved
	switch {
	case errors.As(err, &refused):
		return endedRefused
	case errors.As(err, &moved): // before ErrNotOwner, which it also is
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
