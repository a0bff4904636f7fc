package counterapi

import (
	"errors"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/gin-gonic/gin"

	"headcount/counter"
	"headcount/counter/limit"
	"headcount/gateway/httppolicy"
)

// limitsRoot is the path of all limits.
const limitsRoot = "/api/v1/limits"

// postLimit answers whether a call may pass.
func (a *API) postLimit(c *gin.Context) {
	server := a.callers.IsServer(c.Request)
	key, err := param(c, "key")
	if err == nil {
		err = counter.CheckKey(key)
	}
	switch {
	case err != nil:
		problem(c, http.StatusBadRequest, "This cannot be the key of a limit: "+strings.TrimPrefix(err.Error(), counter.ErrKey.Error()+": ")+". Send 1 to 128 characters without control characters and *, percent-encoded.")
		return
	case !server:
		problem(c, http.StatusForbidden, "Limits are for servers; send an API key in the header "+httppolicy.APIKeyHeader+".")
		return
	}
	text, ok := a.body(c, server)
	if !ok {
		return
	}
	call, err := counter.ParseLimit(text, a.callers.Site(c).Qualify(key))
	if err != nil {
		badBody(c, err)
		return
	}
	ctx, cancel := a.within(c)
	defer cancel()
	taken, err := a.cfg.Counters.Limit(ctx, call)
	switch {
	case err == nil:
		a.writeLimit(c, call, taken)
	case errors.Is(err, counter.ErrUnavailable):
		a.limitUnavailable(c, err)
	default: // a defect: ParseLimit has checked the call
		a.defect(c, err)
	}
}

// writeLimit answers with the outcome of a call, and counts it.
func (a *API) writeLimit(c *gin.Context, call limit.Call, taken limit.Answer) {
	h, reset := c.Writer.Header(), time.Duration(taken.Reset)*time.Millisecond
	httppolicy.SetRateLimit(h, call.Limit, time.Duration(call.Window)*time.Millisecond, taken.Remaining, reset)
	b := append(make([]byte, 0, 128), `{"allowed":`...)
	b = strconv.AppendBool(b, taken.Allowed)
	b = append(b, `,"limit":`...)
	b = strconv.AppendInt(b, call.Limit, 10)
	b = append(b, `,"remaining":`...)
	b = strconv.AppendInt(b, taken.Remaining, 10)
	b = append(b, `,"reset_after_ms":`...)
	b = strconv.AppendInt(b, taken.Reset, 10)
	status, outcome := http.StatusOK, a.metrics.passed
	if !taken.Allowed {
		status, outcome = http.StatusTooManyRequests, a.metrics.stopped
		httppolicy.RetryAfter(reset)(h)
	}
	outcome.Inc()
	httppolicy.AnswerWith(c.Writer, status, "application/json", append(b, "}\n"...))
}

// limitUnavailable answers 503 to a call on a limit.
func (a *API) limitUnavailable(c *gin.Context, err error) {
	detail := "The store of limits cannot be reached now. The call may have been counted or not; decide whether to let it pass, or send it again."
	if errors.Is(err, counter.ErrBusy) {
		detail = "Too many calls on limits are waiting, or too many limits are kept in memory, and this call was not counted; send it again."
	}
	a.away(c, err, detail)
}
