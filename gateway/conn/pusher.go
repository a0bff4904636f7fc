package conn

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"net/http"
	"time"

	"github.com/cespare/xxhash/v2"
	"github.com/gin-gonic/gin"

	"headcount/gateway/bounds"
	"headcount/gateway/calls"
	"headcount/gateway/fanout"
	"headcount/gateway/httppolicy"
	"headcount/gateway/identity"
	"headcount/gateway/pusher"
	"headcount/gateway/websocket"
	"headcount/presence"
)

// pusherForm is a count as an event of Pusher.
const pusherForm fanout.Form = 1 << 6

// pusherCodes are the close codes for the statuses of refusals. With any other one clients may try again in a second.
var pusherCodes = map[int]int{
	http.StatusBadRequest:         pusher.CodeVersion,
	http.StatusUnauthorized:       pusher.CodeUnauthorized,
	http.StatusForbidden:          pusher.CodeUnauthorized,
	http.StatusNotFound:           pusher.CodeUnknownKey,
	http.StatusServiceUnavailable: pusher.CodeOverCapacity,
}

// AcceptPusher upgrades a request of a client of Pusher. The answer and the first event are one write. There is no
// event for unread counts.
func (cs *Clients) AcceptPusher(
	w gin.ResponseWriter, r *http.Request, id identity.Identity, slot *bounds.Slot,
) {
	c, hello, err := cs.upgrade(w, r, pusher.Subprotocol, id, slot)
	if err != nil {
		return
	}

	// Before enter, after which deliveries go by the dialect.
	c.speech = pushers
	// Clients want an id of this form; nothing here refers to it.
	socket := fmt.Sprintf("%d.%d", rand.Uint32(), rand.Uint32())
	established := pusher.AppendEstablished(nil, socket, cs.cfg.PingInterval)
	c.enter(websocket.AppendFrame(hello, websocket.Text, established))
	c.start()
}

// RefusePusher upgrades a request of a client of Pusher that was refused, and closes the connection with the reason.
func (cs *Clients) RefusePusher(w gin.ResponseWriter, r *http.Request) {
	over, _, err := w.Hijack()
	if err != nil {
		cs.cfg.Log.Debug().Err(err).Msg("the connection of a refused client could not be taken over")
		return
	}

	defer over.Close()

	_, detail := httppolicy.Refusal(w.Header())
	code := cmp.Or(pusherCodes[w.Status()], pusher.CodeOverCapacity)

	head := http.Header{} // not that of w, which has the length and the kind of the refusal
	websocket.SetUpgrade(head, r, pusher.Subprotocol)
	b := responseHead(http.StatusSwitchingProtocols, head)
	b = websocket.AppendFrame(b, websocket.Text, pusher.AppendError(nil, code, detail))
	// The client may read nothing, and this is a goroutine of the HTTP server.
	_ = over.SetWriteDeadline(time.Now().Add(cs.cfg.WriteTimeout))

	_, _ = over.Write(websocket.AppendClose(b, code, detail)) // an error means that the client is gone already
}

// pusherDialect is that of Pusher's clients.
type pusherDialect struct{}

func (pusherDialect) parse(text []byte) (message, error) {
	e, err := pusher.ParseEvent(text)
	if err != nil {
		return message{}, faultOf(calls.ErrBad, err.Error())
	}
	if err := pusher.CheckEvent(e.Name); err != nil {
		return message{}, faultOf(calls.ErrMessageType, err.Error())
	}

	m := message{pages: []string{e.Channel}}

	switch e.Name {
	case pusher.Subscribe:
		m.kind = typeJoin
		if err := pusher.CheckChannel(e.Channel); err != nil {
			return message{}, faultOf(calls.ErrNotPublic, err.Error()).about("page", e.Channel)
		}
	case pusher.Unsubscribe:
		// Whoever could not subscribe has nothing to leave, so the channel is not checked.
		m.kind = typeLeave
	case pusher.Ping:
		return message{kind: typeHeartbeat}, nil
	case pusher.Signin:
		return message{kind: typeSignin}, nil
	default:
		return message{}, nil // a pong
	}

	if err := presence.CheckPage(e.Channel); err != nil {
		return message{}, badPage(e.Channel, err)
	}
	return m, nil
}

func (pusherDialect) heartbeat() []byte { return pusher.AppendPong(nil) }

func (pusherDialect) tooManyNew(name string) *fault {
	return faultBeyond(bounds.NewTopics).about("page", presence.KeyOf(name))
}

func (pusherDialect) form() fanout.Form { return pusherForm }

func (pusherDialect) arrived(c *conn, name string) {
	succeeded := pusher.AppendSucceeded(nil, presence.KeyOf(name))
	// An error means that the client is gone already.
	_ = c.send(websocket.Text, succeeded)
}

// appendFault appends errors of Pusher, about a channel in both of their forms.
func (pusherDialect) appendFault(b []byte, f *fault) []byte {
	b = websocket.AppendFrame(b, websocket.Text, pusher.AppendError(nil, pusherCode(f), f.message))
	if f.member != "" {
		failed := pusher.AppendSubscriptionError(nil, f.value, pusherCode(f), f.message)
		b = websocket.AppendFrame(b, websocket.Text, failed)
	}
	return b
}

// pusherCode returns Pusher's code of a fault.
func pusherCode(f *fault) int {
	if f.code == calls.CodeForbidden || f.code == calls.CodeTokenExpired {
		return pusher.CodeUnauthorized
	}

	return pusher.CodeRejected
}

func (pusherDialect) ping() (p []byte, answers bool) { return pingFrame, true }

// move closes the connection: a client can only be asked to reconnect at once, so it stays until then.
func (pusherDialect) move(c *conn, after time.Duration) {
	time.AfterFunc(after, func() { _ = c.end(pusher.CodeReconnect, closeReason, nil) })
}

func (pusherDialect) silent() []byte {
	return websocket.AppendClose(nil, pusher.CodePongTimeout, "no answer to a ping")
}

func (pusherDialect) closeCode(code int, last *fault) int {
	switch {
	case last != nil:
		return pusherCode(last)
	case code == websocket.StatusServiceRestart:
		// This code makes the client wait a second before it reconnects: until then no process may be listening.
		return pusher.CodeOverCapacity
	default:
		return code
	}
}

// appendPusherCount appends a count as a frame of Pusher, and returns a hash of what the client sees of the count.
func appendPusherCount(b []byte, c presence.Count) (frame []byte, shown uint64) {
	text := pusher.AppendCount(nil, presence.KeyOf(c.Page), c.Users)

	return websocket.AppendFrame(b, websocket.Text, text), xxhash.Sum64(text)
}
