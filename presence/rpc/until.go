package rpc

import (
	"context"
	"net/url"
	"strconv"
	"time"
)

const untilName = "until"

// untilQuery returns the query that says when the caller gives up. now is the time of the cluster.
func untilQuery(ctx context.Context, now time.Time) string {
	deadline, limited := ctx.Deadline()
	if !limited || now.IsZero() {
		return ""
	}

	// The time that is left, by the monotonic clock: the wall clock of this machine may be wrong.
	until := now.Add(time.Until(deadline))

	return untilName + "=" + strconv.FormatInt(until.UnixMilli(), 10)
}

// remaining returns how much longer the caller of a request waits, by the clock of the cluster. known is false if the
// request does not say it, as in the previous release.
func remaining(query url.Values, now time.Time) (left time.Duration, known bool) {
	ms, err := strconv.ParseInt(query.Get(untilName), 10, 64)
	if err != nil {
		return 0, false
	}

	return time.UnixMilli(ms).Sub(now), true
}
