package counterredis_test

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"headcount/counter"
	"headcount/counter/counterredis"
	"headcount/counter/countertest"
	"headcount/counter/limit"
	"headcount/internal/redistest"
)

var (
	views = &counter.Rule{Match: "v:*", Kind: counter.Sum}
	stock = &counter.Rule{Match: "k:*", Kind: counter.Exact, Ledger: counter.DefaultLedger}
	likes = &counter.Rule{Match: "m:*", Kind: counter.Members}
)

// once is what is known of calls that are each on a counter or a limit of its own:
// what was acknowledged was made once, what was not at most once.
type once struct {
	mu           sync.Mutex
	acknowledged map[string]bool
	sure, open   map[string]int // of counters that many calls change: how many changes were acknowledged, and how many not
}

// noteMore notes a change by 1 of a counter that others change, too.
func (o *once) noteMore(key string, err error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if err == nil {
		o.sure[key]++
	} else {
		o.open[key]++
	}
}

func (o *once) note(t testing.TB, key string, err error) {
	if err != nil && !errors.Is(err, counter.ErrUnavailable) {
		t.Error(err)
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	o.acknowledged[key] = err == nil
}

func limitCall(key string) []limit.Call {
	return []limit.Call{{Name: limit.Name{Algorithm: limit.Log, Window: limit.MaxWindow.Milliseconds(), Key: key}, Limit: 10, Cost: 1}}
}

// load makes calls from several clients until stop returns true.
func load(t testing.TB, s *counterredis.Store, stop func() bool) *once {
	o := &once{acknowledged: map[string]bool{}, sure: map[string]int{}, open: map[string]int{}}
	var wg sync.WaitGroup
	for client := range 8 {
		wg.Go(func() {
			for n := 0; !stop(); n++ {
				var ops []counter.Op
				for i := range 8 {
					id := fmt.Sprint(client, ".", n, ".", i)
					ops = append(ops, counter.Op{Changes: []counter.Change{{Key: "v:" + id, Rule: views, Verb: counter.Add, Delta: 1}}},
						counter.Op{Changes: []counter.Change{{Key: "k:" + id, Rule: stock, Verb: counter.Add, Delta: 1}}})
				}
				// A set, and a ledger: more keys than that of the counter.
				shared := fmt.Sprint(client % 4)
				ops = append(ops, counter.Op{Changes: []counter.Change{{Key: "m:" + shared, Rule: likes, Verb: counter.Edit, Join: []string{fmt.Sprint(client, ".", n)}}}},
					counter.Op{Changes: []counter.Change{{Key: "k:" + shared, Rule: stock, Verb: counter.Adjust, Delta: 1, Reason: "r", By: "b"}}})
				for i, r := range s.Apply(t.Context(), ops) {
					if i < 16 {
						o.note(t, ops[i].Changes[0].Key, r.Err)
					} else {
						o.noteMore(ops[i].Changes[0].Key, r.Err)
					}
					if r.Err != nil {
						time.Sleep(time.Millisecond) // the store may refuse at once for half a second
					}
				}
				key := fmt.Sprint("l:", client, ".", n)
				o.note(t, key, s.Limit(t.Context(), limitCall(key))[0].Err)
			}
		})
	}
	wg.Wait()
	return o
}

// check asks s, whose way to Redis is undisturbed, what became of the calls.
func (o *once) check(t testing.TB, s *counterredis.Store) {
	countertest.AwaitServed(t, s)
	made := map[string]int64{}
	var keys []string
	for key := range o.acknowledged {
		if key[0] != 'l' {
			keys = append(keys, key)
			continue
		}
		r := s.Limit(t.Context(), limitCall(key))[0]
		if r.Err != nil {
			t.Fatal(r.Err)
		}
		made[key] = 9 - r.Answer.Remaining // before this call
	}
	for some := range slices.Chunk(keys, 500) {
		got, err := s.Read(t.Context(), some, "", 0)
		if err != nil {
			t.Fatal(err)
		}
		for i, key := range some {
			made[key] = got[i].Value
		}
	}
	unknown, wrong := 0, 0
	for key, acknowledged := range o.acknowledged {
		if !acknowledged {
			unknown++
		}
		if made[key] > 1 || acknowledged && made[key] != 1 {
			if wrong++; wrong < 10 {
				t.Errorf("%s: made %d times, acknowledged: %v", key, made[key], acknowledged)
			}
		}
	}
	for key := range o.sure {
		got, err := s.Read(t.Context(), []string{key}, "", 0)
		if err != nil {
			t.Fatal(err)
		}
		value := int(got[0].Value)
		if value < o.sure[key] || value > o.sure[key]+o.open[key] {
			t.Errorf("%s is %d, of %d that were acknowledged and %d that were not", key, value, o.sure[key], o.open[key])
		}
		if key[0] == 'k' {
			page, err := s.Ledger(t.Context(), key, uint64(max(value-3, 0)), counter.MaxLedger)
			if err != nil || len(page.Entries) != min(value, 3) || page.Entries[len(page.Entries)-1].After != int64(value) {
				t.Errorf("the end of the ledger of %s, which is %d: %+v, %v", key, value, page.Entries, err)
			}
		}
	}
	t.Logf("%d calls, %d not acknowledged, %d wrong", len(o.acknowledged), unknown, wrong)
}

func TestServerNothingCountsTwiceWhenAnswersAreCutOff(t *testing.T) {
	t.Parallel()
	const cuts = 200
	for name, start := range map[string]func(testing.TB) (direct, url string, left *redistest.Cuts){
		"single": func(t testing.TB) (string, string, *redistest.Cuts) {
			server := redistest.Start(t)
			url, left := server.Cut(t, cuts)
			return server.URL(), url, left
		},
		"sentinel": func(t testing.TB) (string, string, *redistest.Cuts) {
			sentinel := redistest.StartSentinel(t)
			url, left := sentinel.Cut(t, cuts)
			return sentinel.Master.URL(), url, left
		},
		"cluster": func(t testing.TB) (string, string, *redistest.Cuts) {
			cluster := redistest.StartCluster(t, 3, 0)
			url, left := cluster.Cut(t, cuts)
			return url, url, left // once none is left it is undisturbed
		},
	} {
		t.Run(name, func(t *testing.T) {
			direct, url, left := start(t)
			s := open(t, url, "")
			countertest.AwaitServed(t, s)
			load(t, s, func() bool { return left.Left() == 0 }).check(t, open(t, direct, ""))
		})
	}
}

// Slots go from one master to the next and back while clients use what is in them.
func TestServerNothingCountsTwiceWhileSlotsMove(t *testing.T) {
	t.Parallel()
	const d = 5 * time.Second
	cluster := redistest.StartCluster(t, 3, 0)
	s := open(t, cluster.URL(), "")
	countertest.AwaitServed(t, s)
	end := time.Now().Add(d)
	var moved sync.WaitGroup
	moved.Go(func() {
		for n := 0; time.Now().Before(end); n++ {
			slot := cluster.Masters[0].Do(t, "CLUSTER", "KEYSLOT", fmt.Sprintf("{n%d}", n%counterredis.Buckets))
			cluster.Migrate(t, int(slot.(int64)), n%len(cluster.Masters))
		}
	})
	o := load(t, s, func() bool { return time.Now().After(end) })
	moved.Wait()
	o.check(t, s)
}
