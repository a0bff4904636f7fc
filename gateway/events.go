package gateway

import (
	"errors"
	"time"

	"github.com/gin-gonic/gin"

	"headcount/gateway/api"
	"headcount/gateway/calls"
	"headcount/gateway/conn"
	"headcount/gateway/counterapi"
	"headcount/gateway/identity"
	"headcount/presence"
)

// getEvents answers with the event stream of a page. With ?join=1 the caller is on the page
// while the stream lasts, for clients without WebSockets.
func (g *Gateway) getEvents(c *gin.Context) (calls.Answer, error) {
	join := c.Query("join") == "1"
	check := presence.CheckReadable
	if join {
		check = presence.CheckPage // nobody can be on all pages of a site
	}
	name, err := g.callers.Page(c, check, true)
	if err != nil {
		return calls.Answer{}, err
	}

	return g.serveEvents(c, conn.Events{Topics: []presence.Topic{presence.CountTopic(name)}, Join: join})
}

// serveEvents answers with an event stream.
func (g *Gateway) serveEvents(c *gin.Context, want conn.Events) (calls.Answer, error) {
	id, unknown := g.callers.Identity(c, true)
	if unknown != nil && (want.Join || !mayWatch(unknown)) {
		return calls.Answer{}, unknown
	}

	// A crawler watches like anybody else, and is not counted.
	want.Join = want.Join && !g.callers.Crawler(c.Request)
	if want.Join {
		id.Expires = g.endOfStay(id.Expires)
	}
	if err := g.api.AdmitTopics(c, g.hub.Unwatched(want.Topics)); err != nil {
		return calls.Answer{}, err
	}
	slot, err := g.reserve(c)
	if err != nil {
		return calls.Answer{}, err
	}

	// A back end is no visitor, and keeps no cookie.
	if unknown == nil && !g.callers.IsServer(c.Request) {
		g.callers.SetCookie(c, id)
	}

	g.clients.Stream(c, id, slot, want)

	return calls.Taken, nil
}

// mayWatch reports whether a caller whose identity is not known, for this reason, may watch: a stream that joins no
// page needs no identity.
func mayWatch(unknown error) bool {
	return identity.Nobody(unknown) || errors.Is(unknown, api.ErrElsewhere)
}

// endOfStay returns when a stream ends that keeps its user on a page until a time; zero: forever. A proxy may accept
// comments long after its client has gone. So the stream ends when a WebSocket that does not answer pings would, and
// the client opens another one.
func (g *Gateway) endOfStay(expires time.Time) time.Time {
	until := time.Now().Add(g.cfg.PingInterval + g.cfg.PongTimeout)
	if expires.IsZero() || until.Before(expires) {
		return until
	}

	return expires
}

// CountersChanged must be called when the result of Counters.Up has changed.
func (g *Gateway) CountersChanged() { g.live.StateChanged() }

func (g *Gateway) getCounterEvents(c *gin.Context) (calls.Answer, error) {
	key, err := g.counters.Readable(c)
	if err != nil {
		return calls.Answer{}, err
	}

	return g.serveEvents(c, conn.Events{Topics: []presence.Topic{counterapi.Topic(key)}})
}

func (g *Gateway) getTopEvents(c *gin.Context) (calls.Answer, error) {
	topic, err := g.liveTop.Readable(c)
	if err != nil {
		return calls.Answer{}, err
	}

	return g.serveEvents(c, conn.Events{Topics: []presence.Topic{topic}})
}
