package gateway

import (
	"context"
	"encoding/json"
	"strings"
	"testing"
	"time"

	"headcount/gateway/identity"
	"headcount/presence"
)

const crawls = "User-Agent: Googlebot/2.1 (+http://www.google.com/bot.html)"

// explains checks the parts of which the count of a page is made. Every explanation has to add up.
func (s *served) explains(path, want string, lines ...string) {
	s.t.Helper()
	status, text := s.ask("GET", path+"/counter?explain=1", "", lines...)
	var is struct {
		Counter struct{ Count int64 }
		Explain struct {
			People, Held, Leaving, Connections int64
			Regions                            map[string]int64
			Moving                             bool
		}
	}
	// While a count moves its parts need not add up, so the test would prove nothing.
	if err := json.Unmarshal([]byte(text), &is); status != 200 || err != nil || is.Explain.Moving {
		s.t.Errorf("%s: %d %s, want an explanation that does not move", path, status, text)
	}

	sum := int64(0)
	for _, users := range is.Explain.Regions {
		sum += users
	}

	if is.Counter.Count != sum || sum != is.Explain.People {
		s.t.Errorf("%s does not add up: %s", path, text)
	}

	if _, parts, _ := strings.Cut(text, `"explain":`); parts != want+"}" {
		s.t.Errorf("%s is %s\nwant %s", path, parts, want)
	}
}

// TestCountsAreExplained: a count is explained by connections, graces and holds, which add up to it.
func TestCountsAreExplained(t *testing.T) {
	inMemory(t, func(cfg *Config) {
		cfg.Keys, _ = identity.NewSiteKeys([]string{"k"}, cfg.Sites)
		cfg.LeaveGrace = 2 * time.Second
	}, func(t *testing.T, s *served) {
		const key = "X-API-Key: k"
		s.explains("/p",
			`{"people":0,"connections":0,"held":0,"leaving":0,"ignored":0,"regions":{"":0},"moving":false}`, key)

		first := s.looker()
		r := s.open("/p/counter/events?join=1", "")
		cookie, _, _ := strings.Cut(r.response(200).Header.Get("Set-Cookie"), ";")
		for range 2 { // two tabs of the same user
			s.looker("Cookie: " + cookie).say(`{"type":"join","page":"p"}`)
		}
		first.say(`{"type":"join","page":"p"}`)
		first.say(`{"type":"join","page":"q"}`)
		s.looker(crawls).say(`{"type":"join","page":"p"}`)

		for _, page := range []string{"p", "r"} {
			if status, text := s.ask("PUT", "/-/users/ann/pages/"+page, "", key); status != 200 {
				t.Fatal(text)
			}
		}

		// By then the owners know all users.
		time.Sleep(time.Second)
		s.explains("/p",
			`{"people":3,"connections":4,"held":1,"leaving":0,"ignored":1,"regions":{"":3},"moving":false}`, key)
		s.explains("/r",
			`{"people":1,"connections":0,"held":1,"leaving":0,"ignored":0,"regions":{"":1},"moving":false}`, key)
		s.explains("/*",
			`{"people":3,"connections":5,"held":1,"leaving":0,"ignored":1,"regions":{"":3},"moving":false}`, key)

		// A user whose last connection has ended is counted until the grace is over.
		_ = first.Close()
		time.Sleep(time.Second)
		s.explains("/p",
			`{"people":3,"connections":3,"held":1,"leaving":1,"ignored":1,"regions":{"":3},"moving":false}`, key)
		s.explains("/*",
			`{"people":3,"connections":3,"held":1,"leaving":1,"ignored":1,"regions":{"":3},"moving":false}`, key)

		time.Sleep(2 * time.Second)
		s.explains("/p",
			`{"people":2,"connections":3,"held":1,"leaving":0,"ignored":1,"regions":{"":2},"moving":false}`, key)

		// A visitor may not see explanations.
		for path, want := range map[string]int{"/p": 401, "/-": 400} {
			if status, text := s.ask("GET", path+"/counter?explain=1", ""); status != want {
				t.Errorf("%s without a key: %d %s, want %d", path, status, text, want)
			}
		}
	})
}

// behind is a member that does not know all users of a count.
type behind struct{ lone }

func (b behind) Explain(ctx context.Context, page string) presence.Parts {
	parts := b.lone.Explain(ctx, page)
	parts.People++
	return parts
}

// TestCountsThatMoveDoNotAddUp: while its parts do not add up, an explanation says that the count moves.
func TestCountsThatMoveDoNotAddUp(t *testing.T) {
	inMemory(t, func(cfg *Config) { cfg.Cluster = behind{cfg.Cluster.(lone)} }, func(t *testing.T, s *served) {
		status, text := s.ask("GET", "/p/counter?explain=1", "") // without API keys everybody may see explanations
		if status != 200 || !strings.Contains(text, `"moving":true`) {
			t.Errorf("%d %s, want 200 and a count that moves", status, text)
		}
	})
}
