package e2e

import (
	"net/http"
	"net/url"
	"strings"
	"testing"
)

// Every way in applies the rules of page ids. The rules themselves are tested in package presence.
func TestServerPageIDs(t *testing.T) {
	t.Parallel()
	s := start(t, "--leave-grace=0s")
	for _, page := range []string{
		strings.Repeat("😀", 128), " a  b ", "a%2Fb", "-/ws", "می\u200Cخواهم", "ABC", "caf\u00e9", "cafe\u0301",
	} {
		path := "/" + url.PathEscape(page) + "/counter"
		me := s.ws(t)
		if c := s.get(t, path).counter(t); c.Page != page || c.Count != 0 || c.Version != "0-0" {
			t.Errorf("before: %+v", c)
		}

		me.join(page)
		me.takeCount(page, 1)
		if e := s.sse(t, path+"/events").take(); e.counter.Page != page || e.Count != 1 {
			t.Errorf("event: %s", e.data)
		}
		if got := s.get(t, "/-/counters?page="+url.QueryEscape(page)).body; !strings.Contains(got, `"count":1`) {
			t.Errorf("counters: %s", got)
		}
		if c := s.put(t, path, increment, me.as()).counter(t); c.Page != page || c.Count != 1 {
			t.Errorf("PUT: %+v", c)
		}
	}

	for _, page := range []string{"", "-", ".", strings.Repeat("😀", 129), "\u200Da", "a\x00b", "*"} {
		path := "/" + url.PathEscape(page) + "/counter"
		me := s.ws(t)
		s.put(t, path, increment, me.as()).problem(t, http.StatusBadRequest)

		send := []func(){func() { me.join(page) }, func() { me.leave(page) }}
		if page != "*" { // the whole site can be read
			for _, path := range []string{path, path + "/events", "/-/counters?page=" + url.QueryEscape(page)} {
				s.get(t, path).problem(t, http.StatusBadRequest)
			}
			send = append(send, func() { me.subscribe(page) }, func() { me.unsubscribe(page) })
		}

		for _, send := range send {
			send()
			me.takeError("bad_page")
		}
	}
}

// Page ids in paths and queries: equal ids in any encoding.
func TestServerPercentEncoding(t *testing.T) {
	t.Parallel()
	s := start(t, "--leave-grace=0s")
	c := s.ws(t)
	for page, paths := range map[string]string{ // separated by spaces
		"a/b":              "/a%2Fb/counter /a%2fb/counter /-/counters?page=a%2Fb /-/counters?page=a/b",
		"a+b":              "/a+b/counter /a%2Bb/counter /-/counters?page=a%2Bb",
		"a b":              "/a%20b/counter /-/counters?page=a+b /-/counters?page=a%20b",
		"a%2Fb":            "/a%252Fb/counter /-/counters?page=a%252Fb",
		"ü":                "/%C3%BC/counter /%c3%bc/counter /ü/counter",
		"q":                "/%71/counter /-/counters?%70age=q /-/counters?other=x&page=q&z=1",
		"x/counter/events": "/x%2Fcounter%2Fevents/counter",
		"?":                "/%3F/counter",
		"#":                "/%23/counter",
		"a;b":              "/a;b/counter /-/counters?page=a%3Bb",
		"a&b":              "/a&b/counter?page=q /-/counters?page=a%26b",
		"a=b":              "/a=b/counter /-/counters?page=a=b",
		"*":                "/*/counter /%2A/counter /%2a/counter /-/counters?page=* /-/counters?page=%2A",
	} {
		if page != "*" {
			c.join(page)
			c.takeCount(page, 1)
		}

		name := `"page":"` + page + `"`
		for path := range strings.FieldsSeq(paths) {
			a := s.get(t, path)
			if a.status != http.StatusOK || !strings.Contains(a.body, name) ||
				page != "*" && !strings.Contains(a.body, name+`,"count":1,`) {
				t.Errorf("%s: want %s, got %d %s", path, name, a.status, a.body)
			}
		}
	}

	if e := s.sse(t, "/%2A/counter/events").take(); e.counter.Page != "*" || e.Count != 1 {
		t.Errorf("%s", e.data)
	}

	for status, paths := range map[int]string{
		http.StatusBadRequest: "/-/counter /%2D/counter /./counter /%2E/counter /../counter /%2e%2E/counter " +
			"//counter /%FF/counter /a%00b/counter " +
			"/-/counter/events /-/counters /-/counters?page=a&page= /-/counters?page=- /-/counters?page=%FF " +
			"/-/counters?page=%zz /-/counters?Page=a",
		http.StatusNotFound: "/a/b/counter /a /a/ /a/counter/ /a/counters /-/nothing /counter /a/counter/event " +
			"/a/counter/events/ /-/ws/ /-/counters/",
	} {
		for path := range strings.FieldsSeq(paths) {
			s.get(t, path).problem(t, status)
		}
	}

	for _, target := range []string{"/%zz/counter", "/100%/counter", "/%2/counter"} {
		s.rawRequest(t, "GET "+target+" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").
			problem(t, http.StatusBadRequest)
	}
}
