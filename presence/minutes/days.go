package minutes

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"headcount/presence"
)

const (
	// MinutesOfDay is the step of a Question about days.
	MinutesOfDay = 24 * 60

	millisOfMinute = 60_000
	millisOfDay    = MinutesOfDay * millisOfMinute

	// MaxAhead is how many minutes ahead of the clock the last minute of a page may be: clocks are corrected by less.
	MaxAhead = 1
)

// DayOf returns the day of t in UTC, counted from the Unix epoch.
func DayOf(t time.Time) int64 { return t.Unix() / (24 * 60 * 60) }

// Day has the statistics of a page, or of a whole site, for one day.
type Day struct {
	At  int64 // see DayOf
	Max int64 // the greatest count, including the one at the beginning
	// Presence is the sum over users of the time present, in milliseconds, up to the time Until (Unix ms). Last is the
	// count since then. Of a day that is over, Until is the end of the day.
	Presence, Until, Last int64
	Joins                 int64 // users who arrived
	Visitors              int64 // different users who arrived, estimated
}

// DayStore is a store that keeps days.
type DayStore interface {
	// Days returns the days of a page since from, oldest first, including the running one. They begin with the last
	// earlier day, if there is one. A day in which the count did not change and nobody arrived may be missing.
	Days(ctx context.Context, page string, from int64) ([]Day, error)
}

// Calendar folds the changes of a page into days. The zero value is of a page that nobody has joined.
type Calendar struct {
	past     []byte // the days before that of open, see AppendPast
	pastAt   int64  // the last of them
	open     Day    // the day of the last change
	arrivals Visits // of that day
}

// Count records that the count of the page changed.
func (c *Calendar) Count(users int64, now time.Time) {
	c.advance(now)
	c.open.Max = max(c.open.Max, users)
	c.open.Last = users
}

// Arrive records an arrival.
func (c *Calendar) Arrive(u presence.User, now time.Time) {
	c.advance(now)
	c.arrivals.Add(u)
}

// advance integrates the count up to now. A clock that was set back takes time off again, within the day.
func (c *Calendar) advance(now time.Time) {
	at := DayOf(now)
	switch {
	case at > c.open.At:
		c.close()
		c.open = Day{At: at, Max: c.open.Last, Until: at * millisOfDay, Last: c.open.Last}
	case Of(now)+MaxAhead < c.open.At*MinutesOfDay:
		c.reopen(now)
	}

	// A clock that is corrected to the day before stops at midnight, since that day is written.
	c.integrate(max(now.UnixMilli(), c.open.At*millisOfDay))
}

// integrate adds the time from Until to a time, or takes it off.
func (c *Calendar) integrate(until int64) {
	c.open.Presence = max(0, c.open.Presence+c.open.Last*(until-c.open.Until))
	c.open.Until = until
}

// reopen opens the day of now again, with what was counted in later days: the clock was ahead, and was set. Otherwise
// everything would count in the future until the clock is there.
func (c *Calendar) reopen(now time.Time) {
	days, err := ParsePast(c.past)
	// Days that cannot be parsed stay, see Trim.
	if err != nil {
		return
	}

	ahead := c.open
	c.past = nil
	c.pastAt = 0
	c.open = Day{At: DayOf(now), Until: DayOf(now) * millisOfDay}

	for _, d := range days {
		switch {
		case d.At < c.open.At:
			c.past = AppendPast(c.past, c.pastAt, d)
			c.pastAt = d.At
			c.open.Max = d.Last
			c.open.Last = d.Last
		case d.At == c.open.At:
			c.open = d // until midnight, so what is left of the day is taken off below
			c.arrivals.Joins += d.Joins
		default:
			ahead.Max = max(ahead.Max, d.Max)
			c.arrivals.Joins += d.Joins
		}
	}

	c.integrate(now.UnixMilli())
	c.open.Max = max(c.open.Max, ahead.Max)
	c.open.Last = ahead.Last
}

// close moves the open day to the past.
func (c *Calendar) close() {
	d := c.Open()
	// A day without users takes no bytes: whoever reads takes a missing day for one.
	if d.Max == 0 && d.Joins == 0 {
		return
	}

	d.Presence += d.Last * ((d.At+1)*millisOfDay - d.Until)
	c.past = AppendPast(c.past, c.pastAt, d)
	c.pastAt = d.At
	c.arrivals = Visits{}
}

// Open returns the day of the last change.
func (c *Calendar) Open() Day {
	d := c.open
	d.Joins = c.arrivals.Joins
	registers := c.arrivals.Registers()
	// Of a day that was opened again the registers are lost.
	d.Visitors = max(d.Visitors, registers.Count())

	return d
}

// At returns the day of the last change, and Users the count since then. They are cheap, unlike Open.
func (c *Calendar) At() int64    { return c.open.At }
func (c *Calendar) Users() int64 { return c.open.Last }

// Days implements DayStore for the page.
func (c *Calendar) Days(from int64) ([]Day, error) {
	days, err := ParsePast(c.past)
	if c.open.At > 0 {
		days = append(days, c.Open())
	}

	return Since(days, from), err
}

// Since returns the days since from, and the last one before.
func Since(days []Day, from int64) []Day {
	first := 0
	for first+1 < len(days) && days[first+1].At <= from {
		first++
	}

	return days[first:]
}

// Trim forgets the days before oldest.
func (c *Calendar) Trim(oldest int64) {
	days, err := ParsePast(c.past)
	// Days that cannot be parsed stay, because nobody can tell which of them to keep.
	if err != nil || len(days) == 0 || days[0].At >= oldest {
		return
	}

	kept := slices.DeleteFunc(days, func(d Day) bool { return d.At < oldest })
	c.past = nil
	c.pastAt = 0
	for _, d := range kept {
		c.past = AppendPast(c.past, c.pastAt, d)
		c.pastAt = d.At
	}
}

// Bytes returns how many bytes the days take.
func (c *Calendar) Bytes() int {
	// The capacity counts, since append has taken that much memory.
	registers := c.arrivals.Registers()
	return cap(c.past) + len(registers.Bytes())
}

// AppendPast appends a day that is over, in about 10 bytes: varints of the days since the day before in b, or since the
// epoch; of the greatest count; of the person-minutes; of the arrivals and visitors; and of the count at the end.
func AppendPast(b []byte, before int64, d Day) []byte {
	for _, n := range []int64{d.At - before, d.Max, d.PersonMinutes(), d.Joins, d.Visitors, d.Last} {
		b = binary.AppendUvarint(b, uint64(n))
	}

	return b
}

// PersonMinutes returns Presence in whole minutes.
func (d *Day) PersonMinutes() int64 { return (d.Presence + millisOfMinute/2) / millisOfMinute }

var errDays = errors.New("days are cut off")

// ParsePast parses what AppendPast appended. With an error it returns the days before the fault.
func ParsePast(b []byte) (days []Day, err error) {
	at := int64(0)
	for len(b) > 0 {
		var f [6]int64
		b, err = uvarints(b, f[:])
		if err != nil {
			return days, err
		}

		at += f[0]
		days = append(days, Day{
			At: at, Max: f[1], Presence: f[2] * millisOfMinute, Until: (at + 1) * millisOfDay,
			Joins: f[3], Visitors: f[4], Last: f[5],
		})
	}

	return days, nil
}

// uvarints reads numbers, and returns what follows them.
func uvarints(b []byte, to []int64) ([]byte, error) {
	for i := range to {
		n, size := binary.Uvarint(b)
		if size <= 0 {
			return nil, errDays
		}

		to[i] = int64(n)
		b = b[size:]
	}

	return b, nil
}

// Past returns the days before the open one, as AppendPast writes them, and the last of them. The caller must not
// change them.
func (c *Calendar) Past() (days []byte, last int64) { return c.past, c.pastAt }

// AppendOpen appends the open day, registers of its visitors included.
func (c *Calendar) AppendOpen(b []byte) []byte {
	d := &c.open
	for _, n := range []int64{d.At, d.Max, d.Presence, d.Until, d.Last} {
		b = binary.AppendUvarint(b, uint64(n))
	}

	return AppendVisits(b, c.arrivals.Joins, c.arrivals.Registers())
}

// ParseCalendar returns the calendar of what Past and AppendOpen returned. It takes ownership of both.
func ParseCalendar(past, open []byte) (*Calendar, error) {
	days, err := ParsePast(past)
	if err != nil {
		return nil, err
	}

	c := &Calendar{past: past}
	// AppendPast writes the distance to it.
	if n := len(days); n > 0 {
		c.pastAt = days[n-1].At
	}

	var f [5]int64
	open, err = uvarints(open, f[:])
	if err != nil {
		return nil, err
	}
	c.open = Day{At: f[0], Max: f[1], Presence: f[2], Until: f[3], Last: f[4]}
	c.arrivals.Joins, c.arrivals.registers, err = ParseVisits(open)

	// A process that is killed may have written the past before the open day.
	if c.open.At <= c.pastAt {
		c.open = Day{At: c.pastAt, Until: (c.pastAt + 1) * millisOfDay, Last: c.open.Last}
		c.arrivals = Visits{}
	}

	return c, err
}

// OfDay are the further members of a Point that is a day.
type OfDay struct {
	Avg           float64 `json:"avg"`            // the mean count, of the running day up to now; two digits
	PersonMinutes int64   `json:"person_minutes"` // the sum over users of the time present
	Visitors      int64   `json:"visitors"`       // different users in the day, estimated
}

// AskDays is Ask for days, of which a number is kept.
func AskDays(last time.Duration, kept int, now time.Time) (Question, error) {
	if last == 0 {
		last = defaultLast
	}
	if last > time.Duration(kept)*24*time.Hour {
		return Question{}, fmt.Errorf("%w: %d days are kept; ask for a shorter last", ErrTime, kept)
	}

	return Question{
		From: DayOf(now.Add(-last)) * MinutesOfDay, To: (DayOf(now) + 1) * MinutesOfDay,
		Step: MinutesOfDay, ByDay: true,
	}, nil
}

// AnswerDays answers a question of AskDays from what a DayStore returned and the current count. The visitors are those
// of all days: a user who came on two days is two of them. The peak has the time at which its day began.
func (q Question) AnswerDays(page string, list []Day, count int64, now time.Time) Answer {
	a := Answer{Page: presence.KeyOf(page), Now: count, Points: make([]Point, 0, (q.To-q.From)/q.Step)}
	carried := int64(0)
	for at := q.From / q.Step; at < q.To/q.Step; at++ {
		for len(list) > 0 && list[0].At < at {
			carried = list[0].Last
			list = list[1:]
		}

		start := at * millisOfDay
		// A missing day had no changes, so the count from before held all day long.
		d := Day{At: at, Max: carried, Until: start, Last: carried}
		if len(list) > 0 && list[0].At == at {
			d = list[0]
		}

		end := min(start+millisOfDay, now.UnixMilli())
		// The running day: the current count may be newer than what the store has.
		if end < start+millisOfDay {
			d.Max = max(d.Max, count)
		}
		a.addDay(d, start, end)
	}

	return a
}

// addDay adds the point of a day that began at a time and is over, or is now, at end.
func (a *Answer) addDay(d Day, start, end int64) {
	d.Presence = max(0, d.Presence+d.Last*(end-d.Until))
	// Who was there when the day began did not arrive, so there were at least as many visitors as users at once.
	of := &OfDay{PersonMinutes: d.PersonMinutes(), Visitors: max(d.Visitors, d.Max)}
	if end > start {
		of.Avg = math.Round(100*float64(d.Presence)/float64(end-start)) / 100
	}

	at := Start(d.At * MinutesOfDay)
	a.Points = append(a.Points, Point{At: at, Max: d.Max, Joins: d.Joins, OfDay: of})
	a.Joins += d.Joins
	a.Visitors += of.Visitors
	if d.Max > a.Peak.Max {
		a.Peak = Peak{d.Max, at}
	}
}

// CSV returns the points as RFC 4180 has it, a line for each.
func (a *Answer) CSV() []byte {
	// All points are of one kind.
	byDay := len(a.Points) > 0 && a.Points[0].OfDay != nil
	b := []byte("at,max,joins")
	if byDay {
		b = append(b, ",avg,person_minutes,visitors"...)
	}

	b = append(b, "\r\n"...)
	for _, p := range a.Points {
		b = time.Unix(int64(p.At)*60, 0).UTC().AppendFormat(b, time.RFC3339)
		b = fmt.Appendf(b, ",%d,%d", p.Max, p.Joins)
		if byDay {
			b = fmt.Appendf(b, ",%.2f,%d,%d", p.Avg, p.PersonMinutes, p.OfDay.Visitors)
		}
		b = append(b, "\r\n"...)
	}

	return b
}
