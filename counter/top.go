package counter

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	lru "github.com/hashicorp/golang-lru/v2"
	"github.com/rs/zerolog"
)

const (
	// TopMost is the maximum length of a top list. Fewer than TopMost counters can have more than a thousandth of all
	// increments.
	TopMost = 1000
	// MaxTop is the maximum number of counters in one answer.
	MaxTop = 100

	minRead    = 64  // candidates, at least, whose history is read for an answer
	blockSteps = 16  // closed time buckets whose lists are cached as one sum
	topBlocks  = 512 // sums in the cache

	// closeLate is the time from the end of a time bucket to closing it: slow writes have set their marks by then.
	closeLate = 5 * time.Second
	stepLate  = time.Minute // after the end of a time bucket, until nothing can count or be marked in it any more
	markedFor = time.Minute // until a mark is set again: a store that loses data may have lost it
	maxBehind = 256         // long time buckets that are closed late, when no process ran for a while
)

// Gained is a counter and its increment.
type Gained struct {
	Key   string `json:"key"`
	Value int64  `json:"value"`
}

// TopList has the counters that gained most in a completed time bucket, most first, at most TopMost.
type TopList struct {
	Number int64 // index of the time bucket
	Most   []Gained
}

// TopStore is the part of a store that keeps candidates for top lists, and the lists. A match names a rule.
type TopStore interface {
	// Mark marks keys as candidates in a time bucket of the rule's finest step. Marks are as durable as changes and
	// stay until KeepTop.
	Mark(ctx context.Context, match string, number int64, keys []string) error
	// Marked returns the marked keys of a rule by the index of the time bucket.
	Marked(ctx context.Context, match string) (map[int64][]string, error)
	// KeepTop stores a list for that long, and deletes the given marks of its time bucket.
	KeepTop(
		ctx context.Context, match string, step time.Duration, list TopList, kept time.Duration, marks []string,
	) error
	// TopLists returns the lists of time buckets of length step, with the indexes from from to to-1, in any order.
	TopLists(ctx context.Context, match string, step time.Duration, from, to int64) ([]TopList, error)
	// Running returns for each of the distinct keys its newest slot of that step, or the zero Slot.
	Running(ctx context.Context, keys []string, step time.Duration) ([]Slot, error)
	// Histories returns for each of the distinct keys the time buckets that Reader.History returns.
	Histories(ctx context.Context, keys []string, step time.Duration, from, to int64) ([][]Gain, error)
}

// openStep has the increments of one running time bucket that this process made.
type openStep struct {
	prunedMap
	marked map[string]time.Time // when this process marked keys in the store
}

// isMarked reports whether this process has marked key of late.
func (s *openStep) isMarked(key string) bool { return time.Since(s.marked[key]) < markedFor }

// topOf is the state of one rule with top.
type topOf struct {
	mu   sync.Mutex
	open map[int64]*openStep // the newest time bucket and its neighbours, because writes overlap its beginning and end

	next []int64 // by resolution, the index of the next list to make; only the closer uses it
}

// atLocked returns the open time bucket with that index.
func (r *topOf) atLocked(number int64) *openStep {
	s := r.open[number]
	if s != nil {
		return s
	}

	// Three stay at most. A time bucket that was dropped too early begins anew, and marks some keys a second time.
	maps.DeleteFunc(r.open, func(n int64, _ *openStep) bool { return n < number-1 || n > number+1 })
	s = &openStep{prunedMap: prunedMap{keys: map[string]int64{}}, marked: map[string]time.Time{}}
	r.open[number] = s

	return s
}

// add adds n to key and reports whether key has to be marked: it is not marked yet, and may have more than a
// thousandth of the total.
func (r *topOf) add(number int64, key string, n int64) bool {
	r.mu.Lock()
	defer r.mu.Unlock()

	s := r.atLocked(number)
	gained := s.add(key, n)

	return gained > s.total/TopMost && !s.isMarked(key)
}

// isMarked reports whether this process has marked key in a time bucket of late.
func (r *topOf) isMarked(number int64, key string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()

	s := r.open[number]

	return s != nil && s.isMarked(key)
}

// mark notes that keys are marked in the store.
func (r *topOf) mark(number int64, keys []string) {
	r.mu.Lock()
	defer r.mu.Unlock()

	s := r.open[number]
	if s == nil { // the time bucket has been replaced by newer ones
		return
	}

	for _, key := range keys {
		// A key may be a slice of a request, all of which it would keep in memory.
		s.marked[strings.Clone(key)] = time.Now()
	}
}

// TopTracker finds the counters that gain most under the rules with top, from the changes of its process. The package's
// documentation has the algorithm.
type TopTracker struct {
	store  TopStore
	rules  map[*Rule]*topOf
	blocks *lru.Cache[blockOf, map[string]int64]
	log    zerolog.Logger
	ahead  atomic.Int64 // how far the store's clock is ahead of this process's, in nanoseconds

	stop context.CancelFunc
	wg   sync.WaitGroup // the closer
}

// blockOf names the sum of blockSteps consecutive lists.
type blockOf struct {
	rule  *Rule
	level int // index in rule.Resolutions
	first int64
}

// NewTopTracker returns a tracker of changes in store. Close stops the tracker, not the store.
func NewTopTracker(store TopStore, rules *Rules, log zerolog.Logger) *TopTracker {
	t := &TopTracker{store: store, rules: map[*Rule]*topOf{}, log: log}
	for _, rule := range rules.All() {
		if rule.Top {
			t.rules[rule] = &topOf{open: map[int64]*openStep{}, next: make([]int64, len(rule.Resolutions))}
		}
	}
	t.blocks, _ = lru.New[blockOf, map[string]int64](topBlocks) // fails only for a size under 1

	ctx, stop := context.WithCancel(context.Background())
	t.stop = stop
	// Without rules with top nothing has to be closed.
	if len(t.rules) > 0 {
		t.wg.Go(func() { t.run(ctx) })
	}

	return t
}

// Close stops the closer and waits for it.
func (t *TopTracker) Close() error {
	t.stop()
	t.wg.Wait()

	return nil
}

// now returns the time by the store's clock, as estimated from its last answer.
func (t *TopTracker) now() time.Time { return time.Now().Add(time.Duration(t.ahead.Load())) }

// Note tracks the results of ops. It is called before the calls are answered, and returns when the new candidates
// among the counters are marked in the store. If that fails, it replaces the results by the error: the caller repeats
// the operation, and the replay marks the counter.
func (t *TopTracker) Note(ctx context.Context, ops []Op, results []Result) {
	var newest time.Time
	var due map[markOf][]marking // nil in the usual case that there are no new candidates
	for i := range ops {
		for j := range results[i].Counters { // nil if the operation failed
			c := &ops[i].Changes[j]
			is := &results[i].Counters[j]
			if !gainsForTop(c, is) {
				continue
			}

			isReplay := results[i].Replay
			if !isReplay {
				newest = is.Updated
			}
			at := markOf{c.Rule, numberOf(is.Updated, c.Rule.Resolutions[0].Step)}
			if !t.hasToMark(c, at.number, isReplay) {
				continue
			}

			if due == nil {
				due = map[markOf][]marking{}
			}
			due[at] = append(due[at], marking{i, c.Key})
		}
	}

	// The clock is read once for all.
	if !newest.IsZero() {
		t.ahead.Store(int64(time.Until(newest)))
	}
	for at, changes := range due {
		err := t.mark(ctx, at, changes)
		if err == nil {
			continue
		}
		// The changes were made, so this is like an answer that was lost.
		for _, c := range changes {
			results[c.op] = Result{Err: err}
		}
	}
}

type (
	// markOf is where candidates are marked.
	markOf struct {
		rule   *Rule
		number int64 // of the time bucket
	}
	// marking is a change whose counter has to be marked.
	marking struct {
		op  int
		key string
	}
)

// gainsForTop reports whether a change that was made counts for top lists.
func gainsForTop(c *Change, is *Counter) bool {
	return c.Rule.Top && c.Verb == Add && c.Delta > 0 && is.Kind.Gains() && !is.Updated.IsZero()
}

// mark marks the counters of changes in the store.
func (t *TopTracker) mark(ctx context.Context, at markOf, changes []marking) error {
	keys := make([]string, len(changes))
	for i, c := range changes {
		keys[i] = c.key
	}
	slices.Sort(keys)
	keys = slices.Compact(keys)

	if err := t.store.Mark(ctx, at.rule.Match, at.number, keys); err != nil {
		return err
	}
	// After the store has them, because a key that is noted here is not marked again for a minute.
	t.rules[at.rule].mark(at.number, keys)

	return nil
}

// hasToMark adds a change and reports whether its counter has to be marked. A replay adds nothing, but it may repeat
// a change whose process died before it set the mark.
func (t *TopTracker) hasToMark(c *Change, number int64, replay bool) bool {
	r := t.rules[c.Rule]
	if r == nil { // the tracker was made for other rules
		return false
	}
	if replay {
		return !r.isMarked(number, c.Key)
	}

	return r.add(number, c.Key, c.Delta)
}

// numberOf returns the index of the time bucket that contains a time.
func numberOf(at time.Time, step time.Duration) int64 {
	return floorDiv(at.Unix(), int64(step/time.Second))
}

// Top returns the n counters of a rule that gained most in the time before now, most first. The error is ErrTime,
// ErrHistory or that of the store.
func (t *TopTracker) Top(ctx context.Context, rule *Rule, last time.Duration, n int) ([]Gained, error) {
	now := t.now()
	q, err := rule.Window(last, now)
	if err != nil {
		return nil, err
	}

	// Marks are read before lists: a time bucket that is closed in between is then seen twice rather than not at all.
	marked, err := t.store.Marked(ctx, rule.Match)
	if err != nil {
		return nil, err
	}

	q.To = min(q.To, numberOf(now, q.Step)+2) // a window has no end; 2 because the store's clock may be ahead
	sums := map[string]int64{}
	level := slices.IndexFunc(rule.Resolutions, func(b Resolution) bool { return b.Step == q.Step })
	// A list may change as long as its time bucket has marks.
	lists := topLists{t, rule, now, math.MaxInt64}
	for number := range marked {
		lists.open = min(lists.open, number)
	}
	if err := lists.sum(ctx, level, q.From, q.To, sums); err != nil {
		return nil, err
	}

	fine := rule.Resolutions[0].Step
	maps.DeleteFunc(marked, func(number int64, _ []string) bool { return number < q.From*int64(q.Step/fine) })
	candidates, err := t.sumMarked(ctx, fine, marked, sums)
	if err != nil {
		return nil, err
	}

	all := ranked(sums)
	// A sum of lists lacks what a counter gained where it was not listed, so more than n candidates are read.
	for _, g := range all[:min(len(all), max(2*n, minRead))] {
		candidates[g.Key] = true
	}

	// The sums of lists only choose the candidates: a counter is missing from the lists of time buckets in which it
	// gained little. The answer has the increments from their histories.
	most, err := t.read(ctx, slices.Collect(maps.Keys(candidates)), q)
	if err != nil {
		return nil, err
	}

	return most[:min(n, len(most))], nil
}

// ranked returns the counters with the greatest sums first.
func ranked(sums map[string]int64) []Gained {
	all := make([]Gained, 0, len(sums))
	for key, value := range sums {
		all = append(all, Gained{key, value})
	}
	slices.SortFunc(all, mostFirst)

	return all
}

func mostFirst(a, b Gained) int {
	return cmp.Or(cmp.Compare(b.Value, a.Value), cmp.Compare(a.Key, b.Key))
}

// sumMarked adds to sums the increments of marked counters in the time buckets in which they are marked. It returns the
// counters whose slot has moved on to a later time bucket, so that only their history has the increment.
func (t *TopTracker) sumMarked(
	ctx context.Context, step time.Duration, marked map[int64][]string, sums map[string]int64,
) (past map[string]bool, err error) {
	past = map[string]bool{}
	newest := map[string]Slot{}
	for _, keys := range marked {
		for _, key := range keys {
			newest[key] = Slot{}
		}
	}
	if len(newest) == 0 {
		return past, nil
	}

	keys := slices.Collect(maps.Keys(newest))
	slots, err := t.store.Running(ctx, keys, step)
	if err != nil {
		return nil, err
	}
	for i, key := range keys {
		newest[key] = slots[i]
	}

	for number, keys := range marked {
		for _, key := range keys {
			// A slot of an earlier time bucket says that the counter has gained nothing in this one.
			slot := newest[key]
			switch cmp.Compare(int64(slot.Number), number) {
			case 1:
				past[key] = true
			case 0:
				sums[key] = Saturated(sums[key], slot.Value)
			}
		}
	}

	return past, nil
}

// topLists adds up the lists of a rule for one question.
type topLists struct {
	*TopTracker
	rule *Rule
	now  time.Time
	open int64 // index of the first of the finest time buckets that has marks, whose list may not exist yet
}

// sum adds to sums the lists of time buckets of a resolution, with the indexes from from to to-1.
func (l topLists) sum(ctx context.Context, level int, from, to int64, sums map[string]int64) error {
	step := l.rule.Resolutions[level].Step
	// Older lists have expired.
	from = max(from, numberOf(l.now.Add(-listRetention(l.rule, level)), step))
	to = min(to, numberOf(l.now, step)+2) // the store's clock may be ahead

	for from < to {
		end := min(to, (floorDiv(from, blockSteps)+1)*blockSteps)
		block, err := l.block(ctx, level, from, end)
		if err != nil {
			return err
		}

		for key, n := range block {
			sums[key] = Saturated(sums[key], n)
		}
		from = end
	}

	return nil
}

// block returns the sum of at most blockSteps lists. A long time bucket without a list, because it is running or
// because no process ran to make it, is added up from the lists of its parts. A block is cached when none of its
// lists can change any more.
func (l topLists) block(ctx context.Context, level int, from, to int64) (map[string]int64, error) {
	step := l.rule.Resolutions[level].Step
	at := blockOf{l.rule, level, from}
	isClosed := level > 0 || to <= l.open
	stays := isClosed && to-from == blockSteps && isOver(to-1, step, l.now.Add(-stepLate))
	block, isCached := l.blocks.Get(at)
	// A cached block is passed over while one of its time buckets has got a late mark.
	if isCached && stays {
		return block, nil
	}

	lists, err := l.store.TopLists(ctx, l.rule.Match, step, from, to)
	if err != nil {
		return nil, err
	}

	sums := map[string]int64{}
	listed := map[int64]bool{}
	for _, list := range lists {
		listed[list.Number] = true
		for _, g := range list.Most {
			sums[g.Key] = Saturated(sums[g.Key], g.Value)
		}
	}

	for number := from; number < to && level > 0; number++ {
		if listed[number] {
			continue
		}

		parts := int64(step / l.rule.Resolutions[level-1].Step)
		if err := l.sum(ctx, level-1, number*parts, (number+1)*parts, sums); err != nil {
			return nil, err
		}
		// As long as its parts have lists, a process may still make this one.
		mayBeListed := !isOver(number, step, l.now.Add(-listRetention(l.rule, level-1)))
		stays = stays && !mayBeListed
	}

	if stays {
		// What is subtracted here can only mislead the choice of candidates. The answer comes from their histories.
		for len(sums) > maxPruned {
			prune(sums)
		}
		l.blocks.Add(at, sums)
	}

	return sums, nil
}

// read reads the histories of keys and returns those with a positive increment, most first. It reads in parts, with
// pauses, because on one core a long computation delays all other calls.
func (t *TopTracker) read(ctx context.Context, keys []string, q Question) ([]Gained, error) {
	gained := make([]Gained, 0, len(keys))
	atOnce := int(max(1, stepsAtOnce/max(stepsOfRead, q.To-q.From)))
	for some := range slices.Chunk(keys, atOnce) {
		if len(gained) > 0 {
			time.Sleep(breath)
		}

		histories, err := t.store.Histories(ctx, some, q.Step, q.From, q.To)
		if err != nil {
			return nil, err
		}

		for i, gains := range histories {
			tally := q.Tally()
			tally.Add(gains)
			gained = append(gained, Gained{some[i], tally.Total()})
		}
	}

	gained = slices.DeleteFunc(gained, func(g Gained) bool { return g.Value <= 0 })
	slices.SortFunc(gained, mostFirst)

	return gained, nil
}

// isOver reports whether a time bucket has ended at a time.
func isOver(number int64, step time.Duration, at time.Time) bool {
	return (number+1)*int64(step/time.Second) <= at.Unix()
}

// run closes time buckets soon after their end, until ctx ends. A random delay keeps processes from doing it all at
// once.
func (t *TopTracker) run(ctx context.Context) {
	for {
		// Wait for the next end of a time bucket, and not longer: short ones expire soon.
		wait := time.Hour
		for rule := range t.rules {
			step := rule.Resolutions[0].Step
			late := t.now().Add(-closeLate)
			wait = min(wait, late.Truncate(step).Add(step).Sub(late)+rand.N(min(step, closeLate)/2))
		}

		select {
		case <-ctx.Done():
			return
		case <-time.After(wait):
		}

		for rule, r := range t.rules {
			err := t.close(ctx, rule, r)
			if err != nil && ctx.Err() == nil {
				t.log.Debug().Err(err).Str("match", rule.Match).
					Msg("counters: a top list could not be stored; retrying")
			}
		}
	}
}

// close makes the lists of a rule's completed time buckets: for the finest resolution from the marks, for the others
// from the lists of their parts. Several processes may do it at once, because they read the same histories.
func (t *TopTracker) close(ctx context.Context, rule *Rule, r *topOf) error {
	marked, err := t.store.Marked(ctx, rule.Match)
	if err != nil {
		return err
	}

	late := t.now().Add(-closeLate)
	fine := rule.Resolutions[0].Step
	for number, keys := range marked {
		if !isOver(number, fine, late) {
			continue
		}
		if err := t.closeFinest(ctx, rule, number, keys); err != nil {
			return err
		}
	}

	closed := numberOf(late, fine) - 1 // finer time buckets before this index are closed
	for level := 1; level < len(rule.Resolutions); level++ {
		step := rule.Resolutions[level].Step
		closed = floorDiv(closed, int64(step/rule.Resolutions[level-1].Step))
		// A list whose parts are gone, or that would expire at once, is not made.
		oldest := numberOf(late.Add(-min(listRetention(rule, level-1), rule.Resolutions[level].Kept)), step) + 1
		// After the clock was ahead and was set, the time buckets until then come again.
		if r.next[level] > closed+1 {
			r.next[level] = 0
		}
		// Time buckets that are further behind get no list: an answer adds up the lists of their parts.
		for number := max(r.next[level], oldest, closed-maxBehind); number < closed; number++ {
			if err := t.closeLonger(ctx, rule, level, number); err != nil {
				return err
			}
			// Only now, so that after an error the next round begins with this one.
			r.next[level] = number + 1
		}
	}

	return nil
}

// closeFinest makes the list of one of the finest time buckets, from marked keys.
func (t *TopTracker) closeFinest(ctx context.Context, rule *Rule, number int64, marked []string) error {
	// There is a list already if a mark came after it was made.
	keys, err := t.listed(ctx, rule, 0, number, number+1)
	if err != nil {
		return err
	}

	return t.keep(ctx, rule, 0, number, append(keys, marked...), marked)
}

// closeLonger makes the list of a longer time bucket, from those of its parts, unless another process has made it.
func (t *TopTracker) closeLonger(ctx context.Context, rule *Rule, level int, number int64) error {
	step := rule.Resolutions[level].Step
	is, err := t.store.TopLists(ctx, rule.Match, step, number, number+1)
	if err != nil || len(is) > 0 {
		return err
	}

	parts := int64(step / rule.Resolutions[level-1].Step)
	keys, err := t.listed(ctx, rule, level-1, number*parts, (number+1)*parts)
	if err != nil {
		return err
	}

	return t.keep(ctx, rule, level, number, keys, nil)
}

// listRetention returns how long lists of a resolution are kept: as long as its time buckets, but long enough to make
// the list of the next coarser resolution from them, even by a process that was down meanwhile.
func listRetention(rule *Rule, level int) time.Duration {
	kept := rule.Resolutions[level].Kept
	if level+1 < len(rule.Resolutions) {
		kept = max(kept, 2*rule.Resolutions[level+1].Step+stepLate)
	}

	return kept
}

// listed returns the keys in the lists of time buckets of a resolution, with the indexes from from to to-1.
func (t *TopTracker) listed(ctx context.Context, rule *Rule, level int, from, to int64) (keys []string, err error) {
	lists, err := t.store.TopLists(ctx, rule.Match, rule.Resolutions[level].Step, from, to)
	for _, l := range lists {
		for _, g := range l.Most {
			keys = append(keys, g.Key)
		}
	}

	return keys, err
}

// keep stores the list of a time bucket, made from the candidates keys, and deletes marks.
func (t *TopTracker) keep(ctx context.Context, rule *Rule, level int, number int64, keys, marks []string) error {
	slices.Sort(keys)
	step := rule.Resolutions[level].Step
	most, err := t.read(ctx, slices.Compact(keys), Question{Step: step, From: number, To: number + 1})
	if err != nil {
		return err
	}

	// The sum of the candidates is at most that of all counters, so this never cuts too much.
	all := int64(0)
	for _, g := range most {
		all = Saturated(all, g.Value)
	}
	few := slices.IndexFunc(most, func(g Gained) bool { return g.Value <= all/TopMost })
	if few >= 0 {
		most = most[:few]
	}

	list := TopList{Number: number, Most: most[:min(len(most), TopMost)]}
	if err := t.store.KeepTop(ctx, rule.Match, step, list, listRetention(rule, level), marks); err != nil {
		return err
	}
	// A late mark changes a cached block.
	t.blocks.Remove(blockOf{rule, level, floorDiv(number, blockSteps) * blockSteps})

	return nil
}

// ErrTop means that no rule has the match, or that the rule keeps no top lists.
var ErrTop = errors.New("no top list")

// TopRule returns the rule with that match in the rules file. The error is ErrTop.
func (r *Rules) TopRule(match string) (*Rule, error) {
	rule := r.Of(match)
	if rule == nil {
		return nil, fmt.Errorf("%w: %q is the match of no rule; ask for the match of a rule with top", ErrTop, match)
	}
	if !rule.Top {
		return nil, fmt.Errorf("%w: the rule %q keeps none; add \"top\":true to the rule", ErrTop, match)
	}

	return rule, nil
}
