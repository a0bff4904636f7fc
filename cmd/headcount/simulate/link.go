package simulate

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/coder/websocket"
)

// A link is one WebSocket connection. It owns its socket, because a real client
// can end in ways that no WebSocket library offers: reset, or silent for ever.
type link struct {
	ws    *websocket.Conn
	conn  net.Conn // what the frames go over: TCP, or TLS over it
	tcp   *net.TCPConn
	ahead []byte        // read together with the handshake's answer
	bytes *atomic.Int64 // received, of all links

	heard  atomic.Int64 // when a byte last came, unix milliseconds
	silent atomic.Bool  // reads fail, writes go nowhere, Close leaves the socket open

	// Guarded by the client's mutex, under which send and bye are called, too.
	who    string // the user the server takes it for
	ready  bool   // welcome was read and the joins were sent
	ending bool   // one of the two sides has said that it ends, and how
	how    ending
	said   bool        // the close frame was sent; nothing may follow it
	timer  *time.Timer // ends it when the server asked for that
}

const (
	dialTimeout  = 10 * time.Second
	writeTimeout = 5 * time.Second
	closeTimeout = 5 * time.Second // how long the server may take to answer a close frame
	subprotocol  = "headcount.v1"
)

// refused is an upgrade that the server answered with a status.
type refused struct {
	status     int
	retryAfter time.Duration
	body       string
}

func (r *refused) Error() string {
	return fmt.Sprintf("upgrade refused: %d %s", r.status, r.body)
}

// dial opens a link. The context bounds the handshake only.
func dial(ctx context.Context, url string, header http.Header, received *atomic.Int64) (*link, error) {
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	l := &link{bytes: received}
	ws, resp, err := websocket.Dial(ctx, url, &websocket.DialOptions{
		HTTPClient:   &http.Client{Transport: l},
		HTTPHeader:   header,
		Subprotocols: []string{subprotocol},
	})
	if err != nil {
		l.kill()
		if resp != nil && resp.StatusCode != http.StatusSwitchingProtocols {
			return nil, refusal(resp)
		}
		return nil, err
	}
	l.ws = ws
	return l, nil
}

func refusal(resp *http.Response) error {
	body, _ := io.ReadAll(resp.Body) // 512 bytes in memory, see RoundTrip
	seconds, _ := strconv.Atoi(resp.Header.Get("Retry-After"))
	return &refused{resp.StatusCode, time.Duration(seconds) * time.Second, string(bytes.TrimSpace(body))}
}

// RoundTrip makes the link the transport of its own handshake: http.Transport
// would keep the socket to itself, and two goroutines and two buffers with it.
func (l *link) RoundTrip(req *http.Request) (*http.Response, error) {
	ctx := req.Context()
	if err := l.connect(ctx, req); err != nil {
		return nil, err
	}
	stop := context.AfterFunc(ctx, func() { _ = l.conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	if err := req.Write(l.conn); err != nil {
		return nil, fmt.Errorf("write the handshake: %w", err)
	}
	br := bufio.NewReaderSize(l.conn, 1024)
	resp, err := http.ReadResponse(br, req)
	if err != nil {
		return nil, fmt.Errorf("read the handshake's answer: %w", err)
	}
	if resp.StatusCode != http.StatusSwitchingProtocols {
		body, _ := io.ReadAll(io.LimitReader(resp.Body, 512))
		resp.Body = io.NopCloser(bytes.NewReader(body))
		return resp, nil
	}
	if n := br.Buffered(); n > 0 {
		l.ahead = make([]byte, n)
		_, _ = br.Read(l.ahead) // a buffered read is complete and cannot fail
	}
	l.bytes.Add(int64(len(l.ahead)))
	l.heard.Store(time.Now().UnixMilli())
	resp.Body = l
	return resp, nil
}

func (l *link) connect(ctx context.Context, req *http.Request) error {
	port := req.URL.Port()
	if port == "" {
		port = map[string]string{"http": "80", "https": "443"}[req.URL.Scheme]
	}
	conn, err := new(net.Dialer).DialContext(ctx, "tcp", net.JoinHostPort(req.URL.Hostname(), port))
	if err != nil {
		return err
	}
	l.conn, l.tcp = conn, conn.(*net.TCPConn)
	if req.URL.Scheme == "https" {
		secure := tls.Client(conn, &tls.Config{ServerName: req.URL.Hostname(), NextProtos: []string{"http/1.1"}})
		if err := secure.HandshakeContext(ctx); err != nil {
			return fmt.Errorf("TLS with %s: %w", req.URL.Host, err)
		}
		l.conn = secure
	}
	return nil
}

// Read, Write and Close are what the WebSocket library sees of the socket.

func (l *link) Read(p []byte) (int, error) {
	if l.silent.Load() {
		return 0, net.ErrClosed
	}
	if len(l.ahead) > 0 {
		n := copy(p, l.ahead)
		if l.ahead = l.ahead[n:]; len(l.ahead) == 0 {
			l.ahead = nil
		}
		return n, nil
	}
	n, err := l.conn.Read(p)
	if n > 0 {
		l.bytes.Add(int64(n))
		l.heard.Store(time.Now().UnixMilli())
	}
	return n, err
}

func (l *link) Write(p []byte) (int, error) {
	if l.silent.Load() {
		return 0, net.ErrClosed
	}
	if err := l.conn.SetWriteDeadline(time.Now().Add(writeTimeout)); err != nil {
		return 0, err
	}
	return l.conn.Write(p)
}

func (l *link) Close() error {
	if l.silent.Load() {
		return nil
	}
	return l.conn.Close()
}

// send writes one message, unless the link has said goodbye. After an error it is
// of no use; its reader finds that out too.
func (l *link) send(msg []byte) {
	if l.said {
		return
	}
	if err := l.ws.Write(context.Background(), websocket.MessageText, msg); err != nil {
		_ = l.Close()
	}
}

// closeFrame is a whole close frame, status 1000, masked with zeros.
var closeFrame = []byte{0x88, 0x82, 0, 0, 0, 0, 0x03, 0xe8}

// bye says goodbye as a browser does: a close frame, then the reader waits for
// the server's. It writes past the library, whose Close would wait here.
func (l *link) bye() {
	if l.said {
		return
	}
	l.said = true
	if _, err := l.Write(closeFrame); err != nil {
		_ = l.Close()
		return
	}
	_ = l.conn.SetReadDeadline(time.Now().Add(closeTimeout))
}

// fin ends the connection without a close frame, as a process that is killed does.
func (l *link) fin() {
	if l.tcp != nil {
		_ = l.tcp.Close()
	}
}

// kill resets the connection, as a process that is killed with unread data does.
func (l *link) kill() {
	if l.tcp != nil {
		_ = l.tcp.SetLinger(0)
		_ = l.tcp.Close()
	}
}

// vanish falls silent for ever, as a phone in a tunnel does: the socket stays
// open, nothing is read, answered or sent. The caller closes it some day.
func (l *link) vanish() {
	l.silent.Store(true)
	_ = l.conn.SetReadDeadline(time.Unix(1, 0))
}

// buffers hold messages while they are looked at, so that a waiting client has none.
var buffers = sync.Pool{New: func() any { b := make([]byte, 0, 512); return &b }}

// next waits for a message and hands it to use, which must not keep it.
func (l *link) next(use func(msg []byte)) error {
	_, r, err := l.ws.Reader(context.Background())
	if err != nil {
		return err
	}
	buf := buffers.Get().(*[]byte)
	defer buffers.Put(buf)
	*buf = (*buf)[:0]
	for {
		if len(*buf) == cap(*buf) {
			*buf = append(*buf, 0)[:len(*buf)]
		}
		n, err := r.Read((*buf)[len(*buf):cap(*buf)])
		*buf = (*buf)[:len(*buf)+n]
		if err == io.EOF {
			use(*buf)
			return nil
		}
		if err != nil {
			return err
		}
	}
}
