package tiered_test

import (
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"headcount/counter"
	"headcount/counter/countertest"
	"headcount/counter/hyperloglog"
	"headcount/counter/tiered"
	"headcount/internal/pgtest"
	"headcount/internal/redistest"
	"headcount/internal/testkit"
)

// twins are a store and one in memory, which is changed alike and loses nothing.
type twins struct {
	store counter.Store
	truth counter.Store
	keys  []string
}

// apply makes one op twice on both. Those with an idempotency key are replays the second time.
func (w *twins) apply(t *testing.T, ops ...counter.Op) {
	t.Helper()
	want := w.truth.Apply(t.Context(), ops)
	for i, got := range w.store.Apply(t.Context(), ops) {
		if got.Err != nil || want[i].Err != nil || got.Replay != want[i].Replay || got.Counters[0].Value != want[i].Counters[0].Value && len(ops) == 1 {
			t.Fatalf("%+v: %+v, want %+v", ops[i], got, want[i])
		}
	}
}

// same says that the store has what the truth has.
func (w *twins) same(t *testing.T, when string) {
	t.Helper()
	for _, member := range []string{"a", "b", "c", "member 2999", "nobody"} {
		want, err := w.truth.Read(t.Context(), w.keys, member, 0)
		got, err1 := w.store.Read(t.Context(), w.keys, member, 0)
		if err := errors.Join(err, err1); err != nil {
			t.Fatal(err)
		}
		for i := range want {
			if got[i].Value != want[i].Value || got[i].Kind != want[i].Kind || got[i].Mine != want[i].Mine || got[i].Stale || got[i].Approx != want[i].Approx {
				t.Errorf("%s: %+v, want %+v for %s", when, got[i], want[i], member)
			}
		}
	}
	for _, key := range w.keys {
		for _, b := range kept {
			want, got := gained(t, w.truth, key, b.Step), gained(t, w.store, key, b.Step)
			if got != want {
				t.Errorf("%s: %q gained %d in steps of %s, want %d", when, key, got, b.Step, want)
			}
		}
		_, want, err := w.truth.Dimension(t.Context(), key, "shop")
		_, got, err1 := w.store.Dimension(t.Context(), key, "shop")
		if err != nil || err1 != nil || !maps.Equal(got.Values, want.Values) || got.Other != want.Other {
			t.Errorf("%s: %q counted %+v, want %+v, %v, %v", when, key, got, want, err, err1)
		}
		entries, err := w.truth.Ledger(t.Context(), key, 0, counter.MaxLedger)
		has, err1 := w.store.Ledger(t.Context(), key, 0, counter.MaxLedger)
		if err != nil || err1 != nil || !slices.EqualFunc(entries.Entries, has.Entries, func(a, b counter.Entry) bool { a.At = b.At; return a == b }) {
			t.Errorf("%s: the ledger of %q is %+v, want %+v, %v, %v", when, key, has, entries, err, err1)
		}
	}
	for _, prefix := range []string{"v:", "l:", "u:", "k:"} {
		want, err := w.truth.Aggregate(t.Context(), prefix)
		got, err1 := w.store.Aggregate(t.Context(), prefix)
		if err != nil || err1 != nil || got != want {
			t.Errorf("%s: all of %q are %+v, want %+v, %v, %v", when, prefix, got, want, err, err1)
		}
	}
}

// gained is what a sum gained, or how many a unique saw, in all steps of that length.
func gained(t testing.TB, s counter.Reader, key string, step time.Duration) (total int64) {
	t.Helper()
	_, gains, err := s.History(t.Context(), key, step, 0, 1<<32)
	if err != nil {
		t.Fatal(err)
	}
	var seen hyperloglog.Union
	for _, g := range gains {
		total += g.Value
		if g.Seen != nil {
			seen.Merge(*g.Seen)
		}
	}
	return total + seen.Count()
}

// TestClockWhatLeavesRedisComesBack: counters that are cold, and those of a Redis that lost its memory, come
// back from PostgreSQL with everything that is kept of them, and go on where they were.
func TestClockWhatLeavesRedisComesBack(t *testing.T) {
	redis, pg := redistest.Start(t), pgtest.Single(t)
	cfg := tiered.Config{Rules: countertest.Rules, Redis: redistest.Dial(t, redis.URL()), Postgres: pg.Database(t), PersistInterval: 20 * time.Millisecond, ColdAfter: 100 * time.Millisecond}
	w := &twins{store: open(t, cfg), truth: countertest.InMemory(t, nil), keys: []string{"v:1", "v:2", "v:gone", "l:1", "l:many", "u:1", "u:many", "k:1", "v:none"}}
	many := make([]string, 3000)
	for i := range many {
		many[i] = fmt.Sprint("member ", i)
	}
	for some := range slices.Chunk(many, counter.MaxMembers) {
		w.apply(t, op("", edit(likes, "l:many", some, nil)), op("", edit(visitors, "u:many", some, nil)))
	}
	round := 0
	change := func() {
		t.Helper()
		round++
		id, came := fmt.Sprint("round ", round), fmt.Sprint("came ", round)
		for range 2 {
			w.apply(t, op(id, view("v:1", id)))
			w.apply(t, op(id+" edit", edit(likes, "l:1", []string{"a", came}, []string{"c"})))
			w.apply(t, op(id+" batch", view("v:1", "again"), view("v:2", "x"), add(views, "v:2", 4)))
		}
		w.apply(t, op("", add(stock, "k:1", 5)))
		w.apply(t, op("", ends(views, "v:2", counter.Adjust)))
		w.apply(t, op("", edit(visitors, "u:1", []string{"a", came}, nil)), op("", edit(visitors, "u:many", many[:500], nil)))
		// In one call of the store, and so in one checkpoint.
		w.apply(t, op("", edit(likes, "l:1", []string{"b"}, nil)), op("", edit(likes, "l:1", nil, []string{"a", "b"})), op("", edit(likes, "l:1", []string{"a", "c"}, nil)))
		w.apply(t, op("", view("v:gone", "x")), op("", ends(views, "v:gone", counter.Delete)), op("", view("v:gone", "y")))
		if round%3 == 0 {
			w.apply(t, op("", ends(views, "v:2", counter.Reset)), op("", ends(visitors, "u:1", counter.Delete)), op("", edit(visitors, "u:1", []string{"d"}, nil)))
			w.apply(t, op("", ends(likes, "l:many", counter.Reset)), op("", edit(likes, "l:many", []string{"b"}, nil)))
		}
	}
	version := func() counter.Version {
		t.Helper()
		got, err := w.store.Read(t.Context(), []string{"l:1"}, "", 0)
		if err != nil {
			t.Fatal(err)
		}
		return got[0].Version
	}
	empty := func() bool {
		for _, key := range redis.Do(t, "KEYS", "*").([]any) {
			_, name, _ := strings.Cut(key.(string), "}:")
			if name == "c" || strings.HasPrefix(name, "m:") || strings.HasPrefix(name, "p") || strings.HasPrefix(name, "r:") || strings.HasPrefix(name, "v") || strings.HasPrefix(name, "g") {
				return false
			}
		}
		return true
	}
	persisted := func() {
		t.Helper()
		want, err := w.truth.Read(t.Context(), w.keys, "", 0)
		if err != nil {
			t.Fatal(err)
		}
		testkit.Eventually(t, "all is persisted", func() bool {
			return !slices.ContainsFunc(want, func(r counter.Reading) bool { return r.Touched() && row(t, cfg.Postgres, r.Key) != r.Value })
		})
	}
	leave := map[string]func(){
		"cold":    func() { testkit.Eventually(t, "Redis is empty", empty) },
		"flushed": func() { persisted(); redis.Flush(t) },
		"killed":  func() { persisted(); redis.Kill(); redis.Restart(t) },
	}
	for _, how := range []string{"cold", "flushed", "cold", "killed", "cold"} {
		change()
		w.same(t, "before it is "+how)
		before := version()
		leave[how]()
		testkit.Eventually(t, "it answers", func() bool {
			_, err := w.store.Read(t.Context(), w.keys, "", 0)
			return err == nil
		})
		w.same(t, how)
		if after := version(); how == "cold" && after != before || how != "cold" && after.Incarnation <= before.Incarnation {
			t.Errorf("%s: version %v after %v", how, after, before)
		}
		if how == "cold" { // and a change brings back what no read has
			leave[how]()
		}
	}
	change()
	w.same(t, "in the end")
	w.apply(t, op("", ends(views, "v:1", counter.Delete)))
	testkit.Eventually(t, "it is deleted there, too", func() bool { return row(t, cfg.Postgres, "v:1") == -1 })
	if got, err := w.store.Read(t.Context(), []string{"v:1"}, "", time.Hour); err != nil || got[0].Touched() {
		t.Errorf("%+v, %v: a read that may lag says what was before this process deleted it", got, err)
	}
}

// TestServerPersistedOfOneMoment: what PostgreSQL has of a counter is of one moment, while it is changed, reset and
// deleted: its value, its registers, the gains of all steps, and what was counted under a dimension.
func TestServerPersistedOfOneMoment(t *testing.T) {
	redis, pg := redistest.Start(t), pgtest.Single(t)
	cfg := tiered.Config{Rules: countertest.Rules, Redis: redistest.Dial(t, redis.URL()), Postgres: pg.Database(t), PersistInterval: 5 * time.Millisecond}
	s := open(t, cfg)
	ended, stop := make(chan struct{}), make(chan struct{})
	go func() { // awaited below
		defer close(ended)
		for n := 0; ; n++ {
			select {
			case <-stop:
				return
			default:
			}
			ops := []counter.Op{op("", edit(visitors, "u:1", []string{fmt.Sprint("visitor ", n)}, nil)), op("", view("v:1", fmt.Sprint("shop ", n%3)), view("v:2", "x"))}
			switch {
			case n%100 == 99:
				ops = append(ops, op("", ends(visitors, "u:1", counter.Reset)))
			case n%300 == 150:
				ops = append(ops, op("", ends(views, "v:1", counter.Delete)))
			}
			for _, r := range s.Apply(t.Context(), ops) {
				if r.Err != nil && !errors.Is(r.Err, counter.ErrUnavailable) { // as on a machine that was busy for seconds
					t.Error(r.Err)
					return
				}
			}
		}
	}()
	number := func(text string) int64 {
		n, err := strconv.ParseInt(text, 10, 64)
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	registers, sums := map[int64]bool{}, map[int64]bool{}
	began := time.Now()
	testkit.Eventually(t, "many different values are persisted, over some seconds", func() bool {
		value, text, _ := strings.Cut(pgtest.Query[string](t, cfg.Postgres, `select coalesce((select value || ' ' || encode(coalesce(registers, ''), 'hex')
			from headcount_counters left join headcount_registers using (set_id) where key = 'u:1'), '0 ')`), " ")
		bytes, err := hex.DecodeString(text)
		r, err1 := hyperloglog.Parse(bytes)
		if err := errors.Join(err, err1); err != nil || r.Count() != number(value) {
			t.Fatalf("value %s, registers of %d, %v", value, r.Count(), err)
		}
		registers[r.Count()] = true
		f := strings.SplitN(pgtest.Query[string](t, cfg.Postgres, `select coalesce((select concat_ws(' ', value,
			coalesce((select sum(count) from headcount_dimensions d where d.history_id = c.history_id and c.history_id <> 0), 0),
			coalesce((select sum(gain) from headcount_gains g where g.history_id = c.history_id and step = 1), 0), ltrim(slots))
			from headcount_counters c where key = 'v:1'), '0 0 0')`), " ", 4)
		gained := number(f[2])
		if len(f) == 4 {
			slots, err := counter.ParseSlots(f[3])
			if err != nil {
				t.Fatal(err)
			}
			for _, slot := range slots {
				if slot.Step == 1 {
					gained += slot.Value
				}
			}
		}
		if gained != number(f[0]) || f[1] != f[0] {
			t.Fatalf("%q: %d were gained", f, gained)
		}
		sums[gained] = true
		return len(registers) > 10 && len(sums) > 10 && time.Since(began) > 2*time.Second
	})
	close(stop)
	<-ended
}

// TestClockAnOrderlyEndPersistsAll: after a server was stopped PostgreSQL has everything, however long the persist interval is.
func TestClockAnOrderlyEndPersistsAll(t *testing.T) {
	cfg := tiered.Config{Rules: countertest.Rules, Redis: redistest.Dial(t, redistest.Start(t).URL()), Postgres: pgtest.Single(t).Database(t), PersistInterval: time.Hour}
	s := open(t, cfg)
	apply(t, s, op("", view("v:1", "shop")))
	const patience = 2 * time.Second // of an end
	watch, began := testkit.NewStopwatch(t), time.Now()
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	late := time.Since(began) > patience && watch.Elapsed() < patience // for want of a machine
	if is := row(t, cfg.Postgres, "v:1"); is != 1 && !late {
		t.Errorf("PostgreSQL has %d, want 1", is)
	}
}
