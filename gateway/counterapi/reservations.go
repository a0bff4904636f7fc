package counterapi

import (
	"encoding/json"
	"errors"
	"net/http"

	"github.com/gin-gonic/gin"

	"headcount/counter"
	"headcount/gateway/calls"
)

// reserve reserves an amount of a counter for some time.
func (a *API) reserve(c *gin.Context, one call) (calls.Answer, error) {
	text, err := a.body(c, one.server)
	if err != nil {
		return calls.Answer{}, err
	}
	change, err := counter.ParseReservation(text, one.key, one.rule)
	if err != nil {
		return calls.Answer{}, badBody(err)
	}

	return a.hold(c, change)
}

// endReservation returns the handler that ends the reservation in the path with the given verb.
func (a *API) endReservation(verb counter.Verb) handler {
	return func(c *gin.Context, one call) (calls.Answer, error) {
		id, err := param(c, "id")
		if err == nil {
			err = counter.CheckMember(id)
		}
		if err != nil {
			return calls.Answer{}, calls.Bad("This cannot be the id of a reservation: " + why(err, counter.ErrMember) +
				". Send 1 to 128 characters without control characters, percent-encoded.")
		}

		text, err := a.body(c, one.server)
		if err != nil {
			return calls.Answer{}, err
		}
		// A member that means nothing here is refused, rather than ignored without a word.
		if err := counter.ParseNothing(text); err != nil {
			return calls.Answer{}, badBody(err)
		}

		change := counter.Change{Key: one.key, Rule: one.rule, Verb: verb, Hold: &counter.Hold{ID: id}}
		return a.hold(c, change)
	}
}

// hold makes a change of a reservation. The reservation's id makes the call safe to repeat, so there is no idempotency
// key.
func (a *API) hold(c *gin.Context, change counter.Change) (calls.Answer, error) {
	made, err := a.makeOp(c, counter.Op{Changes: []counter.Change{change}})
	if errors.Is(err, counter.ErrNoReservation) {
		return calls.Answer{}, calls.Refuse(err, "The counter has no reservation with this id: it was never made, or "+
			"it ended more than a day ago.")
	}
	if err != nil {
		return calls.Answer{}, err
	}

	is, err := json.Marshal(made.Reservation)
	if err != nil {
		return calls.Answer{}, err
	}
	b := made.Counters[0].AppendJSON([]byte(`{"counter":`))
	b = append(b, `,"reservation":`...)
	b = append(b, is...)

	answer := calls.JSON(append(b, '}'))
	// The status tells a new reservation from a repetition of the call.
	isNew := change.Verb == counter.Reserve && !made.Replay
	if isNew {
		answer.Status = http.StatusCreated
	}

	return answer, nil
}

// getReservations answers with the open reservations of a counter.
func (a *API) getReservations(c *gin.Context, one call) (calls.Answer, error) {
	// Refused as a reservation of this counter would be.
	if !one.rule.Kind.IsExact() {
		change := counter.Change{Key: one.key, Rule: one.rule, Verb: counter.Reserve}
		return calls.Answer{}, change.Refusal(counter.Counter{Key: one.key})
	}

	query := ReadQuery(c, "?after=cart-7")
	after := query.id("after")
	if query.Err != nil {
		return calls.Answer{}, query.Err
	}

	ctx, cancel := a.within(c)
	defer cancel()
	page, err := a.cfg.Counters.Reservations(ctx, one.key, after, counter.MaxReservations)

	return a.page(c, page, err)
}
