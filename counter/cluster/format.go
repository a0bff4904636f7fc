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

	// The first processes of a Redis write its facts. Releases before the first format had facts without a number.
	theirs, numbered := facts[0].(string)
	isNew := !numbered && facts[1] == nil
	if isNew || theirs == strconv.Itoa(Format) {
		return nil
	}

	return redisconn.Answered(&counter.FormatError{Theirs: theirs, Ours: Format})
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
