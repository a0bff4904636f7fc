package e2e

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"

	"headcount/internal/testkit"
)

// board has the data of the dashboard.
type board struct {
	Region string   `json:"region"`
	Site   *counter `json:"site"`
	Pages  []struct {
		Page  string `json:"page"`
		Count int    `json:"count"`
	} `json:"pages"`
	Processes []process `json:"processes"`
	Regions   []any     `json:"regions"`
}

type process struct {
	Name  string             `json:"name"`
	Roles []string           `json:"roles"`
	Load  map[string]float64 `json:"load"` // nil if the process does not answer
}

func (s *server) board(t testing.TB, headers ...string) (b board) {
	t.Helper()
	a := s.get(t, "/-/dashboard/data", headers...)
	err := json.Unmarshal([]byte(a.body), &b)
	if err != nil || a.status != 200 || a.header.Get("Cache-Control") != "no-store" {
		t.Fatalf("%d %v %.200s: %v", a.status, a.header, a.body, err)
	}

	return b
}

func TestServerDashboard(t *testing.T) {
	t.Parallel()
	s := start(t, "--leave-grace=0s", "--region=here")

	one, two := s.ws(t), s.ws(t)
	one.join("busy")
	one.takeCount("busy", 1)
	two.join("busy")
	two.join("<quiet> page")
	two.awaitAll(func(f frame) bool { return f.counts("busy", 2) },
		func(f frame) bool { return f.counts("<quiet> page", 1) })
	s.put(t, "/busy/counter", increment).counter(t)

	var b board
	testkit.Eventually(t, "the site, and the pages, most viewed first", func() bool {
		b = s.board(t)
		return b.Site != nil && b.Site.Count == 3 && len(b.Pages) == 2 && b.Pages[0].Page == "busy" &&
			b.Pages[0].Count == 3 && b.Pages[1].Page == "<quiet> page" && b.Pages[1].Count == 1
	})

	if b.Region != "here" || len(b.Processes) != 1 || len(b.Regions) != 0 {
		t.Fatalf("the board is %+v, want the region here, one process and no other region", b)
	}

	p := b.Processes[0]
	if !slices.Equal(p.Roles, []string{"gateway", "presence", "dispatcher"}) || p.Load["headcount_connections"] != 2 ||
		p.Load["headcount_users"] != 3 || p.Load["process_resident_memory_bytes"] < 1<<20 {
		t.Errorf("the process is %+v, want all roles, 2 connections, 3 users and its memory", p)
	}

	testkit.Eventually(t, "the deliveries of each count", func() bool {
		return s.board(t).Processes[0].Load["headcount_deliveries_total"] >= 3
	})

	two.leave("<quiet> page")
	testkit.Eventually(t, "a page without users disappears", func() bool { return len(s.board(t).Pages) == 1 })

	// The page itself, and the calls that it makes.
	page := s.get(t, "/-/dashboard", "Accept: text/html")
	if page.status != 200 || !strings.HasPrefix(page.header.Get("Content-Type"), "text/html") ||
		!strings.Contains(page.header.Get("Content-Security-Policy"), "default-src 'self'") {
		t.Errorf("the page of the dashboard: %d %v", page.status, page.header)
	}

	if a := s.get(t, "/-/dashboard/access"); a.body != `{"key_needed":false,"top_needs_key":false}`+"\n" {
		t.Errorf("access: %s", a.body)
	}

	do(t, "POST", s.url+"/-/dashboard/data", "").problem(t, 405)
	s.get(t, "/-/dashboard.html").problem(t, 404)
}
