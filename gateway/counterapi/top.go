package counterapi

import (
	"context"
	"errors"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/gin-gonic/gin"

	"headcount/counter"
	"headcount/presence"
)

// topRoot is the path of top lists.
const topRoot = "/api/v1/top"

// fewTop is how many counters are computed for a list of that length or a shorter one, so that all of these are one
// question. A list of fewTop costs as much as a list of one.
const fewTop = 32

// getTop answers with the counters of a rule that gained most lately.
func (a *API) getTop(c *gin.Context) {
	const example = "?match=views:*&last=1h&n=10"
	server, ok := a.server(c)
	if !ok {
		return
	}
	values, ok := Query(c, example)
	if !ok {
		return
	}
	given := values["match"]
	if len(given) != 1 {
		problem(c, http.StatusBadRequest, `"match" is the match of one rule with top; ask as `+example+".")
		return
	}
	rule, err := a.cfg.Rules.In(a.callers.Site(c)).TopRule(given[0])
	if err != nil {
		problem(c, http.StatusBadRequest, "There is no such list: "+strings.TrimPrefix(err.Error(), counter.ErrTop.Error()+": ")+".")
		return
	}
	if !a.allowed(c, server, rule, counter.PublicRead) || !server && !a.callers.Public(c) {
		return
	}
	last, ok := Duration(c, values, "last")
	if !ok {
		return
	}
	if last == 0 {
		problem(c, http.StatusBadRequest, `"last" is missing; ask as `+example+".")
		return
	}
	n, ok := number(c, values, "n", defaultTop, 1, counter.MaxTop)
	if !ok {
		return
	}
	ctx, cancel := a.within(c)
	defer cancel()
	q, err := rule.Window(last, time.Now())
	if err != nil {
		problem(c, http.StatusBadRequest, "That cannot be asked for: "+strings.TrimPrefix(err.Error(), counter.ErrTime.Error()+": ")+".")
		return
	}
	most := counter.MaxTop
	if n <= fewTop {
		most = fewTop
	}
	found, err := a.questions.ask(ctx, question{of: rule.Match, q: q, top: most}, rule.Stale, server, func(ctx context.Context) (outcome, error) {
		top, err := a.cfg.Counters.Top(ctx, rule, last, most)
		return outcome{top: top}, err
	})
	switch {
	case errors.Is(err, errTurn):
		a.crowded(c)
		return
	case err != nil:
		a.unavailable(c, err)
		return
	}
	writeTop(c, rule, values.Get("last"), found.top[:min(int(n), len(found.top))])
}

// writeTop answers with the counters of a rule that gained most in the last time.
func writeTop(c *gin.Context, rule *counter.Rule, last string, top []counter.Gained) {
	b := append(make([]byte, 0, 64+64*len(top)), `{"match":`...)
	b = presence.AppendString(b, rule.Written())
	b = append(b, `,"last":`...)
	b = presence.AppendString(b, last)
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
	answer(c, append(b, "]}"...))
}
