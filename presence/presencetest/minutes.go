package presencetest

import (
	"testing"
	"time"

	"headcount/presence"
	"headcount/presence/minutes"
)

// runningMinute tests the statistics of the current minute. The test may run into the next one.
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

// runningDay tests the statistics of the current day, which have the time that users were present in milliseconds. The
// test may run into the next day.
func runningDay(t *testing.T, s Store) {
	v := claim(t, s, 5)
	write := func(users int64, arrivals ...presence.User) (before, after time.Time) {
		t.Helper()
		c := v.change(nil, presence.PageUsers{Page: "p", Users: users})
		for _, u := range arrivals {
			c.Arrivals = append(c.Arrivals, presence.Arrival{User: u, Page: "p"})
		}
		// The store reads its clock, which has milliseconds, between these two times.
		before = time.Now().Truncate(time.Millisecond)
		v.write(c)
		return before, time.Now().Add(time.Millisecond)
	}

	today := minutes.DayOf(time.Now())
	least, most := time.Duration(0), time.Duration(0)
	for range 5 {
		before, after := write(7, 1, 2, 3, 4, 5, 6, 7)
		time.Sleep(130 * time.Millisecond)
		left, gone := write(0)
		least += 7 * left.Sub(after)
		most += 7 * gone.Sub(before)
	}

	_, now := write(2, 1, 2)
	list, err := s.Days(t.Context(), "p", today)
	if err != nil || len(list) == 0 {
		t.Fatalf("%d days, %v", len(list), err)
	}

	sum := minutes.Day{}
	// There are two if a day has ended meanwhile.
	for _, d := range list {
		sum.Max = max(sum.Max, d.Max)
		sum.Presence += d.Presence
		sum.Last = d.Last
		sum.Until = d.Until
	}

	present := time.Duration(sum.Presence+sum.Last*(now.UnixMilli()-sum.Until)) * time.Millisecond
	tooLong := present > most+2*time.Since(now)+100*time.Millisecond
	if sum.Max != 7 || sum.Last != 2 || present < least || tooLong {
		t.Errorf("%+v: users were present for %s, want %s to %s", sum, present, least, most)
	}
	if nobody, err := s.Days(t.Context(), "q", today); len(nobody) > 0 || err != nil {
		t.Errorf("a page nobody ever joined: %+v, %v", nobody, err)
	}
}
