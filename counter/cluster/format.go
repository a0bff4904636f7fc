package cluster

import (
	"context"
	"errors"
	"strconv"

	"headcount/counter"
	"headcount/internal/redisconn"
)

// Format is the version of the format of counters in Redis. It is one of the cluster facts of package presenceredis, so
// that processes of different releases do not write to each other's counters.
const Format = 3

const (
	factsKey   = "hc:{c}:facts"
	formatFact = "counters"
)

// accept refuses counters in the format of another release before anything is read or changed. It implements the Accept
// of rowsredis.Config. Presence still works with such a Redis, so during an upgrade by rolling restart only counters
// are interrupted.
func accept(ctx context.Context, c *redisconn.Client) error {
	facts, err := c.HMGet(ctx, factsKey, formatFact, "format").Result()
	if err != nil {
		return err
	}

	// A Redis that no release has used yet has none.
	theirs, _ := facts[0].(string)
	if err := CheckFormat(theirs, facts[1] != nil); err != nil {
		return redisconn.Answered(err)
	}

	return nil
}

// CheckFormat returns a *counter.FormatError if the format is that of another release. theirs is the fact that states
// the format. isUsed says that the Redis has facts at all, which the first processes write; releases before the first
// numbered format wrote facts without it.
func CheckFormat(theirs string, isUsed bool) error {
	isNew := theirs == "" && !isUsed
	if isNew || theirs == strconv.Itoa(Format) {
		return nil
	}

	return &counter.FormatError{Theirs: theirs, Ours: Format}
}

// accept is the Accept of this process's rows. It records the result for Refused.
func (p *Process) accept(ctx context.Context, c *redisconn.Client) error {
	err := accept(ctx, c)

	var other *counter.FormatError
	// Without such an error this stores nil, which ends a former refusal.
	errors.As(err, &other)
	p.refused.Store(other)

	return err
}

// Refused returns why this process serves no counters although Redis answers: their format is that of another release.
// It returns nil otherwise, and before Redis has answered.
func (p *Process) Refused() error {
	if other := p.refused.Load(); other != nil {
		return other
	}

	return nil
}
