// Package minutes has the words, the contract and the arithmetic of what pages
// remember: per page and minute the greatest count, how many users arrived, and
// registers of who they were.
//
// A store remembers a minute only if something changed in it. The other minutes
// follow from the count with which the minute before them ended. So a page where
// nothing happens costs nothing, however many users it has.
package minutes

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"strconv"
	"time"

	"headcount/counter/hyperloglog"
	"headcount/presence"
)

// ErrTime is in every error about times that cannot be asked for.
var ErrTime = errors.New("bad time")

// MaxPoints bounds the points of one Answer.
const MaxPoints = 1500

// Of is the number of the minute that has t, counted from the Unix epoch.
func Of(t time.Time) int64 { return t.Unix() / 60 }

// Minute is what a page, or presence.Site, remembers of one minute.
type Minute struct {
	At int64 // see Of
	// Max is the greatest count in the minute, also the one with which it began. Last
	// is the count with which it ended. They are known only if Counted: one store
	// keeps counts apart from arrivals.
	Counted   bool
	Max, Last int64
	Joins     int64 // users who arrived
	Visitors  hyperloglog.Registers
}

// Store is a store that remembers minutes.
type Store interface {
	// Minutes returns what is kept of a page since the minute from, oldest first, the
	// running minute included. Before that it has the last minute with a count that
	// is kept from earlier, if there is one. Several elements may be about the same
	// minute: their joins add up.
	Minutes(ctx context.Context, page string, from int64) ([]Minute, error)
}

// Visits are the arrivals of one minute. The zero Visits are none.
type Visits struct {
	Joins     int64
	registers hyperloglog.Registers
	pending   []string // users who are not in registers yet; at most maxWaiting
}

// maxPending users are added to the registers together, since to add one takes as long.
const maxPending = 64

// Add counts an arrival.
func (v *Visits) Add(u presence.User) {
	v.Joins++
	v.pending = append(v.pending, string(binary.BigEndian.AppendUint64(nil, uint64(u))))
	if len(v.pending) == maxPending {
		v.addPending()
	}
}

func (v *Visits) addPending() {
	if len(v.pending) > 0 {
		v.registers.Add(v.pending...)
		v.pending = nil
	}
}

// Registers are those of the users who arrived, not to be changed.
func (v *Visits) Registers() hyperloglog.Registers {
	v.addPending()
	return v.registers
}

// AppendVisits appends the form in which stores keep arrivals; ParseVisits reads it.
func AppendVisits(b []byte, joins int64, visitors hyperloglog.Registers) []byte {
	return append(binary.AppendUvarint(b, uint64(joins)), visitors.Bytes()...)
}

// ParseVisits takes b over.
func ParseVisits(b []byte) (joins int64, visitors hyperloglog.Registers, err error) {
	n, size := binary.Uvarint(b)
	if size <= 0 {
		return 0, visitors, errors.New("arrivals without a number")
	}
	visitors, err = hyperloglog.Parse(b[size:])
	return int64(n), visitors, err
}

// Question is about the minutes from From to before To, in steps. From and To are
// multiples of Step since the Unix epoch, and To is after the running minute.
type Question struct{ From, To, Step int64 }

// Defaults of Ask.
const (
	defaultLast = 24 * time.Hour
	defaultStep = 5 * time.Minute
)

// Ask checks what somebody asks for: the time before now, in steps; 0 stands for the
// default of both. Kept is how long minutes are kept; the default is never longer.
func Ask(last, step, retention time.Duration, now time.Time) (Question, error) {
	if last == 0 {
		last = min(defaultLast, retention)
	}
	if step == 0 {
		step = defaultStep
	}
	switch {
	case last > retention:
		return Question{}, fmt.Errorf("%w: minutes are kept for %s only", ErrTime, retention)
	case step < time.Minute || step%time.Minute != 0:
		return Question{}, fmt.Errorf("%w: a step is a whole number of minutes", ErrTime)
	}
	q := Question{Step: int64(step / time.Minute)}
	q.From = now.Add(-last).Unix() / 60 / q.Step * q.Step
	q.To = (Of(now)/q.Step + 1) * q.Step
	if n := (q.To - q.From) / q.Step; n > MaxPoints {
		return Question{}, fmt.Errorf("%w: these are %d points, more than %d; ask for longer steps", ErrTime, n, MaxPoints)
	}
	return q, nil
}

// Point is one step of an Answer. At is its first minute.
type Point struct{ At, Max, Joins int64 }

// Answer is what a page remembers.
type Answer struct {
	Page     string
	Now      int64
	Peak     Point // the first minute with the greatest count; At 0: there was nobody
	Joins    int64
	Visitors int64
	Points   []Point
}

// Answer answers the question from what a Store returned, with the count of now.
//
// Visitors are the distinct users who arrived, but not fewer than were there at once:
// those who came before the time asked and stayed did not arrive in it.
func (q Question) Answer(page string, list []Minute, count int64, now time.Time) Answer {
	a := Answer{Page: page, Now: count, Points: make([]Point, (q.To-q.From)/q.Step)}
	for i := range a.Points {
		a.Points[i].At = q.From + int64(i)*q.Step
	}
	running := Of(now)
	carried, at := int64(0), q.From // every minute before at is in the points
	hold := func(until int64) {     // carried is the count up to then
		for ; at < until; at++ {
			q.raise(&a, at, carried)
		}
	}
	var visitors hyperloglog.Union
	for _, m := range list {
		m.At = min(m.At, running) // clocks differ
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
	hold(running + 1)
	q.raise(&a, running, count)
	a.Visitors = max(visitors.Count(), a.Peak.Max)
	return a
}

// raise notes that there were so many users in a minute.
func (q Question) raise(a *Answer, minute, users int64) {
	p := &a.Points[(minute-q.From)/q.Step]
	p.Max = max(p.Max, users)
	if users > a.Peak.Max {
		a.Peak = Point{At: minute, Max: users}
	}
}

// AppendJSON appends the outside form.
func (a *Answer) AppendJSON(b []byte) []byte {
	moment := func(minute int64) { b = presence.AppendTime(b, time.Unix(minute*60, 0)) }
	number := func(name string, n int64) {
		b = append(b, name...)
		b = strconv.AppendInt(b, n, 10)
	}
	b = append(b, `{"page":`...)
	b = presence.AppendString(b, presence.KeyOf(a.Page))
	number(`,"now":`, a.Now)
	number(`,"peak":{"count":`, a.Peak.Max)
	b = append(b, `,"at":`...)
	if a.Peak.Max == 0 {
		b = append(b, "null"...)
	} else {
		moment(a.Peak.At)
	}
	number(`},"joins":`, a.Joins)
	number(`,"visitors":`, a.Visitors)
	b = append(b, `,"points":[`...)
	for i, p := range a.Points {
		if i > 0 {
			b = append(b, ',')
		}
		b = append(b, `{"at":`...)
		moment(p.At)
		number(`,"max":`, p.Max)
		number(`,"joins":`, p.Joins)
		b = append(b, '}')
	}
	return append(b, "]}\n"...)
}
