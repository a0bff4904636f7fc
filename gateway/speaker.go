package gateway

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"math"
	"net"
	"net/http"
	"runtime"
	"sync"
	"time"

	"github.com/coder/websocket"
)

// speaker is the WebSocket library at work for one client at a time. It is
// given one whole frame after the other, so it never waits for a client, and
// between messages it has nothing to remember: a handful of speakers serve all
// connections, which need not keep one each (2.5 KB). Only in the middle of a
// fragmented message a connection keeps its own.
type speaker struct {
	net.Conn // nil: the library only reads, writes and closes
	ws       *websocket.Conn
	c        *conn
	frame    []byte // what is left of the frame
	closing  bool   // the library has written a close frame

	kind    websocket.MessageType
	message io.Reader // the message under way; nil between messages
	n       int
	text    [maxMessage + 1]byte // the first n bytes of it
}

// speakers are of use to one gateway's connections.
type speakers struct{ pool sync.Pool }

func (s *speakers) get() *speaker {
	if sp, ok := s.pool.Get().(*speaker); ok {
		return sp
	}
	return newSpeaker()
}

// errFrameEnd is what the library gets at the end of a frame. At that place it
// has read nothing of the next one, and can be asked again.
var errFrameEnd = errors.New("nothing more yet")

// newSpeaker upgrades a request that never was: clients' own are answered
// without the library, see Gateway.accept.
func newSpeaker() *speaker {
	s := &speaker{}
	ws, err := websocket.Accept(upgrade{s}, &http.Request{
		Method: http.MethodGet, ProtoMajor: 1, ProtoMinor: 1,
		Header: http.Header{
			"Connection": {"Upgrade"}, "Upgrade": {"websocket"},
			"Sec-Websocket-Version": {"13"}, "Sec-Websocket-Key": {"AAAAAAAAAAAAAAAAAAAAAA=="},
		},
	}, &websocket.AcceptOptions{
		InsecureSkipVerify: true,
		CompressionMode:    websocket.CompressionDisabled,
		OnPingReceived:     func(_ context.Context, p []byte) bool { s.c.answerPing(p); return false },
		OnPongReceived:     func(context.Context, []byte) { s.c.alive() },
	})
	if err != nil {
		panic(err) // the request is ours
	}
	ws.SetReadLimit(-1) // read has its own, with an error frame
	// The library closes what nobody uses any more by a finalizer. There is
	// nothing to close, and the finalizer would keep the speaker for ever: it
	// refers to itself.
	runtime.SetFinalizer(ws, nil)
	s.ws = ws
	return s
}

// upgrade is the http.ResponseWriter of a request that never was.
type upgrade struct{ s *speaker }

func (upgrade) Header() http.Header         { return http.Header{} }
func (upgrade) WriteHeader(int)             {}
func (upgrade) Write(p []byte) (int, error) { return len(p), nil }

// Hijack implements http.Hijacker.
func (u upgrade) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	const control = 128 // the library writes only control frames: at most 2 + 125 bytes
	return u.s, bufio.NewReadWriter(bufio.NewReader(u.s), bufio.NewWriterSize(u.s, control)), nil
}

// Read gives the library the frame, and no more.
func (s *speaker) Read(p []byte) (int, error) {
	if len(s.frame) == 0 {
		return 0, errFrameEnd
	}
	n := copy(p, s.frame)
	s.frame = s.frame[n:]
	return n, nil
}

// Write sends what the library has to say: that it closes, and why.
func (s *speaker) Write(p []byte) (int, error) {
	if p[0] == frameClose {
		s.closing = true
		return len(p), s.c.wire.end(p)
	}
	return s.c.wire.Write(p)
}

// Close does nothing: the connection is closed by who serves it.
func (s *speaker) Close() error { return nil }

// read has the library read one frame of c. When whole, the speaker has a
// message. After an error it must not be used again.
func (s *speaker) read(c *conn, frame []byte) (whole bool, err error) {
	s.c, s.frame = c, frame
	if s.message == nil {
		s.n = 0
		s.kind, s.message, err = s.ws.Reader(context.Background())
	}
	for err == nil && s.n < len(s.text) {
		var n int
		n, err = s.message.Read(s.text[s.n:])
		s.n += n
	}
	switch {
	case err == nil || err == io.EOF: //nolint:errorlint // the end of the message is io.EOF itself
		s.message = nil
		return true, nil
	case errors.Is(err, errFrameEnd):
		return false, nil
	}
	return false, err
}

// speakerPatience is how long a speaker may take for a frame to be used again.
// The library closes itself when a control frame takes it 5 s, even a moment
// after it was done with it.
const speakerPatience = time.Second

// release makes a speaker of use to others, after a message or a control frame
// that it was given at the time.
func (s *speaker) release(began time.Time) {
	if s.n <= maxMessage && time.Since(began) < speakerPatience {
		g := s.c.g
		s.c = nil
		g.speakers.pool.Put(s)
	}
}

// maxFrame is the length of the longest frame that can be served.
const maxFrame = 14 + maxMessage

// frameSize is the length of the frame at the beginning of b, or 0 when that
// cannot be said yet. Of a frame that the library refuses for its head alone
// it is that of the head; of one that is too long for any message it is
// math.MaxInt.
func frameSize(b []byte) int {
	if len(b) < 2 {
		return 0
	}
	head, payload := 2, uint64(b[1]&0x7f)
	switch payload {
	case 126:
		if head = 4; len(b) >= head {
			payload = uint64(binary.BigEndian.Uint16(b[2:]))
		}
	case 127:
		if head = 10; len(b) >= head {
			payload = binary.BigEndian.Uint64(b[2:])
		}
	}
	if b[1]&0x80 != 0 {
		head += 4
	}
	switch {
	case len(b) < head:
		return 0
	case b[0]&0x08 != 0 && payload > 125: // a control frame
		return head
	case payload > maxMessage:
		return math.MaxInt
	}
	return head + int(payload)
}
