package counterapi

import (
	"context"
	"fmt"
	"net/http"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gin-gonic/gin"

	"headcount/gateway/bounds"
	"headcount/gateway/calls"
	"headcount/presence"
)

// topUpdates is a Hub that counts the updates of each kind.
type topUpdates struct {
	nowhere
	mu sync.Mutex
	of map[presence.Kind]int // guarded by mu
}

func (h *topUpdates) Update(u presence.Update) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.of[u.Topic.Kind]++
}

// follow serves event streams of top lists that do not end. The returned end ends those of visitors.
func (s *served) follow(hub Hub) (top *LiveTop, end func()) {
	top = NewLiveTop(s.api, hub)
	var followed []presence.Topic
	stream := func(c *gin.Context) (calls.Answer, error) {
		topic, err := top.Readable(c)
		if err != nil {
			return calls.Answer{}, err
		}

		if topic.Kind == ServerTopKind {
			top.Servers.Want(topic)
			return calls.Taken, nil
		}
		top.Visitors.Want(topic)
		followed = append(followed, topic)

		return calls.Taken, nil
	}
	calls.Register(s.engine, s.api.cfg.Log, []calls.Call{
		{Method: http.MethodGet, Path: TopRoot + "/events", Gives: "text/event-stream", Do: stream},
	})

	return top, func() {
		for _, topic := range followed {
			top.Visitors.Unwant(topic)
		}
	}
}

// list returns the call for a list that no other call asks for.
func list(n int) string {
	return fmt.Sprintf("GET %s/events?match=hits:*&last=%dm", TopRoot, 1+n)
}

// One address may follow a few lists of its own, and any that others follow. Visitors leave room for servers.
func TestListsThatAreFollowed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := serve(t, nil)
		_, end := s.follow(nowhere{})

		follow := func(n, status int, lines ...string) {
			t.Helper()
			time.Sleep(time.Second)
			if w := s.do(list(n), "", lines...); w.Code != status {
				t.Errorf("list %d for %s: %d %s, want %d", n, lines, w.Code, w.Body, status)
			}
		}

		for n := range bounds.TopListsOfAddress.Max {
			follow(n, 200, from(1))
		}

		// A stream that was admitted may still be on its way to its list, so a place is kept for it that long.
		time.Sleep(beginTime)
		follow(bounds.TopListsOfAddress.Max, 429, from(1))
		// Another address begins the list. It is then computed in any case, so the first address may follow it as well.
		follow(bounds.TopListsOfAddress.Max, 200, from(2))
		follow(bounds.TopListsOfAddress.Max, 200, from(1))

		for n := bounds.TopListsOfAddress.Max + 1; n < bounds.TopLists.Max; n++ {
			follow(n, 200, from(n))
		}

		// The places for visitors are taken, but servers have their own.
		follow(bounds.TopLists.Max, 429, from(bounds.TopLists.Max))
		for n := range bounds.TopLists.Max {
			follow(n, 200, key)
		}

		follow(bounds.TopLists.Max, 429, key)

		end()
		follow(bounds.TopLists.Max, 200, from(1))
		time.Sleep(time.Second) // until the pause after a question is over
	})
}

// The lists that servers follow do not wait for questions of visitors.
func TestListsOfServers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := serve(t, nil)
		hub := &topUpdates{of: map[presence.Kind]int{}}
		top, _ := s.follow(hub)

		for n, lines := range [][]string{{from(1)}, {key}} {
			if w := s.do(list(n), "", lines...); w.Code != 200 {
				t.Fatalf("the list is answered %d %s, want 200", w.Code, w.Body)
			}
		}

		time.Sleep(time.Second)            // until the pause after a question is over
		s.api.questions.turn <- struct{}{} // now visitors have to wait

		ctx, cancel := context.WithCancel(t.Context())
		var polls sync.WaitGroup
		polls.Go(func() { top.Visitors.Run(ctx) })
		polls.Go(func() { top.Servers.Run(ctx) })

		// The server's list was computed once by now. After the increment the next look finds another list.
		time.Sleep(1500 * time.Millisecond)
		s.want("POST /hits:1/increment", "", 200, one("hits:1", "sum", 1, "1"))
		time.Sleep(time.Second)

		hub.mu.Lock()
		if hub.of[ServerTopKind] != 2 || hub.of[TopKind] != 0 {
			t.Errorf("the updates are %v, want 2 of the server's list and none of visitors'", hub.of)
		}
		hub.mu.Unlock()

		<-s.api.questions.turn
		cancel()
		polls.Wait()
		time.Sleep(time.Second) // until the pause after a question is over
	})
}
