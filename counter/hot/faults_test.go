package hot

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"headcount/counter"
	"headcount/counter/counterredis"
	"headcount/internal/redistest"
	"headcount/internal/testkit"
)

func (p process) shardNames(key string) (names []string) {
	for shard := range counter.Shards {
		names = append(names, fmt.Sprintf("hc:{n%d}:h:%s", (counterredis.BucketOf(key)+3*shard)%counterredis.Buckets, key))
	}
	return names
}

func (p process) ticks(t testing.TB) {
	t.Helper()
	if err := p.tick(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// TestServerShardsAreLost: a server that comes back without shards, or with older ones, takes no more additions to them, and what it
// has kept still counts.
func TestServerShardsAreLost(t *testing.T) {
	server := redistest.Start(t, "--save", "")
	for name, is := range map[string]struct {
		text string // of a shard, behind its epoch; empty: it is gone
		want int64
	}{
		"gone, but for one":            {"", 151},
		"as it was when it was opened": {"s 0 0 0 anotherrun", 51},
		"as it was when it was closed": {"c 0 0 0 anotherrun", 51},
		"with more than was gathered":  {"s 1000 1000 0 anotherrun", 1 + 16*1000},
		"of the epoch before":          {"c 3 3 0 anotherrun", 51},
	} {
		t.Run(name, func(t *testing.T) {
			p := begin(t, server.URL())
			key := t.Name()
			made(t, p, add(key, 1))
			p.opens(t, key)
			for range 50 {
				made(t, p, add(key, 1))
			}
			p.gathers(t, key)
			sharding, err := p.look(t.Context(), key)
			if err != nil {
				t.Fatal(err)
			}
			if name == "of the epoch before" {
				sharding.Epoch.Incarnation--
			}
			for i, shard := range p.shardNames(key) {
				if is.text == "" && i > 0 {
					server.Do(t, "DEL", shard)
				} else if is.text != "" {
					server.Do(t, "SET", shard, sharding.Epoch.String()+" "+is.text)
				}
			}
			if is.text == "" { // the one goes on
				for range 100 {
					if r := p.redis.AddToShards(t.Context(), []counterredis.ShardAdd{{Key: key, Epoch: sharding.Epoch, Delta: 1}}); r[0].Err != nil {
						t.Fatal(r[0].Err)
					}
				}
			}
			exactly(t, p, key, is.want)
			for n := range int64(3) {
				for range 20 {
					made(t, p, add(key, 1))
				}
				exactly(t, p, key, is.want+20*(n+1))
				p.ticks(t)
				if p.looks(t, key) {
					t.Fatal("it is sharded")
				}
			}
			exactly(t, p, key, is.want+60)
			p.opens(t, key)
			made(t, p, add(key, 1))
			exactly(t, p, key, is.want+61)
		})
	}
}

// TestServerAnOpeningIsLate: a call that opens shards and comes after they were closed opens none of them.
func TestServerAnOpeningIsLate(t *testing.T) {
	p := begin(t, redistest.ThreeMasters(t).URL())
	key := t.Name()
	made(t, p, add(key, 1))
	for range 2 {
		is, err := p.step(t.Context(), key, counter.ReshardStep{To: counter.ToSplit})
		if err != nil {
			t.Fatal(err)
		}
		for _, shards := range [][]int{all[:5], all[10:]} {
			if open, err := p.redis.OpenShards(t.Context(), key, is.Epoch, true, shards); err != nil || !open {
				t.Fatal(open, err)
			}
		}
		if err := p.merge(t.Context(), key); err != nil {
			t.Fatal(err)
		}
		for i := range all {
			if open, err := p.redis.OpenShards(t.Context(), key, is.Epoch, true, all[i:i+1]); err != nil || open {
				t.Errorf("shard %d: %t, %v", i, open, err)
			}
		}
	}
}

// TestServerAGatheringIsLate: of what was read before another gathering, before the sum was merged, and before it was sharded
// again, nothing changes its record.
func TestServerAGatheringIsLate(t *testing.T) {
	p := begin(t, redistest.ThreeMasters(t).URL())
	key := t.Name()
	made(t, p, add(key, 1))
	p.opens(t, key)
	for range 5 {
		made(t, p, add(key, 1))
	}
	is, err := p.look(t.Context(), key)
	if err != nil {
		t.Fatal(err)
	}
	shards, err := p.redis.Shards(t.Context(), []string{key})
	if err != nil {
		t.Fatal(err)
	}
	for range 40 {
		made(t, p, add(key, 1))
	}
	p.gathers(t, key)
	for i, next := range []func(context.Context, string) error{p.merge, p.split, p.merge} {
		for _, to := range []counter.ReshardTo{counter.ToGather, counter.ToMerge} {
			if to == counter.ToMerge && i == 0 {
				continue // its shards are read when all are closed
			}
			before := read(t, p.redis, key, 0)
			if _, err := p.step(t.Context(), key, counter.ReshardStep{To: to, Epoch: is.Epoch, Shards: shards[0][:]}); err != nil {
				t.Fatal(err)
			}
			if after := read(t, p.redis, key, 0); after != before {
				t.Errorf("%+v after a late %s, and it was %+v", after, to, before)
			}
		}
		if err := next(t.Context(), key); err != nil {
			t.Fatal(err)
		}
	}
	exactly(t, p, key, 46)
}

// TestServerTheRecordIsLost, and comes back as it was in an earlier epoch: reads go on, and what shards have kept is counted again.
func TestServerTheRecordIsLost(t *testing.T) {
	server := redistest.Start(t)
	p, other := begin(t, server.URL()), begin(t, server.URL())
	record := fmt.Sprintf("hc:{n%d}:c", counterredis.BucketOf("k"))
	made(t, p, add("k", 1))
	p.opens(t, "k")
	was := server.Do(t, "HGET", record, "k")
	if err := p.merge(t.Context(), "k"); err != nil {
		t.Fatal(err)
	}
	p.opens(t, "k")
	for range 10 {
		made(t, p, add("k", 1))
	}
	server.Do(t, "HSET", record, "k", was)
	testkit.Eventually(t, "it can be read", func() bool {
		_, err := other.Read(t.Context(), []string{"k"}, "", 0)
		other.ticks(t)
		return err == nil
	})
	exactly(t, other, "k", 1)
	other.opens(t, "k") // in the epoch of the shards
	exactly(t, other, "k", 11)
}

// TestServerPhasesOfFormerReleases are as if the sum were sharded.
func TestServerPhasesOfFormerReleases(t *testing.T) {
	server := redistest.Start(t)
	for _, phase := range []string{"o", "c"} {
		p, other := begin(t, server.URL()), begin(t, server.URL())
		key := "in phase " + phase
		made(t, p, add(key, 1))
		p.opens(t, key)
		if phase == "c" {
			for range 20 {
				made(t, p, add(key, 1))
			}
			p.gathers(t, key)
			is, err := p.look(t.Context(), key)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := p.redis.CloseShards(t.Context(), key, is.Epoch, 0, all[:7]); err != nil {
				t.Fatal(err)
			}
		} else {
			server.Do(t, "DEL", p.shardNames(key)[3])
		}
		before := exactly(t, p, key, read(t, p, key, 0).Value)
		record := fmt.Sprintf("hc:{n%d}:c", counterredis.BucketOf(key))
		text := server.Do(t, "HGET", record, key).(string)
		server.Do(t, "HSET", record, key, strings.Replace(text, ":s", ":"+phase, 1))
		if c := exactly(t, other, key, before.Value); c.Version != before.Version {
			t.Errorf("%s: %+v, and it was %+v", key, c, before)
		}
		for range 40 {
			made(t, other, add(key, 1))
		}
		other.ticks(t)
		if is := other.looks(t, key); is != (phase == "o") {
			t.Errorf("%s: it is sharded: %t", key, is)
		}
		exactly(t, p, key, before.Value+40)
		made(t, p, counter.Op{Changes: []counter.Change{{Key: key, Rule: views, Verb: counter.Delete}}})
	}
}

// TestServerDeletedElsewhere while the sum is sharded here. What its shards take before everybody here knows counts in its next life; when
// that is nothing, nobody has touched it.
func TestServerDeletedElsewhere(t *testing.T) {
	for name, url := range map[string]string{"one server": redistest.Single(t).URL(), "three masters": redistest.ThreeMasters(t).URL()} {
		for _, more := range []int64{0, 10} {
			t.Run(fmt.Sprint(name, " ", more), func(t *testing.T) {
				a, b := inRegion(t, url), inRegion(t, url)
				key := t.Name()
				bucket := counterredis.BucketOf(key)
				if _, err := a.redis.Outgoing(t.Context(), []int{bucket}, make([]counterredis.Position, 1), 1); err != nil { // it has its name now
					t.Fatal(err)
				}
				made(t, a, add(key, 100))
				a.opens(t, key)
				b.looks(t, key)
				made(t, a, add(key, 60))
				a.gathers(t, key)
				was := exactly(t, a, key, 160).Version

				died := fmt.Sprint(was.Incarnation + 1)
				acks, err := a.redis.Merge(t.Context(), "eu", "us", []counterredis.Message{{
					Batch: counterredis.Batch{Bucket: bucket, Lines: []counterredis.Line{{key, "", "0", died, "0", "", ""}}}, Mode: counterredis.ModePage,
				}})
				if err != nil || acks[0].Other != "" {
					t.Fatalf("%+v, %v", acks, err)
				}
				for range more {
					made(t, b, add(key, 1)) // to shards, for b does not know
				}
				check := func(when string) {
					t.Helper()
					c := exactly(t, a, key, more)
					if more > 0 && c.Version.Incarnation <= was.Incarnation || more == 0 && c != (counter.Counter{Key: key}) {
						t.Errorf("%s %+v after %v", when, c, was)
					}
					if all, err := a.Aggregate(t.Context(), key); err != nil || all.Value != more || all.Counters != min(more, 1) {
						t.Errorf("%s all are %+v, %v", when, all, err)
					}
				}
				check("at once")
				if err := a.sweep(t.Context()); err != nil {
					t.Fatal(err)
				}
				check("after a sweep")
				if a.isSharded(t, key) {
					t.Error("it is sharded")
				}
				made(t, b, add(key, 1)) // wherever b takes it to
				exactly(t, b, key, more+1)
			})
		}
	}
}

// inRegion is a process of the region us.
func inRegion(t testing.TB, url string) process {
	t.Helper()
	redis := counterredis.New(counterredis.Config{Conn: redistest.Dial(t, url), Region: "us"})
	p := process{newStore(redis, redis, Config{Rate: 1000, Rules: rules}), redis}
	t.Cleanup(func() { p.Close() })
	return p
}

// TestServerOneOfManyGathers: a process gathers what it has added, unless another one has gathered; and an owner what is left.
func TestServerOneOfManyGathers(t *testing.T) {
	url := redistest.ThreeMasters(t).URL()
	a, b, owner := begin(t, url), begin(t, url), begin(t, url)
	key := t.Name()
	made(t, a, add(key, 1))
	a.opens(t, key)
	b.looks(t, key)
	record := func(want int64) {
		t.Helper()
		if c := read(t, owner.redis, key, 0); c.Value != want {
			t.Fatalf("the record is %+v, want %d", c, want)
		}
	}
	made(t, a, add(key, 1))
	made(t, b, add(key, 1))
	a.ticks(t)
	record(3)
	made(t, a, add(key, 1))
	b.ticks(t) // a has gathered since b has looked
	record(3)
	made(t, b, add(key, 1))
	b.ticks(t) // and not since
	record(5)
	made(t, a, add(key, 1))
	if err := owner.sweep(t.Context()); err != nil {
		t.Fatal(err)
	}
	record(6)
}

// TestServerASumThatIsNotBusy stays sharded, and is changed by its record.
func TestServerASumThatIsNotBusy(t *testing.T) {
	p := begin(t, redistest.Single(t).URL())
	key := t.Name()
	made(t, p, add(key, 1))
	p.opens(t, key)
	rests := func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.known[key].busy = time.Time{}
	}
	rests()
	made(t, p, add(key, 1))
	if c := read(t, p.redis, key, 0); c.Value != 2 || !c.IsSharded() {
		t.Fatalf("the record is %+v", c)
	}
	p.rates = newRates(1)
	testkit.Eventually(t, "it is busy", func() bool {
		made(t, p, add(key, 1))
		p.mu.Lock()
		defer p.mu.Unlock()
		return !p.known[key].busy.IsZero()
	})
	before := read(t, p.redis, key, 0)
	c := made(t, p, add(key, 1))
	if after := read(t, p.redis, key, 0); after != before || c.Value != before.Value+1 {
		t.Fatalf("%+v, and the record was %+v and is %+v", c, before, after)
	}
}
