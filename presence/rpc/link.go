package rpc

import (
	"bufio"
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"time"

	"headcount/presence/seal"
)

// A request can become a link: a connection on which both sides send frames of their own, see package link of the
// counters. It begins as an HTTP upgrade (RFC 9110, 7.8), signed like every request:
//
//	PUT /link, Connection: Upgrade, Upgrade: headcount-link-1
//	101, the same two headers, and Headcount-Nonce: 32 hex digits
//
// The key of the frames' signatures is HMAC-SHA256 with the cluster's secret, truncated to 16 bytes, over
// "headcount-link-1", the Authorization header and the nonce, in lines. The Guard accepts a header once, and the server
// chooses the nonce, so no two links have the same key.
const (
	linkPath     = "/link"
	linkProtocol = "headcount-link-1"
	nonceHeader  = "Headcount-Nonce"
	nonceSize    = 16 // bytes
)

// ErrNoLink is in the error of a Link that the other process answered and did not make.
var ErrNoLink = errors.New("no link")

// Links serves the links of other processes.
type Links interface {
	// Serve uses a connection until it ends. The key is that of signatures, nil without secrets.
	Serve(stream io.ReadWriteCloser, key []byte)
}

// linkKey returns the key of a link, nil without secrets.
func linkKey(s *seal.Signer, id seal.ID, authorization, nonce string) []byte {
	// Both sides have chosen a part of the key, so neither can be made to use an old one again.
	return s.Derive(id, []byte(linkProtocol+"\n"+authorization+"\n"+nonce))
}

// Link makes a link to the process at addr. ctx limits how long that takes, not how long the link lasts.
func (c *Client) Link(ctx context.Context, addr string) (io.ReadWriteCloser, []byte, error) {
	// The link outlives ctx, so it has a context of its own, which ctx ends only while the link is being made.
	lifetime, end := context.WithCancel(context.Background())
	made := context.AfterFunc(ctx, end)

	stream, key, err := c.link(lifetime, addr)
	inTime := made()
	// ctx has ended just now, and lifetime with it.
	if err == nil && !inTime {
		_ = stream.Close()
		err = context.Cause(ctx)
	}

	if err != nil {
		end()
		return nil, nil, fmt.Errorf("rpc: link to %s: %w", addr, err)
	}

	return closer{stream, end}, key, nil
}

// closer is a link that releases what belongs to it when it closes.
type closer struct {
	io.ReadWriteCloser
	end context.CancelFunc
}

// Close implements io.Closer.
func (c closer) Close() error {
	defer c.end()

	return c.ReadWriteCloser.Close()
}

func (c *Client) link(ctx context.Context, addr string) (io.ReadWriteCloser, []byte, error) {
	u := url.URL{Scheme: "http", Host: addr, Path: linkPath}
	req, err := http.NewRequestWithContext(ctx, http.MethodPut, u.String(), http.NoBody)
	if err != nil {
		return nil, nil, err
	}

	c.sign(req, nil)
	req.Header.Set("Connection", "Upgrade")
	req.Header.Set("Upgrade", linkProtocol)

	resp, err := c.http.Do(req)
	if err != nil {
		return nil, nil, err
	}

	// net/http returns the connection as the body of an answer 101.
	stream, both := resp.Body.(io.ReadWriteCloser)
	if resp.StatusCode != http.StatusSwitchingProtocols || !both {
		defer resp.Body.Close()
		return nil, nil, fmt.Errorf("%w: answered %s: run the same version everywhere", ErrNoLink, resp.Status)
	}

	signer := c.keys.Signer()

	return stream, linkKey(signer, signer.ID(), req.Header.Get("Authorization"), resp.Header.Get(nonceHeader)), nil
}

// serveLink makes a request whose signature is right a link.
func (h *Handler) serveLink(w http.ResponseWriter, r *http.Request) {
	if r.Header.Get("Upgrade") != linkProtocol {
		w.Header().Set("Upgrade", linkProtocol)
		writeProblem(w, http.StatusUpgradeRequired, "upgrade", "send Upgrade: "+linkProtocol)
		return
	}

	// From here on the server knows nothing of the connection: whoever serves the link closes it.
	conn, buffered, err := http.NewResponseController(w).Hijack()
	if err != nil {
		writeProblem(w, http.StatusInternalServerError, codeInternal, "")
		return
	}

	random := make([]byte, nonceSize)
	_, _ = rand.Read(random) // never fails
	nonce := hex.EncodeToString(random)

	// The limits of the HTTP server do not hold for what follows.
	_ = conn.SetDeadline(time.Time{})
	_, err = fmt.Fprintf(conn,
		"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: %s\r\n%s: %s\r\n\r\n",
		linkProtocol, nonceHeader, nonce)
	if err != nil {
		_ = conn.Close()
		return
	}

	authorization := r.Header.Get("Authorization")
	caller, _, _, _ := parseCredentials(authorization) // open has parsed it before
	h.cfg.Links.Serve(hijacked{conn, buffered.Reader}, linkKey(h.keys.Signer(), caller.key, authorization, nonce))
}

// hijacked is a connection whose first bytes the HTTP server may have read already.
type hijacked struct {
	net.Conn
	from *bufio.Reader
}

// Read implements io.Reader.
func (c hijacked) Read(b []byte) (int, error) { return c.from.Read(b) }
