package gateway

import (
	"fmt"
	"net/http"

	"github.com/gin-gonic/gin"
)

// dashboard serves the dashboard's page and what it shows. Where there are API
// keys both need one; a browser cannot send it with an address, so it gets the
// page, which holds nothing, with a 401, and the page asks for the key.
func (g *Gateway) dashboard(page asset, get func(string, gin.HandlerFunc)) {
	if g.cfg.Dashboard == nil {
		return
	}
	get("/-/dashboard", func(c *gin.Context) {
		addVary(c.Writer.Header(), "Accept", apiKeyHeader)
		switch {
		case g.mayLook(c):
			page.serve(c, http.StatusOK)
		case wantsHTML(headerList(c.Request.Header, "Accept")):
			page.serve(c, http.StatusUnauthorized)
		default:
			needsKey(c)
		}
	})
	// So that a page need not find out by a 401, which browsers report.
	get("/-/dashboard/access", func(c *gin.Context) {
		addVary(c.Writer.Header(), "Accept-Encoding")
		write(c, "application/json", fmt.Appendf(nil, "{\"key_needed\":%t}\n", len(g.keys) > 0))
	})
	get("/-/dashboard/data", func(c *gin.Context) {
		addVary(c.Writer.Header(), "Accept-Encoding")
		if !g.mayLook(c) {
			needsKey(c)
			return
		}
		body, err := g.cfg.Dashboard(c.Request.Context())
		if err != nil {
			unavailable(c, err)
			return
		}
		write(c, "application/json", body)
	})
}

// mayLook reports whether a request has an API key, or none is needed.
func (g *Gateway) mayLook(c *gin.Context) bool {
	return len(g.keys) == 0 || g.keys.has(c.GetHeader(apiKeyHeader))
}

func needsKey(c *gin.Context) {
	writeProblem(c.Writer, http.StatusUnauthorized, "The dashboard is for who has an API key of --api-key: send it as X-API-Key.")
}
