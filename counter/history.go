package counter

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"headcount/hyperloglog"
	"headcount/presence"
)

// Bounds of a question about history.
const (
	MaxPoints     = 1500
	defaultPoints = 60
)

var (
	// ErrTime is wrapped by every error about a time that a history does not cover. The error says what to ask instead.
	ErrTime = errors.New("bad time")
	// ErrHistory means that the rule of a counter keeps no history.
	ErrHistory = errors.New("the counter keeps no such history")
)

// Gain is the increment of a counter in one time bucket.
type Gain struct {
	Number int64 // index of the time bucket since the Unix epoch
	Value  int64 // of a Sum
	// Seen has the registers of a Unique: of all members added in the time bucket. It must not be changed.
	Seen *hyperloglog.Registers
}

// Slot is the running time bucket of one resolution. Slots are a part of State, so an increment in the same time
// bucket writes nothing else. When the next one begins, the slot moves to the history beside the counter.
type Slot struct {
	Value  int64
	Number uint32 // index of the time bucket since the Unix epoch
	Step   uint32 // length in seconds; 0: the slot is free
}

// Slots has the slots of one counter, in any order.
type Slots [MaxResolutions]Slot

// maxAhead is how far the running time bucket may be ahead of the clock, in seconds: the clocks of two owners differ by
// less.
const maxAhead = 60

// Gain adds the delta of c to the slots of s, and passes those that are complete to tx. When the clock goes back, the
// newest time bucket goes on. Without a tx no bucket is completed, and the delta counts in the newest one.
func (s *State) Gain(tx Tx, c *Change, now time.Time) {
	if !s.Kind.Gains() || c.Verb != Add {
		return
	}

	for i := range c.Rule.Resolutions {
		b := &c.Rule.Resolutions[i]
		seconds := uint32(b.Step / time.Second)
		slot := s.Slots.of(seconds, c.Rule)
		isFree := slot.Step == 0

		number := uint32(now.Unix() / int64(seconds))
		// The clock was far ahead, and was set: what was gained then counts as gained now. Otherwise everything would
		// count in the future for as long.
		if int64(slot.Number)*int64(seconds) > now.Unix()+maxAhead {
			slot.Number = number
		}

		// The clock may have gone back.
		number = max(number, slot.Number)
		if tx == nil && !isFree {
			number = slot.Number
		}

		// Without a tx none is complete, because number is then that of the slot.
		isComplete := !isFree && slot.Number != number
		if isComplete {
			tx.Past(c.Key, *slot, b.Kept)
		}
		if isFree || isComplete {
			*slot = Slot{Number: number, Step: seconds}
		}
		slot.Value = Saturated(slot.Value, c.Delta)
	}
}

// At returns the slot with time buckets of that length, or the zero Slot.
func (s *Slots) At(step time.Duration) Slot {
	for _, slot := range s {
		if slot.Step != 0 && time.Duration(slot.Step)*time.Second == step {
			return slot
		}
	}

	return Slot{}
}

// of returns the slot with time buckets of that length, or a free one. If none is free, it frees one whose length the
// rule no longer has; there must be one, because a rule has no more resolutions than a counter has slots.
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
		if rule.resolutionOf(s[i].Step) == nil {
			s[i] = Slot{}
			return &s[i]
		}
	}

	panic("a rule has more resolutions than there are slots") // parseRule counts them
}

// resolutionOf returns the rule's resolution with that step, or nil.
func (rule *Rule) resolutionOf(seconds uint32) *Resolution {
	for i := range rule.Resolutions {
		if rule.Resolutions[i].Step == time.Duration(seconds)*time.Second {
			return &rule.Resolutions[i]
		}
	}

	return nil
}

// Saturated returns a + b, or the nearest int64 if the sum overflows.
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

// Append appends the slots in use as text, " step:number:value" for each.
func (s *Slots) Append(b []byte) []byte {
	for i := range s {
		if s[i].Step != 0 {
			b = fmt.Appendf(b, " %d:%d:%d", s[i].Step, s[i].Number, s[i].Value)
		}
	}

	return b
}

// ParseSlots parses the text that Append wrote.
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

// ForgetAt is when a time bucket with that retention expires: one step late, for readers whose clock is behind the
// store's.
func ForgetAt(number int64, step, kept time.Duration) time.Time {
	return time.Unix((number+2)*int64(step/time.Second), 0).Add(kept)
}

// With appends the running time bucket of that length to the completed ones in gains, if its index is from from to
// to-1.
func (s *State) With(gains []Gain, step time.Duration, from, to int64) []Gain {
	slot := s.Slots.At(step)
	n := int64(slot.Number)
	if slot.Step == 0 || n < from || n >= to {
		return gains
	}

	// The time bucket may have been completed after s was read. A later one may be there from when the clock was ahead.
	isCompleted := slices.ContainsFunc(gains, func(g Gain) bool { return g.Number == n })
	if !isCompleted {
		gains = append(gains, Gain{Number: n, Value: slot.Value})
	}

	return gains
}

// Question is a question about a counter's history, in terms of the time buckets that answer it.
type Question struct {
	Step     time.Duration // length of the time buckets
	From, To int64         // the first index, and the one after the last
	Points   int64         // time buckets per point; 0: only the total is wanted
	Each     time.Duration // length of a point
}

// Range returns the question for a range of points of length each. A zero argument means its default. The error is
// ErrTime, or ErrHistory if the rule keeps no history.
func (rule *Rule) Range(from, to time.Time, each time.Duration, now time.Time) (Question, error) {
	if len(rule.Resolutions) == 0 {
		return Question{}, ErrHistory
	}
	if each == 0 {
		each = rule.Resolutions[0].Step
	}

	length := int64(each / time.Second)
	if length < 1 || each%time.Second != 0 {
		const what = "%w: step: %s has no whole seconds; ask for a multiple of %s"
		return Question{}, fmt.Errorf(what, ErrTime, each, stepText(rule.Resolutions[0].Step))
	}

	last := floorDiv(now.Unix(), length) + 1 // the index after the running point
	if !to.IsZero() {
		// Rounded up to whole seconds, and then to whole points.
		last = floorDiv(to.Add(time.Second-1).Unix()+length-1, length)
	}
	first := rule.firstPoint(last, length, now)
	if !from.IsZero() {
		first = floorDiv(from.Unix(), length)
	}

	if first >= last {
		return Question{}, fmt.Errorf("%w: from is not before to; swap them", ErrTime)
	}
	if n := last - first; n > MaxPoints {
		return Question{}, fmt.Errorf("%w: that is %d points; ask for at most %d, in longer steps",
			ErrTime, n, MaxPoints)
	}

	return rule.question(first, last, each, now)
}

// firstPoint returns the index of the first point by default, for points of some seconds up to last. A history that
// began later than the default number of points ago has fewer.
func (rule *Rule) firstPoint(last, seconds int64, now time.Time) int64 {
	kept := int64(math.MaxInt64)
	for _, b := range rule.Resolutions {
		if time.Duration(seconds)*time.Second%b.Step == 0 {
			// Rounded up, because a point of which a part has expired would be too low.
			kept = min(kept, floorDiv(oldest(b, now)+seconds-1, seconds))
		}
	}

	// The running point is always asked for, even if it is longer than anything that is kept.
	return max(last-defaultPoints, min(kept, last-1))
}

// question returns the question for points of length each, from the finest time buckets that answer it.
func (rule *Rule) question(first, last int64, each time.Duration, now time.Time) (Question, error) {
	divides := false
	for _, b := range rule.Resolutions {
		if each%b.Step != 0 {
			continue
		}

		divides = true
		// The finest come first.
		if first*int64(each/time.Second) >= oldest(b, now) {
			n := int64(each / b.Step)
			return Question{Step: b.Step, From: first * n, To: last * n, Points: n, Each: each}, nil
		}
	}

	what := "%w: step: %s is no multiple of a step that is kept (%s)"
	if divides {
		what = "%w: from is longer ago than is kept for steps that divide %s (%s)"
	}

	return Question{}, fmt.Errorf(what, ErrTime, stepText(each), rule.resolutionsText())
}

// Window returns the question for the total of the time before now.
func (rule *Rule) Window(last time.Duration, now time.Time) (Question, error) {
	if len(rule.Resolutions) == 0 {
		return Question{}, ErrHistory
	}

	for _, b := range rule.Resolutions {
		if last <= b.Kept {
			from := floorDiv(now.Add(-last).Unix(), int64(b.Step/time.Second))
			// A window has no end, because the store's clock may be ahead.
			return Question{Step: b.Step, From: from, To: math.MaxUint32}, nil
		}
	}

	return Question{}, fmt.Errorf("%w: last: %s is longer than is kept (%s)",
		ErrTime, stepText(last), rule.resolutionsText())
}

// oldest returns the time, in unix seconds, of the oldest time bucket that is kept for sure.
func oldest(b Resolution, now time.Time) int64 {
	step := int64(b.Step / time.Second)

	// A time bucket is kept for one step more than Kept, see ForgetAt.
	return (floorDiv(now.Add(-b.Kept).Unix(), step) - 1) * step
}

// floorDiv returns a / b rounded down, also for a negative a.
func floorDiv(a, b int64) int64 {
	n := a / b
	if a%b < 0 {
		n--
	}

	return n
}

func (rule *Rule) resolutionsText() string {
	var list []string
	for _, b := range rule.Resolutions {
		list = append(list, stepText(b.Step)+":"+stepText(b.Kept))
	}

	return strings.Join(list, ", ")
}

// stepText formats a duration in the syntax of rules.
func stepText(d time.Duration) string {
	units := []struct {
		length time.Duration
		name   string
	}{{24 * time.Hour, "d"}, {time.Hour, "h"}, {time.Minute, "m"}}
	for _, unit := range units {
		if d > 0 && d%unit.length == 0 {
			return strconv.FormatInt(int64(d/unit.length), 10) + unit.name
		}
	}

	return d.String()
}

// Tally adds up the answer to a question.
type Tally struct {
	q      Question
	points []int64
	total  int64

	// For a Unique: the union of everything, and that of the point with the index at. Both are nil before the first
	// registers. One union for the point is enough, because time buckets come in order.
	all, some *hyperloglog.Union
	at        int64
}

// Tally returns an empty Tally for the question.
func (q Question) Tally() *Tally {
	t := &Tally{q: q}
	if q.Points > 0 {
		t.points = make([]int64, (q.To-q.From)/q.Points)
	}

	return t
}

// Add adds time buckets. They must come oldest first, possibly in several calls.
func (t *Tally) Add(gains []Gain) {
	for _, g := range gains {
		if g.Number < t.q.From || g.Number >= t.q.To {
			continue
		}

		at := int64(-1)
		if t.q.Points > 0 {
			at = (g.Number - t.q.From) / t.q.Points
		}
		// Registers are united and not added: who was seen in several time buckets counts once.
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

// see adds registers to the total and to the point at; a negative at means no point.
func (t *Tally) see(at int64, seen hyperloglog.Registers) {
	if t.all == nil {
		t.all = &hyperloglog.Union{}
		t.some = &hyperloglog.Union{}
		t.at = at
	}

	t.all.Merge(seen)
	if at < 0 {
		return
	}

	// The time buckets of a point come together.
	if at != t.at {
		t.point()
		*t.some = hyperloglog.Union{}
		t.at = at
	}
	t.some.Merge(seen)
}

// point stores the estimate of the point at, which is complete.
func (t *Tally) point() {
	if t.some != nil && t.at >= 0 {
		t.points[t.at] = t.some.Count()
	}
}

// Answer is the answer to a question.
type Answer struct {
	Question
	Values []int64 // of the points
	Total  int64   // the sum of increments, or the number of distinct members
}

// Answer completes the tally and returns the answer.
func (t *Tally) Answer() Answer {
	t.point()

	return Answer{Question: t.q, Values: t.points, Total: t.Total()}
}

// Total returns the sum of increments, or the number of distinct members.
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
	seconds := int64(q.Step / time.Second)

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
		// A point is named by the beginning of its time.
		b = presence.AppendTime(b, time.Unix((q.From+int64(i)*q.Points)*seconds, 0).UTC())
		b = append(b, `,"value":`...)
		b = strconv.AppendInt(b, value, 10)
		b = append(b, '}')
	}

	b = append(b, `],"total":`...)
	b = strconv.AppendInt(b, a.Total, 10)

	return append(b, '}')
}
