package identity

import (
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"

	"headcount/presence"
)

// SiteHeader is the header in which a request names its site. The parameter "site" of the
// URL does the same.
const SiteHeader = "Headcount-Site"

const siteParameter = "site"

// What a browser says of a request of a page to its own origin.
const (
	fetchSite  = "Sec-Fetch-Site"
	sameOrigin = "same-origin"
)

// ErrSite is in every error about a request that names no site of the server.
var ErrSite = errors.New("unknown site")

// Sites are the sites of one server. They never change, so any goroutine may use them.
type Sites struct{ list []Site }

// Site is one site of a server.
type Site struct {
	presence.Site
	Origins []string // those of its pages, as they were written

	origins *Origins
}

// NewSites reads sites of the form name=origin,origin. An origin is a pattern as that of
// NewOrigins. No origin is in two sites. Without any there is the default site alone, whose
// origins NewOrigins knows.
func NewSites(written []string) (*Sites, error) {
	if len(written) == 0 {
		return &Sites{list: []Site{{origins: &Origins{}}}}, nil
	}
	s := &Sites{}
	for _, text := range written {
		if err := s.add(text); err != nil {
			return nil, fmt.Errorf("site: %q: %w", presence.Excerpt(text), err)
		}
	}
	if len(s.list) > presence.MaxSites {
		return nil, fmt.Errorf("site: there are %d sites; one server has at most %d", len(s.list), presence.MaxSites)
	}
	return s, nil
}

func (s *Sites) add(text string) error {
	name, list, ok := strings.Cut(text, "=")
	if !ok {
		return errors.New("the name is missing; write name=origin, such as shop=https://shop.example")
	}
	site := Site{}
	var err error
	if site.Site, err = presence.ParseSite(strings.TrimSpace(name)); err != nil {
		return err
	}
	for origin := range strings.SplitSeq(list, ",") {
		if origin = strings.TrimSpace(origin); origin != "" {
			site.Origins = append(site.Origins, origin)
		}
	}
	if len(site.Origins) == 0 {
		return errors.New("its origins are missing; name those of its pages, such as https://shop.example")
	}
	if site.origins, err = NewOrigins(site.Origins); err != nil {
		return errors.New(strings.TrimPrefix(err.Error(), "allow-origins: "))
	}
	for _, other := range s.list {
		if other.Site == site.Site {
			return fmt.Errorf("the site %q is there twice; name all its origins in one --site", site.Name())
		}
		if one, both := site.origins.shares(other.origins); both {
			return fmt.Errorf("its origin %q is one of the site %q, too; an origin belongs to one site", one, other.Name())
		}
	}
	s.list = append(s.list, site)
	return nil
}

// All are the sites in the order in which they were written, not to be changed. The first
// is that of calls that name none.
func (s *Sites) All() []Site { return s.list }

// Names are the names of the sites.
func (s *Sites) Names() []presence.Site {
	names := make([]presence.Site, len(s.list))
	for i, site := range s.list {
		names[i] = site.Site
	}
	return names
}

// Origins are those of all sites.
func (s *Sites) Origins() []string {
	var all []string
	for _, site := range s.list {
		all = append(all, site.Origins...)
	}
	return all
}

// Of returns the site of a request: the one whose origins its Origin matches; else the one
// that it names; else, if a page of the server's own origin sent it, the one that has this
// origin; else the first. (A browser sends no Origin when a page reads from its own.) secure
// says whether the client speaks TLS. The error is ErrSite.
func (s *Sites) Of(r *http.Request, secure bool) (presence.Site, error) {
	named, err := s.named(r)
	if err != nil {
		return presence.DefaultSite, err
	}
	if len(s.list) == 1 {
		return s.list[0].Site, nil
	}
	if values := r.Header["Origin"]; len(values) == 1 {
		if from, ok := parseOrigin(values[0]); ok {
			if site := s.with(from); site != nil {
				return site.Site, nil
			}
		}
	}
	if named != nil {
		return named.Site, nil
	}
	if r.Header.Get(fetchSite) == sameOrigin {
		return s.Own(r, secure), nil
	}
	return s.list[0].Site, nil
}

// Own returns the site of the server's own pages, as r names the server: the one that has
// their origin, else the first.
func (s *Sites) Own(r *http.Request, secure bool) presence.Site {
	if site := s.with(ownOrigin(r.Host, secure)); site != nil {
		return site.Site
	}
	return s.list[0].Site
}

// Elsewhere reports whether a page of another site has sent r, which is for this one. That is
// a page of the server's own origin: the Origin of any other page decides in Of. Such a page may
// read what is public of all sites, but not act as its visitor there.
func (s *Sites) Elsewhere(r *http.Request, secure bool, site presence.Site) bool {
	return len(s.list) > 1 && r.Header.Get(fetchSite) == sameOrigin && s.Others(r, secure, site)
}

// Others reports whether the server's own origin, as r names the server, is that of another site
// than this one.
func (s *Sites) Others(r *http.Request, secure bool, site presence.Site) bool {
	own := s.with(ownOrigin(r.Host, secure))
	return own != nil && own.Site != site
}

// with returns the site that the origin belongs to, or nil.
func (s *Sites) with(from webOrigin) *Site {
	for i := range s.list {
		if s.list[i].origins.has(from) {
			return &s.list[i]
		}
	}
	return nil
}

// named returns the site that a request names, or nil if it names none.
func (s *Sites) named(r *http.Request) (site *Site, err error) {
	take := func(name string) {
		i := slices.IndexFunc(s.list, func(of Site) bool { return of.Name() == name })
		switch {
		case i < 0:
			err = fmt.Errorf("%w: there is no site %s; name one of --site in the header %s, or as ?site=name", ErrSite, strconv.Quote(presence.Excerpt(name)), SiteHeader)
		case site != nil && site != &s.list[i]:
			err = fmt.Errorf("%w: the request names two sites; name one", ErrSite)
		default:
			site = &s.list[i]
		}
	}
	for _, name := range r.Header[SiteHeader] {
		take(name)
	}
	if strings.Contains(r.URL.RawQuery, "=") {
		for name := range queryValues(r.URL.RawQuery, siteParameter) {
			take(name)
		}
	}
	return site, err
}

// has reports whether the origin is one of the patterns.
func (o *Origins) has(from webOrigin) bool {
	return o.everyone || o.exact[from] || slices.ContainsFunc(o.globs, func(g originGlob) bool {
		return g.scheme == from.scheme && g.port == from.port && matchLabels(g.labels, from.host)
	})
}

// patterns are all patterns but *, each as one with labels.
func (o *Origins) patterns() []originGlob {
	all := slices.Clone(o.globs)
	for from := range o.exact {
		all = append(all, originGlob{from.scheme, from.port, strings.Split(from.host, ".")})
	}
	return all
}

// shares reports whether there is an origin that both allow, and names the pattern of o that
// allows it.
func (o *Origins) shares(other *Origins) (pattern string, both bool) {
	switch {
	case o.everyone:
		return "*", true
	case other.everyone:
		return o.patterns()[0].String(), true
	}
	for _, a := range o.patterns() {
		for _, b := range other.patterns() {
			if a.scheme == b.scheme && a.port == b.port && shareLabels(a.labels, b.labels) {
				return a.String(), true
			}
		}
	}
	return "", false
}

func (g originGlob) String() string {
	port := g.port
	if port != "" {
		port = ":" + port
	}
	return g.scheme + "://" + strings.Join(g.labels, ".") + port
}

// shareLabels reports whether a host fits both patterns, in each of which * stands for one
// or more labels. It follows both label by label, through all pairs of places that a host
// can lead to; so the time is bounded by the product of both lengths.
func shareLabels(a, b []string) bool {
	type place struct{ a, b int } // labels that are behind
	next := []place{{}}
	seen := map[place]bool{{}: true}
	for len(next) > 0 {
		at := next[len(next)-1]
		next = next[:len(next)-1]
		if at.a == len(a) && at.b == len(b) {
			return true
		}
		if at.a == len(a) || at.b == len(b) {
			continue
		}
		anyA, anyB := a[at.a] == "*", b[at.b] == "*"
		if !anyA && !anyB && a[at.a] != b[at.b] {
			continue
		}
		onward := []place{{at.a + 1, at.b + 1}}
		if anyA { // it takes one more
			onward = append(onward, place{at.a, at.b + 1})
		}
		if anyB {
			onward = append(onward, place{at.a + 1, at.b})
		}
		for _, p := range onward {
			if !seen[p] {
				seen[p] = true
				next = append(next, p)
			}
		}
	}
	return false
}

// SiteKeys are API keys of which each holds for all sites or for one.
type SiteKeys struct {
	APIKeys // all of them
	of      []siteKey
}

// siteKey says what the key in the same place of APIKeys holds for.
type siteKey struct {
	site presence.Site
	any  bool // it holds for all sites
}

// NewSiteKeys reads keys. One that begins with the name of a site and a colon holds for that
// site, and the key is what follows.
func NewSiteKeys(written []string, sites *Sites) (SiteKeys, error) {
	var keys SiteKeys
	var plain []string
	for _, text := range written {
		one := siteKey{any: true}
		site, key := sites.SplitKey(text)
		if site != nil {
			one = siteKey{site: site.Site}
			if key == "" {
				return SiteKeys{}, fmt.Errorf("api-key: the key of the site %q is empty; write %s:KEY", site.Name(), site.Name())
			}
		}
		keys.of, plain = append(keys.of, one), append(plain, key)
	}
	keys.APIKeys = NewAPIKeys(plain)
	return keys, nil
}

// SplitKey returns the site that a key holds for, nil for all of them, and the key itself.
func (s *Sites) SplitKey(written string) (of *Site, key string) {
	name, key, ok := strings.Cut(written, ":")
	for i := range s.list {
		if ok && s.list[i].Name() == name {
			return &s.list[i], key
		}
	}
	return nil, written
}

// Holds reports whether a key of these holds for the site.
func (k SiteKeys) Holds(key string, site presence.Site) bool {
	whole, sites := k.Sites(key)
	return whole || slices.Contains(sites, site)
}

// Sites returns the sites that a key holds for: all of them (whole), or these.
func (k SiteKeys) Sites(key string) (whole bool, sites []presence.Site) {
	for i, one := range k.of {
		switch {
		case !k.APIKeys[i : i+1].Has(key):
		case one.any:
			whole = true
		default:
			sites = append(sites, one.site)
		}
	}
	return whole, sites
}

// Bound reports whether any key holds for one site alone.
func (k SiteKeys) Bound() bool {
	return slices.ContainsFunc(k.of, func(one siteKey) bool { return !one.any })
}
