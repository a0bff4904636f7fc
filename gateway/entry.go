package gateway

import (
	"fmt"
	"net/http"
	"time"

	"github.com/gin-gonic/gin"

	"headcount/gateway/httppolicy"
	"headcount/gateway/websocket"
)

const subprotocol = "headcount.v1"

// reserve takes a place for a long connection, in all and among those of its
// address. If it returns false, it has written the error answer. Otherwise the
// caller gives the place back with release.
func (g *Gateway) reserve(c *gin.Context) (*httppolicy.AddressSlot, bool) {
	g.entry.Lock()
	err := g.serving()
	if g.draining.Load() {
		err = errDraining
	}
	if err == nil {
		g.conns.Add(1)
	}
	g.entry.Unlock()
	if err != nil {
		unavailable(c, err)
		return nil, false
	}
	slot, fits := g.slots.Enter(g.cfg.Proxies.Addr(c.Request))
	limit, detail := "", ""
	switch n := g.connections.Add(1); {
	case !fits:
		limit = limitAddress
		detail = fmt.Sprintf("This address has reached its limit of %d connections; see --max-connections-per-address.", g.cfg.MaxPerAddress)
	case g.cfg.Memory != nil && g.cfg.Memory.High():
		limit = limitMemory
		detail = "This gateway has reached its memory limit."
	case n > int64(g.cfg.MaxConnections):
		limit = limitConnections
		detail = "This gateway has reached its limit of connections."
	default:
		return slot, true
	}
	g.release(slot)
	g.metrics.refused.Inc()
	g.metrics.limits[limit].Inc()
	httppolicy.Problem(c.Writer, http.StatusServiceUnavailable, detail, httppolicy.RetryAfter(5*time.Second), httppolicy.Because(limit))
	return nil, false
}

// release gives back a place that reserve took.
func (g *Gateway) release(slot *httppolicy.AddressSlot) {
	slot.Leave()
	g.connections.Add(-1)
	g.conns.Done()
}

func (g *Gateway) getSocket(c *gin.Context) {
	r := c.Request
	if problem, status := websocket.CheckUpgrade(r, subprotocol); status != 0 {
		if status == http.StatusUpgradeRequired {
			c.Header("Upgrade", "websocket")
			c.Header("Connection", "Upgrade")
		}
		c.Header("Sec-WebSocket-Version", "13")
		httppolicy.Problem(c.Writer, status, problem)
		return
	}
	if key := httppolicy.APIKey(r); key != "" && !g.server(c) {
		return
	}
	id, err := g.identify(c, true)
	if err != nil {
		writeIdentityProblem(c.Writer, err)
		return
	}
	slot, ok := g.reserve(c)
	if !ok {
		return
	}
	g.cfg.Identities.SetCookie(c.Writer, r, id, g.cfg.Proxies.Secure(r))
	if err := g.accept(c.Writer, r, id, slot); err != nil {
		g.release(slot)
		g.cfg.Log.Debug().Err(err).Msg("upgrade failed")
	}
}
