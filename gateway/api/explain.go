package api

import (
	"context"
	"errors"
	"time"

	"github.com/gin-gonic/gin"

	"headcount/gateway/calls"
	"headcount/gateway/counterapi"
	"headcount/gateway/httppolicy"
	"headcount/presence"
)

const (
	maxExplained = 64          // cached answers
	explainedAge = time.Second // maximum age of an answer to visitors
)

// explanation is a count and its parts. It implements counterapi.Answered.
type explanation struct {
	counter presence.Count

	People      int64            `json:"people"`
	Connections int64            `json:"connections"`
	Held        int64            `json:"held"`
	Leaving     int64            `json:"leaving"`
	Ignored     int64            `json:"ignored"`
	Regions     map[string]int64 `json:"regions"`
	Moving      bool             `json:"moving"`
}

func (explanation) Points() int   { return 1 }
func (explanation) Lacking() bool { return false }

// explainCounter answers with a count and its parts. Everyone who may see the dashboard may ask, because it shows the
// same.
func (a *API) explainCounter(c *gin.Context, name string) (calls.Answer, error) {
	if !a.callers.mayLook(c) {
		return calls.Answer{}, a.callers.Server(c)
	}
	if err := a.Serving(); err != nil {
		return calls.Answer{}, Unavailable(err)
	}

	// All owners scan all their users for it, so visitors share answers and take turns.
	by := counterapi.Asker{Server: a.callers.IsServer(c.Request), Addr: a.callers.Addr(c.Request)}
	read := func(ctx context.Context) (explanation, error) { return a.explain(ctx, name) }
	is, err := a.explained.Ask(c.Request.Context(), name, explainedAge, by, read)
	switch {
	case errors.Is(err, counterapi.ErrTurn):
		return calls.Answer{}, a.tooMany("Too many explanations of counts are being made, for this address " +
			"or for all; ask again later.")
	case err != nil:
		return calls.Answer{}, storeAway(err)
	}

	body := append([]byte(`{"counter":`), is.counter.AppendJSON(nil)...)
	body = append(body, `,"explain":`...)
	body = append(body, httppolicy.JSON(is)...)

	return calls.PackedJSON(append(body, '}')), nil
}

// explain returns a count and its parts. If nothing changes during the call, the users here are this region's share,
// and the shares add up to the count.
func (a *API) explain(ctx context.Context, name string) (is explanation, err error) {
	ctx, cancel := context.WithTimeout(ctx, storeTimeout)
	defer cancel()

	parts := a.parts.Cluster.Explain(ctx, name)
	count, shares, err := a.cfg.Regions.Parts(ctx, name)
	if err != nil {
		return is, err
	}

	sum := int64(0)
	regions := map[string]int64{}
	for _, share := range shares {
		regions[share.Region] = share.Users
		sum += share.Users
	}

	// The first share is this region's. A page that no user ever joined may have none.
	own := int64(0)
	if len(shares) > 0 {
		own = shares[0].Users
	}
	addsUp := own == parts.People && sum == count.Users

	return explanation{
		counter: count, People: parts.People, Connections: parts.Connections, Held: parts.Held, Leaving: parts.Leaving,
		Ignored: parts.Ignored, Regions: regions, Moving: parts.Moving || count.Stale || !addsUp,
	}, nil
}
