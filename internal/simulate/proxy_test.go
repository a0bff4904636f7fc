package simulate

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"headcount/internal/servertest"
	"headcount/internal/testkit"
)

const (
	apiKey    = "the key of the tests"
	jwtSecret = "a secret of at least thirty-two bytes"
)

// serve runs the program until the test ends, and returns its address.
func serve(t *testing.T, flags ...string) string {
	t.Helper()
	addr, admin := servertest.FreeAddr(), servertest.FreeAddr()

	var out servertest.Log
	var p servertest.Process
	cmd := exec(append([]string{
		"serve", "--listen=" + addr, "--admin-listen=" + admin, "--api-key=" + apiKey,
		"--id-secret=" + strings.Repeat("of the tests ", 3),
		"--ping-interval=1s", "--pong-timeout=2s", "--heartbeat-interval=300ms", "--presence-timeout=1s",
		"--leave-grace=200ms",
	}, flags...)...)

	cmd.Stderr = &out
	if err := p.Start(cmd); err != nil {
		t.Fatal(err)
	}

	t.Cleanup(func() {
		if status := p.End(testkit.Timeout); status != 0 {
			t.Errorf("the server ended with status %d:\n%s", status, &out)
		}
	})
	if err := servertest.Await(&p, testkit.Timeout, func(ctx context.Context) error {
		return servertest.Ready(ctx, admin)
	}); err != nil {
		t.Fatalf("%v:\n%s", err, &out)
	}

	return "http://" + addr
}

// message is a JSON object on its way from the server.
type message map[string]any

func (m message) number(name string) int64 {
	n, _ := m[name].(json.Number)
	i, _ := n.Int64()
	return i
}

func (m message) text(name string) string {
	s, _ := m[name].(string)
	return s
}

// proxy stands in front of a server. It is honest except for the functions that are set, of which it calls one at a
// time.
type proxy struct {
	URL    string
	server *httptest.Server

	asks    func(*http.Request)                // changes a request
	answers func(req *http.Request, a *answer) // changes a JSON answer
	// Changes a frame. Here first says that it is the first one of its topic on the connection.
	says   func(first bool, m message) (dropped bool)
	holds  bool          // the server does not learn that a client has gone
	delays time.Duration // delays each frame
	// The status with which every tenth call is refused, before it reaches the server; 0: none.
	refuses int

	mu   sync.Mutex
	lied int // how often one of the functions changed something
	open map[io.Closer]bool
	stop chan struct{}
}

type answer struct {
	message
	status int
	header http.Header
}

// lie changes a message, and counts the change.
func (p *proxy) lie(m message, name string, value any) {
	m[name] = value
	p.lied++
}

func (p *proxy) lies() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.lied
}

// cut ends all WebSockets, as a killed gateway does.
func (p *proxy) cut() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for c := range p.open {
		_ = c.Close()
	}
}

// start makes the proxy forward to a server until the test ends.
func (p *proxy) start(t *testing.T, server string) *proxy {
	target, err := url.Parse(server)
	if err != nil {
		t.Fatal(err)
	}
	p.open, p.stop = map[io.Closer]bool{}, make(chan struct{})

	// Answers must not be compressed, since the proxy changes them.
	transport := &http.Transport{DisableCompression: true, MaxIdleConnsPerHost: 64}

	forward := &httputil.ReverseProxy{
		Rewrite: func(r *httputil.ProxyRequest) {
			r.SetURL(target)
			r.Out.Host = r.In.Host
			r.Out.Header.Del("Accept-Encoding") // the proxy reads answers

			p.mu.Lock()
			defer p.mu.Unlock()
			if p.asks != nil {
				p.asks(r.Out)
			}
		},
		Transport: transport, ModifyResponse: p.modify, FlushInterval: -1, ErrorLog: log.New(io.Discard, "", 0),
	}

	var calls atomic.Int64
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if p.refuses != 0 && strings.HasPrefix(r.URL.Path, "/api/") && calls.Add(1)%10 == 0 {
			http.Error(w, "not now", p.refuses)
			return
		}

		forward.ServeHTTP(w, r)
	}))
	p.URL, p.server = s.URL, s

	t.Cleanup(func() {
		close(p.stop)
		p.cut()
		s.CloseClientConnections()
		s.Close()
		transport.CloseIdleConnections()
	})

	return p
}

func (p *proxy) modify(resp *http.Response) error {
	if resp.StatusCode == http.StatusSwitchingProtocols {
		conn := resp.Body.(io.ReadWriteCloser)
		p.mu.Lock()
		p.open[conn] = true
		p.mu.Unlock()
		resp.Body = &frames{ReadWriteCloser: conn, proxy: p, from: bufio.NewReader(conn), topics: map[string]bool{}}

		return nil
	}

	if p.answers == nil || !strings.Contains(resp.Header.Get("Content-Type"), "json") {
		return nil
	}

	body, err := io.ReadAll(resp.Body)
	if err != nil {
		return err
	}
	a := &answer{parse(body), resp.StatusCode, resp.Header}

	p.mu.Lock()
	p.answers(resp.Request, a)
	p.mu.Unlock()
	body, err = json.Marshal(a.message)

	// The changed answer may be longer than the true one.
	resp.StatusCode = a.status
	resp.Header.Set("Content-Length", strconv.Itoa(len(body)))
	resp.ContentLength = int64(len(body))
	resp.Body = io.NopCloser(bytes.NewReader(body))

	return err
}

func parse(text []byte) (m message) {
	dec := json.NewDecoder(bytes.NewReader(text))
	dec.UseNumber()
	if err := dec.Decode(&m); err != nil {
		panic(err)
	}

	return m
}

// frames is the connection to the server of one WebSocket.
type frames struct {
	io.ReadWriteCloser
	proxy  *proxy
	from   *bufio.Reader
	topics map[string]bool
	out    bytes.Buffer
}

func (f *frames) Read(p []byte) (int, error) {
	for f.out.Len() == 0 {
		if err := f.next(); err != nil {
			return 0, err
		}
	}
	return f.out.Read(p)
}

// next reads one frame of the server, which neither masks nor splits its frames.
func (f *frames) next() error {
	head := make([]byte, 2)
	if _, err := io.ReadFull(f.from, head); err != nil {
		return err
	}

	// The length of a frame is in the second byte, or in the two or eight bytes after it.
	size := uint64(head[1])
	if size >= 126 {
		long := make([]byte, map[uint64]int{126: 2, 127: 8}[size])
		if _, err := io.ReadFull(f.from, long); err != nil {
			return err
		}
		size = binary.BigEndian.Uint64(append(make([]byte, 8-len(long)), long...))
	}

	payload := make([]byte, size)
	if _, err := io.ReadFull(f.from, payload); err != nil {
		return err
	}

	const textFrame = 1
	if head[0]&15 == textFrame {
		f.delay()
		payload = f.change(payload)
		if payload == nil {
			return nil // dropped
		}
	}

	f.out.WriteByte(head[0])
	if len(payload) < 126 {
		f.out.WriteByte(byte(len(payload)))
	} else {
		f.out.Write(binary.BigEndian.AppendUint16([]byte{126}, uint16(len(payload))))
	}
	f.out.Write(payload)

	return nil
}

// delay waits as long as the proxy delays frames, or until the end of the test.
func (f *frames) delay() {
	if f.proxy.delays > 0 {
		select {
		case <-time.After(f.proxy.delays):
		case <-f.proxy.stop:
		}
	}
}

func (f *frames) change(payload []byte) []byte {
	f.proxy.mu.Lock()
	defer f.proxy.mu.Unlock()

	if f.proxy.says == nil {
		return payload
	}

	m := parse(payload)
	topic := m.text("page") + m.text("key")
	if f.proxy.says(!f.topics[topic], m) {
		f.proxy.lied++
		return nil
	}
	f.topics[topic] = true

	payload, err := json.Marshal(m)
	if err != nil {
		panic(err)
	}
	return payload
}

func (f *frames) Close() error {
	f.proxy.mu.Lock()
	defer f.proxy.mu.Unlock()
	if f.proxy.holds { // the server believes that the client is connected until cut
		f.proxy.lied++
		return nil
	}

	delete(f.proxy.open, f.ReadWriteCloser)
	return f.ReadWriteCloser.Close()
}
