package gateway

import (
	"fmt"
	"net/http"

	"github.com/gin-gonic/gin"

	"headcount/gateway/httppolicy"
)

// dashboard serves the dashboard's page and its data. If API keys are configured,
// both need one. A browser cannot send a key with an address, so it gets the page
// with a 401. The page itself holds no data, and asks for the key.
func (g *Gateway) dashboard(e *gin.Engine, page asset) {
	if g.cfg.Dashboard == nil {
		return
	}
	httppolicy.Get(e, "/-/dashboard", func(c *gin.Context) {
		httppolicy.AddVary(c.Writer.Header(), "Accept", httppolicy.APIKeyHeader)
		switch {
		case g.mayLook(c):
			page.serve(c, http.StatusOK)
		case httppolicy.WantsHTML(c.Request):
			page.serve(c, http.StatusUnauthorized)
		default:
			needsKey(c)
		}
	})
	// The page asks here whether it needs a key; a browser would report a 401 as an
	// error.
	httppolicy.Get(e, "/-/dashboard/access", func(c *gin.Context) {
		httppolicy.AddVary(c.Writer.Header(), "Accept-Encoding")
		write(c, "application/json", fmt.Appendf(nil, "{\"key_needed\":%t}\n", len(g.keys) > 0))
	})
	httppolicy.Get(e, "/-/dashboard/data", func(c *gin.Context) {
		httppolicy.AddVary(c.Writer.Header(), "Accept-Encoding")
		if !g.mayLook(c) {
			needsKey(c)
			return
		}
		body, err := g.cfg.Dashboard.JSON(c.Request.Context(), siteOf(c), g.alone(c))
		if err != nil {
			unavailable(c, err)
			return
		}
		write(c, "application/json", body)
	})
}
