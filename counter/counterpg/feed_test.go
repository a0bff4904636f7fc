package counterpg

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"headcount/counter"
	"headcount/counter/countertest"
	"headcount/internal/pgtest"
	"headcount/internal/testkit"
)

// untilVersion waits until e hears this version last.
func untilVersion(t testing.TB, e *countertest.Ear, v counter.Version) []counter.Update {
	t.Helper()
	return e.Until(t, "version "+v.String(), func(heard []counter.Update) bool {
		return len(heard) > 0 && heard[len(heard)-1].Counter.Version == v
	})
}

// untilReread waits until e hears that the members are to be looked at again, at this version. A notification that comes
// after it may name more.
func untilReread(t testing.TB, e *countertest.Ear, v counter.Version) {
	t.Helper()
	e.Until(t, "the members are to be looked at again", func(heard []counter.Update) bool {
		return slices.ContainsFunc(heard, func(u counter.Update) bool { return u.Reread && u.Counter.Version == v })
	})
}

// TestServerMembersOfPeersAreNamed: two processes edit one set. A watcher of either hears who
// joined and left, and rereads nothing.
func TestServerMembersOfPeersAreNamed(t *testing.T) {
	t.Parallel()
	// A server of its own: others have theirs fall silent, and a feed that reconnects knows no names.
	url := pgtest.Start(t).Database(t)
	patient := func(c *Config) { c.PollEvery = time.Hour } // a poll that is faster than a notification knows no names
	stores := []*Store{open(t, url, patient), open(t, url, patient)}
	hears(t, stores[0], stores[1]) // what is committed before is never named
	hears(t, stores[1], stores[0])
	first, _ := countertest.Listen(t, stores[0], "m:1")
	second, _ := countertest.Listen(t, stores[1], "m:1")
	ears := []*countertest.Ear{first, second}
	const edits = 15 // of each store, with two changes each; a feed names all of them
	var wg sync.WaitGroup
	for i, s := range stores {
		wg.Go(func() {
			for n := range edits {
				r := s.Apply(t.Context(), []counter.Op{with("", edit("m:1", []string{fmt.Sprintf("%d of %d", n, i)}, nil)), with("", edit("m:1", nil, []string{fmt.Sprintf("%d of %d", n-1, i)}))})
				if r[0].Err != nil || r[1].Err != nil {
					t.Error(r)
				}
			}
		})
	}
	wg.Wait()
	want := map[string]bool{}
	for i := range stores {
		for n := range edits {
			want[fmt.Sprintf("%d of %d", n, i)] = n == edits-1
		}
	}
	for _, e := range ears {
		e.Until(t, "the last members", func(heard []counter.Update) bool {
			in := map[string]bool{}
			for _, u := range heard {
				if u.Reread {
					t.Fatalf("%+v", u)
				}
				for _, m := range u.Joined {
					in[m] = true
				}
				for _, m := range u.Left {
					in[m] = false
				}
			}
			// A member who joined and left between two updates may be in neither.
			for m, is := range want {
				if _, told := in[m]; !told && !is {
					in[m] = false
				}
			}
			return maps.Equal(in, want)
		})
	}
	// This is more than a notification holds: the peer reads again.
	var many []string
	for n := range 100 {
		many = append(many, fmt.Sprintf("%d%s", n, strings.Repeat("x", 100)))
	}
	v := apply(t, stores[0], with("", edit("m:1", many, nil))).Counters[0].Version
	heard := untilVersion(t, second, v)
	if last := heard[len(heard)-1]; !last.Reread {
		t.Errorf("%d joined; %+v", len(many), last)
	}
}

// TestServerWatchHealsAfterAnOutage: a watcher learns of changes that no notification told of.
func TestServerWatchHealsAfterAnOutage(t *testing.T) {
	server := pgtest.Single(t)
	url := server.Database(t)
	s := open(t, url, func(c *Config) { c.PollEvery = 400 * time.Millisecond })
	peer := open(t, url)
	apply(t, peer, with("", add("e:1", 1)))
	e, _ := countertest.Listen(t, s, "e:1", "e:2")
	// Its connections end while the peer changes something.
	hangUp(t, server, url)
	var r counter.Result
	testkit.Eventually(t, "the peer changes something", func() bool {
		r = peer.Apply(t.Context(), []counter.Op{with("again", add("e:1", 1))})[0]
		return r.Err == nil
	})
	untilVersion(t, e, r.Counters[0].Version)
	// This is a process that was killed between its commit and its notification.
	server.Exec(t, url, "update headcount_counters set value = 7, sequence = sequence + 1 where key = 'e:1'")
	v := r.Counters[0].Version
	v.Sequence++
	untilVersion(t, e, v)
}

// TestServerMovesThatNobodyToldAreFound: a process is killed between its commit and its notification, and another one tells of
// a later change of the same set before a poll sees what is missing.
func TestServerMovesThatNobodyToldAreFound(t *testing.T) {
	server := pgtest.Single(t)
	url := server.Database(t)
	s := open(t, url, func(c *Config) { c.PollEvery = 400 * time.Millisecond })
	peer := open(t, url)
	apply(t, peer, with("", edit("m:1", []string{"a"}, nil)))
	e, _ := countertest.Listen(t, s, "m:1")
	server.Exec(t, url, `update headcount_counters set value = 2, sequence = sequence + 1 where key = 'm:1';
		insert into headcount_members select set_id, 'b' from headcount_counters where key = 'm:1'`)
	v := apply(t, peer, with("", edit("m:1", []string{"c"}, nil))).Counters[0].Version
	untilReread(t, e, v)
}

// TestServerNotificationsOfAnOlderRelease: they name changes, and members only in these. All members are looked at again.
func TestServerNotificationsOfAnOlderRelease(t *testing.T) {
	server := pgtest.Single(t)
	url := server.Database(t)
	s, peer := open(t, url, func(c *Config) { c.PollEvery = time.Hour }), open(t, url)
	hears(t, s, peer)
	v := apply(t, s, with("", edit("m:1", []string{"a"}, nil))).Counters[0].Version
	e, _ := countertest.Listen(t, s, "m:1")
	server.Exec(t, url, `select pg_notify('headcount_counters', '{"f":"older","k":[{"k":"m:1","c":[{"i":1,"s":2,"j":["b"]}]}]}')`)
	untilReread(t, e, v)
}
