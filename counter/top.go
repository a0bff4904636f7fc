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
	// TopMost is how many counters a list of those that gained most in a step has. Those with more than a
	// thousandth of what all gained are fewer.
	TopMost = 1000
	// MaxTop is how many one answer has.
	MaxTop = 100

	maxPruned  = 4 * TopMost     // keys of a pruned map
	topLooked  = 64              // counters, at least, whose gain is read for an answer
	blockSteps = 16              // closed steps whose lists are remembered as one sum
	topBlocks  = 512             // such sums that a process remembers; the one not asked for longest goes
	closeLate  = 5 * time.Second // after its end a step is closed: slow writes have marked by then
	stepLate   = time.Minute     // after its end nobody counts or marks in a step any more
	maxBehind  = 256             // long steps that are closed late, after nobody ran for a while
)

// Gained is a counter and what it gained.
type Gained struct {
	Key   string `json:"key"`
	Value int64  `json:"value"`
}

// TopList is what gained most in a step of time that is over, most first, at most TopMost.
type TopList struct {
	Number int64 // of the step
	Most   []Gained
}

// TopStore is the part of a store that knows which sums may have gained most.
type TopStore interface {
	// Mark notes that keys may be among those under match that gained most in a step of the rule's finest bucket.
	// Marks are as safe as changes, and stay until KeepTop.
	Mark(ctx context.Context, match string, number int64, keys []string) error
	// Marked returns the keys that are marked under match, by the numbers of the steps.
	Marked(ctx context.Context, match string) (map[int64][]string, error)
	// KeepTop keeps a list as long as kept says, and forgets that marks were marked in its step.
	KeepTop(ctx context.Context, match string, step time.Duration, list TopList, kept time.Duration, marks []string) error
	// TopLists returns the lists of the steps of a length from the number from to that before to, in any order.
	TopLists(ctx context.Context, match string, step time.Duration, from, to int64) ([]TopList, error)
	// Running returns for each of keys, which are distinct, its newest slot of steps of that length, the zero Slot for none.
	Running(ctx context.Context, keys []string, step time.Duration) ([]Slot, error)
	// Histories returns for each of keys, which are distinct, what Reader.History does.
	Histories(ctx context.Context, keys []string, step time.Duration, from, to int64) ([][]Gain, error)
}

// HistoriesOf returns what Histories of a TopStore does, from a store that reads one counter as fast as many.
func HistoriesOf(ctx context.Context, from Reader, keys []string, step time.Duration, first, to int64) ([][]Gain, error) {
	all := make([][]Gain, len(keys))
	for i, key := range keys {
		var err error
		if _, all[i], err = from.History(ctx, key, step, first, to); err != nil {
			return nil, err
		}
	}
	return all, nil
}

// prunedMap says how much each key gained, and how much all did. It has at most maxPruned keys: when it is full, every key
// loses what half of them have at most, and those that have nothing left go. So a key gained at least what keys says,
// and at most missed more. Each time that missed grows by n, half of the keys lose n, so missed is at most
// 2/maxPruned of the total, a 2,000th. This is the summary of Misra and Gries (Finding Repeated Elements, 1982), which
// bounds the error as Space-Saving does (Metwally, Agrawal, El Abbadi, 2005; see Agarwal, Cormode, Huang, Phillips,
// Wei, Yi: Mergeable Summaries, 2012).
type prunedMap struct {
	total, missed int64
	keys          map[string]int64
}

// add returns what key gained at most.
func (p *prunedMap) add(key string, n int64) int64 {
	p.total = Saturated(p.total, n)
	gained, ok := p.keys[key]
	if !ok {
		if len(p.keys) >= maxPruned {
			p.missed = Saturated(p.missed, prune(p.keys))
		}
		key = strings.Clone(key) // it may be a part of a request
	}
	gained = Saturated(gained, n)
	p.keys[key] = gained
	return Saturated(gained, p.missed)
}

// prune takes from all keys what half of them have at most, and returns it. Keys that have nothing left go.
func prune(keys map[string]int64) int64 {
	all := slices.AppendSeq(make([]int64, 0, len(keys)), maps.Values(keys))
	slices.Sort(all)
	least := all[len(all)/2]
	for key, n := range keys {
		if n > least {
			keys[key] = n - least
		} else {
			delete(keys, key)
		}
	}
	return least
}

// openStep is what the counters of a rule gained in a running step, by changes of this process.
type openStep struct {
	prunedMap
	marked map[string]bool // in the store
}

// topOf is what a process knows of a rule with top.
type topOf struct {
	mu   sync.Mutex
	open map[int64]*openStep // the newest step and its neighbours, since writes at the end of a step overlap

	next []int64 // by bucket: the step whose list is to be made next; used by the closer alone
}

// at is called with mu.
func (r *topOf) at(number int64) *openStep {
	s := r.open[number]
	if s == nil {
		maps.DeleteFunc(r.open, func(n int64, _ *openStep) bool { return n < number-1 || n > number+1 })
		s = &openStep{prunedMap: prunedMap{keys: map[string]int64{}}, marked: map[string]bool{}}
		r.open[number] = s
	}
	return s
}

// add reports whether key has to be marked: it is not, and may have gained more than a thousandth of all.
func (r *topOf) add(number int64, key string, n int64) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	s := r.at(number)
	return s.add(key, n) > s.total/TopMost && !s.marked[key]
}

// isMarked reports whether key is marked in a step.
func (r *topOf) isMarked(number int64, key string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	s := r.open[number]
	return s != nil && s.marked[key]
}

// mark notes that the store has marked keys.
func (r *topOf) mark(number int64, keys []string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	s := r.open[number]
	if s == nil { // of an earlier step
		return
	}
	for _, key := range keys {
		s.marked[strings.Clone(key)] = true
	}
}

// TopTracker knows what gains most under the rules with top. It is told of the changes of its process. The package doc says
// how.
type TopTracker struct {
	store  TopStore
	rules  map[*Rule]*topOf
	blocks *lru.Cache[blockOf, map[string]int64]
	log    zerolog.Logger
	ahead  atomic.Int64 // nanoseconds that the clock of the store is ahead of ours

	stop context.CancelFunc
	wg   sync.WaitGroup // the closer
}

// blockOf names the sum of blockSteps lists that follow each other.
type blockOf struct {
	rule  *Rule
	level int // of the bucket
	first int64
}

// NewTopTracker returns a tracker of the changes that are made in store. Close ends it, and not the store.
func NewTopTracker(store TopStore, rules *Rules, log zerolog.Logger) *TopTracker {
	t := &TopTracker{store: store, rules: map[*Rule]*topOf{}, log: log}
	for _, rule := range rules.All() {
		if rule.Top {
			t.rules[rule] = &topOf{open: map[int64]*openStep{}, next: make([]int64, len(rule.Buckets))}
		}
	}
	var err error
	if t.blocks, err = lru.New[blockOf, map[string]int64](topBlocks); err != nil { // a size under 1
		panic(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	t.stop = stop
	if len(t.rules) > 0 {
		t.wg.Go(func() { t.run(ctx) })
	}
	return t
}

// Close waits for the closer.
func (t *TopTracker) Close() error {
	t.stop()
	t.wg.Wait()
	return nil
}

// now is the time by the clock of the store, as far as its last answer says it.
func (t *TopTracker) now() time.Time { return time.Now().Add(time.Duration(t.ahead.Load())) }

// Note takes what became of ops, before anybody is answered: it returns when what may have gained most is marked in the store.
// An operation whose counters cannot be marked has an error then.
func (t *TopTracker) Note(ctx context.Context, ops []Op, results []Result) {
	type stepOf struct {
		rule   *Rule
		number int64
	}
	type change struct {
		op  int
		key string
	}
	var newest time.Time
	var due map[stepOf][]change
	for i := range ops {
		for j := range results[i].Counters { // an op that failed has none
			c, is := &ops[i].Changes[j], &results[i].Counters[j]
			if !c.Rule.Top || c.Verb != Add || c.Delta <= 0 || is.Kind != Sum || is.Updated.IsZero() {
				continue
			}
			if !results[i].Replay {
				newest = is.Updated
			}
			at := stepOf{c.Rule, numberOf(is.Updated, c.Rule.Buckets[0].Step)}
			if t.hasToMark(c, at.number, results[i].Replay) {
				if due == nil {
					due = map[stepOf][]change{}
				}
				due[at] = append(due[at], change{i, c.Key})
			}
		}
	}
	if !newest.IsZero() {
		t.ahead.Store(int64(time.Until(newest)))
	}
	for at, changes := range due {
		keys := make([]string, len(changes))
		for i, c := range changes {
			keys[i] = c.key
		}
		slices.Sort(keys)
		keys = slices.Compact(keys)
		if err := t.store.Mark(ctx, at.rule.Match, at.number, keys); err != nil {
			for _, c := range changes { // it was made, and may be repeated like one without an answer
				results[c.op] = Result{Err: err}
			}
			continue
		}
		t.rules[at.rule].mark(at.number, keys)
	}
}

// hasToMark reports whether the counter of c has to be marked in the step in which it gained. A replay may be of a change whose
// process died before it marked.
func (t *TopTracker) hasToMark(c *Change, number int64, replay bool) bool {
	switch r := t.rules[c.Rule]; {
	case r == nil: // a rule of others
		return false
	case replay:
		return !r.isMarked(number, c.Key)
	default:
		return r.add(number, c.Key, c.Delta)
	}
}

// numberOf returns the number of the step at a time.
func numberOf(at time.Time, step time.Duration) int64 {
	return floor(at.Unix(), int64(step/time.Second))
}

// Top returns the n counters of a rule that gained most in the time before now, most first. Its error is
// ErrTime, ErrHistory or the store's.
func (t *TopTracker) Top(ctx context.Context, rule *Rule, last time.Duration, n int) ([]Gained, error) {
	now := t.now()
	q, err := rule.Window(last, now)
	if err != nil {
		return nil, err
	}
	marked, err := t.store.Marked(ctx, rule.Match) // first: what is closed meanwhile is in a list by then
	if err != nil {
		return nil, err
	}
	q.To = min(q.To, numberOf(now, q.Step)+2) // a time may end in the future, and clocks differ
	sums := map[string]int64{}
	level := slices.IndexFunc(rule.Buckets, func(b Bucket) bool { return b.Step == q.Step })
	lists := topLists{t, rule, now, math.MaxInt64}
	for number := range marked {
		lists.open = min(lists.open, number)
	}
	if err := lists.sum(ctx, level, q.From, q.To, sums); err != nil {
		return nil, err
	}
	fine := rule.Buckets[0].Step
	maps.DeleteFunc(marked, func(number int64, _ []string) bool { return number < q.From*int64(q.Step/fine) })
	looked, err := t.sumMarked(ctx, fine, marked, sums)
	if err != nil {
		return nil, err
	}
	all := ranked(sums)
	for _, g := range all[:min(len(all), max(2*n, topLooked))] {
		looked[g.Key] = true
	}
	// What made them the first is little more than a guess; what is answered is what they gained.
	most, err := t.read(ctx, slices.Collect(maps.Keys(looked)), q)
	if err != nil {
		return nil, err
	}
	return most[:min(n, len(most))], nil
}

// ranked returns what counters gained, most first.
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

// sumMarked adds what marked counters gained in the steps in which they are marked. It returns those of which only their
// history says it, since they have gained more in a later step.
func (t *TopTracker) sumMarked(ctx context.Context, step time.Duration, marked map[int64][]string, sums map[string]int64) (past map[string]bool, err error) {
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
			switch slot := newest[key]; {
			case int64(slot.Number) > number:
				past[key] = true
			case int64(slot.Number) == number:
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
	open int64 // the first of the shortest steps that has marks: its list may have to be made yet
}

// sum adds up the lists of the steps of a bucket from a number to that before another.
func (l topLists) sum(ctx context.Context, level int, from, to int64, sums map[string]int64) error {
	step := l.rule.Buckets[level].Step
	from = max(from, numberOf(l.now.Add(-listRetention(l.rule, level)), step))
	to = min(to, numberOf(l.now, step)+2) // clocks differ
	for from < to {
		end := min(to, (floor(from, blockSteps)+1)*blockSteps)
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

// block returns the sum of at most blockSteps lists. Where a long step has none, those of its parts are added up: it is
// not over, or nobody ran to make its list. A block is remembered when no further list can come into it.
func (l topLists) block(ctx context.Context, level int, from, to int64) (map[string]int64, error) {
	step, at := l.rule.Buckets[level].Step, blockOf{l.rule, level, from}
	whole := to-from == blockSteps && isOver(to-1, step, l.now.Add(-stepLate)) && (level > 0 || to <= l.open)
	if block, ok := l.blocks.Get(at); ok && whole {
		return block, nil
	}
	lists, err := l.store.TopLists(ctx, l.rule.Match, step, from, to)
	if err != nil {
		return nil, err
	}
	sums, listed := map[string]int64{}, map[int64]bool{}
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
		parts := int64(step / l.rule.Buckets[level-1].Step)
		if err := l.sum(ctx, level-1, number*parts, (number+1)*parts, sums); err != nil {
			return nil, err
		}
		whole = whole && isOver(number, step, l.now.Add(-listRetention(l.rule, level-1))) // else its list may still be made
	}
	if whole {
		for len(sums) > maxPruned {
			prune(sums)
		}
		l.blocks.Add(at, sums)
	}
	return sums, nil
}

// read returns those of keys that gained something, most first.
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

// isOver reports whether a step is over at a time.
func isOver(number int64, step time.Duration, at time.Time) bool {
	return (number+1)*int64(step/time.Second) <= at.Unix()
}

// run closes steps until ctx ends: soon after the end of each, and not all processes at once.
func (t *TopTracker) run(ctx context.Context) {
	for {
		wait := time.Hour
		for rule := range t.rules { // until its next step can be closed, before a short one is no longer kept
			step, late := rule.Buckets[0].Step, t.now().Add(-closeLate)
			wait = min(wait, late.Truncate(step).Add(step).Sub(late)+rand.N(min(step, closeLate)/2))
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(wait):
		}
		for rule, r := range t.rules {
			if err := t.close(ctx, rule, r); err != nil && ctx.Err() == nil {
				t.log.Debug().Err(err).Str("match", rule.Match).Msg("counters: what gained most could not be noted")
			}
		}
	}
}

// close makes lists of the steps of a rule that are over: of a short step from what is marked in it, of a long one from the lists
// of its parts.
func (t *TopTracker) close(ctx context.Context, rule *Rule, r *topOf) error {
	marked, err := t.store.Marked(ctx, rule.Match)
	if err != nil {
		return err
	}
	late, fine := t.now().Add(-closeLate), rule.Buckets[0].Step
	for number, keys := range marked {
		if !isOver(number, fine, late) {
			continue
		}
		listed, err := t.listed(ctx, rule, 0, number, number+1) // none, unless a mark came late
		if err == nil {
			err = t.keep(ctx, rule, 0, number, append(listed, keys...), keys)
		}
		if err != nil {
			return err
		}
	}
	closed := numberOf(late, fine) - 1 // the shorter steps before it are closed
	for level := 1; level < len(rule.Buckets); level++ {
		step, parts := rule.Buckets[level].Step, int64(rule.Buckets[level].Step/rule.Buckets[level-1].Step)
		closed = floor(closed, parts)
		oldest := numberOf(late.Add(-min(listRetention(rule, level-1), rule.Buckets[level].Kept)), step) + 1
		for number := max(r.next[level], oldest, closed-maxBehind); number < closed; number++ {
			is, err := t.store.TopLists(ctx, rule.Match, step, number, number+1)
			if err == nil && len(is) == 0 { // no other process has made it
				var keys []string
				if keys, err = t.listed(ctx, rule, level-1, number*parts, (number+1)*parts); err == nil {
					err = t.keep(ctx, rule, level, number, keys, nil)
				}
			}
			if err != nil {
				return err
			}
			r.next[level] = number + 1
		}
	}
	return nil
}

// listRetention returns how long the lists of a bucket's steps are kept: as long as the bucket, and at least until the
// list of the next coarser step, which is made of them, was made by a process that may have been away meanwhile.
func listRetention(rule *Rule, level int) time.Duration {
	kept := rule.Buckets[level].Kept
	if level+1 < len(rule.Buckets) {
		kept = max(kept, 2*rule.Buckets[level+1].Step+stepLate)
	}
	return kept
}

// listed returns the keys in the lists of the steps of a bucket from a number to that before another.
func (t *TopTracker) listed(ctx context.Context, rule *Rule, level int, from, to int64) (keys []string, err error) {
	lists, err := t.store.TopLists(ctx, rule.Match, rule.Buckets[level].Step, from, to)
	for _, l := range lists {
		for _, g := range l.Most {
			keys = append(keys, g.Key)
		}
	}
	return keys, err
}

// keep makes the list of a step of a bucket from keys, and forgets marks.
func (t *TopTracker) keep(ctx context.Context, rule *Rule, level int, number int64, keys, marks []string) error {
	slices.Sort(keys)
	step := rule.Buckets[level].Step
	most, err := t.read(ctx, slices.Compact(keys), Question{Step: step, From: number, To: number + 1})
	if err != nil {
		return err
	}
	all := int64(0) // of these, so at most what was gained
	for _, g := range most {
		all = Saturated(all, g.Value)
	}
	if few := slices.IndexFunc(most, func(g Gained) bool { return g.Value <= all/TopMost }); few >= 0 {
		most = most[:few]
	}
	list := TopList{Number: number, Most: most[:min(len(most), TopMost)]}
	if err := t.store.KeepTop(ctx, rule.Match, step, list, listRetention(rule, level), marks); err != nil {
		return err
	}
	t.blocks.Remove(blockOf{rule, level, floor(number, blockSteps) * blockSteps}) // a mark may have come late
	return nil
}

// ErrTop says that a match is no rule's, or of one without top.
var ErrTop = errors.New("no top list")

// TopRule is the rule with top that was written with match, or why there is none.
func (r *Rules) TopRule(match string) (*Rule, error) {
	switch rule := r.Of(match); {
	case rule == nil:
		return nil, fmt.Errorf("%w: %q is the match of no rule", ErrTop, match)
	case !rule.Top:
		return nil, fmt.Errorf("%w: the rule %q keeps none; add \"top\":true to the rule", ErrTop, match)
	default:
		return rule, nil
	}
}
