package rpc_test

import (
	"bytes"
	"context"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"headcount/presence/rpc"
)

// links is a function that serves links.
type links func(stream io.ReadWriteCloser, key []byte)

func (f links) Serve(stream io.ReadWriteCloser, key []byte) { f(stream, key) }

// linked runs test with a client, and a server that sends its key and then echoes what it receives.
func linked(t *testing.T, keys [][]byte, test func(t *testing.T, n *network, c *rpc.Client)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		n := newNetwork()

		h := newHandler(t, rpc.Config{
			Keys: secret, Name: server,
			Links: links(func(stream io.ReadWriteCloser, key []byte) {
				defer stream.Close()
				_, _ = stream.Write(key)
				_, _ = io.Copy(stream, stream)
			}),
		})
		// A link must outlive these limits, which are those of a single request.

		srv := &http.Server{Handler: h, ReadTimeout: time.Second, WriteTimeout: time.Second, IdleTimeout: time.Second}
		done := make(chan error, 1)
		go func() { done <- srv.Serve(n) }()

		c := newClient(t, rpc.ClientConfig{Keys: keys, Dial: n.Dial})

		test(t, n, c)

		c.Close()
		srv.Close()
		<-done
		synctest.Wait()
	})
}

// Both sides of a link have the same key, and every link has another. A link outlives the time limits of the HTTP
// server, and the context in which it was made.
func TestLink(t *testing.T) {
	linked(t, secret, func(t *testing.T, _ *network, c *rpc.Client) {
		var keys [2][]byte

		for i := range keys {
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			stream, key, err := c.Link(ctx, server)
			cancel()
			if err != nil {
				t.Fatal(err)
			}

			keys[i] = key

			// After this the limits of the server and of the context have passed.
			time.Sleep(time.Minute)

			theirs := make([]byte, len(key))
			if _, err := io.ReadFull(stream, theirs); err != nil || !bytes.Equal(theirs, key) || len(key) != 16 {
				t.Errorf("the keys are %x and %x: %v", key, theirs, err)
			}

			if _, err := stream.Write([]byte("hello")); err != nil {
				t.Error(err)
			}

			echo := make([]byte, 5)
			if _, err := io.ReadFull(stream, echo); err != nil || string(echo) != "hello" {
				t.Errorf("the echo is %q, %v; want hello", echo, err)
			}

			if err := stream.Close(); err != nil {
				t.Error(err)
			}
		}

		if bytes.Equal(keys[0], keys[1]) {
			t.Error("two links have the same key")
		}
	})
}

func TestLinkRefusals(t *testing.T) {
	linked(t, [][]byte{[]byte("another secret")}, func(t *testing.T, _ *network, c *rpc.Client) {
		if _, _, err := c.Link(t.Context(), server); err == nil || !strings.Contains(err.Error(), "401") {
			t.Errorf("with another secret the link gets %v, want 401", err)
		}
	})

	linked(t, secret, func(t *testing.T, _ *network, c *rpc.Client) {
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if _, _, err := c.Link(ctx, server); err == nil {
			t.Error("a link was made though its context had ended")
		}
	})
}

// A replayed request does not make a second link.
func TestLinkIsMadeOnce(t *testing.T) {
	linked(t, secret, func(t *testing.T, n *network, _ *rpc.Client) {
		recorded := &bytes.Buffer{}

		c := newClient(t, rpc.ClientConfig{
			Keys: secret,
			Dial: func(ctx context.Context, network, addr string) (net.Conn, error) {
				conn, err := n.Dial(ctx, network, addr)
				return tapped{conn, recorded}, err
			},
		})

		stream, _, err := c.Link(t.Context(), server)
		if err != nil {
			t.Fatal(err)
		}
		_ = stream.Close()
		c.Close()

		// An attacker who has recorded the request sends it again.
		conn, err := n.Dial(t.Context(), "tcp", server)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()

		go func() { _, _ = conn.Write(recorded.Bytes()) }()

		line := make([]byte, len("HTTP/1.1 401"))
		if _, err := io.ReadFull(conn, line); err != nil || string(line) != "HTTP/1.1 401" {
			t.Errorf("the answer begins with %q: %v", line, err)
		}
	})
}

// tapped records what is written to a connection.
type tapped struct {
	net.Conn
	to *bytes.Buffer
}

func (r tapped) Write(b []byte) (int, error) {
	r.to.Write(b)

	return r.Conn.Write(b)
}
