package cluster

import (
	"context"
	"errors"
	"strconv"

	"headcount/counter"
	"headcount/internal/redisconn"
)

// Format is the number of the format of counters in Redis. It is a fact of the cluster, as package presenceredis has
// them, so that processes of different releases do not write into each other's counters.
const Format = 3

const (
	factsKey   = "hc:{c}:facts"
	formatFact = "counters"
)

// accept refuses the counters of another release before anything is read or changed. It implements the Accept of
// rowsredis.Config. Presence is served all the same, so an upgrade is a rolling restart for all but counters.
func accept(ctx context.Context, c *redisconn.Client) error {
	facts, err := c.HMGet(ctx, factsKey, formatFact, "format").Result()
	if err != nil {
		return err
	}

	theirs, _ := facts[0].(string)
	if err := CheckFormat(theirs, facts[1] != nil); err != nil {
		return redisconn.Answered(err)
	}

	return nil
}

// CheckFormat returns a *counter.FormatError for the counters of another release: theirs is the fact that says their
// format. isUsed says that the Redis has facts, which its first processes write; releases before the first format had
// facts without a number.
func CheckFormat(theirs string, isUsed bool) error {
	isNew := theirs == "" && !isUsed
	if isNew || theirs == strconv.Itoa(Format) {
		return nil
	}

	return &counter.FormatError{Theirs: theirs, Ours: Format}
}

// accept is the Accept of the rows of this process. It notes what Refused returns.
func (p *Process) accept(ctx context.Context, c *redisconn.Client) error {
	err := accept(ctx, c)

	var other *counter.FormatError
	errors.As(err, &other)
	p.refused.Store(other)

	return err
}

// Refused returns why this process serves no counters although Redis answers: they are of another release. It returns
// nil otherwise, and before Redis has answered.
func (p *Process) Refused() error {
	if other := p.refused.Load(); other != nil {
		return other
	}

	return nil
}
