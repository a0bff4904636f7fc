package api

import (
	"encoding/xml"
	"net/http"
	"strings"
	"testing"
)

// Text from a query stays text in a badge and a widget. A site may show the widget in a frame.
func TestBadgeAndWidget(t *testing.T) {
	h, _ := serve(t, nil, Config{})
	get := func(path string) (string, http.Header) {
		t.Helper()
		w := call(t, h, http.StatusOK, http.MethodGet, path)
		return w.Body.String(), w.Header()
	}

	svg, head := get("/p/badge.svg?label=%22%3E%3Cscript%3E%26&color=0066cc&background=teal")
	var parsed struct {
		XMLName xml.Name
		Title   string `xml:"title"`
	}
	if err := xml.Unmarshal([]byte(svg), &parsed); err != nil || parsed.XMLName.Local != "svg" ||
		parsed.Title != `0 "><script>&` {
		t.Errorf("%v: %+v in %s", err, parsed, svg)
	}
	if !strings.Contains(svg, `fill="#0066cc"`) || !strings.Contains(svg, `fill="teal"`) ||
		head.Get("Content-Type") != "image/svg+xml" || head.Get("Cache-Control") != "no-store" {
		t.Errorf("%v %s", head, svg)
	}

	html, head := get("/%3Cb%3E%22/widget?label=%3Cscript%3E&color=abc&background=%23fff")
	if !strings.Contains(html, `<live-count page="&lt;b&gt;&#34;">0</live-count> &lt;script&gt;`) ||
		!strings.Contains(html, "color: #abc; background: #fff ") {
		t.Errorf("the widget lacks its colours: %s", html)
	}

	if !strings.Contains(html, `src="../-/headcount.js"`) { // a relative path is right below --base-path, too
		t.Errorf("the widget's script: %s", html)
	}

	if policy := head.Get("Content-Security-Policy"); !strings.Contains(policy, "frame-ancestors *") ||
		strings.Contains(policy, "unsafe") {
		t.Errorf("the policy of the widget is %s", policy)
	}

	if html, _ := get("/*/widget"); !strings.Contains(html, `<live-count page="*" watch>`) {
		t.Errorf("the widget of the whole site must only watch: %s", html)
	}

	svg, _ = get("/p/badge.svg?color=RebeccaPurple&background=%23abcd")
	if !strings.Contains(svg, `fill="rebeccapurple"`) || !strings.Contains(svg, `fill="#abcd"`) {
		t.Errorf("a colour name in upper case and one of four digits must be accepted: %s", svg)
	}

	if svg, _ := get("/p/badge.svg?color="); !strings.Contains(svg, `fill="#06c"`) ||
		!strings.Contains(svg, `fill="#444"`) {
		t.Errorf("invalid colours must be replaced by the default: %s", svg)
	}

	for _, bad := range []string{
		"color=blurple", "background=inherit", "color=%7Bx%7D", "color=12345", "background=red%3Bx",
		"label=" + strings.Repeat("x", 41), "label=a%01b", "label=%FF",
	} {
		for _, what := range []string{"badge.svg", "widget"} {
			call(t, h, http.StatusBadRequest, http.MethodGet, "/p/"+what+"?"+bad)
		}
	}
}
