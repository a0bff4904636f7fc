package api

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

// getStats answers with the history of a page: its numbers of users in minutes or longer steps until now.
func (a *API) getStats(c *gin.Context) {
	httppolicy.AddVary(c.Writer.Header(), "Accept-Encoding")
	if a.cfg.PageStats == 0 {
		httppolicy.Problem(c.Writer, http.StatusNotFound, "This server remembers nothing of its pages: it was started with --page-stats 0.")
		return
	}
	name, ok := a.callers.Page(c, presence.CheckReadable, false)
	if !ok || !a.callers.Public(c) {
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
	q, err := minutes.Ask(last, step, a.cfg.PageStats, now)
	if err != nil {
		badRequest(c, "The page cannot be asked for that: "+strings.TrimPrefix(err.Error(), minutes.ErrTime.Error()+": ")+".")
		return
	}
	if !a.admitPages(c, name) {
		return
	}
	ctx, cancel := context.WithTimeout(c.Request.Context(), storeTimeout)
	defer cancel()
	list, err := a.cfg.Minutes.Minutes(ctx, name, q.From)
	if err != nil {
		Unavailable(c, presence.ErrUnavailable)
		return
	}
	counts, ok := a.counts(c, name)
	if !ok {
		return
	}
	a.callers.Cacheable(c, name)
	writeJSON(c, q.Answer(name, list, counts[0].Users, now))
}
