package gateway

import (
	"fmt"
	"net"
	"net/http"
	"time"

	"github.com/gin-gonic/gin"

	"headcount/gateway/api"
	"headcount/gateway/counterapi"
	"headcount/gateway/httppolicy"
	"headcount/gateway/identity"
	"headcount/gateway/socket"
	"headcount/gateway/websocket"
)

const subprotocol = "headcount.v1"

// reserve takes a place for a long connection, among all connections and among those of
// its address. If it returns false, it has written the error answer. Otherwise the caller
// gives the place back with release.
func (g *Gateway) reserve(c *gin.Context) (*httppolicy.AddressSlot, bool) {
	g.entry.Lock()
	err := g.api.Serving()
	if g.draining.Load() {
		err = errDraining
	}

	if err == nil {
		g.conns.Add(1)
	}
	g.entry.Unlock()

	if err != nil {
		api.Unavailable(c, err)
		return nil, false
	}

	slot, fits := g.slots.Enter(g.callers.Addr(c.Request))
	limit, detail := g.full(g.connections.Add(1), fits)
	if limit == "" {
		return slot, true
	}

	g.release(slot)
	g.metrics.refused.Inc()
	g.metrics.limits.WithLabelValues(limit).Inc()
	httppolicy.Problem(c.Writer, http.StatusServiceUnavailable, detail,
		httppolicy.RetryAfter(5*time.Second), httppolicy.Because(limit))

	return nil, false
}

// full returns the limit that refuses a new connection, the given one of all, and why. The limit is empty when the
// connection has a place. fits says whether its address has one.
func (g *Gateway) full(connections int64, fits bool) (limit, detail string) {
	switch {
	case !fits:
		return httppolicy.ReasonAddress, fmt.Sprintf(
			"This address has reached its limit of %d connections; see --max-connections-per-address.",
			g.cfg.MaxPerAddress)
	case g.memoryIsHigh():
		return httppolicy.ReasonMemory, "This gateway has reached its memory limit."
	case connections > int64(g.cfg.MaxConnections):
		return httppolicy.ReasonConnections, "This gateway has reached its limit of connections."
	default:
		return "", ""
	}
}

func (g *Gateway) memoryIsHigh() bool { return g.cfg.Memory != nil && g.cfg.Memory.High() }

// release gives back a place that reserve took.
func (g *Gateway) release(slot *httppolicy.AddressSlot) {
	slot.Leave()
	g.connections.Add(-1)
	g.conns.Done()
}

func (g *Gateway) getSocket(c *gin.Context) {
	if !isUpgrade(c, subprotocol) {
		return
	}

	id, slot, ok := g.admit(c)
	if ok {
		g.accept(c.Writer, c.Request, id, slot)
	}
}

// isUpgrade reports whether a request is an upgrade to a WebSocket that offers the subprotocol or none. If not, it has
// written the error answer.
func isUpgrade(c *gin.Context, subprotocol string) bool {
	problem, status := websocket.CheckUpgrade(c.Request, subprotocol)
	if status == 0 {
		return true
	}

	// HTTP/2 forbids the headers Upgrade and Connection.
	if status == http.StatusUpgradeRequired && c.Request.ProtoMajor == 1 {
		c.Header("Upgrade", "websocket")
		c.Header("Connection", "Upgrade")
	}

	c.Header("Sec-WebSocket-Version", "13")
	httppolicy.Problem(c.Writer, status, problem)

	return false
}

// admit returns who sent an upgrade, and takes a place for the connection. If ok is false, it has written the error
// answer.
func (g *Gateway) admit(c *gin.Context) (id identity.Identity, slot *httppolicy.AddressSlot, ok bool) {
	if key := httppolicy.APIKey(c.Request); key != "" && !g.callers.Server(c) {
		return id, nil, false
	}

	id, err := g.callers.Identity(c, true)
	if err != nil {
		api.RefuseIdentity(c.Writer, err)
		return id, nil, false
	}

	slot, ok = g.reserve(c)
	if ok {
		g.callers.SetCookie(c, id)
	}

	return id, slot, ok
}

// routes returns the public handler: calls, and long connections.
func (g *Gateway) routes() http.Handler {
	e := g.api.Engine()
	e.GET("/-/ws", g.getSocket)
	e.GET("/:page/counter/events", g.getEvents)
	e.GET("/-/users/events", g.getUserEvents)
	// Otherwise it would be the HEAD of a user called events.
	e.HEAD("/-/users/events", func(c *gin.Context) {
		c.Header("Allow", http.MethodGet)
		api.RefuseMethod(c)
	})
	e.GET("/-/top/events", g.getTopPageEvents)

	g.counters.Routes(e)
	e.GET(counterapi.Root+"/:key/events", g.getCounterEvents)
	e.GET(counterapi.TopRoot+"/events", g.getTopEvents)

	if g.cfg.PusherKey != "" {
		g.pusherRoutes(e)
	}

	return api.Below(g.cfg.API.BasePath, e)
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
