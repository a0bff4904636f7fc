package simulate

import (
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"headcount/internal/testkit"
)

// lie is what a proxy does to the answers of an honest server. The run must end with ErrWrong, and its report must
// contain says.
type lie struct {
	says  string
	tells func(p *proxy)
}

// seeds keeps the keys of different runs on one server apart.
var seeds atomic.Uint64

// findOut runs c against the server behind a proxy that tells the lie. The runs get longer until the proxy has lied
// often enough; by then the lie must have been found.
func (l lie) findOut(t *testing.T, server string, c *Command) {
	t.Helper()
	p := &proxy{}
	l.tells(p)
	p.start(t, server)
	c.URL = []string{p.URL}
	c.Seed = seeds.Add(1)
	c.settle = time.Second

	for tries := 1; ; tries++ {
		r, err := run(t, c)
		found := strings.Contains(strings.Join(r.Wrong, "\n"), l.says)

		// A client that gets lies may wait in vain, so that the run fails before it compares anything.
		if (err == nil) != r.OK || err != nil && !errors.Is(err, ErrWrong) && !found {
			t.Fatalf("Run = %v, report %+v", err, r)
		}

		if found {
			return
		}

		// A report names only a few faults, and a lie may first cause many of another kind, hence several tries.
		enough := p.lies() >= 50
		if enough && tries > 6 || c.Duration > 10*time.Second {
			t.Fatalf("after %d lies and a run of %s the report lacks %q: %q", p.lies(), c.Duration, l.says, r.Wrong)
		}

		c.Seed = seeds.Add(1)
		if !enough {
			c.Duration *= 2
		}
	}
}

// inFrames returns a lie in the frames of one type.
func inFrames(kind string, lie func(p *proxy, first bool, m message)) func(*proxy) {
	return func(p *proxy) {
		p.says = func(first bool, m message) bool {
			if m.text("type") == kind {
				lie(p, first, m)
			}
			return false
		}
	}
}

var presenceLies = map[string]lie{
	"one too many": {"the true count is", inFrames("count", func(p *proxy, _ bool, m message) {
		if m.text("page") != wholeSite {
			p.lie(m, "count", m.number("count")+1)
		}
	})},
	"GET is off": {"GET from", func(p *proxy) {
		p.answers = func(_ *http.Request, a *answer) {
			if a.message["count"] != nil && a.text("page") != wholeSite {
				p.lie(a.message, "count", a.number("count")+1)
			}
		}
	}},
	"counts are dropped": {"the true count is", func(p *proxy) {
		p.says = func(first bool, m message) bool { return m.text("type") == "count" && !first }
	}},
	"counts are late": {"the true count is", func(p *proxy) { p.delays = 400 * time.Millisecond; p.lied++ }},
	"ghosts":          {"the true count is", func(p *proxy) { p.holds = true }},
	"another user": {
		"welcomed the token",
		inFrames("welcome", func(p *proxy, _ bool, m message) { p.lie(m, "user", "somebody else") }),
	},
	"accepts everything": {"accepts a page that is not allowed",
		inFrames("error", func(p *proxy, _ bool, m message) {
			if m.text("page") == wholeSite { // the error about a page that is too long does not name it in full
				p.lie(m, "type", "count")
				m["count"], m["version"] = 1, "1-1"
			}
		})},
	"no frame": {"cannot be understood", inFrames("count", func(p *proxy, first bool, m message) {
		if !first {
			p.lie(m, "count", "1")
		}
	})},
}

func TestServerEveryLieAboutPresenceIsFoundOut(t *testing.T) {
	t.Parallel()
	for name, l := range presenceLies {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := command()
			c.Duration = time.Second
			c.Pages = 2
			c.KillFraction = 0
			c.Churn = 2

			var flags []string
			switch name {
			case "another user":
				c.JWTSecret = jwtSecret
				flags = append(flags, "--jwt-secret="+jwtSecret)

			case "accepts everything":
				c.Replay = writeLog(t)
				c.Speed = 20_000
				c.Dwell = 5 * time.Minute

			case "ghosts":
				c.KillFraction = 1 // a killed client sends no leave
			}

			l.findOut(t, serve(t, flags...), c)
		})
	}
}

// on returns a lie in the answers to calls with the method whose paths end with suffix.
func on(method, suffix string, lie func(p *proxy, a *answer)) func(*proxy) {
	return func(p *proxy) {
		p.answers = func(req *http.Request, a *answer) {
			path := req.URL.Path
			if req.Method == method && strings.HasSuffix(path, suffix) && strings.HasPrefix(path, "/api/v1/") {
				lie(p, a)
			}
		}
	}
}

// inLimits returns a lie in the answers about limits.
func inLimits(lie func(p *proxy, a *answer)) func(*proxy) {
	return func(p *proxy) {
		p.answers = func(req *http.Request, a *answer) {
			if strings.HasPrefix(req.URL.Path, "/api/v1/limits/") && a.message["allowed"] != nil {
				lie(p, a)
			}
		}
	}
}

var counterLies = map[string]lie{
	"counts twice": {"the acknowledged changes are", on(http.MethodGet, "/exact", func(p *proxy, a *answer) {
		if a.number("value") > 0 {
			p.lie(a.message, "value", a.number("value")+1)
		}
	})},
	"forgets keys": {"made it again", func(p *proxy) {
		p.asks = func(req *http.Request) {
			if req.Header.Get("Idempotency-Key") != "" {
				p.lied++
				req.Header.Set("Idempotency-Key", fmt.Sprint("forgotten ", p.lied))
			}
		}
	}},
	"takes a first call for a repetition": {"it was sent once",
		on(http.MethodPost, "/increment", func(p *proxy, a *answer) {
			p.lied++
			a.header.Set("Idempotent-Replay", "true")
		})},
	"passes the floor": {"is below 0", on(http.MethodPost, "/decrement", func(p *proxy, a *answer) {
		if a.text("kind") == "exact" {
			p.lie(a.message, "value", -1)
		}
	})},
	"refuses what fits": {"there was enough all the time",
		on(http.MethodPost, "/decrement", func(p *proxy, a *answer) {
			if a.text("kind") != "exact" || a.number("value") < 5 {
				return
			}

			// Three of four calls pass, so that the repetition of a refused one succeeds.
			p.lied++
			if p.lied%4 == 0 {
				a.status = http.StatusConflict
			}
		})},
	"forgets a member": {"the truth is", func(p *proxy) {
		p.answers = func(req *http.Request, a *answer) {
			if member, ok := a.message["member"].(bool); ok && req.Method == http.MethodGet {
				p.lie(a.message, "member", !member)
			}
		}
	}},
	"forgets the last entry": {"entries; ", on(http.MethodGet, "/ledger", func(p *proxy, a *answer) {
		if entries, _ := a.message["entries"].([]any); len(entries) > 1 && a.message["next"] == nil {
			p.lie(a.message, "entries", entries[:len(entries)-1])
		}
	})},
	"lags for ever": {"a read of several counters says",
		on(http.MethodGet, "/counters", func(p *proxy, a *answer) {
			for _, c := range a.message["counters"].([]any) {
				p.lie(c.(map[string]any), "value", 0)
			}
		})},
	"adds up wrongly": {
		"the aggregate of",
		on(http.MethodGet, "/aggregate", func(p *proxy, a *answer) { p.lie(a.message, "value", a.number("value")+1) }),
	},
	"tells no more": {"the true value is", func(p *proxy) {
		p.says = func(first bool, m message) bool { return m.text("type") == "counter" && !first }
	}},
	"keeps what is deleted": {"after DELETE", func(p *proxy) {
		p.asks = func(req *http.Request) {
			if req.Method == http.MethodDelete && !strings.Contains(req.URL.Path, "/members/") {
				p.lied++
				path := req.URL.EscapedPath() + "0" // a counter that does not exist
				req.URL.Path, req.URL.RawPath = req.URL.Path+"0", path
			}
		}
	}},
	"holds back what fits": {"had passed", inLimits(func(p *proxy, a *answer) {
		p.lie(a.message, "allowed", false)
		a.status = http.StatusTooManyRequests
	})},
	"says another limit": {
		"for a cost of", inLimits(func(p *proxy, a *answer) { p.lie(a.message, "limit", a.number("limit")+1) }),
	},
	"breaks": {"status 500", on(http.MethodPost, "/increment", func(p *proxy, a *answer) {
		p.lied++
		a.status = http.StatusInternalServerError
	})},
}

func TestServerEveryLieAboutCountersIsFoundOut(t *testing.T) {
	server := serve(t)
	t.Run("all", func(t *testing.T) { // the group waits for its parallel tests before the server ends
		for name, l := range counterLies {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				l.findOut(t, server, lastingCommand())
			})
		}
	})
}

// A server that forgets the ids of users ends the run with an error that names the remedy.
func TestServerIdsThatAreForgottenEndTheRun(t *testing.T) {
	t.Parallel()
	p := (&proxy{}).start(t, serve(t))
	c := lastingCommand()
	c.URL = []string{p.URL}
	c.Duration = testkit.Timeout

	forget := time.AfterFunc(500*time.Millisecond, func() {
		p.mu.Lock()
		p.asks = func(req *http.Request) {
			query := req.URL.Query()
			query.Del("id")
			req.URL.RawQuery = query.Encode()
		}

		p.mu.Unlock()
		p.cut()
	})

	defer forget.Stop()

	r, err := run(t, c)
	if err == nil || !strings.Contains(r.Error, "--id-secret") {
		t.Errorf("Run = %v, report %+v", err, r)
	}
}
