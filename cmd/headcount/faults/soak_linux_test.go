package faults

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/procfs"

	"headcount/client"
	"headcount/internal/redistest"
	"headcount/internal/servertest"
	"headcount/internal/testkit"
)

// The long form is make soak HOURS=1.
var soakHours = flag.Float64("hours", 0, "of the soak; less than a minute: one minute")

const (
	warm    = 10   // minutes, until caches and tables have their full size
	window  = 10   // minutes whose median is compared: the sizes of one minute are up to 4 % off
	growth  = 1.05 // what nothing exceeds after that …
	few     = 4    // … or by so many: connections of a pool come and go, and a leak with each kill would be more
	backend = 8    // clients that change counters
	every   = 200 * time.Millisecond

	// keyBytes is what Redis keeps of each change for a day, an idempotency key, or for good, an entry of a ledger.
	keyBytes = 126
	// placeBytes is a place for a key in the two tables of Redis, whose number of places doubles: of keys, and of when
	// they expire.
	placeBytes = 2 * 8
)

// TestClockSoak: users come, change pages and go, backends change counters, and each minute a process is killed and
// started again. After each kill counts and counters are exact. From the tenth minute to the last nothing has grown
// in the processes that were never killed.
func TestClockSoak(t *testing.T) {
	t.Parallel()
	redis := redistest.Start(t)
	top := newTopology(t, redis.URL(), nil, "--api-key="+counterKey)
	s := openShop(t, top.gateways)

	lasting := []*member{top.gateways[0], top.nodes[0], top.dispatchers[0]}
	killed := []*member{top.gateways[1], top.nodes[1], top.nodes[2], top.dispatchers[1]}

	var minutes []sizes
	for minute := range max(1, int(*soakHours*60)) {
		victim := killed[minute%len(killed)]
		end := time.Now().Add(time.Minute)

		t.Run(fmt.Sprint("minute ", minute+1), func(t *testing.T) { // its stopwatch ends with it
			f := killed9(victim, func() {
				time.Sleep(time.Until(end.Add(-25 * time.Second)))
				minutes = append(minutes, s.sizes(t, redis, lasting, end.Add(-5*time.Second)))
			})
			top.suffer(t, f)
			s.audit(t)
		})

		t.Logf("minute %d: %s; %s", minute+1, minutes[len(minutes)-1], s)
		if t.Failed() {
			return
		}
		time.Sleep(time.Until(end))
	}

	for _, grown := range compare(minutes) {
		t.Error(grown)
	}
}

// killed9 is a crash of a process that is started again some seconds later, while users come and go until rest returns.
func killed9(m *member, rest func()) fault {
	return fault{
		name: "kill -9 of " + m.name, since: "the last join or leave",
		damage: func(t *testing.T) time.Time {
			m.kill()
			time.Sleep(rand.N(5 * time.Second))
			again(t, m)
			rest()
			return time.Now()
		},
	}
}

// sizes are bytes in use, open descriptors and goroutines of processes, by the names of both.
type sizes map[string]float64

func (s sizes) String() string {
	var b strings.Builder
	for _, name := range slices.Sorted(maps.Keys(s)) {
		fmt.Fprintf(&b, "%s %.0f, ", name, s[name])
	}

	return strings.TrimSuffix(b.String(), ", ")
}

// sizes returns the medians of what is measured until then.
func (s *shop) sizes(t *testing.T, redis *redistest.Server, members []*member, until time.Time) sizes {
	t.Helper()
	all := map[string][]float64{}
	note := func(name string, size float64) { all[name] = append(all[name], size) }

	for ; time.Now().Before(until); time.Sleep(time.Second) {
		note("redis kB", float64(servertest.Memory(redis.PID())-s.kept())/1024)
		note("redis files", files(t, redis.PID()))
		for _, m := range members {
			collect(t, m)
			note(m.name+" kB", inUse(t, m)/1024)
			note(m.name+" files", files(t, m.process.PID()))
			note(m.name+" goroutines", metric(t, m, "go_goroutines"))
		}
	}

	return medians(all)
}

// medians returns the median of each size.
func medians(all map[string][]float64) sizes {
	middle := sizes{}
	for name, values := range all {
		slices.Sort(values)
		middle[name] = values[len(values)/2]
	}

	return middle
}

// collect has a process free its garbage, which comes and goes by more than what could be a leak.
func collect(t *testing.T, m *member) {
	t.Helper()
	status, _, _, err := get("http://" + m.admin + "/debug/pprof/heap?gc=1")
	if err != nil || status != http.StatusOK {
		t.Fatalf("%s: %d, %v", m.name, status, err)
	}
}

func files(t *testing.T, pid int) float64 {
	t.Helper()
	p, err := procfs.NewProc(pid)
	if err != nil {
		t.Fatal(err)
	}
	n, err := p.FileDescriptorsLen()
	if err != nil {
		t.Fatal(err)
	}

	return float64(n)
}

// inUse returns the resident memory of a process, but for what grows by design or is free already.
func inUse(t *testing.T, m *member) float64 {
	t.Helper()
	// An owner of counters keeps rows that it has written, up to 64 MB, which no hour fills.
	rows := metric(t, m, "headcount_owner_rows_bytes")
	// What the runtime has not yet returned to the system comes and goes, like garbage.
	free := metric(t, m, "go_memstats_heap_idle_bytes") - metric(t, m, "go_memstats_heap_released_bytes")

	return float64(servertest.Memory(m.process.PID())) - rows - free
}

// metric returns a metric without labels, 0 if the process has no such.
func metric(t *testing.T, m *member, name string) float64 {
	t.Helper()
	status, _, metrics, err := get("http://" + m.admin + "/metrics")
	if err != nil || status != http.StatusOK {
		t.Fatalf("%s: %d, %v", m.name, status, err)
	}

	_, text, found := strings.Cut(metrics, "\n"+name+" ")
	if !found {
		return 0
	}
	text, _, _ = strings.Cut(text, "\n")
	value, err := strconv.ParseFloat(text, 64)
	if err != nil {
		t.Fatalf("%s: %s: %v", m.name, name, err)
	}

	return value
}

// compare returns what has grown from around the tenth minute to the last ones.
func compare(minutes []sizes) (grown []string) {
	const begin = warm - window/2
	if len(minutes) < begin+2*window {
		return nil
	}

	last := typical(minutes[len(minutes)-window:])
	for name, then := range typical(minutes[begin : begin+window]) {
		if now := last[name]; now > max(then*growth, then+few) {
			grown = append(grown, fmt.Sprintf("%s: %.0f has become %.0f", name, then, now))
		}
	}

	return grown
}

// typical returns the medians of some minutes.
func typical(minutes []sizes) sizes {
	all := map[string][]float64{}
	for _, at := range minutes {
		for name, size := range at {
			all[name] = append(all[name], size)
		}
	}

	return medians(all)
}

func TestCompareFindsWhatGrows(t *testing.T) {
	var minutes []sizes
	for minute := range 40 {
		at := float64(minute)
		minutes = append(minutes, sizes{
			"flat": 100 + float64(minute%4), "leak": 100 + at/3, "cache": 200, "pool": 23 + float64(minute/14),
		})
	}

	minutes[0]["cache"] = 1
	minutes[39]["flat"] = 150

	grown := compare(minutes)
	if want := []string{"leak: 103 has become 112"}; !slices.Equal(grown, want) {
		t.Errorf("what has grown is %q, want %q", grown, want)
	}
	if grown := compare(minutes[:2*warm]); len(grown) > 0 {
		t.Errorf("%q has grown before anything is warm", grown)
	}
}

// shop is backends that change counters at a steady rate, each change under an idempotency key until it is answered.
type shop struct {
	gateways []*member
	web      *http.Client
	keys     []string

	changing sync.RWMutex // held for reading while a change is under way

	mu      sync.Mutex
	sold    map[string]int64 // acknowledged, by key
	changes int
	failed  int // tries that were not answered, or with 503
	wrong   []string
}

func openShop(t *testing.T, gateways []*member) *shop {
	s := &shop{gateways: gateways, sold: map[string]int64{}}
	s.web = &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: backend}, Timeout: 12 * time.Second}
	for i := range 10 {
		s.keys = append(s.keys, fmt.Sprint("views:", i), fmt.Sprint("stock:", i)) // a sum, and an exact one
	}

	ctx, stop := context.WithCancel(t.Context())
	var group sync.WaitGroup
	for range backend {
		group.Go(func() {
			for ctx.Err() == nil {
				s.change()
				time.Sleep(every/2 + rand.N(every))
			}
		})
	}

	t.Cleanup(func() {
		stop()
		group.Wait()
		s.web.CloseIdleConnections()
	})

	return s
}

// kept returns what Redis has to keep of the changes, in bytes.
func (s *shop) kept() int64 {
	s.mu.Lock()
	defer s.mu.Unlock()

	places := 1
	for places < s.changes {
		places *= 2
	}

	return int64(s.changes*keyBytes + places*placeBytes)
}

func (s *shop) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()

	return fmt.Sprintf("%d changes, %d more tries", s.changes, s.failed)
}

func (s *shop) at(m *member) *client.API {
	return client.NewAPI(client.Config{URL: "http://" + m.addr, APIKey: counterKey, HTTP: s.web})
}

// change makes a change. One of ten is made once more, which must change nothing.
func (s *shop) change() {
	s.changing.RLock()
	defer s.changing.RUnlock()

	key := s.keys[rand.IntN(len(s.keys))]
	id := fmt.Sprintf("%s of %x", key, rand.Uint64())
	by := 1 + rand.Int64N(5)

	_, err := s.insist(id, key, by)
	replayed := true
	if err == nil && rand.IntN(10) == 0 {
		var c client.Counter
		c, err = s.insist(id, key, by)
		replayed = c.Replayed
	}

	s.mu.Lock()
	defer s.mu.Unlock()
	s.sold[key] += by
	s.changes++
	if err != nil || !replayed {
		s.wrong = append(s.wrong, fmt.Sprintf("the change of %s by %d: %v; replayed: %t", key, by, err, replayed))
	}
}

// insist repeats a change under its key until it is answered.
func (s *shop) insist(id, key string, by int64) (client.Counter, error) {
	for until := time.Now().Add(testkit.Timeout); ; time.Sleep(every / 2) {
		m := s.gateways[rand.IntN(len(s.gateways))]
		c, err := s.at(m).Once(id).Increment(context.Background(), key, by)
		refused := (*client.Error)(nil)
		isFinal := errors.As(err, &refused) && !refused.Temporary()
		if err == nil || isFinal || time.Now().After(until) {
			return c, err
		}

		s.mu.Lock()
		s.failed++
		s.mu.Unlock()
	}
}

// audit compares the exact values with the acknowledged changes, at all gateways, while no change is under way.
func (s *shop) audit(t *testing.T) {
	t.Helper()
	s.changing.Lock()
	defer s.changing.Unlock()

	for _, m := range s.gateways {
		for _, key := range s.keys {
			c, err := s.at(m).Exact(t.Context(), key)
			if err != nil || c.Value != s.sold[key] {
				t.Errorf("%s at %s: %d, %v; the acknowledged changes are %d", key, m.name, c.Value, err, s.sold[key])
			}
		}
	}

	for _, wrong := range s.wrong {
		t.Error(wrong)
	}
}
