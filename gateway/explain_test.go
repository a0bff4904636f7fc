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

// explains checks what the count of a page is made of. Every explanation has to add up.
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
	// A count that moves need not add up, so the test would show nothing.
	if err := json.Unmarshal([]byte(text), &is); status != 200 || err != nil || is.Explain.Moving {
		s.t.Errorf("%s: %d %s", path, status, text)
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
		for range 2 { // tabs of the same person
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

		// By then the owner of each page knows all of them.
		time.Sleep(time.Second)
		s.explains("/p",
			`{"people":3,"connections":4,"held":1,"leaving":0,"ignored":1,"regions":{"":3},"moving":false}`, key)
		s.explains("/r",
			`{"people":1,"connections":0,"held":1,"leaving":0,"ignored":0,"regions":{"":1},"moving":false}`, key)
		s.explains("/*",
			`{"people":3,"connections":5,"held":1,"leaving":0,"ignored":1,"regions":{"":3},"moving":false}`, key)

		// A user whose last connection has ended counts until the grace is over.
		_ = first.Close()
		time.Sleep(time.Second)
		s.explains("/p",
			`{"people":3,"connections":3,"held":1,"leaving":1,"ignored":1,"regions":{"":3},"moving":false}`, key)
		s.explains("/*",
			`{"people":3,"connections":3,"held":1,"leaving":1,"ignored":1,"regions":{"":3},"moving":false}`, key)

		time.Sleep(2 * time.Second)
		s.explains("/p",
			`{"people":2,"connections":3,"held":1,"leaving":0,"ignored":1,"regions":{"":2},"moving":false}`, key)

		// An explanation says more than a visitor may know.
		for path, want := range map[string]int{"/p": 401, "/-": 400} {
			if status, text := s.ask("GET", path+"/counter?explain=1", ""); status != want {
				t.Errorf("%s without a key: %d %s", path, status, text)
			}
		}
	})
}

// behind is a member that does not know all of a count.
type behind struct{ lone }

func (b behind) Explain(ctx context.Context, page string) presence.Parts {
	parts := b.lone.Explain(ctx, page)
	parts.People++
	return parts
}

func TestCountsThatMoveDoNotAddUp(t *testing.T) {
	inMemory(t, func(cfg *Config) { cfg.Cluster = behind{cfg.Cluster.(lone)} }, func(t *testing.T, s *served) {
		status, text := s.ask("GET", "/p/counter?explain=1", "") // without keys everybody may see the dashboard
		if status != 200 || !strings.Contains(text, `"moving":true`) {
			t.Errorf("%d %s", status, text)
		}
	})
}
