package regions_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"

	"headcount/counter"
	"headcount/counter/counterredis"
	"headcount/counter/regions"
	"headcount/internal/redistest"
	"headcount/internal/servertest"
)

const faulty = "v" // the counter of these tests

var faultyBucket = counterredis.BucketOf(faulty)

// replicas are regions without links.
func replicas(t *testing.T, names ...string) (list []*replica) {
	t.Helper()
	for _, name := range names {
		server := redistest.Start(t)
		r := &replica{name: name, server: server, store: open(t, name, server.URL())}
		r.begin(t, faultyBucket)
		list = append(list, r)
	}
	return list
}

// hear has a region take all that another one tells of the bucket.
func (r *replica) hear(t *testing.T, from *replica) counterredis.Ack {
	t.Helper()
	return tell(t, r.store, from.name, r.name, faultyBucket, counterredis.ModePage, from.lines(t, faultyBucket))
}

// hash is a field of a key of the bucket in Redis.
func (r *replica) hash(t *testing.T, key string) string {
	t.Helper()
	text, _ := r.server.Do(t, "HMGET", fmt.Sprintf("hc:{n%d}:%s", faultyBucket, key), faulty).([]any)[0].(string)
	return text
}

func (r *replica) setHash(t *testing.T, key, text string) {
	t.Helper()
	r.server.Do(t, "HSET", fmt.Sprintf("hc:{n%d}:%s", faultyBucket, key), faulty, text)
}

func wants(t *testing.T, r *replica, want int64) {
	t.Helper()
	if c := read1(t, r.store, faulty); c.Value != want {
		t.Errorf("%s has %+v, not %d", r.name, c, want)
	}
}

func adjust(delta int64) counter.Change {
	return counter.Change{Key: faulty, Rule: views, Verb: counter.Adjust, Delta: delta, Reason: "r", By: "b"}
}

func drop(rule *counter.Rule) counter.Change {
	return counter.Change{Key: faulty, Rule: rule, Verb: counter.Delete}
}

// The total has room, but a region's own part has not.
func TestServerAnOwnPartHasABound(t *testing.T) {
	t.Parallel()
	list := replicas(t, "us", "eu")
	us, eu := list[0], list[1]
	make1(t, eu.store, adjust(-9e18))
	us.hear(t, eu)
	make1(t, us.store, adjust(9e18))
	if r := us.store.Apply(t.Context(), []counter.Op{{Changes: []counter.Change{adjust(1e18)}}})[0]; !errors.Is(r.Err, counter.ErrOverflow) {
		t.Errorf("an own part of 1e19 is %v", r.Err)
	}
	wants(t, us, 0)
	make1(t, us.store, adjust(-8e18))
	eu.hear(t, us)
	wants(t, eu, -8e18)

	// A record of before that was refused harms nothing else.
	f := strings.Fields(us.hash(t, "c"))
	f[1] = "9000000000000000000"
	us.setHash(t, "c", strings.Join(f, " "))
	if lines := us.lines(t, faultyBucket); len(lines) != 0 {
		t.Errorf("it is told as %q", lines)
	}
	if told := us.hear(t, eu); told.Other != "" || told.Odd != 1 {
		t.Errorf("it was merged: %+v", told)
	}
	wants(t, us, 9e18)
	if r := us.store.Apply(t.Context(), []counter.Op{{Changes: []counter.Change{reset(views, faulty)}}})[0]; !errors.Is(r.Err, counter.ErrOverflow) {
		t.Errorf("a reset of it is %v", r.Err)
	}
	wants(t, us, 9e18)
}

// The parts from elsewhere have more than 64 bits together, as long as they have a base each, but the total has not.
func TestServerATotalFitsWherePartsDoNot(t *testing.T) {
	t.Parallel()
	list := replicas(t, "us", "eu")
	us, eu := list[0], list[1]
	make1(t, us.store, adjust(9e18))
	eu.hear(t, us)
	make1(t, eu.store, counter.Change{Key: faulty, Rule: views, Verb: counter.Reset, Reason: "r", By: "b"})
	us.hear(t, eu)
	wants(t, us, 0)
	make1(t, eu.store, adjust(-9e18))
	if told := us.hear(t, eu); told.Odd != 0 {
		t.Errorf("%+v", told)
	}
	wants(t, us, -9e18)
	make1(t, us.store, adjust(-1))
	eu.hear(t, us)
	wants(t, eu, -9e18-1)
}

// A region whose clock is ahead hears of a counter, which is then ended by one that does not know of that life.
func TestServerALifeOfHearingEnds(t *testing.T) {
	t.Parallel()
	list := replicas(t, "us", "eu")
	us, eu := list[0], list[1]
	for _, rule := range []*counter.Rule{visitors, likes, views} {
		for _, end := range []counter.Change{reset(rule, faulty), drop(rule)} {
			for _, changed := range []bool{false, true} {
				if rule == views && end.Verb == counter.Reset {
					continue // that goes by the sequences
				}
				t.Run(fmt.Sprint(rule.Kind, end.Verb, changed), func(t *testing.T) {
					for _, r := range list {
						r.server.Flush(t)
						r.begin(t, faultyBucket)
					}
					change := func(r *replica, n int) {
						if rule == views {
							make1(t, r.store, add(faulty, 1))
						} else {
							make1(t, r.store, edit(rule, faulty, members(n, n+1), nil))
						}
					}
					change(eu, 1)
					lines := eu.lines(t, faultyBucket)
					lines[0][5] += fmt.Sprintf(" us/%d/1/0/0/0", time.Now().Add(10*time.Minute).UnixMilli())
					tell(t, us.store, "eu", "us", faultyBucket, counterredis.ModeLog, lines)
					wants(t, us, 1)
					want := int64(0)
					if changed {
						change(us, 2)
						want = 1 // of a set and a sum; of registers nobody knows whose they are
						if rule == visitors {
							want = 2
						}
					}
					make1(t, eu.store, end)
					us.hear(t, eu)
					wants(t, us, want)
					eu.hear(t, us)
					us.hear(t, eu)
					wants(t, eu, want)
					wants(t, us, want)
					if c := read1(t, us.store, faulty); end.Verb == counter.Delete && c.Touched() != changed {
						t.Errorf("after a DELETE us has %+v", c)
					}
				})
			}
		}
	}
}

// What a process without regions changes is told, if late; and what it deletes leaves no parts.
func TestServerAProcessWithoutRegions(t *testing.T) {
	t.Parallel()
	list := replicas(t, "us", "eu")
	us, eu := list[0], list[1]
	beside := open(t, "", us.server.URL())
	make1(t, eu.store, add(faulty, 5))
	us.hear(t, eu)
	make1(t, us.store, add(faulty, 2))
	look := func(at counterredis.Position) counterredis.Batch {
		t.Helper()
		batches, err := us.store.Outgoing(t.Context(), []int{faultyBucket}, []counterredis.Position{at}, 10)
		if err != nil {
			t.Fatal(err)
		}
		return batches[0]
	}
	at := look(counterredis.Position{}).To
	make1(t, us.store, add(faulty, 1))
	us.hear(t, eu)
	if b := look(at); b.All || len(b.Lines) != 1 {
		t.Errorf("after a change with regions the log has %+v", b)
	}
	make1(t, beside, add(faulty, 1))
	b := look(at)
	if !b.All {
		t.Errorf("after a change without regions the log has %+v", b)
	}
	if b = look(b.To); b.All {
		t.Errorf("the log begins anew again: %+v", b)
	}
	make1(t, beside, drop(views))
	make1(t, us.store, add(faulty, 1))
	wants(t, us, 1)
	if line := us.lines(t, faultyBucket)[0]; strings.Count(line[5], "/") != 5 || !strings.Contains(line[5], "/1/1/0/0") {
		t.Errorf("after a DELETE without regions the parts are %q", line[5])
	}
}

// A copy of a region's Redis has what came from elsewhere, so that is not counted twice.
func TestServerACopyOfARegion(t *testing.T) {
	t.Parallel()
	for _, rule := range []*counter.Rule{views, likes} {
		t.Run(rule.Kind.String(), func(t *testing.T) {
			t.Parallel()
			list := replicas(t, "us", "eu", "us")
			us, eu, empty := list[0], list[1], list[2]
			for i, r := range []*replica{eu, us} {
				if rule == views {
					make1(t, r.store, add(faulty, 3))
				} else {
					make1(t, r.store, edit(rule, faulty, members(i, i+3), nil))
				}
			}
			us.hear(t, eu)
			wants(t, us, 6)
			rules := &counter.Rules{}
			copyTo := func(to *replica) {
				t.Helper()
				if err := us.store.Dump(t.Context(), "", func(c counter.Copy) error {
					text, err := json.Marshal(c)
					if err == nil {
						err = json.Unmarshal(text, &c)
					}
					if err == nil {
						_, err = to.store.Restore(t.Context(), []counter.Copy{c}, rules)
					}
					return err
				}); err != nil {
					t.Fatal(err)
				}
			}
			copyTo(empty)
			wants(t, empty, 6)
			empty.hear(t, eu)
			wants(t, empty, 6)
			eu.hear(t, empty)
			wants(t, eu, 6)
			// Where it takes the place of what is there, the others tell all again.
			tell(t, empty.store, "eu", "us", faultyBucket, counterredis.ModeBegin, nil)
			tell(t, empty.store, "eu", "us", faultyBucket, counterredis.ModeEnd, nil)
			copyTo(empty)
			at, err := empty.store.Positions(t.Context(), "eu", []int{faultyBucket})
			if err != nil || at[0] != (counterredis.Position{}) {
				t.Errorf("after an import it has eu up to %+v, %v", at, err)
			}
		})
	}
	var c counter.Copy
	if err := json.Unmarshal([]byte(`{"key":"v","kind":"sum","value":1,"version":"1.1","elsewhere":"0 0 us"}`), &c); !errors.Is(err, counter.ErrCopy) {
		t.Errorf("a copy with parts that are none is %+v, %v", c, err)
	}
}

// An older memory went on until its sequence was what the others know, with another value.
func TestServerTwoValuesOfOneSequence(t *testing.T) {
	t.Parallel()
	list := replicas(t, "us", "eu")
	us, eu := list[0], list[1]
	make1(t, us.store, add(faulty, 5))
	eu.hear(t, us)
	f := strings.Fields(us.hash(t, "c"))
	f[1] = "3"
	us.setHash(t, "c", strings.Join(f, " "))
	look, err := eu.store.Outgoing(t.Context(), []int{faultyBucket}, make([]counterredis.Position, 1), 10)
	if err != nil {
		t.Fatal(err)
	}
	tell(t, eu.store, "us", "eu", faultyBucket, counterredis.ModeLog, us.lines(t, faultyBucket))
	wants(t, eu, 5)
	back, err := eu.store.Outgoing(t.Context(), []int{faultyBucket}, []counterredis.Position{look[0].To}, 10)
	if err != nil || len(back[0].Lines) != 1 {
		t.Fatalf("eu does not say what us has forgotten: %+v, %v", back, err)
	}
	tell(t, us.store, "eu", "us", faultyBucket, counterredis.ModeLog, back[0].Lines)
	wants(t, us, 5)
	make1(t, us.store, add(faulty, 1))
	eu.hear(t, us)
	wants(t, us, 6)
	wants(t, eu, 6)
}

// A process with another --region is told so, and tells nothing.
func TestServerARegionKeepsItsName(t *testing.T) {
	t.Parallel()
	us := replicas(t, "us")[0]
	renamed := open(t, "usa", us.server.URL())
	if _, err := renamed.Outgoing(t.Context(), []int{faultyBucket}, make([]counterredis.Position, 1), 1); err == nil || !strings.Contains(err.Error(), `"us"`) {
		t.Errorf("it tells, %v", err)
	}
	make1(t, us.store, add(faulty, 1))
	if lines, _, err := renamed.Scan(faultyBucket).Next(t.Context(), 10); err == nil {
		t.Errorf("it tells %q", lines)
	}
	us.begin(t, faultyBucket)
}

// What was deleted long ago is forgotten 30 days after that, not after it was heard.
func TestServerAnOldDeletion(t *testing.T) {
	t.Parallel()
	us := replicas(t, "us")[0]
	hear := func(ago time.Duration) string {
		t.Helper()
		died := strconv.FormatInt(time.Now().Add(-ago).UnixMilli(), 10)
		tell(t, us.store, "eu", "us", faultyBucket, counterredis.ModePage, []counterredis.Line{{faulty, "", "0", died, "0", "", ""}})
		return died
	}
	hear(31 * 24 * time.Hour)
	if text := us.hash(t, "f"); text != "" {
		t.Errorf("it remembers %q", text)
	}
	died := hear(29 * 24 * time.Hour)
	if at, _ := us.server.Do(t, "ZSCORE", fmt.Sprintf("hc:{n%d}:gone", faultyBucket), faulty).(string); at != died {
		t.Errorf("it forgets after %q, not %s", at, died)
	}
}

func TestServerAPartThatFindsNoRoomIsOdd(t *testing.T) {
	t.Parallel()
	us := replicas(t, "us")[0]
	parts := ""
	for n := range 101 {
		parts += fmt.Sprintf(" eu/%d/1/1/0/0", n+1)
	}
	told := tell(t, us.store, "eu", "us", faultyBucket, counterredis.ModePage, []counterredis.Line{{faulty, "sum", "0", "0", "0", parts, ""}})
	if told.Other != "" || told.Odd != 1 {
		t.Errorf("%+v", told)
	}
	wants(t, us, 100)
}

func TestServerPositionsThatCannotBeRead(t *testing.T) {
	t.Parallel()
	us := replicas(t, "us")[0]
	us.server.Do(t, "SET", "hc:{n9}:s", "no hash")
	if at, err := us.store.Positions(t.Context(), "eu", []int{8, 9}); err == nil {
		t.Errorf("they are %+v", at)
	}
}

// The log says once that a link fails, and once that it does not any more.
func TestServerALinkThatFailsSaysSoOnce(t *testing.T) {
	t.Parallel()
	list := replicas(t, "us", "eu")
	remote := counterredis.New(counterredis.Config{Conn: redistest.Dial(t, list[1].server.URL()), Log: zerolog.Nop()})
	defer remote.Close()
	way := &road{Remote: remote, cut: true}
	var log servertest.Log
	registry := prometheus.NewRegistry()
	s := regions.New(list[0].store, regions.Config{
		Region: "us", Rules: counter.BuiltinRules(), Local: list[0].store, Peers: []regions.Peer{{Name: "eu", Remote: way}}, Every: 20 * time.Millisecond,
		Registerer: registry, Log: zerolog.New(&log),
	})
	defer s.Close()
	eventually(t, "it has failed twice", func() (bool, string) {
		families, err := registry.Gather()
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range families {
			if f.GetName() == "headcount_counters_region_failures_total" {
				return f.GetMetric()[0].GetCounter().GetValue() >= 2, f.String()
			}
		}
		return false, ""
	})
	way.set(false)
	eventually(t, "the log says that it tells again", func() (bool, string) {
		return strings.Contains(log.String(), "are replicated to the peer again"), log.String()
	})
	if n := strings.Count(log.String(), `"level":"warn"`); n != 1 {
		t.Errorf("%d warnings: %s", n, log.String())
	}
}

// A region whose log was further on than it says now has lost memory, whatever its counters say.
func TestServerPlacesThatFallTellOfLostMemory(t *testing.T) {
	t.Parallel()
	us := replicas(t, "us")[0]
	for i, tc := range []struct {
		place uint64
		lost  bool
	}{{5, false}, {7, false}, {7, false}, {3, true}, {4, false}, {0, true}} {
		to := counterredis.Position{Log: strconv.Itoa(i), Cursor: tc.place}
		for _, mode := range []counterredis.Mode{counterredis.ModeBegin, counterredis.ModeEnd} {
			told, err := us.store.Merge(t.Context(), "eu", "us", []counterredis.Message{{Batch: counterredis.Batch{Bucket: faultyBucket, To: to}, Mode: mode, Word: "w"}})
			if err != nil || told[0].Other != "" || told[0].Older != (tc.lost && mode == counterredis.ModeBegin) {
				t.Errorf("%s of a log up to %d: %+v, %v", mode, tc.place, told, err)
			}
		}
	}
}
