package presenceredis

import (
	"context"
	"testing"
	"time"

	"headcount/internal/redistest"
	"headcount/presence"
)

// Each partition keeps its share of the departures: the oldest are dropped first, and all expire. Without the setting
// no departure is stored or returned.
func TestServerLastSeenIsBounded(t *testing.T) {
	t.Parallel()
	server := redistest.Single(t)
	const partition, most = 5, 3
	cfg := func(retention time.Duration) Config {
		return Config{
			Conn: redistest.Dial(t, server.URL()), LastSeen: retention,
			MaxLastSeen: most*presence.DefaultPartitions - 1,
		}
	}

	s := open(t, cfg(time.Hour))
	now := time.Now().Truncate(time.Second)
	var users []presence.User
	for i := range 5 {
		users = append(users, presence.User(partition+i*presence.DefaultPartitions))
	}

	seq := uint64(0)
	depart := func(s *Store, departures ...presence.Departure) {
		t.Helper()
		claims, err := s.Claim(t.Context(), "n", []int{partition}, false)
		if err != nil || claims[0].Whole { // no owner has declared the partition complete
			t.Fatalf("the claim is %+v, %v; want a partition that is not whole", claims, err)
		}

		seq++
		change := presence.Change{Claim: claims[0], Sequence: seq, Departures: departures}
		if out := s.Write(t.Context(), []presence.Change{change}); out[0].Err != nil {
			t.Fatal(out[0].Err)
		}
	}

	// Each user departs ten seconds after the one before; the last one departed 20 s ago.
	for i, u := range users {
		depart(s, presence.Departure{User: u, At: now.Add(time.Duration(10*i-60) * time.Second)})
	}

	want := func(s *Store, known ...bool) {
		t.Helper()
		times, err := s.LastSeen(t.Context(), users)
		if err != nil {
			t.Fatal(err)
		}

		for i, at := range times {
			if at.IsZero() == known[i] {
				t.Errorf("user %d was last seen %s, want a known time: %t", i, at, known[i])
			}
		}
	}

	// The partition remembers three users, so the two who departed first are forgotten.
	want(s, false, false, true, true, true)
	kept := func(s *Store) (n int64, expires time.Duration) {
		t.Helper()
		err := s.conn.Do(t.Context(), func(ctx context.Context, c *client) error {
			key := at(t, s).seenKey(partition)
			n = c.ZCard(ctx, key).Val()
			expires = c.TTL(ctx, key).Val()
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}

		return n, expires
	}
	if n, expires := kept(s); n != most || expires <= 0 || expires > time.Hour {
		t.Errorf("%d departures are kept, for %s; want %d, for an hour at most", n, expires, most)
	}

	off := open(t, cfg(0))
	depart(off, presence.Departure{User: users[0], At: now})
	want(off, false, false, false, false, false)
	if n, _ := kept(off); n != most {
		t.Errorf("without the setting %d departures are kept, want the %d from before", n, most)
	}
	if err := off.ForgetSeen(t.Context(), users[4]); err != nil {
		t.Fatal(err)
	}
	want(s, false, false, true, true, false)

	short := open(t, cfg(35*time.Second))
	depart(short, presence.Departure{User: users[0], At: now})
	// Of the two users that are remembered, one departed too long ago for this retention.
	want(short, true, false, false, true, false)
	if n, _ := kept(short); n != 2 {
		t.Errorf("with a shorter retention %d departures are kept, want 2", n)
	}
}
