package presencetest

import (
	"cmp"
	"slices"
	"testing"

	"headcount/presence"
)

func attach(t *testing.T, s Store) {
	w := claim(t, s, 3)
	p := w.set("p", 4)
	want := []presence.Count{{Page: "q"}, p, {Page: presence.AllPages}}
	for what, read := range map[string]func([]presence.Topic) ([]presence.Update, error){
		"Attach":  func(list []presence.Topic) ([]presence.Update, error) { return s.Attach(t.Context(), "g1", list) },
		"Updates": func(list []presence.Topic) ([]presence.Update, error) { return s.Updates(t.Context(), list) },
	} {
		updates, err := read(topics("q", "p", presence.AllPages))
		if err != nil || len(updates) != len(want) {
			t.Fatalf("%s = %+v, %v", what, updates, err)
		}
		for i, u := range updates {
			if c, ok := presence.CountOf(u); !ok || c != want[i] || u.Check() != nil {
				t.Errorf("%s = %+v, want %+v", what, u, want[i])
			}
		}
	}
}

// unknownTopics checks that a store carries topics of a kind that only a newer
// process knows.
func unknownTopics(t *testing.T, s Store) {
	list := []presence.Topic{
		{Kind: presence.KindOf("later"), Key: "p"}, {Kind: presence.KindCount, Key: "p"}, {Site: presence.SiteOf("other"), Kind: presence.KindOf("later"), Key: "p"},
	}
	e := listen(t, s, allBuckets())
	claim(t, s, 3).set("p", 4)
	updates, err := s.Attach(t.Context(), "g", list)
	if err != nil || len(updates) != len(list) {
		t.Fatalf("Attach = %+v, %v", updates, err)
	}
	for i, u := range updates {
		if known := i == 1; u.Topic != list[i] || (u.Version != presence.Version{}) != known || (u.Value != "") != known {
			t.Errorf("%s reads as %+v", list[i], u)
		}
	}
	e.until(t, "the count's endpoint", func() bool { return e.ends[presence.Endpoint{Topic: list[1], Gateway: "g"}] })
	if err := s.Detach(t.Context(), "g", list); err != nil {
		t.Error(err)
	}
}

// sitesApart checks that pages, users and changes with the same key on several sites are
// independent.
func sitesApart(t *testing.T, s Store) {
	shop, blog := presence.SiteOf("shop"), presence.SiteOf("blog")
	sites := []presence.Site{presence.DefaultSite, shop, blog}
	e := listen(t, s, allBuckets())
	w := claim(t, s, 3)
	var list []presence.Topic
	for _, site := range sites {
		for _, key := range []string{"p", "a/b", presence.AllPages} {
			list = append(list, presence.Topic{Site: site, Kind: presence.KindCount, Key: key})
		}
	}
	if _, err := s.Attach(t.Context(), "g", list); err != nil {
		t.Fatal(err)
	}
	var members []presence.MemberChange
	var counts []presence.PageUsers
	users := map[string]int64{}
	for i, topic := range list[:len(list)-1] { // nobody is in the last
		users[topic.Name()] = int64(i + 1)
		counts = append(counts, presence.PageUsers{Page: topic.Name(), Users: int64(i + 1)})
		if topic.Key != presence.AllPages {
			members = append(members, presence.MemberChange{Member: presence.Member{User: 3, Page: topic.Name()}})
		}
	}
	o := s.Write(t.Context(), []presence.Change{w.change(members, counts...)})
	if o[0].Err != nil {
		t.Fatal(o[0].Err)
	}
	for i, c := range o[0].Counts {
		if c.Page != counts[i].Page || c.Users != counts[i].Users {
			t.Errorf("written %+v, answered %+v", counts[i], c)
		}
	}
	updates, err := s.Updates(t.Context(), list)
	if err != nil {
		t.Fatal(err)
	}
	for i, topic := range list {
		wantUsers(t, s, topic.Name(), users[topic.Name()])
		if c, ok := presence.CountOf(updates[i]); !ok || updates[i].Topic != topic || c.Page != topic.Name() || c.Users != users[topic.Name()] {
			t.Errorf("%s reads as %+v", topic, updates[i])
		}
	}
	e.until(t, "the counts of all sites", func() bool {
		for name, n := range users {
			if e.counts[name].Users != n {
				return false
			}
		}
		return true
	})
	e.until(t, "the endpoints of all sites", func() bool {
		for _, topic := range list {
			if !e.ends[presence.Endpoint{Topic: topic, Gateway: "g"}] {
				return false
			}
		}
		return true
	})
	for _, topic := range list {
		if got := attached(t, s, topic.Name()); !slices.Equal(got, []string{"g"}) {
			t.Errorf("attached to %s: %v", topic, got)
		}
	}
	if missing, err := s.Missing(t.Context(), "g", list); err != nil || len(missing) != 0 {
		t.Errorf("Missing = %v, %v", missing, err)
	}
	var pages []string
	for _, m := range load(t, s, claim(t, s, 3).claim).Members {
		pages = append(pages, m.Page)
	}
	slices.Sort(pages)
	var want []string
	for _, m := range members {
		want = append(want, m.Page)
	}
	slices.Sort(want)
	if !slices.Equal(pages, want) {
		t.Errorf("members on %q, want %q", pages, want)
	}
	if err := s.Detach(t.Context(), "g", list[3:4]); err != nil {
		t.Fatal(err)
	}
	if missing, err := s.Missing(t.Context(), "g", list); err != nil || !slices.Equal(missing, list[3:4]) {
		t.Errorf("Missing = %v, %v; want %v", missing, err, list[3:4])
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
		if got := attached(t, s, "p"); !slices.Equal(got, step.want) {
			t.Fatalf("after %+v: %v", step, got)
		}
		for _, gw := range []string{"g1", "g2", "g"} {
			missing, err := s.Missing(t.Context(), gw, topics("p", "never"))
			want := topics("p", "never")
			if slices.Contains(step.want, gw) {
				want = topics("never")
			}
			slices.SortFunc(missing, func(a, b presence.Topic) int { return cmp.Compare(b.Key, a.Key) })
			if err != nil || !slices.Equal(missing, want) {
				t.Fatalf("after %+v %s misses %v, %v; want %v", step, gw, missing, err, want)
			}
		}
	}
}
