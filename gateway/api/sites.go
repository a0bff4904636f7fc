package api

import (
	"fmt"
	"slices"

	"github.com/gin-gonic/gin"

	"headcount/gateway/calls"
	"headcount/gateway/httppolicy"
	"headcount/gateway/identity"
	"headcount/presence"
)

// The gateway is the edge of sites. findSite determines once which site a request is for. Keys of pages,
// counters, limits and users in the request become names, which have the site in them. Everything inside knows
// only names, and answers and frames show keys again. A connection belongs to the site of its
// upgrade until it ends.

const (
	sitesPath = "/-/sites"
	siteOfKey = "site" // in the request's context; none: the default site
)

// findSite determines which site a request is for. It refuses requests for an unknown site, and requests whose API key
// is valid for other sites only.
func (w *Callers) findSite(c *gin.Context) error {
	site, err := w.Sites.Of(c.Request, w.Proxies.Secure(c.Request))
	if err != nil {
		return calls.Bad(sentence(err))
	}
	// Requests for the default site, which most are, need no map of their own.
	if site != presence.DefaultSite {
		c.Set(siteOfKey, site)
	}

	key := httppolicy.APIKey(c.Request)
	// The list of sites is about every site of the key.
	if key == "" || c.Request.URL.Path == sitesPath {
		return nil
	}

	// A key that is valid for no site is wrong, and gets that error.
	whole, sites := w.Keys.Sites(key)
	if whole || len(sites) == 0 || slices.Contains(sites, site) {
		return nil
	}

	const detail = "This API key holds for the site %q, and this call is for the site %q; " +
		"name the site in the header %s or as ?site=%s, or send a key that holds for it."
	own := sites[0].Name()

	return calls.Refuse(calls.ErrOtherSite, fmt.Sprintf(detail, own, site.Name(), identity.SiteHeader, own))
}

// siteOf returns the site that the request is for.
func siteOf(c *gin.Context) presence.Site {
	site, _ := c.Get(siteOfKey)
	of, _ := site.(presence.Site) // none: the default site

	return of
}

// getSites lists the sites that the API key holds for, with their totals.
func (a *API) getSites(c *gin.Context) (calls.Answer, error) {
	httppolicy.AddVary(c.Writer.Header(), "Accept-Encoding")
	if err := a.callers.Server(c); err != nil {
		return calls.Answer{}, err
	}

	key := httppolicy.APIKey(c.Request)
	var sites []identity.Site
	var totals []string
	for _, site := range a.callers.Sites.All() {
		if a.callers.Keys.Holds(key, site.Site) {
			sites = append(sites, site)
			totals = append(totals, site.Qualify(presence.AllPages))
		}
	}
	counts, err := a.counts(c, totals...)
	if err != nil {
		return calls.Answer{}, err
	}

	body := []byte(`{"sites":[`)
	for i, site := range sites {
		if i > 0 {
			body = append(body, ',')
		}
		body = appendSite(body, site, counts[i])
	}

	return calls.PackedJSON(append(body, "]}"...)), nil
}

// appendSite appends the JSON of a site with its total.
func appendSite(b []byte, site identity.Site, total presence.Count) []byte {
	b = append(b, `{"name":`...)
	b = presence.AppendString(b, site.Name())
	b = append(b, `,"origins":[`...)
	for i, origin := range site.Origins {
		if i > 0 {
			b = append(b, ',')
		}
		b = presence.AppendString(b, origin)
	}
	b = append(b, `],`...)
	b = total.AppendMembers(b)

	return append(b, '}')
}
