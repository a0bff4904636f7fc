package gateway

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/trace"

	"headcount/presence"
)

const (
	// JoinSpan is the name of a traced join.
	JoinSpan = "join"

	journeysApart = time.Second     // between the beginnings of two
	journeyLasts  = 5 * time.Second // what has not come round by then is traced as it is
)

// journeys trace one join at a time all the way round: to the owner of the user's partition, into
// the store and back with the acknowledgement; and from the store's publication through the
// dispatcher to this gateway, with a count that includes the join. Nothing of that is on the wire:
// the gateway sees both ways end. Its methods may be called on nil, and then do nothing.
type journeys struct {
	tracer trace.Tracer
	hub    interface {
		Last(presence.Topic) (presence.Update, bool)
	}
	begun atomic.Int64            // unix nanoseconds, of the last one
	now   atomic.Pointer[oneJoin] // nil: none is under way
}

// oneJoin is a join that is traced.
type oneJoin struct {
	conn  *conn
	topic presence.Topic
	began time.Time

	mu         sync.Mutex // guards what follows
	over       bool
	acked      time.Time        // zero: not yet
	version    presence.Version // of the count that came with the acknowledgement; 0-0: of an unknown one
	heard      time.Time        // when the newest publication came; zero: none yet
	heardNewer presence.Version
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
	j.now.Store(&oneJoin{conn: c, topic: topic, began: now})
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

// published notes updates that came from dispatchers.
func (j *journeys) published(updates []presence.Update) {
	if j == nil || j.now.Load() == nil {
		return
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
		}
		round := one.round()
		one.mu.Unlock()
		if round {
			j.end(one, now)
		}
	}
}

// round reports whether both ways have ended. The caller holds mu.
func (o *oneJoin) round() bool {
	return !o.acked.IsZero() && !o.heard.IsZero() && o.heardNewer.Compare(o.version) >= 0
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
	ctx, root := j.tracer.Start(context.Background(), JoinSpan, trace.WithTimestamp(one.began))
	part := func(name string, end time.Time) {
		_, span := j.tracer.Start(ctx, name, trace.WithTimestamp(one.began))
		if end.IsZero() {
			span.SetStatus(codes.Error, "it has not come back")
			end = now
		}
		span.End(trace.WithTimestamp(end))
	}
	part("owner and store", one.acked)
	part("publication and dispatcher", one.heard)
	root.End(trace.WithTimestamp(now))
}
