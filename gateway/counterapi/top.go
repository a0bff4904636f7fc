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
	"headcount/presence"
)

// TopRoot is the path of top lists.
const TopRoot = "/api/v1/top"

// fewTop is how many counters are computed for a list of that length or a shorter one, so that all of these are one
// question. A list of fewTop costs as much as a list of one.
const fewTop = 32

// topList is a list that a request asks for: the n counters of a rule that gained most in the last time.
type topList struct {
	rule *counter.Rule
	last time.Duration
	text string // last, as the request has it
	n    int
}

// getTop answers with the counters of a rule that gained most lately.
func (a *API) getTop(c *gin.Context) {
	if list, server, ok := a.topList(c); ok {
		if top, ok := a.findTop(c, list, server); ok {
			answer(c, list.appendJSON(nil, top))
		}
	}
}

// topList returns the list that the request asks for, if the caller has permission, and whether the caller has an API key. If
// ok is false, it has written the error answer.
func (a *API) topList(c *gin.Context) (list topList, server, ok bool) {
	const example = "?match=views:*&last=1h&n=10"
	server = a.callers.IsServer(c.Request)
	query := ReadQuery(c, example)
	if !query.OK {
		return list, server, false
	}
	given := query.Values["match"]
	if len(given) != 1 {
		problem(c, http.StatusBadRequest, `"match" is the match of one rule with top; ask as `+example+".")
		return list, server, false
	}
	var err error
	if list.rule, err = a.cfg.Rules.In(a.callers.Site(c)).TopRule(given[0]); err != nil {
		problem(c, http.StatusBadRequest, "There is no such list: "+strings.TrimPrefix(err.Error(), counter.ErrTop.Error()+": ")+".")
		return list, server, false
	}
	if !a.allowed(c, server, list.rule, counter.PublicRead) || !server && !a.callers.Public(c) {
		return list, server, false
	}
	list.last, list.text = query.Duration("last"), query.Get("last")
	if query.OK && list.last == 0 {
		query.refuse(`"last" is missing; ask as ` + example + ".")
	}
	list.n = int(query.Number("n", defaultTop, 1, counter.MaxTop))
	return list, server, query.OK
}

// findTop returns the counters of a list. If ok is false, it has written the error answer.
func (a *API) findTop(c *gin.Context, list topList, server bool) (top []counter.Gained, ok bool) {
	ctx, cancel := a.within(c)
	defer cancel()
	top, err := a.askTop(ctx, list, list.rule.Stale, a.asker(c, server))
	switch {
	case errors.Is(err, counter.ErrTime):
		problem(c, http.StatusBadRequest, "That cannot be asked for: "+strings.TrimPrefix(err.Error(), counter.ErrTime.Error()+": ")+".")
	case errors.Is(err, ErrTurn):
		a.crowded(c)
	case err != nil:
		a.unavailable(c, err)
	}
	return top, err == nil
}

// askTop returns the counters of a list, at most stale old.
func (a *API) askTop(ctx context.Context, list topList, stale time.Duration, by Asker) ([]counter.Gained, error) {
	q, err := list.rule.Window(list.last, time.Now())
	if err != nil {
		return nil, err
	}
	most := counter.MaxTop
	if list.n <= fewTop {
		most = fewTop
	}
	found, err := a.questions.Ask(ctx, question{of: list.rule.Match, q: q, top: most}, stale, by, func(ctx context.Context) (outcome, error) {
		top, err := a.cfg.Counters.Top(ctx, list.rule, list.last, most)
		return outcome{top: top}, err
	})
	if err != nil {
		return nil, err
	}
	return found.top[:min(list.n, len(found.top))], nil
}

func (l topList) appendJSON(b []byte, top []counter.Gained) []byte {
	b = append(slices.Grow(b, 64+64*len(top)), `{"match":`...)
	b = presence.AppendString(b, l.rule.Written())
	b = append(b, `,"last":`...)
	b = presence.AppendString(b, l.text)
	b = append(b, `,"top":[`...)
	for i, g := range top {
		if i > 0 {
			b = append(b, ',')
		}
		b = append(b, `{"key":`...)
		b = presence.AppendString(b, presence.KeyOf(g.Key))
		b = append(b, `,"value":`...)
		b = strconv.AppendInt(b, g.Value, 10)
		b = append(b, '}')
	}
	return append(b, "]}"...)
}
