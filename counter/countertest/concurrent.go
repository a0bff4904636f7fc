package countertest

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"headcount/counter"
	"headcount/internal/testkit"
)

// insist makes ops under idempotency keys, and repeats those that were not answered, so that each counts once. On a
// busy machine a store may take its server for dead.
func insist(t *testing.T, s counter.Writer, id string, ops ...counter.Op) []counter.Result {
	for i := range ops {
		ops[i].IdempotencyKey = counter.NewIdempotencyKey(ops[i].Changes[0].Key, "", fmt.Sprint(id, " ", i))
	}

	results := make([]counter.Result, len(ops))
	for i := range results {
		results[i].Err = counter.ErrUnavailable
	}
	testkit.Eventually(t, "answers", func() bool {
		answered := true
		for i, r := range s.Apply(t.Context(), ops) {
			// The first answer stays: the answer to a repetition would be a replay.
			if errors.Is(results[i].Err, counter.ErrUnavailable) {
				results[i] = r
			}
			answered = answered && !errors.Is(results[i].Err, counter.ErrUnavailable)
		}
		return answered
	})

	return results
}

// fight lets clients of two processes sell the last of a stock. Groups of four use the same idempotency key.
func fight(t *testing.T, i Instance) {
	const clients, left, tries, same = 64, 10, 3, 4
	one(t, i.Store, add(stock, "k:1", left))
	sellers := []counter.Store{i.Store, i.peer()}

	var made, answered [tries][clients / same]atomic.Int64
	var wg sync.WaitGroup
	start := make(chan struct{})
	for c := range clients {
		wg.Go(func() {
			<-start // all begin at the same moment, so that their calls overlap
			for n := range tries {
				r := insist(t, sellers[c%2], fmt.Sprintf("%d of %d", n, c/same), op(add(stock, "k:1", -1)))[0]
				if errors.Is(r.Err, counter.ErrBound) {
					continue
				}
				if r.Err != nil {
					t.Error(r.Err)
					continue
				}

				answered[n][c/same].Store(1)
				if !r.Replay {
					made[n][c/same].Add(1)
				} else if r.Counters[0].Value == left {
					t.Errorf("a replay whose value does not include the change: %+v", r)
				}
			}
		})
	}
	close(start)
	wg.Wait()
	AwaitServed(t, i.Store)

	sold := int64(0)
	for n := range tries {
		for of := range made[n] {
			sold += answered[n][of].Load()
			// None if the answer to the one that made the change was lost.
			if m := made[n][of].Load(); m > 1 {
				t.Errorf("made %d times under one idempotency key", m)
			}
		}
	}
	if sold != left {
		t.Errorf("%d were sold, there were %d", sold, left)
	}
	value(t, i.Store, "k:1", 0)
	if n := len(chained(t, i.Store, "k:1")); n != left+1 {
		t.Errorf("%d entries, want %d", n, left+1)
	}
}

// concurrent lets clients of two processes change counters of all kinds. Their batches have the same keys in different
// orders: a store that locked keys in the order of a batch would deadlock.
func concurrent(t *testing.T, i Instance) {
	const clients, rounds, keys = 12, 16, 6
	stores := []counter.Store{i.Store, i.peer()}
	var want [keys]atomic.Int64
	in := make([]map[string]bool, clients) // the members of each client, and whether they are in the set

	var wg sync.WaitGroup
	for c := range clients {
		in[c] = map[string]bool{}
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(1, uint64(c)))
			s := stores[c%2]
			for n := range rounds {
				ops := batches(rng, keys)
				batched := ops

				sums := []counter.Change{
					under(add(sum, "s:1", 1), "country", strconv.Itoa(n%2)),
					under(add(sum, "s:2", 2), "country", strconv.Itoa(c)),
				}
				if n%2 == 0 {
					slices.Reverse(sums)
				}

				m := fmt.Sprintf("%d of %d", rng.IntN(5), c)
				joins := rng.IntN(2) == 0
				change := edit("m:1", []string{m}, nil)
				if !joins {
					change = edit("m:1", nil, []string{m})
				}
				in[c][m] = joins

				from := (c*rounds/2 + n) * 20 // half of them overlap with the next client's
				ops = append(ops, op(sums...), op(change), op(see("u:1", visitors(from, from+20)...)))
				for _, r := range insist(t, s, fmt.Sprintf("%d of %d", n, c), ops...) {
					if r.Err != nil {
						t.Error(r.Err)
						return
					}
				}

				for _, o := range batched {
					for _, change := range o.Changes {
						n, _ := strconv.Atoi(change.Key[2:])
						want[n].Add(change.Delta)
					}
				}

				k := rng.IntN(keys)
				// Taken before the read, whose value must be at least this.
				least := want[k].Load()
				got, err := s.Read(t.Context(), []string{"e:" + strconv.Itoa(k)}, "", 0)
				if err != nil || got[0].Value < least {
					t.Errorf("read %+v, %v; %d were acknowledged before", got, err, least)
					return
				}
			}
		})
	}
	wg.Wait()

	// The other process reads what both have written.
	s := i.peer()
	for n := range keys {
		key := "e:" + strconv.Itoa(n)
		a := value(t, i.Store, key, want[n].Load())
		b := read(t, s, key)
		if !same(a, b) {
			t.Errorf("one process has %+v, the other %+v", a, b)
		}
		chained(t, s, key)
	}
	counts(t, s, "s:1", "country", map[string]int64{"0": clients * rounds / 2, "1": clients * rounds / 2})

	each := map[string]int64{}
	size := int64(0)
	for c := range clients {
		each[strconv.Itoa(c)] = 2 * rounds
		for m, is := range in[c] {
			if readAll(t, s, m, "m:1")[0].Mine != is {
				t.Errorf("%q: want a member %v", m, is)
			}
			if is {
				size++
			}
		}
	}

	counts(t, s, "s:2", "country", each)
	value(t, s, "m:1", size)

	value(t, s, "u:1", estimate(visitors(0, ((clients-1)*rounds/2+rounds)*20)))
}

// batches returns some batches of additions to exact counters.
func batches(rng *rand.Rand, keys int) (ops []counter.Op) {
	for range 1 + rng.IntN(3) {
		var changes []counter.Change
		for range 1 + rng.IntN(4) {
			changes = append(changes, add(exact, "e:"+strconv.Itoa(rng.IntN(keys)), rng.Int64N(9)+1))
		}
		ops = append(ops, op(changes...))
	}

	return ops
}

// away tests an outage of the store, during which clients repeat every change that was not acknowledged. Each must
// count once. It also tests limits before, during and after the outage.
func away(t *testing.T, i Instance) {
	if i.Cut == nil {
		return // the store needs no server or disk
	}

	s := i.Store
	one(t, s, add(exact, "e:1", 1))
	limitsBeforeCut(t, s)
	heal := i.Cut(t)
	limitsMeanwhile(t, s)
	asked := []counter.Op{
		with("a", op(add(exact, "e:1", 1))), with("b", op(edit("m:1", []string{"a"}, nil))),
		with("c", op(see("u:1", "a"))),
	}
	for _, r := range do(t, s, asked...) {
		if !errors.Is(r.Err, counter.ErrUnavailable) {
			t.Fatalf("the store is away, and Apply says %+v", r)
		}
	}

	const clients, changes = 8, 20
	var wg sync.WaitGroup
	var refused atomic.Int64
	for c := range clients {
		wg.Go(func() {
			for n := range changes {
				o := with(fmt.Sprintf("%d of %d", n, c), op(add(exact, "e:1", 1)))
				r := s.Apply(t.Context(), []counter.Op{o})[0]
				for errors.Is(r.Err, counter.ErrUnavailable) {
					refused.Add(1)
					time.Sleep(5 * time.Millisecond)
					r = s.Apply(t.Context(), []counter.Op{o})[0]
				}
				if r.Err != nil {
					t.Error(r.Err)
					return
				}
			}
		})
	}
	// Not earlier, or most changes would be made after the outage.
	testkit.Eventually(t, "clients are refused", func() bool { return refused.Load() >= 2*clients })
	heal()
	wg.Wait()

	// Whether they were made or not, after a repetition they count once.
	for j, o := range asked {
		if r := do(t, s, o)[0]; r.Err != nil {
			t.Fatalf("repeated op %d: %+v", j, r)
		}
	}
	value(t, s, "e:1", 2+clients*changes)
	value(t, s, "m:1", 1)
	value(t, s, "u:1", 1)
	if n := len(chained(t, s, "e:1")); n != 2+clients*changes {
		t.Errorf("%d entries", n)
	}
	limitsAfterwards(t, s)
}
