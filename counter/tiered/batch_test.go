package tiered_test

import (
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"headcount/counter"
	"headcount/counter/counterredis"
	"headcount/counter/countertest"
	"headcount/counter/tiered"
	"headcount/internal/pgtest"
	"headcount/internal/redistest"
	"headcount/internal/testkit"
)

// inBucket is a counter in that bucket.
func inBucket(b int) string {
	for i := 0; ; i++ {
		if key := fmt.Sprintf("s:%d", i); counterredis.BucketOf(key) == b {
			return key
		}
	}
}

func batch(id string, keys ...string) counter.Op {
	rule := &counter.Rule{Match: "*", Kind: counter.Sum}
	op := counter.Op{}
	for _, key := range keys {
		op.Changes = append(op.Changes, counter.Change{Key: key, Rule: rule, Verb: counter.Add, Delta: 1})
	}
	if id != "" {
		op.IdempotencyKey = counter.NewIdempotencyKey("*", "", id)
	}
	return op
}

// valuesAre fails the test unless the counters have these values.
func valuesAre(t testing.TB, s counter.Reader, op *counter.Op, want ...int64) {
	t.Helper()
	read, err := s.Read(t.Context(), op.Keys(), "", 0)
	if err != nil {
		t.Fatal(err)
	}
	var got []int64
	for _, r := range read {
		got = append(got, r.Value)
	}
	if !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
}

// A batch is remembered by PostgreSQL, so it is a replay when one Redis server becomes a Cluster, or the other way round.
func TestServerABatchIsRememberedByPostgres(t *testing.T) {
	one := func() string { return redistest.Start(t).URL() }
	cluster := func() string { return redistest.StartCluster(t, 3, 0).URL() }
	for name, servers := range map[string][2]func() string{"from one server to a cluster": {one, cluster}, "from a cluster to one server": {cluster, one}} {
		t.Run(name, func(t *testing.T) {
			database := pgtest.Single(t).Database(t)
			op := batch(name, inBucket(3), inBucket(5), inBucket(7))
			for n, server := range servers {
				s, err := tiered.Open(t.Context(), tiered.Config{Rules: countertest.Rules, Redis: redistest.Dial(t, server()), Postgres: database, PersistInterval: 50 * time.Millisecond})
				if err != nil {
					t.Fatal(err)
				}
				countertest.AwaitServed(t, s)
				if r := s.Apply(t.Context(), []counter.Op{op})[0]; r.Err != nil || r.Replay != (n == 1) {
					t.Errorf("%d: %+v", n, r)
				}
				valuesAre(t, s, &op, 1, 1, 1)
				testkit.Eventually(t, "it is persisted", func() bool {
					return pgtest.Query[int64](t, database, "select count(*) from headcount_identities") > 0 &&
						!slices.ContainsFunc(op.Keys(), func(key string) bool { return row(t, database, key) != 1 })
				})
				if err := s.Close(); err != nil {
					t.Fatal(err)
				}
			}
		})
	}
}

// When a master of a Cluster has lost a batch that was not persisted, its repetition makes it again, although another
// master remembered it.
func TestServerABatchThatRedisLostIsMadeAgain(t *testing.T) {
	cluster := redistest.StartCluster(t, 3, 0)
	s := open(t, tiered.Config{Rules: countertest.Rules, Redis: redistest.Dial(t, cluster.URL()), Postgres: pgtest.Single(t).Database(t), PersistInterval: time.Hour})
	countertest.AwaitServed(t, s)
	master := func(b int) *redistest.Server {
		for _, m := range cluster.Masters {
			if is, err := m.Client().HExists(t.Context(), fmt.Sprintf("hc:{n%d}:s", b), "generation").Result(); err == nil && is {
				return m
			}
		}
		t.Fatalf("no master has bucket %d", b)
		return nil
	}
	var keys []string
	for b := 1; len(keys) < 2; b++ { // both are on one master that does not remember the batch
		if m := master(b); m != master(0) && (len(keys) == 0 || m == master(counterredis.BucketOf(keys[0]))) {
			keys = append(keys, inBucket(b))
		}
	}
	op := batch("one", keys...)
	for range 2 {
		if r := s.Apply(t.Context(), []counter.Op{op})[0]; r.Err != nil || r.Replay {
			t.Errorf("%+v", r)
		}
		valuesAre(t, s, &op, 1, 1)
		master(counterredis.BucketOf(keys[0])).Flush(t)
	}
}

// A batch that is refused for one of its counters changes none of them, on a Cluster, too.
func TestServerABatchWithACounterOfAnotherKindChangesNothing(t *testing.T) {
	now, err := counter.ParseRules([]byte(`{"rules":[{"match":"*","kind":"sum"}]}`))
	if err != nil {
		t.Fatal(err)
	}
	alone, both, database := redistest.ThreeMasters(t).URL(), redistest.StartCluster(t, 3, 0).URL(), pgtest.Single(t).Database(t)
	for name, begin := range map[string]func(rules *counter.Rules) counter.Store{
		"Redis alone": func(rules *counter.Rules) counter.Store {
			s := counterredis.New(counterredis.Config{Conn: redistest.Dial(t, alone), Rules: rules})
			closes(t, s)
			return s
		},
		"with PostgreSQL": func(rules *counter.Rules) counter.Store {
			return open(t, tiered.Config{Rules: rules, Redis: redistest.Dial(t, both), Postgres: database, PersistInterval: 50 * time.Millisecond})
		},
	} {
		before, after := begin(countertest.Rules), begin(now)
		countertest.AwaitServed(t, before)
		exact := &counter.Rule{Match: "e:*", Kind: counter.Exact}
		if r := before.Apply(t.Context(), []counter.Op{{Changes: []counter.Change{{Key: "e:1", Rule: exact, Verb: counter.Add, Delta: 9}}}})[0]; r.Err != nil {
			t.Fatal(r.Err)
		}
		countertest.AwaitServed(t, after)
		other := inBucket((counterredis.BucketOf("e:1") + 5) % counterredis.Buckets)
		op := batch("", other, "e:1")
		var c *counter.Conflict
		if err := after.Apply(t.Context(), []counter.Op{op})[0].Err; !errors.As(err, &c) || !errors.Is(err, counter.ErrKind) || c.Key != "e:1" || c.Value != 9 {
			t.Errorf("%s: %v", name, err)
		}
		rest := batch("", other)
		valuesAre(t, after, &rest, 0)
	}
}
