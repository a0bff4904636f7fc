package counter

import (
	"context"
	"math"
	"time"

	lru "github.com/hashicorp/golang-lru/v2"

	"headcount/counter/hyperloglog"
)

const (
	maxSpans   = 1 << 12   // spans that an Archive remembers, of 12 KB at most; those not asked for longest go
	maxCounts  = 1 << 16   // points that it remembers, likewise
	spanTrust  = time.Hour // after so long a span is read anew
	readAtOnce = 16        // steps of a unique in one read, and less than a span more: 1 ms or 2 of work
)

// breath is the pause within a long answer. Who only computes keeps a processor for 10 ms, and where there is one, calls
// that take microseconds would wait for it.
const breath = time.Millisecond

// stepsAtOnce is how many steps of sums top reads between two pauses: those of 4 counters with 90 days of hours, some 1.5 ms of work.
// A read of a counter costs as much as stepsOfRead of them at least.
const (
	stepsAtOnce = 4 * 90 * 24
	stepsOfRead = 32
)

// Archive answers questions about the history of counters.
//
// Each step of a unique may have 12 KB, so 90 days of hours are 26 MB. An Archive reads them once: it merges the
// registers of a span of steps that are over into one, and remembers that, and how many were seen in each point that is
// over. A span has the square root of half the steps that are kept, so a window over n steps reads at most
// 2√(2n) registers: 132 of 2,160 steps.
//
// What is over hardly changes. A span counts for one incarnation of its counter, so a delete makes it void, and for an
// hour, so what came late nevertheless (by a clock that went back, or an import) is seen by then. What a silent region
// is missing in is not remembered. All of it is in the memory of the process.
type Archive struct {
	store  Reader
	spans  *lru.Cache[spanOf, span]
	counts *lru.Cache[countOf, pointCount]
}

type (
	spanOf struct {
		key    string
		step   time.Duration
		number int64 // of the span since the Unix epoch
	}
	span struct {
		read        time.Time
		incarnation uint64
		seen        hyperloglog.Registers
	}
	countOf struct {
		key        string
		step, each time.Duration
		number     int64 // of the point since the Unix epoch
	}
	pointCount struct {
		read        time.Time
		incarnation uint64
		n           int64
	}
)

// NewArchive returns an archive of what is in a store.
func NewArchive(store Reader) *Archive {
	spans, err := lru.New[spanOf, span](maxSpans)
	if err != nil { // a size under 1
		panic(err)
	}
	counts, err := lru.New[countOf, pointCount](maxCounts)
	if err != nil {
		panic(err)
	}
	return &Archive{store: store, spans: spans, counts: counts}
}

// Ask answers a question about a counter of a rule, and returns the counter. It is stale when a region is missing in the
// answer. When the counter is of another kind than its rule the answer means nothing.
func (a *Archive) Ask(ctx context.Context, rule *Rule, key string, q Question) (Answer, Counter, error) {
	b := rule.bucketOf(uint32(q.Step / time.Second))
	if rule.Kind != Unique || b == nil {
		is, gains, err := a.store.History(ctx, key, q.Step, q.From, q.To)
		t := q.Tally()
		t.Add(gains)
		return t.Answer(), is, err
	}
	readings, err := a.store.Read(ctx, []string{key}, "", 0)
	if err != nil {
		return Answer{}, Counter{}, err
	}
	now, seconds := time.Now(), int64(q.Step/time.Second)
	r := &archiveRead{
		Archive: a, key: key, q: q, now: now, t: q.Tally(), is: readings[0].Counter,
		incarnation: readings[0].Version.Incarnation,
		span:        spanSteps(b),
		over:        floor(now.Add(-stepLate).Unix(), seconds),
		newest:      floor(now.Unix(), seconds),
	}
	if err := r.run(ctx); err != nil {
		return Answer{}, Counter{}, err
	}
	r.is.Stale = r.stale
	return r.answer(), r.is, nil
}

// spanSteps returns how many steps of a bucket a span has.
func spanSteps(b *Bucket) int64 {
	return max(1, int64(math.Ceil(math.Sqrt(float64(b.Kept/b.Step)/2))))
}

// archiveRead is one question about a unique. Only the caller of Ask uses it.
type archiveRead struct {
	*Archive
	key          string
	q            Question
	now          time.Time
	t            *Tally
	span         int64 // steps in one
	over, newest int64 // the first step in which somebody may still be added, and the one that is running

	is          Counter
	incarnation uint64 // what is remembered counts for this one
	stale       bool   // a region was missing in what was read
	mixed       bool   // so was something of another incarnation: nothing of the answer is to be remembered

	known []bool // points that were remembered
	n     []int64
}

func (r *archiveRead) run(ctx context.Context) error {
	r.recall()
	pending := r.q.From // what is before it is in the tally
	read := func(to int64) error {
		if pending >= to {
			return nil
		}
		err := r.read(ctx, pending, to)
		pending = to
		return err
	}
	for from := r.q.From; from < r.q.To; {
		number := floor(from, r.span)
		to := min((number+1)*r.span, r.q.To)
		if from > r.newest { // the store's clock may be ahead
			to = r.q.To
		}
		if seen, point, ok := r.recalled(number, from, to); ok {
			if err := read(from); err != nil {
				return err
			}
			r.t.see(point, seen)
			pending = to
		} else if to == r.q.To || to-pending >= readAtOnce {
			if err := read(to); err != nil {
				return err
			}
		}
		from = to
	}
	return read(r.q.To)
}

// recall finds the points that are remembered.
func (r *archiveRead) recall() {
	r.known, r.n = make([]bool, len(r.t.points)), make([]int64, len(r.t.points))
	for i := range r.known {
		if is, ok := r.counts.Get(r.point(i)); ok && r.counted(is.read, is.incarnation) {
			r.known[i], r.n[i] = true, is.n
		}
	}
}

func (r *archiveRead) point(i int) countOf {
	return countOf{r.key, r.q.Step, r.q.Each, r.q.From/r.q.Points + int64(i)}
}

// counted reports whether what was read then still counts.
func (r *archiveRead) counted(read time.Time, incarnation uint64) bool {
	return incarnation == r.incarnation && r.now.Sub(read) < spanTrust
}

// recalled returns a span that is remembered, if it may stand for its steps, and the point that it is part of: none when the
// points in which it lies are known.
func (r *archiveRead) recalled(number, from, to int64) (seen hyperloglog.Registers, point int64, ok bool) {
	if from != number*r.span || to != from+r.span {
		return seen, 0, false
	}
	is, ok := r.spans.Get(spanOf{r.key, r.q.Step, number})
	if !ok || !r.counted(is.read, is.incarnation) {
		return seen, 0, false
	}
	if r.q.Points == 0 {
		return is.seen, -1, true
	}
	first, last := (from-r.q.From)/r.q.Points, (to-1-r.q.From)/r.q.Points
	if first == last {
		return is.seen, first, true
	}
	for i := first; i <= last; i++ {
		if !r.known[i] {
			return seen, 0, false
		}
	}
	return is.seen, -1, true
}

// read reads steps, and remembers the spans among them.
func (r *archiveRead) read(ctx context.Context, from, to int64) error {
	is, gains, err := r.store.History(ctx, r.key, r.q.Step, from, to)
	if err != nil {
		return err
	}
	time.Sleep(breath)
	r.is = is
	r.t.Add(gains)
	r.stale = r.stale || is.Stale
	if is.Kind != Unique || is.Stale || is.Version.Incarnation != r.incarnation {
		r.mixed = true
		return nil
	}
	for number := floor(from+r.span-1, r.span); (number+1)*r.span <= min(to, r.over); number++ {
		var all hyperloglog.Union
		for ; len(gains) > 0 && gains[0].Number < (number+1)*r.span; gains = gains[1:] {
			if gains[0].Number >= number*r.span && gains[0].Seen != nil {
				all.Merge(*gains[0].Seen)
			}
		}
		r.spans.Add(spanOf{r.key, r.q.Step, number}, span{r.now, r.incarnation, all.Registers()})
	}
	return nil
}

// answer returns the answer, and remembers the points that are over.
func (r *archiveRead) answer() Answer {
	out := r.t.Answer()
	for i := range out.Values {
		switch end := r.q.From + int64(i+1)*r.q.Points; {
		case r.known[i]:
			out.Values[i] = r.n[i]
		case end <= r.over && !r.mixed && r.incarnation != 0:
			r.counts.Add(r.point(i), pointCount{r.now, r.incarnation, out.Values[i]})
		}
	}
	return out
}
