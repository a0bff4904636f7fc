package minutes_test

import (
	"encoding/json"
	"errors"
	"slices"
	"testing"
	"time"

	"headcount/hyperloglog"
	"headcount/presence"
	"headcount/presence/minutes"
)

// noon is in the middle of minute 100.
var noon = time.Unix(100*60+30, 0)

func TestAsk(t *testing.T) {
	const day = 24 * time.Hour
	for name, tc := range map[string]struct {
		last, step, kept time.Duration
		want             minutes.Question // the zero Question: refused
	}{
		"whole steps": {
			10 * time.Minute, 5 * time.Minute, day, minutes.Question{From: 90, To: 105, Step: 5},
		},
		"one minute":                  {time.Minute, time.Minute, day, minutes.Question{From: 99, To: 101, Step: 1}},
		"the default step":            {time.Minute, 0, day, minutes.Question{From: 95, To: 105, Step: 5}},
		"the default is what is kept": {0, 0, time.Hour, minutes.Question{From: 40, To: 105, Step: 5}},
		"a step longer than the time": {time.Minute, time.Hour, day, minutes.Question{From: 60, To: 120, Step: 60}},
		"longer than kept":            {2 * time.Hour, time.Minute, time.Hour, minutes.Question{}},
		"half a minute":               {time.Hour, 30 * time.Second, day, minutes.Question{}},
		"one and a half":              {time.Hour, 90 * time.Second, day, minutes.Question{}},
	} {
		t.Run(name, func(t *testing.T) {
			q, err := minutes.Ask(tc.last, tc.step, tc.kept, noon)
			good := tc.want != minutes.Question{}
			if q != tc.want || (err == nil) != good || !good && !errors.Is(err, minutes.ErrTime) {
				t.Errorf("Ask = %+v, %v; want %+v", q, err, tc.want)
			}
		})
	}
}

func TestAskForAsManyPointsAsThereMayBe(t *testing.T) {
	now := time.Unix(100_000*60+30, 0)
	q, err := minutes.Ask(1499*time.Minute, time.Minute, 48*time.Hour, now)
	if n := q.To - q.From; err != nil || n != minutes.MaxPoints {
		t.Errorf("got %d points, %v", n, err)
	}

	if _, err := minutes.Ask(1500*time.Minute, time.Minute, 48*time.Hour, now); !errors.Is(err, minutes.ErrTime) {
		t.Errorf("one point more than permitted: %v", err)
	}
}

func visitors(users ...string) (r hyperloglog.Registers) {
	r.Add(users...)

	return r
}

func TestAnswer(t *testing.T) {
	q := minutes.Question{From: 90, To: 105, Step: 5}
	list := []minutes.Minute{
		{At: 80, Counted: true, Max: 9, Last: 3}, // before the time in question, with 3 users at its end
		{At: 92, Joins: 2, Visitors: visitors("a", "b")},
		{At: 92, Joins: 1, Visitors: visitors("c")}, // by another process
		{At: 92, Counted: true, Max: 6, Last: 4},
		{At: 97, Counted: true, Max: 4, Last: 0},
		{At: 99, Joins: 2, Visitors: visitors("a", "d")},
		{At: 99, Counted: true, Max: 1, Last: 1},
		{At: 99, Counted: true, Max: 1, Last: 1}, // written twice
	}

	a := q.Answer("p", list, 2, noon)
	want := []minutes.Point{{At: 90, Max: 6, Joins: 3}, {At: 95, Max: 4, Joins: 2}, {At: 100, Max: 2}}

	right := a.Peak == minutes.Peak{At: 92, Max: 6} && a.Joins == 5 && a.Visitors == 6 && a.Now == 2
	if !slices.Equal(a.Points, want) || !right {
		t.Errorf("the answer is %+v, want the points %v", a, want)
	}

	// A shorter time only has its own visits, and begins with the last count from before.
	late := minutes.Question{From: 98, To: 101, Step: 1}.Answer("p", list, 0, noon)
	if late.Visitors != 2 || late.Joins != 2 || late.Peak != (minutes.Peak{At: 99, Max: 1}) ||
		late.Points[0].Max != 0 || late.Points[2].Max != 1 {
		t.Errorf("after all users have left the answer is %+v", late)
	}

	nobody, _ := json.Marshal(q.Answer("p", nil, 0, noon))
	const empty = `{"page":"p","now":0,"peak":{"count":0,"at":null},"joins":0,"visitors":0,"points":[` +
		`{"at":"1970-01-01T01:30:00Z","max":0,"joins":0},{"at":"1970-01-01T01:35:00Z","max":0,"joins":0},` +
		`{"at":"1970-01-01T01:40:00Z","max":0,"joins":0}]}`
	if string(nobody) != empty {
		t.Errorf("a page that was never used has the answer %s", nobody)
	}

	if a := q.Answer("p", list, 7, noon); a.Peak != (minutes.Peak{At: 100, Max: 7}) {
		t.Errorf("the answer is %+v, want the peak in the running minute", a)
	}
}

func TestVisits(t *testing.T) {
	var v minutes.Visits
	for i := range 1000 {
		v.Add(presence.User(i % 500))
	}

	b := minutes.AppendVisits(nil, v.Joins, v.Registers())
	joins, registers, err := minutes.ParseVisits(b)
	if n := registers.Count(); err != nil || joins != 1000 || n < 490 || n > 510 {
		t.Errorf("got %d joins, %d visitors, %v", joins, n, err)
	}

	for _, broken := range [][]byte{nil, {0x80}, b[:20]} {
		if _, _, err := minutes.ParseVisits(broken); err == nil {
			t.Errorf("the broken entry %q was accepted", broken)
		}
	}
}
