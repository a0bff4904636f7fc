package gateway

import (
	"encoding/json"
	"errors"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"headcount/counter"
	"headcount/gateway/calls"
	"headcount/gateway/websocket"
	"headcount/presence"
)

func TestParseMessage(t *testing.T) {
	for text, want := range map[string]message{
		`{"type":"join","page":"p"}`:                    {kind: typeJoin, pages: []string{"p"}},
		`{"page":"a/b","x":[1],"type":"leave"}`:         {kind: typeLeave, pages: []string{"a/b"}},
		`{"type":"subscribe","pages":["p","*","p"]}`:    {kind: typeSubscribe, pages: []string{"p", "*", "p"}},
		`{"type":"subscribe","pages":[]}`:               {kind: typeSubscribe, pages: nil},
		`{"type":"unsubscribe","pages":["p"],"page":7}`: {kind: typeUnsubscribe, pages: []string{"p"}},
		`{"type":"subscribe","pages":["p"],"precision":2}`: {kind: typeSubscribe, pages: []string{"p"},
			precision: 2},
		`{"type":"unsubscribe","pages":["p"],"precision":"x"}`: {kind: typeUnsubscribe, pages: []string{"p"}},
		`{"type":"subscribe","counters":["views:1","a/b"]}`: {kind: typeSubscribe,
			counters: []string{"views:1", "a/b"}},
		`{"type":"unsubscribe","counters":["a"],"pages":["p"]}`: {
			kind: typeUnsubscribe, pages: []string{"p"}, counters: []string{"a"},
		},
		` {"type":"heartbeat"} `:                       {kind: typeHeartbeat, pages: nil},
		`{"type":"read"}`:                              {kind: typeRead, pages: nil},
		`{"type":"join","page":"\u0041","Type":"bad"}`: {kind: typeJoin, pages: []string{"A"}},
	} {
		m, err := parseMessage([]byte(text))
		if err != nil || m.kind != want.kind || !slices.Equal(m.pages, want.pages) ||
			!slices.Equal(m.counters, want.counters) || m.precision != want.precision {
			t.Errorf("parseMessage(%s) = %+v, %v; want %+v", text, m, err, want)
		}
	}
}

func TestParseMessageFaults(t *testing.T) {
	for text, want := range map[string]string{
		``: calls.CodeBadJSON, `{`: calls.CodeBadJSON, `null`: calls.CodeBadJSON, `[]`: calls.CodeBadJSON,
		`"join"`: calls.CodeBadJSON, `{"type":"join"}x`: calls.CodeBadJSON,
		`{"type":1}`: calls.CodeBadJSON, `{"type":null}`: calls.CodeBadJSON,
		`{"type":"join","page":1}`: calls.CodeBadJSON, `{"type":"join","page":null}`: calls.CodeBadJSON,
		`{"type":"subscribe","pages":"p"}`: calls.CodeBadJSON, `{"type":"subscribe","pages":[1]}`: calls.CodeBadJSON,
		`{"type":"subscribe","pages":[null]}`:                 calls.CodeBadJSON,
		`{"type":"subscribe","pages":null}`:                   calls.CodeBadJSON,
		`{"type":"subscribe","pages":["p"],"precision":"2"}`:  calls.CodeBadJSON,
		`{"type":"subscribe","pages":["p"],"precision":null}`: calls.CodeBadJSON,
		`{"type":"subscribe","pages":["p"],"precision":2.5}`:  calls.CodeBadJSON,
		`{"type":"subscribe","pages":["p"],"precision":0}`:    calls.CodeBadJSON,
		`{"type":"subscribe","pages":["p"],"precision":10}`:   calls.CodeBadJSON,
		`{"type":"subscribe","pages":["p"],"precision":-1}`:   calls.CodeBadJSON,
		`{"type":"subscribe","pages":["p"],"precision":257}`:  calls.CodeBadJSON,
		`{}`: calls.CodeBadType, `{"type":"Join","page":"p"}`: calls.CodeBadType,
		`{"TYPE":"join","page":"p"}`: calls.CodeBadType, `{"type":""}`: calls.CodeBadType,
		`{"type":"join"}`: calls.CodeBadPage, `{"type":"join","page":""}`: calls.CodeBadPage,
		`{"type":"join","page":"*"}`: calls.CodeBadPage, `{"type":"join","page":"\ud800"}`: calls.CodeBadPage,
		`{"type":"join","PAGE":"p"}`: calls.CodeBadPage, `{"type":"subscribe","pages":["p",""]}`: calls.CodeBadPage,
		`{"type":"subscribe"}`:                                    calls.CodeBadPage,
		`{"type":"subscribe","counters":null}`:                    calls.CodeBadJSON,
		`{"type":"subscribe","counters":{}}`:                      calls.CodeBadJSON,
		`{"type":"subscribe","counters":[1]}`:                     calls.CodeBadJSON,
		`{"type":"subscribe","counters":["a",null]}`:              calls.CodeBadJSON,
		`{"type":"subscribe","counters":[""]}`:                    calls.CodeBadCounter,
		`{"type":"unsubscribe","counters":["a*"]}`:                calls.CodeBadCounter,
		`{"type":"subscribe","counters":["a","."],"pages":["p"]}`: calls.CodeBadCounter,
		`{"type":"subscribe","counters":["a"],"pages":["."]}`:     calls.CodeBadPage,
	} {
		_, err := parseMessage([]byte(text))
		var f *fault
		if !errors.As(err, &f) || f.code != want {
			t.Errorf("parseMessage(%s) = %v, want %s", text, err, want)
		}
	}
}

// A client finds the page or counter at fault by its whole name.
func TestFaultsHaveWholeNames(t *testing.T) {
	long := strings.Repeat("é", 164)
	for _, text := range []string{
		`{"type":"join","page":"` + long + `"}`,
		`{"type":"subscribe","pages":["p","` + long + `"]}`,
		`{"type":"subscribe","counters":["` + long + `"]}`,
	} {
		_, err := parseMessage([]byte(text))
		var f *fault
		if !errors.As(err, &f) || f.value != long {
			t.Errorf("%.40s: %v", text, err)
		}
	}
}

func FuzzParseMessage(f *testing.F) {
	for _, text := range []string{
		`{"type":"join","page":"p"}`, `{"type":"subscribe","pages":["p","*"]}`,
		`{"type":"subscribe","pages":["p"],"precision":2}`,
		`{"type":"subscribe","pages":["p"],"counters":["views:1","*"]}`, `{"type":"x\u0000"}`,
		`{"type":"join","page":"\ud800"}`, `null`, "{\"type\":\"\xff\"}",
	} {
		f.Add([]byte(text))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		m, err := parseMessage(text)

		if err == nil {
			if m.precision > maxPrecision {
				t.Fatalf("%q let the precision %d pass", text, m.precision)
			}
			for _, page := range m.pages {
				if presence.CheckReadable(page) != nil {
					t.Fatalf("%q let the page %q pass", text, page)
				}
			}
			for _, key := range m.counters {
				if counter.CheckKey(key) != nil {
					t.Fatalf("%q let the counter %q pass", text, key)
				}
			}
			return
		}

		// Whatever the client has sent, it gets a frame that it can read.
		var f *fault
		if !errors.As(err, &f) {
			t.Fatalf("%q: %v is no fault", text, err)
		}
		out := f.appendJSON(nil) // a "<" becomes \u003c
		if !json.Valid(out) || !utf8.Valid(out) || len(out) > 4096+6*len(text) {
			t.Fatalf("%q: the error frame is %q", text, out)
		}
	})
}

func TestAppendFrame(t *testing.T) {
	// RFC 6455 has three forms of a head, by the length of the payload.
	for n, head := range map[int]int{0: 2, 125: 2, 126: 4, 65535: 4, 65536: 10} {
		payload := strings.Repeat("x", n)
		b := websocket.AppendFrame([]byte("before"), websocket.Text, []byte(payload))[len("before"):]

		if b[0] != 0x81 || len(b) != head+n || string(b[head:]) != payload {
			t.Errorf("a frame of %d bytes has a head of %d, want %d", n, len(b)-n, head)
		}
	}

	// The reason is cut where a character ends, since a close frame has at most 125 bytes.
	long := websocket.AppendClose(nil, 1008, strings.Repeat("é", 100))
	if len(long) > 127 || !utf8.Valid(long[4:]) {
		t.Errorf("close frame of %d bytes: %q", len(long), long)
	}
}
