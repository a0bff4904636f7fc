package gateway

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/rs/zerolog"

	"headcount/gateway/identity"
	"headcount/presence"
)

// doubts records the calls to a hub, with the seconds since the start.
type doubts struct {
	start time.Time
	mu    sync.Mutex // guards said
	said  []string
}

func (d *doubts) Doubt() { d.tell("doubt") }
func (d *doubts) Trust() { d.tell("trust") }
func (d *doubts) tell(word string) {
	d.mu.Lock()
	defer d.mu.Unlock()

	d.said = append(d.said, fmt.Sprintf("%s %.0f", word, time.Since(d.start).Seconds()))
}

func (d *doubts) told() string {
	d.mu.Lock()
	defer d.mu.Unlock()
	return fmt.Sprint(d.said)
}

func TestCountsAreInDoubtUntilAllHadTimeToComeBack(t *testing.T) {
	news := func(target string, lines ...string) *http.Request {
		r := httptest.NewRequest(http.MethodGet, target, nil)
		for i := 0; i < len(lines); i += 2 {
			r.Header.Set(lines[i], lines[i+1])
		}

		return r
	}

	void, known := identity.Identity{Void: true}, identity.Identity{}

	// The process begins when the time of the bubble does, at 946684800000. Versions contain such times.
	for name, tc := range map[string]struct {
		r    *http.Request
		id   identity.Identity
		at   time.Duration
		want string
	}{
		"an id of before":       {news("/-/ws"), void, 2 * time.Second, "[doubt 2 trust 15]"},
		"it says so":            {news("/-/ws?back=1"), known, 3 * time.Second, "[doubt 3 trust 15]"},
		"welcomed before":       {news("/-/ws?back=3001"), known, 3 * time.Second, "[doubt 3 trust 15]"},
		"welcomed in this life": {news("/-/ws?back=2999.5"), known, 3 * time.Second, "[]"},
		"it says nonsense":      {news("/-/ws?back=x"), known, 3 * time.Second, "[]"},
		"an event stream goes on": {
			news("/p/counter/events", "Last-Event-ID", "946684799000-2"), known, time.Second, "[doubt 1 trust 15]",
		},
		"it was begun in this life": {
			news("/p/counter/events", "Last-Event-ID", "946684800500-2"), known, time.Second, "[]",
		},
		"its version is made up":   {news("/p/counter/events", "Last-Event-ID", "1-1"), known, time.Second, "[]"},
		"no version":               {news("/p/counter/events", "Last-Event-ID", "x"), known, time.Second, "[]"},
		"somebody is new":          {news("/-/ws"), known, time.Second, "[]"},
		"after a slow start":       {news("/-/ws"), void, 14 * time.Second, "[doubt 14 trust 17]"},
		"too late for all of them": {news("/-/ws?back=1"), void, 16 * time.Second, "[]"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				hub := &doubts{start: time.Now()}
				g := newRestartDoubt(Config{
					Incarnation: presence.NewIncarnation(time.Now()), Times: Times{ComeBack: 15 * time.Second},
					Log: zerolog.Nop(),
				}, hub)

				time.Sleep(tc.at)
				// The second client that comes back must not begin the doubt anew, or it would last as long as clients
				// come.
				for range 2 {
					g.Note(tc.r, tc.id)
				}

				if g.Doubtful() != (hub.told() != "[]") {
					t.Errorf("Doubtful is %v, but the hub received %v", g.Doubtful(), hub.told())
				}

				// Later calls of the same client change nothing.
				time.Sleep(time.Minute)
				g.Note(tc.r, tc.id)
				if got := hub.told(); got != tc.want || g.Doubtful() {
					t.Errorf("the hub received %s, want %s; Doubtful is %v at the end, want false",
						got, tc.want, g.Doubtful())
				}
			})
		})
	}
}

// TestTheGraceIsOnTheMonotonicClock: otherwise a wall clock that is set back by an hour, as at a boot, would make
// counts stale for an hour.
func TestTheGraceIsOnTheMonotonicClock(t *testing.T) {
	g := newRestartDoubt(Config{Incarnation: presence.NewIncarnation(time.Now())}, &doubts{})
	if g.began == g.began.Round(0) || g.until == g.until.Round(0) {
		t.Errorf("%s and %s have no monotonic reading", g.began, g.until)
	}
}

// TestAStoreThatRemembersIsNotDoubted: a store that remembers users over a restart causes no doubt.
func TestAStoreThatRemembersIsNotDoubted(t *testing.T) {
	hub := &doubts{}
	g := newRestartDoubt(Config{Log: zerolog.Nop()}, hub)

	g.Note(httptest.NewRequest(http.MethodGet, "/-/ws?back=1", nil), identity.Identity{Void: true})
	if hub.told() != "[]" || g.Doubtful() {
		t.Errorf("the hub received %s, and Doubtful is %t; want nothing and false", hub.told(), g.Doubtful())
	}
}

// TestShortDoubtAfterASlowStart: most users are remembered, so the doubt is short. It begins with the first client,
// even if the process started to serve late.
func TestShortDoubtAfterASlowStart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		hub := &doubts{start: time.Now()}
		g := newRestartDoubt(Config{
			Incarnation: presence.NewIncarnation(time.Now()), Times: Times{ComeBack: 3 * time.Second},
			Log: zerolog.Nop(),
		}, hub)

		time.AfterFunc(5*time.Second, func() {
			g.Note(httptest.NewRequest(http.MethodGet, "/-/ws?back=1", nil), identity.Identity{})
		})

		time.Sleep(time.Minute)
		if got := hub.told(); got != "[doubt 5 trust 8]" {
			t.Errorf("the hub received %s, want a doubt from second 5 to 8", got)
		}
	})
}

// A client without WebSockets says in its first call that it comes back.
func TestACallSaysThatItsClientComesBack(t *testing.T) {
	inMemory(t, func(cfg *Config) { cfg.ComeBack = 15 * time.Second }, func(t *testing.T, s *served) {
		for _, step := range []struct {
			query string
			stale bool
		}{{"", false}, {"?back=1", true}} {
			s.do(http.MethodGet, "/-/me/unread"+step.query, "")
			got := s.do(http.MethodGet, "/p/counter", "")
			if strings.Contains(got.text, `"stale":true`) != step.stale {
				t.Errorf("after a call with the query %q the count is %s", step.query, got.text)
			}
		}
		time.Sleep(15 * time.Second)
	})
}
