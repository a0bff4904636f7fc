package api

import (
	"context"
	"errors"
	"net/http"
	"strings"
	"time"

	"github.com/gin-gonic/gin"

	"headcount/gateway/counterapi"
	"headcount/gateway/httppolicy"
	"headcount/presence"
	"headcount/presence/minutes"
)

const (
	statsAge = time.Second // the most age of an answer to visitors
	maxStats = 64          // answers that are kept, of 90 KB at most
)

// statsQuestion asks for the history of a page.
type statsQuestion struct {
	name string
	q    minutes.Question
}

// pageStats is the answer, as JSON. It implements counterapi.Answered.
type pageStats struct {
	body   []byte
	points int
}

func (s pageStats) Points() int { return s.points }
func (pageStats) Lacking() bool { return false }

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
	query := counterapi.ReadQuery(c, "?last=24h&step=5m")
	last, step := query.Duration("last"), query.Duration("step")
	if !query.OK {
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
	if err := a.Serving(); err != nil {
		Unavailable(c, err)
		return
	}
	by := counterapi.Asker{Server: a.callers.IsServer(c.Request), Addr: a.callers.Addr(c.Request)}
	stats, err := a.stats.Ask(c.Request.Context(), statsQuestion{name, q}, statsAge, by, func(ctx context.Context) (pageStats, error) {
		return a.readStats(ctx, name, q, now)
	})
	switch {
	case errors.Is(err, counterapi.ErrTurn):
		a.tooMany(c, LimitRate, "Too many questions about what pages remember are being answered, of this address or of all; ask again later.", httppolicy.RetryAfter(retryAfter))
	case err != nil:
		Unavailable(c, presence.ErrUnavailable)
	default:
		a.callers.Cacheable(c, name)
		write(c, "application/json", stats.body)
	}
}

// readStats answers a question that was asked at a time.
func (a *API) readStats(ctx context.Context, name string, q minutes.Question, asked time.Time) (stats pageStats, err error) {
	ctx, cancel := context.WithTimeout(ctx, storeTimeout)
	defer cancel()
	list, err := a.cfg.Minutes.Minutes(ctx, name, q.From)
	if err != nil {
		return stats, err
	}
	updates, ok := a.parts.Counts.Newest(ctx, presence.CountTopics([]string{name}))
	if !ok {
		return stats, presence.ErrUnavailable
	}
	count, _ := presence.CountOf(updates[0])
	now := time.Now()
	if minutes.Of(now) >= q.To { // the next step began while the question waited for its turn
		now = asked
	}
	answer := q.Answer(name, list, count.Users, now)
	answer.Stale = count.Stale
	return pageStats{append(httppolicy.JSON(answer), '\n'), len(answer.Points)}, nil
}
