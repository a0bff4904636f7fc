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
	return func(c *presenceredis.Config) {
		c.Facts.Region = name
		c.Peers = peers
	}
}

// part returns a region's users on the page, as the store has them, and the total.
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
		t.Fatalf("the parts %[2]v do not add up to %+[1]v", count, parts)
	}

	return users, count.Users
}

// drawBatch draws from few pages, logs and incarnations, so that batches affect each other: one in three comes again,
// or goes on where another one ended.
func drawBatch(t *rapid.T, pages []string, sent []pncounter.Batch) pncounter.Batch {
	if len(sent) > 0 && rapid.IntRange(0, 2).Draw(t, "of another") == 0 {
		b := rapid.SampledFrom(sent).Draw(t, "sent")
		if rapid.Bool().Draw(t, "goes on") {
			b.From, b.To = b.To, b.To+1
		}

		return b
	}

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

// differential checks, batch by batch, that merge.lua does the same as the pure type.
func differential(t *testing.T, url string, flush func()) {
	s := open(t, url, inRegion("us", "eu"), func(c *presenceredis.Config) {
		c.Partitions = 1
		c.Buckets = 1
	})
	peer := presenceredis.NewPeer(s, "eu", "us")
	pages := []string{"a", "b", "ä/ :;", "*"}

	rapid.Check(t, func(rt *rapid.T) {
		flush()

		claims, err := s.Claim(context.Background(), "node", []int{0}, true)
		if err != nil {
			rt.Fatal(err)
		}

		counts := []presence.PageUsers{}
		if rapid.Bool().Draw(rt, "pages of this region, too") { // with a user on each, so that they exist
			for _, page := range pages {
				counts = append(counts, presence.PageUsers{Page: page, Users: 1})
			}
		}

		out := s.Write(context.Background(), []presence.Change{
			{Claim: claims[0], Sequence: 1, Counts: counts, Complete: true},
		})
		if out[0].Err != nil {
			rt.Fatal(out[0].Err)
		}

		// Each batch has the same effect on store and model. Versions never fall, whatever the batch.
		var model presencetest.Copy
		versions := map[string]presence.Version{}

		var sent []pncounter.Batch
		for range rapid.IntRange(1, 12).Draw(rt, "batches") {
			b := drawBatch(rt, pages, sent)
			sent = append(sent, b)
			acks, err := peer.Merge(context.Background(), []pncounter.Batch{b})
			if err != nil {
				rt.Fatal(err)
			}
			got, want := acks[0], model.Merge(b)
			got.Changed = 0 // the model does not count the changes
			if !reflect.DeepEqual(got, want) {
				rt.Fatalf("merge.lua answers %+v to %+v, and the model %+v", got, b, want)
			}
			for _, page := range pages {
				// The store has the peer's users as in the model, and the users of this region in addition.
				users, total := part(t, s, page, "eu")
				if want := model.Value(page); users != want || total != want+int64(len(counts)/len(pages)) {
					rt.Fatalf("%q has %d users in eu, %d in all; the model has %d in eu", page, users, total, want)
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
	differential(t, server.URL(), func() { server.Flush(t) })
}

func TestServerPairThatArrivesAgainAddsNothing(t *testing.T) {
	t.Parallel()
	us := newWorld(t, redistest.Start(t).URL(), "us", "eu")
	peer := presenceredis.NewPeer(us.Store, "eu", "us")
	two := pncounter.PagePair{Page: "a", Pair: pncounter.Pair{Incarnation: 5, Increments: 3, Decrements: 1}}

	for from := range uint64(3) {
		b := pncounter.Batch{
			Region: "eu", Bucket: presence.Bucket("a", presence.DefaultBuckets), Log: 1, From: from, To: from + 1,
			Pages: []pncounter.PagePair{two},
		}
		if _, err := peer.Merge(t.Context(), []pncounter.Batch{b}); err != nil {
			t.Fatal(err)
		}
		if users, _ := part(t, us.Store, "a", "eu"); users != 2 {
			t.Fatalf("after batch %d the page has %d users in eu, want 2", from+1, users)
		}
	}
}

// world is a region: its Redis, and one owner of all partitions.
type world struct {
	*presenceredis.Store
	t        testing.TB
	name     string
	claims   []presence.Claim
	sequence uint64
	stop     func()
	shared   *region.Replicator
	buckets  []int        // the buckets that it replicates
	bytes    atomic.Int64 // bytes on its links to peers
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

// claim claims all partitions and completes them.
func (w *world) claim(counts ...presence.PageUsers) {
	w.t.Helper()
	claims, err := w.Claim(w.t.Context(), "node", upTo(presence.DefaultPartitions), true)
	if err != nil {
		w.t.Fatal(err)
	}

	w.claims = claims
	changes := make([]presence.Change, len(claims))
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

// set writes how many users of this region are on the page.
func (w *world) set(page string, users int64) {
	w.t.Helper()
	w.sequence++
	w.write(presence.Change{
		Claim: w.claims[0], Sequence: w.sequence, Counts: []presence.PageUsers{{Page: page, Users: users}},
	})

	if w.shared != nil { // in a real process the dispatcher calls this
		w.shared.Changed(presence.Bucket(page, presence.DefaultBuckets))
	}
}

// Carried implements redisconn.Traffic.
func (w *world) Carried(sent, received int) { w.bytes.Add(int64(sent + received)) }

// share runs a replicator of all buckets until the test ends or stop is called.
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

	w.buckets = upTo(presence.DefaultBuckets)
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

// look makes the replicator compare the positions of all peers at once. In operation it does that every other second.
func (w *world) look() {
	slices.Reverse(w.buckets) // a changed list of buckets starts a comparison
	w.shared.Own(w.buckets)
}

// shows waits until the store has that many users, not stale.
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

// three returns three regions that replicate to each other over TLS, as the user of deploy/redis.acl.
func three(t *testing.T) (servers map[string]*redistest.Server, worlds map[string]*world) {
	names := []string{"us", "eu", "ap"}
	servers = map[string]*redistest.Server{}
	worlds = map[string]*world{}

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

// Regions share counts even if different releases have initialized their Redis, so that the hash tags differ. An
// emptied Redis may get other tags.
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

	// The Redis is emptied, so the next process initializes it with the tags of this release.
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

// sharing has three regions that share counts, for the parts of TestServerRegionsShareCounts. Each part begins with the
// counts that the former part has left.
type sharing struct {
	servers map[string]*redistest.Server
	worlds  map[string]*world
}

// look makes all regions compare the positions of their peers.
func (s sharing) look() {
	for _, w := range s.worlds {
		w.look()
	}
}

// all waits until every region has that many users.
func (s sharing) all(t *testing.T, page string, users int64) {
	t.Helper()
	for _, w := range s.worlds {
		w.shows(page, users)
	}
}

func TestServerRegionsShareCounts(t *testing.T) {
	t.Parallel()
	servers, worlds := three(t)
	s := sharing{servers, worlds}

	for i, name := range []string{"us", "eu", "ap"} {
		worlds[name].set("p", int64(i+1))
		worlds[name].set(presence.AllPages, int64(i+1))
	}

	s.all(t, "p", 6)
	s.all(t, presence.AllPages, 6)

	// Users leave in one region, and the counts of the others follow.
	worlds["eu"].set("p", 0)
	s.all(t, "p", 4)
	if users, _ := part(t, worlds["us"].Store, "p", "ap"); users != 3 {
		t.Errorf("us has %d users of ap, want 3", users)
	}

	for _, part := range []struct {
		name string
		test func(*testing.T)
	}{
		{"a peer that came back empty gets everything again", s.emptied},
		{"what a region lost stays with no other", s.lost},
		{"a region whose clock went back, and that forgot all, begins above what peers know", s.clockWentBack},
		{"a peer restored from a backup", s.restored},
		{"a page that was forgotten while a peer was behind", s.forgotten},
		{"malformed state in a peer is written anew", s.malformed},
		{"foreign data in a peer is left alone, and the rest goes on", s.foreign},
		{"a log that lacks pages begins anew", s.incompleteLog},
	} {
		t.Log(part.name)
		part.test(t)
	}
}

func (s sharing) emptied(t *testing.T) {
	us := s.worlds["us"]
	before := read(t, us.Store, "p").Version

	s.servers["us"].Flush(t)
	us.renew()
	us.claim(presence.PageUsers{Page: "p", Users: 1}, presence.PageUsers{Page: presence.AllPages, Users: 1})
	s.look()
	s.all(t, "p", 4)
	s.all(t, presence.AllPages, 6)

	if v := read(t, us.Store, "p").Version; v.Compare(before) <= 0 {
		t.Errorf("the version is %v, want one greater than %v", v, before)
	}
}

func (s sharing) lost(t *testing.T) {
	us := s.worlds["us"]
	us.set("gone", 5)
	s.all(t, "gone", 5)

	// The owner writes neither this page nor the count of the site again.
	s.servers["us"].Flush(t)
	us.renew()
	us.claim(presence.PageUsers{Page: "p", Users: 1})
	s.look()

	s.all(t, "gone", 0)
	s.all(t, "p", 4)
	s.all(t, presence.AllPages, 5)
}

func (s sharing) clockWentBack(t *testing.T) {
	s.worlds["us"].stop()
	s.servers["us"].Flush(t)

	// This process does not know the region's past, and its clock is behind.
	fresh := open(t, s.servers["us"].URL(), inRegion("us", "eu", "ap"), quick)
	us := &world{t: t, name: "us", Store: fresh}
	us.renew()
	us.claim()

	// The peers have state of this region whose numbers are an hour ahead.
	eu := s.servers["eu"].Client()
	defer eu.Close()
	future := fmt.Sprint(time.Now().Add(time.Hour).UnixMilli())
	for b := range presence.DefaultBuckets {
		eu.HSet(t.Context(), presenceredis.BucketKey(b, "s"), "peer:us", future+" 77 "+future+" 1")
	}
	editPairs(t, eu, pageKey("p"), func(old string) string {
		i := strings.Index(old, "us ")
		rest := old[i:][strings.Index(old[i:], ";")+1:]
		return old[:i] + "us " + future + " 9 0;" + rest
	})

	// In operation the name of the region becomes free after a while.
	for _, peer := range []string{"eu", "ap"} {
		s.servers[peer].Do(t, "HDEL", "hc:{c}:regions", "us")
	}

	us.share(0, urls(s.servers, "us"))
	us.set("p", 2)
	s.worlds["us"] = us
	s.look()
	s.all(t, "p", 5)
}

func (s sharing) restored(t *testing.T) {
	dump := dumpAll(t, s.servers["ap"])
	s.worlds["us"].set("p", 7)
	s.worlds["us"].set("new", 1)
	s.all(t, "p", 10)
	s.all(t, "new", 1)

	// The backup lacks both changes, which were acknowledged.
	restoreAll(t, s.servers["ap"], dump)
	s.look()
	s.all(t, "p", 10)
	s.all(t, "new", 1)
}

func (s sharing) forgotten(t *testing.T) {
	us := s.worlds["us"]
	us.set("old", 1)
	s.all(t, "old", 1)
	dump := dumpAll(t, s.servers["ap"])

	us.set("old", 0)
	s.all(t, "old", 0)
	s.servers["us"].Do(t, "DEL", pageKey("old"))

	client := s.servers["us"].Client()
	defer client.Close()
	testkit.Eventually(t, "the log has forgotten it", func() bool {
		b := presence.Bucket("old", presence.DefaultBuckets)
		_, err := us.Sweep(t.Context(), b, 0)
		log := presenceredis.BucketKey(b, "l")
		return err == nil && errors.Is(client.ZScore(t.Context(), log, "old").Err(), redis.Nil)
	})

	// The peer still has a user on the page, but the log no longer has the page.
	restoreAll(t, s.servers["ap"], dump)
	s.look()
	s.worlds["ap"].shows("old", 0)
	s.all(t, "p", 10)

	us.set("old", 3)
	s.all(t, "old", 3)
}

func (s sharing) malformed(t *testing.T) {
	ap := s.servers["ap"].Client()
	defer ap.Close()
	editPairs(t, ap, pageKey("p"), func(string) string { return "us is not what it was;eu;;" })

	s.worlds["us"].set("p", 8)
	s.worlds["eu"].set("p", 1)
	s.all(t, "p", 12)
}

func (s sharing) foreign(t *testing.T) {
	us, ap := s.worlds["us"], s.servers["ap"]
	broken := (presence.Bucket("p", presence.DefaultBuckets) + 1) % presence.DefaultBuckets
	state := presenceredis.BucketKey(broken, "s")

	// In the peer's Redis another program has taken the key of a page, and the key of a bucket's state.
	ap.Do(t, "SET", pageKey("taken"), "theirs")
	ap.Do(t, "RENAME", state, state+" kept")
	ap.Do(t, "SET", state, "theirs")

	us.set("taken", 1)
	us.set("p", 9)
	us.set(inBucket(broken), 1)
	s.all(t, "p", 13)
	s.worlds["eu"].shows("taken", 1)

	ap.Do(t, "DEL", pageKey("taken"))
	ap.Do(t, "RENAME", state+" kept", state)
	s.all(t, inBucket(broken), 1)
}

func (s sharing) incompleteLog(t *testing.T) {
	b := presence.Bucket("p", presence.DefaultBuckets)
	s.servers["us"].Do(t, "DEL", presenceredis.BucketKey(b, "l"))
	s.servers["us"].Do(t, "HDEL", presenceredis.BucketKey(b, "s"), "log", "places")

	s.worlds["us"].set("p", 10)
	s.all(t, "p", 14)
}

// pageKey returns the key of a page's count.
func pageKey(page string) string {
	return presenceredis.BucketKey(presence.Bucket(page, presence.DefaultBuckets), "c:"+page)
}

// editPairs changes the other regions' pairs of a page. They have the form of page.lua.
func editPairs(t *testing.T, c *redis.Client, key string, edit func(pairs string) string) {
	t.Helper()
	text, err := c.Get(t.Context(), key).Result()
	if err != nil {
		t.Fatal(err)
	}

	// The head of the value contains the length of the pairs, which are at its end.
	const lengthAt = 40
	body := len(text) - int(text[lengthAt])<<8 - int(text[lengthAt+1])
	pairs := edit(text[body:])
	length := string([]byte{byte(len(pairs) >> 8), byte(len(pairs))})

	edited := text[:lengthAt] + length + text[lengthAt+2:body] + pairs
	if err := c.Set(t.Context(), key, edited, redis.KeepTTL).Err(); err != nil {
		t.Fatal(err)
	}
}

// inBucket returns a page of the bucket.
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
		dump[k], err = c.Dump(t.Context(), k).Result()
		if err != nil && !errors.Is(err, redis.Nil) { // a key may expire meanwhile
			t.Fatal(err)
		}
	}

	return dump
}

// restoreAll replaces all data of the server in one transaction, so that no client sees it empty or half restored.
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

// fill writes that many pages with the given number of users.
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

// An idle link costs little, however many pages the regions have.
func TestServerALinkAtRestCostsLittle(t *testing.T) {
	t.Parallel()
	const most = 10 << 10 // bytes a second
	a, b := redistest.Start(t), redistest.Start(t)
	us, eu := newWorld(t, a.URL(), "us", "eu"), newWorld(t, b.URL(), "eu", "us")

	us.fill(20_000, 1)
	us.share(0, map[string]string{"eu": b.URL()})
	eu.share(0, map[string]string{"us": a.URL()})
	eu.shows("page/19999", 1)

	// How soon the link becomes idle depends on the machine, so the test tries again.
	for tries := 1; ; tries++ {
		before, start := us.bytes.Load(), time.Now()
		time.Sleep(8 * time.Second)

		rate := float64(us.bytes.Load()-before) / time.Since(start).Seconds()
		t.Logf("%.0f bytes a second", rate)
		if rate <= most {
			return
		}
		if tries == 4 {
			t.Fatalf("the idle link carries %.0f bytes a second, want %d at most", rate, most)
		}
	}
}

// A Redis that has only imported counters cannot be a peer until its first process has added the other facts. If the
// Redis user of a peer is disabled, that is an outage until the user is enabled again.
func TestServerAPeerThatCannotBeUsedYet(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	client := &redisconn.Client{UniversalClient: server.Client()}
	imported := presenceredis.Facts{Counters: 3, Postgres: presenceredis.PostgresSharedExact}
	if err := presenceredis.NoteCounters(t.Context(), client, imported); err != nil {
		t.Fatal(err)
	}

	server.Do(t, "ACL", "SETUSER", "us", "on", ">secret", "~hc:*", "&hc:*", "+@all")
	url := strings.Replace(server.URL(), "redis://", "redis://us:secret@", 1)
	peer := presenceredis.NewPeer(open(t, url), "us", "eu")
	err := peer.Hello(t.Context(), "me")
	if !errors.Is(err, presence.ErrUnavailable) || errors.Is(err, pncounter.ErrRefused) {
		t.Errorf("before the first process: %v, want ErrUnavailable", err)
	}

	newWorld(t, server.URL(), "eu")
	if err := peer.Hello(t.Context(), "me"); err != nil {
		t.Fatalf("after the first process: %v", err)
	}

	server.Do(t, "ACL", "SETUSER", "us", "off")
	server.Do(t, "CLIENT", "KILL", "USER", "us")
	for range 6 {
		err := peer.Hello(t.Context(), "me")
		if !errors.Is(err, presence.ErrUnavailable) || errors.Is(err, pncounter.ErrRefused) {
			t.Fatalf("Hello with a disabled user: %v, want ErrUnavailable", err)
		}

		if _, err := peer.Positions(t.Context(), []int{0, 1}); !errors.Is(err, presence.ErrUnavailable) {
			t.Fatalf("Positions with a disabled user: %v, want ErrUnavailable", err)
		}
	}

	server.Do(t, "ACL", "SETUSER", "us", "on")
	testkit.Eventually(t, "the peer is there again", func() bool { return peer.Hello(t.Context(), "me") == nil })
}

// When a peer is back after an outage, a link soon sends all changes.
func TestClockALinkIsBackWithinTwoSeconds(t *testing.T) {
	t.Parallel()
	servers, worlds := three(t)
	worlds["us"].set("p", 1)
	worlds["eu"].shows("p", 1)

	servers["eu"].Do(t, "SAVE")
	servers["eu"].Kill()
	worlds["us"].set("p", 2)

	time.Sleep(2 * time.Second) // until the pauses between attempts have their full length
	servers["eu"].Restart(t)

	// A new client reads Redis, so that the test does not wait until its own one reconnects.
	fresh := open(t, servers["eu"].URL(), inRegion("eu", "us", "ap"))
	testkit.Within(t, 2*time.Second, "eu knows what us has", func() bool { return read(t, fresh, "p").Users == 2 })
}

// A region has lost its data, and its peer does not answer. Totals wait for the peer's users for 5 s, and no longer
// where the clock of Redis is set back meanwhile.
func TestServerAPeerIsAwaitedBriefly(t *testing.T) {
	server := redistest.Single(t)
	c := start(t, open(t, server.URL(), inRegion("us", "eu")))
	c.set(1, "p", 2)

	state := presenceredis.BucketKey(presence.Bucket("p", presence.DefaultBuckets), "s")
	for lostAgo, stale := range map[time.Duration]bool{0: true, 6 * time.Second: false, -time.Hour: false} {
		since := time.Now().Add(-lostAgo).Unix()
		server.Do(t, "HSET", state, "peers", fmt.Sprintf("eu 2 0 %d 0;", since))

		if got := read(t, c.s, "p"); got.Stale != stale {
			t.Errorf("a loss %s ago by the clock of Redis: %+v, want stale %t", lostAgo, got, stale)
		}
	}
}

// A region loses its data while a peer is silent. When the peer is heard again, the region has nothing of the peer's
// users, so totals are stale until it has.
func TestServerAPeerThatReturnsAfterALossIsAwaited(t *testing.T) {
	server := redistest.Single(t)
	c := start(t, open(t, server.URL(), inRegion("us", "eu")))
	c.set(1, "p", 2)
	b := presence.Bucket("p", presence.DefaultBuckets)

	apply := func(in, out []string, stale bool) {
		t.Helper()
		if err := c.s.ApplyPeers(t.Context(), []int{b}, in, out); err != nil {
			t.Fatal(err)
		}
		if got := read(t, c.s, "p"); got.Stale != stale {
			t.Errorf("with %v in and %v out the count is %+v, want stale %t", in, out, got, stale)
		}
	}

	eu := []string{"eu"}
	apply(nil, eu, false)
	apply(eu, nil, true)

	// The peer's log is whole, so the peer is awaited no longer, nor after another silence.
	acks, err := presenceredis.NewPeer(c.s, "eu", "us").Merge(t.Context(), []pncounter.Batch{
		{Region: "eu", Bucket: b, Log: 5, To: 1, Floor: 5, Complete: true, Pages: []pncounter.PagePair{
			{Page: "p", Pair: pncounter.Pair{Incarnation: 5, Increments: 3}},
		}},
	})
	if err != nil || !acks[0].Done {
		t.Fatalf("the batch is answered %+v, %v", acks, err)
	}
	apply(eu, nil, false)
	apply(nil, eu, false)
	apply(eu, nil, false)
}

// A region gets a peer, loses it and gets it again. Totals include the peer's users only while it is a peer, and
// presence that ended meanwhile does not come back.
func TestServerPeersComeAndGo(t *testing.T) {
	t.Parallel()
	a, b := redistest.Start(t), redistest.Start(t)
	us, eu := newWorld(t, a.URL(), "us"), newWorld(t, b.URL(), "eu", "us")

	us.set("p", 2) // without a peer there is no log
	eu.set("p", 3)
	us.shows("p", 2)

	us.share(0, map[string]string{"eu": b.URL()})
	eu.share(0, map[string]string{"us": a.URL()})
	us.shows("p", 5)
	eu.shows("p", 5)

	us.set("q", 1)
	eu.shows("q", 1)
	us.stop()

	us.share(0, nil) // as after a restart without --peer
	us.shows("p", 2)
	us.set("q", 0)
	us.set("p", 4)
	us.shows("p", 4)

	if keys := a.Do(t, "KEYS", "hc:{b*}:l").([]any); len(keys) > 0 {
		t.Errorf("without peers the logs %v are left, want none", keys)
	}

	// While the two are no peers, the page is forgotten.
	a.Do(t, "DEL", pageKey("q"))
	us.stop()

	us.share(0, map[string]string{"eu": b.URL()})
	for _, w := range []*world{us, eu} {
		w.shows("p", 7)
		w.shows("q", 0)
	}
}
