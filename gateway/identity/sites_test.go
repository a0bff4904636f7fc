package identity

import (
	"errors"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"headcount/presence"
)

func sitesOf(t testing.TB, written ...string) *Sites {
	t.Helper()
	sites, err := NewSites(written)
	if err != nil {
		t.Fatal(err)
	}
	return sites
}

func TestSiteOfARequest(t *testing.T) {
	sites := sitesOf(t, "shop=https://shop.example,https://*.shop.example", "default=http://blog.example:8080", "wiki=https://wiki.example")
	for name, tc := range map[string]struct {
		path    string
		headers []string // name, value pairs
		want    string   // empty: unknown
	}{
		"nothing":                          {"/", nil, "shop"},
		"an origin":                        {"/", []string{"Origin", "https://wiki.example"}, "wiki"},
		"an origin by a *":                 {"/", []string{"Origin", "https://a.b.shop.example"}, "shop"},
		"an origin with its port":          {"/", []string{"Origin", "https://wiki.example:443"}, "wiki"},
		"an origin of the default site":    {"/", []string{"Origin", "http://blog.example:8080"}, "default"},
		"an origin with another port":      {"/", []string{"Origin", "http://blog.example"}, "shop"},
		"an origin of none":                {"/", []string{"Origin", "https://evil.example"}, "shop"},
		"an origin of none, and a name":    {"/?site=wiki", []string{"Origin", "https://evil.example"}, "wiki"},
		"the null origin":                  {"/", []string{"Origin", "null"}, "shop"},
		"an empty origin":                  {"/?site=wiki", []string{"Origin", ""}, "wiki"},
		"two origins":                      {"/", []string{"Origin", "https://wiki.example", "Origin", "https://shop.example"}, "shop"},
		"a header":                         {"/", []string{"Headcount-Site", "wiki"}, "wiki"},
		"a parameter":                      {"/p?a=b&site=wiki", nil, "wiki"},
		"a parameter, encoded":             {"/p?%73ite=%77iki", nil, "wiki"},
		"another parameter":                {"/p?sites=wiki&xsite=default", nil, "shop"},
		"both":                             {"/p?site=wiki", []string{"Headcount-Site", "wiki"}, "wiki"},
		"both, not the same":               {"/p?site=wiki", []string{"Headcount-Site", "shop"}, ""},
		"the origin's site holds":          {"/p?site=wiki", []string{"Origin", "https://shop.example"}, "shop"},
		"an unknown site":                  {"/p?site=other", nil, ""},
		"an unknown site in the header":    {"/", []string{"Headcount-Site", "Wiki"}, ""},
		"an unknown site beside an origin": {"/p?site=other", []string{"Origin", "https://shop.example"}, ""},
		"an empty name":                    {"/p?site=", nil, ""},
		"own page of a site":               {"/", []string{"Host", "blog.example:8080", "Sec-Fetch-Site", "same-origin"}, "default"},
		"own page that names another":      {"/?site=wiki", []string{"Host", "blog.example:8080", "Sec-Fetch-Site", "same-origin"}, "wiki"},
		"own page of no site":              {"/", []string{"Host", "counter.example", "Sec-Fetch-Site", "same-origin"}, "shop"},
		"the host alone says nothing":      {"/", []string{"Host", "blog.example:8080", "Sec-Fetch-Site", "cross-site"}, "shop"},
	} {
		r := httptest.NewRequest(http.MethodGet, tc.path, nil)
		for i := 0; i < len(tc.headers); i += 2 {
			if tc.headers[i] == "Host" {
				r.Host = tc.headers[i+1]
			} else {
				r.Header.Add(tc.headers[i], tc.headers[i+1])
			}
		}
		site, err := sites.Of(r, false)
		switch {
		case tc.want == "" && !errors.Is(err, ErrSite), tc.want != "" && (err != nil || site.Called() != tc.want):
			t.Errorf("%s: %q, %v, want %q", name, site.Called(), err, tc.want)
		}
	}
}

func TestOneSite(t *testing.T) {
	for want, sites := range map[string]*Sites{"default": sitesOf(t), "shop": sitesOf(t, "shop=https://shop.example")} {
		for path, known := range map[string]bool{"/": true, "/?site=" + want: true, "/?site=other": false} {
			site, err := sites.Of(httptest.NewRequest(http.MethodGet, path, nil), false)
			if known != (err == nil) || known && site.Called() != want {
				t.Errorf("%s of %s: %q, %v", path, want, site.Called(), err)
			}
		}
	}
}

// Two sites are refused exactly if an origin fits both.
func TestNoOriginIsInTwoSites(t *testing.T) {
	label := rapid.SampledFrom([]string{"*", "a", "b", "x"})
	host := rapid.SliceOfN(label, 1, 4)
	rapid.Check(t, func(t *rapid.T) {
		one, two := host.Draw(t, "one"), host.Draw(t, "two")
		// Whatever fits both is no longer than both together, and has no other labels that matter.
		both := false
		var try func(labels []string)
		try = func(labels []string) {
			if h := strings.Join(labels, "."); len(labels) > 0 && matchLabels(one, h) && matchLabels(two, h) {
				both = true
			}
			if len(labels) < 7 && !both {
				for _, l := range []string{"a", "b", "x"} {
					try(append(labels[:len(labels):len(labels)], l))
				}
			}
		}
		try(nil)
		_, err := NewSites([]string{"one=https://" + strings.Join(one, "."), "two=http://other.example,https://" + strings.Join(two, ".")})
		if refused := err != nil; refused != both {
			t.Fatalf("%v and %v: %v, and there is an origin of both: %v", one, two, err, both)
		}
	})
	for _, apart := range [][]string{
		{"a=https://x.example", "b=http://x.example"}, {"a=https://x.example", "b=https://x.example:8443"}, {"a=https://*.x.example", "b=https://x.example"},
	} {
		if _, err := NewSites(apart); err != nil {
			t.Errorf("%v: %v", apart, err)
		}
	}
}

func TestSiteKeys(t *testing.T) {
	sites := sitesOf(t, "shop=https://shop.example", "blog=https://blog.example")
	keys, err := NewSiteKeys([]string{"shop:s", "blog:b", "blog:both", "shop:both", "all", "other:all", "shop:a:b"}, sites)
	if err != nil {
		t.Fatal(err)
	}
	shop, blog := presence.NamespaceOf("shop"), presence.NamespaceOf("blog")
	for key, want := range map[string][]presence.Namespace{
		"s": {shop}, "b": {blog}, "both": {shop, blog}, "all": {shop, blog}, "other:all": {shop, blog}, "a:b": {shop}, "shop:s": nil, "x": nil, "": nil,
	} {
		var got []presence.Namespace
		for _, site := range sites.Names() {
			if keys.Holds(key, site) {
				got = append(got, site)
			}
		}
		if !slices.Equal(got, want) || keys.Has(key) != (len(want) > 0) {
			t.Errorf("%q holds for %v, want %v", key, got, want)
		}
		if whole, _ := keys.Sites(key); whole != strings.HasSuffix(key, "all") {
			t.Errorf("%q holds for all: %v", key, whole)
		}
	}
}

// A user of one site is nobody on another.
func TestUsersOfSites(t *testing.T) {
	ids, err := New(Config{IDSecrets: [][]byte{[]byte("secret")}})
	if err != nil {
		t.Fatal(err)
	}
	defer ids.Close()
	id, err := ids.Identify(httptest.NewRequest(http.MethodGet, "/", nil), false)
	if err != nil {
		t.Fatal(err)
	}
	shop := ids.In(presence.NamespaceOf("shop"), id)
	if same := ids.In(presence.DefaultSite, id); same != id {
		t.Errorf("the default site changes %+v to %+v", id, same)
	}
	if shop.Hash == id.Hash || shop.User != id.User || shop.Signed != id.Signed || shop != ids.In(presence.NamespaceOf("shop"), shop) {
		t.Errorf("%+v is %+v on a site", id, shop)
	}
}
