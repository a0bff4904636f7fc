package gateway

import (
	"bytes"
	"net"
	"net/http"
	"strconv"
)

// clientConn is a *net.TCPConn in all but one kind of answer.
type clientConn struct{ *net.TCPConn }

// refusal is what follows the status line in the answers that the HTTP server
// gives by itself, each written at once; none of ours begins so.
var refusal = []byte("Content-Type: text/plain; charset=utf-8\r\nConnection: close\r\n\r\n")

func (c clientConn) Write(p []byte) (int, error) {
	line, rest, _ := bytes.Cut(p, []byte("\r\n"))
	if !bytes.HasPrefix(rest, refusal) || len(line) < len("HTTP/1.1 400") {
		return c.TCPConn.Write(p)
	}
	status, err := strconv.Atoi(string(line[9:12]))
	if err != nil {
		return c.TCPConn.Write(p)
	}
	h := headerOnly{h: http.Header{"Connection": {"close"}}}
	writeProblem(&h, status, "The request cannot be read; is its path percent-encoded, each % followed by two hexadecimal digits?")
	var b bytes.Buffer
	b.Write(line)
	b.WriteString("\r\n")
	_ = h.h.Write(&b) // to memory
	b.WriteString("\r\n")
	b.Write(h.body)
	if _, err := c.TCPConn.Write(b.Bytes()); err != nil {
		return 0, err
	}
	return len(p), nil
}

// headerOnly keeps an answer.
type headerOnly struct {
	h    http.Header
	body []byte
}

func (w *headerOnly) Header() http.Header { return w.h }
func (w *headerOnly) WriteHeader(int)     {}
func (w *headerOnly) Write(p []byte) (int, error) {
	w.body = append(w.body, p...)
	return len(p), nil
}
