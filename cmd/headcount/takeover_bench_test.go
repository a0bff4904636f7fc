package main

import (
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"net/http"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/rs/zerolog"

	"headcount/internal/redistest"
	"headcount/internal/servertest"
	"headcount/presence"
	"headcount/presence/presenceredis"
)

var takeoverMembers = flag.Int("members", 1_000_000, "how many members BenchmarkTakeover has nodes take over")

// BenchmarkTakeover lets a presence node take over all partitions of a dead node with many members, and share them with
// a second node. Then the first node is killed, and the second takes over the rest. The benchmark reports how long each
// takeover takes, the memory of the processes, the greatest error of the site's count, and how long the count was
// stale. CAPACITY.md has the figures of
//
//	go test -run '^$' -bench Takeover -benchtime 1x -timeout 30m ./cmd/headcount -members 5000000
func BenchmarkTakeover(b *testing.B) {
	for b.Loop() {
		takeover(b, *takeoverMembers)
	}
	b.ReportMetric(0, "ns/op") // an iteration lasts as long as the scenario
}

const (
	takeoverLimit = 5 * time.Minute
	takeoverRest  = 10 * time.Second // longer than any probation of members and any retry
)

func takeover(b *testing.B, members int) {
	redis := redistest.Start(b)
	start := time.Now()
	seed(b, redis.URL(), members)
	b.Logf("%d members are in Redis after %.1f s", members, time.Since(start).Seconds())

	bin := benchProgram(b)
	process := func(roles string) *process {
		return benchProcess(b, bin, "--roles", roles, "--redis", redis.URL(), "--cluster-listen", servertest.FreeAddr(),
			"--log-level", "warn")
	}

	// The first node takes everything over.
	start = time.Now()
	first, gateway := process(presence.RolePresence), process(presence.RoleGateway+","+presence.RoleDispatcher)
	first.ready(b, takeoverLimit)
	b.ReportMetric(time.Since(start).Seconds(), "s-first")

	gateway.ready(b, takeoverLimit)

	site := watchSite(gateway.url, int64(members))
	time.Sleep(takeoverRest)
	b.ReportMetric(first.memory(b, "VmRSS"), "MB-first")

	// The second node takes half.
	start = time.Now()
	second := process(presence.RolePresence)
	second.ready(b, takeoverLimit)
	b.ReportMetric(time.Since(start).Seconds(), "s-half")
	time.Sleep(takeoverRest)

	// The first node is killed, and the second takes the rest.
	start = time.Now()
	first.Kill()
	for second.metric(b, "headcount_partitions_owned") < presence.DefaultPartitions {
		if time.Since(start) > takeoverLimit {
			b.Fatal("the second node does not have all partitions")
		}
		time.Sleep(20 * time.Millisecond)
	}
	b.ReportMetric(time.Since(start).Seconds(), "s-killed")
	time.Sleep(takeoverRest)

	if n := second.metric(b, "headcount_users"); int(n) != members {
		b.Errorf("the second node has %.0f users, want %d", n, members)
	}

	b.ReportMetric(second.memory(b, "VmRSS"), "MB-node")
	b.ReportMetric(second.memory(b, "VmHWM"), "MB-node-most")
	b.ReportMetric(value(b, redis.Do(b, "INFO", "memory").(string), "used_memory_rss:")/1e6, "MB-redis")

	off, stale, unread := site.stop()
	b.ReportMetric(float64(off), "users-off")
	b.ReportMetric(stale.Seconds(), "s-stale")
	b.ReportMetric(float64(unread), "reads-failed")
}

// seed writes the members into Redis as a node would, and leaves them there. Each member has a hold of an hour, so that
// no gateway needs to report it.
func seed(b *testing.B, url string, members int) {
	b.Helper()
	s := presenceredis.Open(presenceredis.Config{Conn: redistest.Dial(b, url), Log: zerolog.Nop()})
	defer s.Close()

	all := make([]int, presence.DefaultPartitions)
	for i := range all {
		all[i] = i
	}
	claims, err := s.Claim(b.Context(), "a node that is gone", all, false)
	if err != nil {
		b.Fatal(err)
	}

	changes := make([]presence.Change, len(claims))
	users := make([]map[string]int64, len(claims))
	for i, c := range claims {
		changes[i] = presence.Change{Claim: c, Sequence: 1, Reset: true}
		users[i] = map[string]int64{}
	}

	end := time.Now().Add(time.Hour)

	// A multiplier spreads the users evenly over the partitions.
	for i := range members {
		u := presence.User(uint64(i+1) * 0x9E3779B97F4A7C15)
		p := u.Partition(presence.DefaultPartitions)
		page := "/shop/item/" + strconv.Itoa(i%10_000)
		changes[p].Members = append(changes[p].Members,
			presence.MemberChange{Member: presence.Member{User: u, Page: page, Hold: end}})
		users[p][page]++
		users[p][presence.AllPages]++
	}

	const atOnce = 2 // partitions in a write, which has a deadline
	for first := 0; first < len(changes); first += atOnce {
		part := changes[first:min(first+atOnce, len(changes))]
		for i := range part {
			for page, n := range users[first+i] {
				part[i].Counts = append(part[i].Counts, presence.PageUsers{Page: page, Users: n})
			}
			part[i].Complete = true
		}

		failed := func(o presence.Outcome) bool { return o.Err != nil }
		for tries := 1; slices.ContainsFunc(s.Write(b.Context(), part), failed); tries++ {
			if tries == 10 {
				b.Fatal("the members cannot be written")
			}
		}
	}
}

// site watches the count of the site all the time.
type site struct {
	ended  chan struct{}
	done   chan struct{}
	off    int64         // the greatest error
	stale  time.Duration // the time of the stale counts
	failed int           // reads without an answer
}

func watchSite(url string, truth int64) *site {
	s := &site{ended: make(chan struct{}), done: make(chan struct{})}
	go func() { // ends with stop
		defer close(s.done)
		const every = 50 * time.Millisecond
		tick := time.NewTicker(every)
		defer tick.Stop()
		for {
			select {
			case <-s.ended:
				return
			case <-tick.C:
			}

			count, err := readSite(url)
			if err != nil {
				s.failed++
				continue
			}

			s.off = max(s.off, truth-count.Count, count.Count-truth)
			if count.Stale {
				s.stale += every
			}
		}
	}()

	return s
}

func (s *site) stop() (off int64, stale time.Duration, failed int) {
	close(s.ended)
	<-s.done

	return s.off, s.stale, s.failed
}

func readSite(url string) (count struct {
	Count int64
	Stale bool
}, err error) {
	resp, err := http.Get(url + "/*/counter")
	if err != nil {
		return count, err
	}
	defer resp.Body.Close()

	if resp.StatusCode != http.StatusOK {
		return count, fmt.Errorf("status %d", resp.StatusCode)
	}

	return count, json.NewDecoder(resp.Body).Decode(&count)
}

// metric returns one value of the process's metrics.
func (p *process) metric(b *testing.B, name string) float64 {
	b.Helper()
	resp, err := http.Get("http://" + p.admin + "/metrics")
	if err != nil {
		b.Fatal(err)
	}
	defer resp.Body.Close()

	text, err := io.ReadAll(resp.Body)
	if err != nil {
		b.Fatal(err)
	}

	return value(b, string(text), name+" ")
}

// memory returns a field of the process's status, in megabytes.
func (p *process) memory(b *testing.B, field string) float64 {
	b.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.PID()))
	if err != nil {
		b.Fatal(err)
	}

	return value(b, strings.ReplaceAll(string(text), " kB", ""), field+":") * 1024 / 1e6
}

// value returns the number at the end of the line that begins with begin.
func value(b *testing.B, text, begin string) float64 {
	b.Helper()
	for line := range strings.Lines(text) {
		if rest, ok := strings.CutPrefix(line, begin); ok {
			n, err := strconv.ParseFloat(strings.TrimSpace(rest), 64)
			if err != nil {
				b.Fatal(err)
			}
			return n
		}
	}

	b.Fatalf("no line begins with %q", begin)
	return 0
}
