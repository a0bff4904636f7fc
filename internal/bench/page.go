//go:build linux

package main

import (
	"bytes"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/prometheus/procfs"
)

type scenario struct {
	name    string
	measure func(*trial) figures
}

// scenarios are in the order in which they are measured. With growths they take about twenty minutes.
var scenarios = []scenario{
	{"floor", floored(subscribers, "1ms")},
	{"floor-asleep", floored(subscribers, "250ms")},
	{"fanout", simulated(quick("35ms"), "--scenario", "fanout", "--users", "5000", "--pages", "1", "--duration", "5s")},
	{"asleep", simulated(nil, "--scenario", "fanout", "--users", "5000", "--pages", "1", "--duration", "5s")},
	{"fanout-tls", fannedOutOverTLS("--scenario", "fanout", "--users", "5000", "--pages", "1", "--duration", "4s")},
	{"hidden", simulated(quick("35ms"), "--scenario", "hidden", "--users", "5000", "--pages", "1", "--duration", "5s")},
	{"slow", simulated(quick("77ms"), "--scenario", "slow", "--users", "5000", "--pages", "1", "--duration", "8s")},
	{"storm", simulated(nil, "--scenario", "storm", "--users", "5000", "--pages", "1")},
	{"churn", simulated(nil, "--scenario", "churn", "--users", "1000", "--pages", "50", "--tabs", "2",
		"--churn", "0.2", "--kill-fraction", "0", "--duration", "6s")},
	{"arrive", arrived},
	{"people", people},
	{"reads", reads},
	{"increments", increments},
	{"batches", counted(nil, "-keys", "views:#", "-many", "10000", "-batch", "1000", "-callers", "4")},
	{"limit", counted(nil, "-path", "/api/v1/limits/user:#", "-body", `{"limit":1000000000,"window":"1m"}`)},
	{"unique", counted(nil, "-path", "/api/v1/counters/visitors:1/members", "-body", `{"add":["user#"]}`)},
	{"dimensions", underDimensions},
	{"top", func(t *trial) figures { return topOfMany(t) }},
	{"top-redis", topInRedis},
	{"top-postgres", topInPostgres},
	{"file-sum", inFile("-keys", "votes:1")},
	{"file-exact", inFile("-keys", "stock:1")},
	{"file-keys", inFile("-keys", "views:#")},
	{"redis-key", inRedis},
	{"redis-members", membersInRedis},
	{"postgres", inPostgres},
	{"persisted", persisted},
	{beside + "fanout", besideBare(fannedOutBeside)},
	{beside + "arrive", besideBare(arrivedBeside)},
	{beside + "idle", besideBare(idleBeside)},
}

// once has the scenarios that run only once, because their runs agree, or are far from the goal.
var once = map[string]bool{
	"floor-asleep": true, "asleep": true, "hidden": true, "slow": true, "storm": true, "top": true,
	"top-postgres": true,
	"file-sum":     true, "file-exact": true, "file-keys": true, "redis-members": true,
	"postgres": true, "persisted": true, beside + "idle": true, "people": true,
}

// quick returns the flags with which only the machine limits the deliveries.
func quick(interval string) []string {
	return []string{"--update-interval", interval, "--delivery-budget", "1000000"}
}

// A row of the table.
type row struct {
	what   string
	figure string  // scenario and name
	unit   float64 // the figure is divided by it
	digits int
	beside string // the goal and the floor; a {figure} in it is measured in this run
}

var rows = []row{
	{"**Fan-out** to 5,000 subscribers of one page, busy: CPU s per million deliveries",
		"fanout server_cpu_s_per_million_counts", 1, 1,
		"asked 7.4, wanted 6.6; floor: {floor cpu_s_per_million} with `send(2)`"},
	{"… deliveries/s", "fanout counts_per_s", 1, 0,
		"asked 130,000, if the clients' core can read them; floor: {floor per_s}"},
	{"… % of a core while nine of ten of them are hidden", "hidden server_cpu_percent_of_a_core", 1, 1,
		"with all of them shown: {fanout server_cpu_percent_of_a_core}"},
	{"… from the first subscriber to have a count until 99 % have it, ms", "fanout spread_p99_ms", 1, 0, ""},
	{"… at half the rate (65,000/s), ms", "slow spread_p99_ms_before", 1, 0, "asked 60"},
	{"… the same while every tenth of them never reads, times as long", "slow spread_p99_ratio", 1, 2,
		"asked 1.2 at most"},
	{"… four times a second, when every client is asleep: CPU s per million", "asleep server_cpu_s_per_million_counts",
		1, 1, "floor: {floor-asleep cpu_s_per_million} with `send(2)`"},
	{"… busy, with TLS of the server's own: CPU s per million", "fanout-tls cpu_s_per_million", 1, 1,
		"in the same runs without TLS: {fanout-tls plain_cpu_s_per_million}"},
	{"… as times the CPU without TLS", "fanout-tls times", 1, 2, ""},
	{"… KB of RSS for each connection", "fanout-tls rss_kb_each", 1, 1, "without TLS: {fanout-tls plain_rss_kb_each}"},
	{"… with nginx in front of a server without TLS: CPU s of both per million", "fanout-tls nginx_cpu_s_per_million",
		1, 1, "on one core together; TLS of the server's own: {fanout-tls cpu_s_per_million}"},
	{"… as times the CPU without TLS", "fanout-tls nginx_times", 1, 2, "TLS of its own: {fanout-tls times}"},
	{"… KB of RSS of nginx for each connection", "fanout-tls nginx_rss_kb_each", 1, 1,
		"beside the server's {fanout-tls plain_rss_kb_each}"},
	{"**Everyone at once** after a restart ({arrive connections} connections): s until the last is welcomed",
		"arrive all_after_s", 1, 1, ""},
	{"… had to connect again", "arrive again", 1, 0, ""},
	{"… connections per CPU s of the server", "arrive per_cpu_s", 1, 0, "asked 10,000"},
	{"… most RSS, MB", "arrive rss_most_mb", 1, 0, ""},
	{"**People on one machine**: {people users} on 10,000 pages, several servers over one Redis: MB of RSS " +
		"of all servers, half a minute after the last came", "people rss_mb", 1, 0,
		"asked 3,000 for 100,000; {people processes} servers; most: {people rss_most_mb}; {people rss_kb_each} KB " +
			"each"},
	{"… s after the last join until everybody has the right count", "people right_after_s", 1, 2, "asked 1"},
	{"… CPU µs of the servers to connect and join", "people cpu_us_per_join", 1, 0,
		"with the counts for those who came before; of Redis: {people redis_us_per_join}"},
	{"… % of a core afterwards, all servers together", "people core_percent", 1, 0, "ping every 15 s"},
	{"**Storm**: 5,000 users arrive on one page within 5 s: s until all have the final count", "storm right_after_s", 1,
		2, "best of others: 0.12"},
	{"… CPU s of the server", "storm server_cpu_s", 1, 2, "best of others: 1.3"},
	{"… MB received by all", "storm bytes", 1e6, 1, "best of others: 6.5"},
	{"**Churn**, 1,000 users, 200 come or leave a second: a join is seen by another client after ms, median",
		"churn join_p50_ms", 1, 1, ""},
	{"… 99 %, ms", "churn join_p99_ms", 1, 1, ""},
	{"… % of a core", "churn server_cpu_percent_of_a_core", 1, 1, ""},
	{"**Reading**, 64 clients: CPU µs of a GET of a page that others watch, in memory",
		"reads memory_page_cpu_us_per_call", 1, 1,
		"asked 1.18 times the floor: {reads gin_cpu_us_per_call}, a bare gin handler with 200 bytes; {reads " +
			"memory_page_times} times"},
	{"… with `--redis`", "reads redis_page_cpu_us_per_call", 1, 1, "{reads redis_page_times} times the floor"},
	{"… of a counter, in memory", "reads memory_counter_cpu_us_per_call", 1, 1,
		"{reads memory_counter_times} times the floor"},
	{"… of a counter, with `--redis`", "reads redis_counter_cpu_us_per_call", 1, 1,
		"{reads redis_counter_times} times the floor"},
	{"**Counters**, in memory, 64 clients: CPU µs of an increment of one key", "increments one_cpu_us_per_call", 1, 1,
		"floor: {increments gin_cpu_us_per_call}, a bare gin handler that parses the body and answers"},
	{"… as times the floor, median of three rounds", "increments one_times", 1, 2, "asked 1.25"},
	{"… of one of a million keys", "increments many_cpu_us_per_call", 1, 1, "one key may not be slower"},
	{"… as times the floor", "increments many_times", 1, 2, "asked 1.25"},
	{"… increments/s of one key", "increments one_calls_per_s", 1, 0, "floor: {increments gin_calls_per_s}"},
	{"… changes per CPU s, in batches of 1,000 for 10,000 keys", "batches changes_per_cpu_s", 1, 0, "asked 1,000,000"},
	{"… CPU µs of a call on a limit, a million keys", "limit cpu_us_per_call", 1, 1,
		"floor: {increments gin_cpu_us_per_call}, the same gin handler"},
	{"… CPU µs of adding one of a million members to a unique that keeps hours", "unique cpu_us_per_call", 1, 1,
		"an increment of one key: {increments one_cpu_us_per_call}"},
	{"… CPU µs of an increment under one of 200 values of a dimension", "dimensions cpu_us_per_call", 1, 1,
		"an increment without: {increments one_cpu_us_per_call}"},
	{"… a top list, after a million keys have gained: ms, median", "top p50_ms", 1, 2, "asked 5"},
	{"… with `--redis`", "top-redis p50_ms", 1, 2, "asked 5"},
	{"… with `--postgres`", "top-postgres p50_ms", 1, 2, "asked 5"},
	{"… with `--data-dir`, one key of kind sum: changes/s, as times one fsync each", "file-sum times", 1, 1,
		"asked 20; {file-sum changes_per_s} changes/s"},
	{"… one key of kind exact", "file-exact times", 1, 1, "asked 20; {file-exact changes_per_s} changes/s"},
	{"… a million keys", "file-keys times", 1, 1, "asked 20; {file-keys changes_per_s} changes/s"},
	{"… with `--redis`, one key at 20,000/s: scripts/s in Redis", "redis-key scripts_per_s", 1, 0,
		"asked 50, which no p99 under 10 ms allows (docs/decisions.md); {redis-key calls_per_s} calls/s, {redis-key " +
			"core_percent} % of the core"},
	{"… p99, ms", "redis-key p99_ms", 1, 1, "asked 10, of a core that is not full"},
	{"… p99 at 10,000/s, ms", "redis-key 10000_p99_ms", 1, 1,
		"asked 10; {redis-key 10000_scripts_per_s} scripts/s for {redis-key 10000_calls_per_s} calls/s, {redis-key " +
			"10000_core_percent} % of the core"},
	{"… p99 at 5,000/s, ms", "redis-key 5000_p99_ms", 1, 1,
		"asked 10; {redis-key 5000_scripts_per_s} scripts/s for {redis-key 5000_calls_per_s} calls/s, {redis-key " +
			"5000_core_percent} % of the core"},
	{"… p99 of 20,000 changes/s in batches of 100, ms", "redis-key batches_p99_ms", 1, 1,
		"asked 10; {redis-key batches_scripts_per_s} scripts/s, {redis-key batches_core_percent} % of the core"},
	{"… bytes of a member in Redis, a million in one set", "redis-members bytes_each", 1, 1, "asked 24"},
	{"… with `--postgres`, one key of kind exact: changes/s, as times plain updates from 64 connections",
		"postgres times", 1, 1, "asked 20; {postgres changes_per_s} and {postgres updates_per_s} a second"},
	{
		"… with `--redis` and `--postgres`, 200 keys of kind sum: rows that PostgreSQL writes for a counter in a " +
			"`--persist-interval`", "persisted each", 1, 2,
		"asked 1; {persisted rows} rows for {persisted changes} changes"},
}

// page returns BENCHMARKS.md. A row without figures is left out.
func (b *bench) page() []byte {
	var p bytes.Buffer
	p.WriteString("# Benchmarks\n\n")
	fmt.Fprintf(&p, "Written by `make bench`, which measures all of it anew in twenty minutes: `%s` on %s.\n",
		b.version, machineName())
	p.WriteString("The server is on one core, its clients on another, loopback, without TLS unless a row says " +
		"otherwise.\nEach figure is the median of the runs behind it. \"Floor\" is what the work costs without this " +
		"program, as the row says; where that is a figure of its own, it was measured in the same run.\n")
	p.WriteString(b.loadWarning() + "\n| | median | runs | beside it |\n|---|---|---|---|\n")

	for _, r := range slices.Concat(rows, rowsBeside()) {
		runs := b.figures[r.figure]
		if len(runs) == 0 {
			continue
		}

		var all []string
		for _, v := range runs {
			all = append(all, number(v/r.unit, r.digits))
		}
		fmt.Fprintf(&p, "| %s | %s | %s | %s |\n", b.fill(r.what), number(median(runs)/r.unit, r.digits),
			strings.Join(all, ", "), b.fill(r.beside))
	}

	if len(b.figures["people users"]) > 0 {
		p.WriteString(peopleText)
	}
	p.WriteString(b.bareServers())
	p.WriteString(b.growth())
	p.WriteString("\nCPU seconds say more than rates: a rate is also the clients', who share the machine's memory " +
		"and caches. What these figures mean for a site is\nin [CAPACITY.md](CAPACITY.md). " +
		"`go test -run '^$' -bench . ./...` runs the benchmarks of single parts.\n")

	return p.Bytes()
}

// fill puts medians in the place of {figures}.
func (b *bench) fill(text string) string {
	for {
		before, rest, ok := strings.Cut(text, "{")
		name, after, closed := strings.Cut(rest, "}")
		if !ok || !closed {
			return text
		}

		value := "not measured"
		if runs := b.figures[name]; len(runs) > 0 {
			digits := 1
			// Three figures or more need no decimal place.
			if median(runs) >= 100 {
				digits = 0
			}
			value = number(median(runs), digits)
		}

		text = before + value + after
	}
}

func median(runs []float64) float64 {
	sorted := slices.Sorted(slices.Values(runs))
	// The mean of the middle two if the number is even, the middle one if it is odd.
	return (sorted[(len(sorted)-1)/2] + sorted[len(sorted)/2]) / 2
}

// number formats v with a comma before every three digits.
func number(v float64, digits int) string {
	whole, rest, _ := strings.Cut(strconv.FormatFloat(v, 'f', digits, 64), ".")
	for i := len(whole) - 3; i > 0 && whole[i-1] != '-'; i -= 3 {
		whole = whole[:i] + "," + whole[i:]
	}

	if rest != "" {
		whole += "." + rest
	}
	return whole
}

// loadWarning returns a sentence for the page if the machine had other work to do.
func (b *bench) loadWarning() string {
	if b.load < 1 {
		return ""
	}

	return fmt.Sprintf("\n**The machine had other work to do** (a load of %.1f before the first run). Of these "+
		"figures only memory and connections per CPU s are of use, and the others beside their floor.\n", b.load)
}

// settling is how long it takes until the load of two busy cores has fallen below one.
const settling = time.Minute

// loadAverage returns how many processes wanted to run, on average over the last minute.
func loadAverage() (load float64) {
	text, _ := os.ReadFile("/proc/loadavg")
	_, _ = fmt.Sscan(string(text), &load)
	return load
}

// machineName describes the machine of the measurement.
func machineName() string {
	cpu := "an unknown processor"
	if proc, err := procfs.NewDefaultFS(); err == nil {
		cores, err := proc.CPUInfo()
		if err == nil && len(cores) > 0 && cores[0].ModelName != "" {
			cpu = cores[0].ModelName
		}
	}

	kernel, _ := os.ReadFile("/proc/sys/kernel/osrelease")
	release, _, _ := strings.Cut(strings.TrimSpace(string(kernel)), "-")

	return fmt.Sprintf("%d cores of %s, Linux %s", runtime.NumCPU(), cpu, release)
}
