// Package openapi describes the calls and the frames of the server for programs: as
// OpenAPI 3.1 and, for frames and server-sent events, as AsyncAPI 3.0. Both are made
// from the tables in calls.go, schemas.go and frames.go. Tests of package gateway hold
// them to the routes, to real answers and to real frames.
package openapi

import (
	"cmp"
	"encoding/json"
	"maps"
	"net/http"
	"regexp"
	"strconv"
	"strings"
)

// version is the version of the contract. It is not the version of the program.
const version = "1.0.0"

// who may make a call.
type who int

const (
	anyone  who = iota // everybody; a token that is sent must be valid
	visitor            // whoever has an identity, or gets one
	server             // a server with an API key
	opened             // a server, and whoever the rule of the counter lets
	viewer             // a server, and everybody when no API keys are configured or --public-top lets them
)

// call is one HTTP call. Lists are separated by spaces.
type call struct {
	id           string // the name of the call in generated clients; it never changes
	method, path string // the parameters of the path are in parameters
	does         string
	who          who
	takes        string // other parameters
	body         string // the schema of the body; with a ? the body may be left out
	gives        string // the success: a schema, a media type, or a status
	refuses      string // the statuses of refusals, beside those of everySite
}

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
func OpenAPI(base string) []byte {
	paths := object{}
	for _, c := range calls {
		path, _ := paths[c.path].(object)
		if path == nil {
			path = object{"parameters": everywhere}
			paths[c.path] = path
		}
		path[strings.ToLower(c.method)] = c.operation()
	}

	return document(object{
		"openapi": "3.1.0",
		"info": object{
			"title": "Headcount", "version": version, "license": license,
			"description": "Live counts of who is on a page, unread notifications, and counters that last. Every GET but event streams answers HEAD too. Page ids, keys, users and members in paths are percent-encoded, their slashes too. The frames of /-/ws and the events are in /-/asyncapi.json.",
		},
		"servers": []any{object{"url": cmp.Or(base, "/")}}, // clients put a path, which begins with a slash, behind it
		"tags":    tags,
		"paths":   paths,
		"components": object{
			"schemas": schemas, "parameters": named(), "responses": refusals(),
			"securitySchemes": object{
				"key":    object{"type": "apiKey", "in": "header", "name": "X-API-Key", "description": "One of --api-key."},
				"token":  object{"type": "http", "scheme": "bearer", "bearerFormat": "JWT", "description": "With --jwt-secret or --jwks-url; its sub is the user."},
				"id":     object{"type": "apiKey", "in": "header", "name": "Headcount-Id", "description": "The signed id of an anonymous visitor."},
				"cookie": object{"type": "apiKey", "in": "cookie", "name": "headcount_id", "description": "The same as a cookie, which the server sets. Its name may be another (--cookie-name). That of a site other than default ends in _ and its name."},
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

func (c call) operation() object {
	op := object{"operationId": c.id, "summary": c.does, "security": c.who.security(), "tags": []string{c.tag()}}
	var takes []any
	for _, name := range c.parameters() {
		takes = append(takes, parameter(name))
	}
	if takes != nil {
		op["parameters"] = takes
	}
	if c.body != "" {
		name, optional := strings.CutSuffix(c.body, "?")
		op["requestBody"] = object{"required": !optional, "content": object{"application/json": object{"schema": ref(name)}}}
	}
	responses := object{}
	for _, status := range strings.Fields(c.refuses + everySite) {
		responses[status] = object{"$ref": "#/components/responses/" + status}
	}
	good, content := http.StatusOK, object{}
	for _, given := range strings.Fields(c.gives) {
		switch {
		case given == "304":
			responses["304"] = object{"description": "The caller has the newest version: it is in If-None-Match."}
		case given[0] >= '0' && given[0] <= '9': // a status
			good, _ = strconv.Atoi(given)
		case given == "Limit": // the one refusal that is no problem
			responses["429"] = object{"description": "It may not pass now.", "headers": refusedHeaders, "content": object{"application/json": object{"schema": ref(given)}}}
			fallthrough
		case !strings.Contains(given, "/"):
			content["application/json"] = object{"schema": ref(given)}
		default:
			content[given] = object{"schema": object{"type": "string"}}
			if c.who == viewer && given == "text/html" { // a browser cannot send a key with an address
				responses["401"] = object{
					"description": "The API key is missing or wrong. A browser, which asks for HTML, gets the page, and the page asks for the key.",
					"content":     object{"application/problem+json": object{"schema": ref("Problem")}, given: object{"schema": object{"type": "string"}}},
				}
			}
		}
	}
	answer := object{"description": http.StatusText(good)}
	if len(content) > 0 {
		answer["content"] = content
	}
	if responses["304"] != nil {
		answer["headers"] = object{"ETag": object{"description": "The version, with -s behind it when the count is stale.", "schema": object{"type": "string"}}}
	}
	if c.gives == "Limit" {
		answer["headers"] = limitHeaders
	}
	responses[strconv.Itoa(good)] = answer
	op["responses"] = responses
	return op
}

// parameters are the names of the call's parameters, those of the path first.
func (c call) parameters() []string {
	var names []string
	for _, name := range braces.FindAllStringSubmatch(c.path, -1) {
		names = append(names, name[1])
	}
	return append(names, strings.Fields(c.takes)...)
}

func (c call) tag() string {
	switch {
	case strings.HasPrefix(c.path, "/api/v1/limits"):
		return "limits"
	case strings.HasPrefix(c.path, "/api/"):
		return "counters"
	case strings.HasSuffix(c.path, "/changes"), strings.Contains(c.path, "/unread"), strings.Contains(c.path, "/follows"), strings.Contains(c.path, "/notifications"):
		return "notifications"
	case strings.HasPrefix(c.path, "/-/dashboard"), strings.HasSuffix(c.path, "api.json"), strings.HasSuffix(c.path, ".js"), c.path == "/", c.path == "/-/sites":
		return "server"
	case c.path == "/-/me", c.path == "/-/users/{user}":
		return "privacy"
	}
	return "presence"
}

func (w who) security() []any {
	key, none := object{"key": []any{}}, object{}
	switch w {
	case visitor:
		return []any{object{"token": []any{}}, object{"id": []any{}}, object{"cookie": []any{}}, none}
	case server:
		return []any{key}
	case opened, viewer:
		return []any{key, none}
	}
	return []any{none}
}

// Headers of answers. Those of a limit by time are in each 429 of one, and in both answers of a call on a limit.
var (
	retryAfter   = object{"description": "Seconds.", "schema": object{"type": "integer"}}
	limitHeaders = object{
		"RateLimit":        object{"description": "Of a limit by time: r is what is left, t the seconds until all of it is back; in a 429 those of Retry-After.", "schema": object{"type": "string"}},
		"RateLimit-Policy": object{"description": "Of a limit by time: q is how many, w the seconds in which all of them are back.", "schema": object{"type": "string"}},
	}
)

// refusedHeaders are those of a 429.
var refusedHeaders = all(limitHeaders, object{"Retry-After": retryAfter})

// refusals are the answers that say no. All of them are problems of RFC 9457.
func refusals() object {
	all := object{}
	for status, why := range map[int]string{
		400: "The site, the path, the query, a header or the body cannot be.",
		401: "A token or an API key is missing, wrong or expired.",
		403: "The origin may not do this, the rule of the counter does not open it, or the API key holds for another site.",
		404: "There is no such thing.",
		409: "The counter cannot change like this, and did not; or there is no such value of it.",
		413: "The body is too large.",
		415: "The body is not JSON, or it is compressed.",
		426: "This path takes WebSockets only.",
		429: "Too much for now; see Retry-After.",
		503: "The server cannot do this now; see Retry-After.",
	} {
		answer := object{"description": why, "content": object{"application/problem+json": object{"schema": ref("Problem")}}}
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
