package faults

import (
	"encoding/json"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"headcount/presence/redistest"
)

// TestDashboard asks a cluster's gateway for the dashboard: every process reports its
// state, the dispatcher reports which pages are viewed, and a process that dies reports
// nothing.
func TestDashboard(t *testing.T) {
	const key = "a key for tests alone"
	gateway, all := trio(t, redistest.Start(t).URL(), "--api-key="+key, "--cluster-secret=of tests alone")
	awaitReady(t, 20*time.Second, all...)
	put(t, gateway, "", "increment", 1)

	type process struct {
		Name  string
		Roles []string
		Load  map[string]float64
	}
	type board struct {
		Site  counter
		Pages []struct {
			Page  string
			Count int64
		}
		Processes []process
	}
	look := func() (b board) {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+gateway.addr+"/-/dashboard/data", nil)
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("X-API-Key", key)
		resp, err := web.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		if err := json.NewDecoder(resp.Body).Decode(&b); err != nil || resp.StatusCode != http.StatusOK {
			t.Fatalf("%s: %v", resp.Status, err)
		}
		return b
	}
	var got board
	eventually(t, 10*time.Second, "all processes and the page", func() bool {
		got = look()
		return len(got.Processes) == 3 && len(got.Pages) == 1 && !slices.ContainsFunc(got.Processes, func(p process) bool { return p.Load == nil })
	})
	if got.Pages[0].Page != "p" || got.Pages[0].Count != 1 || got.Site.Count != 1 {
		t.Errorf("%+v", got)
	}
	want := map[string]string{"gateway": "headcount_connections", "presence": "headcount_partitions_owned", "dispatcher": "process_cpu_seconds_total"}
	for _, p := range got.Processes {
		role := strings.Join(p.Roles, ",")
		if _, ok := p.Load[want[role]]; !ok {
			t.Errorf("%s does not tell of %s: %v", role, want[role], p.Load)
		}
		if partitions := p.Load["headcount_partitions_owned"]; role == "presence" && partitions != 271 {
			t.Errorf("the only node owns %v partitions", partitions)
		}
	}

	// A frozen process is still a member for a moment, but says nothing. All others are
	// shown all the same.
	node := all[0]
	node.pause()
	eventually(t, 10*time.Second, "a node that says nothing, or on a busy machine is gone by now", func() bool {
		return !slices.ContainsFunc(look().Processes, func(p process) bool { return p.Name == node.self && p.Load != nil })
	})
	eventually(t, 10*time.Second, "a node that is gone", func() bool {
		b := look()
		return len(b.Processes) == 2 && !slices.ContainsFunc(b.Processes, func(p process) bool { return p.Name == node.self })
	})
}
