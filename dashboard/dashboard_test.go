package dashboard

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"

	"headcount/presence"
)

// cluster is a Board's, of this process, one that answers and one that does not.
func cluster(asked *atomic.Int64) Config {
	return Config{
		Self: "a", Region: "us", Log: zerolog.Nop(),
		Members: func() []presence.Process {
			return []presence.Process{
				{Name: "a", Roles: []string{"gateway"}, Incarnation: 1}, {Name: "b", Roles: []string{"dispatcher"}, Incarnation: 2}, {Name: "dead", Incarnation: 3},
			}
		},
		Report: func() presence.Report {
			return presence.Report{
				Load: map[string]float64{"headcount_connections": 5, lagMetric + "{eu}": 0.5},
				Top:  []presence.PageUsers{{Page: "x", Users: 2}, {Page: "both", Users: 3}},
			}
		},
		Ask: func(ctx context.Context, name string) (presence.Report, error) {
			asked.Add(1)
			if name == "dead" {
				<-ctx.Done()
				return presence.Report{}, ctx.Err()
			}
			return presence.Report{
				Load: map[string]float64{lagMetric + "{eu}": 1.5, outMetric + "{asia}": 1},
				Top:  []presence.PageUsers{{Page: "y", Users: 9}, {Page: "both", Users: 4}},
			}, nil
		},
		Counts: func(context.Context, []string) ([]presence.Count, error) {
			return []presence.Count{{Page: presence.Site, Users: 12}}, nil
		},
	}
}

func look(t *testing.T, b *Board) []byte {
	body, err := b.JSON(t.Context())
	if err != nil {
		t.Error(err)
	}
	return body
}

func TestJSON(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var asked atomic.Int64
		b := New(cluster(&asked))
		began := time.Now()
		var got, want map[string]any
		if err := json.Unmarshal(look(t, b), &got); err != nil {
			t.Fatal(err)
		}
		if took := time.Since(began); took != patience {
			t.Errorf("a process that does not answer was waited for %s", took)
		}
		if at := got["at"]; at != float64(time.Now().UnixMilli()) {
			t.Errorf("at %v", at)
		}
		delete(got, "at")
		_ = json.Unmarshal([]byte(`{
			"region": "us", "site": {"page":"*","count":12,"updated_at":null,"version":"0-0"},
			"pages": [{"page":"y","count":9},{"page":"both","count":4},{"page":"x","count":2}],
			"processes": [
				{"name":"a","roles":["gateway"],"since":1,"load":{"headcount_connections":5,"headcount_region_lag_seconds{eu}":0.5}},
				{"name":"b","roles":["dispatcher"],"since":2,"load":{"headcount_region_lag_seconds{eu}":1.5,"headcount_region_left_out{asia}":1}},
				{"name":"dead","roles":null,"since":3,"load":null}],
			"regions": [{"name":"asia","lag":0,"heard":0,"left_out":true},{"name":"eu","lag":1.5,"heard":0,"left_out":false}]}`), &want)
		if !reflect.DeepEqual(got, want) {
			t.Errorf("got  %v\nwant %v", got, want)
		}
	})
}

func TestWhoLooksOftenAsksOnceASecond(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var asked atomic.Int64
		cfg := cluster(&asked)
		b := New(cfg)
		for range 20 {
			go look(t, b)
		}
		time.Sleep(patience + fresh - time.Millisecond)
		look(t, b)
		if n := asked.Load(); n != 2 {
			t.Errorf("%d were asked, want 2", n)
		}
		time.Sleep(time.Millisecond)
		look(t, b)
		if n := asked.Load(); n != 4 {
			t.Errorf("a second later %d were asked, want 4", n)
		}
	})
}

func TestTopIsBoundedAndTheStoreMayBeAway(t *testing.T) {
	var asked atomic.Int64
	cfg := cluster(&asked)
	cfg.Members = func() []presence.Process { return []presence.Process{{Name: "a"}, {Name: "b"}} }
	many := func(prefix string) (r presence.Report) {
		for i := range presence.TopPages {
			r.Top = append(r.Top, presence.PageUsers{Page: fmt.Sprint(prefix, i), Users: int64(i)})
		}
		return r
	}
	cfg.Report = func() presence.Report { return many("a") }
	cfg.Ask = func(context.Context, string) (presence.Report, error) { return many("b"), nil }
	cfg.Counts = func(context.Context, []string) ([]presence.Count, error) { return nil, errors.New("away") }
	var got struct {
		Site  any
		Pages []struct{ Count int64 }
	}
	if err := json.Unmarshal(look(t, New(cfg)), &got); err != nil {
		t.Fatal(err)
	}
	if len(got.Pages) != presence.TopPages || got.Pages[0].Count != 99 || got.Pages[99].Count != 50 || got.Site != nil {
		t.Errorf("%+v", got)
	}
}

func TestLoad(t *testing.T) {
	reg := prometheus.NewRegistry()
	connections := prometheus.NewGauge(prometheus.GaugeOpts{Name: "headcount_connections"})
	lag := prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: lagMetric}, []string{"peer"})
	deliveries := prometheus.NewCounter(prometheus.CounterOpts{Name: "headcount_deliveries_total"})
	other := prometheus.NewCounter(prometheus.CounterOpts{Name: "headcount_http_requests_total"})
	reg.MustRegister(connections, lag, deliveries, other)
	connections.Set(3)
	lag.WithLabelValues("eu").Set(0.5)
	deliveries.Add(7)
	got, err := Load(reg)
	want := map[string]float64{"headcount_connections": 3, lagMetric + "{eu}": 0.5, "headcount_deliveries_total": 7}
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("got %v, %v, want %v", got, err, want)
	}
}
