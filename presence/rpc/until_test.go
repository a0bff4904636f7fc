package rpc_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net/http"
	"regexp"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"headcount/presence"
	"headcount/presence/rpc"
)

// late is a link that delivers late: a whole request, or only its body.
type late struct {
	handler http.Handler
	by      time.Duration
	inBody  bool

	delivered chan struct{} // closed when the request has been answered
}

func (l *late) RoundTrip(r *http.Request) (*http.Response, error) {
	whole := r.Clone(context.WithoutCancel(r.Context())) // the link does not notice that the caller gives up
	if l.inBody {
		whole.Body = io.NopCloser(io.MultiReader(pause(l.by), r.Body))
	}

	go func() {
		defer close(l.delivered)
		if !l.inBody {
			time.Sleep(l.by)
		}
		_, _ = (&direct{handler: l.handler}).RoundTrip(whole)
	}()

	// The caller gives up, and the request is still on its way.
	<-r.Context().Done()
	return nil, r.Context().Err()
}

// pause is a reader that ends after some time.
type pause time.Duration

func (p pause) Read([]byte) (int, error) {
	time.Sleep(time.Duration(p))

	return 0, io.EOF
}

// TestALateRequestIsRefused: a request that a stalled link delivers after its caller has given up has no effect,
// whichever call it is. A call that arrives in time ends when its caller gives up.
func TestALateRequestIsRefused(t *testing.T) {
	const patience = time.Second
	calls := map[string]func(ctx context.Context, c *rpc.Client) error{
		"hold": func(ctx context.Context, c *rpc.Client) error { return c.Hold(ctx, server, asked(1, "p", true)) },
		"updates": func(ctx context.Context, c *rpc.Client) error {
			return c.PushUpdates(ctx, server, []presence.Update{presence.Count{Page: "p"}.Update()})
		},
		"users": func(ctx context.Context, c *rpc.Client) error {
			_, err := c.Users(ctx, server, []presence.User{1})
			return err
		},
	}

	for name, call := range calls {
		for by, refused := range map[time.Duration]float64{
			patience - time.Millisecond: 0, patience + time.Millisecond: 1,
		} {
			for _, inBody := range []bool{false, true} {
				synctest.Test(t, func(t *testing.T) {
					taken := 0
					sink := calledBack{t: t, taken: &taken}
					reg := prometheus.NewRegistry()
					h := newHandler(t, rpc.Config{
						Keys: secret, Registerer: reg, Holds: sink, Updates: sink, Users: sink,
					})

					l := &late{handler: h, by: by, inBody: inBody, delivered: make(chan struct{})}
					ctx, cancel := context.WithTimeout(t.Context(), patience)
					defer cancel()

					if err := call(ctx, newClient(t, rpc.ClientConfig{Keys: secret, Transport: l})); err == nil {
						t.Error("a stalled call was answered")
					}

					<-l.delivered

					if got := refusedFor(t, reg, "late"); got != refused || taken != 1-int(refused) {
						t.Errorf("%s, late by %s, in its body %t: refused %v times, carried out %d times",
							name, by, inBody, got, taken)
					}
				})
			}
		}
	}
}

// calledBack counts the calls that it gets, and checks when they were made and how long they may last.
type calledBack struct {
	t     *testing.T
	taken *int
}

func (c calledBack) took(ctx context.Context) {
	*c.taken++

	if deadline, limited := ctx.Deadline(); !limited || time.Until(deadline) > 2*time.Millisecond {
		c.t.Errorf("the call has the deadline %s, %t", deadline, limited)
	}
}

func (c calledBack) ReceiveHold(ctx context.Context, call presence.HoldChange) error {
	c.took(ctx)
	if age := time.Since(call.Asked); age < 998*time.Millisecond || age > time.Second {
		c.t.Errorf("the call counts as made %s ago, want now", age)
	}

	return nil
}

func (c calledBack) ReceiveUsers(ctx context.Context, _ []presence.User) ([]presence.UserState, error) {
	c.took(ctx)

	return nil, errors.New("nobody waits for this")
}

func (c calledBack) ReceiveUpdates(string, []presence.Update) { *c.taken++ }

// TestARequestOfAnOlderRelease: such a request does not say when its caller gives up, nor when the call was made, and
// its sender's clock may be wrong. The call counts as made when it arrives.
func TestARequestOfAnOlderRelease(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var call presence.HoldChange
		h := newHandler(t, rpc.Config{Keys: secret, Holds: onHold(func(_ context.Context, c presence.HoldChange) error {
			call = c
			return nil
		})})

		// The sender's clock, which is behind, must not make the call older.
		time.Sleep(time.Minute)

		c := newClient(t, rpc.ClientConfig{
			Keys: secret, Now: func() time.Time { return time.Now().Add(-25 * time.Second) },
			Transport: older{&direct{handler: h}},
		})

		if err := c.Hold(t.Context(), server, asked(1, "p", true)); err != nil || !call.Asked.Equal(time.Now()) {
			t.Errorf("%v; made at %s, want now, %s", err, call.Asked, time.Now())
		}
	})
}

// older turns each request into one of an older release, and signs it again.
type older struct{ *direct }

func (o older) RoundTrip(r *http.Request) (*http.Response, error) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return nil, err
	}

	// An older release does not send these times.
	body = regexp.MustCompile(`,"asked":[0-9]+`).ReplaceAll(body, nil)
	r.Body = io.NopCloser(bytes.NewReader(body))
	r.URL.RawQuery = ""
	r.Header.Set("Content-Digest", rpc.DigestOf(body))

	header, _, _ := strings.Cut(r.Header.Get("Authorization"), ", mac=")
	r.Header.Set("Authorization", rpc.Signed(secret, r, header))

	return o.direct.RoundTrip(r)
}
