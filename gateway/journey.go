package gateway

import (
	"context"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/trace"

	"headcount/gateway/fanout"
	"headcount/presence"
	"headcount/tracing"
)

const (
	// JoinSpan is the name of a traced join.
	JoinSpan = "join"

	journeysApart = time.Second     // between the beginnings of two
	journeyLasts  = 5 * time.Second // what has not come round by then is traced as it is
	journeyPushes = 8               // pushes that are told of the join
)

// journeys trace one join at a time all the way round: to the owner of the user's partition, into
// the store and back with the acknowledgement; from the store's publication through the dispatcher
// to this gateway, with a count that includes the join; and to the client who joined. The owner hears
// of the trace with the join (heartbeat.Op). A publication has none, since the store knows only
// totals: the dispatcher hears of it in the answer to its push. Its methods may be called on nil, and
// then do nothing.
type journeys struct {
	tracer trace.Tracer
	hub    interface {
		Last(presence.Topic) (presence.Update, bool)
		Trace(*fanout.Subscriber)
	}
	begun atomic.Int64            // unix nanoseconds, of the last one
	now   atomic.Pointer[oneJoin] // nil: none is under way
}

// oneJoin is a join that is traced.
type oneJoin struct {
	conn  *conn
	topic presence.Topic
	began time.Time
	root  context.Context // with the span of all of it
	// there ends with the acknowledgement, and back with the newest count from a dispatcher.
	there, back       trace.Span
	toOwner, toPusher *tracing.Parent

	mu         sync.Mutex // guards what follows
	over       bool
	acked      time.Time        // zero: not yet
	version    presence.Version // of the count that came with the acknowledgement; 0-0: of an unknown one
	heard      time.Time        // when the newest publication came; zero: none yet
	heardNewer presence.Version
	pushes     int       // that were told of it
	written    time.Time // when the client was first sent the count; zero: not yet
}

// begin may follow the join that c is about to make.
func (j *journeys) begin(c *conn, topic presence.Topic) {
	if j == nil {
		return
	}
	now := time.Now()
	last := j.begun.Load()
	if now.UnixNano()-last < int64(journeysApart) || !j.begun.CompareAndSwap(last, now.UnixNano()) {
		return
	}
	if old := j.now.Load(); old != nil {
		if now.Sub(old.began) < journeyLasts {
			return
		}
		j.end(old, now)
	}
	one := &oneJoin{conn: c, topic: topic, began: now}
	one.root, _ = j.tracer.Start(context.Background(), JoinSpan, trace.WithTimestamp(now))
	_, one.there = j.tracer.Start(one.root, "owner and store", trace.WithTimestamp(now))
	_, one.back = j.tracer.Start(one.root, "publication and dispatcher", trace.WithTimestamp(now))
	one.toOwner, one.toPusher = tracing.ParentOf(one.there), tracing.ParentOf(one.back)
	j.now.Store(one)
	j.hub.Trace(&c.Subscriber)
}

// sent is what the owner is told of a join that is about to be sent, if it is the traced one.
func (j *journeys) sent(sp *spot) *tracing.Parent {
	if j == nil {
		return nil
	}
	one := j.now.Load()
	if one == nil || one.topic != presence.CountTopic(sp.page) || !slices.ContainsFunc(sp.wait, func(w waiter) bool { return w.joiner == one.conn }) {
		return nil
	}
	return one.toOwner
}

// stop drops the join: the store had it before.
func (j *journeys) stop(c *conn, topic presence.Topic) {
	if one := j.of(topic); one != nil && one.conn == c {
		j.now.CompareAndSwap(one, nil)
	}
}

func (j *journeys) of(topic presence.Topic) *oneJoin {
	if j == nil {
		return nil
	}
	if one := j.now.Load(); one != nil && one.topic == topic {
		return one
	}
	return nil
}

// acknowledged notes that the store has the join.
func (j *journeys) acknowledged(c *conn, topic presence.Topic) {
	one := j.of(topic)
	if one == nil || one.conn != c {
		return
	}
	last, _ := j.hub.Last(topic)
	now := time.Now()
	one.mu.Lock()
	if one.acked.IsZero() {
		one.acked, one.version = now, last.Version
	}
	round := one.round()
	one.mu.Unlock()
	if round {
		j.end(one, now)
	}
}

// published notes updates that came from a dispatcher, and returns what it is told of a join that
// waits for one of them.
func (j *journeys) published(updates []presence.Update) (told *tracing.Parent) {
	if j == nil || j.now.Load() == nil {
		return nil
	}
	for i := range updates {
		one := j.of(updates[i].Topic)
		if one == nil {
			continue
		}
		now := time.Now()
		one.mu.Lock()
		if one.heard.IsZero() || one.heardNewer.Compare(updates[i].Version) < 0 {
			one.heard, one.heardNewer = now, updates[i].Version
			if one.pushes++; one.pushes <= journeyPushes && !one.over {
				told = one.toPusher
			}
		}
		round := one.round()
		one.mu.Unlock()
		if round {
			j.end(one, now)
		}
	}
	return told
}

// follows returns the page that c is about to join, if that is the traced join.
func (j *journeys) follows(c *conn) (topic presence.Topic, traced bool) {
	if one := j.now.Load(); one != nil && one.conn == c {
		return one.topic, true
	}
	return topic, false
}

// written notes that the client was sent the count.
func (j *journeys) written(c *conn) {
	one := j.now.Load()
	if one == nil || one.conn != c {
		return
	}
	now := time.Now()
	one.mu.Lock()
	if one.written.IsZero() {
		one.written = now
	}
	round := one.round()
	one.mu.Unlock()
	if round {
		j.end(one, now)
	}
}

// round reports whether all ways have ended. The caller holds mu.
func (o *oneJoin) round() bool {
	return !o.acked.IsZero() && !o.written.IsZero() && !o.heard.IsZero() && o.heardNewer.Compare(o.version) >= 0
}

// end makes the spans.
func (j *journeys) end(one *oneJoin, now time.Time) {
	one.mu.Lock()
	defer one.mu.Unlock()
	if one.over {
		return
	}
	one.over = true
	j.now.CompareAndSwap(one, nil)
	part := func(span trace.Span, end time.Time) {
		if end.IsZero() {
			span.SetStatus(codes.Error, "it has not come back")
			end = now
		}
		span.End(trace.WithTimestamp(end))
	}
	part(one.there, one.acked)
	part(one.back, one.heard)
	if !one.acked.IsZero() { // until then the count is held back, for a while
		from := one.acked
		if !one.written.IsZero() && one.written.Before(from) {
			from = one.written
		}
		_, delivery := j.tracer.Start(one.root, "delivery", trace.WithTimestamp(from))
		part(delivery, one.written)
	}
	trace.SpanFromContext(one.root).End(trace.WithTimestamp(now))
}
