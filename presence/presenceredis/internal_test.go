package presenceredis

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"pgregory.net/rapid"

	"headcount/internal/redisconn"
	"headcount/internal/redistest"
	"headcount/internal/testkit"
	"headcount/presence"
	"headcount/presence/pncounter"
	"headcount/scripts"
	"headcount/unread"
)

// Redis came back with older data, which lack a page's level. The level is read with the incarnation that all levels
// have since the loss, above all versions that gateways may know. Without a loss it has none.
func TestALevelOfWhichAllIsLost(t *testing.T) {
	for void, want := range map[uint64]unread.Level{0: {}, 7: {Incarnation: 7}} {
		if l := parseLevel("", "", void); l != want {
			t.Errorf("with the void %d the level is %+v, want %+v", void, l, want)
		}
	}
}

// A log numbers the pairs of its pages consecutively, so its highest numbers can be far ahead of the clock. A page that
// is forgotten and comes back at once gets a pair with a higher number. Otherwise other regions would refuse the pair.
func TestServerAForgottenPairComesBackAbove(t *testing.T) {
	s := open(t, Config{Conn: redistest.Dial(t, redistest.Single(t).URL())})
	claims, err := s.Claim(t.Context(), "n", []int{1}, false)
	if err != nil {
		t.Fatal(err)
	}
	var pages []string
	for i := range 9 {
		pages = append(pages, pageIn(7, strconv.Itoa(i)))
	}

	sequence := uint64(0)
	set := func(users int64) {
		t.Helper()
		sequence++
		c := presence.Change{Claim: claims[0], Sequence: sequence}
		for _, page := range pages {
			c.Counts = append(c.Counts, presence.PageUsers{Page: page, Users: users})
		}
		if err := s.Write(t.Context(), []presence.Change{c})[0].Err; err != nil {
			t.Fatal(err)
		}
	}

	numbers := func() []uint64 { // the numbers of the pages' pairs
		t.Helper()
		cl := s.ownRun(7, pages)
		if err := s.conn.Run(t.Context(), []*scriptRun{cl}); err != nil {
			t.Fatal(err)
		}

		own := make([]uint64, len(pages))
		for i := range own {
			own[i] = uint64(cl.Reply.([]any)[3*i].(int64))
		}

		return own
	}

	set(1)
	// A peer knows pairs with numbers of an hour ahead, from a Redis that this region used before.

	if err := s.Raise(t.Context(), 7, uint64(time.Now().Add(time.Hour).UnixMilli()), nil); err != nil {
		t.Fatal(err)
	}
	before := numbers()

	set(0)
	if err := s.conn.Run(t.Context(), []*scriptRun{s.sweepRun(7, pages, true, "")}); err != nil {
		t.Fatal(err)
	}

	set(2)
	for i, again := range numbers() {
		if again <= before[i] {
			t.Errorf("page %d: a pair with number %d follows one with %d", i, again, before[i])
		}
	}
}

// A log may begin anew while a process still lists the pages for the former log. The new log lacks those pages, so it
// must not count as complete.
func TestServerALogThatBeganMeanwhileLacksPages(t *testing.T) {
	s := open(t, Config{Conn: redistest.Dial(t, redistest.Single(t).URL()), Buckets: 1, Peers: []string{"eu"}})
	own(t, s, false, 1, map[string]int64{"p": 1})

	relog := func(pages []string, complete string) string {
		t.Helper()
		log, err := s.relog(t.Context(), 0, 0, pages, complete)
		if err != nil {
			t.Fatal(err)
		}
		return log
	}

	outgoing := func() pncounter.Batch {
		t.Helper()
		all, err := s.Outgoing(t.Context(), []pncounter.Position{{Bucket: 0}}, 100)
		if err != nil {
			t.Fatal(err)
		}
		return all[0]
	}

	for _, in := range [][]string{nil, {"eu"}} { // this ends the log that own began
		if err := s.ApplyPeers(t.Context(), []int{0}, in, nil); err != nil {
			t.Fatal(err)
		}
	}

	// A process begins to list the pages, and has not finished when the log begins anew.
	log := relog(nil, "")
	relog([]string{"p"}, "")

	for _, in := range [][]string{nil, {"eu"}} { // as a process without peers does
		if err := s.ApplyPeers(t.Context(), []int{0}, in, nil); err != nil {
			t.Fatal(err)
		}
	}

	// The process reports the end of its list, for a log that no longer exists.
	relog(nil, log)
	if b := outgoing(); b.Log != 0 {
		t.Fatalf("the new log counts as complete, with %+v", b)
	}

	// A list from the beginning makes the log complete.
	if err := s.BeginLogs(t.Context(), []int{0}); err != nil {
		t.Fatal(err)
	}
	if b := outgoing(); b.Log == 0 || len(b.Pages) == 0 {
		t.Fatalf("the log with a full list has %+v, want it complete, with pages", b)
	}
}

// Each run of a script may be repeated and may arrive late. The test splits random changes into their runs, and after
// each run it repeats some of the earlier ones.
func TestServerLateAndRepeatedRunsChangeNothing(t *testing.T) {
	server := redistest.Single(t)
	s := open(t, Config{Conn: redistest.Dial(t, server.URL())})
	round := 0
	rapid.Check(t, func(rt *rapid.T) {
		round++

		claims, err := s.Claim(t.Context(), "n", []int{1, 2}, false)
		if err != nil {
			rt.Fatal(err)
		}
		want := map[string]map[int]int64{}
		present := map[string]bool{}
		var earlier []*scriptRun

		// Earlier runs are repeated, as by a client that has no answer.
		rerun := func() {
			for range rapid.IntRange(0, 3).Draw(rt, "late") {
				if len(earlier) == 0 {
					continue
				}

				late := *rapid.SampledFrom(earlier).Draw(rt, "run")
				late.Reply, late.Err = nil, nil
				if err := s.conn.Run(t.Context(), []*scriptRun{&late}); err != nil {
					rt.Fatal(err)
				}
			}
		}

		for seq := range uint64(rapid.IntRange(1, 8).Draw(rt, "changes")) {
			claim := rapid.SampledFrom(claims).Draw(rt, "claim")
			c := presence.Change{Claim: claim, Sequence: seq + 1}
			for i := range rapid.IntRange(1, 3).Draw(rt, "pages") {
				// All in one bucket, so that the runs can affect each other.
				page := pageIn(7, fmt.Sprintf("%d/%d", round, i))
				users := rapid.Int64Range(0, 3).Draw(rt, "users")
				c.Counts = append(c.Counts, presence.PageUsers{Page: page, Users: users})
				c.Members = append(c.Members, presence.MemberChange{
					Member: presence.Member{User: presence.User(claim.Partition), Page: page}, Gone: users == 0,
				})
				if want[page] == nil {
					want[page] = map[int]int64{}
				}
				want[page][claim.Partition] = users
				present[fmt.Sprint(claim.Partition, page)] = users > 0
			}

			// These are the calls of Store.Write, in its order.
			calls := s.memberRuns(c, s.unwrittenLocked(c), 1, 0)

			outcomes := make([]presence.Outcome, 1)
			for b, groups := range s.byBucket([]presence.Change{c}, outcomes) {
				for _, run := range s.countRuns(b, "PUBLISH", []presence.Change{c}, groups) {
					s.numberLocked(run, []presence.Change{c})
					calls = append(calls, &run.scriptRun)
				}
			}
			for _, cl := range calls {
				if err := s.conn.Run(t.Context(), []*scriptRun{cl}); err != nil {
					rt.Fatal(err)
				}
				earlier = append(earlier, cl)
				rerun()
			}
		}

		for page, users := range want {
			sum := int64(0)
			for _, n := range users {
				sum += n
			}

			got, err := s.Counts(t.Context(), []string{page})
			if err != nil || got[0].Users != sum {
				rt.Fatalf("%q: %+v, %v; want %d", page, got, err, sum)
			}
		}

		// The members must also be those of the last change.
		snaps, err := s.Load(t.Context(), claims)
		if err != nil {
			rt.Fatal(err)
		}

		for i, snap := range snaps {
			n := 0
			for _, m := range snap.Members {
				if _, ours := want[m.Page]; !ours {
					continue // a member of an earlier round
				}
				n++
				if !present[fmt.Sprint(claims[i].Partition, m.Page)] {
					rt.Fatalf("member %+v was loaded, but is not present", m)
				}
			}
			for page := range want {
				if present[fmt.Sprint(claims[i].Partition, page)] {
					n--
				}
			}

			if n != 0 {
				rt.Fatalf("%d members too many were loaded", n)
			}
		}
	})
}

// pageIn returns a page of the bucket.
func pageIn(bucket int, name string) string {
	for i := 0; ; i++ {
		if page := fmt.Sprint(name, ".", i); presence.Bucket(page, presence.DefaultBuckets) == bucket {
			return page
		}
	}
}

// If a part of a change was not applied, the next part is refused.
func TestServerAMissingPartIsNoticed(t *testing.T) {
	server := redistest.Single(t)
	s := open(t, Config{Conn: redistest.Dial(t, server.URL())})
	claims, err := s.Claim(t.Context(), "n", []int{1}, false)
	if err != nil {
		t.Fatal(err)
	}

	c := presence.Change{Claim: claims[0], Sequence: 1}
	for i := 0; len(c.Counts) < countBatch+50; i++ {
		page := fmt.Sprint("p", i)
		c.Members = append(c.Members, presence.MemberChange{
			Member: presence.Member{User: presence.User(i), Page: page},
		})
		if presence.Bucket(page, s.cfg.Buckets) == 7 {
			c.Counts = append(c.Counts, presence.PageUsers{Page: page, Users: 1})
		}
	}

	// Only the second of two batches arrives: the owner must learn that the first one did not.
	members := s.memberRuns(c, pageList{}, shardsFor(len(c.Members)), 0)
	err = s.conn.Run(t.Context(), members[1:2])
	if err != nil || members[1].Reply.([]any)[0] != int64(statusGap-'0') {
		t.Fatalf("the second batch without the first is answered %v, %v; want a gap", members[1].Reply, err)
	}

	groups := s.byBucket([]presence.Change{c}, make([]presence.Outcome, 1))[7]
	parts := s.countRuns(7, "PUBLISH", []presence.Change{c}, groups)
	for _, part := range parts {
		s.numberLocked(part, []presence.Change{c})
	}

	err = s.conn.Run(t.Context(), []*scriptRun{&parts[1].scriptRun})
	if err != nil || fmt.Sprint(parts[1].Reply) != "[gap]" {
		t.Fatalf("the second part without the first is answered %v, %v; want a gap", parts[1].Reply, err)
	}

	// A repeated change may be split into other parts, because it is written together with other changes.
	if err := s.conn.Run(t.Context(), []*scriptRun{&parts[0].scriptRun}); err != nil {
		t.Fatal(err)
	}

	other := presence.Change{Claim: claims[0], Sequence: 1, Counts: c.Counts}
	o := s.Write(t.Context(), []presence.Change{other})
	if o[0].Err != nil {
		t.Fatal(o[0].Err)
	}

	for _, n := range o[0].Counts {
		if n.Users != 1 {
			t.Fatalf("got %+v, want 1 user", n)
		}
	}
}

// If one part of a change cannot be written, the partition stays incomplete, although the next part and other changes
// can be written.
func TestServerNothingGoesOnFromAPartThatFailed(t *testing.T) {
	server := redistest.Single(t)
	s := open(t, Config{Conn: redistest.Dial(t, server.URL())})
	claims, err := s.Claim(t.Context(), "n", []int{1, 2}, false)
	if err != nil {
		t.Fatal(err)
	}

	c := presence.Change{Claim: claims[0], Sequence: 1, Complete: true}
	for i := range countBatch + 50 {
		c.Counts = append(c.Counts, presence.PageUsers{Page: pageIn(7, fmt.Sprint("part", i)), Users: 1})
	}

	other := presence.Change{Claim: claims[1], Sequence: 1, Counts: c.Counts[countBatch : countBatch+1], Complete: true}

	// The first page of the first part cannot be written. The second part could.
	server.Do(t, "SADD", at(t, s).pagePrefix(7)+c.Counts[0].Page, "foreign")

	o := s.Write(t.Context(), []presence.Change{c, other})
	if !errors.Is(o[0].Err, ErrForeign) || o[1].Err != nil {
		t.Fatalf("%v and %v, want the first alone to fail", o[0].Err, o[1].Err)
	}

	complete := func() string { return fmt.Sprint(server.Do(t, "SMISMEMBER", at(t, s).readyKey(7), 1, 2)) }
	if got := complete(); got != "[0 1]" {
		t.Fatalf("the complete flags of partitions 1 and 2 are %s, want only the second set", got)
	}

	server.Do(t, "DEL", at(t, s).pagePrefix(7)+c.Counts[0].Page)
	if o := s.Write(t.Context(), []presence.Change{c}); o[0].Err != nil || complete() != "[1 1]" {
		t.Fatalf("after the repair the write returns %v, and the complete flags are %s", o[0].Err, complete())
	}
}

// A node is suspended between writing members and counts, and resumes when another node has claimed the partition. It
// cannot write a count on any page, whether or not it wrote under its claim before.
func TestServerAZombieWritesNoCount(t *testing.T) {
	s := open(t, Config{Conn: redistest.Dial(t, redistest.Single(t).URL())})
	for _, wrote := range []bool{false, true} {
		zombie, err := s.Claim(t.Context(), "n", []int{1}, false)
		if err != nil {
			t.Fatal(err)
		}

		c := presence.Change{Claim: zombie[0], Sequence: 1, Complete: true}
		if wrote {
			if o := s.Write(t.Context(), []presence.Change{c}); o[0].Err != nil {
				t.Fatal(o[0].Err)
			}
		}

		// The zombie is about to make the calls of its next change when another node claims the partition.
		c.Sequence = 2
		c.Counts = []presence.PageUsers{{Page: "p", Users: 3}}
		var calls []*scriptRun
		for b, groups := range s.byBucket([]presence.Change{c}, make([]presence.Outcome, 1)) {
			for _, run := range s.countRuns(b, "PUBLISH", []presence.Change{c}, groups) {
				s.numberLocked(run, []presence.Change{c})
				if knows := run.Args[stampAt] != noStamp; knows != wrote {
					t.Fatalf("the zombie knows the stamp of bucket %d: %t, want %t", b, knows, wrote)
				}
				calls = append(calls, &run.scriptRun)
			}
		}

		if _, err := s.Claim(t.Context(), "other", []int{1}, false); err != nil {
			t.Fatal(err)
		}

		if err := s.conn.Run(t.Context(), calls); err != nil || len(calls) != s.cfg.Buckets {
			t.Fatal(len(calls), err)
		}

		for _, cl := range calls {
			if got := cl.Reply.([]any)[1]; got != string(statusFenced) {
				t.Fatalf("%v: status %v, want it fenced", cl.Keys, got)
			}
		}

		if got, err := s.Counts(t.Context(), []string{"p"}); err != nil || got[0].Users != 0 {
			t.Fatalf("the count is %+v, %v; want 0 users", got, err)
		}
	}
}

// A process claims twice, and its first claim arrives late. The late claim has no effect. A claim that is sent twice
// gets the same epoch.
func TestServerALateClaimDoesNothing(t *testing.T) {
	s := open(t, Config{Conn: redistest.Dial(t, redistest.Single(t).URL())})
	claim := func(number int) int64 {
		cl := &scriptRun{
			Script: scripts.Claim, Keys: []string{at(t, s).ownerKey(1), at(t, s).dirtyKey(1)},
			Args: []any{"n", "7", "self", number, 0, 0},
		}

		if err := s.conn.Run(t.Context(), []*scriptRun{cl}); err != nil {
			t.Fatal(err)
		}
		return cl.Reply.([]any)[0].(int64)
	}

	first, second := claim(1), claim(2)
	if first >= second {
		t.Fatalf("the second claim got epoch %d, want more than %d", second, first)
	}

	if got := claim(1); got != -1 {
		t.Errorf("the late claim got epoch %d, want -1", got)
	}
	if got := claim(2); got != second {
		t.Errorf("the repeated claim got epoch %d, want %d", got, second)
	}
}

// open returns a store that ends with the test.
func open(t testing.TB, cfg Config) *Store {
	t.Helper()
	s := Open(cfg)
	t.Cleanup(func() { _ = s.Close() })
	return s
}

// at returns the keyspace of the store.
func at(t testing.TB, s *Store) *keyspace {
	t.Helper()
	if err := s.learnFormat(t.Context()); err != nil {
		t.Fatal(err)
	}

	return s.at()
}

var evenKeys = newKeyspace(formatEven, presence.DefaultPartitions, presence.DefaultBuckets)

// BucketKey returns a key of a bucket, for a Redis that this release has initialized with default settings.
func BucketKey(bucket int, rest string) string { return evenKeys.buckets[bucket] + rest }

// PartitionKey returns a key of a partition in such a Redis.
func PartitionKey(partition int, rest string) string { return evenKeys.partitions[partition] + rest }

// listen watches all buckets. The returned function waits for a publication that ok accepts.
func listen(t *testing.T, s *Store) (await func(func(presence.Publication) bool)) {
	t.Helper()
	all := make([]int, s.cfg.Buckets)
	for i := range all {
		all[i] = i
	}

	published := make(chan presence.Publication, 1024)
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		s.Watch(ctx, all, func(p presence.Publication) { published <- p })
	}()

	t.Cleanup(func() {
		stop()
		<-done
	})

	return func(ok func(presence.Publication) bool) {
		t.Helper()
		for limit := time.After(testkit.Timeout); ; {
			select {
			case p := <-published:
				if ok(p) {
					return
				}
			case <-limit:
				t.Fatal("the watcher did not receive the publication")
			}
		}
	}
}

func lost(times int) func(presence.Publication) bool {
	buckets := map[int]int{}
	return func(p presence.Publication) bool {
		if p.Lost {
			buckets[p.Bucket]++
		}
		n := 0
		for _, v := range buckets {
			if v >= times {
				n++
			}
		}

		return n == presence.DefaultBuckets
	}
}

// A subscription that receives nothing, because the server hangs or the network drops all packets, is closed and made
// anew.
func TestClockASilentSubscriptionIsNoticed(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	s := open(t, Config{Conn: redistest.Dial(t, server.URL())})
	s.ping = 200 * time.Millisecond
	await := listen(t, s)
	await(lost(1))

	// The connection stays open, and no answer comes.
	server.Pause()
	time.Sleep(5 * s.ping)
	server.Resume()

	topics := presence.CountTopics([]string{"p"})
	gateways := 0
	await(func(p presence.Publication) bool {
		// The endpoint may be attached after the bucket was lost and before it is subscribed to again. Then this
		// watcher does not get its publication. So every loss of the bucket attaches another endpoint.
		if p.Lost && p.Bucket == topics[0].Bucket(presence.DefaultBuckets) {
			gateways++
			if _, err := s.Attach(t.Context(), fmt.Sprint("g", gateways), topics); err != nil {
				t.Fatal(err)
			}
		}

		return len(p.Endpoints) == 1
	})
}

// A Redis Cluster before version 7 has no sharded channels, so the store uses classic ones.
func TestServerAnOldClusterHearsClassicChannels(t *testing.T) {
	s := open(t, Config{Conn: redistest.Dial(t, redistest.ThreeMasters(t).URL())})
	c, err := s.conn.Known(t.Context())
	if err != nil || c.Publish != "SPUBLISH" {
		t.Fatalf("the Cluster is %+v, %v; want SPUBLISH", c, err)
	}

	// From here on the store treats the Cluster as one of a version before 7.
	c.Publish = "PUBLISH"
	await := listen(t, s)
	await(lost(1))

	for i := range 20 {
		page := fmt.Sprint("p", i)
		if _, err := s.Attach(t.Context(), "g", presence.CountTopics([]string{page})); err != nil {
			t.Fatal(err)
		}

		await(func(p presence.Publication) bool {
			return len(p.Endpoints) == 1 && p.Endpoints[0].Topic == presence.CountTopic(page)
		})
	}
}

func newWatcher(backlog int) *watcher {
	conn := &redisconn.Runner{
		Metrics: &redisconn.Metrics{Gaps: prometheus.NewCounter(prometheus.CounterOpts{Name: "gaps"})},
	}
	return &watcher{
		s: &Store{cfg: Config{Backlog: backlog}, conn: conn}, wake: make(chan struct{}, 1),
		feeds: map[int]*feed{1: {}, 2: {}},
	}
}

// TestWatcherTellsWhatItLost: a watcher reports a bucket as lost when a publication is missing or malformed, or too
// many wait.
func TestWatcherTellsWhatItLost(t *testing.T) {
	for name, tc := range map[string]struct {
		published []string // to bucket 1
		lost      bool
		todo      int
	}{
		"in order":              {[]string{"1 0 0 \n", "2 0 0 \n", "3 0 0 \n"}, false, 3},
		"any beginning":         {[]string{"17 0 0 \n", "18 0 0 \n"}, false, 2},
		"a gap":                 {[]string{"1 0 0 \n", "3 0 0 \n"}, true, 0},
		"from the beginning":    {[]string{"5 0 0 \n", "1 0 0 \n"}, true, 0},
		"twice":                 {[]string{"1 0 0 \n", "1 0 0 \n"}, true, 0},
		"more than there is to": {[]string{"1 0 0 \n", "2 0 0 \nmore than the backlog has room for"}, true, 0},
		"after that nothing":    {[]string{"1 0 0 \n", "3 0 0 \n", "4 0 0 \n"}, true, 0},
		"not ours":              {[]string{"hello"}, false, 0},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWatcher(30)

			for _, p := range tc.published {
				w.Received(1, p)
			}

			// Bucket 3 is not watched, so its publications are ignored.
			w.Received(3, "1 0 0 \n")
			lost, todo := w.take()
			if slices.Contains(lost, 1) != tc.lost || len(todo) != tc.todo {
				t.Fatalf("lost buckets %v, %d publications; want bucket 1 lost: %t, and %d",
					lost, len(todo), tc.lost, tc.todo)
			}
		})
	}
}

// Publications from before a loss must not be delivered after the bucket was read again: they would restore endpoints
// that have gone since.
func TestLostDropsWhatWaits(t *testing.T) {
	w := newWatcher(100)
	w.Received(1, "1 0 0 \n")
	w.Received(2, "1 0 0 \n")
	w.Subscribed(nil, 1)
	w.Received(2, "2 0 0 \n")
	lost, todo := w.take()
	if !slices.Equal(lost, []int{1}) || len(todo) != 2 || todo[0].bucket != 2 || w.bytes != 0 {
		t.Fatalf("lost buckets %v, waiting %+v; want bucket 1 lost, and the publications of bucket 2", lost, todo)
	}
}

func FuzzParsePublication(f *testing.F) {
	f.Add("1 0 0 \nu 10 12 1700000000000 7\ncount//a b5 1700000000+ 8 2\ncount//pgw- 8 2\ncount//pgw")
	f.Add("1 1 1 \n")
	f.Add("1 0 1 eu\n" + aCount + aCount)
	f.Add("1 0 0 \nu 9 5 1 7\nshort")
	f.Add("1 0 0 \n+ 18446744073709551615 1\nx")
	f.Fuzz(func(t *testing.T, payload string) {
		p, err := parsePublication(3, payload)
		if err != nil && !errors.Is(err, errPublication) {
			t.Fatal(err)
		}
		if err != nil {
			return
		}

		for _, u := range p.Updates {
			if u.Topic.Check() != nil || len(u.Key) > len(payload) {
				t.Fatalf("%q was parsed as the update %+v, which is invalid or longer", payload, u)
			}
		}
	})
}

// aCount is the encoded count of page "pq", in the format of publish.lua.
const aCount = "c\x00\x02pq" + "\x00\x00\x00\x01\x02" + "\x00\x65\x53\xf1\x00" + "\x00\x01\x8b\xcf\xe5\x68\x00" +
	"\x00\x00\x00\x00\x02\x03"

func TestParsePublication(t *testing.T) {
	p, err := parsePublication(3,
		"9 1 1 eu,u\nu 11 8 1700000000000 7\nlevel/s/a/b5 1 17 1"+aCount+"- 8 2\ncount//pgw+ 8 2\nlevel//qgw")
	if err != nil || !p.Lost || p.Bucket != 3 || len(p.Updates) != 2 || len(p.Endpoints) != 2 {
		t.Fatalf("got %+v, %v; want a lost bucket 3 with two updates and two endpoints", p, err)
	}

	level := presence.Update{
		Topic: presence.Topic{
			Site: presence.SiteOf("s"), Kind: presence.KindOf("level"), Key: "a/b",
		}, Stale: true, Value: "5 1 17 1",
		Version: presence.Version{Incarnation: 1700000000000, Sequence: 7},
	}

	count := presence.Update{
		Topic: presence.CountTopic("pq"), Stale: true, Value: "258 1700000000 eu,u",
		Version: presence.Version{Incarnation: 1700000000000, Sequence: 515},
	}

	if p.Updates[0] != level || p.Updates[1] != count {
		t.Errorf("the updates are %+v, want %+v and %+v", p.Updates, level, count)
	}

	if e := p.Endpoints; e[0] != (presence.Endpoint{Topic: presence.CountTopic("p"), Gateway: "gw", Gone: true}) ||
		e[1] != (presence.Endpoint{Topic: presence.Topic{Kind: presence.KindOf("level"), Key: "q"}, Gateway: "gw"}) {
		t.Errorf("the endpoints are %+v", e)
	}

	for _, bad := range []string{
		"", "1 0 \n", "1 0 0 ", "1 0 0 \n" + aCount[:len(aCount)-1], "1 0 0 \nc\x00\x00" + aCount[5:], "1 0 0 \nc",
		"1 0 0 \nu 1 1 1\nab", "1 0 0 \nu 8 1 1 1 1\ncount//pv", "1 0 0 \nx 8 1\ncount//pv",
		"1 0 0 \n+ 8 2 3 4\ncount//pgw",
		"1 0 0 \nu 5 1 1 1\ncountv", "1 0 0 \nu 8 9 1 1\ncount//pv", "1 0 0 \nu 8 18446744073709551615 1 1\ncount//pv",
	} {
		if p, err := parsePublication(3, bad); !errors.Is(err, errPublication) {
			t.Errorf("%q is parsed as %+v, %v; want errPublication", bad, p, err)
		}
	}
}
