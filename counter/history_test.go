package counter

import (
	"errors"
	"math"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"headcount/hyperloglog"
)

var noon = time.Date(2030, 10, 10, 12, 11, 42, 0, time.UTC)

// views keeps minutes for a day and hours for 90 days.
var views = &Rule{
	Match: "views:*", Kind: Sum,
	Resolutions: []Resolution{{time.Minute, 24 * time.Hour}, {time.Hour, 90 * 24 * time.Hour}},
}

// ranges are questions at noon about views, and which time buckets answer them. A question with a fault is refused.
var ranges = map[string]struct {
	from, to    string
	step        time.Duration
	bucket      time.Duration
	first, last string // the first moment, and the first after the last
	points      int
	fault       string
}{
	"defaults": {
		bucket: time.Minute, first: "2030-10-10 11:12:00", last: "2030-10-10 12:12:00", points: 60,
	},
	"a step alone": {
		step: 5 * time.Minute, bucket: time.Minute, first: "2030-10-10 07:15:00", last: "2030-10-10 12:15:00",
		points: 60,
	},
	"from alone": {
		from: "2030-10-10 12:00:30", bucket: time.Minute, first: "2030-10-10 12:00:00", last: "2030-10-10 12:12:00",
		points: 12,
	},
	"to alone": {
		to: "2030-10-10 12:00:30", bucket: time.Minute, first: "2030-10-10 11:01:00", last: "2030-10-10 12:01:00",
		points: 60,
	},
	"from is rounded down, to up": {
		from: "2030-10-10 11:03:20", to: "2030-10-10 11:26:01", step: 5 * time.Minute, bucket: time.Minute,
		first: "2030-10-10 11:00:00", last: "2030-10-10 11:30:00", points: 6,
	},
	"whole steps stay": {
		from: "2030-10-10 11:00:00", to: "2030-10-10 11:30:00", step: 5 * time.Minute, bucket: time.Minute,
		first: "2030-10-10 11:00:00", last: "2030-10-10 11:30:00", points: 6,
	},
	"the finest that divides": {
		from: "2030-10-10 02:00:00", to: "2030-10-10 04:00:00", step: time.Hour, bucket: time.Minute,
		first: "2030-10-10 02:00:00", last: "2030-10-10 04:00:00", points: 2,
	},
	"the finest that still keeps it": {
		from: "2030-10-08 02:00:00", to: "2030-10-10 04:00:00", step: time.Hour, bucket: time.Hour,
		first: "2030-10-08 02:00:00", last: "2030-10-10 04:00:00", points: 50,
	},
	"days of hours": {
		from: "2030-09-01 00:00:00", step: 24 * time.Hour, bucket: time.Hour, first: "2030-09-01 00:00:00",
		last: "2030-10-11 00:00:00", points: 40,
	},
	"just kept": {
		from: "2030-10-09 12:11:42", to: "2030-10-09 12:13:00", bucket: time.Minute, first: "2030-10-09 12:11:00",
		last: "2030-10-09 12:13:00", points: 2,
	},
	"a default is what is kept": {
		step: 7 * 24 * time.Hour, bucket: time.Hour, first: "2030-07-18 00:00:00", last: "2030-10-17 00:00:00",
		points: 13,
	},
	"the time to come": {
		from: "2030-10-10 12:00:00", to: "2030-10-10 13:00:00", bucket: time.Minute, first: "2030-10-10 12:00:00",
		last: "2030-10-10 13:00:00", points: 60,
	},
	"the most points": {
		from: "2030-10-09 12:30:00", to: "2030-10-10 13:30:00", bucket: time.Minute, first: "2030-10-09 12:30:00",
		last: "2030-10-10 13:30:00", points: 1500,
	},
	"too many points": {from: "2030-10-09 12:30:00", to: "2030-10-10 13:30:01", fault: "at most 1500"},
	"minutes are not kept so long": {
		from: "2030-10-08 12:00:00", to: "2030-10-08 13:00:00", fault: "longer ago than is kept",
	},
	"hours are not kept so long": {
		from: "2030-07-01 00:00:00", to: "2030-07-02 00:00:00", step: time.Hour, fault: "longer ago than is kept",
	},
	"before all times": {
		from: "1969-01-01 00:00:00", to: "1969-01-01 01:00:00", fault: "longer ago than is kept",
	},
	"nothing divides it":    {step: 90 * time.Second, fault: "no multiple"},
	"parts of seconds":      {step: 1500 * time.Millisecond, fault: "whole seconds"},
	"backwards":             {from: "2030-10-10 12:00:00", to: "2030-10-10 11:00:00", fault: "not before to"},
	"nothing":               {from: "2030-10-10 12:00:00", to: "2030-10-10 12:00:00", fault: "not before to"},
	"from the time to come": {from: "2030-10-10 14:00:00", fault: "not before to"},
}

// TestRanges: a range begins and ends at whole steps; a missing end or step has a default. What is not kept is refused.
func TestRanges(t *testing.T) {
	at := func(text string) time.Time {
		if text == "" {
			return time.Time{}
		}

		at, err := time.Parse("2006-01-02 15:04:05", text)
		if err != nil {
			t.Fatal(err)
		}

		return at
	}

	for name, tc := range ranges {
		q, err := views.Range(at(tc.from), at(tc.to), tc.step, noon)
		if tc.fault != "" {
			if !errors.Is(err, ErrTime) || !strings.Contains(err.Error(), tc.fault) {
				t.Errorf("%s: %v, want %q", name, err, tc.fault)
			}

			continue
		}

		seconds := int64(tc.bucket / time.Second)
		if err != nil || q.Step != tc.bucket || q.From*seconds != at(tc.first).Unix() ||
			q.To*seconds != at(tc.last).Unix() || int(q.To-q.From) != tc.points*int(q.Points) {
			t.Errorf("%s: %+v from %s to %s, %v",
				name, q, time.Unix(q.From*seconds, 0).UTC(), time.Unix(q.To*seconds, 0).UTC(), err)
		}
	}

	if _, err := (&Rule{}).Range(time.Time{}, time.Time{}, 0, noon); !errors.Is(err, ErrHistory) {
		t.Errorf("a rule without a history: %v, want ErrHistory", err)
	}
}

// TestWindows: a window has the finest step that is kept for so long.
func TestWindows(t *testing.T) {
	for last, want := range map[time.Duration]struct {
		step time.Duration
		from string
	}{
		time.Hour:           {time.Minute, "2030-10-10T11:11:00Z"},
		90 * time.Second:    {time.Minute, "2030-10-10T12:10:00Z"},
		24 * time.Hour:      {time.Minute, "2030-10-09T12:11:00Z"},
		25 * time.Hour:      {time.Hour, "2030-10-09T11:00:00Z"},
		90 * 24 * time.Hour: {time.Hour, "2030-07-12T12:00:00Z"},
	} {
		q, err := views.Window(last, noon)
		from := time.Unix(q.From*int64(q.Step/time.Second), 0).UTC().Format(time.RFC3339)
		if err != nil || q.Step != want.step || from != want.from {
			t.Errorf("the last %s is %+v from %s, %v; want the step %s from %s",
				last, q, from, err, want.step, want.from)
		}
	}

	_, err := views.Window(91*24*time.Hour, noon)
	if !errors.Is(err, ErrTime) || !strings.Contains(err.Error(), "1m:1d, 1h:90d") {
		t.Errorf("a window that is too long: %v, want ErrTime with what is kept", err)
	}

	if _, err := (&Rule{}).Window(time.Hour, noon); !errors.Is(err, ErrHistory) {
		t.Errorf("a rule without a history: %v, want ErrHistory", err)
	}
}

// TestPoints: the gains of several reads are added up into points and a total.
func TestPoints(t *testing.T) {
	q, err := views.Range(noon.Add(-12*time.Minute), noon, 5*time.Minute, noon)
	if err != nil {
		t.Fatal(err)
	}

	minute := noon.Unix() / 60
	gains := []Gain{
		{Number: q.From - 1, Value: 100}, {Number: q.From, Value: 1}, {Number: q.From + 4, Value: -3},
		{Number: minute, Value: 7}, {Number: q.To, Value: 100},
	}

	want := `{"key":"views:1","step":"5m","points":[{"at":"2030-10-10T11:55:00Z","value":-2},` +
		`{"at":"2030-10-10T12:00:00Z","value":0},` +
		`{"at":"2030-10-10T12:05:00Z","value":0},{"at":"2030-10-10T12:10:00Z","value":7}],"total":5}`

	// The gains come in two parts, as from two reads.
	all := q.Tally()
	all.Add(gains[:3])
	all.Add(gains[3:])
	if got := string(all.Answer().AppendJSON(nil, "views:1")); got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
}

// TestPointsOfUniques: a point counts a member once, in however many steps of the point the member is. So does the
// total.
func TestPointsOfUniques(t *testing.T) {
	q, err := views.Range(noon.Add(-12*time.Minute), noon, 5*time.Minute, noon)
	if err != nil {
		t.Fatal(err)
	}

	saw := func(number int64, members ...string) Gain {
		var r hyperloglog.Registers
		r.Add(members...)
		return Gain{Number: number, Seen: &r}
	}

	gains := []Gain{
		saw(q.From-1, "x"), saw(q.From, "a", "b"), saw(q.From+4, "b", "c"), saw(q.From+5, "a"),
		saw(noon.Unix()/60, "d", "a"), saw(q.To, "y"),
	}

	want := `{"key":"u","step":"5m","points":[{"at":"2030-10-10T11:55:00Z","value":3},{"at":"2030-10-10T12:00:00Z",` +
		`"value":1},` +
		`{"at":"2030-10-10T12:05:00Z","value":0},{"at":"2030-10-10T12:10:00Z","value":2}],"total":4}`

	// However the gains are divided into reads, the points are the same.
	for parts := 1; parts < len(gains); parts++ {
		all := q.Tally()
		all.Add(gains[:parts])
		all.Add(gains[parts:])
		if got := string(all.Answer().AppendJSON(nil, "u")); got != want {
			t.Errorf("got  %s\nwant %s", got, want)
		}
	}

	window, err := views.Window(time.Hour, noon)
	if err != nil {
		t.Fatal(err)
	}

	all := window.Tally()
	all.Add(gains)
	if got := all.Answer().Total; got != 6 {
		t.Errorf("the total is %d members, want 6", got)
	}
}

func TestSlotsAreText(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var s Slots
		for i := range rapid.IntRange(0, MaxResolutions).Draw(t, "slots") {
			s[i] = Slot{
				Value: rapid.Int64().Draw(t, "value"), Number: rapid.Uint32().Draw(t, "number"),
				Step: rapid.Uint32Min(1).Draw(t, "step"),
			}
		}

		if got, err := ParseSlots(string(s.Append(nil))); err != nil || got != s {
			t.Fatalf("%+v, %v, want %+v", got, err, s)
		}
	})

	for _, text := range []string{
		"x", "60", "60:1", "60:1:x", "1:1:1 2:1:1 3:1:1 4:1:1 5:1:1", "60:-1:1", strings.Repeat("x", 45_000),
	} {
		if _, err := ParseSlots(text); err == nil || len(err.Error()) > 100 || strings.Contains(err.Error(), "%!") {
			t.Errorf("%.40q: %.200v, want an error of one short line", text, err)
		}
	}
}

// history is a Step that keeps the time buckets that have ended.
type history struct {
	Tx
	past []over
}

// over is a time bucket that has ended, and how long it is kept.
type over struct {
	Slot
	Kept time.Duration
}

func (h *history) Past(_ string, s Slot, kept time.Duration) {
	h.past = append(h.past, over{Slot: s, Kept: kept})
}

// TestSlots: gains go to the running time buckets, and from there to the history, even if the clock goes back or the
// rule changes.
func TestSlots(t *testing.T) {
	var h history
	s := State{Kind: Sum}
	gain := func(rule *Rule, delta int64, at time.Duration) {
		s.Gain(&h, &Change{Rule: rule, Verb: Add, Delta: delta}, time.Unix(0, 0).Add(at))
	}

	gain(views, 5, 59*time.Second)
	gain(views, -2, 61*time.Second)
	gain(views, 1, 30*time.Second) // the clock goes back

	want := Slots{{-1, 1, 60}, {4, 0, 3600}}
	if s.Slots != want || len(h.past) != 1 || h.past[0] != (over{Slot: Slot{5, 0, 60}, Kept: 24 * time.Hour}) {
		t.Fatalf("%+v, %+v", s.Slots, h.past)
	}

	// Corrections, and rules without a history, gain nothing.
	s.Gain(&h, &Change{Rule: views, Verb: Adjust, Delta: 9}, time.Unix(7200, 0))
	gain(&Rule{Kind: Sum}, 9, 7200*time.Second)
	if s.Slots != want {
		t.Fatalf("%+v", s.Slots)
	}

	// Without a history no time bucket ends.
	s.Gain(nil, &Change{Rule: views, Verb: Add, Delta: 2}, time.Unix(7200, 0))
	s.Gain(nil, &Change{Rule: views, Verb: Add, Delta: -2}, time.Unix(7200, 0))
	if s.Slots != want || len(h.past) != 1 {
		t.Fatalf("%+v", s.Slots)
	}

	// Another rule has other time buckets; the former ones stay as long as there is room.
	other := &Rule{
		Kind:        Sum,
		Resolutions: []Resolution{{time.Second, time.Hour}, {10 * time.Second, time.Hour}, {time.Hour, time.Hour}},
	}
	gain(other, 3, 3601*time.Second)
	wantOther := Slots{{-1, 1, 60}, {3, 1, 3600}, {3, 3601, 1}, {3, 360, 10}}
	if s.Slots != wantOther || len(h.past) != 2 || h.past[1] != (over{Slot: Slot{4, 0, 3600}, Kept: time.Hour}) {
		t.Fatalf("%+v, %+v", s.Slots, h.past)
	}

	// Without room, a new bucket displaces one that no rule has any more.
	gain(&Rule{Kind: Sum, Resolutions: []Resolution{{24 * time.Hour, 24 * time.Hour}}}, 3, 3601*time.Second)
	if want := (Slots{{3, 0, 86400}, {3, 1, 3600}, {3, 3601, 1}, {3, 360, 10}}); s.Slots != want {
		t.Fatalf("%+v", s.Slots)
	}
}

// TestGainsAfterTheClockWentBack: a clock was hours ahead, and was then set. What is gained from then on counts in the
// present, in ranges and in windows.
func TestGainsAfterTheClockWentBack(t *testing.T) {
	var h history
	s := State{Kind: Sum}
	gain := func(delta int64, at time.Duration) {
		s.Gain(&h, &Change{Rule: views, Verb: Add, Delta: delta}, time.Unix(0, 0).Add(at))
	}

	gain(5, 3*time.Hour)
	gain(2, 3*time.Hour+time.Minute)
	gain(1, 61*time.Second)

	if want := (Slots{{3, 1, 60}, {8, 0, 3600}}); s.Slots != want {
		t.Errorf("the running time buckets are %+v, want %+v", s.Slots, want)
	}

	var gains []Gain
	for _, one := range h.past {
		gains = append(gains, Gain{Number: int64(one.Number), Value: one.Value})
	}
	for to, want := range map[int64]int64{2: 3, math.MaxUint32: 8} {
		all := Question{Step: time.Minute, To: to}.Tally()
		all.Add(s.With(gains, time.Minute, 0, to))
		if got := all.Total(); got != want {
			t.Errorf("up to %d the total is %d, want %d", to, got, want)
		}
	}
}
