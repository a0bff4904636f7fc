package openapi

import "headcount/gateway/calls"

// message is a frame of the WebSocket, or a server-sent event.
type message struct {
	name, does string
	payload    object
}

func frame(kind, does string, more ...any) message {
	return message{kind, does, members(append([]any{"type", object{"type": "string", "const": kind}}, more...)...)}
}

// A client may send members that the server does not know.
func sent(kind, does string, more ...any) message {
	m := frame(kind, does, more...)
	m.payload["additionalProperties"] = true
	return m
}

var names = object{"type": "array", "items": id}

// said are the frames that a client sends.
var said = []message{
	sent("join", "The user is on a page from now on, and the client gets its counts. A user joins at most 10,000 "+
		"pages over all connections to a gateway.", "page", id),
	sent("leave", "The user is on the page no more.", "page", id),
	sent("subscribe", "The client wants counts of pages, * too, and counters; at most 100 at a time, with those "+
		"joined.", "pages?", names, "counters?", names,
		"precision?", object{"type": "integer", "minimum": 1, "maximum": 9, "description": "significant digits of " +
			"the counts"}),
	sent("unsubscribe", "The client wants them no more.", "pages?", names, "counters?", names),
	sent("heartbeat", "The server answers with the same. A client sends it when it has heard nothing for "+
		"heartbeat_ms."),
	sent("pause", "The client gets no counts and no counters until it resumes, not even the first after a join or "+
		"subscribe. All else goes on. A new connection is not paused."),
	sent("resume", "The client gets at once the newest of all that changed meanwhile, and everything from then on."),
	sent("read", "The user has seen everything, or the changes of one page.", "page?", id),
}

// told are the frames that the server sends.
var told = []message{
	frame("welcome", "The first frame: who the user is.", "user", text, "id?", about(text, "the signed id, of "+
		"anonymous users only"), "heartbeat_ms", natural),
	frame(
		"unread",
		"How many changes the user has not seen; the second frame, and again on each change.",
		"count",
		natural,
	),
	frame("count", "How many are on a page: at once after join and subscribe, then on change.", countMembers...),
	frame(
		"counter",
		"A counter: at once after subscribe, then on change.",
		with(counterMembers, "mine?", about(yes, "the user is a member"))...,
	),
	frame("heartbeat", "The answer to a heartbeat."),
	frame("reconnect", "The server ends; connect again after this time.", "after_ms", natural),
	frame("error", "The client has sent something invalid, and the connection stays open; the twentieth "+
		"ends it.",
		"code", one(calls.Codes...),
		"message", text, "page?", text, "counter?", text),
}

// The events of the streams. Their SSE event names are the names of the messages, and their
// ids, if any, are versions.
var (
	countEvent = message{"count", "event: count, id: the version, data: this.", schemas["Count"].(object)}
	joinEvent  = message{"join", "event: join, data: this. With ?join=1: the user is on the page. Another " +
		"stream is to be open within heartbeat_ms.", members("page", id, "heartbeat_ms", natural)}
	counterEvent = message{"counter", "event: counter, id: the version, data: this.", schemas["Counter"].(object)}
	userEvent    = message{"user", "event: user, data: this. A user as it is now, then at most once a second " +
		"when that has changed.", schemas["User"].(object)}
	topPagesEvent = message{"top", "event: top, data: this, most users first. At most one a second, when the list " +
		"has changed.", schemas["TopPages"].(object)}
	topEvent = message{
		"top",
		"event: top, data: this. At most one a second, when the list has changed.",
		schemas["Top"].(object),
	}
)

// AsyncAPI returns the document of the frames and events of a server below a base path.
func AsyncAPI(base string) []byte {
	messages := object{}
	add := func(prefix string, list ...message) (object, []any) {
		channel, refs := object{}, []any{}
		for _, m := range list {
			// Frames of both directions and events may have one name.
			name := prefix + m.name
			messages[name] = object{"name": name, "title": m.name, "summary": m.does, "payload": m.payload}
			channel[name] = object{"$ref": "#/components/messages/" + name}
			refs = append(refs, name)
		}
		return channel, refs
	}
	operation := func(action, channel string, names []any) object {
		refs := []any{}
		for _, name := range names {
			refs = append(refs, object{"$ref": "#/channels/" + channel + "/messages/" + name.(string)})
		}
		return object{"action": action, "channel": object{"$ref": "#/channels/" + channel}, "messages": refs}
	}
	fromClient, saidNames := add("client_", said...)
	fromServer, toldNames := add("server_", told...)
	pageEvents, countNames := add("event_", countEvent, joinEvent)
	counterEvents, counterNames := add("event_", counterEvent)
	topEvents, topNames := add("event_", topEvent)
	topPageEvents, topPageNames := add("event_pages_", topPagesEvent)
	userEvents, userNames := add("event_", userEvent)
	in := func(name string) object { return object{name: object{"description": "percent-encoded"}} }
	server := func(protocol, does string) object {
		host := object{"default": "localhost:8080", "description": "The host, with the port if it is not that of " +
			"the protocol."}
		of := object{"host": "{host}", "protocol": protocol, "description": does, "variables": object{"host": host}}
		if base != "" {
			of["pathname"] = base
		}
		return of
	}
	sockets := []any{object{"$ref": "#/servers/sockets"}}
	streams := []any{object{"$ref": "#/servers/streams"}}

	return document(object{
		"asyncapi": "3.0.0",
		"info": object{
			"title": "Headcount", "version": version, "license": license, "tags": tags,
			"description": "Frames are JSON text, with the subprotocol headcount.v1. Event streams send a comment " +
				"every --ping-interval, /-/top/events after 25 s at the latest. The frames of /app/{app} are " +
				"those of Pusher's protocol, version 7. The other calls are in /-/openapi.json.",
		},
		"defaultContentType": "application/json",
		"servers": object{
			"sockets": server("wss", "WebSockets; ws where the server has no TLS."),
			"streams": server("https", "Server-sent events; http where the server has no TLS."),
		},
		"channels": object{
			"socket": object{
				"address":  "/-/ws",
				"servers":  sockets,
				"messages": all(fromClient, fromServer),
				"bindings": object{"ws": object{"method": "GET"}},
			},
			"pageEvents": object{
				"address":    "/{page}/counter/events",
				"servers":    streams,
				"parameters": in("page"),
				"messages":   pageEvents,
			},
			"counterEvents": object{
				"address":    "/api/v1/counters/{key}/events",
				"servers":    streams,
				"parameters": in("key"),
				"messages":   counterEvents,
			},
			"topEvents":     object{"address": "/api/v1/top/events", "servers": streams, "messages": topEvents},
			"topPageEvents": object{"address": "/-/top/events", "servers": streams, "messages": topPageEvents},
			"userEvents":    object{"address": "/-/users/events", "servers": streams, "messages": userEvents},
		},
		"operations": object{ // of the server: it receives what clients send
			"hear":           operation("receive", "socket", saidNames),
			"tell":           operation("send", "socket", toldNames),
			"streamCount":    operation("send", "pageEvents", countNames),
			"streamCounter":  operation("send", "counterEvents", counterNames),
			"streamTop":      operation("send", "topEvents", topNames),
			"streamTopPages": operation("send", "topPageEvents", topPageNames),
			"streamUsers":    operation("send", "userEvents", userNames),
		},
		"components": object{"messages": messages},
	})
}
