package region_test

import (
	"bytes"
	"context"
	"fmt"
	"math"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"

	"headcount/counter"
	"headcount/counter/call"
	"headcount/counter/countertest"
	"headcount/counter/owner"
	"headcount/counter/region"
	"headcount/counter/simtest"
	"headcount/internal/rows"
)

// place is a region with one process. Nothing fails there, except links that are cut.
type place struct {
	name     string
	home     *journal
	inboxes  map[string]*journal
	owner    *owner.Owner
	region   *region.Region
	counters *call.Store // of this region
	store    *region.Store
	registry *prometheus.Registry
	log      locked

	mu  sync.Mutex // guards cut
	cut bool       // from all others
}

// locked is a log that several goroutines write.
type locked struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *locked) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()

	return l.b.Write(b)
}

func (l *locked) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()

	return l.b.String()
}

func (p *place) setCut(cut bool) {
	p.mu.Lock()
	defer p.mu.Unlock()

	p.cut = cut
}

func (p *place) isCut() bool {
	p.mu.Lock()
	defer p.mu.Unlock()

	return p.cut
}

func (p *place) to(j *journal, passes func() bool) *way {
	return &way{
		to: j, dice: simtest.NewDice(1, p.name), most: time.Millisecond,
		passes: passes, lost: func() float64 { return 0 },
		note: func(string, ...any) {},
	}
}

// places starts regions with these names. Each has the rules of its index, or the first ones.
func places(t *testing.T, names []string, rules ...*counter.Rules) []*place {
	t.Helper()
	var all []*place
	for _, name := range names {
		p := &place{name: name, home: newJournal(), inboxes: map[string]*journal{}}
		for _, other := range append(names, "ap") {
			p.inboxes[other] = newJournal()
		}

		all = append(all, p)
	}

	for i, p := range all {
		p.start(t, all, rules[min(i, len(rules)-1)])
	}

	return all
}

// start starts the process of a region.
func (p *place) start(t *testing.T, all []*place, rules *counter.Rules) {
	t.Helper()
	p.registry = prometheus.NewRegistry()
	here := func() bool { return true }
	store := p.to(p.home, here)
	cfg := region.Config{Name: p.name, Process: p.name, Store: store, Registerer: p.registry, Log: zerolog.New(&p.log)}
	for _, other := range all {
		if other == p {
			continue
		}
		there := func() bool { return !p.isCut() && !other.isCut() }
		cfg.Peers = append(cfg.Peers, region.Peer{
			Name:   other.name,
			Rows:   p.to(other.home, there),
			Outbox: p.to(other.inboxes[p.name], there),
			Inbox:  p.to(p.inboxes[other.name], here),
		})
	}

	p.region = region.New(cfg)
	p.owner = owner.New(store, owner.Config{Name: p.name, VerifyEvery: -1, Region: p.name, Shared: p.region.Shared})
	p.region.Start(p.owner)
	var partitions []int
	for id := range rows.Partitions {
		partitions = append(partitions, id)
	}

	if err := p.owner.Own(t.Context(), partitions...); err != nil {
		t.Fatal(err)
	}

	p.counters = call.NewStore(store, countertest.Everywhere{Owner: p.owner}, rules,
		call.Config{Stream: fmt.Sprint(p.name, time.Now())})
	p.store = region.NewStore(p.counters, rules, cfg.Peers)
}

func (p *place) end(t *testing.T) {
	t.Helper()
	p.region.Close()
	if err := p.store.Close(); err != nil {
		t.Error(err)
	}
	p.owner.Close()
}

func end(t *testing.T, all []*place) {
	t.Helper()
	for _, p := range all {
		p.end(t)
	}
}

// settle waits long enough for everything to arrive.
func settle() { time.Sleep(5 * time.Second) }

func (p *place) do(t *testing.T, c counter.Change) counter.Counter {
	t.Helper()
	result := p.store.Apply(t.Context(), []counter.Op{{Changes: []counter.Change{c}}})[0]
	if result.Err != nil {
		t.Fatalf("%s: %s %v: %v", p.name, c.Key, c.Verb, result.Err)
	}

	return result.Counters[0]
}

func (p *place) read(t *testing.T, key string) counter.Counter {
	t.Helper()
	read, err := p.store.Read(t.Context(), []string{key}, "", 0)
	if err != nil {
		t.Fatal(err)
	}

	return read[0].Counter
}

func agree(t *testing.T, all []*place, key string, want int64) {
	t.Helper()
	settle()
	for _, p := range all {
		if is := p.read(t, key); is.Value != want {
			t.Errorf("%s: %s is %d, want %d", p.name, key, is.Value, want)
		}
	}
}

var (
	views    = &counter.Rule{Match: "v*", Kind: counter.Sum}
	likes    = &counter.Rule{Match: "l*", Kind: counter.Members}
	stock    = &counter.Rule{Match: "s*", Kind: counter.Exact}
	ordinary = mustRules(views, likes, stock, &counter.Rule{Match: "*", Kind: counter.Unique})
)

func mustRules(all ...*counter.Rule) *counter.Rules {
	var text []string
	for _, r := range all {
		text = append(text, fmt.Sprintf(`{"match":%q,"kind":%q}`, r.Match, r.Kind))
	}
	rules, err := counter.ParseRules([]byte(`{"rules":[` + strings.Join(text, ",") + `]}`))
	if err != nil {
		panic(err)
	}

	return rules
}

func add(key string, delta int64) counter.Change {
	return counter.Change{Key: key, Rule: views, Verb: counter.Add, Delta: delta}
}

func (p *place) metric(t *testing.T, name string) (total float64) {
	t.Helper()
	families, err := p.registry.Gather()
	if err != nil {
		t.Fatal(err)
	}

	for _, f := range families {
		if f.GetName() != name {
			continue
		}
		for _, m := range f.GetMetric() {
			total += m.GetCounter().GetValue() + m.GetGauge().GetValue()
		}
	}

	return total
}

// TestAChangeIsSentOnce: of three regions each sends its own changes, and only those.
func TestAChangeIsSentOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		all := places(t, []string{"us", "eu", "ap"}, ordinary)
		settle()
		for i, p := range all {
			p.do(t, add("v", int64(i+1)))
			agree(t, all, "v", int64((i+1)*(i+2)/2))
		}

		// A region that sent on what it has received would have done so by now, and the changes would go round for
		// ever.
		time.Sleep(time.Minute)

		for _, p := range all {
			sent := p.metric(t, "headcount_counters_region_sent_total")
			news := p.metric(t, "headcount_counters_region_merges_total")
			if sent != 2 || news != 2 {
				t.Errorf("%s has sent %v counters, and received %v; want 2 and 2", p.name, sent, news)
			}
			if failed := p.metric(t, "headcount_counters_region_failures_total"); failed > 0 {
				t.Errorf("%v rounds of %s failed, want none", failed, p.name)
			}
		}

		if c := all[0].read(t, "v"); !c.Approx || c.Stale {
			t.Errorf("a total of regions is %+v, want it approximate and not stale", c)
		}

		end(t, all)
	})
}

// TestARegionIsCutForLong: while a region is cut off, more counters change than a log has room for. The process logs
// once that the link fails, and once that it works again.
func TestARegionIsCutForLong(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		all := places(t, []string{"us", "eu"}, ordinary)
		settle()
		all[1].setCut(true)
		var keys []string
		for n := 0; len(keys) < 4200; n++ {
			key := fmt.Sprint("v", n)
			// The log is one of each partition, so all changes go to the same one.
			if rows.PartitionOf(key) == 3 {
				keys = append(keys, key)
			}
		}

		for first := 0; first < len(keys); first += 600 {
			var op counter.Op
			for _, key := range keys[first : first+600] {
				op.Changes = append(op.Changes, add(key, 2))
			}

			if result := all[0].store.Apply(t.Context(), []counter.Op{op})[0]; result.Err != nil {
				t.Fatal(result.Err)
			}
		}

		// A comparison of what exists would not find a counter that is gone.
		all[0].do(t, counter.Change{Key: keys[0], Rule: views, Verb: counter.Delete})
		time.Sleep(time.Minute)
		if lag := all[0].metric(t, "headcount_counters_region_lag_seconds"); lag < 60 {
			t.Errorf("the lag is %v s, want at least 60", lag)
		}
		if failed := all[0].metric(t, "headcount_counters_region_failures_total"); failed < 2 {
			t.Errorf("%v rounds have failed, want at least 2", failed)
		}

		all[1].setCut(false)
		settle()
		if lag := all[0].metric(t, "headcount_counters_region_lag_seconds"); lag > 0 {
			t.Errorf("after the repair the lag is %v s, want 0", lag)
		}

		log := all[0].log.String()
		failing := strings.Count(log, "cannot be replicated to the peer; retrying")
		if again := strings.Count(log, "are replicated to the peer again"); failing != 1 || again != 1 {
			t.Errorf("%d lines of the log say that the link fails, and %d that it works again; want 1 and 1:\n%s",
				failing, again, log)
		}

		is, err := all[1].store.Aggregate(t.Context(), "v")
		if err != nil || is.Counters != 4199 || is.Value != 2*4199 {
			t.Errorf("eu has %+v, %v; want 4199 counters with 2 each", is, err)
		}
		if whole := all[0].metric(t, "headcount_counters_region_repairs_total"); whole != rows.Partitions+1 {
			t.Errorf("%v partitions were compared, want each at the start, and one again", whole)
		}

		end(t, all)
	})
}

// TestPeersOfOtherNames: a peer with an unexpected name gets nothing, and a store keeps its name.
func TestPeersOfOtherNames(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		all := places(t, []string{"us", "eu"}, ordinary)
		all[1].end(t) // before the process has written its name
		all[1].name = "ap"
		all[1].start(t, all, ordinary)
		settle()
		all[0].do(t, add("v", 1))
		settle()

		// A peer with another name may be the store of another region, whose share would then be counted twice.
		if is := all[1].read(t, "v"); is.Touched() {
			t.Errorf("the region with another name has %+v, want nothing", is)
		}
		if n := strings.Count(all[0].log.String(), "correct --peer"); n != 1 {
			t.Errorf("%d lines of the log advise to correct --peer, want 1:\n%s", n, all[0].log.String())
		}

		all[1].end(t)
		all[1].name = "eu"
		all[1].start(t, all, ordinary)
		settle()
		if n := strings.Count(all[1].log.String(), "correct --region"); n != 1 {
			t.Errorf("%d lines of the log advise to correct --region, want 1:\n%s", n, all[1].log.String())
		}

		end(t, all)
	})
}

// TestAStoreHasItsNameAgain: the store of a region had the name of another one for a while, as after a wrong backup.
// The region shares its counters again as soon as the name is right, without a restart.
func TestAStoreHasItsNameAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		all := places(t, []string{"us", "eu"}, ordinary)
		settle()
		for _, name := range []string{"ap", "eu"} {
			if _, err := all[1].owner.Do(t.Context(), owner.NameRegion(name)); err != nil {
				t.Fatal(err)
			}
			settle()
		}

		all[0].do(t, add("v", 1))
		all[1].do(t, add("v", 2))
		agree(t, all, "v", 3)

		log := all[1].log.String()
		if strings.Count(log, "correct --region") != 1 || strings.Count(log, "another region any more") != 1 {
			t.Errorf("the log does not say once that the name is wrong, and once that it is right again:\n%s", log)
		}
		end(t, all)
	})
}

// TestCountersOfOtherKindsAreNotMerged: counters of different kinds are not merged, and exact ones belong to their
// region.
func TestCountersOfOtherKindsAreNotMerged(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		others := mustRules(&counter.Rule{Match: "l*", Kind: counter.Sum},
			&counter.Rule{Match: "v*", Kind: counter.Exact}, stock)
		all := places(t, []string{"us", "eu"}, ordinary, others)
		all[0].do(t, counter.Change{Key: "l", Rule: likes, Verb: counter.Edit, Join: []string{"a"}})
		all[1].do(t, counter.Change{Key: "l", Rule: views, Verb: counter.Add, Delta: 5})
		all[1].do(t, counter.Change{Key: "v", Rule: stock, Verb: counter.Add, Delta: 5})
		all[0].do(t, add("v", 1))
		for i, p := range all {
			p.do(t, counter.Change{Key: "s", Rule: stock, Verb: counter.Add, Delta: int64(i + 1)})
		}

		settle()

		for i, want := range []map[string]int64{{"l": 1, "v": 1, "s": 1}, {"l": 5, "v": 5, "s": 2}} {
			for key, value := range want {
				if is := all[i].read(t, key); is.Value != value {
					t.Errorf("%s: %s is %d, want %d", all[i].name, key, is.Value, value)
				}
			}

			if odd := all[i].metric(t, "headcount_counters_region_odd_total"); odd == 0 {
				t.Errorf("%s has not counted the counters that it could not merge", all[i].name)
			}
			if !strings.Contains(all[i].log.String(), "every region needs the same rules") {
				t.Errorf("the log of %s lacks the advice to use the same rules: %s", all[i].name, all[i].log.String())
			}
		}

		if is, err := all[1].store.Aggregate(t.Context(), "v"); err != nil || is.Counters != 1 {
			t.Errorf("beside the exact counter there is another one: %+v, %v", is, err)
		}
		if all[0].read(t, "s").Approx {
			t.Error("an exact counter is approximate")
		}

		end(t, all)
	})
}

// TestTotalsAtTheBounds: a part of a region fits into 64 bits, but the total of all regions does not.
func TestTotalsAtTheBounds(t *testing.T) {
	const huge = int64(1) << 62
	synctest.Test(t, func(t *testing.T) {
		all := places(t, []string{"us", "eu"}, ordinary)
		us, eu := all[0], all[1]
		adjust := func(p *place, delta int64) counter.Result {
			c := counter.Change{Key: "v", Rule: views, Verb: counter.Adjust, Delta: delta, Reason: "r", By: "b"}
			return p.store.Apply(t.Context(), []counter.Op{{Changes: []counter.Change{c}}})[0]
		}

		must := func(r counter.Result) {
			t.Helper()
			if r.Err != nil {
				t.Fatal(r.Err)
			}
		}

		// While the link is cut neither region knows that the total will not fit, so both accept the change.
		us.setCut(true)
		must(adjust(us, huge))
		must(adjust(eu, huge))
		us.setCut(false)
		settle()
		if a, b := us.read(t, "v").Value, eu.read(t, "v").Value; a != huge || b != huge {
			t.Fatalf("the totals are %d and %d, want the own part where the total does not fit", a, b)
		}

		// Now the total has room for both parts.
		must(adjust(us, -huge-huge))
		settle()
		must(adjust(eu, 1))
		agree(t, all, "v", 1)

		// The total would fit, but the own part would not.
		if r := adjust(eu, math.MaxInt64-10); r.Err == nil || !strings.Contains(r.Err.Error(), "part of this region") {
			t.Errorf("a part beyond 64 bits: %+v, want an error about it", r)
		}

		agree(t, all, "v", 1)
		end(t, all)
	})
}

// TestDeletionsAreForgotten: a deletion is forgotten after thirty days, and not before.
func TestDeletionsAreForgotten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		all := places(t, []string{"us", "eu"}, ordinary)
		us, eu := all[0], all[1]
		graves := func(p *place) (n int) {
			for id := range rows.Partitions {
				_ = p.home.scan(id, "graves", "", func(string, []byte) error {
					n++
					return nil
				})
			}

			return n
		}

		us.do(t, add("v", 3))
		agree(t, all, "v", 3)
		eu.setCut(true)
		us.do(t, counter.Change{Key: "v", Rule: views, Verb: counter.Delete})
		eu.do(t, add("v", 1)) // this one is deleted with the rest
		pass := func(days time.Duration) {
			end(t, all) // otherwise there would be too many rounds
			time.Sleep(days * 24 * time.Hour)
			for _, p := range all {
				p.start(t, all, ordinary)
			}
		}

		pass(29)
		eu.setCut(false)
		agree(t, all, "v", 0)
		if us.read(t, "v").Touched() || eu.read(t, "v").Touched() || graves(us) != 1 || graves(eu) != 1 {
			t.Errorf("us has %d deletions, eu %d, want 1 and 1; the counter is %+v, want none",
				graves(us), graves(eu), eu.read(t, "v"))
		}

		// A counter that is created anew under the key of a deleted one must not be deleted by the old deletion.
		eu.do(t, add("v", 2))
		agree(t, all, "v", 2)
		us.do(t, counter.Change{Key: "v", Rule: views, Verb: counter.Delete}) // once more
		agree(t, all, "v", 0)
		pass(2)
		time.Sleep(5 * time.Minute)
		if graves(us) != 1 || graves(eu) != 1 {
			t.Errorf("us has %d deletions, eu %d, want 1 and 1", graves(us), graves(eu))
		}

		pass(30)
		time.Sleep(5 * time.Minute)
		if graves(us)+graves(eu) != 0 {
			t.Errorf("us has %d deletions, eu %d, want none", graves(us), graves(eu))
		}

		us.do(t, add("v", 1))
		agree(t, all, "v", 1)
		end(t, all)
	})
}

// TestHistoriesAndDimensionsAreAddedUp: histories and dimensions include all regions. What a silent region would add is
// missing, and the answer says that it is stale.
func TestHistoriesAndDimensionsAreAddedUp(t *testing.T) {
	const text = `{"rules":[{"match":"c","kind":"sum","buckets":["1h:90d"],"dimensions":["country"]},` +
		`{"match":"g","kind":"unique","buckets":["1h:90d"]}]}`
	rules, err := counter.ParseRules([]byte(text))
	if err != nil {
		t.Fatal(err)
	}

	synctest.Test(t, func(t *testing.T) {
		all := places(t, []string{"us", "eu", "ap"}, rules)
		for i, p := range all {
			for _, country := range []string{"de", p.name} {
				p.do(t, counter.Change{
					Key: "c", Rule: rules.Find("c"), Verb: counter.Add, Delta: int64(i + 1),
					Dimensions: []counter.Dimension{{Name: "country", Value: country}},
				})
			}

			visitors := []string{fmt.Sprint(i), fmt.Sprint(i + 1)} // each is shared with a neighbour
			p.do(t, counter.Change{Key: "g", Rule: rules.Find("g"), Verb: counter.Edit, Join: visitors})
		}

		agree(t, all, "c", 12)
		agree(t, all, "g", 4)

		gained := func(p *place, key string) (int64, counter.Counter) {
			t.Helper()
			is, gains, err := p.store.History(t.Context(), key, time.Hour, 0, math.MaxInt32)
			if err != nil {
				t.Fatal(err)
			}

			tally := counter.Question{Step: time.Hour, To: math.MaxInt32}.Tally()
			tally.Add(gains)
			return tally.Total(), is
		}

		clicked, c := gained(all[0], "c")
		guested, g := gained(all[0], "g")
		if clicked != 12 || guested != 4 || c.Stale || g.Stale || !c.Approx {
			t.Errorf("gained %d and %d, want 12 and 4: %+v, %+v", clicked, guested, c, g)
		}

		_, counted, err := all[1].store.Dimension(t.Context(), "c", "country")
		if err != nil || fmt.Sprint(counted.Values) != "map[ap:3 de:6 eu:2 us:1]" {
			t.Errorf("the dimension is %+v, %v", counted, err)
		}

		all[2].setCut(true)
		if clicked, c := gained(all[0], "c"); clicked != 6 || !c.Stale {
			t.Errorf("without ap %d are gained, want 6, and stale: %+v", clicked, c)
		}
		if c, counted, err := all[0].store.Dimension(t.Context(), "c", "country"); err != nil || !c.Stale ||
			counted.Values["de"] != 3 {
			t.Errorf("without ap the dimension is %+v, %+v, %v", c, counted, err)
		}

		all[2].setCut(false)

		all[1].do(t, counter.Change{Key: "c", Rule: rules.Find("c"), Verb: counter.Reset, Reason: "r", By: "b"})
		agree(t, all, "c", 0)
		if clicked, _ := gained(all[0], "c"); clicked != 12 {
			t.Errorf("after a reset %d are gained, want 12", clicked)
		}

		all[1].do(t, counter.Change{Key: "c", Rule: rules.Find("c"), Verb: counter.Delete})
		settle()
		clicked, _ = gained(all[2], "c")
		_, counted, err = all[2].store.Dimension(t.Context(), "c", "country")
		if clicked != 0 || err != nil || len(counted.Values) != 0 {
			t.Errorf("a deleted counter still has %d, %+v, %v; want nothing", clicked, counted, err)
		}

		end(t, all)
	})
}

// TestTheMostOfAnotherRegionIsListed: this region has as many values of a dimension as it keeps. What another region
// has counted is under its own value all the same, and not among the others.
func TestTheMostOfAnotherRegionIsListed(t *testing.T) {
	rules, err := counter.ParseRules([]byte(`{"rules":[{"match":"c","kind":"sum","dimensions":["path"]}]}`))
	if err != nil {
		t.Fatal(err)
	}

	synctest.Test(t, func(t *testing.T) {
		all := places(t, []string{"us", "eu"}, rules)
		count := func(p *place, value string, delta int64) {
			p.do(t, counter.Change{
				Key: "c", Rule: rules.Find("c"), Verb: counter.Add, Delta: delta,
				Dimensions: []counter.Dimension{{Name: "path", Value: value}},
			})
		}
		for n := range counter.MaxValues {
			count(all[0], fmt.Sprint("/", n), 1)
		}
		count(all[1], "/news", 5000)
		count(all[1], "/0", 2)

		for _, p := range all {
			_, counted, err := p.store.Dimension(t.Context(), "c", "path")
			if err != nil || counted.Values["/news"] != 5000 || counted.Values["/0"] != 3 || counted.Other != 0 {
				t.Errorf("%s has %d for /news, %d for /0 and %d for others, %v; want 5000, 3 and 0",
					p.name, counted.Values["/news"], counted.Values["/0"], counted.Other, err)
			}
		}

		end(t, all)
	})
}

// TestMembersAreNotShared: each region knows only its own members of a set.
func TestMembersAreNotShared(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		all := places(t, []string{"us", "eu"}, ordinary)
		all[0].do(t, counter.Change{Key: "l", Rule: likes, Verb: counter.Edit, Join: []string{"ann", "bob"}})
		all[1].do(t, counter.Change{Key: "l", Rule: likes, Verb: counter.Edit, Join: []string{"ann"}})
		agree(t, all, "l", 3)

		for i, mine := range []bool{true, false} {
			read, err := all[i].store.Read(context.Background(), []string{"l"}, "bob", 0)
			if err != nil || read[0].Mine != mine {
				t.Errorf("%s: %+v, %v", all[i].name, read, err)
			}
		}

		end(t, all)
	})
}

// TestAnExportKeepsWhatOthersHaveCounted: an export of a region is imported into an empty store while the other region
// goes on. What that region has counted stays.
func TestAnExportKeepsWhatOthersHaveCounted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		all := places(t, []string{"us", "eu"}, ordinary)
		us := all[0]
		join := func(p *place, names ...string) {
			t.Helper()
			p.do(t, counter.Change{Key: "l", Rule: likes, Verb: counter.Edit, Join: names})
			p.do(t, counter.Change{Key: "u", Rule: ordinary.Find("u"), Verb: counter.Edit, Join: names})
		}

		us.do(t, add("v", 3))
		agree(t, all, "v", 3)
		all[1].do(t, add("v", 4))
		agree(t, all, "v", 7)
		all[1].do(t, counter.Change{Key: "v", Rule: views, Verb: counter.Reset, Reason: "r", By: "b"})
		agree(t, all, "v", 0)
		us.do(t, add("v", 10))
		join(us, "ann", "bob")
		join(all[1], "bob", "cid")
		agree(t, all, "v", 10)
		agree(t, all, "l", 4)
		agree(t, all, "u", 3)

		var copies []counter.Copy
		err := us.counters.Dump(t.Context(), "", func(c counter.Copy) error {
			text, err := c.MarshalJSON()
			if err == nil {
				err = c.UnmarshalJSON(text)
			}
			copies = append(copies, c)
			return err
		})

		if err != nil || len(copies) != 3 {
			t.Fatalf("the export has %d counters, %v; want 3", len(copies), err)
		}

		us.end(t)
		us.home.back(time.Time{})
		for _, inbox := range us.inboxes {
			inbox.back(time.Time{})
		}

		all[1].do(t, add("v", 20))
		us.start(t, all, ordinary)
		if n, err := us.counters.Restore(t.Context(), copies, ordinary); n != 3 || err != nil {
			t.Fatalf("%d counters were restored, %v; want 3", n, err)
		}

		agree(t, all, "v", 30)
		agree(t, all, "l", 4)
		agree(t, all, "u", 3)
		us.do(t, add("v", 1))
		join(us, "dan")
		agree(t, all, "v", 31)
		agree(t, all, "l", 5)
		agree(t, all, "u", 4)
		end(t, all)
	})
}

// TestADeletionBeforeARestart: a counter is deleted while the other region is cut off, and then the process is
// restarted. It remembers nothing of the deletion, and the other region has no reason to send the counter. Both end
// with the deletion.
func TestADeletionBeforeARestart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		all := places(t, []string{"us", "eu"}, ordinary)
		us, eu := all[0], all[1]
		settle() // after that eu compares nothing
		us.do(t, add("v", 3))
		agree(t, all, "v", 3)

		eu.setCut(true)
		us.do(t, counter.Change{Key: "v", Rule: views, Verb: counter.Delete})
		us.end(t)
		us.start(t, all, ordinary)
		eu.setCut(false)
		agree(t, all, "v", 0)
		end(t, all)
	})
}

// TestAnInboxLosesItsTail: an inbox loses its newest commits between two changes, and gets them again.
func TestAnInboxLosesItsTail(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		all := places(t, []string{"us", "eu"}, ordinary)
		us, eu := all[0], all[1]
		inbox := eu.inboxes["us"]
		settle()
		eu.end(t) // so no process reads the inbox
		before := time.Now()
		time.Sleep(time.Second)
		us.do(t, add("v", 1))
		other := "v0"
		for n := 1; rows.PartitionOf(other) != rows.PartitionOf("v"); n++ {
			other = fmt.Sprint("v", n)
		}

		time.Sleep(300 * time.Millisecond)
		inbox.back(before)
		us.do(t, add(other, 2)) // before the link reads the position of the inbox
		settle()
		eu.start(t, all, ordinary)
		agree(t, all, "v", 1)
		agree(t, all, other, 2)

		end(t, all)
	})
}

// TestAnInboxLosesPages: a partition is being sent as a whole, and the inbox loses pages of it: in the middle, and just
// before the last commit.
func TestAnInboxLosesPages(t *testing.T) {
	const counters = 900
	for _, pages := range []int{500, counters} {
		synctest.Test(t, func(t *testing.T) {
			all := places(t, []string{"us", "eu"}, ordinary)
			us, eu := all[0], all[1]
			inbox := eu.inboxes["us"]
			settle()
			eu.setCut(true)
			var op counter.Op
			for n := 0; len(op.Changes) < counters; n++ {
				key := fmt.Sprint("v many ", n)
				if rows.PartitionOf(key) == 3 {
					op.Changes = append(op.Changes, add(key, 1))
				}
			}

			if result := us.store.Apply(t.Context(), []counter.Op{op})[0]; result.Err != nil {
				t.Fatal(result.Err)
			}

			us.end(t)
			us.start(t, all, ordinary) // the new process has no log
			eu.end(t)                  // so no process reads the inbox
			eu.setCut(false)

			sent := func() (n int) {
				_ = inbox.scan(3, "shares", "", func(string, []byte) error {
					n++
					return nil
				})

				return n
			}

			before := time.Now()
			for sent() < pages {
				time.Sleep(time.Millisecond / 4)
			}

			inbox.back(before)
			settle()
			eu.start(t, all, ordinary)
			settle()
			if is, err := eu.store.Aggregate(t.Context(), "v many"); err != nil || is.Counters != counters {
				t.Errorf("after the loss of %d pages eu has %+v, %v; want all counters", pages, is, err)
			}

			end(t, all)
		})
	}
}

// TestAnInboxIsTakenBack: a late process has claimed an inbox, though it owns the partition no longer. The owner takes
// it back.
func TestAnInboxIsTakenBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		all := places(t, []string{"us", "eu"}, ordinary)
		settle()
		all[0].do(t, add("v", 1))
		settle()
		all[1].inboxes["us"].claim("late", []rows.Former{{Partition: rows.PartitionOf("v")}})
		all[0].do(t, add("v", 1))
		agree(t, all, "v", 2)
		end(t, all)
	})
}

// TestARepairIsSentOn: eu has lost a visitor whom us knows, and has counted further, so its share is newer and lacks
// the visitor. Usually us sends only what it has changed itself; the mark of the repair makes it send this share as
// well.
func TestARepairIsSentOn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		all := places(t, []string{"us", "eu", "ap"}, ordinary)
		us, eu, ap := all[0], all[1], all[2]
		come := func(name string) {
			t.Helper()
			eu.do(t, counter.Change{Key: "u", Rule: ordinary.Find("u"), Verb: counter.Edit, Join: []string{name}})
		}

		come("ann")
		agree(t, all, "u", 1)
		before := time.Now()
		ap.setCut(true)
		time.Sleep(time.Second)
		come("bob")
		agree(t, all[:2], "u", 2)

		eu.end(t)
		eu.home.back(before)
		for _, inbox := range eu.inboxes {
			inbox.back(before)
		}

		us.setCut(true)
		ap.setCut(false)
		eu.start(t, all, ordinary)
		come("cid")
		come("dan")
		agree(t, all[1:], "u", 3) // without bob, whom us alone remembers

		us.setCut(false)
		agree(t, all, "u", 4)
		end(t, all)
	})
}

// TestAPartitionIsGivenUpAtOnce: a partition is claimed, changed and given up between two rounds. It leaves nothing
// that delays the other partitions.
func TestAPartitionIsGivenUpAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		all := places(t, []string{"us", "eu"}, ordinary)
		other := (rows.PartitionOf("v") + 1) % rows.Partitions
		if err := all[0].owner.Release(t.Context(), other); err != nil {
			t.Fatal(err)
		}
		settle()

		all[0].region.Shared(other, 1<<60, []string{"whatever"})
		settle()
		all[0].do(t, add("v", 1))
		agree(t, all, "v", 1)

		end(t, all)
	})
}
