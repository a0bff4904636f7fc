package rpc_test

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"reflect"
	"strings"
	"testing"

	"headcount/presence"
	"headcount/presence/rpc"
)

// TestReportOnTheWire pins the bytes of a report, which processes of other releases write and read. The bytes decode to
// the same report.
func TestReportOnTheWire(t *testing.T) {
	for want, r := range map[string]presence.Report{
		`{"process":{"memory":1048576,"cpu":1.5},"gateway":{"connections":1,"watched":2,"deliveries":3,"messages":4},` +
			`"node":{"users":5,"partitions":6,"changes":7},` +
			`"peers":[{"name":"eu","lag":0.25,"heard":1,"left_out":false},{"name":"asia","lag":0,"heard":0,` +
			`"left_out":true}],` +
			`"top":[{"page":"a\"\u003cb\\c","users":3},{"page":"日本","users":2},` +
			`{"page":"\u001fshop\u001fa b","users":2}]}`: {
			Stats: presence.Stats{
				Process: presence.ProcessStats{Memory: 1 << 20, CPU: 1.5},
				Gateway: &presence.GatewayStats{Connections: 1, Watched: 2, Deliveries: 3, Messages: 4},
				Node:    &presence.NodeStats{Users: 5, Partitions: 6, Changes: 7},
				Peers:   []presence.PeerStats{{Name: "eu", Lag: 0.25, Heard: 1}, {Name: "asia", LeftOut: true}},
			},
			Top: []presence.PageUsers{
				{Page: `a"<b\c`, Users: 3}, {Page: "日本", Users: 2},
				{Page: presence.SiteOf("shop").Qualify("a b"), Users: 2},
			},
		},
		`{"process":{"memory":0,"cpu":0},"top":[]}`: {Top: []presence.PageUsers{}},
	} {
		h := newHandler(t, rpc.Config{
			Keys: secret, Name: server, Reports: onReport(func() presence.Report { return r }),
		})

		wire := &recording{RoundTripper: &direct{handler: h}}
		_, err := newClient(t, rpc.ClientConfig{Keys: secret, Transport: wire}).Report(t.Context(), server)
		if err != nil {
			t.Fatal(err)
		}
		if wire.body != want {
			t.Errorf("the wire has\n%s, want\n%s", wire.body, want)
		}

		got, err := newClient(t, rpc.ClientConfig{Keys: secret, Transport: says(want)}).Report(t.Context(), server)
		if err != nil || !reflect.DeepEqual(got, r) {
			t.Errorf("read %+v, %v, want %+v", got, err, r)
		}
	}
}

// recording keeps the body of the last answer.
type recording struct {
	http.RoundTripper
	body string
}

func (r *recording) RoundTrip(req *http.Request) (*http.Response, error) {
	resp, err := r.RoundTripper.RoundTrip(req)
	if err != nil {
		return nil, err
	}

	body, err := io.ReadAll(resp.Body)
	r.body = string(body)
	resp.Body = io.NopCloser(strings.NewReader(r.body))

	return resp, err
}

func TestReportIsForTheClusterAlone(t *testing.T) {
	h := newHandler(t, rpc.Config{
		Keys: secret, Reports: onReport(func() presence.Report {
			t.Error("an unsigned caller's request reached the report")
			return presence.Report{}
		}),
	})

	c := newClient(t, rpc.ClientConfig{Keys: [][]byte{[]byte("another")}, Transport: &direct{handler: h}})
	if _, err := c.Report(t.Context(), server); err == nil {
		t.Error("a caller with a foreign secret got a report")
	}

	without := newClient(t, rpc.ClientConfig{
		Keys: secret, Transport: &direct{handler: newHandler(t, rpc.Config{Keys: secret})},
	})

	// A process that has no reports does not know the path.
	var answer *rpc.Error
	if _, err := without.Report(t.Context(), server); !errors.As(err, &answer) || answer.Status != http.StatusNotFound {
		t.Errorf("a process without reports answers %v, want 404", err)
	}
}

type says string

func (s says) RoundTrip(*http.Request) (*http.Response, error) {
	return &http.Response{
		StatusCode: http.StatusOK, Status: "200 OK", Header: http.Header{},
		Body: io.NopCloser(strings.NewReader(string(s))),
	}, nil
}

func TestReportsThatMakeNoSense(t *testing.T) {
	many := make([]string, 2*presence.TopPages+1)
	for i := range many {
		many[i] = fmt.Sprintf(`{"page":"p%d","users":1}`, i)
	}

	for _, body := range []string{
		"", "{", "[]", `{"top":[{"page":""}]}`, `{"top":[{"page":"*"}]}`, `{"node":{"users":"y"}}`, `{"peers":3}`,
		`{"top":[` + strings.Join(many, ",") + `]}`,
	} {
		c := newClient(t, rpc.ClientConfig{Keys: secret, Transport: says(body)})
		if r, err := c.Report(t.Context(), server); err == nil {
			t.Errorf("%.60s was accepted: %+v", body, r)
		}
	}
}
