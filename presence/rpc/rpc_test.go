package rpc_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"
	"pgregory.net/rapid"

	"headcount/internal/testkit"
	"headcount/presence"
	"headcount/presence/rpc"
	"headcount/presence/seal"
)

func TestMain(m *testing.M) { testkit.Main(m) }

const server = "10.0.0.2:7946"

var secret = [][]byte{[]byte("secret")}

// direct is a RoundTripper that calls a handler, and may change what is sent.
type direct struct {
	handler http.Handler
	change  func(r *http.Request, body []byte) []byte
	answer  *http.Response // the last answer
}

func (d *direct) RoundTrip(r *http.Request) (*http.Response, error) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return nil, err
	}

	in := r.Clone(r.Context())
	in.RequestURI = r.URL.RequestURI()
	in.RemoteAddr = "10.0.0.1:1000"
	if d.change != nil {
		body = d.change(in, body)
	}

	in.Body = io.NopCloser(bytes.NewReader(body))

	// The length is unknown, as with a chunked body.
	in.ContentLength = -1
	if in.Host == "" {
		in.Host = in.URL.Host
	}

	w := httptest.NewRecorder()
	d.handler.ServeHTTP(w, in)
	d.answer = w.Result()
	return d.answer, nil
}

func newHandler(t rapid.TB, cfg rpc.Config) *rpc.Handler {
	t.Helper()
	h, err := rpc.NewHandler(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return h
}

func newClient(t rapid.TB, cfg rpc.ClientConfig) *rpc.Client {
	t.Helper()
	if cfg.Name == "" {
		cfg.Name = "10.0.0.1:7946"
	}

	c, err := rpc.NewClient(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func TestUpdatesComeBack(t *testing.T) {
	// Keys and values have characters that JSON has to escape.
	key := rapid.OneOf(rapid.SampledFrom([]string{"*", "home", `a"b\c`, "日本", "<&>"}),
		rapid.StringMatching(`[a-z0-9/ é]{1,60}`))
	gen := rapid.Custom(func(t *rapid.T) presence.Update {
		return presence.Update{
			Topic: presence.Topic{
				Site: presence.SiteOf(rapid.SampledFrom([]string{"", "shop-1"}).Draw(t, "site")),
				Kind: rapid.SampledFrom([]presence.Kind{
					presence.KindCount, presence.KindOf("level"), presence.KindOf("of-tomorrow"),
				}).Draw(t, "kind"),
				Key: key.Draw(t, "key"),
			},
			Version: presence.Version{
				Incarnation: rapid.Uint64().Draw(t, "incarnation"), Sequence: rapid.Uint64().Draw(t, "sequence"),
			},
			Stale: rapid.Bool().Draw(t, "stale"),
			Value: rapid.StringMatching(`[a-z0-9 "\\,é]{0,30}`).Draw(t, "value"),
		}
	})

	rapid.Check(t, func(t *rapid.T) {
		want := rapid.SliceOf(gen).Draw(t, "updates")
		var got []presence.Update

		h := newHandler(t, rpc.Config{
			Keys: secret, Name: server,
			Updates: onUpdates(func(from string, updates []presence.Update) {
				if from != "10.0.0.1:7946" {
					t.Errorf("the updates are from %q, want 10.0.0.1:7946", from)
				}

				got = append(got, updates...)
			}),
		})

		c := newClient(t, rpc.ClientConfig{Keys: secret, Transport: &direct{handler: h}})
		if err := c.PushUpdates(t.Context(), server, want); err != nil {
			t.Fatal(err)
		}

		if len(got)+len(want) > 0 && !reflect.DeepEqual(got, want) {
			t.Fatalf("sent\n%+v\ngot\n%+v", want, got)
		}
	})
}

// An invalid update is skipped, and the longest pages of a full push fit into one request.
func TestManyUpdatesTakeOneRequest(t *testing.T) {
	requests, got := 0, 0
	h := newHandler(t, rpc.Config{Keys: secret, Updates: onUpdates(func(_ string, updates []presence.Update) {
		requests++
		got += len(updates)
	})})
	c := newClient(t, rpc.ClientConfig{Keys: secret, Transport: &direct{handler: h}})

	updates := make([]presence.Update, 1024)
	for i := range updates {
		// JSON escapes "<" with six bytes, so these pages are the longest on the wire.
		updates[i] = presence.Count{Page: strings.Repeat("<", 127) + strconv.Itoa(i%10), Users: int64(i)}.Update()
	}

	// One update is invalid. The others are sent all the same.
	updates[77].Key = "\x00"

	if err := c.PushUpdates(t.Context(), server, updates); !errors.Is(err, presence.ErrTopic) {
		t.Errorf("got %v, want an error about the invalid update", err)
	}

	if got != len(updates)-1 || requests != 1 {
		t.Errorf("got %d updates in %d requests", got, requests)
	}
}

// TestAnotherFormat: requests of another format are counted, logged once and refused with an explanation. None of them
// is carried out.
func TestAnotherFormat(t *testing.T) {
	var log bytes.Buffer
	reg := prometheus.NewRegistry()
	h := newHandler(t, rpc.Config{
		Keys: secret, Registerer: reg, Log: zerolog.New(&log),
		Holds: onHold(func(context.Context, presence.HoldChange) error {
			t.Error("a hold of another format was carried out")
			return nil
		}),
	})

	for i, format := range []string{"", "format=1, ", "format=3, ", "format=, "} {
		d := &direct{handler: h, change: func(r *http.Request, body []byte) []byte {
			a := r.Header.Get("Authorization")
			r.Header.Set("Authorization", strings.Replace(a, "format=2, ", format, 1))
			if i == 1 { // the oldest format had other paths
				r.URL.Path = "/v1/counts"
				r.RequestURI = "/v1/counts"
			}

			return body
		}}

		// The format is checked before the signature, which another format may compute in another way.
		err := newClient(t, rpc.ClientConfig{Keys: secret, Transport: d}).Hold(t.Context(), server, asked(1, "p", true))
		if !errors.Is(err, rpc.ErrFormat) || d.answer.StatusCode != 400 ||
			!strings.Contains(err.Error(), "run the same version everywhere") {
			t.Errorf("with the format %q the answer is %d, %v; want an explanation", format, d.answer.StatusCode, err)
		}
	}

	if n := refusedFor(t, reg, "format"); n != 4 {
		t.Errorf("%v requests were refused for their format, want 4", n)
	}
	if n := strings.Count(log.String(), "run the same version everywhere"); n != 1 {
		t.Errorf("logged %d times, want once:\n%s", n, log.String())
	}
}

type onUsers func(context.Context, []presence.User) ([]presence.UserState, error)

func (f onUsers) ReceiveUsers(ctx context.Context, users []presence.User) ([]presence.UserState, error) {
	return f(ctx, users)
}

// The states are in the order of the users. A node that does not own one of them answers ErrNotOwner.
func TestUsers(t *testing.T) {
	users := []presence.User{1<<63 + 5, 0, 7}
	states := []presence.UserState{{Since: time.Unix(1700000000, 0), Pages: 2}, {}, {Since: time.Unix(1, 0), Pages: 1}}
	var fails error

	h := newHandler(t, rpc.Config{
		Keys: secret,
		Users: onUsers(func(_ context.Context, asked []presence.User) ([]presence.UserState, error) {
			if !slices.Equal(asked, users) {
				t.Errorf("the node was asked about %v", asked)
			}
			return states, fails
		}),
	})
	d := &direct{handler: h}
	c := newClient(t, rpc.ClientConfig{Keys: secret, Transport: d})

	if got, err := c.Users(t.Context(), server, users); err != nil || !slices.Equal(got, states) {
		t.Errorf("the states are %v, %v", got, err)
	}

	fails = presence.ErrNotOwner
	if _, err := c.Users(t.Context(), server, users); !errors.Is(err, presence.ErrNotOwner) {
		t.Error(err)
	}

	_, err := c.Users(t.Context(), server, make([]presence.User, presence.MaxAsked+1))
	if err == nil || d.answer.StatusCode != http.StatusBadRequest {
		t.Errorf("too many users are answered %v, %d", err, d.answer.StatusCode)
	}
}

type onParts func(page string) (presence.Parts, error)

func (f onParts) ReceiveExplain(_ context.Context, page string) (presence.Parts, error) {
	return f(page)
}

func TestExplain(t *testing.T) {
	parts := presence.Parts{People: 5, Held: 1, Leaving: 2, Connections: 7, Ignored: 3, Settled: 9, Moving: true}
	var fails error

	h := newHandler(t, rpc.Config{Keys: secret, Parts: onParts(func(page string) (presence.Parts, error) {
		if page != `a"é` {
			t.Errorf("the process was asked about %q", page)
		}
		return parts, fails
	})})

	c := newClient(t, rpc.ClientConfig{Keys: secret, Transport: &direct{handler: h}})
	if got, err := c.Explain(t.Context(), server, `a"é`); err != nil || got != parts {
		t.Errorf("the parts are %+v, %v", got, err)
	}

	fails = presence.ErrUnavailable
	if _, err := c.Explain(t.Context(), server, `a"é`); !errors.Is(err, presence.ErrUnavailable) {
		t.Error(err)
	}

	// A process of an older release does not know this call.
	old := newClient(t, rpc.ClientConfig{
		Keys: secret, Transport: &direct{handler: newHandler(t, rpc.Config{Keys: secret})},
	})
	if _, err := old.Explain(t.Context(), server, "p"); err == nil {
		t.Error("a process of an older release explained a count")
	}
}

func TestHold(t *testing.T) {
	for name, tc := range map[string]struct {
		remote error
		want   error
		status int
		says   string
	}{
		"done": {nil, nil, 204, ""},
		"too many": {
			fmt.Errorf("%w holds: at most 100", presence.ErrTooMany), presence.ErrTooMany, 429,
			"too many holds: at most 100",
		},
		"store away":    {presence.ErrUnavailable, presence.ErrUnavailable, 503, ""},
		"too slow":      {context.DeadlineExceeded, presence.ErrUnavailable, 503, ""},
		"not the owner": {presence.ErrNotOwner, presence.ErrNotOwner, 409, ""},
		"overtaken":     {presence.ErrOvertaken, presence.ErrOvertaken, 409, ""},
		"not, wrapped":  {fmt.Errorf("hold: %w", presence.ErrNotOwner), presence.ErrNotOwner, 409, ""},
	} {
		t.Run(name, func(t *testing.T) {
			h := newHandler(t, rpc.Config{
				Keys: secret,
				Holds: onHold(func(_ context.Context, call presence.HoldChange) error {
					if call.User != 1<<63+5 || call.Page != `a"é` || !call.On {
						t.Errorf("the node got the call %+v", call)
					}

					return tc.remote
				}),
			})

			d := &direct{handler: h}
			c := newClient(t, rpc.ClientConfig{Keys: secret, Transport: d})

			err := c.Hold(t.Context(), server, asked(1<<63+5, `a"é`, true))
			if !errors.Is(err, tc.want) || tc.want == nil && err != nil {
				t.Errorf("got %v, want %v", err, tc.want)
			}
			if tc.says != "" && !strings.Contains(err.Error(), tc.says) {
				t.Errorf("%q does not say %q", err, tc.says)
			}
			if d.answer.StatusCode != tc.status {
				t.Errorf("status %d, want %d", d.answer.StatusCode, tc.status)
			}
			// Errors are problems (RFC 9457).
			if ct := d.answer.Header.Get("Content-Type"); tc.want != nil && ct != "application/problem+json" {
				t.Errorf("the error has the type %q, want application/problem+json", ct)
			}
		})
	}

	t.Run("something else", func(t *testing.T) {
		h := newHandler(t, rpc.Config{Holds: onHold(func(context.Context, presence.HoldChange) error {
			return errors.New("inner things")
		})})
		err := newClient(t, rpc.ClientConfig{Transport: &direct{handler: h}}).
			Hold(t.Context(), server, asked(1, "p", false))

		answer := (*rpc.Error)(nil)
		if !errors.As(err, &answer) || answer.Status != 500 || strings.Contains(err.Error(), "inner things") {
			t.Errorf("got %v, want a 500 without the inner error", err)
		}
	})

	t.Run("page", func(t *testing.T) {
		c := newClient(t, rpc.ClientConfig{Transport: &direct{}})
		if err := c.Hold(t.Context(), server, asked(1, "*", true)); !errors.Is(err, presence.ErrPage) {
			t.Errorf("a hold of the whole site: %v, want ErrPage", err)
		}
	})
}

func TestRefusals(t *testing.T) {
	set := func(key, value string) func(*http.Request, []byte) []byte {
		return func(r *http.Request, body []byte) []byte {
			r.Header.Set(key, value)
			return body
		}
	}

	replace := func(old, new string) func(*http.Request, []byte) []byte {
		return func(r *http.Request, body []byte) []byte {
			a := r.Header.Get("Authorization")
			if !strings.Contains(a, old) {
				panic(a)
			}

			r.Header.Set("Authorization", strings.Replace(a, old, new, 1))
			return body
		}
	}

	for name, tc := range map[string]struct {
		keys   [][]byte
		change func(*http.Request, []byte) []byte
		want   *seal.Refusal
		status int
	}{
		"as it is":     {secret, nil, nil, 204},
		"wrong secret": {[][]byte{[]byte("guess")}, nil, seal.ErrKey, 401},
		"no secret":    {nil, nil, seal.ErrKey, 401},
		"not signed":   {secret, set("Authorization", ""), rpc.ErrUnsigned, 401},
		"nonsense":     {secret, set("Authorization", "Bearer x"), rpc.ErrUnsigned, 401},
		"half a mac": {secret, func(r *http.Request, b []byte) []byte {
			a := r.Header.Get("Authorization")
			r.Header.Set("Authorization", a[:len(a)-2])
			return b
		}, rpc.ErrUnsigned, 401},
		"another sender": {secret, replace("10.0.0.1", "10.0.0.9"), seal.ErrForged, 401},
		"another number": {secret, replace("number=1", "number=2"), seal.ErrForged, 401},
		"another method": {
			secret, func(r *http.Request, b []byte) []byte { r.RequestURI += "?"; return b }, seal.ErrForged, 401,
		},
		"another host": {
			secret, func(r *http.Request, b []byte) []byte { r.Host = "10.0.0.3:7946"; return b }, seal.ErrForged, 401,
		},
		"another digest": {secret, set("Content-Digest", "sha-256=:AAAA:"), seal.ErrForged, 401},
		"another body": {secret, func(_ *http.Request, b []byte) []byte {
			return bytes.Replace(b, []byte("true"), []byte("false"), 1)
		}, rpc.ErrDigest, 400},
		"cut short": {secret, func(_ *http.Request, b []byte) []byte { return b[:5] }, rpc.ErrDigest, 400},
		"body too long": {
			secret, func(_ *http.Request, b []byte) []byte { return make([]byte, 5<<20) }, rpc.ErrOversized, 413,
		},
		"said to be too long": {secret, func(r *http.Request, b []byte) []byte {
			r.ContentLength = 5 << 20
			return make([]byte, 5<<20)
		}, rpc.ErrOversized, 413},
		"header without end": {
			secret, set("Authorization", "Headcount format=2, "+strings.Repeat("key=00, mac=", 1000)), rpc.ErrUnsigned,
			401,
		},
		"quotes in the sender": {secret, replace(`from="`, `from="\"`), rpc.ErrUnsigned, 401},
	} {
		t.Run(name, func(t *testing.T) {
			held := false
			reg := prometheus.NewRegistry()
			h := newHandler(t, rpc.Config{
				Registerer: reg, Keys: secret, Name: server,
				Holds: onHold(func(context.Context, presence.HoldChange) error {
					held = true
					return nil
				}),
			})

			d := &direct{handler: h, change: tc.change}
			c := newClient(t, rpc.ClientConfig{Keys: tc.keys, Transport: d})

			err := c.Hold(t.Context(), server, asked(1, "p", true))
			if d.answer.StatusCode != tc.status || held != (tc.want == nil) {
				t.Errorf("status %d, want %d; carried out: %t", d.answer.StatusCode, tc.status, held)
			}

			if tc.want == nil {
				if err != nil {
					t.Error(err)
				}

				return
			}

			if !errors.Is(err, tc.want) {
				t.Errorf("got %v, want %v", err, tc.want)
			}
			if got := refusedFor(t, reg, tc.want.Reason); got != 1 {
				t.Errorf("%v requests were refused as %s, want 1", got, tc.want.Reason)
			}
		})
	}
}

func refusedFor(t testing.TB, reg prometheus.Gatherer, reason string) float64 {
	t.Helper()
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}

	for _, f := range families {
		for _, m := range f.GetMetric() {
			if f.GetName() == "headcount_cluster_requests_refused_total" && m.GetLabel()[0].GetValue() == reason {
				return m.GetCounter().GetValue()
			}
		}
	}

	return 0
}

func TestReplayAndTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		taken := 0
		h := newHandler(t, rpc.Config{
			Keys: secret, Name: server,
			Holds: onHold(func(context.Context, presence.HoldChange) error {
				taken++
				return nil
			}),
		})

		var sent *http.Request
		var sentBody []byte
		keep := func(r *http.Request, body []byte) []byte {
			sent = r.Clone(context.Background())
			sentBody = body
			return body
		}

		d := &direct{handler: h, change: keep}
		c := newClient(t, rpc.ClientConfig{Keys: secret, Transport: d})
		if err := c.Hold(t.Context(), server, asked(1, "p", true)); err != nil {
			t.Fatal(err)
		}

		again := func(h http.Handler, says string) {
			t.Helper()
			r := sent.Clone(context.Background())
			r.Body = io.NopCloser(bytes.NewReader(sentBody))
			w := httptest.NewRecorder()

			h.ServeHTTP(w, r)
			if w.Code != 401 || !strings.Contains(w.Body.String(), `"code":"`+says+`"`) {
				t.Errorf("want %s, got %d %s", says, w.Code, w.Body)
			}
		}

		// The request is replayed soon and late, to this process and to one that has started since.
		again(h, "replayed")

		// After the time window the number is forgotten, but then the request is too old.
		time.Sleep(31 * time.Second)
		again(h, "old")
		again(newHandler(t, rpc.Config{
			Keys: secret, Holds: onHold(func(context.Context, presence.HoldChange) error {
				taken++
				return nil
			}),
		}), "old")

		if taken != 1 {
			t.Errorf("the request was carried out %d times, want once", taken)
		}

		if err := c.Hold(t.Context(), server, asked(1, "p", true)); err != nil {
			t.Error(err)
		}

		// A request for one process is refused by every other one.
		other := newHandler(t, rpc.Config{
			Keys: secret, Name: "10.0.0.3:7946",
			Holds: onHold(func(context.Context, presence.HoldChange) error { return nil }),
		})

		stray := newClient(t, rpc.ClientConfig{Keys: secret, Transport: &direct{handler: other}})
		err := stray.Hold(t.Context(), server, asked(1, "p", true))
		if !errors.Is(err, rpc.ErrMisdirected) {
			t.Errorf("a request for another process gets %v", err)
		}
	})
}

func TestBodiesThatMakeNoSense(t *testing.T) {
	h := newHandler(t, rpc.Config{
		Updates: onUpdates(func(string, []presence.Update) { t.Error("updates of a senseless body were carried out") }),
		Holds: onHold(func(context.Context, presence.HoldChange) error {
			t.Error("a hold of a senseless body was carried out")
			return nil
		}),
	})

	for _, tc := range []struct{ path, body string }{
		{"/updates", ``}, {"/updates", `[]`}, {"/updates", `{"updates":[{"topic":"","value":"1"}]}`},
		{"/updates", `{"updates":[{"topic":"count//"}]}`},
		{"/updates", `{"updates":[{"topic":"count//a","sequence":1.5}]}`},
		{"/updates", `{"updates":[{"topic":"count//\u0007"}]}`}, {"/updates", `{"updates":[{"topic":"a b//p"}]}`},
		{"/updates", `{"updates":[{"topic":"count//p","value":"a\nb"}]}`},
		{"/updates", `{"updates":[{"topic":"count//p","value":7}]}`},
		{"/hold", `{"user":"1","page":"p","on":true}`}, {"/hold", `{"user":"0000000000000001","page":"*","on":true}`},
		{"/hold", `{"user":"0000000000000001","page":"p"}`},
		{"/hold", `{"user":"000000000000000g","page":"p","on":true}`},
	} {
		// Neither client nor server has secrets here: the test is about bodies alone.
		d := &direct{handler: h}
		d.change = func(r *http.Request, _ []byte) []byte {
			r.URL.Path = tc.path
			r.RequestURI = tc.path
			r.Header.Set("Content-Digest", rpc.DigestOf([]byte(tc.body)))
			return []byte(tc.body)
		}

		err := newClient(t, rpc.ClientConfig{Transport: d}).Hold(t.Context(), server, asked(1, "p", true))
		if !errors.Is(err, rpc.ErrMalformed) {
			t.Errorf("%s with the body %s gets %v", tc.path, tc.body, err)
		}
	}
}

func TestOtherPathsAndMethods(t *testing.T) {
	h := newHandler(t, rpc.Config{Updates: onUpdates(func(string, []presence.Update) {})})
	for _, tc := range []struct {
		method, path string
		status       int
	}{
		{"GET", "/", 404}, {"PUT", "/v1/counts", 404}, {"PUT", "/hold", 404}, {"GET", "/updates", 405},
		{"OPTIONS", "/updates", 405}, {"PUT", "/updates", 401},
	} {
		w := httptest.NewRecorder()
		h.ServeHTTP(w, httptest.NewRequest(tc.method, tc.path, nil))

		if w.Code != tc.status || w.Header().Get("Content-Type") != "application/problem+json" {
			t.Errorf("%s %s: %d %s", tc.method, tc.path, w.Code, w.Body)
		}
		if tc.status == 405 && w.Header().Get("Allow") != "PUT" {
			t.Errorf("%s %s gets a 405 without Allow: PUT", tc.method, tc.path)
		}
	}
}

// network is connections in memory.
type network struct {
	accept chan net.Conn
	closed chan struct{}
	mu     sync.Mutex
	open   []net.Conn
	dials  int
}

func newNetwork() *network {
	return &network{accept: make(chan net.Conn), closed: make(chan struct{})}
}

func (n *network) Dial(ctx context.Context, _, _ string) (net.Conn, error) {
	here, there := net.Pipe()
	select {
	case n.accept <- there:
		n.mu.Lock()
		defer n.mu.Unlock()
		n.open = append(n.open, here, there)
		n.dials++

		return here, nil
	case <-n.closed:
	case <-ctx.Done():
	}

	here.Close()
	there.Close()
	return nil, &net.OpError{Op: "dial", Net: "memory", Err: errors.New("connection refused")}
}

func (n *network) Accept() (net.Conn, error) {
	select {
	case c := <-n.accept:
		return c, nil
	case <-n.closed:
		return nil, net.ErrClosed
	}
}

func (n *network) Addr() net.Addr { return &net.UnixAddr{Name: server} }

func (n *network) Close() error {
	close(n.closed)
	return nil
}

func TestOverConnections(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNetwork()
		got, slow := 0, false
		h := newHandler(t, rpc.Config{
			Keys: secret, Name: server,
			Updates: onUpdates(func(_ string, updates []presence.Update) { got += len(updates) }),
			Holds: onHold(func(ctx context.Context, _ presence.HoldChange) error {
				if slow {
					<-ctx.Done()
					return ctx.Err()
				}
				return nil
			}),
		})

		srv := &http.Server{Handler: h}
		done := make(chan error, 1)
		go func() { done <- srv.Serve(n) }()

		c := newClient(t, rpc.ClientConfig{Keys: secret, Dial: n.Dial})
		updates := []presence.Update{presence.Count{Page: "p", Users: 1}.Update()}

		for range 10 {
			if err := c.PushUpdates(t.Context(), server, updates); err != nil {
				t.Fatal(err)
			}
		}

		if n.dials != 1 || got != 10 {
			t.Errorf("%d connections for %d requests", n.dials, got)
		}

		// The idle connections break unnoticed.
		for _, cn := range n.open {
			cn.Close()
		}

		if err := c.PushUpdates(t.Context(), server, updates); err != nil {
			t.Error(err)
		}

		// The server does not answer. The client gives up after its own limit, or when its context ends.
		slow = true
		began := time.Now()
		err := c.Hold(t.Context(), server, asked(1, "p", true))
		if !errors.Is(err, presence.ErrUnavailable) || time.Since(began) != 5*time.Second {
			t.Errorf("after %s the call ends with %v", time.Since(began), err)
		}

		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()

		if err := c.Hold(ctx, server, asked(1, "p", true)); !errors.Is(err, presence.ErrUnavailable) {
			t.Error(err) // either side may notice the timeout first
		}

		srv.Close()
		<-done
		if err := c.Hold(t.Context(), server, asked(1, "p", true)); !errors.Is(err, presence.ErrUnavailable) {
			t.Errorf("a call without a server ends with %v, want ErrUnavailable", err)
		}

		c.Close()
		synctest.Wait()
	})
}

// TestServerOverTCP: of many simultaneous requests none is taken for a replay.
func TestServerOverTCP(t *testing.T) {
	var mu sync.Mutex
	got := 0
	h := newHandler(t, rpc.Config{Keys: secret, Updates: onUpdates(func(_ string, updates []presence.Update) {
		mu.Lock()
		defer mu.Unlock()
		got += len(updates)
	})})

	srv := httptest.NewServer(h)
	defer srv.Close()
	c := newClient(t, rpc.ClientConfig{Keys: secret})
	defer c.Close()

	var wg sync.WaitGroup

	for range 80 { // more clients than there may be connections
		wg.Go(func() {
			for range 10 {
				updates := []presence.Update{presence.Count{Page: "p"}.Update()}
				if err := c.PushUpdates(t.Context(), srv.Listener.Addr().String(), updates); err != nil {
					t.Error(err)
				}
			}
		})
	}

	wg.Wait()
	if got != 800 {
		t.Errorf("%d counts arrived, want 80", got)
	}
}

func TestAnswersOfStrangers(t *testing.T) {
	for name, tc := range map[string]struct {
		status int
		body   string
	}{
		"page":     {200, "<html>hello"},
		"redirect": {302, ""},
		"error":    {502, "bad gateway"},
		"endless":  {500, strings.Repeat("x", 1<<20)},
		"code":     {500, `{"code":"rude"}`},
	} {
		t.Run(name, func(t *testing.T) {
			// The server may be a stranger: the client follows no redirect, and quotes little of the answer.
			d := &direct{handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
				w.Header().Set("Location", "http://elsewhere/")
				w.WriteHeader(tc.status)
				io.WriteString(w, tc.body)
			})}

			err := newClient(t, rpc.ClientConfig{Keys: secret, Transport: d}).
				Hold(t.Context(), server, asked(1, "p", true))

			answer := (*rpc.Error)(nil)
			if !errors.As(err, &answer) || answer.Status != tc.status || len(err.Error()) > 2000 {
				t.Errorf("got %v, want a short quote of the foreign answer", err)
			}
		})
	}
}

func TestSettingsThatCannotWork(t *testing.T) {
	for name, cfg := range map[string]rpc.ClientConfig{
		"no name": {}, "long name": {Name: strings.Repeat("a", 129)}, "a quote": {Name: `a"b`},
		"empty secret": {Name: "a:1", Keys: [][]byte{{}}},
	} {
		if _, err := rpc.NewClient(cfg); !errors.Is(err, rpc.ErrConfig) {
			t.Errorf("client, %s: %v", name, err)
		}
	}

	for name, cfg := range map[string]rpc.Config{"empty secret": {Keys: [][]byte{{}}}} {
		if _, err := rpc.NewHandler(cfg); !errors.Is(err, rpc.ErrConfig) {
			t.Errorf("handler, %s: %v", name, err)
		}
	}
}

// FuzzBodies: any signed body is refused or understood.
func FuzzBodies(f *testing.F) {
	f.Add(false, `{"updates":[{"topic":"count//p","incarnation":1,"sequence":2,"stale":true,"value":"3 1700000000"}]}`)
	f.Add(true, `{"user":"00000000000000ff","page":"p","on":true}`)
	f.Fuzz(func(t *testing.T, hold bool, body string) {
		if hold {
			call, err := rpc.ParseHold([]byte(body), time.Now())
			if err == nil && presence.CheckPage(call.Page) != nil {
				t.Fatal("bad page")
			}

			return
		}

		updates, err := rpc.ParseUpdates([]byte(body))
		if err != nil {
			return
		}

		for _, u := range updates {
			if u.Check() != nil {
				t.Fatalf("%+v", u)
			}
		}
	})
}

// FuzzAuthorization: a header without a valid signature is never accepted.
func FuzzAuthorization(f *testing.F) {
	f.Add(`Headcount format=2, key=00000000, from="a:1", time=1700000000000, life=ff, number=1, ` +
		`mac=00000000000000000000000000000000`)
	h, err := rpc.NewHandler(rpc.Config{
		Keys: secret, Updates: onUpdates(func(string, []presence.Update) { panic("forged") }),
	})
	if err != nil {
		f.Fatal(err)
	}

	f.Fuzz(func(t *testing.T, header string) {
		r := httptest.NewRequest(http.MethodPut, "/updates", strings.NewReader("{}"))
		r.Header["Authorization"] = []string{header}

		w := httptest.NewRecorder()
		h.ServeHTTP(w, r)
		if w.Code != 401 && w.Code != 400 { // of another format
			t.Fatalf("status %d", w.Code)
		}
	})
}

// These function types implement rpc.Updates, rpc.Holds and rpc.Reports.
type (
	onUpdates func(from string, updates []presence.Update)
	onHold    func(ctx context.Context, call presence.HoldChange) error
	onReport  func() presence.Report
)

func (f onUpdates) ReceiveUpdates(from string, updates []presence.Update) {
	f(from, updates)
}

func (f onHold) ReceiveHold(ctx context.Context, call presence.HoldChange) error {
	return f(ctx, call)
}

func (f onReport) Report() presence.Report { return f() }

// asked returns the change of a hold by a call that is made now.
func asked(u presence.User, page string, on bool) presence.HoldChange {
	return presence.HoldChange{User: u, Page: page, On: on, Asked: time.Now()}
}
