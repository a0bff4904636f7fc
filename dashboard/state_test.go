package dashboard

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"headcount/presence"
)

func TestState(t *testing.T) {
	site := &presence.Count{}
	well := func() *answer { return &answer{Site: site, Processes: []process{{Name: "a", Load: &load{}}}} }

	for name, tc := range map[string]struct {
		change func(*answer)
		ready  error
		want   state
	}{
		"well": {func(*answer) {}, nil, state{"good", "All is well: the store and 1 process answer."}},
		"regions": {
			func(a *answer) { a.Regions = []presence.PeerStats{{Name: "eu", Heard: 1}} }, nil, state{
				"good", "All is well: the store and 1 process answer, and 1 other region is heard.",
			},
		},
		"store": {
			func(a *answer) { a.Site = nil }, nil, state{
				"bad", "The store does not answer, so counts are the last that were known.",
			},
		},
		"not ready": {
			func(*answer) {}, errors.New("no presence node is known"), state{
				"bad", "This process is not ready: no presence node is known.",
			},
		},
		"stale": {
			func(a *answer) { a.Site = &presence.Count{Stale: true} }, nil,
			state{"warn", "Counts are not complete at the moment."},
		},
		"cut": {
			func(a *answer) { a.Regions = []presence.PeerStats{{Name: "eu", Heard: 31}} }, nil, state{
				"warn", "The region eu has not been heard for 31 s; totals have what it said last.",
			},
		},
		"bad is told": {
			func(a *answer) { a.Processes[0].Load, a.Site = nil, nil }, nil, state{
				"bad", "The store does not answer, so counts are the last that were known. No answer from 1 of 1 " +
					"process: a.",
			},
		},
	} {
		is := well()
		tc.change(is)
		b := New(Config{Ready: func() error { return tc.ready }})
		if got := b.state(is); got != tc.want {
			t.Errorf("%s: %+v, want %+v", name, got, tc.want)
		}
	}
}

// Each event is noted once. The processes that run at the start are no events.
func TestEvents(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := presence.Process{Name: "a", Roles: []string{"gateway"}, Incarnation: 1}
		b := presence.Process{Name: "b", Roles: []string{"presence"}, Incarnation: 2}

		var mu sync.Mutex // guards the next three variables
		trouble := errors.New("it has not joined")
		there := []presence.Process{}
		heard := time.Second
		board := New(Config{
			Self: "a",
			Ready: func() error {
				mu.Lock()
				defer mu.Unlock()
				return trouble
			},
			Members: members(func() []presence.Process {
				mu.Lock()
				defer mu.Unlock()
				return there
			}),
			Report: report(func() presence.Report {
				mu.Lock()
				defer mu.Unlock()
				return presence.Report{
					Stats: presence.Stats{Peers: []presence.PeerStats{{Name: "eu", Heard: heard.Seconds()}}},
				}
			}),
		})

		ctx, stop := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() {
			defer close(done)
			board.Watch(ctx)
		}()

		// Each step lasts long enough for the board to notice it.
		step := func(change func()) {
			mu.Lock()
			change()
			mu.Unlock()
			time.Sleep(2 * watchEvery)
		}

		step(func() {})
		step(func() {
			there = []presence.Process{a, b}
			trouble = nil
		})
		step(func() { there = []presence.Process{a} })
		step(func() { trouble = presence.ErrUnavailable })
		step(func() { trouble = nil })
		step(func() { heard = time.Minute })
		step(func() { heard = time.Second })
		step(func() {
			b.Incarnation = 3
			there = []presence.Process{a, b}
		})

		stop()
		<-done

		var got []string
		for _, e := range board.events.newest() {
			got = append(got, e.Text)
		}
		slices.Reverse(got)

		want := []string{
			"This process, a, has started.", "A process left: b (presence).",
			"This process is not ready: store is unavailable.", "This process is ready again.",
			"The region eu is silent.", "The region eu is heard again.", "A process joined: b (presence).",
		}
		if !slices.Equal(got, want) {
			t.Errorf("the events are %q\nwant %q", got, want)
		}

		// Old events make room for new ones.
		for i := range 2 * maxEvents {
			board.events.add(fmt.Sprint(i))
		}
		if all := board.events.newest(); len(all) != maxEvents || all[0].Text != fmt.Sprint(2*maxEvents-1) {
			t.Errorf("%d events are kept, and the newest is %+v; want %d", len(all), all[0], maxEvents)
		}
	})
}

// A process that is leaving has no roles, and the board may see it in that state. Its departure is an event all the
// same.
func TestAProcessThatIsLeavingHasAName(t *testing.T) {
	there := []presence.Process{{Name: "b", Incarnation: 2}}
	board := New(Config{
		Ready:   func() error { return nil },
		Members: members(func() []presence.Process { return there }),
		Report:  report(func() presence.Report { return presence.Report{} }),
	})

	was := board.look(around{})
	there = nil
	board.compare(was, board.look(was))

	if got := board.events.newest(); len(got) != 1 || got[0].Text != "A process left: b." {
		t.Errorf("the events are %+v, want the departure of b", got)
	}
}
