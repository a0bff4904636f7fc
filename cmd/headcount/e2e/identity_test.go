package e2e

import (
	"context"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/golang-jwt/jwt/v5"
)

// cookie returns the only cookie that the answer sets, or nil.
func cookie(t testing.TB, h http.Header) *http.Cookie {
	t.Helper()
	resp := http.Response{Header: h}
	switch all := resp.Cookies(); len(all) {
	case 0:
		return nil
	case 1:
		return all[0]
	default:
		t.Fatalf("%d cookies: %v", len(all), h["Set-Cookie"])
		return nil
	}
}

func checkCookie(t testing.TB, c *http.Cookie, secure bool) {
	t.Helper()
	if c == nil {
		t.Error("no cookie")
		return
	}

	if c.Name != "headcount_id" || c.Value == "" || !c.HttpOnly || c.SameSite != http.SameSiteLaxMode ||
		c.Path != "/" || c.MaxAge < 364*24*3600 || c.MaxAge > 366*24*3600 || c.Secure != secure || c.Domain != "" {
		t.Errorf("cookie %s", c)
	}
}

// The same identity holds in every transport, however the transport carries it. Its cookie is secure if the proxy says
// that the connection is.
func TestServerIdentities(t *testing.T) {
	t.Parallel()

	// The server runs alone: an unknown id may come from before a restart.
	s := start(t, "--leave-grace=0s", "--presence-timeout=1m", "--trusted-proxies=127.0.0.1")
	ways := map[string]func(query string, headers ...string) http.Header{
		"WebSocket": func(query string, headers ...string) http.Header {
			return s.dial(t, dialer{query: query, headers: headers}).resp.Header
		},
		"event stream": func(query string, headers ...string) http.Header {
			return s.sse(t, "/p/counter/events?"+query, headers...).resp.Header
		},
		"PUT": func(query string, headers ...string) http.Header {
			a := s.put(t, "/p/counter?"+query, increment, headers...)
			a.counter(t)
			return a.header
		},
	}

	for name, way := range ways {
		checkCookie(t, cookie(t, way("")), false)
		checkCookie(t, cookie(t, way("", "X-Forwarded-Proto: https")), true)

		// An author of a URL must not be able to give its visitors an id for a year.
		if got := cookie(t, way("id="+s.ws(t).id)); name != "PUT" && got != nil {
			t.Errorf("a %s with ?id= sets %v", name, got)
		}
	}

	for _, path := range []string{"/p/counter", "/-/counters?page=p", "/", "/-/headcount.js", "/-/ws", "/nothing"} {
		if got := s.get(t, path).header["Set-Cookie"]; got != nil {
			t.Errorf("GET %s sets %q", path, got)
		}
	}

	// The id of the cookie is that of the welcome frame, and identifies the user on every transport.
	c := s.ws(t)
	if got := cookie(t, c.resp.Header).Value; got != c.id {
		t.Errorf("cookie %q, id %q", got, c.id)
	}

	c.join("mine")
	c.takeCount("mine", 1)

	forged := "Headcount-Id: " + c.user + ".AAAAAAAAAAAAAAAAAAAAAA"
	for i, d := range []dialer{
		{query: "id=" + c.id}, {headers: []string{c.as()}},
		{headers: []string{"Cookie: other=1; headcount_id=" + c.id + "; more=2"}}, {headers: []string{forged}},
	} {
		if o := s.dial(t, d); (o.user == c.user) != (i < 3) {
			t.Errorf("%+v: user %q came back as %q; the same user: want %t", d, c.user, o.user, i < 3)
		}

		// A PUT takes no ?id=.
		n := s.put(t, "/mine/counter?"+d.query, increment, d.headers...).counter(t).Count
		if n != []int{2, 2, 2, 3}[i] {
			t.Errorf("%+v: the count is %d, want %d", d, n, []int{2, 2, 2, 3}[i])
		}
	}
}

const jwtSecret = "a secret for tokens, of thirty-two bytes or more"

// token signs claims. The claim "in" sets exp to that many seconds from now.
func token(t testing.TB, method jwt.SigningMethod, key any, claims jwt.MapClaims) string {
	t.Helper()
	if in, ok := claims["in"]; ok {
		delete(claims, "in")
		claims["exp"] = time.Now().Unix() + int64(in.(int))
	}

	text, err := jwt.NewWithClaims(method, claims).SignedString(key)
	if err != nil {
		t.Fatal(err)
	}

	return text
}

func hs256(t testing.TB, claims jwt.MapClaims) string {
	t.Helper()
	return token(t, jwt.SigningMethodHS256, []byte(jwtSecret), claims)
}

// A server with tokens requires them wherever somebody is counted, and refuses bad tokens everywhere.
func TestServerTokens(t *testing.T) {
	t.Parallel()
	s := start(t, "--jwt-secret="+jwtSecret+"\n", "--leave-grace=0s", "--allow-origins=https://site.example",
		"--api-key="+apiKey)
	good := hs256(t, jwt.MapClaims{"sub": "alice", "in": 600})

	s.refused(t, dialer{}).problem(t, 401)
	a := s.put(t, "/p/counter", increment)
	a.problem(t, 401)
	if a.header.Get("Www-Authenticate") == "" {
		t.Error("a 401 without WWW-Authenticate")
	}

	s.get(t, "/p/counter").counter(t)

	st := s.sse(t, "/p/counter/events")
	st.take()
	if st.resp.Header["Set-Cookie"] != nil {
		t.Error("an event stream without a token sets a cookie")
	}

	// An anonymous id of another server replaces no token.
	anonymous := common(t).ws(t)
	s.refused(t, dialer{query: "id=" + anonymous.id}).problem(t, 401)
	s.put(t, "/p/counter", increment, anonymous.as()).problem(t, 401)
	s.put(t, "/p/counter?token="+good, increment).problem(t, 401) // only URLs of WebSockets and SSE have tokens

	for _, d := range []dialer{{query: "token=" + good}, {headers: []string{"authorization: bearer " + good}}} {
		c := s.dial(t, d)
		if c.user != "alice" || c.id != "" || c.frames[0].ID != nil || c.resp.Header["Set-Cookie"] != nil {
			t.Errorf("welcome %s, %v", c.frames[0].text, c.resp.Header)
		}
		c.join("p")
		c.takeCount("p", 1) // both clients are one user
	}

	for i, sub := range []string{"alice", "bob"} {
		bearer := "Authorization: Bearer " + hs256(t, jwt.MapClaims{"sub": sub, "in": 600})
		if got := s.put(t, "/p/counter", increment, bearer).counter(t); got.Count != i+1 {
			t.Errorf("PUT of %s: %+v", sub, got)
		}
	}

	// An expired token is worse than none: every call refuses it.
	bad := hs256(t, jwt.MapClaims{"sub": "alice", "in": -1})
	bearer := "Authorization: Bearer " + bad
	for what, a := range map[string]answer{
		"WebSocket":           s.refused(t, dialer{headers: []string{bearer}}),
		"WebSocket, ?token=":  s.refused(t, dialer{query: "token=" + bad}),
		"PUT":                 s.put(t, "/p/counter", increment, bearer),
		"GET":                 s.get(t, "/p/counter", bearer),
		"GET counters":        s.get(t, "/-/counters?page=p", bearer),
		"SSE":                 s.get(t, "/p/counter/events", bearer),
		"SSE, ?token=":        s.get(t, "/p/counter/events?token="+bad),
		"PUT, another origin": s.put(t, "/p/counter", increment, bearer, "Origin: https://site.example"),
	} {
		a.problem(t, 401)
		if strings.Contains(a.body, "alice") || strings.Contains(a.body, bad[:10]) {
			t.Errorf("%s: the answer repeats the token: %s", what, a.body)
		}
		if what == "PUT, another origin" && a.header.Get("Access-Control-Allow-Origin") == "" {
			t.Errorf("%s: the error has no CORS headers: %v", what, a.header)
		}
	}

	behindAProxyWithTokens(t, s)

	if log := s.log.String(); strings.Contains(log, "alice") || strings.Contains(log, good[:30]) {
		t.Errorf("in the log: %s", log)
	}
}

// A private page is for servers and for tokens that open it, in every call and frame. Other clients learn only that it
// is private. Its users count on the site.
func TestServerPrivatePages(t *testing.T) {
	t.Parallel()
	s := startWithKey(t, "--private=team/*", "--private=board", "--jwt-secret="+jwtSecret)
	ann := hs256(t, jwt.MapClaims{"sub": "ann", "pages": []string{"team/a*", "board"}})
	ben := hs256(t, jwt.MapClaims{"sub": "ben", "pages": "team/a1"}) // no list, so it opens nothing
	in := s.dial(t, dialer{query: "token=" + ann})
	out := s.dial(t, dialer{query: "token=" + ben})

	in.join("team/a1")
	in.awaitCount("team/a1", 1)
	out.join("open")
	out.awaitCount("open", 1)
	out.send(`{"type":"subscribe","pages":["*"]}`)
	out.awaitCount("*", 2)

	for _, message := range []string{
		`{"type":"join","page":"team/a1"}`, `{"type":"join","page":"team/never"}`,
		`{"type":"subscribe","pages":["q","team/a1"]}`,
	} {
		out.send(message)
		f := out.take("error")
		if f.Code != "forbidden" || f.Page == nil || !strings.HasPrefix(*f.Page, "team/") {
			t.Errorf("%s: answered with %s, want forbidden and the page", message, f.text)
		}
	}

	in.send(`{"type":"subscribe","pages":["team/b"]}`)
	if f := in.take("error"); f.Code != "forbidden" {
		t.Errorf("another page: %s", f.text)
	}

	// Each call about the page, by users who may, users who may not, and servers.
	for _, path := range []string{
		"GET /team%2Fa1/counter", "GET /-/counters?page=open&page=team/a1", "GET /team%2Fa1/badge.svg",
		"GET /team%2Fa1/widget", "GET /team%2Fa1/stats", "GET /team%2Fa1/counter/events",
		"PUT /team%2Fa1/counter", "PUT /-/me/follows/team%2Fa1", "GET /team%2Fnever/counter", "GET /board/counter",
	} {
		method, path, _ := strings.Cut(path, " ")

		body := ""
		if method == "PUT" {
			body = `{"action":"increment"}`
		}
		if strings.Contains(path, "follows") {
			body = ""
		}

		call := func(lines ...string) answer {
			if strings.HasSuffix(path, "/events") {
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel() // a stream does not end by itself
				r, err := http.NewRequestWithContext(ctx, method, s.url+path, nil)
				if err != nil {
					t.Fatal(err)
				}

				for _, line := range lines {
					name, value, _ := strings.Cut(line, ": ")
					r.Header.Set(name, value)
				}
				resp, err := http.DefaultClient.Do(r)
				if err != nil {
					t.Fatal(err)
				}
				return answer{status: resp.StatusCode}
			}
			return do(t, method, s.url+path, body, lines...)
		}

		if a := call("Authorization: Bearer " + ben); a.status != http.StatusForbidden {
			t.Errorf("%s %s of ben: %d %s", method, path, a.status, a.body)
		}

		for _, with := range [][]string{{}, {withKey}} {
			if a := call(append(with, "Authorization: Bearer x")...); a.status != http.StatusUnauthorized {
				t.Errorf("%s %s with a bad token and %q: %d %s", method, path, with, a.status, a.body)
			}
		}

		nobody := http.StatusUnauthorized // only plain reads need no token
		if method == "GET" {
			nobody = http.StatusForbidden
		}

		if a := call(); a.status != nobody {
			t.Errorf("%s %s of nobody: %d %s", method, path, a.status, a.body)
		}

		if a := call("X-API-Key: wrong"); a.status != http.StatusUnauthorized && !strings.Contains(path, "follows") {
			t.Errorf("%s %s with a wrong API key: %d %s", method, path, a.status, a.body)
		}
		a := call("Authorization: Bearer " + ann)
		never := strings.Contains(path, "never")
		if !never && a.status/100 != 2 || never && a.status != http.StatusForbidden {
			t.Errorf("%s %s of ann: %d %s", method, path, a.status, a.body)
		}

		if a := call(withKey); method == "GET" && a.status != http.StatusOK {
			t.Errorf("%s %s of a server: %d %s", method, path, a.status, a.body)
		}
	}

	a := s.call(t, "POST", "views:1/increment", "", withKey, "Authorization: Bearer x")
	if a.status != http.StatusUnauthorized {
		t.Errorf("a change with an API key and a bad token: %d %s", a.status, a.body)
	}

	// Ann's next token opens nothing: she may end her follow, and learns nothing about the page meanwhile.
	left := "Authorization: Bearer " + hs256(t, jwt.MapClaims{"sub": "ann"})
	if a := s.get(t, "/-/me/follows", left); a.status != http.StatusOK || strings.Contains(a.body, "team") {
		t.Errorf("what ann follows: %d %s", a.status, a.body)
	}
	if a := s.get(t, "/-/me/follows", "Authorization: Bearer "+ann); !strings.Contains(a.body, "team/a1") {
		t.Errorf("what ann follows: %d %s", a.status, a.body)
	}
	if a := do(t, "DELETE", s.url+"/-/me/follows/team%2Fa1", "", left); a.status != http.StatusNoContent {
		t.Errorf("ann ends her follow: %d %s", a.status, a.body)
	}

	s.dial(t, dialer{query: "token=" + ben, headers: []string{withKey}}).join("team/x")
	if a := s.get(t, "/-/dashboard/data"); a.status != http.StatusUnauthorized {
		t.Errorf("the dashboard: %d", a.status)
	}
}
