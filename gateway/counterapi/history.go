package counterapi

import (
	"context"
	"errors"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/gin-gonic/gin"

	"headcount/counter"
	"headcount/gateway/calls"
	"headcount/presence"
)

// getRange answers with the gains of a counter in each step of a range.
func (a *API) getRange(c *gin.Context, one call) (calls.Answer, error) {
	query := ReadQuery(c, "?from=2030-10-10T12:00:00Z&to=2030-10-10T13:00:00Z&step=5m")
	from := query.moment("from")
	to := query.moment("to")
	step := query.Duration("step")
	if query.Err != nil {
		return calls.Answer{}, query.Err
	}

	q, err := one.rule.Range(from, to, step, time.Now())
	if err != nil {
		return calls.Answer{}, a.noHistory(c, one, err)
	}
	found, err := a.history(c, one, q)
	if err != nil {
		return calls.Answer{}, err
	}

	return calls.JSON(withStale(found.all.AppendJSON(nil, one.key), found.is.Stale)), nil
}

// getWindow answers with the gain of a counter in the most recent period.
func (a *API) getWindow(c *gin.Context, one call) (calls.Answer, error) {
	const example = "?last=1h"
	query := ReadQuery(c, example)
	last := query.needed("last", example)
	if query.Err != nil {
		return calls.Answer{}, query.Err
	}

	q, err := one.rule.Window(last, time.Now())
	if err != nil {
		return calls.Answer{}, a.noHistory(c, one, err)
	}
	found, err := a.history(c, one, q)
	if err != nil {
		return calls.Answer{}, err
	}

	b := append(make([]byte, 0, 128), `{"key":`...)
	b = presence.AppendString(b, presence.KeyOf(one.key))
	b = append(b, `,"last":`...)
	// The duration is repeated as the client wrote it, so that 60m does not come back as 1h.
	b = presence.AppendString(b, query.Get("last"))
	b = append(b, `,"value":`...)
	b = strconv.AppendInt(b, found.all.Total, 10)

	return calls.JSON(withStale(append(b, '}'), found.is.Stale)), nil
}

// withStale marks a JSON object as stale if a region did not answer, so that its part is missing.
func withStale(b []byte, stale bool) []byte {
	if stale {
		b = append(b[:len(b)-1], `,"stale":true}`...)
	}

	return b
}

// getDimension answers with a counter's counts by the values of a dimension.
func (a *API) getDimension(c *gin.Context, one call) (calls.Answer, error) {
	name, err := param(c, "name")
	if err != nil || !slices.Contains(one.rule.Dimensions, name) {
		return calls.Answer{}, noDimension(one.rule)
	}
	query := ReadQuery(c, "?n=20")
	n := query.Number("n", defaultValues, 1, counter.MaxValues)
	if query.Err != nil {
		return calls.Answer{}, query.Err
	}

	ctx, cancel := a.within(c)
	defer cancel()
	is, counted, err := a.cfg.Counters.Dimension(ctx, one.key, name)
	if err != nil {
		return calls.Answer{}, a.failed(c, err)
	}

	// A counter keeps the kind that it was created with, even if its rule has another one by now.
	if is.Kind != 0 && !is.Kind.Gains() {
		a.logKind(one.rule)
		return calls.Answer{}, misfit(one, is.Value,
			"The counter is of kind "+is.Kind.String()+", which has no dimensions.")
	}

	return calls.JSON(withStale(counted.AppendJSON(nil, one.key, name, int(n)), is.Stale)), nil
}

// noDimension refuses a dimension that the rule does not have.
func noDimension(rule *counter.Rule) error {
	known := "it has none"
	if len(rule.Dimensions) > 0 {
		known = "ask for " + strings.Join(rule.Dimensions, ", ")
	}

	return calls.Bad("The rule " + strconv.Quote(rule.Written()) + " has no such dimension; " + known + ".")
}

// noHistory refuses a question about history that the counter's rule cannot answer.
func (a *API) noHistory(c *gin.Context, one call, err error) error {
	if !errors.Is(err, counter.ErrHistory) {
		return calls.Bad("The history cannot be asked for that: " + why(err, counter.ErrTime) + ".")
	}

	// Every answer with status 409 includes the value of the counter.
	ctx, cancel := a.within(c)
	defer cancel()
	read, err := a.read(ctx, []string{one.key}, "", one.rule.MaxAge)
	if err != nil {
		return a.failed(c, err)
	}

	return misfit(one, read[0].Value, "The counter has no history: the rule "+strconv.Quote(one.rule.Written())+
		" keeps none; add buckets to the rule.")
}

// history returns the answer to q, and the counter, which is stale if a region's part is missing.
func (a *API) history(c *gin.Context, one call, q counter.Question) (outcome, error) {
	ctx, cancel := a.within(c)
	defer cancel()

	compute := func(ctx context.Context) (outcome, error) {
		all, is, err := a.archive.Ask(ctx, one.rule, one.key, q)
		return outcome{all: all, is: is}, err
	}
	asked := question{of: one.key, q: q}
	found, err := a.questions.Ask(ctx, asked, one.rule.MaxAge, a.asker(c, one.server), compute)
	switch {
	case errors.Is(err, ErrTurn):
		return found, a.crowded()
	case err != nil:
		return found, a.failed(c, err)
	}

	if found.is.Kind != 0 && found.is.Kind != one.rule.Kind {
		a.logKind(one.rule)
		return found, misfit(one, found.is.Value,
			"The counter is of kind "+found.is.Kind.String()+", which keeps no history under this rule.")
	}

	return found, nil
}
