package counter

import (
	"context"
	"math"
	"time"

	lru "github.com/hashicorp/golang-lru/v2"

	"headcount/hyperloglog"
)

const (
	maxSpans   = 1 << 12   // cached spans, of 12 KB at most
	maxCounts  = 1 << 16   // cached points
	maxAge     = time.Hour // of a cached span or point
	readAtOnce = 16        // time buckets of a unique in one read, and less than a span more: 1 ms or 2 of work
)

// breath is the pause between two parts of a long answer. Go switches from a goroutine that computes to the next one
// only after 10 ms, and with one processor, calls that take microseconds would wait that long.
const breath = time.Millisecond

// stepsAtOnce is how many time buckets of sums a top list reads between two pauses: those of 4 counters with 90 days
// of hours, about 1.5 ms of work. Each counter counts as at least stepsOfRead of them.
const (
	stepsAtOnce = 4 * 90 * 24
	stepsOfRead = 32
)

// Archive answers questions about the history of counters.
//
// A time bucket of a unique may have 12 KB, so 90 days of hours are 26 MB. An Archive reads them once. It merges the
// registers of a span of consecutive completed time buckets and caches the union, and it caches the estimate of each
// completed point. The number of time buckets in a span is the square root of half of those that are kept, so a window
// over n of them reads at most 2√(2n) registers: 132 of 2,160.
//
// Completed time buckets hardly change. A cached span is valid for one incarnation of its counter, so a delete discards
// it, and for an hour, after which late changes (of a clock that went back, or of an import) are visible. Answers that
// lack a region are not cached. The cache is in the memory of the process.
//
// A counter that does not exist has nothing to cache, so of its history only the newest time buckets are read. Other
// regions may have made it seconds ago.
type Archive struct {
	store  Reader
	spans  *lru.Cache[spanOf, span]
	counts *lru.Cache[countOf, pointCount]
}

type (
	spanOf struct {
		key    string
		step   time.Duration
		number int64 // index of the span since the Unix epoch
	}
	span struct {
		read        time.Time
		incarnation uint64
		seen        hyperloglog.Registers
	}
	countOf struct {
		key        string
		step, each time.Duration
		number     int64 // index of the point since the Unix epoch
	}
	pointCount struct {
		read        time.Time
		incarnation uint64
		n           int64
	}
)

// NewArchive returns an Archive of a store.
func NewArchive(store Reader) *Archive {
	spans, _ := lru.New[spanOf, span](maxSpans) // fails only for a size under 1
	counts, _ := lru.New[countOf, pointCount](maxCounts)

	return &Archive{store: store, spans: spans, counts: counts}
}

// Ask answers a question about a counter of a rule, and returns the counter, which is Stale if the answer lacks a
// region. If the counter has another kind than its rule, the answer has no meaning.
func (a *Archive) Ask(ctx context.Context, rule *Rule, key string, q Question) (Answer, Counter, error) {
	b := rule.resolutionOf(uint32(q.Step / time.Second))
	if !rule.Kind.Estimates() || b == nil {
		// A time bucket of a sum has few bytes, so nothing needs to be cached.
		is, gains, err := a.store.History(ctx, key, q.Step, q.From, q.To)
		t := q.Tally()
		t.Add(gains)
		return t.Answer(), is, err
	}

	// The counter comes first: its incarnation says what the cache is good for.
	readings, err := a.store.Read(ctx, []string{key}, "", 0)
	if err != nil {
		return Answer{}, Counter{}, err
	}

	now := time.Now()
	seconds := int64(q.Step / time.Second)
	r := &archiveRead{
		Archive:     a,
		key:         key,
		q:           q,
		now:         now,
		t:           q.Tally(),
		is:          readings[0].Counter,
		incarnation: readings[0].Version.Incarnation,
		span:        spanSteps(b),
		over:        floorDiv(now.Add(-stepLate).Unix(), seconds),
		newest:      floorDiv(now.Unix(), seconds),
	}
	if err := r.run(ctx); err != nil {
		return Answer{}, Counter{}, err
	}
	r.is.Stale = r.stale

	return r.answer(), r.is, nil
}

// spanSteps returns the number of time buckets in a span.
func spanSteps(b *Resolution) int64 {
	return max(1, int64(math.Ceil(math.Sqrt(float64(b.Kept/b.Step)/2))))
}

// archiveRead is the state of answering one question about a unique. Only the caller of Ask uses it.
type archiveRead struct {
	*Archive
	key          string
	q            Question
	now          time.Time
	t            *Tally
	span         int64 // time buckets in a span
	over, newest int64 // the first time bucket that may still change, and the running one

	pending     int64 // the first time bucket that is not in the tally
	is          Counter
	incarnation uint64 // for which cached spans and points are valid
	stale       bool   // a read lacked a region
	mixed       bool   // a read lacked a region or had another incarnation, so the answer must not be cached

	known []bool // points that are cached
	n     []int64
}

// run adds to the tally all time buckets of the question, from cached spans where it can. It delays reads of the
// others until they are worth a read.
func (r *archiveRead) run(ctx context.Context) error {
	r.recall()
	first := r.q.From
	if !r.is.Kind.Estimates() { // the counter does not exist
		// Another region may have made the counter a moment ago, so the newest time buckets may have something.
		first = max(first, min(r.newest, r.q.To)-1)
	}

	r.pending = first
	for from := first; from < r.q.To; {
		number := floorDiv(from, r.span)
		to := min((number+1)*r.span, r.q.To)
		if from > r.newest { // the store's clock may be ahead
			to = r.q.To
		}

		seen, point, isCached := r.recalled(number, from, to)
		isWorthARead := to == r.q.To || to-r.pending >= readAtOnce
		var err error
		switch {
		case isCached:
			// Time buckets come in order, so those before the span go first.
			err = r.readUntil(ctx, from)
			r.t.see(point, seen)
			r.pending = to
		case isWorthARead:
			err = r.readUntil(ctx, to)
		}
		if err != nil {
			return err
		}

		from = to
	}

	return r.readUntil(ctx, r.q.To)
}

// readUntil reads what is pending before a time bucket.
func (r *archiveRead) readUntil(ctx context.Context, to int64) error {
	if r.pending >= to {
		return nil
	}

	err := r.read(ctx, r.pending, to)
	r.pending = to

	return err
}

// recall looks up the cached points.
func (r *archiveRead) recall() {
	r.known = make([]bool, len(r.t.points))
	r.n = make([]int64, len(r.t.points))
	for i := range r.known {
		is, ok := r.counts.Get(r.point(i))
		// A cached point of another life of the counter, or one that is too old, is none.
		if ok && r.counted(is.read, is.incarnation) {
			r.known[i] = true
			r.n[i] = is.n
		}
	}
}

func (r *archiveRead) point(i int) countOf {
	return countOf{r.key, r.q.Step, r.q.Each, r.q.From/r.q.Points + int64(i)}
}

// counted reports whether a cache entry is still valid.
func (r *archiveRead) counted(read time.Time, incarnation uint64) bool {
	return incarnation == r.incarnation && r.now.Sub(read) < maxAge
}

// recalled returns a cached span, if it is valid and the question has all of its time buckets, and the point that
// contains it. If several points share the span, it can be used only when the cache has all of them; the point is
// then -1.
func (r *archiveRead) recalled(number, from, to int64) (seen hyperloglog.Registers, point int64, ok bool) {
	// At the ends of a question only a part of a span is wanted, and a union of registers cannot be taken apart.
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

	first := (from - r.q.From) / r.q.Points
	last := (to - 1 - r.q.From) / r.q.Points
	// Within one point the union of the whole span is a part of that point's.
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

// read adds time buckets from the store to the tally, and caches the complete spans among them.
func (r *archiveRead) read(ctx context.Context, from, to int64) error {
	is, gains, err := r.store.History(ctx, r.key, r.q.Step, from, to)
	if err != nil {
		return err
	}

	// Others run between two parts of a long answer: see breath.
	time.Sleep(breath)
	r.is = is
	r.t.Add(gains)
	r.stale = r.stale || is.Stale
	// A counter that was made again meanwhile has another past, which must not be cached under the former incarnation.
	if !is.Kind.Estimates() || is.Stale || is.Version.Incarnation != r.incarnation {
		r.mixed = true
		return nil
	}

	r.keepSpans(from, to, gains)

	return nil
}

// keepSpans caches the complete spans among time buckets that were read.
func (r *archiveRead) keepSpans(from, to int64, gains []Gain) {
	// Time buckets from over on may still change, so their spans are not complete.
	for number := floorDiv(from+r.span-1, r.span); (number+1)*r.span <= min(to, r.over); number++ {
		var all hyperloglog.Union
		for ; len(gains) > 0 && gains[0].Number < (number+1)*r.span; gains = gains[1:] {
			if gains[0].Number >= number*r.span && gains[0].Seen != nil {
				all.Merge(*gains[0].Seen)
			}
		}
		// A span without any time bucket is kept as well: otherwise it would be read again each time.
		r.spans.Add(spanOf{r.key, r.q.Step, number}, span{r.now, r.incarnation, all.Registers()})
	}
}

// answer returns the answer, and caches its completed points.
func (r *archiveRead) answer() Answer {
	out := r.t.Answer()
	// A counter that does not exist has no incarnation whose end would make its points invalid.
	mayCache := !r.mixed && r.incarnation != 0
	for i := range out.Values {
		if r.known[i] {
			out.Values[i] = r.n[i]
			continue
		}

		// A point that may still grow is computed anew for each answer.
		end := r.q.From + int64(i+1)*r.q.Points
		if mayCache && end <= r.over {
			r.counts.Add(r.point(i), pointCount{r.now, r.incarnation, out.Values[i]})
		}
	}

	return out
}
