package counterapi

import (
	"errors"
	"net/http"
	"strconv"
	"time"

	"github.com/gin-gonic/gin"

	"headcount/counter"
	"headcount/counter/limit"
	"headcount/gateway/calls"
	"headcount/gateway/httppolicy"
)

// limitsRoot is the path of all limits.
const limitsRoot = "/api/v1/limits"

var errLimitsNotPublic = calls.Refuse(calls.ErrNotPublic,
	"Limits are for servers; send an API key in the header "+httppolicy.APIKeyHeader+".")

// askLimit answers whether a call on a limit is allowed.
func (a *API) askLimit(c *gin.Context) (calls.Answer, error) {
	asked, err := a.parseLimit(c)
	if err != nil {
		return calls.Answer{}, err
	}

	ctx, cancel := a.within(c)
	defer cancel()
	taken, err := a.cfg.Counters.Limit(ctx, asked)
	switch {
	case errors.Is(err, counter.ErrUnavailable):
		return calls.Answer{}, a.limitUnavailable(err)
	case err != nil: // a bug: parseLimit has validated the call
		return calls.Answer{}, err
	}

	return a.answerLimit(c.Writer.Header(), asked, taken), nil
}

// forgetLimit deletes the states of a limit.
func (a *API) forgetLimit(c *gin.Context) (calls.Answer, error) {
	key, err := a.limitKey(c)
	if err != nil {
		return calls.Answer{}, err
	}

	ctx, cancel := a.within(c)
	defer cancel()
	err = a.cfg.Counters.ForgetLimit(ctx, key)
	if errors.Is(err, counter.ErrUnavailable) {
		return calls.Answer{}, a.unavailable(err,
			"The store of limits cannot be reached now. The limit may have been forgotten or not; send the call again.")
	}

	return calls.NoContent, err
}

// limitKey returns the name of the limit in the path.
func (a *API) limitKey(c *gin.Context) (string, error) {
	key, err := param(c, "key")
	if err == nil {
		err = counter.CheckKey(key)
	}
	if err != nil {
		return "", badKey("limit", "", err)
	}
	if !a.callers.IsServer(c.Request) {
		return "", errLimitsNotPublic
	}

	return a.callers.Site(c).Qualify(key), nil
}

// parseLimit parses the request to a limit.
func (a *API) parseLimit(c *gin.Context) (asked limit.Request, err error) {
	key, err := a.limitKey(c)
	if err != nil {
		return asked, err
	}

	text, err := a.body(c, true)
	if err != nil {
		return asked, err
	}
	asked, err = counter.ParseLimit(text, key)
	if err != nil {
		return asked, badBody(err)
	}

	return asked, nil
}

// answerLimit returns the answer with the outcome of a request, and counts it. A 429 is an ordinary answer here, and
// not an error: the caller asked whether the limit is reached.
func (a *API) answerLimit(h http.Header, asked limit.Request, taken limit.Answer) calls.Answer {
	window := time.Duration(asked.Window) * time.Millisecond
	reset := time.Duration(taken.Reset) * time.Millisecond
	httppolicy.SetRateLimit(h, asked.Limit, window, taken.Remaining, reset)

	b := append(make([]byte, 0, 128), `{"allowed":`...)
	b = strconv.AppendBool(b, taken.Allowed)
	b = append(b, `,"limit":`...)
	b = strconv.AppendInt(b, asked.Limit, 10)
	b = append(b, `,"remaining":`...)
	b = strconv.AppendInt(b, taken.Remaining, 10)
	b = append(b, `,"reset_after_ms":`...)
	b = strconv.AppendInt(b, taken.Reset, 10)
	answer := calls.JSON(append(b, '}'))

	if taken.Allowed {
		// A call that only looks, or gives back, has passed nothing.
		if asked.Cost > 0 {
			a.metrics.passed.Inc()
		}
		return answer
	}

	// Clients that only look at headers expect those of any other 429.
	a.metrics.stopped.Inc()
	httppolicy.RetryAfter(reset)(h)
	answer.Status = http.StatusTooManyRequests

	return answer
}

// limitUnavailable refuses a call on a limit with 503.
func (a *API) limitUnavailable(err error) error {
	detail := "The store of limits cannot be reached now. The call may have been counted or not; " +
		"decide whether to let it pass, or send it again."
	if errors.Is(err, counter.ErrBusy) {
		detail = "Too many calls on limits are waiting, or too many limits are kept in memory, " +
			"and this call was not counted; send it again."
	}

	return a.unavailable(err, detail)
}
