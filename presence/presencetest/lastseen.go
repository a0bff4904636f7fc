package presencetest

import (
	"slices"
	"testing"
	"time"

	"headcount/presence"
)

// depart writes departures, and removes the members.
func (w *writer) depart(departures ...presence.Departure) {
	w.t.Helper()
	c := w.change(nil)
	for _, d := range departures {
		c.Members = append(c.Members, presence.MemberChange{
			Member: presence.Member{User: d.User, Page: "p"}, Gone: true,
		})
	}

	c.Departures = departures

	for range 2 { // writes may be repeated
		w.write(c)
	}
}

// wantSeen checks when users departed. The zero time means that the store does not know.
func wantSeen(t tb, s Store, users []presence.User, want ...time.Time) {
	t.Helper()
	got, err := s.LastSeen(t.Context(), users)
	if err != nil || !slices.EqualFunc(got, want, func(a, b time.Time) bool { return a.Equal(b) }) {
		t.Fatalf("LastSeen(%v) = %v, %v; want %v", users, got, err, want)
	}
}

// secondsAgo returns a time in whole seconds, as stores keep it.
func secondsAgo(n int) time.Time {
	return time.Now().Truncate(time.Second).Add(-time.Duration(n) * time.Second)
}

// userIn returns a user of the partition.
func userIn(partition, i int) presence.User {
	return presence.User(uint64(partition) + uint64(i)*presence.DefaultPartitions)
}

func departed(t *testing.T, s Store) {
	a, b := userIn(3, 1), userIn(3, 2)
	never, other := userIn(3, 3), userIn(4, 1)

	w, at := claim(t, s, 3), secondsAgo(10)

	w.depart(presence.Departure{User: a, At: at}, presence.Departure{User: b, At: at.Add(300 * time.Millisecond)})
	claim(t, s, 4).depart(presence.Departure{User: other, At: at.Add(time.Second)})

	users := []presence.User{other, never, b, a}
	wantSeen(t, s, users, at.Add(time.Second), time.Time{}, at, at)

	// The next owner can make a departure later, but not earlier.
	next := claim(t, s, 3)
	wantSeen(t, s, users, at.Add(time.Second), time.Time{}, at, at)

	next.depart(presence.Departure{User: a, At: at.Add(5 * time.Second)})
	next.depart(presence.Departure{User: b, At: at.Add(-5 * time.Second)})
	wantSeen(t, s, users, at.Add(time.Second), time.Time{}, at, at.Add(5*time.Second))

	// The former claim permits nothing.
	late := w.change(nil)
	late.Departures = []presence.Departure{{User: never, At: at}}
	if o := s.Write(t.Context(), []presence.Change{late}); o[0].Err == nil {
		t.Error("a former owner may write departures")
	}
	wantSeen(t, s, []presence.User{never}, time.Time{})
	wantSeen(t, s, nil)
}

func manyDeparted(t *testing.T, s Store) {
	const n = 3000
	at := secondsAgo(1)
	users := make([]presence.User, n)
	departures := make([]presence.Departure, n)
	want := make([]time.Time, n)
	for i := range n {
		users[i] = userIn(3, i)
		want[i] = at
		departures[i] = presence.Departure{User: users[i], At: at}
	}

	w := claim(t, s, 3)
	// With only one change of a member, no batch of members splits the departures.
	c := w.change([]presence.MemberChange{{Member: presence.Member{User: 1, Page: "p"}}})
	c.Departures = departures
	w.write(c)
	wantSeen(t, s, users, want...)
}

func departedLongAgo(t *testing.T, s Store) {
	old, recent := userIn(3, 1), userIn(3, 2)
	at := secondsAgo(3500)
	claim(t, s, 3).depart(presence.Departure{User: old, At: secondsAgo(3601)}, presence.Departure{User: recent, At: at})
	wantSeen(t, s, []presence.User{old, recent}, time.Time{}, at)
}

func forgotten(t *testing.T, s Store) {
	a, b := userIn(3, 1), userIn(3, 2)
	w, at := claim(t, s, 3), secondsAgo(10)

	w.depart(presence.Departure{User: a, At: at}, presence.Departure{User: b, At: at})

	for range 2 {
		if err := s.ForgetSeen(t.Context(), a); err != nil {
			t.Fatal(err)
		}
		wantSeen(t, s, []presence.User{a, b}, time.Time{}, at)
	}

	// The store does not know when the user departed before, so an earlier departure counts.
	w.depart(presence.Departure{User: a, At: at.Add(-time.Second)})
	wantSeen(t, s, []presence.User{a, b}, at.Add(-time.Second), at)
}
