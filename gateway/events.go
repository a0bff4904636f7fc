package gateway

import (
	"errors"
	"net/http"
	"time"

	"github.com/gin-gonic/gin"

	"headcount/gateway/identity"
	"headcount/gateway/policy"
	"headcount/presence"
)

func (g *Gateway) getEvents(c *gin.Context) {
	name, ok := page(c, presence.CheckReadable)
	if ok {
		g.serveEvents(c, presence.CountTopic(name))
	}
}

// serveEvents answers with the event stream of a topic.
func (g *Gateway) serveEvents(c *gin.Context, topic presence.Topic) {
	id, err := g.identify(c, true)
	if err != nil && !errors.Is(err, identity.ErrNoToken) && !errors.Is(err, errElsewhere) { // the stream is for everybody
		writeIdentityProblem(c.Writer, err)
		return
	}
	if n := g.hub.Unheard([]presence.Topic{topic}); n > 0 && !g.bring(g.cfg.Proxies.Addr(c.Request), n) {
		g.refuseNewPages(c)
		return
	}
	crowd, ok := g.reserve(c)
	if !ok {
		return
	}
	if err == nil {
		g.cfg.Identities.SetCookie(c.Writer, c.Request, id, g.cfg.Proxies.Secure(c.Request))
	}
	last := c.GetHeader("Last-Event-ID")
	if c.Request.ProtoMajor > 1 {
		g.shareStream(c, id, crowd, topic, last)
		return
	}
	if err := g.stream(c.Writer, id, crowd, topic, last); err != nil {
		g.release(crowd)
		g.cfg.Log.Debug().Err(err).Msg("event stream failed")
	}
}

// stream answers with an event stream that lasts until either side closes the
// connection. The end of the connection is the end of the body, so the fan-out
// writes events without chunks around them.
func (g *Gateway) stream(w gin.ResponseWriter, id identity.Identity, crowd *policy.Crowd, topic presence.Topic, lastID string) error {
	c, err := g.open(w, id.Hash, id.Expires, crowd)
	if err != nil {
		return err
	}
	head := w.Header()
	streamHead(head)
	head.Set("Connection", "close")
	head.Set("Date", time.Now().UTC().Format(http.TimeFormat))
	c.tell(topic, lastID, responseHead(http.StatusOK, head))
	c.start()
	return nil
}

func streamHead(head http.Header) {
	head.Set("Content-Type", "text/event-stream")
	head.Set("Cache-Control", "no-store")
	head.Set("X-Accel-Buffering", "no") // otherwise nginx delays events
	head.Set("X-Content-Type-Options", "nosniff")
}

// tell begins the event stream of a topic. A client that returns with the id of the
// newest update does not get that one again.
func (c *conn) tell(topic presence.Topic, lastID string, hello []byte) {
	c.events = true
	c.enter(hello)
	has, err := presence.ParseVersion(lastID)
	if err == nil && !c.g.hub.StaleLately() {
		c.Resume(topic, eventForm, shownVersion(has.String()))
	} else {
		c.Subscribe([]presence.Topic{topic}, eventForm)
	}
}
