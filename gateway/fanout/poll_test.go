package fanout

import (
	"context"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"headcount/presence"
)

// polled has one value for all topics; "": none can be read. It may lack something: " lacking".
type polled struct{ value atomic.Value }

func (p *polled) Values(_ context.Context, topics []presence.Topic, found func(presence.Topic, string, bool)) {
	value, lacking := strings.CutSuffix(p.value.Load().(string), " lacking")
	for _, t := range topics {
		if value != "" {
			found(t, value, lacking)
		}
	}
}

// withPoll is withCalls with a Poll that runs, and a topic of its kind.
func withPoll(t *testing.T, test func(t *testing.T, h *Hub, poll *Poll, from *polled, topic presence.Topic)) {
	t.Helper()
	withCalls(t, func(t *testing.T, h *Hub, _ *calls) {
		kind := presence.KindOf("polled")
		from := &polled{}
		from.value.Store("")
		poll := NewPoll(h, from)
		h.Supply(kind, exactly{}, poll)

		ctx, stop := context.WithCancel(t.Context())
		ended := make(chan struct{})
		go func() { defer close(ended); poll.Run(ctx) }()
		defer func() { stop(); <-ended }()

		test(t, h, poll, from, presence.Topic{Kind: kind, Key: "k"})
	})
}

// What is polled reaches the hub at once and when it has changed, also for a topic that was dropped and is wanted
// again.
func TestPoll(t *testing.T) {
	withPoll(t, func(t *testing.T, h *Hub, poll *Poll, from *polled, topic presence.Topic) {
		var before presence.Version
		for round := range 3 {
			// A topic that comes again has no value from before.
			from.value.Store("")
			h.Want(topic)
			synctest.Wait()
			if _, known := h.Last(topic); known {
				t.Errorf("round %d: there is a value that nobody has found", round)
			}

			for i := range 5 {
				value := fmt.Sprint(round, ".", i)
				from.value.Store(value)
				time.Sleep(pollEvery)
				synctest.Wait()
				for range 2 { // the same value is no news
					is, _ := h.Last(topic)
					if is.Value != value || is.Version.Compare(before) < 0 {
						t.Errorf("the hub has %q at %s after %s, want %q", is.Value, is.Version, before, value)
					}
					before = is.Version
					time.Sleep(pollEvery)
					synctest.Wait()
				}

				if is, _ := h.Last(topic); is.Version != before {
					t.Errorf("%q was passed twice", is.Value)
				}
			}

			h.Unwant(topic)
			time.Sleep(2 * lingerFor)
			if wanted, all := poll.Wanted(topic); wanted || all > 0 {
				t.Errorf("%d topics are polled that nobody wants", all)
			}
		}
	})
}

// What cannot be read any more, and what may lack something, says so in the words of counts.
func TestPollMarksStaleValues(t *testing.T) {
	withPoll(t, func(t *testing.T, h *Hub, _ *Poll, from *polled, topic presence.Topic) {
		from.value.Store(`{"top":[1]} lacking`)
		h.Want(topic)
		for _, step := range []struct{ read, want string }{
			{`{"top":[1]} lacking`, `{"top":[1],"stale":true}`}, // from the beginning
			{`{"top":[1]}`, `{"top":[1]}`},
			{``, `{"top":[1],"stale":true}`},
			{`{"top":[1,2]}`, `{"top":[1,2]}`},
			{`{"top":[2]} lacking`, `{"top":[2],"stale":true}`},
			{``, `{"top":[2],"stale":true}`},
		} {
			from.value.Store(step.read)
			time.Sleep(pollEvery)
			synctest.Wait()
			if is, _ := h.Last(topic); is.Value != step.want {
				t.Errorf("read %q: the hub has %s, want %s", step.read, is.Value, step.want)
			}
		}
	})
}
