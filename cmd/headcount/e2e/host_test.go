package e2e

import (
	"net/http"
	"net/http/cookiejar"
	"strings"
	"testing"

	"github.com/golang-jwt/jwt/v5"
)

// Two servers run on one host. A browser keeps one cookie of a name for all ports, so each server needs a cookie name
// of its own. A visitor stays the same visitor when a server gets such a name.
func TestServerNextToAnother(t *testing.T) {
	t.Parallel()
	jar, err := cookiejar.New(nil)
	if err != nil {
		t.Fatal(err)
	}

	browser := &http.Client{Jar: jar}
	like := func(s *server) {
		t.Helper()
		req, err := request("PUT", s.url+root+"likes:1/members/me", "")
		if err != nil {
			t.Fatal(err)
		}

		resp, err := browser.Do(req)
		if err != nil {
			t.Fatal(err)
		}

		_ = resp.Body.Close()
		if resp.StatusCode != http.StatusOK {
			t.Fatalf("PUT is %s", resp.Status)
		}
	}

	directory := t.TempDir()
	before, err := launch("--data-dir="+directory, "--api-key="+apiKey)
	if err != nil {
		t.Fatal(err)
	}
	like(before)
	if problem := before.end(); problem != "" {
		t.Fatal(problem)
	}

	// The second server would replace the browser's cookie if it had the same name.
	both := startAll(t, []string{"--api-key=" + apiKey}, []string{
		"--data-dir=" + directory, "--api-key=" + apiKey, "--cookie-name=headcount_shop",
	})
	for range 3 {
		like(both[1])
		like(both[0])
	}
	for i, s := range both {
		if n := s.exact(t, "likes:1"); n != 1 {
			t.Errorf("one browser likes %d times at server %d", n, i)
		}
	}
}

// A proxy may add its own token to every request. Calls without a need for a token ignore it, and a client's explicit
// token takes precedence.
func behindAProxyWithTokens(t *testing.T, s *server) {
	const page = "proxied"
	proxys := "Authorization: Bearer " +
		token(t, jwt.SigningMethodHS256, []byte("the secret of a proxy"), jwt.MapClaims{"sub": "session"})
	anns := hs256(t, jwt.MapClaims{"sub": "ann"})

	c := s.dial(t, dialer{query: "token=" + anns, headers: []string{proxys}})
	if c.user != "ann" {
		t.Errorf("the WebSocket is of %q", c.user)
	}
	c.join(page)
	c.takeCount(page, 1)

	if got := s.get(t, "/"+page+"/counter", proxys).counter(t); got.Count != 1 {
		t.Errorf("GET: %+v", got)
	}

	st := s.sse(t, "/"+page+"/counter/events", proxys)
	st.awaitCount(1)

	s.call(t, "GET", "views:1", "", withKey, proxys).lasting(t)
	s.put(t, "/"+page+"/counter", increment, proxys).problem(t, http.StatusUnauthorized)
	s.refused(t, dialer{headers: []string{proxys}}).problem(t, http.StatusUnauthorized)

	if log := s.log.String(); !strings.Contains(log, "--jwt-secret begins or ends with white space") {
		t.Errorf("the log does not say that the secret has a newline: %s", log)
	}
}
