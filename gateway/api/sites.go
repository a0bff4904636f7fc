package api

import (
	"fmt"
	"net/http"
	"slices"
	"strings"

	"github.com/gin-gonic/gin"

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

// findSite determines which site a request is for. It refuses one for an unknown site, and one
// with an API key that holds only for others.
func (w *Callers) findSite(c *gin.Context) {
	site, err := w.Sites.Of(c.Request, w.Proxies.Secure(c.Request))
	if err != nil {
		badRequest(c, sentence(err))
		c.Abort()
		return
	}
	if site != presence.DefaultSite {
		c.Set(siteOfKey, site)
	}
	key := httppolicy.APIKey(c.Request)
	if key == "" || c.Request.URL.Path == sitesPath {
		return
	}
	if whole, sites := w.Keys.Sites(key); !whole && len(sites) > 0 && !slices.Contains(sites, site) {
		httppolicy.Problem(c.Writer, http.StatusForbidden, fmt.Sprintf(
			"This API key holds for the site %q, and this call is for the site %q; name the site in the header %s or as ?site=%s, or send a key that holds for it.",
			sites[0].Name(), site.Name(), identity.SiteHeader, sites[0].Name()), httppolicy.Because(httppolicy.ReasonSite))
		c.Abort()
	}
}

// siteOf returns the site that the request is for.
func siteOf(c *gin.Context) presence.Site {
	site, _ := c.Get(siteOfKey)
	of, _ := site.(presence.Site) // none: the default site
	return of
}

// sentence returns the text of an error as a sentence.
func sentence(err error) string {
	text := err.Error()
	return strings.ToUpper(text[:1]) + text[1:] + "."
}

// getSites lists the sites that the API key holds for, with their totals.
func (a *API) getSites(c *gin.Context) {
	httppolicy.AddVary(c.Writer.Header(), "Accept-Encoding")
	if !a.callers.Server(c) {
		return
	}
	key := httppolicy.APIKey(c.Request)
	var sites []identity.Site
	var totals []string
	for _, site := range a.callers.Sites.All() {
		if a.callers.Keys.Holds(key, site.Site) {
			sites, totals = append(sites, site), append(totals, site.Qualify(presence.AllPages))
		}
	}
	counts, ok := a.counts(c, totals...)
	if !ok {
		return
	}
	body := []byte(`{"sites":[`)
	for i, site := range sites {
		if i > 0 {
			body = append(body, ',')
		}
		body = append(body, `{"name":`...)
		body = presence.AppendString(body, site.Name())
		body = append(body, `,"origins":[`...)
		for j, origin := range site.Origins {
			if j > 0 {
				body = append(body, ',')
			}
			body = presence.AppendString(body, origin)
		}
		body = append(body, `],`...)
		body = counts[i].AppendMembers(body)
		body = append(body, '}')
	}
	write(c, "application/json", append(body, "]}\n"...))
}
