// Package openapi describes the calls and the frames of the server for programs: as
// OpenAPI 3.1 and, for frames and server-sent events, as AsyncAPI 3.0. The first is made of the
// table of calls that the routes are made of, and of schemas.go, the second of frames.go. Tests of
// package gateway hold both to real answers and to real frames.
package openapi

import (
	"cmp"
	"encoding/json"
	"maps"
	"net/http"
	"regexp"
	"strconv"
	"strings"

	"headcount/gateway/calls"
)

// version is the version of the contract. It is not the version of the program.
const version = "1.0.0"

// everySite are the statuses of refusals of every call: it names a site that is not there,
// or its API key holds for another.
const everySite = " 400 403"

type object = map[string]any

// license of both documents.
var license = object{"name": "MIT", "identifier": "MIT"}

// tags are what operations are grouped by, in the order in which people read them.
var tags = []any{
	tag("presence", "Who is here now."),
	tag("notifications", "Follows, and changes that were not seen yet."),
	tag("counters", "Counters that last."),
	tag("limits", "How much may pass."),
	tag("privacy", "What is kept of one person."),
	tag("server", "The server itself: pages, scripts, documents."),
}

func tag(name, does string) object { return object{"name": name, "description": does} }

// OpenAPI returns the document of the calls of a server below a base path, which is empty or begins with a slash.
func OpenAPI(base string, table []calls.Call) []byte {
	paths := object{}
	for _, c := range table {
		path, _ := paths[c.Path].(object)
		if path == nil {
			path = object{"parameters": everywhere}
			paths[c.Path] = path
		}
		path[strings.ToLower(c.Method)] = operation(c)
	}

	return document(object{
		"openapi": "3.1.0",
		"info": object{
			"title": "Headcount", "version": version, "license": license,
			"description": "Live counts of who is on a page, unread notifications, and counters that last. Every " +
				"GET but event streams answers HEAD too. Page ids, keys, users and members in paths are " +
				"percent-encoded, their slashes too. The frames of /-/ws and the events are in /-/asyncapi.json.",
		},
		"servers": []any{object{"url": cmp.Or(base, "/")}}, // clients put a path, which begins with a slash, behind it
		"tags":    tags,
		"paths":   paths,
		"components": object{
			"schemas": schemas, "parameters": named(), "responses": refusals(),
			"securitySchemes": object{
				"key": object{
					"type":        "apiKey",
					"in":          "header",
					"name":        "X-API-Key",
					"description": "One of --api-key.",
				},
				"token": object{
					"type":         "http",
					"scheme":       "bearer",
					"bearerFormat": "JWT",
					"description":  "With --jwt-secret or --jwks-url; its sub is the user.",
				},
				"id": object{
					"type":        "apiKey",
					"in":          "header",
					"name":        "Headcount-Id",
					"description": "The signed id of an anonymous visitor.",
				},
				"signature": object{
					"type": "apiKey",
					"in":   "query",
					"name": "auth_signature",
					"description": "The HMAC-SHA256 of method, path and sorted query by one of --pusher-secret, in " +
						"hexadecimal digits, beside auth_key, auth_timestamp and auth_version. Libraries of Pusher " +
						"make it.",
				},
				"cookie": object{
					"type": "apiKey",
					"in":   "cookie",
					"name": "headcount_id",
					"description": "The same as a cookie, which the server sets. Its name may be another " +
						"(--cookie-name). That of a site other than default ends in _ and its name.",
				},
			},
		},
	})
}

func document(of object) []byte {
	text, err := json.MarshalIndent(of, "", " ")
	if err != nil {
		panic(err) // maps and strings
	}

	return append(text, '\n')
}

var braces = regexp.MustCompile(`\{(\w+)\}`)

func operation(c calls.Call) object {
	op := object{
		"operationId": c.ID, "summary": c.Does, "security": security(c.Who), "tags": []string{tagOf(c.Path)},
		"responses": responses(c),
	}

	var takes []any
	for _, name := range parametersOf(c) {
		takes = append(takes, parameter(name))
	}
	if takes != nil {
		op["parameters"] = takes
	}

	if c.Body != "" {
		name, optional := strings.CutSuffix(c.Body, "?")
		op["requestBody"] = object{"required": !optional, "content": content("application/json", ref(name))}
	}

	return op
}

// responses are the answers of a call, by status.
func responses(c calls.Call) object {
	all := object{}
	for _, status := range strings.Fields(c.Refuses + everySite) {
		all[status] = object{"$ref": "#/components/responses/" + status}
	}

	good := http.StatusOK
	answer := object{}
	body := object{}
	for _, given := range strings.Fields(c.Gives) {
		status, err := strconv.Atoi(given)
		switch {
		case status == http.StatusNotModified:
			all[given] = object{"description": "The caller has the newest version: it is in If-None-Match."}
			answer["headers"] = object{"ETag": etag}
		case status == http.StatusCreated:
			all[given] = answer // beside 200, with the same body
		case err == nil:
			good = status
		case strings.Contains(given, "/"): // a media type
			maps.Copy(body, content(given, text))
		default:
			maps.Copy(body, content("application/json", ref(given)))
		}
	}
	if len(body) > 0 {
		answer["content"] = body
	}

	// A browser cannot send a key with an address.
	pageForKey := c.Who == calls.Viewer && c.Gives == "text/html"
	switch {
	case c.Gives == "Limit": // the one refusal that is no problem
		answer["headers"] = limitHeaders
		all["429"] = object{
			"description": "It may not pass now.", "headers": refusedHeaders, "content": answer["content"],
		}
	case pageForKey:
		both := content("application/problem+json", ref("Problem"))
		maps.Copy(both, content(c.Gives, text))
		all["401"] = object{
			"description": "The API key is missing or wrong. A browser, which asks for HTML, gets the page, " +
				"and the page asks for the key.",
			"content": both,
		}
	}

	answer["description"] = http.StatusText(good)
	all[strconv.Itoa(good)] = answer

	return all
}

// content describes a body of a media type.
func content(mediaType string, schema object) object {
	return object{mediaType: object{"schema": schema}}
}

var etag = object{
	"description": "The version, with -s behind it when the count is stale.", "schema": object{"type": "string"},
}

// parametersOf returns the names of the call's parameters, those of the path first.
func parametersOf(c calls.Call) []string {
	var names []string
	for _, name := range braces.FindAllStringSubmatch(c.Path, -1) {
		names = append(names, name[1])
	}

	return append(names, strings.Fields(c.Takes)...)
}

// tagOf returns the tag of the calls of a path. The first row that fits says it.
func tagOf(path string) string {
	for _, row := range []struct {
		tag  string
		path string
	}{
		{"limits", "^/api/v1/limits"},
		{"counters", "^/api/"},
		{"notifications", "/changes$|/unread|/follows|/notifications"},
		{"notifications", "^/apps/.*events$"},
		{"server", `^/-/dashboard|api\.json$|\.js$|^/$|^/-/sites$`},
		{"privacy", `^/-/me$|^/-/users/\{user\}$`},
	} {
		// The document is made once, so the expression is not kept.
		if regexp.MustCompile(row.path).MatchString(path) {
			return row.tag
		}
	}

	return "presence"
}

func security(w calls.Who) []any {
	none := object{}
	key := object{"key": []any{}}

	switch w {
	case calls.Visitor:
		return []any{object{"token": []any{}}, object{"id": []any{}}, object{"cookie": []any{}}, none}
	case calls.Server:
		return []any{key}
	case calls.Signer:
		return []any{object{"signature": []any{}}}
	case calls.Opened, calls.Viewer:
		return []any{key, none}
	}

	return []any{none}
}

// Headers of answers. Those of a limit by time are in each 429 of one, and in both answers of a call on a limit.
var (
	retryAfter   = object{"description": "Seconds.", "schema": object{"type": "integer"}}
	limitHeaders = object{
		"RateLimit": object{"description": "Of a limit by time: r is what is left, t the seconds until all " +
			"of it is back; in a 429 those of Retry-After.", "schema": object{"type": "string"}},
		"RateLimit-Policy": object{"description": "Of a limit by time: q is how many, w the seconds in which all " +
			"of them are back.", "schema": object{"type": "string"}},
	}
)

// refusedHeaders are those of a 429.
var refusedHeaders = all(limitHeaders, object{"Retry-After": retryAfter})

// refusals are the answers that say no. All of them are problems of RFC 9457.
func refusals() object {
	all := object{}
	for status, why := range map[int]string{
		400: "The site, the path, the query, a header or the body cannot be.",
		401: "A token, an API key or a signature is missing, wrong or expired.",
		403: "The origin may not do this, the rule of the counter does not open it, the API key holds for " +
			"another site, or the event would be a message.",
		404: "There is no such thing.",
		409: "The counter cannot change like this, and did not; or there is no such value of it.",
		413: "The body is too large.",
		415: "The body is not JSON, or it is compressed.",
		426: "This path takes WebSockets only.",
		429: "Too much for now; see Retry-After.",
		503: "The server cannot do this now; see Retry-After.",
	} {
		answer := object{
			"description": why,
			"content":     object{"application/problem+json": object{"schema": ref("Problem")}},
		}
		switch status {
		case 429:
			answer["headers"] = refusedHeaders
		case 503:
			answer["headers"] = object{"Retry-After": retryAfter}
		}
		all[strconv.Itoa(status)] = answer
	}
	return all
}

func ref(name string) object { return object{"$ref": "#/components/schemas/" + name} }

// all joins the objects.
func all(objects ...object) object {
	sum := object{}
	for _, o := range objects {
		maps.Copy(sum, o)
	}
	return sum
}
