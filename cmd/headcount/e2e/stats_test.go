package e2e

import (
	"encoding/json"
	"net/http"
	"strings"
	"syscall"
	"testing"
	"time"

	"headcount/internal/testkit"
)

// stats has the history of a page.
type stats struct {
	Page string
	Now  int
	Peak struct {
		Count int
		At    *time.Time
	}
	Joins, Visitors int
	Points          []struct {
		At         time.Time
		Max, Joins int
	}
}

func (s *server) stats(t testing.TB, path string) (is stats) {
	t.Helper()
	a := s.get(t, path)
	if a.status != http.StatusOK {
		t.Fatalf("%s: %d %s", path, a.status, a.body)
	}

	if err := json.Unmarshal([]byte(a.body), &is); err != nil {
		t.Fatalf("%s: %v: %s", path, err, a.body)
	}

	return is
}

// sum returns the greatest count and the joins of all points.
func (s stats) sum() (most, joins int) {
	for _, p := range s.Points {
		most = max(most, p.Max)
		joins += p.Joins
	}

	return most, joins
}

func TestServerPagesRemember(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	s := start(t, "--data-dir="+dir, "--leave-grace=300ms", "--update-interval=10ms",
		"--allow-origins=https://shop.example")

	// Three users arrive, and one of them leaves.
	a, b, c := s.ws(t), s.ws(t), s.ws(t)
	a.join("p")
	a.awaitCount("p", 1)
	b.join("p")
	c.join("p")
	a.awaitCount("p", 3)

	again := s.again(t, b) // a second tab is no arrival
	again.join("p")
	again.awaitCount("p", 3)
	again.close()

	c.leave("p")
	a.awaitCount("p", 2)

	is := s.stats(t, "/p/stats")
	most, joins := is.sum()
	if is.Page != "p" || is.Now != 2 || is.Peak.Count != 3 || is.Peak.At == nil || is.Joins != 3 || is.Visitors != 3 ||
		most != 3 || joins != 3 || len(is.Points) < 288 {
		t.Errorf("stats are %+v; want 2 now, a peak of 3, 3 joins and 3 visitors", is)
	}

	for i := 1; i < len(is.Points); i++ {
		if step := is.Points[i].At.Sub(is.Points[i-1].At); step != 5*time.Minute || is.Points[i].At.Second() != 0 {
			t.Fatalf("point %d is %s after the one before", i, step)
		}
	}
	site := s.stats(t, "/*/stats?last=10m&step=1m")
	if site.Page != "*" || site.Now != 3 && site.Now != 2 || site.Joins != 3 || len(site.Points) != 11 {
		t.Errorf("the whole site: %+v", site)
	}
	days := s.stats(t, "/p/stats?last=365d&step=1d")
	if days.Now != 2 || days.Peak.Count != 3 || days.Joins != 3 || len(days.Points) != 366 {
		t.Errorf("a year of days: %d, %+v", len(days.Points), days.Peak)
	}

	table := s.get(t, "/p/stats?step=1d&format=csv")
	lines := strings.Split(table.body, "\r\n")
	isTable := table.header.Get("Content-Type") == "text/csv; charset=utf-8"
	if !isTable || len(lines) != 4 || !strings.Contains(lines[2], "Z,3,3,") {
		t.Errorf("no CSV table of two days with the peak 3 and 3 joins: %s", table.body)
	}

	none := s.stats(t, "/nobody/stats?last=1d&step=1h")
	if none.Peak.At != nil || none.Joins+none.Visitors+none.Now != 0 || len(none.Points) != 25 {
		t.Errorf("a page that nobody ever joined: %+v", none)
	}

	// Other origins may read the stats.
	answer := s.get(t, "/p/stats", "Origin: https://shop.example")
	if answer.header.Get("Cache-Control") != "no-store" ||
		answer.header.Get("Access-Control-Allow-Origin") != "https://shop.example" {
		t.Errorf("headers: %v", answer.header)
	}

	for path, status := range map[string]int{
		"/p/stats?step=30s": 400, "/p/stats?step=90s": 400, "/p/stats?last=25h": 400, "/p/stats?last=0s": 400,
		"/p/stats?last=x": 400, "/p/stats?last=401d&step=1d": 400, "/p/stats?format=CSV": 400,
		"/p/stats?last=-1h": 400, "/p/stats?step=1m&step=2m": 400, "/p/stats?last=%zz": 400, "/-/stats": 400,
		"/%00/stats": 400, "/p/statistics": 404,
	} {
		s.get(t, path).problem(t, status)
	}

	if put := do(t, http.MethodPut, s.url+"/p/stats", "{}"); put.status != http.StatusMethodNotAllowed {
		t.Errorf("PUT: %d", put.status)
	}

	for _, c := range []*client{a, b, c} {
		c.close()
	}

	// Otherwise the file would remember them as present.
	testkit.Eventually(t, "that all have gone", func() bool { return s.count(t, "p") == 0 })

	s.Signal(syscall.SIGTERM)
	s.died(t, 0)
	next := start(t, "--data-dir="+dir)
	days, after := next.stats(t, "/p/stats?step=1d"), next.stats(t, "/p/stats")
	if days.Peak.Count != 3 || days.Joins != 3 || days.Visitors < 3 {
		t.Errorf("days after a restart: %+v", days)
	}
	if after.Now != 0 || after.Peak.Count != 3 || after.Joins != 3 || after.Visitors != 3 {
		t.Errorf("after a restart: %+v", after)
	}

	start(t, "--page-stats=0").get(t, "/p/stats").problem(t, http.StatusNotFound)
}
