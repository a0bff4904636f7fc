package counterapi

import (
	"net/http"

	"headcount/counter"
	"headcount/gateway/calls"
)

// Calls returns the calls of counters and limits. Their event streams and badges are in other packages.
func (a *API) Calls() []calls.Call {
	const one = Root + "/{key}"

	return []calls.Call{
		{
			ID: "getCounters", Method: http.MethodGet, Path: Root, Do: a.getSeveral,
			Who: calls.Opened, Takes: "keys", Gives: "Counters", Refuses: "400 401 403 503",
			Does: "Several counters, in the order asked.",
		},
		{
			ID: "changeCounters", Method: http.MethodPost, Path: Root, Do: a.batch,
			Who: calls.Server, Takes: "idempotency", Body: "Batch", Gives: "Counters",
			Refuses: "400 401 403 409 413 415 503",
			Does:    "Up to 1,000 changes, of exact counters alone or of others alone.",
		},
		{
			ID: "getCounter", Method: http.MethodGet, Path: one, Do: a.getOne,
			Who: calls.Opened, Gives: "Counter", Refuses: "400 401 403 503",
			Does: "A counter, which may lag as its rule says.",
		},
		{
			ID: "deleteCounter", Method: http.MethodDelete, Path: one, Do: a.delete,
			Who: calls.Server, Gives: "204", Refuses: "400 401 403 503",
			Does: "Deletes a counter with its members, history and ledger.",
		},
		{
			ID: "getExactCounter", Method: http.MethodGet, Path: one + "/exact", Do: a.getExact,
			Who: calls.Opened, Gives: "Counter", Refuses: "400 401 403 503",
			Does: "A counter with everything that was acknowledged before.",
		},
		{
			ID: "incrementCounter", Method: http.MethodPost, Path: one + "/increment", Do: a.increment,
			Who: calls.Opened, Takes: "idempotency", Body: "Step?", Gives: "Counter",
			Refuses: "400 401 403 409 413 415 429 503",
			Does:    "Adds to a sum or an exact counter.",
		},
		{
			ID: "decrementCounter", Method: http.MethodPost, Path: one + "/decrement", Do: a.byServer(stepDown),
			Who: calls.Server, Takes: "idempotency", Body: "Step?", Gives: "Counter",
			Refuses: "400 401 403 409 413 415 503",
			Does:    "Takes away from a sum or an exact counter.",
		},
		{
			ID: "resetCounter", Method: http.MethodPost, Path: one + "/reset", Do: a.byServer(counter.ParseReset),
			Who: calls.Server, Takes: "idempotency", Body: "CounterReset", Gives: "Counter",
			Refuses: "400 401 403 409 413 415 503",
			Does:    "Sets a counter to 0; its history stays.",
		},
		{
			ID: "setCounter", Method: http.MethodPost, Path: one + "/set", Do: a.byServer(counter.ParseSet),
			Who: calls.Server, Takes: "idempotency", Body: "Setting", Gives: "Counter",
			Refuses: "400 401 403 409 413 415 503",
			Does:    "Gives an exact counter a value, within its bounds.",
		},
		{
			ID: "adjustCounter", Method: http.MethodPost, Path: one + "/adjust", Do: a.byServer(counter.ParseAdjust),
			Who: calls.Server, Takes: "idempotency", Body: "Adjustment", Gives: "Counter",
			Refuses: "400 401 403 409 413 415 503",
			Does:    "Corrects a sum or an exact counter; its history stays.",
		},
		{
			ID: "changeMembers", Method: http.MethodPost, Path: one + "/members", Do: a.byServer(counter.ParseMembers),
			Who: calls.Server, Takes: "idempotency", Body: "Members", Gives: "Counter",
			Refuses: "400 401 403 409 413 415 503",
			Does:    "Adds and removes up to 1,000 members.",
		},
		{
			ID: "getMember", Method: http.MethodGet, Path: one + "/members/{member}", Do: a.getMember,
			Who: calls.Opened, Gives: "Member", Refuses: "400 401 403 409 503",
			Does: "Whether somebody is a member.",
		},
		{
			ID: "addMember", Method: http.MethodPut, Path: one + "/members/{member}", Do: a.addMember,
			Who: calls.Opened, Gives: "Member", Refuses: "400 401 403 409 413 415 429 503",
			Does: "Adds a member.",
		},
		{
			ID: "removeMember", Method: http.MethodDelete, Path: one + "/members/{member}", Do: a.removeMember,
			Who: calls.Opened, Gives: "Member", Refuses: "400 401 403 409 413 415 429 503",
			Does: "Removes a member.",
		},
		{
			ID: "getLedger", Method: http.MethodGet, Path: one + "/ledger", Do: a.getLedger,
			Who: calls.Server, Takes: "after limit", Gives: "Ledger", Refuses: "400 401 403 503",
			Does: "The changes of an exact counter, the corrections of any.",
		},
		{
			ID: "getRange", Method: http.MethodGet, Path: one + "/range", Do: a.getRange,
			Who: calls.Opened, Takes: "from to step", Gives: "Range", Refuses: "400 401 403 409 429 503",
			Does: "What a counter gained, step by step.",
		},
		{
			ID: "getWindow", Method: http.MethodGet, Path: one + "/window", Do: a.getWindow,
			Who: calls.Opened, Takes: "last", Gives: "Window", Refuses: "400 401 403 409 429 503",
			Does: "What a counter gained up to now.",
		},
		{
			ID: "getDimension", Method: http.MethodGet, Path: one + "/dimensions/{name}", Do: a.getDimension,
			Who: calls.Server, Takes: "n", Gives: "Dimension", Refuses: "400 401 403 409 503",
			Does: "The values of a dimension that count most.",
		},
		{
			ID: "getAggregate", Method: http.MethodGet, Path: one + "/aggregate", Do: a.getAggregate,
			Who: calls.Server, Gives: "Aggregate", Refuses: "400 401 403 409 503",
			Does: "All counters that a match fits, added up.",
		},
		{
			ID: "getTop", Method: http.MethodGet, Path: TopRoot, Do: a.getTop,
			Who: calls.Opened, Takes: "match last n", Gives: "Top", Refuses: "400 401 403 429 503",
			Does: "What gained most under a rule with top.",
		},
		{
			ID: "askLimit", Method: http.MethodPost, Path: limitsRoot + "/{key}", Do: a.askLimit,
			Who: calls.Server, Body: "LimitQuestion", Gives: "Limit", Refuses: "400 401 403 413 415 503",
			Does: "May so much pass now? If so, it counts.",
		},
	}
}
