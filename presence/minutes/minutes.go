// Package minutes has the types, the contract and the arithmetic of page statistics: for
// each page and minute the greatest count, the number of arrivals, and a HyperLogLog of
// the users who arrived. Days are folded from the same changes and kept longer, see Calendar.
//
// A store keeps only minutes in which the count changed or users arrived. The other minutes
// follow from the last count before them. So a page without changes costs nothing, however
// many users it has.
package minutes

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	"headcount/hyperloglog"
	"headcount/presence"
)

// ErrTime is wrapped by every error about an invalid question.
var ErrTime = errors.New("bad time")

// MaxPoints bounds the points of one Answer.
const MaxPoints = 1500

// Of returns the minute of t, counted from the Unix epoch.
func Of(t time.Time) int64 { return t.Unix() / 60 }

// Minute has the statistics of a page, or of a whole site, for one minute.
type Minute struct {
	At int64 // see Of
	// Max is the greatest count in the minute, including the one at its beginning. Last is
	// the count at its end. They are known only if Counted: the store in Redis keeps counts
	// and arrivals apart.
	Counted   bool
	Max, Last int64
	Joins     int64 // users who arrived
	Visitors  hyperloglog.Registers
}

// Store is a store that keeps minutes.
type Store interface {
	// Minutes returns the minutes of a page since from, oldest first, including the running
	// minute. They begin with the last earlier minute that has a count, if there is one.
	// Several elements may be about the same minute; their joins add up.
	Minutes(ctx context.Context, page string, from int64) ([]Minute, error)
}

// Visits are the arrivals of one minute. The zero value has none.
type Visits struct {
	Joins     int64
	registers hyperloglog.Registers
	pending   []presence.User // users that are not in registers yet; at most maxPending
}

// maxPending users are added to the registers together, which takes as long as adding one.
const maxPending = 64

// Add counts an arrival.
func (v *Visits) Add(u presence.User) {
	v.Joins++
	v.pending = append(v.pending, u)
	if len(v.pending) == maxPending {
		v.addPending()
	}
}

// Merge counts the arrivals of o, too.
func (v *Visits) Merge(o *Visits) {
	v.Joins += o.Joins
	v.addPending()
	v.registers.Merge(o.Registers())
}

func (v *Visits) addPending() {
	if len(v.pending) == 0 {
		return
	}

	members := make([]string, len(v.pending))
	for i, u := range v.pending {
		members[i] = string(binary.BigEndian.AppendUint64(nil, uint64(u)))
	}
	v.registers.Add(members...)

	// Not cut to length 0: a page with few visitors would keep an array for 64.
	v.pending = nil
}

// Registers returns the registers of the users who arrived. The caller must not change
// them.
func (v *Visits) Registers() hyperloglog.Registers {
	v.addPending()
	return v.registers
}

// AppendVisits appends the form in which stores keep arrivals; ParseVisits parses it.
func AppendVisits(b []byte, joins int64, visitors hyperloglog.Registers) []byte {
	return append(binary.AppendUvarint(b, uint64(joins)), visitors.Bytes()...)
}

// ParseVisits parses what AppendVisits appended. It takes ownership of b.
func ParseVisits(b []byte) (joins int64, visitors hyperloglog.Registers, err error) {
	n, size := binary.Uvarint(b)
	if size <= 0 {
		return 0, visitors, errors.New("arrivals without a number")
	}
	visitors, err = hyperloglog.Parse(b[size:])
	return int64(n), visitors, err
}

// Question asks for the minutes from From up to, not including, To, in steps. From and To
// are multiples of Step since the Unix epoch, and To is after the running minute. ByDay says that days are asked for,
// which are kept apart: see AskDays.
type Question struct {
	From, To, Step int64
	ByDay          bool
}

// Defaults of Ask.
const (
	defaultLast = 24 * time.Hour
	defaultStep = 5 * time.Minute
)

// Ask returns the question for the last time before now in steps, if it is valid. 0 stands
// for the default of both. Minutes are kept for retention, which bounds the default too.
func Ask(last, step, retention time.Duration, now time.Time) (Question, error) {
	if last == 0 {
		last = min(defaultLast, retention)
	}
	if step == 0 {
		step = defaultStep
	}

	isWholeMinutes := step >= time.Minute && step%time.Minute == 0
	switch {
	case last > retention:
		return Question{}, fmt.Errorf("%w: minutes are kept for %s; ask for a shorter last, or for step=1d",
			ErrTime, retention)
	case !isWholeMinutes:
		return Question{}, fmt.Errorf("%w: a step is a whole number of minutes; ask for step=1m or longer", ErrTime)
	}

	// Whole steps since the epoch, so that two questions a moment apart have the same points.
	q := Question{Step: int64(step / time.Minute)}
	q.From = now.Add(-last).Unix() / 60 / q.Step * q.Step
	q.To = (Of(now)/q.Step + 1) * q.Step
	if n := (q.To - q.From) / q.Step; n > MaxPoints {
		return Question{}, fmt.Errorf("%w: these are %d points, more than %d; ask for longer steps",
			ErrTime, n, MaxPoints)
	}

	return q, nil
}

// Start is the start of a minute. Its JSON is that of a time, for 0 null.
type Start int64

// MarshalJSON implements json.Marshaler.
func (s Start) MarshalJSON() ([]byte, error) {
	if s == 0 {
		return []byte("null"), nil
	}
	return presence.AppendTime(nil, time.Unix(int64(s)*60, 0)), nil
}

// Point is one step of an Answer. At is its first minute.
type Point struct {
	At     Start `json:"at"`
	Max    int64 `json:"max"`
	Joins  int64 `json:"joins"`
	*OfDay       // nil: the step is no day
}

// Peak is the first minute with the greatest count. At 0: there was no user.
type Peak struct {
	Max int64 `json:"count"`
	At  Start `json:"at"`
}

// Answer has the statistics of a page.
type Answer struct {
	Page     string  `json:"page"` // without its site
	Now      int64   `json:"now"`
	Peak     Peak    `json:"peak"`
	Joins    int64   `json:"joins"`
	Visitors int64   `json:"visitors"`
	Points   []Point `json:"points"`
	Stale    bool    `json:"stale,omitempty"` // Now may be old
}

// Answer answers the question from what a Store returned and the current count.
//
// Visitors are the distinct users who arrived, but at least as many as were present at
// once: users who came earlier and stayed did not arrive in the time asked for.
func (q Question) Answer(page string, list []Minute, count int64, now time.Time) Answer {
	a := Answer{Page: presence.KeyOf(page), Now: count, Points: make([]Point, (q.To-q.From)/q.Step)}
	for i := range a.Points {
		a.Points[i].At = Start(q.From + int64(i)*q.Step)
	}

	running := Of(now)
	carried, at := int64(0), q.From // the points are done up to, not including, the minute at
	hold := func(until int64) {     // the count was carried until then
		for ; at < until; at++ {
			q.raise(&a, at, carried)
		}
	}

	var visitors hyperloglog.Union
	for _, m := range list {
		m.At = min(m.At, running) // clocks differ
		// Redis keeps counts and arrivals apart, so an element may have only one of them.
		if m.Counted {
			hold(m.At)
			if m.At >= q.From {
				q.raise(&a, m.At, max(m.Max, carried))
			}
			carried, at = m.Last, max(at, m.At+1)
		}

		if m.At >= q.From {
			a.Points[(m.At-q.From)/q.Step].Joins += m.Joins
			a.Joins += m.Joins
			visitors.Merge(m.Visitors)
		}
	}

	// What the store knew last holds up to now, and the current count may be newer than that.
	hold(running + 1)
	q.raise(&a, running, count)
	a.Visitors = max(visitors.Count(), a.Peak.Max)

	return a
}

// raise records that a minute had that many users.
func (q Question) raise(a *Answer, minute, users int64) {
	p := &a.Points[(minute-q.From)/q.Step]
	p.Max = max(p.Max, users)
	if users > a.Peak.Max {
		a.Peak = Peak{users, Start(minute)}
	}
}
