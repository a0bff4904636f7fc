package openapi

import (
	"strings"

	"headcount/counter"
)

// members describes an object that has these members and no others: names and schemas
// in turn. A name with a ? may be missing.
func members(pairs ...any) object {
	properties, required := object{}, []string{}
	for i := 0; i < len(pairs); i += 2 {
		name, optional := strings.CutSuffix(pairs[i].(string), "?")
		properties[name] = pairs[i+1]
		if !optional {
			required = append(required, name)
		}
	}
	o := object{"type": "object", "properties": properties, "additionalProperties": false}
	if len(required) > 0 {
		o["required"] = required
	}
	return o
}

func list(of object) object { return object{"type": "array", "items": of} }

func one(of ...string) object { return object{"type": "string", "enum": of} }

func about(o object, text string) object { return all(o, object{"description": text}) }

// with is a list of members with more of them.
func with(pairs []any, more ...any) []any { return append(pairs[:len(pairs):len(pairs)], more...) }

var (
	text    = object{"type": "string"}
	flag    = object{"type": "boolean"}
	yes     = object{"type": "boolean", "const": true}
	number  = object{"type": "integer", "format": "int64"}
	natural = object{"type": "integer", "format": "int64", "minimum": 0}
	id      = object{"type": "string", "minLength": 1, "maxLength": 128}
	note    = object{"type": "string", "minLength": 1, "maxLength": 300}
	reason  = object{"type": "string", "minLength": 1, "maxLength": 200}
	moment  = object{"type": "string", "format": "date-time", "pattern": `^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$`}
	never   = object{
		"type":    []string{"string", "null"},
		"format":  "date-time",
		"pattern": `^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$`,
	}
	versioned = object{
		"type":        "string",
		"pattern":     `^\d+-\d+$`,
		"description": "incarnation-sequence; the greater one is newer",
	}
	cost  = object{"type": "integer", "format": "int64", "minimum": -1_000_000_000_000, "maximum": 1_000_000_000_000}
	delta = object{"type": "integer", "format": "int64", "minimum": 1, "maximum": 1_000_000_000_000}
	span  = object{"type": "string", "pattern": `^\d`, "examples": []string{"5m", "1h", "7d"}}

	instant    = object{"type": "string", "format": "date-time"}
	dimensions = object{"type": "object", "additionalProperties": id}
	shares     = object{
		"type": "object", "additionalProperties": natural, "description": "each region's share, with ?regions=1",
	}
	entry = members(
		"seq", natural,
		"at", moment,
		"op", one("increment", "decrement", "adjust", "reset", "set", "reserve", "commit", "cancel", "expire"),
		"delta", number,
		"before", number,
		"after", number,
		"reason?", text,
		"by?", text,
	)

	countMembers = []any{
		"page", id, "count", natural, "updated_at", never, "version", versioned,
		"stale?", about(yes, "the last known count, since the store is away, or a region is left out"),
		"stale_regions?", list(text),
	}
	counterMembers = []any{
		"key", id, "kind", one(counter.KindNames()...), "value", number,
		"updated_at", never, "version", versioned,
		"exact", flag, "error?", about(object{"type": "number"}, "the standard error of kind unique"), "stale?", yes,
		"reserved?", about(natural, "what open reservations have taken out of the value"),
	}
	reservation = members("id", id, "amount", delta, "expires_at", instant)
	pusherInfo  = []any{
		"subscription_count?", about(natural, "how many people are on the page, with info=subscription_count"),
		"user_count?", about(natural, "the same, with info=user_count"),
	}
	// Other members of an event, such as socket_id, have no meaning here.
	pusherEvent = object{
		"name":    about(object{"type": "string", "const": "headcount:changed"}, "any other is 403"),
		"channel": about(id, "a page that was modified"),
		"data":    about(text, "it is ignored"),
	}
	lacking = about(yes, "a region is missing in it, which did not answer")
)

// schemas are the bodies of calls and answers.
var schemas = object{
	"Problem": members(
		"type", text,
		"title", text,
		"status", number,
		"detail?", text,
		"key?", about(text, "the counter at fault, with 409"),
		"value?", about(number, "and its value"),
		"request_id", about(text, "under which the log knows the request"),
	),

	"Count": members(with(countMembers, "regions?", shares)...),
	"ExplainedCount": members("counter", ref("Count"), "explain", members(
		"people", about(natural, "who are here, in this region"),
		"connections", about(natural, "that joined; of the whole site once for each page that they joined"),
		"held", about(natural, "of the people, by a hold alone"),
		"leaving", about(natural, "of the people, without a connection any more, in their grace"),
		"ignored", about(natural, "connections of crawlers, which are not counted"),
		"regions", object{"type": "object", "additionalProperties": natural},
		"moving", about(flag, "false: people are this region's share, and the shares add up to the count"),
	)),
	"Counts": members("counters", list(ref("Count"))),
	"Stats": members(
		"page", id,
		"now", natural,
		"peak", members("count", natural, "at", never),
		"joins", natural,
		"visitors", about(natural, "different users, estimated; of days the sum of theirs"),
		"points", list(members(
			"at", moment, "max", natural, "joins", natural,
			"avg?", about(object{"type": "number"}, "of days: the mean count, of the running day up to now"),
			"person_minutes?", about(natural, "of days: the sum over users of the time present"),
			"visitors?", about(natural, "of days: different users, estimated"),
		)),
		"stale?", about(yes, "now is the last known count"),
	),
	"Action": members("action", one("increment", "decrement")),
	"Empty":  members(),

	"Change": members(
		"by?", about(text, "the user who did it, who is not notified"),
		"title?", about(note, "for the list of notifications"),
		"url?", about(note, "the same; http, https, or a path"),
	),
	"Notifications": members(
		"count", natural,
		"notifications", list(members("page", id, "count", natural, "updated_at", never, "title?", note, "url?", note)),
	),
	"Follows": members(
		"follows", list(id),
		"unread?", about(
			object{"type": "object", "additionalProperties": natural},
			"the pages of this answer that have any",
		),
		"next?", about(id, "ask for the rest with ?after="),
	),
	"Unread":      members("count", natural, "updated_at", never),
	"ResetUnread": members("action", one("reset"), "page?", about(id, "its changes alone")),

	"Counter":  members(counterMembers...),
	"Counters": members("counters", list(ref("Counter"))),
	"Member":   members(with(counterMembers, "member", flag)...),
	"Step": members(
		"delta?", delta,
		"dimensions?", dimensions,
		"reason?", about(reason, "of an exact counter"),
		"by?", about(reason, "of an exact counter"),
	),
	"Batch": members("changes", object{"type": "array", "minItems": 1, "maxItems": 1000, "items": members(
		"key", id, "delta?", about(number, "not 0, up to 10^12 either way; default 1"), "dimensions?", dimensions)}),
	"Members":      members("add?", list(id), "remove?", list(id)),
	"CounterReset": members("reason", reason, "by", reason),
	"Adjustment":   members("delta", number, "reason", reason, "by", reason),
	"Setting":      members("value", number, "reason", reason, "by", reason),
	"Ledger":       members("entries", list(entry), "next?", about(natural, "ask for the rest with ?after=")),
	"Reserving": members(
		"id", about(id, "the caller's; the same one again is the same reservation"),
		"amount", delta,
		"for", about(span, "1s to 31d"),
		"reason?", reason,
		"by?", reason,
	),
	"Reserved":     members("counter", ref("Counter"), "reservation", reservation),
	"Reservations": members("reservations", list(reservation), "next?", about(id, "ask for the rest with ?after=")),
	"Range": members("key", id, "step", span, "points", list(members("at", moment, "value", number)), "total", number,
		"stale?", lacking),
	"Window": members("key", id, "last", span, "value", number, "stale?", lacking),
	"Dimension": members("key", id, "dimension", text, "values", list(members("value", text, "count", number)),
		"other", number, "stale?", lacking),
	"Aggregate": members("match", id, "counters", natural, "value", number),
	"Users":     members("users", list(ref("User"))),
	"User": members(
		"user", text,
		"online", flag,
		"since?", about(instant, "when the user came, as far as is known"),
		"pages?", about(natural, "how many the user has joined"),
		"last_seen?", about(instant, "when a user who is not here was last here, if --last-seen remembers it"),
		"stale?", about(yes, "in events: what was last known, since the owner of the user does not answer"),
	),
	"Top": members("match", id, "last", span, "top", list(members("key", id, "value", number)),
		"stale?", about(yes, "in events: the last known list, since the store is away")),
	"TopPages": members("top", list(members("page", id, "users", natural)),
		"stale?", about(yes, "the list may be old or lack pages, since the store is away or a dispatcher does not "+
			"answer")),
	"LimitQuestion": members("limit", delta, "window", span, "cost?",
		about(cost, "default 1; 0 only looks, a negative one gives back"),
		"algorithm?", about(one("sliding", "fixed", "log"), "default sliding")),
	"Limit": members("allowed", flag, "limit", natural, "remaining", natural, "reset_after_ms", natural),

	"PusherChannels": members(
		"channels", object{"type": "object", "additionalProperties": members(pusherInfo...)},
		"stale?", about(yes, "the list may lack channels, since not all of the store is known again"),
	),
	"PusherChannel": members(
		with(pusherInfo, "occupied", flag, "stale?", about(yes, "the last known count, since the store is away"))...,
	),
	"PusherEvent": object{"type": "object", "required": []string{"name"}, "properties": all(pusherEvent, object{
		"channels": about(object{"type": "array", "items": id, "minItems": 1, "maxItems": 100}, "in place of channel"),
	})},
	"PusherBatch": object{"type": "object", "required": []string{"batch"}, "properties": object{
		"batch": object{"type": "array", "minItems": 1, "maxItems": 10, "items": object{
			"type": "object", "required": []string{"name", "channel"}, "properties": pusherEvent}},
	}},

	"Access": members("key_needed", flag, "top_needs_key", flag),
	"Sites": members(
		"sites", list(
			members(with(countMembers, "name", text, "origins", about(list(text), "those of the site's pages"))...),
		),
	),
	"Dashboard": object{"type": "object", "description": "what the dashboard's page shows; it changes with the page"},
	"Document":  object{"type": "object"},
}

func path(name, of, text string, s object) object {
	return object{"name": name, "in": "path", "required": true, "description": text, "schema": s, "example": of}
}

func query(name, text string, s object) object {
	return object{"name": name, "in": "query", "description": text, "schema": s}
}

// needed is a parameter that every call has to name.
func needed(parameter object) object { return all(parameter, object{"required": true}) }

func header(name, text string) object {
	return object{
		"name":        name,
		"in":          "header",
		"description": text,
		"schema":      object{"type": "string", "minLength": 1, "maxLength": 255},
	}
}

func several(name, text string) object {
	o := query(name, text, object{"type": "array", "minItems": 1, "items": id})
	return needed(all(o, object{"explode": true, "style": "form"}))
}

// everywhere are the parameters of every call.
var everywhere = []any{parameter("site"), parameter("insite")}

// parameter refers to one of parameters. Generators make types of schemas and of parameters, so that no two may have
// the same name.
func parameter(name string) object {
	return object{"$ref": "#/components/parameters/" + name + "Parameter"}
}

// named has the parameters under the names that parameter refers to.
func named() object {
	components := object{}
	for name, of := range parameters {
		components[name+"Parameter"] = of
	}

	return components
}

// parameters are those of all calls, by the name that the table has for them.
var parameters = object{
	"page": path("page", "pricing", "A page; where it is only read also *, the whole site.", id),
	"user": path("user", "alice", "A user: the sub of tokens, or the user of an anonymous visitor's "+
		"welcome.", object{"type": "string", "minLength": 1, "maxLength": 256}),
	"key":     path("key", "views:42", "A counter, which a rule fits; of an aggregate a match.", id),
	"app":     path("app", "0a1b2c", "The key of --pusher-key.", text),
	"app_id":  path("app_id", "1", "The id of the app: whatever the library has been given.", text),
	"channel": path("channel", "news", "A channel, which is the page of its name.", id),
	"member":  path("member", "me", "A member of a set; me is the caller.", id),
	"name":    path("name", "country", "A dimension of the rule.", text),
	"id":      path("id", "cart-7", "A reservation.", id),

	"label": query("label", "What stands beside the number. By default here now, and for a counter its key up to "+
		"the first colon.",
		object{"type": "string", "maxLength": 40}),
	"color":      query("color", "A colour: a name of CSS, or hexadecimal digits.", text),
	"background": query("background", "The same.", text),
	"watch":      query("watch", "1: whoever looks is not counted.", one("1")),

	"regions": query("regions", "1: with each region's share.", one("1")),
	"explain": query("explain", "1, with an API key if there is any: what the count is made of. The answer is an "+
		"ExplainedCount.", one("1")),
	"pages":    several("page", "1 to 100 distinct pages, * too."),
	"users":    several("user", "1 to 100 distinct users."),
	"keys":     several("key", "1 to 100 distinct counters."),
	"last":     needed(query("last", "A stretch of time up to now, such as 1h or 7d.", span)),
	"lastday":  query("last", "A stretch of time up to now; by default 24h, or all that is remembered.", span),
	"step":     query("step", "The length of each point, such as 5m.", span),
	"format":   query("format", "csv: a table with a line for each point.", one("json", "csv")),
	"from":     query("from", "A time, such as 2030-10-10T12:00:00Z.", object{"type": "string", "format": "date-time"}),
	"to":       query("to", "The same; exclusive.", object{"type": "string", "format": "date-time"}),
	"info":     query("info", "subscription_count, user_count, or both with a comma: what to say of a channel.", text),
	"prefix":   query("filter_by_prefix", "The beginning of the names of the channels.", text),
	"md5":      needed(query("body_md5", "The MD5 hash of the body, in hexadecimal digits.", text)),
	"protocol": query("protocol", "The version of Pusher's protocol.", one("7")),
	"match":    needed(query("match", "The match of a rule with top.", id)),
	"n":        query("n", "How many, at most.", natural),
	"after":    query("after", "What came last in the answer before: its next.", text),
	"limit":    query("limit", "Entries of one answer, 1 to 1000.", natural),

	"site": query("site", "The site, where no Origin says it; else the first. The header Headcount-Site does "+
		"the same.", text),
	"insite": header("Headcount-Site", "The same as ?site=."),

	"idempotency": header("Idempotency-Key", "For a day the same key counts once. The answer to a repeated change "+
		"of a counter has the header Idempotent-Replay: true."),
	"lastevent": header("Last-Event-ID", "The id of the last event that was received. After a restart the "+
		"server learns from it that clients are coming back."),
	"ifnonematch": header("If-None-Match", "The ETag of an answer of before: 304 when it is the newest."),
	"urltoken":    query("token", "The token, for clients that cannot send a header.", text),
	"back": query("back", "How many ms ago the client was welcomed before, or 1 if it does not know. A "+
		"server that was restarted since, and has forgotten who was there, calls its counts stale until the "+
		"others had time to come back.", text),
	"join": query("join", "1: the caller is on the page until the stream ends, which it does after "+
		"--ping-interval and --pong-timeout: open another one before that.", one("1")),
	"urlid": query("id", "The signed id of an anonymous visitor, for pages of another origin.", text),
}
