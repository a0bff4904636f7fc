package counter_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"headcount/counter"
	"headcount/counter/countertest"
)

var (
	sum   = &counter.Rule{Match: "s:*", Kind: counter.Sum}
	exact = &counter.Rule{Match: "e:*", Kind: counter.Exact}
)

func add(rule *counter.Rule, key string, delta int64) counter.Op {
	return counter.Op{Changes: []counter.Change{{Key: key, Rule: rule, Verb: counter.Add, Delta: delta}}}
}

// gate is a Writer in front of a store in memory. While the gate is shut, writes wait.
type gate struct {
	counter.Store
	mu     sync.Mutex
	writes [][]counter.Op // deep copies
	shut   chan struct{}
	fail   error
}

func (g *gate) Apply(ctx context.Context, ops []counter.Op) []counter.Result {
	g.mu.Lock()

	var copied []counter.Op
	for _, op := range ops {
		op.Changes = slices.Clone(op.Changes)
		copied = append(copied, op)
	}

	g.writes = append(g.writes, copied)
	shut, fail := g.shut, g.fail
	g.mu.Unlock()

	if shut != nil {
		select {
		case <-shut:
		case <-ctx.Done():
			fail = counter.ErrUnavailable
		}
	}

	if fail != nil {
		results := make([]counter.Result, len(ops))
		for i := range results {
			results[i].Err = fail
		}
		return results
	}

	return g.Store.Apply(ctx, ops)
}

// gather starts the first operation, makes the others wait for it, and then lets all of them go on.
func gather(t *testing.T, g *gate, c *counter.Combiner, first counter.Op, others ...counter.Op) []counter.Result {
	t.Helper()
	shut := make(chan struct{})
	g.mu.Lock()
	g.shut = shut
	g.mu.Unlock()

	results := make([]counter.Result, 1+len(others))
	var wg sync.WaitGroup
	for i, op := range append([]counter.Op{first}, others...) {
		wg.Go(func() { results[i] = c.Do(t.Context(), op) })
		synctest.Wait()
	}

	g.mu.Lock()
	g.shut = nil
	g.mu.Unlock()
	close(shut)
	wg.Wait()

	return results
}

func value(t *testing.T, s counter.Reader, key string) int64 {
	t.Helper()
	got, err := s.Read(t.Context(), []string{key}, "", 0)
	if err != nil {
		t.Fatal(err)
	}

	return got[0].Value
}

func start(t *testing.T, cfg counter.CombinerConfig) (*gate, *counter.Combiner) {
	g := &gate{Store: countertest.InMemory(t, nil)}
	c := counter.NewCombiner(g, cfg)
	t.Cleanup(c.Close)
	return g, c
}

// Other counters do not wait for a write of exact counters.
func TestExactCountersApart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g, c := start(t, counter.CombinerConfig{SeparateExact: true})

		// An operation of two exact counters, in the other order than the single ones.
		two := counter.Op{Changes: append(add(exact, "e:2", 1).Changes, add(exact, "e:1", 1).Changes...)}
		for i, r := range gather(t, g, c, add(exact, "e:1", 1), add(sum, "s:1", 1), two, add(exact, "e:2", 1)) {
			if r.Err != nil {
				t.Errorf("operation %d: %v", i, r.Err)
			}
		}

		if len(g.writes) != 3 || len(g.writes[1]) != 1 || g.writes[1][0].Changes[0].Key != "s:1" ||
			len(g.writes[2]) != 2 {
			t.Errorf("the writes are %+v", g.writes)
		}

		if s, e := value(t, g, "s:1"), value(t, g, "e:1"); s != 1 || e != 2 {
			t.Errorf("the counters are %d and %d, want 1 and 2", s, e)
		}
	})
}

// Operations that arrive during a write are written together. Changes of a sum are merged, and each caller gets its own
// answer.
func TestWhatComesDuringAWriteGoesAsOne(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g, c := start(t, counter.CombinerConfig{})
		results := gather(t, g, c, add(sum, "s:1", 1),
			add(sum, "s:1", 2), add(sum, "s:1", 3), add(sum, "s:2", 7), add(sum, "s:1", -1), add(exact, "e:1", 1),
			add(exact, "e:1", 1), add(sum, "s:1", 4))

		if len(g.writes) != 2 || len(g.writes[1]) != 5 {
			t.Fatalf("%d writes, want 2, and the second is %+v, want 5 operations", len(g.writes), g.writes[1])
		}

		// Changes of a sum are merged, and changes of an exact counter are not, since each has an entry.
		if ch := g.writes[1][0].Changes[0]; ch.Delta != 9 || ch.Merged != 3 {
			t.Errorf("the merged change is %+v, want 3 changes that add up to 9", ch)
		}

		for i, r := range results {
			if r.Err != nil {
				t.Errorf("operation %d: %v", i, r.Err)
			}
		}
		for i, least := range []int64{1, 3, 6, 7, 5, 1, 2, 9} { // each answer has at least the caller's own change
			if got := results[i].Counters[0].Value; got < least && i != 4 ||
				results[i].Counters[0].Version.Sequence == 0 {
				t.Errorf("operation %d is answered with %+v, want at least %d", i, results[i], least)
			}
		}

		if got := value(t, g, "s:1"); got != 9 {
			t.Errorf("s:1 is %d, want 9", got)
		}
		if l, err := g.Ledger(t.Context(), "e:1", 0, 10); err != nil || len(l.Entries) != 2 {
			t.Errorf("the ledger is %+v, %v; want an entry for each change", l, err)
		}
	})
}

// Changes are not merged over one that cannot be merged: their order stays.
func TestOrderIsKeptAroundWhatCannotBeMerged(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g, c := start(t, counter.CombinerConfig{})
		reset := counter.Op{
			Changes: []counter.Change{{Key: "s:1", Rule: sum, Verb: counter.Reset, Reason: "r", By: "b"}},
		}

		gather(t, g, c, add(sum, "s:0", 1), add(sum, "s:1", 5), add(sum, "s:1", 5), reset, add(sum, "s:1", 2),
			add(sum, "s:1", 2))

		if got := value(t, g, "s:1"); got != 4 || len(g.writes[1]) != 3 {
			t.Errorf("s:1 is %d after %+v, want 4 after 3 operations", got, g.writes[1])
		}
	})
}

// If a merged change is refused, its parts are made one by one, so that each caller gets its own answer.
func TestAMergedChangeThatIsRefusedIsMadeOneByOne(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g, c := start(t, counter.CombinerConfig{})

		// Merged, the changes overflow; one by one, some of them fit.
		full := add(sum, "s:1", math.MaxInt64-5)
		full.Changes[0].Verb = counter.Adjust
		results := gather(t, g, c, full, add(sum, "s:1", 3), add(sum, "s:1", 3), add(sum, "s:1", 2), add(sum, "s:2", 1))

		for i, want := range []error{nil, nil, counter.ErrOverflow, nil, nil} {
			if !errors.Is(results[i].Err, want) {
				t.Errorf("operation %d: %+v, want %v", i, results[i], want)
			}
		}

		if got := value(t, g, "s:1"); got != math.MaxInt64 {
			t.Errorf("s:1 is %d, want the greatest number", got)
		}

		// The counter was created as exact, before the rule said sum: each change is refused.
		c.Do(t.Context(), add(exact, "s:3", 1))
		for i, r := range gather(t, g, c, add(sum, "s:0", 1), add(sum, "s:3", 1), add(sum, "s:3", 1)) {
			if errors.Is(r.Err, counter.ErrKind) != (i > 0) {
				t.Errorf("operation %d: %+v, want ErrKind: %t", i, r, i > 0)
			}
		}
	})
}

// A queue is bounded. Operations beyond the bound are refused and not made.
func TestQueueIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g, c := start(t, counter.CombinerConfig{QueueSize: 3})

		results := gather(t, g, c, add(sum, "s:1", 1), add(exact, "e:1", 1), add(exact, "e:1", 1), add(exact, "e:1", 1),
			add(exact, "e:1", 1))
		for i, r := range results {
			busy := errors.Is(r.Err, counter.ErrBusy)
			if busy != (i == 4) || busy && !errors.Is(r.Err, counter.ErrUnavailable) {
				t.Errorf("operation %d: %v", i, r.Err)
			}
		}

		if got := value(t, g, "e:1"); got != 3 {
			t.Errorf("e:1 is %d, want 3", got)
		}

		// The queue has room again.
		if r := c.Do(t.Context(), add(exact, "e:1", 1)); r.Err != nil {
			t.Errorf("when the queue has room again: %v", r.Err)
		}
	})
}

// A write has a bounded number of changes.
func TestWritesAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g, c := start(t, counter.CombinerConfig{Batch: 2})
		many := counter.Op{
			Changes: slices.Concat(add(exact, "e:1", 1).Changes, add(exact, "e:2", 1).Changes,
				add(exact, "e:3", 1).Changes),
		}

		// A write has two changes at most, but an operation is never divided.
		gather(t, g, c, add(sum, "s:1", 1), add(exact, "e:1", 1), add(exact, "e:1", 1), add(exact, "e:1", 1), many,
			add(exact, "e:1", 1))

		var sizes []int
		for _, w := range g.writes {
			sizes = append(sizes, len(w))
		}
		if !slices.Equal(sizes, []int{1, 2, 1, 1, 1}) {
			t.Errorf("the writes have %v operations", sizes)
		}
	})
}

// waiting blocks operations of several changes until may is closed.
type waiting struct {
	counter.Store
	may chan struct{}
}

func (w *waiting) Apply(ctx context.Context, ops []counter.Op) []counter.Result {
	if len(ops[0].Changes) > 1 {
		<-w.may
	}

	return w.Store.Apply(ctx, ops)
}

// An operation without a queue does not delay others. It is made even if its caller gives up or the Combiner closes,
// and the number of such operations is bounded.
func TestAnOperationWithoutAQueue(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := &waiting{countertest.InMemory(t, nil), make(chan struct{})}
		single := func(op *counter.Op) (int, bool) { return 0, len(op.Changes) == 1 }
		c := counter.NewCombiner(w, counter.CombinerConfig{QueueOf: single, QueueSize: 5})
		batch := counter.Op{Changes: slices.Concat(add(exact, "e:1", 1).Changes, add(exact, "e:2", 1).Changes)}

		ctx, leave := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		for range 2 {
			wg.Go(func() {
				if r := c.Do(ctx, batch); !errors.Is(r.Err, counter.ErrUnavailable) {
					t.Errorf("a caller that gave up got %+v, want ErrUnavailable", r)
				}
			})
		}

		synctest.Wait()
		if r := c.Do(t.Context(), batch); !errors.Is(r.Err, counter.ErrBusy) {
			t.Errorf("a third batch: %+v, want ErrBusy", r)
		}
		if r := c.Do(t.Context(), add(exact, "e:1", 1)); r.Err != nil {
			t.Errorf("a single change: %+v", r)
		}

		// The callers return at once, but Close waits for their batches.
		leave()
		wg.Wait()
		closed := false
		wg.Go(func() {
			c.Close()
			closed = true
		})

		synctest.Wait()
		if r := c.Do(t.Context(), batch); closed || !errors.Is(r.Err, counter.ErrUnavailable) {
			t.Errorf("Close returned while batches were under way: %v; afterwards a batch is answered %+v", closed, r)
		}

		close(w.may)
		wg.Wait()
		if got := value(t, w, "e:1"); got != 3 {
			t.Errorf("e:1 is %d, want 3", got)
		}
	})
}

// A caller that gives up returns at once, and its accepted change is made.
func TestACancelledCallerLeavesItsChange(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g, c := start(t, counter.CombinerConfig{})
		shut := make(chan struct{})
		g.shut = shut

		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		for range 3 {
			wg.Go(func() {
				if r := c.Do(ctx, add(exact, "e:1", 1)); !errors.Is(r.Err, counter.ErrUnavailable) {
					t.Errorf("the caller that gave up got %+v, want ErrUnavailable", r)
				}
			})
			synctest.Wait()
		}

		// The callers return, though the store has not answered.
		cancel()
		wg.Wait()

		close(shut)
		c.Close()
		if got := value(t, g, "e:1"); got != 3 {
			t.Errorf("e:1 is %d, want 3, since accepted changes are made", got)
		}
	})
}

// A call to a silent store is given up after the timeout.
func TestASilentStoreIsGivenUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g, c := start(t, counter.CombinerConfig{WriteTimeout: time.Second})
		g.shut = make(chan struct{})
		began := time.Now()
		r := c.Do(t.Context(), add(sum, "s:1", 1))
		if !errors.Is(r.Err, counter.ErrUnavailable) || time.Since(began) != time.Second {
			t.Errorf("%+v after %s, want ErrUnavailable after 1s", r, time.Since(began))
		}

		g.mu.Lock()
		g.shut, g.fail = nil, fmt.Errorf("x: %w", counter.ErrUnavailable)
		g.mu.Unlock()
		for i, r := range gather(t, g, c, add(sum, "s:1", 1), add(sum, "s:1", 1), add(sum, "s:1", 1)) {
			if !errors.Is(r.Err, counter.ErrUnavailable) {
				t.Errorf("operation %d: %+v, want ErrUnavailable", i, r)
			}
		}
	})
}

// Keys are divided among many queues, which write at the same time.
func TestQueuesWriteInParallel(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g, c := start(t, counter.CombinerConfig{Queues: 64})
		shut := make(chan struct{})
		g.shut = shut

		var wg sync.WaitGroup
		for i := range 200 {
			wg.Go(func() { c.Do(t.Context(), add(exact, fmt.Sprintf("e:%d", i), 1)) })
		}

		synctest.Wait()

		// Two hundred keys use nearly all of the queues.
		if n := len(g.writes); n < 32 || n > 64 {
			t.Errorf("%d writes are under way, want 32 to 64", n)
		}

		close(shut)
		wg.Wait()
	})
}

func TestCloseRefuses(t *testing.T) {
	_, c := start(t, counter.CombinerConfig{})
	c.Close()
	if r := c.Do(t.Context(), add(sum, "s:1", 1)); !errors.Is(r.Err, counter.ErrUnavailable) {
		t.Errorf("after Close an operation is answered %+v, want ErrUnavailable", r)
	}
}

// combined is a store whose every operation goes through a Combiner.
type combined struct {
	counter.Store
	c *counter.Combiner
}

func (s combined) Apply(ctx context.Context, ops []counter.Op) []counter.Result {
	results := make([]counter.Result, len(ops))
	for i, op := range ops {
		results[i] = s.c.Do(ctx, op)
	}

	return results
}

// TestContractCombined runs the contract through a Combiner: callers cannot notice that changes are combined.
func TestContractCombined(t *testing.T) {
	countertest.FewHistories(t)
	for name, cfg := range map[string]counter.CombinerConfig{
		"instant":   {Instant: true},
		"one queue": {},
		"queues":    {Queues: 8, Batch: 16},
	} {
		t.Run(name, func(t *testing.T) {
			countertest.RunInBubble(t, func(t testing.TB) countertest.Instance {
				s := countertest.InMemory(t, nil)
				c := counter.NewCombiner(s, cfg)
				t.Cleanup(c.Close)
				return countertest.Instance{Store: combined{s, c}}
			})
		})
	}
}

// slow is a store whose writes take a while.
type slow struct {
	counter.Store
	takes  time.Duration
	mu     sync.Mutex
	writes int
}

func (s *slow) Apply(ctx context.Context, ops []counter.Op) []counter.Result {
	time.Sleep(s.takes)

	s.mu.Lock()
	s.writes++
	s.mu.Unlock()
	return s.Store.Apply(ctx, ops)
}

func (s *slow) Writes() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.writes
}

// A key that changes often is written at the pace, and no caller waits much longer than that. In an idle queue a caller
// does not wait.
func TestABusyQueueKeepsItsPace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const takes, pace = 200 * time.Microsecond, 7 * time.Millisecond
		s := &slow{Store: countertest.InMemory(t, nil), takes: takes}
		c := counter.NewCombiner(s, counter.CombinerConfig{Pace: pace})

		took := func() time.Duration {
			began := time.Now()
			if r := c.Do(t.Context(), add(sum, "s:1", 1)); r.Err != nil {
				t.Error(r.Err)
			}
			return time.Since(began)
		}

		// Without a rush, a change is written at once.
		for range 3 {
			if d := took(); d != takes {
				t.Errorf("a single change took %s, want %s", d, takes)
			}
		}

		var wg sync.WaitGroup
		before := s.Writes()
		began := time.Now()
		for range 20_000 { // for a second
			time.Sleep(50 * time.Microsecond)
			wg.Go(func() {
				if d := took(); d > pace+2*takes {
					t.Errorf("a change took %s, want at most %s", d, pace+2*takes)
				}
			})
		}
		wg.Wait()

		if n, most := s.Writes()-before, int(time.Since(began)/pace)+10; n > most {
			t.Errorf("%d writes in %s, want at most %d", n, time.Since(began), most)
		}

		time.Sleep(pace)
		if d := took(); d != takes {
			t.Errorf("a single change after the rush took %s, want %s", d, takes)
		}
		// A caller that makes one change after another is not slowed down to the pace.
		began = time.Now()
		for range 64 {
			wg.Go(func() {
				for range 100 {
					took()
				}
			})
		}
		wg.Wait()
		if d := time.Since(began); d > 100*(takes+3*time.Millisecond) {
			t.Errorf("100 changes one after the other took %s, want %s at most", d, 100*(takes+3*time.Millisecond))
		}

		c.Close()
	})
}
