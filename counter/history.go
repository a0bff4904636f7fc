package counter

import (
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"

	"headcount/counter/hyperloglog"
	"headcount/presence"
)

// Bounds of what is asked about history.
const (
	MaxPoints     = 1500
	defaultPoints = 60
)

var (
	// ErrTime is in every error about a time that cannot be asked about. Its text says
	// what to ask instead.
	ErrTime = errors.New("bad time")
	// ErrHistory says that a counter has no history.
	ErrHistory = errors.New("the counter keeps no such history")
)

// Gain is what a counter gained in one step of time.
type Gain struct {
	Number int64 // of the step since the Unix epoch
	Value  int64 // of a Sum
	// Seen are the registers of a Unique: of all who were added in the step. Nobody changes them.
	Seen *hyperloglog.Registers
}

// Slot is the step in which a counter gained last, one for each bucket: it stands in
// the counter's State, so a change in the same step writes nothing else. When the
// next step begins the slot goes to the history beside the counter.
type Slot struct {
	Value  int64
	Number uint32 // of the step since the Unix epoch
	Step   uint32 // seconds; 0: the slot is free
}

// Slots are those of one counter, in no order.
type Slots [MaxBuckets]Slot

// Past is what a counter gained in a step that is over, and how long that is kept. Of a
// Unique it is of any step, and has Seen in place of a value.
type Past struct {
	Slot
	Kept time.Duration
	Seen *hyperloglog.Registers
}

// Gain adds what c has made of s to the slots of its buckets. A step never goes back when
// the clock does. Without a step none is over: what is gained counts in the newest.
func (s *State) Gain(step Step, c *Change, now time.Time) {
	if s.Kind != Sum || c.Verb != Add {
		return
	}
	for i := range c.Rule.Buckets {
		b := &c.Rule.Buckets[i]
		seconds := uint32(b.Step / time.Second)
		slot := s.Slots.of(seconds, c.Rule)
		number := max(uint32(now.Unix()/int64(seconds)), slot.Number)
		if step == nil && slot.Step != 0 {
			number = slot.Number
		}
		if slot.Step == 0 || slot.Number != number {
			if slot.Step != 0 {
				step.Past(c.Key, *slot, b.Kept)
			}
			*slot = Slot{Number: number, Step: seconds}
		}
		slot.Value = Saturated(slot.Value, c.Delta)
	}
}

// At is the slot of steps of that length, the zero Slot for none.
func (s *Slots) At(step time.Duration) Slot {
	for _, slot := range s {
		if slot.Step != 0 && time.Duration(slot.Step)*time.Second == step {
			return slot
		}
	}
	return Slot{}
}

// of is the slot of a step, or one that is free, or else one that the rule does not
// name any more, as a free one.
func (s *Slots) of(seconds uint32, rule *Rule) *Slot {
	for i := range s {
		if s[i].Step == seconds {
			return &s[i]
		}
	}
	for i := range s {
		if s[i].Step == 0 {
			return &s[i]
		}
	}
	for i := range s {
		if rule.bucketOf(s[i].Step) == nil {
			s[i] = Slot{}
			return &s[i]
		}
	}
	panic("a rule has more buckets than there are slots") // parseRule counts them
}

// bucketOf is the rule's bucket with that step, or nil.
func (rule *Rule) bucketOf(seconds uint32) *Bucket {
	for i := range rule.Buckets {
		if rule.Buckets[i].Step == time.Duration(seconds)*time.Second {
			return &rule.Buckets[i]
		}
	}
	return nil
}

// Saturated is a + b, or the nearest number that 64 bits hold.
func Saturated(a, b int64) int64 {
	sum, over := plus(a, b)
	switch {
	case !over:
		return sum
	case a < 0:
		return math.MinInt64
	default:
		return math.MaxInt64
	}
}

// Append appends the slots in use as text: " step:number:value" for each.
func (s *Slots) Append(b []byte) []byte {
	for i := range s {
		if s[i].Step != 0 {
			b = append(b, ' ')
			b = strconv.AppendUint(b, uint64(s[i].Step), 10)
			b = append(b, ':')
			b = strconv.AppendUint(b, uint64(s[i].Number), 10)
			b = append(b, ':')
			b = strconv.AppendInt(b, s[i].Value, 10)
		}
	}
	return b
}

// ParseSlots reads what Append wrote.
func ParseSlots(text string) (s Slots, err error) {
	i := 0
	for field := range strings.FieldsSeq(text) {
		step, rest, _ := strings.Cut(field, ":")
		number, value, _ := strings.Cut(rest, ":")
		n, err := strconv.ParseUint(step, 10, 32)
		m, err1 := strconv.ParseUint(number, 10, 32)
		v, err2 := strconv.ParseInt(value, 10, 64)
		if err := errors.Join(err, err1, err2); err != nil {
			return Slots{}, fmt.Errorf("slots: want step:number:value, got %.40q", field)
		}
		if i == len(s) {
			return Slots{}, fmt.Errorf("slots: more than %d", len(s))
		}
		s[i] = Slot{Value: v, Number: uint32(m), Step: uint32(n)}
		i++
	}
	return s, nil
}

// ForgetAt is when what was gained in a step that is kept for so long may be forgotten. It is kept a step longer, for
// who asks with a clock that is late.
func ForgetAt(number int64, step, kept time.Duration) time.Time {
	return time.Unix((number+2)*int64(step/time.Second), 0).Add(kept)
}

// Over reports whether what was gained in a step that is kept for so long may be forgotten.
func Over(number int64, step, kept time.Duration, now time.Time) bool {
	return !ForgetAt(number, step, kept).After(now)
}

// LookAgain is when a store looks whether the oldest gain, in the step of that number, may be forgotten. It waits at least
// a hundredth of the time that gains are kept, so that it does not look for every single one.
func LookAgain(number int64, step, kept time.Duration, now time.Time) time.Time {
	at := ForgetAt(number, step, kept)
	if later := now.Add(kept / 100); at.Before(later) {
		return later
	}
	return at
}

// With adds the running steps of s to the gains of steps that are over, from the
// number from to that before to.
func (s *State) With(gains []Gain, step time.Duration, from, to int64) []Gain {
	for _, slot := range s.Slots {
		n := int64(slot.Number)
		if time.Duration(slot.Step)*time.Second != step || step == 0 || n < from || n >= to {
			continue
		}
		if last := len(gains) - 1; last < 0 || gains[last].Number < n { // else it is over since s was read
			gains = append(gains, Gain{Number: n, Value: slot.Value})
		}
	}
	return gains
}

// Question is what is asked about the history of a counter: of which bucket, from which
// of its steps to that before which, and how many of them make a point.
type Question struct {
	Step     time.Duration // of the bucket
	From, To int64
	Points   int64         // steps in one; 0: no points are asked for
	Each     time.Duration // the length of a point
}

// Range is the question of a range. A zero time or step takes its default. The error is
// ErrTime, or ErrHistory when the rule keeps none.
func (rule *Rule) Range(from, to time.Time, each time.Duration, now time.Time) (Question, error) {
	if len(rule.Buckets) == 0 {
		return Question{}, ErrHistory
	}
	if each == 0 {
		each = rule.Buckets[0].Step
	}
	length := int64(each / time.Second)
	if length < 1 || each%time.Second != 0 {
		return Question{}, fmt.Errorf("%w: step: %s has no whole seconds; ask for a multiple of %s", ErrTime, each, stepText(rule.Buckets[0].Step))
	}
	last := floor(now.Unix(), length) + 1 // the point after the running one
	if !to.IsZero() {
		last = floor(to.Add(time.Second-1).Unix()+length-1, length)
	}
	first := last - defaultPoints
	if !from.IsZero() {
		first = floor(from.Unix(), length)
	} else { // what nobody keeps is not asked for unless somebody says so
		kept := int64(math.MaxInt64)
		for _, b := range rule.Buckets {
			if each%b.Step == 0 {
				kept = min(kept, floor(oldest(b, now)+length-1, length))
			}
		}
		first = max(first, min(kept, last-1))
	}
	switch {
	case first >= last:
		return Question{}, fmt.Errorf("%w: from is not before to; swap them", ErrTime)
	case last-first > MaxPoints:
		return Question{}, fmt.Errorf("%w: that is %d points; ask for at most %d, in longer steps", ErrTime, last-first, MaxPoints)
	}
	divides := false
	for _, b := range rule.Buckets {
		if each%b.Step != 0 {
			continue
		}
		divides = true
		if first*length >= oldest(b, now) {
			n := int64(each / b.Step)
			return Question{Step: b.Step, From: first * n, To: last * n, Points: n, Each: each}, nil
		}
	}
	if !divides {
		return Question{}, fmt.Errorf("%w: step: %s is no multiple of a step that is kept (%s)", ErrTime, stepText(each), rule.bucketsText())
	}
	return Question{}, fmt.Errorf("%w: from is longer ago than is kept in steps of which %s is a multiple (%s)", ErrTime, stepText(each), rule.bucketsText())
}

// Window is the question of what was gained in the time before now.
func (rule *Rule) Window(last time.Duration, now time.Time) (Question, error) {
	if len(rule.Buckets) == 0 {
		return Question{}, ErrHistory
	}
	for _, b := range rule.Buckets {
		if last <= b.Kept {
			from := floor(now.Add(-last).Unix(), int64(b.Step/time.Second))
			return Question{Step: b.Step, From: from, To: math.MaxUint32}, nil
		}
	}
	return Question{}, fmt.Errorf("%w: last: %s is longer than is kept (%s)", ErrTime, stepText(last), rule.bucketsText())
}

// oldest is the moment, in unix seconds, from which what was gained is surely kept.
func oldest(b Bucket, now time.Time) int64 {
	step := int64(b.Step / time.Second)
	return (floor(now.Add(-b.Kept).Unix(), step) - 1) * step
}

// floor is a / b, rounded down.
func floor(a, b int64) int64 {
	n := a / b
	if a%b < 0 {
		n--
	}
	return n
}

func (rule *Rule) bucketsText() string {
	var list []string
	for _, b := range rule.Buckets {
		list = append(list, stepText(b.Step)+":"+stepText(b.Kept))
	}
	return strings.Join(list, ", ")
}

// stepText writes a duration as rules do.
func stepText(d time.Duration) string {
	switch {
	case d > 0 && d%(24*time.Hour) == 0:
		return strconv.FormatInt(int64(d/(24*time.Hour)), 10) + "d"
	case d > 0 && d%time.Hour == 0:
		return strconv.FormatInt(int64(d/time.Hour), 10) + "h"
	case d > 0 && d%time.Minute == 0:
		return strconv.FormatInt(int64(d/time.Minute), 10) + "m"
	default:
		return d.String()
	}
}

// Tally adds up the answer to a question.
type Tally struct {
	q      Question
	points []int64
	total  int64

	// Of a Unique: all that was seen, and in the point at. They are nil while nothing was.
	all, some *hyperloglog.Union
	at        int64
}

// Tally begins to add up.
func (q Question) Tally() *Tally {
	t := &Tally{q: q}
	if q.Points > 0 {
		t.points = make([]int64, (q.To-q.From)/q.Points)
	}
	return t
}

// Add adds gains, which come oldest first, perhaps in several calls.
func (t *Tally) Add(gains []Gain) {
	for _, g := range gains {
		if g.Number < t.q.From || g.Number >= t.q.To {
			continue
		}
		at := int64(-1)
		if t.q.Points > 0 {
			at = (g.Number - t.q.From) / t.q.Points
		}
		if g.Seen != nil {
			t.see(at, *g.Seen)
			continue
		}
		t.total = Saturated(t.total, g.Value)
		if at >= 0 {
			t.points[at] = Saturated(t.points[at], g.Value)
		}
	}
}

func (t *Tally) see(at int64, seen hyperloglog.Registers) {
	if t.all == nil {
		t.all, t.some, t.at = &hyperloglog.Union{}, &hyperloglog.Union{}, at
	}
	t.all.Merge(seen)
	if at < 0 {
		return
	}
	if at != t.at {
		t.point()
		*t.some, t.at = hyperloglog.Union{}, at
	}
	t.some.Merge(seen)
}

// point puts down how many were seen in the point at.
func (t *Tally) point() {
	if t.some != nil && t.at >= 0 {
		t.points[t.at] = t.some.Count()
	}
}

// Answer is the answer to a question.
type Answer struct {
	Question
	Values []int64 // of its points
	Total  int64   // all that was gained, or how many distinct members were seen
}

// Answer returns what was added up.
func (t *Tally) Answer() Answer {
	t.point()
	return Answer{Question: t.q, Values: t.points, Total: t.Total()}
}

// Total is all that was gained, or how many distinct members were seen.
func (t *Tally) Total() int64 {
	if t.all != nil {
		return t.all.Count()
	}
	return t.total
}

// AppendJSON appends the answer to a range:
// {"key":"views:1","step":"5m","points":[{"at":"2030-10-10T12:10:00Z","value":3}],"total":3}.
func (a Answer) AppendJSON(b []byte, key string) []byte {
	q := a.Question
	b = append(b, `{"key":`...)
	b = presence.AppendString(b, presence.KeyOf(key))
	b = append(b, `,"step":`...)
	b = presence.AppendString(b, stepText(q.Each))
	b = append(b, `,"points":[`...)
	for i, value := range a.Values {
		if i > 0 {
			b = append(b, ',')
		}
		b = append(b, `{"at":`...)
		b = presence.AppendTime(b, time.Unix((q.From+int64(i)*q.Points)*int64(q.Step/time.Second), 0).UTC())
		b = append(b, `,"value":`...)
		b = strconv.AppendInt(b, value, 10)
		b = append(b, '}')
	}
	b = append(b, `],"total":`...)
	b = strconv.AppendInt(b, a.Total, 10)
	return append(b, '}')
}
