package cluster_test

import (
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"
	"reflect"
	"strings"
	"testing"

	"headcount/presence"
	"headcount/presence/cluster"
)

func TestReportComesBack(t *testing.T) {
	want := presence.Report{
		Load: map[string]float64{"headcount_connections": 12, "headcount_region_lag_seconds{eu}": 0.25},
		Top:  []presence.PageUsers{{Page: `a"b\c`, Users: 3}, {Page: "日本 <&>", Users: 2}},
	}
	said := want
	said.Load = map[string]float64{"nothing": math.NaN(), "all": math.Inf(1)}
	for name, value := range want.Load {
		said.Load[name] = value
	}
	h := newHandler(t, cluster.Config{Keys: secret, Name: server, OnReport: func() presence.Report { return said }})
	c := newClient(t, cluster.ClientConfig{Keys: secret, Transport: &direct{handler: h}})
	got, err := c.Report(t.Context(), server)
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("got %+v, %v, want %+v", got, err, want)
	}
}

func TestReportIsForTheClusterAlone(t *testing.T) {
	h := newHandler(t, cluster.Config{Keys: secret, OnReport: func() presence.Report { t.Error("it was asked"); return presence.Report{} }})
	c := newClient(t, cluster.ClientConfig{Keys: [][]byte{[]byte("another")}, Transport: &direct{handler: h}})
	if _, err := c.Report(t.Context(), server); err == nil {
		t.Error("a stranger got a report")
	}
	without := newClient(t, cluster.ClientConfig{Keys: secret, Transport: &direct{handler: newHandler(t, cluster.Config{Keys: secret})}})
	var answer *cluster.Error
	if _, err := without.Report(t.Context(), server); !errors.As(err, &answer) || answer.Status != http.StatusNotFound {
		t.Errorf("without reports: %v, want a 404", err)
	}
}

type says string

func (s says) RoundTrip(*http.Request) (*http.Response, error) {
	return &http.Response{StatusCode: http.StatusOK, Status: "200 OK", Header: http.Header{}, Body: io.NopCloser(strings.NewReader(string(s)))}, nil
}

func TestReportsThatMakeNoSense(t *testing.T) {
	many := make([]string, presence.TopPages+1)
	for i := range many {
		many[i] = fmt.Sprintf(`{"page":"p%d","users":1}`, i)
	}
	for _, body := range []string{"", "{", "[]", `{"top":[{"page":""}]}`, `{"top":[{"page":"*"}]}`, `{"load":{"x":"y"}}`, `{"top":[` + strings.Join(many, ",") + `]}`} {
		c := newClient(t, cluster.ClientConfig{Keys: secret, Transport: says(body)})
		if r, err := c.Report(t.Context(), server); err == nil {
			t.Errorf("%.60s was taken: %+v", body, r)
		}
	}
}
