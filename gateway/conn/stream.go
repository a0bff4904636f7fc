package conn

import (
	"net/http"
	"strconv"
	"time"

	"github.com/gin-gonic/gin"

	"headcount/gateway/bounds"
	"headcount/gateway/identity"
	"headcount/presence"
)

// Events are what an event stream has.
type Events struct {
	Topics []presence.Topic
	Join   bool // the caller joins the page whose count is the only topic
	Often  bool // for a client that takes a silent minute for a broken connection
}

// Stream answers with an event stream, which gives the slot back at its end.
func (cs *Clients) Stream(c *gin.Context, id identity.Identity, slot *bounds.Slot, want Events) {
	// Over HTTP/2 other calls share the connection, so it cannot be taken over.
	if c.Request.ProtoMajor > 1 {
		cs.share(c, id, slot, want)
		return
	}

	if err := cs.take(c.Writer, id, slot, want); err != nil {
		cs.Release(slot)
		cs.cfg.Log.Debug().Err(err).Msg("an event stream could not be opened")
	}
}

// take answers with an event stream that lasts until either side closes the
// connection. The end of the connection ends the body, so the fan-out writes events
// without chunked encoding.
func (cs *Clients) take(w gin.ResponseWriter, id identity.Identity, slot *bounds.Slot, want Events) error {
	c, err := cs.open(w, id, slot)
	if err != nil {
		return err
	}
	head := w.Header()
	streamHead(head)
	head.Set("Connection", "close") // the HTTP server, which would add this and the date, does not write the answer
	head.Set("Date", time.Now().UTC().Format(http.TimeFormat))
	c.beginEvents(want, responseHead(http.StatusOK, head))

	c.start()

	return nil
}

func streamHead(head http.Header) {
	head.Set("Content-Type", "text/event-stream")
	head.Set("Cache-Control", "no-store")
	head.Set("X-Accel-Buffering", "no") // otherwise nginx delays events
	head.Set("X-Content-Type-Options", "nosniff")
}

// beginEvents begins an event stream with the newest update of each topic.
func (c *conn) beginEvents(want Events, hello []byte) {
	c.speech = stream
	if want.Often {
		c.PingOften()
	}

	c.enter(hello)
	if !want.Join {
		c.Subscribe(want.Topics, eventForm)
		return
	}

	// Withheld before the join, whose arrival ends that and may come at once.
	page := want.Topics[0]
	c.Withhold(page)
	c.Reform(page, eventForm, false)
	c.attend(page.Name())
}

// attend joins the page of an event stream. The client gets an event when the store has the
// join. If the user is on too many pages, the stream has only counts.
func (c *conn) attend(name string) {
	err := c.all.cfg.Roster.Join(c.user, name, c)
	// Nothing will arrive, so withholding the page has to end here.
	if err != nil {
		c.Ready(presence.CountTopic(name))
		return
	}

	c.wants = []wanted{{name: name, joined: true, counts: untilLeave}}
	c.all.metrics.joins.Inc()
}

// streamDialect is that of event streams. The server reads no messages of them, so it never answers with a fault.
type streamDialect struct{ ourDialect }

func (streamDialect) ping() (p []byte, answers bool) { return pingComment, false }

func (streamDialect) move(*conn, time.Duration) {} // it cannot be asked

func (streamDialect) arrived(c *conn, name string) {
	joined := appendJoined(nil, name, c.all.cfg.PingInterval)
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
