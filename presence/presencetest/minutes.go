package presencetest

import (
	"testing"
	"time"

	"headcount/presence"
	"headcount/presence/minutes"
)

// runningMinute tests the statistics of the running minute. The test may run into the next
// minute.
func runningMinute(t *testing.T, s Store) {
	v, w := claim(t, s, 5), claim(t, s, 6)
	answer := func(page string) minutes.Answer {
		t.Helper()
		now := time.Now()
		q, err := minutes.Ask(time.Hour, 0, time.Hour, now)
		if err != nil {
			t.Fatal(err)
		}

		list, err := s.Minutes(t.Context(), page, q.From)
		if err != nil {
			t.Fatal(err)
		}

		return q.Answer(page, list, count(t, s, page).Users, now)
	}

	write := func(by *writer, users int64, arrivals ...presence.User) {
		t.Helper()
		c := by.change(nil, presence.PageUsers{Page: "p", Users: users})
		for _, u := range arrivals {
			c.Arrivals = append(c.Arrivals, presence.Arrival{User: u, Page: "p"})
		}

		by.write(c)
	}

	write(v, 4, 1, 2, 3, 4)
	write(w, 3, 5, 6, 7)
	write(v, 0)
	write(w, 2)
	write(w, 3, 7) // user 7 came back

	a := answer("p")
	if a.Now != 3 || a.Peak.Max != 7 || a.Joins != 8 || a.Visitors != 7 {
		t.Errorf("%+v; want 3 now of 7 visitors, all at once, and 8 joins", a)
	}
	if nobody := answer("q"); nobody.Peak.Max != 0 || nobody.Joins != 0 || nobody.Visitors != 0 {
		t.Errorf("a page nobody ever joined: %+v", nobody)
	}

	// A former owner's change does not count, neither its users nor its arrivals.
	fenced := s.Write(t.Context(), []presence.Change{
		{
			Claim: presence.Claim{Partition: 5, Epoch: 1}, Sequence: 99,
			Arrivals: []presence.Arrival{{User: 9, Page: "q"}},
		},
	})
	if fenced[0].Err == nil {
		t.Error("a change under an old claim is written")
	}
	if late := answer("q"); late.Joins != 0 {
		t.Errorf("an arrival under an old claim counts: %+v", late)
	}
}
