package gateway

import (
	"context"
	"net/http"
	"strings"
	"time"

	"github.com/gin-gonic/gin"

	"headcount/gateway/counterapi"
	"headcount/gateway/httppolicy"
	"headcount/presence"
	"headcount/presence/minutes"
)

// getStats answers what a page remembers of the time before now.
func (g *Gateway) getStats(c *gin.Context) {
	httppolicy.AddVary(c.Writer.Header(), "Accept-Encoding")
	if g.cfg.PageStats == 0 {
		httppolicy.Problem(c.Writer, http.StatusNotFound, "This server remembers nothing of its pages: it was started with --page-stats 0.")
		return
	}
	name, ok := page(c, presence.CheckReadable)
	if !ok || !g.public(c) {
		return
	}
	values, ok := counterapi.Query(c, "?last=24h&step=5m")
	if !ok {
		return
	}
	last, ok := counterapi.Duration(c, values, "last")
	if !ok {
		return
	}
	step, ok := counterapi.Duration(c, values, "step")
	if !ok {
		return
	}
	now := time.Now()
	q, err := minutes.Ask(last, step, g.cfg.PageStats, now)
	if err != nil {
		badRequest(c, "The page cannot be asked for that: "+strings.TrimPrefix(err.Error(), minutes.ErrTime.Error()+": ")+".")
		return
	}
	if !g.admitPages(c, name) {
		return
	}
	ctx, cancel := context.WithTimeout(c.Request.Context(), readPatience)
	defer cancel()
	list, err := g.cfg.Minutes.Minutes(ctx, name, q.From)
	if err != nil {
		unavailable(c, presence.ErrUnavailable)
		return
	}
	counts, ok := g.counts(c, name)
	if !ok {
		return
	}
	answer := q.Answer(name, list, counts[0].Users, now)
	write(c, "application/json", answer.AppendJSON(nil))
}
