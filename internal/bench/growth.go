//go:build linux

package main

import (
	"bytes"
	"cmp"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/wcharczuk/go-chart/v2"

	"headcount/internal/benchenv"
	"headcount/internal/machine"
	"headcount/internal/redistest"
)

// growths are scenarios that run once at each size, so they have one figure for each size.
var growths = []struct {
	name    string
	sockets bool // a size is a number of connections, which the limit of open files bounds
	measure func(t *trial, size int) figures
}{
	{"idle", true, joined(nil, "100", "30s")}, // two pings each, and time to return the memory of the arrival
	{"quiet", true, joined([]string{"--ping-interval", "10m"}, "100", "8s")},
	{"pages", true, joined(nil, "", "1s")},
	{"subscribers", true, overSubscribers},
	{"keys", false, overKeys},
}

// plots show growths. Each plot is a file, and each of its lines is also a row of the table.
var plots = []struct {
	file, figure, over string
	lines              []row
}{
	{"memory", "KB of RSS for each connection", "connections", []row{
		{"idle on 100 pages", "idle server_rss_bytes_per_connection", 1e3, 1,
			"half a minute after the last came; asked 8, wanted 4; floor: 1.0, bare epoll readers"},
	}},
	{"idle", "% of a core", "connections", []row{
		{"idle on 100 pages", "idle server_cpu_percent_of_a_core", 1, 2, ""},
		{"without pings", "quiet server_cpu_percent_of_a_core", 1, 2,
			"the difference is ping and pong: asked 1 at 10,000"},
	}},
	{"joins", "CPU µs to connect and join", "connections", []row{
		{"a page for each", "pages server_cpu_us_per_join", 1, 0, "floor: {arrive cpu_us_each}, to connect alone"},
		{"on 100 pages", "idle server_cpu_us_per_join", 1, 0, "with the counts for those who came before"},
	}},
	{"fanout", "CPU s per million deliveries", "subscribers", []row{
		{"one page, busy", "subscribers server_cpu_s_per_million_counts", 1, 1, ""},
		{"floor: send(2)", "subscribers floor_cpu_s_per_million", 1, 1, ""},
	}},
	{"page-reads", "CPU µs of a GET of a page", "pages", []row{
		{"in memory", "keys memory_page_cpu_us", 1, 1, ""},
		{"with Redis", "keys redis_page_cpu_us", 1, 1, "without Redis's own"},
		{"floor: bare gin", "keys gin_get_cpu_us", 1, 1, ""},
	}},
	{"counter-reads", "CPU µs of a GET of a counter", "keys", []row{
		{"in memory", "keys memory_counter_cpu_us", 1, 1, ""},
		{"with Redis", "keys redis_counter_cpu_us", 1, 1, "without Redis's own"},
		{"floor: bare gin", "keys gin_get_cpu_us", 1, 1, ""},
	}},
	{"increments", "CPU µs of an increment", "keys", []row{
		{"in memory", "keys memory_increment_cpu_us", 1, 1, ""},
		{"with Redis", "keys redis_increment_cpu_us", 1, 1, "without Redis's own"},
		{"with Redis, in batches", "keys redis_batch_cpu_us", 1_000, 1, "1,000 at a time; without Redis's own"},
		{"floor: bare gin", "keys gin_increment_cpu_us", 1, 1, ""},
	}},
	{"redis", "CPU µs of Redis itself", "keys", []row{
		{"GET of a page", "keys redis_page_store_cpu_us", 1, 1, "none for what is read twice within a second"},
		{"GET of a counter", "keys redis_counter_store_cpu_us", 1, 1, "the same"},
		{"increment", "keys redis_increment_store_cpu_us", 1, 1, ""},
		{"increment, in batches", "keys redis_batch_store_cpu_us", 1_000, 1, "1,000 at a time"},
	}},
}

// joined returns a measurement in which each user joins one of so many pages; "": a page of its own.
func joined(flags []string, pages, lasts string) func(*trial, int) figures {
	return func(t *trial, size int) figures {
		users := strconv.Itoa(size)
		args := []string{"--scenario", "idle", "--users", users, "--pages", cmp.Or(pages, users), "--duration", lasts}
		return t.simulate(t.serve(flags...), args...)
	}
}

// overSubscribers measures the fan-out to size subscribers.
func overSubscribers(t *trial, size int) figures {
	// The interval grows with the subscribers, so that deliveries a second are about the same at every size.
	interval := max(time.Duration(size)*7*time.Microsecond, 10*time.Millisecond)

	s := t.serve(quick(interval.String())...)
	f := t.simulate(s, "--scenario", "fanout", "--users", strconv.Itoa(size), "--pages", "1", "--duration", "5s")
	s.End(benchenv.EndTime)

	// After the server has ended, because both need the core.
	f["floor_cpu_s_per_million"] = floored(size, "1ms")(t)["cpu_s_per_million"]

	return f
}

// overKeys changes counters and reads counters and pages. Each call is for a random one of size keys.
func overKeys(t *trial, size int) figures {
	f := figures{}
	call := func(name string, s server, store int, args ...string) {
		before := cpuTime(store)
		args = append([]string{"-keys", "views:#", "-many", strconv.Itoa(size), "-for", "1s"}, args...)
		got := t.calls(s, args...)
		f[name+"_cpu_us"] = got["cpu_us_per_call"]
		f[name+"_store_cpu_us"] = (cpuTime(store) - before) / got["calls"] * 1e6
	}

	gin := t.bareGin()
	redis := redistest.Start(t)
	call("gin_increment", gin, 0)
	call("gin_get", gin, 0, "-path", "/read")

	servers := map[string]server{"memory": t.serveCounters(), "redis": t.serveCounters("--redis", redis.URL())}
	for store, s := range servers {
		call(store+"_batch", s, redis.PID(), "-batch", "1000", "-callers", "4") // also creates the counters
		call(store+"_increment", s, redis.PID())
		for range 2 { // only the second counts: in the first the server subscribes to topics that are read often
			call(store+"_counter", s, redis.PID(), "-path", "/api/v1/counters/views:#")
			call(store+"_page", s, redis.PID(), "-path", "/page#/counter")
		}
	}

	return f
}

// mostSockets returns how many connections a server can have. Of the files that it may open it keeps a sixth for
// newcomers, stores and peers. Its clients may open as many files.
func mostSockets() int {
	files, _ := machine.OpenFiles()
	return int(files) * 4 / 5
}

// growth returns the part of BENCHMARKS.md about growths. It is empty if none was measured.
func (b *bench) growth() string {
	var heads, table, images strings.Builder
	for _, size := range b.sizes {
		fmt.Fprintf(&heads, " %s |", number(float64(size), 0))
	}

	for _, p := range plots {
		name := "**" + strings.ToUpper(p.figure[:1]) + p.figure[1:] + "** over " + p.over + ": "
		for _, r := range p.lines {
			sizes := b.sizesOf(r)
			if len(sizes) == 0 {
				continue
			}

			fmt.Fprintf(&table, "| %s%s |", name, r.what)
			name = "… "
			for i, v := range b.figures[r.figure] {
				table.WriteString(" " + number(v/r.unit, r.digits))
				// Where open files are few, several columns may have the same size.
				if sizes[i] != float64(b.sizes[i]) {
					table.WriteString(" at " + number(sizes[i], 0))
				}
				table.WriteString(" |")
			}
			fmt.Fprintf(&table, " %s |\n", b.fill(r.beside))
		}

		// A plot without any line would be an empty frame.
		if name == "… " {
			fmt.Fprintf(&images, "<img src=\"%s/%s.svg\" width=\"440\" alt=\"%s over %s\">\n",
				plotFolder, p.file, p.figure, p.over)
		}
	}

	if table.Len() == 0 {
		return ""
	}

	return "\n## Growth\n\nEach figure is measured once, with as many connections, pages, subscribers or keys as " +
		"its column says. \"At\" gives their number where the machine's open files allow fewer.\n\n| |" +
		heads.String() + " beside it |\n|" + strings.Repeat("---|", len(b.sizes)+2) + "\n" +
		table.String() + "\n" + images.String()
}

// sizesOf returns the sizes at which the figures of a line were measured.
func (b *bench) sizesOf(r row) []float64 {
	scenario, _, _ := strings.Cut(r.figure, " ")
	return b.figures[scenario+" size"]
}

// plotFolder is beside BENCHMARKS.md.
const plotFolder = "docs/plots"

// draw writes a file for each plot, in colors that can be read on white and on black.
func (b *bench) draw(folder string) error {
	if err := os.MkdirAll(folder, 0o755); err != nil {
		return err
	}

	gray := chart.ColorAlternateGray
	none := chart.ColorTransparent
	style := chart.Style{FontSize: 9, FontColor: gray, StrokeColor: gray, FillColor: none}
	legend := chart.Style{FontSize: 9, FontColor: gray, StrokeColor: none, FillColor: none}
	for _, p := range plots {
		c := chart.Chart{
			Width: 640, Height: 240, Background: style, Canvas: style, Title: p.figure, TitleStyle: style,
		}
		c.Background.Padding = chart.Box{Top: 40, Left: 170, Right: 10, Bottom: 10}

		ticks := []chart.Tick{{Label: "0"}}
		top := 0.0
		for _, size := range b.sizesOf(p.lines[0]) {
			ticks = append(ticks, chart.Tick{Value: size, Label: number(size, 0)})
		}

		for i, r := range p.lines {
			color := chart.GetDefaultColor(i)
			s := chart.ContinuousSeries{Name: r.what, XValues: b.sizesOf(r)}
			s.Style = chart.Style{StrokeWidth: 2, StrokeColor: color, DotWidth: 3, DotColor: color}

			for _, v := range b.figures[r.figure] {
				s.YValues = append(s.YValues, v/r.unit)
				top = max(top, v/r.unit)
			}
			c.Series = append(c.Series, s)
		}

		c.XAxis = chart.XAxis{Name: p.over + ", " + b.version, NameStyle: style, Style: style, Ticks: ticks}
		c.YAxis = chart.YAxis{Style: style, Range: &chart.ContinuousRange{Max: top * 1.1}}
		c.YAxis.ValueFormatter = func(v any) string { return number(v.(float64), p.lines[0].digits) }
		c.Elements = []chart.Renderable{chart.LegendLeft(&c, legend)}

		var svg bytes.Buffer
		if err := c.Render(chart.SVG, &svg); err != nil {
			return fmt.Errorf("draw %s: %w", p.file, err)
		}
		if err := os.WriteFile(filepath.Join(folder, p.file+".svg"), svg.Bytes(), 0o644); err != nil {
			return err
		}
	}

	return nil
}
