package conn

import (
	"time"

	"headcount/gateway/bounds"
	"headcount/gateway/fanout"
	"headcount/gateway/websocket"
)

// speech says how the client of a connection speaks. It is a byte and not the dialect itself, because there are many
// idle connections.
type speech uint8

const (
	ours    speech = iota // our messages, over a WebSocket
	pushers               // Pusher's events, over a WebSocket
	stream                // server-sent events; the server reads nothing, and there is no close frame
)

var dialects = [...]dialect{ours: ourDialect{}, pushers: pusherDialect{}, stream: streamDialect{}}

// dialect returns how the client speaks.
func (c *conn) dialect() dialect { return dialects[c.speech] }

// dialect is all in which clients differ that speak in different ways. What a message does, and what it costs, is the
// same for all of them.
type dialect interface {
	// parse reads one message. Its error is a *fault.
	parse(text []byte) (message, error)
	// heartbeat is the answer to a heartbeat, as text.
	heartbeat() []byte
	// tooManyNew is the fault of a join of a page that would be one new page too many.
	tooManyNew(name string) *fault
	// form is that of the counts of a page that the client joins.
	form() fanout.Form
	// arrived tells the client that it is on the page, if it has to be told.
	arrived(c *conn, name string)
	// appendFault appends the frames of a fault.
	appendFault(b []byte, f *fault) []byte
	// ping is what a silent client is sent, and whether it answers.
	ping() (p []byte, answers bool)
	// move asks the client to connect elsewhere after the given time.
	move(c *conn, after time.Duration)
	// closeCode returns the code of the close frame, for our code and the last fault, which may be nil.
	closeCode(code int, last *fault) int
	// silent is what a client is sent that has not answered a ping, before its connection is closed; nil: nothing.
	silent() []byte
}

// What silent clients are sent; the bytes are shared, because there are many of them.
var (
	pingFrame   = []byte{websocket.Ping, 0}
	pingComment = []byte(": ping\n\n") // no event
)

// ourDialect is that of our own messages.
type ourDialect struct{}

func (ourDialect) parse(text []byte) (message, error) { return parseMessage(text) }

func (ourDialect) heartbeat() []byte { return []byte(`{"type":"heartbeat"}`) }

// Clients give up a page that is named, and may ask for this one again.
func (ourDialect) tooManyNew(string) *fault { return faultBeyond(bounds.NewTopics) }

func (ourDialect) form() fanout.Form { return 0 }

func (ourDialect) arrived(*conn, string) {} // the count says it

func (ourDialect) appendFault(b []byte, f *fault) []byte {
	return websocket.AppendFrame(b, websocket.Text, f.appendJSON(nil))
}

func (ourDialect) ping() (p []byte, answers bool) { return pingFrame, true }

func (ourDialect) move(c *conn, after time.Duration) {
	_ = c.send(websocket.Text, appendReconnect(nil, after)) // an error means that the client is gone already
}

func (ourDialect) closeCode(code int, _ *fault) int { return code }

func (ourDialect) silent() []byte { return nil }
