package gateway

import (
	"bufio"
	"bytes"
	"io"
	"net"
	"net/http"
	"sync"
	"time"

	"headcount/gateway/httppolicy"
	"headcount/gateway/socket"
	"headcount/gateway/websocket"
)

// Entrance accepts the clients of an HTTP server. It reads what a client sends first: if that is a request for a
// WebSocket as browsers write it, the Entrance calls the server's handler with it at once. So these clients, which come
// by the thousand after a restart, need none of what net/http makes for a connection: a goroutine, a second one that
// waits for the client's end, two buffers, and a dozen system calls. All others go to the HTTP server, with the bytes
// that were read.
type Entrance struct {
	*httppolicy.ConnLimiter
	g       *Gateway
	handler http.Handler
	timeout time.Duration
	path    string // of WebSockets
	passed  passed
}

// NewEntrance returns a listener for an HTTP server and its handler. It accepts connections from l, and closes those
// whose clients send nothing within timeout. The server must serve Passed, too.
func (g *Gateway) NewEntrance(l net.Listener, handler http.Handler, timeout time.Duration) (*Entrance, error) {
	acceptor, err := socket.Acceptor(l)
	if err != nil {
		return nil, err
	}

	limiter := g.Listener(acceptor)

	return &Entrance{
		ConnLimiter: limiter,
		g:           g,
		handler:     handler,
		timeout:     timeout,
		path:        g.cfg.API.BasePath + "/-/ws",
		passed:      passed{addr: l.Addr(), conns: make(chan net.Conn, limiter.Max()), closed: make(chan struct{})},
	}, nil
}

// Accept returns the next client that no poller waits for. In a build without pollers these are all clients.
func (e *Entrance) Accept() (net.Conn, error) {
	for {
		client, err := e.ConnLimiter.Accept()
		if err != nil {
			return nil, err
		}

		over, ok := httppolicy.Below(client).(*socket.Conn)
		if !ok {
			return client, nil
		}

		if !e.await(client, over) {
			return client, nil
		}
	}
}

// await has a poller wait for what a client sends first. It returns false if that is not possible.
func (e *Entrance) await(client net.Conn, over *socket.Conn) bool {
	a := &arrival{Entrance: e, client: client}
	a.silent = time.AfterFunc(e.timeout, func() { a.end(over) })
	if e.g.clients.Poller().Await(over, a) {
		return true
	}
	a.silent.Stop()

	return false
}

// Passed returns the listener of the clients that the Entrance passes on to the HTTP server.
func (e *Entrance) Passed() net.Listener { return &e.passed }

// arrival is a client that has sent nothing yet.
type arrival struct {
	*Entrance
	client net.Conn    // as the limiter knows it
	silent *time.Timer // closes the connection
}

// Awaited implements socket.Awaiter.
func (a *arrival) Awaited(over *socket.Conn, sent []byte) {
	// The connection's time is over, and the timer closes it, or it is closed. No handler may use the descriptor now:
	// it may be that of another client right after.
	if !a.silent.Stop() {
		return
	}
	if len(sent) == 0 {
		a.end(over)
		return
	}

	// Otherwise the client would count as one that has sent nothing, and would be the first to make room for others.
	a.State(a.client, http.StateActive)

	r, rest := websocket.ReadUpgrade(sent, a.path)
	if r == nil {
		a.pass(over, bytes.Clone(sent))
		return
	}

	r.RemoteAddr = over.RemoteAddr().String()
	early := bytes.Clone(rest)

	if a.g.cfg.Waits {
		a.g.arriving.Go(func() { a.serve(over, r, early) })
		return
	}

	a.serve(over, r, early)
}

// Gone implements socket.Awaiter. The timer would keep all that is left of the client in memory.
func (a *arrival) Gone() { a.silent.Stop() }

// serve calls the handler, and writes its answer if that did not take the connection over.
func (a *arrival) serve(over *socket.Conn, r *http.Request, early []byte) {
	w := &reply{header: http.Header{}, arrival: a, over: over, early: early}
	defer w.recover()
	a.handler.ServeHTTP(w, r)
	if w.taken {
		return
	}

	// A new connection takes a whole answer at once. After it the client may make other requests.
	if over.Send(w.bytes(r)) != nil || w.sent.Get("Connection") == "close" {
		a.end(over)
		return
	}
	a.pass(over, early)
}

// recover ends a connection whose handler has panicked, as net/http does. A poller calls the handler, so otherwise the
// process would end.
func (w *reply) recover() {
	v := recover()
	if v == nil {
		return
	}

	// That is how a handler breaks a connection off on purpose.
	if v != http.ErrAbortHandler { //nolint:errorlint
		w.g.cfg.Log.Error().Interface("panic", v).Stack().Msg("a request panicked")
	}
	if !w.taken {
		w.end(w.over)
	}
}

// end closes the connection. A client that sees its end may come back at once, so its place is free before.
func (a *arrival) end(over *socket.Conn) {
	a.State(a.client, http.StateClosed)
	_ = over.Close()
}

// pass passes the connection on to the HTTP server, which first reads sent.
func (a *arrival) pass(over *socket.Conn, sent []byte) {
	over.Unread(sent)

	if a.passed.isClosed() {
		a.end(over)
		return
	}

	select {
	case a.passed.conns <- a.client: // there is room for all that the limiter lets in
	case <-a.passed.closed:
		a.end(over)
	}
}

// reply is the answer to the request of an arrival.
type reply struct {
	*arrival
	over   *socket.Conn
	early  []byte // what the client has sent after its request
	taken  bool   // Hijack was called
	header http.Header
	sent   http.Header // as it was when the answer began; the handler then adds fields for the log
	status int
	body   bytes.Buffer
}

// Header implements http.ResponseWriter.
func (w *reply) Header() http.Header { return w.header }

// WriteHeader implements http.ResponseWriter.
func (w *reply) WriteHeader(status int) {
	if w.status == 0 {
		w.status = status
		w.sent = w.header.Clone()
	}
}

// Write implements http.ResponseWriter.
func (w *reply) Write(p []byte) (int, error) {
	w.WriteHeader(http.StatusOK)
	return w.body.Write(p)
}

// Hijack implements http.Hijacker.
func (w *reply) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	if w.taken {
		return nil, nil, http.ErrHijacked
	}

	w.taken = true
	w.State(w.client, http.StateHijacked)

	// Hardly any client sends frames before it has the answer.
	early := bufio.NewReaderSize(bytes.NewReader(w.early), len(w.early))
	_, _ = early.Peek(len(w.early))

	return w.over, &bufio.ReadWriter{Reader: early}, nil
}

// bytes returns the answer as it is sent.
func (w *reply) bytes(r *http.Request) []byte {
	w.WriteHeader(http.StatusOK)
	w.sent.Set("Date", time.Now().UTC().Format(http.TimeFormat))
	var b bytes.Buffer
	answer := http.Response{
		StatusCode: w.status, ProtoMajor: 1, ProtoMinor: 1, Request: r, Header: w.sent,
		Body: io.NopCloser(&w.body), ContentLength: int64(w.body.Len()),
	}
	_ = answer.Write(&b) // a write to memory does not fail

	return b.Bytes()
}

// passed is a listener of clients that were accepted before.
type passed struct {
	addr   net.Addr
	conns  chan net.Conn
	once   sync.Once // closes closed
	closed chan struct{}
}

// Accept implements net.Listener.
func (p *passed) Accept() (net.Conn, error) {
	select {
	case c := <-p.conns:
		return c, nil
	case <-p.closed:
		return nil, net.ErrClosed
	}
}

// Addr implements net.Listener.
func (p *passed) Addr() net.Addr { return p.addr }

func (p *passed) isClosed() bool {
	select {
	case <-p.closed:
		return true
	default:
		return false
	}
}

// Close implements net.Listener.
func (p *passed) Close() error {
	p.once.Do(func() { close(p.closed) })
	return nil
}
