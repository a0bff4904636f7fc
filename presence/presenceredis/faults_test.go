package presenceredis_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/rs/zerolog"

	"headcount/internal/redistest"
	"headcount/internal/testkit"
	"headcount/presence"
	"headcount/presence/presenceredis"
)

// cluster owns all partitions of a store, as running nodes do.
type cluster struct {
	t      testing.TB
	s      *presenceredis.Store
	claims []presence.Claim
	seq    uint64
	users  map[string]map[int]int64 // page -> partition -> users
}

func start(t testing.TB, s *presenceredis.Store) *cluster {
	t.Helper()
	c := &cluster{t: t, s: s, users: map[string]map[int]int64{}}
	c.claim(false)
	return c
}

// claim claims all partitions and writes all their counts and members.
func (c *cluster) claim(again bool) {
	c.t.Helper()
	if err := c.tryClaim(again); err != nil {
		c.t.Fatal(err)
	}
}

func (c *cluster) tryClaim(again bool) error {
	claims, err := c.s.Claim(c.t.Context(), "node", upTo(presence.DefaultPartitions), again)
	if err != nil {
		return err
	}

	c.claims = claims
	c.seq++

	changes := make([]presence.Change, len(claims))
	for i, cl := range claims {
		// After a reset the store has only what this change writes.
		changes[i] = presence.Change{Claim: cl, Sequence: c.seq, Reset: true, Complete: true}
		for page, users := range c.users {
			if n := users[cl.Partition]; n > 0 {
				changes[i].Counts = append(changes[i].Counts, presence.PageUsers{Page: page, Users: n})
				changes[i].Members = append(changes[i].Members, presence.MemberChange{
					Member: presence.Member{User: user(cl.Partition), Page: page},
				})
			}
		}
	}

	// If any of the writes failed, the caller has to claim again.
	var errs []error
	for _, o := range c.s.Write(c.t.Context(), changes) {
		errs = append(errs, o.Err)
	}

	return errors.Join(errs...)
}

// user returns a user of the partition.
func user(partition int) presence.User {
	return presence.User(partition + 7*presence.DefaultPartitions)
}

// try writes the number of users that one partition has on a page.
func (c *cluster) try(partition int, page string, users int64) presence.Outcome {
	c.seq++
	return c.s.Write(c.t.Context(), []presence.Change{{
		Claim: c.claims[partition], Sequence: c.seq,
		Members: []presence.MemberChange{
			{Member: presence.Member{User: user(partition), Page: page}, Gone: users == 0},
		},
		Counts: []presence.PageUsers{{Page: page, Users: users}},
	}})[0]
}

func (c *cluster) set(partition int, page string, users int64) presence.Count {
	c.t.Helper()
	o := c.try(partition, page, users)
	if o.Err != nil {
		c.t.Fatal(o.Err)
	}

	if c.users[page] == nil {
		c.users[page] = map[int]int64{}
	}
	c.users[page][partition] = users

	return o.Counts[0]
}

func counts(t testing.TB, s *presenceredis.Store, pages ...string) []presence.Count {
	t.Helper()
	got, err := s.Counts(t.Context(), pages)
	if err != nil {
		t.Fatal(err)
	}
	return got
}

// right checks that all counts are exact and not stale, and that all versions are newer than before.
func (c *cluster) right(before map[string]presence.Count) {
	c.t.Helper()
	for page, users := range c.users {
		want := int64(0)
		for _, n := range users {
			want += n
		}

		got := counts(c.t, c.s, page)[0]
		if got.Users != want || got.Stale {
			c.t.Errorf("%q is %+v, want %d and not stale", page, got, want)
		}
		if old, ok := before[page]; ok && !got.Newer(old) {
			c.t.Errorf("%q has version %s, want one newer than %s", page, got.Version, old.Version)
		}
	}
}

func (c *cluster) versions() map[string]presence.Count {
	before := map[string]presence.Count{}
	for page := range c.users {
		before[page] = counts(c.t, c.s, page)[0]
	}
	return before
}

func TestServerEmptiedRedisIsFilledAgain(t *testing.T) {
	for name, servers := range map[string]func() (string, []*redistest.Server){
		"one server": func() (string, []*redistest.Server) {
			s := redistest.Single(t)
			return s.URL(), []*redistest.Server{s}
		},
		"one master of three": func() (string, []*redistest.Server) {
			c := redistest.ThreeMasters(t)
			return c.URL(), c.Masters[1:2]
		},
	} {
		t.Run(name, func(t *testing.T) {
			url, flush := servers()
			c := start(t, open(t, url))
			for i := range 300 {
				c.set(i%presence.DefaultPartitions, fmt.Sprint("page ", i%60), int64(i%5+1))
			}
			c.set(1, "gone with the data", 3)
			before := c.versions()

			gen, err := c.s.Generation(t.Context())
			if err != nil {
				t.Fatal(err)
			}

			for _, s := range flush {
				s.Flush(t)
			}

			after, err := c.s.Generation(t.Context())
			if err != nil || after == gen {
				t.Fatalf("generation %d after %d, %v", after, gen, err)
			}
			if name != "one master of three" { // in the Cluster, page 5 may be at any of the masters
				// The owner must notice the loss, and a reader must not take 0 for the right count.
				if o := c.try(5, "page 5", 9); !errors.Is(o.Err, presence.ErrLost) {
					t.Fatalf("a write after the loss: %v, want ErrLost", o.Err)
				}

				if got := counts(t, c.s, "page 5")[0]; !got.Stale {
					t.Fatalf("a read after the loss: %+v, want it stale", got)
				}
			}

			delete(c.users, "gone with the data")
			c.claim(true)
			c.right(before)

			// A page that is not written again has no users. When it comes back it must not repeat a version.
			got := counts(t, c.s, "gone with the data")[0]
			if got.Users != 0 || !got.Newer(before["gone with the data"]) {
				t.Fatalf("a page that was not written again: %+v, want 0 and newer than %+v",
					got, before["gone with the data"])
			}

			if got := counts(t, c.s, "never seen")[0]; got.Users != 0 || got.Stale {
				t.Fatalf("a page that was never joined: %+v, want 0 and not stale", got)
			}

			if back := c.set(3, "gone with the data", 1); !back.Newer(got) {
				t.Fatalf("the page came back as %+v, want a newer version than %+v", back, got)
			}
		})
	}
}

func TestClockRegressedRedisIsRebuilt(t *testing.T) {
	t.Parallel()

	// The dump that SAVE writes is older than everything that follows it.
	server := redistest.Start(t)
	c := start(t, open(t, server.URL()))
	c.set(1, "p", 2)
	c.set(2, "p", 3)
	c.set(3, "left since", 4)
	c.set(4, "left for good", 4)
	server.Do(t, "SAVE")

	// Versions grow beyond those of the dump. None of them may be assigned again.
	for i := range 50 {
		c.set(1, "p", int64(i+10))
	}

	c.set(3, "left since", 0)
	c.set(5, "new since", 5)
	before := c.versions()
	gen := c.claims[0].Generation

	server.Kill()
	server.Restart(t) // with the data of the SAVE
	testkit.Eventually(t, "redis back", func() bool {
		_, err := c.s.Generation(t.Context())
		return err == nil
	})

	if after, _ := c.s.Generation(t.Context()); after == gen {
		t.Fatal("the generation is the same after a restart")
	}

	delete(c.users, "left for good")
	// The claims of a process that was suspended during the restart.
	zombie := c.claims
	c.claim(true)
	c.right(before)

	for _, page := range []string{"left since", "left for good"} {
		if got := counts(t, c.s, page)[0]; got.Users != 0 || !got.Newer(before[page]) {
			t.Errorf("%q, not written since: %+v, want 0 and newer than %+v", page, got, before[page])
		}
	}

	// A claim from before the loss permits no write.
	o := c.s.Write(t.Context(), []presence.Change{
		{Claim: zombie[1], Sequence: 1000, Counts: []presence.PageUsers{{Page: "p", Users: 1}}},
	})
	if !errors.Is(o[0].Err, presence.ErrFenced) {
		t.Errorf("a write under the former claim: %v, want ErrFenced", o[0].Err)
	}
}

// A proxy may switch processes to another server, and later back to the first one, whose data is older by then.
func TestServerAServerThatComesBackIsAnotherGeneration(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	c := start(t, open(t, server.URL()))
	c.set(1, "p", 2)
	server.Do(t, "SWAPDB", 0, 1)
	c.claim(true)
	c.set(1, "p", 3)
	before := c.versions()

	server.Do(t, "SWAPDB", 0, 1)
	c.claim(true)
	c.right(before)
}

// The same, but all processes were replaced while they used the other server, so none of them knows the first one.
func TestServerAServerThatNobodyRemembersIsAnotherGeneration(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	first := start(t, open(t, server.URL()))
	first.set(1, "p", 2)
	first.set(1, "forgotten", 2)

	server.Do(t, "SWAPDB", 0, 1)
	c := start(t, open(t, server.URL()))
	c.set(1, "p", 3)
	c.set(2, "p", 1)
	before := c.versions()

	server.Do(t, "SWAPDB", 0, 1)
	testkit.Eventually(t, "everything to be written again", func() bool { return c.tryClaim(true) == nil })
	c.right(before)
	if got := counts(t, c.s, "forgotten")[0]; got.Users != 0 {
		t.Errorf("a page of before is %+v, want it empty", got)
	}
}

// While counts are being rebuilt, an owner that has not claimed its partition again cannot write.
func TestClockAnOldGenerationWritesNothing(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	c := start(t, open(t, server.URL()))
	c.set(1, "p", 2)
	c.set(2, "p", 3)
	server.Do(t, "SAVE")
	server.Kill()
	server.Restart(t)

	// Another node is the first to claim after the loss. The first node has not noticed it yet.
	other := open(t, server.URL())
	var claims []presence.Claim
	testkit.Eventually(t, "a claim of the other node", func() (ok bool) {
		var err error
		claims, err = other.Claim(t.Context(), "other", []int{2}, true)
		return err == nil
	})

	testkit.Eventually(t, "a write under the old generation to be ErrLost", func() bool {
		return errors.Is(c.try(1, "p", 7).Err, presence.ErrLost)
	})
	o := other.Write(t.Context(), []presence.Change{
		{Claim: claims[0], Sequence: 1, Counts: []presence.PageUsers{{Page: "p", Users: 4}}},
	})
	if o[0].Err != nil || o[0].Counts[0].Users != 4 || !o[0].Counts[0].Stale {
		t.Fatalf("the first write under the new claim: %+v, want 4, stale", o[0])
	}
}

// After a loss, a process that claims its partitions again does not get those that another process has claimed since.
func TestServerANewerOwnerIsNotClaimedOver(t *testing.T) {
	server := redistest.Single(t)
	c, other := start(t, open(t, server.URL())), open(t, server.URL())
	// Another process takes partition 2.
	newer, err := other.Claim(t.Context(), "other", []int{2}, false)
	if err != nil {
		t.Fatal(err)
	}

	again, err := c.s.Claim(t.Context(), "node", []int{1, 2}, true)
	if err != nil || again[0].Epoch <= c.claims[1].Epoch || again[1].Epoch != 0 {
		t.Fatalf("claims %+v, %v; want 1 again and 2 refused", again, err)
	}

	// Both owners can write.
	for what, tc := range map[string]struct {
		s     *presenceredis.Store
		claim presence.Claim
	}{"of the newer owner": {other, newer[0]}, "of what was claimed again": {c.s, again[0]}} {
		o := tc.s.Write(t.Context(), []presence.Change{
			{Claim: tc.claim, Sequence: 1000, Counts: []presence.PageUsers{{Page: "p", Users: 1}}},
		})
		if o[0].Err != nil {
			t.Errorf("a write %s fails: %v", what, o[0].Err)
		}
	}

	// A first claim, unlike a repeated one, takes the partition from any owner.
	if taken, err := c.s.Claim(t.Context(), "node", []int{2}, false); err != nil || taken[0].Epoch <= newer[0].Epoch {
		t.Errorf("a first claim: %+v, %v; want a newer one", taken, err)
	}
}

// The masters of a Cluster forget their scripts, and the first call gets NOSCRIPT in the middle of its pipelines. It
// succeeds all the same.
func TestServerUnknownScriptsAreLoaded(t *testing.T) {
	servers := redistest.ThreeMasters(t)
	c := start(t, open(t, servers.URL()))
	for round := range 3 {
		for _, s := range servers.Masters {
			s.Do(t, "SCRIPT", "FLUSH")
		}

		change := presence.Change{Claim: c.claims[1], Sequence: 100 + uint64(round)}
		for i := range 2000 {
			page := fmt.Sprint("p", i)
			change.Members = append(change.Members, presence.MemberChange{
				Member: presence.Member{User: presence.User(i), Page: page},
			})
			change.Counts = append(change.Counts, presence.PageUsers{Page: page, Users: int64(round + 1)})
		}

		o := c.s.Write(t.Context(), []presence.Change{change})
		if o[0].Err != nil {
			t.Fatal(o[0].Err)
		}

		for _, n := range o[0].Counts {
			if n.Users != int64(round+1) {
				t.Fatalf("got %+v, want %d users", n, round+1)
			}
		}
	}
}

// The connections of a watcher to all masters of a Cluster break, and are made anew.
func TestServerADeadSubscriptionIsMadeAnew(t *testing.T) {
	servers := redistest.ThreeMasters(t)
	c := start(t, open(t, servers.URL()))
	var mu sync.Mutex
	lost := map[int]int{}
	received := map[string]int64{}
	watchAll(t, c.s, func(_ context.Context, p presence.Publication) {
		mu.Lock()
		defer mu.Unlock()
		if p.Lost {
			lost[p.Bucket]++
		}
		for _, u := range p.Updates {
			n, _ := presence.CountOf(u)
			received[n.Page] = n.Users
		}
	})

	times := func(n int) func() bool {
		return func() bool {
			mu.Lock()
			defer mu.Unlock()
			fewer := func(v int) bool { return v < n }
			return len(lost) == presence.DefaultBuckets &&
				!slices.ContainsFunc(slices.Collect(maps.Values(lost)), fewer)
		}
	}

	testkit.Eventually(t, "the first Lost", times(1))

	for _, s := range servers.Masters {
		s.Do(t, "CLIENT", "KILL", "TYPE", "pubsub")
	}

	testkit.Eventually(t, "Lost after the connections were killed", times(2))

	// A write that repeats a number of users is not published, so each attempt has one more.
	users := int64(0)
	testkit.Eventually(t, "a publication on the new subscription", func() bool {
		users++
		c.set(1, "after", users)
		mu.Lock()
		defer mu.Unlock()
		return received["after"] > 0
	})
}

// states receives from a store whether Redis answers.
type states chan bool

func (s states) StoreState(up bool) { s <- up }

func TestClockRedisComesAndGoes(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	server.Kill()

	states := make(states, 16)
	s := open(t, server.URL(), func(c *presenceredis.Config) { c.OnState = states })

	if _, err := s.Generation(t.Context()); !errors.Is(err, presence.ErrUnavailable) {
		t.Fatalf("Generation before Redis runs: %v, want ErrUnavailable", err)
	}
	for i := range 10 {
		if _, err := s.Counts(t.Context(), []string{"p"}); !errors.Is(err, presence.ErrUnavailable) {
			t.Fatalf("call %d of Counts before Redis runs: %v, want ErrUnavailable", i, err)
		}
	}

	want := func(up bool) {
		t.Helper()
		select {
		case got := <-states:
			if got != up {
				t.Fatalf("reported up=%t, want %t", got, up)
			}
		case <-time.After(testkit.Timeout):
			t.Fatalf("up=%t was not reported in time", up)
		}
	}

	server.Restart(t)
	want(true) // without any call

	c := start(t, s)
	c.set(1, "p", 2)
	server.Kill()

	var begin *testkit.Stopwatch
	testkit.Eventually(t, "writes to fail at once", func() bool {
		// Only the time of the last attempt counts: then the store knows that Redis is gone.
		begin = testkit.NewStopwatch(t)
		o := c.try(1, "p", 3)
		if !errors.Is(o.Err, presence.ErrUnavailable) {
			t.Fatalf("Write without Redis: %v, want ErrUnavailable", o.Err)
		}
		return len(states) > 0
	})

	if took := begin.Elapsed(); took > time.Second {
		t.Errorf("a write without Redis took %s, want 1s at most", took)
	}
	want(false)
	server.Restart(t)
	want(true)

	if o := c.try(1, "p", 3); !errors.Is(o.Err, presence.ErrLost) {
		t.Fatalf("a write into a Redis that came back empty: %v, want ErrLost", o.Err)
	}

	c.claim(true)
	c.right(nil)
}

func TestServerForeignDataIsNamed(t *testing.T) {
	server := redistest.Single(t)
	var log bytes.Buffer
	c := start(t, open(t, server.URL(),
		func(c *presenceredis.Config) { c.Log = zerolog.New(zerolog.SyncWriter(&log)) }))

	b := presence.Bucket("p", presence.DefaultBuckets)
	for _, key := range []string{
		presenceredis.PartitionKey(1, "o"), presenceredis.PartitionKey(1, "d"), presenceredis.PartitionKey(1, "m:0"),
		presenceredis.BucketKey(b, "c:p"), presenceredis.BucketKey(b, "f"), presenceredis.BucketKey(b, "s"),
		presenceredis.BucketKey(b, "r"),
	} {
		// An existing key is renamed meanwhile: the test needs its data afterwards.
		was, _ := server.Do(t, "EXISTS", key).(int64)
		if was == 1 {
			server.Do(t, "RENAME", key, key+"~")
		}
		server.Do(t, "ZADD", key, 1, "foreign")
		o := c.try(1, "p", 3)
		if !errors.Is(o.Err, presenceredis.ErrForeign) || !errors.Is(o.Err, presence.ErrUnavailable) {
			t.Errorf("Write while the key %s is foreign: %v, want ErrForeign", key, o.Err)
		}

		server.Do(t, "DEL", key)
		if was == 1 {
			server.Do(t, "RENAME", key+"~", key)
		}

		if o := c.try(1, "p", 3); o.Err != nil || o.Counts[0].Users != 3 {
			t.Errorf("Write after %s was repaired: %+v, want 3 users", key, o)
		}
		c.set(1, "p", 0)
	}

	server.Do(t, "SET", "hc:{c}:facts", "foreign")
	_, _, err := c.s.Renew(t.Context(), presence.Process{Name: "a"}, time.Second)
	if !errors.Is(err, presenceredis.ErrForeign) {
		t.Errorf("Renew: %v, want ErrForeign", err)
	}

	_ = c.s.Close() // nothing is logged from here on
	if n := strings.Count(log.String(), presenceredis.ErrForeign.Error()); n != 1 {
		t.Errorf("%d lines of the log are about foreign data, want 1:\n%s", n, log.String())
	}
}

// A write may fail halfway. The next owner loads the page that was not written, and finishes the write.
func TestServerUnwrittenPagesAreLoaded(t *testing.T) {
	server := redistest.Single(t)
	c := start(t, open(t, server.URL()))
	c.set(1, "a", 1)
	c.set(1, "b", 1)

	page := pageKey("a")
	server.Do(t, "RENAME", page, page+"~")
	server.Do(t, "SET", page, "so that the count cannot be written")

	// This change writes its members, and then fails to write the count.
	if o := c.try(1, "a", 0); o.Err == nil {
		t.Fatal("the write succeeded, though the key of the count is foreign")
	}
	c.set(1, "b", 2)
	c.set(1, "b", 3)
	server.Do(t, "RENAME", page+"~", page)

	// The first owner has ended, and nobody remembers the page that it could not write.
	next := open(t, server.URL())
	for range 2 { // the next owner may end before it writes, too
		claims, err := next.Claim(t.Context(), "next", []int{1}, false)
		if err != nil {
			t.Fatal(err)
		}
		snaps, err := next.Load(t.Context(), claims)
		if err != nil {
			t.Fatal(err)
		}

		if !slices.Contains(snaps[0].Pages, "a") {
			t.Fatalf("Load = %+v, want the page a, which must be written again", snaps[0])
		}

		o := next.Write(t.Context(), []presence.Change{
			{Claim: claims[0], Sequence: 1, Counts: []presence.PageUsers{{Page: "b", Users: 1}}},
		})
		if o[0].Err != nil {
			t.Fatal(o[0].Err)
		}
	}
	claims, _ := next.Claim(t.Context(), "next", []int{1}, false)
	if _, err := next.Load(t.Context(), claims); err != nil {
		t.Fatal(err)
	}

	write := func(seq uint64, pages ...string) {
		change := presence.Change{Claim: claims[0], Sequence: seq}
		for _, p := range pages {
			change.Counts = append(change.Counts, presence.PageUsers{Page: p})
		}
		if o := next.Write(t.Context(), []presence.Change{change}); o[0].Err != nil {
			t.Fatal(o[0].Err)
		}
	}

	// When these pages have been written, only those of the last change may be unwritten.
	write(1, "a", "b")
	write(2, "c")

	snaps, err := next.Load(t.Context(), claims)
	if err != nil || !slices.Equal(snaps[0].Pages, []string{"c"}) {
		t.Fatalf("Load = %+v, %v; want only the pages of the last change", snaps, err)
	}

	if got := counts(t, next, "a")[0]; got.Users != 0 {
		t.Fatalf("page a has %d users, want 0", got.Users)
	}
}

func TestServerEmptyPagesAreForgotten(t *testing.T) {
	server := redistest.Single(t)
	c := start(t, open(t, server.URL(), func(c *presenceredis.Config) { c.RememberFor = time.Second }))

	first := c.set(1, "p", 2)
	c.set(1, "p", 0)
	c.set(1, "kept", 1)
	c.set(1, "kept", 0)
	c.set(2, "kept", 1)

	testkit.Eventually(t, "p forgotten", func() bool { return counts(t, c.s, "p")[0] == presence.Count{Page: "p"} })
	if got := counts(t, c.s, "kept")[0]; got.Users != 1 {
		t.Fatalf("a page that is used again: %+v, want 1 user", got)
	}

	if back := c.set(1, "p", 1); !back.Newer(first) || back.Version.Incarnation == first.Version.Incarnation {
		t.Fatalf("the page came back with version %s, want a newer incarnation than %s", back.Version, first.Version)
	}
}

// A Redis that has lost its data may have a clock that is behind the former one. Versions grow all the same, because
// the processes know the highest incarnation.
func TestServerVersionsGrowAfterALossAlthoughTheClockWentBack(t *testing.T) {
	server := redistest.Single(t)
	c := start(t, open(t, server.URL()))

	ahead := uint64(time.Now().Add(time.Hour).UnixMilli())
	for _, key := range server.Do(t, "KEYS", "hc:{b*}:s").([]any) { // as if the counts began an hour from now
		server.Do(t, "HSET", key, "base", ahead)
	}

	first := c.set(1, "p", 1)
	if first.Version.Incarnation < ahead {
		t.Fatalf("the version is %s, want an incarnation of at least %d", first.Version, ahead)
	}
	server.Flush(t)
	c.claim(true)

	if back := counts(t, c.s, "p")[0]; back.Users != 1 || !back.Newer(first) {
		t.Fatalf("after the loss %+v, before %+v; want the same users and a newer version", back, first)
	}

	// A page that is new to Redis must not get a version that a page of its name had before the loss.
	fresh := presence.Count{Version: c.set(1, "q", 1).Version}
	if !fresh.Newer(presence.Count{Version: first.Version}) {
		t.Fatalf("a new page has version %s, want one newer than those from before the loss: %s",
			fresh.Version, first.Version)
	}
}

// The clock of Redis was an hour ahead when partitions were claimed, and is right when its data is lost. The owner's
// next claim is newer than its former one all the same, both for the owner, which has to find its members in any number
// of hashes, and for the buckets of a Cluster that lost nothing.
func TestServerClaimsGrowAfterALossAlthoughTheClockWentBack(t *testing.T) {
	for name, servers := range map[string]func() (url string, all, lossy []*redistest.Server){
		"one server": func() (string, []*redistest.Server, []*redistest.Server) {
			s := []*redistest.Server{redistest.Single(t)}
			return s[0].URL(), s, s
		},
		"one master of three": func() (string, []*redistest.Server, []*redistest.Server) {
			c := redistest.ThreeMasters(t)
			return c.URL(), c.Masters, c.Masters[1:2]
		},
	} {
		t.Run(name, func(t *testing.T) {
			url, all, lossy := servers()
			s := open(t, url)
			start(t, s)

			ahead := time.Now().Add(time.Hour).UnixMilli()
			for _, server := range all {
				for _, key := range server.Do(t, "KEYS", "hc:{p*}:o").([]any) {
					server.Do(t, "HSET", key, "epoch", ahead)
				}
			}
			c := start(t, s)
			if first := c.claims[1].Epoch; first <= uint64(ahead) {
				t.Fatalf("the epoch is %d, want one after %d", first, ahead)
			}

			for _, server := range lossy {
				server.Flush(t)
			}

			c.claim(true)

			// So many users that their members need several hashes, whose number the second change has to know.
			changes := make([]presence.Change, presence.DefaultPartitions)
			for p := range changes {
				changes[p].Claim = c.claims[p]
				changes[p].Counts = []presence.PageUsers{{Page: "p", Users: 200}}
				for i := range 200 {
					m := presence.Member{User: user(p) + presence.User(i*presence.DefaultPartitions), Page: "p"}
					changes[p].Members = append(changes[p].Members, presence.MemberChange{Member: m})
				}
			}

			for _, members := range []int{200, 1} {
				c.seq++
				for p := range changes {
					changes[p].Sequence = c.seq
					changes[p].Members = changes[p].Members[:members]
				}
				for p, o := range s.Write(t.Context(), changes) {
					if o.Err != nil {
						t.Fatalf("partition %d: %v", p, o.Err)
					}
				}
			}
		})
	}
}
