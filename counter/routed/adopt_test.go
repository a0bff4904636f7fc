package routed

import (
	"crypto/rand"
	"strings"
	"testing"
	"time"

	"headcount/counter"
	"headcount/counter/call"
	"headcount/counter/countertest"
	"headcount/counter/owner"
	"headcount/internal/redistest"
	"headcount/internal/rows/rowsredis"
	"headcount/internal/testkit"
)

// alone returns the counters of the Redis, used without PostgreSQL.
func (s *stores) alone(t testing.TB) *call.Store {
	t.Helper()
	front := rowsredis.New(rowsredis.Config{Conn: redistest.Dial(t, s.redis.URL())})
	t.Cleanup(front.Close)
	owned, err := call.NewLocal(t.Context(), front, countertest.Rules, owner.Config{Name: rand.Text()})
	if err != nil {
		t.Fatal(err)
	}

	return owned
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

// carryHalf leaves exact counters in the state of a process that was killed before it deleted them in Redis.
func (s *stores) carryHalf(t testing.TB, all []counter.Copy) {
	t.Helper()
	p := s.open(t)
	var exact []counter.Copy
	for _, c := range all {
		if c.Kind.IsExact() {
			exact = append(exact, c)
		}
	}

	if len(exact) < 2 {
		t.Fatalf("%d exact counters", len(exact))
	}
	if _, err := p.tiered.exact.Restore(t.Context(), exact, countertest.Rules); err != nil {
		t.Fatal(err)
	}

	p.kill()
}

// sameCounters compares counters: their states, and how many ledger entries and other rows they have.
func sameCounters(t testing.TB, got, want []counter.Copy) {
	t.Helper()
	if len(got) != len(want) {
		t.Fatalf("there are %d counters, want %d", len(got), len(want))
	}
	for i := range want {
		is, was := &got[i], &want[i]
		same := is.Key == was.Key && is.State == was.State && len(is.Ledger) == len(was.Ledger) &&
			len(is.Hashes) == len(was.Hashes) && len(is.Steps) == len(was.Steps)
		if !same {
			t.Errorf("there is %+v\nwant %+v", is, was)
		}
	}
}

// TestServerPostgresAdded: PostgreSQL is put behind a Redis that was used alone. Before a gateway is ready, all
// counters are in PostgreSQL exactly once, including exact ones with their ledgers, even if a process was killed
// meanwhile. A change made under an idempotency key is not made again, even if Redis is lost then.
func TestServerPostgresAdded(t *testing.T) {
	in := newStores(t)
	alone := in.alone(t)
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

	in.carryHalf(t, want)
	p := in.begin(t)
	// With Redis empty only PostgreSQL can have what follows.
	in.redis.Flush(t)
	back, err := OpenDump(t.Context(), in.url, UseTiered, nil)
	if err != nil {
		t.Fatal(err)
	}

	defer back.Close()
	sameCounters(t, dumped(t, back), want)

	p.kill()
	p = in.begin(t)
	mustReplay(t, p, op("sum", add("s:1", 3)), exactOp, op("batch", add("e:1", 1), add("e:2", 1)))
	must(t, p, op("", add("e:1", 1)))
	becomes(t, p, "e:1", 9)
}

// TestServerRedisAdded: an empty Redis is put in front of a PostgreSQL that was used alone, and has all its counters.
// After that PostgreSQL cannot be used alone again.
func TestServerRedisAdded(t *testing.T) {
	in := newStores(t)
	alone := openAlone(t, in.url)
	must(t, alone, op("sum", add("s:1", 3)))
	must(t, alone, op("exact", add("e:1", 7)))
	if err := alone.Close(); err != nil {
		t.Fatal(err)
	}

	p := in.begin(t)
	mustReplay(t, p, op("sum", add("s:1", 3)), op("exact", add("e:1", 7)))
	if c := must(t, p, op("", add("s:1", 1))); c.Value != 4 {
		t.Errorf("the next change makes the counter %+v, want 4", c)
	}

	// Alone it would lack what is in Redis and not drained yet, and change older values.
	_, err := OpenAlone(t.Context(), AloneConfig{URL: in.url, Rules: countertest.Rules})
	if err == nil || !strings.Contains(err.Error(), "a Redis stands in front") {
		t.Errorf("PostgreSQL used alone again: %v, want that a Redis stands in front", err)
	}
}

// TestServerColdCounters: counters that were not changed for long leave Redis, whatever their kind. When they are
// needed they are as before.
func TestServerColdCounters(t *testing.T) {
	in := newStores(t)
	p := in.open(t)
	p.own(t, p.tiered.Rows(), owner.Config{Memory: 1, Tier: p.tiered.Tier(), ColdAfter: 100 * time.Millisecond})
	p.call(t, p.owner)
	countertest.Fill(t, p, 40)
	must(t, p, op("", add("s:1", 3)))
	want := dumped(t, p)

	testkit.Eventually(t, "no counter is in Redis", func() bool {
		return len(in.redis.Do(t, "KEYS", "*:r:heads").([]any)) == 0 &&
			len(in.redis.Do(t, "KEYS", "*:r:set:*").([]any)) == 0
	})

	sameCounters(t, dumped(t, p), want)
	if c := must(t, p, op("", add("s:1", 1))); c.Value != 4 {
		t.Errorf("the next change makes the counter %+v, want 4", c)
	}
}
