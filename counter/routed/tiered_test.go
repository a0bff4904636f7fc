package routed

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/rs/zerolog"

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

// stores has an empty Redis and an empty database.
type stores struct {
	redis    *redistest.Server
	postgres *pgtest.Server
	url      string // of the database
}

func newStores(t testing.TB) *stores {
	t.Helper()
	s := &stores{redis: redistest.Single(t), postgres: pgtest.Single(t)}
	s.redis.Flush(t)
	s.url = s.postgres.Database(t)

	return s
}

// process is a gateway and an owner over Redis, with PostgreSQL behind it or beside it. It owns everything.
type process struct {
	*Store
	redis   *rowsredis.Store
	tiered  *Tiered // nil: PostgreSQL has exact counters only
	shared  *SharedExact
	owner   *owner.Owner
	gateway *call.Store
}

// begin returns a process with PostgreSQL behind Redis, which is ended when the test ends.
func (s *stores) begin(t testing.TB, with ...func(*TieredConfig)) *process {
	t.Helper()
	p := s.open(t, with...)
	p.own(t, p.tiered.Rows(), owner.Config{})
	p.call(t, p.owner)

	return p
}

// open returns a process that owns nothing yet.
func (s *stores) open(t testing.TB, with ...func(*TieredConfig)) *process {
	t.Helper()
	cfg := TieredConfig{
		URL: s.url, Rules: countertest.Rules, PersistInterval: 20 * time.Millisecond, Log: zerolog.Nop(),
	}
	for _, w := range with {
		w(&cfg)
	}
	tiered, err := OpenTiered(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}

	p := &process{tiered: tiered, redis: rowsredis.New(rowsredis.Config{Conn: redistest.Dial(t, s.redis.URL())})}
	tiered.Begin(p.redis)
	t.Cleanup(func() { _ = p.Close() })

	return p
}

// own makes the process own all partitions.
func (p *process) own(t testing.TB, over rows.Store, cfg owner.Config) {
	t.Helper()
	cfg.Name = rand.Text()
	cfg.ExactOutside = true
	p.owner = owner.New(over, cfg)
	all := make([]int, rows.Partitions)
	for id := range all {
		all[id] = id
	}
	testkit.Eventually(t, "everything is claimed", func() bool { return p.owner.Own(t.Context(), all...) == nil })
}

// call makes the process send its calls to an owner.
func (p *process) call(t testing.TB, o *owner.Owner) {
	t.Helper()
	p.gateway = call.NewStore(p.tiered.Rows(), countertest.Everywhere{Owner: o}, countertest.Rules,
		call.Config{Stream: rand.Text()})
	p.Store = p.tiered.NewStore(p.gateway)
	testkit.Eventually(t, "counters are served", func() bool { return p.tiered.Ready() == nil })
}

// Close implements counter.Store: an orderly end.
func (p *process) Close() error {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()

	return p.end(ctx)
}

// kill ends the process without draining, as far as that is possible within the test's own process.
func (p *process) kill() {
	ended, cancel := context.WithCancel(context.Background())
	cancel()
	_ = p.end(ended)
}

// end ends the process once. It drains until ctx ends.
func (p *process) end(ctx context.Context) (err error) {
	if p.redis == nil {
		return nil
	}

	if p.gateway != nil {
		_ = p.gateway.Close()
	}
	if p.owner != nil {
		p.owner.Close()
	}
	if p.shared != nil {
		p.shared.Close()
	}
	if p.tiered != nil {
		err = p.tiered.Close(ctx)
	}
	p.redis.Close()
	p.redis = nil

	return err
}

func behind(t testing.TB) countertest.Instance {
	in := newStores(t)
	p := in.begin(t)
	peer := in.open(t)
	peer.call(t, p.owner)

	return countertest.Instance{
		Store: p,
		Peer:  peer,
		Crash: func(t testing.TB) counter.Store {
			p.kill()
			p = in.begin(t)
			return p
		},
	}
}

// Aggregates and watchers, which ask both stores, have the same code as without Redis: TestServerContractAlone tests
// it.
func TestServerContractTiered(t *testing.T) {
	countertest.RunParts(t, countertest.Parts{
		"any history ends with the model's counters": "two stores",
		"many members and changes at once":           "rows in two stores",
		"changes at the same time add up":            "two processes",
		"limits end as the model's":                  "rows in two stores",
		"reservations expire":                        "PostgreSQL says what is due",
	}, behind)
}

var (
	sum   = countertest.Rules.Find("s:1")
	exact = countertest.Rules.Find("e:1")
)

func add(key string, delta int64) counter.Change {
	return counter.Change{Key: key, Rule: countertest.Rules.Find(key), Verb: counter.Add, Delta: delta}
}

func op(id string, changes ...counter.Change) counter.Op {
	o := counter.Op{Changes: changes}
	if id != "" {
		o.IdempotencyKey = counter.NewIdempotencyKey("*", "", id)
	}

	return o
}

// change applies an operation, and gives up after two seconds.
func change(t testing.TB, s counter.Writer, o counter.Op) counter.Result {
	t.Helper()

	return changeWithin(t, s, o, 2*time.Second)
}

func changeWithin(t testing.TB, s counter.Writer, o counter.Op, limit time.Duration) counter.Result {
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()

	return s.Apply(ctx, []counter.Op{o})[0]
}

// must makes an operation, which must succeed.
func must(t testing.TB, s counter.Writer, o counter.Op) counter.Counter {
	t.Helper()
	r := changeWithin(t, s, o, testkit.Timeout)
	if r.Err != nil || r.Replay {
		t.Fatalf("%+v: %+v", o, r)
	}

	return r.Counters[0]
}

// mustReplay makes operations that were made before.
func mustReplay(t testing.TB, s counter.Writer, ops ...counter.Op) {
	t.Helper()
	for _, again := range ops {
		if r := change(t, s, again); r.Err != nil || !r.Replay {
			t.Errorf("a repetition of %+v: %+v", again, r)
		}
	}
}

// becomes waits until a counter has a value.
func becomes(t testing.TB, s counter.Reader, key string, want int64) {
	t.Helper()
	testkit.Eventually(t, fmt.Sprintf("%q is %d", key, want), func() bool {
		got, err := s.Read(t.Context(), []string{key}, "", 0)
		return err == nil && got[0].Value == want
	})
}

// persisted waits until PostgreSQL has the value of a counter in the table that people read.
func persisted(t testing.TB, url, key string, want int64) {
	t.Helper()
	testkit.Eventually(t, fmt.Sprintf("%d of %q is persisted", want, key), func() bool {
		const sql = "select coalesce((select value from headcount_counters where key = $1), 0)"
		return pgtest.Query[int64](t, url, sql, key) == want
	})
}

// TestServerPostgresAwayTiered: without PostgreSQL resident counters can be changed, and are persisted later. Evicted
// and exact ones cannot be changed.
func TestServerPostgresAwayTiered(t *testing.T) {
	in := newStores(t)
	p := in.begin(t)
	must(t, p, op("", add("s:resident", 1)))
	must(t, p, op("", add("s:evicted", 5)))
	must(t, p, op("", add("e:1", 7)))
	persisted(t, in.url, "s:resident", 1)
	persisted(t, in.url, "s:evicted", 5)

	// Another process has nothing in memory, so the owner must forget the counter, too.
	p.tiered.Tier().Evict(rows.PartitionOf("s:evicted"), []rows.Name{{Collection: "heads", Field: "s:evicted"}})
	must(t, p, op("", add(beside("s:evicted"), 1)))
	p.kill()
	p = in.begin(t)

	in.postgres.Kill()
	if c := must(t, p, op("", add("s:resident", 1))); c.Value != 2 {
		t.Errorf("the resident counter is %+v, want 2", c)
	}

	for _, key := range []string{"s:evicted", "e:1"} {
		if r := change(t, p, op("", add(key, 1))); !errors.Is(r.Err, counter.ErrUnavailable) {
			t.Errorf("a change of %q returns %+v, want ErrUnavailable", key, r)
		}
	}

	found, err := p.Read(t.Context(), []string{"s:resident", "e:1"}, "", time.Second)
	if err != nil || found[0].Value != 2 || !found[1].Away {
		t.Errorf("the counters are read as %+v, %v; want 2, and the other away", found, err)
	}
	if p.tiered.Cause() == nil {
		t.Error("PostgreSQL is away, and Cause returns nil")
	}

	in.postgres.Restart(t)
	persisted(t, in.url, "s:resident", 2)
	becomes(t, p, "s:evicted", 5)
	testkit.Eventually(t, "exact counters can be changed", func() bool {
		return change(t, p, op("again", add("e:1", 1))).Err == nil
	})
	becomes(t, p, "e:1", 8)
}

// beside returns another key in the partition of key.
func beside(key string) string {
	for n := 0; ; n++ {
		other := fmt.Sprint("s:beside ", n)
		if rows.PartitionOf(other) == rows.PartitionOf(key) {
			return other
		}
	}
}

// TestServerRedisEmptied: what was persisted comes back, with the idempotency keys of a day, even if no owner remembers
// anything. What an owner remembers comes back as well.
func TestServerRedisEmptied(t *testing.T) {
	in := newStores(t)
	p := in.begin(t)

	must(t, p, op("a", add("s:1", 3), add("s:2", 4)))
	must(t, p, op("b", add("e:1", 1), add("e:2", 2)))
	persisted(t, in.url, "s:1", 3)
	persisted(t, in.url, "s:2", 4)

	// First the owner lives, and remembers.
	in.redis.Flush(t)
	testkit.Eventually(t, "changes go on after the loss", func() bool {
		return change(t, p, op("c", add("s:1", 1))).Err == nil
	})
	becomes(t, p, "s:1", 4)
	persisted(t, in.url, "s:1", 4)

	// Then no process remembers anything.
	p.kill()
	in.redis.Flush(t)
	p = in.begin(t)
	becomes(t, p, "s:1", 4)
	becomes(t, p, "s:2", 4)
	mustReplay(t, p, op("a", add("s:1", 3), add("s:2", 4)), op("b", add("e:1", 1), add("e:2", 2)))
	becomes(t, p, "e:2", 2)
	if c := must(t, p, op("", add("s:2", 1))); c.Value != 5 {
		t.Errorf("after the loss the counter is %+v, want 5", c)
	}
}

// TestServerKindsOfTwoStores: a counter exists in one of the two stores. When its rule gets the kind of the other
// store, it is not created there.
func TestServerKindsOfTwoStores(t *testing.T) {
	alone := openAlone(t, pgtest.Single(t).Database(t))
	p := newStores(t).begin(t)
	elsewhere := &stores{redis: redistest.Start(t), url: pgtest.Single(t).Database(t)}
	region := elsewhere.beginSharedExact(t)

	inZero := "s:0" // a key whose partition is that of exact counters without PostgreSQL
	for n := 0; rows.PartitionOf(inZero) != owner.ExactPartition; n++ {
		inZero = fmt.Sprint("s:", n)
	}

	for name, s := range map[string]counter.Store{"alone": alone, "behind Redis": p, "beside Redis": region} {
		for _, key := range []string{"s:1", inZero} {
			asExact := counter.Change{Key: key, Rule: exact, Verb: counter.Add, Delta: 1}
			asSum := counter.Change{Key: key, Rule: sum, Verb: counter.Add, Delta: 1}
			must(t, s, op("", asSum))
			if r := change(t, s, op("", asExact)); !errors.Is(r.Err, counter.ErrKind) {
				t.Errorf("%s: %q is a sum, and yet an exact counter was made: %+v", name, key, r)
			}

			dropped := counter.Change{Key: key, Rule: sum, Verb: counter.Delete}
			if r := change(t, s, op("", dropped)); r.Err != nil {
				t.Errorf("%s: the deletion returns %+v", name, r)
			}

			must(t, s, op("", asExact))
			if r := change(t, s, op("", asSum)); !errors.Is(r.Err, counter.ErrKind) {
				t.Errorf("%s: %q is exact, and yet a sum was made: %+v", name, key, r)
			}
			wantsRead(t, name, s, key, counter.Exact)
		}
	}
}

// TestServerKindsChanged: a counter is read where it is, although its rule has another kind now.
func TestServerKindsChanged(t *testing.T) {
	elsewhere := &stores{redis: redistest.Start(t), url: pgtest.Single(t).Database(t)}
	for name, s := range map[string]counter.Store{
		"alone":        openAlone(t, pgtest.Single(t).Database(t)),
		"behind Redis": newStores(t).begin(t),
		"beside Redis": elsewhere.beginSharedExact(t),
	} {
		must(t, s, op("", counter.Change{Key: "e:1", Rule: sum, Verb: counter.Add, Delta: 1}))
		must(t, s, op("", counter.Change{Key: "s:1", Rule: exact, Verb: counter.Add, Delta: 1}))

		wantsRead(t, name, s, "e:1", counter.Sum)
		wantsRead(t, name, s, "s:1", counter.Exact)
	}
}

// wantsRead checks that a counter is read with a kind and the value 1, beside others that do not exist.
func wantsRead(t *testing.T, name string, s counter.Store, key string, kind counter.Kind) {
	t.Helper()
	for _, lag := range []time.Duration{0, time.Second} {
		read, err := s.Read(t.Context(), []string{"e:none", key, "s:none"}, "", lag)
		if err != nil {
			t.Fatal(err)
		}
		if read[1].Key != key || read[1].Kind != kind || read[1].Value != 1 {
			t.Errorf("%s: %q is read as %+v, want the value 1 of kind %s", name, key, read[1], kind)
		}
		if read[0].Kind != 0 || read[0].Key != "e:none" || read[2].Kind != 0 || read[2].Key != "s:none" {
			t.Errorf("%s: counters that do not exist are read as %+v", name, read)
		}
	}
}

// TestServerRedisOlder: a Redis that starts with an older copy of its data gets what was persisted since, whether its
// owner lives or is new.
func TestServerRedisOlder(t *testing.T) {
	in := &stores{redis: redistest.Start(t), url: pgtest.Single(t).Database(t)}
	p := in.begin(t)
	must(t, p, op("", add("s:1", 1)))
	must(t, p, op("", add("s:gone", 1)))
	persisted(t, in.url, "s:gone", 1)
	in.redis.Do(t, "SAVE")

	must(t, p, op("since", add("s:1", 1)))
	must(t, p, op("", counter.Change{Key: "s:gone", Rule: sum, Verb: counter.Delete}))
	persisted(t, in.url, "s:1", 2)
	persisted(t, in.url, "s:gone", 0)
	older := func() {
		in.redis.Kill()
		in.redis.Restart(t)
	}

	older()
	becomes(t, p, "s:1", 2)
	becomes(t, p, "s:gone", 0)

	// The second time nobody remembers what Redis has lost, so it can come from PostgreSQL alone.
	p.kill()
	older()
	p = in.begin(t)
	becomes(t, p, "s:1", 2)
	becomes(t, p, "s:gone", 0)
	mustReplay(t, p, op("since", add("s:1", 1)))
}

// TestServerPostgresOlder: it is noticed that PostgreSQL was restored from an older copy, and what Redis has stays
// right.
func TestServerPostgresOlder(t *testing.T) {
	in := newStores(t)
	p := in.begin(t)
	in.postgres.Exec(t, in.url, `create table older as table headcount_rows;
		create table numbers as table headcount_partitions`)
	for n := range int64(5) {
		must(t, p, op("", add("s:1", 1)))
		persisted(t, in.url, "s:1", n+1)
	}

	time.Sleep(time.Second) // one commit a second records in Redis what PostgreSQL has
	p.kill()
	in.postgres.Exec(t, in.url, `truncate headcount_rows; insert into headcount_rows table older;
		update headcount_partitions p set number = n.number from numbers n where n.partition = p.partition`)

	var log strings.Builder
	p = in.begin(t, func(c *TieredConfig) { c.Log = zerolog.New(&log).Level(zerolog.WarnLevel) })
	// The newer value is in Redis, and a claim must not take the older rows for a repair.
	becomes(t, p, "s:1", 5)
	if c := must(t, p, op("", add("s:1", 1))); c.Value != 6 {
		t.Errorf("the counter is %+v, want 6", c)
	}

	persisted(t, in.url, "s:1", 6)
	if !strings.Contains(log.String(), "restored from an older copy") {
		t.Errorf("the log is %q, want a line about the restored PostgreSQL", log.String())
	}
}
