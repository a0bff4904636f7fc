package counter

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"maps"
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

	settled   = 5 * time.Second // after its end a step is closed: whoever was slow has marked by then
	topLists  = 1 << 14         // closed lists that a process remembers; those not asked for longest go
	topLooked = 64              // counters, at least, whose gain is read for an answer
	topMerged = 1 << 9          // merged lists that a process remembers, likewise
	mergeOf   = 32              // closed lists are merged into one
	unmarked  = time.Minute     // after its end nobody marks in a step any more
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

// TopStore is the part of a store that knows which counters may have gained most.
type TopStore interface {
	// Marked returns the counters that were marked under match in steps that are not closed, by the numbers of
	// the steps, which have the length of the rule's finest bucket.
	Marked(ctx context.Context, match string) (map[int64][]string, error)
	// KeepTop keeps a list as long as kept says, and forgets that marks were marked in its step.
	KeepTop(ctx context.Context, match string, step time.Duration, list TopList, kept time.Duration, marks []string) error
	// TopLists returns the lists of the steps of a length from the number from to that before to, in any order.
	TopLists(ctx context.Context, match string, step time.Duration, from, to int64) ([]TopList, error)
}

// Gainers is the part of a store on a server of its own that reads what many sums gained, in as few round trips as it can.
type Gainers interface {
	// Running returns for each of keys, which are distinct, its newest slot of steps of that length, the zero Slot for none.
	Running(ctx context.Context, keys []string, step time.Duration) ([]Slot, error)
	// Histories returns for each of keys, which are distinct, what Reader.History does.
	Histories(ctx context.Context, keys []string, step time.Duration, from, to int64) ([][]Gain, error)
}

// mark notes that c may be among those that gained most in the running step, unless who made c knows better.
func mark(step Step, s *State, c *Change) {
	if !c.Rule.Top || s.Kind != Sum || c.Verb != Add || c.Delta <= 0 {
		return
	}
	slot := *s.Slots.of(uint32(c.Rule.Buckets[0].Step/time.Second), c.Rule)
	if int64(slot.Number) != c.Light {
		step.Mark(c.Rule.Match, slot, c.Key)
	}
}

// Marks reports whether c marks its counter: so its record is to see it, also of a sum that is spread.
func (c *Change) Marks() bool { return c.Rule.Top && c.Verb == Add && c.Delta > 0 && c.Light <= 0 }

// summary says of each key at least what it gained, and at most so much more as it has missed: a
// thousandth of half of all at most. It is the summary of Misra and Gries, which is that of "Space-Saving"
// (Metwally, Agrawal, El Abbadi, 2005) in another form (Agarwal, Cormode, Huang, Phillips, Wei, Yi:
// Mergeable Summaries, 2012). When it is full every key loses what half of them have at most, and those that
// have nothing then go. There is no lock.
type summary struct {
	total, missed int64
	keys          map[uint64]weight // by the hashes of keys; at most room
}

type weight struct {
	gained int64
	marked bool
}

const room = 4 * TopMost

// hashed is what stands for a key in summaries: it needs no copy of the key. Two keys with one hash would be taken for one; nobody can
// choose them, and among the keys of a summary there are two in one of 10^12 steps.
func hashed(key string) uint64 { return maphash.String(seed, key) }

var seed = maphash.MakeSeed()

func (s *summary) add(hash uint64, n int64) weight {
	s.total = Saturated(s.total, n)
	w, ok := s.keys[hash]
	if !ok && len(s.keys) >= room {
		s.thin()
	}
	if s.keys == nil {
		s.keys = map[uint64]weight{}
	}
	w.gained = Saturated(w.gained, n)
	s.keys[hash] = w
	return w
}

func (s *summary) thin() {
	all := make([]int64, 0, len(s.keys))
	for _, w := range s.keys {
		all = append(all, w.gained)
	}
	slices.Sort(all)
	least := all[len(all)/2]
	for hash, w := range s.keys {
		if w.gained -= least; w.gained <= 0 {
			delete(s.keys, hash)
		} else {
			s.keys[hash] = w
		}
	}
	s.missed = Saturated(s.missed, least)
}

// heavy reports whether w may have gained more than a thousandth of all.
func (s *summary) heavy(w weight) bool { return Saturated(w.gained, s.missed) > s.total/TopMost }

// running is what one rule's counters gained in the running step and in the one before it, by changes of this process.
type running struct {
	mu     sync.Mutex // guards all below
	began  int64      // the step in which this process began: another one may have counted in it, too
	number int64
	summary
	last   int64 // the number of before
	before summary

	marks marks // for who is alone: those of the store
}

// marks are what a store has in steps that are not closed, for a process that is alone in front of it: so that it does not
// read what it wrote. There are as many as in the store.
type marks struct {
	whole bool                      // none is missing, and what is marked from now on is weighed; else the store has to be asked
	lost  int                       // how often one may have been lost
	steps map[int64]map[string]bool // true: more than was weighed may have been counted in that step
}

func (m *marks) add(number int64, key string, others bool) {
	if m.steps == nil {
		m.steps = map[int64]map[string]bool{}
	}
	if m.steps[number] == nil {
		m.steps[number] = map[string]bool{}
	}
	m.steps[number][key] = others
}

// remove forgets one that may be in the store nevertheless.
func (m *marks) remove(number int64, key string) {
	delete(m.steps[number], key)
	m.whole = false
	m.lost++
}

// list returns the marks of each step, nil when one may be missing.
func (r *running) list() map[int64][]string {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.marks.whole {
		return nil
	}
	steps := make(map[int64][]string, len(r.marks.steps))
	for number, keys := range r.marks.steps {
		steps[number] = slices.AppendSeq(make([]string, 0, len(keys)), maps.Keys(keys))
	}
	return steps
}

func (r *running) losses() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.marks.lost
}

// learn takes what was read after losses returned lost. Of steps that are settled it is all there is.
func (r *running) learn(steps map[int64][]string, lost int, settled func(number int64) bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	m := &r.marks
	maps.DeleteFunc(m.steps, func(number int64, _ map[string]bool) bool { return settled(number) })
	for number, keys := range steps {
		others := false
		for _, key := range keys {
			if _, mine := m.steps[number][key]; !mine {
				others = true
				m.add(number, key, !m.whole)
			}
		}
		if others && !m.whole { // those of this process may have been marked before, too
			for key := range m.steps[number] {
				m.steps[number][key] = true
			}
		}
	}
	m.whole = m.lost == lost
}

// closed forgets a step.
func (r *running) closed(number int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.marks.steps, number)
}

// weigh adds to a counter, and returns the number of the step in which nobody needs to mark it, -1 for none.
func (r *running) weigh(key string, n, number int64, alone bool) (light int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if number != r.number {
		r.before, r.last = r.summary, r.number
		r.number, r.summary = number, summary{}
	}
	hash := hashed(key)
	w := r.add(hash, n)
	if w.marked || !r.heavy(w) {
		return number
	}
	w.marked = true
	r.keys[hash] = w
	if alone && !r.marks.steps[number][key] {
		r.marks.add(number, strings.Clone(key), false) // before it is written: so none is missing
	}
	return -1
}

// failed takes back what weigh added: it was not made, or nobody knows.
func (r *running) failed(key string, n, number, light int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if light < 0 {
		r.marks.remove(number, key)
	}
	hash := hashed(key)
	if w, ok := r.keys[hash]; ok && number == r.number {
		r.keys[hash] = weight{gained: w.gained - n}
		r.total -= n
	}
}

// known adds to sums what the marked keys gained in a step, and returns the keys whose gain this process does not
// know. A key that only this process marked, and that is no longer in the summary, gained too little to be listed.
func (r *running) known(number int64, keys []string, sums map[string]int64) (rest []string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	of := r.keys
	switch {
	case number <= r.began:
		return keys
	case number == r.last:
		of = r.before.keys
	case number != r.number:
		return keys
	}
	for _, key := range keys {
		w, ok := of[hashed(key)]
		switch {
		case r.marks.steps[number][key] || ok && w.gained <= 0:
			rest = append(rest, key)
		case ok:
			sums[key] = Saturated(sums[key], w.gained)
		}
	}
	return rest
}

// A TopTracker stands in front of a store, behind the Combiner, and knows what gains most under the rules with top. The
// package doc says how.
type TopTracker struct {
	Store
	rules map[*Rule]*running
	lists *lru.Cache[listOf, []Gained] // of steps that are closed, without any for those in which nobody gained
	// merged has the sums of mergeOf lists that follow each other, by the number of the first. A list of room counters leaves
	// out none with more than a 4,000th of the sum, and what they gained is read for an answer anyhow.
	merged *lru.Cache[listOf, []Gained]
	alone  bool    // nobody else changes what is in the store
	many   Gainers // nil: the store is in this process
	log    zerolog.Logger
	ahead  atomic.Int64 // nanoseconds that the store's clock is ahead of ours

	stop context.CancelFunc
	wg   sync.WaitGroup // the closer
}

type listOf struct {
	match  string
	step   time.Duration
	number int64
}

// NewTopTracker returns a tracker in front of a store; alone says that no other process changes what is in it, and many is nil when the store is
// in this process. Close ends it, and not the store.
func NewTopTracker(to Store, rules *Rules, alone bool, many Gainers, log zerolog.Logger) *TopTracker {
	t := newTopTracker(to, rules, alone, many, log)
	ctx, stop := context.WithCancel(context.Background())
	t.stop = stop
	if len(t.rules) > 0 {
		t.wg.Go(func() { t.run(ctx) })
	}
	return t
}

// newTopTracker is NewTopTracker without the closer.
func newTopTracker(to Store, rules *Rules, alone bool, many Gainers, log zerolog.Logger) *TopTracker {
	t := &TopTracker{Store: to, rules: map[*Rule]*running{}, alone: alone, many: many, log: log}
	for _, rule := range rules.All() {
		if rule.Top {
			t.rules[rule] = &running{began: t.now().Unix() / int64(rule.Buckets[0].Step/time.Second)}
		}
	}
	var err error
	if t.lists, err = lru.New[listOf, []Gained](topLists); err != nil { // a size under 1
		panic(err)
	}
	if t.merged, err = lru.New[listOf, []Gained](topMerged); err != nil {
		panic(err)
	}
	return t
}

// Close waits for the closer.
func (t *TopTracker) Close() error {
	t.stop()
	t.wg.Wait()
	return nil
}

func (t *TopTracker) now() time.Time { return time.Now().Add(time.Duration(t.ahead.Load())) }

// Apply is as Writer says. It tells the store which counters need no mark.
func (t *TopTracker) Apply(ctx context.Context, ops []Op) []Result {
	now, any := t.now().Unix(), false
	each := func(f func(i, j int, c *Change, r *running, number int64)) {
		for i := range ops {
			for j := range ops[i].Changes {
				c := &ops[i].Changes[j]
				if c.Verb != Add || c.Delta <= 0 || !c.Rule.Top {
					continue
				}
				if r := t.rules[c.Rule]; r != nil {
					f(i, j, c, r, now/int64(c.Rule.Buckets[0].Step/time.Second))
				}
			}
		}
	}
	each(func(_, _ int, c *Change, r *running, number int64) {
		any = true
		c.Light = r.weigh(c.Key, c.Delta, number, t.alone)
	})
	results := t.Store.Apply(ctx, ops)
	if !any {
		return results
	}
	var last time.Time
	each(func(i, j int, c *Change, r *running, number int64) {
		if results[i].Err != nil || results[i].Replay {
			r.failed(c.Key, c.Delta, number, c.Light)
		} else if at := results[i].Counters[j].Updated; !at.IsZero() {
			last = at
		}
	})
	if !last.IsZero() {
		t.ahead.Store(int64(time.Until(last)))
	}
	return results
}

// Top returns the n counters of a rule that gained most in the time before now, most first. Its error is
// ErrTime, ErrHistory or the store's.
func (t *TopTracker) Top(ctx context.Context, rule *Rule, last time.Duration, n int) ([]Gained, error) {
	q, err := rule.Window(last, time.Now())
	if err != nil {
		return nil, err
	}
	fine := rule.Buckets[0].Step
	marked, err := t.marked(ctx, rule) // first: what is closed meanwhile is in a list by then
	if err != nil {
		return nil, err
	}
	to := t.now().Unix()/int64(fine/time.Second) + 2 // clocks differ
	each := int64(q.Step / fine)
	first := q.From * each // of the fine steps that are needed
	sums := map[string]int64{}
	if err := t.sum(ctx, rule, len(rule.Buckets)-1, first, to, marked, sums); err != nil {
		return nil, err
	}
	looked := map[string]bool{} // what these gained is read, for it is not known how much it may be
	asked := map[string]int64{} // in which step these are marked, the newest
	for number, keys := range marked {
		if number < first {
			continue
		}
		if t.alone {
			keys = t.rules[rule].known(number, keys, sums)
		}
		for _, key := range keys {
			switch was, again := asked[key]; {
			case t.many == nil:
				looked[key] = true
			case again:
				looked[key] = true
				asked[key] = max(was, number)
			default:
				asked[key] = number
			}
		}
	}
	if len(asked) > 0 {
		keys := slices.AppendSeq(make([]string, 0, len(asked)), maps.Keys(asked))
		slots, err := t.many.Running(ctx, keys, fine)
		if err != nil {
			return nil, err
		}
		for i, key := range keys {
			if int64(slots[i].Number) > asked[key] { // it has gained more since, and what it gained in that step is in its history
				looked[key] = true
			} else if int64(slots[i].Number) == asked[key] {
				sums[key] = Saturated(sums[key], slots[i].Value)
			}
		}
	}
	all := make([]Gained, 0, len(sums))
	for key, value := range sums {
		all = append(all, Gained{key, value})
	}
	slices.SortFunc(all, mostFirst)
	for _, g := range all[:min(len(all), max(2*n, topLooked))] {
		looked[g.Key] = true
	}
	// What made them the first is little more than a guess; what is told is what they gained.
	out, err := t.read(ctx, slices.Collect(maps.Keys(looked)), q)
	if err != nil {
		return nil, err
	}
	return out[:min(n, len(out))], nil
}

// marked is what the store's Marked returns, and asks it only when it may know more than this process.
func (t *TopTracker) marked(ctx context.Context, rule *Rule) (map[int64][]string, error) {
	if !t.alone {
		return t.Store.Marked(ctx, rule.Match)
	}
	if steps := t.rules[rule].list(); steps != nil {
		return steps, nil
	}
	return t.readMarks(ctx, rule)
}

// readMarks asks the store, and remembers what it says.
func (t *TopTracker) readMarks(ctx context.Context, rule *Rule) (map[int64][]string, error) {
	r := t.rules[rule]
	lost := r.losses()
	steps, err := t.Store.Marked(ctx, rule.Match)
	if err == nil && t.alone {
		now, fine := t.now(), rule.Buckets[0].Step
		r.learn(steps, lost, func(number int64) bool { return isSettled(number, fine, now) })
	}
	return steps, err
}

// sum adds up the lists of the fine steps from a number to that before another: those of long steps that are within, and
// those of shorter ones for what no long one has. level is that of the longest.
func (t *TopTracker) sum(ctx context.Context, rule *Rule, level int, from, to int64, marked map[int64][]string, sums map[string]int64) error {
	b, fine := rule.Buckets[level], rule.Buckets[0].Step
	each := int64(b.Step / fine)
	now := t.now()
	if level == 0 {
		from = max(from, (now.Unix()-int64(listRetention(rule, 0)/time.Second))/int64(fine/time.Second))
	}
	first, last := floor(from+each-1, each), floor(to, each) // the steps that are within
	if first >= last {
		if level == 0 || from >= to {
			return nil
		}
		return t.sum(ctx, rule, level-1, from, to, marked, sums)
	}
	never := func(number int64) bool {
		if level > 0 { // the closer makes one while those of its parts are kept
			return number*int64(b.Step/time.Second) < now.Add(-listRetention(rule, level-1)).Unix()
		}
		return len(marked[number]) == 0 && isSettled(number, fine, now.Add(-unmarked))
	}
	missing := from
	fill := func(to int64) error { // from shorter steps
		if level == 0 || missing >= to {
			return nil
		}
		return t.sum(ctx, rule, level-1, missing, to, marked, sums)
	}
	add := func(list []Gained) {
		for _, g := range list {
			sums[g.Key] = Saturated(sums[g.Key], g.Value)
		}
	}
	for number := first; number < last; {
		begin := floor(number, mergeOf) * mergeOf
		end := min(begin+mergeOf, last)
		whole := number == begin && end == begin+mergeOf
		at := listOf{rule.Match, b.Step, begin}
		if list, ok := t.merged.Get(at); ok && whole {
			add(list)
			if err := fill(number * each); err != nil {
				return err
			}
			missing, number = end*each, end
			continue
		}
		lists, err := t.closed(ctx, rule, b.Step, number, end, never)
		if err != nil {
			return err
		}
		whole = whole && isSettled(end-1, b.Step, now.Add(-unmarked))
		for ; number < end; number++ {
			list, ok := lists[number]
			if !ok || list == nil && level > 0 {
				whole = whole && never(number) && (level == 0 || never(number+1)) // the parts of the step are forgotten, too
				continue
			}
			add(list)
			if err := fill(number * each); err != nil {
				return err
			}
			missing = (number + 1) * each
		}
		if whole {
			t.merged.Add(at, mergeLists(lists))
			for ; begin < end; begin++ { // few are asked for again: those at the ends of a time
				t.lists.Remove(listOf{rule.Match, b.Step, begin})
			}
		}
	}
	return fill(to)
}

// mergeLists returns what the counters of lists gained in all of them, the room greatest of them.
func mergeLists(lists map[int64][]Gained) []Gained {
	sums := map[string]int64{}
	for _, list := range lists {
		for _, g := range list {
			sums[g.Key] = Saturated(sums[g.Key], g.Value)
		}
	}
	all := make([]Gained, 0, len(sums))
	for key, value := range sums {
		all = append(all, Gained{key, value})
	}
	slices.SortFunc(all, mostFirst)
	return slices.Clone(all[:min(len(all), room)])
}

// read returns those of keys that gained something, most first.
func (t *TopTracker) read(ctx context.Context, keys []string, q Question) ([]Gained, error) {
	gained := make([]Gained, 0, len(keys))
	steps := min(q.To, t.now().Unix()/int64(q.Step/time.Second)+2) - q.From // a time may end in the future
	atOnce := int(max(1, stepsAtOnce/max(stepsOfRead, steps)))
	for some := range slices.Chunk(keys, atOnce) {
		if len(gained) > 0 {
			time.Sleep(breath)
		}
		histories, err := t.histories(ctx, some, q)
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

// histories returns what each of keys gained.
func (t *TopTracker) histories(ctx context.Context, keys []string, q Question) ([][]Gain, error) {
	if t.many != nil {
		return t.many.Histories(ctx, keys, q.Step, q.From, q.To)
	}
	all := make([][]Gain, len(keys))
	for i, key := range keys {
		_, gains, err := t.Store.History(ctx, key, q.Step, q.From, q.To)
		if err != nil {
			return nil, err
		}
		all[i] = gains
	}
	return all, nil
}

func mostFirst(a, b Gained) int {
	if a.Value != b.Value {
		return cmp.Compare(b.Value, a.Value)
	}
	return cmp.Compare(a.Key, b.Key)
}

// isSettled reports whether a step is over, and whoever was slow has marked.
func isSettled(number int64, step time.Duration, now time.Time) bool {
	return (number+1)*int64(step/time.Second) <= now.Add(-settled).Unix()
}

// closed returns the lists of steps of a length, by their numbers. An import has also made lists of steps that are running.
// never says of a step that is not closed that it never will be.
func (t *TopTracker) closed(ctx context.Context, rule *Rule, step time.Duration, from, to int64, never func(number int64) bool) (map[int64][]Gained, error) {
	out := map[int64][]Gained{}
	now := t.now()
	for number := from; number < to; {
		if list, ok := t.lists.Get(listOf{rule.Match, step, number}); ok {
			out[number] = list
			number++
			continue
		}
		end := number + 1
		for end < to && !t.lists.Contains(listOf{rule.Match, step, end}) {
			end++
		}
		found, err := t.Store.TopLists(ctx, rule.Match, step, number, end)
		if err != nil {
			return nil, err
		}
		for _, l := range found {
			out[l.Number] = l.Most
			if isSettled(l.Number, step, now) {
				t.lists.Add(listOf{rule.Match, step, l.Number}, l.Most)
			}
		}
		for ; number < end; number++ {
			if _, ok := out[number]; !ok && never(number) {
				t.lists.Add(listOf{rule.Match, step, number}, nil)
			}
		}
	}
	return out, nil
}

// run closes steps until ctx ends: soon after the end of each, and not all processes at once.
func (t *TopTracker) run(ctx context.Context) {
	next := map[listOf]int64{}  // the steps of longer buckets that are to be closed next, by rule and length
	for rule := range t.rules { // before others than those of a process that was here before are marked
		if _, err := t.marked(ctx, rule); err != nil && ctx.Err() == nil {
			t.log.Debug().Err(err).Str("match", rule.Match).Msg("counters: what may have gained most could not be read")
		}
	}
	for {
		wait := time.Hour
		for rule := range t.rules { // until its next step is settled, before a short one is no longer kept
			step, late := rule.Buckets[0].Step, t.now().Add(-settled)
			wait = min(wait, late.Truncate(step).Add(step).Sub(late)+rand.N(min(step, settled)/2))
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(wait):
		}
		for rule := range t.rules {
			if err := t.close(ctx, rule, next); err != nil && ctx.Err() == nil {
				t.log.Debug().Err(err).Str("match", rule.Match).Msg("counters: what gained most could not be noted")
			}
		}
	}
}

// close makes lists of the steps of a rule that are over.
func (t *TopTracker) close(ctx context.Context, rule *Rule, next map[listOf]int64) error {
	marked, err := t.readMarks(ctx, rule)
	if err != nil {
		return err
	}
	now := t.now()
	before := now.Add(-settled).Unix()
	fine := rule.Buckets[0]
	for number, keys := range marked {
		if !isSettled(number, fine.Step, now) {
			continue
		}
		was, err := t.Store.TopLists(ctx, rule.Match, fine.Step, number, number+1)
		if err != nil {
			return err
		}
		all := slices.Clone(keys)
		for _, l := range was { // somebody was late
			for _, g := range l.Most {
				all = append(all, g.Key)
			}
		}
		if err := t.keep(ctx, rule, 0, number, all, keys); err != nil {
			return err
		}
	}
	done := (before - int64(fine.Step/time.Second)) / int64(fine.Step/time.Second) // the finer steps before it are closed
	for i, b := range rule.Buckets[1:] {
		finer := rule.Buckets[i]
		at := listOf{match: rule.Match, step: b.Step}
		each := int64(b.Step / finer.Step)
		over := done / each
		from, known := next[at]
		if !known {
			oldest := now.Add(-min(listRetention(rule, i), b.Kept)).Unix() / int64(b.Step/time.Second)
			from = max(oldest+1, over-256)
		}
		for ; from < over; from++ {
			is, err := t.Store.TopLists(ctx, rule.Match, b.Step, from, from+1)
			if err != nil {
				return err
			}
			if len(is) > 0 {
				continue
			}
			parts, err := t.Store.TopLists(ctx, rule.Match, finer.Step, from*each, (from+1)*each)
			if err != nil {
				return err
			}
			var keys []string
			for _, l := range parts {
				for _, g := range l.Most {
					keys = append(keys, g.Key)
				}
			}
			if err := t.keep(ctx, rule, i+1, from, keys, nil); err != nil {
				return err
			}
		}
		next[at] = from
		done = from
	}
	return nil
}

// listRetention returns how long the lists of a bucket's steps are kept: as long as the bucket, and at least until the
// list of the next coarser step, which is made of them, was made by a process that may have been away meanwhile.
func listRetention(rule *Rule, level int) time.Duration {
	kept := rule.Buckets[level].Kept
	if level+1 < len(rule.Buckets) {
		kept = max(kept, 2*rule.Buckets[level+1].Step+unmarked)
	}
	return kept
}

// keep reads what keys gained in a step of a bucket, and keeps those that gained most.
func (t *TopTracker) keep(ctx context.Context, rule *Rule, level int, number int64, keys, marks []string) error {
	b := rule.Buckets[level]
	slices.Sort(keys)
	most, err := t.read(ctx, slices.Compact(keys), Question{Step: b.Step, From: number, To: number + 1})
	if err != nil {
		return err
	}
	all := int64(0) // of these, so at most what was gained
	for _, g := range most {
		all = Saturated(all, g.Value)
	}
	few, _ := slices.BinarySearchFunc(most, all/TopMost, func(g Gained, least int64) int {
		if g.Value > least {
			return -1
		}
		return 1
	})
	list := TopList{Number: number, Most: most[:min(few, TopMost)]}
	if err := t.Store.KeepTop(ctx, rule.Match, b.Step, list, listRetention(rule, level), marks); err != nil {
		return err
	}
	t.lists.Add(listOf{rule.Match, b.Step, number}, list.Most)
	t.merged.Remove(listOf{rule.Match, b.Step, floor(number, mergeOf) * mergeOf}) // somebody was late
	if marks != nil {
		t.rules[rule].closed(number) // what asks meanwhile finds the list
	}
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
