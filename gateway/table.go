package gateway

import (
	"net/http"
	"slices"

	"headcount/gateway/calls"
	"headcount/gateway/counterapi"
)

// table returns all calls of the public address.
func (g *Gateway) table() []calls.Call {
	return slices.Concat(g.api.Calls(), g.counters.Calls(), g.longCalls())
}

// longCalls returns the calls that are answered with a long connection.
func (g *Gateway) longCalls() []calls.Call {
	return []calls.Call{
		{ID: "streamPageCount", Method: http.MethodGet, Path: "/{page}/counter/events", Do: g.getEvents,
			Who: calls.Visitor, Takes: "lastevent urltoken urlid join", Gives: "text/event-stream",
			Refuses: "401 429 503",
			Does:    "The count, live, as server-sent events."},
		{ID: "openSocket", Method: http.MethodGet, Path: calls.SocketPath, Do: g.getSocket,
			Who: calls.Visitor, Takes: "urltoken urlid back", Gives: "101", Refuses: "401 426 503",
			Does: "The WebSocket; its frames are in /-/asyncapi.json."},
		{
			// pusherRoutes adds the route.
			ID: "openPusherSocket", Method: http.MethodGet, Path: calls.PusherRoot + "{app}",
			Who: calls.Visitor, Takes: "protocol urltoken urlid back", Gives: "101", Refuses: "426",
			Does: "With --pusher-key: the WebSocket of Pusher's clients. Refusals of an upgrade are close codes.",
		},
		{ID: "streamUsers", Method: http.MethodGet, Path: "/-/users/events", Do: g.getUserEvents,
			Who: calls.Server, Takes: "users", Gives: "text/event-stream", Refuses: "401 429 503",
			Does: "Users, live, as server-sent events: each as it is now, then each change."},
		{ID: "streamTopPages", Method: http.MethodGet, Path: "/-/top/events", Do: g.getTopPageEvents,
			Who: calls.Viewer, Takes: "n urltoken urlid", Gives: "text/event-stream", Refuses: "401 429 503",
			Does: "The pages with the most users, live, as server-sent events. Visitors get those of --public-top."},
		{ID: "streamCounter", Method: http.MethodGet, Path: counterapi.Root + "/{key}/events",
			Do: g.getCounterEvents, Who: calls.Opened,
			Takes: "lastevent urltoken urlid", Gives: "text/event-stream", Refuses: "401 429 503",
			Does: "A counter, live, as server-sent events."},
		{ID: "streamTop", Method: http.MethodGet, Path: counterapi.TopRoot + "/events", Do: g.getTopEvents,
			Who: calls.Opened, Takes: "match last n urltoken urlid", Gives: "text/event-stream", Refuses: "401 429 503",
			Does: "The same, live, as server-sent events."},
	}
}
