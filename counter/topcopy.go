package counter

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/rs/zerolog"
)

// maxTopped is how much of what counters gained is held until Keep.
const maxTopped = 1 << 20

// TopCopies makes the lists of what gained most anew, of counters that are imported, from what they gained in
// each step. A key comes once, with all it gained: so a list is right, however many keys there are.
type TopCopies struct {
	rules *Rules
	now   time.Time
	lists map[topCopy]*gainers
	held  int // in all lists, at most a little more than maxTopped
	kept  bool
}

type topCopy struct {
	rule   *Rule
	step   uint32 // seconds
	number int64
}

// gainers are those that may have gained more than a thousandth of all.
type gainers struct {
	total int64
	most  []Gained // at most twice TopMost
}

// NewTopCopies makes lists for rules with top; now is by the clock of this process.
func NewTopCopies(rules *Rules, now time.Time) *TopCopies {
	return &TopCopies{rules: rules, now: now, lists: map[topCopy]*gainers{}}
}

// Add takes what a counter gained. Full says that Keep is due.
func (t *TopCopies) Add(c *Copy) (full bool) {
	rule := t.rules.Find(c.Key)
	if rule == nil || !rule.Top || c.Kind != Sum {
		return false
	}
	for _, s := range c.Slots {
		t.add(rule, c.Key, s.Step, int64(s.Number), s.Value)
	}
	for _, s := range c.Steps {
		t.add(rule, c.Key, s.Step, s.Number, s.Value)
	}
	return t.held >= maxTopped
}

func (t *TopCopies) add(rule *Rule, key string, seconds uint32, number, value int64) {
	b := rule.bucketOf(seconds)
	if b == nil || value <= 0 || Over(number, b.Step, b.Kept, t.now) || number > t.now.Unix()/int64(seconds)+1 {
		return
	}
	if b != &rule.Buckets[0] && !isSettled(number, b.Step, t.now) {
		return // its list is made when it is over, of those of its parts
	}
	at := topCopy{rule, seconds, number}
	list := t.lists[at]
	if list == nil {
		list = &gainers{}
		t.lists[at] = list
	}
	list.total = Saturated(list.total, value)
	list.most = append(list.most, Gained{key, value})
	if t.held++; len(list.most) >= 2*TopMost {
		t.held -= len(list.most)
		list.thin()
		t.held += len(list.most)
	}
}

func (g *gainers) thin() {
	g.most = slices.DeleteFunc(g.most, func(is Gained) bool { return is.Value <= g.total/TopMost })
	g.most = mostOf(g.most)
}

// mostOf is what a list has of all.
func mostOf(all []Gained) []Gained {
	slices.SortFunc(all, mostFirst)
	return all[:min(len(all), TopMost)]
}

// Keep puts the lists into a store, beside what it knows of the same steps, and forgets them.
func (t *TopCopies) Keep(ctx context.Context, to Store) error {
	if !t.kept {
		if err := t.close(ctx, to); err != nil {
			return err
		}
		t.kept = true
	}
	for at, list := range t.lists {
		if err := ctx.Err(); err != nil {
			return err
		}
		if err := t.keep(ctx, to, at, list); err != nil {
			return fmt.Errorf("what gained most under %q: %w", at.rule.Match, err)
		}
	}
	clear(t.lists)
	t.held = 0
	return nil
}

// close makes lists of what the store has marked in steps that are over.
func (t *TopCopies) close(ctx context.Context, to Store) error {
	tops := newTopTracker(to, t.rules, true, nil, zerolog.Nop())
	for rule := range tops.rules {
		marked, err := to.Marked(ctx, rule.Match)
		if err == nil && len(marked) > 0 {
			err = tops.close(ctx, rule, map[listOf]int64{})
		}
		if err != nil {
			return fmt.Errorf("what gained most under %q: %w", rule.Match, err)
		}
	}
	return nil
}

func (t *TopCopies) keep(ctx context.Context, to Store, at topCopy, list *gainers) error {
	b, fine := at.rule.bucketOf(at.step), at.rule.Buckets[0]
	was, err := to.TopLists(ctx, at.rule.Match, b.Step, at.number, at.number+1)
	if err == nil && len(was) == 0 && b.Step > fine.Step {
		each := int64(b.Step / fine.Step)
		was, err = to.TopLists(ctx, at.rule.Match, fine.Step, at.number*each, (at.number+1)*each)
	}
	if err != nil {
		return err
	}
	there := map[string]int64{}
	for _, l := range was {
		for _, g := range l.Most {
			there[g.Key] = Saturated(there[g.Key], g.Value)
		}
	}
	for i := range list.most {
		g := &list.most[i]
		if n, ok := there[g.Key]; ok {
			g.Value = max(g.Value, n)
			delete(there, g.Key)
		}
	}
	for key, n := range there {
		list.most = append(list.most, Gained{key, n})
	}
	return to.KeepTop(ctx, at.rule.Match, b.Step, TopList{Number: at.number, Most: mostOf(list.most)}, b.Kept, nil)
}
