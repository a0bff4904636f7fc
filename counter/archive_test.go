package counter_test

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"

	"headcount/counter"
	"headcount/counter/countertest"
)

var archived = &counter.Rule{Match: "u:*", Kind: counter.Unique, Resolutions: []counter.Resolution{
	{Step: time.Minute, Kept: 6 * time.Hour}, {Step: time.Hour, Kept: 30 * 24 * time.Hour},
}}

// counting is a store that counts the records that are read.
type counting struct {
	counter.Store
	records int
	stale   bool  // as while a region is silent
	late    int64 // number of a time bucket that gets a late member; 0: none
}

func (c *counting) History(
	ctx context.Context, key string, step time.Duration, from, to int64,
) (counter.Counter, []counter.Gain, error) {
	is, gains, err := c.Store.History(ctx, key, step, from, to)
	is.Stale = c.stale

	c.records += len(gains)
	for i := range gains {
		if gains[i].Number == c.late {
			gains[i].Seen.Add("late")
		}
	}
	if c.stale {
		gains = nil
	}

	return is, gains, err
}

func visit(t rapid.TB, s counter.Store, key string, members ...string) {
	t.Helper()
	change(t, s, counter.Change{Key: key, Rule: archived, Verb: counter.Edit, Join: members})
}

func change(t rapid.TB, s counter.Store, c counter.Change) {
	t.Helper()
	if r := s.Apply(context.Background(), []counter.Op{{Changes: []counter.Change{c}}})[0]; r.Err != nil {
		t.Fatal(r.Err)
	}
}

// direct answers from the store, without an archive.
func direct(t rapid.TB, s counter.Store, key string, q counter.Question) counter.Answer {
	t.Helper()
	_, gains, err := s.History(context.Background(), key, q.Step, q.From, q.To)
	if err != nil {
		t.Fatal(err)
	}

	tally := q.Tally()
	tally.Add(gains)

	return tally.Answer()
}

func ask(t rapid.TB, a *counter.Archive, key string, q counter.Question) counter.Answer {
	t.Helper()
	out, is, err := a.Ask(context.Background(), archived, key, q)
	if err != nil || is.Key != key {
		t.Fatalf("the archive answers %+v, %v; want the counter %q", is, err, key)
	}

	return out
}

// TestArchive: an archive answers any question as the store does, in any order, while members come, counters are
// deleted and regions are silent.
func TestArchive(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		synctest.Test(t, func(*testing.T) {
			store := &counting{Store: countertest.InMemory(t, nil)}
			defer store.Close()

			archive := counter.NewArchive(store)

			// A question is a window, or a range with random ends and steps. Some questions are impossible.
			question := func() (counter.Question, error) {
				now := time.Now()
				if rapid.Bool().Draw(rt, "window") {
					return archived.Window(time.Duration(rapid.IntRange(1, 30*24*60).Draw(rt, "last"))*time.Minute, now)
				}

				each := rapid.SampledFrom([]time.Duration{
					0, time.Minute, 5 * time.Minute, 45 * time.Minute, time.Hour, 7 * time.Hour, 24 * time.Hour,
				}).Draw(rt, "step")

				var from, to time.Time
				if rapid.Bool().Draw(rt, "from") {
					from = now.Add(-time.Duration(rapid.IntRange(1, 29*24*60).Draw(rt, "ago")) * time.Minute)
				}
				if rapid.Bool().Draw(rt, "to") {
					to = now.Add(-time.Duration(rapid.IntRange(-60, 10*24*60).Draw(rt, "until")) * time.Minute)
				}

				return archived.Range(from, to, each, now)
			}

			for range rapid.IntRange(10, 60).Draw(rt, "turns") {
				key := rapid.SampledFrom([]string{"u:1", "u:2"}).Draw(rt, "key")
				store.stale = rapid.IntRange(0, 9).Draw(rt, "silent") == 0
				switch rapid.IntRange(0, 9).Draw(rt, "turn") {
				case 0, 1, 2, 3:
					visit(rt, store, key, fmt.Sprint(rapid.IntRange(0, 50).Draw(rt, "member")))
				case 4, 5:
					time.Sleep(time.Duration(rapid.IntRange(1, 3*3600).Draw(rt, "sleep")) * time.Second)
				case 6:
					change(rt, store, counter.Change{Key: key, Rule: archived, Verb: counter.Delete})
				default:
					q, err := question()
					if err != nil {
						continue
					}
					if store.stale {
						ask(rt, archive, key, q) // an incomplete answer must not be remembered
						store.stale = false
					}

					want := direct(rt, store, key, q)
					got := ask(rt, archive, key, q)
					if got.Total != want.Total || !slices.Equal(got.Values, want.Values) {
						rt.Fatalf("%+v: %d %v\nwant %d %v", q, got.Total, got.Values, want.Total, want.Values)
					}
				}
			}
		})
	})
}

// TestArchiveForgets: an archive forgets a deleted counter, and reads again what it read while a region was missing.
func TestArchiveForgets(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := &counting{Store: countertest.InMemory(t, nil), stale: true}
		defer store.Close()
		archive := counter.NewArchive(store)

		visit(t, store, "u:1", "a", "b")
		time.Sleep(2 * time.Hour)
		visit(t, store, "u:1", "c")

		window, err := archived.Window(6*time.Hour, time.Now())
		if err != nil {
			t.Fatal(err)
		}
		each, err := archived.Range(time.Time{}, time.Time{}, time.Hour, time.Now())
		if err != nil {
			t.Fatal(err)
		}

		// The total and the sum of the points must both be right.
		check := func(what string, total int64) {
			t.Helper()
			for _, q := range []counter.Question{window, each} {
				got, is, err := archive.Ask(t.Context(), archived, "u:1", q)

				seen := int64(0)
				for _, n := range got.Values {
					seen += n
				}
				if err != nil || got.Total != total || q.Points > 0 && seen != total || is.Stale != store.stale {
					t.Errorf("%s: the archive answers %+v of %+v, %v; want the total %d", what, got, is, err, total)
				}
			}
		}

		check("a region is missing", 0)
		store.stale = false
		check("it is back", 3)
		check("again", 3)

		change(t, store, counter.Change{Key: "u:1", Rule: archived, Verb: counter.Delete})
		check("deleted", 0)

		visit(t, store, "u:1", "d")
		check("made anew", 1)
	})
}

// TestArchiveReadsLittle: after the first question no answer reads more than about 200 records, however long the time
// in question is. A late member is included after an hour at most.
func TestArchiveReadsLittle(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		now := time.Now
		rule := &counter.Rule{
			Match: "u:*", Kind: counter.Unique,
			Resolutions: []counter.Resolution{{Step: time.Hour, Kept: 90 * 24 * time.Hour}},
		}
		store := &counting{Store: countertest.InMemory(t, nil)}
		defer store.Close()

		see := func(member string) {
			change(t, store, counter.Change{Key: "u:1", Rule: rule, Verb: counter.Edit, Join: []string{member}})
		}

		// One new visitor an hour, for a little more than is kept.
		for hour := range 90*24 + 5 {
			see(fmt.Sprint("visitor ", hour))
			time.Sleep(time.Hour)
		}

		archive := counter.NewArchive(store)
		day := 24 * time.Hour

		window, err := rule.Window(90*day, now())
		if err != nil {
			t.Fatal(err)
		}
		hours, err := rule.Range(now().Add(-60*day), time.Time{}, time.Hour, now())
		if err != nil {
			t.Fatal(err)
		}
		days, err := rule.Range(now().Add(-89*day), time.Time{}, day, now())
		if err != nil {
			t.Fatal(err)
		}

		for what, q := range map[string]counter.Question{
			"90 days": window, "1,440 hours": hours, "each of 90 days": days,
		} {
			// The first answer reads everything, and the second one only what may have changed.
			for _, most := range []int{2200, 200} {
				store.records = 0
				got, _, err := archive.Ask(t.Context(), rule, "u:1", q)
				if err != nil || store.records > most {
					t.Errorf("%s: %d records were read, want %d at most; %v", what, store.records, most, err)
				}
				want := direct(t, store, "u:1", q)
				if got.Total != want.Total || !slices.Equal(got.Values, want.Values) {
					t.Errorf("%s: %+v, want %+v", what, got, want)
				}
			}
		}

		before, _, err := archive.Ask(t.Context(), rule, "u:1", window)
		if err != nil {
			t.Fatal(err)
		}

		// A late member is added to an hour that the archive has read long before.
		store.late = now().Add(-50*day).Unix() / 3600
		time.Sleep(time.Hour + time.Second)
		if got, _, err := archive.Ask(t.Context(), rule, "u:1", window); err != nil || got.Total != before.Total+1 {
			t.Errorf("the total is %d, %v; want %d and the late member", got.Total, err, before.Total)
		}
	})
}
