package counterapi

import (
	"context"
	"errors"
	"slices"
	"strconv"
	"time"

	"github.com/gin-gonic/gin"

	"headcount/counter"
	"headcount/gateway/calls"
	"headcount/presence"
)

// TopRoot is the path of top lists.
const TopRoot = "/api/v1/top"

// fewTop is the length for which a list of fewTop or fewer counters is computed, so that all these lists share one
// question. A list of fewTop costs as much as a list of one.
const fewTop = 32

// topList is a requested list: the n counters of a rule that gained most in the most recent period.
type topList struct {
	rule *counter.Rule
	last time.Duration
	text string // last, as written in the request
	n    int
}

// getTop answers with the counters of a rule that gained most recently.
func (a *API) getTop(c *gin.Context) (calls.Answer, error) {
	list, server, err := a.topList(c)
	if err != nil {
		return calls.Answer{}, err
	}

	top, err := a.findTop(c, list, server)
	if err != nil {
		return calls.Answer{}, err
	}

	return calls.JSON(list.appendJSON(nil, top)), nil
}

// topList parses the requested list, if the caller has permission, and reports whether the caller has an API key.
func (a *API) topList(c *gin.Context) (list topList, server bool, err error) {
	const example = "?match=views:*&last=1h&n=10"

	server = a.callers.IsServer(c.Request)
	query := ReadQuery(c, example)
	if query.Err != nil {
		return list, server, query.Err
	}

	given := query.Values["match"]
	if len(given) != 1 {
		return list, server, calls.Bad(`"match" is the match of one rule with top; ask as ` + example + ".")
	}
	list.rule, err = a.cfg.Rules.In(a.callers.Site(c)).TopRule(given[0])
	if err != nil {
		return list, server, calls.Bad("There is no such list: " + why(err, counter.ErrTop) + ".")
	}
	if err := a.permitsTop(c, list.rule, server); err != nil {
		return list, server, err
	}

	// Kept as it was asked, for the answer.
	list.text = query.Get("last")
	list.last = query.needed("last", example)
	list.n = int(query.Number("n", defaultTop, 1, counter.MaxTop))

	return list, server, query.Err
}

// permitsTop returns an error unless the caller may read the counters of a rule.
func (a *API) permitsTop(c *gin.Context, rule *counter.Rule, server bool) error {
	if server {
		return nil
	}
	if err := permits(server, rule, counter.PublicRead); err != nil {
		return err
	}

	return a.callers.Public(c)
}

// findTop returns the counters of a list.
func (a *API) findTop(c *gin.Context, list topList, server bool) ([]counter.Gained, error) {
	ctx, cancel := a.within(c)
	defer cancel()

	top, err := a.askTop(ctx, list, list.rule.MaxAge, a.asker(c, server))
	switch {
	case errors.Is(err, counter.ErrTime):
		return nil, calls.Bad("That cannot be asked for: " + why(err, counter.ErrTime) + ".")
	case errors.Is(err, ErrTurn):
		return nil, a.crowded()
	case err != nil:
		return nil, a.failed(c, err)
	}

	return top, nil
}

// askTop returns the counters of a list. The answer is at most maxAge old.
func (a *API) askTop(ctx context.Context, list topList, maxAge time.Duration, by Asker) ([]counter.Gained, error) {
	q, err := list.rule.Window(list.last, time.Now())
	if err != nil {
		return nil, err
	}

	// All short lists share one question and its answer.
	most := counter.MaxTop
	if list.n <= fewTop {
		most = fewTop
	}
	compute := func(ctx context.Context) (outcome, error) {
		top, err := a.cfg.Counters.Top(ctx, list.rule, list.last, most)
		return outcome{top: top}, err
	}
	found, err := a.questions.Ask(ctx, question{of: list.rule.Match, q: q, top: most}, maxAge, by, compute)
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
