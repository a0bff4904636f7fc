package e2e

import (
	"net/http"
	"net/url"
	"strings"
	"testing"
)

// These are the rules of page ids, which every way in must apply alike.
func TestPageIDs(t *testing.T) {
	t.Parallel()
	s := start(t, "--leave-grace=0s")
	x128, astral := strings.Repeat("x", 128), strings.Repeat("😀", 128)
	for name, tc := range map[string]struct {
		page string
		ok   bool
	}{
		"one letter":               {"a", true},
		"128 letters":              {x128, true},
		"129 letters":              {x128 + "x", false},
		"128 astral characters":    {astral, true},
		"129 astral characters":    {astral + "😀", false},
		"128 with two bytes":       {strings.Repeat("é", 128), true},
		"129 with two bytes":       {strings.Repeat("é", 129), false},
		"a letter and its mark":    {strings.Repeat("e\u0301", 64), true},
		"129 with marks":           {strings.Repeat("e\u0301", 64) + "e", false},
		"a thousand":               {strings.Repeat("x", 1000), false},
		"a slash":                  {"a/b", true},
		"only a slash":             {"/", true},
		"a path":                   {"/blog/2030/?q=a&b=c#top", true},
		"percent":                  {"100%", true},
		"looks encoded":            {"a%2Fb", true},
		"plus":                     {"a+b", true},
		"quotes and backslash":     {`"a\b"'`, true},
		"less and greater":         {"<script>&amp;", true},
		"spaces":                   {" a  b ", true},
		"only a space":             {" ", true},
		"Arabic":                   {"مرحبا", true},
		"a family":                 {"👩\u200D👩\u200D👧", true},
		"Persian with ZWNJ":        {"می\u200Cخواهم", true},
		"a combining mark first":   {"\u0301a", true},
		"only a combining mark":    {"\u0301", true},
		"a variation selector":     {"❤\uFE0F", true},
		"symbols":                  {"€+±♥", true},
		"number forms":             {"Ⅻ½٣", true},
		"two stars":                {"**", true},
		"three dots":               {"...", true},
		"two dashes":               {"--", true},
		"dash and more":            {"-/ws", true},
		"case is kept":             {"ABC", true},
		"empty":                    {"", false},
		"star":                     {"*", false},
		"dash":                     {"-", false},
		"dot":                      {".", false},
		"two dots":                 {"..", false},
		"ZWJ first":                {"\u200Da", false},
		"ZWJ last":                 {"a\u200D", false},
		"ZWNJ first":               {"\u200Ca", false},
		"ZWNJ last":                {"a\u200C", false},
		"only ZWJ":                 {"\u200D", false},
		"two joiners inside":       {"a\u200D\u200Cb", true},
		"zero-width space":         {"a\u200Bb", false},
		"replacement character":    {"a\uFFFDb", false},
		"no-break space":           {"a\u00A0b", false},
		"line separator":           {"a\u2028b", false},
		"paragraph separator":      {"a\u2029b", false},
		"ideographic space":        {"a\u3000b", false},
		"thin space":               {"a\u2009b", false},
		"soft hyphen":              {"a\u00ADb", false},
		"byte order mark":          {"\uFEFFa", false},
		"left-to-right mark":       {"a\u200Eb", false},
		"right-to-left override":   {"a\u202Eb", false},
		"private use":              {"a\uE000b", false},
		"private use beyond":       {"a\U000F0000b", false},
		"unassigned":               {"a\u0378b", false},
		"a noncharacter":           {"a\uFFFFb", false},
		"a tag":                    {"a\U000E0041b", false},
		"NUL":                      {"a\x00b", false},
		"tab":                      {"a\tb", false},
		"newline":                  {"a\nb", false},
		"delete":                   {"a\x7fb", false},
		"C1 control":               {"a\u0085b", false},
		"invalid UTF-8":            {"a\xffb", false},
		"half a character":         {"a\xe2\x82", false},
		"an encoded surrogate":     {"a\xed\xa0\x80", false},
		"overlong slash":           {"a\xc0\xaf", false},
		"two that look the same A": {"caf\u00e9", true},
		"two that look the same B": {"cafe\u0301", true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			site := tc.page == "*" // but it can be read
			path := "/" + url.PathEscape(tc.page) + "/counter"
			query := "/-/counters?page=" + url.QueryEscape(tc.page)
			me := s.ws(t)
			bad := func(path string) {
				t.Helper()
				s.get(t, path).problem(t, http.StatusBadRequest)
			}
			if !tc.ok {
				if !site {
					bad(path)
					bad(path + "/events")
					bad(query)
				}
				s.put(t, path, `{"action":"increment"}`, "Headcount-Id: "+me.id).problem(t, http.StatusBadRequest)
				if strings.ToValidUTF8(tc.page, "") != tc.page {
					return // on a WebSocket that is a close 1007, see TestSizesAndEncodings
				}
				me.join(tc.page)
				me.takeError("bad_page")
				me.leave(tc.page)
				me.takeError("bad_page")
				if !site {
					me.subscribe(tc.page)
					me.takeError("bad_page")
					me.unsubscribe(tc.page)
					me.takeError("bad_page")
				}
				return
			}
			if c := s.get(t, path).counter(t); c.Page != tc.page || c.Count != 0 || c.Version != "0-0" {
				t.Errorf("before: %+v", c)
			}
			me.join(tc.page)
			me.takeCount(tc.page, 1)
			if c := s.get(t, path).counter(t); c.Page != tc.page || c.Count != 1 {
				t.Errorf("GET: %+v", c)
			}
			st := s.sse(t, path+"/events")
			if e := st.take(); e.counter.Page != tc.page || e.Count != 1 {
				t.Errorf("event: %s", e.data)
			}
			if got := s.get(t, query).body; !strings.Contains(got, `"count":1`) {
				t.Errorf("counters: %s", got)
			}
			if c := s.put(t, path, `{"action":"increment"}`, "Headcount-Id: "+me.id).counter(t); c.Page != tc.page || c.Count != 1 {
				t.Errorf("PUT: %+v", c)
			}
		})
	}
}

// This is how ids travel in paths and queries.
func TestPercentEncoding(t *testing.T) {
	t.Parallel()
	s := start(t, "--leave-grace=0s")
	c := s.ws(t)
	pages := []string{"a/b", "a+b", "a b", "a%2Fb", "ü", "q", "a/counter", "x/counter/events", "?", "#", "a;b", "a&b", "a=b"}
	for _, p := range pages {
		c.join(p)
		c.takeCount(p, 1)
	}
	for path, want := range map[string]string{
		"/a%2Fb/counter":                 "a/b",
		"/a%2fb/counter":                 "a/b",
		"/a+b/counter":                   "a+b",
		"/a%2Bb/counter":                 "a+b",
		"/a%20b/counter":                 "a b",
		"/a%252Fb/counter":               "a%2Fb",
		"/%C3%BC/counter":                "ü",
		"/%c3%bc/counter":                "ü",
		"/ü/counter":                     "ü",
		"/%71/counter":                   "q",
		"/a%2Fcounter/counter":           "a/counter",
		"/x%2Fcounter%2Fevents/counter":  "x/counter/events",
		"/%3F/counter":                   "?",
		"/%23/counter":                   "#",
		"/a;b/counter":                   "a;b",
		"/a&b/counter?page=q":            "a&b",
		"/a=b/counter":                   "a=b",
		"/-/counters?page=a%2Fb":         "a/b",
		"/-/counters?page=a/b":           "a/b",
		"/-/counters?page=a+b":           "a b",
		"/-/counters?page=a%20b":         "a b",
		"/-/counters?page=a%2Bb":         "a+b",
		"/-/counters?page=a%252Fb":       "a%2Fb",
		"/-/counters?%70age=q":           "q",
		"/-/counters?other=x&page=q&z=1": "q",
		"/-/counters?page=a%3Bb":         "a;b",
		"/-/counters?page=a%26b":         "a&b",
		"/-/counters?page=a=b":           "a=b",
	} {
		a := s.get(t, path)
		if want := `"page":` + quotedPlain(want) + `,"count":1,`; a.status != http.StatusOK || !strings.Contains(a.body, want) {
			t.Errorf("%s: want %s, got %d %s", path, want, a.status, a.body)
		}
	}
	for _, path := range []string{"/*/counter", "/%2A/counter", "/%2a/counter", "/-/counters?page=*", "/-/counters?page=%2A"} {
		if a := s.get(t, path); a.status != http.StatusOK || !strings.Contains(a.body, `"page":"*","count":1,`) {
			t.Errorf("%s: got %d %s", path, a.status, a.body)
		}
	}
	for _, path := range []string{"/*/counter/events", "/%2A/counter/events"} {
		if e := s.sse(t, path).take(); e.counter.Page != "*" || e.Count != 1 {
			t.Errorf("%s: %s", path, e.data)
		}
	}
	for _, path := range []string{
		"/-/counter", "/%2D/counter", "/./counter", "/%2E/counter", "/../counter", "/%2e%2E/counter", "//counter", "/%FF/counter", "/a%00b/counter",
		"/-/counter/events", "//counter/events", "/%E2%80%8D/counter", "/-/counters", "/-/counters?page=", "/-/counters?page=a&page=", "/-/counters?page=-",
		"/-/counters?page=%FF", "/-/counters?page=%zz", "/-/counters?Page=a", "/-/counters?page=a%00",
	} {
		s.get(t, path).problem(t, http.StatusBadRequest)
	}
	for _, path := range []string{"/a/b/counter", "/a", "/a/", "/a/counter/", "/a/counters", "/-/nothing", "/counter", "/a/counter/event", "/a/counter/events/", "/-/ws/", "/-/counters/"} {
		s.get(t, path).problem(t, http.StatusNotFound)
	}
	for _, target := range []string{"/%zz/counter", "/100%/counter", "/%/counter", "/%2/counter"} {
		s.rawRequest(t, "GET "+target+" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").problem(t, http.StatusBadRequest)
	}
}

// quotedPlain is quoted without escapes for HTML.
func quotedPlain(s string) string {
	return `"` + strings.NewReplacer(`"`, `\"`, `\`, `\\`).Replace(s) + `"`
}
