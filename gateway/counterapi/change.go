package counterapi

import (
	"errors"
	"time"

	"github.com/gin-gonic/gin"

	"headcount/counter"
	"headcount/gateway/calls"
	"headcount/internal/tracing"
)

// parser parses the body of a change of one counter.
type parser func(text []byte, key string, rule *counter.Rule) (counter.Change, error)

// increment adds to a counter.
func (a *API) increment(c *gin.Context, one call) (calls.Answer, error) {
	// A visitor may not send dimensions, so error messages must not list their names.
	parse := counter.ParseOpenStep
	if one.server {
		parse = stepUp
	}
	op, err := a.op(c, one, parse)
	if err != nil {
		return calls.Answer{}, err
	}

	if !one.server {
		if err := a.admit(c, one, &op.Changes[0]); err != nil {
			return calls.Answer{}, err
		}
		if a.callers.Crawler(c.Request) { // a crawler's request changes nothing
			return a.getExact(c, one)
		}
	}

	made, err := a.make(c, op)
	if err != nil {
		return calls.Answer{}, err
	}
	a.issue(c, one)

	return answerOne(made[0]), nil
}

func stepUp(text []byte, key string, rule *counter.Rule) (counter.Change, error) {
	return counter.ParseStep(text, key, rule, false)
}

func stepDown(text []byte, key string, rule *counter.Rule) (counter.Change, error) {
	return counter.ParseStep(text, key, rule, true)
}

// admit returns an error if a caller without API key may not make this change.
func (a *API) admit(c *gin.Context, one call, change *counter.Change) error {
	attributed := change.Reason != "" || change.By != ""
	if change.Delta != 1 || len(change.Dimensions) > 0 || attributed {
		return notPublic(" but by 1 and without dimensions, reason and by")
	}

	return a.limit(c, one, change)
}

// issue sends a caller without API key its identity, so that the caller can keep it.
func (a *API) issue(c *gin.Context, one call) {
	if !one.server {
		a.callers.Issue(c, one.id)
	}
}

// change returns the handler of a change that parse parses and that is not rate limited.
func (a *API) change(parse parser) handler {
	return func(c *gin.Context, one call) (calls.Answer, error) {
		op, err := a.op(c, one, parse)
		if err != nil {
			return calls.Answer{}, err
		}

		made, err := a.make(c, op)
		if err != nil {
			return calls.Answer{}, err
		}

		return answerOne(made[0]), nil
	}
}

// batch makes several changes.
func (a *API) batch(c *gin.Context) (calls.Answer, error) {
	if !a.callers.IsServer(c.Request) {
		return calls.Answer{}, notPublic("")
	}

	op, err := a.batchOp(c)
	if err != nil {
		return calls.Answer{}, err
	}

	made, err := a.make(c, op)
	if err != nil {
		return calls.Answer{}, err
	}

	return answerList(len(made), func(i int) *counter.Counter { return &made[i] }), nil
}

// batchOp parses the body and the Idempotency-Key of several changes.
func (a *API) batchOp(c *gin.Context) (op counter.Op, err error) {
	text, err := a.body(c, true)
	if err != nil {
		return op, err
	}

	site := a.callers.Site(c)
	op.Changes, err = counter.ParseBatch(text, a.cfg.Rules.In(site))
	if err != nil {
		return op, badBody(err)
	}
	for i := range op.Changes {
		op.Changes[i].Key = site.Qualify(op.Changes[i].Key)
	}

	// All batches share one space of keys, whichever counters they change.
	op.IdempotencyKey, err = idempotencyKey(c, site.Qualify("*"), "")

	return op, err
}

// delete deletes a counter.
func (a *API) delete(c *gin.Context, one call) (calls.Answer, error) {
	change := counter.Change{Key: one.key, Rule: one.rule, Verb: counter.Delete}
	if _, err := a.make(c, counter.Op{Changes: []counter.Change{change}}); err != nil {
		return calls.Answer{}, err
	}

	return calls.NoContent, nil
}

// op parses the body and the Idempotency-Key of a change of one counter.
func (a *API) op(c *gin.Context, one call, parse parser) (op counter.Op, err error) {
	text, err := a.body(c, one.server)
	if err != nil {
		return op, err
	}

	change, err := parse(text, one.key, one.rule)
	if err != nil {
		return op, badBody(err)
	}
	op.Changes = []counter.Change{change}

	// Different visitors, and changes of different counters, may use the same key.
	op.IdempotencyKey, err = idempotencyKey(c, one.key, one.id.User)

	return op, err
}

// make carries out op and returns the counters after it, one for each change.
func (a *API) make(c *gin.Context, op counter.Op) ([]counter.Counter, error) {
	result, err := a.makeOp(c, op)

	return result.Counters, err
}

// makeOp carries out op. If the error is nil, so is that of the result.
func (a *API) makeOp(c *gin.Context, op counter.Op) (counter.Result, error) {
	ctx, cancel := a.within(c)
	defer cancel()

	// Does something only in programs that tests start.
	before := floorsOf(op.Changes)

	// Measure only the store: the time until the change is durable, or refused.
	began := time.Now()
	ctx, span := tracing.Start(ctx, "change of counters")
	result := a.cfg.Counters.Change(ctx, op)
	span.End()
	a.metrics.acknowledged.Observe(time.Since(began).Seconds())

	if result.Err != nil {
		return counter.Result{}, a.refused(c, op.Changes, result.Err)
	}

	if result.Replay {
		a.metrics.replayed.Inc()
		c.Header("Idempotent-Replay", "true")
	} else {
		a.metrics.made.Inc()
	}

	// Make later reads see the change.
	for i := range result.Counters {
		a.live.remember(result.Counters[i])
		a.reads.Forget(result.Counters[i].Key)
	}
	before.noteChanges(op.Changes, &result)

	return result, nil
}

// refused returns the error for changes that were not made. An error that is neither a conflict nor an outage is a bug,
// because the changes were validated before.
func (a *API) refused(c *gin.Context, changes []counter.Change, err error) error {
	var conflict *counter.Conflict
	switch {
	case errors.As(err, &conflict):
		for i := range changes {
			if surprises(conflict, &changes[i]) {
				a.logKind(changes[i].Rule)
			}
		}
		a.metrics.refused.Inc()
		return conflict
	case errors.Is(err, counter.ErrUnavailable):
		return a.failed(c, err)
	}

	return err
}

// surprises reports whether a conflict says that the counter has the wrong kind, although the change fits the kind of
// its rule. Then the counter is of an older kind than its rule.
func surprises(conflict *counter.Conflict, change *counter.Change) bool {
	return change.Key == conflict.Key &&
		errors.Is(conflict.Is, counter.ErrKind) &&
		change.Refusal(counter.Counter{}) == nil
}
