package identity

import (
	"errors"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"

	"github.com/golang-jwt/jwt/v5"
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
	sites := sitesOf(t, "shop=https://shop.example,https://*.shop.example", "default=http://blog.example:8080",
		"wiki=https://wiki.example")

	for name, tc := range map[string]struct {
		path    string
		headers []string // name, value pairs
		want    string   // empty: no site
	}{
		"nothing":                       {"/", nil, "shop"},
		"an origin":                     {"/", []string{"Origin", "https://wiki.example"}, "wiki"},
		"an origin by a *":              {"/", []string{"Origin", "https://a.b.shop.example"}, "shop"},
		"an origin with its port":       {"/", []string{"Origin", "https://wiki.example:443"}, "wiki"},
		"an origin of the default site": {"/", []string{"Origin", "http://blog.example:8080"}, "default"},
		"an origin with another port":   {"/", []string{"Origin", "http://blog.example"}, "shop"},
		"an origin of none":             {"/", []string{"Origin", "https://evil.example"}, "shop"},
		"an origin of none, and a name": {"/?site=wiki", []string{"Origin", "https://evil.example"}, "wiki"},
		"the null origin":               {"/", []string{"Origin", "null"}, "shop"},
		"an empty origin":               {"/?site=wiki", []string{"Origin", ""}, "wiki"},
		"two origins": {
			"/", []string{"Origin", "https://wiki.example", "Origin", "https://shop.example"}, "shop",
		},
		"a header":             {"/", []string{"Headcount-Site", "wiki"}, "wiki"},
		"a parameter":          {"/p?a=b&site=wiki", nil, "wiki"},
		"a parameter, encoded": {"/p?%73ite=%77iki", nil, "wiki"},
		"another parameter":    {"/p?sites=wiki&xsite=default", nil, "shop"},
		// Two names are accepted if they agree.
		"both":               {"/p?site=wiki", []string{"Headcount-Site", "wiki"}, "wiki"},
		"both, not the same": {"/p?site=wiki", []string{"Headcount-Site", "shop"}, ""},
		// The origin decides, or a page of one site could read the counts of another by naming it.
		"the origin's site holds":          {"/p?site=wiki", []string{"Origin", "https://shop.example"}, "shop"},
		"an unknown site":                  {"/p?site=other", nil, ""},
		"an unknown site in the header":    {"/", []string{"Headcount-Site", "Wiki"}, ""},
		"an unknown site beside an origin": {"/p?site=other", []string{"Origin", "https://shop.example"}, ""},
		"an empty name":                    {"/p?site=", nil, ""},
		// With a GET to the page's own origin a browser sends no Origin, but Sec-Fetch-Site.
		"own page of a site": {
			"/", []string{"Host", "blog.example:8080", "Sec-Fetch-Site", "same-origin"}, "default",
		},
		"own page that names another": {
			"/?site=wiki", []string{"Host", "blog.example:8080", "Sec-Fetch-Site", "same-origin"}, "wiki",
		},
		"own page of no site": {
			"/", []string{"Host", "counter.example", "Sec-Fetch-Site", "same-origin"}, "shop",
		},
		"the host alone says nothing": {
			"/", []string{"Host", "blog.example:8080", "Sec-Fetch-Site", "cross-site"}, "shop",
		},
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
		unknown := tc.want == ""
		if unknown && !errors.Is(err, errSite) || !unknown && (err != nil || site.Name() != tc.want) {
			t.Errorf("%s: %q, %v, want %q", name, site.Name(), err, tc.want)
		}
	}
}

func TestOneSite(t *testing.T) {
	for want, sites := range map[string]*Sites{"default": sitesOf(t), "shop": sitesOf(t, "shop=https://shop.example")} {
		// With a single site only a wrong name has an effect.
		for path, known := range map[string]bool{"/": true, "/?site=" + want: true, "/?site=other": false} {
			site, err := sites.Of(httptest.NewRequest(http.MethodGet, path, nil), false)
			if known != (err == nil) || known && site.Name() != want {
				t.Errorf("%s of %s: %q, %v", path, want, site.Name(), err)
			}
		}
	}
}

// Two sites are refused exactly if some origin fits both.
func TestNoOriginIsInTwoSites(t *testing.T) {
	label := rapid.SampledFrom([]string{"*", "a", "b", "x"})
	host := rapid.SliceOfN(label, 1, 4)

	rapid.Check(t, func(t *rapid.T) {
		one, two := host.Draw(t, "one"), host.Draw(t, "two")

		// An origin that fits both is no longer than both patterns together, and needs no other labels.
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
		_, err := NewSites([]string{
			"one=https://" + strings.Join(one, "."), "two=http://other.example,https://" + strings.Join(two, "."),
		})

		if refused := err != nil; refused != both {
			t.Fatalf("%v and %v: %v, and there is an origin of both: %v", one, two, err, both)
		}
	})

	for _, apart := range [][]string{
		{"a=https://x.example", "b=http://x.example"}, {"a=https://x.example", "b=https://x.example:8443"},
		{"a=https://*.x.example", "b=https://x.example"},
	} {
		if _, err := NewSites(apart); err != nil {
			t.Errorf("%v: %v", apart, err)
		}
	}
}

// A key is valid for the sites that it names, or for all.
func TestSiteKeys(t *testing.T) {
	sites := sitesOf(t, "shop=https://shop.example", "blog=https://blog.example")
	keys, err := NewSiteKeys([]string{
		"shop:s", "blog:b", "blog:both", "shop:both", "all", "other:all", "shop:a:b",
	}, sites)
	if err != nil {
		t.Fatal(err)
	}

	shop, blog := presence.SiteOf("shop"), presence.SiteOf("blog")

	for key, want := range map[string][]presence.Site{
		"s": {shop}, "b": {blog}, "both": {shop, blog}, "all": {shop, blog}, "other:all": {shop, blog}, "a:b": {shop},
		"shop:s": nil, "x": nil, "": nil,
	} {
		var got []presence.Site
		for _, site := range sites.Names() {
			if keys.Holds(key, site) {
				got = append(got, site)
			}
		}

		if !slices.Equal(got, want) || keys.Has(key) != (len(want) > 0) {
			t.Errorf("the key %q is valid for %v, want %v", key, got, want)
		}

		if whole, _ := keys.Sites(key); whole != strings.HasSuffix(key, "all") {
			t.Errorf("the key %q is valid for all sites: %v", key, whole)
		}
	}
}

// The id of a visitor on one site, which its pages know, is worthless on another site, wherever it is sent. Each site
// has its own cookie.
func TestUsersOfSites(t *testing.T) {
	ids := newTestIDs(t, Config{})
	shop, blog := presence.SiteOf("shop"), presence.SiteOf("blog")
	all := []presence.Site{presence.DefaultSite, shop, blog}
	cookies := map[presence.Site]string{
		presence.DefaultSite: "headcount_id", shop: "headcount_id_shop", blog: "headcount_id_blog",
	}

	for _, own := range all {
		id, err := ids.Identify(getRequest("/"), own, false)
		if err != nil || !id.Fresh || id.Site != own || id.Hash != ids.Hash(own.Qualify(id.User)) {
			t.Fatalf("%q: %+v, %v", own, id, err)
		}

		w := httptest.NewRecorder()
		ids.SetCookie(w, getRequest("/"), id, false)
		if got := w.Result().Cookies(); len(got) != 1 || got[0].Name != cookies[own] || got[0].Value != id.Signed {
			t.Errorf("%q sets the cookies %v, want its own", own, got)
		}

		for _, site := range all {
			for name, r := range map[string]*http.Request{
				"the URL": getRequest("/?id=" + id.Signed), "the header": getRequest("/", Header, id.Signed),
				"the cookie of the site": getRequest("/", "Cookie", cookies[site]+"="+id.Signed),
				"the cookie of its own":  getRequest("/", "Cookie", cookies[own]+"="+id.Signed),
			} {
				got := mustIdentifyOn(t, ids, r, site)
				if got.Fresh == (site == own) || !got.Fresh && got.Hash != id.Hash {
					t.Errorf("an id of %q in %s is accepted on %q as %+v", own, name, site, got)
				}
			}

			w := httptest.NewRecorder()
			ids.ForgetCookie(w, getRequest("/", "Cookie", cookies[own]+"="+id.Signed), site, false)
			if forgotten := len(w.Result().Cookies()) > 0; forgotten != (site == own) {
				t.Errorf("%q forgets the cookie of %q: %v", site, own, forgotten)
			}
		}
	}
}

// A token identifies its user on every site, but as another user on each.
func TestTokensOfSites(t *testing.T) {
	ids := newTestIDs(t, Config{JWTSecret: []byte("s3cret")})
	r := getRequest("/", "Authorization", "Bearer "+signToken(t, "s3cret", jwt.MapClaims{"sub": "ann"}))

	seen := map[presence.User]bool{}
	for _, site := range []presence.Site{presence.DefaultSite, presence.SiteOf("shop"), presence.SiteOf("blog")} {
		id := mustIdentifyOn(t, ids, r, site)
		if id.User != "ann" || id.Site != site || seen[id.Hash] {
			t.Errorf("on %q: %+v", site, id)
		}

		seen[id.Hash] = true
	}
}

func mustIdentifyOn(t testing.TB, ids *Identities, r *http.Request, site presence.Site) Identity {
	t.Helper()
	id, err := ids.Identify(r, site, true)
	if err != nil {
		t.Fatal(err)
	}
	return id
}

// A page on the server's own origin, if that is the origin of a site, belongs to that site. Only a browser's headers
// show it.
func TestElsewhere(t *testing.T) {
	sites := sitesOf(t, "shop=https://shop.example", "blog=http://blog.example:8080")
	shop, blog := presence.SiteOf("shop"), presence.SiteOf("blog")
	request := func(host, fetched string) *http.Request {
		r := getRequest("/", "Sec-Fetch-Site", fetched)
		r.Host = host
		return r
	}

	for name, tc := range map[string]struct {
		r      *http.Request
		secure bool
		site   presence.Site
		want   bool
	}{
		"own page of another site":  {request("blog.example:8080", "same-origin"), false, shop, true},
		"own page of the site":      {request("blog.example:8080", "same-origin"), false, blog, false},
		"over TLS":                  {request("shop.example", "same-origin"), true, blog, true},
		"own page of no site":       {request("counter.example", "same-origin"), false, shop, false},
		"another scheme":            {request("shop.example", "same-origin"), false, blog, false},
		"a page of another origin":  {request("blog.example:8080", "cross-site"), false, shop, false},
		"a page beside":             {request("blog.example:8080", "same-site"), false, shop, false},
		"an address that was typed": {request("blog.example:8080", "none"), false, shop, false},
		"no browser":                {request("blog.example:8080", ""), false, shop, false},
	} {
		if got := sites.Elsewhere(tc.r, tc.secure, tc.site); got != tc.want {
			t.Errorf("%s: Elsewhere is %v, want %v", name, got, tc.want)
		}
	}

	if sitesOf(t, "shop=https://shop.example").Elsewhere(request("shop.example", "same-origin"), true, blog) {
		t.Error("with a single site a page is elsewhere")
	}
}
