package hot

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/rs/zerolog"

	"headcount/counter"
	"headcount/counter/counterredis"
	"headcount/internal/pgtest"
	"headcount/internal/redistest"
	"headcount/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m, redistest.Stop, pgtest.Stop) }

var (
	rules, _ = counter.ParseRules([]byte(`{"rules":[{"match":"*","kind":"sum","buckets":["1m:24h"]}]}`))
	views    = rules.All()[0]
)

// process is a process that gathers only when it is told to.
type process struct {
	*Store
	redis *counterredis.Store
}

func begin(t testing.TB, url string) process {
	t.Helper()
	redis := counterredis.New(counterredis.Config{Conn: redistest.Dial(t, url)})
	p := process{newStore(redis, redis, Config{Rate: 1000, Rules: rules}), redis}
	t.Cleanup(func() { p.Close() })
	return p
}

func add(key string, delta int64) counter.Op {
	return counter.Op{Changes: []counter.Change{{Key: key, Rule: views, Verb: counter.Add, Delta: delta}}}
}

func made(t testing.TB, s counter.Store, op counter.Op) counter.Counter {
	t.Helper()
	r := s.Apply(t.Context(), []counter.Op{op})[0]
	if r.Err != nil {
		t.Fatal(r.Err)
	}
	return r.Counters[0]
}

func read(t testing.TB, s counter.Store, key string, lag time.Duration) counter.Counter {
	t.Helper()
	r, err := s.Read(t.Context(), []string{key}, "", lag)
	if err != nil {
		t.Fatal(err)
	}
	return r[0].Counter
}

// exactly fails the test unless the value is want, of whatever process.
func exactly(t testing.TB, s counter.Store, key string, want int64) counter.Counter {
	t.Helper()
	c := read(t, s, key, 0)
	if c.Value != want || c.Approx {
		t.Fatalf("%+v, want %d", c, want)
	}
	return c
}

// exported are the copies of an export.
func exported(t testing.TB, p process) (copies []counter.Copy) {
	t.Helper()
	if err := p.redis.Dump(t.Context(), "", func(c counter.Copy) error {
		copies = append(copies, c)
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	return copies
}

// looks has p know key, and reports whether it is sharded.
func (p process) looks(t testing.TB, key string) bool {
	t.Helper()
	sharding, err := p.look(t.Context(), key)
	if err != nil {
		t.Fatal(err)
	}
	return sharding.Active
}

// opens splits key.
func (p process) opens(t testing.TB, key string) {
	t.Helper()
	if err := p.split(t.Context(), key); err != nil {
		t.Fatal(err)
	}
	if !p.looks(t, key) {
		t.Fatal("it is not sharded")
	}
}

// gathers gathers key.
func (p process) gathers(t testing.TB, keys ...string) {
	t.Helper()
	if err := p.gatherKeys(t.Context(), keys...); err != nil {
		t.Fatal(err)
	}
}

// gatherKeys gathers sums, whoever has added to them.
func (s *Store) gatherKeys(ctx context.Context, keys ...string) (err error) {
	var sums []*sum
	for _, key := range keys {
		_, fault := s.look(ctx, key)
		err = errors.Join(err, fault)
		s.mu.Lock()
		if k := s.known[key]; k != nil {
			sums = append(sums, k)
		}
		s.mu.Unlock()
	}
	return errors.Join(err, s.gather(ctx, sums))
}

// isSharded reports whether the bucket of key has it as a sum that is sharded.
func (p process) isSharded(t testing.TB, key string) bool {
	t.Helper()
	hot, err := p.redis.Sharded(t.Context(), []int{counterredis.BucketOf(key)})
	if err != nil {
		t.Fatal(err)
	}
	return slices.ContainsFunc(hot, func(c counter.Counter) bool { return c.Key == key })
}

func TestServerASumIsSplitAndMerged(t *testing.T) {
	for name, url := range map[string]string{"one server": redistest.Single(t).URL(), "three masters": redistest.ThreeMasters(t).URL()} {
		t.Run(name, func(t *testing.T) {
			a, b := begin(t, url), begin(t, url)
			key := t.Name()
			made(t, a, add(key, 100))
			a.opens(t, key)
			b.looks(t, key)
			last := counter.Version{}
			for i := range 40 {
				c := made(t, []process{a, b}[i%2], add(key, 3))
				if !c.Approx || i%2 == 0 && c.Version.Compare(last) <= 0 {
					t.Fatalf("%+v after version %v", c, last)
				}
				if i%2 == 0 {
					last = c.Version
				}
			}
			exactly(t, a, key, 220)
			if c := read(t, a.redis, key, 0); c.Value != 100 || !c.Approx {
				t.Fatalf("the record is %+v before it is gathered", c)
			}
			b.gathers(t, key)
			if c := read(t, a.redis, key, 0); c.Value != 220 || c.Version.Sequence != 41 {
				t.Fatalf("the record is %+v after it was gathered", c)
			}
			before := exactly(t, b, key, 220)
			made(t, a, add(key, -20))
			if err := b.merge(t.Context(), key); err != nil {
				t.Fatal(err)
			}
			// a does not know yet: its shard refuses, and the record takes the change.
			if c := made(t, a, add(key, 1)); c.Value != 201 || c.Approx || c.Version.Sequence != before.Version.Sequence+2 {
				t.Fatalf("%+v after %+v", c, before)
			}
			if a.isSharded(t, key) {
				t.Fatal("it is hot")
			}
			// What it gained is in its history.
			_, gains, err := a.History(t.Context(), key, time.Minute, 0, 1<<40)
			sum := int64(0)
			for _, g := range gains {
				sum += g.Value
			}
			if err != nil || sum != 201 {
				t.Fatalf("gained %d, %v", sum, err)
			}
		})
	}
}

// TestServerStepsOfTimeEnd while a sum is sharded: a history has what shards have gained, in the steps that are running, and
// those that are over stay.
func TestServerStepsOfTimeEnd(t *testing.T) {
	for name, behindRedis := range map[string]bool{"Redis": false, "PostgreSQL behind it": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			server, p := redistest.Start(t), (*Store)(nil)
			if behindRedis {
				p, _ = behind(t, server.URL(), pgtest.Single(t).Database(t))
			} else {
				p = begin(t, server.URL()).Store
			}
			seconds, err := counter.ParseRules([]byte(`{"rules":[{"match":"*","kind":"sum","buckets":["1s:1h","1m:24h"]}]}`))
			if err != nil {
				t.Fatal(err)
			}
			p.cfg.Rules = seconds
			one := counter.Op{Changes: []counter.Change{{Key: "k", Rule: seconds.All()[0], Verb: counter.Add, Delta: 1}}}
			made(t, p, one)
			if err := p.split(t.Context(), "k"); err != nil {
				t.Fatal(err)
			}
			for want, steps := int64(1), 0; steps < 2; want++ {
				made(t, p, one)
				_, gains, err := p.History(t.Context(), "k", time.Second, 0, 1<<40)
				sum := int64(0)
				for _, g := range gains {
					sum += g.Value
				}
				if err != nil || sum != want+1 {
					t.Fatalf("gained %d in %v, want %d, %v", sum, gains, want+1, err)
				}
				steps = len(gains)
				time.Sleep(20 * time.Millisecond)
			}
		})
	}
}

// TestServerTopOfAShardedSum: what gains most is found, with all it gained, though it is sharded: by each process, whichever of them
// added to its shards, and after it was merged.
func TestServerTopOfAShardedSum(t *testing.T) {
	for name, url := range map[string]string{"one server": redistest.Single(t).URL(), "three masters": redistest.ThreeMasters(t).URL()} {
		t.Run(name, func(t *testing.T) {
			match := fmt.Sprintf("%s %d ", t.Name(), time.Now().UnixNano())
			topped, err := counter.ParseRules([]byte(`{"rules":[{"match":` + strconv.Quote(match+"*") + `,"kind":"sum","buckets":["1m:1h"],"top":true}]}`))
			if err != nil {
				t.Fatal(err)
			}
			rule := topped.All()[0]
			var processes [2]process
			var tops [2]*counter.TopTracker
			for i := range tops {
				processes[i] = begin(t, url)
				processes[i].cfg.Rules = topped
				tops[i] = counter.NewTopTracker(processes[i], topped, zerolog.Nop())
				t.Cleanup(func() { tops[i].Close() })
			}
			truth := map[string]int64{}
			gain := func(process int, name string, n int64) {
				t.Helper()
				op := counter.Op{Changes: []counter.Change{{Key: match + name, Rule: rule, Verb: counter.Add, Delta: n}}}
				results := processes[process].Apply(t.Context(), []counter.Op{op})
				tops[process].Note(t.Context(), []counter.Op{op}, results)
				if results[0].Err != nil {
					t.Fatal(results[0].Err)
				}
				truth[match+name] += n
			}
			check := func(when string) {
				t.Helper()
				var want []counter.Gained
				for key, n := range truth {
					want = append(want, counter.Gained{Key: key, Value: n})
				}
				slices.SortFunc(want, func(a, b counter.Gained) int { return cmp.Or(cmp.Compare(b.Value, a.Value), cmp.Compare(a.Key, b.Key)) })
				for i := range tops {
					got, err := tops[i].Top(t.Context(), rule, 30*time.Minute, 5)
					if err != nil || !slices.Equal(got, want[:5]) {
						t.Errorf("%s process %d says %v, want %v, %v", when, i, got, want[:5], err)
					}
				}
			}
			// late is a sum that nobody marks, since its changes were made in a step that is over when they are gathered.
			hot, late := match+"hot", match+"late"
			gainLate := func(n int64) {
				t.Helper()
				made(t, processes[0], counter.Op{Changes: []counter.Change{{Key: late, Rule: rule, Verb: counter.Add, Delta: n}}})
				truth[late] += n
			}
			gainLate(1)
			for i := range 40 {
				gain(i%2, fmt.Sprint(i%20), int64(1+i%20))
			}
			gain(0, "hot", 1)
			check("before it is sharded,")
			for _, key := range []string{hot, late} {
				processes[0].opens(t, key)
				processes[1].looks(t, key)
			}
			for i := range 60 {
				gainLate(4)
				gain(i%2, "hot", 5)
				gain(i%2, fmt.Sprint(i%20), 1)
			}
			gain(0, "hot", -1)
			if c := read(t, processes[0].redis, hot, 0); c.Value > 100 {
				t.Fatalf("the record is %+v before it is gathered: its shards had nothing", c)
			}
			processes[1].gathers(t, hot, late)
			check("after it was gathered,")
			gain(1, "hot", 7)
			if err := processes[0].merge(t.Context(), hot); err != nil {
				t.Fatal(err)
			}
			gain(1, "hot", 2)
			check("after it was merged,")
			processes[1].opens(t, hot)
			made(t, processes[0], counter.Op{Changes: []counter.Change{{Key: hot, Rule: rule, Verb: counter.Delete}}})
			delete(truth, hot)
			check("after it was deleted,")
		})
	}
}

// TestServerWritesLandOnAllMasters is why sums are sharded.
func TestServerWritesLandOnAllMasters(t *testing.T) {
	cluster := redistest.ThreeMasters(t)
	p := begin(t, cluster.URL())
	for _, key := range []string{"a", "b", "c", "d"} {
		key = t.Name() + key
		made(t, p, add(key, 1))
		p.opens(t, key)
		runs := func() (runs [3]int) {
			for i, m := range cluster.Masters {
				text := m.Do(t, "INFO", "commandstats").(string)
				_, rest, _ := strings.Cut(text, "cmdstat_evalsha:calls=")
				calls, _, _ := strings.Cut(rest, ",")
				runs[i], _ = strconv.Atoi(calls)
			}
			return runs
		}
		before := runs()
		for range 300 {
			made(t, p, add(key, 1))
		}
		for i, after := range runs() {
			if n := after - before[i]; n < 30 || n > 210 {
				t.Errorf("%q: %d of 300 writes landed on master %d", key, n, i)
			}
		}
		exactly(t, p, key, 301)
	}
}

// TestServerWhatNeedsTheWholeSumMergesIt: resets, adjustments, DELETE, and the value in a refusal.
func TestServerWhatNeedsTheWholeSumMergesIt(t *testing.T) {
	url := redistest.ThreeMasters(t).URL()
	for _, knows := range []bool{true, false} {
		a, b := begin(t, url), begin(t, url)
		key := t.Name() + fmt.Sprint(knows)
		change := func(verb counter.Verb, delta int64) counter.Counter {
			t.Helper()
			if knows {
				b.looks(t, key)
			}
			return made(t, b, counter.Op{Changes: []counter.Change{{Key: key, Rule: views, Verb: verb, Delta: delta, Reason: "r", By: "b"}}})
		}
		made(t, a, add(key, 5))
		a.opens(t, key)
		made(t, a, add(key, 7))
		change(counter.Adjust, -2)
		before := exactly(t, a, key, 10)
		if c := change(counter.Reset, 0); c.Value != 0 || c.Approx || c.Version.Compare(before.Version) <= 0 {
			t.Fatalf("%+v after %+v", c, before)
		}
		ledger, err := b.Ledger(t.Context(), key, 0, 10)
		if err != nil || len(ledger.Entries) != 2 || ledger.Entries[1].Before != 10 || ledger.Entries[1].After != 0 {
			t.Fatalf("%+v, %v", ledger, err)
		}
		a.opens(t, key)
		made(t, a, add(key, 3))
		change(counter.Delete, 0)
		if c := read(t, a, key, 0); c.Touched() {
			t.Fatalf("%+v after it was deleted", c)
		}
		// Its next life.
		if c := made(t, a, add(key, 4)); c.Value != 4 || c.Version.Incarnation <= before.Version.Incarnation {
			t.Fatalf("%+v in its next life", c)
		}
		a.opens(t, key)
		made(t, a, add(key, 4))
		exactly(t, b, key, 8)
		for n, c := range []counter.Change{
			{Verb: counter.Set, Delta: 52, Reason: "r", By: "b", Rule: &counter.Rule{Match: "*", Kind: counter.Exact}},
			{Verb: counter.Edit, Join: []string{"m"}, Rule: &counter.Rule{Match: "*", Kind: counter.Members}},
		} {
			if n > 0 {
				a.opens(t, key)
			}
			made(t, a, add(key, 1))
			c.Key = key
			r, conflict := b.Apply(t.Context(), []counter.Op{{Changes: []counter.Change{c}}})[0], (*counter.Conflict)(nil)
			if want := int64(9 + n); !errors.As(r.Err, &conflict) || !errors.Is(r.Err, counter.ErrKind) || conflict.Value != want {
				t.Errorf("%d is refused with %+v, %v; want the value %d", c.Verb, conflict, r.Err, want)
			}
		}
	}
}

// TestServerAnAggregateHasTheShards while others add.
func TestServerAnAggregateHasTheShards(t *testing.T) {
	for _, url := range []string{redistest.Single(t).URL(), redistest.ThreeMasters(t).URL()} {
		a, b := begin(t, url), begin(t, url)
		key := t.Name()
		made(t, a, add(key+"1", 5))
		made(t, a, add(key+"2", 5))
		a.opens(t, key+"1")
		done := make(chan error, 1)
		go func() { // awaited below
			for range 50 {
				if r := a.Apply(context.Background(), []counter.Op{add(key+"1", 1)})[0]; r.Err != nil {
					done <- r.Err
					return
				}
			}
			done <- nil
		}()
		last := int64(0)
		for ended := false; !ended; {
			select {
			case err := <-done:
				if err != nil {
					t.Fatal(err)
				}
				ended = true
			default:
			}
			sum, err := b.Aggregate(t.Context(), key)
			if err != nil || sum.Counters != 2 || sum.Value < last {
				t.Fatalf("%+v after %d, %v", sum, last, err)
			}
			last = sum.Value
		}
		if last != 60 {
			t.Fatalf("%d in the end", last)
		}
	}
}

// TestServerAnExportHasTheShards, and says nothing of them.
func TestServerAnExportHasTheShards(t *testing.T) {
	p := begin(t, redistest.Start(t).URL())
	made(t, p, add("k", 1))
	p.opens(t, "k")
	for range 20 {
		made(t, p, add("k", 1))
	}
	copies := exported(t, p)
	if len(copies) != 1 || copies[0].Value != 21 || copies[0].Version.Sequence != 21 || copies[0].Sharding != nil {
		t.Fatalf("%+v", copies)
	}
	if gained := copies[0].Slots.At(time.Minute).Value; gained != 21 {
		t.Errorf("the history of the export has %d", gained)
	}
}

// TestServerLargeNumbersAreJudgedWhole: what 64 bits do not hold is refused as if the sum were not sharded.
func TestServerLargeNumbersAreJudgedWhole(t *testing.T) {
	p := begin(t, redistest.Single(t).URL())
	key := t.Name()
	made(t, p, add(key, 1))
	p.opens(t, key)
	const most = 1_000_000_000_000_000_000 // the Combiner makes it of many
	for range 9 {
		made(t, p, add(key, most))
	}
	var c *counter.Conflict
	if r := p.Apply(t.Context(), []counter.Op{add(key, most)})[0]; !errors.As(r.Err, &c) || c.Is != counter.ErrOverflow || c.Value != 9*most+1 {
		t.Fatalf("%+v", r)
	}
	exactly(t, p, key, 9*most+1)
	if err := p.split(t.Context(), key); err != nil || p.looks(t, key) {
		t.Fatalf("it is sharded, %v", err)
	}
}

// caller is a store whose calls to Redis go through call, which makes them for all shards, some, or one
// after the other.
type caller struct {
	counter.Store
	ShardStore
	call func(shards []int, make func(shards []int) error) error
}

func (c *caller) Apply(ctx context.Context, ops []counter.Op) (results []counter.Result) {
	err := c.call(nil, func([]int) error { results = c.Store.Apply(ctx, ops); return nil })
	if err != nil {
		results = make([]counter.Result, len(ops))
		for i := range results {
			results[i].Err = err
		}
	}
	return results
}

func (c *caller) Read(ctx context.Context, keys []string, member string, lag time.Duration) (out []counter.Reading, err error) {
	err = c.call(nil, func([]int) (err error) { out, err = c.Store.Read(ctx, keys, member, lag); return err })
	return out, err
}

func (c *caller) AddToShards(ctx context.Context, adds []counterredis.ShardAdd) (out []counterredis.ShardAdded) {
	err := c.call(nil, func([]int) error { out = c.ShardStore.AddToShards(ctx, adds); return nil })
	if err != nil {
		out = make([]counterredis.ShardAdded, len(adds))
		for i := range out {
			out[i].Err = err
		}
	}
	return out
}

func (c *caller) OpenShards(ctx context.Context, key string, e counter.Epoch, fresh bool, shards []int) (open bool, err error) {
	open = true
	err = c.call(shards, func(shards []int) error {
		some, err := c.ShardStore.OpenShards(ctx, key, e, fresh, shards)
		open = open && some
		return err
	})
	return open, err
}

func (c *caller) CloseShards(
	ctx context.Context, key string, e counter.Epoch, kept time.Duration, shards []int,
) (out []counter.Shard, err error) {
	err = c.call(shards, func(shards []int) error {
		some, err := c.ShardStore.CloseShards(ctx, key, e, kept, shards)
		out = append(out, some...)
		return err
	})
	return out, err
}

func (c *caller) Shards(ctx context.Context, keys []string) (out [][counter.Shards]counter.Shard, err error) {
	err = c.call(nil, func([]int) (err error) { out, err = c.ShardStore.Shards(ctx, keys); return err })
	return out, err
}

// mortal is a process that dies at a call to Redis: before Redis has it, before it is answered, or, when
// it is of several shards, in its midst.
type mortal struct {
	left int
	how  death
}

type death int

const (
	unsent death = iota
	unanswered
	halfway
	deaths
)

var errDead = fmt.Errorf("%w: the process is dead", counter.ErrUnavailable)

func (m *mortal) call(shards []int, make func(shards []int) error) error {
	m.left--
	switch {
	case m.left > 0:
		return make(shards)
	case m.left < 0 || m.how == unsent:
		return errDead
	case m.how == halfway:
		shards = shards[:len(shards)/2]
	}
	return errors.Join(make(shards), errDead)
}

// TestServerAProcessDiesAtAnyStep, and another one goes on: no change is lost or doubled, no version goes back,
// and nothing is left half done. (Invariant 1.)
func TestServerAProcessDiesAtAnyStep(t *testing.T) {
	url := redistest.ThreeMasters(t).URL()
	witness, other := begin(t, url), begin(t, url)
	for name, way := range map[string]func(s *Store, key string) error{
		"sharded": func(s *Store, key string) error { return s.split(t.Context(), key) },
		"gather": func(s *Store, key string) error {
			return s.gatherKeys(t.Context(), key)
		},
		"merge": func(s *Store, key string) error { return s.merge(t.Context(), key) },
		"add": func(s *Store, key string) error {
			_, err := s.look(t.Context(), key)
			return errors.Join(err, s.Apply(t.Context(), []counter.Op{add(key, 1000)})[0].Err)
		},
		"reset": func(s *Store, key string) error {
			return s.Apply(t.Context(), []counter.Op{{Changes: []counter.Change{{Key: key, Rule: views, Verb: counter.Reset, Reason: "r", By: "b"}}}})[0].Err
		},
	} {
		t.Run(name, func(t *testing.T) {
			for how := range deaths {
				for calls, died := 1, true; died; calls++ {
					key := fmt.Sprint(t.Name(), how, calls)
					made(t, witness, add(key, 5))
					if name != "sharded" {
						witness.opens(t, key)
						for range 20 {
							made(t, witness, add(key, 1))
						}
					}
					before := read(t, witness, key, 0)
					m := &mortal{left: calls, how: how}
					c := &caller{witness.redis, witness.redis, m.call}
					err := way(newStore(c, c, Config{Rate: 1000, Rules: rules}), key)
					if died = m.left <= 0; died && name != "merge" && name != "reset" && !errors.Is(err, errDead) || !died && err != nil {
						t.Fatalf("call %d: %v", calls, err)
					}
					// What is there is right at once, for who knew the sum before and who did not, and
					// each change lands.
					after := read(t, other, key, 0)
					if v := after.Value - before.Value; v != 0 && (name != "add" || v != 1000) && (name != "reset" || after.Value != 0) {
						t.Fatalf("call %d: %+v after %+v", calls, after, before)
					}
					if v := after.Version; v.Compare(before.Version) < 0 || v == before.Version && after.Value != before.Value {
						t.Fatalf("call %d: %+v after %+v", calls, after, before)
					}
					want := after.Value
					for _, p := range []process{witness, other} {
						for range 4 {
							made(t, p, add(key, 1))
						}
					}
					exactly(t, witness, key, want+8)
					// Another one finishes what was begun.
					for range 3 {
						if err := other.sweep(t.Context()); err != nil {
							t.Fatal(err)
						}
						if err := other.tick(t.Context()); err != nil {
							t.Fatal(err)
						}
					}
					made(t, witness, add(key, 1))
					last := exactly(t, other, key, want+9)
					if last.Version.Sequence != after.Version.Sequence+9 {
						t.Fatalf("call %d: %+v, nine changes after %+v", calls, last, after)
					}
					if err := other.merge(t.Context(), key); err != nil {
						t.Fatal(err)
					}
					if c := exactly(t, other.redis, key, want+9); c.Version != last.Version {
						t.Fatalf("call %d: %+v, and it was %+v before it was merged", calls, c, last)
					}
					if other.isSharded(t, key) {
						t.Fatalf("call %d: it is hot", calls)
					}
					is, err := other.look(t.Context(), key)
					if err != nil {
						t.Fatal(err)
					}
					for i := range all {
						if open, err := other.redis.OpenShards(t.Context(), key, is.Epoch, false, all[i:i+1]); err != nil || open {
							t.Fatalf("call %d: shard %d is open: %t, %v", calls, i, open, err)
						}
					}
				}
			}
		})
	}
}

// TestServerNothingOvertakesAMerge: an operation that a merge has to precede is made before the later ones on its counter, also
// when these are made in another run of the script, after a new counter was looked for in another bucket.
func TestServerNothingOvertakesAMerge(t *testing.T) {
	url := redistest.Single(t).URL()
	a, key := begin(t, url), t.Name()
	replay := add(key, 5)
	replay.IdempotencyKey = counter.NewIdempotencyKey("*", "", key)
	made(t, a, replay)
	a.opens(t, key)
	made(t, a, add(key, 7))
	redis := counterredis.New(counterredis.Config{Conn: redistest.Dial(t, url), Rules: rules})
	b := newStore(redis, redis, Config{Rate: 1000, Rules: rules})
	t.Cleanup(func() { b.Close() })
	join := counter.Change{Key: key, Verb: counter.Edit, Join: []string{"m"}, Rule: &counter.Rule{Match: "*", Kind: counter.Members}}
	results := b.Apply(t.Context(), []counter.Op{{Changes: []counter.Change{join}}, replay, add(key+" new", 1), add(key, 100)})
	conflict := (*counter.Conflict)(nil)
	if !errors.As(results[0].Err, &conflict) || conflict.Value != 12 || !results[1].Replay || results[1].Counters[0].Value != 12 ||
		results[2].Err != nil || results[3].Err != nil {
		t.Errorf("%+v with %+v", results, conflict)
	}
	exactly(t, a, key, 112)

	// One waits for the idempotency key of the first, and the next for its counter.
	first, second, other := counter.Op{Changes: []counter.Change{join}}, add(key+" other", 1), add(key+" other", 5)
	first.IdempotencyKey = counter.NewIdempotencyKey("*", "", key+" again")
	second.IdempotencyKey = first.IdempotencyKey
	a.opens(t, key)
	results = b.Apply(t.Context(), []counter.Op{first, second, other})
	if results[0].Err == nil || results[1].Err != nil || results[2].Err != nil || results[2].Counters[0].Value != 6 {
		t.Errorf("%+v", results)
	}
}

// TestServerAnyOrder has processes add, sharded, gather, merge and reset at once, and lets one call to Redis after the other
// through, in an order that the seed says. (Invariant 1.)
func TestServerAnyOrder(t *testing.T) {
	cluster := redistest.ThreeMasters(t)
	seeds := uint64(4)
	for seed := range seeds {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			rng := rand.New(rand.NewPCG(seed, 1))
			turns := make(chan chan struct{})
			const actors = 5
			var wg sync.WaitGroup
			var mu sync.Mutex
			want := int64(0)
			key := t.Name()
			processes := [2]process{begin(t, cluster.URL()), begin(t, cluster.URL())}
			made(t, processes[0], add(key, 1))
			want++
			for a := range actors {
				p := processes[a%2]
				g := gate{turns}
				c := &caller{p.redis, p.redis, g.call}
				s := newStore(c, c, Config{Rate: 1000, Rules: rules})
				rng := rand.New(rand.NewPCG(seed, 2+uint64(a)))
				wg.Go(func() {
					var last, master counter.Version
					for n := range 25 {
						var err error
						switch x := rng.IntN(20); {
						case x < 9:
							delta := rng.Int64N(7) - 2
							if delta == 0 {
								delta = 9
							}
							op := add(key, delta)
							if x < 2 {
								op.IdempotencyKey = counter.NewIdempotencyKey(key, "", fmt.Sprint(a, n))
								_ = s.Apply(t.Context(), []counter.Op{op})
							}
							if err = s.Apply(t.Context(), []counter.Op{op})[0].Err; err == nil {
								mu.Lock()
								want += delta
								mu.Unlock()
							}
						case x < 12:
							err = s.split(t.Context(), key)
						case x < 15:
							err = s.gatherKeys(t.Context(), key)
						case x < 16:
							err = s.merge(t.Context(), key)
						case x < 17: // another process dies on its way
							m := &mortal{left: 1 + rng.IntN(6), how: death(rng.IntN(int(deaths)))}
							c := &caller{p.redis, p.redis, func(shards []int, make func([]int) error) error {
								return m.call(shards, func(shards []int) error { return g.call(shards, make) })
							}}
							dies := newStore(c, c, Config{Rate: 1000, Rules: rules})
							way := []func(context.Context, string) error{dies.split, dies.merge, dies.repair}[rng.IntN(3)]
							if fault := way(t.Context(), key); fault != nil && !errors.Is(fault, errDead) {
								err = fault
							}
						case x < 18:
							err = s.Apply(t.Context(), []counter.Op{{Changes: []counter.Change{{Key: key, Rule: views, Verb: counter.Reset, Reason: "r", By: "b"}}}})[0].Err
						case x < 19:
							var r []counter.Reading
							if r, err = c.Read(t.Context(), []string{key}, "", 0); err == nil {
								if v := r[0].Version; v.Compare(master) < 0 {
									t.Errorf("the record is %+v after %v", r[0], master)
								} else {
									master = v
								}
							}
						default:
							var r []counter.Reading
							if r, err = s.Read(t.Context(), []string{key}, "", 0); err == nil {
								if v := r[0].Version; v.Compare(last) < 0 || r[0].Approx {
									t.Errorf("%+v after %v", r[0], last)
								} else {
									last = v
								}
							}
						}
						// Five fight over one sum, more than ever will.
						if err != nil && !errors.Is(err, counter.ErrSharded) && !strings.Contains(err.Error(), "faster than they can be read") {
							t.Error(err)
						}
					}
					g.leave()
				})
			}
			// Whoever wants to call waits; when all do, one of them is let through.
			var waiting []chan struct{}
			for left := actors; left > 0; {
				for len(waiting) < left {
					if turn := <-turns; turn == nil {
						left--
					} else {
						waiting = append(waiting, turn)
					}
				}
				if left > 0 {
					i := rng.IntN(len(waiting))
					turn := waiting[i]
					waiting = append(waiting[:i], waiting[i+1:]...)
					close(turn)
				}
			}
			wg.Wait()
			ledger, err := processes[0].Ledger(t.Context(), key, 0, 1000)
			if err != nil {
				t.Fatal(err)
			}
			for _, e := range ledger.Entries {
				want += e.Delta
			}
			exactly(t, processes[1], key, want)
			if err := processes[0].merge(t.Context(), key); err != nil {
				t.Fatal(err)
			}
			exactly(t, processes[1].redis, key, want)
			t.Logf("%d in the end, %d resets", want, len(ledger.Entries))
		})
	}
}

// gate asks for a turn before each call to Redis, of which each shard is one.
type gate struct{ turns chan chan struct{} }

func (g gate) call(shards []int, make func(shards []int) error) (err error) {
	if len(shards) == 0 {
		shards = []int{0}
	}
	for _, p := range shards {
		g.pass()
		err = errors.Join(err, make([]int{p}))
	}
	return err
}

func (g gate) leave() { g.turns <- nil }

func (g gate) pass() {
	turn := make(chan struct{})
	g.turns <- turn
	<-turn
}

// TestServerAnImportReplacesASplitSum: what its shards had counts no more, also when the sum is split again.
func TestServerAnImportReplacesASplitSum(t *testing.T) {
	url, key := redistest.Single(t).URL(), t.Name()
	p := begin(t, url)
	spread(t, p.Store, key)
	copies := exported(t, p)
	made(t, p, add(key, 1))
	if n, err := p.redis.Restore(t.Context(), copies, rules); err != nil || n != 0 {
		t.Fatalf("%d were imported, and the sum is newer than its copy, %v", n, err)
	}
	exactly(t, p, key, 121)
	copies[0].Version.Sequence += 2
	if n, err := p.redis.Restore(t.Context(), copies, rules); err != nil || n != 1 {
		t.Fatalf("%d were imported, %v", n, err)
	}
	exactly(t, p, key, 120)
	p.opens(t, key)
	exactly(t, p, key, 120)
	made(t, p, add(key, 1))
	exactly(t, begin(t, url), key, 121)
}
