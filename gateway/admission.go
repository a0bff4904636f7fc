package gateway

import (
	"cmp"
	"fmt"
	"net"
	"net/http"
	"time"

	"github.com/gin-gonic/gin"

	"headcount/gateway/api"
	"headcount/gateway/bounds"
	"headcount/gateway/calls"
	"headcount/gateway/conn"
	"headcount/gateway/httppolicy"
	"headcount/gateway/identity"
	"headcount/gateway/socket"
	"headcount/gateway/websocket"
)

// reserve takes a place for a long-lived connection, both among all connections and among those of its address.
func (g *Gateway) reserve(c *gin.Context) (*bounds.Slot, error) {
	if err := cmp.Or(g.clients.Open(), g.api.Serving()); err != nil {
		return nil, api.Unavailable(err)
	}

	// Counted before it is compared, so that of connections which come at once only as many as fit get a place.
	connections, err := g.clients.Begin()
	if err != nil {
		return nil, api.Unavailable(err)
	}
	slot, fits := g.slots.Enter(g.callers.Addr(c.Request))

	limit, detail := "", ""
	switch {
	case !fits:
		limit = httppolicy.ReasonAddress
		const form = "This address has reached its limit of %d connections; see --max-connections-per-address."
		detail = fmt.Sprintf(form, g.cfg.MaxPerAddress)
	case g.memoryIsLow():
		limit = httppolicy.ReasonMemory
		detail = "This gateway has reached its memory limit."
	case connections > int64(g.cfg.MaxConnections):
		limit = httppolicy.ReasonConnections
		detail = "This gateway has reached its limit of connections."
	default:
		return slot, nil
	}

	// The place was taken before the limits were looked at.
	g.clients.Release(slot)
	g.metrics.refused.Inc()
	g.metrics.limits.WithLabelValues(limit).Inc()

	return nil, calls.Refuse(calls.ErrUnavailable, detail,
		httppolicy.RetryAfter(fullFor), httppolicy.Because(limit))
}

// fullFor is when a client may come back to a gateway that has no place for it.
const fullFor = 5 * time.Second

func (g *Gateway) memoryIsLow() bool { return g.cfg.Memory != nil && g.cfg.Memory.High() }

func (g *Gateway) getSocket(c *gin.Context) (calls.Answer, error) {
	if err := checkUpgrade(c, conn.Subprotocol); err != nil {
		return calls.Answer{}, err
	}

	// After the check, so that a request that is no upgrade takes no place.
	id, slot, err := g.admit(c)
	if err != nil {
		return calls.Answer{}, err
	}
	g.clients.Accept(c.Writer, c.Request, id, slot)

	return calls.Taken, nil
}

// checkUpgrade returns an error unless a request is an upgrade to a WebSocket that offers the subprotocol or none.
func checkUpgrade(c *gin.Context, subprotocol string) error {
	problem, status := websocket.CheckUpgrade(c.Request, subprotocol)
	if status == 0 {
		return nil
	}

	// RFC 6455, section 4.4, wants it in a refusal because of the version.
	c.Header("Sec-WebSocket-Version", "13")
	if status != http.StatusUpgradeRequired {
		return calls.Bad(problem)
	}
	if c.Request.ProtoMajor == 1 { // HTTP/2 forbids these headers
		c.Header("Upgrade", "websocket")
		c.Header("Connection", "Upgrade")
	}

	return calls.Refuse(calls.ErrNoUpgrade, problem)
}

// admit identifies the sender of an upgrade, and takes a place for the connection.
func (g *Gateway) admit(c *gin.Context) (id identity.Identity, slot *bounds.Slot, err error) {
	// A key is never ignored: whoever sends a wrong one would take the rights of a visitor for those of a server.
	if httppolicy.APIKey(c.Request) != "" {
		if err := g.callers.Server(c); err != nil {
			return id, nil, err
		}
	}

	// Scripts cannot set headers of an upgrade, so the URL's parameters count.
	id, err = g.callers.Identity(c, true)
	if err != nil {
		return id, nil, err
	}
	slot, err = g.reserve(c)
	if err != nil {
		return id, nil, err
	}
	g.callers.SetCookie(c, id) // last, since a refusal sets none

	return id, slot, nil
}

// routes returns the public handler: calls, and long connections.
func (g *Gateway) routes() http.Handler {
	e := g.api.Engine(g.table())

	// Otherwise it would be the HEAD of a user called events.
	e.HEAD("/-/users/events", calls.Serve(g.cfg.Log, func(c *gin.Context) (calls.Answer, error) {
		c.Header("Allow", http.MethodGet)
		return api.RefuseMethod(c)
	}))
	if g.cfg.API.App.Key != "" {
		g.pusherRoutes(e)
	}

	return api.Below(g.cfg.API.BasePath, api.WithPageApps(e))
}

// acceptFails records that no new client can be accepted, because this process has too
// many open files. A nil err means that clients are accepted again.
func (g *Gateway) acceptFails(err error) {
	if err == nil {
		g.acceptErr.Store(nil)
		g.cfg.Log.Info().Msg("new clients are accepted again")
		return
	}

	err = fmt.Errorf("new clients cannot be accepted, since this process has too many open files; "+
		"raise ulimit -n, or lower --max-connections: %w", err)
	g.acceptErr.Store(&err)
	g.cfg.Log.Error().Msg(err.Error())
}

// Listener returns the listener for the HTTP server that serves Handler. It accepts
// connections from l.
func (g *Gateway) Listener(l net.Listener) *httppolicy.ConnLimiter {
	// The longest time that a ping, its answer and a write may take together.
	silence := g.cfg.PingInterval + g.cfg.PongTimeout + g.cfg.WriteTimeout

	return httppolicy.NewConnLimiter(l, silence, g.cfg.MaxConnections, g.acceptFails, g.metrics.evicted)
}

// BelowTLS prepares the connections of limiter for an HTTP server that speaks TLS: limiter
// bounds handshakes, and a connection that the gateway takes over from that server then
// needs no goroutine.
func BelowTLS(limiter *httppolicy.ConnLimiter) net.Listener {
	limiter.SpeakTLS()
	return socket.Listener{Listener: limiter}
}
