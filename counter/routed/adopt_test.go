package routed

import (
	"context"
	"crypto/rand"
	"errors"
	"strings"
	"testing"
	"time"

	"headcount/counter"
	"headcount/counter/call"
	"headcount/counter/countertest"
	"headcount/counter/owner"
	"headcount/internal/pgtest"
	"headcount/internal/redistest"
	"headcount/internal/rows"
	"headcount/internal/rows/rowsredis"
	"headcount/internal/testkit"
)

// redisAlone returns the counters of a Redis without PostgreSQL.
func redisAlone(t testing.TB, url string) *call.Store {
	t.Helper()
	front := rowsredis.New(rowsredis.Config{Conn: redistest.Dial(t, url)})
	t.Cleanup(front.Close)
	s, err := call.NewLocal(t.Context(), front, countertest.Rules, owner.Config{Name: rand.Text()})
	if err != nil {
		t.Fatal(err)
	}

	return s
}

// dumped returns everything that a store has.
func dumped(t testing.TB, d counter.Dumper) (all []counter.Copy) {
	t.Helper()
	err := d.Dump(t.Context(), "", func(c counter.Copy) error {
		all = append(all, c)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}

	return all
}

// carryHalf leaves exact counters as a process does that is killed before it has them deleted in Redis.
func carryHalf(t testing.TB, redis, url string, all []counter.Copy) {
	t.Helper()
	p := &process{}
	p.open(t, redis, url)
	var exact []counter.Copy
	for _, c := range all {
		if c.Kind.IsExact() {
			exact = append(exact, c)
		}
	}
	if len(exact) < 2 {
		t.Fatalf("%d exact counters", len(exact))
	}
	if _, err := p.behind.exact.Restore(t.Context(), exact, countertest.Rules); err != nil {
		t.Fatal(err)
	}
	if err := p.behind.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// TestServerPostgresAdded: what a Redis had alone is in PostgreSQL before a gateway is ready, exact counters with their
// ledgers too, once, although a process was killed meanwhile. Nothing that was made under an idempotency key is made again,
// also when Redis is lost then.
func TestServerPostgresAdded(t *testing.T) {
	redis := redistest.Single(t)
	redis.Flush(t)
	url := pgtest.Single(t).Database(t)
	alone := redisAlone(t, redis.URL())
	countertest.Fill(t, alone, 40)
	must(t, alone, op("sum", add("s:1", 3)))
	exactOp := op("", add("e:1", 7))
	exactOp.IdempotencyKey = counter.NewIdempotencyKey("e:1", "", "exact")
	must(t, alone, exactOp)
	must(t, alone, op("batch", add("e:1", 1), add("e:2", 1)))
	want := dumped(t, alone)
	if err := alone.Close(); err != nil {
		t.Fatal(err)
	}

	carryHalf(t, redis.URL(), url, want)
	p := begin(t, redis.URL(), url)
	t.Cleanup(func() { _ = p.Close() })
	redis.Flush(t)
	back, err := OpenDump(t.Context(), url, UseBehind, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer back.Close()
	got := dumped(t, back)
	if len(got) != len(want) {
		t.Fatalf("PostgreSQL has %d counters, want %d", len(got), len(want))
	}
	for i := range want {
		is, was := &got[i], &want[i]
		same := is.Key == was.Key && is.State == was.State && len(is.Ledger) == len(was.Ledger) &&
			len(is.Hashes) == len(was.Hashes) && len(is.Steps) == len(was.Steps)
		if !same {
			t.Errorf("PostgreSQL has %+v\nwant %+v", is, was)
		}
	}

	p.kill()
	p = begin(t, redis.URL(), url)
	for _, again := range []counter.Op{op("sum", add("s:1", 3)), exactOp, op("batch", add("e:1", 1), add("e:2", 1))} {
		if r := change(t, p, again); r.Err != nil || !r.Replay {
			t.Errorf("a repetition: %+v", r)
		}
	}
	must(t, p, op("", add("e:1", 1)))
	becomes(t, p, "e:1", 9)
}

// TestServerRedisAdded: an empty Redis in front of a PostgreSQL that was used alone has what that has, and PostgreSQL is
// not used without it again.
func TestServerRedisAdded(t *testing.T) {
	redis := redistest.Single(t)
	redis.Flush(t)
	url := pgtest.Single(t).Database(t)
	alone := openAlone(t, url)
	must(t, alone, op("sum", add("s:1", 3)))
	must(t, alone, op("exact", add("e:1", 7)))
	if err := alone.Close(); err != nil {
		t.Fatal(err)
	}

	p := begin(t, redis.URL(), url)
	t.Cleanup(func() { _ = p.Close() })
	for _, again := range []counter.Op{op("sum", add("s:1", 3)), op("exact", add("e:1", 7))} {
		if r := change(t, p, again); r.Err != nil || !r.Replay {
			t.Errorf("a repetition: %+v", r)
		}
	}
	if c := must(t, p, op("", add("s:1", 1))); c.Value != 4 {
		t.Errorf("it goes on with %+v", c)
	}
	_, err := OpenAlone(t.Context(), AloneConfig{URL: url, Rules: countertest.Rules})
	if err == nil || !strings.Contains(err.Error(), "a Redis stands in front") {
		t.Errorf("PostgreSQL alone: %v", err)
	}
}

// TestServerTwoStoresWithRows that were never used together are refused.
func TestServerTwoStoresWithRows(t *testing.T) {
	redis := redistest.Single(t)
	redis.Flush(t)
	url := pgtest.Single(t).Database(t)
	alone := openAlone(t, url)
	must(t, alone, op("", add("s:1", 3)))
	other := redisAlone(t, redis.URL())
	must(t, other, op("", add("s:1", 100)))
	if err := errors.Join(alone.Close(), other.Close()); err != nil {
		t.Fatal(err)
	}

	p := &process{}
	p.open(t, redis.URL(), url)
	p.owner = owner.New(p.behind.Rows(), owner.Config{Name: rand.Text(), ExactOutside: true})
	err := p.owner.Own(t.Context(), rows.PartitionOf("s:1"))
	if err == nil || !strings.Contains(err.Error(), "never used together") {
		t.Errorf("the claim: %v", err)
	}
	p.owner.Close()
	if err := p.behind.Close(context.Background()); err != nil {
		t.Error(err)
	}
}

// TestServerColdCounters leave Redis, whatever they consist of, and are as they were when somebody needs them.
func TestServerColdCounters(t *testing.T) {
	redis := redistest.Single(t)
	redis.Flush(t)
	url := pgtest.Single(t).Database(t)
	p := &process{}
	p.open(t, redis.URL(), url)
	p.owner = owner.New(p.behind.Rows(), owner.Config{
		Name: rand.Text(), ExactOutside: true, Memory: 1, Tier: p.behind.Tier(), ColdAfter: 100 * time.Millisecond,
	})
	p.claim(t)
	p.call(t, p.owner)
	t.Cleanup(func() { _ = p.Close() })
	countertest.Fill(t, p, 40)
	must(t, p, op("", add("s:1", 3)))
	want := dumped(t, p)

	testkit.Eventually(t, "no counter is in Redis", func() bool {
		return len(redis.Do(t, "KEYS", "*:r:heads").([]any)) == 0 && len(redis.Do(t, "KEYS", "*:r:set:*").([]any)) == 0
	})
	got := dumped(t, p)
	if len(got) != len(want) {
		t.Fatalf("there are %d counters, want %d", len(got), len(want))
	}
	for i := range want {
		if got[i].Key != want[i].Key || got[i].State != want[i].State || len(got[i].Hashes) != len(want[i].Hashes) {
			t.Errorf("there is %+v\nwant %+v", got[i], want[i])
		}
	}
	if c := must(t, p, op("", add("s:1", 1))); c.Value != 4 {
		t.Errorf("it goes on with %+v", c)
	}
}
