package gateway

import "headcount/presence"

// Explain returns what this gateway knows of the count of a page, or of a site.
func (g *Gateway) Explain(page string) presence.Parts {
	parts := g.roster.Explain(page)
	parts.Ignored = g.clients.Ignored(page)

	return parts
}
