package gateway

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"headcount/gateway/roster"
	"headcount/gateway/websocket"
	"headcount/presence"
	"headcount/presence/presencemem"
)

// step is a frame to send, and all frames that must come. P and Q stand for two pages.
type step struct {
	send string
	want []string // "P 1" is a count, "bad_page" an error
}

// sequences are frames that a client sends, and what it receives after each.
var sequences = map[string][]step{
	"join answers with the joiner":    {{join, []string{"P 1"}}},
	"a join again answers again":      {{join, []string{"P 1"}}, {join, []string{"P 1"}}},
	"subscribe answers":               {{subscribe, []string{"P 0"}}},
	"a subscribe again answers again": {{subscribe, []string{"P 0"}}, {subscribe, []string{"P 0"}}},
	"several at once": {
		{`{"type":"subscribe","pages":["P","Q"]}`, []string{"P 0", "Q 0"}},
	},
	"none at all": {
		{`{"type":"subscribe","pages":[]}`, nil}, {`{"type":"unsubscribe","pages":[]}`, nil},
	},
	"twice in one frame": {
		{`{"type":"subscribe","pages":["P","P"]}`, []string{"P 0"}},
		{`{"type":"subscribe","pages":["P","P"]}`, []string{"P 0"}},
	},
	"join after subscribe":               {{subscribe, []string{"P 0"}}, {join, []string{"P 1"}}},
	"leave ends the join's subscription": {{join, []string{"P 1"}}, {leave, nil}},
	"leave leaves an own subscription": {
		{subscribe, []string{"P 0"}}, {join, []string{"P 1"}}, {leave, []string{"P 0"}},
	},
	"leave leaves a later own subscription": {
		{join, []string{"P 1"}}, {subscribe, []string{"P 1"}}, {leave, []string{"P 0"}},
	},
	"unsubscribe leaves presence": {
		{join, []string{"P 1"}}, {unsubscribe, nil}, {subscribe, []string{"P 1"}},
	},
	"unsubscribe, then leave": {{join, []string{"P 1"}}, {unsubscribe, nil}, {leave, nil}},
	"unsubscribe ends an own one": {
		{subscribe, []string{"P 0"}}, {unsubscribe, nil}, {join, []string{"P 1"}}, {leave, nil},
	},
	"unsubscribe ends both": {
		{subscribe, []string{"P 0"}}, {join, []string{"P 1"}}, {unsubscribe, nil}, {leave, nil},
	},
	"join after unsubscribe subscribes again": {
		{join, []string{"P 1"}}, {unsubscribe, nil}, {join, []string{"P 1"}},
	},
	"join, leave, join": {
		{join, []string{"P 1"}}, {leave, nil}, {join, []string{"P 1"}},
	},
	"leaving what is not there is silent": {
		{leave, nil}, {unsubscribe, nil}, {`{"type":"unsubscribe","pages":["*"]}`, nil},
	},
	"leave twice is silent": {{join, []string{"P 1"}}, {leave, nil}, {leave, nil}},
	"leave without join keeps a subscription": {
		{subscribe, []string{"P 0"}}, {leave, nil}, {join, []string{"P 1"}},
	},
	"one of the pages is bad: nothing changes": {
		{`{"type":"subscribe","pages":["P",""]}`, []string{"bad_page"}}, {join, []string{"P 1"}}, {leave, nil},
	},
	"the site can be subscribed to, not joined": {{`{"type":"join","page":"*"}`, []string{"bad_page *"}}},
	"an error names the page": {
		{`{"type":"subscribe","pages":["P","Q\u0007"]}`, []string{"bad_page Q\a"}},
	},
	"half a surrogate pair": {
		{`{"type":"join","page":"P\ud83d"}`, []string{"bad_page P\uFFFD"}},
	},
	"errors change nothing and the rest goes on": {
		{join, []string{"P 1"}}, {`{"type":"leave","page":5}`, []string{"bad_json"}},
		{subscribe, []string{"P 1"}},
	},
}

const (
	join        = `{"type":"join","page":"P"}`
	leave       = `{"type":"leave","page":"P"}`
	subscribe   = `{"type":"subscribe","pages":["P"]}`
	unsubscribe = `{"type":"unsubscribe","pages":["P"]}`
)

// TestFrames sends sequences of frames, and compares all that the client receives.
func TestFrames(t *testing.T) {
	inMemory(t, nil, func(t *testing.T, s *served) {
		defer s.dispatch()() // counts change only by publications
		for name, steps := range sequences {
			// Each case has pages of its own, so that all cases can share a gateway.
			p, q := name+` "ü" p`, name+` "ü" q`
			in := strings.NewReplacer("P", escaped(p), "Q", escaped(q))
			out := strings.NewReplacer("P", p, "Q", q)
			c := s.socket("")

			for _, st := range steps {
				c.write([]byte(masked(websocket.Text, in.Replace(st.send))))
				var want []string
				for _, w := range st.want {
					want = append(want, out.Replace(w))
				}

				slices.Sort(want)

				got := c.said(t)
				if !slices.Equal(got, want) {
					t.Fatalf("%s: %s is answered with %q, want %q", name, st.send, got, want)
				}
			}

			_ = c.Close()
		}

		s.settles(0)
	})
}

// dispatch sends the publications of the store to the gateway, as dispatchers do, until the returned function is
// called.
func (s *served) dispatch() (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	var watching sync.WaitGroup
	all := make([]int, presence.DefaultBuckets)
	for i := range all {
		all[i] = i
	}

	store := s.g.cfg.Store.(*presencemem.Store)
	watching.Go(func() {
		store.Watch(ctx, all, func(p presence.Publication) { s.g.Push(p.Updates) })
	})
	synctest.Wait() // until it watches the store; otherwise it would miss the first changes

	return func() {
		cancel()
		watching.Wait()
	}
}

// escaped returns text as it appears within a JSON string.
func escaped(text string) string {
	quoted, _ := json.Marshal(text)

	return strings.Trim(string(quoted), `"`)
}

// said returns the counts and errors that come before a silence, sorted.
func (r *raw) said(t *testing.T) (all []string) {
	t.Helper()
	for {
		// Whatever a frame causes takes less time.
		_ = r.SetReadDeadline(time.Now().Add(2 * time.Second))
		_, payload, err := r.next()
		if err != nil {
			slices.Sort(all)
			return all
		}

		var f struct {
			Type, Code, Page, Message string
			Count                     int
			Stale                     bool
		}

		err = json.Unmarshal(payload, &f)
		switch {
		case err != nil:
			t.Fatalf("%q: %v", payload, err)
		case f.Type == "count":
			all = append(all, fmt.Sprintf("%s %d", f.Page, f.Count))
		case f.Type == "error":
			all = append(all, strings.TrimSpace(f.Code+" "+f.Page))
		default:
			all = append(all, string(payload))
		}
	}
}

// nobody is a connection that ignores notifications.
type nobody struct{}

func (nobody) Arrived(string) {}

// A client subscribes to a page, and its user may not join it. The client still gets the counts of the page.
func TestRefusedJoinLeavesTheSubscription(t *testing.T) {
	inMemory(t, nil, func(t *testing.T, s *served) {
		r := s.looker()
		r.write([]byte(masked(websocket.Text, `{"type":"subscribe","pages":["watched"]}`)))
		r.expect(websocket.Text, `{"type":"count","page":"watched","count":0`)
		user := s.g.callers.Identities.Hash(r.user)
		// The user is on as many other pages as a user may be.
		for n := range roster.MaxUserPages {
			if err := s.g.roster.Join(user, fmt.Sprint(n), nobody{}); err != nil {
				t.Fatalf("page %d: %v", n, err)
			}
		}

		r.write([]byte(joins("watched")))
		await := func(frame string) { // the earlier count may come once more
			t.Helper()
			for seen := false; !seen; {
				_, payload, err := r.frame()
				if err != nil {
					t.Fatal(err)
				}
				seen = bytes.HasPrefix(payload, []byte(frame))
			}
		}

		await(`{"type":"error","code":"too_many_pages","message":"a user may join at most 10000 pages over all ` +
			`connections; leave some","page":"watched"}`)

		r.write([]byte(joins("fresh"))) // without a subscription
		await(`{"type":"error","code":"too_many_pages","message":"a user may join at most 10000 pages over all ` +
			`connections; leave some","page":"fresh"}`)

		// The count that another user changes must still reach the refused one: an undone join that undid the
		// subscription would leave a frozen number on the page.
		other := s.socket("")
		other.write([]byte(joins("watched")))
		await(`{"type":"count","page":"watched","count":1`)

		r.write([]byte(joins("7"))) // the user is on it already
		r.expect(websocket.Text, `{"type":"count","page":"7","count":1`)
	})
}
