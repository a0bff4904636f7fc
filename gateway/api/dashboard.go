package api

import (
	"fmt"
	"net/http"

	"github.com/gin-gonic/gin"

	"headcount/gateway/calls"
	"headcount/gateway/httppolicy"
)

var (
	errDashboardKey = calls.Refuse(calls.ErrKeyWanted,
		"The dashboard needs an API key of --api-key: send one in the header "+httppolicy.APIKeyHeader+".")
	errNoPublicTop = calls.Refuse(calls.ErrKeyWanted,
		"This server shows visitors no list of pages: send an API key in the header "+httppolicy.APIKeyHeader+
			", or start Headcount with --public-top and the pages that everybody may see.")
)

// getDashboard returns the handler of the dashboard's page, or nil if there is no such page. With API keys or private
// pages, the dashboard's data needs a key, and so does the page. But a browser cannot send a key when it opens an
// address, so the page is sent with status 401. It contains no data, and asks the user for the key.
func (a *API) getDashboard() calls.Handler {
	page := a.files[dashboardFile]
	if page == nil {
		return nil
	}

	return func(c *gin.Context) (calls.Answer, error) {
		httppolicy.AddVary(c.Writer.Header(), "Accept", httppolicy.APIKeyHeader)

		switch {
		case a.callers.mayLook(c):
			return page.answer(c, http.StatusOK), nil
		case httppolicy.WantsHTML(c.Request):
			return page.answer(c, http.StatusUnauthorized), nil
		}

		return calls.Answer{}, errDashboardKey
	}
}

// getDashboardAccess answers whether the dashboard needs a key. Pages ask this way, because a browser would report a
// 401 as an error.
func (a *API) getDashboardAccess(c *gin.Context) (calls.Answer, error) {
	httppolicy.AddVary(c.Writer.Header(), "Accept-Encoding")
	const form = `{"key_needed":%t,"top_needs_key":%t}`
	topNeedsKey := len(a.callers.PublicTop.Pages) == 0

	return calls.PackedJSON(fmt.Appendf(nil, form, a.callers.guarded(), topNeedsKey)), nil
}

// getDashboardData answers with what the dashboard shows.
func (a *API) getDashboardData(c *gin.Context) (calls.Answer, error) {
	httppolicy.AddVary(c.Writer.Header(), "Accept-Encoding")
	if !a.callers.mayLook(c) {
		return calls.Answer{}, errDashboardKey
	}

	body, err := a.cfg.Dashboard.JSON(c.Request.Context(), siteOf(c), a.callers.alone(c))
	if err != nil {
		return calls.Answer{}, Unavailable(err)
	}

	return calls.Packed(calls.TypeJSON, body), nil
}

// mayLook reports whether the request may see the dashboard: it has a valid API key, or the dashboard needs none.
func (w *Callers) mayLook(c *gin.Context) bool { return !w.guarded() || w.IsServer(c.Request) }

// guarded reports whether the dashboard needs an API key: there are keys, or private pages, which it would show.
func (w *Callers) guarded() bool { return len(w.Keys) > 0 || len(w.Private) > 0 }

// TopPages reports whether the sender sees all pages in the list of the pages with the most users, or only those of
// PublicTop.
func (w *Callers) TopPages(c *gin.Context) (all bool, err error) {
	switch {
	case w.IsServer(c.Request):
		return true, nil
	case len(w.PublicTop.Pages) > 0:
		return false, nil
	}

	return false, errNoPublicTop
}

// alone reports whether the API key of the request is valid for single sites only, so that its sender may not see data
// that concerns all sites.
func (w *Callers) alone(c *gin.Context) bool {
	whole, sites := w.Keys.Sites(httppolicy.APIKey(c.Request))
	return !whole && len(sites) > 0
}
