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

// polled has one value for all topics; if it is empty, none can be read. The suffix " lacking" marks a value that lacks
// something.
type polled struct{ value atomic.Value }

func (p *polled) Values(_ context.Context, topics []presence.Topic, found func(presence.Topic, string, bool)) {
	value, lacking := strings.CutSuffix(p.value.Load().(string), " lacking")
	for _, t := range topics {
		if value != "" {
			found(t, value, lacking)
		}
	}
}

// withPoll is withCalls with a running Poll, and a topic that it polls.
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

// A polled value reaches the hub at once and after each change, also when its topic was dropped and is wanted again.
func TestPoll(t *testing.T) {
	withPoll(t, func(t *testing.T, h *Hub, poll *Poll, from *polled, topic presence.Topic) {
		var before presence.Version
		for round := range 3 {
			// A topic that is wanted again has no value from before.
			from.value.Store("")
			h.Want(topic)
			synctest.Wait()
			if _, known := h.Last(topic); known {
				t.Errorf("round %d: the hub has a value before one was read", round)
			}

			for i := range 5 {
				value := fmt.Sprint(round, ".", i)
				from.value.Store(value)
				time.Sleep(pollEvery)
				synctest.Wait()
				for range 2 { // the same value read again is no update
					is, _ := h.Last(topic)
					if is.Value != value || is.Version.Compare(before) < 0 {
						t.Errorf("the hub has %q with version %s, want %q and a version from %s on",
							is.Value, is.Version, value, before)
					}

					before = is.Version
					time.Sleep(pollEvery)
					synctest.Wait()
				}

				if is, _ := h.Last(topic); is.Version != before {
					t.Errorf("%q, read again, got another version", is.Value)
				}
			}

			// A topic lingers, since many clients come back at once. After that it must not be polled any more.
			h.Unwant(topic)
			time.Sleep(2 * lingerFor)
			if wanted, all := poll.Wanted(topic); wanted || all > 0 {
				t.Errorf("the topic is still wanted: %t; %d topics are polled, want none", wanted, all)
			}
		}
	})
}

// A value that cannot be read any more, or may lack something, is marked as stale like a count.
func TestPollMarksStaleValues(t *testing.T) {
	withPoll(t, func(t *testing.T, h *Hub, _ *Poll, from *polled, topic presence.Topic) {
		from.value.Store(`{"top":[1]} lacking`)
		h.Want(topic)
		for _, step := range []struct{ read, want string }{
			{`{"top":[1]} lacking`, `{"top":[1],"stale":true}`}, // stale from the beginning
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
