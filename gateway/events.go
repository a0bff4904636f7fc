package gateway

import (
	"errors"
	"net/http"
	"strconv"
	"time"

	"github.com/gin-gonic/gin"

	"headcount/gateway/api"
	"headcount/gateway/bounds"
	"headcount/gateway/calls"
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

	return g.serveEvents(c, []presence.Topic{presence.CountTopic(name)}, join)
}

// serveEvents answers with the event stream of topics. If join is set, the caller joins the page
// whose count is the only topic.
func (g *Gateway) serveEvents(c *gin.Context, topics []presence.Topic, join bool) (calls.Answer, error) {
	id, unknown := g.callers.Identity(c, true)
	if unknown != nil && (join || !mayWatch(unknown)) {
		return calls.Answer{}, unknown
	}

	// A crawler watches like anybody else, and is not counted.
	join = join && !g.callers.Crawler(c.Request)
	if join {
		id.Expires = g.endOfStay(id.Expires)
	}
	if err := g.api.AdmitTopics(c, g.hub.Unwatched(topics)); err != nil {
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

	// Over HTTP/2 other calls share the connection, so it cannot be taken over.
	if c.Request.ProtoMajor > 1 {
		g.shareStream(c, id, slot, topics, join)
		return calls.Taken, nil
	}

	if err := g.stream(c.Writer, id, slot, topics, join); err != nil {
		g.release(slot)
		g.cfg.Log.Debug().Err(err).Msg("event stream failed")
	}

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

// stream answers with an event stream that lasts until either side closes the
// connection. The end of the connection ends the body, so the fan-out writes events
// without chunked encoding.
func (g *Gateway) stream(
	w gin.ResponseWriter, id identity.Identity, slot *bounds.Slot, topics []presence.Topic, join bool,
) error {
	c, err := g.open(w, id, slot)
	if err != nil {
		return err
	}
	head := w.Header()
	streamHead(head)
	head.Set("Connection", "close") // the HTTP server, which would add this and the date, does not write the answer
	head.Set("Date", time.Now().UTC().Format(http.TimeFormat))
	c.beginEvents(topics, join, responseHead(http.StatusOK, head))

	c.start()

	return nil
}

func streamHead(head http.Header) {
	head.Set("Content-Type", "text/event-stream")
	head.Set("Cache-Control", "no-store")
	head.Set("X-Accel-Buffering", "no") // otherwise nginx delays events
	head.Set("X-Content-Type-Options", "nosniff")
}

// beginEvents begins the event stream of topics with the newest update of each.
func (c *conn) beginEvents(topics []presence.Topic, join bool, hello []byte) {
	c.speech = stream
	if topics[0].Kind == topPagesKind {
		c.PingOften() // web/live-top.js reopens a stream that has been silent for a minute
	}

	c.enter(hello)
	if !join {
		c.Subscribe(topics, eventForm)
		return
	}

	// Held before the join, whose arrival ends the hold and may come at once.
	c.Hold(topics[0])
	c.Reform(topics[0], eventForm, false)
	c.attend(topics[0].Name())
}

// attend joins the page of an event stream. The client gets an event when the store has the
// join. If the user is on too many pages, the stream has only counts.
func (c *conn) attend(name string) {
	err := c.g.roster.Join(c.user, name, c)
	// Nothing will arrive, so the hold has to end here.
	if err != nil {
		c.Ready(presence.CountTopic(name))
		return
	}

	c.wants = []wanted{{name: name, joined: true, counts: untilLeave}}
	c.g.metrics.joins.Inc()
}

// streamDialect is that of event streams. The server reads no messages of them, so it never answers with a fault.
type streamDialect struct{ ourDialect }

func (streamDialect) ping() (p []byte, answers bool) { return pingComment, false }

func (streamDialect) move(*conn, time.Duration) {} // it cannot be asked

func (streamDialect) arrived(c *conn, name string) {
	joined := appendJoined(nil, name, c.g.cfg.PingInterval)
	_ = c.wire.Write(joined) // an error means that the client is gone already
}

// appendJoined appends the event that confirms a join. To stay on the page, the client has to
// open another such stream within heartbeat.
func appendJoined(b []byte, name string, heartbeat time.Duration) []byte {
	b = append(b, "event: join\ndata: {\"page\":"...)
	b = presence.AppendString(b, presence.KeyOf(name))

	b = append(b, `,"heartbeat_ms":`...)
	b = strconv.AppendInt(b, heartbeat.Milliseconds(), 10)
	return append(b, "}\n\n"...)
}
