package gateway

import (
	"fmt"
	"strings"

	"github.com/gin-gonic/gin"

	"headcount/gateway/api"
	"headcount/gateway/bounds"
	"headcount/gateway/calls"
	"headcount/gateway/identity"
	"headcount/gateway/pusher"
	"headcount/presence"
)

// pusherRoutes adds the path of Pusher's clients. Another key has no route, since /app/:key would hide the page app.
func (g *Gateway) pusherRoutes(e *gin.Engine) {
	upgrade := calls.Serve(g.cfg.Log, g.getPusher)
	notFound := calls.Serve(g.cfg.Log, api.NotFound)

	e.GET(calls.PusherRoot+g.cfg.API.App.Key, upgrade)
	e.NoRoute(func(c *gin.Context) {
		// The escaped path, in which a slash of a page's id is none.
		if strings.HasPrefix(c.Request.URL.EscapedPath(), calls.PusherRoot) && c.GetHeader("Upgrade") != "" {
			upgrade(c)
		} else {
			notFound(c)
		}
	})
}

// statusOnly takes the status and the header of a refusal, and not its body.
type statusOnly struct{ gin.ResponseWriter }

func (statusOnly) Write(p []byte) (int, error) { return len(p), nil }

// getPusher serves a client of Pusher. A browser shows a script no status, so what refuses any other WebSocket with one
// closes this one with a code. Metrics and log have the status.
func (g *Gateway) getPusher(c *gin.Context) (calls.Answer, error) {
	// Without an upgrade there is no WebSocket to close with a code.
	if err := checkUpgrade(c, pusher.Subprotocol); err != nil {
		return calls.Answer{}, err
	}

	id, slot, err := g.admitPusher(c)
	if err == nil {
		g.clients.AcceptPusher(c.Writer, c.Request, id, slot)
		return calls.Taken, nil
	}

	// The refusal is written for the metrics and the log; its body would stand before the frames of the upgrade.
	w := c.Writer
	c.Writer = statusOnly{w}
	calls.WriteRefusal(c, g.cfg.Log, err)
	g.clients.RefusePusher(w, c.Request)

	return calls.Taken, nil
}

// admitPusher is admit for a client of Pusher.
func (g *Gateway) admitPusher(c *gin.Context) (id identity.Identity, slot *bounds.Slot, err error) {
	// NoRoute has sent the request here, so its key is another one.
	if c.FullPath() == "" {
		return id, nil, calls.Refuse(calls.ErrNotFound, "The key of the app is not that of --pusher-key.")
	}
	version := c.Query("protocol")
	if version != pusher.Version {
		const form = "The protocol is %q; this server speaks %s."
		return id, nil, calls.Bad(fmt.Sprintf(form, presence.Excerpt(version), pusher.Version))
	}

	return g.admit(c)
}
