package httppolicy

import (
	"bytes"
	"net"
	"net/http"
	"strconv"
	"sync/atomic"
	"syscall"
)

// socketConn is a connection over a socket, such as a *net.TCPConn.
type socketConn interface {
	net.Conn
	syscall.Conn
	CloseWrite() error
}

// clientConn is a connection over a socket that rewrites the HTTP server's own refusals as
// problems. It also knows something of what its client has sent.
type clientConn struct {
	socketConn
	received *received
}

// received is what a client has sent so far.
type received struct {
	any    atomic.Bool // the server has read something
	length atomic.Bool // a Content-Length was among it, or a text like it
	match  int         // how many letters of contentLength the latest bytes are
}

func (c clientConn) Read(p []byte) (int, error) {
	n, err := c.socketConn.Read(p)
	c.received.note(p[:n])
	return n, err
}

const contentLength = "content-length"

// note looks for a Content-Length until it has found one. The first letter of that name occurs in it only once, so
// after a mismatch only the latest byte can begin a new match.
func (r *received) note(p []byte) {
	// Stored only once, since a store costs more than a load.
	if len(p) > 0 && !r.any.Load() {
		r.any.Store(true)
	}
	if r.length.Load() {
		return
	}

	for _, b := range p {
		// Names of headers have no case. Some other bytes become letters here, too; a false match does little harm:
		// the connection is closed after its request.
		lower := b | 0x20
		if lower != contentLength[r.match] {
			r.match = 0
		}
		if lower == contentLength[r.match] {
			r.match++
		}
		if r.match == len(contentLength) {
			r.length.Store(true)
			return
		}
	}
}

// MayHideLength reports whether the request may have had a Content-Length beside its Transfer-Encoding. The HTTP server
// removes it, so only the bytes of the connection tell; with TLS these are encrypted, so the answer is always true.
func MayHideLength(r *http.Request) bool {
	v, ok := r.Context().Value(visitKey{}).(visit)
	if !ok || r.TLS != nil {
		return true
	}
	client, ok := v.conn.(clientConn)

	return !ok || client.received.length.Load()
}

// said reports whether the client has sent anything, even if the server has not read it yet.
func said(c net.Conn) bool {
	client, ok := c.(clientConn)
	return ok && client.received.any.Load() || unreadBytes(c)
}

// refusal follows the status line in the HTTP server's own refusals, each of which is
// one write. No answer of a handler begins so.
var refusal = []byte("Content-Type: text/plain; charset=utf-8\r\nConnection: close\r\n\r\n")

// noTLS follows the status line in the refusal of a client that does not speak TLS to a port that does.
var noTLS = []byte("\r\nClient sent an HTTP request to an HTTPS server.\n")

// unexpected ends the status line of a request with an unknown expectation, whose refusal has no text. No handler
// answers so.
var unexpected = []byte(" 417 Expectation Failed")

func (c clientConn) Write(p []byte) (int, error) {
	line, rest, _ := bytes.Cut(p, []byte("\r\n"))
	plain := bytes.Equal(rest, noTLS)
	refused := plain || bytes.HasPrefix(rest, refusal) || bytes.HasSuffix(line, unexpected)
	// A shorter line has no status to read below.
	if !refused || len(line) < len("HTTP/1.1 400") {
		return c.socketConn.Write(p)
	}
	status, err := strconv.Atoi(string(line[9:12]))
	if err != nil {
		return c.socketConn.Write(p)
	}

	h := http.Header{"Connection": {"close"}}
	said := problem{Status: status, Detail: unreadable(status)}
	if plain {
		said.Detail = "This port speaks TLS only; use https."
	}
	_, body := said.describe(h)

	var b bytes.Buffer
	b.Write(line)
	b.WriteString("\r\n")
	_ = h.Write(&b) // a Buffer takes everything
	b.WriteString("\r\n")
	b.Write(body)
	if _, err := c.socketConn.Write(b.Bytes()); err != nil {
		return 0, err
	}

	// The server has written p, and takes any other number for an error.
	return len(p), nil
}

// unreadable returns why the HTTP server itself refused a request with this status.
func unreadable(status int) string {
	switch status {
	case http.StatusRequestHeaderFieldsTooLarge:
		return "The header of the request is too large; send fewer or shorter cookies and header lines."
	case http.StatusNotImplemented:
		return "The server does not know the Transfer-Encoding of the request; it knows only chunked."
	case http.StatusHTTPVersionNotSupported:
		return "The server supports only HTTP/1.0 and HTTP/1.1."
	case http.StatusExpectationFailed:
		return "The server supports only the expectation 100-continue."
	}
	return "The request cannot be read; is its path percent-encoded, each % followed by two hexadecimal digits?"
}
