package presencetest

import (
	"cmp"
	"fmt"
	"slices"
	"testing"

	"headcount/presence"
)

// twin is the page "p" of another site.
var twin = presence.SiteOf("shop").Qualify("p")

// unknownTopics checks that a store distributes topics of kinds that only newer processes know.
func unknownTopics(t *testing.T, s Store) {
	list := []presence.Topic{
		{Kind: presence.KindOf("later"), Key: "p"}, {Kind: presence.KindCount, Key: "p"},
		{Site: presence.SiteOf("other"), Kind: presence.KindOf("later"), Key: "p"},
	}

	e := listen(t, s, allBuckets())
	claim(t, s, 3).set("p", 4)

	updates, err := s.Attach(t.Context(), "g", list)
	if err != nil || len(updates) != len(list) {
		t.Fatalf("Attach = %+v, %v", updates, err)
	}

	for i, u := range updates {
		known := i == 1 // the store has no values of the other kinds
		if u.Topic != list[i] || (u.Version != presence.Version{}) != known || (u.Value != "") != known {
			t.Errorf("%s reads as %+v", list[i], u)
		}
	}

	e.until(t, "the count's endpoint", func() bool { return e.ends[presence.Endpoint{Topic: list[1], Gateway: "g"}] })

	if err := s.Detach(t.Context(), "g", list); err != nil {
		t.Error(err)
	}
}

func topics(pages ...string) []presence.Topic { return presence.CountTopics(pages) }

func attached(t testing.TB, s presence.Store, page string) []string {
	t.Helper()
	all, err := s.Attached(t.Context(), presence.Bucket(page, presence.DefaultBuckets))
	if err != nil {
		t.Fatal(err)
	}

	var gws []string
	for _, e := range all {
		if e.Topic == presence.CountTopic(page) && !e.Gone {
			gws = append(gws, e.Gateway)
		}
	}

	slices.Sort(gws)
	return gws
}

func endpoints(t *testing.T, s Store) {
	e := listen(t, s, allBuckets())
	// The page of the same name on another site keeps its endpoint all the time.
	if _, err := s.Attach(t.Context(), "g1", topics(twin)); err != nil {
		t.Fatal(err)
	}

	for _, step := range []struct {
		gateway string
		gone    bool
		want    []string
	}{
		{"g1", false, []string{"g1"}},
		{"g1", false, []string{"g1"}},
		{"g2", false, []string{"g1", "g2"}},
		{"g1", true, []string{"g2"}},
		{"g1", true, []string{"g2"}},
		{"g2", true, nil},
	} {
		var err error
		if step.gone {
			err = s.Detach(t.Context(), step.gateway, topics("p"))
		} else {
			_, err = s.Attach(t.Context(), step.gateway, topics("p"))
		}
		if err != nil {
			t.Fatal(err)
		}

		// The watcher may receive an endpoint again, so its last state is compared.
		e.until(t, fmt.Sprintf("%+v", step), func() bool {
			there, known := e.ends[presence.Endpoint{Topic: presence.CountTopic("p"), Gateway: step.gateway}]
			return known && there != step.gone
		})

		if got := attached(t, s, "p"); !slices.Equal(got, step.want) {
			t.Fatalf("after %+v: %v", step, got)
		}
		if got := attached(t, s, twin); !slices.Equal(got, []string{"g1"}) {
			t.Fatalf("after %+v: %v are attached to the page of another site", step, got)
		}

		for _, gw := range []string{"g1", "g2", "g"} {
			missing, err := s.Missing(t.Context(), gw, topics("p", "never", twin))
			// Every gateway lacks the unknown page. Only g1 is attached to the page of the other site.
			want := topics("never", twin, "p")
			if gw == "g1" {
				want = slices.Delete(want, 1, 2)
			}
			if slices.Contains(step.want, gw) {
				want = want[:len(want)-1]
			}

			byName := func(a, b presence.Topic) int { return cmp.Compare(a.Name(), b.Name()) }
			slices.SortFunc(want, byName)
			slices.SortFunc(missing, byName)
			if err != nil || !slices.Equal(missing, want) {
				t.Fatalf("after %+v %s misses %v, %v; want %v", step, gw, missing, err, want)
			}
		}
	}
}
