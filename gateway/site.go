package gateway

import (
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"

	"github.com/gin-gonic/gin"

	"headcount/gateway/httppolicy"
	"headcount/gateway/identity"
	"headcount/presence"
	"headcount/unread"
)

// The gateway is the edge of sites. It finds out once which site a request is for (inSite),
// and makes names of what comes in: of pages (page), counters, limits and users. Everything
// inside knows names alone, and the outside forms show keys. A connection belongs to the
// site of its upgrade as long as it lives.

const (
	sitesPath = "/-/sites"
	siteOfKey = "site" // in the request's context; none: the default site
)

// inSite finds out which site a request is for. It refuses one for an unknown site, and one
// with an API key that holds for others alone.
func (g *Gateway) inSite(c *gin.Context) {
	site, err := g.cfg.Sites.Of(c.Request, g.cfg.Proxies.Secure(c.Request))
	if err != nil {
		badRequest(c, sentence(err))
		c.Abort()
		return
	}
	if site != presence.DefaultSite {
		c.Set(siteOfKey, site)
	}
	key := httppolicy.APIKey(c.Request)
	if key == "" || !g.keys.Bound() || c.Request.URL.Path == sitesPath {
		return
	}
	if whole, sites := g.keys.Sites(key); !whole && len(sites) > 0 && !slices.Contains(sites, site) {
		httppolicy.Problem(c.Writer, http.StatusForbidden, fmt.Sprintf(
			"This API key holds for the site %q, and this call is for the site %q; name the site in the header %s or as ?site=%s, or send a key that holds for it.",
			sites[0].Name(), site.Name(), identity.SiteHeader, sites[0].Name()), httppolicy.Because(httppolicy.ReasonSite))
		c.Abort()
	}
}

// sentence is the text of an error as a sentence.
func sentence(err error) string {
	text := err.Error()
	return strings.ToUpper(text[:1]) + text[1:] + "."
}

// siteOf returns the site that the request is for.
func siteOf(c *gin.Context) presence.Site {
	site, _ := c.Get(siteOfKey)
	of, _ := site.(presence.Site) // none: the default site
	return of
}

// errElsewhere refuses a page of one site that would act as its visitor on another.
var errElsewhere = errors.New("this page is of another site, and a visitor is somebody else there; ask without a site")

// identify returns who sent the request, as a user of its site. query says whether the
// URL's parameters count. It notes whether they have come back after a restart.
func (g *Gateway) identify(c *gin.Context, query bool) (identity.Identity, error) {
	site := siteOf(c)
	if g.cfg.Sites.Elsewhere(c.Request, g.cfg.Proxies.Secure(c.Request), site) {
		return identity.Identity{}, errElsewhere
	}
	id, err := g.cfg.Identities.Identify(c.Request, site, query)
	g.comebacks.note(c.Request, id)
	return id, err
}

// userOf identifies a user of a site in follows.
func (g *Gateway) userOf(site presence.Site, id string) unread.User {
	return unread.User(g.cfg.Identities.Hash128(site.Qualify(id)))
}

// setSites completes the settings of sites.
func setSites(cfg *Config) (keys identity.SiteKeys, err error) {
	if cfg.Sites == nil {
		if cfg.Sites, err = identity.NewSites(nil); err != nil {
			return keys, err
		}
	}
	return identity.NewSiteKeys(cfg.APIKeys, cfg.Sites)
}

// alone reports whether the API key of the request holds for single sites, so that what is
// of all sites is not for who sent it.
func (g *Gateway) alone(c *gin.Context) bool {
	whole, sites := g.keys.Sites(httppolicy.APIKey(c.Request))
	return !whole && len(sites) > 0
}

// getSites lists the sites that the API key holds for, with their totals.
func (g *Gateway) getSites(c *gin.Context) {
	httppolicy.AddVary(c.Writer.Header(), "Accept-Encoding")
	if !g.server(c) {
		return
	}
	key := httppolicy.APIKey(c.Request)
	var sites []identity.Site
	var totals []string
	for _, site := range g.cfg.Sites.All() {
		if g.keys.Holds(key, site.Site) {
			sites, totals = append(sites, site), append(totals, site.Qualify(presence.AllPages))
		}
	}
	counts, ok := g.counts(c, totals...)
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
