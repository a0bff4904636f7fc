package e2e

import (
	"bufio"
	"encoding/base64"
	"fmt"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/coder/websocket"
	"github.com/golang-jwt/jwt/v5"
)

// cookie is the one cookie that the answer sets, or nil.
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
	if c.Name != "headcount_id" || c.Value == "" || !c.HttpOnly || c.SameSite != http.SameSiteLaxMode || c.Path != "/" ||
		c.MaxAge < 364*24*3600 || c.MaxAge > 366*24*3600 || c.Secure != secure || c.Domain != "" {
		t.Errorf("cookie %s", c)
	}
}

func TestCookie(t *testing.T) {
	t.Parallel()
	s := start(t, "--leave-grace=0s", "--trusted-proxies=127.0.0.1")
	ws := func(headers ...string) (*http.Cookie, *client) {
		c := s.dial(t, dialer{headers: headers})
		return cookie(t, c.resp.Header), c
	}
	sse := func(headers ...string) *http.Cookie {
		return cookie(t, s.sse(t, "/p/counter/events", headers...).resp.Header)
	}
	put := func(headers ...string) *http.Cookie {
		a := s.put(t, "/p/counter", increment, headers...)
		a.counter(t)
		return cookie(t, a.header)
	}

	first, c := ws()
	checkCookie(t, first, false)
	if first.Value != c.id {
		t.Errorf("cookie %q, id %q", first.Value, c.id)
	}
	checkCookie(t, sse(), false)
	checkCookie(t, put(), false)
	for _, path := range []string{"/p/counter", "/-/counters?page=p", "/", "/-/headcount.js", "/-/ws", "/nothing"} {
		if got := s.get(t, path).header["Set-Cookie"]; got != nil {
			t.Errorf("GET %s sets %q", path, got)
		}
	}
	for _, proto := range []string{"https", "wss", "HTTPS"} { // as the proxy in front says
		got, _ := ws("X-Forwarded-Proto: " + proto)
		checkCookie(t, got, proto != "http")
	}
	checkCookie(t, sse("X-Forwarded-Proto: https"), true)
	checkCookie(t, put("X-Forwarded-Proto: https"), true)
	checkCookie(t, put("X-Forwarded-Proto: http"), false)

	// It is an identity: the same user over each transport.
	me := "Cookie: other=1; headcount_id=" + first.Value + "; more=2"
	if _, o := ws(me); o.user != c.user {
		t.Errorf("user %q came back as %q", c.user, o.user)
	}
	c.join("mine")
	c.takeCount("mine", 1)
	if got := s.put(t, "/mine/counter", increment, me).counter(t); got.Count != 1 {
		t.Errorf("the same user by cookie: %+v", got)
	}
	if got := s.put(t, "/mine/counter", increment).counter(t); got.Count != 2 {
		t.Errorf("another user: %+v", got)
	}
}

func TestForwardedProtoOfAnUntrustedAddress(t *testing.T) {
	t.Parallel()
	s := start(t, "--trusted-proxies=192.0.2.0/24")
	c := s.dial(t, dialer{headers: []string{"X-Forwarded-Proto: https"}})
	checkCookie(t, cookie(t, c.resp.Header), false)
}

func TestAnonymousIDs(t *testing.T) {
	t.Parallel()
	s := common(t)
	a, b := s.ws(t), s.ws(t)
	page := fresh(t)
	path := "/" + pathEscape(page) + "/counter"
	a.join(page)
	a.takeCount(page, 1)

	if got := s.put(t, path, increment, "Headcount-Id: "+a.id).counter(t); got.Count != 1 {
		t.Errorf("by header: %+v", got)
	}
	if got := s.put(t, path+"?id="+a.id, decrement, "Headcount-Id: "+b.id).counter(t); got.Count != 1 {
		t.Errorf("?id= counts on WebSocket and SSE only: %+v", got)
	}
	// Somebody who writes a URL must not be able to give its visitor an id for a year.
	if got := cookie(t, s.sse(t, path+"/events?id="+a.id).resp.Header); got != nil {
		t.Errorf("an event stream with ?id= sets %v", got)
	}
	if got := cookie(t, s.dial(t, dialer{query: "id=" + a.id}).resp.Header); got != nil {
		t.Errorf("a WebSocket with ?id= sets %v", got)
	}
	// Of several ids the explicit one counts, when it is valid.
	for name, tc := range map[string]struct {
		d    dialer
		want string // a user, or nothing for a new one
	}{
		"query":                        {dialer{query: "id=" + a.id}, a.user},
		"header":                       {dialer{headers: []string{"Headcount-Id: " + a.id}}, a.user},
		"cookie":                       {dialer{headers: []string{"Cookie: headcount_id=" + a.id}}, a.user},
		"query before cookie":          {dialer{query: "id=" + a.id, headers: []string{"Cookie: headcount_id=" + b.id}}, a.user},
		"header before cookie":         {dialer{headers: []string{"Headcount-Id: " + a.id, "Cookie: headcount_id=" + b.id}}, a.user},
		"forged query, valid cookie":   {dialer{query: "id=" + a.user + ".AAAAAAAAAAAAAAAAAAAAAA", headers: []string{"Cookie: headcount_id=" + b.id}}, b.user},
		"forged signature":             {dialer{query: "id=" + a.user + ".AAAAAAAAAAAAAAAAAAAAAA"}, ""},
		"no signature":                 {dialer{query: "id=" + a.user}, ""},
		"empty signature":              {dialer{query: "id=" + a.user + "."}, ""},
		"signature of another":         {dialer{query: "id=" + a.user + strings.TrimPrefix(b.id, b.user)}, ""},
		"forged cookie":                {dialer{headers: []string{"Cookie: headcount_id=" + b.user + strings.TrimPrefix(a.id, a.user)}}, ""},
		"forged header":                {dialer{headers: []string{"Headcount-Id: root"}}, ""},
		"empty":                        {dialer{query: "id=", headers: []string{"Cookie: headcount_id=", "Headcount-Id: "}}, ""},
		"a long one":                   {dialer{query: "id=" + strings.Repeat("A", 5000)}, ""},
		"a token, where there is none": {dialer{query: "token=x", headers: []string{"Authorization: Bearer x"}}, ""},
		"one more bit":                 {dialer{query: "id=" + lastBit(a.id)}, ""},
		"more after it":                {dialer{query: "id=" + a.id + "A"}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			c := s.dial(t, tc.d)
			switch {
			case tc.want == "" && (c.user == a.user || c.user == b.user || c.id == ""):
				t.Errorf("forged id: user %q with id %q", c.user, c.id)
			case tc.want == "" && cookie(t, c.resp.Header).Value != c.id:
				t.Errorf("the cookie is not the new id")
			case tc.want != "" && c.user != tc.want:
				t.Errorf("user %q, want %q", c.user, tc.want)
			}
		})
	}
}

// lastBit changes the last character of s in a bit that decoders of base64 may
// take for padding.
func lastBit(s string) string {
	const alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
	i := strings.IndexByte(alphabet, s[len(s)-1])
	return s[:len(s)-1] + string(alphabet[i^1])
}

func TestIDSecrets(t *testing.T) {
	t.Parallel()
	const old, next = "an old secret of some length", "the next secret of some length"
	of := func(secrets ...string) *server {
		var flags []string
		for _, secret := range secrets {
			flags = append(flags, "--id-secret="+secret)
		}
		return start(t, flags...)
	}
	before, during, after, other := of(old), of(next, old), of(next), start(t)
	a := before.ws(t)
	b := during.dial(t, dialer{headers: []string{"Cookie: headcount_id=" + a.id}})
	if b.user != a.user {
		t.Errorf("an id of the old secret: user %q became %q", a.user, b.user)
	}
	if b.id == a.id {
		t.Error("the id has not been signed anew")
	}
	if c := cookie(t, b.resp.Header); c == nil || c.Value != b.id {
		t.Errorf("cookie %v, want %q", c, b.id)
	}
	if c := after.dial(t, dialer{query: "id=" + b.id}); c.user != a.user {
		t.Error("an id signed anew does not survive the end of the old secret")
	}
	if c := after.dial(t, dialer{query: "id=" + a.id}); c.user == a.user {
		t.Error("an id of a secret that is gone is valid")
	}
	if c := other.dial(t, dialer{query: "id=" + a.id}); c.user == a.user {
		t.Error("an id of another server is valid")
	}
	if c := of(old).dial(t, dialer{query: "id=" + a.id}); c.user != a.user {
		t.Error("an id does not survive a restart with the same secret")
	}
}

const jwtSecret = "a secret for tokens, of thirty-two bytes or more"

// token signs claims; "in" seconds from now stands for exp.
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

func TestTokens(t *testing.T) {
	t.Parallel()
	s := start(t, "--jwt-secret="+jwtSecret, "--leave-grace=0s", "--allow-origins=https://site.example")
	good := hs256(t, jwt.MapClaims{"sub": "alice", "in": 600})

	// These are the calls that need no token, and those that do.
	s.refused(t, dialer{}).problem(t, 401)
	s.put(t, "/p/counter", increment).problem(t, 401)
	s.get(t, "/p/counter").counter(t)
	s.get(t, "/-/counters?page=p")
	st := s.sse(t, "/p/counter/events")
	st.take()
	if st.resp.Header["Set-Cookie"] != nil {
		t.Error("an event stream without a token sets a cookie")
	}
	if a := s.put(t, "/p/counter", increment); a.header.Get("Www-Authenticate") == "" {
		t.Error("a 401 without WWW-Authenticate")
	}
	// An anonymous id does not serve as a token.
	anonymous := common(t).ws(t)
	s.refused(t, dialer{query: "id=" + anonymous.id}).problem(t, 401)
	s.put(t, "/p/counter", increment, "Headcount-Id: "+anonymous.id).problem(t, 401)

	// There are two ways to present one.
	for _, d := range []dialer{{query: "token=" + good}, {headers: []string{"Authorization: Bearer " + good}}, {headers: []string{"authorization: bearer " + good}}} {
		c := s.dial(t, d)
		if c.user != "alice" || c.id != "" || c.frames[0].ID != nil {
			t.Errorf("welcome %s", c.frames[0].text)
		}
		if c.resp.Header["Set-Cookie"] != nil {
			t.Error("a user with a token gets a cookie")
		}
		c.join("p")
		c.takeCount("p", 1) // all of them are one user
		defer c.close()
	}
	if got := s.put(t, "/p/counter", increment, "Authorization: Bearer "+good).counter(t); got.Count != 1 {
		t.Errorf("PUT of the same user: %+v", got)
	}
	if got := s.put(t, "/p/counter", increment, "Authorization: Bearer "+hs256(t, jwt.MapClaims{"sub": "bob", "in": 600})).counter(t); got.Count != 2 {
		t.Errorf("PUT of another: %+v", got)
	}
	s.put(t, "/p/counter?token="+good, increment).problem(t, 401) // only in the URLs of WebSocket and SSE

	for name, bad := range map[string]string{
		"expired":              hs256(t, jwt.MapClaims{"sub": "alice", "in": -1}),
		"of another secret":    token(t, jwt.SigningMethodHS256, []byte("another secret, just as long as it"), jwt.MapClaims{"sub": "alice", "in": 600}),
		"HS512":                token(t, jwt.SigningMethodHS512, []byte(jwtSecret), jwt.MapClaims{"sub": "alice", "in": 600}),
		"none":                 token(t, jwt.SigningMethodNone, jwt.UnsafeAllowNoneSignatureType, jwt.MapClaims{"sub": "alice", "in": 600}),
		"no sub":               hs256(t, jwt.MapClaims{"in": 600}),
		"an empty sub":         hs256(t, jwt.MapClaims{"sub": "", "in": 600}),
		"sub a number":         hs256(t, jwt.MapClaims{"sub": 7, "in": 600}),
		"sub null":             hs256(t, jwt.MapClaims{"sub": nil, "in": 600}),
		"Sub":                  hs256(t, jwt.MapClaims{"Sub": "alice", "in": 600}),
		"not yet valid":        hs256(t, jwt.MapClaims{"sub": "alice", "in": 600, "nbf": time.Now().Unix() + 300}),
		"exp a string":         hs256(t, jwt.MapClaims{"sub": "alice", "exp": "tomorrow"}),
		"garbage":              "garbage",
		"two parts":            "a.b",
		"empty parts":          "..",
		"without signature":    good[:strings.LastIndexByte(good, '.')+1],
		"another body":         good[:strings.IndexByte(good, '.')+1] + base64.RawURLEncoding.EncodeToString([]byte(`{"sub":"root"}`)) + good[strings.LastIndexByte(good, '.'):],
		"an id":                anonymous.id,
		"longer than any":      strings.Repeat("a", 9000),
		"last bit of the good": lastBit(good),
	} {
		t.Run(name, func(t *testing.T) {
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
				if strings.Contains(a.body, "alice") || len(bad) > 10 && strings.Contains(a.body, bad[:10]) {
					t.Errorf("%s: the answer repeats the token: %s", what, a.body)
				}
				if what == "PUT, another origin" && a.header.Get("Access-Control-Allow-Origin") == "" {
					t.Errorf("%s: the error has no CORS headers: %v", what, a.header)
				}
			}
		})
	}
	s.refused(t, dialer{query: "token="}).problem(t, 401)
	// Nothing of that is in the log.
	if log := s.log.String(); strings.Contains(log, "alice") || strings.Contains(log, good[:30]) {
		t.Errorf("in the log: %s", log)
	}
	// These tokens never end, or end so late that clocks overflow.
	for _, claims := range []jwt.MapClaims{{"sub": "eve"}, {"sub": "eve", "exp": int64(99_999_999_999)}, {"sub": "eve", "exp": time.Now().UnixMilli()}, {"sub": "eve", "exp": 1e300}, {"sub": "eve", "in": 600, "nbf": 5.5}} {
		c := s.dial(t, dialer{query: "token=" + hs256(t, claims)})
		defer func() { c.silent() }()
	}
	time.Sleep(1500 * time.Millisecond) // longer than two looks at the tokens of open connections
}

func TestTokenOfAnOpenConnectionExpires(t *testing.T) {
	t.Parallel()
	s := start(t, "--jwt-secret="+jwtSecret, "--leave-grace=0s", "--ping-interval=1s", "--pong-timeout=1s", "--update-interval=10ms")
	watcher := s.dial(t, dialer{query: "token=" + hs256(t, jwt.MapClaims{"sub": "watcher"})})
	watcher.subscribe("p")
	watcher.takeCount("p", 0)
	short := hs256(t, jwt.MapClaims{"sub": "alice", "in": 3})
	until := time.Unix(time.Now().Unix()+2, 0) // no later than 3 s after a second that has begun
	c := s.dial(t, dialer{query: "token=" + short})
	c.join("p")
	c.takeCount("p", 1)
	watcher.takeCount("p", 1)
	st := s.sse(t, "/p/counter/events?token="+short)
	st.take()
	f := c.take("error")
	if f.Type != "error" || f.Code != "token_expired" || f.Message == "" || f.at.Before(until) {
		t.Errorf("%s at %s", f.text, f.at)
	}
	c.takeClose(websocket.StatusPolicyViolation)
	st.end()
	watcher.takeCount("p", 0)
	watcher.silent()
	s.refused(t, dialer{query: "token=" + short}).problem(t, 401)
	if took := time.Since(until); took > patience {
		t.Errorf("it took %s", took)
	}
}

// A user with a token and a user without one are never the same, whatever the sub says.
func TestSubjectsAreUsers(t *testing.T) {
	t.Parallel()
	s := start(t, "--jwt-secret="+jwtSecret, "--leave-grace=0s")
	for i, sub := range []string{"alice", "Alice", "alice ", "älice", "a/b?c", strings.Repeat("x", 200), "😀", `"<&>\`} {
		c := s.dial(t, dialer{query: "token=" + hs256(t, jwt.MapClaims{"sub": sub})})
		if c.user != sub {
			t.Errorf("sub %q is welcomed as %q", sub, c.user)
		}
		c.join("p")
		c.awaitCount("p", i+1)
	}
	if log := s.log.String(); strings.Contains(log, "älice") {
		t.Error("a sub is in the log")
	}
}

// In whatever way an address gets its ids, it gets only a few of them by PUT. An id that
// it has had before costs nothing, nor does an id that a server with an API key names.
func TestIdentitiesOfOneAddressAreLimited(t *testing.T) {
	t.Parallel()
	s := start(t, "--api-key="+apiKey)
	path := "/" + pathEscape(fresh(t)) + "/counter"
	var ids []string
	for range 400 {
		c, err := net.Dial("tcp", s.addr)
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprintf(c, "GET %s/events HTTP/1.1\r\nHost: h\r\n\r\n", path)
		resp, err := http.ReadResponse(bufio.NewReader(c), nil)
		if err != nil {
			t.Fatal(err)
		}
		ids = append(ids, cookie(t, resp.Header).Value)
		c.Close()
	}
	began, in := time.Now(), 0
	for _, id := range ids {
		switch a := s.put(t, path, increment, "Headcount-Id: "+id); a.status {
		case http.StatusOK:
			in++
		default:
			a.problem(t, http.StatusTooManyRequests)
			if a.header.Get("Retry-After") == "" {
				t.Fatal("no Retry-After")
			}
		}
	}
	if bound := 101 + int(10*time.Since(began).Seconds()); in > bound {
		t.Fatalf("one address brought %d identities within %s", in, time.Since(began))
	}
	for range 2 {
		for _, id := range ids[:50] {
			s.put(t, path, increment, "Headcount-Id: "+id).counter(t)
		}
	}
	for _, id := range ids {
		s.put(t, path, increment, "Headcount-Id: "+id, "X-API-Key: "+apiKey).counter(t)
	}
}
