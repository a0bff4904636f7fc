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

// The header and value that a browser sends when a page calls its own origin.
const (
	fetchSite  = "Sec-Fetch-Site"
	sameOrigin = "same-origin"
)

// errSite is wrapped by every error about a request that names a site unknown to the server.
var errSite = errors.New("unknown site")

// Sites are the sites of one server. They never change, so any goroutine may use them.
type Sites struct{ list []Site }

// Site is one site of a server.
type Site struct {
	presence.Site
	Origins []string // of its pages, as they were written

	origins *Origins
}

// NewSites parses sites of the form name=origin,origin. An origin is a pattern as in
// NewOrigins. No origin may belong to two sites. An empty list means only the default site,
// without origins of its own.
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
	site.Site, err = presence.ParseSite(strings.TrimSpace(name))
	if err != nil {
		return err
	}

	for origin := range strings.SplitSeq(list, ",") {
		origin = strings.TrimSpace(origin)
		if origin != "" {
			site.Origins = append(site.Origins, origin)
		}
	}

	if len(site.Origins) == 0 {
		return errors.New("its origins are missing; name those of its pages, such as https://shop.example")
	}

	site.origins, err = NewOrigins(site.Origins)
	if err != nil {
		// The text names another setting.
		return errors.New(strings.TrimPrefix(err.Error(), "allow-origins: "))
	}

	// An origin leads to one site, or Of would depend on the order of the settings.
	for _, other := range s.list {
		if other.Site == site.Site {
			return fmt.Errorf("the site %q is given twice; name all its origins in one --site", site.Name())
		}

		if one, both := site.origins.shares(other.origins); both {
			return fmt.Errorf("its origin %q is one of the site %q, too; an origin belongs to one site",
				one, other.Name())
		}
	}

	s.list = append(s.list, site)

	return nil
}

// All returns the sites in the order of the settings; the caller must not change them. A call
// that names no site is for the first one.
func (s *Sites) All() []Site { return s.list }

// Names returns the names of the sites.
func (s *Sites) Names() []presence.Site {
	names := make([]presence.Site, len(s.list))
	for i, site := range s.list {
		names[i] = site.Site
	}

	return names
}

// Origins returns the origins of all sites.
func (s *Sites) Origins() []string {
	var all []string
	for _, site := range s.list {
		all = append(all, site.Origins...)
	}

	return all
}

// Of returns the site of a request: the site with the request's Origin; else the site that the
// request names; else, if a page on the server's own origin sent it, the site with this origin;
// else the first. (A browser sends no Origin when a page reads from its own origin.) secure says
// whether the client uses TLS. The error wraps errSite.
func (s *Sites) Of(r *http.Request, secure bool) (presence.Site, error) {
	// A wrong name is refused even where the Origin decides, since it is a mistake of the page.
	named, err := s.named(r)
	if err != nil {
		return presence.DefaultSite, err
	}

	// Without other sites the Origin decides only whether a page may act, see Origins.
	if len(s.list) == 1 {
		return s.list[0].Site, nil
	}

	// The Origin comes before the name, or a page could act for another site by naming it.
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

	// Scripts cannot set this header, so the page is one of the server's own origin.
	if r.Header.Get(fetchSite) == sameOrigin {
		return s.Own(r, secure), nil
	}

	return s.list[0].Site, nil
}

// Own returns the site with the server's own origin, according to r's Host, or else the first
// site.
func (s *Sites) Own(r *http.Request, secure bool) presence.Site {
	if site := s.with(ownOrigin(r.Host, secure)); site != nil {
		return site.Site
	}

	return s.list[0].Site
}

// Elsewhere reports whether a page of another site sent r to this site. Only a page on the
// server's own origin can do so, because for any other page the Origin decides in Of. Such a page
// may read public data of all sites, but must not act as its visitor on another site.
func (s *Sites) Elsewhere(r *http.Request, secure bool, site presence.Site) bool {
	return len(s.list) > 1 && r.Header.Get(fetchSite) == sameOrigin && s.Others(r, secure, site)
}

// Others reports whether the server's own origin, according to r's Host, belongs to another
// site than this one.
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
		if i < 0 {
			err = fmt.Errorf("%w: there is no site %s; name one of --site in the header %s, or as ?site=name",
				errSite, strconv.Quote(presence.Excerpt(name)), SiteHeader)
			return
		}

		// Both the header and the URL may name the site, as long as they agree.
		if site != nil && site != &s.list[i] {
			err = fmt.Errorf("%w: the request names two sites; name one", errSite)
			return
		}
		site = &s.list[i]
	}

	for _, name := range r.Header[SiteHeader] {
		take(name)
	}

	for _, name := range queryValues(r, siteParameter) {
		take(name)
	}

	return site, err
}
