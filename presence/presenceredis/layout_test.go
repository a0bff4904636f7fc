package presenceredis

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"testing"

	"pgregory.net/rapid"

	"headcount/internal/redistest"
	"headcount/internal/testkit"
	"headcount/presence"
	"headcount/presence/pncounter"
)

// A user moves to another hash only when the user's hash is split or removed, and to the one in which shardOf looks for
// the user. resize.lua relies on this.
func TestSharesMoveOneAtATime(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2)) // users are keyed hashes
	users := make([]presence.User, 20_000)
	for i := range users {
		users[i] = presence.User(random.Uint64())
	}

	for n := 1; n < 300; n++ {
		used := map[int]bool{}
		for _, u := range users {
			was, is := shardOf(u, n), shardOf(u, n+1)
			// Hash n is new, and gets only users of its neighbour.
			if was != is && (was != neighbour(n+1) || is != n) {
				t.Fatalf("from %d to %d hashes user %d moves from %d to %d", n, n+1, u, was, is)
			}

			used[was] = true
		}

		if len(used) != n {
			t.Fatalf("%d of %d hashes are used", len(used), n)
		}
	}
}

// stored returns what an owner of the partition loads: its members, and the number of hashes that they are in.
func stored(t *rapid.T, s *Store, claim presence.Claim) (members map[presence.Member]bool, shares int) {
	snaps, err := s.Load(context.Background(), []presence.Claim{claim})
	if err != nil {
		t.Fatal(err)
	}

	members = map[presence.Member]bool{}
	for _, m := range snaps[0].Members {
		if members[m] {
			t.Fatalf("%+v is found twice", m)
		}
		members[m] = true
	}

	return members, s.partitions[claim.Partition].shards
}

// Whatever users come and go, this owner and the next one find all members. The number of hashes suits the number of
// members.
func TestServerMembersAreFoundInAnyNumberOfShares(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	cfg := Config{Conn: redistest.Dial(t, server.URL())}
	s, next := open(t, cfg), open(t, cfg)
	seq := uint64(0)
	rapid.Check(t, func(rt *rapid.T) {
		owner := s
		claims, err := owner.Claim(t.Context(), "n", []int{1}, false)
		if err != nil {
			rt.Fatal(err)
		}

		seq++
		want := map[presence.Member]bool{}

		write := func(c presence.Change) {
			seq++
			c.Claim = claims[0]
			c.Sequence = seq
			if o := owner.Write(t.Context(), []presence.Change{c}); o[0].Err != nil {
				rt.Fatal(o[0].Err)
			}
		}

		write(presence.Change{Reset: true})
		number := presence.User(0)
		for range rapid.IntRange(1, 6).Draw(rt, "changes") {
			c := presence.Change{Reset: rapid.IntRange(0, 5).Draw(rt, "reset") == 0}
			if c.Reset {
				for m := range want {
					c.Members = append(c.Members, presence.MemberChange{Member: m})
				}
			}

			// These numbers are below and above the sizes at which hashes are split.
			for range rapid.SampledFrom([]int{0, 10, 900, 3000}).Draw(rt, "come") {
				number++
				m := presence.Member{User: number * 0x9E3779B97F4A7C15, Page: fmt.Sprint("/", number%7)}
				want[m] = true
				c.Members = append(c.Members, presence.MemberChange{Member: m})
			}
			going := rapid.SampledFrom([]int{0, 10, 2500}).Draw(rt, "go")
			for m := range want {
				if going == 0 {
					break
				}
				going--
				delete(want, m)
				c.Members = append(c.Members, presence.MemberChange{Member: m, Gone: true})
			}
			write(c)

			// Another process takes the partition. It does not know how the members are divided among hashes.
			if rapid.IntRange(0, 3).Draw(rt, "another owner") == 0 {
				owner = map[*Store]*Store{s: next, next: s}[owner]
				claims, err = owner.Claim(t.Context(), "n", []int{1}, false)
				if err != nil {
					rt.Fatal(err)
				}
			}

			got, shares := stored(rt, owner, claims[0])
			if !maps.Equal(got, want) {
				rt.Fatalf("%d members are found in %d hashes, want %d members", len(got), shares, len(want))
			}

			if most := len(want) / shares; most > perShard {
				rt.Fatalf("%d members in %d hashes are more than %d per hash", len(want), shares, perShard)
			}
		}

		// Hashes that are not needed any more are removed, some with each change.
		for range 200 {
			write(presence.Change{})
		}

		got, shares := stored(rt, owner, claims[0])
		if !maps.Equal(got, want) || shares > 3*shardsFor(len(want)) {
			rt.Fatalf("at rest %d of %d members are found in %d hashes", len(got), len(want), shares)
		}
	})
}

// After a crash between any two runs the next owner finds all members, even if the runs change the number of hashes.
func TestServerACrashWhileSharesGrowLosesNobody(t *testing.T) {
	s := open(t, Config{Conn: redistest.Dial(t, redistest.Single(t).URL())})
	claims, err := s.Claim(t.Context(), "n", []int{1}, false)
	if err != nil {
		t.Fatal(err)
	}

	c := presence.Change{Claim: claims[0], Sequence: 1}
	for i := range presence.User(1500) {
		c.Members = append(c.Members, presence.MemberChange{
			Member: presence.Member{User: i * 0x9E3779B97F4A7C15, Page: "p"},
		})
	}
	if o := s.Write(t.Context(), []presence.Change{c}); o[0].Err != nil {
		t.Fatal(o[0].Err)
	}

	from := s.partitions[1].shards
	for _, to := range []int{from + 100, 3} {
		for _, cl := range s.resizeRuns(claims[0], from, to) {
			cl.Args[0] = claims[0].Epoch
			if err := s.conn.Run(t.Context(), []*scriptRun{cl}); err != nil || cl.Reply.(int64) != 0 {
				t.Fatal(cl.Reply, err)
			}

			// The process crashes here, and the next owner finds everybody.
			claims, err = s.Claim(t.Context(), "n", []int{1}, false)
			if err != nil {
				t.Fatal(err)
			}

			snaps, err := s.Load(t.Context(), claims)
			if err != nil || len(snaps[0].Members) != len(c.Members) {
				t.Fatalf("on the way from %d to %d hashes %d members are found: %v",
					from, to, len(snaps[0].Members), err)
			}

			// The run is repeated too late, and moves no user.
			late := *cl
			late.Args = append([]any{claims[0].Epoch}, cl.Args[1:]...)
			err = s.conn.Run(t.Context(), []*scriptRun{&late})
			if err != nil || late.Reply.(int64) != statusResharded-'0' {
				t.Fatalf("the late run is answered %v, %v; want that the hashes have changed", late.Reply, err)
			}
		}

		from = s.partitions[1].shards
	}
}

// empties returns how many pages Redis has, and how many of them do not expire.
func empties(t *testing.T, s *Store) (pages, forever int) {
	t.Helper()
	err := s.conn.Do(t.Context(), func(ctx context.Context, c *client) error {
		keys, err := c.Keys(ctx, prefix+"{b*}:c:page*").Result()
		for _, key := range keys {
			pages++
			if c.TTL(ctx, key).Val() < 0 {
				forever++
			}
		}

		return err
	})

	if err != nil {
		t.Fatal(err)
	}

	return pages, forever
}

// own claims all partitions and completes them with the given counts.
func own(t *testing.T, s *Store, again bool, seq uint64, pages map[string]int64) []presence.Claim {
	t.Helper()
	all := make([]int, s.cfg.Partitions)
	for i := range all {
		all[i] = i
	}

	claims, err := s.Claim(t.Context(), "n", all, again)
	if err != nil {
		t.Fatal(err)
	}

	changes := make([]presence.Change, len(claims))
	for i, c := range claims {
		changes[i] = presence.Change{Claim: c, Sequence: seq, Reset: true, Complete: true}
	}

	for page, n := range pages {
		changes[1].Counts = append(changes[1].Counts, presence.PageUsers{Page: page, Users: n})
	}

	for _, o := range s.Write(t.Context(), changes) {
		if o.Err != nil {
			t.Fatal(o.Err)
		}
	}

	return claims
}

// Pages that became empty during an outage of Redis are never written again. They expire all the same, and pages with
// users do not.
func TestClockPagesThatEmptiedUnseenExpire(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t, redistest.Durable...)
	s := open(t, Config{Conn: redistest.Dial(t, server.URL())})

	pages := map[string]int64{}
	for i := range 800 {
		pages[fmt.Sprint("page", i)] = 2
	}

	own(t, s, false, 1, pages)
	if n, forever := empties(t, s); n != 800 || forever != 800 {
		t.Fatalf("there are %d pages, of which %d never expire; want 800 of 800", n, forever)
	}

	server.Restart(t)
	stay := map[string]int64{"page7": 1, "page8": 2}

	testkit.Eventually(t, "Redis is back", func() bool {
		_, err := s.Generation(t.Context())
		return err == nil
	})

	// The pages of users who left during the outage are not written by anybody.
	own(t, s, true, 2, stay)
	testkit.Eventually(t, "all but two pages expire", func() bool {
		n, forever := empties(t, s)
		return n == 800 && forever == 2
	})

	got, err := s.Counts(t.Context(), []string{"page7", "page9"})
	if err != nil || got[0].Users != 1 || got[1].Users != 0 {
		t.Fatalf("the counts are %+v, %v; want 1 and 0", got, err)
	}
}

// A page also expires if a rebuild finds its count at 0, or if 0 is written again.
func TestServerPagesWrittenAtZeroExpire(t *testing.T) {
	s := open(t, Config{Conn: redistest.Dial(t, redistest.Single(t).URL())})
	claims := own(t, s, false, 1, map[string]int64{"page": 3})

	write := func(seq uint64, n int64) {
		o := s.Write(t.Context(), []presence.Change{
			{Claim: claims[1], Sequence: seq, Counts: []presence.PageUsers{{Page: "page", Users: n}}},
		})
		if o[0].Err != nil {
			t.Fatal(o[0].Err)
		}
	}

	write(2, 0)
	key := at(t, s).pagePrefix(presence.Bucket("page", s.cfg.Buckets)) + "page"

	c, err := s.conn.Known(t.Context())
	if err != nil {
		t.Fatal(err)
	}

	c.Persist(t.Context(), key) // simulates a failover that lost the expiry
	write(3, 0)
	if _, forever := empties(t, s); forever != 0 {
		t.Fatal("a page whose count is 0 never expires")
	}

	write(4, 1)
	if _, forever := empties(t, s); forever != 1 {
		t.Fatal("a page with users expires")
	}
}

// The number of empty pages is bounded. The pages that have been empty longest are forgotten, and come back with a
// higher version. If another program has taken the key of such a page, the key is not deleted, and the sweep does not
// try it again and again.
func TestServerEmptyPagesAreBounded(t *testing.T) {
	s := open(t, Config{Conn: redistest.Dial(t, redistest.Single(t).URL()), Buckets: 1, EmptyPages: 100})
	claims := own(t, s, false, 1, nil)

	write := func(seq uint64, page string, n int64) presence.Count {
		o := s.Write(t.Context(), []presence.Change{
			{Claim: claims[1], Sequence: seq, Counts: []presence.PageUsers{{Page: page, Users: n}}},
		})
		if o[0].Err != nil {
			t.Fatal(o[0].Err)
		}
		return o[0].Counts[0]
	}

	c, err := s.conn.Known(t.Context())
	if err != nil {
		t.Fatal(err)
	}

	seq := uint64(1)
	first := presence.Count{}
	for i := range 300 {
		page := fmt.Sprintf("page%03d", i)
		// Each page gets a user, who leaves at once.
		write(seq+1, page, 1)
		seq += 2
		empty := write(seq, page, 0)
		switch i {
		case 0:
			first = empty
		case 1:
			c.Set(t.Context(), at(t, s).pagePrefix(0)+page, "theirs", 0)
		}
	}
	seq++
	write(seq, "page stays", 1)
	testkit.Eventually(t, "the pages are within their bound", func() bool {
		n, _ := empties(t, s)
		return n <= 102 && c.ZCard(t.Context(), at(t, s).emptiesKey(0)).Val() <= 100
	})

	if is := c.Get(t.Context(), at(t, s).pagePrefix(0)+"page001").Val(); is != "theirs" {
		t.Errorf("the key of another program has %q, want \"theirs\"", is)
	}
	if c.Exists(t.Context(), at(t, s).pagePrefix(0)+"page000").Val() != 0 ||
		c.Exists(t.Context(), at(t, s).pagePrefix(0)+"page299").Val() != 1 {
		t.Error("the forgotten page is not the one that has been empty longest")
	}

	if got, err := s.Counts(t.Context(), []string{"page stays"}); err != nil || got[0].Users != 1 {
		t.Errorf("the page with a user is %+v, %v; want 1", got, err)
	}

	if again := write(seq+1, "page000", 1); !again.Newer(first) {
		t.Errorf("the page came back as %+v, want a newer version than %+v", again, first)
	}
}

// The same holds in a region that has no users of its own, so that no script changes its counts: pages that the users
// of another region have left, or that it has lost, are bounded and expire.
func TestServerEmptyPagesOfAnotherRegionAreBounded(t *testing.T) {
	cfg := Config{
		Conn: redistest.Dial(t, redistest.Single(t).URL()), Buckets: 1, EmptyPages: 100, Peers: []string{"eu"},
	}
	s := open(t, cfg)
	own(t, s, false, 1, nil)

	peer := NewPeer(s, "eu", "us")
	merge := func(b pncounter.Batch, pages int, pair pncounter.Pair) {
		t.Helper()
		b.Region = "eu"
		b.Complete = true
		for i := range pages {
			b.Pages = append(b.Pages, pncounter.PagePair{Page: fmt.Sprintf("page%03d", i), Pair: pair})
		}

		acks, err := peer.Merge(t.Context(), []pncounter.Batch{b})
		if err != nil || acks[0].Status != pncounter.Merged {
			t.Fatalf("the batch is answered %+v, %v", acks, err)
		}
	}

	here := pncounter.Pair{Incarnation: 5, Increments: 1}
	merge(pncounter.Batch{Log: 5, To: 300, Floor: 5}, 300, here)
	left := pncounter.Pair{Incarnation: 5, Increments: 1, Decrements: 1}
	merge(pncounter.Batch{Log: 5, From: 300, To: 450, Floor: 5}, 150, left)
	merge(pncounter.Batch{Log: 9, Floor: 9}, 0, pncounter.Pair{}) // the other region has lost its data

	testkit.Eventually(t, "the pages are within their bound, and expire", func() bool {
		if _, err := s.Sweep(t.Context(), 0, 0); err != nil { // as each region does all the time
			t.Fatal(err)
		}
		n, forever := empties(t, s)
		return n <= 102 && forever == 0
	})
}
