package rpc

import (
	"bytes"
	"cmp"
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/url"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"headcount/presence"
	"headcount/presence/seal"
)

const (
	timeout     = 5 * time.Second // of a request, in addition to its context
	dialTimeout = 2 * time.Second
	maxConns    = 32 // to one address; further requests wait
	maxIdle     = 8  // of these
)

// ClientConfig tunes a Client. A zero field takes its default.
type ClientConfig struct {
	Keys [][]byte                                                          // the cluster's secrets; the first signs
	Name string                                                            // this process's name; required
	Dial func(ctx context.Context, network, addr string) (net.Conn, error) // default: the system's
	// Transport replaces the Client's own connections, so that Dial has no effect.
	Transport  http.RoundTripper
	Now        func() time.Time      // the time of the cluster; default time.Now
	Registerer prometheus.Registerer // registers the client's metrics; nil: there are none
}

// Client sends requests to other processes. Any goroutine may use it.
type Client struct {
	cfg         ClientConfig
	keys        *seal.Keys
	http        *http.Client
	incarnation uint64
	number      atomic.Uint64
	requests    *prometheus.CounterVec
}

// NewClient returns a Client.
func NewClient(cfg ClientConfig) (*Client, error) {
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	if err := checkName(cfg.Name); err != nil {
		return nil, err
	}

	keys, err := seal.NewKeys(cfg.Keys, purpose)
	if err != nil {
		return nil, fmt.Errorf("rpc: %w", err)
	}

	if cfg.Transport == nil {
		if cfg.Dial == nil {
			cfg.Dial = (&net.Dialer{Timeout: dialTimeout, KeepAlive: 15 * time.Second}).DialContext
		}
		cfg.Transport = &http.Transport{
			DialContext:            cfg.Dial,
			MaxConnsPerHost:        maxConns,
			MaxIdleConnsPerHost:    maxIdle,
			MaxIdleConns:           256,
			IdleConnTimeout:        time.Minute, // less than the servers' idle timeout
			MaxResponseHeaderBytes: 16 << 10,
			DisableCompression:     true,
		}
	}

	c := &Client{
		cfg: cfg, keys: keys, incarnation: rand.Uint64(),
		http: &http.Client{
			Transport: cfg.Transport,
			// A redirect would take the signed request to an address that nobody chose.
			CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		},
		requests: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "headcount_cluster_calls_total", Help: "Requests to other processes, by kind and code of the answer.",
		}, []string{"path", "code"}),
	}

	if cfg.Registerer != nil {
		cfg.Registerer.MustRegister(c.requests)
	}

	return c, nil
}

// Close closes idle connections.
func (c *Client) Close() { c.http.CloseIdleConnections() }

// PushUpdates sends updates to the process at addr: at most 1,024, which fit into one request.
// It skips invalid updates, and returns an error about them after it has sent all others. Without
// updates the call only shows that this process reaches the other one.
func (c *Client) PushUpdates(ctx context.Context, addr string, updates []presence.Update) (wrong error) {
	wire := wireUpdates{Updates: make([]wireUpdate, 0, len(updates))}
	for _, u := range updates {
		if err := u.Check(); err != nil {
			wrong = fmt.Errorf("rpc: push updates to %s: %w", addr, err)
			continue
		}
		wire.Updates = append(wire.Updates, wireUpdate{
			Topic:       u.Topic.String(),
			Incarnation: u.Version.Incarnation,
			Sequence:    u.Version.Sequence,
			Stale:       u.Stale,
			Value:       u.Value,
		})
	}

	// An empty push would be a greeting.
	if wrong != nil && len(wire.Updates) == 0 {
		return wrong
	}

	body, err := json.Marshal(wire)
	if err == nil {
		_, err = c.ask(ctx, addr, updatesPath, body, http.StatusNoContent)
	}
	if err != nil {
		return fmt.Errorf("rpc: push updates to %s: %w", addr, err)
	}

	return wrong
}

// Hold has the presence node at addr take, renew or end a hold. Its errors are
// presence.ErrTooMany, presence.ErrNotOwner, presence.ErrOvertaken, and
// presence.ErrUnavailable when the node or its store cannot be reached; in that case
// the change may still have taken effect.
func (c *Client) Hold(ctx context.Context, addr string, change presence.HoldChange) error {
	if err := presence.CheckName(change.Page); err != nil {
		return fmt.Errorf("rpc: hold: %w", err)
	}

	// The clock of this machine may be wrong, so the age of the call is what counts.
	asked := c.cfg.Now().Add(-time.Since(change.Asked))

	body, err := json.Marshal(wireHold{
		User:  fmt.Sprintf("%016x", uint64(change.User)),
		Page:  change.Page,
		On:    &change.On,
		Asked: asked.UnixMilli(),
	})
	if err != nil {
		return fmt.Errorf("rpc: hold: %w", err)
	}

	if _, err := c.ask(ctx, addr, holdPath, body, http.StatusNoContent); err != nil {
		return fmt.Errorf("rpc: hold at %s: %w", addr, err)
	}

	return nil
}

// ask makes a request, and repeats it once if its connection broke: the server may have
// just closed an idle connection. All requests are safe to repeat. It returns the body of
// an answer with the status ok.
func (c *Client) ask(ctx context.Context, addr, path string, body []byte, ok int) ([]byte, error) {
	within, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()

	answer, err := c.try(within, addr, path, body, ok)
	if dropped(err) && within.Err() == nil {
		answer, err = c.try(within, addr, path, body, ok)
	}

	code := "ok"
	refusal := (*Error)(nil)
	switch {
	case err == nil:
	case errors.As(err, &refusal):
		code = refusal.label()
	// The caller has given up, which says nothing about the other process.
	case ctx.Err() != nil:
		code = "canceled"
		err = fmt.Errorf("%w: %w", presence.ErrUnavailable, context.Cause(ctx))
	default:
		code = codeUnavailable
		err = fmt.Errorf("%w: %w", presence.ErrUnavailable, err)
	}

	c.requests.WithLabelValues(path, code).Inc()
	return answer, err
}

// dropped reports whether an established connection broke.
func dropped(err error) bool {
	if err == nil {
		return false
	}

	answer := (*Error)(nil)
	answered := errors.As(err, &answer)
	op := (*net.OpError)(nil)
	// Where nobody listens, another attempt would fail as well.
	notEstablished := errors.As(err, &op) && op.Op == "dial"

	return !answered && !notEstablished
}

func (c *Client) try(ctx context.Context, addr, path string, body []byte, ok int) ([]byte, error) {
	u := url.URL{Scheme: "http", Host: addr, Path: path, RawQuery: untilQuery(ctx, c.cfg.Now())}
	req, err := http.NewRequestWithContext(ctx, http.MethodPut, u.String(), bytes.NewReader(body))
	if err != nil {
		return nil, err
	}

	// The transport must not repeat a request: every attempt needs its own number.
	req.GetBody = nil
	c.sign(req, body)

	resp, err := c.http.Do(req)
	if err != nil {
		if e := (*url.Error)(nil); errors.As(err, &e) {
			err = e.Err // callers add the method and the address themselves
		}
		return nil, err
	}
	defer resp.Body.Close()

	answer, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer)) // to the end, so that the connection can be reused
	if err != nil && resp.StatusCode != http.StatusNoContent {
		return nil, err
	}
	if resp.StatusCode == ok {
		return answer, nil
	}

	var p problem
	// The answer may be that of a proxy, or of another program at that address.
	if json.Unmarshal(answer, &p) != nil || p.Code == "" {
		p = problem{Title: resp.Status}
	}
	return nil, &Error{Status: resp.StatusCode, Code: p.Code, Detail: cmp.Or(p.Detail, p.Title)}
}

func (c *Client) sign(req *http.Request, body []byte) {
	// One goroutine at a time may use a Signer, so each request makes one.
	s := c.keys.Signer()
	digest := digestOf(body)

	header := credentials{s.ID(), c.cfg.Name, c.cfg.Now().UnixMilli(), c.incarnation, c.number.Add(1)}.header()
	mac := s.Sign(nil, signed(req.Method, req.Host, req.URL.RequestURI(), digest, header))

	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("Content-Digest", digest)
	req.Header.Set("Authorization", header+macPart+hex.EncodeToString(mac))
}

// Error is the error answer of another process. It wraps presence.ErrTooMany, presence.ErrUnavailable,
// presence.ErrNotOwner, presence.ErrOvertaken or the Refusal of the other process.
type Error struct {
	Status int
	Code   string // empty when the answer is not one that a Handler writes
	Detail string
}

func (e *Error) Error() string {
	return fmt.Sprintf("answered %d: %s", e.Status, presence.Excerpt(e.Detail))
}

// errorOf maps the codes of problems to errors.
var errorOf = map[string]error{
	codeTooMany:     presence.ErrTooMany,
	codeUnavailable: presence.ErrUnavailable,
	codeNotOwner:    presence.ErrNotOwner,
	codeOvertaken:   presence.ErrOvertaken,
}

func init() {
	for _, r := range []*seal.Refusal{
		seal.ErrKey, seal.ErrForged, seal.ErrClock, seal.ErrOld, seal.ErrFuture, seal.ErrReplayed, seal.ErrSenders,
		ErrFormat, ErrUnsigned, ErrMisdirected, ErrDigest, ErrOversized, ErrTruncated, ErrMalformed, ErrLate,
	} {
		errorOf[r.Reason] = r
	}
}

// Unwrap returns the error that the code stands for, or nil.
func (e *Error) Unwrap() error { return errorOf[e.Code] }

// label returns the code if it is known, and otherwise "other": foreign text must not
// become a label.
func (e *Error) label() string {
	if errorOf[e.Code] != nil || e.Code == codeInternal {
		return e.Code
	}
	return "other"
}
