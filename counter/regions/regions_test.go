package regions_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"

	"headcount/counter"
	"headcount/counter/counterredis"
	"headcount/counter/regions"
	"headcount/internal/redistest"
	"headcount/internal/servertest"
	"headcount/internal/testkit"
)

// road is the way to another region. It may be cut; and a bad one loses batches and answers, and carries what it has
// carried before once more.
type road struct {
	regions.Remote
	bad bool

	mu      sync.Mutex
	cut     bool
	carried []counterredis.Message
}

var errCut = errors.New("the link is cut")

func (r *road) set(cut bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.cut = cut
}

// forget drops what was carried: after a peer's server is emptied, nothing arrives twice that it got before. The first and
// the last message of a whole bucket would make an empty one complete.
func (r *road) forget() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.carried = nil
}

func (r *road) isCut() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.cut
}

func (r *road) Positions(ctx context.Context, of string, buckets []int) ([]counterredis.Position, error) {
	if r.isCut() {
		return nil, errCut
	}
	return r.Remote.Positions(ctx, of, buckets)
}

func (r *road) History(ctx context.Context, key string, step time.Duration, from, to int64) (counter.Counter, []counter.Gain, error) {
	if r.isCut() {
		return counter.Counter{}, nil, errCut
	}
	return r.Remote.History(ctx, key, step, from, to)
}

func (r *road) Dimension(ctx context.Context, key, name string) (counter.Counter, counter.Counted, error) {
	if r.isCut() {
		return counter.Counter{}, counter.Counted{}, errCut
	}
	return r.Remote.Dimension(ctx, key, name)
}

func (r *road) Merge(ctx context.Context, from, to string, messages []counterredis.Message) ([]counterredis.Ack, error) {
	if r.isCut() || r.bad && rand.IntN(4) == 0 {
		return nil, errCut
	}
	if r.bad {
		r.mu.Lock()
		late := r.carried
		if len(late) > 0 {
			late = late[rand.IntN(len(late)):][:1]
		}
		r.carried = append(r.carried, messages...)
		r.mu.Unlock()
		if len(late) > 0 {
			if _, err := r.Remote.Merge(ctx, from, to, late); err != nil {
				return nil, err
			}
		}
	}
	told, err := r.Remote.Merge(ctx, from, to, messages)
	if r.bad && rand.IntN(3) == 0 {
		return nil, errCut
	}
	return told, err
}

// region is one, with its links.
type region struct {
	name     string
	server   *redistest.Server
	local    *counterredis.Store
	inner    counter.Store // what the links stand in front of: local, or a store over it
	store    *regions.Store
	registry *prometheus.Registry
	roads    map[string]*road // to the others
}

// world starts three regions with links between all of them.
func world(t *testing.T, bad bool) (us, eu, ap *region) {
	t.Helper()
	list := []*region{{name: "us"}, {name: "eu"}, {name: "ap"}}
	for _, r := range list {
		r.server = redistest.Start(t)
		r.local = open(t, r.name, r.server.URL())
		r.inner = r.local
	}
	link(t, bad, list)
	return list[0], list[1], list[2]
}

// link connects all of list with each other.
func link(t *testing.T, bad bool, list []*region) {
	t.Helper()
	for _, r := range list {
		r.roads, r.registry = map[string]*road{}, prometheus.NewRegistry()
		cfg := regions.Config{Region: r.name, Rules: counter.BuiltinRules(), Local: r.local, Every: 50 * time.Millisecond, Registerer: r.registry, Log: zerolog.New(zerolog.NewTestWriter(t)).Level(zerolog.WarnLevel)}
		for _, other := range list {
			if other == r {
				continue
			}
			remote := counterredis.New(counterredis.Config{Conn: redistest.Dial(t, other.server.URL()), Log: zerolog.Nop()})
			t.Cleanup(func() { _ = remote.Close() })
			r.roads[other.name] = &road{Remote: remote, bad: bad}
			cfg.Peers = append(cfg.Peers, regions.Peer{Name: other.name, Remote: r.roads[other.name]})
		}
		r.store = regions.New(r.inner, cfg)
		t.Cleanup(func() {
			if err := r.store.Close(); err != nil {
				t.Errorf("close %s: %v", r.name, err)
			}
		})
	}
}

// eventually waits for a fact of other goroutines and servers, and logs what there was meanwhile.
func eventually(t testing.TB, what string, is func() (bool, string)) {
	t.Helper()
	said := ""
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("%s: at last %s", what, said)
		}
	})
	testkit.Eventually(t, what, func() (ok bool) {
		ok, said = is()
		return ok
	})
}

// agree waits until all regions have these values.
func agree(t testing.TB, want map[string]int64, all ...*region) {
	t.Helper()
	eventually(t, fmt.Sprint("all have ", want), func() (bool, string) {
		for _, r := range all {
			for key, value := range want {
				read, err := r.store.Read(t.Context(), []string{key}, "", 0)
				if err != nil || read[0].Value != value {
					return false, fmt.Sprintf("%s has %+v, %v", r.name, read, err)
				}
			}
		}
		return true, ""
	})
}

func cut(is bool, all ...*region) {
	for _, r := range all {
		for _, road := range r.roads {
			road.set(is)
		}
	}
}

func members(from, to int) (list []string) {
	for i := from; i < to; i++ {
		list = append(list, "m"+strconv.Itoa(i))
	}
	return list
}

// watcher sees what is told of a key, and that no version goes back but to none.
type watcher struct {
	mu    sync.Mutex
	last  map[string]counter.Counter
	wrong []string
}

func watchKeys(t *testing.T, r *region, keys ...string) *watcher {
	t.Helper()
	w := &watcher{last: map[string]counter.Counter{}}
	watch := r.store.Watch(func(updates []counter.Update) {
		w.mu.Lock()
		defer w.mu.Unlock()
		for _, u := range updates {
			was := w.last[u.Counter.Key]
			if u.Counter.Touched() && u.Counter.Version.Compare(was.Version) < 0 || u.Counter.Kind != 0 && !u.Counter.Approx {
				w.wrong = append(w.wrong, fmt.Sprintf("%s is told %+v after %+v", r.name, u.Counter, was))
			}
			w.last[u.Counter.Key] = u.Counter
		}
	}, nil)
	t.Cleanup(func() {
		watch.Close()
		for _, wrong := range w.wrong {
			t.Error(wrong)
		}
	})
	if err := watch.Follow(t.Context(), keys...); err != nil {
		t.Fatal(err)
	}
	return w
}

func (w *watcher) value(key string) int64 {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.last[key].Value
}

// The faults of links and regions, one after the other in one world.
func TestClockRegionsHaveOneTotal(t *testing.T) {
	t.Parallel()
	us, eu, ap := world(t, false)
	all := []*region{us, eu, ap}
	watched := []*watcher{watchKeys(t, us, "v", "l", "u"), watchKeys(t, eu, "v", "l", "u")}
	for i, r := range all {
		c := make1(t, r.store, add("v", int64(10+i)))
		if c.Approx != true {
			t.Errorf("%+v says that it is exact", c)
		}
		make1(t, r.store, edit(likes, "l", members(i, i+3), nil))    // whoever likes in two regions counts twice
		make1(t, r.store, edit(visitors, "u", members(i, i+3), nil)) // but not who visits
	}
	agree(t, map[string]int64{"v": 33, "l": 9, "u": 5}, all...)
	eventually(t, "who watches is told", func() (bool, string) {
		for _, w := range watched {
			if w.value("v") != 33 || w.value("l") != 9 || w.value("u") != 5 {
				return false, fmt.Sprintf("%+v", w.last)
			}
		}
		return true, ""
	})

	t.Run("cut, write on all sides, heal", func(t *testing.T) {
		cut(true, all...)
		before := read1(t, us.store, "v").Version
		for i, r := range all {
			make1(t, r.store, add("v", -int64(100*(i+1))))
			make1(t, r.store, edit(likes, "l", members(10, 12), members(i, i+1)))
			make1(t, r.store, edit(visitors, "u", members(10*i, 10*i+10), nil))
			make1(t, r.store, add("only "+r.name, 1))
		}
		if c := read1(t, us.store, "v"); c.Value != 33-100 || c.Version.Compare(before) <= 0 {
			t.Errorf("us, cut off, has %+v", c)
		}
		cut(false, all...)
		agree(t, map[string]int64{"v": 33 - 600, "l": 12, "u": 30, "only us": 1, "only eu": 1, "only ap": 1}, all...)
	})

	t.Run("resets that do not know of everything", func(t *testing.T) {
		cut(true, all...)
		make1(t, ap.store, add("v", 5))
		if c := make1(t, us.store, reset(views, "v")); c.Value != 0 {
			t.Errorf("after its reset us has %+v", c)
		}
		make1(t, eu.store, reset(views, "v")) // two at once
		make1(t, eu.store, add("v", 2))
		make1(t, us.store, reset(likes, "l"))
		make1(t, us.store, reset(visitors, "u"))
		cut(false, all...)
		agree(t, map[string]int64{"v": 7, "l": 0, "u": 0}, all...)
		make1(t, ap.store, edit(likes, "l", members(0, 2), nil))
		make1(t, ap.store, edit(visitors, "u", members(0, 2), nil))
		agree(t, map[string]int64{"v": 7, "l": 2, "u": 2}, all...)
		read, err := eu.store.Read(t.Context(), []string{"l"}, "m11", 0)
		if err != nil || read[0].Mine {
			t.Errorf("a member of eu is one after a reset in us: %+v, %v", read, err)
		}
	})

	t.Run("a region's Redis comes back empty", func(t *testing.T) {
		make1(t, us.store, add("gone", 1))
		make1(t, us.store, counter.Change{Key: "gone", Rule: views, Verb: counter.Delete})
		make1(t, us.store, edit(likes, "l", members(0, 4), nil))
		agree(t, map[string]int64{"v": 7, "l": 6, "u": 2, "gone": 0}, all...)
		before := read1(t, us.store, "v").Version
		us.server.Kill()
		us.server.Restart(t)
		// What the region had given counts on; its set is lost with its members.
		agree(t, map[string]int64{"v": 7, "l": 2, "u": 2, "only us": 1, "only ap": 1, "gone": 0}, all...)
		if c := read1(t, us.store, "v"); c.Version.Compare(before) <= 0 {
			t.Errorf("version %v after %v", c.Version, before)
		}
		make1(t, us.store, add("v", 1))
		make1(t, us.store, edit(likes, "l", members(0, 1), nil))
		agree(t, map[string]int64{"v": 8, "l": 3, "u": 2}, all...)
	})

	t.Run("it comes back empty while cut off", func(t *testing.T) {
		cut(true, all...)
		eu.server.Flush(t)
		make1(t, eu.store, add("v", 100))
		make1(t, us.store, add("v", 10))
		make1(t, eu.store, edit(visitors, "u", members(5, 6), nil))
		cut(false, all...)
		agree(t, map[string]int64{"v": 118, "l": 3, "u": 3, "only eu": 1}, all...)
	})

	t.Run("DELETE", func(t *testing.T) {
		cut(true, all...)
		make1(t, us.store, counter.Change{Key: "v", Rule: views, Verb: counter.Delete})
		make1(t, us.store, counter.Change{Key: "l", Rule: likes, Verb: counter.Delete})
		make1(t, us.store, counter.Change{Key: "u", Rule: visitors, Verb: counter.Delete})
		make1(t, eu.store, add("v", 1)) // it is gone with the rest
		cut(false, all...)
		agree(t, map[string]int64{"v": 0, "l": 0, "u": 0}, all...)
		for _, r := range all {
			if c := read1(t, r.store, "v"); c.Touched() {
				t.Errorf("%s has %+v after a DELETE", r.name, c)
			}
		}
		eventually(t, "who watches is told that it is gone", func() (bool, string) {
			w := watched[1]
			w.mu.Lock()
			defer w.mu.Unlock()
			return !w.last["v"].Touched(), fmt.Sprintf("%+v", w.last["v"])
		})
		make1(t, ap.store, add("v", 4))
		make1(t, eu.store, edit(likes, "l", members(0, 1), nil))
		agree(t, map[string]int64{"v": 4, "l": 1, "u": 0}, all...)
	})

	t.Run("more changes than a log has", func(t *testing.T) {
		cut(true, all...)
		var keys []string
		for n := 0; len(keys) < 4200; n++ {
			if key := "k" + strconv.Itoa(n); counterredis.BucketOf(key) == 3 {
				keys = append(keys, key)
			}
		}
		for from := 0; from < len(keys); from += 600 {
			op := counter.Op{}
			for _, key := range keys[from : from+600] {
				op.Changes = append(op.Changes, add(key, 2))
			}
			if r := us.store.Apply(t.Context(), []counter.Op{op})[0]; r.Err != nil {
				t.Fatal(r.Err)
			}
		}
		if n := us.server.Do(t, "ZCARD", "hc:{n3}:log"); n.(int64) > 4096 {
			t.Errorf("the log has %d counters", n)
		}
		cut(false, all...)
		eventually(t, "the others have all", func() (bool, string) {
			for _, r := range []*region{eu, ap} {
				if n := r.server.Do(t, "HLEN", "hc:{n3}:c").(int64); n < int64(len(keys)) {
					return false, fmt.Sprintf("%s has %d of %d", r.name, n, len(keys))
				}
			}
			return true, ""
		})
		for _, r := range all {
			if a, err := r.store.Aggregate(t.Context(), "k"); err != nil || a.Value != int64(2*len(keys)) || a.Counters != int64(len(keys)) {
				t.Errorf("%s: %+v, %v", r.name, a, err)
			}
		}
	})

	// What has arrived is told to nobody again.
	eventually(t, "nothing is left to tell", func() (bool, string) {
		for _, r := range all {
			for b := range counterredis.Buckets {
				for name := range r.roads {
					at, err := other(all, name).local.Positions(t.Context(), r.name, []int{b})
					if err != nil {
						t.Fatal(err)
					}
					batch, err := r.local.Outgoing(t.Context(), []int{b}, at, 1)
					if err != nil || batch[0].All || len(batch[0].Lines) > 0 {
						return false, fmt.Sprintf("%s to %s: %+v, %v", r.name, name, batch, err)
					}
				}
			}
		}
		return true, ""
	})
	shown := map[string]int{}
	families, err := us.registry.Gather()
	for _, f := range families {
		shown[f.GetName()] = len(f.GetMetric())
	}
	if err != nil || shown["headcount_counters_region_lag_seconds"] != 2 || shown["headcount_counters_region_merges_total"] != 2 {
		t.Errorf("the metrics are %v, %v", shown, err)
	}
}

func other(all []*region, name string) *region {
	for _, r := range all {
		if r.name == name {
			return r
		}
	}
	return nil
}

// Links that lose batches and answers, and repeat what they carried long ago, change no total.
func TestServerBadLinks(t *testing.T) {
	t.Parallel()
	us, eu, ap := world(t, true)
	all := []*region{us, eu, ap}
	var total, liked int64
	seen := map[string]bool{}
	for n := range 90 {
		r := all[rand.IntN(3)]
		delta := rand.Int64N(7) + 1
		make1(t, r.store, add("v", delta))
		total += delta
		make1(t, r.store, edit(likes, "l", members(n, n+1), nil))
		liked++
		if n%10 == 9 {
			make1(t, r.store, edit(likes, "l", nil, members(n, n+1)))
			liked--
		}
		name := members(n%40, n%40+1)
		make1(t, r.store, edit(visitors, "u", name, nil))
		seen[name[0]] = true
		if n%30 == 29 {
			cut(true, all[n/30%3])
		}
		if n%30 == 12 {
			cut(false, all...)
		}
	}
	cut(false, all...)
	agree(t, map[string]int64{"v": total, "l": liked, "u": int64(len(seen))}, all...)
}

// A bucket of many pages reaches an empty peer over a link that loses batches and answers and repeats what it carried.
func TestServerAWholeBucketOnABadLink(t *testing.T) {
	t.Parallel()
	us, eu, ap := world(t, true)
	want := map[string]int64{}
	op := counter.Op{}
	for n := 0; len(want) < 900; n++ {
		if key := "k" + strconv.Itoa(n); counterredis.BucketOf(key) == 3 {
			want[key] = 2
			op.Changes = append(op.Changes, add(key, 2))
			if len(op.Changes) == 300 {
				if r := us.store.Apply(t.Context(), []counter.Op{op})[0]; r.Err != nil {
					t.Fatal(r.Err)
				}
				op.Changes = nil
			}
		}
	}
	agree(t, want, us, eu, ap)
	cut(true, ap) // so that us alone tells eu
	us.roads["eu"].forget()
	eu.server.Flush(t)
	agree(t, want, us, eu)
}

// Steps of time and dimensions are each region's own, and added up when they are read.
func TestServerHistoriesAreAddedUp(t *testing.T) {
	t.Parallel()
	us, eu, ap := world(t, false)
	all := []*region{us, eu, ap}
	const step = 24 * time.Hour
	kept := []counter.Bucket{{Step: step, Kept: 30 * 24 * time.Hour}}
	clicks := &counter.Rule{Match: "*", Kind: counter.Sum, Buckets: kept, Dimensions: []string{"country"}}
	guests := &counter.Rule{Match: "*", Kind: counter.Unique, Buckets: kept}
	for i, r := range all {
		for _, country := range []string{"de", r.name} {
			make1(t, r.store, counter.Change{Key: "c", Rule: clicks, Verb: counter.Add, Delta: int64(i + 1), Dimensions: []counter.Dimension{{Name: "country", Value: country}}})
		}
		make1(t, r.store, edit(guests, "g", members(i, i+2), nil)) // of two neighbours each has one
	}
	agree(t, map[string]int64{"c": 12, "g": 4}, all...)
	// A day may begin meanwhile: all steps there are are added up.
	sum := func(r *region, key string) (total int64, is counter.Counter) {
		t.Helper()
		is, gains, err := r.store.History(t.Context(), key, step, 0, 1<<31)
		if err != nil {
			t.Fatal(err)
		}
		tally := counter.Question{Step: step, To: 1 << 31}.Tally()
		for i := range gains {
			if i > 0 && gains[i].Number <= gains[i-1].Number {
				t.Fatalf("steps %d and %d", gains[i-1].Number, gains[i].Number)
			}
		}
		tally.Add(gains)
		return tally.Total(), is
	}
	for _, r := range all {
		clicked, c := sum(r, "c")
		guested, g := sum(r, "g")
		if clicked != 12 || guested != 4 || c.Stale || g.Stale || c.Value != 12 {
			t.Errorf("%s has gained %d and %d: %+v, %+v", r.name, clicked, guested, c, g)
		}
		_, counted, err := r.store.Dimension(t.Context(), "c", "country")
		if err != nil || fmt.Sprint(counted.Values) != "map[ap:3 de:6 eu:2 us:1]" || counted.Other != 0 {
			t.Errorf("%s has counted %+v, %v", r.name, counted, err)
		}
	}
	us.roads["ap"].set(true)
	if clicked, c := sum(us, "c"); clicked != 6 || !c.Stale {
		t.Errorf("without ap us has gained %d: %+v", clicked, c)
	}
	if c, counted, err := us.store.Dimension(t.Context(), "c", "country"); err != nil || !c.Stale || counted.Values["de"] != 3 {
		t.Errorf("without ap us has counted %+v, %+v, %v", c, counted, err)
	}
	us.roads["ap"].set(false)
	make1(t, eu.store, reset(clicks, "c"))
	agree(t, map[string]int64{"c": 0}, all...)
	if clicked, c := sum(us, "c"); clicked != 12 || c.Stale {
		t.Errorf("after a reset us has gained %d: %+v", clicked, c)
	}
	make1(t, eu.store, counter.Change{Key: "c", Rule: clicks, Verb: counter.Delete})
	make1(t, eu.store, counter.Change{Key: "g", Rule: guests, Verb: counter.Delete})
	eventually(t, "nothing of a deleted counter is left", func() (bool, string) {
		clicked, _ := sum(ap, "c")
		guested, _ := sum(ap, "g")
		_, counted, err := ap.store.Dimension(t.Context(), "c", "country")
		return clicked == 0 && guested == 0 && err == nil && len(counted.Values) == 0, fmt.Sprint(clicked, guested, counted)
	})
}

// A server that comes back with an older memory counts what the others know of it, and all agree.
func TestClockAnOlderMemory(t *testing.T) {
	t.Parallel()
	us, eu, ap := world(t, false)
	all := []*region{us, eu, ap}
	make1(t, us.store, add("v", 5))
	make1(t, us.store, edit(likes, "l", members(0, 2), nil))
	agree(t, map[string]int64{"v": 5, "l": 2}, all...)
	us.server.Do(t, "SAVE")
	make1(t, us.store, add("v", 7))
	make1(t, us.store, edit(likes, "l", members(2, 4), nil))
	agree(t, map[string]int64{"v": 12, "l": 4}, all...)
	us.server.Kill()
	us.server.Restart(t)
	agree(t, map[string]int64{"v": 12, "l": 2}, all...) // of the set it is known who is in it
	make1(t, us.store, add("v", 1))
	make1(t, us.store, edit(likes, "l", members(1, 3), nil))
	agree(t, map[string]int64{"v": 13, "l": 3}, all...)
}

// A peer that is another region than the settings say is told nothing.
func TestServerAPeerOfAnotherName(t *testing.T) {
	t.Parallel()
	us, wrong := redistest.Start(t), redistest.Start(t)
	there := open(t, "ap", wrong.URL())
	if _, err := there.Outgoing(t.Context(), []int{0}, make([]counterredis.Position, 1), 1); err != nil {
		t.Fatal(err)
	}
	var log servertest.Log
	local := open(t, "us", us.URL())
	remote := counterredis.New(counterredis.Config{Conn: redistest.Dial(t, wrong.URL()), Log: zerolog.Nop()})
	defer remote.Close()
	s := regions.New(local, regions.Config{Region: "us", Rules: counter.BuiltinRules(), Local: local, Peers: []regions.Peer{{Name: "eu", Remote: remote}}, Log: zerolog.New(&log)})
	defer s.Close()
	key := "a"
	for n := 0; counterredis.BucketOf(key) != 0; n++ {
		key = "a" + strconv.Itoa(n)
	}
	make1(t, s, add(key, 1))
	eventually(t, "the log says so", func() (bool, string) {
		return strings.Contains(log.String(), `"region":"ap"`) && strings.Contains(log.String(), "correct --peer"), log.String()
	})
	if c := read1(t, there, key); c.Touched() {
		t.Errorf("it was told %+v", c)
	}
}
