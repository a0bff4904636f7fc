package region_test

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"headcount/counter/share"
	"headcount/counter/simtest"
	"headcount/internal/rows"
	"headcount/internal/rows/rowsmem"
)

// journal is a store of a region. It keeps a log of all changes, so that it can go back to an earlier moment.
type journal struct {
	watches rows.Watches

	mu      sync.Mutex // guards the fields below
	store   *rowsmem.Store
	numbers [rows.Partitions]uint64
	log     []entry
	at      time.Time // time of the repeated change; zero: now

	// Planted faults.
	hidesLosses bool // the store claims to have the last commit that it ever had
	newest      map[int]rows.Commit
	adds        bool // the store adds up the values of a share
	added       map[string]int64
}

// entry is a claim or a commit.
type entry struct {
	at     time.Time
	owner  string
	former []rows.Former
	commit *rows.Commit
}

func newJournal() *journal {
	j := &journal{newest: map[int]rows.Commit{}, added: map[string]int64{}}
	j.store = rowsmem.New(rowsmem.Config{Now: j.now})

	return j
}

func (j *journal) now() time.Time {
	if j.at.IsZero() {
		return time.Now()
	}

	return j.at
}

func (j *journal) claim(owner string, former []rows.Former) []rows.Claim {
	j.mu.Lock()
	defer j.mu.Unlock()

	j.log = append(j.log, entry{at: time.Now(), owner: owner, former: slices.Clone(former)})
	claims, _ := j.store.Claim(context.Background(), owner, former)
	for i := range claims {
		if j.hidesLosses {
			claims[i].Number = j.newest[former[i].Partition].Number
		}
	}

	return claims
}

func (j *journal) commit(c rows.Commit) error {
	c.Rows = slices.Clone(c.Rows)
	c.IDs = slices.Clone(c.IDs)
	c.Asked = slices.Clone(c.Asked)

	j.mu.Lock()
	defer j.mu.Unlock()

	if j.adds {
		j.add(&c)
	}
	if j.hidesLosses && c.Number == j.newest[c.Partition].Number+1 {
		c.After = j.numbers[c.Partition]
	}
	err := j.store.Commit(context.Background(), []rows.Commit{c})[0]
	if err != nil || j.numbers[c.Partition] == c.Number {
		return err
	}

	j.numbers[c.Partition] = c.Number
	j.log = append(j.log, entry{at: time.Now(), commit: &c})
	j.newest[c.Partition] = c
	j.watches.Publish(&c)

	return nil
}

// add is a planted fault: it adds the value of each share to the former ones.
func (j *journal) add(c *rows.Commit) {
	for i := range c.Rows {
		row := &c.Rows[i]
		if row.Collection != "shares" {
			continue
		}
		s, err := share.Parse(row.Value)
		if err != nil {
			panic(err)
		}
		for at := range s.Parts {
			p := &s.Parts[at]
			name := fmt.Sprint(row.Field, p.Region, p.Life)
			before := j.added[name]
			j.added[name] += p.Value
			p.Value += before
		}

		row.Value = s.Append(nil)
	}
}

// back makes the store what it was at an earlier moment.
func (j *journal) back(to time.Time) {
	j.mu.Lock()
	defer j.mu.Unlock()

	j.store = rowsmem.New(rowsmem.Config{Now: j.now})
	j.numbers = [rows.Partitions]uint64{}
	log := j.log
	j.log = nil
	for _, e := range log {
		isLost := e.at.After(to)
		if isLost && (e.commit != nil || !j.hidesLosses) {
			continue
		}

		j.log = append(j.log, e)
		j.at = e.at
		if e.commit == nil {
			_, _ = j.store.Claim(context.Background(), e.owner, e.former)
			continue
		}
		_ = j.store.Commit(context.Background(), []rows.Commit{*e.commit})
		j.numbers[e.commit.Partition] = e.commit.Number
	}

	j.at = time.Time{}
	j.watches.Missed()
}

func (j *journal) read(addresses []rows.Address) []rows.Found {
	j.mu.Lock()
	defer j.mu.Unlock()

	found := j.store.Read(context.Background(), addresses)
	for i, at := range addresses {
		if !j.hidesLosses || at.Collection != "position" {
			continue
		}
		for _, row := range j.newest[at.Partition].Rows {
			if row.Name == at.Name {
				found[i].Value = row.Value
			}
		}
	}

	return found
}

func (j *journal) scan(id int, collection, after string, each func(string, []byte) error) error {
	j.mu.Lock()
	store := j.store
	j.mu.Unlock()

	return store.Scan(context.Background(), id, collection, after, each)
}

// way is how a process reaches a store, in its own region or, over a link, in another one.
type way struct {
	to      *journal
	dice    *simtest.Dice
	most    time.Duration  // each way
	passes  func() bool    // false if the process is dead or the link is cut
	lost    func() float64 // share of the calls, and of the answers, that get lost
	late    func(func())   // makes a lost commit arrive later; nil: it never does
	noReset bool           // a planted fault: resets are not sent

	note func(format string, args ...any) // of claims and commits
}

var _ rows.Store = (*way)(nil)

// passesOnce is one way, there or back.
func (w *way) passesOnce() bool {
	time.Sleep(w.dice.UpTo(w.most))

	return w.passes() && !w.dice.Chance(w.lost())
}

// Claim implements rows.Store.
func (w *way) Claim(_ context.Context, owner string, partitions []rows.Former) ([]rows.Claim, error) {
	if !w.passesOnce() {
		return nil, rows.ErrUnavailable
	}
	claims := w.to.claim(owner, partitions)
	w.note("claims %+v: %+v", partitions, claims)
	if !w.passesOnce() {
		return nil, rows.ErrUnavailable
	}

	return claims, nil
}

// Commit implements rows.Store.
func (w *way) Commit(_ context.Context, commits []rows.Commit) []error {
	errs := make([]error, len(commits))
	there := w.passesOnce()
	for i, c := range commits {
		if w.noReset {
			c.Rows = withoutResets(c.Rows)
		}
		if !there {
			errs[i] = rows.ErrUnavailable
			w.note("commits to partition %d: number %d is lost, or late", c.Partition, c.Number)
			if w.late != nil {
				c.Rows = slices.Clone(c.Rows)
				w.late(func() { _ = w.to.commit(c) })
			}
			continue
		}
		errs[i] = w.to.commit(c)
		w.note("commits to partition %d: number %d after %d, %d rows, epoch %d: %v",
			c.Partition, c.Number, c.After, len(c.Rows), c.Epoch, errs[i])
	}

	if !w.passesOnce() {
		for i := range errs {
			errs[i] = rows.ErrUnavailable
		}
	}

	return errs
}

func withoutResets(all []rows.Row) []rows.Row {
	var some []rows.Row
	for _, row := range all {
		if row.Collection == "shares" {
			s, err := share.Parse(row.Value)
			if err != nil {
				panic(err)
			}
			for i := range s.Parts {
				s.Parts[i].At = 0
				s.Parts[i].Base = 0
			}

			row.Value = s.Append(nil)
		}
		some = append(some, row)
	}

	return some
}

// Read implements rows.Store.
func (w *way) Read(_ context.Context, addresses []rows.Address) []rows.Found {
	if !w.passesOnce() {
		return rows.Unread(len(addresses), rows.ErrUnavailable)
	}
	found := w.to.read(addresses)
	if !w.passesOnce() {
		return rows.Unread(len(addresses), rows.ErrUnavailable)
	}

	return found
}

// Scan implements rows.Store.
func (w *way) Scan(_ context.Context, id int, collection, after string, each func(string, []byte) error) error {
	if !w.passesOnce() {
		return rows.ErrUnavailable
	}

	return w.to.scan(id, collection, after, each)
}

// Watch implements rows.Store.
func (w *way) Watch(ctx context.Context, heard func(int, uint64, []byte), missed func()) error {
	w.to.watches.Watch(ctx, heard, missed)

	return nil
}
