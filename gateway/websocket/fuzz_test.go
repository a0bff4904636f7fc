package websocket

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	oracle "github.com/coder/websocket"
)

// FuzzReader reads the same bytes with the reader and with coder/websocket. Both have to see the same frames and
// messages, and the same end, except for lengths in a longer form than necessary. The library leaves UTF-8 to its
// callers, so the test checks it.
func FuzzReader(f *testing.F) {
	for _, in := range []string{
		masked(Text, "hello") + masked(Close, "\x03\xe8bye"),
		masked(firstPart, "a") + masked(Ping, "p") + masked(nextPart, "") + masked(lastPart, "b"),
		masked(Binary, strings.Repeat("x", 200)) + masked(Pong, ""),
	} {
		f.Add([]byte(in))
	}

	// After these bytes every frame is complete, and then something invalid follows. So there always is an end to
	// compare.
	tail := make([]byte, 2*MaxMessage)
	f.Fuzz(func(t *testing.T, in []byte) {
		in = append(slices.Clip(in), tail...)
		want := oracleReads(t, in)

		// The input comes as a whole, and in pieces of a size that depends on it.
		for _, step := range []int{len(in), 1 + len(in)%97} {
			got, want := readAll(string(in), step), want
			if last := len(got) - 1; last >= 0 && strings.HasSuffix(got[last], errLongForm.Reason) {
				got, want = got[:last], want[:min(last, len(want))] // the library accepts a length in any form
			}

			if got := codes(got); !slices.Equal(got, want) {
				t.Fatalf("%x in pieces of %d bytes\ngot  %q\nwant %q", in[:len(in)-len(tail)], step, got, want)
			}
		}
	})
}

// codes reduces each error to its code.
func codes(lines []string) []string {
	last := len(lines) - 1
	if last >= 0 && !strings.HasPrefix(lines[last], "0x") {
		lines[last] = lines[last][:4]
	}

	return lines
}

// oracleReads does what readAll does, with the library. Of errors it returns only the codes.
func oracleReads(t *testing.T, in []byte) (lines []string) {
	t.Helper()
	end := func(code int) []string { return append(lines, fmt.Sprint(code)) }

	ws, err := oracle.Accept(&oneRequest{in: in}, &http.Request{
		Method: http.MethodGet, ProtoMajor: 1, ProtoMinor: 1,
		Header: http.Header{
			"Connection": {"Upgrade"}, "Upgrade": {"websocket"},
			"Sec-Websocket-Version": {"13"}, "Sec-Websocket-Key": {"AAAAAAAAAAAAAAAAAAAAAA=="},
		},
	}, &oracle.AcceptOptions{
		CompressionMode: oracle.CompressionDisabled,
		OnPingReceived: func(_ context.Context, p []byte) bool {
			lines = append(lines, fmt.Sprintf("%#x %q", Ping, p))
			return false
		},
		OnPongReceived: func(_ context.Context, p []byte) {
			lines = append(lines, fmt.Sprintf("%#x %q", Pong, p))
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	defer ws.CloseNow()

	ws.SetReadLimit(MaxMessage)
	for {
		kind, text, err := ws.Read(context.Background())
		if err == nil && kind == oracle.MessageText && !utf8.Valid(text) {
			return end(StatusInvalidPayload)
		}

		if err == nil {
			lines = append(lines, fmt.Sprintf("%#x %q",
				map[oracle.MessageType]byte{oracle.MessageText: Text, oracle.MessageBinary: Binary}[kind], text))
			continue
		}

		if errors.Is(err, oracle.ErrMessageTooBig) {
			return end(StatusTooBig)
		}

		var closed oracle.CloseError
		if !errors.As(err, &closed) {
			return end(StatusProtocolError)
		}

		if !utf8.ValidString(closed.Reason) {
			return end(StatusInvalidPayload)
		}

		var payload []byte
		// A close frame without a code has no payload.
		if closed.Code != oracle.StatusNoStatusRcvd {
			payload = append(binary.BigEndian.AppendUint16(nil, uint16(closed.Code)), closed.Reason...)
		}

		return append(lines, fmt.Sprintf("%#x %q", Close, payload))
	}
}

// oneRequest is a ResponseWriter whose connection delivers in, and accepts whatever is written.
type oneRequest struct{ in []byte }

func (*oneRequest) Header() http.Header         { return http.Header{} }
func (*oneRequest) WriteHeader(int)             {}
func (*oneRequest) Write(p []byte) (int, error) { return len(p), nil }

// Hijack implements http.Hijacker.
func (r *oneRequest) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	c := &memoryConn{r}
	return c, bufio.NewReadWriter(bufio.NewReader(c), bufio.NewWriter(c)), nil
}

type memoryConn struct{ *oneRequest }

func (c *memoryConn) Read(p []byte) (int, error) {
	if len(c.in) == 0 {
		return 0, io.EOF
	}

	n := copy(p, c.in)
	c.in = c.in[n:]

	return n, nil
}

func (*memoryConn) Close() error                     { return nil }
func (*memoryConn) LocalAddr() net.Addr              { return nil }
func (*memoryConn) RemoteAddr() net.Addr             { return nil }
func (*memoryConn) SetDeadline(time.Time) error      { return nil }
func (*memoryConn) SetReadDeadline(time.Time) error  { return nil }
func (*memoryConn) SetWriteDeadline(time.Time) error { return nil }
