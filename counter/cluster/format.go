package cluster

import (
	"context"
	"errors"
	"fmt"
	"strconv"

	"headcount/internal/redisconn"
)

// Format is the number of the format of counters in Redis. It is a fact of the cluster, as package presenceredis has them,
// so that processes of different releases do not write into each other's counters.
const Format = 3

// ErrFormat says that the counters in a Redis are those of another release.
var ErrFormat = errors.New("the counters in this Redis are of another release")

// accept refuses the counters of another release before anything is read or changed. It implements the Accept of
// rowsredis.Config. Presence is served all the same, so an upgrade is a rolling restart for all but counters.
func accept(ctx context.Context, c *redisconn.Client) error {
	facts, err := c.HMGet(ctx, "hc:{c}:facts", "counters", "format").Result()
	if err != nil {
		return err
	}

	theirs, numbered := facts[0].(string)
	isNew := !numbered && facts[1] == nil
	if isNew || theirs == strconv.Itoa(Format) {
		return nil
	}

	return redisconn.Answered(fmt.Errorf("%w: their format is %q, this release knows %d; carry them over: "+
		"\"headcount export --redis URL\" of the release that wrote them, then \"headcount import --redis URL\" of this one",
		ErrFormat, theirs, Format))
}
