package owner_test

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"headcount/counter"
	"headcount/counter/owner"
	"headcount/internal/rows"
	"headcount/internal/rows/rowsmem"
)

// forgetful is a store that can lose everything in partition 0, and in which each commit takes a millisecond.
type forgetful struct {
	others *rowsmem.Store // has the other partitions

	mu   sync.Mutex // guards the fields below
	zero *rowsmem.Store
	most int // number of rows and IDs in the largest commit since the loss
	left int // so many more commits with rows, and the process is dead; negative: it lives on
	deny int // so many more claims fail

	kept map[[16]byte]rows.ID // IDs that survive losses, nil if none do
}

func newForgetful() *forgetful {
	return &forgetful{others: rowsmem.New(rowsmem.Config{}), zero: rowsmem.New(rowsmem.Config{}), left: -1}
}

func (f *forgetful) lose(left int) {
	f.mu.Lock()
	defer f.mu.Unlock()

	f.zero = rowsmem.New(rowsmem.Config{})
	f.most = 0
	f.left = left
}

func (f *forgetful) of(partition int) *rowsmem.Store {
	f.mu.Lock()
	defer f.mu.Unlock()

	if partition == 0 {
		return f.zero
	}

	return f.others
}

// Claim implements rows.Store, for one partition.
func (f *forgetful) Claim(ctx context.Context, name string, one []rows.Former) ([]rows.Claim, error) {
	if f.denies() {
		return []rows.Claim{{Err: rows.ErrUnavailable}}, nil
	}

	return f.of(one[0].Partition).Claim(ctx, name, one)
}

func (f *forgetful) denies() bool {
	f.mu.Lock()
	defer f.mu.Unlock()

	denied := f.deny > 0
	f.deny = max(f.deny-1, 0)

	return denied
}

// Commit implements rows.Store.
func (f *forgetful) Commit(ctx context.Context, commits []rows.Commit) []error {
	time.Sleep(time.Millisecond)
	errs := make([]error, len(commits))
	for i := range commits {
		errs[i] = rows.ErrUnavailable
		if f.lives(&commits[i]) {
			errs[i] = f.commit(ctx, &commits[i])
		}
	}

	return errs
}

func (f *forgetful) commit(ctx context.Context, c *rows.Commit) error {
	f.mu.Lock()
	var known []rows.ID
	for _, id := range c.IDs {
		if is, ok := f.kept[id.Bytes]; ok {
			known = append(known, is)
		}
	}
	f.mu.Unlock()
	if len(known) > 0 {
		return &rows.Known{IDs: known}
	}

	err := f.of(c.Partition).Commit(ctx, []rows.Commit{*c})[0]

	f.mu.Lock()
	defer f.mu.Unlock()
	if err == nil && f.kept != nil {
		for _, id := range c.IDs {
			f.kept[id.Bytes] = id
		}
	}

	return err
}

// lives reports whether the process still lives when it makes a commit.
func (f *forgetful) lives(c *rows.Commit) bool {
	f.mu.Lock()
	defer f.mu.Unlock()

	size := len(c.Rows) + len(c.IDs)
	f.most = max(f.most, size)
	alive := f.left != 0
	if f.left > 0 && size > 0 {
		f.left--
	}

	return alive
}

// Read implements rows.Store, for one partition.
func (f *forgetful) Read(ctx context.Context, addresses []rows.Address) []rows.Found {
	return f.of(addresses[0].Partition).Read(ctx, addresses)
}

// Scan implements rows.Store.
func (f *forgetful) Scan(ctx context.Context, id int, collection, after string, each func(string, []byte) error) error {
	return f.of(id).Scan(ctx, id, collection, after, each)
}

// Watch implements rows.Store.
func (f *forgetful) Watch(ctx context.Context, heard func(int, uint64, []byte), missed func()) error {
	return f.others.Watch(ctx, heard, missed)
}

// TestHealsWhenItCanBeClaimed: after a loss the store cannot grant the partition to its owner at once. Until it can,
// the owner keeps what it alone remembers.
func TestHealsWhenItCanBeClaimed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := newForgetful()
		o := begin(t, "a", store)
		defer o.Close()

		for want := range int64(2) {
			answer, err := o.Do(t.Context(), owner.Call{Partition: 0, Ops: increment("k")})
			if err != nil {
				t.Fatal(err)
			}
			if is := answer.Results[0].Counters[0].Value; is != want+1 {
				t.Errorf("the counter is %d, want %d", is, want+1)
			}

			// The second increment finds the loss. It builds on the first one only if the owner forgets nothing while
			// its claims fail.
			store.lose(-1)
			store.deny = 3
		}
	})
}

// TestReleasedAfterALoss: a partition is given up before its owner has noticed that the store has lost something. The
// next owner has it all the same.
func TestReleasedAfterALoss(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := newForgetful()
		a := begin(t, "a", store)
		defer a.Close()
		makes(t, a, increment("k"))

		store.lose(-1)
		// Only the memory of this owner has the change, and a release forgets that memory. So it has to look at the
		// store first.
		if err := a.Release(t.Context(), 0); err != nil {
			t.Fatal(err)
		}

		b := begin(t, "b", store)
		defer b.Close()
		if is := makes(t, b, increment("k")); is.Value != 2 {
			t.Errorf("after one more increment the counter is %d, want 2", is.Value)
		}
	})
}

// TestWhatWasHealedIsLostAgain: what the store loses twice is written again twice, if it was written shortly before.
func TestWhatWasHealedIsLostAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := newForgetful()
		o := begin(t, "a", store)
		defer o.Close()

		once := increment("k")
		once[0].IdempotencyKey = counter.IdempotencyKey{1}
		makes(t, o, once)

		time.Sleep(20 * time.Second)
		store.lose(-1)
		makes(t, o, increment("other"))

		// By now the first change is old, but it was written again only a moment ago.
		time.Sleep(15 * time.Second)
		makes(t, o, increment("other"))
		store.lose(-1)
		makes(t, o, increment("other"))

		// Without the key the repetition would count again, and without the value it would be a replay of 0.
		if is := makes(t, o, once); is.Value != 1 {
			t.Errorf("after a repetition under its key the counter is %d, want 1", is.Value)
		}
	})
}

// TestHealsWhereIDsAreKept: a store loses rows and keeps idempotency keys, as a Redis does that evicts keys. Its owner
// writes the rows again all the same.
func TestHealsWhereIDsAreKept(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := newForgetful()
		store.kept = map[[16]byte]rows.ID{}
		o := begin(t, "a", store)
		defer o.Close()

		for i := range 3 {
			once := increment("k")
			once[0].IdempotencyKey = counter.IdempotencyKey{byte(i + 1)}
			makes(t, o, once)
		}

		store.lose(-1)

		// The store refuses a commit with a key that it knows. An owner that repeated the same commit would never be
		// done.
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		answer, err := o.Do(ctx, owner.Call{Partition: 0, Ops: increment("k")})
		if err != nil {
			t.Fatal(err)
		}
		if is := answer.Results[0].Counters[0].Value; is != 4 {
			t.Errorf("after another increment the counter is %d, want 4", is)
		}
	})
}

// TestHealsInPieces: an owner writes lost rows again in small commits. Other partitions are served meanwhile, and a
// takeover waits for the end.
func TestHealsInPieces(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const counters, most = 2000, 50
		store := newForgetful()
		o := owner.New(store, owner.Config{Name: "a", HealRows: most})
		defer o.Close()
		for id := range 2 {
			if err := o.Own(t.Context(), id); err != nil {
				t.Fatal(err)
			}
		}

		do := func(partition int, key string) {
			t.Helper()
			if _, err := o.Do(t.Context(), owner.Call{Partition: partition, Ops: increment(key)}); err != nil {
				t.Fatal(err)
			}
		}

		var keys []string
		for i := range counters {
			keys = append(keys, fmt.Sprint("k", i))
			do(0, keys[i])
		}

		store.lose(-1)
		// From the first healed row on the owner is in the middle of it.
		for o.Stats().Healed == 0 {
			time.Sleep(time.Millisecond)
		}

		began := time.Now()
		do(1, "other")
		if took := time.Since(began); took > 10*time.Millisecond {
			t.Errorf("another partition waited for %v, want 10ms at most", took)
		}
		// The release ends only when all is written, or the next owner would read a part.
		if err := o.Release(t.Context(), 0); err != nil {
			t.Fatal(err)
		}

		read, err := owner.NewReader(store, func(string) int { return 0 }).Read(t.Context(), keys, "", 0)
		if err != nil {
			t.Fatal(err)
		}

		for _, r := range read {
			if r.Value != 1 {
				t.Fatalf("%s is %d, want 1", r.Key, r.Value)
			}
		}

		if store.most > 2*most || o.Stats().Healed < counters {
			t.Errorf("the largest commit has %d rows, want %d at most; %d rows were healed, want at least %d",
				store.most, 2*most, o.Stats().Healed, counters)
		}
	})
}

// TestDiesWhileItHeals: an owner dies at any point while it writes lost rows again. The next owner does not repeat a
// call that the first one had made.
func TestDiesWhileItHeals(t *testing.T) {
	const streams, keys = 40, 25
	for left := range 30 {
		synctest.Test(t, func(t *testing.T) {
			store := newForgetful()
			a := owner.New(store, owner.Config{Name: "a", HealRows: 5, RepeatAfter: time.Hour})
			defer a.Close()
			if err := a.Own(t.Context(), 0); err != nil {
				t.Fatal(err)
			}

			// Several streams share a counter, so that the order of counters is not that of streams.
			call := func(o *owner.Owner, stream int, repeated bool) counter.Result {
				t.Helper()
				c := owner.Call{Partition: 0, Stream: fmt.Sprint("s", stream), Number: 1, Repeated: repeated}
				c.Ops = increment(fmt.Sprint("k", stream*stream%keys))
				c.Ops[0].IdempotencyKey = counter.IdempotencyKey{byte(stream), 1}
				if stream%2 == 0 {
					c.Stream = "" // an idempotency key alone
				}
				answer, err := o.Do(t.Context(), c)
				if err != nil {
					t.Fatal(err)
				}

				return answer.Results[0]
			}

			made := map[string]int64{}
			for stream := range streams {
				made[call(a, stream, false).Counters[0].Key]++
			}

			// If a counter were written again before the keys of its calls, the next owner would count a call twice
			// after a death between the two.
			store.lose(left)
			time.Sleep(5 * time.Second)
			store.mu.Lock()
			store.left = -1
			store.mu.Unlock()
			b := owner.New(store, owner.Config{Name: "b"})
			defer b.Close()
			if err := b.Own(t.Context(), 0); err != nil {
				t.Fatal(err)
			}

			for stream := range streams {
				c := call(b, stream, true).Counters[0]
				if c.Value > made[c.Key] {
					t.Errorf("the owner died after %d commits: %s is %d, want at most %d",
						left, c.Key, c.Value, made[c.Key])
				}
			}
		})
	}
}
