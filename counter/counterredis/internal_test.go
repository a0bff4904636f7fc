package counterredis

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"headcount/counter"
	"headcount/counter/hyperloglog"
	"headcount/internal/redistest"
	"headcount/internal/testkit"
	"headcount/scripts"
)

var (
	stock = &counter.Rule{Match: "*", Kind: counter.Exact, Floor: new(int64), Ledger: counter.DefaultLedger}
	likes = &counter.Rule{Match: "*", Kind: counter.Members}
	views = &counter.Rule{Match: "*", Kind: counter.Sum}
)

func begin(t testing.TB, url string) *Store {
	t.Helper()
	rules, err := counter.ParseRules([]byte(`{"rules":[{"match":"k","kind":"exact"},{"match":"k:*","kind":"exact"},{"match":"*","kind":"sum"}]}`))
	if err != nil {
		t.Fatal(err)
	}
	s := New(Config{Conn: redistest.Dial(t, url), Rules: rules})
	t.Cleanup(func() { s.Close() })
	return s
}

func add(rule *counter.Rule, key string, delta int64) counter.Change {
	return counter.Change{Key: key, Rule: rule, Verb: counter.Add, Delta: delta}
}

func values(t testing.TB, s *Store, keys []string) (out []int64) {
	t.Helper()
	read, err := s.Read(t.Context(), keys, "", 0)
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range read {
		out = append(out, r.Value)
	}
	return out
}

// TestServerABatchOfExactCountersIsWholeOnACluster: all of them, and their idempotency key, are in one slot, so that one
// script makes them. (Invariant 1.)
func TestServerABatchOfExactCountersIsWholeOnACluster(t *testing.T) {
	s := begin(t, redistest.ThreeMasters(t).URL())
	op := counter.Op{IdempotencyKey: counter.NewIdempotencyKey("*", "", "batch")}
	keys := []string{"k:a", "k:b", "k:c", "k:d", "k:e", "k:f"}
	for _, key := range keys {
		if r := s.Apply(t.Context(), []counter.Op{{Changes: []counter.Change{add(stock, key, 5)}}})[0]; r.Err != nil {
			t.Fatal(r.Err)
		}
		op.Changes = append(op.Changes, add(stock, key, -1))
	}
	if s.crosses(&op) {
		t.Error("they are in several buckets")
	}
	over := op
	over.Changes = append(slices.Clone(op.Changes), add(stock, "k:d", -5))
	var c *counter.Conflict
	if err := s.Apply(t.Context(), []counter.Op{over})[0].Err; !errors.As(err, &c) || c.Key != "k:d" || c.Value != 5 {
		t.Fatalf("%v", err)
	}
	if got := fmt.Sprint(values(t, s, keys)); got != "[5 5 5 5 5 5]" {
		t.Errorf("after the refusal: %s", got)
	}
	for n := range 2 {
		if r := s.Apply(t.Context(), []counter.Op{op})[0]; r.Err != nil || r.Replay != (n == 1) {
			t.Errorf("try %d: %+v", n, r)
		}
	}
	if got := fmt.Sprint(values(t, s, keys)); got != "[4 4 4 4 4 4]" {
		t.Errorf("in the end: %s", got)
	}
}

// halfway makes only some of what it is given.
type halfway struct {
	ReadWriter
	parts int
}

func (h halfway) Apply(ctx context.Context, ops []counter.Op) []counter.Result {
	results := h.ReadWriter.Apply(ctx, ops[:h.parts])
	for len(results) < len(ops) {
		results = append(results, counter.Result{Err: counter.ErrUnavailable})
	}
	return results
}

// TestServerABatchThatWasMadeInPartIsMadeWhole: a process that dies within a batch of counters in several buckets leaves some of
// them unmade. Its repetition makes these, and no other once more.
func TestServerABatchThatWasMadeInPartIsMadeWhole(t *testing.T) {
	s := begin(t, redistest.ThreeMasters(t).URL())
	keys := []string{"v:a", "v:b", "v:c", "v:d", "v:e"}
	for parts := range 5 {
		op := counter.Op{IdempotencyKey: counter.NewIdempotencyKey("*", "", strconv.Itoa(parts))}
		for _, key := range keys {
			op.Changes = append(op.Changes, add(views, key, 1))
		}
		list, _ := s.split(&op)
		if len(list) < 4 {
			t.Fatal("the keys are in too few buckets")
		}
		if r := s.applyParts(t.Context(), &op, halfway{alone{s}, min(parts, len(list)-1)}); !errors.Is(r.Err, counter.ErrUnavailable) {
			t.Fatalf("%+v", r)
		}
		for n := range 2 {
			if r := s.Apply(t.Context(), []counter.Op{op})[0]; r.Err != nil || n == 1 && !r.Replay {
				t.Fatalf("%d parts, repetition %d: %+v", parts, n, r)
			}
			want := int64(parts + 1)
			if got := values(t, s, keys); slices.ContainsFunc(got, func(is int64) bool { return is != want }) {
				t.Errorf("%d parts, repetition %d: %v, want %d each", parts, n, got, want)
			}
		}
		// Under its key another batch is a replay, too.
		other := counter.Op{IdempotencyKey: op.IdempotencyKey, Changes: []counter.Change{add(views, "v:other", 1)}}
		if r := s.Apply(t.Context(), []counter.Op{other})[0]; r.Err != nil || !r.Replay || r.Counters[0].Value != 0 {
			t.Errorf("another batch under its key: %+v", r)
		}
	}
}

// TestServerACounterWhoseRuleHadAnotherKind: it is in the bucket of the rule of before, and its change is refused.
func TestServerACounterWhoseRuleHadAnotherKind(t *testing.T) {
	for name, url := range map[string]string{"one server": redistest.Single(t).URL(), "cluster": redistest.ThreeMasters(t).URL()} {
		s := begin(t, url)
		for key, was := range map[string]*counter.Rule{"v:1": stock, "v:2": stock, "k:1": views, "k:2": views} {
			before := New(Config{Conn: redistest.Dial(t, url), Rules: rulesFor(t, was.Kind)})
			if r := before.Apply(t.Context(), []counter.Op{{Changes: []counter.Change{add(was, key, 7)}}})[0]; r.Err != nil {
				t.Fatal(r.Err)
			}
			if err := before.Close(); err != nil {
				t.Error(err)
			}
			now := stock
			if was == stock {
				now = views
			}
			var c *counter.Conflict
			if err := s.Apply(t.Context(), []counter.Op{{Changes: []counter.Change{add(now, key, 1)}}})[0].Err; !errors.As(err, &c) || !errors.Is(err, counter.ErrKind) || c.Value != 7 {
				t.Errorf("%s: %q: %v", name, key, err)
			}
		}
	}
}

// TestServerACopyGoesWhereItsKindIs: an import may have been given other rules than the server, or none.
func TestServerACopyGoesWhereItsKindIs(t *testing.T) {
	server := redistest.Start(t)
	by := New(Config{Conn: redistest.Dial(t, server.URL()), Rules: rulesFor(t, counter.Sum)})
	defer by.Close()
	c := counter.Copy{Key: "k:1", State: counter.State{Kind: counter.Exact, Value: 9, Updated: 1, Version: counter.Version{Incarnation: 5, Sequence: 3}}}
	if n, err := by.Restore(t.Context(), []counter.Copy{c}, rulesFor(t, counter.Sum)); n != 1 || err != nil {
		t.Fatal(n, err)
	}
	s := begin(t, server.URL())
	if r := s.Apply(t.Context(), []counter.Op{{Changes: []counter.Change{add(stock, "k:1", 1)}}})[0]; r.Err != nil || r.Counters[0].Value != 10 {
		t.Errorf("%+v", r)
	}
}

// rulesFor have all counters be of one kind.
func rulesFor(t testing.TB, kind counter.Kind) *counter.Rules {
	t.Helper()
	rules, err := counter.ParseRules([]byte(`{"rules":[{"match":"*","kind":"` + kind.String() + `"}]}`))
	if err != nil {
		t.Fatal(err)
	}
	return rules
}

// TestClockKillNineOfRedisLosesNothing: the value is what was acknowledged, plus what landed
// unanswered. Repeating an operation shows whether it landed: then it is a replay.
// (Invariant 1.)
func TestClockKillNineOfRedisLosesNothing(t *testing.T) {
	server := redistest.Start(t, redistest.Durable...)
	s := begin(t, server.URL())
	var made, repeated atomic.Int64
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 4)
	for c := range 4 {
		go func() { // awaited below
			ended <- func() error {
				for n := 0; ctx.Err() == nil; n++ {
					op := counter.Op{Changes: []counter.Change{add(stock, "k", 1)}, IdempotencyKey: counter.NewIdempotencyKey("k", "", fmt.Sprint(c, n))}
					for {
						r := s.Apply(t.Context(), []counter.Op{op})[0]
						if r.Err == nil {
							made.Add(1)
							if r.Replay {
								repeated.Add(1)
							}
							break
						}
						if !errors.Is(r.Err, counter.ErrUnavailable) {
							return r.Err
						}
						time.Sleep(time.Millisecond)
					}
				}
				return nil
			}()
		}()
	}
	const rounds = 4
	for range rounds {
		before := made.Load()
		testkit.Eventually(t, "changes are made", func() bool { return made.Load() >= before+20 })
		server.Kill()
		server.Restart(t)
	}
	cancel()
	for range 4 {
		if err := <-ended; err != nil {
			t.Fatal(err)
		}
	}
	if got := values(t, s, []string{"k"})[0]; got != made.Load() {
		t.Errorf("the value is %d, %d were acknowledged", got, made.Load())
	}
	t.Logf("%d acknowledged, of them %d that had landed unanswered", made.Load(), repeated.Load())
	l, err := s.Ledger(t.Context(), "k", uint64(made.Load()-1), 10)
	if err != nil || len(l.Entries) != 1 || l.Entries[0].After != made.Load() {
		t.Errorf("the ledger ends with %+v, %v", l, err)
	}
}

// TestServerAMemberIsSmall: of a million members each takes at most 24 bytes. This test has
// fewer; BenchmarkMembers has the million.
func TestServerAMemberIsSmall(t *testing.T) {
	server := redistest.Single(t)
	s := begin(t, server.URL())
	if got := fill(t, s, server, 30_000); got > 24 {
		t.Errorf("a member costs %.1f bytes", got)
	}
	// Members that leave free their memory.
	if r := s.Apply(t.Context(), []counter.Op{{Changes: []counter.Change{{Key: "likes", Rule: likes, Verb: counter.Reset, Reason: "r", By: "b"}}}})[0]; r.Err != nil {
		t.Fatal(r.Err)
	}
	if n := server.Do(t, "EXISTS", membersKey(hashBucket("likes"), "likes")); n != int64(0) {
		t.Error("the set is there after a reset")
	}
}

// fill adds n members and returns how many bytes each takes.
func fill(t testing.TB, s *Store, server *redistest.Server, n int) float64 {
	t.Helper()
	for from := 0; from < n; from += 1000 {
		c := counter.Change{Key: "likes", Rule: likes, Verb: counter.Edit}
		for m := from; m < from+1000; m++ {
			c.Join = append(c.Join, "a member with a name of some length "+strconv.Itoa(m))
		}
		if r := s.Apply(t.Context(), []counter.Op{{Changes: []counter.Change{c}}})[0]; r.Err != nil || r.Counters[0].Value != int64(from+1000) {
			t.Fatalf("%+v", r)
		}
	}
	bytes := server.Do(t, "MEMORY", "USAGE", membersKey(hashBucket("likes"), "likes"), "SAMPLES", 0).(int64)
	return float64(bytes) / float64(n)
}

func BenchmarkMembers(b *testing.B) {
	for _, n := range []int{100_000, 1_000_000} {
		b.Run(strconv.Itoa(n), func(b *testing.B) {
			for b.Loop() {
				server := redistest.Single(b)
				b.ReportMetric(fill(b, begin(b, server.URL()), server, n), "bytes/member")
			}
		})
	}
}

// BenchmarkOneKey sends 20,000 increments a second of one key through a Combiner, for
// three seconds, and reports how many of them reach Redis.
func BenchmarkOneKey(b *testing.B) {
	server := redistest.Single(b)
	s := begin(b, server.URL())
	for b.Loop() {
		combiner := counter.NewCombiner(s, counter.CombinerConfig{})
		before, _ := strconv.Atoi(commands(b, server))
		var done atomic.Int64
		start := time.Now()
		const rate, seconds = 20_000, 3
		ended := make(chan time.Duration, rate*seconds)
		for sent := 0; sent < rate*seconds; {
			for due := min(int(time.Since(start).Seconds()*rate), rate*seconds); sent < due; sent++ {
				go func() { // awaited below
					at := time.Now()
					if r := combiner.Do(b.Context(), counter.Op{Changes: []counter.Change{add(views, "hot", 1)}}); r.Err == nil {
						done.Add(1)
					}
					ended <- time.Since(at)
				}()
			}
			time.Sleep(time.Millisecond)
		}
		var slow int
		for range rate * seconds {
			if <-ended > 10*time.Millisecond {
				slow++
			}
		}
		took := time.Since(start).Seconds()
		after, _ := strconv.Atoi(commands(b, server))
		b.ReportMetric(float64(after-before)/took, "commands/s")
		b.ReportMetric(float64(done.Load())/took, "increments/s")
		b.ReportMetric(100*float64(slow)/float64(rate*seconds), "%over10ms")
		combiner.Close()
	}
}

// commands is how many scripts the server has run.
func commands(b testing.TB, server *redistest.Server) string {
	_, rest, _ := strings.Cut(server.Do(b, "INFO", "commandstats").(string), "cmdstat_evalsha:calls=")
	calls, _, _ := strings.Cut(rest, ",")
	return calls
}

// TestServerRegistersAreRedisOwn: Redis and package hyperloglog add to the same bytes and count the same,
// sparse and dense.
func TestServerRegistersAreRedisOwn(t *testing.T) {
	server := redistest.Single(t)
	client := redis.NewClient(mustURL(t, server.URL()))
	t.Cleanup(func() { client.Close() })
	for _, size := range []int{1, 50, 700, 5000} {
		members, theirs, ours := make([]string, size), make([]any, size), hyperloglog.Registers{}
		for i := range members {
			members[i] = fmt.Sprint("a member with a name of ", strings.Repeat("x", i%9), i)
			theirs[i] = members[i]
		}
		ours.Add(members...)
		client.Del(t.Context(), "theirs")
		text, err := client.PFAdd(t.Context(), "theirs", theirs...).Uint64()
		if err != nil || text != 1 {
			t.Fatal(text, err)
		}
		bytes, err := client.Get(t.Context(), "theirs").Bytes()
		if err != nil {
			t.Fatal(err)
		}
		read, err := hyperloglog.Parse(bytes)
		if err != nil || read.Count() != ours.Count() || read.Add(members...) {
			t.Errorf("%d members: Redis' registers count %d, ours %d, %v", size, read.Count(), ours.Count(), err)
		}
		if err := client.Set(t.Context(), "ours", ours.Bytes(), 0).Err(); err != nil {
			t.Fatal(err)
		}
		if n, err := client.PFCount(t.Context(), "ours").Result(); err != nil || n != ours.Count() {
			t.Errorf("%d members: Redis counts %d in ours, we %d, %v", size, n, ours.Count(), err)
		}
		if changed, err := client.PFAdd(t.Context(), "ours", theirs...).Result(); err != nil || changed != 0 {
			t.Errorf("%d members: Redis adds what is in ours: %d, %v", size, changed, err)
		}
	}
}

func mustURL(t testing.TB, url string) *redis.Options {
	t.Helper()
	o, err := redis.ParseURL(url)
	if err != nil {
		t.Fatal(err)
	}
	return o
}

// TestServerAFewUniquesAreSmall: a counter of few members costs no 12 KB.
func TestServerAFewUniquesAreSmall(t *testing.T) {
	server := redistest.Single(t)
	s := begin(t, server.URL())
	visitors := &counter.Rule{Match: "*", Kind: counter.Unique}
	if r := s.Apply(t.Context(), []counter.Op{{Changes: []counter.Change{{Key: "v", Rule: visitors, Verb: counter.Edit, Join: []string{"a", "b", "c"}}}}})[0]; r.Err != nil || r.Counters[0].Value != 3 {
		t.Fatalf("%+v", r)
	}
	if n := server.Do(t, "MEMORY", "USAGE", registersKey(hashBucket("v"), "v")).(int64); n > 200 {
		t.Errorf("three members cost %d bytes", n)
	}
	if r := s.Apply(t.Context(), []counter.Op{{Changes: []counter.Change{{Key: "v", Rule: visitors, Verb: counter.Delete}}}})[0]; r.Err != nil {
		t.Fatalf("%+v", r)
	}
	if n := server.Do(t, "EXISTS", registersKey(hashBucket("v"), "v")); n != int64(0) {
		t.Error("the registers are there after a DELETE")
	}
}

// TestServerStepsOfUniquesAreForgotten: whom a unique saw in a step expires; what is over leaves the list of
// steps when the next one begins, and all of it goes with the counter.
func TestServerStepsOfUniquesAreForgotten(t *testing.T) {
	server := redistest.Single(t)
	s := begin(t, server.URL())
	rule := &counter.Rule{Match: "*", Kind: counter.Unique, Buckets: []counter.Bucket{{Step: time.Second, Kept: time.Hour}}}
	see := func(verb counter.Verb, members ...string) {
		t.Helper()
		if r := s.Apply(t.Context(), []counter.Op{{Changes: []counter.Change{{Key: "w", Rule: rule, Verb: verb, Join: members}}}})[0]; r.Err != nil {
			t.Fatal(r.Err)
		}
	}
	list, old := stepsKey(hashBucket("w"), "w"), stepKey(hashBucket("w"), counter.Slot{Step: 1, Number: 7}, "w")
	server.Do(t, "ZADD", list, "8000", "1:7")
	server.Do(t, "PFADD", old, "a")
	began := time.Now()
	see(counter.Edit, "a", "b")
	names := server.Do(t, "ZRANGE", list, "0", "-1").([]any)
	if len(names) != 1 || server.Do(t, "EXISTS", old) != int64(0) {
		t.Fatalf("%v are kept", names)
	}
	_, number, _ := strings.Cut(names[0].(string), ":")
	n, err := strconv.Atoi(number)
	if err != nil {
		t.Fatal(err)
	}
	now := stepKey(hashBucket("w"), counter.Slot{Step: 1, Number: uint32(n)}, "w")
	for _, name := range []string{list, now} {
		if ttl := server.Do(t, "TTL", name).(int64); ttl < 3600-int64(time.Since(began).Seconds()) || ttl > 3610 {
			t.Errorf("%q expires in %d s", name, ttl)
		}
	}
	see(counter.Delete)
	for _, name := range []string{list, now} {
		if server.Do(t, "EXISTS", name) != int64(0) {
			t.Errorf("%q is there after a DELETE", name)
		}
	}
}

// TestServerHistoryIsForgotten: what was gained goes when it is kept long enough, with all of it when nobody
// touches the counter any more, and with the counter.
func TestServerHistoryIsForgotten(t *testing.T) {
	server := redistest.Single(t)
	s := begin(t, server.URL())
	rule := &counter.Rule{Match: "*", Kind: counter.Sum, Buckets: []counter.Bucket{{Step: time.Second, Kept: time.Hour}, {Step: time.Hour, Kept: 24 * time.Hour}}}
	name := gainsKey(hashBucket("v"), time.Second, "v")
	now := time.Now().Unix()
	text := ""
	for n := now - 5000; n < now-3000; n++ { // of 5,000 s ago and later; an hour is kept
		text += strconv.FormatInt(n, 10) + ":-2 "
	}
	server.Do(t, "SET", name, text)
	seconds := func() []counter.Gain {
		_, gains, err := s.History(t.Context(), "v", time.Second, 0, 1<<40)
		if err != nil {
			t.Fatal(err)
		}
		return gains
	}
	for n := 0; n == 0 || len(seconds()) > 1000; n++ { // until a second is over
		if r := s.Apply(t.Context(), []counter.Op{{Changes: []counter.Change{add(rule, "v", 1)}}})[0]; r.Err != nil {
			t.Fatal(r.Err)
		}
		time.Sleep(20 * time.Millisecond)
	}
	if gains := seconds(); gains[0].Number < now-3605 || gains[0].Number > time.Now().Unix()-3590 || gains[0].Value != -2 {
		t.Errorf("the oldest is of %d s ago, an hour is kept", now-gains[0].Number)
	}
	if ttl := server.Do(t, "TTL", name).(int64); ttl < 3600 || ttl > 3610 {
		t.Errorf("it expires in %d s", ttl)
	}
	if r := s.Apply(t.Context(), []counter.Op{{Changes: []counter.Change{{Key: "v", Rule: likes, Verb: counter.Delete}}}})[0]; r.Err != nil {
		t.Fatal(r.Err)
	}
	if n := server.Do(t, "EXISTS", name); n != int64(0) {
		t.Error("its history is there after a DELETE")
	}
}

// TestAllHistoriesGo: whatever steps a rule had, a counter that is deleted leaves none of its history.
func TestAllHistoriesGo(t *testing.T) {
	text := scripts.CounterApply.Source()
	for _, step := range counter.BucketSteps {
		if name := fmt.Sprintf("'g%d'", step/time.Second); !strings.Contains(text, name) {
			t.Errorf("a DELETE leaves the histories %s", name)
		}
	}
}
