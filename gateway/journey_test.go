package gateway

import (
	"testing"
	"testing/synctest"
	"time"

	"go.opentelemetry.io/otel/codes"
	sdk "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"

	"headcount/gateway/fanout"
	"headcount/presence"
)

// lastUpdate is a hub that has one update.
type lastUpdate presence.Version

func (l lastUpdate) Last(t presence.Topic) (presence.Update, bool) {
	return presence.Update{Topic: t, Version: presence.Version(l)}, true
}

func (lastUpdate) Trace(*fanout.Subscriber) {}

func TestJourneys(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		recorder := tracetest.NewSpanRecorder()
		j := &journeys{tracer: sdk.NewTracerProvider(sdk.WithSpanProcessor(recorder)).Tracer("t"), hub: lastUpdate{Incarnation: 1, Sequence: 5}}
		topic, c, other := presence.CountTopic("p"), &conn{}, &conn{}
		update := func(sequence uint64) []presence.Update {
			return []presence.Update{{Topic: presence.CountTopic("q"), Version: presence.Version{Incarnation: 9}}, {Topic: topic, Version: presence.Version{Incarnation: 1, Sequence: sequence}}}
		}
		ended := func() int { return len(recorder.Ended()) }

		time.Sleep(time.Minute)
		j.begin(c, topic)
		j.begin(other, topic) // too soon
		time.Sleep(10 * time.Millisecond)
		j.published(update(4)) // does not have the join
		j.acknowledged(other, topic)
		j.acknowledged(c, topic)
		if ended() != 0 {
			t.Fatal("the join ended with a count from before it")
		}
		time.Sleep(10 * time.Millisecond)
		if j.published(update(5)) == nil {
			t.Error("the dispatcher is told nothing of a join that waits for its push")
		}
		if ended() != 0 {
			t.Fatal("the join ended before the client had the count")
		}
		time.Sleep(10 * time.Millisecond)
		j.written(other)
		j.written(c)
		if j.published(update(6)) != nil { // nobody's any more
			t.Error("the dispatcher is told of a join that is over")
		}
		if ended() != 4 {
			t.Fatalf("%d spans", ended())
		}
		for i, want := range []time.Duration{10 * time.Millisecond, 20 * time.Millisecond, 20 * time.Millisecond, 30 * time.Millisecond} {
			if s := recorder.Ended()[i]; s.EndTime().Sub(s.StartTime()) != want || s.Status().Code != codes.Unset {
				t.Errorf("%s took %s, want %s", s.Name(), s.EndTime().Sub(s.StartTime()), want)
			}
		}

		time.Sleep(journeysApart)
		j.begin(c, topic)
		j.stop(c, topic) // the store had it before
		j.acknowledged(c, topic)
		j.published(update(7))
		if ended() != 4 {
			t.Fatal("a join that changed nothing was traced")
		}

		time.Sleep(journeysApart)
		j.begin(c, topic)
		j.acknowledged(c, topic)
		time.Sleep(journeyLasts)
		j.begin(other, topic)
		if ended() != 8 {
			t.Fatalf("%d spans", ended())
		}
		if s := recorder.Ended()[5]; s.Status().Code != codes.Error {
			t.Errorf("%s came back", s.Name())
		}
		var none *journeys
		none.begin(c, topic)
		none.acknowledged(c, topic)
		none.published(update(8))
		none.stop(c, topic)
		none.sent(&spot{})
	})
}
