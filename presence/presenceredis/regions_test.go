package presenceredis_test

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/rs/zerolog"
	"pgregory.net/rapid"

	"headcount/internal/redisconn"
	"headcount/internal/redistest"
	"headcount/internal/testkit"
	"headcount/presence"
	"headcount/presence/pncounter"
	"headcount/presence/presenceredis"
	"headcount/presence/presencetest"
	"headcount/presence/region"
)

func inRegion(name string, peers ...string) func(*presenceredis.Config) {
	return func(c *presenceredis.Config) { c.Facts.Region, c.Peers = name, peers }
}

// part is the region's part of the page, as the store sees it, and the total.
func part(t testing.TB, s *presenceredis.Store, page, region string) (users, total int64) {
	t.Helper()
	count, parts, err := s.Parts(context.Background(), page)
	if err != nil {
		t.Fatal(err)
	}
	sum := int64(0)
	for _, p := range parts {
		sum += p.Users
		if p.Region == region {
			users = p.Users
		}
	}
	if sum != count.Users {
		t.Fatalf("the parts of %+v are %v", count, parts)
	}
	return users, count.Users
}

// The batches have few pages, logs and incarnations, so that they meet.
func drawBatch(t *rapid.T, pages []string) pncounter.Batch {
	b := pncounter.Batch{
		Region: "eu", Log: rapid.Uint64Range(1, 4).Draw(t, "log"), From: rapid.Uint64Range(0, 3).Draw(t, "from"),
		Floor: rapid.Uint64Range(0, 4).Draw(t, "floor"), Complete: rapid.Bool().Draw(t, "complete"),
	}
	b.To = b.From + rapid.Uint64Range(0, 3).Draw(t, "more")
	for _, page := range pages {
		if rapid.Bool().Draw(t, "with "+page) {
			b.Pages = append(b.Pages, pncounter.PagePair{Page: page, Pair: pncounter.Pair{
				Incarnation: rapid.Uint64Range(0, 5).Draw(t, "incarnation"),
				Increments:  rapid.Int64Range(0, 4).Draw(t, "increments"),
				Decrements:  rapid.Int64Range(0, 4).Draw(t, "decrements"),
			}})
		}
	}
	return b
}

// merge.lua does the same as the pure type, batch by batch.
func differential(t *testing.T, url string, flush func(), owner bool) {
	s := open(t, url, inRegion("us", "eu"), func(c *presenceredis.Config) { c.Partitions, c.Buckets = 1, 1 })
	peer := presenceredis.NewPeer(s, "eu", "us")
	pages := []string{"a", "b", "ä/ :;", "*"}
	rapid.Check(t, func(rt *rapid.T) {
		flush()
		claims, err := s.Claim(context.Background(), "node", []int{0}, true)
		if err != nil {
			rt.Fatal(err)
		}
		counts := []presence.PageUsers{}
		if owner { // a user of ours is on the pages, so that they exist
			for _, page := range pages {
				counts = append(counts, presence.PageUsers{Page: page, Users: 1})
			}
		}
		if out := s.Write(context.Background(), []presence.Change{
			{Claim: claims[0], Sequence: 1, Counts: counts, Complete: true},
		}); out[0].Err != nil {
			rt.Fatal(out[0].Err)
		}
		var model presencetest.Copy
		versions := map[string]presence.Version{}
		for range rapid.IntRange(1, 12).Draw(rt, "batches") {
			b := drawBatch(rt, pages)
			acks, err := peer.Merge(context.Background(), []pncounter.Batch{b})
			if err != nil {
				rt.Fatal(err)
			}
			got, want := acks[0], model.Merge(b)
			got.Changed = 0 // the model does not say how many were news
			if !reflect.DeepEqual(got, want) {
				rt.Fatalf("merge.lua says %+v to %+v, the model %+v", got, b, want)
			}
			for _, page := range pages {
				users, total := part(t, s, page, "eu")
				if want := model.Value(page); users != want || total != want+int64(len(counts)/len(pages)) {
					rt.Fatalf("%q has %d users in eu, %d in all; the model says %d", page, users, total, want)
				}
				c := read(t, s, page)
				if old, ok := versions[page]; ok && c.Version.Compare(old) < 0 {
					rt.Fatalf("%q fell from version %v to %v", page, old, c.Version)
				}
				versions[page] = c.Version
			}
		}
	})
}

func read(t testing.TB, s *presenceredis.Store, page string) presence.Count {
	t.Helper()
	counts, err := s.Counts(context.Background(), []string{page})
	if err != nil {
		t.Fatal(err)
	}
	return counts[0]
}

func TestServerMergeEqualsThePureType(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	flush := func() { server.Flush(t) }
	t.Run("pages of other regions", func(t *testing.T) { differential(t, server.URL(), flush, false) })
	t.Run("pages of this region, too", func(t *testing.T) { differential(t, server.URL(), flush, true) })
}

// world is a region with its Redis, and one owner of all its partitions.
type world struct {
	*presenceredis.Store
	t        testing.TB
	name     string
	claims   []presence.Claim
	sequence uint64
	stop     func()
	shared   *region.Replicator
	buckets  []int        // that it shares
	bytes    atomic.Int64 // on the links of share
}

func newWorld(t testing.TB, url, name string, peers ...string) *world {
	w := &world{t: t, name: name, Store: open(t, url, inRegion(name, peers...), quick)}
	w.renew()
	w.claim()
	return w
}

func (w *world) renew() {
	w.t.Helper()
	if _, err := renew(w.t, w.Store, presence.Process{Name: "p", Incarnation: 1}); err != nil {
		w.t.Fatal(err)
	}
}

// claim takes all partitions and writes that they are complete.
func (w *world) claim(counts ...presence.PageUsers) {
	w.t.Helper()
	all := make([]int, presence.DefaultPartitions)
	for i := range all {
		all[i] = i
	}
	var err error
	if w.claims, err = w.Claim(w.t.Context(), "node", all, true); err != nil {
		w.t.Fatal(err)
	}
	changes := make([]presence.Change, len(all))
	for i, c := range w.claims {
		changes[i] = presence.Change{Claim: c, Sequence: 1, Reset: true, Complete: true}
	}
	changes[0].Counts = counts
	w.sequence = 1
	w.write(changes...)
}

func (w *world) write(changes ...presence.Change) {
	w.t.Helper()
	for _, o := range w.Write(w.t.Context(), changes) {
		if o.Err != nil {
			w.t.Fatal(o.Err)
		}
	}
}

// set makes the number of this region's users on a page what it is now.
func (w *world) set(page string, users int64) {
	w.t.Helper()
	w.sequence++
	w.write(presence.Change{
		Claim: w.claims[0], Sequence: w.sequence, Counts: []presence.PageUsers{{Page: page, Users: users}},
	})
	if w.shared != nil { // a dispatcher would say so
		w.shared.Changed(presence.Bucket(page, presence.DefaultBuckets))
	}
}

// Carried implements redisconn.Traffic.
func (w *world) Carried(sent, received int) { w.bytes.Add(int64(sent + received)) }

// share runs a replicator of all buckets until the test, or stop, ends it.
func (w *world) share(stale time.Duration, peers map[string]string) {
	var list []region.Peer
	for name, url := range peers {
		conn, err := redisconn.Open(redisconn.Config{URL: url, OnBytes: w})
		if err != nil {
			w.t.Fatal(err)
		}
		w.t.Cleanup(func() { _ = conn.Close() })
		s := open(w.t, url, func(c *presenceredis.Config) { c.Conn = conn })
		list = append(list, region.Peer{Name: name, Remote: presenceredis.NewPeer(s, w.name, name)})
	}
	r := region.New(region.Config{
		Local: w.Store, Peers: list, StaleAfter: stale, Every: 20 * time.Millisecond,
		Log: zerolog.New(zerolog.NewTestWriter(w.t)).With().Str("region", w.name).Logger(),
	})
	w.buckets = nil
	for i := range presence.DefaultBuckets {
		w.buckets = append(w.buckets, i)
	}
	r.Own(w.buckets)
	w.shared = r
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = r.Run(ctx)
	}()
	w.stop = func() {
		cancel()
		<-done
	}
	w.t.Cleanup(w.stop)
}

// look compares the positions of all peers now, as a replicator does every other second.
func (w *world) look() {
	slices.Reverse(w.buckets) // as if it owned others
	w.shared.Own(w.buckets)
}

// shows waits until the store shows that many users, not stale.
func (w *world) shows(page string, users int64) {
	w.t.Helper()
	var last presence.Count
	defer func() {
		if w.t.Failed() {
			w.t.Logf("%s: %+v", w.name, last)
		}
	}()
	testkit.Eventually(w.t, fmt.Sprintf("%s shows %d on %s", w.name, users, page), func() bool {
		last = read(w.t, w.Store, page)
		return last.Users == users && !last.Stale
	})
}

// three is three regions that know each other, over TLS as the documented user.
func three(t *testing.T) (servers map[string]*redistest.Server, worlds map[string]*world) {
	names := []string{"us", "eu", "ap"}
	servers, worlds = map[string]*redistest.Server{}, map[string]*world{}
	for _, name := range names {
		servers[name] = secure(t)
	}
	for _, name := range names {
		worlds[name] = newWorld(t, servers[name].URL(), name, without(names, name)...)
	}
	for _, name := range names {
		worlds[name].share(0, urls(servers, name))
	}
	return servers, worlds
}

// Regions share counts whichever release has begun their Redis: each has hash tags of its own. A Redis that is emptied
// and begun anew may get others.
func TestServerRegionsWithOtherHashTagsShareCounts(t *testing.T) {
	t.Parallel()
	servers := map[string]*redistest.Server{"us": redistest.Start(t), "eu": redistest.Start(t)}
	servers["us"].Do(t, "HSET", "hc:{c}:facts", "format", "5")

	us := newWorld(t, servers["us"].URL(), "us", "eu")
	eu := newWorld(t, servers["eu"].URL(), "eu", "us")
	us.share(0, urls(servers, "us"))
	eu.share(0, urls(servers, "eu"))
	us.set("p", 1)
	eu.set("p", 2)
	us.shows("p", 3)
	eu.shows("p", 3)

	us.stop()
	servers["us"].Flush(t)
	again := newWorld(t, servers["us"].URL(), "us", "eu")
	again.share(0, urls(servers, "us"))
	again.set("p", 5)
	again.shows("p", 7)
	eu.look()
	eu.shows("p", 7)
}

func without(names []string, name string) []string {
	return slices.DeleteFunc(slices.Clone(names), func(n string) bool { return n == name })
}

func urls(servers map[string]*redistest.Server, but string) map[string]string {
	all := map[string]string{}
	for name, s := range servers {
		if name != but {
			all[name] = s.URL()
		}
	}
	return all
}

func TestServerRegionsShareCounts(t *testing.T) {
	t.Parallel()
	servers, worlds := three(t)
	test := t
	look := func() {
		for _, w := range worlds {
			w.look()
		}
	}
	all := func(page string, users int64) {
		t.Helper()
		for _, w := range worlds {
			w.shows(page, users)
		}
	}
	for i, name := range []string{"us", "eu", "ap"} {
		worlds[name].set("p", int64(i+1))
		worlds[name].set(presence.AllPages, int64(i+1))
	}
	all("p", 6)
	all(presence.AllPages, 6)
	worlds["eu"].set("p", 0)
	all("p", 4)
	if users, _ := part(t, worlds["us"].Store, "p", "ap"); users != 3 {
		t.Errorf("us sees %d users of ap, want 3", users)
	}

	t.Run("a peer that came back empty is told again", func(t *testing.T) {
		before := read(t, worlds["us"].Store, "p").Version
		servers["us"].Flush(t)
		worlds["us"].renew()
		worlds["us"].claim(presence.PageUsers{Page: "p", Users: 1},
			presence.PageUsers{Page: presence.AllPages, Users: 1})
		look()
		all("p", 4)
		all(presence.AllPages, 6)
		if v := read(t, worlds["us"].Store, "p").Version; v.Compare(before) <= 0 {
			t.Errorf("version %v after %v", v, before)
		}
	})
	t.Run("what a region lost stays with no other", func(t *testing.T) {
		worlds["us"].set("gone", 5)
		all("gone", 5)
		servers["us"].Flush(t)
		worlds["us"].renew()
		worlds["us"].claim(presence.PageUsers{Page: "p", Users: 1})
		look()
		all("gone", 0)
		all("p", 4)
		all(presence.AllPages, 5)
	})
	t.Run("a region whose clock went back, and that forgot all, begins above what peers know", func(t *testing.T) {
		c := servers["us"].Client()
		defer c.Close()
		worlds["us"].stop()
		servers["us"].Flush(t)
		// This is how a process begins that knows nothing and whose clock is wrong.
		fresh := open(test, servers["us"].URL(), inRegion("us", "eu", "ap"), quick)
		w := &world{t: test, name: "us", Store: fresh}
		w.renew()
		w.claim()
		eu := servers["eu"].Client()
		defer eu.Close()
		future := fmt.Sprint(time.Now().Add(time.Hour).UnixMilli())
		for b := range presence.DefaultBuckets {
			key := presenceredis.BucketKey(b, "s")
			eu.HSet(t.Context(), key, "peer:us", future+" 77 "+future+" 1")
		}
		page := presenceredis.BucketKey(presence.Bucket("p", presence.DefaultBuckets), "c:p")
		editPairs(t, eu, page, func(old string) string {
			i := strings.Index(old, "us ")
			rest := old[i:][strings.Index(old[i:], ";")+1:]
			return old[:i] + "us " + future + " 9 0;" + rest
		})
		for _, peer := range []string{"eu", "ap"} { // the name is free again after a while
			servers[peer].Do(t, "HDEL", "hc:{c}:regions", "us")
		}
		w.share(0, urls(servers, "us"))
		w.set("p", 2)
		worlds["us"] = w
		look()
		all("p", 5)
	})
	t.Run("a peer restored from a backup", func(t *testing.T) {
		dump := dumpAll(t, servers["ap"])
		worlds["us"].set("p", 7)
		worlds["us"].set("new", 1)
		all("p", 10)
		all("new", 1)
		restoreAll(t, servers["ap"], dump)
		look()
		all("p", 10)
		all("new", 1)
	})
	t.Run("a page that was forgotten while a peer was behind", func(t *testing.T) {
		worlds["us"].set("old", 1)
		all("old", 1)
		dump := dumpAll(t, servers["ap"])
		worlds["us"].set("old", 0)
		all("old", 0)
		servers["us"].Do(t, "DEL", presenceredis.BucketKey(presence.Bucket("old", presence.DefaultBuckets), "c:old"))
		us := servers["us"].Client()
		defer us.Close()
		testkit.Eventually(t, "the log has forgotten it", func() bool {
			_, err := worlds["us"].Sweep(t.Context(), presence.Bucket("old", presence.DefaultBuckets), 0)
			key := presenceredis.BucketKey(presence.Bucket("old", presence.DefaultBuckets), "l")
			return err == nil && errors.Is(us.ZScore(t.Context(), key, "old").Err(), redis.Nil)
		})
		restoreAll(t, servers["ap"], dump)
		look()
		worlds["ap"].shows("old", 0)
		all("p", 10)
		worlds["us"].set("old", 3)
		all("old", 3)
	})
	t.Run("malformed state in a peer is written anew", func(t *testing.T) {
		key := presenceredis.BucketKey(presence.Bucket("p", presence.DefaultBuckets), "c:p")
		c := servers["ap"].Client()
		defer c.Close()
		editPairs(t, c, key, func(string) string { return "us is not what it was;eu;;" })
		worlds["us"].set("p", 8)
		worlds["eu"].set("p", 1)
		all("p", 12)
	})
	t.Run("foreign data in a peer is left alone, and the rest goes on", func(t *testing.T) {
		taken := presenceredis.BucketKey(presence.Bucket("taken", presence.DefaultBuckets), "c:taken")
		broken := (presence.Bucket("p", presence.DefaultBuckets) + 1) % presence.DefaultBuckets
		state := presenceredis.BucketKey(broken, "s")
		servers["ap"].Do(t, "SET", taken, "theirs")
		servers["ap"].Do(t, "RENAME", state, state+" kept")
		servers["ap"].Do(t, "SET", state, "theirs")
		worlds["us"].set("taken", 1)
		worlds["us"].set("p", 9)
		worlds["us"].set(inBucket(broken), 1)
		all("p", 13)
		worlds["eu"].shows("taken", 1)
		servers["ap"].Do(t, "DEL", taken)
		servers["ap"].Do(t, "RENAME", state+" kept", state)
		all(inBucket(broken), 1)
	})
	t.Run("a log that lacks pages begins anew", func(t *testing.T) {
		b := presence.Bucket("p", presence.DefaultBuckets)
		servers["us"].Do(t, "DEL", presenceredis.BucketKey(b, "l"))
		servers["us"].Do(t, "HDEL", presenceredis.BucketKey(b, "s"), "log", "places")
		worlds["us"].set("p", 10)
		all("p", 14)
	})
}

// editPairs changes the other regions' pairs of a page, whose form is that of page.lua.
func editPairs(t *testing.T, c *redis.Client, key string, edit func(pairs string) string) {
	t.Helper()
	text, err := c.Get(t.Context(), key).Result()
	if err != nil {
		t.Fatal(err)
	}
	const lengthAt = 40
	body := len(text) - int(text[lengthAt])<<8 - int(text[lengthAt+1])
	pairs := edit(text[body:])
	length := string([]byte{byte(len(pairs) >> 8), byte(len(pairs))})
	if err := c.Set(t.Context(), key, text[:lengthAt]+length+text[lengthAt+2:body]+pairs,
		redis.KeepTTL).Err(); err != nil {
		t.Fatal(err)
	}
}

// inBucket is a page of that bucket.
func inBucket(bucket int) string {
	for i := 0; ; i++ {
		if page := fmt.Sprint("page ", i); presence.Bucket(page, presence.DefaultBuckets) == bucket {
			return page
		}
	}
}

func dumpAll(t *testing.T, s *redistest.Server) map[string]string {
	c := s.Client()
	defer c.Close()
	keys, err := c.Keys(t.Context(), "*").Result()
	if err != nil {
		t.Fatal(err)
	}
	dump := map[string]string{}
	for _, k := range keys {
		if dump[k], err = c.Dump(t.Context(), k).Result(); err != nil && !errors.Is(err, redis.Nil) {
			t.Fatal(err)
		}
	}
	return dump
}

// restoreAll replaces all that the server has by what was dumped, at once: nobody sees it empty, nor half of it.
func restoreAll(t *testing.T, s *redistest.Server, dump map[string]string) {
	c := s.Client()
	defer c.Close()
	pipe := c.TxPipeline()
	pipe.FlushAll(t.Context())
	for k, v := range dump {
		pipe.RestoreReplace(t.Context(), k, 0, v)
	}
	if _, err := pipe.Exec(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// fill puts users on many pages.
func (w *world) fill(pages int, users int64) {
	w.t.Helper()
	w.sequence++
	for first := 0; first < pages; first += 50_000 {
		var counts []presence.PageUsers
		for i := first; i < min(first+50_000, pages); i++ {
			counts = append(counts, presence.PageUsers{Page: "page/" + strconv.Itoa(i), Users: users})
		}
		w.sequence++
		w.write(presence.Change{Claim: w.claims[0], Sequence: w.sequence, Counts: counts})
	}
}

// What a link costs at rest does not depend on how many pages there are.
func TestServerALinkAtRestCostsLittle(t *testing.T) {
	t.Parallel()
	const most = 10 << 10 // bytes a second
	a, b := redistest.Start(t), redistest.Start(t)
	us, eu := newWorld(t, a.URL(), "us", "eu"), newWorld(t, b.URL(), "eu", "us")
	us.fill(20_000, 1)
	us.share(0, map[string]string{"eu": b.URL()})
	eu.share(0, map[string]string{"us": a.URL()})
	eu.shows("page/19999", 1)
	for tries := 1; ; tries++ { // it comes to rest sooner or later, depending on the machine
		before, start := us.bytes.Load(), time.Now()
		time.Sleep(8 * time.Second)
		rate := float64(us.bytes.Load()-before) / time.Since(start).Seconds()
		t.Logf("%.0f bytes a second", rate)
		if rate <= most {
			return
		}
		if tries == 4 {
			t.Fatalf("%.0f bytes a second at rest, more than %d", rate, most)
		}
	}
}

// A user of Redis is switched off, and on again: an outage and its end.
func TestServerAPeersUserIsSwitchedOffAndOn(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	newWorld(t, server.URL(), "eu")
	server.Do(t, "ACL", "SETUSER", "us", "on", ">secret", "~hc:*", "&hc:*", "+@all")
	peer := presenceredis.NewPeer(open(t, strings.Replace(server.URL(), "redis://", "redis://us:secret@", 1)), "us",
		"eu")
	if err := peer.Hello(t.Context(), "me"); err != nil {
		t.Fatal(err)
	}
	server.Do(t, "ACL", "SETUSER", "us", "off")
	server.Do(t, "CLIENT", "KILL", "USER", "us")
	for range 6 {
		if err := peer.Hello(t.Context(), "me"); !errors.Is(err, presence.ErrUnavailable) ||
			errors.Is(err, pncounter.ErrRefused) {
			t.Fatalf("with its user switched off: %v", err)
		}
		if _, err := peer.Positions(t.Context(), []int{0, 1}); !errors.Is(err, presence.ErrUnavailable) {
			t.Fatalf("with its user switched off: %v", err)
		}
	}
	server.Do(t, "ACL", "SETUSER", "us", "on")
	testkit.Eventually(t, "the peer is there again", func() bool { return peer.Hello(t.Context(), "me") == nil })
}

// TestServerAPeerThatOnlyHasAnImport: its first process comes, adds the other facts, and then the peer can be greeted.
func TestServerAPeerThatOnlyHasAnImport(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	client := &redisconn.Client{UniversalClient: server.Client()}
	imported := presenceredis.Facts{Counters: 3, Postgres: presenceredis.PostgresBeside}
	if err := presenceredis.NoteCounters(t.Context(), client, imported); err != nil {
		t.Fatal(err)
	}

	peer := presenceredis.NewPeer(open(t, server.URL()), "us", "eu")
	err := peer.Hello(t.Context(), "me")
	if !errors.Is(err, presence.ErrUnavailable) || errors.Is(err, pncounter.ErrRefused) {
		t.Errorf("without a process: %v", err)
	}

	newWorld(t, server.URL(), "eu")
	if err := peer.Hello(t.Context(), "me"); err != nil {
		t.Errorf("with a process: %v", err)
	}
}

// A link whose peer was away tells it soon after it is back of what changed.
func TestClockALinkIsBackWithinTwoSeconds(t *testing.T) {
	t.Parallel()
	servers, worlds := three(t)
	worlds["us"].set("p", 1)
	worlds["eu"].shows("p", 1)
	servers["eu"].Do(t, "SAVE")
	servers["eu"].Kill()
	worlds["us"].set("p", 2)
	time.Sleep(2 * time.Second) // by then the link makes its longest pauses
	servers["eu"].Restart(t)
	fresh := open(t, servers["eu"].URL(), inRegion("eu", "us", "ap"))
	testkit.Within(t, 2*time.Second, "eu knows what us has", func() bool { return read(t, fresh, "p").Users == 2 })
}

// A region without peers gets one, loses it and gets it again. Totals include the peer's
// users while it is a peer, and later no ghosts of what happened between.
func TestServerPeersComeAndGo(t *testing.T) {
	t.Parallel()
	a, b := redistest.Start(t), redistest.Start(t)
	us, eu := newWorld(t, a.URL(), "us"), newWorld(t, b.URL(), "eu", "us")
	us.set("p", 2) // nobody listens, and there is no log
	eu.set("p", 3)
	us.shows("p", 2)
	us.share(0, map[string]string{"eu": b.URL()})
	eu.share(0, map[string]string{"us": a.URL()})
	us.shows("p", 5)
	eu.shows("p", 5)
	us.set("q", 1)
	eu.shows("q", 1)
	us.stop()

	us.share(0, nil) // the same region after a restart without --peer
	us.shows("p", 2)
	us.set("q", 0)
	us.set("p", 4)
	us.shows("p", 4)
	if keys := a.Do(t, "KEYS", "hc:{b*}:l").([]any); len(keys) > 0 {
		t.Errorf("without peers there are still logs: %v", keys)
	}
	a.Do(t, "DEL", presenceredis.BucketKey(presence.Bucket("q", presence.DefaultBuckets), "c:q")) // it is forgotten
	us.stop()

	us.share(0, map[string]string{"eu": b.URL()})
	for _, w := range []*world{us, eu} {
		w.shows("p", 7)
		w.shows("q", 0)
	}
}
