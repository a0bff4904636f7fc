package api

import (
	"context"
	"errors"
	"strings"
	"time"

	"github.com/gin-gonic/gin"

	"headcount/gateway/calls"
	"headcount/gateway/counterapi"
	"headcount/gateway/httppolicy"
	"headcount/presence"
	"headcount/presence/minutes"
)

const (
	statsAge = time.Second // maximum age of an answer to visitors
	maxStats = 64          // cached answers, of 150 KB at most
)

// statsQuestion asks for the history of a page.
type statsQuestion struct {
	name string
	q    minutes.Question
	csv  bool
}

// pageStats is the answer, as JSON or CSV. It implements counterapi.Answered.
type pageStats struct {
	body   []byte
	points int
}

func (s pageStats) Points() int { return s.points }
func (pageStats) Lacking() bool { return false }

// getStats answers with the history of a page: its numbers of users in minutes or longer steps until now.
func (a *API) getStats(c *gin.Context) (calls.Answer, error) {
	httppolicy.AddVary(c.Writer.Header(), "Accept-Encoding")
	if a.cfg.PageStats == 0 {
		return calls.Answer{}, errNoStats
	}

	now := time.Now()
	asked, err := a.statsAsked(c, now)
	if err != nil {
		return calls.Answer{}, err
	}
	if err := a.admitPages(c, asked.name); err != nil {
		return calls.Answer{}, err
	}
	if err := a.Serving(); err != nil {
		return calls.Answer{}, Unavailable(err)
	}

	// Visitors share answers and take turns; servers do not wait for them.
	by := counterapi.Asker{Server: a.callers.IsServer(c.Request), Addr: a.callers.Addr(c.Request)}
	read := func(ctx context.Context) (pageStats, error) { return a.readStats(ctx, asked, now) }
	stats, err := a.stats.Ask(c.Request.Context(), asked, statsAge, by, read)
	switch {
	case errors.Is(err, counterapi.ErrTurn):
		return calls.Answer{}, a.tooMany("Too many questions about what pages remember are being answered, " +
			"of this address or of all; ask again later.")
	case err != nil:
		return calls.Answer{}, storeAway(err)
	}
	a.callers.Cacheable(c, asked.name)

	if asked.csv {
		return calls.Packed("text/csv; charset=utf-8", stats.body), nil
	}
	return calls.Packed(calls.TypeJSON, stats.body), nil
}

var errNoStats = calls.Refuse(calls.ErrNotFound,
	"This server remembers nothing of its pages: it was started with --page-stats 0.")

// statsAsked parses the question of a request that arrived at the given time.
func (a *API) statsAsked(c *gin.Context, now time.Time) (asked statsQuestion, err error) {
	asked.name, err = a.callers.Page(c, presence.CheckReadable, false)
	if err != nil {
		return asked, err
	}
	if err := a.callers.Public(c); err != nil {
		return asked, err
	}

	query := counterapi.ReadQuery(c, "?last=24h&step=5m")
	last := query.Duration("last")
	step := query.Duration("step")
	asked.csv = query.Choice("format", "json", "csv") == "csv"
	if query.Err != nil {
		return asked, query.Err
	}

	// Days are kept for longer than minutes.
	if step == 24*time.Hour && a.cfg.PageDays > 0 {
		asked.q, err = minutes.AskDays(last, a.cfg.PageDays, now)
	} else {
		asked.q, err = minutes.Ask(last, step, a.cfg.PageStats, now)
	}
	if err != nil {
		why := strings.TrimPrefix(err.Error(), minutes.ErrTime.Error()+": ")
		return asked, calls.Bad("The page cannot be asked for that: " + why + ".")
	}

	return asked, nil
}

// readStats answers a question that was asked at the given time.
func (a *API) readStats(ctx context.Context, of statsQuestion, asked time.Time) (stats pageStats, err error) {
	ctx, cancel := context.WithTimeout(ctx, storeTimeout)
	defer cancel()

	past, err := a.readPast(ctx, of)
	if err != nil {
		return stats, err
	}
	updates, ok := a.parts.Counts.Newest(ctx, presence.CountTopics([]string{of.name}))
	if !ok {
		return stats, presence.ErrUnavailable
	}
	count, _ := presence.CountOf(updates[0])

	// The next step may have begun while the question waited for its turn.
	now := time.Now()
	if minutes.Of(now) >= of.q.To {
		now = asked
	}
	answer := past(count.Users, now)
	answer.Stale = count.Stale

	body := append(httppolicy.JSON(answer), '\n')
	if of.csv {
		body = answer.CSV()
	}
	return pageStats{body, len(answer.Points)}, nil
}

// readPast reads what the store has of the minutes or days that are asked for. It returns a function that makes the
// answer of that, and of the page's count at the time now.
func (a *API) readPast(
	ctx context.Context, of statsQuestion,
) (answer func(count int64, now time.Time) minutes.Answer, err error) {
	if of.q.ByDay {
		days, err := a.cfg.Days.Days(ctx, of.name, of.q.From/minutes.MinutesOfDay)
		return func(count int64, now time.Time) minutes.Answer {
			return of.q.AnswerDays(of.name, days, count, now)
		}, err
	}

	list, err := a.cfg.Minutes.Minutes(ctx, of.name, of.q.From)
	return func(count int64, now time.Time) minutes.Answer { return of.q.Answer(of.name, list, count, now) }, err
}
