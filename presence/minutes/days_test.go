package minutes_test

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"headcount/presence"
	"headcount/presence/minutes"
)

// stay is a user on the page from one time to another, in ms.
type stay struct {
	user     presence.User
	from, to int64
}

const dayMillis = 24 * 60 * 60 * 1000

// truth computes from all stays what the days must be at a time.
func truth(stays []stay, from, days, now int64) []minutes.Day {
	list := make([]minutes.Day, days)
	for i := range list {
		start := (from + int64(i)) * dayMillis
		end := min(start+dayMillis, now)
		d := minutes.Day{At: from + int64(i)}
		users := map[presence.User]bool{}
		type step struct{ at, by int64 }
		var steps []step
		for _, s := range stays {
			if s.from >= end || s.to <= start {
				continue
			}
			d.Presence += min(s.to, end) - max(s.from, start)
			steps = append(steps, step{max(s.from, start), 1}, step{s.to, -1})
			if s.from >= start {
				d.Joins++
				users[s.user] = true
			}
		}

		slices.SortStableFunc(steps, func(a, b step) int { return int(a.at - b.at) })
		for i, n := 0, int64(0); i < len(steps); i++ {
			if n += steps[i].by; steps[i].at < end && (i+1 == len(steps) || steps[i+1].at > steps[i].at) {
				d.Max = max(d.Max, n)
			}
		}

		d.Visitors = max(int64(len(users)), d.Max)
		list[i] = d
	}

	return list
}

// In random histories with restarts, the days are those that truth computes: person-minutes exactly, up to rounding.
func TestDaysOfRandomHistories(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		const first = 20_000
		days := rapid.Int64Range(1, 9).Draw(t, "days")
		var stays []stay
		for range rapid.IntRange(0, 60).Draw(t, "stays") {
			from := first*dayMillis + rapid.Int64Range(0, days*dayMillis-1).Draw(t, "from")
			to := from + rapid.OneOf(rapid.Int64Range(1, 600_000), rapid.Int64Range(1, 3*dayMillis)).Draw(t, "stays")
			if to%dayMillis == 0 {
				to++ // a user who leaves exactly at midnight is a case that does not matter
			}
			stays = append(stays, stay{presence.User(rapid.Uint64Range(1, 40).Draw(t, "user")), from, to})
		}

		now := first*dayMillis + rapid.Int64Range(1, days*dayMillis).Draw(t, "now")
		if now%dayMillis == 0 {
			now++
		}
		stays = slices.DeleteFunc(stays, func(s stay) bool { return s.from >= now })

		type event struct {
			at   int64
			user presence.User
			by   int64
		}
		var events []event
		for _, s := range stays {
			events = append(events, event{s.from, s.user, 1})
			if s.to < now {
				events = append(events, event{s.to, s.user, -1})
			}
		}

		slices.SortStableFunc(events, func(a, b event) int { return int(a.at - b.at) })

		c, users := &minutes.Calendar{}, int64(0)
		for i := 0; i < len(events); {
			at := time.UnixMilli(events[i].at)
			for ; i < len(events) && events[i].at == at.UnixMilli(); i++ {
				users += events[i].by
				if events[i].by > 0 {
					c.Arrive(events[i].user, at)
				}
			}

			c.Count(users, at)
			if rapid.IntRange(0, 3).Draw(t, "restart") == 0 {
				past, _ := c.Past()
				again, err := minutes.ParseCalendar(slices.Clone(past), c.AppendOpen(nil))
				if err != nil {
					t.Fatal(err)
				}

				c = again
			}
		}

		list, err := c.Days(first + 1)
		if err != nil {
			t.Fatal(err)
		}

		q, err := minutes.AskDays(time.Duration(max(1, now/dayMillis-first))*24*time.Hour, 400, time.UnixMilli(now))
		if err != nil {
			t.Fatal(err)
		}

		a := q.AnswerDays("p", list, users, time.UnixMilli(now))
		from := q.From / minutes.MinutesOfDay
		want := truth(stays, from, int64(len(a.Points)), now)
		for i, p := range a.Points {
			w := want[i]
			if w.At < first+1 && len(list) > 0 && list[0].At > w.At {
				continue // the question does not include this day
			}
			if off := math.Abs(float64(w.Presence)/60_000 - float64(p.PersonMinutes)); off > 0.51 {
				t.Errorf("day %d has %d person-minutes, want %.2f", w.At, p.PersonMinutes, float64(w.Presence)/60_000)
			}
			if p.Max != w.Max || p.Joins != w.Joins || p.OfDay.Visitors != w.Visitors {
				t.Errorf("day %d: %+v %+v, want %+v", w.At, p, *p.OfDay, w)
			}
		}
	})
}

// TestDaysAfterTheClockWentBack: a clock was days ahead, and was then set. The day of the present goes on, with what
// was counted meanwhile.
func TestDaysAfterTheClockWentBack(t *testing.T) {
	var c minutes.Calendar
	at := func(hours int) time.Time { return time.UnixMilli(10 * dayMillis).Add(time.Duration(hours) * time.Hour) }
	c.Count(1, at(-24)) // on day 9
	c.Arrive(1, at(-24))
	c.Count(3, at(6))
	c.Arrive(2, at(6))
	c.Arrive(3, at(6))

	c.Count(4, at(3*24)) // on day 13, at 7 o'clock of day 10
	c.Arrive(4, at(3*24))
	c.Count(2, at(8))
	c.Arrive(5, at(9))
	c.Count(0, at(10))

	days, err := c.Days(0)
	if err != nil {
		t.Fatal(err)
	}
	text := ""
	for _, d := range days {
		text += fmt.Sprintf("%d: %d %d +%d %d, ", d.At, d.Max, d.PersonMinutes()/60, d.Joins, d.Visitors)
	}
	if want := "9: 1 24 +1 1, 10: 4 16 +4 2, "; text != want {
		t.Errorf("the days are %q, want %q", text, want)
	}

	// A correction at midnight opens no day again.
	c.Count(1, at(24))
	c.Count(2, at(24).Add(-time.Second))
	if c.At() != 11 {
		t.Errorf("the day is %d after a correction of a second, want 11", c.At())
	}
}

func TestDaysAreTrimmed(t *testing.T) {
	c := &minutes.Calendar{}
	for day := range 30 {
		c.Count(1, time.Unix(int64(day+20_000)*86_400+60, 0))
		c.Count(0, time.Unix(int64(day+20_000)*86_400+660, 0))
	}
	c.Trim(20_020)
	list, err := c.Days(0)
	if err != nil || len(list) != 10 || list[0].At != 20_020 || list[0].PersonMinutes() != 10 {
		t.Errorf("got %d days, %+v, %v", len(list), list, err)
	}
}

// A year and more of 10,000 pages takes 50 MB: of pages whose sizes are like those of a real site, where the page at
// place n has 1/n of the users.
func TestDaysAreSmall(t *testing.T) {
	const pages, days = 10_000, 400
	rnd, bytes := rand.New(rand.NewPCG(1, 2)), 0
	for page := range pages {
		joins := int64(1_000_000/(page+1)) + 5
		before := int64(0)
		var past []byte
		for day := range int64(days) {
			n := joins/2 + rnd.Int64N(joins+1)
			past = minutes.AppendPast(past, before, minutes.Day{
				At: 20_000 + day, Max: n/20 + 1, Presence: n * 180_000, Joins: n, Visitors: n * 2 / 3, Last: n / 100,
			})
			before = 20_000 + day
		}

		bytes += len(past)
	}

	t.Logf("%d pages of %d days: %.1f MB, %.1f bytes a day", pages, days, float64(bytes)/1e6,
		float64(bytes)/pages/days)
	if bytes > 50e6 {
		t.Errorf("the days take %d bytes, want 50 MB at most", bytes)
	}
}

func TestAnswerAsCSV(t *testing.T) {
	now := time.Unix(20_001*86_400+43_200, 0)
	q, err := minutes.AskDays(0, 400, now)
	if err != nil {
		t.Fatal(err)
	}

	a := q.AnswerDays("p", []minutes.Day{
		{At: 20_000, Max: 3, Presence: 600_000, Until: 20_001 * dayMillis, Joins: 4, Visitors: 2, Last: 1},
	}, 1, now)
	want := "at,max,joins,avg,person_minutes,visitors\r\n" +
		"2024-10-04T00:00:00Z,3,4,0.01,10,3\r\n2024-10-05T00:00:00Z,1,0,1.00,720,1\r\n"
	if is := string(a.CSV()); is != want {
		t.Errorf("the CSV by days is %s", is)
	}

	byMinute := (minutes.Question{From: 100, To: 101, Step: 1}).Answer("p", nil, 0, noon)
	if is := string(byMinute.CSV()); is != "at,max,joins\r\n1970-01-01T01:40:00Z,0,0\r\n" {
		t.Errorf("the CSV by minutes is %s", is)
	}
}

func TestDamagedDays(t *testing.T) {
	c := &minutes.Calendar{}
	c.Count(5, noon)
	c.Arrive(3, noon.Add(24*time.Hour))
	past, _ := c.Past()
	open := c.AppendOpen(nil)
	for i := range past {
		if _, err := minutes.ParsePast(past[:i]); (err == nil) != (i == 0) {
			t.Errorf("the first %d bytes of a day give %v", i, err)
		}
	}

	for i := range len(open) - 1 {
		if _, err := minutes.ParseCalendar(past, open[:i]); err == nil && i < 6 {
			t.Errorf("the first %d bytes of an open day were accepted", i)
		}
	}

	if text := fmt.Sprint(minutes.AskDays(401*24*time.Hour, 400, noon)); !strings.Contains(text, "400 days") {
		t.Errorf("the error is %q, want \"400 days\" in it", text)
	}
}
