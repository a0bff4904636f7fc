package faults

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"headcount/client"
	"headcount/internal/redistest"
	"headcount/internal/servertest"
	"headcount/internal/testkit"
)

const (
	mergedWithin = 5 * time.Second // the promise after a link's return
	spot         = "the spot"      // where users of all regions meet
)

// dataCentre is one region: a Redis whose clock may be wrong, a process with all roles, and one that takes over from
// it.
type dataCentre struct {
	name    string
	redis   *redistest.Server
	members []*member
	users   []*client.Conn
	watcher *regionWatcher
	likes   map[string]bool // the members of its own set
}

// world is the regions and the links between them.
type world struct {
	regions []*dataCentre
	links   map[string]*wire // "us eu": how us reaches the Redis of eu

	// The values of durable counters when all regions know everything: the views, and the visitors.
	views    int64
	visitors map[string]bool
}

// regionWatcher sees every count of a region as a client does.
type regionWatcher struct {
	mu     sync.Mutex
	last   map[string]client.Count
	wrongs []string
	floor  int64 // no fresh count of the spot may be below it
}

// clocks are the errors of the regions' clocks.
var clocks = map[string]time.Duration{"us": 0, "eu": 10 * time.Minute, "ap": -10 * time.Minute}

// newWorld starts three regions whose clocks are ten minutes apart.
func newWorld(t *testing.T, delay time.Duration, flags ...string) *world {
	t.Helper()
	w := &world{links: map[string]*wire{}, visitors: map[string]bool{}}
	for _, name := range []string{"us", "eu", "ap"} {
		w.regions = append(w.regions, &dataCentre{
			name: name, redis: redistest.StartAt(t, clocks[name]), likes: map[string]bool{},
		})
	}

	var all []*member
	for _, r := range w.regions {
		settings := append([]string{"--region=" + r.name, "--api-key=" + counterKey}, flags...)
		for _, other := range w.regions {
			if other == r {
				continue
			}
			l := newWire(t, other.redis.Addr, delay)
			w.links[r.name+" "+other.name] = l
			settings = append(settings, "--peer="+other.name+"="+l.url())
		}

		r.members = []*member{
			newMember(r.name+" 1", allRoles, r.redis.URL(), nil, settings...),
			newMember(r.name+" 2", "presence,dispatcher", r.redis.URL(), nil, settings...),
		}
		all = append(all, r.members...)
	}

	startAll(t, all...)
	awaitReady(t, all...)
	for _, r := range w.regions {
		r.watch(t)
	}

	return w
}

// watch connects a client that receives the counts of the spot and of the site.
func (r *dataCentre) watch(t testing.TB) {
	t.Helper()
	w := &regionWatcher{last: map[string]client.Count{}}
	r.watcher = w

	conn, err := dial(r.members[0], "")
	if err != nil {
		t.Fatal(err)
	}
	if err := conn.Subscribe(site, spot); err != nil {
		t.Fatal(err)
	}

	done := make(chan struct{})
	t.Cleanup(func() {
		conn.Abort()
		<-done
		w.mu.Lock()
		defer w.mu.Unlock()
		for _, wrong := range w.wrongs {
			t.Errorf("%s: %s", r.name, wrong)
		}
	})

	go func() {
		defer close(done)
		var f client.Frame
		for conn.Receive(&f) == nil {
			if f.Type != "count" {
				continue
			}

			w.mu.Lock()
			n := f.Count
			last := w.last[n.Page]
			tooLow := n.Page == spot && !n.Stale && n.Count < w.floor
			if n.Count < 0 || tooLow || n.Version.Before(last.Version) {
				w.wrongs = append(w.wrongs,
					fmt.Sprintf("%+v after %+v, while the least is %d", n, last, w.floor))
			}
			w.last[n.Page] = n
			w.mu.Unlock()
		}
	}()
}

func (r *dataCentre) seen(page string) client.Count {
	r.watcher.mu.Lock()
	defer r.watcher.mu.Unlock()
	return r.watcher.last[page]
}

// stay declares that all present users stay: no count may fall below n.
func (r *dataCentre) stay(n int64) {
	r.watcher.mu.Lock()
	defer r.watcher.mu.Unlock()
	r.watcher.floor = n
}

// join brings n users to the spot.
func (w *world) join(t testing.TB, r *dataCentre, n int) {
	t.Helper()
	for range n {
		conn, err := dial(r.members[0], "")
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(conn.Abort)
		if err := conn.Join(spot); err != nil {
			t.Fatal(err)
		}
		r.users = append(r.users, conn)
		go drain(conn) // ends with the connection
	}
}

// leave takes n users away.
func (r *dataCentre) leave(t testing.TB, n int) {
	t.Helper()
	for _, conn := range r.users[:n] {
		if err := conn.Leave(spot); err != nil {
			t.Fatal(err)
		}
	}
	r.users = r.users[n:]
}

// total returns the number of users in all regions.
func (w *world) total() (n int64) {
	for _, r := range w.regions {
		n += int64(len(r.users))
	}

	return n
}

func (w *world) cut(names ...string) {
	for _, name := range names {
		w.links[name].cut()
	}
}

func (w *world) heal() {
	for _, l := range w.links {
		l.heal()
	}
}

// parts returns the answer to a GET with regions=1.
func parts(t testing.TB, r *dataCentre, page string) (count int64, regions map[string]int64) {
	t.Helper()
	n, err := r.api().Regions(t.Context(), page)
	if err != nil {
		t.Fatal(err)
	}

	return n.Count, n.Regions
}

// api makes calls in the region.
func (r *dataCentre) api() *client.API {
	return r.members[0].keyed()
}

// count makes a region count views (one too many, and one back), two likes, and two visitors, one of whom was in other
// regions too.
func (w *world) count(t testing.TB, r *dataCentre, views int) {
	t.Helper()
	api := r.api()
	ctx := t.Context()
	must := func(_ client.Counter, err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}

	must(api.Increment(ctx, "views:1", int64(views)+1))
	must(api.Decrement(ctx, "views:1", 1))
	w.views += int64(views)

	for i := range 2 {
		name := fmt.Sprintf("%s %d", r.name, len(r.likes)+i)
		must(api.EditMembers(ctx, "likes:1", []string{name}, nil))
		r.likes[name] = true
	}

	for _, name := range []string{fmt.Sprintf("visitor %d", len(w.visitors)), "visitor of all"} {
		must(api.EditMembers(ctx, "visitors:1", []string{name}, nil))
		w.visitors[name] = true
	}
}

// counted describes the counters of a region that differ from what all regions have counted together.
func (w *world) counted(t testing.TB, r *dataCentre) (lacks string) {
	t.Helper()
	likes := 0
	for _, other := range w.regions {
		likes += len(other.likes)
	}

	is, err := r.api().Counters(t.Context(), "views:1", "likes:1", "visitors:1")
	if err != nil {
		return fmt.Sprintf("%s: %v; ", r.name, err)
	}
	for i, want := range []int64{w.views, int64(likes), int64(len(w.visitors))} {
		if is[i].Value != want {
			return fmt.Sprintf("%s has %+v, want %d; ", r.name, is[i], want)
		}
	}

	return ""
}

// converge waits until every region shows the sum, to clients and over HTTP.
func (w *world) converge(t testing.TB, within time.Duration, among ...*dataCentre) {
	t.Helper()
	if among == nil {
		among = w.regions
	}

	want := map[string]int64{}
	sum := int64(0)
	for _, r := range among {
		want[r.name] = int64(len(r.users))
		sum += want[r.name]
	}

	watch := testkit.NewStopwatch(t)
	start := time.Now()
	var lacks string
	var counted time.Duration

	for {
		lacks = ""
		if len(among) == len(w.regions) {
			for _, r := range among {
				lacks += w.counted(t, r)
			}
			if lacks == "" && counted == 0 {
				counted = time.Since(start)
			}
		}

		for _, r := range among {
			for _, page := range []string{spot, site} {
				if f := r.seen(page); f.Count != sum || f.Stale && len(among) == len(w.regions) {
					lacks += fmt.Sprintf("%s shows %+v; ", r.name, f)
				}
				if count, got := parts(t, r, page); count != sum || !maps.Equal(got, want) {
					lacks += fmt.Sprintf("%s says %d, %v of %q; ", r.name, count, got, page)
				}
			}
		}

		if lacks == "" {
			t.Logf("all show %d after %.2f s, and the durable counters after %.2f s",
				sum, time.Since(start).Seconds(), counted.Seconds())
			return
		}

		if watch.Elapsed() > within {
			t.Fatalf("not all show %v after %s of %s: %s", want, watch.Elapsed(), within, lacks)
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// This is the partition test, and the other faults of data centres, one after the other in one world, whose clocks are
// ten minutes apart.
func TestClockRegions(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 0)
	us, eu, ap := w.regions[0], w.regions[1], w.regions[2]

	all := slices.Collect(maps.Keys(w.links))
	for i, r := range w.regions {
		w.join(t, r, i+1)
		w.count(t, r, 10*i+1)
	}
	w.converge(t, exactWithin)

	step := func(fault string, suffer func()) {
		t.Log(fault)
		suffer()
	}
	step("all links are cut", func() {
		w.cut(all...)
		for i, r := range w.regions {
			w.count(t, r, 100*i+1)
		}

		before := w.total()
		w.join(t, us, 3)
		w.join(t, eu, 2)
		eu.leave(t, 1)
		w.join(t, ap, 5)

		own := map[*dataCentre]int64{us: before + 3, eu: before + 1, ap: before + 5}
		testkit.Within(t, exactWithin, "every region shows its users and those it knew of the others", func() bool {
			for r, n := range own {
				if r.seen(spot).Count != n || r.seen(site).Count != n {
					return false
				}
			}
			return true
		})

		time.Sleep(3 * time.Second) // nothing changes
		for r, n := range own {
			if f := r.seen(spot); f.Count != n || f.Stale {
				t.Errorf("%s shows %+v without its links, want %d", r.name, f, n)
			}
			if w.counted(t, r) == "" {
				t.Errorf("%s has everything that was counted, without its links", r.name)
			}
		}

		// Gains are asked for in all regions.
		hour := "/api/v1/counters/views:1/window?last=1h"
		_, _, body, err := get("http://" + us.members[0].addr + hour)
		if err != nil || !strings.Contains(body, `"stale":true`) {
			t.Errorf("the views of an hour are %s, %v, without the others", body, err)
		}

		w.heal()
		w.converge(t, mergedWithin)
		testkit.Within(t, exactWithin, "every region adds up all gains", func() bool {
			for _, r := range w.regions {
				_, _, body, err := get("http://" + r.members[0].addr + hour)
				if err != nil || !strings.Contains(body, fmt.Sprintf(`"value":%d}`, w.views)) {
					return false
				}
			}
			return true
		})
	})

	step("one link in one direction is cut", func() {
		w.cut("us eu")
		w.join(t, us, 1)
		w.join(t, eu, 1)
		w.count(t, us, 3)
		w.count(t, eu, 4)

		testkit.Within(t, exactWithin, "all but eu know", func() bool {
			return us.seen(spot).Count == w.total() && ap.seen(spot).Count == w.total()
		})
		testkit.Within(t, exactWithin, "eu knows its own", func() bool { return eu.seen(spot).Count == w.total()-1 })

		time.Sleep(time.Second)
		if n := eu.seen(spot).Count; n != w.total()-1 {
			t.Errorf("eu shows %d of %d", n, w.total())
		}

		w.heal()
		w.converge(t, mergedWithin)
	})

	step("a dispatcher is killed", func() {
		for _, r := range w.regions {
			r.stay(w.total())
		}
		us.members[1].kill()
		w.join(t, us, 1)
		w.converge(t, exactWithin)
		again(t, us.members[1])
	})

	step("one region's Redis is killed and restarted empty", func() {
		for _, r := range w.regions {
			r.stay(w.total())
		}

		eu.redis.Kill()
		time.Sleep(2 * time.Second)
		eu.redis.Restart(t) // nothing is lost while the owners of its counters live
		w.converge(t, exactWithin)

		w.join(t, us, 1)
		w.join(t, eu, 1)
		w.count(t, us, 5)
		w.count(t, eu, 6)
		w.converge(t, exactWithin)
	})

	step("FLUSHALL in one region while another is cut off", func() {
		w.cut("us ap", "ap us", "eu ap", "ap eu")
		us.redis.Flush(t)
		time.Sleep(3 * time.Second)

		for _, r := range w.regions {
			r.stay(0) // before anybody leaves, as us and eu still receive each other's counts
		}
		for _, r := range w.regions {
			r.leave(t, 1)
			w.count(t, r, 7)
		}

		w.heal()
		w.converge(t, exactWithin)
	})

	step("a whole region dies, and comes back empty", func() {
		for _, conn := range eu.users {
			conn.Abort()
		}

		eu.users = nil
		for _, m := range eu.members {
			m.kill()
		}
		eu.redis.Kill()
		w.count(t, us, 8)
		eu.redis.Restart(t)
		clear(eu.likes) // nobody remembers its set, but the others have the counts that it gave them
		for _, m := range eu.members {
			again(t, m)
		}

		eu.watch(t)
		w.converge(t, exactWithin)

		w.count(t, eu, 9)
		w.converge(t, exactWithin)
	})
}

func TestClockRegionsOnBadLinks(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 200*time.Millisecond)
	for _, l := range w.links {
		l.lose(0.05)
	}

	for i, r := range w.regions {
		w.join(t, r, 3-i)
		w.count(t, r, i)
	}
	w.converge(t, exactWithin)

	for round := range 5 {
		r := w.regions[round%3]
		w.join(t, r, 2)
		r.leave(t, 1)
		w.count(t, r, round)
		w.converge(t, mergedWithin)
	}

	// All links fail at the same time.
	w.cut(slices.Collect(maps.Keys(w.links))...)
	for _, r := range w.regions {
		w.join(t, r, 1)
	}
	time.Sleep(4 * time.Second)
	w.heal()
	w.converge(t, mergedWithin+2*time.Second) // the promise is about links that lose nothing
}

func TestClockARegionThatIsDownForGood(t *testing.T) {
	t.Parallel()
	const stale = 4 * time.Second
	w := newWorld(t, 0, "--region-stale-after="+stale.String())
	us, eu, ap := w.regions[0], w.regions[1], w.regions[2]
	for i, r := range w.regions {
		w.join(t, r, i+1)
	}
	w.converge(t, exactWithin)

	for _, conn := range ap.users {
		conn.Abort()
	}
	for _, m := range ap.members {
		m.kill()
	}
	ap.redis.Kill()

	testkit.Within(t, stale+exactWithin, "the others leave it out and mark their counts", func() bool {
		for _, r := range []*dataCentre{us, eu} {
			for _, page := range []string{spot, site} {
				if f := r.seen(page); f.Count != 3 || !f.Stale || !slices.Equal(f.StaleRegions, []string{"ap"}) {
					return false
				}
			}
		}
		return true
	})

	_, _, body, err := get("http://" + us.members[0].addr + "/the%20spot/counter")
	if err != nil || !strings.Contains(body, `"count":3`) ||
		!strings.Contains(body, `"stale":true,"stale_regions":["ap"]`) {
		t.Errorf("GET says %s, %v", body, err)
	}

	// One process decides, and the others read the decision at their next check.
	testkit.Within(t, exactWithin, "the metrics say that ap is left out, and not eu", func() bool {
		status, _, metrics, err := get("http://" + us.members[0].admin + "/metrics")
		return err == nil && status == 200 &&
			strings.Contains(metrics, `headcount_region_left_out{peer="ap"} 1`) &&
			strings.Contains(metrics, `headcount_region_left_out{peer="eu"} 0`)
	})

	// The two others go on without it.
	w.join(t, us, 2)
	eu.leave(t, 1)
	w.converge(t, mergedWithin, us, eu)

	// The region comes back empty, and counts again.
	ap.users = nil
	ap.redis.Restart(t)
	for _, m := range ap.members {
		if err := m.start(); err != nil {
			t.Fatal(err)
		}
	}
	awaitReady(t, ap.members...)

	ap.watch(t)
	w.join(t, ap, 4)
	w.converge(t, exactWithin)
}

// The log names a wrongly set peer once, and everything else works on.
func TestClockPeersThatAreRefused(t *testing.T) {
	t.Parallel()
	var servers []*redistest.Server
	for range 4 {
		servers = append(servers, redistest.Start(t))
	}

	region := func(i int, name string, peers ...string) *member {
		flags := []string{"--region=" + name}
		for _, p := range peers {
			flags = append(flags, "--peer="+p)
		}

		return newMember(name, allRoles, servers[i].URL(), nil, flags...)
	}

	// Apart from a right peer, us has one that calls itself by another name, one that does not answer, and one whose
	// facts belong to another program.
	foreign := redistest.Start(t)
	foreign.Do(t, "HSET", "hc:{c}:facts", "region", "odd", "partitions", "999", "buckets", "64", "seed", "1")
	us := region(0, "us", "eu="+servers[1].URL(), "wrong="+servers[2].URL(), "gone=redis://"+servertest.FreeAddr(),
		"odd="+foreign.URL())
	eu := region(1, "eu", "us="+servers[0].URL())
	ap := region(2, "ap", "us="+servers[0].URL())
	twin := region(3, "us", "eu="+servers[1].URL())

	startAll(t, us, eu, ap)
	awaitReady(t, us, eu, ap)
	put(t, eu, "", "increment", 1)
	testkit.Within(t, exactWithin, "us and eu share", func() bool {
		_, _, body, err := get("http://" + us.addr + "/p/counter?regions=1")
		return err == nil && strings.Contains(body, `"count":1`) && strings.Contains(body, `"eu":1`)
	})

	// A second region of the same name writes to eu, too.
	startAll(t, twin)
	awaitReady(t, twin)
	for _, want := range []struct {
		m    *member
		text string
	}{
		{us, `the region there calls itself \"ap\", not \"wrong\"`},
		{us, `buckets is`}, // or partitions or seed: only one is named
		{twin, `another region called \"us\" writes there`},
		// The counts of this region are not stale.
		{us, `redis cannot be used; changes for that region wait meanwhile`},
	} {
		testkit.Within(t, exactWithin, want.m.name+" says "+want.text, func() bool {
			text := want.m.log.String()
			differ := strings.Contains(text, ` is \"`) &&
				strings.Contains(text, `there; all regions must run with the same`)
			return strings.Contains(text, want.text) || want.text == `buckets is` && differ
		})
	}

	for _, want := range []string{
		`headcount_region_refused{peer="wrong"} 1`, `headcount_region_refused{peer="odd"} 1`,
		`headcount_region_refused{peer="eu"} 0`,
		`headcount_region_lag_seconds{peer="eu"} 0`, `headcount_region_heard_seconds{peer="eu"}`,
		`headcount_region_bytes_total{direction="sent",peer="eu"}`,
	} {
		// The lag is not 0 while a batch is under way.
		testkit.Within(t, exactWithin, "the metrics have "+want, func() bool {
			_, _, metrics, err := get("http://" + us.admin + "/metrics")
			return err == nil && strings.Contains(metrics, want)
		})
	}

	if n := strings.Count(us.log.String(), "calls itself"); n != 1 {
		t.Errorf("the log names a refused peer %d times", n)
	}

	// The refused peers do not disturb the right one.
	put(t, us, "", "increment", 2)
	testkit.Within(t, mergedWithin, "the right peer receives the count", func() bool {
		_, _, body, err := get("http://" + eu.addr + "/p/counter?regions=1")
		return err == nil && strings.Contains(body, `"us":1`)
	})
}
