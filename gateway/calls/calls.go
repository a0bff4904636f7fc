// Package calls has what all HTTP calls have in common. A row of a table says of each call where it is, who may make
// it, what it takes and what it answers; routes and the OpenAPI document are made from the rows. A handler returns an
// Answer or an error, and Serve is the one place that writes either of them. What an error means to a client stands
// in one table, meanings: its HTTP status, and the code of its error frame over a WebSocket.
package calls

import (
	"net/http"
	"strings"

	"github.com/gin-gonic/gin"
	"github.com/rs/zerolog"
)

// Paths of WebSockets: of our own, and of Pusher's clients, whose key follows.
const (
	SocketPath = "/-/ws"
	PusherRoot = "/app/"
)

// Who may make a call.
type Who int

const (
	Anyone  Who = iota // everybody; a token that is sent must be valid
	Visitor            // whoever has an identity, or gets one
	Server             // a server with an API key
	Signer             // a back end that signs as libraries of Pusher do
	Opened             // a server, and whoever the rule of the counter lets
	Viewer             // a server, and everybody when no API keys are configured or --public-top lets them
)

// Call is a row of the table of calls. Lists are separated by spaces.
type Call struct {
	ID           string // the name of the call in generated clients; it never changes
	Method, Path string // a parameter of the path is a name in braces
	Does         string
	Who          Who
	Takes        string  // parameters beside those of the path, by their names in package openapi
	Body         string  // the schema of the body; with a ? the body may be left out
	Gives        string  // the success: a schema, a media type, or a status
	Refuses      string  // the statuses of refusals, beside 400 and 403, which every call has
	Do           Handler // nil: this server does not serve the call
}

// Register adds the routes of the calls that have a handler. A GET answers HEAD too, unless its answer does not end.
func Register(e *gin.Engine, log zerolog.Logger, table []Call) {
	pattern := strings.NewReplacer("{", ":", "}", "")

	for _, call := range table {
		if call.Do == nil {
			continue
		}

		// The router has another form for parameters, and matches paths as they were sent.
		path, serve := pattern.Replace(call.Path), Serve(log, call.Do)
		e.Handle(call.Method, path, serve)
		if call.Method == http.MethodGet && !call.lasts() {
			e.HEAD(path, serve)
		}
	}
}

// lasts reports whether the answer is a long connection: an event stream or a WebSocket.
func (c Call) lasts() bool { return c.Gives == "text/event-stream" || c.Gives == "101" }
