package dashboard

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/rs/zerolog"

	"headcount/presence"
)

// cluster is what a Board sees: this process, another one that answers, and one that does not.
func cluster(asked *atomic.Int64) Config {
	return Config{
		Self: "a", Region: "us", Log: zerolog.Nop(), Ready: func() error { return nil },
		Members: members(func() []presence.Process {
			return []presence.Process{
				{
					Name: "a", Roles: []string{"gateway"}, Incarnation: 1_000_000,
				}, {
					Name: "b", Roles: []string{"dispatcher"}, Incarnation: 2_000_000,
				}, {Name: "dead", Incarnation: 3_000_000},
			}
		}),
		Report: report(func() presence.Report {
			return presence.Report{
				Stats: presence.Stats{
					Process: presence.ProcessStats{Memory: 1 << 20, CPU: 2},
					Gateway: &presence.GatewayStats{Connections: 5, Watched: 4, Deliveries: 3, Messages: 2},
					Peers:   []presence.PeerStats{{Name: "eu", Lag: 0.5, Heard: 2}},
				},
				Top: []presence.PageUsers{{Page: "x", Users: 2}, {Page: "both", Users: 3}},
			}
		}),
		Others: others(func(ctx context.Context, name string) (presence.Report, error) {
			asked.Add(1)
			if name == "dead" {
				<-ctx.Done()
				return presence.Report{}, ctx.Err()
			}

			return presence.Report{
				Stats: presence.Stats{
					Node:  &presence.NodeStats{Users: 7, Partitions: 8, Changes: 9},
					Peers: []presence.PeerStats{{Name: "eu", Lag: 1.5, Heard: 1}, {Name: "asia", LeftOut: true}},
				},
				Top: []presence.PageUsers{{Page: "y", Users: 9}, {Page: "both", Users: 4}},
			}, nil
		}),
		Counts: counts(func(ctx context.Context, _ []string) ([]presence.Count, error) {
			return []presence.Count{{Page: presence.AllPages, Users: 12}}, ctx.Err()
		}),
	}
}

func look(t *testing.T, b *Board) []byte {
	body, err := b.JSON(t.Context(), presence.DefaultSite, false)
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

		if took := time.Since(began); took != timeout {
			t.Errorf("the answer waited for %s for a silent process", took)
		}

		if at := got["at"]; at != float64(time.Now().UnixMilli()) {
			t.Errorf("\"at\" is %v, want now", at)
		}

		delete(got, "at")
		_ = json.Unmarshal([]byte(`{
			"region": "us", "state": {"level":"warn","text":"No answer from 1 of 3 processes: dead. `+
			`The region asia is silent, and totals leave it out."},
			"events": [], "site": {"page":"*","count":12,"updated_at":null,"version":"0-0"},
			"pages": [{"page":"y","count":9},{"page":"both","count":4},{"page":"x","count":2}],
			"processes": [
				{"name":"a","roles":["gateway"],"since":1,"load":{
					"headcount_connections":5,"headcount_pages_watched":4,"headcount_deliveries_total":3,
					"headcount_client_messages_total":2,"process_resident_memory_bytes":1048576,
					"process_cpu_seconds_total":2}},
				{"name":"b","roles":["dispatcher"],"since":2,"load":{
					"headcount_users":7,"headcount_partitions_owned":8,"headcount_store_changes_total":9,
					"process_cpu_seconds_total":0}},
				{"name":"dead","roles":null,"since":3,"load":null}],
			"regions": [
				{"name":"asia","lag":0,"heard":0,"left_out":true},
				{"name":"eu","lag":1.5,"heard":2,"left_out":false}]}`), &want)

		if !reflect.DeepEqual(got, want) {
			t.Errorf("got  %v\nwant %v", got, want)
		}

		// The list is from the same answers.
		top, err := b.Top(t.Context(), presence.DefaultSite)
		wantTop := []presence.PageUsers{{Page: "y", Users: 9}, {Page: "both", Users: 4}, {Page: "x", Users: 2}}
		if err != nil || !slices.Equal(top.Pages, wantTop) || top.Stale {
			t.Errorf("the top list is %v, want %v; %v", top, wantTop, err)
		}

		if n := asked.Load(); n != 2 {
			t.Errorf("the two views asked %d processes, want 2", n)
		}
	})
}

// A viewer sees one site. A viewer who may see only that site sees nothing of the cluster.
func TestSites(t *testing.T) {
	var asked atomic.Int64
	cfg := cluster(&asked)
	shop := presence.SiteOf("shop")
	cfg.Members = members(func() []presence.Process { return []presence.Process{{Name: "a"}, {Name: "b"}} })
	cfg.Sites = []presence.Site{shop, presence.DefaultSite}

	cfg.Others = others(func(context.Context, string) (presence.Report, error) {
		asked.Add(1)
		return presence.Report{
			Top: []presence.PageUsers{{Page: "both", Users: 4}, {Page: shop.Qualify("both"), Users: 1}},
		}, nil
	})
	cfg.Counts = counts(func(_ context.Context, pages []string) ([]presence.Count, error) {
		return []presence.Count{{Page: pages[0], Users: int64(len(pages[0]))}}, nil
	})

	b := New(cfg)

	// The part of the answer that differs between viewers.
	type seen struct {
		Sites     []string
		Shown     string
		State     state
		Site      struct{ Page string }
		Pages     []page
		Processes []any
	}

	look := func(site presence.Site, alone bool) (s seen) {
		body, err := b.JSON(t.Context(), site, alone)
		if err == nil {
			err = json.Unmarshal(body, &s)
		}

		if err != nil || s.Site.Page != presence.AllPages {
			t.Errorf("%s: %v", body, err)
		}

		return s
	}

	if s := look(shop, false); !reflect.DeepEqual(s.Sites, []string{"shop", "default"}) || s.Shown != "shop" ||
		!reflect.DeepEqual(s.Pages, []page{{"both", 1}}) || len(s.Processes) != 2 {
		t.Errorf("the shop is seen as %+v", s)
	}

	if s := look(shop, true); len(s.Sites) != 0 || !reflect.DeepEqual(s.Pages, []page{{"both", 1}}) ||
		len(s.Processes) != 0 {
		t.Errorf("a viewer of the shop alone sees %+v", s)
	}

	if s := look(presence.DefaultSite, false); s.Shown != "default" ||
		!reflect.DeepEqual(s.Pages, []page{{"both", 4}, {"x", 2}}) {
		t.Errorf("the default site is seen as %+v", s)
	}
	top, err := b.Top(t.Context(), shop)
	if err != nil || !slices.Equal(top.Pages, []presence.PageUsers{{Page: "both", Users: 1}}) {
		t.Errorf("the top list of the shop is %v, %v", top, err)
	}

	if n := asked.Load(); n != 1 {
		t.Errorf("three views asked the other process %d times", n)
	}

	// Only a viewer of the whole cluster sees the store's address.
	cfg.Ready = func() error { return errors.New("the store at 10.0.0.1 is away") }
	b = New(cfg)
	if s := look(shop, true); s.State != (state{"bad", "Counts may be the last that were known."}) {
		t.Errorf("the state for a viewer of one site is %+v", s.State)
	}
	if s := look(shop, false); !strings.Contains(s.State.Text, "10.0.0.1") {
		t.Errorf("the state for a viewer of all sites is %+v, want the store's address in it", s.State)
	}
}

func TestFrequentReadsAskOnceASecond(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var asked atomic.Int64
		cfg := cluster(&asked)
		b := New(cfg)

		for range 20 {
			go look(t, b)
		}
		time.Sleep(timeout + cacheTime - time.Millisecond) // a moment before the cached answer is too old
		look(t, b)
		if n := asked.Load(); n != 2 {
			t.Errorf("%d processes were asked, want 2", n)
		}

		time.Sleep(time.Millisecond)
		look(t, b)
		if n := asked.Load(); n != 4 {
			t.Errorf("a second later %d processes were asked, want 4", n)
		}
	})
}

func TestTopIsBoundedAndTheStoreMayBeAway(t *testing.T) {
	var asked atomic.Int64
	cfg := cluster(&asked)
	cfg.Members = members(func() []presence.Process { return []presence.Process{{Name: "a"}, {Name: "b"}} })

	// Two processes with a full list each.
	many := func(prefix string) (r presence.Report) {
		for i := range presence.TopPages {
			r.Top = append(r.Top, presence.PageUsers{Page: fmt.Sprint(prefix, i), Users: int64(i)})
		}
		return r
	}
	cfg.Report = report(func() presence.Report { return many("a") })
	cfg.Others = others(func(context.Context, string) (presence.Report, error) { return many("b"), nil })
	cfg.Counts = counts(func(context.Context, []string) ([]presence.Count, error) { return nil, errors.New("away") })

	var got struct {
		Site  any
		Pages []struct{ Count int64 }
	}
	if err := json.Unmarshal(look(t, New(cfg)), &got); err != nil {
		t.Fatal(err)
	}

	if len(got.Pages) != presence.TopPages || got.Pages[0].Count != 99 || got.Pages[99].Count != 50 || got.Site != nil {
		t.Errorf("the merged list is %+v", got)
	}
}

// These functions serve as the interfaces of a Config.
type (
	members func() []presence.Process
	report  func() presence.Report
	others  func(ctx context.Context, name string) (presence.Report, error)
	counts  func(ctx context.Context, pages []string) ([]presence.Count, error)
)

func (f members) Members() []presence.Process { return f() }
func (f report) Report() presence.Report      { return f() }
func (f report) Peers() []presence.PeerStats  { return f().Peers }

func (f others) Report(ctx context.Context, name string) (presence.Report, error) {
	return f(ctx, name)
}

func (f counts) Counts(ctx context.Context, pages []string) ([]presence.Count, error) {
	return f(ctx, pages)
}

// The list of pages is stale when a dispatcher did not answer or cannot reach its store. Other roles have no pages.
func TestTopOfSilentDispatchers(t *testing.T) {
	for name, tc := range map[string]struct {
		role  string
		err   error
		away  bool
		stale bool
	}{
		"all answer":              {role: presence.RoleDispatcher},
		"a dispatcher is silent":  {role: presence.RoleDispatcher, err: presence.ErrUnavailable, stale: true},
		"a dispatcher is cut off": {role: presence.RoleDispatcher, away: true, stale: true},
		"a gateway is silent":     {role: presence.RoleGateway, err: presence.ErrUnavailable},
	} {
		var asked atomic.Int64
		cfg := cluster(&asked)
		cfg.Members = members(func() []presence.Process {
			return []presence.Process{{Name: "a"}, {Name: "b", Roles: []string{tc.role}}}
		})
		cfg.Others = others(func(context.Context, string) (presence.Report, error) {
			return presence.Report{Away: tc.away}, tc.err
		})

		top, err := New(cfg).Top(t.Context(), presence.DefaultSite)
		if err != nil || top.Stale != tc.stale {
			t.Errorf("%s: stale %t, %v", name, top.Stale, err)
		}
	}
}
