package counterapi

import (
	"context"
	"errors"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/gin-gonic/gin"

	"headcount/counter"
	"headcount/gateway/httppolicy"
	"headcount/presence"
)

// getRange answers with the gains of a counter in each step of a range.
func (a *API) getRange(c *gin.Context) {
	const example = "?from=2030-10-10T12:00:00Z&to=2030-10-10T13:00:00Z&step=5m"
	one, ok := a.begin(c, counter.PublicRead)
	if !ok {
		return
	}
	query := ReadQuery(c, example)
	from, to, step := query.moment("from"), query.moment("to"), query.Duration("step")
	if !query.OK {
		return
	}
	q, err := one.rule.Range(from, to, step, time.Now())
	if all, stale, ok := a.history(c, one, q, err); ok {
		answer(c, staled(all.AppendJSON(nil, one.key), stale))
	}
}

// getWindow answers with the gain of a counter in the last time.
func (a *API) getWindow(c *gin.Context) {
	one, ok := a.begin(c, counter.PublicRead)
	if !ok {
		return
	}
	query := ReadQuery(c, "?last=1h")
	last := query.Duration("last")
	if query.OK && last == 0 {
		query.refuse(`"last" is missing; ask as ?last=1h.`)
	}
	if !query.OK {
		return
	}
	q, err := one.rule.Window(last, time.Now())
	all, stale, ok := a.history(c, one, q, err)
	if !ok {
		return
	}
	b := append(make([]byte, 0, 128), `{"key":`...)
	b = presence.AppendString(b, presence.KeyOf(one.key))
	b = append(b, `,"last":`...)
	b = presence.AppendString(b, query.Get("last"))
	b = append(b, `,"value":`...)
	b = strconv.AppendInt(b, all.Total, 10)
	answer(c, staled(append(b, '}'), stale))
}

// staled marks a JSON object as stale, since a region is missing in it that did not answer.
func staled(b []byte, stale bool) []byte {
	if stale {
		b = append(b[:len(b)-1], `,"stale":true}`...)
	}
	return b
}

// getDimension answers with the counts of a counter for the values of a dimension.
func (a *API) getDimension(c *gin.Context) {
	one, ok := a.begin(c, nobody)
	if !ok {
		return
	}
	name, err := param(c, "name")
	if err != nil || !slices.Contains(one.rule.Dimensions, name) {
		known := "it has none"
		if len(one.rule.Dimensions) > 0 {
			known = "ask for " + strings.Join(one.rule.Dimensions, ", ")
		}
		problem(c, http.StatusBadRequest, "The rule "+strconv.Quote(one.rule.Written())+" has no such dimension; "+known+".")
		return
	}
	query := ReadQuery(c, "?n=20")
	n := query.Number("n", defaultValues, 1, counter.MaxValues)
	if !query.OK {
		return
	}
	ctx, cancel := a.within(c)
	defer cancel()
	is, counted, err := a.cfg.Counters.Dimension(ctx, one.key, name)
	switch {
	case err != nil:
		a.unavailable(c, err)
	case is.Kind != 0 && !is.Kind.Gains():
		a.logKind(one.rule)
		httppolicy.Conflict(c.Writer, "The counter is of kind "+is.Kind.String()+", which has no dimensions.", presence.KeyOf(one.key), is.Value)
	default:
		answer(c, staled(counted.AppendJSON(nil, one.key, name, int(n)), is.Stale))
	}
}

// history returns the answer to the question q, unless err says that q cannot be asked. stale says that a region is
// missing in it. If ok is false, history has written the error answer.
func (a *API) history(c *gin.Context, one call, q counter.Question, err error) (all counter.Answer, stale, ok bool) {
	ctx, cancel := a.within(c)
	defer cancel()
	switch {
	case errors.Is(err, counter.ErrHistory):
		read, err := a.read(ctx, []string{one.key}, "", one.rule.Stale)
		if err != nil {
			a.unavailable(c, err)
			return all, false, false
		}
		httppolicy.Conflict(c.Writer, "The counter has no history: the rule "+strconv.Quote(one.rule.Written())+" keeps none; add buckets to the rule.", presence.KeyOf(one.key), read[0].Value)
		return all, false, false
	case err != nil:
		problem(c, http.StatusBadRequest, "The history cannot be asked for that: "+strings.TrimPrefix(err.Error(), counter.ErrTime.Error()+": ")+".")
		return all, false, false
	}
	found, err := a.questions.Ask(ctx, question{of: one.key, q: q}, one.rule.Stale, a.asker(c, one.server), func(ctx context.Context) (outcome, error) {
		all, is, err := a.archive.Ask(ctx, one.rule, one.key, q)
		return outcome{all: all, is: is}, err
	})
	switch is := found.is; {
	case errors.Is(err, ErrTurn):
		a.crowded(c)
		return all, false, false
	case err != nil:
		a.unavailable(c, err)
		return all, false, false
	case is.Kind != 0 && is.Kind != one.rule.Kind:
		a.logKind(one.rule)
		httppolicy.Conflict(c.Writer, "The counter is of kind "+is.Kind.String()+", which keeps no history under this rule.", presence.KeyOf(one.key), is.Value)
		return all, false, false
	}
	return found.all, found.is.Stale, true
}
