package api

import (
	"fmt"
	"net/http"

	"github.com/gin-gonic/gin"

	"headcount/gateway/httppolicy"
)

// dashboard serves the dashboard's page and its data. If API keys or private pages
// are configured, both need a key. A browser cannot send a key with an address, so it gets the page
// with a 401. The page itself holds no data, and asks for the key.
func (a *API) dashboard(e *gin.Engine, page asset) {
	httppolicy.Get(e, "/-/dashboard", func(c *gin.Context) {
		httppolicy.AddVary(c.Writer.Header(), "Accept", httppolicy.APIKeyHeader)
		switch {
		case a.callers.mayLook(c):
			page.serve(c, http.StatusOK)
		case httppolicy.WantsHTML(c.Request):
			page.serve(c, http.StatusUnauthorized)
		default:
			needsKey(c)
		}
	})
	// The pages ask here whether they need a key; a browser would report a 401 as an
	// error.
	httppolicy.Get(e, "/-/dashboard/access", func(c *gin.Context) {
		httppolicy.AddVary(c.Writer.Header(), "Accept-Encoding")
		const form = `{"key_needed":%t,"top_needs_key":%t}` + "\n"
		write(c, "application/json", fmt.Appendf(nil, form, a.callers.guarded(), len(a.callers.PublicTop.Pages) == 0))
	})
	httppolicy.Get(e, "/-/dashboard/data", func(c *gin.Context) {
		httppolicy.AddVary(c.Writer.Header(), "Accept-Encoding")
		if !a.callers.mayLook(c) {
			needsKey(c)
			return
		}
		body, err := a.cfg.Dashboard.JSON(c.Request.Context(), siteOf(c), a.callers.alone(c))
		if err != nil {
			Unavailable(c, err)
			return
		}
		write(c, "application/json", body)
	})
}

// mayLook reports whether the request may see the dashboard: it has a valid API
// key, or needs none.
func (w *Callers) mayLook(c *gin.Context) bool { return !w.guarded() || w.IsServer(c.Request) }

// guarded reports whether the dashboard needs an API key: there are keys, or private pages, which it would show.
func (w *Callers) guarded() bool { return len(w.Keys) > 0 || len(w.Private) > 0 }

// TopPages reports whether the list of the pages with the most users has all pages for the sender, or
// only those of PublicTop. If ok is false, it has written the error answer.
func (w *Callers) TopPages(c *gin.Context) (all, ok bool) {
	switch {
	case w.IsServer(c.Request):
		return true, true
	case len(w.PublicTop.Pages) > 0:
		return false, true
	}
	const detail = "This server shows visitors no list of pages: send an API key in the header " + httppolicy.APIKeyHeader +
		", or start Headcount with --public-top and the pages that everybody may see."
	httppolicy.Problem(c.Writer, http.StatusUnauthorized, detail, httppolicy.Because(httppolicy.ReasonAPIKey))
	return false, false
}

// alone reports whether the API key of the request holds only for single sites, so that its
// sender may not see what is of all sites.
func (w *Callers) alone(c *gin.Context) bool {
	whole, sites := w.Keys.Sites(httppolicy.APIKey(c.Request))
	return !whole && len(sites) > 0
}

func needsKey(c *gin.Context) {
	httppolicy.Problem(c.Writer, http.StatusUnauthorized, "The dashboard needs an API key of --api-key: send one in the header "+httppolicy.APIKeyHeader+".", httppolicy.Because(httppolicy.ReasonAPIKey))
}
